"""What a check works on: one store of some backend, and batches as the kernel would make them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from perdure.kernel.json import JsonValue
from perdure.kernel.records import (
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    ForkPoint,
    Pending,
    SubmissionRecord,
    TaskRecord,
    to_raw,
)
from perdure.kernel.storage import (
    Batch,
    Content,
    DocumentWrite,
    MailReply,
    Storage,
    StoreInfo,
)

T = TypeVar("T")

_WAIT_SECONDS = 30
"""Long past what anything here may take; it only keeps a broken backend from hanging the suite."""


class Subject(Protocol):
    """One store under test, which does not exist before it is opened first."""

    def storage(self) -> Storage:
        """A way to the store, not open: a new object, or the only one there can be."""
        ...

    async def crash(self) -> Subject:
        """The store as a kill at this moment would leave it, as another subject; this one goes on."""
        ...

    async def supersede(self, epoch: int, writer: str) -> None:
        """Raise the stored fence behind the back of whoever has the store open, as a takeover does."""
        ...

    async def post(self, kind: str, body: JsonValue, *, now: int) -> int:
        """Leave a request as another process does, and return its mail id."""
        ...

    async def reply(self, mail_id: int) -> MailReply | None:
        """What became of a request, as its sender asks. Raises NotFound."""
        ...


class Line:
    """Makes batches as the kernel does: it mints ids and commit numbers, and hands them over in order."""

    def __init__(self, storage: Storage, info: StoreInfo) -> None:
        self.storage = storage
        self.info = info
        self.seq = info.seq
        self.next_id = info.next_id
        self.now = 1_000 + info.seq

    @classmethod
    async def open(cls, subject: Subject, *, epoch: int | None = None, writer: str = "writer") -> Line:
        storage = subject.storage()
        return cls(storage, await storage.open(epoch=epoch, writer=writer, log_id="log", now=1_000))

    def id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def batch(
        self,
        *,
        conversations: Sequence[ConversationRecord] = (),
        entries: Sequence[EntryRecord] = (),
        submissions: Sequence[SubmissionRecord] = (),
        tasks: Sequence[TaskRecord] = (),
        documents: Sequence[DocumentWrite] = (),
        replies: Sequence[MailReply] = (),
        progress: bool = False,
        deleted: Sequence[int] = (),
        contents: Sequence[Content] = (),
        pins: Sequence[tuple[int, str]] = (),
        unpinned: Sequence[int] = (),
        reclaimed: Sequence[str] = (),
    ) -> Batch:
        """The next batch; the number is spent even if it is never handed over."""
        self.seq += 1
        self.now += 1
        return Batch(
            seq=self.seq,
            at=self.now,
            next_id=self.next_id,
            conversations=conversations,
            entries=entries,
            submissions=submissions,
            tasks=tasks,
            documents=documents,
            replies=replies,
            progress=progress,
            deleted=deleted,
            contents=contents,
            pins=pins,
            unpinned=unpinned,
            reclaimed=reclaimed,
        )

    async def commit(self, batch: Batch) -> None:
        await soon(self.storage.commit(batch))

    def conversation(self, *, parent: ForkPoint | None = None, owner: int | None = None) -> ConversationRecord:
        return ConversationRecord(id=self.id(), created_at=self.now, parent=parent, owner=owner)

    def entry(self, conversation: int, *, data: JsonValue = None, head: bool = False) -> EntryRecord:
        """An entry of the next batch."""
        id = self.id()
        return EntryRecord(
            id=id,
            seq=self.seq + 1,
            created_at=self.now,
            conversation_id=conversation,
            kind="note",
            raw_messages=to_raw([{"role": "user", "content": f"entry {id}"}]),
            raw_data=to_raw(data),
            head=id if head else None,
        )

    def submission(self, conversation: int, *, request_id: str | None = None) -> SubmissionRecord:
        return SubmissionRecord(
            id=self.id(),
            conversation_id=conversation,
            type="input",
            status="queued",
            digest="digest",
            created_at=self.now,
            request_id=request_id,
        )

    def task(self, conversation: int, *, kind: str = "work") -> TaskRecord:
        return TaskRecord(
            id=self.id(),
            conversation_id=conversation,
            kind=kind,
            version=1,
            created_at=self.now,
            state=Pending(phase="begin"),
            nonce="nonce",
        )

    def document(self, kind: str = "plan", *, scope_id: int = 1, key: str = "") -> DocumentRecord:
        """A document of the next batch."""
        return DocumentRecord(
            id=self.id(),
            kind=kind,
            scope="conversation",
            scope_id=scope_id,
            key=key,
            history="rewindable",
            fork="as_of",
            created_at=self.now,
            created_seq=self.seq + 1,
        )

    def retired(self, record: DocumentRecord) -> DocumentRecord:
        """As it is once the next batch has retired it."""
        return msgspec.structs.replace(record, retired_at=self.now, retired_seq=self.seq + 1)


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(_WAIT_SECONDS):
        return await awaitable


async def refused(error: type[Exception], awaitable: Awaitable[Any]) -> Exception:  # Any: it has no result here
    """Await something that must raise ``error``, and give what it raised."""
    try:
        await soon(awaitable)
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised")


async def begun(subject: Subject) -> Line:
    """An open store with the root conversation in it."""
    line = await Line.open(subject)
    await line.commit(line.batch(conversations=[ConversationRecord(id=1, created_at=line.now)]))
    return line
