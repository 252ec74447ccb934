"""Group commit: batches are encoded on the event loop, and written on one other thread by as many at a time as wait.

Whatever is handed over while one group is being flushed goes into the next, so a flush is shared by everybody who
waited for it. One failed group fails the writer for good, with the first cause.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from perdure.kernel.errors import StorageError
from perdure.kernel.storage import Batch, StoreInfo
from perdure.storage.rules import MAX_PENDING, check_batch
from perdure.storage.worker import Worker, tell

MAX_GROUP = 256
"""Commits in one group."""

MAX_GROUP_BYTES = 4 << 20
"""A group takes no further commit once its records have this size."""


class Prepared(Protocol):
    """One batch, encoded."""

    @property
    def seq(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes of its records."""
        ...

    @property
    def deleted(self) -> Sequence[int]: ...
    @property
    def future(self) -> asyncio.Future[None]: ...


P = TypeVar("P", bound=Prepared)


class GroupWriter(ABC, Generic[P]):
    """What writes to an open store, with one thread to do it on. A backend says how in the abstract methods."""

    def __init__(self, path: str, worker: Worker, opening: StoreInfo) -> None:
        self._path = path
        self._worker = worker
        self._opening = opening
        self._loop = asyncio.get_running_loop()
        # Of the event loop: what was handed over, what has settled, why nothing more is taken.
        self._seq = opening.seq
        self._next_id = opening.next_id
        self._settled_seq = opening.seq
        self._settling = self._loop.create_future()
        self._refusal: BaseException | None = None
        self._over = False
        # Of the thread, but for the queue, which it empties and the event loop fills.
        self._waiting: deque[P] = deque()
        self._failure: StorageError | None = None

    # --- what a backend does -----------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, batch: Batch, future: asyncio.Future[None]) -> P:
        """On the event loop: encode a batch."""
        ...

    @abstractmethod
    def _store(self, group: list[P]) -> int:
        """On the thread: write a group, or its first commits, and tell how many. If it raises, none is stored."""
        ...

    @abstractmethod
    def _superseded(self, seq: int) -> StorageError:
        """On the thread: why the store is not as this writer left it; ``seq`` is the commit that shows it."""
        ...

    def _after_group(self) -> None:
        """On the thread: what is due once a group is stored and told. An error fails the writer."""

    @abstractmethod
    def _explained(self, error: BaseException, doing: str) -> StorageError: ...

    # --- on the event loop -----------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        """Encode a batch and queue it. What is wrong with it, or was with an earlier one, its future tells."""
        future = self._loop.create_future()
        try:
            if self._refusal is not None:
                raise self._refusal
            if len(self._waiting) >= MAX_PENDING:
                raise StorageError(f"{self._path}: {MAX_PENDING} commits are waiting already")
            check_batch(batch, seq=self._seq, next_id=self._next_id)
            commit = self._prepare(batch, future)
        except (StorageError, msgspec.MsgspecError, OverflowError) as error:
            # Nothing that comes later is taken; and it fails in its turn, after what was handed over before it.
            refusal = self._refusal = self._explained(error, "written to")
            self._worker.post(lambda: self._refuse(future, refusal))
            return future
        self._seq = batch.seq
        self._next_id = batch.next_id
        self._waiting.append(commit)
        self._worker.post(self._write_group)
        return future

    async def settled(self, seq: int) -> None:
        """Wait until commit ``seq``, which a reader has seen stored, is settled for everybody here (rule K61).

        Raises StaleEpochError if it is nobody's here: another writer stored it, and it would never settle.
        """
        if seq > self._seq:
            raise await self._worker.call(lambda: self._superseded(seq))
        while seq > self._settled_seq and not self._over:
            await asyncio.wait([self._settling])

    def _end(self, futures: list[asyncio.Future[None]], seq: int | None, failure: StorageError | None) -> None:
        if failure is not None:
            self._refusal = self._refusal or failure
        for future in futures:
            if future.done():
                continue  # its caller was cancelled; the commit stands or falls all the same
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
                future.exception()  # the session that fails on the first need not look at every later one
        # After the futures' callbacks, which publish these commits: a reader that saw one goes on only then.
        self._loop.call_soon(self._let_read, seq, failure is not None)

    def _let_read(self, seq: int | None, over: bool) -> None:
        if seq is not None:
            self._settled_seq = seq
        self._over = self._over or over
        self._settling.set_result(None)
        self._settling = self._loop.create_future()

    # --- on the thread ---------------------------------------------------------------------------------------

    def _refuse(self, future: asyncio.Future[None], refusal: StorageError) -> None:
        self._failure = self._failure or refusal
        tell(self._loop, self._end, [future], None, self._failure)

    def _write_group(self) -> None:
        """Write what waits. Called once a commit, so mostly for nothing under load."""
        waiting = self._waiting
        if not waiting:
            return
        group = [waiting.popleft()]
        size = group[0].size
        while waiting and len(group) < MAX_GROUP and size + waiting[0].size <= MAX_GROUP_BYTES:
            if group[-1].deleted:
                break  # what comes after a deletion is written after it
            size += waiting[0].size
            group.append(waiting.popleft())
        if self._failure is None:
            try:
                stored = self._store(group)
                if stored < len(group):
                    waiting.extendleft(reversed(group[stored:]))
                    del group[stored:]
                    self._worker.post(self._write_group)
            except BaseException as error:  # whatever it is: it fails this writer, and its callers must hear of it
                self._failure = self._explained(error, "written to")
        futures = [commit.future for commit in group]
        if self._failure is not None:
            tell(self._loop, self._end, futures, None, self._failure)
            return
        tell(self._loop, self._end, futures, group[-1].seq, None)
        try:
            self._after_group()
        except BaseException as error:  # as above; the next commit tells
            self._failure = self._explained(error, "written to")
