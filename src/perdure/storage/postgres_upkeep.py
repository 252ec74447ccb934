"""What is done to a whole session, or to the tables of all, beside the daily work: checking, measuring, copying."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from perdure.kernel.errors import StorageError
from perdure.kernel.storage import MAX_BIGGEST, ConversationSize, RowCounts, SizeReport, VacuumReport
from perdure.storage import postgres_contents
from perdure.storage.checking import MOST_FINDINGS, record_check
from perdure.storage.postgres_link import Diagnostic, Link, Target, errors
from perdure.storage.postgres_owner import Row, find
from perdure.storage.postgres_schema import COLUMNS
from perdure.storage.rows import TABLES

_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_TEXTS = {"submissions": 3, "documents": 4}
"""The column that is a text in the record and bytes in the row."""
_STRAY = (
    "SELECT document_id, seq FROM perdure.{0} AS state WHERE session = %(session)s AND (seq > %(seq)s OR NOT EXISTS"
    " (SELECT 1 FROM perdure.documents AS d WHERE d.session = state.session AND d.id = state.document_id)) LIMIT 100"
)
_BASELESS = (
    "SELECT id FROM perdure.documents AS d WHERE session = %(session)s AND retired_seq IS NULL AND NOT EXISTS"
    " (SELECT 1 FROM perdure.bases AS b WHERE b.session = d.session AND b.document_id = d.id) LIMIT 100"
)
_SIZES = {
    "conversations": "octet_length(body)",
    "entries": "octet_length(body)",
    "submissions": "octet_length(body)",
    "tasks": "octet_length(body)",
    "documents": "octet_length(body)",
    "bases": "octet_length(value)",
    "deltas": "octet_length(ops)",
    "contents": "size",
    "mailbox": "octet_length(body) + coalesce(octet_length(result), 0)",
}
_BIGGEST = """
WITH parts (conversation, entries, bytes) AS (
    SELECT conversation_id, count(*), sum(octet_length(body)) FROM perdure.entries WHERE session = %(session)s
        GROUP BY conversation_id
    UNION ALL SELECT conversation_id, 0, sum(octet_length(body)) FROM perdure.submissions WHERE session = %(session)s
        GROUP BY conversation_id
    UNION ALL SELECT conversation_id, 0, sum(octet_length(body)) FROM perdure.tasks WHERE session = %(session)s
        GROUP BY conversation_id
    UNION ALL SELECT scope_id, 0, octet_length(body) FROM perdure.documents
        WHERE session = %(session)s AND scope = 'conversation'
    UNION ALL SELECT d.scope_id, 0, octet_length(b.value) FROM perdure.bases AS b
        JOIN perdure.documents AS d ON d.session = b.session AND d.id = b.document_id
        WHERE b.session = %(session)s AND d.scope = 'conversation'
    UNION ALL SELECT d.scope_id, 0, octet_length(b.ops) FROM perdure.deltas AS b
        JOIN perdure.documents AS d ON d.session = b.session AND d.id = b.document_id
        WHERE b.session = %(session)s AND d.scope = 'conversation'
)
SELECT conversation, sum(entries)::int8, sum(bytes)::int8, EXISTS (
    SELECT 1 FROM perdure.conversations AS c WHERE c.session = %(session)s AND c.id = conversation AND c.owner = 0)
FROM parts GROUP BY conversation ORDER BY sum(bytes) DESC, conversation LIMIT %(most)s
"""
_TAKEN = "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::int8 FROM pg_class WHERE relkind = 'r' AND relnamespace = 'perdure'::regnamespace"  # noqa: E501
_COPY = (
    "WITH made AS (INSERT INTO perdure.sessions"
    " (name, format, log_id, epoch, writer, seq, next_id, committed_at, takeovers)"
    " SELECT %s, format, %s, epoch, writer, seq, next_id, committed_at, 0 FROM perdure.sessions WHERE id = %s"
    " ON CONFLICT (name) DO NOTHING RETURNING id)"
    " INSERT INTO perdure.mailboxes SELECT made.id, last FROM made, perdure.mailboxes WHERE session = %s"
    " RETURNING session"
)


def check(link: Link, target: Target, session: int, go_on: Callable[[], None]) -> list[str]:
    """What is wrong with a session as one commit left it, one line each, at most a hundred."""
    found: list[str] = []
    with link.transaction():
        link.execute(_SNAPSHOT)
        row = _found(link, target)
        for table in TABLES:
            wrong = record_check(table, seq=row.seq, next_id=row.next_id)
            text = _TEXTS.get(table)
            with link.cursor(table, binary=True) as cursor:
                cursor.itersize = 200
                sql = f"SELECT {COLUMNS[table]} FROM perdure.{table} WHERE session = %s ORDER BY id"  # noqa: S608
                for *stored, body in cursor.execute(sql.encode(), (session,)):
                    if text is not None and stored[text] is not None:
                        stored[text] = stored[text].decode(errors="replace")
                    found += wrong(tuple(stored), body)
                    if len(found) >= MOST_FINDINGS:
                        return found[:MOST_FINDINGS]
            go_on()
        for table in ("bases", "deltas"):
            for id, at in link.execute(_STRAY.format(table).encode(), {"session": session, "seq": row.seq}):
                found.append(f"documents: a value of document {id} in commit {at} belongs to no document or no commit")
        baseless = link.execute(_BASELESS, {"session": session})
        found += [f"documents: document {id} has no base" for (id,) in baseless]
        found += islice(postgres_contents.check(link, session), MOST_FINDINGS)
    return found[:MOST_FINDINGS]


def measure(link: Link, session: int) -> SizeReport:
    """What is stored of a session, as of one commit. ``total`` is the sum: its tables are those of others too."""
    rows: dict[str, int] = {}
    bytes: dict[str, int] = {}
    with link.transaction():
        link.execute(_SNAPSHOT)
        for table, size in _SIZES.items():
            sql = f"SELECT count(*), coalesce(sum({size}), 0)::int8 FROM perdure.{table} WHERE session = %s"  # noqa: S608
            rows[table], bytes[table] = link.execute(sql.encode(), (session,)).fetchone() or (0, 0)
        biggest = [
            ConversationSize(id=id, entries=count, bytes=size, deleted=deleted)
            for id, count, size, deleted in link.execute(_BIGGEST, {"session": session, "most": MAX_BIGGEST})
        ]
    return SizeReport(
        total=sum(bytes.values()),
        conversations=bytes["conversations"],
        entries=bytes["entries"],
        submissions=bytes["submissions"],
        tasks=bytes["tasks"],
        documents=bytes["documents"] + bytes["bases"] + bytes["deltas"],
        contents=bytes["contents"],
        mailbox=bytes["mailbox"],
        free=0,
        log=0,
        rows=RowCounts(
            conversations=rows["conversations"],
            entries=rows["entries"],
            submissions=rows["submissions"],
            tasks=rows["tasks"],
            documents=rows["documents"],
            states=rows["bases"] + rows["deltas"],
            contents=rows["contents"],
            mail=rows["mailbox"],
        ),
        biggest=tuple(biggest),
    )


def vacuum(link: Link, target: Target, *, within_ms: int, go_on: Callable[[], None]) -> VacuumReport:
    """Vacuum the tables of all sessions, one after the other; nobody's commits wait. Raises StorageError."""
    warned: list[str] = []

    def note(notice: Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            warned.append(notice.message_primary or "")

    link.add_notice_handler(note)
    before = _taken(link)
    link.execute("SELECT set_config('statement_timeout', %s, false)", (f"{within_ms}ms",))
    for table in ("sessions", "mailboxes", *COLUMNS):
        go_on()
        try:
            link.execute(f"VACUUM perdure.{table}".encode())
        except errors.QueryCanceled as error:
            go_on()  # closing the store ends it too
            raise StorageError(
                f"{target} was not vacuumed wholly: of {within_ms} ms a table, perdure.{table} had too few, or waited "
                f"for another's lock ({error.diag.message_primary}); allow more by within_ms"
            ) from None
        if warned:
            raise StorageError(
                f"{target} was not vacuumed: {warned[0]}. Only the owner of the tables may; the server's own "
                "autovacuum does the same by and by"
            )
    return VacuumReport(before=before, after=_taken(link))


def copy(link: Link, target: Target, session: int, goal: str, *, log_id: str, go_on: Callable[[], None]) -> None:
    """Copy a session as one commit left it into a new one of the same server, or leave nothing. Raises StorageError."""
    with link.transaction():
        link.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        made = link.execute(_COPY, (goal, log_id, session, session)).fetchone()
        if made is None:
            raise StorageError(f"session {goal!r} of {target.where} is there already; copy to a name that is free")
        for table, columns in COLUMNS.items():
            sql = f"INSERT INTO perdure.{table} SELECT %s, {columns} FROM perdure.{table} WHERE session = %s"  # noqa: S608
            link.execute(sql.encode(), (made[0], session))
            go_on()


def _taken(link: Link) -> int:
    row = link.execute(_TAKEN).fetchone()
    return 0 if row is None else row[0]


def _found(link: Link, target: Target) -> Row:
    row = find(link, target)
    if row is None:
        raise StorageError(f"{target} was removed while it was open")
    return row
