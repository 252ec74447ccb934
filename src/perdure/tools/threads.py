"""Blocking calls in threads of their own kind, which are over when the awaiting task goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few threads beside the event loop's own pool, so that what hangs there does not hold up what works
    here."""

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"perdure-{name}")

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it in a thread. Cancelled before it began, it never runs; else the cancellation waits for its
        end."""
        job = self._pool.submit(function, *args, **kwargs)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not job.cancel() and not future.done():
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:
                    continue
            if future.done() and not future.cancelled():
                future.exception()  # Seen: the caller gets the cancellation.
            raise
