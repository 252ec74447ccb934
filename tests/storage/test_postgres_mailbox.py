"""Requests that other processes leave in a PostgreSQL store (rules K72 to K77, K236)."""

from __future__ import annotations

import asyncio
from functools import partial

import psycopg
import pytest
from postgres_server import Server, fresh_session
from postgres_work import end_backend, opened, until
from storage_processes import POST, end, line_of, start

from perdure import Harness
from perdure.kernel.errors import StorageError
from perdure.kernel.records import to_raw
from perdure.kernel.storage import MailReply
from perdure.storage import postgres_mailbox, reading, rules
from perdure.storage.postgres import PostgresStorage

_POST = POST.replace("sqlite_mailbox", "postgres_mailbox").replace("post(sys.argv[1],", "post(*sys.argv[1:3],")
_POST_MANY = """
import sys
from perdure.storage.postgres_mailbox import post
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    post(sys.argv[1], sys.argv[2], "signal", number, now=1)
"""


async def test_the_owner_is_told_and_need_not_ask(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """K74, K236: by the server, from another process."""
    dsn, session = postgres.dsn(), fresh_session()
    line = await opened(dsn, session)
    assert isinstance(line.storage, PostgresStorage)
    line.storage._poll = reading.MailPoll(line.storage._newest_mail, every=3600)
    heard = asyncio.Event()
    line.storage.on_mail(heard.set)
    assert await line.storage.mail() == []
    for number in (1, 2):
        sender = await start(_POST, dsn, session)
        await asyncio.wait_for(heard.wait(), 60)
        heard.clear()
        assert await line_of(sender) == str(number)
        assert await end(sender) == 0
        assert len(await line.storage.mail()) == number
    await line.storage.close()


async def test_mail_that_nobody_told_of_is_found(postgres: Server) -> None:
    """K236: by the look that comes by itself."""
    dsn, session = postgres.dsn(), fresh_session()
    line = await opened(dsn, session)
    assert isinstance(line.storage, PostgresStorage)
    line.storage._poll = reading.MailPoll(line.storage._newest_mail, every=0.01)
    heard = asyncio.Event()
    line.storage.on_mail(heard.set)
    sql = "INSERT INTO perdure.mailbox SELECT id, 1, 'signal', '1', 1 FROM perdure.sessions WHERE name = %s"
    await asyncio.to_thread(postgres.execute, sql, session)
    await asyncio.wait_for(heard.wait(), 60)
    await line.storage.close()


async def test_senders_and_the_owner_do_not_refuse_each_other(postgres: Server) -> None:
    """K72, K77: other processes post while it is open, and each request gets an id of its own."""
    dsn, session = postgres.dsn(), fresh_session()
    line = await opened(dsn, session)
    senders = [await start(_POST_MANY, dsn, session, 15) for _ in range(2)]
    for sender in senders:
        assert await line_of(sender) == "ready"
    ends = [asyncio.ensure_future(end(sender)) for sender in senders]
    answered: list[int] = []
    while not all(sender.done() for sender in ends):
        for mail in await line.storage.mail(limit=2):
            await line.commit(line.batch(replies=[MailReply(mail.id, True, to_raw(mail.id))]))
            answered.append(mail.id)
    assert [sender.result() for sender in ends] == [0, 0]
    left = [mail.id for mail in await line.storage.mail()]
    assert sorted(answered + left) == list(range(1, 31))
    for id in answered[:3]:
        assert postgres_mailbox.reply(dsn, session, id) == MailReply(id, True, to_raw(id))
    await line.storage.close()


async def test_a_full_mailbox_refuses_and_keeps_what_it_has(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """K76, K77: and no id is given twice, though answers are forgotten."""
    monkeypatch.setattr(postgres_mailbox, "MAX_UNANSWERED", 2)
    monkeypatch.setattr("perdure.storage.postgres_writer.KEPT_ANSWERS", 1)
    dsn, session = postgres.dsn(), fresh_session()
    with pytest.raises(StorageError, match="there is no session"):
        postgres_mailbox.post(dsn, session, "signal", 0, now=1)
    line = await opened(dsn, session)
    for number in range(2):
        postgres_mailbox.post(dsn, session, "signal", number, now=1)
    with pytest.raises(StorageError, match="wait in the mailbox"):
        postgres_mailbox.post(dsn, session, "signal", 2, now=1)
    with pytest.raises(StorageError, match="the body of a request is at most"):
        postgres_mailbox.post(dsn, session, "signal", "x" * rules.MAX_MAIL_BYTES, now=1)
    for id in (2, 1):
        await line.commit(line.batch(replies=[MailReply(id, True, to_raw(None))]))
    assert (await line.storage.size()).rows.mail == 1
    assert postgres_mailbox.post(dsn, session, "signal", 3, now=1) == 3
    await line.storage.close()


async def test_what_was_sent_to_a_harness_is_folded_in(postgres: Server) -> None:
    """K74, K75: while it runs, and at the next open."""
    dsn, session = postgres.dsn(), fresh_session()
    async with Harness.open(PostgresStorage(dsn, session)):
        id = await asyncio.to_thread(postgres_mailbox.post, dsn, session, "unknown", None, now=1)
        await until(lambda: postgres_mailbox.reply(dsn, session, id) is not None)
    later = postgres_mailbox.post(dsn, session, "unknown", None, now=1)
    assert postgres_mailbox.reply(dsn, session, later) is None
    async with Harness.open(PostgresStorage(dsn, session)):
        await until(lambda: postgres_mailbox.reply(dsn, session, later) is not None)


_WAITING = (
    "SELECT a.pid FROM pg_stat_activity AS a WHERE wait_event_type = 'Lock' AND query LIKE '%perdure.mailboxes%'"
    " AND query LIKE '%FOR UPDATE%' ORDER BY a.pid"
)


async def test_senders_that_waited_for_each_other_keep_the_bound(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K72: each counts what those before it left."""
    monkeypatch.setattr(postgres_mailbox, "MAX_UNANSWERED", 1)
    dsn, session = postgres.database(), fresh_session()
    line = await opened(dsn, session)
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        await other.execute("SELECT FROM perdure.mailboxes FOR UPDATE")
        post = partial(postgres_mailbox.post, dsn, session, "signal", 0, now=1)
        senders = [asyncio.ensure_future(asyncio.to_thread(post)) for _ in range(3)]
        await until(lambda: len(postgres.execute(_WAITING)) == 3)
    ends = await asyncio.gather(*senders, return_exceptions=True)
    assert [end for end in ends if isinstance(end, int)] == [1]
    assert sum("wait in the mailbox" in str(end) for end in ends) == 2
    assert [mail.id for mail in await line.storage.mail()] == [1]
    await line.storage.close()


async def test_a_sender_that_lost_its_connection_is_told_that_nobody_knows(postgres: Server) -> None:
    """K234, K235: it may be there, so it is not to be sent again as if it were not."""
    dsn, session = postgres.database(), fresh_session()
    line = await opened(dsn, session)
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        await other.execute("SELECT FROM perdure.mailboxes FOR UPDATE")
        sender = asyncio.ensure_future(asyncio.to_thread(postgres_mailbox.post, dsn, session, "signal", 0, now=1))
        await until(lambda: len(postgres.execute(_WAITING)) == 1)
        ((pid,),) = postgres.execute(_WAITING)
        await end_backend(postgres, pid)
        with pytest.raises(StorageError, match=r"connection was lost.*whether the request is there nobody told"):
            await sender
    assert await line.storage.mail() == []
    await line.storage.close()
