"""What a transaction reads: its own writes, then what earlier transactions staged, then storage (rules K45, K60)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, TypeVar

from perdure.kernel import lineage as history
from perdure.kernel.errors import NotFound, TransactionClosed
from perdure.kernel.records import (
    ConversationRecord,
    EntryRecord,
    SubmissionRecord,
    SubmissionStatus,
    TaskRecord,
    check_request_id,
)
from perdure.kernel.storage import ANY, Anything, Order

if TYPE_CHECKING:
    from perdure.kernel.session import Session

M = TypeVar("M", SubmissionRecord, TaskRecord)
R = TypeVar("R", ConversationRecord, EntryRecord, SubmissionRecord, TaskRecord)


class TransactionReads:
    """The reading half of a Transaction, over the records it has staged itself."""

    def __init__(self, session: Session, conversation_id: int | None, *, internal: bool) -> None:
        self.session = session
        self.conversation_id = conversation_id
        self.internal = internal
        """Admitted while the session closes."""
        self._open = False
        self._conversations: dict[int, ConversationRecord] = {}
        self._entries: dict[int, EntryRecord] = {}
        self._tasks: dict[int, TaskRecord] = {}
        self._submissions: dict[int, SubmissionRecord] = {}
        self._deleted: set[int] = set()
        """Conversations this transaction deletes."""
        self._free_requests: set[tuple[int, str]] = set()
        """Request ids that no earlier transaction used."""

    def check_open(self) -> None:
        """Raises TransactionClosed after the block, SessionFailed or SessionClosed once nothing can be committed."""
        if not self._open:
            raise TransactionClosed("this transaction's block has ended; begin another with commit()")
        session = self.session
        if session.closing or session.failed is not None:
            session.check_admission(self.internal)

    def _here(self, conversation: int | None) -> int:
        where = self.conversation_id if conversation is None else conversation
        if where is None:
            raise ValueError("name the conversation, or use conversation.commit()")
        return where

    async def conversation(self, id: int) -> ConversationRecord:
        """Raises NotFound."""
        self.check_open()
        if id in self._deleted:
            raise NotFound(f"conversation {id} is deleted by this transaction")
        found = self._conversations.get(id) or await self.session.find_conversation(id)
        return _found(found, "conversation", id)

    def _knows(self, conversation_id: int) -> bool:
        """Whether memory tells that it exists; else ``conversation`` does."""
        there = conversation_id in self._conversations or self.session.knows_conversation(conversation_id)
        return there and conversation_id not in self._deleted

    async def entry(self, id: int) -> EntryRecord:
        """Raises NotFound."""
        self.check_open()
        session = self.session
        found = self._entries.get(id) or session.staged.entries.get(id)
        return _found(found or await session.reading(session.storage.entry(id)), "entry", id)

    async def submission(self, id: int) -> SubmissionRecord:
        """Raises NotFound."""
        self.check_open()
        session = self.session
        found = self._submissions.get(id) or session.staged.submissions.get(id) or session.open_submissions.get(id)
        found = found or await session.reading(session.storage.submission(id))
        return _found(self._unless_gone(found), "submission", id)

    async def task(self, id: int) -> TaskRecord:
        """Raises NotFound."""
        self.check_open()
        session = self.session
        found = self.live_task(id) or self._tasks.get(id) or session.staged.tasks.get(id)
        found = found or await session.reading(session.storage.task(id))
        return _found(self._unless_gone(found), "task", id)

    def _unless_gone(self, record: M | None) -> M | None:
        return None if record is not None and record.conversation_id in self._deleted else record

    async def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        """The submission that holds the request id in this conversation, whatever became of it."""
        self.check_open()
        check_request_id(request_id)
        if conversation_id in self._deleted:
            return None
        own = _asked(self._submissions, conversation_id, request_id)
        return own or await self._earlier_request(conversation_id, request_id)

    async def _earlier_request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        session = self.session
        found = _asked(session.staged.submissions, conversation_id, request_id) or await session.reading(
            session.storage.request(conversation_id, request_id)
        )
        if found is None:
            self._free_requests.add((conversation_id, request_id))
        return found

    async def entries(
        self,
        conversation: int | None = None,
        *,
        first: int = 0,
        last: int | None = None,
        order: Order = "ascending",
        limit: int = 100,
    ) -> list[EntryRecord]:
        """Entries of a conversation through its forks, in id order, own writes included."""
        self.check_open()
        segments = await self._lineage(self._here(conversation))
        await self.session.settled_here()
        read = self.session.storage.entries(segments, first=first, last=last, order=order, limit=limit)
        stored = await self.session.reading(read)
        own = [e for e in self._entries.values() if history.contains(segments, e.conversation_id, e.id)]
        inside = [e for e in own if e.id >= first and (last is None or e.id <= last)]
        return _merge(stored, inside, limit, descending=order == "descending")

    async def head(self, conversation: int | None = None, *, last: int | None = None) -> EntryRecord | None:
        """The newest head marker at or below ``last``."""
        self.check_open()
        segments = await self._lineage(self._here(conversation))
        own = [
            e
            for e in self._entries.values()
            if e.head is not None
            and (last is None or e.id <= last)
            and history.contains(segments, e.conversation_id, e.id)
        ]
        if own:
            return max(own, key=_by_id)
        await self.session.settled_here()
        return await self.session.reading(self.session.storage.head(segments, last=last))

    async def conversations(
        self, *, owner: int | Anything | None = ANY, after: int = 0, limit: int = 100
    ) -> list[ConversationRecord]:
        """Conversations with id > ``after``, by owner."""
        self.check_open()
        await self.session.settled_here()

        def read(after: int) -> Awaitable[list[ConversationRecord]]:
            return self.session.storage.conversations(owner=owner, after=after, limit=limit)

        stored = await self._unchanged(read, lambda c: c.id in self._deleted, after, limit)
        own = [c for c in self._conversations.values() if c.id > after and owner in (ANY, c.owner)]
        return _merge(stored, own, limit)

    async def tasks(
        self,
        *,
        conversation_id: int | None = None,
        kind: str | None = None,
        live: bool | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[TaskRecord]:
        """Tasks with id > ``after``, in id order."""
        self.check_open()
        await self.session.settled_here()

        def read(after: int) -> Awaitable[list[TaskRecord]]:
            return self.session.storage.tasks(
                conversation_id=conversation_id, kind=kind, live=live, after=after, limit=limit
            )

        stored = await self._unchanged(
            read, lambda t: t.id in self._tasks or t.conversation_id in self._deleted, after, limit
        )
        own = [
            t
            for t in self._tasks.values()
            if t.id > after
            and t.conversation_id not in self._deleted
            and conversation_id in (None, t.conversation_id)
            and kind in (None, t.kind)
            and live in (None, t.live)
        ]
        return _merge(stored, own, limit)

    async def submissions(
        self,
        *,
        conversation_id: int | None = None,
        status: SubmissionStatus | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[SubmissionRecord]:
        """Submissions with id > ``after``, in id order."""
        self.check_open()
        await self.session.settled_here()

        def read(after: int) -> Awaitable[list[SubmissionRecord]]:
            return self.session.storage.submissions(
                conversation_id=conversation_id, status=status, after=after, limit=limit
            )

        stored = await self._unchanged(
            read, lambda s: s.id in self._submissions or s.conversation_id in self._deleted, after, limit
        )
        own = [
            s
            for s in self._submissions.values()
            if s.id > after
            and s.conversation_id not in self._deleted
            and conversation_id in (None, s.conversation_id)
            and status in (None, s.status)
        ]
        return _merge(stored, own, limit)

    async def _unchanged(
        self, read: Callable[[int], Awaitable[list[R]]], changed: Callable[[R], bool], after: int, limit: int
    ) -> list[R]:
        """Stored records that this transaction has not replaced or deleted, page by page: ``limit`` of them, or all
        there are."""
        found: list[R] = []
        while True:
            page = await self.session.reading(read(after))
            found.extend(record for record in page if not changed(record))
            if len(page) < limit or len(found) >= limit:
                return found
            after = page[-1].id

    def live_task(self, id: int) -> TaskRecord | None:
        """The live task as this transaction leaves it so far, from memory; None if it is terminal or unknown."""
        own = self._tasks.get(id)
        if own is not None:
            return own if own.live else None
        return self.session.live.staged.get(id)

    def live_tasks(self) -> Iterator[TaskRecord]:
        """Every live task as this transaction leaves it so far, from memory."""
        own = self._tasks
        for id, record in self.session.live.staged.items():
            if id not in own:
                yield record
        for record in own.values():
            if record.live:
                yield record

    @property
    def changed_tasks(self) -> Mapping[int, TaskRecord]:
        """The tasks this transaction created or changed so far."""
        return self._tasks

    @property
    def changed_submissions(self) -> Mapping[int, SubmissionRecord]:
        """The submissions this transaction created or changed so far."""
        return self._submissions

    @property
    def new_entries(self) -> Sequence[EntryRecord]:
        """The entries this transaction appended so far, in order."""
        return list(self._entries.values())

    @property
    def new_conversations(self) -> Mapping[int, ConversationRecord]:
        return self._conversations

    @property
    def deleted_conversations(self) -> AbstractSet[int]:
        return self._deleted

    async def _lineage(self, conversation_id: int) -> tuple[history.Segment, ...]:
        if conversation_id in self._deleted:
            raise NotFound(f"conversation {conversation_id} is deleted by this transaction")
        own = self._conversations.get(conversation_id)
        if own is None:
            return await self.session.lineage(conversation_id, staged=True)
        return history.of(own, () if own.parent is None else await self._lineage(own.parent.conversation))


def _found(record: R | None, what: str, id: int) -> R:
    if record is None:
        raise NotFound(f"there is no {what} {id}")
    return record


def _asked(
    submissions: Mapping[int, SubmissionRecord], conversation_id: int, request_id: str
) -> SubmissionRecord | None:
    for record in submissions.values():
        if record.request_id == request_id and record.conversation_id == conversation_id:
            return record
    return None


def _by_id(record: ConversationRecord | EntryRecord | SubmissionRecord | TaskRecord) -> int:
    return record.id


def _merge(stored: list[R], own: list[R], limit: int, *, descending: bool = False) -> list[R]:
    """Stored records and this transaction's own, in id order."""
    if not own:
        return stored[:limit]
    return sorted([*stored, *own], key=_by_id, reverse=descending)[:limit]
