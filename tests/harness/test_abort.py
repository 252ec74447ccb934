"""Aborting conversations and tasks (rules T71 to T83, H41, H54)."""

from __future__ import annotations

import asyncio

import pytest
from kit import Hold, Note, live, opened, queue, rest, transcript
from msgspec import structs

from perdure.harness.documents import ToolResultData
from perdure.harness.submission import Unanswered
from perdure.harness.tool import tool
from perdure.kernel.records import Aborted, Orphaned, Pending, Running, to_raw
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say

SCRIPT = {
    "hi": say("hello"),
    "tool": [calls(call("work"), call("work")), say("worked")],
    "more": say("more it is"),
    "flaky": fail("overloaded"),
}


async def test_an_abort_ends_inputs_withdraws_queued_ones_and_keeps_writes_t78_h54() -> None:
    async with opened(ScriptedModel(SCRIPT, pace=Hold())) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        queued = await root.submit("more")
        steer = await root.submit("more", mode="steer")
        write = await root.write(Note(text="kept"))
        await root.abort()
        for submission in (first, queued, steer):
            with pytest.raises(Unanswered) as ended:
                await submission.answer()
            assert ended.value.reason == "aborted"
        assert await queue(root) == [write.id]
        assert not await root.busy()
        assert harness.session.live.settled == {}


async def test_the_conversation_goes_on_after_an_abort_h51() -> None:
    hold = Hold()
    model = ScriptedModel(SCRIPT, pace=hold)
    async with opened(model) as harness:
        root = await harness.root()
        await root.submit("hi")
        write = await root.write(Note(text="kept"))
        await root.abort()
        hold.release()
        after = await root.submit("more")
        assert (await after.answer()).text == "more it is"
        assert (await write.record()).status == "done"
        assert await transcript(root) == ["user hi", "app.note kept", "user more", "assistant more it is"]


async def test_tools_stop_first_and_their_calls_have_results_t73_h59() -> None:
    entered = asyncio.Event()
    stopped: list[str] = []

    @tool
    async def work() -> str:
        """Work."""
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("work")
        return ""

    model = ScriptedModel(SCRIPT)
    async with opened(model, tools=(work,)) as harness:
        root = await harness.root()
        submission = await root.submit("tool")
        await entered.wait()
        await rest()
        await root.abort()
        assert stopped == ["work", "work"]
        assert (await submission.record()).reason == "aborted"
        results = [e.data_as(ToolResultData) for e in await root.entries() if e.kind == "pi.tool-result"]
        assert [result.code for result in results] == ["aborted", "aborted"]
        state = await live(root)
        assert (state.run, state.tools) == (None, {})
        # What follows is a request any provider takes: the calls have their results.
        await (await root.submit("hi")).wait()
        assert len(model.requests[-1].messages) == 5


async def test_an_abort_of_the_generation_alone_ends_its_inputs_and_keeps_the_queue_t81_h50() -> None:
    async with opened(ScriptedModel(SCRIPT, pace=Hold())) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        queued = await root.submit("more")
        (task,) = harness.session.live.settled
        await harness.abort_task(task, reason="enough")
        record = await first.record()
        assert (record.reason, record.detail) == ("aborted", "enough")
        assert await queue(root) == [queued.id]
        ended = await harness.session.task(task)
        assert ended is not None
        assert ended.outcome == Aborted("enough")


async def test_a_run_that_waits_for_its_retry_can_be_aborted_t72() -> None:
    async with opened(ScriptedModel(SCRIPT)) as harness:
        root = await harness.root()
        submission = await root.submit("flaky")
        await rest()
        assert (await live(root)).retry is not None
        await root.abort()
        assert (await submission.record()).reason == "aborted"
        state = await live(root)
        assert (state.run, state.retry) == (None, None)


async def test_an_abort_of_an_idle_conversation_withdraws_only_h54() -> None:
    hold = Hold()
    async with opened(ScriptedModel({"bad": fail("malformed"), "more": say("x")}, pace=hold)) as harness:
        root = await harness.root()
        failing = await root.submit("bad")
        queued = await root.submit("more")
        hold.release()
        await failing.wait()
        await root.abort()
        assert (await queued.record()).reason == "aborted"
        assert await queue(root) == []


@pytest.mark.parametrize(
    ("orphaned", "reason", "changes"),
    [
        ("missing_task", "missing_task", {"kind": "pi.generation"}),
        ("task_too_old", "task_too_old", {"version": 99}),
        ("migration_failed", "migration_failed", {"state": Running(phase="request", raw_checkpoint=to_raw({}))}),
        ("parked", "aborted", {"restarts": 5, "state": Pending(phase="start")}),
    ],
)
async def test_an_aborted_run_that_was_blocked_tells_why_t82_h41(orphaned, reason, changes) -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT, pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        crash = storage.snapshot()
    tasks = crash._contents.tasks
    (task,) = tasks
    tasks[task] = structs.replace(tasks[task], **changes)
    async with opened(ScriptedModel(SCRIPT), storage=crash) as harness:
        if orphaned == "missing_task":
            harness.tasks.registry.remove("pi.generation")
        root = await harness.root()
        (live_task,) = (await harness.inspect()).tasks
        assert live_task.blocked in (orphaned, None)
        await root.abort()
        ended = await harness.session.task(task)
        assert ended is not None
        if orphaned == "parked":
            # A parked task's abort handler is fresh code: it may run.
            assert isinstance(ended.outcome, (Orphaned, Aborted))
        else:
            assert ended.outcome == Orphaned(orphaned)
        assert (await (await harness.submission(submission.id)).record()).reason == reason
        assert not await root.busy()


async def test_an_abort_survives_a_kill_t76() -> None:
    storage = MemoryStorage()
    entered = asyncio.Event()

    @tool(replay="safe")
    async def work() -> str:
        """Work."""
        entered.set()
        await asyncio.Event().wait()
        return ""

    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=(work,)) as harness:
        root = await harness.root()
        submission = await root.submit("tool")
        await entered.wait()
        crash = None

        def grab(settled) -> None:
            nonlocal crash
            if crash is None and any(task.abort_requested for task in settled.batch.tasks):
                crash = storage.snapshot()

        harness.session.observe(grab)
        await root.abort()
    assert crash is not None
    model = ScriptedModel(SCRIPT)
    async with opened(model, storage=crash, tools=(work,)) as harness:
        assert (await (await harness.submission(submission.id)).wait()).reason == "aborted"
        assert not model.requests
        assert not await (await harness.root()).busy()
