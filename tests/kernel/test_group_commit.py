"""Commits that are staged and not yet settled: who sees them, in which order they end, and what a failure takes along
(rules K59 to K68, K78, K79)."""

from __future__ import annotations

import asyncio

import pytest

from kernel.samples import Job, Label, Note, Tally, begin, conversation, ended, job, new_task, note, tally, there
from kernel.stores import HandClock, HeldStorage, rest
from perdure.kernel.context import Context
from perdure.kernel.errors import NotFound, SessionFailed, StorageError, TransactionClosed
from perdure.kernel.records import NULL
from perdure.kernel.session import Session, Settled
from perdure.kernel.transaction import Transaction


async def test_the_next_transaction_is_staged_while_the_one_before_is_flushed() -> None:
    """Rule K59: and it sees what the one before staged (rule K60)."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        storage.hold()
        first = begin(tally(session, 1))
        await rest()
        async with asyncio.timeout(60), session.commit() as tx:
            seen = there(await tx.read(Tally))
            assert seen.n == 1
            (await tx.draft(Tally)).n += 10
            assert not first.done()
            handed = len(storage.held)
            begin(storage.settle())
        assert handed == 1
        assert [batch.seq for batch in storage.batches] == [1, 2]
        found = there(await session.snapshot(Tally))
        assert found.n == 11


async def test_a_transaction_sees_every_kind_of_staged_record() -> None:
    """Rule K60: by id, by request id, in scans, and among the live tasks."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        storage.hold()

        async def write() -> tuple[int, int, int, int, int]:
            async with session.commit() as tx:
                place = tx.create_conversation(owner=None).id
                entry = tx.append(Note(n=1), conversation=place, head="self")
                task = new_task(tx, place)
                asked = tx.new_submission(
                    type="input", status="placed", digest="d", request_id="r", conversation=place, entry=entry.id
                )
                made.append((place, entry.id, task.id, asked.id, tx.new_id()))
            return made[0]

        made: list[tuple[int, int, int, int, int]] = []
        writing = begin(write())
        await rest()
        place, entry_id, task_id, asked_id, _ = made[0]

        async with session.commit() as tx:
            assert (await tx.conversation(place)).id == place
            assert (await tx.entry(entry_id)).data == {"n": 1}
            assert (await tx.task(task_id)).status == "pending"
            assert (await tx.submission(asked_id)).status == "placed"
            found = there(await tx.request(place, "r"))
            assert found.id == asked_id
            assert [task.id for task in tx.live_tasks()] == [task_id]
            assert session.live.settled == {}
            assert not writing.done()
            begin(storage.settle())
            assert [entry.id for entry in await tx.entries(place)] == [entry_id]
            assert [task.id for task in await tx.tasks(live=True)] == [task_id]
            assert [s.id for s in await tx.submissions(status="placed")] == [asked_id]
            assert [c.id for c in await tx.conversations(owner=None)] == [place]
            head = there(await tx.head(place))
            assert head.id == entry_id
        assert await writing == made[0]


async def test_outside_transactions_only_settled_commits_are_seen() -> None:
    """Rules K2 and K61: point reads, scans, requests, documents, memory of live tasks."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        await job(session, place, 1)
        storage.hold()

        async def write() -> None:
            async with session.commit(conversation_id=place) as tx:
                (await tx.draft(Job)).n = 2
                task = new_task(tx)
                entry = tx.append(Note(n=2))
                asked = tx.new_submission(type="input", status="placed", digest="d", request_id="r", entry=entry.id)
                other = tx.create_conversation(owner=None)
                made.extend((task.id, entry.id, asked.id, other.id))

        made: list[int] = []
        writing = begin(write())
        await rest()
        task_id, entry_id, asked_id, other_id = made

        seen = there(await session.snapshot(Job, conversation=place))
        assert seen.n == 1
        assert await session.task(task_id) is None
        assert await session.entry(entry_id) is None
        assert await session.submission(asked_id) is None
        assert await session.request(place, "r") is None
        assert await session.conversation(other_id) is None
        assert [entry.data for entry in await session.entries(place)] == [{"n": 1}]
        assert [c.id for c in await session.conversations()] == [place]
        assert await session.tasks() == []
        assert await session.submissions() == []
        assert session.seq == 2
        assert session.live.settled == {}
        assert not writing.done()

        await storage.settle()
        await writing
        assert (await session.submission(asked_id)) is not None
        assert await session.conversation(other_id) is not None
        assert session.seq == 3


async def test_a_staged_end_of_a_task_is_unknown_outside_until_it_settles() -> None:
    """Rule K61: the live task is still live for everyone outside."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
        storage.hold()

        async def end() -> None:
            async with session.commit() as tx:
                tx.put_task(ended(await tx.task(task.id)))

        ending = begin(end())
        await rest()
        assert await session.task(task.id) == task
        async with session.commit() as tx:
            assert list(tx.live_tasks()) == []
            assert (await tx.task(task.id)).status == "terminal"
            begin(storage.settle())
        await ending
        found = there(await session.task(task.id))
        assert found.status == "terminal"


async def test_a_call_returns_and_observers_hear_only_after_settlement_and_in_order() -> None:
    """Rules K65 and K70: an observer hears each commit, in order, before the committing block returns."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        heard: list[str] = []

        def observe(settled: Settled) -> None:
            heard.append(f"settled {settled.seq}")

        session.observe(observe)
        storage.hold()

        async def write(n: int) -> None:
            await tally(session, n)
            heard.append(f"returned {n}")

        writers = [begin(write(n)) for n in (1, 2, 3)]
        await rest()
        assert heard == []
        await storage.settle(1)
        assert heard == ["settled 1", "returned 1"]
        await storage.settle()
        await asyncio.gather(*writers)
        assert [h for h in heard if h.startswith("settled")] == ["settled 1", "settled 2", "settled 3"]
        assert all(heard.index(f"settled {n}") < heard.index(f"returned {n}") for n in (1, 2, 3))


@pytest.mark.parametrize("how", ["return", "raise"])
async def test_leaving_a_block_waits_for_what_was_staged_before_it(how: str) -> None:
    """Rule K66: a block that wrote nothing, or raised, rests on what it saw."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        storage.hold()
        writing = begin(tally(session, 1))
        await rest()

        async def look() -> int:
            async with session.commit() as tx:
                seen = there(await tx.read(Tally))
                if how == "raise":
                    raise LookupError("the block's own")
            return seen.n

        looking = begin(look())
        await rest()
        assert not looking.done()
        await storage.settle()
        await writing
        if how == "raise":
            with pytest.raises(LookupError):
                await looking
        else:
            assert await looking == 1
        assert len(storage.batches) == 1


@pytest.mark.parametrize("how", ["return", "raise"])
async def test_a_block_that_saw_what_storage_refused_fails_with_the_session(how: str) -> None:
    """Rules K64 and K66: neither its value nor its own error may get out."""
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.hold()
    writing = begin(tally(session, 1))
    await rest()

    async def look() -> None:
        async with session.commit() as tx:
            await tx.read(Tally)
            if how == "raise":
                raise LookupError("the block's own")

    looking = begin(look())
    await rest()
    error = await storage.refuse()
    with pytest.raises(StorageError) as first:
        await writing
    assert first.value is error
    with pytest.raises(SessionFailed) as second:
        await looking
    assert second.value.cause is error
    await session.close()


async def test_a_refused_commit_takes_every_later_one_along_in_order() -> None:
    """Rule K64: the refused call gets the storage's error, the others SessionFailed with that cause (rule K129)."""
    storage = HeldStorage()
    session = await Session.start(storage)
    ends: list[tuple[int, BaseException]] = []

    async def write(n: int) -> None:
        try:
            await tally(session, n)
        except Exception as error:
            ends.append((n, error))

    storage.hold()
    writers = [begin(write(n)) for n in (1, 2, 3, 4)]
    await rest()
    await storage.settle(1)
    error = await storage.refuse()
    await asyncio.gather(*writers)
    assert [n for n, _ in ends] == [2, 3, 4]
    assert ends[0][1] is error
    for _, later in ends[1:]:
        assert isinstance(later, SessionFailed)
        assert later.cause is error
    assert session.seq == 1
    await session.close()
    async with Session.open(storage.snapshot()) as again:
        found = there(await again.snapshot(Tally))
        assert found.n == 1


async def test_nothing_of_a_failed_commit_is_published() -> None:
    """Rules K2 and K43: no frame, no observer, no settled value."""
    storage = HeldStorage()
    session = await Session.start(storage)
    await tally(session, 1)
    heard: list[int] = []
    session.observe(lambda settled: heard.append(settled.seq))
    async with session.state(Tally) as state:
        storage.hold()
        writing = begin(tally(session, 2))
        await rest()
        assert state.value.n == 1
        await storage.refuse()
        with pytest.raises(StorageError):
            await writing
        assert state.value.n == 1
        assert state.ended == "session_failed"
    assert heard == []
    await session.close()


async def test_cancelled_before_admission_a_transaction_rolls_back() -> None:
    """Rule K78: in the line and in the block."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        entered = asyncio.Event()

        async def block() -> None:
            async with session.commit() as tx:
                (await tx.draft(Tally)).n = 1
                entered.set()
                await asyncio.Event().wait()

        inside = begin(block())
        await entered.wait()
        waiting = begin(tally(session, 2))
        await rest()
        waiting.cancel()
        inside.cancel()
        for task in (waiting, inside):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert storage.batches == []
        await tally(session, 3)
        assert session.seq == 1


async def test_a_turn_that_comes_as_its_owner_gives_up_goes_to_the_next() -> None:
    """Rule K78: the line is not lost with a waiter that was cancelled in the moment of its turn."""
    async with Session.open(HeldStorage()) as session:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def block() -> None:
            async with session.commit():
                entered.set()
                await leave.wait()

        first = begin(block())
        await entered.wait()
        second = begin(tally(session, 2))
        third = begin(tally(session, 3))
        await rest()
        leave.set()
        await asyncio.sleep(0)  # the first leaves and hands its turn over; the second has not run yet
        second.cancel()
        await first
        with pytest.raises(asyncio.CancelledError):
            await second
        async with asyncio.timeout(60):
            await third
        assert session.seq == 1


async def test_cancelled_after_admission_a_commit_settles_and_the_cancellation_comes_afterwards() -> None:
    """Rule K79."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        storage.hold()
        writing = begin(tally(session, 1))
        await rest()
        writing.cancel()
        await rest()
        writing.cancel()
        await rest()
        assert not writing.done()
        await storage.settle()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert session.seq == 1
        found = there(await session.snapshot(Tally))
        assert found.n == 1


async def test_a_timeout_after_admission_is_raised_once_the_commit_has_settled() -> None:
    """Rules K79 and K88."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        storage.hold()

        async def write() -> None:
            async with asyncio.timeout(0):
                await tally(session, 1)

        async with session.commit() as tx:  # the line is held, so that the timeout is set before the commit begins
            (await tx.draft(Label, key="a")).n = 1
            late = begin(write())
            await rest()
            begin(storage.settle())
        with pytest.raises(TimeoutError):
            await late
        assert session.seq == 1

        storage.hold()
        inside = asyncio.Event()

        async def slow() -> None:
            async with asyncio.timeout(3600) as bound:
                async with session.commit() as tx:
                    (await tx.draft(Tally)).n = 1
                    bound.reschedule(asyncio.get_running_loop().time())
                inside.set()

        writing = begin(slow())
        await rest()
        assert not writing.done()
        await storage.settle()
        with pytest.raises(TimeoutError):
            await writing
        assert not inside.is_set()
        assert session.seq == 2


async def test_a_document_of_a_staged_commit_stays_in_memory_at_retention_zero() -> None:
    """Rule K67: it is kept while its staged and settled values differ, however often others settle."""
    storage = HeldStorage()
    async with Session.open(storage, document_retention_ms=0) as session:
        await tally(session, 1)
        storage.hold()
        first, second = begin(note_label(session, "a")), begin(tally(session, 2))
        await rest()
        await storage.settle(1)  # settles the first, and lets go of what is not needed
        await first

        async def add() -> int:
            async with session.commit() as tx:
                tally = await tx.draft(Tally)
                tally.n += 10
                return tally.n

        adding = begin(add())
        await rest()
        await storage.settle()
        await second
        assert await adding == 12


async def note_label(session: Session, key: str) -> None:
    async with session.commit() as tx:
        (await tx.draft(Label, key=key)).n += 1


async def test_a_document_open_in_a_block_stays_in_memory_at_retention_zero() -> None:
    """Rule K67: commits that settle meanwhile do not take the open draft's document out of memory, so that the next
    transaction sees what this one staged."""
    storage = HeldStorage()
    async with Session.open(storage, document_retention_ms=0) as session:
        await tally(session, 1)
        storage.hold()
        earlier = begin(note_label(session, "a"))
        await rest()

        leave = asyncio.Event()

        async def add(amount: int) -> int:
            async with session.commit() as tx:
                draft = await tx.draft(Tally)
                await leave.wait()
                draft.n += amount
                return draft.n

        first, second = begin(add(10)), begin(add(100))
        await rest()
        await storage.settle(1)
        assert earlier.done()
        leave.set()
        await rest()
        assert len(storage.held) == 2
        await storage.settle()
        assert [await first, await second] == [11, 111]
    async with Session.open(storage) as again:
        found = there(await again.snapshot(Tally))
        assert found.n == 111


async def test_a_document_used_for_longer_than_the_retention_is_the_same_for_all() -> None:
    """Rules K67 and K114: use counts from the last use, not from when it was loaded."""
    storage = HeldStorage()
    clock = HandClock()
    async with Session.open(storage, clock=clock, document_retention_ms=60_000) as session:
        for n in range(1, 6):
            clock.now += 59
            await tally(session, n)
        assert storage.reads["document"] == 1
        clock.now += 61
        await note_label(session, "a")
        await tally(session, 6)
        assert storage.reads["document"] == 3


async def test_a_conversation_made_in_a_staged_commit_can_be_written_to_and_forked() -> None:
    """Rule K60: a fork waits for what it stands on to settle."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        storage.hold()
        made: list[int] = []

        async def create() -> None:
            async with session.commit() as tx:
                place = tx.create_conversation(owner=None).id
                made.extend((place, tx.append(Note(n=1), conversation=place).id))

        async def append() -> None:
            await note(session, made[0], 2)

        creating = begin(create())
        await rest()
        appending = begin(append())
        await rest()
        assert len(storage.held) == 2

        async def fork() -> int:
            async with session.commit() as tx:
                return (await tx.fork(made[0], made[1])).id

        forking = begin(fork())
        await rest()
        assert len(storage.held) == 2
        await storage.settle()
        await asyncio.gather(creating, appending)
        assert [entry.data for entry in await session.entries(await forking)] == [{"n": 1}]
        assert [entry.data for entry in await session.entries(made[0])] == [{"n": 1}, {"n": 2}]


async def test_scans_of_a_conversation_that_only_is_staged_find_nothing_outside() -> None:
    """Rule K61."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        storage.hold()
        creating = begin(conversation(session))
        await rest()
        with pytest.raises(NotFound):
            await session.entries(2)
        await storage.settle()
        assert await session.entries(await creating) == []


async def test_staged_commits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of staged commits has a bound: the next transaction waits for the oldest, and fails with it."""
    import perdure.kernel.session as module

    monkeypatch.setattr(module, "MAX_STAGED", 2)
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.hold()
    entered: list[int] = []

    async def write(n: int) -> None:
        async with session.commit() as tx:
            entered.append(n)
            (await tx.draft(Tally)).n = n

    writers = [begin(write(n)) for n in range(4)]
    await rest()
    assert entered == [0, 1]
    await storage.settle(1)
    assert entered == [0, 1, 2]
    error = await storage.refuse()
    results = await asyncio.gather(*writers, return_exceptions=True)
    assert entered == [0, 1, 2], "a transaction that waited for room does not begin in a failed session"
    assert results[1] is error
    for later in results[2:]:
        assert isinstance(later, SessionFailed)
        assert later.cause is error
    await session.close()


async def test_the_values_a_context_carries_go_with_the_commit() -> None:
    """Rule K91: values, without the context's cancellation."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        heard: list[object] = []
        session.observe(lambda settled: heard.append(dict(settled.values)))
        context = Context(values={"request": 7})
        storage.hold()

        async def write() -> None:
            async with session.commit(context=context) as tx:
                (await tx.draft(Tally)).n = 1

        writing = begin(write())
        await rest()
        context.cancel()
        await storage.settle()
        await writing
        assert heard == [{"request": 7}]


async def test_a_commit_that_failed_has_no_number() -> None:
    """Rules K44 and K65: nor has one that has not settled."""
    storage = HeldStorage()
    session = await Session.start(storage)
    kept: list[Transaction] = []

    async def write() -> None:
        async with session.commit() as tx:
            kept.append(tx)
            (await tx.draft(Tally)).n = 1

    storage.hold()
    writing = begin(write())
    await rest()
    with pytest.raises(TransactionClosed):
        _ = kept[0].seq
    await storage.refuse()
    with pytest.raises(StorageError):
        await writing
    with pytest.raises(TransactionClosed):
        _ = kept[0].seq
    await session.close()


async def test_a_transaction_is_one_block_also_for_two_who_enter_at_once() -> None:
    """Rule K41."""
    async with Session.open(HeldStorage()) as session:
        tx = session.commit()

        async def write() -> None:
            async with tx:
                (await tx.draft(Tally)).n += 1

        async with session.commit():
            both = [begin(write()), begin(write())]
            await rest()
        results = await asyncio.gather(*both, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), TransactionClosed]
        assert there(await session.snapshot(Tally)).n == 1


async def test_progress_is_of_documents_alone() -> None:
    """Rule K152: a commit with a record in it, a derivation's too, is flushed like any other."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        for appends in (False, True):
            async with session.commit(conversation_id=place) as tx:
                tx.progress = True
                (await tx.draft(Tally)).n += 1
                if appends:
                    tx.append(Note())
        session.derive(lambda tx: tx.append(Note(), conversation=place) and None)
        async with session.commit() as tx:
            tx.progress = True
            (await tx.draft(Tally)).n += 1
        assert [batch.progress for batch in storage.batches] == [False, True, False, False]


async def test_one_batch_holds_all_of_a_transaction() -> None:
    """Rules K1, K25 and K26: one batch, its seq and the next id minted in memory."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            place = tx.create_conversation(owner=None).id
            tx.append(Note(n=1), conversation=place)
            tx.new_task(kind="app.task", version=1, phase="start", input=NULL, conversation=place)
            tx.new_submission(type="write", status="done", digest="d", conversation=place)
            (await tx.draft(Tally)).n = 1
        (batch,) = storage.batches
        assert tx.seq == batch.seq == 1
        assert [len(part) for part in (batch.conversations, batch.entries, batch.tasks, batch.submissions)] == [1] * 4
        assert len(batch.documents) == 1
        ids = [place, batch.entries[0].id, batch.tasks[0].id, batch.submissions[0].id, batch.documents[0].record.id]
        assert ids == [2, 3, 4, 5, 6]
        assert batch.next_id == 7
