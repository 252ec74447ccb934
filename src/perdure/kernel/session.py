"""The session: one owner of one store. It orders transactions, stages them, and shows what has settled.

The commit path, top to bottom: ``commit()`` takes the mutation line (line.py); the block stages (transaction.py);
leaving it runs the derivations, hands one batch to storage and passes the line on (``stage``); storage settles batches
in order (``_on_stored``); only then do observers, watches and the block's own caller see the commit (``_publish``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from os import PathLike, fspath
from typing import TypeVar

import msgspec
from msgspec import structs
from typing_extensions import override

from perdure.kernel.clock import Clock, Entropy, SystemClock, SystemEntropy
from perdure.kernel.contents import Contents
from perdure.kernel.context import Context, bounded
from perdure.kernel.documents import (
    DocState,
    DocumentCache,
    DocumentChange,
    LoadedDocument,
)
from perdure.kernel.errors import SessionClosed, SessionFailed, StorageError
from perdure.kernel.line import Line
from perdure.kernel.observation import NO_VALUES
from perdure.kernel.records import (
    ConversationRecord,
    EntryRecord,
    SubmissionRecord,
    TaskRecord,
    check_epoch,
)
from perdure.kernel.reports import OnReport, Report, deliver
from perdure.kernel.settled import KEPT_CONVERSATIONS, KEPT_SUBMISSIONS, Settled, SettledReads, remember
from perdure.kernel.storage import MAX_SCAN, Batch, Storage, StoreInfo
from perdure.kernel.transaction import Derivation, Transaction

S = TypeVar("S", ConversationRecord, EntryRecord, SubmissionRecord, TaskRecord)

MAX_STAGED = 1000
"""Commits that may be staged and not settled; the next transaction waits for the oldest."""


class Straggler(msgspec.Struct, frozen=True):
    """Code that did not stop within the drain bound."""

    name: str
    stack: str
    ended: asyncio.Future[object]
    """Done once it has returned after all."""


class CloseReport(msgspec.Struct, frozen=True):
    """What a close has to say."""

    seq: int
    """The last commit that settled."""
    stragglers: tuple[str, ...] = ()
    """Code that did not stop; the store stays owned by this process until it returns."""
    unreleased: tuple[str, ...] = ()
    """States and watches nobody released; none where the session failed, which ended them."""
    failed: BaseException | None = None
    """Why the session failed, before the close or in it. What it had not committed is not stored; a task that was to
    be written back as pending is found running at the next open, as after a crash (rules K84 and K130)."""


class Settlement(asyncio.Future[None]):
    """The end of a staged commit. It comes whatever becomes of who awaits it: a cancellation reaches them afterwards
    (rule K79), since a future that refuses to be cancelled makes its task wait on."""

    @override
    def cancel(self, msg: object = None) -> bool:
        return False


class _Pending(msgspec.Struct):
    """A staged commit on its way through storage."""

    settled: Settled
    stored: asyncio.Future[None]
    states: list[tuple[LoadedDocument, DocState]]
    waiter: Settlement


class Session(SettledReads):
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
        document_retention_ms: float,
    ) -> None:
        documents = DocumentCache(storage.document, clock.monotonic, document_retention_ms / 1000)
        super().__init__(storage, info, documents)
        self.clock = clock
        self.entropy = entropy
        self.next_id = info.next_id
        self.contents = Contents(self)
        """Bytes by their SHA-256, beside the records."""
        self.derivations: list[Derivation] = []
        self.close_report: CloseReport | None = None
        self._on_report = on_report
        self._line = Line(line_bound_ms / 1000, self._report_slow)
        self._line_bound = line_bound_ms / 1000
        self._drain_ms = drain_ms
        self._staged_seq = info.seq
        self._pending: deque[_Pending] = deque()
        self._last_staged: Settlement | None = None
        self._observers: list[Callable[[Settled], None]] = []
        self._stage_observers: list[Callable[[Batch, asyncio.Future[None]], None]] = []
        self._stoppers: list[Callable[[int], Awaitable[Sequence[Straggler]]]] = []
        self._failure_observers: list[Callable[[BaseException], None]] = []
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
        takeover: bool = False,
        line_bound_ms: int = 1_000,
        drain_ms: int = 10_000,
        document_retention_ms: float = 600_000,
    ) -> Session:
        """Open the store and load what is live. The caller must ``close()``; prefer ``open()``.

        Raises what ``Storage.open`` raises, ValueError for a bound that is none, and TypeError for a bare path.
        """
        if isinstance(storage, str | PathLike):  # of untyped callers
            raise TypeError(f"a path is no storage; open SqliteStorage({fspath(storage)!r})")
        bounds = {
            "line_bound_ms": line_bound_ms,
            "drain_ms": drain_ms,
            "document_retention_ms": document_retention_ms,
        }
        for name, bound in bounds.items():
            if not bound >= 0:
                raise ValueError(f"{name} is a number of milliseconds, 0 or more, not {bound}")
        if epoch is not None:
            check_epoch(epoch)
        clock = clock or SystemClock()
        entropy = entropy or SystemEntropy()
        info = await storage.open(
            read_only=read_only,
            epoch=epoch,
            takeover=takeover,
            writer=entropy.token(),
            log_id=entropy.token(),
            now=clock.wall(),
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
        for warning in info.warnings:
            session.report(Report(type="store_warning", message=warning))
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
        takeover: bool = False,
        line_bound_ms: int = 1_000,
        drain_ms: int = 10_000,
        document_retention_ms: float = 600_000,
    ) -> AsyncGenerator[Session]:
        """``async with Session.open(storage) as session``: closed when the block ends."""
        session = await cls.start(
            storage,
            clock=clock,
            entropy=entropy,
            on_report=on_report,
            read_only=read_only,
            epoch=epoch,
            takeover=takeover,
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

    async def close(self, *, context: Context | None = None) -> CloseReport:
        """Seal admission, stop running code within the drain bound, let commits settle, close storage (rules K80-K87).

        Unfinished durable work is kept. Cancelling this wait, or its context, cancels only the wait. Closing twice
        gives the same report. A session that failed says so in its report (``failed``). Raises what closing the store
        raises, if that is the first failure, and InsideTransaction.
        """
        self._line.check_outside()
        return await bounded(asyncio.shield(self._begin_close()), context)

    def _begin_close(self) -> asyncio.Future[CloseReport]:
        if self._closed is None:
            self.closing = True
            self._line.seal(SessionClosed("the session is closing; nothing new is admitted"))
            self._closed = asyncio.ensure_future(self._close())
        return self._closed

    async def _close(self) -> CloseReport:
        stragglers: list[Straggler] = []
        for stop in reversed(self._stoppers):
            try:
                stragglers.extend(await stop(self._drain_ms))
            except Exception as error:  # the store must be let go of all the same
                self.report(Report(type="stop_failed", message="stopping running code failed", error=error))
        while self._last_staged is not None and not self._last_staged.done():
            await asyncio.wait([self._last_staged])
        unreleased = () if self.failed is not None else tuple(observer.name for observer in self._open_observers)
        for source in list(self._sources):
            source.end("session_failed" if self.failed else "session_closed", self.failed)
        self.close_report = report = CloseReport(self.seq, tuple(s.name for s in stragglers), unreleased, self.failed)
        for name in unreleased:
            self.report(Report(type="unreleased", message=f"{name} was never released"))
        if stragglers:
            for straggler in stragglers:
                self.report(Report(type="not_stopped", message=f"{straggler.name} did not stop:\n{straggler.stack}"))
            self._release = asyncio.ensure_future(self._release_later(stragglers))
        else:
            error = await self._close_storage()
            if error is not None and self.failed is None:
                raise error
        return report

    async def _release_later(self, stragglers: list[Straggler]) -> None:
        """Keep the owner lock until the code that did not stop has returned: nobody may run it beside itself."""
        await asyncio.wait([s.ended for s in stragglers])
        await self._close_storage()

    async def _close_storage(self) -> Exception | None:
        self.storage_closed = True
        self._line.stop()
        try:
            await self.storage.close()
        except Exception as error:  # of a session that failed, the first cause is what matters
            self.report(Report(type="close_failed", message="closing the store failed", error=error))
            return error
        return None

    @override
    def check_outside(self) -> None:
        """Raises InsideTransaction in a commit block, where a wait would be for its own end; RuntimeError in another
        event loop than the session's."""
        self._line.check_outside()

    @override
    def check_open(self) -> None:
        """Raises SessionFailed or SessionClosed."""
        if self.failed is not None:
            raise SessionFailed(self.failed)
        if self.closing:
            raise SessionClosed("the session is closed; open the store again")

    @override
    def fail(self, cause: BaseException, *, refused: asyncio.Future[None] | None = None) -> None:
        """End everything that rests on this session (rules K64 and K129). ``refused``: the commit the cause is of."""
        if self.failed is not None:
            return
        self.failed = cause
        pending, self._pending = self._pending, deque()
        for commit in pending:
            commit.waiter.set_exception(cause if commit.stored is refused else SessionFailed(cause))
            commit.waiter.exception()  # a caller that was cancelled does not come for it
        self._line.seal(SessionFailed(cause))
        for source in list(self._sources):
            source.end("session_failed", cause)
        self.report(Report(type="session_failed", message="the session failed and stopped", error=cause))
        for observe in self._failure_observers:
            try:
                observe(cause)
            except Exception as error:  # the others must hear of it too
                self.report(Report(type="observer_failed", message="an observer of failures raised", error=error))
        self._begin_close()

    def report(self, report: Report) -> None:
        """Tell the host, by ``on_report``."""
        deliver(report, self._on_report)

    # --- what floors above register ----------------------------------------------------------------------------

    def derive(self, derivation: Derivation) -> None:
        """Run this on each transaction's candidate records before it is staged. It answers an awaitable only where it
        needs to read, and raises only to refuse the transaction."""
        self.derivations.append(derivation)

    def observe(self, observer: Callable[[Settled], None]) -> None:
        """Call this with each settled commit, in order, before the committing block returns."""
        self._observers.append(observer)

    def on_staged(self, observer: Callable[[Batch, asyncio.Future[None]], None]) -> None:
        """Call this with each batch as storage has taken it, and the future that storage settles. It may not raise."""
        self._stage_observers.append(observer)

    def on_stop(self, stop: Callable[[int], Awaitable[Sequence[Straggler]]]) -> None:
        """Call this at close with the drain bound in ms, admission sealed; it answers what did not stop."""
        self._stoppers.append(stop)

    def on_failure(self, observer: Callable[[BaseException], None]) -> None:
        """Call it, once, with what the session fails of."""
        self._failure_observers.append(observer)

    # --- transactions ------------------------------------------------------------------------------------------

    def commit(self, *, conversation_id: int | None = None, context: Context | None = None) -> Transaction:
        """``async with session.commit() as tx``: stage in the block; leaving it commits, an exception rolls back."""
        return Transaction(self, conversation_id=conversation_id, context=context)

    async def enter(self, transaction: Transaction) -> None:
        """A transaction begins: wait for those before it. Raises SessionFailed, SessionClosed."""
        self.check_admission(transaction.internal)
        if not self._line.take(transaction):
            await self._line.wait(transaction, transaction.context)
        try:
            self.check_admission(transaction.internal)
            if transaction.context is not None:
                transaction.context.check()
            while len(self._pending) >= MAX_STAGED:
                await bounded(asyncio.wait([self._pending[0].waiter]), transaction.context)
                self.check_admission(transaction.internal)
            while self.staged.deleted:  # rule K195
                await bounded(asyncio.wait([self._pending[-1].waiter]), transaction.context)
                self.check_admission(transaction.internal)
        except BaseException:
            self._line.release(transaction)
            raise
        transaction.begin(self.clock.wall(), self._staged_seq + 1)

    def check_admission(self, internal: bool) -> None:
        """Whether a transaction may begin, go on or commit. Raises SessionFailed, SessionClosed, StorageError."""
        if self.info.read_only:
            raise StorageError("this store is open for reading only; open it without read_only to commit")
        if not internal or self.failed is not None:
            self.check_open()

    def _report_slow(self, transaction: object) -> None:
        assert isinstance(transaction, Transaction), "nothing else takes the line"
        self.report(
            Report(
                type="line_held",
                message=f"a transaction holds the mutation line longer than {self._line_bound:g} s; "
                "do slow work before or after the block",
                task=transaction.by_task,
                conversation=transaction.conversation_id,
            )
        )

    def leave(self, transaction: Transaction) -> None:
        """The block has ended: the next transaction's turn."""
        self._line.release(transaction)

    def mint(self) -> int:
        """A new id."""
        id = self.next_id
        self.next_id = id + 1
        return id

    def stage(
        self,
        batch: Batch,
        changes: list[DocumentChange],
        states: list[tuple[LoadedDocument, DocState]],
        values: Mapping[str, object] | None,
    ) -> Settlement:
        """Hand the batch to storage; from here it settles whatever becomes of its caller."""
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
        if batch.replies:
            staged.replies.update(reply.mail_id for reply in batch.replies)
        if batch.deleted:
            staged.deleted.update(batch.deleted)
        if batch.epoch is not None:
            staged.epoch = batch.epoch
        self.contents.staged(batch)
        for loaded, state in states:
            loaded.staged = state
            if loaded.address.scope == "task" and state.record is not None:
                self._task_documents.setdefault(loaded.address.scope_id, set()).add(loaded.address)
        waiter = Settlement()
        settled = Settled(batch.seq, batch.at, batch, tuple(changes), values or NO_VALUES)
        self._pending.append(_Pending(settled, stored, states, waiter))
        self._last_staged = waiter
        for observe in self._stage_observers:
            observe(batch, stored)
        stored.add_done_callback(self._on_stored)
        return waiter

    def _on_stored(self, stored: asyncio.Future[None]) -> None:
        error = StorageError("the storage cancelled a commit") if stored.cancelled() else stored.exception()
        if error is not None:
            self.fail(error, refused=stored)
        elif self.failed is None:
            if self._pending[0].stored is not stored:
                self.fail(StorageError("the storage settled commits out of order"))
                return
            commit = self._pending.popleft()
            try:
                self._settle(commit)
                self._publish(commit)
            except Exception as broken:  # somebody did not see this commit: nothing may rest on that
                self.fail(broken)
            commit.waiter.set_result(None)

    def _settle(self, commit: _Pending) -> None:
        """The commit is what reads outside transactions see from here on."""
        settled = commit.settled
        batch = settled.batch
        assert settled.seq == self.seq + 1, "commits settle in order"
        self.seq = settled.seq
        if batch.epoch is not None and batch.epoch > self.info.epoch:
            self.info = structs.replace(self.info, epoch=batch.epoch)
        staged = self.staged
        for conversation in batch.conversations:
            _forget(staged.conversations, conversation)
            remember(self._known_conversations, conversation.id, conversation, KEPT_CONVERSATIONS)
        for entry in batch.entries:
            _forget(staged.entries, entry)
        for submission in batch.submissions:
            _forget(staged.submissions, submission)
            remember(self._settled_submissions, submission.id, submission, KEPT_SUBMISSIONS)
        for task in batch.tasks:
            _forget(staged.tasks, task)
            if task.live:
                self.live.settled[task.id] = task
            else:
                self.live.settled.pop(task.id, None)
                self._task_documents.pop(task.id, None)
                self._old_tasks.discard(task.id)
        if batch.replies:
            staged.replies.difference_update(reply.mail_id for reply in batch.replies)
        if commit.states:
            for loaded, state in commit.states:
                loaded.settled = state
            self.documents.use(*(loaded for loaded, _ in commit.states))
        self.contents.settled(batch)
        if batch.deleted:
            self._forget_conversations(batch.deleted)

    def _publish(self, commit: _Pending) -> None:
        """Tell observers and watches of it, before the block that made it returns (rules K65 and K70)."""
        settled = commit.settled
        for observe in self._observers:
            observe(settled)
        for change, (loaded, _) in zip(settled.documents, commit.states, strict=True):
            if loaded.sources:
                self._publish_document(settled, loaded, change)
        self.documents.sweep()

    async def wait_staged(self, own: Settlement | None) -> None:
        """Wait until everything staged so far has settled; a cancellation meanwhile is delivered afterwards."""
        last = own if own is not None else self._last_staged
        if last is None:
            return
        cancelled: asyncio.CancelledError | None = None
        while not last.done():
            try:
                await last
            except asyncio.CancelledError as error:
                cancelled = error
            except Exception:
                break  # why the commit failed: told below
        failure = last.exception()
        if failure is not None:
            assert self.failed is not None, "a commit fails with its session"
            raise failure if own is not None else SessionFailed(self.failed)
        if cancelled is not None:
            raise cancelled

    async def settled_here(self) -> None:
        """Inside a transaction: wait until all that was staged before it has settled, so that a scan is complete."""
        while self._pending:
            await asyncio.wait([self._pending[-1].waiter])
        if self.failed is not None:
            raise SessionFailed(self.failed)


def _forget(staged: dict[int, S], record: S) -> None:
    """A settled record leaves the staged ones, unless a later commit staged the next one."""
    if staged.get(record.id) is record:
        del staged[record.id]
