"""Opening, reading and reopening a store through a session (rules K13, K23, K28, K31, K32, K41, K130, K143, K170,
K171, K172, K185)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from kernel.samples import Job, Note, Tally, begin, conversation, ended, job, new_task, note, tally, there
from kernel.stores import HandClock, HeldStorage
from perdure.kernel.errors import InvalidRead, NotFound, StaleEpochError, StorageBusy, StorageError
from perdure.kernel.session import Session
from perdure.kernel.storage import Storage


async def test_a_reopened_store_gives_back_what_was_committed() -> None:
    """Rules K23 and K130: records, documents, live tasks, requests, the last commit's number and the next id."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session, root=True)
        entry = await job(session, place, 5)
        async with session.commit(conversation_id=place) as tx:
            live, done = new_task(tx), new_task(tx)
            asked = tx.new_submission(type="input", status="queued", digest="d", request_id="r")
        async with session.commit() as tx:
            tx.put_task(ended(done))
        before = (await session.entries(place), await session.tasks(), await session.submissions(), session.seq)
        used = session.next_id
    async with Session.open(storage.snapshot()) as session:
        after = (await session.entries(place), await session.tasks(), await session.submissions(), session.seq)
        assert after == before
        assert session.next_id == used
        assert session.live.settled == session.live.staged == {live.id: live}
        assert there(await session.snapshot(Job, conversation=place)).n == 5
        assert await session.request(place, "r") == asked
        assert there(await session.entry(entry)).data == {"n": 5}
        assert there(await session.conversation(place)).id == 1


async def test_settled_reads_page_in_id_order() -> None:
    """Rule K139: cursors, limits, filters, both orders."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            entries = [tx.append(Note(n=n)).id for n in range(7)]
            tasks = [new_task(tx).id for _ in range(5)]
            places = [tx.create_conversation(owner=tasks[0]).id for _ in range(3)]
            asked = [tx.new_submission(type="write", status="queued", digest="d").id for _ in range(3)]
        assert [e.id for e in await session.entries(place, limit=3)] == entries[:3]
        assert [e.id for e in await session.entries(place, first=entries[3], limit=3)] == entries[3:6]
        assert [e.id for e in await session.entries(place, last=entries[3], order="descending", limit=2)] == [
            entries[3],
            entries[2],
        ]
        assert [t.id for t in await session.tasks(limit=2)] == tasks[:2]
        assert [t.id for t in await session.tasks(after=tasks[1], limit=9)] == tasks[2:]
        assert [t.id for t in await session.tasks(kind="app.other")] == []
        assert [c.id for c in await session.conversations(owner=tasks[0], after=places[0])] == places[1:]
        assert [c.id for c in await session.conversations(owner=None)] == [place]
        assert [s.id for s in await session.submissions(status="queued", after=asked[0])] == asked[1:]
        assert [s.id for s in await session.submissions(conversation_id=places[0])] == []
        for limit in (0, 1_001):
            with pytest.raises(InvalidRead):
                await session.conversations(limit=limit)


async def test_reads_of_what_is_not_there() -> None:
    """Rule K138: None for a record, NotFound for the history of a conversation that does not exist."""
    async with Session.open(HeldStorage()) as session:
        reads = (session.conversation, session.entry, session.submission, session.task)
        assert [await read(99) for read in reads] == [None] * 4
        assert await session.request(99, "r") is None
        for history in (session.entries, session.head):
            with pytest.raises(NotFound):
                await history(99)
        place = await conversation(session)
        assert await session.entries(place) == []
        assert await session.head(place) is None


async def test_records_that_were_read_are_detached_and_immutable() -> None:
    """Rules K31 and K32."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        entry = there(await session.entry(await note(session, place, 1)))
        data = entry.data
        assert isinstance(data, dict)
        data["n"] = 7
        entry.messages.append("m")
        assert (entry.data, entry.messages) == ({"n": 1}, [])
        with pytest.raises(AttributeError):
            entry.kind = "app.other"  # pyright: ignore[reportAttributeAccessIssue]
        scanned = await session.entries(place)
        scanned.clear()
        assert len(await session.entries(place)) == 1


async def test_conversations_and_live_tasks_are_read_from_memory() -> None:
    """Rule K185: what is live or fixed costs no storage call once known."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
    async with Session.open(storage) as session:
        await session.conversation(place)
        storage.reads.clear()
        for _ in range(3):
            assert await session.conversation(place) is not None
            assert await session.task(task.id) == task
            await session.entries(place)
        assert storage.reads == {"entries": 3}


async def test_opening_costs_what_is_live() -> None:
    """Rule K185: pages of live tasks, and nothing else of a store with thousands of entries and ended tasks."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            for n in range(3_000):
                tx.append(Note(n=n))
            for _ in range(1_500):
                tx.put_task(ended(new_task(tx)))
            live = [new_task(tx).id for _ in range(1_500)]
    storage.reads.clear()
    async with Session.open(storage) as session:
        assert list(session.live.settled) == live
        assert storage.reads == {"tasks": 2}


@pytest.mark.parametrize("option", ["line_bound_ms", "drain_ms", "document_retention_ms"])
@pytest.mark.parametrize("value", [-1, math.nan])
async def test_a_bound_that_is_none_is_refused_before_the_store_is_touched(option: str, value: float) -> None:
    """Rules K58, K82 and K114."""
    storage = HeldStorage()
    with pytest.raises(ValueError, match=option):
        await Session.start(storage, **{option: value})  # pyright: ignore[reportArgumentType]
    async with Session.open(storage) as session:
        assert session.info.epoch == 1


async def test_a_path_is_no_storage() -> None:
    for path in ("agent.db", Path("agent.db")):
        with pytest.raises(TypeError, match=r"a path is no storage; open SqliteStorage\('agent\.db'\)"):
            async with Session.open(cast(Storage, path)):
                raise AssertionError("never opened")


async def test_a_store_has_one_owner() -> None:
    """Rule K168: a second opener fails at once, the first goes on."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        with pytest.raises(StorageBusy):
            await Session.start(storage)
        await tally(session, 1)


async def test_every_opening_raises_the_fence() -> None:
    """Rules K28 and K170 to K172: an epoch one higher, a writer of its own; an old epoch is refused."""
    storage = HeldStorage()
    infos: list[tuple[int, str, str]] = []
    for epoch in (None, None, 7, None):
        async with Session.open(storage, epoch=epoch) as session:
            infos.append((session.info.epoch, session.info.writer, session.info.log_id))
    assert [epoch for epoch, _, _ in infos] == [1, 2, 7, 8]
    assert len({writer for _, writer, _ in infos}) == 4
    assert len({log_id for _, _, log_id in infos}) == 1
    for epoch in (8, 3):
        with pytest.raises(StaleEpochError):
            await Session.start(storage, epoch=epoch)
    async with Session.open(storage) as session:
        assert session.info.epoch == 9


async def test_a_superseded_writer_adds_nothing() -> None:
    """Rules K64 and K173: its session fails, the other's store is as it was."""
    storage = HeldStorage()
    session = await Session.start(storage)
    await tally(session, 1)
    storage._contents.epoch += 1
    storage._contents.writer = "another"
    with pytest.raises(StaleEpochError):
        await tally(session, 2)
    assert isinstance(session.failed, StaleEpochError)
    await session.close()
    assert storage._contents.seq == 1


async def test_a_store_opened_for_reading_takes_no_commits() -> None:
    """Rules K143 and K159: reads work, no fence is written, and the refusal fails nothing."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        await job(session, place, 1)
        epoch = session.info.epoch
    async with Session.open(storage, read_only=True) as session:
        assert (session.info.read_only, session.info.epoch) == (True, epoch)
        assert len(await session.entries(place)) == 1
        assert there(await session.snapshot(Job, conversation=place)).n == 1
        async with session.state(Job, conversation=place) as state:
            assert state.value.n == 1
        with pytest.raises(StorageError):
            await tally(session, 1)
        assert session.failed is None
    async with Session.open(storage) as session:
        assert session.info.epoch == epoch + 1


async def test_times_come_from_the_sessions_clock() -> None:
    """Rules K13 and K14."""
    clock = HandClock()
    storage = HeldStorage()
    async with Session.open(storage, clock=clock) as session:
        place = await conversation(session)
        assert there(await session.conversation(place)).created_at == clock.wall()
        clock.now += 60
        assert there(await session.entry(await note(session, place))).created_at == clock.wall()
        await tally(session, 1)
        (write,) = storage.batches[-1].documents
        assert (write.record.created_at, storage.batches[-1].at) == (clock.wall(), clock.wall())


async def test_a_storm_of_writers_and_readers_stays_consistent() -> None:
    """Rules K1, K41 and K61: two documents and an entry that change together are never seen apart."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        await job(session, place, 0)
        await tally(session, 0)
        torn: list[tuple[int, int]] = []
        done = asyncio.Event()

        async def write() -> None:
            for _ in range(10):
                async with session.commit(conversation_id=place) as tx:
                    (await tx.draft(Job)).n += 1
                    (await tx.draft(Tally)).n += 1
                    tx.append(Note())

        async def watch() -> None:
            async with session.state(Job, conversation=place) as one, session.state(Tally) as two:
                while not done.is_set():
                    if one.value.n != two.value.n:
                        torn.append((one.value.n, two.value.n))
                    await asyncio.sleep(0)

        async def read() -> None:
            while not done.is_set():
                await asyncio.sleep(0)
                async with session.commit() as tx:
                    pair = there(await tx.read(Job, conversation=place)).n, there(await tx.read(Tally)).n
                    entries = len(await tx.entries(place, limit=1_000))
                if pair[0] != pair[1] or entries != pair[0] + 1:
                    torn.append(pair)

        others = [begin(watch()), begin(read())]
        await asyncio.gather(*(write() for _ in range(5)))
        done.set()
        await asyncio.gather(*others)
        assert torn == []
        assert there(await session.snapshot(Tally)).n == 50
        assert len(await session.entries(place)) == 51


async def test_a_call_from_another_event_loop_is_refused_at_once_k208() -> None:
    """A wait there would never end, and what it changes is not made for two threads."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)

        async def commit() -> None:
            async with session.commit() as tx:
                (await tx.draft(Tally)).n = 5

        def call(make: Callable[[], Awaitable[object]]) -> str:
            async def wait() -> None:
                await make()

            with pytest.raises(RuntimeError) as raised:
                asyncio.run(wait())
            return str(raised.value)

        for make in (commit, lambda: session.entries(place), lambda: session.snapshot(Tally), session.close):
            assert "run_coroutine_threadsafe" in await asyncio.to_thread(call, make)
        assert session.close_report is None
        assert await session.snapshot(Tally) is None
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(commit(), loop).result(10))
        assert there(await session.snapshot(Tally)).n == 5
