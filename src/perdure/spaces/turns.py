"""Whose turn it is in a Space: one call that may change something, or any number that only read (rule S146)."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiting:
    id: int
    shared: bool
    turn: asyncio.Future[None]


class Turns:
    """In the order of asking; whoever only reads does not overtake a change that waits."""

    def __init__(self) -> None:
        self._changing: int | None = None
        self._reading: set[int] = set()
        self._waiting: deque[_Waiting] = deque()

    async def take(self, id: int, *, shared: bool) -> None:
        """Wait for a turn. Cancelled, it has none."""
        waiting = _Waiting(id, shared, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._go_on()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            self.give(id)
            raise

    def has(self, id: int) -> bool:
        return self._changing == id or id in self._reading

    def alone(self, id: int) -> bool:
        """Whether it has the turn of one that may change something."""
        return self._changing == id

    def give(self, id: int) -> None:
        """The turn is over; nothing happens if there was none."""
        if self._changing == id:
            self._changing = None
        self._reading.discard(id)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._changing is None:
            first = self._waiting[0]
            if first.turn.cancelled():
                self._waiting.popleft()  # it does not know yet
                continue
            if not first.shared and self._reading:
                return
            self._waiting.popleft()
            if first.shared:
                self._reading.add(first.id)
            else:
                self._changing = first.id
            first.turn.set_result(None)
