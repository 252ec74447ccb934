"""Callers that wait for tasks to end or for a scope to be idle. Cancelling a wait cancels only that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from perdure.kernel.context import Context, bounded

T = TypeVar("T")


class _Wait(Generic[T]):
    __slots__ = ("check", "future")

    def __init__(self, check: Callable[[], T | None]) -> None:
        self.check = check
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def look(self) -> None:
        if self.future.done():
            return
        try:
            value = self.check()
        except Exception as error:
            self.future.set_exception(error)
            return
        if value is not None:
            self.future.set_result(value)


class Waits:
    """Each wait is a check: a value ends it, an error it raises ends it with that, None goes on waiting."""

    def __init__(self) -> None:
        self._of_task: dict[int, dict[_Wait[object], None]] = {}
        self._of_scope: dict[_Wait[object], None] = {}
        self._failure: BaseException | None = None

    async def until(self, check: Callable[[], T | None], *, task: int | None, context: Context | None) -> T:
        """Wait until ``check`` says so: looked at when ``task`` ends (None: when any does), and at every stir()."""
        if context is not None:
            context.check()
        value = check()
        if value is not None:
            return value
        if self._failure is not None:
            raise self._failure
        wait = _Wait(check)
        waits: dict[_Wait[object], None] = self._of_scope if task is None else self._of_task.setdefault(task, {})
        waits[wait] = None  # pyright: ignore[reportArgumentType]  # kept only to be looked at
        try:
            return await bounded(wait.future, context)
        finally:
            if wait.future.done() and not wait.future.cancelled():
                wait.future.exception()  # seen, or of no interest any more
            waits.pop(wait, None)  # pyright: ignore[reportArgumentType, reportCallIssue]
            if task is not None and not waits:
                self._of_task.pop(task, None)

    def ended(self, tasks: Iterable[int]) -> None:
        """These tasks are terminal, in a settled commit."""
        for task in tasks:
            for wait in list(self._of_task.get(task, ())):
                wait.look()
        for wait in list(self._of_scope):
            wait.look()

    def stir(self) -> None:
        """Something else changed that waits look at: work became blocked, or code did not stop."""
        for wait in self._everyone():
            wait.look()

    def fail(self, error: BaseException) -> None:
        """Everybody who waits, or will, gets the error."""
        self._failure = self._failure or error
        for wait in self._everyone():
            if not wait.future.done():
                wait.future.set_exception(error)

    def _everyone(self) -> list[_Wait[object]]:
        return [*self._of_scope, *(wait for waits in self._of_task.values() for wait in waits)]
