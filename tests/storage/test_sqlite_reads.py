"""Reading an SQLite store whatever its owner, other readers and the callers do (rules K129, K131, K143, K159)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import apsw
import pytest
from storage_subjects import copy_files

from perdure.kernel.errors import InvalidRead, StorageError
from perdure.kernel.records import ConversationRecord
from perdure.kernel.storage import DocumentWrite
from perdure.storage import sqlite_mailbox, sqlite_reads
from perdure.storage.sqlite import SqliteStorage
from perdure.storage.sqlite_reads import Reader
from perdure.storage.sqlite_schema import Link, connect
from perdure.testing.conformance import Line


async def opened(path: Path, *, read_only: bool = False) -> Line:
    storage = SqliteStorage(path)
    return Line(storage, await storage.open(read_only=read_only, writer="writer", log_id="log", now=1_000))


@pytest.mark.parametrize(
    "read",
    [
        lambda storage: storage.task(2**70),
        lambda storage: storage.submission(-(2**64)),
        lambda storage: storage.request(1, "\ud800"),
        lambda storage: storage.tasks(kind="\ud800"),
        lambda storage: storage.mail(after=2**70),
    ],
)
async def test_what_no_record_can_have_is_an_invalid_read(
    read: Callable[[SqliteStorage], Awaitable[object]], tmp_path: Path
) -> None:
    """K129: the session goes on; it would fail with any other error."""
    line = await opened(tmp_path / "store.db")
    assert isinstance(line.storage, SqliteStorage)
    with pytest.raises(InvalidRead):
        await read(line.storage)
    await line.storage.close()


async def test_an_owner_that_closes_while_somebody_looks_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K143: the log that was there is gone before it could be opened."""
    path = tmp_path / "store.db"
    await (await opened(path)).storage.close()
    id = sqlite_mailbox.post(path, "signal", 1, now=1)
    log = tmp_path / "store.db-wal"
    log.touch()
    modes: list[str] = []

    def closing(path: str, mode: Literal["write", "read", "still"], *, vfs: str | None = None) -> Link:
        modes.append(mode)
        if log.exists():
            log.unlink()
            raise StorageError(f"{path} could not be opened: this process may not")
        return connect(path, mode, vfs=vfs)

    monkeypatch.setattr(sqlite_reads, "connect", closing)
    assert sqlite_mailbox.reply(path, id) is None
    assert modes == ["read", "still"]


async def test_a_store_that_another_one_replaced_is_read_anew(tmp_path: Path) -> None:
    """K143: both have a log, so nothing but the file itself tells."""
    path, other = tmp_path / "store.db", tmp_path / "other.db"
    line = await opened(other)
    await line.commit(line.batch(entries=[line.entry(1)]))
    copy_files(other, path)
    reader = await opened(path, read_only=True)
    assert reader.info.seq == 1
    await line.commit(line.batch(entries=[entry := line.entry(1)]))
    copy_files(other, tmp_path / "new.db")
    for suffix in ("-wal", ""):
        os.rename(f"{tmp_path}/new.db{suffix}", f"{path}{suffix}")
    assert await reader.storage.entry(entry.id) == entry
    await reader.storage.close()
    await line.storage.close()


async def test_a_rollback_of_a_read_that_fails_too_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K186: the first cause is the error."""
    line = await opened(tmp_path / "store.db")
    execute = Link.execute

    def failing(self: Link, statements: str, *args: Any) -> apsw.Cursor:
        if statements == "ROLLBACK":
            raise apsw.SQLError("cannot rollback")
        return execute(self, statements, *args)

    def broken(self: Reader, id: int) -> None:
        raise apsw.IOError("the disk is on fire")

    monkeypatch.setattr(Link, "execute", failing)
    monkeypatch.setattr(Reader, "entry", broken)
    with pytest.raises(StorageError, match="the disk is on fire"):
        await line.storage.entry(1)
    monkeypatch.undo()
    await line.storage.close()


async def test_a_commit_is_readable_only_once_it_was_published(tmp_path: Path) -> None:
    """K61: what awaits a commit's future runs before a reader that saw the commit stored."""
    line = await opened(tmp_path / "store.db")
    storage = line.storage
    assert isinstance(storage, SqliteStorage)
    opening = storage._opening
    assert opening is not None
    writer = opening.writer
    assert writer is not None
    loop = asyncio.get_running_loop()
    order: list[str] = []
    stored: asyncio.Future[None] = loop.create_future()
    stored.add_done_callback(lambda _: order.append("published"))
    writer._seq = 1

    async def reader() -> None:
        await writer.settled(1)
        order.append("read")

    # The reader comes back to the loop before the writer's word is acted on, in the same turn of the loop.
    reading = asyncio.ensure_future(reader())
    writer._end([stored], 1, None)
    await reading
    assert order == ["published", "read"]
    writer._seq = 0
    await storage.close()


async def test_a_read_that_is_over_keeps_no_old_state(tmp_path: Path) -> None:
    """K61, K149: or the log could not begin anew until the next read, and would grow."""
    path = tmp_path / "store.db"
    line = await opened(path)
    storage = line.storage
    entry, task, asked = line.entry(1, head=True), line.task(1), line.submission(1, request_id="r")
    plan = line.document()
    made = line.batch(
        conversations=[ConversationRecord(id=1, created_at=1)],
        entries=[entry],
        tasks=[task],
        submissions=[asked],
        documents=[DocumentWrite(plan, version=1, base=b"0")],
    )
    await line.commit(made)
    lineage = await storage.lineage(1)
    for read in (
        lambda: storage.conversation(1),
        lambda: storage.entry(entry.id),
        lambda: storage.task(task.id),
        lambda: storage.submission(asked.id),
        lambda: storage.request(1, "r"),
        lambda: storage.head(lineage),
        lambda: storage.entries(lineage),
        lambda: storage.document(plan.address),
        lambda: storage.documents("conversation", plan.scope_id),
        lambda: storage.mail(),
    ):
        assert await read() is not None
        other = apsw.Connection(str(path))
        assert other.execute("SELECT seq FROM meta").fetchall() == [(line.seq,)]
        other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)  # raises BusyError where somebody still reads
        other.close()
        await line.commit(line.batch(entries=[line.entry(1)]))
    await storage.close()
