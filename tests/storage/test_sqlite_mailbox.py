"""Senders of mail beside each other and beside the owner (rules K72 to K76)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest
from storage_processes import end, line_of, start

from perdure.kernel.errors import StorageError
from perdure.kernel.records import to_raw
from perdure.kernel.storage import MailReply
from perdure.storage import rules, sqlite_mailbox, sqlite_schema
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.conformance import Line


async def opened(path: Path) -> Line:
    storage = SqliteStorage(path)
    return Line(storage, await storage.open(writer="writer", log_id="log", now=1_000))


_POST_MANY = """
import sys
from perdure.storage.sqlite_mailbox import post
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    post(sys.argv[1], "signal", number, now=1)
"""


async def test_senders_and_the_owner_do_not_refuse_each_other(tmp_path: Path) -> None:
    """K72: one whose look at the mailbox is overtaken by somebody's commit is not told that the store is locked."""
    path = tmp_path / "store.db"
    line = await opened(path)
    senders = [await start(_POST_MANY, path, 40) for _ in range(2)]
    for sender in senders:
        assert await line_of(sender) == "ready"
    ends = [asyncio.ensure_future(end(sender)) for sender in senders]
    while not all(sender.done() for sender in ends):
        await line.commit(line.batch(entries=[line.entry(1)]))
    assert [sender.result() for sender in ends] == [0, 0]
    assert len(await line.storage.mail()) == 80
    await line.storage.close()


def _waiting(path: Path) -> int:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        ((count,),) = connection.execute("SELECT count(*) FROM mailbox WHERE answered_seq IS NULL")
        assert isinstance(count, int)
        return count
    finally:
        connection.close()


async def test_a_full_mailbox_refuses_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_mailbox, "MAX_UNANSWERED", 3)
    path = tmp_path / "store.db"
    line = await opened(path)
    ids = [sqlite_mailbox.post(path, "signal", number, now=1) for number in range(3)]
    with pytest.raises(StorageError, match="wait in the mailbox"):
        sqlite_mailbox.post(path, "signal", 3, now=1)
    assert _waiting(path) == 3
    await line.commit(line.batch(replies=[MailReply(ids[0], True, to_raw(None))]))
    assert sqlite_mailbox.post(path, "signal", 4, now=1) > ids[-1]
    await line.storage.close()


async def test_a_sender_is_told_how_long_it_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_schema, "BUSY_MS", 20)
    path = tmp_path / "store.db"
    line = await opened(path)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="held a lock on it for 20 ms"):
        sqlite_mailbox.post(path, "signal", 1, now=1)
    other.close()
    await line.storage.close()


async def test_an_answered_request_takes_no_room_for_its_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that are kept are bounded by their number, so what each of them keeps must be small."""
    path = tmp_path / "store.db"
    line = await opened(path)
    id = sqlite_mailbox.post(path, "input", "x" * (rules.MAX_MAIL_BYTES - 2), now=1)
    answer = MailReply(id, True, to_raw({"submission": 7}))
    await line.commit(line.batch(replies=[answer]))
    assert sqlite_mailbox.reply(path, id) == answer
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    assert connection.execute("SELECT sum(length(body)) FROM mailbox").get == 0
    connection.close()
    await line.storage.close()


async def test_an_answer_costs_the_same_however_many_requests_wait(tmp_path: Path) -> None:
    """K74: a flood of mail does not slow down what answers it, and every commit with it."""
    path = tmp_path / "store.db"
    line = await opened(path)
    assert isinstance(line.storage, SqliteStorage)
    assert line.storage._opening is not None
    assert line.storage._opening.link is not None
    steps: list[None] = []
    line.storage._opening.link.set_progress_handler(lambda: bool(steps.append(None)), 100)
    costs: list[int] = []
    for answered in (1, 2):
        connection = apsw.Connection(str(path))
        with connection:
            rows = [(b"0",)] * 3000
            connection.executemany("INSERT INTO mailbox (kind, body, posted_at) VALUES ('signal', ?, 1)", rows)
        connection.close()
        steps.clear()
        await line.commit(line.batch(replies=[MailReply(answered, True, to_raw(None))]))
        costs.append(len(steps))
    assert costs[1] <= costs[0] + 2
    await line.storage.close()
