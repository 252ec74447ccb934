"""When sleeping tasks and deadlines are due, on the session's clock (rules T21, T22)."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any

from perdure.kernel.clock import Clock
from perdure.kernel.records import Sleeping, TaskRecord, Waiting

MAX_NAP = 60.0
"""Seconds after which the wall clock is looked at again, since it may have been set."""
FEW = 1_000
"""Entries kept without asking whether they still stand."""


def due_at(record: TaskRecord) -> int | None:
    """When a sleeping task, or one that waits with a deadline, is due; None for any other."""
    state = record.state
    if isinstance(state, Sleeping):
        return state.until
    return state.deadline if isinstance(state, Waiting) else None


class Alarm:
    """Sleeps until the earliest is due, then names all that are. One asyncio task, and none while nothing sleeps."""

    def __init__(
        self,
        clock: Clock,
        *,
        look: Callable[[int], TaskRecord | None],
        fire: Callable[[list[int]], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._clock = clock
        self._look = look
        self._fire = fire
        self._spawn = spawn
        self._heap: list[tuple[int, int]] = []
        self._compacted = 0
        self._on = False
        self._sleeper: asyncio.Task[None] | None = None
        self._until = 0

    def set(self, record: TaskRecord) -> None:
        """Note when the record is due, if it ever is."""
        at = due_at(record)
        if at is None:
            return
        if len(self._heap) > FEW + 2 * self._compacted:
            self._heap = [entry for entry in self._heap if self._stands(*entry)]
            heapq.heapify(self._heap)
            self._compacted = len(self._heap)
        heapq.heappush(self._heap, (at, record.id))
        if self._on and (self._sleeper is None or at < self._until):
            self._restart()

    def start(self) -> None:
        if not self._on:
            self._on = True
            self._restart()

    def stop(self) -> None:
        self._on = False
        if self._sleeper is not None:
            self._sleeper.cancel()
            self._sleeper = None

    def earliest(self) -> int | None:
        """The earliest time anything is due."""
        while self._heap and not self._stands(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _stands(self, at: int, id: int) -> bool:
        record = self._look(id)
        return record is not None and due_at(record) == at

    def _restart(self) -> None:
        if self._sleeper is not None:
            self._sleeper.cancel()
            self._sleeper = None
        if self.earliest() is not None:
            self._until = self._heap[0][0]
            self._sleeper = self._spawn(self._sleep(), "perdure task alarm")

    async def _sleep(self) -> None:
        while (at := self.earliest()) is not None:
            self._until = at
            now = self._clock.wall()
            if at > now:
                await self._clock.sleep(min((at - now) / 1000, MAX_NAP))
                continue
            due: list[int] = []
            while self._heap and self._heap[0][0] <= now:
                due.append(heapq.heappop(self._heap)[1])
            self._fire(due)
        self._sleeper = None
