"""Faults of compaction that users of such systems met: it loops, one failure is for ever, it wedges the session, it is
refused. Rules H133 to H146, H200 to H214.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from acceptance_kit import STORE, SUMMARY, WINDOW, WORDY, Child, kinds, lines, opened, records, run, summarises
from test_run_faults import ODD, Odd, is_valid

from perdure import Compaction, Conversation, ModelRequest, Report, RetryPolicy
from perdure.harness.messages import Usage
from perdure.harness.model import ModelEvent
from perdure.testing.model import Reply, ScriptedModel, fail, say


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


class Model(ScriptedModel):
    """Answers "ok", refuses what a provider would refuse, and gives summaries as it is told."""

    def __init__(self, summary: Callable[[ModelRequest], Reply]) -> None:
        # They tell no usage: what a context takes is estimated.
        ok = say("ok", usage=Usage())
        super().__init__(lambda request: summary(request) if summarises(request) else ok, context_window=WINDOW)
        self.summaries: list[ModelRequest] = []
        self.hangs = False
        self.hanging = asyncio.Event()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        assert is_valid(request.messages), "no provider takes this"
        if summarises(request):
            self.summaries.append(request)
            if self.hangs:
                self.hanging.set()
                await asyncio.Event().wait()
        async for event in super().stream(request):
            yield event


def summarised(request: ModelRequest) -> Reply:
    return say(SUMMARY, usage=Usage())


async def tell(root: Conversation, times: int) -> list[str | None]:
    """How so many long inputs ended: None is an answer."""
    ends: list[str | None] = []
    for _ in range(times):
        ends.append((await (await root.submit(WORDY)).wait()).reason)
    return ends


# --- it frees nothing, and loops ----------------------------------------------------------------------------------


async def test_summaries_that_free_nothing_are_asked_for_once_an_input_h140_h141(store: Path) -> None:
    """However many inputs come: each ends, with why; and a reset is a way out."""
    model = Model(lambda request: say("and so on " * 3_000, usage=Usage()))
    async with opened(store, model) as harness:
        root = await harness.root()
        ends = await tell(root, 20)
        assert ends[0] is None
        assert set(ends) <= {None, "model_error"}
        assert 1 <= len(model.summaries) <= len(ends)
        assert len(model.requests) <= 2 * len(ends)
        assert "pi.compaction" not in kinds(store)
        details = [record["detail"] for record in records(store, "submissions") if record["status"] == "unanswered"]
        assert details
        assert all("compaction_ineffective" in detail for detail in details)
        await (await root.reset("Begin anew.")).wait()
        assert await tell(root, 1) == [None]


async def test_a_conversation_that_goes_on_for_long_is_summarised_now_and_then_and_always_fits(store: Path) -> None:
    """H135 to H137: not at every turn, and no request comes near the window."""
    model = Model(summarised)
    async with opened(store, model) as harness:
        root = await harness.root()
        assert await tell(root, 60) == [None] * 60
        async with root.view() as view:
            for task in view.value.live.compactions:
                await harness.wait_task(int(task))  # what is in the background does not keep a harness from idling
        largest = max(len(str([*request.messages])) for request in model.requests if not summarises(request))
        assert largest < 4 * WINDOW
        assert 3 <= len(model.summaries) <= 20
        assert kinds(store).count("pi.user") == 60, "the history has it all"
        assert (await root.usage()).requests == len(model.requests)


# --- one failure is for ever --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["refused", "malformed", "connection", "other"])
async def test_a_failure_is_over_with_the_next_input_h141_h210(code: Any, store: Path) -> None:
    """The inputs are answered all the while, and once summaries come again they are placed; over a restart too."""
    model = Model(lambda request: fail(code, "not now"))
    quick = RetryPolicy(retries=1, first_ms=1)
    async with opened(store, model, retry=quick) as harness:
        root = await harness.root()
        assert await tell(root, 12) == [None] * 12
        await harness.idle()
        failed = len(model.summaries)
        assert failed >= 2, "it was tried again"
        async with root.view() as view:
            failure = view.value.live.compaction_failure
            assert failure is not None
            assert failure["code"] == code
        assert "pi.compaction" not in kinds(store)
    model = Model(summarised)
    async with opened(store, model, retry=quick) as harness:
        root = await harness.root()
        assert await tell(root, 2) == [None] * 2
        await harness.idle()
        assert "pi.compaction" in kinds(store)
        async with root.view() as view:
            assert view.value.live.compaction_failure is None


# --- a summary that never comes back ------------------------------------------------------------------------------


async def test_a_summary_that_never_comes_wedges_nothing_h146(store: Path) -> None:
    """Its deadline ends it, and the inputs are answered; so does an abort, of it or of its run; so does a close."""
    model = Model(summarised)
    reports: list[Report] = []
    async with opened(store, model, compaction=Compaction(deadline_ms=200), reports=reports) as harness:
        root = await harness.root()
        model.hangs = True
        async with asyncio.timeout(30):
            assert await tell(root, 12) == [None] * 12
            await harness.idle()
        assert model.summaries
        assert {report.type for report in reports} == {"compaction_failed"}
        model.hanging.clear()
    async with opened(store, model) as harness:  # five minutes, by default
        root = await harness.root()
        waiting = await root.submit(WORDY)
        await model.hanging.wait()
        async with root.view() as view:
            assert view.value.live.compactions, "everybody sees what it waits for"
        async with asyncio.timeout(60):
            await root.abort()
        assert (await waiting.wait()).reason == "aborted"
        model.hanging.clear()
        await root.submit(WORDY, request_id="r")
        await model.hanging.wait()
    model.hangs = False
    async with opened(store, model) as harness:
        root = await harness.root()
        assert (await (await root.submit(WORDY, request_id="r")).answer()).text == "ok"
        await harness.idle()
        assert not (await harness.inspect()).tasks
    assert "pi.compaction" in kinds(store)


async def test_a_process_that_is_killed_in_a_summary_asks_for_it_again_h206(tmp_path: Path) -> None:
    """Killed there twice: the same inputs, answers and cuts as where nobody was killed."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    wanted = await run("talker", calm, inputs=12)
    for _ in range(2):
        async with Child.run("talker", killed, inputs=12, points=["summary"]) as child:
            await child.at("summary")
    found = await run("talker", killed, inputs=12)
    assert found["transcript"] == wanted["transcript"]
    assert kinds(killed / STORE).count("pi.compaction") == kinds(calm / STORE).count("pi.compaction") >= 1
    assert len(lines(killed / "summaries")) == len(lines(calm / "summaries")) + 2


# --- a call without a result: compaction is refused too -----------------------------------------------------------


@pytest.mark.parametrize("odd", ODD)
async def test_whatever_calls_and_results_there_are_compaction_works_h138(odd: str, store: Path) -> None:
    """By itself and by hand, before and behind the cut."""
    model = Model(summarised)
    async with opened(store, model) as harness:
        root = await harness.root()
        for _ in range(3):
            for messages in ODD[odd]:
                await root.write(Odd(what=messages))
            assert await tell(root, 4) == [None] * 4
        await harness.idle()
        before = kinds(store).count("pi.compaction")
        assert before >= 1
        for messages in ODD[odd]:
            await root.write(Odd(what=messages))
        assert await tell(root, 2) == [None] * 2
        await harness.wait_task(await root.compact())
        assert await tell(root, 1) == [None]
    async with opened(store, model) as harness:
        assert await tell(await harness.root(), 1) == [None]
