"""The mutation line: one transaction at a time, in the order they asked (rules K41, K56 and K57)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from perdure.kernel.context import Context, bounded
from perdure.kernel.errors import InsideTransaction


class Line:
    """A fair lock that knows which transaction holds it, and in which asyncio task."""

    def __init__(self, bound: float, on_slow: Callable[[object], None]) -> None:
        """``on_slow`` is called with a transaction that holds the line longer than ``bound`` seconds (rule K58)."""
        self._loop = asyncio.get_running_loop()
        self._bound = bound
        self._on_slow = on_slow
        self._since = 0.0
        """Since when it is held, in the event loop's time."""
        self._watchdog: asyncio.TimerHandle | None = None
        """One timer looks after many transactions: setting one for each costs what a tenth of a commit does."""
        self._busy = False
        """Held, or handed to a waiter that has not run yet."""
        self._owner: object = None
        self._holder: asyncio.Task[object] | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()

    def check_outside(self) -> None:
        """Raise InsideTransaction when the calling task is inside its own open transaction, and RuntimeError in another
        event loop than the session's, where a wait would never end (rule K208)."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "a session is called in the event loop that opened it; from another thread use "
                "asyncio.run_coroutine_threadsafe(call, loop_of_the_session)"
            )
        if self._holder is not None and self._holder is asyncio.current_task():
            raise InsideTransaction(
                "a session call was awaited inside this task's own open transaction; use the transaction's methods, "
                "or leave the block first"
            )

    def take(self, owner: object) -> bool:
        """The turn of ``owner``, a transaction, unless another has it: then ``wait``. Raises InsideTransaction."""
        self.check_outside()
        if self._busy:
            return False
        self._busy = True
        self._hold(owner)
        return True

    async def wait(self, owner: object, context: Context | None) -> None:
        """Wait for the turn. Raises what ``seal`` says, what the context says."""
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
        self._hold(owner)

    def _hold(self, owner: object) -> None:
        loop = asyncio.get_running_loop()
        self._owner = owner
        self._holder = asyncio.current_task(loop)
        self._since = loop.time()
        if self._watchdog is None:
            self._watchdog = loop.call_later(self._bound, self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        owner = self._owner
        if owner is None:
            return  # whoever takes it next sets the watchdog again, as after a report
        loop = asyncio.get_running_loop()
        due = self._since + self._bound
        if loop.time() >= due:
            self._on_slow(owner)
        else:
            self._watchdog = loop.call_at(due, self._watch)

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

    def stop(self) -> None:
        """Nobody takes it any more."""
        if self._watchdog is not None:
            self._watchdog.cancel()
