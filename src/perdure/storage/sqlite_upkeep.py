"""What is done to a whole SQLite store beside its daily work: checking, measuring."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from itertools import islice

import apsw
import msgspec

from perdure.kernel.records import EntryRecord
from perdure.kernel.storage import SizeReport
from perdure.storage import sqlite_contents
from perdure.storage.sqlite_rows import TABLES, row_of
from perdure.storage.sqlite_schema import roll_back

_MOST_FINDINGS = 100
_STRAY = "WHERE seq > ? OR document_id NOT IN (SELECT id FROM documents) LIMIT 100"
_STRAY_BASES = f"SELECT document_id, seq FROM bases {_STRAY}"  # noqa: S608 - a constant
_STRAY_DELTAS = f"SELECT document_id, seq FROM deltas {_STRAY}"  # noqa: S608 - a constant


def check(link: apsw.Connection) -> list[str]:
    """What is wrong with a store, one line each, at most a hundred."""
    found: list[str] = []
    link.execute("BEGIN")
    try:
        pages = link.execute(f"PRAGMA integrity_check({_MOST_FINDINGS})")
        found += [f"pages: {line}" for (line,) in pages if line != "ok"]
        if not found:  # damaged pages say nothing of what was written
            _check_records(link, found)
    except (apsw.CorruptError, apsw.NotADBError) as error:
        found.append(f"pages: {error}")
    finally:
        roll_back(link)
    return found[:_MOST_FINDINGS]


def _check_records(link: apsw.Connection, found: list[str]) -> None:
    ((seq, next_id),) = link.execute("SELECT seq, next_id FROM meta")
    for table, type in TABLES.items():
        decode = msgspec.json.Decoder(type).decode
        for *stored, body in link.execute(f"SELECT * FROM {table} ORDER BY id"):  # noqa: S608 - a constant
            id = stored[0]
            try:
                record = decode(body)
            except msgspec.MsgspecError as error:
                found.append(f"{table}: record {id} cannot be read: {error}")
                continue
            if tuple(stored) != row_of(record):
                found.append(f"{table}: record {id} contradicts what it is found by")
            if id >= next_id:
                found.append(f"{table}: record {id} is not below the next id, {next_id}")
            if isinstance(record, EntryRecord) and record.seq > seq:
                found.append(f"{table}: record {id} is of commit {record.seq}, after the last, {seq}")
            if len(found) >= _MOST_FINDINGS:
                return
    for sql in (_STRAY_BASES, _STRAY_DELTAS):
        for id, at in link.execute(sql, (seq,)):
            found.append(f"documents: a value of document {id} in commit {at} belongs to no document or no commit")
    sql = "SELECT id FROM documents d WHERE retired_seq IS NULL AND id NOT IN (SELECT document_id FROM bases) LIMIT 100"
    found += [f"documents: document {id} has no base" for (id,) in link.execute(sql)]
    found += islice(sqlite_contents.check(link), _MOST_FINDINGS)


def measure(link: apsw.Connection, path: str) -> SizeReport:
    """The bytes of the records, and of the files they are in."""

    def total(table: str, column: str = "body") -> int:
        sql = f"SELECT coalesce(sum(length({column})), 0) FROM {table}"  # noqa: S608 - constants, see below
        value = link.execute(sql).get
        assert isinstance(value, int)
        return value

    files = 0
    for name in (path, f"{path}-wal"):
        if os.path.exists(name):
            files += os.stat(name).st_size
    return SizeReport(
        total=files,
        entries=total("entries"),
        submissions=total("submissions"),
        tasks=total("tasks"),
        documents=total("documents") + total("bases", "value") + total("deltas", "ops"),
        contents=sqlite_contents.measure(link),
    )
