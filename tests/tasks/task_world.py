"""A store, a clock and a runtime for scenarios: opened, closed, crashed and opened again."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from perdure.kernel.records import Outcome, TaskRecord
from perdure.kernel.reports import Report
from perdure.kernel.session import CloseReport, Session
from perdure.storage.memory import MemoryStorage
from perdure.tasks import Task, TaskRegistry, TaskRuntime

ROOT = 1
START = 1_000_000
"""What the clock shows at first, in ms."""


class FakeClock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = START
        self.elapsed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0
        self.hurried = False

    def wall(self) -> int:
        return self.now

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        if self.hurried:
            await asyncio.sleep(0)
            return
        self._count += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.elapsed + seconds, self._count, future))
        await future

    @property
    def sleeping(self) -> int:
        """How many sleep, those that were cancelled left out."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def advance(self, ms: int) -> None:
        """Let time pass, waking sleepers in order, and let what they do come to rest."""
        end = self.elapsed + ms / 1000
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            at, _, future = heapq.heappop(self._sleepers)
            if future.done():
                continue
            self.now += round((at - self.elapsed) * 1000)
            self.elapsed = at
            future.set_result(None)
            await settle()
        self.now += round((end - self.elapsed) * 1000)
        self.elapsed = end
        await settle()


async def settle() -> None:
    """Let everything that can go on without time or outside help go on: commits settle, phases run."""
    for _ in range(60):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("what the test waits for never came")


class World:
    """Everything that outlives a session, and the session that is open now."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.clock = FakeClock()
        self.reports: list[Report] = []
        self.registry = TaskRegistry()
        self.closed: CloseReport | None = None
        self.session: Session
        self.runtime: TaskRuntime

    async def start(self, *tasks: Any, resume: bool = True, **options: int) -> None:
        """Open the store with this code; the root conversation is created if it is new."""
        self.session = await Session.start(self.storage, clock=self.clock, on_report=self.reports.append)
        self.registry = TaskRegistry()
        self.registry.install(*tasks)
        self.runtime = TaskRuntime(self.session, self.registry, **options)
        await self.runtime.recover()
        if await self.session.conversation(ROOT) is None:
            async with self.session.commit() as tx:
                tx.create_conversation(owner=None, root=True)
        if resume:
            self.runtime.resume()

    async def stop(self) -> CloseReport:
        self.closed = await self.session.close()
        return self.closed

    async def crash(self) -> None:
        """As if the process ended now: only what has settled is there for the next start."""
        self.storage = self.storage.snapshot()
        self.session.fail(ConnectionError("the test's crash"))
        assert self.session._closed is not None
        await self.session._closed

    @asynccontextmanager
    async def open(self, *tasks: Any, resume: bool = True, **options: int) -> AsyncIterator[World]:
        """Opened for the block; closed after it, unless the block crashed it."""
        await self.start(*tasks, resume=resume, **options)
        session = self.session
        try:
            yield self
        except BaseException:
            self.clock.hurried = True  # a test that failed waits for no drain bound
            raise
        finally:
            if session.failed is None:
                self.closed = await session.close()

    async def create(
        self,
        kind: type[Task[Any, Any]],
        input: object = None,
        *,
        owner: int | None = None,
        conversation: int = ROOT,
        background: bool = False,
    ) -> int:
        async with self.session.commit() as tx:
            record = tx.create_task(kind, input, owner=owner, conversation=conversation, background=background)
        return record.id

    async def conversation(self, owner: int | None) -> int:
        async with self.session.commit() as tx:
            record = tx.create_conversation(owner=owner)
        return record.id

    async def task(self, id: int) -> TaskRecord:
        record = await self.session.task(id)
        assert record is not None
        return record

    async def status(self, id: int) -> str:
        return (await self.task(id)).status

    async def outcome(self, id: int) -> Outcome | None:
        return (await self.task(id)).outcome

    def reported(self, type: str) -> list[Report]:
        return [report for report in self.reports if report.type == type]
