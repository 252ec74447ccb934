"""What an attempt costs: its price is asked once, before the commit that counts it (rule H158).

A table of prices is code of others. One that raises, blocks, or says what is no price costs the attempt its price,
and nothing else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from decimal import ROUND_HALF_EVEN, Context, Decimal
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Final, TypeAlias

from msgspec.structs import replace
from typing_extensions import ParamSpec, TypeVar, override

from perdure.harness.messages import Usage
from perdure.harness.model import Models, Price, Priced
from perdure.harness.usage import Attempt
from perdure.kernel.reports import Report
from perdure.kernel.session import Session

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE: Final = 5.0
"""Seconds a lookup may take."""
MOST_DOLLARS: Final = 10_000
"""What one attempt may cost; more is a mistake of the table. A total of a million such still fits its 64 bits."""
MOST_WAITING: Final = 4
"""Threads kept for the next lookup. Starting one takes more than most lookups do."""
UNTOLD: Final = Usage()
"""Every request takes tokens: none means that the provider did not tell."""
_Queue: TypeAlias = "SimpleQueue[Callable[[Callable[[], None]], None]]"
"""Calls, each given what says that its thread is free again."""
_EXACT: Final = Context(prec=60, rounding=ROUND_HALF_EVEN, traps=[])


class Costs:
    """The prices of one harness."""

    def __init__(self, session: Session, models: Models | None) -> None:
        self._session = session
        self._price: Price | None = models.price if isinstance(models, Priced) else None
        self._reported = False
        """Only the first failure is told: a table that fails once may fail at every attempt."""

    async def priced(self, attempt: Attempt) -> Attempt:
        """The attempt with its cost, as far as it is known."""
        price, usage = self._price, attempt.usage
        if price is None or usage is None or usage == UNTOLD:
            return attempt

        def look_up() -> Decimal | _Raised | None:
            try:
                return price(attempt.model, usage, at=attempt.at)
            except BaseException as error:  # whatever it is, it belongs to the table
                return _Raised(error)

        found = await self._in_time(look_up)
        if found is None:
            return attempt
        if isinstance(found, _Raised):
            self._report("the lookup of a price raised; the attempt counts as unpriced", found.error)
            return attempt
        wrong = _no_price(found)
        if wrong is not None:
            self._report(f"the price of an attempt is a Decimal of US dollars, not {wrong}")
            return attempt
        return replace(attempt, cost=int(_EXACT.to_integral_value(_EXACT.scaleb(found, 9))))

    async def _in_time(self, look_up: Callable[[], Decimal | _Raised | None]) -> Decimal | _Raised | None:
        try:
            asked = asyncio.get_running_loop().run_in_executor(_THREADS, look_up)
        except RuntimeError as error:  # no more threads
            return _Raised(error)
        timer = asyncio.ensure_future(self._session.clock.sleep(PATIENCE))
        try:
            await asyncio.wait((asked, timer), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            timer.cancel()
            asked.cancel()
        if self._price is not None:
            # Its thread cannot be stopped, and the next one would be lost too. This is told whatever was told before.
            self._price = None
            self._reported = False
            self._report(f"the lookup of a price took more than {PATIENCE:g} s; none is asked any more")
        return None

    def _report(self, message: str, error: BaseException | None = None) -> None:
        if not self._reported:
            self._reported = True
            self._session.report(Report(type="price_lookup_failed", message=message, error=error))


class _Raised:
    """What a lookup raised, as a value: no future carries every exception."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _no_price(found: object) -> str | None:
    """What is wrong with it. Tables are typed by their authors, if at all."""
    if not isinstance(found, Decimal):
        return f"a {type(found).__name__}"
    if not found.is_finite() or found < 0 or found > MOST_DOLLARS:
        return "one that is negative, not finite, or larger than any attempt may cost"
    return None


class _Threads(Executor):
    """A thread a call under way: one that waits for work, else a new one. All harnesses share them.

    They are daemons, unlike asyncio's own, so that one that hangs does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[_Queue] = []

    def forget(self) -> None:
        """A process that was forked off has none of the threads of the other."""
        self.__init__()

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """``fn`` must not raise."""
        future: Future[T] = Future()

        def run(free: Callable[[], None]) -> None:
            if future.set_running_or_notify_cancel():
                result = fn(*args, **kwargs)
                free()  # before the next call can come
                future.set_result(result)
            else:
                free()

        with self._lock:
            found = self._waiting.pop() if self._waiting else None
        queue: _Queue = SimpleQueue() if found is None else found
        if found is None:
            Thread(target=self._work, args=(queue,), name="perdure-price", daemon=True).start()
        queue.put(run)
        return future

    def _work(self, queue: _Queue) -> None:
        kept = True

        def free() -> None:
            nonlocal kept
            with self._lock:
                kept = len(self._waiting) < MOST_WAITING
                if kept:
                    self._waiting.append(queue)

        while kept:
            queue.get()(free)


_THREADS: Final = _Threads()
os.register_at_fork(after_in_child=_THREADS.forget)
