"""Work of others within a time: then it is stopped, and waited for until it has ended (rules H101 and T86)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from perdure.kernel.clock import Clock
from perdure.tasks.invocation import stack_of


class TimedOut(Exception):
    """The work took too long, and has ended."""


async def within(
    clock: Clock,
    timeout_ms: int | None,
    call: Callable[[], Awaitable[object]],
    *,
    drain_ms: int,
    on_overdue: Callable[[str], None],
) -> object:
    """What ``call`` gives. Raises TimedOut, once the work has stopped. None: it may take any time.

    ``on_overdue`` is told the stack of work that does not stop within the drain bound.
    """
    if timeout_ms is None:
        return await call()
    work = asyncio.ensure_future(call())
    timer = asyncio.ensure_future(clock.sleep(timeout_ms / 1000))
    try:
        await asyncio.wait((work, timer), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise TimedOut
        return work.result()
    finally:
        timer.cancel()
        await _stop(clock, work, drain_ms, on_overdue)


async def _stop(clock: Clock, work: asyncio.Future[object], drain_ms: int, on_overdue: Callable[[str], None]) -> None:
    """Cancel work and wait until it has ended, whatever becomes of the waiter; tell if that takes long."""
    work.cancel()
    cancelled: asyncio.CancelledError | None = None
    patience = asyncio.ensure_future(clock.sleep(drain_ms / 1000))
    waited: set[asyncio.Future[Any]] = {work, patience}
    while not work.done():
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
        if patience.done() and patience in waited:
            waited.remove(patience)
            if not work.done():
                on_overdue(stack_of(work.get_coro()) if isinstance(work, asyncio.Task) else "")
    patience.cancel()
    if not work.cancelled():
        work.exception()
    if cancelled is not None:
        raise cancelled
