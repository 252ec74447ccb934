"""Responses that are made in the background: kept by their handle, polled, never paid for twice (rules H75, H168, H400
to H406)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from doubles import ManualClock
from kit import Commits, Reports, kinds, live, opened, rest, transcript

from perdure import Harness, Limits, ModelError, PollPolicy, RetryPolicy, ToolCall, Unanswered, Usage, tool
from perdure.events import ResponseDeferred
from perdure.harness.asking import MOST_HANDLE
from perdure.harness.compaction_policy import Compaction
from perdure.harness.conversation import Conversation
from perdure.harness.deferral import CANCEL_MS, FETCH_MS
from perdure.harness.messages import AssistantMessage, Text, ToolCallPart
from perdure.harness.model import (
    Deferred,
    DeferredFailed,
    Finished,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    TextDelta,
)
from perdure.kernel.records import to_raw
from perdure.storage.memory import MemoryStorage
from perdure.testing import ScriptedModel, defer, fail, say

USED = Usage(input=10, output=10)
Poll: TypeAlias = str | ModelError | Deferred | AssistantMessage | object
"""What the next poll finds: an answer's text, an error, that it is not there yet."""
NOT_YET = Deferred(handle="job-1")


def answer(text: str, *, usage: Usage = USED) -> AssistantMessage:
    return AssistantMessage(content=(Text(text),), provider="test", model="slow", stop_reason="stop", usage=usage)


@dataclass
class Provider:
    """Makes everything in the background, and outlives the processes that ask it."""

    polls: list[Poll] = field(default_factory=list)
    accepted: list[ModelRequest] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    told: Callable[[str], Deferred] = lambda handle: Deferred(handle=handle)
    before: Sequence[ModelEvent] = ()
    hangs: bool = False
    closes_slowly: bool = False
    """The stream that gave a handle does not end before it is cancelled."""
    cannot_cancel: Exception | None = None
    default = "test:slow"

    def find(self, model: str) -> ModelInfo | None:
        known = model == self.default
        return ModelInfo(provider="test", name="slow", context_window=10_000, max_output=100) if known else None

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        self.accepted.append(request)
        for event in self.before:
            yield event
        try:
            yield self.told(f"job-{len(self.accepted)}") if request.may_defer else Finished(answer("at once"))
        finally:
            if self.closes_slowly:
                await asyncio.Event().wait()

    async def fetch_deferred(self, model: str, handle: str, /) -> Deferred | Finished:
        assert model == self.default
        self.fetched.append(handle)
        if self.hangs:
            await asyncio.Event().wait()
        found = self.polls.pop(0)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, str):
            found = answer(found)
        return Finished(found) if isinstance(found, AssistantMessage) else found  # type: ignore[return-value]

    async def cancel_deferred(self, model: str, handle: str, /) -> None:
        self.cancelled.append(handle)
        if self.hangs:
            await asyncio.Event().wait()
        if self.cannot_cancel is not None:
            raise self.cannot_cancel


@asynccontextmanager
async def working(provider: object, clock: ManualClock, storage: MemoryStorage | None = None, **options):
    options.setdefault("retry", RetryPolicy(jitter=0.0))
    async with opened(provider, storage=storage, clock=clock, **options) as harness:  # type: ignore[arg-type]
        yield harness, await harness.root()


async def ended(root: Conversation, submission: int) -> tuple[str, str]:
    with pytest.raises(Unanswered) as caught:
        await (await root._harness.submission(submission)).answer()
    return caught.value.reason, caught.value.detail or ""


async def test_the_handle_is_stored_before_it_is_polled_and_counted_once_it_is_answered_h75_h400_h405() -> None:
    provider, clock = Provider([NOT_YET, NOT_YET, "at last"]), ManualClock()
    async with working(provider, clock) as (harness, root):
        commits = Commits(harness)
        submission = await root.submit("Think.")
        await rest()
        assert not provider.fetched, "it was polled before its first pause"
        waits = (await live(root)).deferred
        assert waits is not None
        assert (waits["handle"], waits["polls"], waits["until"]) == ("job-1", 0, clock.wall() + 2_000)
        assert (await root.usage()).requests == 0, "nobody knows yet what it uses"
        assert await kinds(root) == ["pi.user"], "a deferred answer is none"
        for seconds, polled in ((1.9, 0), (0.1, 1), (3.9, 1), (0.1, 2), (8.0, 3)):
            await clock.advance(seconds)
            assert len(provider.fetched) == polled
        assert (await submission.answer()).text == "at last"
        assert len(commits.durable) == 8, "one for the input, one for the handle, two for each poll: it begins, it ends"
        assert (await live(root)).deferred is None
        usage = await root.usage()
        assert (usage.requests, usage.turns, usage.tokens) == (1, 1, USED)
    assert len(provider.accepted) == 1
    assert not provider.cancelled


async def test_another_process_polls_on_and_sends_nothing_h75() -> None:
    provider, clock, storage = Provider([NOT_YET, "at last"]), ManualClock(), MemoryStorage()
    async with working(provider, clock, storage) as (_, root):
        await root.submit("Think.", request_id="think")
        await rest()
        await clock.advance(2)
        assert provider.fetched == ["job-1"]
    async with working(provider, clock, storage) as (harness, root):
        await clock.advance(100)
        assert provider.fetched == ["job-1"], "opening runs nothing"
        harness.resume()
        await rest()
        again = await root.submit("Think.", request_id="think")
        assert (await again.answer()).text == "at last"
    assert (len(provider.accepted), len(provider.fetched)) == (1, 2)


async def test_what_is_waited_for_is_told_by_events_and_views_h405() -> None:
    provider, clock = Provider([NOT_YET, ModelError("overloaded", "busy"), "at last"]), ManualClock()
    async with working(provider, clock) as (_, root), root.events() as events:
        submission = await root.submit("Think.")
        for _ in range(4):
            await rest()
            await clock.advance(30)
        await submission.answer()
        told: list[tuple[int, str | None]] = []
        async for event in events:
            if isinstance(event, ResponseDeferred):
                assert (event.model, event.handle, event.attempt) == ("test:slow", "job-1", 1)
                told.append((event.polls, event.code))
            if event.__class__.__name__ == "RunEnd":
                break
    assert told == [(0, None), (1, None), (2, "overloaded")]


async def test_the_newest_handle_counts_and_the_provider_says_when_to_ask_h401() -> None:
    polls: list[Poll] = [Deferred(handle="job-1b", poll_after_ms=45_000), "at last"]
    provider, clock = Provider(polls, told=lambda handle: Deferred(handle=handle, poll_after_ms=7_000)), ManualClock()
    async with working(provider, clock) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        for seconds, fetched in ((6.9, []), (0.1, ["job-1"]), (44.9, ["job-1"]), (0.1, ["job-1", "job-1b"])):
            await clock.advance(seconds)
            assert provider.fetched == fetched
        assert (await submission.answer()).text == "at last"


def test_pauses_double_up_to_a_bound_h401() -> None:
    policy = PollPolicy()
    assert [policy.pause(n) // 1000 for n in range(6)] == [2, 4, 8, 16, 30, 30]
    assert policy.pause(10**6) == 30_000
    assert policy.pause(0, asked_ms=90_000) == 90_000
    for field_name in ("first_ms", "longest_ms", "deadline_ms"):
        with pytest.raises(ValueError, match=field_name):
            PollPolicy(**{field_name: 0})
    with pytest.raises(TypeError, match="PollPolicy"):
        Harness.open(MemoryStorage(), polling=5)  # type: ignore[arg-type]


async def test_a_response_that_takes_too_long_is_cancelled_and_the_run_ends_h401_h404() -> None:
    provider, clock = Provider([NOT_YET] * 20), ManualClock()
    async with working(provider, clock, polling=PollPolicy(deadline_ms=60_000)) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        for _ in range(60):
            await clock.advance(1)
        reason, detail = await ended(root, submission.id)
        assert (await root.usage()).requests == 1
    assert reason == "model_error"
    assert "expired: there is no answer after 60 seconds" in detail
    assert "'job-1'" in detail
    assert provider.cancelled == ["job-1"]
    assert len(provider.fetched) == 5, "after 2, 6, 14 and 30 seconds, then at 60, the last time"


async def test_polls_that_fail_are_made_again_until_the_deadline_h402() -> None:
    busy = ModelError("rate_limit", "slowly", retry_after_ms=5_000)
    provider, clock = Provider([busy, *[ModelError("connection", "nobody there")] * 8, "at last"]), ManualClock()
    async with working(provider, clock) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        await clock.advance(4.9)
        assert len(provider.fetched) == 1, "the provider asked for more patience"
        for _ in range(10):
            await clock.advance(30)
        assert (await submission.answer()).text == "at last"
        assert (await root.usage()).requests == 1
    assert (len(provider.accepted), len(provider.fetched), provider.cancelled) == (1, 10, [])


async def test_polls_that_go_on_failing_end_the_run_at_the_deadline_and_cancel_h402_h404() -> None:
    provider, clock = Provider([ModelError("connection", "nobody there")] * 2), ManualClock()
    async with working(provider, clock, polling=PollPolicy(deadline_ms=5_000)) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        await clock.advance(3)
        reason, detail = await ended(root, submission.id)
    assert reason == "model_error"
    assert detail == (
        "expired: there is no answer after 5 seconds; asking for it failed: nobody there; the response 'job-1' is "
        "given up"
    )
    assert provider.cancelled == ["job-1"]
    assert len(provider.accepted) == 1, "it may be paid for, so it is not asked for anew"


@pytest.mark.parametrize(
    "error",
    [
        ModelError("authentication", "who are you?"),
        ModelError("malformed", "no such thing"),
        RuntimeError("a fault of the adapter"),
        42,
        Deferred(handle=""),
    ],
)
async def test_polls_that_fail_for_good_end_the_run_h402(error: Poll) -> None:
    provider, clock = Provider([error]), ManualClock()
    reports: Reports = []
    async with working(provider, clock, reports=reports) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        reason, _ = await ended(root, submission.id)
    assert reason == "model_error"
    assert provider.cancelled == ["job-1"]
    assert [report.type for report in reports] == (["model_adapter_failed"] if isinstance(error, RuntimeError) else [])


@pytest.mark.parametrize("code", ["expired", "cancelled", "overloaded", "refused", "overflow"])
async def test_a_response_that_ended_without_an_answer_is_not_asked_for_anew_h403(code) -> None:
    """Unless the provider says that nothing was used; whatever the code, it may have been paid for."""
    provider, clock = Provider([DeferredFailed(code, "that is why", usage=USED)]), ManualClock()
    async with working(provider, clock) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        await clock.advance(100)
        assert await ended(root, submission.id) == ("model_error", f"{code}: that is why")
        usage = await root.usage()
    assert (usage.requests, usage.turns, usage.tokens) == (1, 0, USED)
    assert (len(provider.accepted), provider.cancelled) == (1, [])


async def test_one_of_which_is_not_known_what_it_used_is_not_asked_for_anew_h403() -> None:
    provider, clock = Provider([DeferredFailed("overloaded", "that is why")]), ManualClock()
    async with working(provider, clock) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        assert await ended(root, submission.id) == ("model_error", "overloaded: that is why")
    assert len(provider.accepted) == 1


async def test_one_that_used_nothing_is_asked_for_anew_h403() -> None:
    provider, clock = Provider([DeferredFailed("overloaded", "no room", usage=Usage()), "at last"]), ManualClock()
    async with working(provider, clock) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        retry = (await live(root)).retry
        assert retry is not None
        assert (retry["code"], retry["attempt"], (await live(root)).deferred) == ("overloaded", 2, None)
        await clock.advance(2)
        await clock.advance(2)
        assert (await submission.answer()).text == "at last"
        assert (await root.usage()).requests == 2
    assert [request.attempt for request in provider.accepted] == [1, 2]
    assert provider.fetched == ["job-1", "job-2"]


async def test_one_that_is_refused_as_too_long_is_compacted_and_asked_for_anew_h403_h139() -> None:
    polls: list[Poll] = ["short", "short", DeferredFailed("overflow", "too long"), "at last"]
    provider, clock = Provider(polls), ManualClock()
    compaction = Compaction(reserve_tokens=10, keep_recent_tokens=1, background_tokens=0)
    async with working(provider, clock, compaction=compaction) as (_, root):
        for text in ("Think.", "Think more.", "Think it over."):
            await root.submit(text, request_id=text)
            for _ in range(4):
                await rest()
                await clock.advance(2)
        last = await root.submit("Think it over.", request_id="Think it over.")
        assert (await last.answer()).text == "at last"
        assert "pi.compaction" in await kinds(root)
    asked = [request.may_defer for request in provider.accepted]
    assert asked == [True, True, True, False, True], "a summary is never deferred"


async def test_an_abort_cancels_at_the_provider_and_the_attempt_counts_h404() -> None:
    provider, clock, storage = Provider(), ManualClock(), MemoryStorage()
    async with working(provider, clock, storage) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await root.abort()
        assert (await ended(root, submission.id))[0] == "aborted"
        assert (await live(root)).deferred is None
        usage = await root.usage()
        assert (usage.requests, usage.unpriced, usage.tokens) == (1, 1, Usage())
        await clock.advance(100)
    assert (provider.cancelled, provider.fetched) == (["job-1"], [])


@pytest.mark.parametrize("error", [ModelError("connection", "nobody there"), RuntimeError("a fault"), None])
async def test_an_abort_ends_though_the_provider_cannot_be_told_h404(error: Exception | None) -> None:
    provider, clock = Provider(cannot_cancel=error, hangs=error is None), ManualClock()
    reports: Reports = []
    async with working(provider, clock, reports=reports) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        aborting = asyncio.create_task(root.abort())
        await rest()
        await clock.advance(CANCEL_MS / 1000)
        await aborting
        assert (await ended(root, submission.id))[0] == "aborted"
    assert [report.type for report in reports] == ["deferred_not_cancelled"]
    assert provider.cancelled == ["job-1"]


async def test_an_abort_in_the_middle_of_a_poll_cancels_h404() -> None:
    provider, clock = Provider(hangs=True), ManualClock()
    reports: Reports = []
    async with working(provider, clock, reports=reports) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        assert provider.fetched == ["job-1"]
        provider.hangs = False
        await root.abort()
        assert (await ended(root, submission.id))[0] == "aborted"
    assert (provider.cancelled, reports) == (["job-1"], [])


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_a_handle_that_is_not_stored_any_more_is_cancelled_h404(how) -> None:
    provider, clock, storage = Provider(closes_slowly=True), ManualClock(), MemoryStorage()
    async with working(provider, clock, storage) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        assert (await live(root)).deferred is None
        if how == "abort":
            await root.abort()
            assert (await ended(root, submission.id))[0] == "aborted"
            assert (await root.usage()).requests == 1
    assert (provider.cancelled, len(provider.accepted)) == (["job-1"], 1)


async def test_a_poll_that_hangs_is_one_that_fails_h402() -> None:
    provider, clock = Provider(["at last"], hangs=True), ManualClock()
    async with working(provider, clock) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(2)
        await clock.advance(FETCH_MS / 1000)
        waits = (await live(root)).deferred
        assert waits is not None
        assert (waits["code"], waits["polls"]) == ("connection", 1)
        provider.hangs = False
        await clock.advance(4)
        assert (await submission.answer()).text == "at last"


async def test_what_was_begun_below_a_limit_is_answered_h406() -> None:
    """Nothing more is sent beyond it."""
    provider, clock = Provider(["at last"]), ManualClock()
    async with working(provider, clock) as (_, root):
        first = await root.submit("Think.")
        await rest()
        await root.set_limits(turns=0, seconds=1)
        await clock.advance(2)
        assert (await first.answer()).text == "at last"
        second = await root.submit("Think more.")
        assert (await ended(root, second.id))[0] == "limit"
    assert len(provider.accepted) == 1


async def test_at_a_limit_nothing_is_deferred_h406() -> None:
    provider, clock = Provider(), ManualClock()
    async with working(provider, clock, conversation_limits=Limits(turns=0)) as (_, root):
        submission = await root.submit("Think.")
        assert (await ended(root, submission.id))[0] == "limit"
    assert not provider.accepted


async def test_calls_of_a_deferred_answer_run_and_the_next_answer_may_be_deferred_too_h75() -> None:
    @tool
    async def look(call: ToolCall) -> str:
        return "the sea"

    called = AssistantMessage(
        content=(ToolCallPart("c1", "look", to_raw({})),),
        provider="test",
        model="slow",
        stop_reason="tool_use",
        usage=USED,
    )
    provider, clock = Provider([called, "I see the sea"]), ManualClock()
    async with working(provider, clock, tools=(look,)) as (_, root):
        submission = await root.submit("Look.")
        for _ in range(3):
            await rest()
            await clock.advance(2)
        assert (await submission.answer()).text == "I see the sea"
        assert await transcript(root) == ["user Look.", "assistant", "tool-result the sea", "assistant I see the sea"]
        usage = await root.usage()
        assert (usage.requests, usage.turns) == (2, 2)
    assert provider.fetched == ["job-1", "job-2"]


async def test_what_streamed_before_it_was_deferred_is_no_answer_h400() -> None:
    provider, clock = Provider(["Well, yes."], before=[TextDelta("Well, ")]), ManualClock()
    async with working(provider, clock) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        assert (await live(root)).message is None
        await clock.advance(2)
        assert (await submission.answer()).text == "Well, yes."
        assert await transcript(root) == ["user Think.", "assistant Well, yes."]


class Undeferring:
    """A model that knows nothing of fetching."""

    default = "test:slow"

    def __init__(self, provider: Provider, *, stubborn: bool) -> None:
        self.find = provider.find
        self._stubborn = stubborn
        self._provider = provider

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        self._provider.accepted.append(request)
        yield Deferred(handle="job") if self._stubborn else Finished(answer("at once"))


async def test_a_model_that_cannot_be_polled_is_not_asked_to_defer_h400() -> None:
    provider = Provider()
    async with working(Undeferring(provider, stubborn=False), ManualClock()) as (_, root):
        assert (await (await root.submit("Think.")).answer()).text == "at once"
    assert not provider.accepted[0].may_defer


async def test_an_answer_that_is_deferred_unasked_is_an_error_h400() -> None:
    async with working(Undeferring(Provider(), stubborn=True), ManualClock()) as (_, root):
        reason, detail = await ended(root, (await root.submit("Think.")).id)
    assert (reason, detail) == ("model_error", "other: the model deferred an answer that it was to give at once")


@pytest.mark.parametrize("handle", ["", "x" * (MOST_HANDLE + 1), "half a \ud800 character", 7])
async def test_a_handle_that_cannot_be_kept_is_an_error_h400(handle) -> None:
    provider = Provider(told=lambda _: Deferred(handle=handle))
    async with working(provider, ManualClock()) as (_, root):
        reason, detail = await ended(root, (await root.submit("Think.")).id)
    assert reason == "model_error"
    assert detail.startswith("malformed: the model deferred its answer")


async def test_without_its_model_the_run_ends_and_the_attempt_counts_h75() -> None:
    provider, clock, storage = Provider(), ManualClock(), MemoryStorage()
    async with working(provider, clock, storage) as (_, root):
        submission = await root.submit("Think.")
        await rest()
    async with working(None, clock, storage) as (harness, root):
        harness.resume()
        await clock.advance(2)
        reason, detail = await ended(root, submission.id)
        assert (await root.usage()).requests == 1
    assert reason == "no_model"
    assert "'job-1'" in detail


async def test_where_nothing_can_fetch_it_the_run_ends_h75() -> None:
    provider, clock, storage = Provider(), ManualClock(), MemoryStorage()
    async with working(provider, clock, storage) as (_, root):
        submission = await root.submit("Think.")
        await rest()
    async with working(Undeferring(provider, stubborn=False), clock, storage) as (harness, root):
        harness.resume()
        await clock.advance(2)
        reason, detail = await ended(root, submission.id)
        assert (await root.usage()).requests == 1
    assert reason == "model_error"
    assert detail == (
        "other: the response 'job-1' of test:slow is made in the background, and this host's models have no "
        "fetch_deferred: it can be fetched with those that sent the request"
    )


# --- the scripted model -------------------------------------------------------------------------------------------


async def test_the_scripted_model_defers_on_cue_also_for_another_process_h407() -> None:
    clock, storage = ManualClock(), MemoryStorage()
    script = {"Think.": defer(say("at last"), polls=2, poll_after_ms=9_000)}
    first, second = ScriptedModel(script), ScriptedModel({})
    async with working(first, clock, storage) as (_, root):
        submission = await root.submit("Think.")
        await rest()
        await clock.advance(9)
        assert len(first.fetched) == 1
    async with working(second, clock, storage) as (harness, root):
        harness.resume()
        for _ in range(2):
            await rest()
            await clock.advance(9)
        assert (await (await harness.submission(submission.id)).answer()).text == "at last"
    assert (len(first.requests), len(second.requests), len(second.fetched)) == (1, 0, 2)


async def test_a_scripted_response_ends_as_the_script_says_h407() -> None:
    clock = ManualClock()
    lost = defer(fail("expired", "it is gone"), polls=0)
    once = defer(fail("overloaded", times=1, then=say("now"), usage=Usage()), polls=0)
    model = ScriptedModel({"lost": lost, "once": once, "long": defer(say("never"), polls=100)})
    async with working(model, clock) as (_, root):
        submission = await root.submit("lost")
        await rest()
        await clock.advance(2)
        assert await ended(root, submission.id) == ("model_error", "expired: it is gone")
        submission = await root.submit("once")
        for _ in range(4):
            await rest()
            await clock.advance(2)
        assert (await submission.answer()).text == "now"
        submission = await root.submit("long")
        await rest()
        await root.abort()
        assert len(model.cancelled) == 1
        with pytest.raises(DeferredFailed) as caught:
            await model.fetch_deferred(model.default or "", model.cancelled[0])
        assert caught.value.code == "cancelled"
