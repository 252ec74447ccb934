"""A tool that calls tools: by key, once, through the same pipeline (rules H109, H340 to H346)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import msgspec
import pytest

from harness.kit import live, opened
from harness.test_tool_scopes import Environment
from harness.tool_world import ROOT, ToolWorld, until
from perdure.harness.approval import APPROVAL, Decision
from perdure.harness.approvals import pending
from perdure.harness.documents import TOOL_RESULT, ToolResultData
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.events import Snapshot, ToolEnd, ToolStart
from perdure.harness.handle import CallConflict, CallRefused
from perdure.harness.hooks import Block, HookCall, before_tool
from perdure.harness.messages import ToolResultMessage
from perdure.harness.nested import MAX_CALLS, MAX_DEPTH
from perdure.harness.registry import Extension
from perdure.harness.scopes import stored_intent
from perdure.harness.tool import AnyTool, ToolCall, ToolResult, tool
from perdure.kernel.errors import SessionClosed
from perdure.kernel.json import JsonValue
from perdure.testing.model import ScriptedModel, call, say


@pytest.fixture
async def world() -> AsyncIterator[ToolWorld]:
    world = ToolWorld()
    yield world
    await world.close()


@tool(replay="safe")
async def add(a: int, b: int, call: ToolCall) -> ToolResult:
    """Add."""
    call.diagnostic("adding")
    return ToolResult(str(a + b), details={"sum": a + b}, usage={"sums": 1})


def counting(count: list[int]) -> AnyTool:
    @tool(replay="safe")
    async def count_up() -> int:
        """One more."""
        count.append(1)
        return len(count)

    return count_up


async def test_a_nested_call_is_a_task_of_its_own_and_its_caller_has_its_result_h109_h341(world: ToolWorld) -> None:
    results: list[ToolResult] = []

    @tool
    async def outer(call: ToolCall) -> str:
        """Call."""
        results.append(await call.call("add", {"a": 1, "b": 2}, key="sum"))
        return "called"

    await world.open(outer, add)
    task = await world.call("outer")
    assert (await world.result(task)).text == "called"
    assert results == [ToolResult(results[0].content, details={"sum": 3})]
    assert results[0].text == "3"
    nested, told = [e for e in await world.session.entries(ROOT) if e.kind == TOOL_RESULT]
    data = nested.data_as(ToolResultData)
    assert (nested.messages, data.caller, data.name, data.diagnostics) == ([], task, "add", ("adding",))
    assert [message["role"] for message in told.messages if isinstance(message, dict)] == ["tool"]
    record = await world.session.task(data.task)
    assert record is not None
    assert (record.owner, record.kind) == (task, "pi.tool")
    assert await world.usage() == {
        "add": {"calls": 1, "usage": {"sums": 1.0}},
        "outer": {"calls": 1, "usage": {}},
    }
    # creation with the intent, its result, beside the caller's own three
    assert len(world.commits) == 5


async def test_a_key_gives_the_same_call_and_another_call_is_a_conflict_h340(world: ToolWorld) -> None:
    count: list[int] = []

    @tool
    async def outer(call: ToolCall) -> str:
        """Call several times with a key."""
        first, second = await asyncio.gather(call.call("count_up", key="k"), call.call("count_up", key="k"))
        third = await call.call("count_up", {}, key="k")
        assert first == second == third
        for name, arguments in (("add", {}), ("count_up", {"a": 1})):
            with pytest.raises(CallConflict, match="with the key 'k'"):
                await call.call(name, arguments, key="k")
        other = await call.call("count_up", key="other")
        return f"{first.text} {other.text}"

    await world.open(outer, counting(count), add)
    assert (await world.run("outer")).text == "1 2"
    assert len(count) == 2


@pytest.mark.parametrize("key", ["", "k" * 300, None])
async def test_a_key_is_a_short_text_h340(world: ToolWorld, key: str) -> None:
    @tool
    async def outer(call: ToolCall) -> str:
        """Call."""
        with pytest.raises(CallRefused, match="a key is a text of"):
            await call.call("add", {"a": 1, "b": 2}, key=key)
        return "refused"

    await world.open(outer, add)
    assert (await world.run("outer")).text == "refused"


async def test_a_rerun_finds_what_had_ended_and_waits_for_what_goes_on_h109(world: ToolWorld) -> None:
    count: list[int] = []
    attempts: list[int] = []
    hang = asyncio.Event()

    @tool(replay="safe")
    async def slow() -> str:
        """Wait."""
        await hang.wait()
        return "at last"

    @tool(replay="safe")
    async def outer(call: ToolCall) -> str:
        """Call twice."""
        attempts.append(call.attempt)
        first = await call.call("count_up", key="first")
        second = await call.call("slow", key="second")
        return f"{first.text} {second.text}"

    tools = outer, counting(count), slow
    await world.open(*tools)
    task = await world.call("outer")
    while "slow" not in [shown["name"] for shown in (await world.live()).values()]:
        await asyncio.sleep(0)
    await world.crash()
    hang.set()
    await world.open(*tools)
    assert (await world.result(task)).text == "1 at last"
    assert (len(count), attempts) == (1, [1, 2])


async def test_an_unsafe_caller_that_was_cut_off_begins_nothing_anew_h343(world: ToolWorld) -> None:
    began: list[str] = []
    hang = asyncio.Event()

    @tool(replay="safe")
    async def slow(call: ToolCall) -> str:
        """Wait."""
        began.append("slow")
        call.output("so far\n")
        await hang.wait()
        return "at last"

    @tool
    async def outer(call: ToolCall) -> str:
        """Call."""
        await call.call("count_up", key="done")
        return (await call.call("slow", key="slow")).text

    count: list[int] = []
    tools = outer, slow, counting(count)
    await world.open(*tools)
    task = await world.call("outer")
    await until(lambda: bool(began))
    await world.crash()
    await world.open(*tools)
    assert (await world.result(task)).code == "interrupted"
    assert began == ["slow"], "what it called was not run again"
    codes = {result_data.name: result_data.code for result_data in await _data(world)}
    assert codes == {"count_up": None, "slow": "aborted", "outer": "interrupted"}


@pytest.mark.parametrize("stands_at", ["before_tool", "approval"])
async def test_one_that_had_no_intent_yet_is_not_begun_for_an_unsafe_caller_that_was_cut_off_h343(
    stands_at: str, world: ToolWorld
) -> None:
    """No hook is asked about it, and nobody's decision is used up for it."""
    asked: list[str] = []
    began: list[str] = []

    @before_tool
    async def look(about: HookCall) -> None:
        if about.tool.name == "inner":
            asked.append("inner")
            if stands_at == "before_tool" and len(asked) == 1:
                await asyncio.Event().wait()

    @tool(replay="safe", requires_approval=stands_at == "approval")
    async def inner() -> str:
        """Do something."""
        began.append("inner")
        return "done"

    @tool
    async def outer(call: ToolCall) -> str:
        """Call."""
        return (await call.call("inner", key="inner")).text

    hooks = Extension("hooks", hooks=[look])
    await world.open(outer, inner, extensions=(hooks,))
    task = await world.call("outer")
    await until(lambda: bool(asked))
    if stands_at == "approval":
        await until(lambda: any(record.status == "waiting" for record in world.session.live.settled.values()))
    await world.crash()
    await world.open(outer, inner, extensions=(hooks,), resume=False)
    for question in await pending(world.session):
        decision = Decision(allow=True, digest=question.digest, expires_at=question.expires_at, at=question.asked_at)
        assert await world.runtime.send_signal(question.task, APPROVAL, msgspec.to_builtins(decision))
        stands_at = "decided"
    assert stands_at in ("before_tool", "decided")
    world.runtime.resume()
    assert (await world.result(task)).code == "interrupted"
    assert (asked, began) == (["inner"], [])
    settled = [record for commit in world.commits for record in commit.batch.tasks if record.owner == task]
    assert [record for record in settled if stored_intent(record) is not None] == [], "nor does it come to an intent"
    assert {data.name: data.code for data in await _data(world)} == {"inner": "aborted", "outer": "interrupted"}


async def _data(world: ToolWorld) -> list[ToolResultData]:
    return [e.data_as(ToolResultData) for e in await world.session.entries(ROOT) if e.kind == TOOL_RESULT]


async def test_closing_leaves_both_to_the_next_open_h109(world: ToolWorld) -> None:
    attempts: list[int] = []
    hang = asyncio.Event()

    @tool(replay="safe")
    async def slow() -> str:
        """Wait."""
        await hang.wait()
        return "at last"

    @tool(replay="safe")
    async def outer(call: ToolCall) -> str:
        """Call, and take no failure for an answer."""
        attempts.append(call.attempt)
        try:
            return (await call.call("slow", key="slow")).text
        except SessionClosed:
            return "closed"

    await world.open(outer, slow)
    task = await world.call("outer")
    while len(await world.live()) < 2:
        await asyncio.sleep(0)
    report = await world.session.close()
    assert not report.stragglers
    assert report.failed is None
    hang.set()
    await world.open(outer, slow)
    assert (await world.result(task)).text == "at last"


async def test_a_call_that_ends_aborts_what_it_still_owns_h342(world: ToolWorld) -> None:
    stopped: list[str] = []

    @tool
    async def slow(call: ToolCall) -> str:
        """Wait for ever."""
        call.output("begun\n")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("slow")
        return "never"

    @tool(timeout_ms=50)
    async def outer(call: ToolCall) -> str:
        """Wait for too long."""
        return (await call.call("slow", key="slow")).text

    await world.open(outer, slow)
    task = await world.call("outer")
    while not any(shown["output"] for shown in (await world.live()).values()):
        await asyncio.sleep(0)
        await world.clock.advance(0.001)
    await world.clock.advance(1)
    assert (await world.result(task)).code == "timeout"
    assert stopped == ["slow"]
    assert {data.name: data.code for data in await _data(world)} == {"outer": "timeout", "slow": "aborted"}
    record = await world.session.task(task)
    assert record is not None
    assert not record.live, "it is over once what it called has ended"


async def test_the_pipeline_is_the_same_with_hooks_and_errors_h341(world: ToolWorld) -> None:
    @before_tool
    async def block(asked: HookCall) -> Block | None:
        return Block("not that") if asked.arguments.get("a") == 13 else None

    @tool
    async def outer(call: ToolCall) -> str:
        """Call what fails."""
        wanted: tuple[tuple[str, dict[str, JsonValue]], ...] = (
            ("add", {"a": 13, "b": 0}),
            ("add", {"a": "x", "b": 0}),
            ("nowhere", {}),
            ("fails", {}),
        )
        codes = [(await call.call(name, given, key=str(at))).code for at, (name, given) in enumerate(wanted)]
        return " ".join(map(str, codes))

    @tool
    async def fails() -> str:
        """Fail."""
        raise ValueError("on purpose")

    await world.open(outer, add, fails, extensions=(Extension("hooks", hooks=[block]),))
    assert (await world.run("outer")).text == "blocked invalid_arguments tool_unavailable tool_error"


async def test_an_aborted_nested_call_is_an_error_for_its_caller(world: ToolWorld) -> None:
    @tool
    async def slow() -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return "never"

    @tool
    async def outer(call: ToolCall) -> str:
        """Call."""
        result = await call.call("slow", key="slow")
        return f"{result.is_error} {result.code}"

    await world.open(outer, slow)
    task = await world.call("outer")
    while len(shown := await world.live()) < 2:
        await asyncio.sleep(0)
    (nested,) = (int(id) for id, shown in shown.items() if shown.get("caller") == task)
    await world.runtime.abort_task(nested)
    assert (await world.result(task)).text == "True aborted"


async def test_depth_and_number_are_bounded_h344(world: ToolWorld) -> None:
    @tool
    async def deeper(level: int, call: ToolCall) -> str:
        """Call itself."""
        result = await call.call("deeper", {"level": level + 1}, key="down")
        return result.text if "callers above it" in result.text else f"{level}: {result.text}"

    said: list[str] = []

    @tool
    async def many(call: ToolCall) -> None:
        """Call often."""
        for at in range(MAX_CALLS):
            await call.call("count_up", key=str(at))
        with pytest.raises(CallRefused, match=f"made {MAX_CALLS} calls"):
            await call.call("count_up", key="more")
        said.append((await call.call("count_up", key="0")).text)

    await world.open(deeper, many, counting([]))
    assert f"{MAX_DEPTH} callers above it" in (await world.run("deeper", {"level": 0})).text
    assert len(await _data(world)) == MAX_DEPTH + 1
    await world.runtime.wait(await world.call("many"))
    assert said == ["1"]


async def test_only_a_running_tool_of_a_harness_makes_calls_h344() -> None:
    with pytest.raises(CallRefused, match="only a running tool can"):
        await ToolCall(name="alone").call("add", {"a": 1, "b": 2}, key="k")


async def test_memos_of_the_package_have_their_own_names() -> None:
    with pytest.raises(ValueError, match="reserved"):
        await ToolCall(name="alone").memo("pi.call:k", 1)


async def test_no_call_waits_for_an_environment_that_its_caller_holds_h345(world: ToolWorld) -> None:
    world.environment = cast("ExecutionEnvironment", Environment())

    @tool
    async def inner(env: ExecutionEnvironment) -> str:
        """Work there."""
        return "worked"

    @tool
    async def outer(env: ExecutionEnvironment, call: ToolCall) -> str:
        """Work there, and call what works there too."""
        result = await call.call("inner", key="inner")
        plain = await call.call("add", {"a": 1, "b": 2}, key="plain")
        return f"{result.code} {plain.text}"

    @tool
    async def outside(call: ToolCall) -> str:
        """Call what works there."""
        return (await call.call("inner", key="inner")).text

    await world.open(outer, inner, outside, add)
    assert (await world.run("outer")).text == "tool_unavailable 3"
    assert (await world.run("outside")).text == "worked"


async def test_people_see_nested_calls_with_their_caller_and_no_model_does_h341() -> None:
    seen: list[list[ToolResultMessage]] = []

    @tool
    async def outer(call: ToolCall) -> str:
        """Call."""
        return (await call.call("add", {"a": 1, "b": 2}, key="sum")).text

    def reply(request):
        results = [message for message in request.messages if isinstance(message, ToolResultMessage)]
        seen.append(results)
        return say("done") if results else call("outer")

    async with opened(ScriptedModel(reply), tools=(outer, add)) as harness:
        root = await harness.root()
        async with root.events() as events:
            assert isinstance(await anext(events), Snapshot)
            await (await root.submit("Go")).answer()
            told = []
            async for event in events:
                if isinstance(event, ToolStart | ToolEnd):
                    told.append((type(event).__name__, event.name, event.caller))
                if len(told) == 4:
                    break
        outer_task = next(e for e in await root.entries() if e.kind == TOOL_RESULT and e.messages).by_task
        assert told == [
            ("ToolStart", "outer", None),
            ("ToolStart", "add", outer_task),
            ("ToolEnd", "add", outer_task),
            ("ToolEnd", "outer", None),
        ]
        assert [[m.name for m in results] for results in seen] == [[], ["outer"]]
        assert (await live(root)).tools == {}
        text = "".join([part async for part in root.export("markdown")])
        assert "### Result of `add`" in text
