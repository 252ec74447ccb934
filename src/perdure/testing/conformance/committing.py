"""Checks of commits: order, atomicity, what is refused, what a crash leaves."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.kernel.errors import StorageError
from perdure.kernel.json import JsonValue
from perdure.kernel.records import (
    ConversationRecord,
    Edit,
    ForkPoint,
    to_raw,
)
from perdure.kernel.storage import Batch, DocumentWrite, MailReply
from perdure.testing.conformance.subject import Line, Subject, begun, refused, soon


async def commits_settle_later_and_in_order(subject: Subject) -> None:
    """K59, K61, K64: never before control is back with the caller, and one after the other."""
    line = await begun(subject)
    ended: list[int] = []
    futures: list[asyncio.Future[None]] = []
    for number in range(20):
        future = line.storage.commit(line.batch(entries=[line.entry(1)]))
        future.add_done_callback(lambda _, number=number: ended.append(number))
        futures.append(future)
    assert not any(future.done() for future in futures)
    await soon(asyncio.gather(*futures))
    assert ended == list(range(20))
    assert len(await line.storage.entries(await line.storage.lineage(1))) == 20
    await line.storage.close()


async def records_come_back_as_they_were(subject: Subject) -> None:
    """K31, K32, K40: every field, every kind of value; and reading twice gives no shared state."""
    line = await begun(subject)
    data: JsonValue = {"numbers": [1, 1.0, True, None, -(2**63), 2**63 - 1, 1e-300], "text": "ü\x00\U0001f600"}
    task = line.task(1)
    fork_at = line.entry(1, data=data, head=True)
    entry = msgspec.structs.replace(
        line.entry(1, data=[]),
        edits=(Edit(entry=fork_at.id), Edit(entry=fork_at.id, replace=to_raw([{"role": "user"}]))),
        by_task=task.id,
        head=fork_at.id,
    )
    fork = line.conversation(parent=ForkPoint(1, fork_at.id), owner=task.id)
    submission = msgspec.structs.replace(
        line.submission(1, request_id="request"),
        status="unanswered",
        entry=entry.id,
        reason="aborted",
        detail="in words",
    )
    await line.commit(
        line.batch(conversations=[fork], entries=[fork_at, entry], submissions=[submission], tasks=[task])
    )
    storage = line.storage
    assert await storage.conversation(fork.id) == fork
    assert await storage.submission(submission.id) == submission
    assert await storage.task(task.id) == task
    assert await storage.entry(entry.id) == entry
    read = await storage.entry(fork_at.id)
    assert read is not None
    assert read == fork_at
    assert repr(read.data) == repr(data), "1, 1.0 and True are three values"
    assert isinstance(read.data, dict)
    read.data.clear()
    assert repr(read.data) == repr(data)
    for absent in (line.next_id, 0, -1):
        assert await storage.entry(absent) is None
        assert await storage.task(absent) is None
        assert await storage.submission(absent) is None
        assert await storage.conversation(absent) is None
    await storage.close()


async def a_refused_batch_stores_nothing_and_ends_the_store(subject: Subject) -> None:
    """K1, K64, K137: all of it or none, every later one fails too, and what was acknowledged stays readable."""
    line = await begun(subject)
    taken = line.submission(1, request_id="taken")
    await line.commit(line.batch(submissions=[taken]))
    before = line.seq
    entry = line.entry(1)
    bad = line.batch(entries=[entry], submissions=[line.submission(1, request_id="taken")])
    good = line.batch(entries=[line.entry(1)])
    first, second = line.storage.commit(bad), line.storage.commit(good)
    await refused(StorageError, first)
    await refused(StorageError, second)
    await refused(StorageError, line.storage.commit(line.batch()))
    assert await line.storage.entry(entry.id) is None
    assert await line.storage.request(1, "taken") == taken
    await line.storage.close()
    again = await Line.open(subject)
    assert again.info.seq == before
    assert await again.storage.check() == []
    await again.storage.close()


def _wrong_batches(line: Line) -> list[tuple[str, Batch]]:
    """Batches that contradict what the root, one entry and one document in the store say."""
    change = replace = msgspec.structs.replace
    document = line.document()
    new = DocumentWrite(document, version=1, base=b"{}")
    other = DocumentWrite(line.document(), version=1, base=b"{}")
    entry = line.entry(1)
    batch = line.batch(entries=[entry])
    return [
        ("a number left out", replace(batch, seq=batch.seq + 1)),
        ("a number used before", replace(batch, seq=batch.seq - 1)),
        ("a next id that goes back", replace(batch, entries=(), next_id=2)),
        ("an id used before", replace(batch, entries=[change(entry, id=2)])),
        ("an id not given out", replace(batch, entries=[change(entry, id=batch.next_id)])),
        ("an id twice", replace(batch, entries=[entry, entry])),
        ("an entry of another commit", replace(batch, entries=[change(entry, seq=1)])),
        ("the root twice", replace(batch, conversations=[ConversationRecord(id=1, created_at=1)])),
        ("a document without a value", replace(batch, documents=[DocumentWrite(document, version=1)])),
        ("two documents at one address", replace(batch, documents=[new, other])),
        ("an answer to nobody", replace(batch, replies=[MailReply(99, True, msgspec.Raw(b"null"))])),
    ]


async def what_contradicts_the_store_is_refused(subject: Subject) -> None:
    """K23, K26: numbers, ids, addresses and answers that no kernel in order would hand over."""
    line = await begun(subject)
    await line.commit(line.batch(entries=[line.entry(1)]))
    await line.storage.close()
    for number in range(len(_wrong_batches(line))):
        again = await Line.open(subject)
        name, batch = _wrong_batches(again)[number]
        try:
            await refused(StorageError, again.storage.commit(batch))
        except AssertionError as error:
            raise AssertionError(f"{name} was stored") from error
        await again.storage.close()
        line = await Line.open(subject)
        assert line.info.seq == 2, name
        assert await line.storage.check() == [], name
        await line.storage.close()


async def a_caller_that_went_away_changes_nothing(subject: Subject) -> None:
    """K79: a future that was cancelled is still a commit, and those after it settle."""
    line = await begun(subject)
    entry = line.entry(1)
    line.storage.commit(line.batch(entries=[entry])).cancel()
    await line.commit(line.batch())
    assert await line.storage.entry(entry.id) == entry
    await line.storage.close()


async def a_crash_loses_nothing_acknowledged(subject: Subject) -> None:
    """K5, K130: what has settled is in the store that a kill leaves behind, progress too; the open one goes on."""
    line = await begun(subject)
    entry = line.entry(1)
    await line.commit(line.batch(entries=[entry]))
    note = line.entry(1)
    await line.commit(line.batch(entries=[note], progress=True))
    crashed = await subject.crash()
    later = line.entry(1)
    await line.commit(line.batch(entries=[later]))
    await line.storage.close()
    again = await Line.open(crashed)
    assert again.info.seq == line.seq - 1
    lineage = await again.storage.lineage(1)
    assert await again.storage.entries(lineage) == [entry, note]
    assert await again.storage.check() == []
    await again.storage.close()


CHECKS = (
    commits_settle_later_and_in_order,
    records_come_back_as_they_were,
    a_refused_batch_stores_nothing_and_ends_the_store,
    what_contradicts_the_store_is_refused,
    a_caller_that_went_away_changes_nothing,
    a_crash_loses_nothing_acknowledged,
)
