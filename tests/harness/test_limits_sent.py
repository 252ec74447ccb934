"""Limits are looked at once more before a request is sent, which was pinned before (rules H159, H242, H248)."""

from __future__ import annotations

from typing import Any

import pytest
from compaction_kit import compactions, failure, fill, model, summaries
from doubles import ManualClock
from kit import Hold, Reports, opened, rest, transcript

from perdure.harness.limits import Limits
from perdure.harness.model import ModelInfo
from perdure.harness.submission import Unanswered
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, say


async def ended(submission: Any) -> str:
    """The detail of a limit."""
    with pytest.raises(Unanswered) as raised:
        await submission.answer()
    assert raised.value.reason == "limit"
    return str(raised.value.detail)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("scope", ["limits", "conversation_limits"])
async def test_a_request_that_was_cut_off_is_not_sent_again_at_a_limit_h159(scope: str, begun: bool) -> None:
    storage, hold = MemoryStorage(), Hold(1 if begun else 0)
    async with opened(ScriptedModel(say("one two three four"), pace=hold), storage=storage) as harness:
        submission = (await (await harness.root()).submit("hi")).id
        await hold.reached.wait()
        await rest()
    heard: list[str] = []
    limits: dict[str, Any] = {scope: Limits(turns=0)}

    async def pace(request: Any, event: int) -> None:
        heard.append(request.model)

    async with opened(ScriptedModel(say("again"), pace=pace), storage=storage, **limits) as harness:
        assert "has had 0 of 0 model responses" in await ended(await harness.submission(submission))
        assert heard == []
        root = await harness.root()
        assert [line.split()[0] for line in await transcript(root)] == ["user", *(["assistant"] if begun else [])]
        assert (await root.usage()).requests == (1 if begun else 0), "what was stored of it tells that it was sent"
        harness.set_limits()  # as they are
        await root.set_limits(turns=1)
        harness.set_limits(session=None)
        assert (await (await root.submit("hi")).answer()).text == "again"


async def test_the_time_without_a_process_counts_before_it_is_sent_again_h241_h159() -> None:
    storage, hold, clock = MemoryStorage(), Hold(), ManualClock()
    async with opened(ScriptedModel(say("hello"), pace=hold), storage=storage, clock=clock) as harness:
        root = await harness.root()
        await root.set_limits(seconds=60)
        submission = (await root.submit("hi")).id
        await hold.reached.wait()
    later = ManualClock()
    later.now = clock.now + 61
    async with opened(ScriptedModel(say("hello")), storage=storage, clock=later) as harness:
        assert await ended(await harness.submission(submission)) == "the conversation has run for 61 of 60 seconds"


async def test_a_summary_that_was_cut_off_is_not_asked_for_again_at_a_limit_h159() -> None:
    storage, hold = MemoryStorage(), Hold()
    scripted = model()
    async with opened(scripted, storage=storage) as harness:
        root = await harness.root()
        await fill(root, 6)
    async with opened(model(pace=hold), storage=storage) as harness:
        task = await (await harness.root()).compact()
        await hold.reached.wait()
    scripted = model()
    async with opened(scripted, storage=storage, conversation_limits=Limits(turns=1)) as harness:
        root = await harness.root()
        await harness.wait_task(task)
        assert await failure(root) == ("manual", "limit")
        assert await compactions(root) == []
        assert summaries(scripted) == []


class Meddler(ScriptedModel):
    """Tells when its catalogue is asked."""

    def asked(self) -> None:
        """Nothing, until somebody puts another in its place."""

    def find(self, model: str) -> ModelInfo | None:
        self.asked()
        return super().find(model)


async def test_a_limit_of_the_session_that_comes_while_a_request_is_prepared_counts_h248_h159() -> None:
    scripted, reports, times = Meddler(say("hello")), Reports(), 0
    async with opened(scripted, reports=reports) as harness:
        root = await harness.root()

        def asked() -> None:
            nonlocal times
            times += 1
            if times == 1:
                raise OSError("the catalogue is away")  # so that it is prepared in a commit of the run's own
            harness.set_limits(session=Limits(turns=0))

        scripted.asked = asked
        assert "the session has had 0 of 0" in await ended(await root.submit("hi"))
    assert [report.type for report in reports] == ["model_adapter_failed"]
