"""A store whose commits settle when the test says, whose reads are counted, held and failed; a clock by hand."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from perdure.kernel.errors import StorageError
from perdure.kernel.storage import Batch
from perdure.storage.memory import MemoryStorage

PATIENCE = 60
"""Seconds that a store holds commits before it refuses them."""

TURNS = 20
"""Enough turns of the event loop for everything that a test set in motion to come to rest."""

_READS = {"conversation", "entry", "submission", "task", "request", "lineage", "entries", "head"}
_SCANS = {"conversations", "tasks", "submissions", "documents", "document", "mail"}


async def rest() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class HeldStorage(MemoryStorage):
    """MemoryStorage under the test's control. ``hold()`` from when on commits wait for ``settle()`` or ``refuse()``."""

    def __init__(self) -> None:
        super().__init__()
        self.held: deque[tuple[Batch, asyncio.Future[None]]] = deque()
        self.reads: Counter[str] = Counter()
        self.documents_read: Counter[str] = Counter()
        """By kind."""
        self.batches: list[Batch] = []
        """Every commit handed over, settled or not."""
        self.closes = 0
        self.read_gate: asyncio.Event | None = None
        """What reads wait for before they read."""
        self.late_gate: asyncio.Event | None = None
        """What reads wait for once they have read, like an answer that is long on its way."""
        self.lazy = False
        """Every read takes a turn of the event loop."""
        self.read_error: Exception | None = None
        self._holding = False
        self._refusal: Exception | None = None
        self._patience: asyncio.TimerHandle | None = None

    def hold(self) -> None:
        self._holding = True
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE, self._give_up)

    def _give_up(self) -> None:
        """A test that fails with commits held would wait for them for ever."""
        self._refuse(StorageError("held for too long"))

    async def settle(self, count: int | None = None) -> None:
        """Let the oldest ``count`` held commits (None: all, and no longer hold) settle, and come to rest."""
        if count is None:
            self._holding = False
            count = len(self.held)
        for _ in range(count):
            batch, future = self.held.popleft()
            super().commit(batch).add_done_callback(_passing_on(future))
        await rest()

    async def refuse(self, error: Exception | None = None) -> Exception:
        """Refuse the oldest held commit, and every later one, with an error, which is returned."""
        refusal = error or StorageError("the disk is full")
        self._refuse(refusal)
        await rest()
        return refusal

    def _refuse(self, error: Exception) -> None:
        self._refusal = error
        while self.held:
            _, future = self.held.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        self.batches.append(batch)
        if not self._holding and self._refusal is None:
            return super().commit(batch)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._refusal is None:
            self.held.append((batch, future))
        else:
            future.set_exception(self._refusal)
        return future

    async def close(self) -> None:
        self.closes += 1
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        await super().close()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._counted(name, value) if name in _READS | _SCANS else value

    def _counted(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(*args: Any, **options: Any) -> Any:
            self.reads[name] += 1
            if name == "document":
                self.documents_read[args[0].kind] += 1
            if self.read_gate is not None:
                await self.read_gate.wait()
            if self.read_error is not None:
                raise self.read_error
            if self.lazy:
                await asyncio.sleep(0)
            late_gate = self.late_gate
            found = await read(*args, **options)
            if late_gate is not None:
                await late_gate.wait()
            return found

        return counted


def _passing_on(outer: asyncio.Future[None]) -> Callable[[asyncio.Future[None]], None]:
    def done(inner: asyncio.Future[None]) -> None:
        error = inner.exception()
        if error is None:
            outer.set_result(None)
        else:
            outer.set_exception(error)

    return done


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def wall(self) -> int:
        return 1_700_000_000_000 + round(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("the kernel does not sleep")
