"""The reads of a PostgreSQL store: one statement each, and with it the newest commit, in one exchange.

The commit is looked up after the records, so it is the one they are of, or a later one: whoever waits until it has
settled has waited long enough.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
)
from perdure.storage.packing import unpack
from perdure.storage.postgres_link import Byteas, Int8s, Link, ServerError, Target, errors
from perdure.storage.rules import MAX_ID, as_of, lineage_of, no_history, no_mail, ranges

T = TypeVar("T")
Record = TypeVar("Record", ConversationRecord, EntryRecord, SubmissionRecord, TaskRecord, DocumentRecord)

_PLACES = 64
"""Segments of a history that one statement looks through."""

_SEQ = "SELECT seq FROM perdure.sessions WHERE id = %s"
_THERE = "session = %(session)s AND owner IS DISTINCT FROM 0"
_LINEAGE = f"""
WITH RECURSIVE chain (id, parent, forked_at, depth) AS (
    SELECT id, parent, forked_at, 0 FROM perdure.conversations WHERE {_THERE} AND id = %(id)s
    UNION ALL
    SELECT c.id, c.parent, c.forked_at, depth + 1
        FROM chain JOIN perdure.conversations AS c ON c.session = %(session)s AND c.id = chain.parent
)
SELECT id, forked_at FROM chain ORDER BY depth
"""  # noqa: S608 - a constant
_CLOSURE = f"""
WITH RECURSIVE closure (id, depth) AS (
    SELECT id, 0 FROM perdure.conversations WHERE {_THERE} AND id = %(id)s
    UNION
    SELECT c.id, depth + 1 FROM closure
        JOIN perdure.tasks AS t ON t.session = %(session)s AND t.conversation_id = closure.id
        JOIN perdure.conversations AS c ON c.session = %(session)s AND c.owner = t.id
)
SELECT id FROM closure ORDER BY depth, id
"""  # noqa: S608 - a constant
_PLACE = "FROM unnest(%(places)s::int8[], %(lows)s::int8[], %(highs)s::int8[]) AS place (conversation, low, high),"
_ENTRIES = (
    f"SELECT e.body {_PLACE} LATERAL (SELECT id, body FROM perdure.entries WHERE session = %(session)s"  # noqa: S608
    " AND conversation_id = conversation AND id BETWEEN low AND high ORDER BY id {0} LIMIT %(limit)s) AS e"
    " ORDER BY e.id {0} LIMIT %(limit)s"
)
# The newest head marker of each range, by one step of the index each; of these the newest.
_HEAD = (
    f"SELECT e.body {_PLACE} LATERAL (SELECT id, body FROM perdure.entries WHERE session = %(session)s"  # noqa: S608
    " AND conversation_id = conversation AND id BETWEEN low AND high AND head IS NOT NULL"
    " ORDER BY id DESC LIMIT 1) AS e ORDER BY e.id DESC LIMIT 1"
)
_ALIVE = "retired_seq IS NULL"
_ALIVE_AT = "created_seq <= %(at)s AND (retired_seq IS NULL OR retired_seq > %(at)s)"
_SCOPE = (
    "SELECT body FROM perdure.documents WHERE session = %(session)s AND scope = %(scope)s AND scope_id = %(scope_id)s"
    " AND {0} ORDER BY id"
)
_DOCUMENT = """
SELECT d.body, b.seq, b.version, b.value, ARRAY(
    SELECT ops FROM perdure.deltas WHERE session = %(session)s AND document_id = d.id AND seq > b.seq
        AND seq <= %(upto)s ORDER BY seq
) FROM (
    SELECT id, body FROM perdure.documents WHERE session = %(session)s AND scope = %(scope)s
        AND scope_id = %(scope_id)s AND kind = %(kind)s AND sha256(key) = sha256(%(key)s) AND {0}
        ORDER BY id DESC LIMIT 1
) AS d LEFT JOIN LATERAL (
    SELECT seq, version, value FROM perdure.bases WHERE session = %(session)s AND document_id = d.id
        AND seq <= %(upto)s ORDER BY seq DESC LIMIT 1
) AS b ON true
"""
_CONTENTS = "FROM perdure.contents AS c WHERE session = %(session)s AND digest"
_HELD = "EXISTS (SELECT 1 FROM perdure.pins AS p WHERE p.session = c.session AND p.digest = c.digest)"

_decode_conversation = msgspec.json.Decoder(ConversationRecord).decode
_decode_entry = msgspec.json.Decoder(EntryRecord).decode
_decode_submission = msgspec.json.Decoder(SubmissionRecord).decode
_decode_task = msgspec.json.Decoder(TaskRecord).decode
_decode_document = msgspec.json.Decoder(DocumentRecord).decode


class Reader:
    """Reads of one session, all on the thread that has its connection."""

    def __init__(self, target: Target, link: Link, session: int) -> None:
        self._target = target
        self._link = link
        self._session = session
        self._cursor = link.cursor(binary=True)
        self._newest = link.cursor(binary=True)
        self._seq = 0

    def run(self, read: Callable[[Reader], T]) -> tuple[int, T]:
        """Do ``read``, and tell the commit it saw, or a later one."""
        try:
            value = read(self)
        except (errors.DataError, OverflowError, struct.error, UnicodeEncodeError) as error:
            raise InvalidRead(f"what was looked for is nothing a record can have ({error})") from error
        except msgspec.MsgspecError as error:
            raise StorageCorrupt(f"{self._target} holds a record that is not one ({error})") from error
        except ServerError as error:
            raise self._target.explained(error, "read") from None
        return self._seq, value

    def _rows(self, sql: str, **values: object) -> list[tuple[Any, ...]]:  # Any: the statement knows
        with self._link.pipeline():
            self._cursor.execute(sql.encode(), {"session": self._session, **values}, prepare=True)
            self._newest.execute(_SEQ, (self._session,), prepare=True)
        found = self._newest.fetchone()
        if found is None:
            raise StorageError(f"{self._target} was removed while it was open")
        self._seq = int(found[0])
        return self._cursor.fetchall()

    def _one(self, decode: Callable[[bytes], Record], sql: str, **values: object) -> Record | None:
        found = self._many(decode, sql, **values)
        return found[0] if found else None

    def _many(self, decode: Callable[[bytes], Record], sql: str, **values: object) -> list[Record]:
        return [decode(body) for (body,) in self._rows(sql, **values)]

    # --- records ---------------------------------------------------------------------------------------------

    def conversation(self, id: int) -> ConversationRecord | None:
        sql = f"SELECT body FROM perdure.conversations WHERE {_THERE} AND id = %(id)s"  # noqa: S608 - a constant
        return self._one(_decode_conversation, sql, id=id)

    def entry(self, id: int) -> EntryRecord | None:
        sql = "SELECT body FROM perdure.entries WHERE session = %(session)s AND id = %(id)s"
        return self._one(_decode_entry, sql, id=id)

    def submission(self, id: int) -> SubmissionRecord | None:
        sql = "SELECT body FROM perdure.submissions WHERE session = %(session)s AND id = %(id)s"
        return self._one(_decode_submission, sql, id=id)

    def task(self, id: int) -> TaskRecord | None:
        sql = "SELECT body FROM perdure.tasks WHERE session = %(session)s AND id = %(id)s"
        return self._one(_decode_task, sql, id=id)

    def request(self, conversation_id: int, request_id: str) -> SubmissionRecord | None:
        sql = (
            "SELECT body FROM perdure.submissions WHERE session = %(session)s AND conversation_id = %(id)s"
            " AND request_id IS NOT NULL AND sha256(request_id) = sha256(%(request)s)"
        )
        return self._one(_decode_submission, sql, id=conversation_id, request=request_id.encode())

    # --- histories -------------------------------------------------------------------------------------------

    def lineage(self, conversation_id: int) -> tuple[Segment, ...]:
        return lineage_of((id, at) for id, at in self._rows(_LINEAGE, id=conversation_id))

    def closure(self, conversation_id: int) -> list[int]:
        return [id for (id,) in self._rows(_CLOSURE, id=conversation_id)]

    def entries(
        self, lineage: Sequence[Segment], first: int, last: int | None, order: Order, limit: int
    ) -> list[EntryRecord]:
        sql = _ENTRIES.format("ASC" if order == "ascending" else "DESC")
        found: list[EntryRecord] = []
        places = ranges(lineage, first, last, order)
        for begin in range(0, len(places), _PLACES):
            found += self._placed(sql, places[begin : begin + _PLACES], limit=limit - len(found))
            if len(found) == limit:
                break
        return found

    def head(self, lineage: Sequence[Segment], last: int | None) -> EntryRecord | None:
        places = ranges(lineage, 0, last, "descending")
        for begin in range(0, len(places), _PLACES):
            for found in self._placed(_HEAD, places[begin : begin + _PLACES]):
                return found
        return None

    def _placed(self, sql: str, places: Sequence[tuple[int, int, int]], **values: object) -> list[EntryRecord]:
        ids, lows, highs = zip(*places, strict=True)
        return self._many(_decode_entry, sql, places=Int8s(ids), lows=Int8s(lows), highs=Int8s(highs), **values)

    # --- scans -----------------------------------------------------------------------------------------------

    def conversations(self, owner: int | Anything | None, after: int, limit: int) -> list[ConversationRecord]:
        if owner is ANY:
            where = _THERE
        elif owner is None:
            where = "session = %(session)s AND owner IS NULL"
        else:
            where = "session = %(session)s AND owner = %(owner)s"
        values: dict[str, object] = {} if owner is ANY or owner is None else {"owner": owner}
        return self._scan(_decode_conversation, "conversations", where, values, after, limit)

    def tasks(
        self, conversation_id: int | None, kind: str | None, live: bool | None, after: int, limit: int
    ) -> list[TaskRecord]:
        where = "session = %(session)s" if live is None else f"session = %(session)s AND live = {int(live)}"
        values: dict[str, object] = {"conversation_id": conversation_id, "kind": kind}
        return self._scan(_decode_task, "tasks", where, values, after, limit)

    def submissions(
        self, conversation_id: int | None, status: str | None, after: int, limit: int
    ) -> list[SubmissionRecord]:
        # As a word of the statement, a status that is not at its end is found by the index of these.
        where, values = "session = %(session)s", {"conversation_id": conversation_id, "status": status}
        if status in ("queued", "placed"):
            where, values = f"{where} AND status = '{status}'", {"conversation_id": conversation_id}
        return self._scan(_decode_submission, "submissions", where, values, after, limit)

    def _scan(
        self,
        decode: Callable[[bytes], Record],
        table: str,
        where: str,
        equal: dict[str, Any],  # Any: ids and texts
        after: int,
        limit: int,
    ) -> list[Record]:
        given = {column: value for column, value in equal.items() if value is not None}
        also = "".join(f" AND {column} = %({column})s" for column in given if f"%({column})s" not in where)
        # Every part is a constant of this module; the values are bound.
        sql = f"SELECT body FROM perdure.{table} WHERE {where}{also} AND id > %(after)s ORDER BY id LIMIT %(limit)s"  # noqa: S608
        return self._many(decode, sql, after=after, limit=limit, **given)

    # --- documents -------------------------------------------------------------------------------------------

    def documents(self, scope: str, scope_id: int, at: int | None) -> list[DocumentRecord]:
        sql = _SCOPE.format(_ALIVE if at is None else _ALIVE_AT)
        values: dict[str, object] = {} if at is None else {"at": at}
        found = self._many(_decode_document, sql, scope=scope, scope_id=scope_id, **values)
        return [as_of(record, at) for record in found]

    def document(self, address: Address, at: int | None) -> StoredDocument | None:
        values: dict[str, object] = {"upto": MAX_ID} if at is None else {"upto": at, "at": at}
        values |= {"scope": address.scope, "scope_id": address.scope_id, "kind": address.kind}
        sql = _DOCUMENT.format(_ALIVE if at is None else _ALIVE_AT)
        for body, seq, version, base, deltas in self._rows(sql, key=address.key.encode(), **values):
            record = _decode_document(body)
            if seq is None:
                raise no_history(record, at)
            return StoredDocument(as_of(record, at), int(version), base, deltas)
        return None

    # --- contents --------------------------------------------------------------------------------------------

    def has_contents(self, digests: Sequence[str]) -> set[str]:
        rows = self._rows(f"SELECT digest {_CONTENTS} = ANY (%(digests)s)", digests=_digests(digests))
        return {digest.hex() for (digest,) in rows}

    def contents(self, digests: Sequence[str]) -> dict[str, bytes]:
        sql = f"SELECT digest, size, packing, data {_CONTENTS} = ANY (%(digests)s)"
        return {row[0].hex(): unpack(*row) for row in self._rows(sql, digests=_digests(digests))}

    def content_scan(self, pinned: bool, after: str, limit: int) -> list[StoredContent]:
        held = _HELD if pinned else f"NOT {_HELD}"
        sql = f"SELECT digest, size {_CONTENTS} > %(after)s AND {held} ORDER BY digest LIMIT %(limit)s"
        rows = self._rows(sql, after=bytes.fromhex(after), limit=limit)
        return [StoredContent(digest.hex(), size) for digest, size in rows]

    def content_pins(self, after: int, limit: int) -> list[int]:
        sql = (
            "SELECT DISTINCT pin FROM perdure.pins WHERE session = %(session)s AND pin > %(after)s"
            " ORDER BY pin LIMIT %(limit)s"
        )
        return [pin for (pin,) in self._rows(sql, after=after, limit=limit)]

    # --- mailbox ---------------------------------------------------------------------------------------------

    def mail(self, after: int, limit: int) -> list[Mail]:
        sql = (
            "SELECT id, kind, body, posted_at FROM perdure.mailbox WHERE session = %(session)s"
            " AND answered_seq IS NULL AND id > %(after)s ORDER BY id LIMIT %(limit)s"
        )
        return [
            Mail(id=id, kind=kind, body=msgspec.Raw(body), posted_at=at)
            for id, kind, body, at in self._rows(sql, after=after, limit=limit)
        ]

    def reply(self, mail_id: int) -> MailReply | None:
        sql = "SELECT ok, result FROM perdure.mailbox WHERE session = %(session)s AND id = %(id)s"
        for ok, result in self._rows(sql, id=mail_id):
            return None if result is None else MailReply(mail_id, bool(ok), msgspec.Raw(result))
        raise no_mail(mail_id)

    def newest_mail(self) -> int:
        """The id of the newest request without an answer; 0 if none waits."""
        sql = "SELECT max(id) FROM perdure.mailbox WHERE session = %(session)s AND answered_seq IS NULL"
        return self._rows(sql)[0][0] or 0


def _digests(digests: Sequence[str]) -> Byteas:
    return Byteas(bytes.fromhex(digest) for digest in digests)
