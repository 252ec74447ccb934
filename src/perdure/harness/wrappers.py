"""What extensions put around a tool, between the call's intent and its result (rule H228)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from perdure.harness.handle import ToolCall
from perdure.harness.tool import ToolError
from perdure.kernel.errors import PerdureError

Wrapper: TypeAlias = Callable[[ToolCall, Callable[[], Awaitable[object]]], Awaitable[object]]
"""Runs around a tool: ``async def around(call, run): ... return await run()``. What it returns is the tool's value; a
tool that still runs then is stopped."""


class RunTwice(PerdureError):
    """A wrapper ran the tool a second time, or after it had returned itself. The tool did not run again."""


def wrapped(
    wrappers: Sequence[Wrapper], call: ToolCall, run: Callable[[], Awaitable[object]]
) -> Callable[[], Awaitable[object]]:
    """The tool's execution with the wrappers around it, the first of them outermost."""
    for wrapper in reversed(wrappers):
        run = _around(wrapper, call, run)
    return run


async def _end(running: asyncio.Future[object]) -> None:
    """A tool whose wrapper did not wait for it: nothing of a call goes on behind its result."""
    running.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:  # whoever waits for the call waits for the tool
            cancelled = error
    if not running.cancelled():
        running.exception()  # looked at; the wrapper's word counts
    if cancelled is not None:
        raise cancelled


def _around(wrapper: Wrapper, call: ToolCall, run: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
    async def wrap() -> object:
        may_run, returned = True, False
        running: asyncio.Future[object] | None = None

        def once() -> Awaitable[object]:
            # One intent is one execution: whether a tool may run again is for its replay policy to say.
            nonlocal may_run
            if not may_run:
                raise RunTwice(f"a wrapper runs {call.name} once, before it returns")
            may_run = False
            return execute()

        async def execute() -> object:
            nonlocal running
            if returned:
                raise RunTwice(f"a wrapper runs {call.name} before it returns")
            if asyncio.current_task() is own:
                return await run()
            running = asyncio.ensure_future(run())  # so that it can be ended alone, whoever waits for it
            return await running

        own = asyncio.current_task()
        try:
            return await wrapper(call, once)
        except SystemExit:
            raise ToolError("a wrapper of the tool tried to end the process") from None
        finally:
            may_run, returned = False, True
            if running is not None and not running.done():
                await _end(running)

    return wrap
