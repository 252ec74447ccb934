"""Who owns a JSONL store, who takes it over, and what happens beside its owner (rules K165 to K174, K72 to K77)."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest
from jsonl_work import opened
from recording_disk import Event, Recorder
from storage_processes import OWNER, POST, end, go, line_of, start
from storage_subjects import add_fence

from perdure.kernel.errors import StaleEpochError, StorageBusy, StorageError
from perdure.kernel.records import to_raw
from perdure.kernel.storage import MailReply
from perdure.storage import jsonl, jsonl_mailbox, rules
from perdure.storage.jsonl_lines import LOG

_OWNER = OWNER.replace("storage.sqlite import SqliteStorage", "storage.jsonl import JsonlStorage").replace(
    "SqliteStorage", "JsonlStorage"
)
_POST = POST.replace("sqlite_mailbox", "jsonl_mailbox")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a second instead of five."""
    monkeypatch.setattr(jsonl, "TAKEOVER_SECONDS", 0.2)


# --- taking over -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
async def test_a_store_is_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    """K168, K169, K174, K178: a holder is named; neither an epoch nor patience is enough; takeover kills it."""
    path = tmp_path / "store"
    owner = await start(_OWNER, path)
    go(owner)
    assert (await line_of(owner), await line_of(owner)) == ("ready", "open 1")
    owner.send_signal(signal.SIGSTOP)
    for epoch in (None, 7):
        with pytest.raises(StorageBusy, match=rf"process {owner.pid} on host .* which is stopped"):
            await opened(path, epoch=epoch)
    line = await opened(path, takeover=True)
    assert line.info.epoch == 2
    assert await owner.wait() == -signal.SIGKILL
    await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()


async def test_a_holder_that_closes_in_time_is_not_killed(tmp_path: Path) -> None:
    """K174: the owner lock is enough."""
    path = tmp_path / "store"
    owner = await start(_OWNER, path)
    go(owner)
    assert (await line_of(owner), await line_of(owner)) == ("ready", "open 1")
    taking = asyncio.ensure_future(opened(path, takeover=True))
    await asyncio.sleep(0)
    go(owner)
    line = await taking
    assert await end(owner) == 0
    await line.storage.close()


@pytest.mark.usefixtures("impatient")
async def test_this_process_is_not_killed(tmp_path: Path) -> None:
    """K179: the error says why."""
    line = await opened(tmp_path / "store")
    with pytest.raises(StorageBusy, match="was not killed: it is this process"):
        await opened(tmp_path / "store", takeover=True)
    await line.commit(line.batch())
    await line.storage.close()


async def test_a_writer_superseded_before_its_marker_confirms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K173, K174: also where that happens after it has written its records."""
    path = tmp_path / "store"
    line = await opened(path)
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    recorder = Recorder(tmp_path)

    def supersede(event: Event) -> None:
        if event.kind == "write" and "entries" in event.path:
            add_fence(path, 9, "usurper")

    recorder.before = supersede
    recorder.install(monkeypatch)
    late = line.entry(1)
    with pytest.raises(StaleEpochError) as raised:
        await line.commit(line.batch(entries=[late]))
    assert (raised.value.mine, raised.value.stored, raised.value.stored_writer) == (1, 9, "usurper")
    monkeypatch.undo()
    assert await line.storage.entry(late.id) is None
    assert await line.storage.entry(entry.id) == entry
    log = (path / LOG).read_bytes()
    with pytest.raises(StaleEpochError):
        await line.commit(line.batch())
    await line.storage.close()
    assert (path / LOG).read_bytes() == log, "nor does it say that it was closed"
    again = await opened(path)
    assert (again.info.epoch, again.info.seq) == (10, 1)
    assert await again.storage.entry(late.id) is None
    await again.storage.close()


async def test_a_superseded_writer_does_not_vacuum(tmp_path: Path) -> None:
    """K223."""
    line = await opened(tmp_path / "store")
    add_fence(tmp_path / "store", 9, "usurper")
    with pytest.raises(StaleEpochError):
        await line.storage.vacuum()
    await line.storage.close()


# --- the event loop --------------------------------------------------------------------------------------------


async def test_commits_share_a_flush_and_block_neither_the_loop_nor_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K59, K61: the disk is waited for on a thread; what waits meanwhile is written together."""
    line = await opened(tmp_path / "store", fsync=True)
    recorder, gate, held = Recorder(tmp_path), threading.Event(), threading.Event()

    def wait(event: Event) -> None:
        if event.kind == "flush" and LOG in event.path:
            held.set()
            assert gate.wait(60)

    recorder.before = wait
    recorder.install(monkeypatch)
    entries = [line.entry(1)]
    first = line.storage.commit(line.batch(entries=entries))
    await asyncio.get_running_loop().run_in_executor(None, held.wait, 60)
    others = []
    for _ in range(5):
        entries.append(line.entry(1))
        others.append(line.storage.commit(line.batch(entries=entries[-1:])))
    read = asyncio.ensure_future(line.storage.entry(entries[-1].id))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not any(future.done() for future in (first, read, *others))
    gate.set()
    await asyncio.gather(first, *others)
    assert await read in (None, entries[-1]), "of before, or settled"
    flushes = [event for event in recorder.events if event.kind == "flush" and LOG in event.path]
    assert len(flushes) == 2
    monkeypatch.undo()
    await line.storage.close()


# --- the mailbox -----------------------------------------------------------------------------------------------

_POST_MANY = """
import sys
from perdure.storage.jsonl_mailbox import post
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    post(sys.argv[1], "signal", number, now=1)
"""


async def test_senders_and_the_owner_do_not_refuse_each_other(tmp_path: Path) -> None:
    """K72, K74, K77: other processes post while it is open, each gets an id of its own, and the owner hears of it."""
    path = tmp_path / "store"
    line = await opened(path)
    heard = asyncio.Event()
    line.storage.on_mail(heard.set)
    senders = [await start(_POST_MANY, path, 25) for _ in range(2)]
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
    assert sorted(answered + left) == list(range(1, 51))
    assert all(jsonl_mailbox.reply(path, id) == MailReply(id, True, to_raw(id)) for id in answered)
    heard.clear()
    sender = await start(_POST, path)
    await asyncio.wait_for(heard.wait(), 60)
    assert await line_of(sender) == "51"
    assert await end(sender) == 0
    await line.storage.close()


async def test_no_id_is_given_twice_though_answers_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K75, K77: a request takes a file while it waits, its answer one while it is kept; the highest id stays."""
    monkeypatch.setattr("perdure.storage.jsonl_index.KEPT_ANSWERS", 2)
    path = tmp_path / "store"
    line = await opened(path)
    ids = [jsonl_mailbox.post(path, "signal", number, now=1) for number in range(5)]
    for id in (ids[4], *ids[:4]):
        await line.commit(line.batch(replies=[MailReply(id, True, to_raw(id))]))
    names = sorted(file.name for file in (path / "mailbox").iterdir())
    assert names == ["3.answer.json", "4.answer.json", "5.answer.json"]
    await line.storage.vacuum()
    await line.storage.close()
    assert jsonl_mailbox.post(path, "signal", 5, now=1) == 6
    line = await opened(path)
    assert [mail.id for mail in await line.storage.mail()] == [6]
    assert (await line.storage.size()).rows.mail == 3
    await line.storage.close()


async def test_a_full_mailbox_refuses_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_mailbox, "MAX_UNANSWERED", 2)
    path = tmp_path / "store"
    with pytest.raises(StorageError, match="there is no store at"):
        jsonl_mailbox.post(path, "signal", 0, now=1)
    line = await opened(path)
    for number in range(2):
        jsonl_mailbox.post(path, "signal", number, now=1)
    with pytest.raises(StorageError, match="wait in the mailbox"):
        jsonl_mailbox.post(path, "signal", 2, now=1)
    with pytest.raises(StorageError, match="the body of a request is at most"):
        jsonl_mailbox.post(path, "signal", "x" * rules.MAX_MAIL_BYTES, now=1)
    await line.commit(line.batch(replies=[MailReply(1, True, to_raw(None))]))
    assert jsonl_mailbox.post(path, "signal", 3, now=1) == 3
    assert sorted(file.name for file in (path / "mailbox").iterdir()) == ["1.answer.json", "2.json", "3.json"]
    await line.storage.close()
