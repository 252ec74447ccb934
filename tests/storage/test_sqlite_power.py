"""Rules K152, K153: what is left of an SQLite store when the power goes at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import msgspec
import pytest
from recording_vfs import Recorder, RecordingVFS

from perdure.kernel.errors import StorageError
from perdure.kernel.records import EntryRecord
from perdure.kernel.storage import Batch, DocumentWrite
from perdure.storage import sqlite_writer
from perdure.storage.sqlite import Durability, SqliteStorage
from perdure.testing.conformance import Line


async def _work(path: Path, recorder: Recorder, durability: Durability) -> tuple[dict[str, bytes], list[EntryRecord]]:
    """Commit through the recorder, with notes of what was acknowledged; give the files before, and the entries."""
    line = await _open(SqliteStorage(path))
    await line.storage.close()
    before = {path.name: path.read_bytes()}  # noqa: ASYNC240 - nothing has it open
    line = await _open(SqliteStorage(path, durability=durability, vfs=recorder.name))
    entries: list[EntryRecord] = []
    plan = None
    for number in range(20):
        if number % 5 == 4:  # several that share a flush
            batches = [_batch(line, entries, number) for _ in range(3)]
            await asyncio.gather(*(line.storage.commit(batch) for batch in batches))
            recorder.note(str(line.seq))
        elif number % 4 == 3:
            plan = msgspec.structs.replace(plan or line.document(), history="latest")
            new = plan.created_seq == line.seq + 1
            write = DocumentWrite(plan, version=1, base=b"0" if new else None, ops=None if new else b"[1]")
            await line.commit(line.batch(documents=[write], progress=not new))
            recorder.note(str(line.seq) if new else "progress")
        else:
            await line.commit(_batch(line, entries, number))
            recorder.note(str(line.seq))
    await line.storage.close()
    return before, entries


async def _open(storage: SqliteStorage) -> Line:
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1_000))


def _batch(line: Line, entries: list[EntryRecord], number: int) -> Batch:
    made = [line.entry(1, data="x" * (3000 if number % 3 == 0 else 10)) for _ in range(1 + number % 2)]
    entries += made
    return line.batch(entries=made)


def _put(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir()
    for file, data in files.items():
        (directory / file).write_bytes(data)
        (directory / file).chmod(0o600)


async def _left(directory: Path, name: str, files: dict[str, bytes], entries: list[EntryRecord]) -> int:
    """Open what the power left, see that it is whole, and tell the last commit in it."""
    _put(directory, files)
    line = await _open(SqliteStorage(directory / name, durability="process"))
    assert await line.storage.check() == []
    for entry in entries:
        assert await line.storage.entry(entry.id) == (entry if entry.seq <= line.info.seq else None)
    await line.storage.close()
    return line.info.seq


@pytest.mark.parametrize("variant", range(3))
async def test_no_acknowledged_commit_is_lost_with_the_power(
    variant: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_PAGES", 16)
    recorder = Recorder(f"recorder-{variant}")
    vfs = RecordingVFS(recorder)
    before, entries = await _work(tmp_path / "store.db", recorder, "power")
    checkpoints = [e for e in recorder.events if e.kind == "sync" and e.file == "store.db"]
    assert len(checkpoints) >= 3, "checkpoints are part of what is tested"
    acknowledged, flushed = 0, 0
    for count, event in enumerate(recorder.events, 1):
        if event.kind == "note" and event.file.isdigit():
            acknowledged = int(event.file)
        chance = Random(variant * 10_000 + count) if variant else None
        files = recorder.files_after(before, count, chance)
        found = await _left(tmp_path / f"{variant}-{count}", "store.db", files, entries)
        assert found >= acknowledged, f"after event {count}"
        flushed = max(flushed, found)
    assert flushed == entries[-1].seq
    vfs.unregister()


async def test_without_flushes_the_recorder_sees_losses(tmp_path: Path) -> None:
    """K153, and that the test above can fail: what no flush followed is gone, the store is whole all the same."""
    recorder = Recorder("recorder-process")
    vfs = RecordingVFS(recorder)
    before, entries = await _work(tmp_path / "store.db", recorder, "process")
    last = max(count for count, event in enumerate(recorder.events, 1) if event.kind == "note")
    assert not [event for event in recorder.events[:last] if event.kind == "sync" and event.file == "store.db"]
    files = recorder.files_after(before, last, None)
    assert await _left(tmp_path / "lost", "store.db", files, entries) == 0
    vfs.unregister()


async def test_progress_is_acknowledged_without_a_flush(tmp_path: Path) -> None:
    """K152: and the next commit flushes it too."""
    recorder = Recorder("recorder-progress")
    vfs = RecordingVFS(recorder)
    line = await _open(SqliteStorage(tmp_path / "store.db", vfs=recorder.name))

    def syncs() -> int:
        return sum(event.kind == "sync" for event in recorder.events)

    await line.commit(line.batch(entries=[line.entry(1)]))
    before = syncs()
    for _ in range(3):
        await line.commit(line.batch(entries=[line.entry(1)], progress=True))
    assert syncs() == before
    one, other = line.batch(entries=[line.entry(1)], progress=True), line.batch(entries=[line.entry(1)])
    await asyncio.gather(line.storage.commit(one), line.storage.commit(other))
    assert syncs() > before
    await line.storage.close()
    vfs.unregister()


async def test_a_failed_flush_is_the_error_and_ends_the_store(tmp_path: Path) -> None:
    """K64, K128: the commit that met it fails, and every later one; what was acknowledged before is there."""
    recorder = Recorder("recorder-fail")
    vfs = RecordingVFS(recorder)
    line = await _open(SqliteStorage(tmp_path / "store.db", vfs=recorder.name))
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    recorder.fail_sync = True
    with pytest.raises(StorageError, match=r"store\.db could not be written to: the disk or file system refused"):
        await line.commit(line.batch(entries=[line.entry(1)]))
    recorder.fail_sync = False
    with pytest.raises(StorageError, match="refused"):
        await line.commit(line.batch(entries=[line.entry(1)]))
    assert await line.storage.entry(entry.id) == entry
    await line.storage.close()
    again = await _open(SqliteStorage(tmp_path / "store.db"))
    assert again.info.seq >= 1
    assert await again.storage.entry(entry.id) == entry
    await again.storage.close()
    vfs.unregister()
