"""The mutation line: one transaction at a time, in the order they asked (rules K41, K56 and K57)."""

from __future__ import annotations

import asyncio
from collections import deque

from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import InsideTransaction


class Line:
    """A fair lock that knows which asyncio task holds it."""

    def __init__(self) -> None:
        self._busy = False
        """Held, or handed to a waiter that has not run yet."""
        self._holder: asyncio.Task[object] | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()

    def check_outside(self) -> None:
        """Raise InsideTransaction when the calling task is inside its own open transaction."""
        if self._holder is not None and self._holder is asyncio.current_task():
            raise InsideTransaction(
                "a session call was awaited inside this task's own open transaction; use the transaction's methods, "
                "or leave the block first"
            )

    async def acquire(self, context: Context | None) -> None:
        self.check_outside()
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(turn)
            try:
                await bounded(turn, context)
            except BaseException:
                if turn in self._waiters:
                    self._waiters.remove(turn)
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._pass_on()  # the turn came as its owner gave up
                raise
        elif context is not None:
            context.check()
        self._busy = True
        self._holder = asyncio.current_task()

    def release(self) -> None:
        self._holder = None
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    def fail(self, error: BaseException) -> None:
        """Everybody who waits for a turn gets the error."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_exception(error)
