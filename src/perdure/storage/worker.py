"""One thread for blocking calls, run in the order they were handed over, so that the event loop never waits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from perdure.kernel.errors import StorageError

T = TypeVar("T")


class Worker:
    """A thread and its queue. Every job has someone waiting for it, which bounds the queue by the callers."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._process = os.getpid()
        # A daemon: a program that ends without closing its stores must end, as if it had crashed.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` in its turn. It must not raise."""
        if os.getpid() != self._process:
            raise StorageError(f"process {self._process} opened this store; a fork of it must open its own")
        self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``function`` in its turn; the future, of the running loop, gets what it returns or raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            if future.cancelled():
                return
            try:
                value = function()
            except BaseException as error:  # whatever it is, it belongs to the caller, not to this thread
                tell(loop, _fail, future, error)
            else:
                tell(loop, _finish, future, value)

        self.post(job)
        return future

    def stop(self) -> None:
        """End the thread once what is queued has run."""
        self._jobs.put(None)

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            job()


async def finish(future: asyncio.Future[T]) -> T:
    """Wait for something that must run to its end even if the caller is cancelled, which it learns afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # looked at, so that nobody warns of it
        raise cancelled
    return future.result()


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Call back on the loop; if the loop has been closed, nobody waits any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


def _finish(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
