"""The reads of a JSONL store: found in the index, read from the files by offset."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from threading import Lock
from typing import TypeVar

import msgspec

from perdure.kernel.errors import StorageCorrupt, StorageError
from perdure.kernel.records import (
    Address,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    SubmissionRecord,
    TaskRecord,
)
from perdure.kernel.storage import ANY, Anything, Mail, Order, Segment, StoredContent, StoredDocument, StoreInfo
from perdure.storage import jsonl_contents, jsonl_disk, jsonl_mailbox
from perdure.storage.jsonl_image import Image, open_image
from perdure.storage.jsonl_index import EntryRow, State, WorkRow
from perdure.storage.jsonl_lines import RecordLine, entry_line, record_line
from perdure.storage.rules import MAX_ID, as_of, lineage_of, no_history, ranges

T = TypeVar("T")

_ATTEMPTS = 5


class Live:
    """The image that an opening reads from, which its writer changes and replaces: one of them at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock = Lock()
        self.image: Image | None = None
        self.failure: StorageError | None = None
        """Why there is none."""

    def get(self) -> Image:
        if self.image is None:
            raise self.failure or StorageError(f"the store at {self.path} is not open")
        return self.image

    def replace(self, image: Image | None) -> None:
        if self.image is not None:
            self.image.close()
        self.image = image


class Reader:
    """Reads of one store. Who does not own it looks before each whether there is more to read."""

    def __init__(self, live: Live, *, owned: bool) -> None:
        self._live = live
        self._owned = owned

    def info(self) -> StoreInfo:
        return self._image.info(read_only=True)

    @property
    def _image(self) -> Image:
        return self._live.get()

    def run(self, read: Callable[[Reader], T]) -> tuple[int, T]:
        """Do ``read`` as of one commit, and tell that commit."""
        path = self._live.path
        with self._live.lock:
            for _ in range(_ATTEMPTS):
                try:
                    if not self._owned:
                        self._follow()
                    value = read(self)
                except (OSError, StorageCorrupt) as error:
                    # What was compacted or reclaimed meanwhile is gone; what is damaged stays so.
                    if self._owned or self._live.image is None or self._live.image.is_newest():
                        raise jsonl_disk.explained(error, path, "read") from error
                except msgspec.MsgspecError as error:
                    raise StorageCorrupt(f"{path} holds a record that is not one ({error})") from error
                else:
                    return self._image.seq, value
        raise StorageError(f"{path} is compacted by others again and again; try later")

    def _follow(self) -> None:
        live = self._live
        if live.image is None or not live.image.in_place():
            known = live.image
            fresh = open_image(live.path, write=False)
            if known is not None and known.header.log_id != fresh.header.log_id:
                fresh.close()
                raise StorageError(f"{live.path} was replaced by another store; open that")
            live.replace(fresh)
        elif live.image.unread() > 0:
            try:
                live.image.follow()
            except BaseException:
                live.replace(None)  # what was read of it in part is not to be read from
                raise

    def close(self) -> None:
        with self._live.lock:
            self._live.replace(None)

    # --- records ---------------------------------------------------------------------------------------------

    def _entry(self, row: EntryRow) -> EntryRecord:
        entry = entry_line(self._image.line("entries", row))
        assert entry is not None, "the image has looked"
        return entry

    def _record(self, place: WorkRow | State) -> RecordLine:
        record = record_line(self._image.line("records", place))
        assert record is not None, "the image has looked"
        return record

    def _submission(self, row: WorkRow) -> SubmissionRecord:
        found = self._record(row).submission
        assert found is not None, "what the row is of"
        return found

    def _task(self, row: WorkRow) -> TaskRecord:
        found = self._record(row).task
        assert found is not None, "what the row is of"
        return found

    def conversation(self, id: int) -> ConversationRecord | None:
        return self._image.index.there(id)

    def entry(self, id: int) -> EntryRecord | None:
        row = self._image.index.entries.rows.get(id)
        return None if row is None else self._entry(row)

    def submission(self, id: int) -> SubmissionRecord | None:
        row = self._image.index.submissions.rows.get(id)
        return None if row is None else self._submission(row)

    def task(self, id: int) -> TaskRecord | None:
        row = self._image.index.tasks.rows.get(id)
        return None if row is None else self._task(row)

    def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        return self.submission(self._image.index.requests.get((conversation_id, request_id), 0))

    # --- histories -------------------------------------------------------------------------------------------

    def lineage(self, conversation_id: int) -> tuple[Segment, ...]:
        return lineage_of(self._image.index.ancestry(conversation_id))

    def closure(self, conversation_id: int) -> list[int]:
        return self._image.index.closure(conversation_id)

    def entries(
        self, lineage: Sequence[Segment], first: int, last: int | None, order: Order, limit: int
    ) -> list[EntryRecord]:
        return [self._entry(row) for row in islice(self._history(lineage, first, last, order), limit)]

    def _history(self, lineage: Sequence[Segment], first: int, last: int | None, order: Order) -> Iterator[EntryRow]:
        table = self._image.index.entries
        for conversation_id, low, high in ranges(lineage, first, last, order):
            ids = table.of.get(conversation_id, [])
            found = ids[bisect_left(ids, low) : bisect_right(ids, high)]
            yield from (table.rows[id] for id in (found if order == "ascending" else reversed(found)))

    def head(self, lineage: Sequence[Segment], last: int | None) -> EntryRecord | None:
        table = self._image.index.entries
        for conversation_id, low, high in ranges(lineage, 0, last, "descending"):
            ids = table.marked.get(conversation_id, [])
            upto = bisect_right(ids, high)
            if upto and ids[upto - 1] >= low:
                return self._entry(table.rows[ids[upto - 1]])
        return None

    # --- scans -----------------------------------------------------------------------------------------------

    def conversations(self, owner: int | Anything | None, after: int, limit: int) -> list[ConversationRecord]:
        index = self._image.index
        if not isinstance(owner, Anything):
            ids = index.owned.get(owner, [])
            return [index.conversations[id] for id in ids[bisect_right(ids, after) :][:limit]]
        assert owner is ANY
        found = (id for id, record in index.conversations.items() if id > after and record.shared_through is None)
        return [index.conversations[id] for id in nsmallest(limit, found)]

    def tasks(
        self, conversation_id: int | None, kind: str | None, live: bool | None, after: int, limit: int
    ) -> list[TaskRecord]:
        rows = self._image.index.tasks.scan(conversation_id, marked=bool(live), after=after)
        found = (row for row in rows if (kind is None or row.mark == kind) and (live is None or row.open == live))
        return [self._task(row) for row in islice(found, limit)]

    def submissions(
        self, conversation_id: int | None, status: str | None, after: int, limit: int
    ) -> list[SubmissionRecord]:
        marked = status in ("queued", "placed")
        rows = self._image.index.submissions.scan(conversation_id, marked=marked, after=after)
        found = (row for row in rows if status is None or row.mark == status)
        return [self._submission(row) for row in islice(found, limit)]

    # --- documents -------------------------------------------------------------------------------------------

    def documents(self, scope: str, scope_id: int, at: int | None) -> list[DocumentRecord]:
        return [as_of(h.record, at) for h in self._image.index.scope(scope, scope_id) if h.alive(at)]

    def document(self, address: Address, at: int | None) -> StoredDocument | None:
        history = self._image.index.alive(address, at)
        if history is None:
            return None
        upto = MAX_ID if at is None else at
        base = next((state for state in reversed(history.bases) if state.seq <= upto), None)
        if base is None:
            raise no_history(history.record, at)
        deltas = [state for state in history.deltas if base.seq < state.seq <= upto]
        return StoredDocument(
            as_of(history.record, at),
            base.version,
            bytes(self._record(base).base),
            [bytes(self._record(state).ops) for state in deltas],
        )

    # --- contents --------------------------------------------------------------------------------------------

    def has_contents(self, digests: Sequence[str]) -> set[str]:
        stored = self._image.index.contents
        return {digest for digest in digests if digest in stored}

    def contents(self, digests: Sequence[str]) -> dict[str, bytes]:
        stored = self._image.index.contents
        return {d: jsonl_contents.read(self._live.path, d, stored[d]) for d in digests if d in stored}

    def content_scan(self, pinned: bool, after: str, limit: int) -> list[StoredContent]:
        index = self._image.index
        found = (digest for digest in index.contents if digest > after and (digest in index.held) == pinned)
        return [StoredContent(digest, index.contents[digest]) for digest in nsmallest(limit, found)]

    def content_pins(self, after: int, limit: int) -> list[int]:
        return nsmallest(limit, (pin for pin in self._image.index.pins if pin > after))

    # --- mailbox ---------------------------------------------------------------------------------------------

    def mail(self, after: int, limit: int) -> list[Mail]:
        return jsonl_mailbox.waiting(self._image.mailbox, self._image.index.answered, after, limit)

    def newest_mail(self) -> int:
        """The id of the newest request without an answer; 0 if none waits."""
        requests, _ = jsonl_mailbox.listed(self._image.mailbox)
        return max(requests - self._image.index.answered.keys(), default=0)
