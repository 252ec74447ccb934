"""Rules K146 and K221 to K224: the disk is given back, and nothing else changes, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
from collections.abc import Awaitable, Iterator
from pathlib import Path
from random import Random

import apsw
import golden_store as golden
import pytest
import storage_processes as processes
from recording_vfs import Recorder, RecordingVFS

from perdure.kernel.errors import StaleEpochError, StorageBusy, StorageError
from perdure.storage import sqlite_vacuum
from perdure.storage.sqlite import SqliteStorage
from perdure.storage.sqlite_takeover import take_over
from perdure.testing.conformance import Line


async def opened(path: Path, **options: str) -> Line:
    storage = SqliteStorage(path, **options)  # pyright: ignore[reportArgumentType]
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1_000))


async def holed(path: Path, *, conversations: int = 8, entries: int = 40, size: int = 3000, **options: str) -> Line:
    """A store, open, in which every second conversation has been deleted."""
    line = await opened(path, **options)
    made = [line.conversation() for _ in range(conversations)]
    await line.commit(line.batch(conversations=made))
    for number in range(entries):
        batch = line.batch
        await line.commit(batch(entries=[line.entry(c.id, data=f"{number}" + "x" * size) for c in made]))
    await line.commit(line.batch(deleted=[c.id for c in made[::2]]))
    return line


def dump(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """All rows of all tables, through a connection of its own."""
    link = apsw.Connection(f"file:{path}?mode=ro", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        tables = [str(name) for (name,) in link.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {table: sorted(link.execute(f"SELECT * FROM {table}"), key=repr) for table in tables}
    finally:
        link.close()


def log_size(path: Path) -> int:
    return os.stat(f"{path}-wal").st_size


async def test_a_vacuum_gives_the_disk_back_and_changes_no_row_k221(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path)
    rows, size = dump(path), await line.storage.size()
    assert size.free > 300_000
    report = await line.storage.vacuum()
    assert report.before == size.total
    assert report.freed == report.before - report.after > 300_000
    assert report.after == path.stat().st_size
    assert log_size(path) == 0, "the log was cut"
    after = await line.storage.size()
    assert (after.free, after.rows, after.biggest) == (0, size.rows, size.biggest)
    assert dump(path) == rows, "the fence and the number of the last commit too"
    assert await line.storage.check() == []
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    assert await line.storage.entry(entry.id) == entry
    await line.storage.close()
    again = await opened(path)
    assert again.info.seq == line.seq
    assert await again.storage.entry(entry.id) == entry
    await again.storage.close()


async def test_commits_wait_for_a_vacuum_and_lose_nothing_k223(tmp_path: Path) -> None:
    line = await holed(tmp_path / "store.db")
    entries = []
    work: list[Awaitable[object]] = []
    for number in range(30):
        entries.append(line.entry(1, data="y" * 500))
        work.append(asyncio.ensure_future(line.storage.commit(line.batch(entries=[entries[-1]]))))
        if number % 10 == 5:
            work.append(asyncio.ensure_future(line.storage.vacuum()))
            await asyncio.sleep(0)
    await asyncio.gather(*work)
    for entry in entries:
        assert await line.storage.entry(entry.id) == entry
    assert await line.storage.check() == []
    await line.storage.close()


async def test_reads_go_on_beside_a_vacuum_k223(tmp_path: Path) -> None:
    recorder = Recorder("vacuum-held")
    vfs = RecordingVFS(recorder)
    line = await holed(tmp_path / "store.db", vfs=recorder.name)
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    recorder.gate.clear()  # what it flushes first is not flushed until it may
    vacuum = asyncio.ensure_future(line.storage.vacuum())
    commit = line.storage.commit(line.batch(entries=[line.entry(1)]))
    try:
        for _ in range(10):
            assert await line.storage.entry(entry.id) == entry
        assert not vacuum.done()
        assert not commit.done()
    finally:
        recorder.gate.set()
    assert (await vacuum).freed > 0
    await commit
    await line.storage.close()
    vfs.unregister()


async def test_a_log_that_grew_after_a_vacuum_is_checkpointed_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path)
    await line.storage.vacuum()
    for _ in range(300):
        await line.commit(line.batch(entries=[line.entry(1, data="z" * 8000)]))
    assert log_size(path) < 2 * 1000 * 4120 + 100_000
    await line.storage.close()


async def test_who_reads_an_old_state_keeps_it_and_the_disk_until_later(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path)
    reader = apsw.Connection(str(path))
    reader.execute("BEGIN")
    rows = reader.execute("SELECT count(*) FROM entries").get
    report = await line.storage.vacuum()
    assert report.freed == 0
    long = path.stat().st_size
    assert long > 1_000_000
    assert reader.execute("SELECT count(*) FROM entries").get == rows
    reader.execute("COMMIT")
    reader.close()
    assert (await line.storage.vacuum()).freed > 300_000
    assert path.stat().st_size < long - 300_000
    await line.storage.close()


async def test_a_bound_ends_a_vacuum_and_not_the_store_k222(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path, conversations=40, entries=200, size=200)
    rows = dump(path)
    with pytest.raises(StorageError, match=r"not vacuumed and is as it was: it took longer than 1 ms; allow it more"):
        await line.storage.vacuum(within_ms=1)
    assert dump(path) == rows
    await line.commit(line.batch(entries=[line.entry(1)]))
    assert (await line.storage.vacuum()).freed > 0
    for bound in (0, -5, float("nan"), True):
        with pytest.raises(ValueError, match="1 or more"):
            await line.storage.vacuum(within_ms=bound)  # pyright: ignore[reportArgumentType]
    await line.storage.close()


async def test_closing_the_store_ends_a_vacuum_k222(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path, conversations=40, entries=200, size=200)
    rows = dump(path)
    work = asyncio.ensure_future(line.storage.vacuum())
    await asyncio.sleep(0)
    await line.storage.close()
    (ended,) = await asyncio.gather(work, return_exceptions=True)
    assert not isinstance(ended, BaseException) or "the store is being closed" in str(ended)
    assert dump(path) == rows


async def test_only_who_owns_the_store_vacuums_it_k224(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path)
    await line.storage.close()
    owner = await processes.start(processes.OWNER, path)
    assert await processes.line_of(owner) == "ready"
    processes.go(owner)
    assert (await processes.line_of(owner)).startswith("open")
    with pytest.raises(StorageBusy, match=f"process {owner.pid} on host"):
        await opened(path)
    reader = SqliteStorage(path)
    await reader.open(read_only=True, writer="reader", log_id="log", now=1)
    with pytest.raises(StorageError, match="for reading only"):
        await reader.vacuum()
    await reader.close()
    processes.go(owner)
    assert await processes.end(owner) == 0


async def test_a_superseded_writer_does_not_vacuum_k223(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path)
    size = path.stat().st_size
    with pytest.raises(StorageBusy) as busy:
        await opened(path)
    taken = take_over(str(path), busy.value, epoch=9, writer="other", now=2, kill=False, vfs=None)
    assert taken is not None
    with pytest.raises(StaleEpochError):
        await line.storage.vacuum()
    assert path.stat().st_size >= size
    taken.link.close()
    taken.lock.release()
    await line.storage.close()


async def test_an_old_store_is_vacuumed_and_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(gzip.decompress((golden.GOLDEN / "format-1.gz").read_bytes()))
    path.chmod(0o600)
    line = await opened(path)
    rows = dump(path)
    await line.storage.vacuum()
    assert dump(path) == rows
    assert await line.storage.entries(await line.storage.lineage(7)) == [golden.ASKED, golden.ANSWERED, golden.EDITED]
    assert await line.storage.check() == []
    await line.storage.close()


# --- no room ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def test_a_vacuum_without_room_says_how_much_it_needs_k222(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known beforehand, or met in the middle of it: the same is said, and the store goes on as it was."""
    path = small_disk / "store.db"
    await (await holed(path, entries=60)).storage.close()
    line = await opened(path)
    rows, size = dump(path), await line.storage.size()
    live = size.total - size.log - size.free
    needed = rf"it needs \d{{6,7}} bytes in .* and \d{{6,7}} bytes in {small_disk}: free them, then vacuum again"
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        file.write(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 200_000))
    for known in (True, False):
        if not known:
            monkeypatch.setattr(sqlite_vacuum._Room, "check", lambda *_: None)
        with pytest.raises(StorageError, match=needed) as refused:
            await line.storage.vacuum()
        assert ("there are only" in str(refused.value)) == known
        assert ("the disk is full" in str(refused.value)) != known
        assert dump(path) == rows
        assert log_size(path) < live, "what it had written to the log was given back"
    await line.commit(line.batch(entries=[line.entry(1)]))
    assert await line.storage.check() == []
    ballast.unlink()
    monkeypatch.undo()
    assert (await line.storage.vacuum()).freed >= size.free // 2
    await line.storage.close()


async def test_what_the_system_refuses_is_said_and_the_store_goes_on_k222(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = await holed(tmp_path / "store.db")

    def refusing(path: str) -> os.statvfs_result:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "statvfs", refusing)
    with pytest.raises(StorageError, match=r"store\.db could not be vacuumed: this process may not"):
        await line.storage.vacuum()
    monkeypatch.undo()
    await line.commit(line.batch(entries=[line.entry(1)]))
    assert (await line.storage.vacuum()).freed > 0
    await line.storage.close()


async def test_a_store_that_was_moved_is_not_vacuumed_k222(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "store.db", tmp_path / "elsewhere.db"
    line = await holed(path)
    os.rename(path, elsewhere)
    with pytest.raises(StorageError, match="no longer the file this store has open"):
        await line.storage.vacuum()
    os.rename(elsewhere, path)
    assert (await line.storage.vacuum()).freed > 0
    await line.storage.close()


# --- kills and losses of power ---------------------------------------------------------------------------------

_VACUUMS = """
import asyncio, sys
from perdure.storage.sqlite import SqliteStorage
async def main():
    storage = SqliteStorage(sys.argv[1])
    await storage.open(writer="w", log_id="l", now=1)
    print("open", flush=True)
    while True:
        await storage.vacuum()
        print("done", flush=True)
asyncio.run(main())
"""


async def test_kills_in_the_middle_of_vacuums_change_nothing_k222(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await holed(path, conversations=20, entries=60)
    await line.storage.close()
    rows = dump(path)
    chance = Random(4)
    finished = 0
    for _ in range(12):
        process = await processes.start(_VACUUMS, path)
        assert await processes.line_of(process) == "open"
        try:
            async with asyncio.timeout(chance.random() * 0.08):
                while await processes.line_of(process) == "done":
                    finished += 1
        except TimeoutError:
            pass
        process.kill()
        await process.wait()
        again = await opened(path)
        assert await again.storage.check() == []
        await again.storage.close()
        found = dump(path)
        assert found.pop("meta")[0][-3:] == rows["meta"][0][-3:], "but for the fence of each open"
        assert found == {table: rows[table] for table in found}
    assert path.stat().st_size < 20 * 60 * 3000, "one of them came to its end, or the last one did"


@pytest.mark.parametrize("variant", range(3))
async def test_power_lost_at_any_write_of_a_vacuum_loses_nothing_k222(variant: int, tmp_path: Path) -> None:
    recorder = Recorder(f"vacuum-{variant}")
    vfs = RecordingVFS(recorder)
    line = await holed(tmp_path / "store.db", conversations=4, entries=6)
    await line.storage.close()
    rows = dump(tmp_path / "store.db")
    before = {"store.db": (tmp_path / "store.db").read_bytes()}
    line = await opened(tmp_path / "store.db", vfs=recorder.name)
    first = len(recorder.events)
    assert (await line.storage.vacuum()).freed > 0
    last = len(recorder.events)
    await line.storage.close()
    assert last - first > 20
    sizes: set[int] = set()
    for count in range(first, last + 1):
        chance = Random(variant * 10_000 + count) if variant else None
        place = tmp_path / f"{variant}-{count}"
        place.mkdir()
        for name, data in recorder.files_after(before, count, chance).items():
            if name.startswith("store.db"):
                (place / name).write_bytes(data)
                (place / name).chmod(0o600)
        again = await opened(place / "store.db", durability="process")
        assert await again.storage.check() == [], f"after event {count}"
        await again.storage.close()
        found = dump(place / "store.db")
        assert {t: found[t] for t in found if t != "meta"} == {t: rows[t] for t in rows if t != "meta"}
        sizes.add((place / "store.db").stat().st_size)
    assert len(sizes) == 2, "as it was, or vacuumed"
    vfs.unregister()
