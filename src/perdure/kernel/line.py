"""The mutation line: one transaction at a time, in the order they asked (rules K41, K56 and K57)."""

from __future__ import annotations

import asyncio
from collections import deque

from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import InsideTransaction


class Line:
    """A fair lock that knows which transaction holds it, and in which asyncio task."""

    def __init__(self) -> None:
        self._busy = False
        """Held, or handed to a waiter that has not run yet."""
        self._owner: object = None
        self._holder: asyncio.Task[object] | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()

    def check_outside(self) -> None:
        """Raise InsideTransaction when the calling task is inside its own open transaction."""
        if self._holder is not None and self._holder is asyncio.current_task():
            raise InsideTransaction(
                "a session call was awaited inside this task's own open transaction; use the transaction's methods, "
                "or leave the block first"
            )

    async def acquire(self, owner: object, context: Context | None) -> None:
        """Wait for the turn of ``owner``, a transaction. Raises InsideTransaction, what ``seal`` says, what the context
        says."""
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
        self._owner = owner
        self._holder = asyncio.current_task()

    def release(self, owner: object) -> None:
        """The turn is over, unless it was taken away before (``seal``)."""
        if self._owner is owner:
            self._owner = self._holder = None
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    def seal(self, error: BaseException) -> None:
        """The session admits nothing more. Everybody who waits for a turn gets the error; who has it loses it, since
        its block can commit nothing and may not end soon: what the close itself writes does not wait for it."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_exception(error)
        if self._owner is not None:
            self.release(self._owner)
