"""Rule K186: on a full disk the first cause is the error, and everything acknowledged stays readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.kernel.errors import StorageError
from perdure.kernel.records import EntryRecord
from perdure.storage.sqlite import SqliteStorage
from perdure.storage.sqlite_schema import Link
from perdure.testing.conformance import Line


async def opened(path: Path, *, read_only: bool = False) -> Line:
    storage = SqliteStorage(path)
    return Line(storage, await storage.open(read_only=read_only, writer="writer", log_id="log", now=1_000))


async def fill(line: Line) -> list[EntryRecord]:
    """Commit until the disk is full, and tell what was acknowledged."""
    acknowledged: list[EntryRecord] = []
    with pytest.raises(StorageError, match="the disk is full"):
        for _ in range(1000):
            entry = line.entry(1, data="x" * 20_000)
            await line.commit(line.batch(entries=[entry]))
            acknowledged.append(entry)
    return acknowledged


async def test_a_full_disk_is_said_and_loses_nothing_acknowledged(small_disk: Path) -> None:
    path = small_disk / "store.db"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 500_000)
    line = await opened(path)
    acknowledged = await fill(line)
    assert len(acknowledged) > 10
    with pytest.raises(StorageError, match=r"store\.db could not be written to: the disk is full .* free some space"):
        await line.commit(line.batch(entries=[line.entry(1)]))
    for entry in acknowledged:
        assert await line.storage.entry(entry.id) == entry
    await line.storage.close()
    reader = await opened(path, read_only=True)
    for entry in acknowledged:
        assert await reader.storage.entry(entry.id) == entry
    await reader.storage.close()
    ballast.unlink()
    again = await opened(path)
    assert again.info.seq >= len(acknowledged)
    assert await again.storage.entries(await again.storage.lineage(1)) == []
    for entry in acknowledged:
        assert await again.storage.entry(entry.id) == entry
    assert await again.storage.check() == []
    await again.commit(again.batch(entries=[again.entry(1)]))
    await again.storage.close()


async def test_no_store_is_made_on_a_full_disk(small_disk: Path) -> None:
    """K161: and nothing is left in the way."""
    with open(small_disk / "ballast", "wb") as file, pytest.raises(OSError, match="No space"):  # noqa: ASYNC230
        while True:
            file.write(b"x" * 65536)
            file.flush()
    with pytest.raises(StorageError, match=r"store\.db.*(full|No space)"):
        await opened(small_disk / "store.db")
    (small_disk / "ballast").unlink()
    line = await opened(small_disk / "store.db")
    await line.storage.close()


async def test_a_rollback_that_fails_too_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = await opened(tmp_path / "store.db")
    taken = line.submission(1, request_id="taken")
    await line.commit(line.batch(submissions=[taken]))
    execute, refused = Link.execute, []

    def failing(self: Link, statements: str, *args: Any) -> apsw.Cursor:
        if statements == "ROLLBACK":
            refused.append(statements)
            raise apsw.SQLError("cannot rollback")
        return execute(self, statements, *args)

    monkeypatch.setattr(Link, "execute", failing)
    with pytest.raises(StorageError, match="UNIQUE constraint failed: submissions"):
        await line.commit(line.batch(submissions=[line.submission(1, request_id="taken")]))
    assert refused
    monkeypatch.undo()
    await line.storage.close()
