"""What a JSONL store says and keeps when the disk is full, refuses or is another one (rules K64, K128, K186)."""

# ruff: noqa: ASYNC240 - nothing else runs in these loops

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonl_work import CONTENTS, Life, dump_jsonl, opened
from recording_disk import Event, Recorder

from perdure.kernel.errors import StorageError
from perdure.kernel.records import to_raw
from perdure.kernel.storage import Batch, MailReply
from perdure.storage.jsonl import JsonlStorage
from perdure.testing.conformance import Line


async def made(place: Path) -> Life:
    life = Life(place / "store", fsync=True)
    await life.begin()
    await life.live()
    return life


def everything(line: Line) -> Batch:
    """A commit that writes a file of each kind."""
    reply = MailReply(2, True, to_raw(None))
    return line.batch(entries=[line.entry(1)], tasks=[line.task(1)], contents=CONTENTS[:1], replies=[reply])


async def test_an_error_at_any_step_of_a_commit_fails_it_and_loses_nothing_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K64, K128, K130, K186: what was acknowledged stays readable; the next open has it, or the whole commit too."""
    steps, outcomes = 0, set[int]()
    while True:
        place = tmp_path / str(steps)
        place.mkdir()
        life = await made(place)
        acknowledged = life.line.seq
        recorder = Recorder(place)

        def fail(event: Event, recorder: Recorder = recorder, steps: int = steps) -> None:
            if len(recorder.events) >= steps:
                raise OSError(errno.EIO, "Input/output error")

        recorder.before = fail
        recorder.install(monkeypatch)
        commit, later = life.line.storage.commit(everything(life.line)), life.line.storage.commit(life.line.batch())
        errors = await asyncio.gather(commit, later, return_exceptions=True)
        done = errors == [None, None]
        for error in errors if not done else ():
            assert isinstance(error, StorageError)
            assert "store could not be written to: the disk or file system refused" in str(error)
            assert isinstance(error.__cause__, OSError)
        monkeypatch.undo()
        assert isinstance(life.line.storage, JsonlStorage)
        if not done:
            assert await dump_jsonl(life.line.storage, life.last_id) == life.dumps[acknowledged]
        await life.end()
        again = await opened(place / "store")
        assert again.info.seq >= acknowledged
        outcomes.add(again.info.seq - acknowledged)
        if again.info.seq == acknowledged:
            assert isinstance(again.storage, JsonlStorage)
            assert await dump_jsonl(again.storage, life.last_id) == life.dumps[acknowledged]
        else:
            assert await again.storage.has_contents([CONTENTS[0].digest]) == {CONTENTS[0].digest}
            assert await again.storage.mail() == []
        assert await again.storage.check() == []
        await again.storage.close()
        shutil.rmtree(place)
        if done:
            break
        steps += 1
    assert steps > 15
    assert outcomes == {0, 2}, "nothing, or all that was written together"


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (errno.ENOSPC, "the disk is full .* free some space, then open the store again"),
        (errno.EACCES, "this process may not .* check the modes of the files and their directories"),
        (errno.EROFS, "this process may not .* check the modes"),
        (errno.EMFILE, "too many files are open .* raise the limit"),
        (errno.EIO, "the disk or file system refused .* see the system's log"),
    ],
)
async def test_an_error_names_its_cause_and_the_remedy(
    code: int, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a commit, at an open, and where a store is to be made; nothing is left in the way (K161)."""
    life = await made(tmp_path)
    recorder = Recorder(tmp_path)

    def fail(event: Event) -> None:
        if event.kind in ("write", "flush", "create"):
            raise OSError(code, os.strerror(code))

    recorder.before = fail
    recorder.install(monkeypatch)
    with pytest.raises(StorageError, match=f"store could not be written to: {match}"):
        await life.line.commit(life.line.batch(entries=[life.line.entry(1)]))
    await life.end()
    with pytest.raises(StorageError, match=f"store could not be opened: {match}"):
        await opened(life.path)
    with pytest.raises(StorageError, match=f"new could not be created: {match}"):
        await opened(tmp_path / "new")
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"store", "store.lock", "new.lock"}
    for name in ("store", "new"):
        line = await opened(tmp_path / name)
        assert await line.storage.check() == []
        await line.storage.close()


def _gone(path: Path) -> None:
    shutil.rmtree(path)


def _moved(path: Path) -> None:
    path.rename(path.with_name("moved"))


def _replaced(path: Path) -> None:
    path.rename(path.with_name("moved"))
    shutil.copytree(path.with_name("moved"), path)


def _one_gone(path: Path) -> None:
    (path / "records-1.jsonl").unlink()


@pytest.mark.parametrize("what", [_gone, _moved, _replaced, _one_gone])
async def test_nothing_is_acknowledged_into_files_that_are_gone(what: Callable[[Path], None], tmp_path: Path) -> None:
    """K128: the error says so, and a close writes nothing into what is in their place."""
    life = await made(tmp_path)
    what(life.path)
    before = {path: path.read_bytes() for path in life.path.rglob("*") if path.is_file()}
    with pytest.raises(StorageError, match=r"no longer the directory this store has open: .* put it back"):
        await life.line.commit(life.line.batch(entries=[life.line.entry(1)]))
    with pytest.raises(StorageError):
        await life.line.storage.vacuum()
    await life.end()
    assert {path: path.read_bytes() for path in life.path.rglob("*") if path.is_file()} == before
    if what is _moved:
        (tmp_path / "moved").rename(life.path)
        line = await opened(life.path)
        assert line.info.seq == life.line.seq - 1
        await line.storage.close()


async def test_a_read_that_the_disk_refuses_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K128."""
    life = await made(tmp_path)
    (entry,) = await life.line.storage.entries(await life.line.storage.lineage(1), limit=1)

    def refuse(descriptor: int, length: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("perdure.storage.jsonl_image.os.pread", refuse)
    with pytest.raises(StorageError, match="store could not be read: the disk or file system refused"):
        await life.line.storage.entry(entry.id)
    monkeypatch.undo()
    assert await life.line.storage.entry(entry.id) == entry
    await life.end()


async def test_a_full_disk_is_said_and_loses_nothing_acknowledged(small_disk: Path) -> None:
    """K186: on a real one; a vacuum without room says how much it needs, and fails no session (K222)."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 400_000)
    line = await opened(small_disk / "store")
    entries = [line.entry(1, data="x" * 20_000) for _ in range(50)]
    await line.commit(line.batch(entries=entries))
    with pytest.raises(StorageError, match=r"was not vacuumed and is as it was: it needs 1.* bytes there, and"):
        await line.storage.vacuum()
    with pytest.raises(StorageError, match=r"store could not be written to: the disk is full .* free some space"):
        for _ in range(1000):
            entry = line.entry(1, data="x" * 20_000)
            await line.commit(line.batch(entries=[entry]))
            entries.append(entry)
    for entry in entries:
        assert await line.storage.entry(entry.id) == entry
    await line.storage.close()
    ballast.unlink()
    again = await opened(small_disk / "store")
    for entry in entries:
        assert await again.storage.entry(entry.id) == entry
    assert await again.storage.check() == []
    await again.commit(again.batch(entries=[again.entry(1)]))
    await again.storage.close()
