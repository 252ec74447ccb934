"""Kill the process after admission, in generation, in a tool: reopen, resume, observe the original submission."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from kit import Hold, Note, live, opened, queue, rest, transcript, until

from perdure.harness.documents import ToolResultData
from perdure.harness.tool import tool
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, say

SCRIPT = {"hi": say("hello"), "tool": [call("work"), say("worked")], "more": say("more it is")}


async def test_killed_right_after_admission_h20_h77() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT, pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi", request_id="r")
        crash = storage.snapshot()
    async with opened(ScriptedModel(SCRIPT), storage=crash) as harness:
        root = await harness.root()
        assert (await live(root)).run is not None
        again = await harness.submission(submission.id)
        assert (await again.answer()).text == "hello"
        assert (await root.submit("hi", request_id="r")) == again
        assert await transcript(root) == ["user hi", "assistant hello"]


async def test_killed_before_admission_settled_nothing_is_there_h20() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT), storage=storage) as harness:
        root = await harness.root()
        crash = storage.snapshot()
        await (await root.submit("hi", request_id="r")).wait()
    async with opened(ScriptedModel(SCRIPT), storage=crash) as harness:
        root = await harness.root()
        assert await transcript(root) == []
        assert (await (await root.submit("hi", request_id="r")).answer()).text == "hello"


async def killed_in_tool(replay) -> tuple[MemoryStorage, int]:
    entered = asyncio.Event()

    @tool(name="work", replay=replay)
    async def work() -> str:
        """Work."""
        entered.set()
        await asyncio.Event().wait()
        return ""

    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=(work,)) as harness:
        submission = await (await harness.root()).submit("tool")
        await entered.wait()
        return storage.snapshot(), submission.id


async def test_killed_in_a_safe_tool_it_runs_again_h91() -> None:
    crash, id = await killed_in_tool("safe")
    runs: list[int] = []

    @tool(name="work", replay="safe")
    async def work() -> str:
        """Work."""
        runs.append(1)
        return "done"

    async with opened(ScriptedModel(SCRIPT), storage=crash, tools=(work,)) as harness:
        assert (await (await harness.submission(id)).answer()).text == "worked"
        assert await transcript(await harness.root()) == [
            "user tool",
            "assistant",
            "tool-result done",
            "assistant worked",
        ]
    assert runs == [1]


async def test_killed_in_an_unsafe_tool_it_is_interrupted_and_the_run_goes_on_h92() -> None:
    crash, id = await killed_in_tool("unsafe")
    runs: list[int] = []

    @tool(name="work")
    async def work() -> str:
        """Work."""
        runs.append(1)
        return "done"

    async with opened(ScriptedModel(SCRIPT), storage=crash, tools=(work,)) as harness:
        assert (await (await harness.submission(id)).answer()).text == "worked"
        result = (await (await harness.root()).entries())[2].data_as(ToolResultData)
        assert (result.is_error, result.code) == (True, "interrupted")
    assert runs == []


async def test_the_queue_survives_a_kill_h36() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT, pace=Hold()), storage=storage) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        second = await root.submit("more")
        write = await root.write(Note(text="x"))
        crash = storage.snapshot()
    async with opened(ScriptedModel(SCRIPT), storage=crash) as harness:
        root = await harness.root()
        assert await queue(root) == [second.id, write.id]
        inspection = await harness.inspect()
        assert [s.id for s in inspection.placed] == [first.id]
        assert [s.id for s in inspection.queued] == [second.id, write.id]
        assert [t.kind for t in inspection.tasks] == ["pi.generation"]
        assert (await (await harness.submission(second.id)).answer()).text == "more it is"
        assert await transcript(root) == [
            "user hi",
            "assistant hello",
            "app.note x",
            "user more",
            "assistant more it is",
        ]


async def test_opening_runs_nothing_until_asked_t37() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT, pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        crash = storage.snapshot()
    model = ScriptedModel(SCRIPT)
    async with opened(model, storage=crash) as harness:
        root = await harness.root()
        await root.write(Note(text="x"))
        await rest()
        assert not model.requests
        harness.resume()
        await harness.idle()
        assert (await (await harness.submission(submission.id)).record()).status == "done"


@pytest.mark.parametrize(
    "how", ["resume", "submit", "compact", "wait", "answer", "run", "wait_task", "idle", "idle of the conversation"]
)
async def test_what_asks_for_progress_sets_all_work_going_t37(how: str) -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT, pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        other = await harness.create_conversation()
        crash = storage.snapshot()
    async with opened(ScriptedModel(SCRIPT), storage=crash) as harness:
        root, found = await harness.root(), await harness.submission(submission.id)
        (task,) = (await harness.inspect()).tasks
        asks = {
            "submit": partial(harness.handle(other.id).submit, "more"),
            "compact": harness.handle(other.id).compact,
            "wait": found.wait,
            "answer": found.answer,
            "run": found.run,
            "wait_task": partial(harness.wait_task, task.id),
            "idle": harness.idle,
            "idle of the conversation": root.idle,
        }
        if how == "resume":
            harness.resume()
        else:
            await asks[how]()
        await until(lambda: task.id not in harness.session.live.settled)
        assert (await found.record()).status == "done"


async def test_a_tool_that_is_gone_after_a_reopen_gives_an_error_result_h101() -> None:
    crash, id = await killed_in_tool("safe")
    async with opened(ScriptedModel(SCRIPT), storage=crash) as harness:
        assert (await (await harness.submission(id)).answer()).text == "worked"


async def test_a_pinned_tool_that_changed_is_pinned_anew_h67() -> None:
    """The same request cannot be sent again; what is there now is offered in its place."""
    storage = MemoryStorage()

    @tool(name="work")
    async def old(a: int) -> str:
        """Work."""
        return ""

    @tool(name="work")
    async def new(b: str) -> str:
        """Work differently."""
        return ""

    async with opened(ScriptedModel(SCRIPT, pace=Hold()), storage=storage, tools=(old,)) as harness:
        submission = await (await harness.root()).submit("hi")
        crash = storage.snapshot()
    model = ScriptedModel(SCRIPT)
    async with opened(model, storage=crash, tools=(new,)) as harness:
        assert (await (await harness.submission(submission.id)).answer()).text == "hello"
        assert [spec.description for spec in model.requests[0].tools] == ["Work differently."]


async def test_a_model_that_is_gone_after_a_reopen_ends_the_run_no_model_h19() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT, pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        crash = storage.snapshot()
    async with opened(None, storage=crash) as harness:
        assert (await (await harness.submission(submission.id)).wait()).reason == "no_model"
