"""Hooks and wrappers that do not do as they are told: nothing goes on by that (rules H128, H221, H228)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from compaction_kit import LONG, asks_for_summary, compactions, fill
from compaction_kit import model as small_model
from kit import Reports, live, opened, rest, transcript

from perdure.harness.handle import ToolCall
from perdure.harness.harness import Harness
from perdure.harness.hooks import (
    Decline,
    HookCall,
    HookCompaction,
    after_response,
    after_tool,
    after_tools,
    before_compact,
    before_request,
    before_tool,
    gate_request,
    on_yield,
)
from perdure.harness.messages import ToolResultMessage
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension
from perdure.harness.submission import Submission
from perdure.harness.tool import tool
from perdure.harness.wrappers import RunTwice
from perdure.kernel.records import Failed
from perdure.tasks import WaitCycle
from perdure.testing.model import Reply, ScriptedModel, call, say
from perdure.tools.subagents import subagent

DECORATORS = [
    before_tool,
    after_tool,
    before_request,
    gate_request,
    after_response,
    on_yield,
    after_tools,
    before_compact,
]


# --- where they apply ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decorate", DECORATORS)
@pytest.mark.parametrize("conversation", ["1", True, 1.0])
def test_a_scope_that_is_no_conversation_is_refused_h128(decorate: Any, conversation: Any) -> None:
    """It would apply nowhere, and nobody would hear of it."""

    async def guard(*asked: object) -> None: ...

    with pytest.raises(TypeError, match=f"{decorate.__name__} is given the id"):
        decorate(conversation=conversation)(guard)


async def test_a_handle_is_no_id_h128() -> None:
    async with opened() as harness:
        root: Any = await harness.root()
        with pytest.raises(TypeError, match="the id of its conversation, not <Conversation 1>"):
            before_tool(conversation=root, subtree=True)(lambda call: asyncio.sleep(0))


@pytest.mark.parametrize("decorate", DECORATORS)
def test_what_is_no_function_is_refused_h128(decorate: Any) -> None:
    with pytest.raises(TypeError, match=f"{decorate.__name__} is an async function, not 5"):
        decorate(5)


# --- cancelled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["returns", "raises"])
@pytest.mark.parametrize("decorate", DECORATORS[:-1])
async def test_a_hook_that_catches_its_cancellation_keeps_nothing_going_h221(decorate: Any, how: str) -> None:
    """After an abort no request is sent and no tool is run, whatever a hook makes of it."""
    reached, ran, asked = asyncio.Event(), list[int](), list[str]()

    @tool(replay="safe")
    async def look(at: int) -> str:
        """Look."""
        ran.append(at)
        return "seen"

    async def stubborn(*about: object) -> None:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if how == "raises":
                raise ValueError("not now") from None

    async def next_one(*about: object) -> None:
        asked.append("asked")

    hooks = [decorate(stubborn), decorate(next_one)]
    model = ScriptedModel([call("look", at=1), say("done")])
    async with opened(model, tools=(look,), extensions=[Extension("hooks", hooks=hooks)]) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await reached.wait()
        before = len(model.requests), list(ran)
        await root.abort()
        assert (await submission.wait()).reason == "aborted"
        assert (len(model.requests), ran) == before
        assert asked == [], "the next hook of its kind is not asked either"
        assert (await live(root)).run is None


async def test_a_long_reason_for_no_compaction_is_cut_h127() -> None:
    @before_compact
    async def never(asked: HookCompaction) -> Decline:
        return Decline("no " * 1_000_000)

    async with opened(small_model(), extensions=[Extension("hooks", hooks=[never])]) as harness:
        root = await harness.root()
        await fill(root, 6, LONG)
        outcome = await harness.wait_task(await root.compact())
        assert isinstance(outcome, Failed)
        assert (outcome.error.code, len(outcome.error.message)) == ("declined", 2_000)
        assert await compactions(root) == []


# --- leaving ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decorate", DECORATORS)
async def test_a_hook_that_exits_ends_neither_the_process_nor_another_run_h132_h129_h130(decorate: Any) -> None:
    ran: list[int] = []

    @tool(replay="safe")
    async def look(at: int) -> str:
        """Look."""
        ran.append(at)
        return "seen"

    async def leave(*about: object) -> None:
        raise SystemExit(3)

    def script(request: ModelRequest) -> Reply:
        if asks_for_summary(request):
            return say("The goal is to test.")
        return say("done") if isinstance(request.messages[-1], ToolResultMessage) else call("look", at=1)

    model, reports = ScriptedModel(script, context_window=40_000), Reports()
    extensions = [Extension("hooks", hooks=[decorate(leave)])]
    async with opened(model, tools=(look,), extensions=extensions, reports=reports) as harness:
        root = await harness.root()
        record = await (await root.submit("word " * 2_000)).wait()
        await (await root.submit("word " * 900)).wait()
        await root.set_compaction(keep_recent_tokens=500)
        await harness.wait_task(await root.compact())
        assert record.reason == ("gate" if decorate is gate_request else None)
        assert ran == ([] if decorate in (before_tool, gate_request) else [1, 1])
    assert {report.type for report in reports} >= {"hook_failed"}


async def test_a_wrapper_that_exits_fails_its_call_h228() -> None:
    @tool(replay="safe")
    async def look(at: int) -> str:
        """Look."""
        return "seen"

    async def leave(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        raise SystemExit(3)

    model = ScriptedModel([call("look", at=1), say("done")])
    async with opened(model, tools=(look,), extensions=[Extension("w", wrappers=[leave])]) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert (await transcript(root))[2] == "tool-result a wrapper of the tool tried to end the process"


# --- waiting for oneself ------------------------------------------------------------------------------------------


async def idle(harness: Harness, _: Submission) -> None:
    await (await harness.root()).idle()


async def all_idle(harness: Harness, _: Submission) -> None:
    await harness.idle()


async def answered(_: Harness, submission: Submission) -> None:
    await submission.answer()


async def later_answered(harness: Harness, _: Submission) -> None:
    await (await (await harness.root()).submit("And then?")).wait()


async def called(harness: Harness, _: Submission) -> None:
    await harness.wait_task(min(harness.session.live.settled))  # the run of the root, which came first


@pytest.mark.parametrize("waits", [idle, all_idle, answered, later_answered, called])
@pytest.mark.parametrize("who", ["tool", "hook", "child"])
async def test_what_waits_for_its_own_run_is_told_so_t68(
    waits: Callable[[Harness, Submission], Awaitable[None]], who: str
) -> None:
    """It would wait for ever."""
    said: list[str] = []
    submitted: asyncio.Future[Submission] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        with pytest.raises(WaitCycle) as caught:
            await waits(harness, await submitted)
        said.append(str(caught.value))

    @tool(replay="safe")
    async def look() -> str:
        """Look."""
        if who != "hook":
            await wait()
        return "seen"

    @before_tool
    async def check(_: HookCall) -> None:
        if who == "hook":
            await wait()

    replies: dict[str, list[Reply]] = {
        "Go.": [call("subagent", prompt="Look.") if who == "child" else call("look"), say("done")],
        "Look.": [call("look"), say("looked")],
        "And then?": [say("then")],
    }
    tools = (look, subagent())
    extensions = [Extension("h", hooks=[check])]
    async with opened(ScriptedModel(replies), tools=tools, extensions=extensions) as harness:
        submitted.set_result(await (await harness.root()).submit("Go."))
        assert (await (await submitted).answer()).text == "done"
        assert len(said) == 1
        assert "would wait for itself" in said[0]
        await harness.idle()


async def test_what_a_tool_has_begun_beside_itself_may_wait_for_its_run_t68() -> None:
    beside: list[asyncio.Future[None]] = []

    @tool(replay="safe")
    async def look(call: ToolCall) -> str:
        """Look."""
        beside.append(asyncio.ensure_future(call.harness.idle()))
        await rest()
        return "seen"

    async with opened(ScriptedModel([call("look"), say("done")]), tools=(look,)) as harness:
        assert (await (await (await harness.root()).submit("Go.")).answer()).text == "done"
        await beside[0]


# --- wrappers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("how", ["begins late", "does not wait", "gives up"])
async def test_no_tool_runs_on_behind_its_result_h228(how: str, deep: bool) -> None:
    begun, ended, go = list[int](), list[str](), asyncio.Event()
    kept: list[Awaitable[object]] = []

    @tool(replay="safe")
    async def look(at: int) -> str:
        """Look."""
        begun.append(at)
        try:
            await go.wait()
        finally:
            ended.append("stopped")
        ended.append("had its effect")
        return "seen"

    async def around(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        if how == "begins late":
            kept.append(run())
            return "early"
        running = asyncio.ensure_future(run())
        kept.append(running)
        while not begun:
            await asyncio.sleep(0)
        if how == "gives up":
            raise TimeoutError("too slow")
        return "early"

    async def plain(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        return await run()

    wrappers = [plain, around, plain] if deep else [around]
    model, reports = ScriptedModel([call("look", at=1), say("done")]), Reports()
    extensions = [Extension("w", wrappers=wrappers)]
    async with opened(model, tools=(look,), extensions=extensions, reports=reports) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi")).answer()).text == "done"
        result = (await transcript(root))[2]
        assert result == ("tool-result TimeoutError: too slow" if how == "gives up" else "tool-result early")
        assert ended == ([] if how == "begins late" else ["stopped"]), "before the result was stored"
        go.set()
        with pytest.raises(RunTwice if how == "begins late" else asyncio.CancelledError):
            await kept[0]
    assert "had its effect" not in ended
    assert [report.type for report in reports] == (["tool_raised"] if how == "gives up" else [])


async def test_an_abort_waits_for_a_tool_that_its_wrapper_left_behind_h228() -> None:
    begun, cancelled, go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    @tool(replay="safe")
    async def look(at: int) -> str:
        """Look."""
        begun.set()
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                cancelled.set()
        ended.append("ended")
        return "seen"

    async def around(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        kept.append(asyncio.ensure_future(run()))
        await begun.wait()
        return "early"

    kept: list[asyncio.Future[object]] = []
    model = ScriptedModel([call("look", at=1), say("done")])
    async with opened(model, tools=(look,), extensions=[Extension("w", wrappers=[around])]) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await cancelled.wait()
        aborting = asyncio.ensure_future(root.abort())
        await rest()
        assert not aborting.done()
        go.set()
        await aborting
        assert ended == ["ended"]
        assert (await submission.wait()).reason == "aborted"
    await asyncio.wait(kept)


async def test_a_tool_that_a_wrapper_runs_in_a_task_of_its_own_gives_its_value_h228() -> None:
    @tool(replay="safe")
    async def look(at: int) -> str:
        """Look."""
        if at == 2:
            raise ValueError("not there")
        return f"seen {at}"

    async def around(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        return await asyncio.ensure_future(run())

    model, reports = ScriptedModel([call("look", at=1), call("look", at=2), say("done")]), Reports()
    extensions = [Extension("w", wrappers=[around, around])]
    async with opened(model, tools=(look,), extensions=extensions, reports=reports) as harness:
        root = await harness.root()
        await (await root.submit("hi")).answer()
        assert [line for line in await transcript(root) if line.startswith("tool")] == [
            "tool-result seen 1",
            "tool-result ValueError: not there",
        ]
