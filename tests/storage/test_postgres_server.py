"""What a PostgreSQL server, its users and its disk may be, and what an error says (rules K164, K180, K182, K186,
K232 to K239)."""

from __future__ import annotations

import asyncio
import logging
import shutil
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import golden_store
import psycopg
import pytest
from postgres_server import USER, Server, fresh_session
from postgres_work import opened

from perdure.kernel.contents import digest_of
from perdure.kernel.errors import InvalidRead, StorageError, StorageFormatError
from perdure.kernel.records import to_raw
from perdure.kernel.storage import Content, DocumentWrite
from perdure.storage import postgres_link, postgres_writer
from perdure.storage.postgres import PostgresStorage

SECRET = "s3cret-%/@:word"
_QUOTED = "s3cret-%25%2F%40%3Aword"


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# --- secrets ---------------------------------------------------------------------------------------------------


async def test_a_password_is_used_and_never_shown(
    postgres: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K237: in no error, no log, no repr; it may come from the environment."""
    caplog.set_level(logging.DEBUG)
    postgres.execute(f"CREATE ROLE secretive LOGIN SUPERUSER PASSWORD '{SECRET}'")
    right = f"postgresql://secretive:{_QUOTED}@/postgres?host={postgres.place}"
    line = await opened(right, fresh_session())
    said = [repr(line.storage), str(line.storage)]
    with pytest.raises(StorageError) as busy:
        await opened(right, line.storage._target.session)  # pyright: ignore
    said.append(_shown(busy.value))
    await line.storage.close()
    monkeypatch.setenv("PGPASSWORD", SECRET)
    line = await opened(postgres.dsn(user="secretive"), fresh_session())
    await line.storage.close()
    monkeypatch.delenv("PGPASSWORD")
    for wrong in (f"host={postgres.place} user=secretive password=wrong-{SECRET}", postgres.dsn(user="secretive")):
        with pytest.raises(StorageError, match=r"could not be reached.*PGPASSWORD, a passfile or the dsn") as refused:
            await opened(wrong, fresh_session())
        said.append(_shown(refused.value))
    for none in (
        f"postgresql://u:{SECRET}@/db",
        f"password={SECRET} b host=x",
        "postgresql://u:pw@s3cret@host/db",
        "postgresql://u:s3cret/s3cret@host/db",
        "postgresql://u:/s3cret@host/db",
        "postgresql://u:12/s3cret@host/db",
        "dbname=postgresql://u:s3cret@host/db",
        "s3cret",
    ):
        with pytest.raises(ValueError, match="none that libpq can read") as invalid:
            PostgresStorage(none, "session")
        said.append(_shown(invalid.value))
    assert not [text for text in (*said, caplog.text) if "s3cret" in text]


@pytest.mark.parametrize(
    ("dsn", "told"),
    [("postgresql://u%40server@h/a%40b", "dbname=a@b user=u@server"), ("host=h user=u@server dbname=a@b", "user=u@")],
)
def test_a_name_with_an_at_sign_is_taken(dsn: str, told: str) -> None:
    """K237: percent-encoded in an address."""
    assert told in repr(PostgresStorage(dsn, "session"))


@pytest.mark.parametrize("name", ["", "x" * 201, "a\x00b", "a\nb", "\ud800"])
def test_a_name_that_no_session_can_have(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 characters"):
        PostgresStorage("host=x", name)


async def test_an_error_quotes_no_record(postgres: Server) -> None:
    """K136: though the server's own says which values were in the way."""
    secret = "-".join(["told", "to", "nobody"])
    line = await opened(postgres.dsn(), fresh_session())
    await line.commit(line.batch(submissions=[line.submission(1, request_id=secret)]))
    with pytest.raises(StorageError, match="duplicate key") as raised:
        await line.commit(line.batch(submissions=[line.submission(1, request_id=secret)]))
    assert secret not in _shown(raised.value)
    assert secret.encode().hex() not in _shown(raised.value)
    await line.storage.close()


# --- what is not there, or not as it must be --------------------------------------------------------------------


async def test_a_server_or_database_that_is_not_there(postgres: Server, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"could not be reached.*Look whether the server runs"):
        await opened(f"host={tmp_path}", "session")
    with pytest.raises(StorageError, match=r'database "nowhere" does not exist'):
        await opened(postgres.dsn("nowhere"), "session")


async def test_looking_makes_nothing(postgres: Server) -> None:
    """K143, K159."""
    dsn = postgres.database()
    with pytest.raises(StorageError, match=r"there is no session 'session' of PostgreSQL"):
        await opened(dsn, "session", read_only=True)
    with psycopg.connect(dsn) as link:
        assert link.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'perdure'").fetchone() == (0,)
    line = await opened(dsn, "session")
    reader = await opened(dsn, "session", read_only=True)
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    assert await reader.storage.entry(entry.id) == entry
    await reader.storage.close()
    await line.storage.close()


async def test_rights_that_are_missing_are_named(postgres: Server) -> None:
    """K235: to make, to use, to vacuum; who may only look can."""
    dsn = postgres.database()
    database = dsn.partition("?")[0].rpartition("/")[2]
    postgres.execute("CREATE ROLE guest LOGIN")
    guest = postgres.dsn(database, "guest")
    with pytest.raises(StorageError, match=r"this user may not.*CREATE on the database"):
        await opened(guest, "session")
    await (await opened(dsn, "session")).storage.close()
    with pytest.raises(StorageError, match="this user may not"):
        await opened(guest, "session", read_only=True)
    grant = "GRANT USAGE ON SCHEMA perdure TO guest; GRANT SELECT ON ALL TABLES IN SCHEMA perdure TO guest"
    postgres.execute(grant, database=database)
    reader = await opened(guest, "session", read_only=True)
    assert await reader.storage.check() == []
    await reader.storage.close()
    with pytest.raises(StorageError, match="this user may not"):
        await opened(guest, "session")
    postgres.execute("GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA perdure TO guest", database=database)
    line = await opened(guest, "session")
    await line.commit(line.batch(entries=[line.entry(1)]))
    with pytest.raises(StorageError, match=r"was not vacuumed.*Only the owner of the tables may"):
        await line.storage.vacuum()
    await line.storage.close()


async def test_a_newer_format_or_layout_is_refused_and_left_alone(postgres: Server) -> None:
    """K180, K182."""
    dsn = postgres.database()
    await (await opened(dsn, "session")).storage.close()
    with psycopg.connect(dsn, autocommit=True) as link:
        link.execute("UPDATE perdure.sessions SET format = 99")
        for read_only in (True, False):
            with pytest.raises(StorageFormatError, match="format 99"):
                await opened(dsn, "session", read_only=read_only)
        link.execute("UPDATE perdure.store SET layout = 98")
        for read_only in (True, False):
            with pytest.raises(StorageFormatError, match="layout 98"):
                await opened(dsn, "session", read_only=read_only)
        assert link.execute("SELECT epoch FROM perdure.sessions").fetchone() == (1,)


async def test_a_schema_of_others_is_refused_and_an_empty_one_used(postgres: Server) -> None:
    """K233."""
    dsn = postgres.database()
    with psycopg.connect(dsn, autocommit=True) as link:
        link.execute("CREATE SCHEMA perdure CREATE TABLE other (id int)")
        with pytest.raises(StorageFormatError, match="something else is"):
            await opened(dsn, "session")
        link.execute("DROP TABLE perdure.other")
    await (await opened(dsn, "session")).storage.close()


async def test_a_server_that_will_not_do_says_why(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """K235, K238: encoding, version, a pooler, no writes."""
    postgres.execute("CREATE DATABASE bytes ENCODING 'SQL_ASCII' TEMPLATE template0")
    with pytest.raises(StorageError, match="has the encoding SQL_ASCII; make one with UTF8"):
        await opened(postgres.dsn("bytes"), "session")
    with pytest.raises(StorageError, match="takes no writes"):
        await opened(f"{postgres.dsn()}&options=-cdefault_transaction_read_only%3Don", fresh_session())
    with monkeypatch.context() as patch:
        patch.setattr(postgres_link, "OLDEST_SERVER", 99)
        with pytest.raises(StorageError, match="at least PostgreSQL 99 is needed"):
            await opened(postgres.dsn(), "session")
    with monkeypatch.context() as patch:
        patch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda _: 1))
        with pytest.raises(StorageError, match="a pooler"):
            await opened(postgres.dsn(), "session")


async def test_a_full_disk_is_the_error_and_what_was_acknowledged_stays(postgres: Server, small_disk: Path) -> None:
    """K186."""
    shutil.chown(small_disk, "postgres", "postgres")
    small_disk.parent.chmod(0o755)
    for parent in small_disk.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    dsn, session = postgres.dsn(), fresh_session()
    postgres.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    dsn = postgres.database()
    line = await opened(dsn, session)
    with psycopg.connect(dsn, autocommit=True) as link:
        link.execute("ALTER TABLE perdure.entries SET TABLESPACE small")
        link.execute("ALTER TABLE perdure.entries ALTER COLUMN body SET STORAGE EXTERNAL")
    with pytest.raises(StorageError, match="the disk of the server is full"):
        for _ in range(100):
            await line.commit(line.batch(entries=[line.entry(1, data="x" * 100_000)]))
    assert len(await line.storage.entries(await line.storage.lineage(1))) == 0, "the root was not made here"
    assert await line.storage.entry(2) is not None
    await line.storage.close()
    again = await opened(dsn, session)
    assert again.info.seq == line.seq - 1
    assert await again.storage.check() == []
    await again.storage.close()
    with psycopg.connect(dsn, autocommit=True) as link:
        link.execute("DROP SCHEMA perdure CASCADE")
    postgres.execute("DROP TABLESPACE small")


# --- values ----------------------------------------------------------------------------------------------------


async def test_texts_of_any_length_with_any_character(postgres: Server) -> None:
    """K40: a text of PostgreSQL has no NUL, and an index of it takes 2,700 bytes."""
    line = await opened(postgres.dsn(), fresh_session())
    for text in ("a\x00b", "ü" * 20_000, "\U0001f600", ""):
        submission = line.submission(1, request_id=text)
        document = line.document(key=text)
        base = DocumentWrite(document, version=1, base=to_raw(text))
        entry = line.entry(1, data={text: text})
        await line.commit(line.batch(submissions=[submission], documents=[base], entries=[entry]))
        assert await line.storage.request(1, text) == submission
        stored = await line.storage.document(document.address)
        assert stored is not None
        assert stored.record == document
        assert await line.storage.entry(entry.id) == entry
    assert await line.storage.check() == []
    await line.storage.close()


async def test_large_values_and_what_is_too_large(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """K239: the error names the limit."""
    line = await opened(postgres.dsn(), fresh_session())
    entry = line.entry(1, data="x" * (20 << 20))
    await line.commit(line.batch(entries=[entry]))
    assert await line.storage.entry(entry.id) == entry
    monkeypatch.setattr(postgres_writer, "MAX_COMMIT_BYTES", 1_000)
    with pytest.raises(StorageError, match="more than the 1000 that one commit may have"):
        await line.commit(line.batch(entries=[line.entry(1, data="x" * 1_000)]))
    await line.storage.close()


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
    read: Callable[[PostgresStorage], Awaitable[object]], postgres: Server
) -> None:
    """K131: the session goes on; it would fail with any other error."""
    line = await opened(postgres.dsn(), fresh_session())
    assert isinstance(line.storage, PostgresStorage)
    with pytest.raises(InvalidRead):
        await read(line.storage)
    assert await line.storage.task(1) is None
    await line.storage.close()


# --- what the server is asked to do ----------------------------------------------------------------------------


async def test_a_server_that_does_not_wait_for_its_disk_is_made_to(postgres: Server) -> None:
    """K232: but for progress, and that alone."""
    postgres.execute("CREATE ROLE hasty LOGIN SUPERUSER; ALTER ROLE hasty SET synchronous_commit = off")
    line = await opened(postgres.dsn(user="hasty"), fresh_session())
    assert isinstance(line.storage, PostgresStorage)
    assert line.storage._opening is not None
    link = line.storage._opening.link
    assert link is not None
    for progress in (False, True, False):
        await line.commit(line.batch(entries=[line.entry(1)], progress=progress))
        assert link.execute("SHOW synchronous_commit").fetchone() == ("on",)
    await line.storage.close()


async def test_no_statement_reads_a_table_whole(postgres: Server) -> None:
    """K139, K185: however much is stored, what is looked for or written costs what there is of it."""
    dsn, log = postgres.database(), postgres.place / "log"
    explaining = "-c session_preload_libraries=auto_explain -c auto_explain.log_min_duration=0"
    before = log.stat().st_size
    await golden_store.make_postgres(f"{dsn}&options={quote(explaining)}")
    storage = PostgresStorage(f"{dsn}&options={quote(explaining)}", golden_store.SESSION)
    await storage.open(writer="writer", log_id="log", now=1_000)
    lineage = await storage.lineage(7)
    assert await storage.conversation(7) is not None
    assert await storage.entry(2) is not None
    assert await storage.submission(3) is not None
    assert await storage.task(4) is not None
    assert await storage.request(1, "r") is not None
    assert await storage.closure(1)
    assert await storage.entries(lineage)
    assert await storage.entries(lineage, order="descending", limit=1)
    assert await storage.head(lineage) is not None
    assert await storage.conversations()
    assert await storage.conversations(owner=4)
    for live in (None, True):
        for kind in (None, golden_store.PENDING.kind):
            for conversation in (None, golden_store.PENDING.conversation_id):
                assert await storage.tasks(live=live, kind=kind, conversation_id=conversation)
    for status in (None, golden_store.QUEUED.status):
        for conversation in (None, golden_store.QUEUED.conversation_id):
            assert await storage.submissions(status=status, conversation_id=conversation)
    address = golden_store.PLAN.address
    for at in (None, 2):
        assert await storage.documents(address.scope, address.scope_id, at=at)
        assert await storage.document(address, at=at) is not None
    await storage.has_contents([digest_of(b"x")])
    await storage.contents([digest_of(b"x")])
    for pinned in (True, False):
        await storage.content_scan(pinned=pinned)
    await storage.content_pins()
    assert await storage.mail()
    await storage.close()
    with log.open("rb") as file:
        file.seek(before)
        plans = file.read().decode()
    for index in ("entries_heads", "submissions_open", "tasks_by_conversation", "tasks_by_kind", "tasks_live"):
        assert index in plans
    of_tables = [line for line in plans.splitlines() if "Seq Scan on" in line]
    # A handful of sessions in which a name is looked up, and the one row of the layout.
    assert [line for line in of_tables if "on store" not in line and "on pg_" not in line] == []


async def test_a_check_names_what_is_wrong(postgres: Server) -> None:
    """K145."""
    dsn, session = postgres.dsn(), fresh_session()
    line = await opened(dsn, session)
    data = b"some bytes" * 50
    content = Content(digest_of(data), data)
    entries = [line.entry(1) for _ in range(3)]
    await line.commit(line.batch(entries=entries, contents=[content], pins=[(1, content.digest)]))
    assert await line.storage.check() == []
    here = "session = (SELECT id FROM perdure.sessions WHERE name = %s)"
    postgres.execute(f"UPDATE perdure.entries SET body = 'x' WHERE {here} AND id = {entries[0].id}", session)
    postgres.execute(f"UPDATE perdure.entries SET head = 5 WHERE {here} AND id = {entries[1].id}", session)
    postgres.execute(f"UPDATE perdure.contents SET data = 'x' WHERE {here}", session)
    found = await line.storage.check()
    assert len(found) == 3
    assert f"entries: record {entries[0].id} cannot be read" in found[0]
    assert f"entries: record {entries[1].id} contradicts" in found[1]
    assert "is not what its digest says" in found[2]
    await line.storage.close()


async def test_a_backup_is_a_session_of_its_own(postgres: Server) -> None:
    """K29, K184: as of one commit; nothing is left of one that cannot be made."""
    dsn, goal = postgres.dsn(), fresh_session()
    line = await opened(dsn, fresh_session())
    assert isinstance(line.storage, PostgresStorage)
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    await line.storage.backup(goal, log_id="another", now=1)
    with pytest.raises(StorageError, match="is there already"):
        await line.storage.backup(goal, log_id="another", now=1)
    await line.commit(line.batch(entries=[line.entry(1)]))
    copy = await opened(dsn, goal)
    assert (copy.info.log_id, copy.info.seq, copy.info.next_id) == ("another", 1, entry.id + 1)
    assert await copy.storage.entry(entry.id) == entry
    await copy.commit(copy.batch(entries=[copy.entry(1)]))
    await copy.storage.close()
    await line.storage.close()


async def test_closing_ends_what_is_done_beside(postgres: Server) -> None:
    """K147, K223: as a vacuum that waits for others."""
    dsn, session = postgres.dsn(), fresh_session()
    line = await opened(dsn, session)
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE perdure.deltas IN SHARE UPDATE EXCLUSIVE MODE")
        vacuum = asyncio.ensure_future(line.storage.vacuum())
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'VACUUM%deltas'"
        async with asyncio.timeout(60):
            while postgres.execute(waiting) != [(1,)]:
                await asyncio.sleep(0.01)
        await line.storage.close()
        with pytest.raises(StorageError, match="is not open"):
            await vacuum
    await (await opened(dsn, session)).storage.close()
    assert USER in dsn


async def test_a_vacuum_past_its_bound_says_which_table_and_what_to_do(postgres: Server) -> None:
    """K222, K235: and fails no session."""
    dsn = postgres.database()
    line = await opened(dsn, "session")
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE perdure.entries IN SHARE UPDATE EXCLUSIVE MODE")
        with pytest.raises(
            StorageError, match=r"2000 ms a table, perdure\.entries had too few.*allow more by within_ms"
        ):
            await line.storage.vacuum(within_ms=2000)
    await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()
