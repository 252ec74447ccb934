"""Streaming: partials in ``pi.live``, and what becomes of them (rules H68, H69, H76)."""

from __future__ import annotations

import asyncio

import pytest
from doubles import ManualClock
from kit import Commits, Hold, live, opened, rest, transcript

from perdure.harness.documents import AssistantData, Live, LiveRun
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.harness.model import TextDelta, ToolCallDelta
from perdure.harness.partial import Partial
from perdure.kernel.draft import Recorder
from perdure.kernel.ops import Append
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, fail, say


class Step:
    """A pace of which each event waits for the test."""

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)
        self.at = -1

    async def __call__(self, request, event) -> None:
        self.at = event
        await self.steps.acquire()

    async def go(self, n: int = 1) -> None:
        for _ in range(n):
            self.steps.release()
            await rest()


async def test_the_first_partial_is_committed_at_once_later_ones_by_the_interval_h68() -> None:
    clock, step = ManualClock(), Step()
    async with opened(ScriptedModel(say("abcdef", chunk=1), pace=step), clock=clock) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await rest()
        commits = Commits(harness)
        await step.go()
        assert len(commits.all) == 1
        assert commits.all[0].batch.progress
        assert (await live(root)).message == {
            "task": harness.session.live.settled and next(iter(harness.session.live.settled)),
            "model": "test:scripted",
            "attempt": 1,
            "content": [{"type": "text", "text": "a", "id": "", "name": ""}],
        }
        await step.go(3)
        assert len(commits.all) == 1, "nothing before the interval has passed"
        await clock.advance(0.1)
        assert len(commits.all) == 2
        (change,) = commits.all[1].documents
        assert change.ops == (Append(("message", "content", 0, "text"), "bcd"),), "a delta costs the delta"
        await clock.advance(10)
        assert len(commits.all) == 2, "nothing new is no commit"
        await step.go(3)
        assert (await submission.answer()).text == "abcdef"
        assert (await live(root)).message is None


async def test_the_final_commit_waits_for_no_interval_h68() -> None:
    clock, step = ManualClock(), Step()
    async with opened(ScriptedModel(say("abc", chunk=1), pace=step), clock=clock) as harness:
        submission = await (await harness.root()).submit("hi")
        await rest()
        await step.go(4)
        assert (await submission.answer()).text == "abc"
        assert clock.now == 0.0
        await clock.advance(10)
        assert (await live(await harness.root())).message is None, "no partial comes after the answer"


async def test_thinking_text_and_calls_stream_as_parts_h68() -> None:
    clock = ManualClock()
    reply = say("said", thinking="thought", chunk=100)
    async with opened(ScriptedModel(reply, pace=Hold(2)), clock=clock) as harness:
        root = await harness.root()
        await root.submit("hi")
        await rest()
        await clock.advance(0.1)
        message = (await live(root)).message
        assert message is not None
        assert [(p["type"], p["text"]) for p in message["content"]] == [("thinking", "thought"), ("text", "said")]
        await root.abort()


def test_calls_that_stream_at_once_are_told_apart_h68() -> None:
    partial = Partial(5, "m:x", 1)
    view = Live(run={"task": 5, "inputs": [], "started_at": 0, "turn": 0})
    recorder = Recorder(view.to_json())
    draft = Live.over(recorder)
    for event in (
        TextDelta("let me"),
        ToolCallDelta(0, "a", "look", '{"x'),
        ToolCallDelta(1, "b", "look", '{"y'),
    ):
        partial.add(event)
    partial.write(draft)
    partial.add(ToolCallDelta(0, "a", "look", '":1}'))
    partial.add(ToolCallDelta(1, "b", "look", '":2}'))
    partial.write(draft)
    message = Live.from_json(recorder.value).message
    assert message is not None
    assert [(p["id"], p["text"]) for p in message["content"]] == [("", "let me"), ("a", '{"x":1}'), ("b", '{"y":2}')]
    assert [type(p).__name__ for p in partial.parts()] == ["Text", "ToolCallPart", "ToolCallPart"]


def test_nothing_is_shown_of_a_run_that_is_over_h68() -> None:
    partial = Partial(5, "m:x", 1)
    partial.add(TextDelta("late"))
    runs: list[LiveRun | None] = [None, {"task": 6, "inputs": [], "started_at": 0, "turn": 0}]
    for run in runs:
        recorder = Recorder(Live(run=run).to_json())
        partial.write(Live.over(recorder))
        assert not recorder.ops


@pytest.mark.parametrize("how", ["answer", "fail", "abort", "close"])
async def test_the_stream_is_closed_on_every_path_h68(how) -> None:
    reply = fail("malformed", partial="x") if how == "fail" else say("abc", chunk=1)
    hold = Hold(1)
    model = ScriptedModel(reply, pace=hold)
    async with opened(model) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await hold.reached.wait()
        assert model.closed == 0
        if how == "abort":
            await root.abort()
        elif how == "close":
            await harness.close()
        else:
            hold.release()
            await submission.wait()
        assert model.closed == 1


async def test_a_partial_of_a_dead_process_becomes_an_aborted_answer_and_the_request_is_sent_again_h69() -> None:
    storage = MemoryStorage()
    step = Step()
    model = ScriptedModel(say("abcdef", chunk=2), pace=step)
    async with opened(model, storage=storage) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await rest()
        await step.go(1)
        assert (await live(root)).message is not None
        crash = storage.snapshot()
        first = model.requests[0]
    again = ScriptedModel(say("abcdef", chunk=2))
    async with opened(again, storage=crash) as harness:
        root = await harness.root()
        busy = await live(root)
        assert busy.run is not None, "busy, as it was"
        submission = await harness.submission(submission.id)
        assert (await submission.answer()).text == "abcdef"
        assert await transcript(root) == ["user hi", "assistant ab", "assistant abcdef"]
        entry = (await root.entries())[1]
        (message,) = decode_messages(entry.raw_messages)
        assert isinstance(message, AssistantMessage)
        assert (message.stop_reason, message.provider, message.model) == ("aborted", "test", "scripted")
        assert entry.data_as(AssistantData).attempt == 1
        second = again.requests[0]
        assert list(second.messages) == list(first.messages)
        assert (second.attempt, second.model, second.session_key) == (first.attempt, first.model, first.session_key)
        assert (await live(root)).message is None
        # The attempt that died counts.
        assert (await root.usage()).requests == 2


async def test_a_close_is_like_a_crash_to_the_stream_h69() -> None:
    storage = MemoryStorage()
    step = Step()
    async with opened(ScriptedModel(say("abcdef", chunk=2), pace=step), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        await rest()
        await step.go(1)
    async with opened(ScriptedModel(say("abcdef", chunk=2)), storage=storage) as harness:
        assert (await (await harness.submission(submission.id)).answer()).text == "abcdef"
        assert (await transcript(await harness.root()))[1] == "assistant ab"


async def test_a_crash_before_the_first_partial_leaves_no_aborted_answer_h69() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(say("x"), pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        await rest()
        crash = storage.snapshot()
    async with opened(ScriptedModel(say("x")), storage=crash) as harness:
        assert (await (await harness.submission(submission.id)).answer()).text == "x"
        assert await transcript(await harness.root()) == ["user hi", "assistant x"]


async def test_the_committed_partial_of_an_aborted_run_becomes_an_aborted_answer_t78() -> None:
    step = Step()
    async with opened(ScriptedModel(say("abcdef", chunk=2), pace=step)) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await rest()
        await step.go(1)
        await root.abort()
        assert (await submission.record()).reason == "aborted"
        assert await transcript(root) == ["user hi", "assistant ab"]
        state = await live(root)
        assert (state.run, state.message) == (None, None)


async def test_a_request_that_ends_its_process_each_time_is_parked_at_last_t42() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(say("x"), pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        await rest()
        storage = storage.snapshot()
    for _ in range(6):
        step = Step()
        async with opened(ScriptedModel(say("abc", chunk=1), pace=step), storage=storage) as harness:
            harness.resume()
            await rest()
            await step.go(1)
            storage = storage.snapshot()
    reports = []
    async with opened(ScriptedModel(say("x")), storage=storage, reports=reports) as harness:
        harness.resume()
        await rest()
        assert [r.type for r in reports] == ["task_blocked"]
        (task,) = (await harness.inspect()).tasks
        assert task.blocked == "parked"
        await harness.retry_task(task.id)
        assert (await (await harness.submission(submission.id)).answer()).text == "x"


async def test_a_tool_call_that_was_cut_off_is_kept_for_people_only_h60() -> None:
    storage = MemoryStorage()
    step = Step()
    async with opened(ScriptedModel(call("look", at="somewhere far away"), pace=step), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        await rest()
        await step.go(1)
        crash = storage.snapshot()
    model = ScriptedModel(say("x"))
    async with opened(model, storage=crash) as harness:
        await (await harness.submission(submission.id)).wait()
        entry = (await (await harness.root()).entries())[1]
        (message,) = decode_messages(entry.raw_messages)
        assert isinstance(message, AssistantMessage)
        assert [call.name for call in message.tool_calls] == ["look"]
        assert [m.text for m in model.requests[0].messages] == ["hi"]
