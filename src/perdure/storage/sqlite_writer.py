"""The way of a commit into SQLite: a group of commits is one database transaction (``group_writer``)."""

# apsw's stubs speak of collections.abc.Buffer, which Python 3.11 does not have.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import chain

import apsw
import msgspec

from perdure.kernel.errors import StaleEpochError, StorageCorrupt, StorageError
from perdure.kernel.storage import Batch, StoreInfo, VacuumReport
from perdure.storage import sqlite_vacuum
from perdure.storage.deletion import delete
from perdure.storage.encoded import EncodedCommit
from perdure.storage.group_writer import GroupWriter
from perdure.storage.rules import KEPT_ANSWERS
from perdure.storage.sqlite_contents import add_tables, apply
from perdure.storage.sqlite_deletion import SqliteShelf
from perdure.storage.sqlite_schema import BUSY_MS, Link, explained, roll_back
from perdure.storage.worker import Worker

CHECKPOINT_PAGES = 1000
"""When the write-ahead log is this long it is copied into the database."""

_RESTART_PAGES = 8 * CHECKPOINT_PAGES
"""When readers have kept it from starting over until it is this long, writing waits for them, for a bounded time."""

_RESTART_BUSY_MS = 250

_ADVANCE = (
    "UPDATE meta SET seq = ?, next_id = ?, committed_at = ? WHERE id = 1 AND epoch = ? AND writer = ? AND seq = ?"
)
_INSERTS = (
    "INSERT INTO conversations VALUES (?, ?, ?, ?, ?)",
    "INSERT INTO entries VALUES (?, ?, ?, ?)",
    "INSERT INTO submissions VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET status = excluded.status, body = excluded.body",
    "INSERT INTO tasks VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET live = excluded.live, body = excluded.body",
    "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET retired_seq = excluded.retired_seq, body = excluded.body",
    "INSERT INTO bases VALUES (?, ?, ?, ?)",
    "INSERT INTO deltas VALUES (?, ?, ?)",
)
_RECLAIM = (
    "DELETE FROM bases WHERE document_id = ? AND seq < ?",
    "DELETE FROM deltas WHERE document_id = ? AND seq < ?",
)
# What was asked for is not read again.
_ANSWER = "UPDATE mailbox SET answered_seq = ?, ok = ?, result = ?, body = x'' WHERE id = ? AND answered_seq IS NULL"
_FORGET = (
    "DELETE FROM mailbox WHERE id IN (SELECT id FROM mailbox WHERE answered_seq IS NOT NULL"
    " ORDER BY answered_seq DESC, id DESC LIMIT -1 OFFSET ?)"
)


def raise_fence(link: Link, path: str, *, epoch: int | None, writer: str, own: Callable[[], None]) -> StoreInfo:
    """The first transaction of every exclusive open (rules K170 to K172). Raises StaleEpochError.

    ``own`` is called inside it, once the epoch is known to be new: whoever returns from it owns the store.
    """
    cursor = link.cursor()
    if cursor.execute("PRAGMA journal_mode").get != "wal":
        raise StorageError(f"{path} is not in WAL mode; run: PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute(f"PRAGMA journal_size_limit = {2 * CHECKPOINT_PAGES * 4096}")
    cursor.execute("BEGIN IMMEDIATE")
    try:
        stored = read_info(link, path, read_only=False)
        mine = stored.epoch + 1 if epoch is None else epoch
        if mine <= stored.epoch:
            raise StaleEpochError(mine=mine, my_writer=writer, stored=stored.epoch, stored_writer=stored.writer)
        own()
        cursor.execute("UPDATE meta SET epoch = ?, writer = ?", (mine, writer))
        add_tables(link)
        cursor.execute("COMMIT")
    except BaseException:
        roll_back(link)
        raise
    return msgspec.structs.replace(stored, epoch=mine, writer=writer)


def read_info(link: Link, path: str, *, read_only: bool) -> StoreInfo:
    row = link.execute("SELECT format, log_id, epoch, writer, seq, next_id FROM meta WHERE id = 1").fetchone()
    if row is None:
        raise StorageCorrupt(f"{path} does not say which commit was its last; restore it from a backup")
    format, log_id, epoch, writer, seq, next_id = row
    return StoreInfo(
        format=format,
        log_id=log_id,
        epoch=epoch,
        writer=writer,
        seq=seq,
        next_id=next_id,
        read_only=read_only,
    )


class Writer(GroupWriter[EncodedCommit]):
    """What writes to an open store, with one thread to do it on."""

    def __init__(self, path: str, link: Link, worker: Worker, opening: StoreInfo, *, flush: bool) -> None:
        super().__init__(path, worker, opening)
        self._link = link
        self._cursor = link.cursor()
        self._flush = flush
        self._flushing: bool | None = None
        self._log_pages = 0
        self._checkpoint_at = CHECKPOINT_PAGES
        link.set_wal_hook(self._note_log)

    def _prepare(self, batch: Batch, future: asyncio.Future[None]) -> EncodedCommit:
        return EncodedCommit(batch, future)

    def _explained(self, error: BaseException, doing: str) -> StorageError:
        return explained(error, self._path, doing)

    def close(self) -> None:
        """Close the connection. After a failure the files stay as they are, for the next open to recover."""
        if self._failure is not None:
            self._link.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._link.close()

    def vacuum(self, *, within_ms: int, stopping: Callable[[], bool]) -> VacuumReport:
        """Between two groups; what waits meanwhile is written after it. Raises StorageError, StaleEpochError.

        A vacuum that fails changes nothing, so that the writer goes on.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._link.check_place()
            stored = read_info(self._link, self._path, read_only=False)
            if (stored.epoch, stored.writer) != (self._opening.epoch, self._opening.writer):
                raise self._superseded(stored.seq)
            return sqlite_vacuum.vacuum(self._link, self._path, within_ms=within_ms, stopping=stopping)
        except (apsw.Error, OSError) as error:
            raise explained(error, self._path, "vacuumed") from error
        finally:
            self._log_pages, self._checkpoint_at = 0, CHECKPOINT_PAGES  # the next commit tells how long the log is

    def _after_group(self) -> None:
        if self._log_pages >= self._checkpoint_at:
            try:
                self._checkpoint()
            except apsw.Error as error:
                raise explained(error, self._path, "checkpointed") from error

    def _store(self, group: list[EncodedCommit]) -> int:
        link, cursor = self._link, self._cursor
        link.check_place()
        first, last = group[0], group[-1]
        flushing = self._flush and not all(commit.progress for commit in group)
        if flushing is not self._flushing:
            # In WAL mode NORMAL does not flush a commit, and FULL flushes all that was written before it as well.
            cursor.execute("PRAGMA synchronous = FULL" if flushing else "PRAGMA synchronous = NORMAL")
            self._flushing = flushing
        cursor.execute("BEGIN IMMEDIATE")
        try:
            mine = self._opening
            cursor.execute(_ADVANCE, (last.seq, last.next_id, last.at, mine.epoch, mine.writer, first.seq - 1))
            if link.changes() != 1:
                raise self._superseded(first.seq)
            if len(group) == 1:
                tables = first.tables
                reclaim, replies = first.reclaim, first.replies
            else:
                tables = [list(chain.from_iterable(parts)) for parts in zip(*(c.tables for c in group), strict=True)]
                reclaim = [row for commit in group for row in commit.reclaim]
                replies = [row for commit in group for row in commit.replies]
            for sql, rows in zip(_INSERTS, tables, strict=True):
                if rows:
                    cursor.executemany(sql, rows)
            if reclaim:
                for sql in _RECLAIM:
                    cursor.executemany(sql, reclaim)
            if replies:
                before = link.total_changes()
                cursor.executemany(_ANSWER, replies)
                if link.total_changes() - before != len(replies):
                    raise StorageError(f"{self._path}: a request is answered that is not there or has its answer")
                cursor.execute(_FORGET, (KEPT_ANSWERS,))
            for commit in group:
                if commit.contents is not None:
                    apply(commit.contents, cursor, self._path)
            if last.deleted:
                delete(SqliteShelf(cursor, self._path), last.deleted)
            epoch = max(mine.epoch, *(commit.epoch or 0 for commit in group))
            if epoch != mine.epoch:
                cursor.execute("UPDATE meta SET epoch = ? WHERE id = 1", (epoch,))
            cursor.execute("COMMIT")
            if epoch != mine.epoch:
                self._opening = msgspec.structs.replace(mine, epoch=epoch)
            return len(group)
        except BaseException:
            roll_back(link)
            raise

    def _superseded(self, seq: int) -> StorageError:
        """Why the row of the last commit is not as this writer left it; ``seq`` is the commit that shows it."""
        mine, stored = self._opening, read_info(self._link, self._path, read_only=False)
        if (stored.epoch, stored.writer) != (mine.epoch, mine.writer):
            return StaleEpochError(
                mine=mine.epoch, my_writer=mine.writer, stored=stored.epoch, stored_writer=stored.writer
            )
        return StorageError(f"{self._path}: commit {seq} does not go with the stored commit {stored.seq}")

    def _note_log(self, link: apsw.Connection, name: str, pages: int) -> int:
        self._log_pages = pages
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        pages = self._log_pages
        self._checkpoint_at = pages + CHECKPOINT_PAGES if pages >= CHECKPOINT_PAGES else CHECKPOINT_PAGES
        if pages < _RESTART_PAGES:
            # Busy: somebody this store was taken over from stopped while it did the same.
            with suppress(apsw.BusyError):
                total, copied = self._link.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                if copied == total:
                    self._checkpoint_at = CHECKPOINT_PAGES  # the next commit begins the log anew
            return
        self._link.set_busy_timeout(_RESTART_BUSY_MS)
        try:
            self._link.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
            self._checkpoint_at = CHECKPOINT_PAGES
        except apsw.BusyError:
            pass  # somebody reads an old state for long; it is tried again when the log has grown further
        finally:
            self._link.set_busy_timeout(BUSY_MS)
