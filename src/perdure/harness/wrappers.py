"""What extensions put around a tool, between the call's intent and its result (rule H228)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from perdure.harness.handle import ToolCall
from perdure.kernel.errors import PerdureError

Wrapper: TypeAlias = Callable[[ToolCall, Callable[[], Awaitable[object]]], Awaitable[object]]
"""Runs around a tool: ``async def around(call, run): ... return await run()``. What it returns is the tool's value."""


class RunTwice(PerdureError):
    """A wrapper ran the tool a second time, or after it had returned itself. The tool did not run again."""


def wrapped(
    wrappers: Sequence[Wrapper], call: ToolCall, run: Callable[[], Awaitable[object]]
) -> Callable[[], Awaitable[object]]:
    """The tool's execution with the wrappers around it, the first of them outermost."""
    for wrapper in reversed(wrappers):
        run = _around(wrapper, call, run)
    return run


def _around(wrapper: Wrapper, call: ToolCall, run: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
    async def wrap() -> object:
        may_run = True

        def once() -> Awaitable[object]:
            # One intent is one execution: whether a tool may run again is for its replay policy to say.
            nonlocal may_run
            if not may_run:
                raise RunTwice(f"a wrapper runs {call.name} once, before it returns")
            may_run = False
            return run()

        try:
            return await wrapper(call, once)
        finally:
            may_run = False

    return wrap
