"""What tools, hooks and models get wrong fails one call, with an error result, and nothing else (K133, H86 to H103)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from harness.doubles import settle
from harness.tool_world import ToolWorld, until
from perdure.harness.hooks import HookCall, after_tool, before_tool
from perdure.harness.messages import Image, Text
from perdure.harness.registry import Extension
from perdure.harness.tool import CallEnded, OutputLimits, ToolCall, ToolError, ToolResult, tool
from perdure.kernel.json import JsonValue


@pytest.fixture
async def world() -> AsyncIterator[ToolWorld]:
    world = ToolWorld()
    yield world
    await world.close()


@tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


untyped: Any = ToolResult


@pytest.mark.parametrize(
    "make",
    [
        lambda: untyped(5),
        lambda: untyped(["text"]),
        lambda: untyped([Text(5)]),  # pyright: ignore[reportArgumentType]
        lambda: untyped([Image("image/\ud800", "AA==")]),
        lambda: untyped("x", diagnostics=[5]),
        lambda: untyped("x", diagnostics="not a list"),
        lambda: untyped("x", is_error="yes"),
        lambda: untyped("x", code="of_its_own"),
        lambda: untyped("x", usage=5),
        lambda: untyped("x", usage={5: 1}),
        lambda: untyped("x", usage={"\ud800": 1}),
        lambda: untyped("x", usage={"a": 10**400}),
        lambda: untyped("x", usage={"a": 1.7e308}),
    ],
)
async def test_a_result_that_is_none_is_an_error_of_the_tool(world: ToolWorld, make: Callable[[], object]) -> None:
    @tool
    async def silly() -> object:
        """Be silly."""
        return make()

    await world.open(silly)
    assert (await world.run("silly")).code == "tool_error"


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("it does not say")


def exits() -> str:
    sys.exit(3)


def stops() -> str:
    return next(iter([]))


def mute() -> str:
    raise Mute


async def exits_on_the_loop() -> str:
    sys.exit(3)


def shows_no_text(call: ToolCall) -> None:
    untyped: Any = 5
    call.output(untyped)


@pytest.mark.parametrize("function", [exits, stops, mute, exits_on_the_loop, shows_no_text])
async def test_whatever_a_tool_raises_is_its_result(world: ToolWorld, function: Callable[..., object]) -> None:
    await world.open(tool(name="raises")(function))
    result = await world.run("raises")
    assert (result.code, world.session.failed) == ("tool_error", None)


async def test_a_tool_that_raises_generator_exit_fails_its_call_alone(world: ToolWorld) -> None:
    """Nobody closed its coroutine."""

    @tool
    async def leave() -> str:
        """Leave."""
        raise GeneratorExit

    await world.open(leave)
    assert (await world.run("leave")).code == "interrupted"
    assert world.session.failed is None


async def test_arguments_nested_without_end_are_invalid(world: ToolWorld) -> None:
    await world.open(add)
    result = await world.run("add", raw=msgspec.json.encode("[" * 100_000))
    assert result.code == "invalid_arguments"


async def test_texts_between_images_keep_the_limits_together(world: ToolWorld) -> None:
    image = Image("image/png", "AA==")
    content = [Text("1\n2\n"), image, Text("3\n4\n"), image, Text("5\n")]

    @tool(output=OutputLimits(max_lines=3))
    async def tail() -> ToolResult:
        """Five lines."""
        return ToolResult(content)

    @tool(output=OutputLimits(max_lines=3, keep="head"))
    async def head() -> ToolResult:
        """Five lines."""
        return ToolResult(content)

    await world.open(tail, head)
    result = await world.run("tail")
    assert result.text == "[4 bytes in 2 whole lines before this are left out.]\n3\n4\n5\n"
    assert (result.data.dropped_lines, result.data.dropped_bytes) == (2, 4)
    result = await world.run("head")
    said = "[2 bytes in 1 whole lines after this are left out.]"
    assert result.text == f"1\n2\n3\n{said}{said}"
    assert (result.data.dropped_lines, result.data.dropped_bytes) == (2, 4)


async def test_an_error_made_of_the_words_of_others_is_bounded(world: ToolWorld) -> None:
    @tool
    async def picky(a: int) -> str:
        """Refuse."""
        return str(a)

    @picky.intent
    async def _(a: int) -> JsonValue:
        raise ToolError("no " * 1_000_000)

    await world.open(add, picky)
    for name, arguments in (("n" * 1_000_000, {}), ("add", {"n" * 1_000_000: 1}), ("picky", {"a": 1})):
        result = await world.run(name, arguments)
        assert (result.message.is_error, len(result.text) < 60_000) == (True, True)


async def test_a_call_that_took_too_long_tells_so_beside_its_bounded_output(world: ToolWorld) -> None:
    @tool(timeout_ms=1000, output=OutputLimits(max_lines=2))
    async def slow(call: ToolCall) -> None:
        """Show five lines and go on."""
        call.output("1\n2\n3\n4\n5\n")
        await asyncio.Event().wait()

    await world.open(slow)
    task = await world.call("slow")
    await until(lambda: world.clock.sleeping > 0)
    await world.clock.advance(2)
    result = await world.result(task)
    assert result.text.startswith("The call took longer than 1000 ms")
    assert result.text.endswith(":\n4\n5\n")
    assert (result.code, result.data.dropped_lines, result.data.dropped_bytes) == ("timeout", 3, 6)


async def test_a_call_that_took_too_long_and_does_not_stop_is_reported_with_its_stack_t86(world: ToolWorld) -> None:
    stubborn = asyncio.Event()

    @tool(timeout_ms=1000)
    async def deaf() -> str:
        """Do not listen."""
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    await world.open(deaf)
    task = await world.call("deaf")
    await until(lambda: world.clock.sleeping > 0)
    await world.clock.advance(2)
    await world.clock.advance(9)
    assert not world.reports
    await world.clock.advance(2)
    (report,) = world.reports
    assert (report.type, report.task) == ("not_stopped", task)
    assert "await stubborn.wait()" in report.message
    stubborn.set()
    assert (await world.result(task)).code == "timeout"


async def test_output_of_an_aborted_call_keeps_the_limits_of_its_tool_after_a_crash(world: ToolWorld) -> None:
    @tool(output=OutputLimits(max_lines=2, keep="head"))
    async def first(call: ToolCall) -> None:
        """Show five lines and go on."""
        call.output("1\n2\n3\n4\n5\n")
        await asyncio.Event().wait()

    await world.open(first)
    task = await world.call("first")
    await settle()
    await world.crash()
    await world.open(first, resume=False)
    await world.runtime.abort_task(task)
    result = await world.result(task)
    assert result.text.endswith(":\n1\n2\n")
    assert (result.code, result.data.dropped_lines) == ("aborted", 3)


async def test_handles_end_with_what_they_were_given_for_k92_k93(world: ToolWorld) -> None:
    held: list[ToolCall] = []

    @tool
    async def keep(a: int, call: ToolCall) -> str:
        """Keep the handle."""
        held.append(call)
        assert call.context.cancelled is None
        return str(a)

    @keep.intent
    async def _(a: int, call: ToolCall) -> JsonValue:
        held.append(call)
        return a

    await world.open(keep)
    await world.run("keep", {"a": 1})
    assert len(held) == 2
    for call in held:
        assert call.context.cancelled is not None
        with pytest.raises(CallEnded):
            call.output("late")


async def test_a_hook_that_cancels_itself_is_one_that_raised_h129_h132(world: ToolWorld) -> None:
    @before_tool
    async def before(call: HookCall) -> None:
        if call.arguments == {"a": 1, "b": 1}:
            raise asyncio.CancelledError

    @after_tool
    async def after(call: HookCall, result: ToolResult) -> None:
        raise asyncio.CancelledError

    await world.open(add, extensions=(Extension("hooks", hooks=[before, after]),))
    assert (await world.run("add", {"a": 1, "b": 1})).code == "blocked"
    assert (await world.run("add", {"a": 1, "b": 2})).text == "3"
    assert [report.type for report in world.reports] == ["hook_failed", "hook_failed"]
