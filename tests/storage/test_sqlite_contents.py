"""Contents by hash in an SQLite file: how they are packed, damage, older stores, copies (K183, K184, K200 to K206)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import apsw
import pytest
from recording_vfs import Recorder, RecordingVFS
from test_golden import unpacked

from perdure.kernel.contents import digest_of
from perdure.kernel.errors import StorageCorrupt, StorageError
from perdure.kernel.storage import FORMAT_VERSION, MAX_CONTENT_BYTES, Content
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.conformance import Line


def content(data: bytes) -> Content:
    return Content(digest_of(data), data)


TEXT = content(b"a line of a file\n" * 50_000)
NOISE = content(os.urandom(MAX_CONTENT_BYTES))
SMALL = content(b"small")
ALL = (TEXT, NOISE, SMALL)
DIGESTS = [c.digest for c in ALL]


async def opened(path: Path, *, read_only: bool = False, vfs: str | None = None) -> Line:
    storage = SqliteStorage(path, vfs=vfs)
    return Line(storage, await storage.open(read_only=read_only, writer="writer", log_id="log", now=1_000))


def rows(path: Path, sql: str) -> list[Any]:
    connection = apsw.Connection(str(path))
    found = list(connection.execute(sql))
    connection.close()
    return found


async def test_what_can_be_packed_is_and_the_rest_is_kept_plain(tmp_path: Path) -> None:
    """K200: on disk; it comes back as it was given, and its size is told as that."""
    path = tmp_path / "store.db"
    line = await opened(path)
    await line.commit(line.batch(contents=ALL))
    assert await line.storage.contents(DIGESTS) == {c.digest: c.data for c in ALL}
    assert (await line.storage.size()).contents == sum(len(c.data) for c in ALL)
    await line.storage.close()
    kept = dict(rows(path, "SELECT lower(hex(digest)), length(data) FROM contents"))
    assert kept[TEXT.digest] < len(TEXT.data) // 100
    assert (kept[NOISE.digest], kept[SMALL.digest]) == (len(NOISE.data), len(SMALL.data))


@pytest.mark.parametrize(
    ("change", "which"),
    [
        ("UPDATE contents SET data = x'0102030405' WHERE size = 5", SMALL),
        ("UPDATE contents SET data = substr(data, 1, 40) WHERE packing = 1", TEXT),
        ("UPDATE contents SET data = x'' WHERE packing = 1", TEXT),
        ("UPDATE contents SET size = size + 1 WHERE packing = 1", TEXT),
        ("UPDATE contents SET packing = 0 WHERE packing = 1", TEXT),
    ],
)
async def test_a_damaged_content_is_told_and_not_given(change: str, which: Content, tmp_path: Path) -> None:
    """K141, K145, K201."""
    path = tmp_path / "store.db"
    line = await opened(path)
    await line.commit(line.batch(contents=ALL))
    await line.storage.close()
    rows(path, change)
    line = await opened(path)
    with pytest.raises(StorageCorrupt, match=f"content {which.digest} is not what its digest says"):
        await line.storage.contents([which.digest])
    (finding,) = await line.storage.check()
    assert which.digest in finding
    (other,) = (c for c in (SMALL, TEXT) if c is not which)
    assert await line.storage.contents([other.digest]) == {other.digest: other.data}
    await line.storage.close()


async def test_a_packing_of_a_newer_version_is_refused_and_a_pin_of_nothing_found(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    line = await opened(path)
    await line.commit(line.batch(contents=[SMALL, TEXT], pins=[(7, SMALL.digest)]))
    await line.storage.close()
    rows(path, "UPDATE contents SET packing = 9 WHERE packing = 1; DELETE FROM contents WHERE size = 5")
    line = await opened(path)
    with pytest.raises(StorageError, match="use a newer perdure"):
        await line.storage.contents([TEXT.digest])
    findings = await line.storage.check()
    assert len(findings) == 2
    assert f"pin 7 holds {SMALL.digest}, which is not stored" in findings[1]
    await line.storage.close()


async def test_an_older_store_has_none_and_gets_the_tables_when_it_is_opened_for_writing(tmp_path: Path) -> None:
    """K183."""
    path = unpacked(1, tmp_path)
    before = path.read_bytes()
    line = await opened(path, read_only=True)
    assert await line.storage.has_contents(DIGESTS) == set()
    assert await line.storage.contents(DIGESTS) == {}
    assert await line.storage.content_scan(pinned=True) == await line.storage.content_scan(pinned=False) == []
    assert await line.storage.content_pins() == []
    assert (await line.storage.size()).contents == 0
    assert await line.storage.check() == []
    await line.storage.close()
    assert path.read_bytes() == before
    line = await opened(path)
    assert line.info.format == FORMAT_VERSION == 1
    await line.commit(line.batch(contents=ALL))
    await line.storage.close()
    line = await opened(path, read_only=True)
    assert await line.storage.has_contents(DIGESTS) == set(DIGESTS)
    await line.storage.close()


async def test_a_copy_has_the_contents_too(tmp_path: Path) -> None:
    """K184: with their pins."""
    line = await opened(tmp_path / "store.db")
    await line.commit(line.batch(contents=ALL, pins=[(7, TEXT.digest)]))
    assert isinstance(line.storage, SqliteStorage)
    await line.storage.backup(tmp_path / "copy.db", log_id="another", now=1)
    await line.storage.close()
    copy = await opened(tmp_path / "copy.db")
    assert await copy.storage.contents(DIGESTS) == {c.digest: c.data for c in ALL}
    assert await copy.storage.content_pins() == [7]
    assert await copy.storage.check() == []
    await copy.storage.close()


async def test_the_space_of_reclaimed_contents_is_used_again(tmp_path: Path) -> None:
    """K199, K206."""
    path = tmp_path / "store.db"
    line = await opened(path)
    for _ in range(8):
        noise = [content(os.urandom(MAX_CONTENT_BYTES)) for _ in range(4)]
        await line.commit(line.batch(contents=noise))
        await line.commit(line.batch(reclaimed=[c.digest for c in noise]))
    await line.storage.close()
    assert path.stat().st_size < 10 * MAX_CONTENT_BYTES


async def test_contents_are_flushed_and_pins_and_reclaims_are_not(tmp_path: Path) -> None:
    """K152, K202, K206."""
    recorder = Recorder("recorder-contents")
    vfs = RecordingVFS(recorder)
    line = await opened(tmp_path / "store.db", vfs=recorder.name)

    def flushes() -> int:
        return sum(event.kind == "sync" for event in recorder.events)

    before = flushes()
    await line.commit(line.batch(contents=[SMALL]))
    assert flushes() > before
    before = flushes()
    await line.commit(line.batch(pins=[(7, SMALL.digest)], progress=True))
    await line.commit(line.batch(unpinned=[7], progress=True))
    await line.commit(line.batch(reclaimed=[SMALL.digest], progress=True))
    assert flushes() == before
    await line.storage.close()
    vfs.unregister()
