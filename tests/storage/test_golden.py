"""Rules K180, K181, K183: a store of every format there has been goes on being opened, with all that is in it."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import apsw
import golden_store as golden
import psycopg
import pytest
from postgres_server import Server

from perdure.kernel.storage import FORMAT_VERSION, StoredDocument
from perdure.storage import jsonl_mailbox, postgres_mailbox, sqlite_mailbox
from perdure.storage.jsonl import JsonlStorage
from perdure.storage.postgres import PostgresStorage
from perdure.storage.postgres_schema import COLUMNS, LAYOUT
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.conformance import Line


def unpacked(format: int, directory: Path) -> Path:
    path = directory / "store.db"
    path.write_bytes(gzip.decompress((golden.GOLDEN / f"format-{format}.gz").read_bytes()))
    path.chmod(0o600)
    return path


def copied(format: int, directory: Path) -> Path:
    path = directory / "store"
    shutil.copytree(golden.GOLDEN / f"jsonl-format-{format}", path)
    (path / "contents").mkdir(exist_ok=True)  # git keeps no empty directory
    return path


@pytest.mark.parametrize("format", range(1, FORMAT_VERSION + 1))
async def test_an_old_store_opens_with_all_that_is_in_it(format: int, tmp_path: Path) -> None:
    path = unpacked(format, tmp_path)
    await _has_all(SqliteStorage(path))
    assert sqlite_mailbox.reply(path, 1) == golden.REPLY


@pytest.mark.parametrize("format", range(1, FORMAT_VERSION + 1))
async def test_an_old_store_of_json_lines_opens_with_all_that_is_in_it(format: int, tmp_path: Path) -> None:
    path = copied(format, tmp_path)
    await _has_all(JsonlStorage(path))
    assert jsonl_mailbox.reply(path, 1) == golden.REPLY


def loaded(layout: int, server: Server) -> str:
    dsn = server.database()
    with psycopg.connect(dsn, autocommit=True) as link:
        link.execute((golden.GOLDEN / f"postgres-layout-{layout}.sql").read_bytes())
    return dsn


@pytest.mark.parametrize("layout", range(1, LAYOUT + 1))
async def test_an_old_session_in_postgresql_opens_with_all_that_is_in_it(layout: int, postgres: Server) -> None:
    dsn = loaded(layout, postgres)
    await _has_all(PostgresStorage(dsn, golden.SESSION))
    assert postgres_mailbox.reply(dsn, golden.SESSION, 1) == golden.REPLY


async def _has_all(storage: SqliteStorage | JsonlStorage | PostgresStorage) -> None:
    line = Line(storage, await storage.open(writer="new", log_id="other", now=1))
    assert (line.info.format, line.info.log_id, line.info.epoch) == (FORMAT_VERSION, "golden log", 4)
    assert (line.info.seq, line.info.next_id) == (3, 11)
    assert await storage.conversations() == [golden.ROOT, golden.FORK]
    assert await storage.entries(await storage.lineage(7)) == [golden.ASKED, golden.ANSWERED, golden.EDITED]
    assert await storage.head(await storage.lineage(7)) == golden.ASKED
    assert await storage.submissions() == [golden.DONE, golden.QUEUED]
    assert await storage.request(1, "r") == golden.DONE
    assert await storage.tasks() == [golden.ENDED, golden.PENDING]
    assert await storage.tasks(live=True) == [golden.PENDING]
    for at, deltas in ((1, []), (2, [golden.OPS]), (None, [golden.OPS])):
        expected = StoredDocument(golden.PLAN, 1, golden.BASE, deltas)
        assert await storage.document(golden.PLAN.address, at=at) == expected
    assert [(mail.id, bytes(mail.body)) for mail in await storage.mail()] == [(2, b'{"answered":false}')]
    assert await storage.check() == []
    await line.commit(line.batch(entries=[line.entry(1)]))
    await storage.close()


async def test_the_format_has_not_changed_by_itself(tmp_path: Path) -> None:
    """A new store has every table and column of the golden one of its format, made by the same words."""
    old, new = unpacked(FORMAT_VERSION, tmp_path), tmp_path / "new.db"
    await golden.make(new)

    def schema(path: Path) -> set[str]:
        connection = apsw.Connection(str(path))
        found = {str(sql) for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
        connection.close()
        return found

    assert schema(old) <= schema(new)


async def test_the_format_of_json_lines_has_not_changed_by_itself(tmp_path: Path) -> None:
    """Not by a byte."""
    old, new = copied(FORMAT_VERSION, tmp_path), tmp_path / "new"
    await golden.make_jsonl(new)
    files = [
        {str(p.relative_to(store)): p.read_bytes() for p in store.rglob("*") if p.is_file()} for store in (old, new)
    ]
    assert files[0] == files[1]


async def test_the_tables_in_postgresql_have_not_changed_by_themselves(postgres: Server) -> None:
    """Nor what is in them."""
    old, new = loaded(LAYOUT, postgres), postgres.database()
    await golden.make_postgres(new)

    def content(dsn: str) -> list[list[tuple[object, ...]]]:
        columns = (
            "SELECT table_name, column_name, data_type, is_nullable, is_identity FROM information_schema.columns"
            " WHERE table_schema = 'perdure' ORDER BY table_name, ordinal_position"
        )
        indexes = "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'perdure' ORDER BY 1, 2"
        rows = [f"SELECT * FROM perdure.{table} ORDER BY 1, 2" for table in ("sessions", "mailboxes", *COLUMNS)]
        with psycopg.connect(dsn) as link:
            return [link.execute(sql.encode()).fetchall() for sql in (columns, indexes, *rows)]

    assert content(old) == content(new)
