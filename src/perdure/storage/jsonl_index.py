"""What a JSONL store keeps in memory: where each record is, and what it is found by.

Of entries, submissions, tasks and states of documents that is a row of some 200 to 350 bytes each; conversations and
the records of documents are kept whole, they are small. Bodies stay on the disk.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from sys import intern
from typing import Generic, TypeVar

import msgspec

from perdure.kernel.records import Address, ConversationRecord, DocumentRecord, EntryRecord
from perdure.storage.deletion import delete, keeps
from perdure.storage.jsonl_lines import ContentsLine, Kind, Marker, RecordLine
from perdure.storage.rules import KEPT_ANSWERS

DIGEST_BYTES = 75
"""What a digest takes in a line, about."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """A line of a sidecar."""

    offset: int
    length: int


class EntryRow(Place, frozen=True, gc=False):
    id: int
    conversation_id: int
    seq: int


class WorkRow(Place, frozen=True, gc=False):
    """A submission or a task."""

    id: int
    conversation_id: int
    mark: str
    """A submission's status, a task's kind."""
    open: bool
    """A submission that is queued or placed, a task that is live."""
    request_id: str | None = None


class State(Place, frozen=True, gc=False):
    """A base of a document, or a change of it."""

    seq: int
    version: int
    size: int
    """Bytes of the value alone."""


@dataclass(slots=True)
class History:
    """A document incarnation."""

    record: DocumentRecord
    bases: list[State] = field(default_factory=list[State])
    deltas: list[State] = field(default_factory=list[State])

    def alive(self, at: int | None) -> bool:
        retired = self.record.retired_seq
        if at is None:
            return retired is None
        return self.record.created_seq <= at and (retired is None or retired > at)


Row = TypeVar("Row", EntryRow, WorkRow)


class Table(Generic[Row]):
    """Rows by id and by conversation; of the open ones, and of head markers, the ids besides. All in id order."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.ids: list[int] = []
        self.of: dict[int, list[int]] = {}
        self.marked: dict[int, list[int]] = {}
        """By conversation."""

    def put(self, row: Row, *, marked: bool) -> Row | None:
        """The row that it takes the place of, if there was one."""
        old = self.rows.get(row.id)
        if old is None:
            insort(self.ids, row.id)
            insort(self.of.setdefault(row.conversation_id, []), row.id)
        self.rows[row.id] = row
        ids = self.marked.get(row.conversation_id, [])
        at = bisect_left(ids, row.id)
        if (at < len(ids) and ids[at] == row.id) != marked:
            if marked:
                self.marked.setdefault(row.conversation_id, ids).insert(at, row.id)
            else:
                del ids[at]
                if not ids:
                    del self.marked[row.conversation_id]
        return old

    def drop(self, conversation_id: int, *, after: int = 0) -> list[Row]:
        """Remove those of a conversation with a higher id, and give them."""
        gone = _after(self.of.get(conversation_id, []), after)
        for index in (self.of, self.marked):
            if conversation_id in index:
                del index[conversation_id][bisect_right(index[conversation_id], after) :]
                if not index[conversation_id]:
                    del index[conversation_id]
        for id in gone:
            del self.ids[bisect_left(self.ids, id)]
        return [self.rows.pop(id) for id in gone]

    def scan(self, conversation_id: int | None, *, marked: bool, after: int) -> Iterator[Row]:
        """In id order. Finding marked ones costs what there is of them."""
        if conversation_id is not None:
            ids = _after((self.marked if marked else self.of).get(conversation_id, []), after)
        elif marked:
            ids = sorted(id for some in self.marked.values() for id in some if id > after)
        else:
            ids = _after(self.ids, after)
        return (self.rows[id] for id in ids)


class Index:
    """Everything committed, as ``refusal.Stored`` and ``deletion.Shelf`` see it."""

    def __init__(self, mailbox: str) -> None:
        self._mailbox = mailbox
        self.conversations: dict[int, ConversationRecord] = {}
        self.owned: dict[int | None, list[int]] = {}
        self.forked: dict[int, set[int]] = {}
        self.entries: Table[EntryRow] = Table()
        self.submissions: Table[WorkRow] = Table()
        self.requests: dict[tuple[int, str], int] = {}
        self.tasks: Table[WorkRow] = Table()
        self.documents: dict[int, History] = {}
        self.at_address: dict[Address, list[int]] = {}
        self.in_scope: dict[tuple[str, int], list[int]] = {}
        self.contents: dict[str, int] = {}
        """Digest and size."""
        self.pins: dict[int, set[str]] = {}
        self.held: Counter[str] = Counter()
        """By digest, how many pins hold it."""
        self.answered: dict[int, int] = {}
        """Requests whose answers are kept, and the commits that answered them, in order."""
        self.dead: dict[Kind, int] = {"entries": 0, "records": 0}
        """Bytes of the sidecars that nobody reads any more, about: those of deleted conversations are not counted."""

    # --- one commit ------------------------------------------------------------------------------------------

    def put_entry(self, record: EntryRecord, offset: int, length: int) -> None:
        row = EntryRow(offset, length, record.id, record.conversation_id, record.seq)
        self.entries.put(row, marked=record.head is not None)

    def put_record(self, line: RecordLine, offset: int, length: int) -> None:
        if line.conversation is not None:
            self._put_conversation(line.conversation)
        elif line.submission is not None:
            record = line.submission
            row = WorkRow(
                offset,
                length,
                record.id,
                record.conversation_id,
                intern(record.status),
                not record.settled,
                record.request_id,
            )
            if record.request_id is not None:
                self.requests[record.conversation_id, record.request_id] = record.id
            self._superseded(self.submissions.put(row, marked=row.open))
        elif line.task is not None:
            task = line.task
            row = WorkRow(offset, length, task.id, task.conversation_id, intern(task.kind), task.live)
            self._superseded(self.tasks.put(row, marked=row.open))
        elif line.document is not None:
            self._put_document(line.document, line, offset, length)
        elif line.contents is not None:
            self._put_contents(line.contents)

    def settle(self, marker: Marker) -> None:
        """What a commit does besides its records, after them."""
        for id in sorted(marker.replies):
            self.answered[id] = marker.seq
        for id in list(self.answered)[:-KEPT_ANSWERS]:
            del self.answered[id]
        if marker.deleted:
            delete(self, marker.deleted)

    def _superseded(self, place: Place | None, kind: Kind = "records") -> None:
        if place is not None:
            self.dead[kind] += place.length

    def _put_conversation(self, record: ConversationRecord) -> None:
        self.conversations[record.id] = record
        if record.shared_through is None:
            insort(self.owned.setdefault(record.owner, []), record.id)
        if record.parent is not None:
            self.forked.setdefault(record.parent.conversation, set()).add(record.id)

    def _put_document(self, record: DocumentRecord, line: RecordLine, offset: int, length: int) -> None:
        history = self.documents.get(record.id)
        if history is None:
            history = self.documents[record.id] = History(record)
            insort(self.at_address.setdefault(record.address, []), record.id)
            insort(self.in_scope.setdefault((record.scope, record.scope_id), []), record.id)
        history.record = record
        if line.reclaim:
            for state in (*history.bases, *history.deltas):
                self._superseded(state)
            history.bases.clear()
            history.deltas.clear()
        if base := bytes(line.base):
            history.bases.append(State(offset, length, line.seq, line.version, len(base)))
        elif ops := bytes(line.ops):
            history.deltas.append(State(offset, length, line.seq, line.version, len(ops)))

    def _put_contents(self, line: ContentsLine) -> None:
        for digest, size in line.put:
            self.contents.setdefault(digest, size)
        for pin, digest in line.pins:
            digests = self.pins.setdefault(pin, set())
            if digest not in digests:
                digests.add(digest)
                self.held[digest] += 1
        for pin in line.unpinned:
            for digest in self.pins.pop(pin, ()):
                self.dead["records"] += DIGEST_BYTES
                self.held[digest] -= 1
                if not self.held[digest]:
                    del self.held[digest]
        for digest in line.reclaimed:
            if digest not in self.held and self.contents.pop(digest, None) is not None:
                self.dead["records"] += DIGEST_BYTES

    # --- what a commit is held against -------------------------------------------------------------------------

    def has_conversation(self, id: int) -> bool:
        return id in self.conversations

    def has_entry(self, id: int) -> bool:
        return id in self.entries.rows

    def holder_of(self, conversation_id: int, request_id: str) -> int | None:
        return self.requests.get((conversation_id, request_id))

    def alive_at(self, address: Address) -> int | None:
        found = self.alive(address)
        return None if found is None else found.record.id

    def waits(self, mail_id: int) -> bool:
        return mail_id not in self.answered and os.path.exists(request_path(self._mailbox, mail_id))

    def has_content(self, digest: str) -> bool:
        return digest in self.contents

    def is_there(self, conversation_id: int) -> bool:
        return self.there(conversation_id) is not None

    def live_tasks(self, conversation_id: int) -> Collection[int]:
        return self.tasks.marked.get(conversation_id, ())

    def open_submissions(self, conversation_id: int) -> Collection[int]:
        return self.submissions.marked.get(conversation_id, ())

    def living_documents(self, conversation_id: int) -> Collection[int]:
        return [history.record.id for history in self.scope("conversation", conversation_id) if history.alive(None)]

    # --- reading -----------------------------------------------------------------------------------------------

    def there(self, conversation_id: int) -> ConversationRecord | None:
        """A conversation, unless it is deleted."""
        found = self.conversations.get(conversation_id)
        return found if found is not None and found.shared_through is None else None

    def alive(self, address: Address, at: int | None = None) -> History | None:
        for id in reversed(self.at_address.get(address, ())):
            if self.documents[id].alive(at):
                return self.documents[id]
        return None

    def scope(self, scope: str, scope_id: int) -> list[History]:
        return [self.documents[id] for id in self.in_scope.get((scope, scope_id), ())]

    def ancestry(self, conversation_id: int) -> Iterator[tuple[int, int | None]]:
        conversation = self.there(conversation_id)
        while conversation is not None:
            parent = conversation.parent
            yield conversation.id, None if parent is None else parent.at
            conversation = None if parent is None else self.conversations[parent.conversation]

    def closure(self, conversation_id: int) -> list[int]:
        if self.there(conversation_id) is None:
            return []
        found = {conversation_id: None}
        for id in (todo := [conversation_id]):  # grows while it is walked
            for task in self.tasks.of.get(id, ()):
                owned = [child for child in self.owned.get(task, ()) if child not in found]
                todo += owned
                found.update(dict.fromkeys(owned))
        return list(found)

    # --- deleting ----------------------------------------------------------------------------------------------

    def conversation(self, id: int) -> ConversationRecord | None:
        return self.conversations.get(id)

    def forks(self, id: int) -> list[ConversationRecord]:
        return [self.conversations[fork] for fork in self.forked.get(id, ())]

    def replace(self, record: ConversationRecord) -> None:
        self.remove(record.id)
        self._put_conversation(record)

    def remove(self, id: int) -> None:
        record = self.conversations.pop(id)
        if record.shared_through is None:
            _take_out(self.owned, record.owner, id)
        if record.parent is not None:
            forks = self.forked[record.parent.conversation]
            forks.discard(id)
            if not forks:
                del self.forked[record.parent.conversation]

    def drop_work(self, id: int) -> None:
        for submission in self.submissions.drop(id):
            self._superseded(submission)
            if submission.request_id is not None:
                del self.requests[id, submission.request_id]
        for task in self.tasks.drop(id):
            self._superseded(task)
            for history in self.scope("task", task.id):
                self._drop(history)

    def drop_entries(self, id: int, through: int) -> int:
        for row in self.entries.drop(id, after=through):
            self._superseded(row, "entries")
        left = self.entries.of.get(id)
        return self.entries.rows[left[-1]].seq if left else 0

    def drop_documents(self, id: int, seq: int) -> None:
        for history in self.scope("conversation", id):
            if keeps(history.record, seq):
                for states in (history.bases, history.deltas):
                    self.dead["records"] += sum(state.length for state in states if state.seq > seq)
                    states[:] = [state for state in states if state.seq <= seq]
            else:
                self._drop(history)

    def _drop(self, history: History) -> None:
        record = history.record
        for state in (*history.bases, *history.deltas):
            self._superseded(state)
        del self.documents[record.id]
        _take_out(self.at_address, record.address, record.id)
        _take_out(self.in_scope, (record.scope, record.scope_id), record.id)


Key = TypeVar("Key")


def _take_out(index: dict[Key, list[int]], key: Key, id: int) -> None:
    ids = index[key]
    ids.remove(id)
    if not ids:
        del index[key]


def _after(ids: list[int], after: int) -> list[int]:
    return ids[bisect_right(ids, after) :]


def request_path(mailbox: str, mail_id: int) -> str:
    return os.path.join(mailbox, f"{mail_id}.json")


def answer_path(mailbox: str, mail_id: int) -> str:
    return os.path.join(mailbox, f"{mail_id}.answer.json")
