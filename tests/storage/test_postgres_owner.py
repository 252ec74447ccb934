"""Who owns a session of a PostgreSQL server, who takes it over, and what a lost connection means (rule K166)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from postgres_server import Server, fresh_session
from postgres_work import backend, end_backend, opened, until
from storage_processes import OWNER, end, go, line_of, start

from perdure.kernel.errors import StaleEpochError, StorageBusy, StorageError
from perdure.storage import postgres_link, postgres_owner
from perdure.storage.postgres import PostgresStorage

_OWNER = OWNER.replace("storage.sqlite import SqliteStorage", "storage.postgres import PostgresStorage").replace(
    "SqliteStorage(sys.argv[1])", "PostgresStorage(sys.argv[1], sys.argv[2])"
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a second instead of five."""
    monkeypatch.setattr(postgres_owner, "TAKEOVER_SECONDS", 0.2)


async def test_a_second_process_is_told_who_holds_it_and_a_dead_one_holds_nothing(postgres: Server) -> None:
    """K168, K169."""
    dsn, session = postgres.dsn(), fresh_session()
    owner = await start(_OWNER, dsn, session)
    go(owner)
    assert (await line_of(owner), await line_of(owner)) == ("ready", "open 1")
    with pytest.raises(StorageBusy, match=rf"{session}.*held by process {owner.pid} on host .* since"):
        await opened(dsn, session)
    owner.kill()
    await owner.wait()
    line = await opened(dsn, session)
    assert line.info.epoch == 2
    await line.storage.close()


async def test_a_stopped_holder_is_named_as_such(postgres: Server) -> None:
    """K168, K177: and taken over from; what it commits when it goes on, it does not."""
    dsn, session = postgres.dsn(), fresh_session()
    owner = await start(_OWNER, dsn, session)
    go(owner)
    assert (await line_of(owner), await line_of(owner)) == ("ready", "open 1")
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(StorageBusy, match="which is stopped"):
        await opened(dsn, session)
    line = await opened(dsn, session, takeover=True)
    assert line.info.epoch == 2
    owner.send_signal(signal.SIGCONT)
    assert await end(owner) == 0
    with pytest.raises(StorageBusy, match=f"process {os.getpid()}"):
        await opened(dsn, session)
    await line.storage.close()
    again = await opened(dsn, session)
    await again.storage.close()


@pytest.mark.parametrize("epoch", [None, 7])
async def test_it_is_taken_over_beside_a_holder_that_lives(epoch: int | None, postgres: Server) -> None:
    """K166, K173, K177: the holder adds nothing more, and the end of its connection frees nothing."""
    dsn, session = postgres.dsn(), fresh_session()
    old = await opened(dsn, session)
    await old.commit(old.batch(entries=[old.entry(1)]))
    new = await opened(dsn, session, epoch=epoch, takeover=epoch is None)
    assert (new.info.epoch, new.info.seq) == (epoch or 2, 1)
    late = old.entry(1, data="late")
    with pytest.raises(StaleEpochError) as raised:
        await old.commit(old.batch(entries=[late]))
    assert (raised.value.mine, raised.value.stored) == (1, epoch or 2)
    with pytest.raises(StaleEpochError):
        await old.storage.vacuum()
    await old.storage.close()
    with pytest.raises(StorageBusy):
        await opened(dsn, session)
    await new.commit(new.batch(entries=[new.entry(1)]))
    assert await new.storage.entry(late.id) != late
    for stale in (1, epoch or 2):
        with pytest.raises(StaleEpochError):
            await opened(dsn, session, epoch=stale)
    await new.storage.close()
    last = await opened(dsn, session)
    assert last.info.seq == 2
    await last.storage.close()


@pytest.mark.usefixtures("impatient")
async def test_a_holder_that_stopped_within_a_transaction_loses_its_connection(postgres: Server) -> None:
    """K178, K179: if the caller passed takeover=True; else the error names it."""
    dsn, session = postgres.dsn(), fresh_session()
    old = await opened(dsn, session)
    assert isinstance(old.storage, PostgresStorage)
    assert old.storage._opening is not None
    link = old.storage._opening.link
    assert link is not None
    link.execute("BEGIN")
    link.execute("SELECT 1 FROM perdure.sessions WHERE name = %s FOR UPDATE", (session,))
    with pytest.raises(StorageBusy, match=f"process {os.getpid()}.*could not begin within"):
        await opened(dsn, session, epoch=9)
    new = await opened(dsn, session, takeover=True)
    with pytest.raises(StorageError, match="the connection was lost"):
        await old.commit(old.batch())
    await old.storage.close()
    await new.commit(new.batch(entries=[new.entry(1)]))
    await new.storage.close()


async def test_a_lost_connection_is_heard_of_and_ends_the_ownership(postgres: Server) -> None:
    """K166, K234: at once, though nothing is asked; the next opener needs to wait for nobody.

    The descriptor is closed then, and is not watched any more: its number may be another's.
    """
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    dsn, session = postgres.dsn(), fresh_session()
    old = await opened(dsn, session)
    heard = asyncio.Event()
    old.storage.on_mail(heard.set)
    assert await old.storage.mail() == []
    await asyncio.sleep(0)
    heard.clear()
    await end_backend(postgres, backend(old))
    await asyncio.wait_for(heard.wait(), 60)
    with pytest.raises(StorageError, match=r"the connection was lost.*open the store again"):
        await old.storage.mail()
    new = await opened(dsn, session)
    assert new.info.epoch == 2
    with pytest.raises(StorageError, match=r"the connection was lost.*whether what was being committed is stored"):
        await old.commit(old.batch(entries=[old.entry(1)]))
    await old.storage.close()
    assert await new.storage.check() == []
    await new.storage.close()
    assert wrong == []


async def test_two_who_make_everything_at_once_do_not_meet(postgres: Server) -> None:
    """K161, K233: the tables are made once; one of two openers of one session owns it."""
    dsn = postgres.database()
    names = ["one", "two", "one", "three"]
    lines = await asyncio.gather(*(opened(dsn, name) for name in names), return_exceptions=True)
    refused = [line for line in lines if isinstance(line, BaseException)]
    assert [type(error) for error in refused] == [StorageBusy]
    for line in lines:
        if not isinstance(line, BaseException):
            assert line.info.epoch == 1
            await line.commit(line.batch(entries=[line.entry(1)]))
            await line.storage.close()


async def test_two_takeovers_at_once_leave_one_owner(postgres: Server) -> None:
    """K177."""
    dsn, session = postgres.dsn(), fresh_session()
    old = await opened(dsn, session)
    lines = await asyncio.gather(*(opened(dsn, session, takeover=True) for _ in range(4)), return_exceptions=True)
    owners = 0
    for line in lines:
        if isinstance(line, BaseException):
            assert isinstance(line, StorageBusy), line
            continue
        try:
            await line.commit(line.batch(entries=[line.entry(1)]))
            owners += 1
        except StaleEpochError:
            pass
        await line.storage.close()
    assert owners == 1
    await old.storage.close()


_FORKED = """
import asyncio, os, signal, sys, time
from perdure.storage.postgres import PostgresStorage
async def main():
    storage = PostgresStorage(sys.argv[1], sys.argv[2])
    await storage.open(writer="w", log_id="log", now=1)
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    time.sleep(3600)
asyncio.run(main())
"""


def test_a_forked_child_does_not_keep_its_parents_lock(postgres: Server) -> None:
    """K169: as it inherits the connection."""
    dsn, session = postgres.dsn(), fresh_session()
    command = [sys.executable, "-c", _FORKED, dsn, session]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0, "the child runs"
        parent.kill()
        parent.wait()
        asyncio.run(_again(dsn, session))


async def _again(dsn: str, session: str) -> None:
    line = await opened(dsn, session)
    assert line.info.epoch == 2
    await line.storage.close()


async def test_sessions_of_one_server_do_not_see_each_other(postgres: Server) -> None:
    """K151: the same ids, names and requests in each."""
    dsn = postgres.dsn()
    lines = [await opened(dsn, fresh_session()) for _ in range(2)]
    entries = [line.entry(1, data=number) for number, line in enumerate(lines)]
    for line, entry in zip(lines, entries, strict=True):
        await line.commit(line.batch(entries=[entry], submissions=[line.submission(1, request_id="r")]))
    for line, entry in zip(lines, entries, strict=True):
        assert await line.storage.entry(entry.id) == entry
        assert (await line.storage.size()).rows.entries == 1
        await line.storage.close()


def test_without_the_extra_the_error_names_it() -> None:
    """K235."""
    script = "import sys; sys.modules['psycopg'] = None\nfrom perdure import PostgresStorage"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'perdure[postgres]'" in done.stderr
    script = "import sys, perdure.harness.harness, perdure.cli\nassert 'psycopg' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


async def test_a_connection_that_is_idle_costs_no_question(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """K236: notifications of others' configuration are taken up, too, and do not keep it busy."""
    monkeypatch.setattr("perdure.storage.postgres.MAIL_POLL_SECONDS", 3600.0)
    line = await opened(postgres.dsn(), fresh_session())
    line.storage.on_mail(lambda: None)
    await line.storage.mail()
    assert isinstance(line.storage, PostgresStorage)
    assert line.storage._opening is not None
    worker = line.storage._opening.worker
    await until(lambda: worker._watched is not None)
    postgres.execute("SELECT pg_reload_conf()")
    await line.storage.mail()
    await until(lambda: worker._watched is not None)
    await line.storage.close()


def test_a_server_gives_up_a_client_that_acknowledges_nothing() -> None:
    """K234: keepalives alone do not find a vanished client to which a notification is on its way.

    Over a socket of this machine a server takes the setting and does not keep it, so what it is told is looked at.
    """
    assert 0 < int(postgres_link._SERVER["tcp_user_timeout"]) <= 30_000


async def test_a_connection_is_a_forks_to_drop_from_its_first_statement(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K169: a child that was forked while the parent was opening does not hold it either."""
    prepare, known = postgres_link.Target._prepare, list[bool]()

    def noted(self: postgres_link.Target, link: postgres_link.Link, *, write: bool, planner: bool) -> None:
        known.append(link in postgres_link._links)
        prepare(self, link, write=write, planner=planner)

    monkeypatch.setattr(postgres_link.Target, "_prepare", noted)
    await (await opened(postgres.dsn(), fresh_session())).storage.close()
    assert known == [True]
