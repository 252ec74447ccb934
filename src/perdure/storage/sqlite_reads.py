"""The reads of an SQLite store: one short read transaction each, on a connection of their own."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import apsw
import msgspec

from perdure.kernel.errors import InvalidRead, StorageCorrupt, StorageError
from perdure.kernel.records import (
    Address,
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    SubmissionRecord,
    TaskRecord,
)
from perdure.kernel.storage import (
    ANY,
    Anything,
    Mail,
    MailReply,
    Order,
    Segment,
    StoredContent,
    StoredDocument,
    StoreInfo,
)
from perdure.storage import sqlite_contents
from perdure.storage.rules import MAX_ID, as_of, lineage_of, no_history, no_mail, ranges
from perdure.storage.sqlite_schema import Link, connect, explained, roll_back
from perdure.storage.sqlite_writer import read_info

T = TypeVar("T")
Record = TypeVar("Record", ConversationRecord, EntryRecord, SubmissionRecord, TaskRecord, DocumentRecord)

_STILL_ATTEMPTS = 5
_LINEAGE = """
WITH RECURSIVE chain (id, parent, forked_at, depth) AS (
    SELECT id, parent, forked_at, 0 FROM conversations WHERE id = ? AND owner IS NOT 0
    UNION ALL
    SELECT c.id, c.parent, c.forked_at, depth + 1 FROM chain JOIN conversations AS c ON c.id = chain.parent
)
SELECT id, forked_at FROM chain ORDER BY depth
"""
_CLOSURE = """
WITH RECURSIVE closure (id) AS (
    SELECT id FROM conversations WHERE id = ? AND owner IS NOT 0
    UNION
    SELECT c.id FROM closure
        JOIN tasks AS t INDEXED BY tasks_by_conversation ON t.conversation_id = closure.id
        JOIN conversations AS c INDEXED BY conversations_by_owner ON c.owner = t.id
)
SELECT id FROM closure
"""
_ENTRIES = {
    "ascending": "SELECT body FROM entries WHERE conversation_id = ? AND id BETWEEN ? AND ? ORDER BY id LIMIT ?",
    "descending": (
        "SELECT body FROM entries WHERE conversation_id = ? AND id BETWEEN ? AND ? ORDER BY id DESC LIMIT ?"
    ),
}
# The newest head marker of each range, by one step of the index each; of these the newest.
_HEAD = """
SELECT body FROM entries WHERE id = (
    SELECT max((
        SELECT id FROM entries INDEXED BY entries_heads
            WHERE conversation_id = place.value ->> 0 AND id BETWEEN place.value ->> 1 AND place.value ->> 2
                AND head IS NOT NULL
            ORDER BY id DESC LIMIT 1
    )) FROM json_each(?) AS place
)
"""
_PLACES = 250
"""Ranges that one statement looks through for a head marker: a chain of forks has as many as it is long."""
_ADDRESS = "SELECT body FROM documents WHERE scope = ? AND scope_id = ? AND kind = ? AND key = ?"
_SCOPE = "SELECT body FROM documents WHERE scope = ? AND scope_id = ?"
_ALIVE = " AND retired_seq IS NULL"
_ALIVE_AT = " AND created_seq <= ? AND (retired_seq IS NULL OR retired_seq > ?)"
_BASE = "SELECT seq, version, value FROM bases WHERE document_id = ? AND seq <= ? ORDER BY seq DESC LIMIT 1"
_DELTAS = "SELECT ops FROM deltas WHERE document_id = ? AND seq > ? AND seq <= ? ORDER BY seq"

_decode_conversation = msgspec.json.Decoder(ConversationRecord).decode
_decode_entry = msgspec.json.Decoder(EntryRecord).decode
_decode_submission = msgspec.json.Decoder(SubmissionRecord).decode
_decode_task = msgspec.json.Decoder(TaskRecord).decode
_decode_document = msgspec.json.Decoder(DocumentRecord).decode
_encode = msgspec.json.Encoder().encode


class Reader:
    """Reads of one store, all on one thread. Each method is one statement or a few of one transaction."""

    def __init__(self, path: str, *, vfs: str | None, live: bool) -> None:
        self._path = path
        self._vfs = vfs
        self._live = live
        """Somebody in this process owns the store, so it has a write-ahead log."""
        self._face: tuple[object, ...] | None = None
        self._link: Link | None = None
        self._cursor: apsw.Cursor | None = None

    def info(self) -> StoreInfo:
        """What the store says of itself, for whoever only reads it."""
        assert self._link is not None, "reads go through run()"
        return read_info(self._link, self._path, read_only=True)

    def run(self, read: Callable[[Reader], T]) -> tuple[int, T]:
        """Do ``read`` in one transaction, and tell the commit it saw."""
        for _ in range(_STILL_ATTEMPTS):
            face = self._look()
            try:
                found = self._attempt(face, read)
            except (apsw.Error, StorageError) as error:
                if face == self._look():
                    raise explained(error, self._path, "read") from error
            except (OverflowError, UnicodeEncodeError) as error:
                raise InvalidRead(f"what was looked for is nothing a record can have ({error})") from error
            except msgspec.MsgspecError as error:
                raise StorageCorrupt(f"{self._path} holds a record that is not one ({error})") from error
            else:
                if face == self._look():
                    return found
        raise StorageError(f"{self._path} is opened and closed by others again and again; try later")

    def _attempt(self, face: tuple[object, ...] | None, read: Callable[[Reader], T]) -> tuple[int, T]:
        if self._link is None or face != self._face:
            self.close()
            self._link = connect(self._path, "read" if self._live else quietly(self._path), vfs=self._vfs)
            self._cursor = self._link.cursor()
            self._face = face
        assert self._cursor is not None
        self._cursor.execute("BEGIN")
        try:
            seq = self._cursor.execute("SELECT seq FROM meta").get
            assert isinstance(seq, int)
            return seq, read(self)
        finally:
            roll_back(self._link)

    def close(self) -> None:
        link, self._link, self._cursor = self._link, None, None
        if link is not None:
            link.close()

    def _look(self) -> tuple[object, ...] | None:
        """What tells that the connection no longer fits how the store is; None where this process owns it.

        A file without a log is opened as one that nobody writes to, so that looking at it makes no files; then
        nothing says that somebody began to write after all but the file's own face and a log beside it.
        """
        return None if self._live else face(self._path)

    def _rows(self, sql: str, values: Sequence[object]) -> Iterable[tuple[bytes, ...]]:
        assert self._cursor is not None, "reads go through run()"
        return self._cursor.execute(sql, values)  # pyright: ignore[reportReturnType, reportArgumentType]

    def _one(self, decode: Callable[[bytes], Record], sql: str, *values: object) -> Record | None:
        # To its end: a statement that was left in its middle would go on reading, and keep the log from starting over.
        found = self._many(decode, sql, *values)
        return found[0] if found else None

    def _many(self, decode: Callable[[bytes], Record], sql: str, *values: object) -> list[Record]:
        return [decode(body) for (body,) in self._rows(sql, values)]

    # --- records ---------------------------------------------------------------------------------------------

    def conversation(self, id: int) -> ConversationRecord | None:
        sql = "SELECT body FROM conversations WHERE id = ? AND owner IS NOT 0"
        return self._one(_decode_conversation, sql, id)

    def entry(self, id: int) -> EntryRecord | None:
        return self._one(_decode_entry, "SELECT body FROM entries WHERE id = ?", id)

    def submission(self, id: int) -> SubmissionRecord | None:
        return self._one(_decode_submission, "SELECT body FROM submissions WHERE id = ?", id)

    def task(self, id: int) -> TaskRecord | None:
        return self._one(_decode_task, "SELECT body FROM tasks WHERE id = ?", id)

    def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        sql = "SELECT body FROM submissions WHERE conversation_id = ? AND request_id = ?"
        return self._one(_decode_submission, sql, conversation_id, request_id)

    # --- histories -------------------------------------------------------------------------------------------

    def lineage(self, conversation_id: int) -> tuple[Segment, ...]:
        return lineage_of(self._rows(_LINEAGE, (conversation_id,)))  # pyright: ignore[reportArgumentType]

    def closure(self, conversation_id: int) -> list[int]:
        return [int(id) for (id,) in self._rows(_CLOSURE, (conversation_id,))]

    def entries(
        self, lineage: Sequence[Segment], first: int, last: int | None, order: Order, limit: int
    ) -> list[EntryRecord]:
        found: list[EntryRecord] = []
        for place in ranges(lineage, first, last, order):
            found += self._many(_decode_entry, _ENTRIES[order], *place, limit - len(found))
            if len(found) == limit:
                break
        return found

    def head(self, lineage: Sequence[Segment], last: int | None) -> EntryRecord | None:
        places = ranges(lineage, 0, last, "descending")
        for begin in range(0, len(places), _PLACES):
            found = self._one(_decode_entry, _HEAD, _encode(places[begin : begin + _PLACES]).decode())
            if found is not None:
                return found
        return None

    # --- scans -----------------------------------------------------------------------------------------------

    def conversations(self, owner: int | Anything | None, after: int, limit: int) -> list[ConversationRecord]:
        if owner is ANY:
            sql, values = "SELECT body FROM conversations WHERE id > ? AND owner IS NOT 0", (after, limit)
        else:
            sql, values = "SELECT body FROM conversations WHERE owner IS ? AND id > ?", (owner, after, limit)
        return self._many(_decode_conversation, f"{sql} ORDER BY id LIMIT ?", *values)

    def tasks(
        self, conversation_id: int | None, kind: str | None, live: bool | None, after: int, limit: int
    ) -> list[TaskRecord]:
        sql, values = tasks_query(conversation_id, kind, live, after, limit)
        return self._many(_decode_task, sql, *values)

    def submissions(
        self, conversation_id: int | None, status: str | None, after: int, limit: int
    ) -> list[SubmissionRecord]:
        sql, values = submissions_query(conversation_id, status, after, limit)
        return self._many(_decode_submission, sql, *values)

    # --- documents -------------------------------------------------------------------------------------------

    def documents(self, scope: str, scope_id: int, at: int | None) -> list[DocumentRecord]:
        sql, values = (_ALIVE, ()) if at is None else (_ALIVE_AT, (at, at))
        found = self._many(_decode_document, f"{_SCOPE}{sql} ORDER BY id", scope, scope_id, *values)
        return [as_of(record, at) for record in found]

    def document(self, address: Address, at: int | None) -> StoredDocument | None:
        sql, values = (_ALIVE, ()) if at is None else (f"{_ALIVE_AT} ORDER BY id DESC LIMIT 1", (at, at))
        place = (address.scope, address.scope_id, address.kind, address.key)
        record = self._one(_decode_document, _ADDRESS + sql, *place, *values)
        if record is None:
            return None
        upto = MAX_ID if at is None else at
        for seq, version, base in self._rows(_BASE, (record.id, upto)):
            deltas = [ops for (ops,) in self._rows(_DELTAS, (record.id, seq, upto))]
            return StoredDocument(as_of(record, at), int(version), base, deltas)
        raise no_history(record, at)

    # --- contents --------------------------------------------------------------------------------------------

    def has_contents(self, digests: Sequence[str]) -> set[str]:
        assert self._link is not None, "reads go through run()"
        return sqlite_contents.has(self._link, digests)

    def contents(self, digests: Sequence[str]) -> dict[str, bytes]:
        assert self._link is not None, "reads go through run()"
        return sqlite_contents.get(self._link, digests)

    def content_scan(self, pinned: bool, after: str, limit: int) -> list[StoredContent]:
        assert self._link is not None, "reads go through run()"
        return sqlite_contents.scan(self._link, pinned, after, limit)

    def content_pins(self, after: int, limit: int) -> list[int]:
        assert self._link is not None, "reads go through run()"
        return sqlite_contents.pins(self._link, after, limit)

    # --- mailbox ---------------------------------------------------------------------------------------------

    def mail(self, after: int, limit: int) -> list[Mail]:
        sql = "SELECT id, kind, body, posted_at FROM mailbox WHERE answered_seq IS NULL AND id > ? ORDER BY id LIMIT ?"
        rows: Iterable[tuple[int, str, bytes, int]] = self._rows(sql, (after, limit))  # pyright: ignore[reportAssignmentType]
        return [Mail(id=id, kind=kind, body=msgspec.Raw(body), posted_at=at) for id, kind, body, at in rows]

    def reply(self, mail_id: int) -> MailReply | None:
        for ok, result in self._rows("SELECT ok, result FROM mailbox WHERE id = ?", (mail_id,)):
            return MailReply(mail_id, bool(ok), msgspec.Raw(result)) if result else None
        raise no_mail(mail_id)

    def newest_mail(self) -> int:
        """The id of the newest request without an answer; 0 if none waits."""
        assert self._cursor is not None
        return self._cursor.execute("SELECT max(id) FROM mailbox WHERE answered_seq IS NULL").get or 0  # pyright: ignore[reportReturnType]


def face(path: str) -> tuple[object, ...]:
    """How a store looks from outside. Without a log, it changes with every change of the store."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise StorageError(f"{path} is gone") from None
    if os.path.exists(f"{path}-wal"):
        return (found.st_dev, found.st_ino)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def quietly(path: str) -> Literal["read", "still"]:
    """How to open a store that this process does not own, so that looking at it leaves no file behind (K160)."""
    return "read" if os.path.exists(f"{path}-wal") else "still"


def tasks_query(
    conversation_id: int | None, kind: str | None, live: bool | None, after: int, limit: int
) -> tuple[str, list[object]]:
    """The statement of a scan and its values. The index it goes by is named: nothing is left to a guess."""
    if live:
        index = "tasks_live"
    elif conversation_id is not None:
        index = "tasks_by_conversation"
    else:
        index = None if kind is None else "tasks_by_kind"
    wanted = "" if live is None else f" AND live = {int(live)}"
    return _scan("tasks", index, wanted, {"conversation_id": conversation_id, "kind": kind}, after, limit)


def submissions_query(
    conversation_id: int | None, status: str | None, after: int, limit: int
) -> tuple[str, list[object]]:
    """As ``tasks_query``."""
    if status in ("queued", "placed"):
        index, wanted = "submissions_open", " AND status IN ('queued', 'placed')"
    else:
        index, wanted = None if conversation_id is None else "submissions_by_conversation", ""
    equal = {"conversation_id": conversation_id, "status": status}
    return _scan("submissions", index, wanted, equal, after, limit)


def _scan(
    table: str, index: str | None, wanted: str, equal: dict[str, int | str | None], after: int, limit: int
) -> tuple[str, list[object]]:
    by = "" if index is None else f" INDEXED BY {index}"
    also = "".join(f" AND {column} = ?" for column, value in equal.items() if value is not None)
    values: list[object] = [after, *(value for value in equal.values() if value is not None), limit]
    # Every part is a constant of this module; the values are bound.
    return f"SELECT body FROM {table}{by} WHERE id > ?{wanted}{also} ORDER BY id LIMIT ?", values  # noqa: S608
