"""A store that dies, fails or dawdles at a chosen commit, around a store that can be copied as a crash leaves it
(rules P3 and P5).

Every commit has two edges that a kill may hit: nobody has heard of it yet, though it is stored (``after:3``), or
everything up to handing over the next one has happened, and that one is lost (``before:4``).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, cast, get_args

from typing_extensions import override

from perdure.kernel.errors import StorageError
from perdure.kernel.records import (
    Address,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    SubmissionRecord,
    SubmissionStatus,
    TaskRecord,
)
from perdure.kernel.storage import (
    ANY,
    MAX_SCAN,
    VACUUM_MS,
    Anything,
    Batch,
    Mail,
    Order,
    Segment,
    SizeReport,
    Storage,
    StoredContent,
    StoredDocument,
    StoreInfo,
    VacuumReport,
)

R = TypeVar("R")

LONGEST_DELAY = 0.2
"""Virtual seconds that a dawdling store takes at most for a commit."""


class CrashableStorage(Storage, Protocol):
    """A store whose state after a crash can be had without one. It must start no threads."""

    def snapshot(self) -> CrashableStorage:
        """The store as a crash now would leave it, for another process to open."""
        ...


FaultKind: TypeAlias = Literal["after", "before", "step", "fail", "unacknowledged", "read"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What ends one life of the process, and where. Written ``after:3``, or ``3`` for short.

    - ``after:n``: killed once commit n is stored, before anybody has heard of it; 0 is right after opening.
    - ``before:n``: killed as commit n is handed over; it is lost.
    - ``step:n``: killed before the n-th callback of the event loop.
    - ``fail:n``: commit n is refused with an error, and with it every later one; the process may see it end.
    - ``unacknowledged:n``: the same, but commit n is stored all the same.
    - ``read:n``: the n-th read fails.

    Commits, reads and steps count from 1, and from the beginning of each life.
    """

    kind: FaultKind
    n: int
    """Which commit, step or read."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        kind, _, n = text.strip().rpartition(":")
        if (kind or "after") not in get_args(FaultKind) or not n.isdigit():
            known = ", ".join(get_args(FaultKind))
            raise ValueError(f"{text!r} is no fault; write a commit's number, or KIND:N with a kind of {known}")
        return cls(cast("FaultKind", kind or "after"), int(n))

    @property
    def kills(self) -> bool:
        """Whether the process is killed, rather than left to see an error."""
        return self.kind in ("after", "before", "step")

    @override
    def __str__(self) -> str:
        return f"{self.kind}:{self.n}"


class InjectedError(StorageError):
    """A failure that the simulation asked for."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A commit that was handed over and has not settled."""

    n: int
    batch: Batch
    future: asyncio.Future[None]
    not_before: float


class FaultyStorage:
    """One process's view of a store. ``on_death`` is called when the fault is a kill and its point is reached.

    ``delay_seed``: each commit takes a while of virtual time, in order.
    """

    def __init__(
        self,
        inner: CrashableStorage,
        *,
        fault: Fault | None = None,
        delay_seed: str | None = None,
        on_death: Callable[[], None],
    ) -> None:
        self.inner = inner
        """The store itself, as another process would reach it."""
        self._fault = fault
        self._delays = None if delay_seed is None else random.Random(f"delay {delay_seed}")  # noqa: S311
        self._on_death = on_death
        self._dead = False
        self._broken: InjectedError | None = None
        self._waiting: deque[_Waiting] = deque()
        self._storing = False
        self._free_at = 0.0
        self._closed = False
        self.opened = False
        self.commits = 0
        """Handed over in this life."""
        self.reads = 0
        self.acknowledged = 0
        """The seq of the newest commit the process was told is stored."""
        self.reached = False
        """The fault has happened."""

    # --- opening and closing -----------------------------------------------------------------------------------

    async def open(
        self,
        *,
        read_only: bool = False,
        epoch: int | None = None,
        takeover: bool = False,
        writer: str,
        log_id: str,
        now: int,
    ) -> StoreInfo:
        info = await self.inner.open(
            read_only=read_only, epoch=epoch, takeover=takeover, writer=writer, log_id=log_id, now=now
        )
        self._closed = False
        self.opened = True
        self.acknowledged = info.seq
        if self._is("after", 0):
            self.die()
            await asyncio.get_running_loop().create_future()
        return info

    async def close(self) -> None:
        while self._waiting and not self._dead:
            await asyncio.wait([self._waiting[-1].future])
        if not self._dead and not self._closed:
            self._closed = True
            await self.inner.close()

    def snapshot(self) -> CrashableStorage:
        """The store as it is now, for the next life."""
        return self.inner.snapshot()

    def die(self) -> None:
        """From here on nothing settles, and nothing is told."""
        self._dead = True
        self.reached = True
        self._on_death()

    def _is(self, kind: FaultKind, n: int) -> bool:
        return self._fault == Fault(kind, n)

    # --- committing --------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._dead:
            return future
        self.commits += 1
        if self._is("before", self.commits):
            self.die()
            return future
        if self._delays is not None:
            self._free_at = max(self._free_at, loop.time()) + self._delays.random() * LONGEST_DELAY
        self._waiting.append(_Waiting(self.commits, batch, future, self._free_at))
        if not self._storing:
            self._storing = True
            self._schedule()
        return future

    def _schedule(self) -> None:
        """The next one in line: one at a time, so that nothing later is stored when this one is the last."""
        loop = asyncio.get_running_loop()
        wait = self._waiting[0].not_before
        if wait > loop.time():
            loop.call_at(wait, self._store)
        else:
            loop.call_soon(self._store)

    def _store(self) -> None:
        if self._dead:
            return
        commit = self._waiting[0]
        if self._is("fail", commit.n):
            self._broken = InjectedError(f"commit {commit.batch.seq} was refused, as the simulation asked")
            self.reached = True
        if self._broken is not None:
            self._settle(self._broken)
        else:
            self.inner.commit(commit.batch).add_done_callback(self._on_stored)

    def _on_stored(self, stored: asyncio.Future[None]) -> None:
        if self._dead:
            return
        commit = self._waiting[0]
        error = stored.exception()
        if error is None and self._is("after", commit.n):
            self.die()
            return
        if error is None and self._is("unacknowledged", commit.n):
            error = self._broken = InjectedError(f"commit {commit.batch.seq} is stored, but was not acknowledged")
            self.reached = True
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        commit = self._waiting.popleft()
        if error is None:
            self.acknowledged = commit.batch.seq
        if not commit.future.done():
            if error is None:
                commit.future.set_result(None)
            else:
                commit.future.set_exception(error)
                commit.future.exception()  # a session that failed on the first does not look at every later one
        if self._waiting:
            self._schedule()
        else:
            self._storing = False

    # --- reading -----------------------------------------------------------------------------------------------

    async def _reading(self, read: Coroutine[Any, Any, R]) -> R:
        if self._dead:
            read.close()
            await asyncio.get_running_loop().create_future()
        self.reads += 1
        if self._is("read", self.reads):
            self.reached = True
            read.close()
            raise InjectedError(f"read {self.reads} failed, as the simulation asked")
        return await read

    async def conversation(self, id: int) -> ConversationRecord | None:
        return await self._reading(self.inner.conversation(id))

    async def entry(self, id: int) -> EntryRecord | None:
        return await self._reading(self.inner.entry(id))

    async def submission(self, id: int) -> SubmissionRecord | None:
        return await self._reading(self.inner.submission(id))

    async def task(self, id: int) -> TaskRecord | None:
        return await self._reading(self.inner.task(id))

    async def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        return await self._reading(self.inner.request(conversation_id, request_id))

    async def lineage(self, conversation_id: int) -> tuple[Segment, ...]:
        return await self._reading(self.inner.lineage(conversation_id))

    async def closure(self, conversation_id: int) -> list[int]:
        return await self._reading(self.inner.closure(conversation_id))

    async def entries(
        self,
        lineage: Sequence[Segment],
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = MAX_SCAN,
    ) -> list[EntryRecord]:
        return await self._reading(self.inner.entries(lineage, first=first, last=last, order=order, limit=limit))

    async def head(self, lineage: Sequence[Segment], *, last: int | None = None) -> EntryRecord | None:
        return await self._reading(self.inner.head(lineage, last=last))

    async def conversations(
        self, *, owner: int | Anything | None = ANY, after: int = 0, limit: int = MAX_SCAN
    ) -> list[ConversationRecord]:
        return await self._reading(self.inner.conversations(owner=owner, after=after, limit=limit))

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[TaskRecord]:
        read = self.inner.tasks(conversation_id=conversation_id, kind=kind, live=live, after=after, limit=limit)
        return await self._reading(read)

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[SubmissionRecord]:
        read = self.inner.submissions(conversation_id=conversation_id, status=status, after=after, limit=limit)
        return await self._reading(read)

    async def documents(self, scope: str, scope_id: int, *, at: int | None = None) -> list[DocumentRecord]:
        return await self._reading(self.inner.documents(scope, scope_id, at=at))

    async def document(self, address: Address, *, at: int | None = None) -> StoredDocument | None:
        return await self._reading(self.inner.document(address, at=at))

    async def has_contents(self, digests: Sequence[str]) -> set[str]:
        return await self._reading(self.inner.has_contents(digests))

    async def contents(self, digests: Sequence[str]) -> dict[str, bytes]:
        return await self._reading(self.inner.contents(digests))

    async def content_scan(self, *, pinned: bool, after: str = "", limit: int = MAX_SCAN) -> list[StoredContent]:
        return await self._reading(self.inner.content_scan(pinned=pinned, after=after, limit=limit))

    async def content_pins(self, *, after: int = 0, limit: int = MAX_SCAN) -> list[int]:
        return await self._reading(self.inner.content_pins(after=after, limit=limit))

    async def mail(self, *, after: int = 0, limit: int = 100) -> list[Mail]:
        return await self._reading(self.inner.mail(after=after, limit=limit))

    def on_mail(self, callback: Callable[[], None]) -> None:
        self.inner.on_mail(callback)

    # --- upkeep ------------------------------------------------------------------------------------------------

    async def check(self) -> list[str]:
        return await self._reading(self.inner.check())

    async def size(self) -> SizeReport:
        return await self._reading(self.inner.size())

    async def vacuum(self, *, within_ms: int = VACUUM_MS) -> VacuumReport:
        return await self._reading(self.inner.vacuum(within_ms=within_ms))
