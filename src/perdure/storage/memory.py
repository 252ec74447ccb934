"""The reference semantics of a store, in memory: what every other backend must do too (rule K148)."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import chain, islice

import msgspec

from perdure.kernel.contents import check_digests, digest_of
from perdure.kernel.errors import StaleEpochError, StorageBusy, StorageError
from perdure.kernel.json import JsonValue
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
    FORMAT_VERSION,
    MAX_CONTENTS,
    MAX_DIGESTS,
    MAX_SCAN,
    VACUUM_MS,
    Anything,
    Batch,
    DocumentWrite,
    Mail,
    MailReply,
    Order,
    Segment,
    SizeReport,
    StoredContent,
    StoredDocument,
    StoreInfo,
    VacuumReport,
)
from perdure.storage.deletion import delete
from perdure.storage.memory_deletion import MemoryShelf, closure_of
from perdure.storage.memory_size import measure
from perdure.storage.refusal import refusal_of
from perdure.storage.rules import (
    FIRST_ID,
    KEPT_ANSWERS,
    MAX_UNANSWERED,
    as_of,
    check_batch,
    check_bound,
    check_limit,
    check_live,
    check_order,
    check_takeover,
    lineage_of,
    mail_body,
    mailbox_full,
    no_history,
    no_mail,
    ranges,
)


@dataclass(slots=True)
class StoredHistory:
    record: DocumentRecord
    bases: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    """(seq, version, value), ascending."""
    deltas: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    """(seq, operations), ascending."""

    def alive(self, at: int | None) -> bool:
        if at is None:
            return self.record.retired_seq is None
        retired = self.record.retired_seq
        return self.record.created_seq <= at and (retired is None or retired > at)


@dataclass(slots=True)
class Contents:
    """Everything committed. Records are immutable, so a copy of the containers is a copy of the store."""

    log_id: str = ""
    epoch: int = 0
    writer: str = ""
    seq: int = 0
    next_id: int = FIRST_ID
    conversations: dict[int, ConversationRecord] = field(default_factory=dict[int, ConversationRecord])
    entries: dict[int, EntryRecord] = field(default_factory=dict[int, EntryRecord])
    by_conversation: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    heads: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    submissions: dict[int, SubmissionRecord] = field(default_factory=dict[int, SubmissionRecord])
    requests: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    tasks: dict[int, TaskRecord] = field(default_factory=dict[int, TaskRecord])
    live: set[int] = field(default_factory=set[int])
    documents: dict[int, StoredHistory] = field(default_factory=dict[int, StoredHistory])
    at_address: dict[Address, list[int]] = field(default_factory=dict[Address, list[int]])
    in_scope: dict[tuple[str, int], list[int]] = field(default_factory=dict[tuple[str, int], list[int]])
    mail: dict[int, Mail] = field(default_factory=dict[int, Mail])
    replies: dict[int, MailReply] = field(default_factory=dict[int, MailReply])
    last_mail: int = 0
    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])
    pins: dict[int, set[str]] = field(default_factory=dict[int, set[str]])

    def copy(self) -> Contents:
        return Contents(
            self.log_id,
            self.epoch,
            self.writer,
            self.seq,
            self.next_id,
            dict(self.conversations),
            dict(self.entries),
            {key: list(ids) for key, ids in self.by_conversation.items()},
            {key: list(ids) for key, ids in self.heads.items()},
            dict(self.submissions),
            dict(self.requests),
            dict(self.tasks),
            set(self.live),
            {id: StoredHistory(d.record, list(d.bases), list(d.deltas)) for id, d in self.documents.items()},
            {key: list(ids) for key, ids in self.at_address.items()},
            {key: list(ids) for key, ids in self.in_scope.items()},
            dict(self.mail),
            dict(self.replies),
            self.last_mail,
            dict(self.contents),
            {pin: set(digests) for pin, digests in self.pins.items()},
        )

    # --- one commit ----------------------------------------------------------------------------------------

    def apply(self, batch: Batch) -> None:
        for conversation in batch.conversations:
            self.conversations[conversation.id] = conversation
        for entry in batch.entries:
            self.entries[entry.id] = entry
            insort(self.by_conversation.setdefault(entry.conversation_id, []), entry.id)
            if entry.head is not None:
                insort(self.heads.setdefault(entry.conversation_id, []), entry.id)
        for submission in batch.submissions:
            self.submissions[submission.id] = submission
            if submission.request_id is not None:
                self.requests[submission.conversation_id, submission.request_id] = submission.id
        for task in batch.tasks:
            self.tasks[task.id] = task
            (self.live.add if task.live else self.live.discard)(task.id)
        for write in batch.documents:
            self._write(batch.seq, write)
        for reply in sorted(batch.replies, key=lambda reply: reply.mail_id):
            self.replies[reply.mail_id] = reply
        for id in list(self.replies)[:-KEPT_ANSWERS]:
            del self.replies[id], self.mail[id]
        for content in batch.contents:
            self.contents.setdefault(content.digest, content.data)
        for pin, digest in batch.pins:
            self.pins.setdefault(pin, set()).add(digest)
        for pin in batch.unpinned:
            self.pins.pop(pin, None)
        for digest in set(batch.reclaimed) - self.pinned() if batch.reclaimed else ():
            self.contents.pop(digest, None)
        if batch.deleted:
            delete(MemoryShelf(self), batch.deleted)
        self.seq = batch.seq
        self.next_id = batch.next_id

    def _write(self, seq: int, write: DocumentWrite) -> None:
        record = write.record
        document = self.documents.get(record.id)
        if document is None:
            document = self.documents[record.id] = StoredHistory(record)
            insort(self.at_address.setdefault(record.address, []), record.id)
            insort(self.in_scope.setdefault((record.scope, record.scope_id), []), record.id)
        document.record = record
        if write.reclaim:
            document.bases.clear()
            document.deltas.clear()
        if write.base is not None:
            document.bases.append((seq, write.version, write.base))
        if write.ops is not None:
            document.deltas.append((seq, write.ops))

    # --- reads ---------------------------------------------------------------------------------------------

    def pinned(self) -> set[str]:
        return set[str]().union(*self.pins.values())

    def alive(self, address: Address, at: int | None = None) -> StoredHistory | None:
        for id in reversed(self.at_address.get(address, ())):
            if self.documents[id].alive(at):
                return self.documents[id]
        return None

    def has_conversation(self, id: int) -> bool:
        return id in self.conversations

    def has_entry(self, id: int) -> bool:
        return id in self.entries

    def holder_of(self, conversation_id: int, request_id: str) -> int | None:
        return self.requests.get((conversation_id, request_id))

    def alive_at(self, address: Address) -> int | None:
        found = self.alive(address)
        return None if found is None else found.record.id

    def waits(self, mail_id: int) -> bool:
        return mail_id in self.mail and mail_id not in self.replies

    def has_content(self, digest: str) -> bool:
        return digest in self.contents

    def is_there(self, conversation_id: int) -> bool:
        return self.there(conversation_id) is not None

    def live_tasks(self, conversation_id: int) -> list[int]:
        return [id for id in self.live if self.tasks[id].conversation_id == conversation_id]

    def open_submissions(self, conversation_id: int) -> list[int]:
        found = self.submissions.values()
        return [s.id for s in found if s.conversation_id == conversation_id and not s.settled]

    def living_documents(self, conversation_id: int) -> list[int]:
        ids = self.in_scope.get(("conversation", conversation_id), ())
        return [id for id in ids if self.documents[id].alive(None)]

    def there(self, conversation_id: int) -> ConversationRecord | None:
        """A conversation, unless it is deleted."""
        found = self.conversations.get(conversation_id)
        return found if found is not None and found.shared_through is None else None

    def ancestry(self, conversation_id: int) -> Iterator[tuple[int, int | None]]:
        conversation = self.there(conversation_id)
        while conversation is not None:
            parent = conversation.parent
            yield conversation.id, None if parent is None else parent.at
            conversation = None if parent is None else self.conversations[parent.conversation]


class MemoryStorage:
    """A store that lives as long as this object. It may be closed and opened again, and keeps its contents.

    A commit is applied, and its future ended, in a later step of the event loop: never before control has
    returned to the caller. Raises what ``perdure.kernel.storage.Storage`` says.
    """

    def __init__(self) -> None:
        self._contents = Contents()
        self._info: StoreInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: StorageError | None = None
        self._pending: deque[tuple[Batch, asyncio.Future[None]]] = deque()
        self._on_mail: Callable[[], None] | None = None

    def snapshot(self) -> MemoryStorage:
        """The store as a crash now would leave it: what has settled, in a store nobody has open."""
        copy = MemoryStorage()
        copy._contents = self._contents.copy()
        return copy

    # --- opening and closing -------------------------------------------------------------------------------

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
        check_takeover(takeover, read_only=read_only)
        if self._info is not None:
            raise StorageBusy("this MemoryStorage is open already; close it first, or open a snapshot() of it")
        contents = self._contents
        if read_only and not contents.log_id:
            raise StorageError("this MemoryStorage has never been opened for writing; there is nothing to read")
        if not read_only:
            fence = contents.epoch + 1 if epoch is None else epoch
            if fence <= contents.epoch:
                raise StaleEpochError(
                    mine=fence, my_writer=writer, stored=contents.epoch, stored_writer=contents.writer
                )
            contents.epoch = fence
            contents.writer = writer
            contents.log_id = contents.log_id or log_id
        self._loop = asyncio.get_running_loop()
        self._failure = None
        self._info = StoreInfo(
            format=FORMAT_VERSION,
            log_id=contents.log_id,
            epoch=contents.epoch,
            writer=contents.writer,
            seq=contents.seq,
            next_id=contents.next_id,
            read_only=read_only,
        )
        return self._info

    async def close(self) -> None:
        while self._pending:
            await asyncio.wait([future for _, future in self._pending])
        self._info = None
        self._loop = None
        self._on_mail = None

    # --- committing ----------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        info, loop = self._info, self._loop
        if info is None or loop is None:
            raise StorageError("this MemoryStorage is not open")
        if info.read_only:
            raise StorageError("this MemoryStorage is open for reading only")
        future = loop.create_future()
        self._pending.append((batch, future))
        loop.call_soon(self._settle)
        return future

    def _settle(self) -> None:
        batch, future = self._pending.popleft()
        try:
            if self._failure is None:
                self._store(batch)
        except StorageError as error:
            self._failure = error
        if future.done():
            return  # its caller was cancelled; the commit stands all the same
        if self._failure is None:
            future.set_result(None)
        else:
            future.set_exception(self._failure)
            future.exception()  # the session that fails on the first one need not look at every later one

    def _store(self, batch: Batch) -> None:
        contents, opening = self._contents, self._info
        assert opening is not None, "closing waits for what is pending"
        if (contents.epoch, contents.writer) != (opening.epoch, opening.writer):
            raise StaleEpochError(
                mine=opening.epoch,
                my_writer=opening.writer,
                stored=contents.epoch,
                stored_writer=contents.writer,
            )
        check_batch(batch, seq=contents.seq, next_id=contents.next_id)
        refusal = refusal_of(contents, batch)
        if refusal is not None:
            raise StorageError(f"commit {batch.seq} was refused: {refusal}")
        contents.apply(batch)
        if batch.epoch is not None and batch.epoch > opening.epoch:
            contents.epoch = batch.epoch
            self._info = msgspec.structs.replace(opening, epoch=batch.epoch)

    # --- reading -------------------------------------------------------------------------------------------

    def _read(self) -> Contents:
        if self._info is None:
            raise StorageError("this MemoryStorage is not open")
        return self._contents

    async def conversation(self, id: int) -> ConversationRecord | None:
        return self._read().there(id)

    async def entry(self, id: int) -> EntryRecord | None:
        return self._read().entries.get(id)

    async def submission(self, id: int) -> SubmissionRecord | None:
        return self._read().submissions.get(id)

    async def task(self, id: int) -> TaskRecord | None:
        return self._read().tasks.get(id)

    async def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        contents = self._read()
        return contents.submissions.get(contents.requests.get((conversation_id, request_id), 0))

    async def lineage(self, conversation_id: int) -> tuple[Segment, ...]:
        return lineage_of(self._read().ancestry(conversation_id))

    async def closure(self, conversation_id: int) -> list[int]:
        return closure_of(self._read(), conversation_id)

    async def entries(
        self,
        lineage: Sequence[Segment],
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = MAX_SCAN,
    ) -> list[EntryRecord]:
        contents = self._read()
        check_limit(limit)
        check_order(order)
        found: list[EntryRecord] = []
        for conversation_id, low, high in ranges(lineage, first, last, order):
            ids = contents.by_conversation.get(conversation_id, [])
            ids = ids[bisect_left(ids, low) : bisect_right(ids, high)]
            for id in ids if order == "ascending" else reversed(ids):
                found.append(contents.entries[id])
                if len(found) == limit:
                    return found
        return found

    async def head(self, lineage: Sequence[Segment], *, last: int | None = None) -> EntryRecord | None:
        contents = self._read()
        for conversation_id, low, high in ranges(lineage, 0, last, "descending"):
            ids = contents.heads.get(conversation_id, [])
            upto = bisect_right(ids, high)
            if upto and ids[upto - 1] >= low:
                return contents.entries[ids[upto - 1]]
        return None

    async def conversations(
        self, *, owner: int | Anything | None = ANY, after: int = 0, limit: int = MAX_SCAN
    ) -> list[ConversationRecord]:
        contents = self._read()
        check_limit(limit)
        found = (
            c
            for c in contents.conversations.values()
            if c.id > after and c.shared_through is None and (owner is ANY or c.owner == owner)
        )
        return nsmallest(limit, found, key=lambda c: c.id)

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[TaskRecord]:
        contents = self._read()
        check_limit(limit)
        check_live(live)
        found = (
            task
            for task in ((contents.tasks[id] for id in contents.live) if live else contents.tasks.values())
            if task.id > after
            and (conversation_id is None or task.conversation_id == conversation_id)
            and (kind is None or task.kind == kind)
            and (live is None or task.live == live)
        )
        return nsmallest(limit, found, key=lambda task: task.id)

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = MAX_SCAN,
    ) -> list[SubmissionRecord]:
        contents = self._read()
        check_limit(limit)
        found = (
            submission
            for submission in contents.submissions.values()
            if submission.id > after
            and (conversation_id is None or submission.conversation_id == conversation_id)
            and (status is None or submission.status == status)
        )
        return nsmallest(limit, found, key=lambda submission: submission.id)

    async def documents(self, scope: str, scope_id: int, *, at: int | None = None) -> list[DocumentRecord]:
        contents = self._read()
        documents = (contents.documents[id] for id in contents.in_scope.get((scope, scope_id), ()))
        return [as_of(document.record, at) for document in documents if document.alive(at)]

    async def document(self, address: Address, *, at: int | None = None) -> StoredDocument | None:
        document = self._read().alive(address, at)
        if document is None:
            return None
        bases = [base for base in document.bases if at is None or base[0] <= at]
        if not bases:
            raise no_history(document.record, at)
        seq, version, base = bases[-1]
        deltas = [ops for where, ops in document.deltas if where > seq and (at is None or where <= at)]
        return StoredDocument(as_of(document.record, at), version, base, deltas)

    # --- contents --------------------------------------------------------------------------------------------

    async def has_contents(self, digests: Sequence[str]) -> set[str]:
        stored = self._read().contents
        return {digest for digest in check_digests(digests, most=MAX_DIGESTS) if digest in stored}

    async def contents(self, digests: Sequence[str]) -> dict[str, bytes]:
        stored = self._read().contents
        return {digest: stored[digest] for digest in check_digests(digests, most=MAX_CONTENTS) if digest in stored}

    async def content_scan(self, *, pinned: bool, after: str = "", limit: int = MAX_SCAN) -> list[StoredContent]:
        contents = self._read()
        check_limit(limit)
        held = contents.pinned()
        found = (digest for digest in contents.contents if digest > after and (digest in held) == pinned)
        return [StoredContent(digest, len(contents.contents[digest])) for digest in nsmallest(limit, found)]

    async def content_pins(self, *, after: int = 0, limit: int = MAX_SCAN) -> list[int]:
        contents = self._read()
        check_limit(limit)
        return nsmallest(limit, (pin for pin in contents.pins if pin > after))

    # --- mailbox -------------------------------------------------------------------------------------------

    async def mail(self, *, after: int = 0, limit: int = 100) -> list[Mail]:
        contents = self._read()
        check_limit(limit)
        waiting = (mail for mail in contents.mail.values() if mail.id > after and mail.id not in contents.replies)
        return list(islice(waiting, limit))

    def on_mail(self, callback: Callable[[], None]) -> None:
        self._on_mail = callback
        if self._loop is not None and len(self._contents.mail) > len(self._contents.replies):
            self._loop.call_soon(callback)

    def post(self, kind: str, body: JsonValue, *, now: int) -> int:
        """Leave a request as another process would, whether the store is open or not, and return its mail id.

        Raises NotJson, and StorageError if the body is too large or too much is waiting.
        """
        contents = self._contents
        raw = mail_body(body)
        if len(contents.mail) - len(contents.replies) >= MAX_UNANSWERED:
            raise mailbox_full()
        contents.last_mail += 1
        contents.mail[contents.last_mail] = Mail(id=contents.last_mail, kind=kind, body=raw, posted_at=now)
        if self._loop is not None and self._on_mail is not None:
            self._loop.call_soon(self._on_mail)
        return contents.last_mail

    def reply(self, mail_id: int) -> MailReply | None:
        """What became of a request; None while it waits. Raises NotFound if it is not there (any more)."""
        if mail_id not in self._contents.mail:
            raise no_mail(mail_id)
        return self._contents.replies.get(mail_id)

    # --- upkeep --------------------------------------------------------------------------------------------

    async def check(self) -> list[str]:
        contents = self._read()
        ids = chain(contents.conversations, contents.entries, contents.submissions, contents.tasks, contents.documents)
        found = [f"record {id} is not below the next id {contents.next_id}" for id in ids if id >= contents.next_id]
        wrong = (digest for digest, data in contents.contents.items() if digest_of(data) != digest)
        return found + [f"content {digest} is not what its digest says" for digest in wrong]

    async def size(self) -> SizeReport:
        return measure(self._read())

    async def vacuum(self, *, within_ms: int = VACUUM_MS) -> VacuumReport:
        """Nothing is on disk, so nothing is given back."""
        if self._info is None or self._info.read_only:
            raise StorageError("this MemoryStorage is not open for writing")
        check_bound(within_ms)
        return VacuumReport(before=0, after=0)
