"""Files that move or vanish under an open store, and long work that a close ends (rules K130, K147, K184, K187)."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from storage_subjects import copy_files

from perdure.kernel.errors import StorageCorrupt, StorageError
from perdure.storage import sqlite, sqlite_create, sqlite_upkeep
from perdure.storage.sqlite import SqliteStorage
from perdure.storage.sqlite_reads import Reader
from perdure.storage.sqlite_schema import Link
from perdure.testing.conformance import Line


async def opened(path: Path, *, read_only: bool = False) -> Line:
    storage = SqliteStorage(path)
    return Line(storage, await storage.open(read_only=read_only, writer="writer", log_id="log", now=1_000))


def sqlite_of(line: Line) -> SqliteStorage:
    assert isinstance(line.storage, SqliteStorage)
    return line.storage


# --- moved and removed files -----------------------------------------------------------------------------------


async def test_closing_a_store_that_was_moved_leaves_the_one_in_its_place_alone(tmp_path: Path) -> None:
    """K130: the log that closing removes is known by its name, and that is another store's by now."""
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    place.mkdir()
    moved = await opened(place / "store.db")
    await moved.commit(moved.batch(entries=[first := moved.entry(1)]))
    place.rename(elsewhere)
    place.mkdir()
    line = await opened(place / "store.db")
    await line.commit(line.batch(entries=[entry := line.entry(1, data="theirs")]))
    await moved.storage.close()
    assert (place / "store.db-wal").exists()
    copy_files(place / "store.db", tmp_path / "crashed.db")
    await line.storage.close()
    for path, wanted in ((tmp_path / "crashed.db", entry), (elsewhere / "store.db", first)):
        again = await opened(path)
        assert await again.storage.entry(wanted.id) == wanted
        assert await again.storage.check() == []
        await again.storage.close()


@pytest.mark.parametrize("what", ["removed", "moved", "replaced"])
async def test_nothing_is_acknowledged_into_a_file_that_is_gone(what: str, tmp_path: Path) -> None:
    """K130: it would be lost with the last descriptor, or be where nobody looks for it."""
    path = tmp_path / "store.db"
    line = await opened(path)
    await line.commit(line.batch(entries=[line.entry(1)]))
    if what == "removed":
        path.unlink()
    else:
        path.rename(tmp_path / "other.db")
    if what == "replaced":
        path.write_bytes(b"something else")
    for _ in range(2):
        with pytest.raises(StorageError, match=r"store\.db is no longer the file this store has open"):
            await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()
    assert (tmp_path / "store.db-wal").exists(), "what was acknowledged is in the log, for whoever puts the file back"


async def test_no_other_store_is_copied_or_checked_in_its_place(tmp_path: Path) -> None:
    """K184."""
    place = tmp_path / "place"
    place.mkdir()
    line = await opened(place / "store.db")
    place.rename(tmp_path / "elsewhere")
    place.mkdir()
    other = await opened(place / "store.db")
    with pytest.raises(StorageError, match="no longer the file"):
        await sqlite_of(line).backup(tmp_path / "copy.db", log_id="copy", now=1)
    with pytest.raises(StorageError, match="no longer the file"):
        await line.storage.check()
    assert not (tmp_path / "copy.db").exists()
    await other.storage.close()
    await line.storage.close()


# --- work beside -----------------------------------------------------------------------------------------------


class Gate:
    """Holds the thread that copies or checks, until the test has done something."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self.passed = 0
        self._go = threading.Event()

    def wait(self) -> None:
        self.passed += 1
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._go.wait(60)

    def open(self) -> None:
        self._go.set()


def stepwise(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """A backup of single pages, each of which passes the gate."""
    copying = sqlite_create.copying

    def gated(source: apsw.Connection, *, log_id: str, go_on: Callable[[], None]) -> Callable[[apsw.Connection], None]:
        def step() -> None:
            gate.wait()
            go_on()

        return copying(source, log_id=log_id, go_on=step)

    monkeypatch.setattr(sqlite, "copying", gated)
    monkeypatch.setattr(sqlite_create, "_PAGES_A_STEP", 1)


async def test_closing_ends_a_copy_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K147: at the next step, whatever is left to copy; and nothing of it stays."""
    gate = Gate()
    stepwise(monkeypatch, gate)
    line = await opened(tmp_path / "store.db")
    copying = asyncio.ensure_future(sqlite_of(line).backup(tmp_path / "copy.db", log_id="copy", now=1))
    await gate.reached.wait()
    closing = asyncio.ensure_future(line.storage.close())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(StorageError, match="is not open"):
        await copying
    await closing
    assert gate.passed == 1
    assert sorted(os.listdir(tmp_path)) == ["copy.db.lock", "store.db", "store.db.lock"]


async def test_closing_ends_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K147."""
    gate = Gate()

    def endless(link: Link) -> list[str]:
        gate.wait()
        link.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n").fetchall()
        return []

    monkeypatch.setattr(sqlite_upkeep, "check", endless)
    line = await opened(tmp_path / "store.db")
    checking = asyncio.ensure_future(line.storage.check())
    await gate.reached.wait()
    closing = asyncio.ensure_future(line.storage.close())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(StorageError, match="is not open"):
        await checking
    await closing


async def test_a_closed_store_that_is_opened_while_it_is_copied_gives_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K184: it is read as a file nobody writes to, so its pages would be of several commits."""
    gate = Gate()
    path = tmp_path / "store.db"
    line = await opened(path)
    await line.storage.close()
    reader = await opened(path, read_only=True)
    stepwise(monkeypatch, gate)
    copying = asyncio.ensure_future(sqlite_of(reader).backup(tmp_path / "copy.db", log_id="copy", now=1))
    await gate.reached.wait()
    line = await opened(path)
    await line.commit(line.batch(entries=[line.entry(1)]))
    gate.open()
    with pytest.raises(StorageError, match="was opened by others meanwhile; try again"):
        await copying
    assert not (tmp_path / "copy.db").exists()
    await reader.storage.close()
    await line.storage.close()


async def test_damage_that_is_only_somebodys_writing_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K145."""
    gate = Gate()

    def check(link: Link) -> list[str]:
        gate.wait()
        return ["pages: they contradict each other"]

    def measure(link: Link, path: str) -> None:
        gate.wait()
        raise apsw.CorruptError("malformed")

    monkeypatch.setattr(sqlite_upkeep, "check", check)
    monkeypatch.setattr(sqlite_upkeep, "measure", measure)
    path = tmp_path / "store.db"
    await (await opened(path)).storage.close()
    reader = await opened(path, read_only=True)
    work = [asyncio.ensure_future(reader.storage.check()), asyncio.ensure_future(reader.storage.size())]
    while gate.passed < 2:
        await asyncio.sleep(0)
    line = await opened(path)
    gate.open()
    for each in work:
        with pytest.raises(StorageError, match="was opened by others meanwhile; try again"):
            await each
    await reader.storage.close()
    await line.storage.close()


# --- the poll for mail -----------------------------------------------------------------------------------------


async def test_a_poll_for_mail_that_fails_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K128: an idle owner reads nothing else, and would never know that no mail can reach it any more."""
    line = await opened(tmp_path / "store.db")

    def broken(self: Reader) -> int:
        raise StorageCorrupt("its pages contradict each other")

    monkeypatch.setattr(Reader, "newest_mail", broken)
    heard = asyncio.Event()
    line.storage.on_mail(heard.set)
    async with asyncio.timeout(30):
        await heard.wait()
    await line.storage.close()
