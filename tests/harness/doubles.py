"""A clock that tests move by hand."""

from __future__ import annotations

import asyncio

TURNS = 50
"""Enough turns of the event loop for everything that a test set in motion to come to rest."""


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def wall(self) -> int:
        return 1_700_000_000_000 + round(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, future))
        await future

    @property
    def sleeping(self) -> int:
        return sum(not future.done() for _, future in self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Move on and let all that this wakes come to rest."""
        self.now += seconds
        for due, future in list(self._sleepers):
            if due <= self.now + 1e-9 and not future.done():
                future.set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
