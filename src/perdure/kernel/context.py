"""A caller's Context: until when it waits, whether it still wants to, and the values it carries (rules K88
to K93).

Python's own cancellation and ``asyncio.timeout()`` work everywhere besides. A Context bounds a wait; it never
cancels durable work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import TypeVar

from perdure.kernel.errors import ContextCancelled, ContextDeadline

T = TypeVar("T")


class Context:
    """Immutable but for its cancellation. ``deadline`` is in the event loop's seconds (``loop.time()``)."""

    __slots__ = ("_callbacks", "_cancelled", "_parent", "deadline", "values")

    def __init__(
        self,
        *,
        deadline: float | None = None,
        values: Mapping[str, object] | None = None,
        parent: Context | None = None,
    ) -> None:
        inherited: Mapping[str, object] = {} if parent is None else parent.values
        self.values: Mapping[str, object] = MappingProxyType({**inherited, **(values or {})})
        bounds = [d for d in (deadline, parent.deadline if parent is not None else None) if d is not None]
        self.deadline = min(bounds) if bounds else None
        self._parent = parent
        self._cancelled: str | None = None
        self._callbacks: dict[object, Callable[[], None]] = {}

    def child(self, *, timeout: float | None = None, values: Mapping[str, object] | None = None) -> Context:
        """A context bounded by this one, with its own cancellation; ``timeout`` in seconds from now."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        return Context(deadline=deadline, values=values, parent=self)

    def cancel(self, reason: str = "cancelled by its caller") -> None:
        """Cancel every wait bounded by this context or a child of it."""
        if self._cancelled is None:
            self._cancelled = reason
            for callback in list(self._callbacks.values()):
                callback()

    @property
    def cancelled(self) -> str | None:
        """Why it was cancelled, or None."""
        if self._cancelled is not None or self._parent is None:
            return self._cancelled
        return self._parent.cancelled

    @property
    def ended(self) -> bool:
        """Whether it was cancelled or its deadline passed."""
        if self.cancelled is not None:
            return True
        return self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline

    def error(self) -> ContextCancelled | ContextDeadline:
        """What a wait that this context ended raises."""
        reason = self.cancelled
        return ContextDeadline("the context's deadline passed") if reason is None else ContextCancelled(reason)

    def check(self) -> None:
        """Raise ContextCancelled or ContextDeadline if this context no longer wants anything."""
        if self.ended:
            raise self.error()

    def _watch(self, key: object, callback: Callable[[], None]) -> None:
        context: Context | None = self
        while context is not None:
            context._callbacks[key] = callback
            context = context._parent

    def _unwatch(self, key: object) -> None:
        context: Context | None = self
        while context is not None:
            context._callbacks.pop(key, None)
            context = context._parent


class _Background(Context):
    __slots__ = ()

    def cancel(self, reason: str = "") -> None:
        raise RuntimeError("BACKGROUND never cancels; make a child() and cancel that")

    def _watch(self, key: object, callback: Callable[[], None]) -> None:
        return

    def _unwatch(self, key: object) -> None:
        return


BACKGROUND: Context = _Background()
"""Never cancels, has no deadline, carries no values."""


async def bounded(awaitable: Awaitable[T], context: Context | None) -> T:
    """Await within a context. When the context ends first, the awaitable is cancelled and the context's error raised.

    Pass only waits here (something whose cancellation cancels nothing durable). Cancelling the caller's own task is
    delivered as that, also when the context ends at the same time.
    """
    if context is None or context is BACKGROUND:
        return await awaitable
    if context.ended:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise context.error()
    future = asyncio.ensure_future(awaitable)
    task = asyncio.current_task()
    cancels = 0 if task is None else task.cancelling()
    expired = False

    def end() -> None:
        nonlocal expired
        if not future.done():
            expired = True
            future.cancel()

    loop = asyncio.get_running_loop()
    timer = None if context.deadline is None else loop.call_at(context.deadline, end)
    context._watch(future, end)  # pyright: ignore[reportPrivateUsage]
    try:
        return await future
    except asyncio.CancelledError:
        if expired and (task is None or task.cancelling() == cancels):
            raise context.error() from None  # a timer may come a little before its time, so nothing is checked again
        raise
    finally:
        if timer is not None:
            timer.cancel()
        context._unwatch(future)  # pyright: ignore[reportPrivateUsage]
        if not future.done():
            future.cancel()
