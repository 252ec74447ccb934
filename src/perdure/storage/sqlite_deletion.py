"""Deleting in an SQLite store, inside the transaction of the commit that does it (rules K192 to K197)."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import apsw
import msgspec

from perdure.kernel.errors import StorageError
from perdure.kernel.records import ConversationRecord, DocumentRecord, EntryRecord
from perdure.storage.deletion import keeps
from perdure.storage.rows import conversation_row

_decode_conversation = msgspec.json.Decoder(ConversationRecord).decode
_decode_document = msgspec.json.Decoder(DocumentRecord).decode
_decode_entry = msgspec.json.Decoder(EntryRecord).decode
_encode = msgspec.json.Encoder().encode

_LIVE = (
    "SELECT id FROM tasks INDEXED BY tasks_live WHERE live = 1 AND conversation_id = ?1 UNION ALL"
    " SELECT id FROM submissions INDEXED BY submissions_open"
    " WHERE status IN ('queued', 'placed') AND conversation_id = ?1 LIMIT 1"
)
_OF_TASKS = (
    "SELECT d.id FROM tasks AS t INDEXED BY tasks_by_conversation JOIN documents AS d INDEXED BY documents_by_address"
    " ON d.scope = 'task' AND d.scope_id = t.id WHERE t.conversation_id = ?"
)
_WORK = ("DELETE FROM submissions WHERE conversation_id = ?", "DELETE FROM tasks WHERE conversation_id = ?")
_DOCUMENT = (
    "DELETE FROM bases WHERE document_id = ?",
    "DELETE FROM deltas WHERE document_id = ?",
    "DELETE FROM documents WHERE id = ?",
)
_LATER = (
    "DELETE FROM bases WHERE document_id = ? AND seq > ?",
    "DELETE FROM deltas WHERE document_id = ? AND seq > ?",
)


class SqliteShelf:
    """The records of a store, for ``deletion.delete``."""

    def __init__(self, cursor: apsw.Cursor, path: str) -> None:
        self._cursor = cursor
        self._path = path

    def _bodies(self, sql: str, *values: int) -> list[bytes]:
        return [cast("bytes", body) for (body,) in self._cursor.execute(sql, values)]

    def conversation(self, id: int) -> ConversationRecord | None:
        found = self._bodies("SELECT body FROM conversations WHERE id = ?", id)
        return _decode_conversation(found[0]) if found else None

    def forks(self, id: int) -> Sequence[ConversationRecord]:
        return list(map(_decode_conversation, self._bodies("SELECT body FROM conversations WHERE parent = ?", id)))

    def replace(self, record: ConversationRecord) -> None:
        row = (*conversation_row(record), _encode(record))
        self._cursor.execute("REPLACE INTO conversations VALUES (?, ?, ?, ?, ?)", row)

    def remove(self, id: int) -> None:
        self._cursor.execute("DELETE FROM conversations WHERE id = ?", (id,))

    def drop_work(self, id: int) -> None:
        for (live,) in self._cursor.execute(_LIVE, (id,)):
            raise StorageError(f"{self._path}: conversation {id} is to be deleted, and {live} in it is live")
        self._drop([cast("int", document) for (document,) in self._cursor.execute(_OF_TASKS, (id,))])
        for sql in _WORK:
            self._cursor.execute(sql, (id,))

    def drop_entries(self, id: int, through: int) -> int:
        self._cursor.execute("DELETE FROM entries WHERE conversation_id = ? AND id > ?", (id, through))
        newest = "SELECT body FROM entries WHERE conversation_id = ? ORDER BY id DESC LIMIT 1"
        return max((_decode_entry(body).seq for body in self._bodies(newest, id)), default=0)

    def drop_documents(self, id: int, seq: int) -> None:
        sql = "SELECT body FROM documents WHERE scope = 'conversation' AND scope_id = ?"
        records = list(map(_decode_document, self._bodies(sql, id)))
        kept = {record.id for record in records if keeps(record, seq)}
        for sql in _LATER:
            self._cursor.executemany(sql, [(document, seq) for document in kept])
        self._drop([record.id for record in records if record.id not in kept])

    def _drop(self, documents: Sequence[int]) -> None:
        for sql in _DOCUMENT:
            self._cursor.executemany(sql, [(document,) for document in documents])
