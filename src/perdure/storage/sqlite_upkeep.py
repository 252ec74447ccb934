"""What is done to a whole SQLite store beside its daily work: checking, measuring."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import cast

import apsw

from perdure.kernel.storage import MAX_BIGGEST, ConversationSize, RowCounts, SizeReport
from perdure.storage import sqlite_contents
from perdure.storage.checking import MOST_FINDINGS, record_check
from perdure.storage.rows import TABLES
from perdure.storage.sqlite_schema import roll_back

_STRAY = "WHERE seq > ? OR document_id NOT IN (SELECT id FROM documents) LIMIT 100"
_STRAY_BASES = f"SELECT document_id, seq FROM bases {_STRAY}"  # noqa: S608 - a constant
_STRAY_DELTAS = f"SELECT document_id, seq FROM deltas {_STRAY}"  # noqa: S608 - a constant
_BIGGEST = """
WITH parts (conversation, entries, bytes) AS (
    SELECT conversation_id, count(*), sum(length(body)) FROM entries GROUP BY conversation_id
    UNION ALL SELECT conversation_id, 0, sum(length(body)) FROM submissions GROUP BY conversation_id
    UNION ALL SELECT conversation_id, 0, sum(length(body)) FROM tasks GROUP BY conversation_id
    UNION ALL SELECT scope_id, 0, length(body) FROM documents WHERE scope = 'conversation'
    UNION ALL SELECT d.scope_id, 0, length(b.value) FROM bases AS b JOIN documents AS d ON d.id = b.document_id
        WHERE d.scope = 'conversation'
    UNION ALL SELECT d.scope_id, 0, length(b.ops) FROM deltas AS b JOIN documents AS d ON d.id = b.document_id
        WHERE d.scope = 'conversation'
)
SELECT conversation, sum(entries), sum(bytes),
    EXISTS (SELECT 1 FROM conversations WHERE id = conversation AND owner IS 0)
FROM parts GROUP BY conversation ORDER BY sum(bytes) DESC, conversation LIMIT ?
"""


def check(link: apsw.Connection) -> list[str]:
    """What is wrong with a store, one line each, at most a hundred."""
    found: list[str] = []
    link.execute("BEGIN")
    try:
        pages = link.execute(f"PRAGMA integrity_check({MOST_FINDINGS})")
        found += [f"pages: {line}" for (line,) in pages if line != "ok"]
        if not found:  # damaged pages say nothing of what was written
            _check_records(link, found)
    except (apsw.CorruptError, apsw.NotADBError) as error:
        found.append(f"pages: {error}")
    finally:
        roll_back(link)
    return found[:MOST_FINDINGS]


def _check_records(link: apsw.Connection, found: list[str]) -> None:
    ((seq, next_id),) = link.execute("SELECT seq, next_id FROM meta")
    for table in TABLES:
        wrong = record_check(table, seq=seq, next_id=next_id)
        for *stored, body in link.execute(f"SELECT * FROM {table} ORDER BY id"):  # noqa: S608 - a constant
            found += wrong(tuple(stored), body)
            if len(found) >= MOST_FINDINGS:
                return
    for sql in (_STRAY_BASES, _STRAY_DELTAS):
        for id, at in link.execute(sql, (seq,)):
            found.append(f"documents: a value of document {id} in commit {at} belongs to no document or no commit")
    sql = "SELECT id FROM documents d WHERE retired_seq IS NULL AND id NOT IN (SELECT document_id FROM bases) LIMIT 100"
    found += [f"documents: document {id} has no base" for (id,) in link.execute(sql)]
    found += islice(sqlite_contents.check(link), MOST_FINDINGS)


def measure(link: apsw.Connection, path: str) -> SizeReport:
    """What is in the files, as of one commit. Reads every table once, but not what long values go on with."""
    link.execute("BEGIN")
    try:
        documents = _table(link, "documents", "length(body)")
        bases, deltas = _table(link, "bases", "length(value)"), _table(link, "deltas", "length(ops)")
        conversations, entries = _table(link, "conversations", "length(body)"), _table(link, "entries", "length(body)")
        submissions, tasks = _table(link, "submissions", "length(body)"), _table(link, "tasks", "length(body)")
        mailbox = _table(link, "mailbox", "length(body) + coalesce(length(result), 0)")
        contents = sqlite_contents.measure(link)
        free = _number(link, "PRAGMA freelist_count") * _number(link, "PRAGMA page_size")
        biggest = [
            ConversationSize(id=id, entries=count, bytes=size, deleted=bool(deleted))
            for id, count, size, deleted in cast(
                "Iterator[tuple[int, int, int, int]]", link.execute(_BIGGEST, (MAX_BIGGEST,))
            )
        ]
    finally:
        roll_back(link)
    return SizeReport(
        total=taken(path),
        conversations=conversations.bytes,
        entries=entries.bytes,
        submissions=submissions.bytes,
        tasks=tasks.bytes,
        documents=documents.bytes + bases.bytes + deltas.bytes,
        contents=contents.bytes,
        mailbox=mailbox.bytes,
        free=free,
        log=taken(path, ("-wal",)),
        rows=RowCounts(
            conversations=conversations.rows,
            entries=entries.rows,
            submissions=submissions.rows,
            tasks=tasks.rows,
            documents=documents.rows,
            states=bases.rows + deltas.rows,
            contents=contents.rows,
            mail=mailbox.rows,
        ),
        biggest=tuple(biggest),
    )


def taken(path: str, suffixes: Sequence[str] = ("", "-wal")) -> int:
    """Bytes of the files of a store, those that are there."""
    found = 0
    for suffix in suffixes:
        with suppress(FileNotFoundError):
            found += os.stat(f"{path}{suffix}").st_size
    return found


def _table(link: apsw.Connection, table: str, size: str) -> sqlite_contents.Amount:
    (found,) = link.execute(f"SELECT count(*), coalesce(sum({size}), 0) FROM {table}")  # noqa: S608 - constants
    return sqlite_contents.Amount(*cast("tuple[int, int]", found))


def _number(link: apsw.Connection, sql: str) -> int:
    return cast("int", link.execute(sql).get)
