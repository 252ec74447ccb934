"""Deleting in a PostgreSQL store, inside the transaction of the commit that does it (rules K192 to K197)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.kernel.errors import StorageError
from perdure.kernel.records import ConversationRecord, DocumentRecord, EntryRecord
from perdure.storage.deletion import keeps
from perdure.storage.postgres_link import Int8s, Link
from perdure.storage.rows import conversation_row

_decode_conversation = msgspec.json.Decoder(ConversationRecord).decode
_decode_document = msgspec.json.Decoder(DocumentRecord).decode
_decode_entry = msgspec.json.Decoder(EntryRecord).decode
_encode = msgspec.json.Encoder().encode

_LIVE = (
    "SELECT id FROM perdure.tasks WHERE session = %(session)s AND live = 1 AND conversation_id = %(id)s UNION ALL"
    " SELECT id FROM perdure.submissions WHERE session = %(session)s AND status IN ('queued', 'placed')"
    " AND conversation_id = %(id)s LIMIT 1"
)
_OF_TASKS = (
    "SELECT d.id FROM perdure.tasks AS t JOIN perdure.documents AS d"
    " ON d.session = t.session AND d.scope = 'task' AND d.scope_id = t.id"
    " WHERE t.session = %(session)s AND t.conversation_id = %(id)s"
)
_WORK = (
    "DELETE FROM perdure.submissions WHERE session = %(session)s AND conversation_id = %(id)s",
    "DELETE FROM perdure.tasks WHERE session = %(session)s AND conversation_id = %(id)s",
)
_DOCUMENTS = (
    "DELETE FROM perdure.bases WHERE session = %(session)s AND document_id = ANY (%(ids)s)",
    "DELETE FROM perdure.deltas WHERE session = %(session)s AND document_id = ANY (%(ids)s)",
    "DELETE FROM perdure.documents WHERE session = %(session)s AND id = ANY (%(ids)s)",
)
_LATER = (
    "DELETE FROM perdure.bases WHERE session = %(session)s AND document_id = ANY (%(ids)s) AND seq > %(seq)s",
    "DELETE FROM perdure.deltas WHERE session = %(session)s AND document_id = ANY (%(ids)s) AND seq > %(seq)s",
)
_REPLACE = (
    "UPDATE perdure.conversations SET owner = %(owner)s, parent = %(parent)s, forked_at = %(at)s, body = %(body)s"
    " WHERE session = %(session)s AND id = %(id)s"
)


class PostgresShelf:
    """The records of a session, for ``deletion.delete``."""

    def __init__(self, link: Link, session: int, path: str) -> None:
        self._cursor = link.cursor(binary=True)
        self._session = session
        self._path = path

    def _first(self, sql: str, **values: object) -> list[bytes]:
        """The first column of what it finds."""
        self._run(sql, **values)
        return [row[0] for row in self._cursor]

    def _run(self, sql: str, **values: object) -> None:
        self._cursor.execute(sql.encode(), {"session": self._session, **values})

    def conversation(self, id: int) -> ConversationRecord | None:
        sql = "SELECT body FROM perdure.conversations WHERE session = %(session)s AND id = %(id)s"
        found = self._first(sql, id=id)
        return _decode_conversation(found[0]) if found else None

    def forks(self, id: int) -> Sequence[ConversationRecord]:
        sql = "SELECT body FROM perdure.conversations WHERE session = %(session)s AND parent = %(id)s"
        return list(map(_decode_conversation, self._first(sql, id=id)))

    def replace(self, record: ConversationRecord) -> None:
        id, owner, parent, at = conversation_row(record)
        self._run(_REPLACE, id=id, owner=owner, parent=parent, at=at, body=_encode(record))

    def remove(self, id: int) -> None:
        self._run("DELETE FROM perdure.conversations WHERE session = %(session)s AND id = %(id)s", id=id)

    def drop_work(self, id: int) -> None:
        for live in self._first(_LIVE, id=id):
            raise StorageError(f"{self._path}: conversation {id} is to be deleted, and {live} in it is live")
        self._run(_OF_TASKS, id=id)
        self._drop([document for (document,) in self._cursor])
        for sql in _WORK:
            self._run(sql, id=id)

    def drop_entries(self, id: int, through: int) -> int:
        here = "FROM perdure.entries WHERE session = %(session)s AND conversation_id = %(id)s"
        self._run(f"DELETE {here} AND id > %(through)s", id=id, through=through)
        newest = self._first(f"SELECT body {here} ORDER BY id DESC LIMIT 1", id=id)
        return max((_decode_entry(body).seq for body in newest), default=0)

    def drop_documents(self, id: int, seq: int) -> None:
        sql = (
            "SELECT body FROM perdure.documents"
            " WHERE session = %(session)s AND scope = 'conversation' AND scope_id = %(id)s"
        )
        records = list(map(_decode_document, self._first(sql, id=id)))
        kept = {record.id for record in records if keeps(record, seq)}
        for sql in _LATER:
            self._run(sql, ids=Int8s(kept), seq=seq)
        self._drop([record.id for record in records if record.id not in kept])

    def _drop(self, documents: Sequence[int]) -> None:
        for sql in _DOCUMENTS:
            self._run(sql, ids=Int8s(documents))
