"""A call from the model's words to the committed result (rules H86 to H103), and after interruptions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal

import pytest

from harness.doubles import settle
from harness.tool_world import ROOT, ToolWorld, until
from perdure.harness.documents import Agent
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.hooks import Block, HookCall, after_tool, before_tool
from perdure.harness.messages import Image, Text
from perdure.harness.registry import Extension
from perdure.harness.tool import (
    AnyTool,
    CallEnded,
    OutputLimits,
    ReplayPolicy,
    ToolCall,
    ToolError,
    ToolResult,
    tool,
)
from perdure.harness.wrappers import RunTwice
from perdure.kernel.json import JsonValue
from perdure.tasks import NotStopped


@pytest.fixture
async def world() -> AsyncIterator[ToolWorld]:
    world = ToolWorld()
    yield world
    await world.close()


@tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


# --- the plain way -----------------------------------------------------------------------------------------------


async def test_a_call_makes_two_commits_the_intent_and_the_result(world: ToolWorld) -> None:
    await world.open(add)
    result = await world.run("add", {"a": 1, "b": 2})
    assert (result.text, result.code, result.message.is_error) == ("3", None, False)
    assert len(world.commits) == 3  # with the one that created it
    assert await world.usage() == {"add": {"calls": 1, "usage": {}}}


async def test_nothing_runs_before_its_intent_has_settled(world: ToolWorld) -> None:
    seen: list[tuple[str, int]] = []

    @tool
    async def look(call: ToolCall) -> None:
        """Look at the log from inside."""
        record = await world.session.task(call.id)
        assert record is not None
        seen.append((record.state.phase, world.session.seq))  # pyright: ignore[reportAttributeAccessIssue]
        assert (await world.live())[str(call.id)]["state"] == "running"

    await world.open(look)
    await world.run("look")
    assert seen == [("execute", world.session.seq - 1)]


async def test_results_carry_details_diagnostics_and_usage(world: ToolWorld) -> None:
    @tool
    async def paid(call: ToolCall) -> ToolResult:
        """Cost something."""
        call.details({"step": 1})
        call.diagnostic("first")
        return ToolResult([Text("a"), Image("image/png", "AA==")], usage={"credits": 2}, diagnostics=["second"])

    await world.open(paid)
    result = await world.run("paid")
    assert result.details == {"step": 1}
    assert result.data.diagnostics == ("first", "second")
    assert result.data.usage == {"credits": 2.0}
    assert result.message.content == (Text("a"), Image("image/png", "AA=="))
    await world.run("paid")
    assert await world.usage() == {"paid": {"calls": 2, "usage": {"credits": 4.0}}}


async def test_a_tool_that_returns_nothing_gives_what_it_streamed(world: ToolWorld) -> None:
    @tool
    async def talk(call: ToolCall) -> None:
        """Talk."""
        call.output("a\n")
        call.output(b"\xc3")
        call.output(b"\xa9\n")

    await world.open(talk)
    assert (await world.run("talk")).text == "a\né\n"


async def test_output_is_bounded_and_the_model_is_told(world: ToolWorld) -> None:
    @tool(output=OutputLimits(max_lines=2))
    async def tail() -> str:
        """Five lines."""
        return "1\n2\n3\n4\n5\n"

    @tool(output=OutputLimits(max_lines=2, keep="head"))
    async def head(call: ToolCall) -> None:
        """Five lines."""
        for number in range(1, 6):
            call.output(f"{number}\n")

    await world.open(tail, head)
    result = await world.run("tail")
    assert result.text == "[6 bytes in 3 whole lines before this are left out.]\n4\n5\n"
    assert (result.data.dropped_bytes, result.data.dropped_lines) == (6, 3)
    result = await world.run("head")
    assert result.text == "1\n2\n[6 bytes in 3 whole lines after this are left out.]"
    assert (result.data.dropped_bytes, result.data.dropped_lines) == (6, 3)


@pytest.mark.parametrize("keep", ["head", "tail"])
async def test_what_is_kept_does_not_depend_on_chunks_or_timing(
    world: ToolWorld, keep: Literal["head", "tail"]
) -> None:
    text = "".join(f"{'é' * (number % 17)} {number}\n" for number in range(300)).encode()

    @tool(output=OutputLimits(max_bytes=700, max_lines=40, keep=keep))
    async def talk(size: int, pause: bool, call: ToolCall) -> None:
        """Talk."""
        for at in range(0, len(text), size):
            call.output(text[at : at + size])
            if pause:
                await settle()
                world.clock.now += 0.2

    await world.open(talk)
    results = [
        await world.run("talk", {"size": size, "pause": pause})
        for size, pause in ((len(text), False), (1, False), (13, False), (211, True), (997, True))
    ]
    assert len({(r.text, r.data.dropped_bytes, r.data.dropped_lines) for r in results}) == 1
    assert results[0].data.dropped_lines >= 260


async def test_a_running_call_streams_throttled_into_live(world: ToolWorld) -> None:
    go_on = asyncio.Event()
    calls: list[ToolCall] = []

    @tool
    async def slow(call: ToolCall) -> str:
        """Take its time."""
        calls.append(call)
        await go_on.wait()
        return "done"

    await world.open(slow)
    task = await world.call("slow")
    await until(lambda: bool(calls))
    calls[0].output("one\n")
    await settle()
    shown = (await world.live())[str(task)]
    assert (shown["output"], shown["call_id"], shown["name"]) == ("one\n", "call-slow", "slow")
    calls[0].output("two\n")
    calls[0].details({"percent": 50})
    calls[0].diagnostic("hm")
    await settle()
    assert (await world.live())[str(task)]["output"] == "one\n"
    await world.clock.advance(0.1)
    shown = (await world.live())[str(task)]
    assert (shown["output"], shown["details"], shown["diagnostics"]) == ("one\ntwo\n", {"percent": 50}, ["hm"])
    calls[0].output("never shown\n")
    go_on.set()
    assert (await world.result(task)).text == "done"
    assert world.clock.sleeping == 0
    with pytest.raises(CallEnded):
        calls[0].output("late")


async def test_a_synchronous_tool_streams_from_its_thread(world: ToolWorld) -> None:
    @tool
    def work(call: ToolCall) -> None:
        """Work."""
        for number in range(50):
            call.output(f"{number}\n")

    await world.open(work)
    assert (await world.run("work")).text == "".join(f"{n}\n" for n in range(50))


async def test_a_sequential_call_waits_for_the_one_before(world: ToolWorld) -> None:
    order: list[str] = []
    go_on = asyncio.Event()

    @tool
    async def first() -> None:
        """First."""
        await go_on.wait()
        order.append("first")

    @tool
    async def second() -> None:
        """Second."""
        order.append("second")

    await world.open(first, second)
    one = await world.call("first")
    two = await world.call("second", after=one)
    await settle()
    assert (await world.live())[str(two)]["state"] == "waiting"
    go_on.set()
    await world.result(two)
    assert order == ["first", "second"]
    three = await world.call("second", after=one)
    await world.result(three)


async def test_idempotency_keys_differ_between_calls_and_stores(world: ToolWorld) -> None:
    keys: list[str] = []

    @tool
    async def note(call: ToolCall) -> None:
        """Note the key."""
        keys.append(call.idempotency_key)

    other = ToolWorld()
    for place in (world, other):
        await place.open(note)
        await place.run("note")
        await place.run("note")
    await other.close()
    assert len(set(keys)) == 4


# --- what the harness refuses and tells ---------------------------------------------------------------------------


async def test_errors_have_codes(world: ToolWorld) -> None:
    @tool
    async def fails(how: str) -> str:
        """Fail."""
        if how == "plainly":
            raise ToolError("No such city.")
        if how == "oddly":
            raise KeyError("k")
        if how == "json":
            return [object()]  # pyright: ignore[reportReturnType]
        raise asyncio.CancelledError

    @tool
    async def files(env: ExecutionEnvironment) -> None:
        """Need files."""

    @tool(result=int)
    async def number() -> str:
        """Not one."""
        return "abc"

    await world.open(add, fails, files, number)
    for name, arguments, code, text in (
        ("nope", {}, "tool_unavailable", "There is no tool 'nope'. There are: add, fails, files, number."),
        ("files", {}, "tool_unavailable", "this conversation has none"),
        ("add", {"a": "x"}, "invalid_arguments", "- b: is required"),
        ("fails", {"how": "plainly"}, "tool_error", "No such city."),
        ("fails", {"how": "oddly"}, "tool_error", "KeyError: 'k'"),
        ("fails", {"how": "json"}, "tool_error", "has no JSON"),
        ("fails", {"how": "cancelled"}, "tool_error", "cancelled itself"),
        ("number", {}, "tool_error", "not what number declares"),
    ):
        result = await world.run(name, arguments)
        assert (result.code, result.message.is_error) == (code, True), name
        assert text in result.text, name
    assert [report.type for report in world.reports] == ["tool_raised"]


async def test_arguments_are_repaired_and_stored_as_they_are_final(world: ToolWorld) -> None:
    await world.open(add)
    assert (await world.run("add", raw=b'"{\\"a\\": 1, \\"b\\": \\"2\\"}"')).text == "3"


async def test_a_tool_whose_types_cannot_be_described_is_unavailable(world: ToolWorld) -> None:
    @tool
    async def odd(value: Callable[[], Nothing]) -> None:  # pyright: ignore[reportUndefinedVariable]  # noqa: F821
        """Odd."""

    await world.open(odd)
    assert (await world.run("odd")).code == "tool_unavailable"
    assert [report.type for report in world.reports] == ["tool_unusable"]


async def test_a_tool_that_takes_too_long_is_stopped(world: ToolWorld) -> None:
    stopped: list[str] = []

    @tool(timeout_ms=2000)
    async def slow(call: ToolCall) -> None:
        """Too slow."""
        call.output("so far\n")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("stopped")

    await world.open(slow)
    task = await world.call("slow")
    await settle()
    await world.clock.advance(2.1)
    result = await world.result(task)
    assert result.code == "timeout"
    assert result.text == "The call took longer than 2000 ms and was stopped.\nOutput until then:\nso far\n"
    assert stopped == ["stopped"]


async def test_a_time_limit_that_is_kept_leaves_no_trace(world: ToolWorld) -> None:
    @tool(timeout_ms=2000)
    async def quick() -> str:
        """Quick."""
        return "done"

    await world.open(quick)
    assert (await world.run("quick")).text == "done"
    assert world.clock.sleeping == 0


# --- hooks and wrappers -------------------------------------------------------------------------------------------


async def test_hooks_rewrite_block_and_replace(world: ToolWorld) -> None:
    @before_tool
    async def before(call: HookCall) -> Mapping[str, JsonValue] | Block | None:
        if call.arguments["a"] == 13:
            return Block("unlucky")
        return {**call.arguments, "b": 100}

    @after_tool
    async def after(call: HookCall, result: ToolResult) -> ToolResult | None:
        return ToolResult(f"{result.text} of {call.arguments['a']}", is_error=result.is_error, code=result.code)

    await world.open(add, extensions=(Extension("hooks", hooks=[before, after]),))
    assert (await world.run("add", {"a": 1, "b": 2})).text == "101 of 1"
    blocked = await world.run("add", {"a": 13, "b": 2})
    assert (blocked.code, blocked.text) == ("blocked", "The call was blocked: unlucky")


async def test_rewritten_arguments_are_validated_again(world: ToolWorld) -> None:
    @before_tool
    async def spoil(call: HookCall) -> Mapping[str, JsonValue]:
        return {"a": "many"}

    await world.open(add, extensions=(Extension("hooks", hooks=[spoil]),))
    result = await world.run("add", {"a": 1, "b": 2})
    assert result.code == "invalid_arguments"
    assert "- a: input should be a valid integer" in result.text


async def test_a_before_hook_that_raises_blocks(world: ToolWorld) -> None:
    @before_tool
    async def broken(call: HookCall) -> None:
        raise RuntimeError

    await world.open(add, extensions=(Extension("hooks", hooks=[broken]),))
    assert (await world.run("add", {"a": 1, "b": 2})).code == "blocked"


async def test_a_replaced_result_is_validated_and_bounded(world: ToolWorld) -> None:
    @tool(result=int, output=OutputLimits(max_bytes=10))
    async def number() -> int:
        """A number."""
        return 1

    @after_tool
    async def spoil(call: HookCall, result: ToolResult) -> ToolResult:
        return ToolResult("no number")

    await world.open(number, extensions=(Extension("hooks", hooks=[spoil]),))
    result = await world.run("number")
    assert result.code == "tool_error"


async def test_wrappers_run_around_a_tool(world: ToolWorld) -> None:
    order: list[str] = []

    def wrapper(name: str) -> Callable[[ToolCall, Callable[[], Awaitable[object]]], Awaitable[object]]:
        async def around(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
            order.append(f"{name} before {call.name}")
            value = await run()
            order.append(f"{name} after")
            return value

        return around

    await world.open(add, extensions=(Extension("w", wrappers=[wrapper("outer"), wrapper("inner")]),))
    assert (await world.run("add", {"a": 1, "b": 2})).text == "3"
    assert order == ["outer before add", "inner before add", "inner after", "outer after"]


async def test_a_wrapper_runs_the_tool_once_and_before_it_returns_h228(world: ToolWorld) -> None:
    ran: list[int] = []
    late: list[Callable[[], Awaitable[object]]] = []

    @tool(replay="safe")
    async def act(n: int) -> str:
        """Act."""
        ran.append(n)
        return "acted"

    async def insist(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        late.append(run)
        if len(late) == 3:
            return "not run"
        return [await run(), await run()] if not ran else await run()

    await world.open(act, extensions=(Extension("w", wrappers=[insist]),))
    result = await world.run("act", {"n": 1})
    assert (result.code, result.text) == ("tool_error", "a wrapper runs act once, before it returns")
    assert (await world.run("act", {"n": 2})).text == "acted"
    assert (await world.run("act", {"n": 3})).text == "not run"
    for run in late[1:]:
        with pytest.raises(RunTwice):
            await run()
    assert ran == [1, 2]


async def test_a_wrapper_may_keep_the_tool_from_running_and_what_it_raises_is_the_tools_h228(world: ToolWorld) -> None:
    @after_tool
    async def seen(call: HookCall, result: ToolResult) -> None:
        results.append(result.text)

    async def around(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        if call.name == "fails":
            try:
                return await run()
            except ValueError:
                return "caught"
        raise OSError("no room")

    @tool
    async def fails() -> str:
        """Fail."""
        raise ValueError

    results: list[str] = []
    await world.open(add, fails, extensions=(Extension("w", wrappers=[around], hooks=[seen]),))
    refused = await world.run("add", {"a": 1, "b": 2})
    assert (refused.code, refused.text) == ("tool_error", "OSError: no room")
    assert (await world.run("fails")).text == "caught"
    assert results == ["OSError: no room", "caught"]


async def test_a_conversation_calls_only_what_it_selects(world: ToolWorld) -> None:
    await world.open(add)
    async with world.session.commit(conversation_id=ROOT) as tx:
        (await tx.draft(Agent)).tools = []
    assert (await world.run("add", {"a": 1, "b": 2})).code == "tool_unavailable"


# --- intents ------------------------------------------------------------------------------------------------------


async def test_what_a_tool_prepares_is_stored_with_the_intent(world: ToolWorld) -> None:
    prepared: list[int] = []

    @tool(replay="safe")
    async def change(n: int, call: ToolCall) -> JsonValue:
        """Change."""
        if len(prepared) == 1 and call.attempt == 1:
            prepared.append(0)
            await asyncio.Event().wait()
        return [call.intent, call.attempt]

    @change.intent
    async def prepare(n: int) -> JsonValue:
        prepared.append(n)
        return {"hash": n * 2}

    await world.open(change)
    task = await world.call("change", {"n": 4})
    await until(lambda: prepared == [4, 0])
    await world.crash()
    await world.open(change)
    assert (await world.result(task)).text == '[{"hash":8},2]'
    assert prepared == [4, 0], "it is prepared once"


async def test_a_tool_is_not_run_when_its_intent_cannot_be_prepared(world: ToolWorld) -> None:
    ran: list[int] = []

    @tool
    async def change(n: int) -> None:
        """Change."""
        ran.append(n)

    @change.intent
    async def prepare(n: int) -> JsonValue:
        raise ToolError("The file is not there.")

    await world.open(change)
    result = await world.run("change", {"n": 1})
    assert (result.code, result.text, ran) == ("tool_error", "The file is not there.", [])


# --- interruptions ------------------------------------------------------------------------------------------------


def hanging(replay: ReplayPolicy) -> tuple[AnyTool, list[str]]:
    """A tool that hangs in its first run and ends in its second."""
    runs: list[str] = []

    @tool(replay=replay)
    async def work(call: ToolCall) -> str:
        """Work."""
        runs.append(call.idempotency_key)
        call.output(f"run {len(runs)}\n")
        if len(runs) == 1:
            await asyncio.Event().wait()
        return f"attempt {call.attempt}"

    return work, runs


async def test_an_unsafe_call_ends_interrupted_with_its_committed_output(world: ToolWorld) -> None:
    work, runs = hanging("unsafe")
    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await settle()
    await world.crash()
    await world.open(work)
    result = await world.result(task)
    assert (result.code, len(runs)) == ("interrupted", 1)
    assert result.text.endswith("Output until then:\nrun 1\n")


async def test_a_safe_call_is_run_again_with_the_same_key(world: ToolWorld) -> None:
    work, runs = hanging("safe")
    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await settle()
    await world.crash()
    await world.open(work)
    assert (await world.result(task)).text == "attempt 2"
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("before", "now"), [("safe", "unsafe"), ("unsafe", "safe")])
async def test_both_policies_must_say_safe(world: ToolWorld, before: ReplayPolicy, now: ReplayPolicy) -> None:
    work, runs = hanging(before)
    changed, again = hanging(now)
    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await world.crash()
    await world.open(changed)
    assert (await world.result(task)).code == "interrupted"
    assert again == []


async def test_an_ordinary_close_is_an_interruption_too(world: ToolWorld) -> None:
    work, runs = hanging("safe")
    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await world.close()
    await world.open(work)
    assert (await world.result(task)).text == "attempt 2"


async def test_a_rerun_shows_its_own_output_only(world: ToolWorld) -> None:
    runs: list[ToolCall] = []

    @tool(replay="safe")
    async def work(call: ToolCall) -> None:
        """Work."""
        runs.append(call)
        call.output(f"run {len(runs)}\n")
        await asyncio.Event().wait()

    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await settle()
    await world.crash()
    await world.open(work)
    await until(lambda: len(runs) == 2)
    await settle()
    assert (await world.live())[str(task)]["output"] == "run 2\n"


async def test_a_call_without_an_intent_is_simply_started(world: ToolWorld) -> None:
    await world.open(add, resume=False)
    task = await world.call("add", {"a": 1, "b": 2})
    await world.crash()
    await world.open(add)
    assert (await world.result(task)).text == "3"


async def test_a_call_whose_tool_is_gone_ends_interrupted(world: ToolWorld) -> None:
    work, runs = hanging("safe")
    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await world.crash()
    await world.open(add)
    assert (await world.result(task)).code == "interrupted"


async def test_a_memo_survives_a_rerun(world: ToolWorld) -> None:
    kept: list[JsonValue] = []

    @tool(replay="safe")
    async def choose(call: ToolCall) -> str:
        """Choose."""
        kept.append(await call.memo("choice", len(kept)))
        if len(kept) == 1:
            await asyncio.Event().wait()
        return "done"

    await world.open(choose)
    task = await world.call("choose")
    await until(lambda: len(kept) == 1)
    await world.crash()
    await world.open(choose)
    await world.result(task)
    assert kept == [0, 0]


# --- aborts -------------------------------------------------------------------------------------------------------


async def test_an_aborted_call_has_a_result_with_the_output_so_far(world: ToolWorld) -> None:
    work, runs = hanging("safe")
    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await world.runtime.abort_task(task)
    result = await world.result(task)
    assert (result.code, result.text) == ("aborted", "The call was aborted.\nOutput until then:\nrun 1\n")
    record = await world.session.task(task)
    assert record is not None
    assert record.outcome is not None
    assert type(record.outcome).__name__ == "Aborted"


async def test_a_call_aborted_before_it_began_has_a_result_too(world: ToolWorld) -> None:
    await world.open(add, resume=False)
    task = await world.call("add", {"a": 1, "b": 2})
    await world.runtime.abort_task(task)
    assert (await world.result(task)).code == "aborted"


async def test_a_call_aborted_while_it_waits_its_turn_has_a_result(world: ToolWorld) -> None:
    work, runs = hanging("safe")
    await world.open(work, add)
    first = await world.call("work")
    second = await world.call("add", {"a": 1, "b": 2}, after=first)
    await until(lambda: len(runs) == 1)
    await settle()
    await world.runtime.abort_task(second)
    assert (await world.result(second)).code == "aborted"
    await world.runtime.abort_task(first)


async def test_an_abort_after_a_crash_keeps_the_committed_output(world: ToolWorld) -> None:
    work, runs = hanging("safe")
    await world.open(work)
    task = await world.call("work")
    await until(lambda: len(runs) == 1)
    await settle()
    await world.crash()
    await world.open(work, resume=False)
    await world.runtime.abort_task(task)
    result = await world.result(task)
    assert (result.code, len(runs)) == ("aborted", 1)
    assert "run 1" in result.text


async def test_a_thread_that_ignores_the_abort_is_named(world: ToolWorld) -> None:
    began, go_on = threading.Event(), threading.Event()

    @tool
    def stubborn() -> None:
        """Take its time."""
        began.set()
        go_on.wait()

    await world.open(stubborn)
    task = await world.call("stubborn")
    await asyncio.to_thread(began.wait)
    aborting = asyncio.ensure_future(world.runtime.abort_task(task))
    await settle()
    await world.clock.advance(1)
    with pytest.raises(NotStopped, match=r"pi\.tool"):
        await aborting
    go_on.set()
    assert (await world.result(task)).code == "aborted"


# --- outcomes that the scheduler wrote -----------------------------------------------------------------------------


async def test_a_faulted_call_has_a_result(world: ToolWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.open(add)
    monkeypatch.setattr("perdure.harness.execution.bounded_result", lambda *_: 1 / 0)
    result = await world.run("add", {"a": 1, "b": 2})
    assert result.code == "interrupted"


async def test_a_call_faulted_before_its_intent_says_that_nothing_ran(
    world: ToolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.open(add)
    monkeypatch.setattr("perdure.harness.opened.view", lambda *_: 1 / 0)
    result = await world.run("add", {"a": 1, "b": 2})
    assert (result.code, result.text) == ("tool_error", "The call failed before the tool began.")
