"""No call of an SQLite store blocks the event loop; commits share flushes (rules K59, K61, K74, K165, K185)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest
from recording_vfs import Recorder, RecordingVFS

from perdure.kernel.errors import StaleEpochError, StorageError
from perdure.storage import group_writer, sqlite_schema, sqlite_writer
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.conformance import Line


async def opened(path: Path, vfs: str | None = None) -> Line:
    storage = SqliteStorage(path, vfs=vfs)
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1_000))


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """Somebody else is inside a write transaction."""
    connection = apsw.Connection(str(path))
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.close()


async def ticks() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def test_a_commit_that_waits_for_a_lock_does_not_block_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await opened(path)
    entry = line.entry(1)
    async with locked(path):
        future = line.storage.commit(line.batch(entries=[entry]))
        await ticks()
        assert await line.storage.entry(entry.id) is None, "reads go on beside it"
        assert not future.done()
    await future
    await line.storage.close()


async def test_an_open_that_waits_for_a_lock_does_not_block_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await (await opened(path)).storage.close()
    async with locked(path):
        opening = asyncio.ensure_future(opened(path))
        await ticks()
        assert not opening.done()
    line = await opening
    await line.storage.close()


async def test_a_lock_is_waited_for_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then the error says what it was."""
    monkeypatch.setattr(sqlite_schema, "BUSY_MS", 20)
    path = tmp_path / "store.db"
    line = await opened(path)
    async with locked(path):
        with pytest.raises(StorageError, match="another process has held a lock on it for 20 ms"):
            await line.commit(line.batch(entries=[line.entry(1)]))
    with pytest.raises(StorageError, match="another process has held a lock"):
        await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()


async def test_a_cancelled_open_holds_nothing(tmp_path: Path) -> None:
    """K80: the caller gets its cancellation once all is given back."""
    path = tmp_path / "store.db"
    await (await opened(path)).storage.close()
    storage = SqliteStorage(path)
    async with locked(path):
        opening = asyncio.ensure_future(storage.open(writer="writer", log_id="log", now=1))
        await ticks()
        opening.cancel()
        await ticks()
        assert not opening.done()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await storage.open(writer="writer", log_id="log", now=1)
    await storage.close()


async def test_what_waits_during_a_flush_shares_the_next_one(tmp_path: Path) -> None:
    """K59: however many commits are handed over meanwhile; and none ends before it is flushed."""
    recorder = Recorder("recorder-group")
    vfs = RecordingVFS(recorder)
    line = await opened(tmp_path / "store.db", recorder.name)
    await line.commit(line.batch(entries=[line.entry(1)]))  # the log's header is flushed as well the first time
    before = sum(event.kind == "sync" for event in recorder.events)
    writes = len(recorder.events)
    recorder.gate.clear()
    futures = [line.storage.commit(line.batch(entries=[line.entry(1)]))]
    while len(recorder.events) == writes:  # until the first is written and waits for its flush
        await asyncio.sleep(0)
    await ticks()
    futures += [line.storage.commit(line.batch(entries=[line.entry(1)])) for _ in range(50)]
    await ticks()
    assert not any(future.done() for future in futures)
    recorder.gate.set()
    await asyncio.gather(*futures)
    assert sum(event.kind == "sync" for event in recorder.events) == before + 2
    await line.storage.close()
    vfs.unregister()


async def test_a_group_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_writer, "MAX_GROUP", 10)
    recorder = Recorder("recorder-bound")
    vfs = RecordingVFS(recorder)
    line = await opened(tmp_path / "store.db", recorder.name)
    await line.commit(line.batch(entries=[line.entry(1)]))
    before, writes = sum(event.kind == "sync" for event in recorder.events), len(recorder.events)
    recorder.gate.clear()
    futures = [line.storage.commit(line.batch(entries=[line.entry(1)]))]
    while len(recorder.events) == writes:
        await asyncio.sleep(0)
    futures += [line.storage.commit(line.batch(entries=[line.entry(1)])) for _ in range(35)]
    recorder.gate.set()
    await asyncio.gather(*futures)
    assert sum(event.kind == "sync" for event in recorder.events) == before + 1 + 4
    await line.storage.close()
    vfs.unregister()


async def test_a_read_shows_no_commit_before_it_has_settled(tmp_path: Path) -> None:
    """K61: even when the database has it already."""
    line = await opened(tmp_path / "store.db")
    for _ in range(50):
        entry = line.entry(1)
        future = line.storage.commit(line.batch(entries=[entry]))
        found = await line.storage.entry(entry.id)
        assert found is None or future.done()
        await future
    await line.storage.close()


async def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is written; and also after a reader that held on to an old state has let go."""
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_PAGES", 16)
    monkeypatch.setattr(sqlite_writer, "_RESTART_PAGES", 64)
    monkeypatch.setattr(sqlite_writer, "_RESTART_BUSY_MS", 1)
    path = tmp_path / "store.db"
    line = await opened(path)

    async def write(commits: int) -> int:
        for _ in range(commits):
            await line.commit(line.batch(entries=[line.entry(1)]))
        return os.stat(f"{path}-wal").st_size

    assert await write(100) <= 2 * 16 * 4200
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("BEGIN; SELECT * FROM meta").fetchall()
    held = await write(100)
    assert held > 64 * 4200, "what is read cannot be thrown away"
    reader.close()
    assert await write(100) <= held + 64 * 4200
    await line.storage.close()


async def test_a_writer_that_was_superseded_leaves_the_files_alone(tmp_path: Path) -> None:
    """K173: it adds nothing, by its closing either."""
    path = tmp_path / "store.db"
    line = await opened(path)
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE meta SET epoch = 9, writer = 'usurper'")
    connection.close()
    with pytest.raises(StaleEpochError):
        await line.commit(line.batch(entries=[line.entry(1)]))
    with open(f"{path}-wal", "rb") as file:  # noqa: ASYNC230 - no lock of SQLite is on the log
        log = file.read()
    await line.storage.close()
    with open(f"{path}-wal", "rb") as file:  # noqa: ASYNC230
        assert file.read() == log


async def test_opening_costs_what_is_live(tmp_path: Path) -> None:
    """K185: pages read at an open, of an empty store and of one with 20,000 entries."""
    recorder = Recorder("recorder-open")
    vfs = RecordingVFS(recorder)
    path = tmp_path / "store.db"

    async def cost() -> int:
        before = recorder.reads
        line = await opened(path, recorder.name)
        assert await line.storage.tasks(live=True) == []
        assert await line.storage.submissions(status="queued") == []
        assert await line.storage.mail() == []
        spent = recorder.reads - before
        await line.storage.close()
        return spent

    await (await opened(path)).storage.close()
    empty = await cost()
    line = await opened(path)
    for _ in range(20):
        await line.commit(line.batch(entries=[line.entry(1) for _ in range(1000)]))
    await line.storage.close()
    assert await cost() <= empty + 3
    vfs.unregister()
