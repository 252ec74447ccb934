"""The way of a commit into PostgreSQL: a group of commits is one statement, which writes only if its fence holds.

A connection that is lost may leave a commit of which nobody here knows whether it is stored. It is the owner's
connection, so it ends the store: opening it again tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, cast

from msgspec import structs

from perdure.kernel.errors import StaleEpochError, StorageError
from perdure.kernel.storage import Batch, StoreInfo
from perdure.storage.deletion import delete
from perdure.storage.encoded import EncodedCommit, Tables
from perdure.storage.group_writer import GroupWriter
from perdure.storage.postgres_contents import apply
from perdure.storage.postgres_deletion import PostgresShelf
from perdure.storage.postgres_link import Byteas, Int8s, Link, Target, Texts
from perdure.storage.postgres_owner import Owned, find
from perdure.storage.rows import Row
from perdure.storage.rules import KEPT_ANSWERS
from perdure.storage.worker import Worker

MAX_COMMIT_BYTES = 512 << 20
"""Of one commit, encoded: PostgreSQL takes no message above 1 GiB."""

_ADVANCE = (
    "fence AS (UPDATE perdure.sessions SET seq = %s, next_id = %s, committed_at = %s, epoch = %s"
    " WHERE id = %s AND epoch = %s AND writer = %s AND seq = %s RETURNING id)"
)
_RECLAIM = (
    "{0}_gone AS (DELETE FROM perdure.{0} AS old USING fence, unnest(%s::int8[], %s::int8[]) AS gone (id, seq)"
    " WHERE old.session = fence.id AND old.document_id = gone.id AND old.seq < gone.seq)"
)
_END = "SELECT count(*) FROM fence"
# Progress is acknowledged before the server has flushed it, as if it were a server that never waits (rule K232).
_END_UNFLUSHED = "SELECT count(*), set_config('synchronous_commit', 'off', true) FROM fence"
# What was asked for is not read again.
_ANSWER = (
    "UPDATE perdure.mailbox AS mail SET answered_seq = a.seq, ok = a.ok, result = a.result, body = ''"
    " FROM unnest(%s::int8[], %s::int8[], %s::bytea[], %s::int8[]) AS a (seq, ok, result, id)"
    " WHERE mail.session = %s AND mail.id = a.id AND answered_seq IS NULL"
)
_FORGET = (
    "DELETE FROM perdure.mailbox WHERE session = %s AND id IN (SELECT id FROM perdure.mailbox WHERE session = %s AND"
    " answered_seq IS NOT NULL ORDER BY answered_seq DESC, id DESC OFFSET %s)"
)


class _Table(NamedTuple):
    columns: tuple[tuple[str, type[Int8s | Texts | Byteas]], ...]
    conflict: str = ""

    def insert(self, name: str) -> str:
        columns = ", ".join(column for column, _ in self.columns)
        arrays = ", ".join(f"%s::{_TYPES[kind]}[]" for _, kind in self.columns)
        return (
            f"{name} AS (INSERT INTO perdure.{name} (session, {columns})"  # noqa: S608 - constants of this module
            f" SELECT fence.id, given.* FROM fence, unnest({arrays}) AS given{self.conflict})"
        )

    def arrays(self, rows: Sequence[Row]) -> list[object]:
        return [kind(column) for (_, kind), column in zip(self.columns, zip(*rows, strict=True), strict=True)]  # pyright: ignore[reportArgumentType]


_TYPES = {Int8s: "int8", Texts: "text", Byteas: "bytea"}
_TABLES = Tables[_Table](
    conversations=_Table(
        (("id", Int8s), ("owner", Int8s), ("parent", Int8s), ("forked_at", Int8s), ("body", Byteas)),
    ),
    entries=_Table((("id", Int8s), ("conversation_id", Int8s), ("head", Int8s), ("body", Byteas))),
    submissions=_Table(
        (("id", Int8s), ("conversation_id", Int8s), ("status", Texts), ("request_id", Byteas), ("body", Byteas)),
        " ON CONFLICT (session, id) DO UPDATE SET status = excluded.status, body = excluded.body",
    ),
    tasks=_Table(
        (("id", Int8s), ("conversation_id", Int8s), ("kind", Texts), ("live", Int8s), ("body", Byteas)),
        " ON CONFLICT (session, id) DO UPDATE SET live = excluded.live, body = excluded.body",
    ),
    documents=_Table(
        (
            ("id", Int8s),
            ("scope", Texts),
            ("scope_id", Int8s),
            ("kind", Texts),
            ("key", Byteas),
            ("created_seq", Int8s),
            ("retired_seq", Int8s),
            ("body", Byteas),
        ),
        " ON CONFLICT (session, id) DO UPDATE SET retired_seq = excluded.retired_seq, body = excluded.body",
    ),
    bases=_Table((("document_id", Int8s), ("seq", Int8s), ("version", Int8s), ("value", Byteas))),
    deltas=_Table((("document_id", Int8s), ("seq", Int8s), ("ops", Byteas))),
)
_RETIRED = 6
"""The column of a document that says when it was retired."""


class Writer(GroupWriter[EncodedCommit]):
    """What writes to an open session, on the thread that has its connection."""

    def __init__(self, target: Target, link: Link, worker: Worker, owned: Owned) -> None:
        super().__init__(str(target), worker, owned.info)
        self._target = target
        self._link = link
        self._session = owned.id
        self._cursor = link.cursor()
        self._statements: dict[tuple[bool, ...], bytes] = {}

    def _prepare(self, batch: Batch, future: asyncio.Future[None]) -> EncodedCommit:
        commit = EncodedCommit(batch, future)
        if commit.size > MAX_COMMIT_BYTES:
            raise StorageError(
                f"{self._path}: commit {batch.seq} has {commit.size} bytes, more than the {MAX_COMMIT_BYTES} that one "
                "commit may have in PostgreSQL; divide it"
            )
        return commit

    def _explained(self, error: BaseException, doing: str) -> StorageError:
        if self._link.closed and not isinstance(error, StorageError):
            why = self._target.explained(error, doing)
            return StorageError(f"{why}; whether what was being committed is stored, the store tells then")
        return self._target.explained(error, doing)

    def check_fence(self) -> None:
        """On the thread: raise StaleEpochError if another writer owns the session by now, and what failed this one."""
        if self._failure is not None:
            raise self._failure
        mine, stored = self._opening, self._stored()
        if (stored.epoch, stored.writer) != (mine.epoch, mine.writer):
            raise self._superseded(stored.seq)

    def _store(self, group: list[EncodedCommit]) -> int:
        first, last, mine = group[0], group[-1], self._opening
        epoch = max(mine.epoch, *(commit.epoch or 0 for commit in group))
        fence = [last.seq, last.next_id, last.at, epoch]
        fence += [self._session, mine.epoch, mine.writer, first.seq - 1]
        sql, values = self._statement(group)
        if any(commit.replies or commit.contents for commit in group) or last.deleted:
            with self._link.transaction():
                self._write(sql, [*fence, *values], first.seq)
                self._follow(group)
        else:
            self._write(sql, [*fence, *values], first.seq)
        if epoch != mine.epoch:
            self._opening = structs.replace(mine, epoch=epoch)
        return len(group)

    def _write(self, sql: bytes, values: Sequence[object], seq: int) -> None:
        row = self._cursor.execute(sql, values, prepare=True).fetchone()
        if row is None or row[0] != 1:
            raise self._superseded(seq)

    def _statement(self, group: list[EncodedCommit]) -> tuple[bytes, list[object]]:
        tables, reclaim = _merged(group)
        unflushed = all(commit.progress for commit in group)
        shape = (unflushed, bool(reclaim), *map(bool, tables))
        if shape not in self._statements:
            parts = [_ADVANCE]
            parts += [
                table.insert(name) for name, table, rows in zip(Tables._fields, _TABLES, tables, strict=True) if rows
            ]
            if reclaim:
                parts += [_RECLAIM.format("bases"), _RECLAIM.format("deltas")]
            end = _END_UNFLUSHED if unflushed else _END
            self._statements[shape] = f"WITH {', '.join(parts)} {end}".encode()
        values: list[object] = []
        for table, rows in zip(_TABLES, tables, strict=True):
            if rows:
                values += table.arrays(rows)
        if reclaim:
            values += 2 * [Int8s(reclaim), Int8s(reclaim.values())]
        return self._statements[shape], values

    def _follow(self, group: list[EncodedCommit]) -> None:
        """What needs to see what is stored, in the same transaction."""
        replies = [row for commit in group for row in commit.replies]
        if replies:
            seqs, oks, results, ids = zip(*replies, strict=True)
            values = (Int8s(seqs), Int8s(oks), Byteas(results), Int8s(ids), self._session)
            if self._cursor.execute(_ANSWER, values).rowcount != len(replies):
                raise StorageError(f"{self._path}: a request is answered that is not there or has its answer")
            self._cursor.execute(_FORGET, (self._session, self._session, KEPT_ANSWERS))
        for commit in group:
            if commit.contents is not None:
                apply(commit.contents, self._cursor, self._session, self._path)
        if group[-1].deleted:
            delete(PostgresShelf(self._link, self._session, self._path), group[-1].deleted)

    def _stored(self) -> StoreInfo:
        row = find(self._link, self._target)
        if row is None or row.id != self._session:
            raise StorageError(f"{self._path} was removed while it was open")
        return row.info(read_only=False)

    def _superseded(self, seq: int) -> StorageError:
        mine, stored = self._opening, self._stored()
        if (stored.epoch, stored.writer) != (mine.epoch, mine.writer):
            return StaleEpochError(
                mine=mine.epoch, my_writer=mine.writer, stored=stored.epoch, stored_writer=stored.writer
            )
        return StorageError(f"{self._path}: commit {seq} does not go with the stored commit {stored.seq}")


def _merged(group: Sequence[EncodedCommit]) -> tuple[Tables[list[Row]], dict[int, int]]:
    """The rows of a group as its last commit leaves them, and which documents lose what came before which commit.

    One statement changes no row twice, and what it deletes is what was there before it.
    """
    reclaim = dict(chain.from_iterable(commit.reclaim for commit in group))
    if len(group) == 1:
        return group[0].tables, reclaim
    tables = Tables(*(list(chain.from_iterable(parts)) for parts in zip(*(c.tables for c in group), strict=True)))
    return (
        tables._replace(
            submissions=_newest(tables.submissions),
            tasks=_newest(tables.tasks),
            # An address is given up before it is taken again.
            documents=sorted(_newest(tables.documents), key=lambda row: row[_RETIRED] is None),
            bases=_kept(tables.bases, reclaim),
            deltas=_kept(tables.deltas, reclaim),
        ),
        reclaim,
    )


def _newest(rows: Iterable[Row]) -> list[Row]:
    return list({row[0]: row for row in rows}.values())


def _kept(rows: Iterable[Row], reclaim: dict[int, int]) -> list[Row]:
    return [row for row in rows if cast(int, row[1]) >= reclaim.get(cast(int, row[0]), 0)]
