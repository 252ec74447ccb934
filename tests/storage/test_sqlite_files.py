"""What an SQLite store does with the files it finds, and which it leaves (rules K159 to K164, K182, K187)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import apsw
import pytest
from storage_subjects import copy_files

from perdure.kernel.errors import StorageCorrupt, StorageError, StorageFormatError
from perdure.kernel.storage import FORMAT_VERSION
from perdure.storage import sqlite_header, sqlite_mailbox
from perdure.storage.sqlite import SqliteStorage
from perdure.storage.sqlite_header import APPLICATION_ID
from perdure.testing.conformance import Line


async def opened(path: Path, *, read_only: bool = False) -> Line:
    storage = SqliteStorage(path)
    return Line(storage, await storage.open(read_only=read_only, writer="writer", log_id="log", now=1_000))


async def store(path: Path, entries: int = 300) -> None:
    line = await opened(path)
    await line.commit(line.batch(entries=[line.entry(1, data="x" * 500) for _ in range(entries)]))
    await line.storage.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


async def refused_untouched(path: Path, error: type[StorageError], *words: str) -> None:
    """Opening in any way is refused with these words; the file stays as it is, and nothing is made beside it."""
    before = contents(path.parent)
    for read_only in (False, True):
        with pytest.raises(error) as raised:
            await opened(path, read_only=read_only)
        assert str(path) in str(raised.value)
        assert all(word in str(raised.value) for word in words), str(raised.value)
        assert contents(path.parent) == before
    with pytest.raises(error):
        sqlite_mailbox.post(path, "signal", None, now=1)
    assert contents(path.parent) == before


# --- what is refused (K162, K182, K187) ------------------------------------------------------------------------


async def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").touch()
    await refused_untouched(tmp_path / "store.db", StorageCorrupt, "is empty")


async def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await store(path)
    (tmp_path / "store.db.lock").unlink()
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 1, 4096, 100, 50, 3):
        path.write_bytes(whole[:size])
        await refused_untouched(path, StorageCorrupt, f"cut to {size} bytes")
    path.write_bytes(whole)
    await (await opened(path)).storage.close()


async def test_a_cut_file_is_refused_beside_a_log_that_does_not_hold_the_rest(tmp_path: Path) -> None:
    path, crashed = tmp_path / "store.db", tmp_path / "crash" / "store.db"
    crashed.parent.mkdir()
    await store(path)
    line = await opened(path)
    await line.commit(line.batch(entries=[line.entry(1)]))
    copy_files(path, crashed)
    await line.storage.close()
    whole = crashed.read_bytes()
    crashed.write_bytes(whole[: len(whole) // 2])
    await refused_untouched(crashed, StorageCorrupt, "page", "missing")
    crashed.write_bytes(whole)
    again = await opened(crashed)
    assert again.info.seq == line.seq
    await again.storage.close()


async def test_a_store_that_its_owner_checkpoints_meanwhile_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K162: its header is ahead of its size for a moment, and the log may begin anew before it is looked at."""
    path = tmp_path / "store.db"
    await store(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    pages_in_log = sqlite_header._pages_in_log

    def checkpointed(log: str, page_size: int) -> set[int]:
        path.write_bytes(whole)
        return pages_in_log(log, page_size)

    monkeypatch.setattr(sqlite_header, "_pages_in_log", checkpointed)
    assert sqlite_header.examine(str(path))


async def test_a_header_that_speaks_of_four_billion_pages_is_refused(tmp_path: Path) -> None:
    """K162: at once, and without a list of them."""
    path = tmp_path / "store.db"
    await store(path)
    (tmp_path / "store.db.lock").unlink()
    whole = bytearray(path.read_bytes())
    whole[28:32] = b"\xff" * 4
    path.write_bytes(whole)
    tracemalloc.start()
    try:
        await refused_untouched(path, StorageCorrupt, f"cut to {len(whole)} bytes")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [os.fsdecode(b"st\xffre.db"), "x" * 250 + "/" + "y" * 250])
async def test_a_path_that_sqlite_cannot_take_is_refused_untouched(name: str, tmp_path: Path) -> None:
    """The error speaks of the path, not of rights."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for read_only in (False, True):
        with pytest.raises(StorageError, match=r"the path of a store is (UTF-8|at most \d+ bytes long)"):
            await opened(path, read_only=read_only)
    line = await opened(tmp_path / "store.db")
    assert isinstance(line.storage, SqliteStorage)
    with pytest.raises(StorageError, match="the path of a store is"):
        await line.storage.backup(path, log_id="copy", now=1)
    await line.storage.close()
    assert os.listdir(path.parent) == ([] if path.parent != tmp_path else ["store.db", "store.db.lock"])


async def test_a_path_that_the_system_writes_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a locale that is not UTF-8 SQLite would look for another file."""
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode("latin-1"))
    with pytest.raises(StorageError, match="PYTHONUTF8=1"):
        await opened(tmp_path / "caf\u00e9.db")
    await (await opened(tmp_path / "cafe.db")).storage.close()


async def test_the_longest_path_that_is_taken_works(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 200)
    directory.mkdir()
    path = directory / ("s" * (sqlite_header.MAX_PATH - len(str(directory)) - 1))
    await store(path)
    sqlite_mailbox.post(path, "signal", 1, now=1)
    line = await opened(path)
    assert await line.storage.check() == []
    await line.storage.close()


async def test_what_a_log_belonged_to_is_not_made_anew(tmp_path: Path) -> None:
    """K161, K187: SQLite would play the log of the lost store into the new one."""
    path, lost, copy = tmp_path / "store.db", tmp_path / "lost.db", tmp_path / "copy.db"
    line = await opened(path)
    await line.commit(line.batch(entries=[line.entry(1)]))
    copy_files(path, lost)
    lost.unlink()
    before = (tmp_path / "lost.db-wal").read_bytes()
    with pytest.raises(StorageCorrupt, match=r"lost\.db is gone, but its log .*lost\.db-wal is there"):
        await opened(lost)
    assert (tmp_path / "lost.db-wal").read_bytes() == before
    assert not lost.exists()
    (tmp_path / "copy.db-wal").write_bytes(before)
    assert isinstance(line.storage, SqliteStorage)
    with pytest.raises(StorageCorrupt, match=r"copy\.db is gone"):
        await line.storage.backup(copy, log_id="copy", now=1)
    assert not copy.exists()
    await line.storage.close()


async def test_a_store_that_is_made_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K168: its log was there the moment after the store was not, since another process made both in between."""
    path, later = tmp_path / "store.db", tmp_path / "later.db"
    line = await opened(later)
    await line.commit(line.batch(entries=[line.entry(1)]))
    islink = os.path.islink

    def made_now(name: str) -> bool:
        for end in ("", "-wal"):
            (tmp_path / f"later.db{end}").rename(tmp_path / f"store.db{end}")
        monkeypatch.setattr(sqlite_header.os.path, "islink", islink)
        return islink(name)

    monkeypatch.setattr(sqlite_header.os.path, "islink", made_now)
    assert sqlite_header.examine(str(path))
    await line.storage.close()


@pytest.mark.parametrize("text", [b"hello", b"SQLite format 2\x00" + b"x" * 200, b"\x00" * 5000])
async def test_a_foreign_file_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(text)
    await refused_untouched(tmp_path / "notes.txt", StorageFormatError, "another kind of file")


async def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with apsw.Connection(str(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    await refused_untouched(tmp_path / "other.db", StorageFormatError, "another program")


async def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await store(path, 1)
    connection = apsw.Connection(str(path))
    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    connection.close()
    await refused_untouched(path, StorageFormatError, f"format {FORMAT_VERSION + 1}", f"format {FORMAT_VERSION};")


async def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").mkdir()
    await refused_untouched(tmp_path / "store.db", StorageFormatError, "not a file", "JsonlStorage")


async def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises((StorageError, OSError)):
        await opened(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


async def test_a_store_needs_its_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not a directory; make it first"):
        await opened(tmp_path / "missing" / "store.db")
    assert os.listdir(tmp_path) == []


_AS_NOBODY = """
import asyncio, os, sys
from perdure.kernel.errors import StorageError
from perdure.storage.sqlite import SqliteStorage
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # after the imports: it may not see the interpreter's files
async def main():
    storage = SqliteStorage(sys.argv[1])
    try:
        await storage.open(writer="writer", log_id="log", now=1)
    except StorageError as error:
        print(error)
    storage = SqliteStorage(sys.argv[1])
    try:
        info = await storage.open(read_only=True, writer="writer", log_id="log", now=1)
    except StorageError as error:
        print(error)
    else:
        print("read", info.seq)
        await storage.close()
asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who may not write")
@pytest.mark.parametrize("what", ["file", "directory", "new"])
async def test_what_may_not_be_written_is_refused_untouched(what: str) -> None:
    """K187: and it can still be read."""
    directory = _own_directory(0o777 if what == "file" else 0o755)
    try:
        path = directory / "store.db"
        if what != "new":
            await store(path, 1)
            os.unlink(f"{path}.lock")
            os.chmod(path, 0o644 if what == "file" else 0o666)
        before = contents(directory)
        answers = _as_nobody(path)
        assert "may not be written" in answers[0]
        assert answers[1] == (f"there is no store at {path}" if what == "new" else "read 1")
        assert contents(directory) == before
    finally:
        shutil.rmtree(directory)


def _own_directory(mode: int) -> Path:
    """One that others can see into: that of pytest belongs to root alone."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(mode)
    return directory


def _as_nobody(path: Path) -> list[str]:
    python = [sys.executable, "-c", _AS_NOBODY, str(path)]
    return subprocess.run(python, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


# --- what is left behind ---------------------------------------------------------------------------------------


async def test_files_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    """K163: with whatever umask."""
    old = os.umask(0)
    try:
        line = await opened(tmp_path / "store.db")
        await line.commit(line.batch(entries=[line.entry(1)]))
        modes = {name: os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)}
        assert modes == dict.fromkeys(("store.db", "store.db-wal", "store.db-shm", "store.db.lock"), 0o600)
        assert line.info.warnings == ()
        await line.storage.close()
    finally:
        os.umask(old)


async def test_wider_modes_are_reported(tmp_path: Path) -> None:
    """K163."""
    path = tmp_path / "store.db"
    await store(path, 1)
    path.chmod(0o640)
    for read_only in (False, True):
        storage = SqliteStorage(path)
        info = await storage.open(read_only=read_only, writer="writer", log_id="log", now=1)
        assert any(f"{path} is open to other users (mode 0640)" in warning for warning in info.warnings)
        await storage.close()


async def test_closing_leaves_no_log_behind(tmp_path: Path) -> None:
    known = len(sqlite_header.in_use)
    await store(tmp_path / "store.db")
    assert len(sqlite_header.in_use) == known, "nor a trace in memory"
    assert sorted(os.listdir(tmp_path)) == ["store.db", "store.db.lock"]


async def test_any_name_can_be_read(tmp_path: Path) -> None:
    """Rules K143 and K159: also where a URI would mean something else by it."""
    path = tmp_path / "50%41 of #1? é.db"
    await store(path, 3)
    reader = await opened(path, read_only=True)
    assert reader.info.seq == 1
    await reader.storage.close()


async def test_looking_leaves_no_file_behind(tmp_path: Path) -> None:
    """K159, K160: reading, checking, measuring, copying, and asking for a reply."""
    path = tmp_path / "store.db"
    await store(path, 3)
    mail = sqlite_mailbox.post(path, "signal", 1, now=1)
    before = contents(tmp_path)
    storage = SqliteStorage(path)
    info = await storage.open(read_only=True, writer="writer", log_id="log", now=1)
    assert len(await storage.mail()) == 1
    assert await storage.check() == []
    assert (await storage.size()).total == path.stat().st_size
    assert sqlite_mailbox.reply(path, mail) is None
    assert contents(tmp_path) == before
    await storage.close()
    assert contents(tmp_path) == before
    assert info.seq == 1


async def test_a_reader_of_a_closed_store_sees_what_an_owner_then_writes(tmp_path: Path) -> None:
    """K143: it was opened as a file nobody writes to, and notices that somebody does."""
    path = tmp_path / "store.db"
    await store(path, 1)
    reader = SqliteStorage(path)
    await reader.open(read_only=True, writer="reader", log_id="log", now=1)
    line = await opened(path)
    entries = [line.entry(1)]
    assert await reader.entry(entries[0].id) is None
    await line.commit(line.batch(entries=entries))
    assert await reader.entry(entries[0].id) == entries[0]
    await line.storage.close()
    assert await reader.entry(entries[0].id) == entries[0]
    await reader.close()
    await (await opened(path)).storage.close()
    assert sorted(os.listdir(tmp_path)) == ["store.db", "store.db.lock"]


async def test_what_a_crash_left_is_read_without_owning_it(tmp_path: Path) -> None:
    """K143, K159: the log is read too, and still there for the owner."""
    path, crashed = tmp_path / "store.db", tmp_path / "crashed.db"
    line = await opened(path)
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    copy_files(path, crashed)
    await line.storage.close()
    reader = await opened(crashed, read_only=True)
    assert reader.info.seq == 1
    assert await reader.storage.entry(entry.id) == entry
    await reader.storage.close()
    assert f"{crashed.name}.lock" not in os.listdir(tmp_path)
    again = await opened(crashed)
    assert await again.storage.entry(entry.id) == entry
    await again.storage.close()


async def test_a_copy_of_a_live_store_is_one_commit_of_it(tmp_path: Path) -> None:
    """K29, K184: whole, with another log id, and nothing is written over."""
    line = await opened(tmp_path / "store.db")
    storage = line.storage
    assert isinstance(storage, SqliteStorage)
    await line.commit(line.batch(entries=[line.entry(1, data="x" * 1000) for _ in range(2000)]))
    copying = storage.backup(tmp_path / "copy.db", log_id="copied", now=1)
    writing = storage.commit(line.batch(entries=[line.entry(1)]))
    await copying
    await writing
    with pytest.raises(StorageError, match="is there already"):
        await storage.backup(tmp_path / "copy.db", log_id="copied", now=1)
    await storage.close()
    copy = await opened(tmp_path / "copy.db")
    assert copy.info.log_id == "copied"
    assert copy.info.seq in (line.seq - 1, line.seq)
    assert await copy.storage.check() == []
    await copy.storage.close()
    assert sorted(os.listdir(tmp_path)) == ["copy.db", "copy.db.lock", "store.db", "store.db.lock"]


async def test_damage_is_found_and_told(tmp_path: Path) -> None:
    """K145: in the pages, and in what the records say."""
    path = tmp_path / "store.db"
    await store(path)
    line = await opened(path)
    assert await line.storage.check() == []
    await line.storage.close()
    connection = apsw.Connection(str(path))
    assert connection.pragma("application_id") == APPLICATION_ID
    connection.execute(
        "UPDATE entries SET conversation_id = 7 WHERE id = 3; UPDATE entries SET body = x'00' WHERE id = 4"
    )
    connection.execute("UPDATE meta SET next_id = 5")
    connection.close()
    line = await opened(path)
    found = await line.storage.check()
    assert "entries: record 3 contradicts what it is found by" in found
    assert any(finding.startswith("entries: record 4 cannot be read") for finding in found)
    assert "entries: record 6 is not below the next id, 5" in found
    with pytest.raises(StorageCorrupt, match="holds a record that is not one"):
        await line.storage.entry(4)
    await line.storage.close()
    whole = bytearray(path.read_bytes())
    whole[-4096:] = b"\xff" * 4096
    path.write_bytes(whole)
    line = await opened(path)
    assert await line.storage.check() != []
    await line.storage.close()
