"""The session: one owner of one store. It orders transactions, stages them, and shows what has settled.

The commit path, top to bottom: ``commit()`` takes the mutation line (line.py); the block stages (transaction.py);
leaving it runs the derivations, hands one batch to storage and passes the line on (``stage``); storage settles batches
in order (``_on_stored``); only then do observers, watches and the block's own caller see the commit (``_publish``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from perdure.kernel import lineage as history
from perdure.kernel.clock import Clock, Entropy, SystemClock, SystemEntropy
from perdure.kernel.context import Context, bounded
from perdure.kernel.document import Document
from perdure.kernel.documents import (
    DocState,
    DocumentCache,
    DocumentChange,
    LoadedDocument,
    materialise,
    read_state,
)
from perdure.kernel.errors import NotFound, PerdureError, SessionClosed, SessionFailed, StorageError
from perdure.kernel.line import Line
from perdure.kernel.observation import NO_VALUES, Frame, Observer, Source, State, Watch
from perdure.kernel.records import (
    Address,
    ConversationRecord,
    EntryRecord,
    SubmissionRecord,
    SubmissionStatus,
    TaskRecord,
)
from perdure.kernel.reports import OnReport, Report, deliver
from perdure.kernel.storage import ANY, MAX_SCAN, Anything, Batch, Order, Segment, Storage, StoreInfo
from perdure.kernel.transaction import Derivation, Transaction, address_of

D = TypeVar("D", bound=Document)
T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")
Obs = TypeVar("Obs", bound=Observer[Any])
S = TypeVar("S", ConversationRecord, EntryRecord, SubmissionRecord, TaskRecord)

MAX_STAGED = 1000
"""Commits that may be staged and not settled; the next transaction waits for the oldest."""
KEPT_LINEAGES = 10_000
KEPT_CONVERSATIONS = 10_000


@dataclass(frozen=True, slots=True)
class Settled:
    """One commit that storage accepted, as observers see it."""

    seq: int
    at: int
    batch: Batch
    documents: tuple[DocumentChange, ...]
    values: Mapping[str, object]
    """What the committing context carried."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Code that did not stop within the drain bound."""

    name: str
    stack: str
    ended: asyncio.Future[object]
    """Done once it has returned after all."""


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What a close has to say."""

    seq: int
    stragglers: tuple[str, ...] = ()
    """Code that did not stop; the store stays owned by this process until it returns."""
    unreleased: tuple[str, ...] = ()
    """States and watches nobody released."""


@dataclass(slots=True)
class LiveTasks:
    """Every task that is not terminal, in memory: as of the settled commits, and with the staged ones."""

    settled: dict[int, TaskRecord] = field(default_factory=dict[int, TaskRecord])
    staged: dict[int, TaskRecord] = field(default_factory=dict[int, TaskRecord])


@dataclass(slots=True)
class StagedRecords:
    """Records of commits that storage has not settled yet: transactions see them, nobody else does."""

    conversations: dict[int, ConversationRecord] = field(default_factory=dict[int, ConversationRecord])
    entries: dict[int, EntryRecord] = field(default_factory=dict[int, EntryRecord])
    submissions: dict[int, SubmissionRecord] = field(default_factory=dict[int, SubmissionRecord])
    tasks: dict[int, TaskRecord] = field(default_factory=dict[int, TaskRecord])


@dataclass(slots=True)
class _Pending:
    """A staged commit on its way through storage."""

    settled: Settled
    states: list[tuple[LoadedDocument, DocState]]
    waiter: asyncio.Future[None]


class Session:
    """Open one with ``Session.open(storage)``; a Harness opens its own."""

    def __init__(
        self,
        storage: Storage,
        info: StoreInfo,
        *,
        clock: Clock,
        entropy: Entropy,
        on_report: OnReport | None,
        line_bound_ms: int,
        drain_ms: int,
        document_retention_ms: int,
    ) -> None:
        self.storage = storage
        self.info = info
        self.clock = clock
        self.entropy = entropy
        self.seq = info.seq
        self.next_id = info.next_id
        self.live = LiveTasks()
        self.staged = StagedRecords()
        self.open_submissions: dict[int, SubmissionRecord] = {}
        """Queued and placed submissions this session has seen, as of the staged commits."""
        self.documents = DocumentCache(storage.document, clock.monotonic, document_retention_ms / 1000)
        self.derivations: list[Derivation] = []
        self.failed: BaseException | None = None
        self.closing = False
        self.close_report: CloseReport | None = None
        self._on_report = on_report
        self._line = Line()
        self._line_bound = line_bound_ms / 1000
        self._line_timer: asyncio.TimerHandle | None = None
        self._drain_ms = drain_ms
        self._staged_seq = info.seq
        self._pending: deque[_Pending] = deque()
        self._last_staged: asyncio.Future[None] | None = None
        self._observers: list[Callable[[Settled], None]] = []
        self._stoppers: list[Callable[[int], Awaitable[Sequence[Straggler]]]] = []
        self._failure_observers: list[Callable[[BaseException], None]] = []
        self._open_observers: dict[Observer[Any], None] = {}
        self._sources: dict[Source[Any], None] = {}
        self._lineages: OrderedDict[int, tuple[Segment, ...]] = OrderedDict()
        self._conversations: OrderedDict[int, ConversationRecord] = OrderedDict()
        self._old_tasks: set[int] = set()
        """Tasks that were live at open: their documents are not known from memory."""
        self._task_documents: dict[int, set[Address]] = {}
        self._closed: asyncio.Future[CloseReport] | None = None

    # --- opening and closing -----------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        storage: Storage,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        on_report: OnReport | None = None,
        read_only: bool = False,
        epoch: int | None = None,
        line_bound_ms: int = 1_000,
        drain_ms: int = 10_000,
        document_retention_ms: int = 600_000,
    ) -> Session:
        """Open the store and load what is live. The caller must ``close()``; prefer ``open()``.

        Raises what ``Storage.open`` raises.
        """
        clock = clock or SystemClock()
        entropy = entropy or SystemEntropy()
        info = await storage.open(
            read_only=read_only, epoch=epoch, writer=entropy.token(), log_id=entropy.token(), now=clock.wall()
        )
        session = cls(
            storage,
            info,
            clock=clock,
            entropy=entropy,
            on_report=on_report,
            line_bound_ms=line_bound_ms,
            drain_ms=drain_ms,
            document_retention_ms=document_retention_ms,
        )
        try:
            await session._load_live()
        except BaseException:
            await storage.close()
            raise
        return session

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        storage: Storage,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        on_report: OnReport | None = None,
        read_only: bool = False,
        epoch: int | None = None,
        line_bound_ms: int = 1_000,
        drain_ms: int = 10_000,
        document_retention_ms: int = 600_000,
    ) -> AsyncGenerator[Session]:
        """``async with Session.open(storage) as session``: closed when the block ends."""
        session = await cls.start(
            storage,
            clock=clock,
            entropy=entropy,
            on_report=on_report,
            read_only=read_only,
            epoch=epoch,
            line_bound_ms=line_bound_ms,
            drain_ms=drain_ms,
            document_retention_ms=document_retention_ms,
        )
        try:
            yield session
        finally:
            await session.close()

    async def _load_live(self) -> None:
        after = 0
        while True:
            page = await self.storage.tasks(live=True, after=after, limit=MAX_SCAN)
            for record in page:
                self.live.settled[record.id] = record
                self.live.staged[record.id] = record
                self._old_tasks.add(record.id)
            if len(page) < MAX_SCAN:
                return
            after = page[-1].id

    async def close(self) -> CloseReport:
        """Seal admission, stop running code within the drain bound, let commits settle, close storage.

        Unfinished durable work is kept. Cancelling this wait cancels only the wait. Closing
        twice gives the same report.
        """
        self._line.check_outside()
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close())
        return await asyncio.shield(self._closed)

    async def _close(self) -> CloseReport:
        self.closing = True
        self._line.fail(SessionClosed("the session is closing; nothing new is admitted"))
        stragglers: list[Straggler] = []
        for stop in reversed(self._stoppers):
            stragglers.extend(await stop(self._drain_ms))
        while self._last_staged is not None and not self._last_staged.done():
            await asyncio.wait([self._last_staged])
        unreleased = tuple(observer.name for observer in self._open_observers)
        for source in list(self._sources):
            source.end("session_failed" if self.failed else "session_closed", self.failed)
        report = CloseReport(self.seq, tuple(s.name for s in stragglers), unreleased)
        for name in unreleased:
            self.report(Report(type="unreleased", message=f"{name} was never released"))
        if stragglers:
            for straggler in stragglers:
                self.report(Report(type="not_stopped", message=f"{straggler.name} did not stop:\n{straggler.stack}"))
            self._release = asyncio.ensure_future(self._release_later(stragglers))
        else:
            await self.storage.close()
        self.close_report = report
        return report

    async def _release_later(self, stragglers: list[Straggler]) -> None:
        """Keep the owner lock until the code that did not stop has returned: nobody may run it beside itself."""
        await asyncio.wait([s.ended for s in stragglers])
        await self.storage.close()

    def check_open(self) -> None:
        """Raises SessionFailed or SessionClosed."""
        if self.failed is not None:
            raise SessionFailed(self.failed)
        if self.closing:
            raise SessionClosed("the session is closed; open the store again")

    def fail(self, cause: BaseException) -> None:
        """Storage refused or lost something: end everything that rests on this session (rule 1.7)."""
        if self.failed is not None:
            return
        self.failed = cause
        error = SessionFailed(cause)
        first = True
        pending, self._pending = self._pending, deque()
        for commit in pending:
            if not commit.waiter.done():
                commit.waiter.set_exception(cause if first else error)
                commit.waiter.exception()  # a caller that was cancelled does not come for it
            first = False
        self._line.fail(error)
        for source in list(self._sources):
            source.end("session_failed", cause)
        for observe in self._failure_observers:
            observe(cause)
        self.report(Report(type="session_failed", message="storage failed; the session stopped", error=cause))
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close())
            self._closed.add_done_callback(self._closed_after_failure)

    def _closed_after_failure(self, closed: asyncio.Future[CloseReport]) -> None:
        if not closed.cancelled() and closed.exception() is not None:
            self.report(
                Report(type="close_failed", message="closing the failed store failed", error=closed.exception())
            )

    def report(self, report: Report) -> None:
        deliver(report, self._on_report)

    # --- what floors above register ----------------------------------------------------------------------------

    def derive(self, derivation: Derivation) -> None:
        """Run this on each transaction's candidate records before it is staged. It is synchronous and must not raise
        but to refuse the transaction."""
        self.derivations.append(derivation)

    def observe(self, observer: Callable[[Settled], None]) -> None:
        """Call this with each settled commit, in order, before the committing block returns."""
        self._observers.append(observer)

    def on_stop(self, stop: Callable[[int], Awaitable[Sequence[Straggler]]]) -> None:
        """Call this at close with the drain bound in ms, admission sealed; it answers what did not stop."""
        self._stoppers.append(stop)

    def on_failure(self, observer: Callable[[BaseException], None]) -> None:
        self._failure_observers.append(observer)

    # --- transactions ------------------------------------------------------------------------------------------

    def commit(self, *, conversation_id: int | None = None, context: Context | None = None) -> Transaction:
        """``async with session.commit() as tx``: stage in the block; leaving it commits, an exception rolls back."""
        return Transaction(self, conversation_id=conversation_id, context=context)

    async def enter(self, transaction: Transaction) -> None:
        self._check_admission(transaction)
        await self._line.acquire(transaction.context)
        try:
            self._check_admission(transaction)
            if len(self._pending) >= MAX_STAGED:
                await asyncio.wait([self._pending[0].waiter])
        except BaseException:
            self._line.release()
            raise
        transaction.begin(self.clock.wall(), self._staged_seq + 1)
        self._line_timer = asyncio.get_running_loop().call_later(self._line_bound, self._report_slow, transaction)

    def _check_admission(self, transaction: Transaction) -> None:
        if self.info.read_only:
            raise StorageError("this store is open for reading only; open it without read_only to commit")
        if not transaction.internal or self.failed is not None:
            self.check_open()

    def _report_slow(self, transaction: Transaction) -> None:
        self.report(
            Report(
                type="line_held",
                message=f"a transaction holds the mutation line longer than {self._line_bound:g} s; "
                "do slow work before or after the block",
                task=transaction.by_task,
                conversation=transaction.conversation_id,
            )
        )

    def leave(self, _: Transaction) -> None:
        if self._line_timer is not None:
            self._line_timer.cancel()
            self._line_timer = None
        self._line.release()

    def mint(self) -> int:
        id = self.next_id
        self.next_id = id + 1
        return id

    def stage(
        self,
        batch: Batch,
        changes: list[DocumentChange],
        states: list[tuple[LoadedDocument, DocState]],
        values: Mapping[str, object] | None,
    ) -> asyncio.Future[None]:
        """Hand the batch to storage; from here it settles whatever becomes of its caller."""
        if self.failed is not None:
            raise SessionFailed(self.failed)
        try:
            stored = self.storage.commit(batch)
        except BaseException as error:
            self.fail(error)
            raise
        self._staged_seq = batch.seq
        staged = self.staged
        for conversation in batch.conversations:
            staged.conversations[conversation.id] = conversation
        for entry in batch.entries:
            staged.entries[entry.id] = entry
        for submission in batch.submissions:
            staged.submissions[submission.id] = submission
            if submission.settled:
                self.open_submissions.pop(submission.id, None)
            else:
                self.open_submissions[submission.id] = submission
        for task in batch.tasks:
            staged.tasks[task.id] = task
            if task.live:
                self.live.staged[task.id] = task
            else:
                self.live.staged.pop(task.id, None)
        for loaded, state in states:
            loaded.staged = state
            if loaded.address.scope == "task" and state.record is not None:
                self._task_documents.setdefault(loaded.address.scope_id, set()).add(loaded.address)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        settled = Settled(batch.seq, batch.at, batch, tuple(changes), values or NO_VALUES)
        self._pending.append(_Pending(settled, states, waiter))
        self._last_staged = waiter
        stored.add_done_callback(self._on_stored)
        return waiter

    def _on_stored(self, stored: asyncio.Future[None]) -> None:
        if stored.cancelled():
            self.fail(StorageError("the storage cancelled a commit"))
            return
        error = stored.exception()
        if error is not None:
            self.fail(error)
        elif self._pending:
            self._publish(self._pending.popleft())

    def _publish(self, commit: _Pending) -> None:
        settled = commit.settled
        batch = settled.batch
        assert settled.seq == self.seq + 1, "commits settle in order"
        self.seq = settled.seq
        staged = self.staged
        for conversation in batch.conversations:
            _forget(staged.conversations, conversation)
            _remember(self._conversations, conversation.id, conversation, KEPT_CONVERSATIONS)
        for entry in batch.entries:
            _forget(staged.entries, entry)
        for submission in batch.submissions:
            _forget(staged.submissions, submission)
        for task in batch.tasks:
            _forget(staged.tasks, task)
            if task.live:
                self.live.settled[task.id] = task
            else:
                self.live.settled.pop(task.id, None)
                self._task_documents.pop(task.id, None)
                self._old_tasks.discard(task.id)
        for loaded, state in commit.states:
            loaded.settled = state
        for observe in self._observers:
            observe(settled)
        for change, (loaded, _) in zip(settled.documents, commit.states, strict=True):
            if loaded.sources:
                self._publish_document(settled, loaded, change)
        self.documents.sweep()
        if not commit.waiter.done():
            commit.waiter.set_result(None)

    async def wait_staged(self, own: asyncio.Future[None] | None) -> None:
        """Wait until everything staged so far has settled; a cancellation meanwhile is delivered afterwards."""
        last = own if own is not None else self._last_staged
        if last is None:
            return
        cancelled: asyncio.CancelledError | None = None
        while not last.done():
            try:
                await asyncio.wait([last])
            except asyncio.CancelledError as error:
                cancelled = error
        failure = last.exception()
        if failure is not None:
            raise failure if own is not None else SessionFailed(failure)
        if cancelled is not None:
            raise cancelled

    async def settled_here(self) -> None:
        """Inside a transaction: wait until all that was staged before it has settled, so that a scan is complete."""
        while self._pending:
            await asyncio.wait([self._pending[-1].waiter])
        if self.failed is not None:
            raise SessionFailed(self.failed)

    # --- settled reads -----------------------------------------------------------------------------------------

    async def _reading(self, read: Awaitable[R], context: Context | None = None) -> R:
        """A read outside transactions: a storage error in it fails the session (an invalid request does not)."""
        try:
            return await bounded(read, context)
        except StorageError as error:
            self.fail(error)
            raise

    def _check_read(self) -> None:
        self._line.check_outside()
        self.check_open()

    async def find_conversation(self, id: int) -> ConversationRecord | None:
        found = self.staged.conversations.get(id) or self._conversations.get(id)
        if found is None:
            found = await self.storage.conversation(id)
            if found is not None:
                _remember(self._conversations, id, found, KEPT_CONVERSATIONS)
        return found

    async def conversation(self, id: int) -> ConversationRecord | None:
        self._check_read()
        found = self._conversations.get(id)
        if found is None:
            found = await self._reading(self.storage.conversation(id))
            if found is not None:
                _remember(self._conversations, id, found, KEPT_CONVERSATIONS)
        return found

    async def entry(self, id: int) -> EntryRecord | None:
        self._check_read()
        return await self._reading(self.storage.entry(id))

    async def submission(self, id: int) -> SubmissionRecord | None:
        self._check_read()
        if id not in self.staged.submissions and id in self.open_submissions:
            return self.open_submissions[id]
        return await self._reading(self.storage.submission(id))

    async def task(self, id: int) -> TaskRecord | None:
        """A live task from memory; an ended one from storage."""
        self._check_read()
        return self.live.settled.get(id) or await self._reading(self.storage.task(id))

    async def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        self._check_read()
        return await self._reading(self.storage.request(conversation_id, request_id))

    async def lineage(self, conversation_id: int, *, staged: bool = False) -> tuple[Segment, ...]:
        """Whose entries a conversation shows. Raises NotFound."""
        known = self._lineages.get(conversation_id)
        if known is not None:
            self._lineages.move_to_end(conversation_id)
            return known
        record = self.staged.conversations.get(conversation_id) if staged else None
        if record is None:
            segments = await self.storage.lineage(conversation_id)
        elif record.parent is None:
            segments = (Segment(conversation_id, 0, None),)
        else:
            parent = await self.lineage(record.parent.conversation, staged=True)
            segments = history.fork(parent, record.parent.at, conversation_id)
        if not segments:
            raise NotFound(f"there is no conversation {conversation_id}")
        if record is None:
            _remember(self._lineages, conversation_id, segments, KEPT_LINEAGES)
        return segments

    async def entries(
        self,
        conversation_id: int,
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = 100,
        context: Context | None = None,
    ) -> list[EntryRecord]:
        """Entries of a conversation through its forks with ``first <= id <= last``. Raises NotFound, InvalidRead."""
        self._check_read()
        segments = await self._reading(self.lineage(conversation_id))
        read = self.storage.entries(segments, first=first, last=last, order=order, limit=limit)
        return await self._reading(read, context)

    async def head(self, conversation_id: int, *, last: int | None = None) -> EntryRecord | None:
        """The newest head marker at or below ``last``: where the model's context begins."""
        self._check_read()
        segments = await self._reading(self.lineage(conversation_id))
        return await self._reading(self.storage.head(segments, last=last))

    async def conversations(
        self, *, owner: int | Anything | None = ANY, after: int = 0, limit: int = 100
    ) -> list[ConversationRecord]:
        self._check_read()
        return await self._reading(self.storage.conversations(owner=owner, after=after, limit=limit))

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[TaskRecord]:
        self._check_read()
        read = self.storage.tasks(conversation_id=conversation_id, kind=kind, live=live, after=after, limit=limit)
        return await self._reading(read)

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[SubmissionRecord]:
        self._check_read()
        read = self.storage.submissions(conversation_id=conversation_id, status=status, after=after, limit=limit)
        return await self._reading(read)

    async def snapshot(
        self,
        kind: type[D],
        *,
        conversation: int | None = None,
        task: int | None = None,
        key: str = "",
        at: int | None = None,
        context: Context | None = None,
    ) -> D | None:
        """A detached value, as settled; None if nothing lives there.

        ``at``: the state as of the commit of that entry, found through the conversation's forks; for rewindable
        documents. Raises NotFound for an entry the conversation does not show, DocumentVersionError.
        """
        self._check_read()
        address = address_of(kind, conversation, task, key)
        if at is None:
            loaded = await self._reading(self.documents.load(address), context)
            return read_state(loaded.settled, kind)
        return await self._reading(self._snapshot_at(kind, address, at), context)

    async def _snapshot_at(self, kind: type[D], address: Address, at: int) -> D | None:
        if kind.definition.history != "rewindable":
            raise ValueError(f"{kind.definition.kind} keeps its latest value only; declare it history='rewindable'")
        entry = await self.storage.entry(at)
        if entry is None:
            raise NotFound(f"there is no entry {at}")
        if address.scope == "conversation":
            segments = await self.lineage(address.scope_id)
            if not history.contains(segments, entry.conversation_id, entry.id):
                raise NotFound(f"entry {at} is not visible from conversation {address.scope_id}")
            address = Address(address.kind, address.scope, entry.conversation_id, address.key)
        stored = await self.storage.document(address, at=entry.seq)
        return None if stored is None else read_state(materialise(stored), kind)

    async def task_documents(self, task_id: int) -> list[Address]:
        """Addresses of the task-scoped documents that may live: from memory, or read for tasks live at open."""
        known = self._task_documents.get(task_id, set())
        if task_id in self._old_tasks:
            stored = await self.storage.documents("task", task_id)
            known = known | {record.address for record in stored}
        return sorted(known, key=str)

    # --- observation -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def state(
        self,
        kind: type[D],
        *,
        conversation: int | None = None,
        task: int | None = None,
        key: str = "",
        context: Context | None = None,
    ) -> AsyncGenerator[State[D]]:
        """A live value of one document: ``async with session.state(Job, conversation=1) as job: job.value``.

        Raises NotFound if nothing lives there.
        """
        source = await self._document_source(kind, address_of(kind, conversation, task, key), context)
        with self.observing(source.state()) as state:
            yield state

    @asynccontextmanager
    async def watch(
        self,
        kind: type[D],
        *,
        conversation: int | None = None,
        task: int | None = None,
        key: str = "",
        context: Context | None = None,
    ) -> AsyncGenerator[Watch[D]]:
        """Every value of one document from now on: ``async for frame in watch``. Raises NotFound if there is none."""
        source = await self._document_source(kind, address_of(kind, conversation, task, key), context)
        with self.observing(source.watch(context)) as watch:
            yield watch

    @contextmanager
    def observing(self, observer: Obs) -> Generator[Obs]:
        """Keep an observer in the session's account of open ones while the block runs, and release it after."""
        self._open_observers[observer] = None
        try:
            yield observer
        finally:
            observer.release()
            del self._open_observers[observer]

    def add_source(self, source: Source[T]) -> None:
        """A source a floor above publishes to: it ends with the session."""
        self._sources[source] = None

    def drop_source(self, source: Source[T]) -> None:
        self._sources.pop(source, None)

    async def _document_source(self, kind: type[D], address: Address, context: Context | None) -> Source[D]:
        self._check_read()
        loaded = await self._reading(self.documents.load(address), context)
        if loaded.settled.record is None:
            raise NotFound(f"nothing lives at {address}")
        known = loaded.sources.get(kind.definition)
        if known is not None:
            return known  # pyright: ignore[reportReturnType]  # kept by the definition it was made with
        value = read_state(loaded.settled, kind)
        assert value is not None, "a living document has a value"
        definition = kind.definition

        def forget() -> None:
            loaded.sources.pop(definition, None)
            self.drop_source(source)

        source: Source[D] = Source(str(address), seq=self.seq, value=value, on_idle=forget)
        loaded.sources[definition] = source  # pyright: ignore[reportArgumentType]
        self.add_source(source)
        return source

    def _publish_document(self, settled: Settled, loaded: LoadedDocument, change: DocumentChange) -> None:
        for definition, source in list(loaded.sources.items()):
            if change.after is None:
                del loaded.sources[definition]
                self.drop_source(source)
                source.end("retired")
            else:
                try:
                    value = read_state(DocState(change.record, loaded.settled.version, change.after), definition.cls)
                except PerdureError as error:
                    source.end("listener_error", error)
                    continue
                assert value is not None, "a living document has a value"
                source.publish(Frame(settled.seq, value, change.ops, settled.values))


def _forget(staged: dict[int, S], record: S) -> None:
    """A settled record leaves the staged ones, unless a later commit staged the next one."""
    if staged.get(record.id) is record:
        del staged[record.id]


def _remember(kept: OrderedDict[int, K], id: int, value: K, most: int) -> None:
    kept[id] = value
    if len(kept) > most:
        kept.popitem(last=False)
