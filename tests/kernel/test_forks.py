"""Forks: shared history, documents by their policy, and chains of them (rules K115 to K120)."""

from __future__ import annotations

import asyncio

import pytest

from kernel.samples import Draft, Job, Live, Note, Scratch, begin, conversation, job, new_task, note, there
from kernel.stores import HeldStorage, rest
from perdure.kernel import lineage
from perdure.kernel.documents import ForkConflict
from perdure.kernel.errors import NotFound
from perdure.kernel.session import Session


async def fork(session: Session, place: int, at: int) -> int:
    async with session.commit() as tx:
        return (await tx.fork(place, at)).id


async def ids(session: Session, place: int) -> list[int]:
    return [entry.id for entry in await session.entries(place)]


async def test_a_fork_shows_the_history_through_its_entry_and_both_go_on_alone() -> None:
    """Rules K115 and K116: entries are shared, none is copied."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        one, two, three = [await note(session, place, n) for n in (1, 2, 3)]
        child = await fork(session, place, two)
        assert len(storage.batches[-1].entries) == 0
        assert await ids(session, child) == [one, two]
        four, five = await note(session, place, 4), await note(session, child, 5)
        assert await ids(session, place) == [one, two, three, four]
        assert await ids(session, child) == [one, two, five]
        assert await session.entries(child, order="descending", limit=2) == [
            await session.entry(five),
            await session.entry(two),
        ]
        assert [e.id for e in await session.entries(child, first=two, last=four)] == [two]
        record = there(await session.conversation(child))
        assert record.parent is not None
        assert (record.parent.conversation, record.parent.at, record.owner) == (place, two, None)
    async with Session.open(storage) as session:
        assert await ids(session, child) == [one, two, five]


async def test_a_fork_at_an_inherited_entry_takes_nothing_of_its_parents_own() -> None:
    """Rule K115: a fork of a fork, before, at and after the point it was forked at."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one, two = await note(session, place), await note(session, place)
        child = await fork(session, place, two)
        three = await note(session, child)
        assert await ids(session, await fork(session, child, one)) == [one]
        assert await ids(session, await fork(session, child, two)) == [one, two]
        assert await ids(session, await fork(session, child, three)) == [one, two, three]


async def test_heads_are_found_through_forks() -> None:
    """Rules K115 and K139: the newest at or below the point, not one the fork does not show."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            head = tx.append(Note(), head="self").id
        at = await note(session, place)
        async with session.commit(conversation_id=place) as tx:
            later = tx.append(Note(), head="self").id
        child = await fork(session, place, at)
        assert there(await session.head(place)).id == later
        assert there(await session.head(child)).id == head
        async with session.commit() as tx:
            assert there(await tx.head(child)).id == head
            own = tx.append(Note(), conversation=child, head=at).id
            assert there(await tx.head(child)).id == own
        assert there(await session.head(child)).head == at


async def test_only_a_visible_entry_can_be_forked_at() -> None:
    """Rule K115: not another conversation's, not one after the parent's own fork point, not this transaction's."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place, other = await conversation(session), await conversation(session)
        one, two = await note(session, place), await note(session, place)
        child = await fork(session, place, one)
        before = len(storage.batches)
        for where, at in ((other, one), (child, two), (place, 999), (999, one)):
            with pytest.raises(NotFound):
                await fork(session, where, at)
        async with session.commit(conversation_id=place) as tx:
            with pytest.raises(ValueError):
                await tx.fork(place, tx.append(Note()).id)
        assert len(storage.batches) == before + 1


async def test_a_fork_can_be_written_to_in_its_own_transaction() -> None:
    """Rules K45 and K48: and is read there with what it inherits."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await note(session, place)
        async with session.commit() as tx:
            child = (await tx.fork(place, one, owner=None)).id
            own = tx.append(Note(n=2), conversation=child).id
            assert [entry.id for entry in await tx.entries(child)] == [one, own]
            assert (await tx.conversation(child)).parent is not None
        assert await ids(session, child) == [one, own]


async def states(session: Session, place: int) -> tuple[int | None, ...]:
    reads = [await session.snapshot(kind, conversation=place) for kind in (Job, Live, Draft)]
    return tuple(None if read is None else read.n for read in reads)


async def write(session: Session, place: int, n: int) -> int:
    async with session.commit(conversation_id=place) as tx:
        for kind in (Job, Live, Draft):
            (await tx.draft(kind)).n = n
        return tx.append(Note(n=n)).id


async def test_documents_follow_their_fork_policy() -> None:
    """Rule K118: as_of the state at the entry, current the state now, initial none; then each goes on alone."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
        await write(session, place, 2)
        child = await fork(session, place, one)
        assert await states(session, child) == (1, 2, None)
        assert await states(session, place) == (2, 2, 2)
        await write(session, child, 30)
        await write(session, place, 3)
        assert await states(session, child) == (30, 30, 30)
        assert await states(session, place) == (3, 3, 3)
    async with Session.open(storage) as session:
        assert await states(session, child) == (30, 30, 30)
        assert await states(session, place) == (3, 3, 3)


async def test_a_fork_takes_documents_as_they_lived_then() -> None:
    """Rule K118: one retired since is in an as_of fork and not in a current one; one made since the other way round."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
        async with session.commit(conversation_id=place) as tx:
            await tx.retire(Job)
            await tx.retire(Live)
        two = await note(session, place)
        assert await states(session, await fork(session, place, one)) == (1, None, None)
        assert await states(session, await fork(session, place, two)) == (None, None, None)
        await write(session, place, 3)
        assert await states(session, await fork(session, place, one)) == (1, 3, None)
        assert await states(session, await fork(session, place, two)) == (None, 3, None)


async def test_a_fork_through_an_ancestor_takes_the_ancestors_past_and_the_parents_present() -> None:
    """Rule K118: as_of is of the conversation the entry is of, current of the one that is forked."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
        await write(session, place, 2)
        child = await fork(session, place, one)
        await write(session, child, 30)
        assert await states(session, await fork(session, child, one)) == (1, 30, None)


async def test_the_documents_of_a_new_fork_are_there_in_its_own_transaction() -> None:
    """Rules K45 and K63: to be read, changed and retired like any other; staged once."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
        await write(session, place, 2)
        async with session.commit() as tx:
            child = (await tx.fork(place, one)).id
            assert there(await tx.read(Job, conversation=child)).n == 1
            assert there(await tx.read(Live, conversation=child)).n == 2
            assert await tx.read(Draft, conversation=child) is None
            draft = await tx.draft(Job, conversation=child)
            draft.n += 10
            assert there(await tx.read(Job, conversation=child)).n == 11
            (await tx.draft(Live, conversation=child)).n += 10
            (await tx.draft(Draft, conversation=child)).n = 7
        assert await states(session, child) == (11, 12, 7)
        async with session.commit() as tx:
            other = (await tx.fork(place, one)).id
            await tx.retire(Job, conversation=other)
            assert await tx.read(Job, conversation=other) is None
            with pytest.raises(NotFound):
                await tx.retire(Job, conversation=other)
            (await tx.draft(Job, conversation=other)).n += 5
        assert await states(session, other) == (5, 2, None)
        assert session.failed is None
    async with Session.open(storage) as session:
        assert await states(session, child) == (11, 12, 7)
        assert await states(session, other) == (5, 2, None)


async def test_a_rolled_back_fork_leaves_nothing() -> None:
    """Rule K43."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
        made: list[int] = []
        with pytest.raises(LookupError):
            async with session.commit() as tx:
                made.append((await tx.fork(place, one)).id)
                raise LookupError
        assert await session.conversation(made[0]) is None
        assert await states(session, made[0]) == (None, None, None)
        assert await states(session, await fork(session, place, one)) == (1, 1, None)


async def test_a_fork_that_was_given_up_while_it_read_leaves_nothing() -> None:
    """Rules K1 and K118: there is no fork with some of its documents, whatever the block goes on to do."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
    storage.lazy = True
    outcomes: list[bool] = []
    for turns in range(1, 16):
        async with Session.open(storage) as session, session.commit(conversation_id=place) as tx:
            forking = begin(tx.fork(place, one))
            for _ in range(turns):
                await asyncio.sleep(0)
            given_up = not forking.done()
            forking.cancel()
            await asyncio.wait([forking])
            assert (tx.new_conversations == {}) == given_up
            outcomes.append(given_up)
            tx.append(Note())
        assert len(storage.batches[-1].conversations) == (not given_up)
        assert len(storage.batches[-1].documents) == (0 if given_up else 2)
    assert outcomes == [*[True] * outcomes.count(True), *[False] * outcomes.count(False)]
    assert 3 < outcomes.count(True) < len(outcomes)


async def test_somebody_who_looked_before_does_not_hinder_the_fork() -> None:
    """Rule K118: a document's absence that was read before its conversation existed is no obstacle."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
        for id in range(1, 12):
            await session.snapshot(Job, conversation=id)
        child = await fork(session, place, one)
        assert child < 12
        assert await states(session, child) == (1, 1, None)


async def test_a_fork_that_also_writes_a_current_document_of_the_parent_is_refused() -> None:
    """Rule K120: changing, making and retiring it, before and after the fork; other documents may be written."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        one = await note(session, place)
        before = len(storage.batches)
        for first in (True, False):
            with pytest.raises(ForkConflict):
                async with session.commit(conversation_id=place) as tx:
                    if first:
                        await tx.fork(place, one)
                    (await tx.draft(Live)).n = 2
                    if not first:
                        await tx.fork(place, one)
        assert len(storage.batches) == before
        await write(session, place, 1)
        for retire in (True, False):
            with pytest.raises(ForkConflict):
                async with session.commit(conversation_id=place) as tx:
                    await tx.fork(place, one)
                    if retire:
                        await tx.retire(Live)
                    else:
                        (await tx.draft(Live)).n = 2
        async with session.commit(conversation_id=place) as tx:
            child = (await tx.fork(place, one)).id
            (await tx.draft(Job)).n = 5
            (await tx.draft(Draft)).n = 5
            assert (await tx.draft(Live)).n == 1
            (await tx.draft(Live, conversation=child)).n = 9
        assert await states(session, place) == (5, 1, 5)
        assert await states(session, child) == (None, 9, None)
        assert session.failed is None


async def test_tasks_submissions_and_request_ids_are_never_inherited() -> None:
    """Rule K119."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
            (await tx.draft(Scratch, task=task.id)).n = 1
            at = tx.append(Note()).id
            asked = tx.new_submission(type="input", status="placed", digest="d", request_id="r", entry=at)
        child = await fork(session, place, at)
        assert await session.tasks(conversation_id=child) == []
        assert await session.submissions(conversation_id=child) == []
        assert await session.request(child, "r") is None
        async with session.commit(conversation_id=child) as tx:
            again = tx.new_submission(type="input", status="queued", digest="e", request_id="r")
        assert again.id != asked.id
        assert session.live.settled.keys() == {task.id}


async def test_a_fork_sees_what_was_staged_before_it() -> None:
    """Rules K60 and K118: its parent's current document as the commit before it left it."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        one = await write(session, place, 1)
        storage.hold()
        writing = begin(write(session, place, 2))
        await rest()
        forking = begin(fork(session, place, one))
        await rest()
        await storage.settle()
        await asyncio.gather(writing, forking)
        assert await states(session, await forking) == (1, 2, None)


async def test_a_chain_of_a_thousand_forks_works_and_costs_no_call_a_link() -> None:
    """Rule K117: a scan, a head, a past state and a fork at its end make as many storage calls as at its start."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            first = tx.append(Note(n=0), head="self").id
            (await tx.draft(Job)).n = 7
        costs: list[dict[str, int]] = []
        at, entries = first, [first]
        for n in range(1, 1_001):
            storage.reads.clear()
            place = await fork(session, place, at)
            costs.append(dict(storage.reads))
            at = await note(session, place, n)
            entries.append(at)
        assert costs[-1] == costs[10]
        assert sum(costs[-1].values()) <= 6
    async with Session.open(storage) as session:
        storage.reads.clear()
        assert [e.id for e in await session.entries(place, limit=1_000)] == entries[:1_000]
        assert [e.id for e in await session.entries(place, order="descending", limit=3)] == entries[:-4:-1]
        assert [e.id for e in await session.entries(place, first=entries[500], limit=2)] == entries[500:502]
        assert there(await session.head(place)).id == first
        assert there(await session.snapshot(Job, conversation=place, at=at)).n == 7
        assert there(await session.snapshot(Job, conversation=place, at=entries[500])).n == 7
        async with session.commit() as tx:
            assert [e.id for e in await tx.entries(place, first=entries[999])] == entries[999:]
        assert sum(storage.reads.values()) <= 12
        child = await fork(session, place, entries[500])
        assert await ids(session, child) == entries[:100]
        assert [e.id for e in await session.entries(child, first=entries[499])] == entries[499:501]


async def test_a_long_chain_forked_in_one_storm_of_transactions() -> None:
    """Rule K117: forks that wait for each other's commits."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        at = await job(session, place, 1)
        children = await asyncio.gather(*(fork(session, place, at) for _ in range(20)))
        assert len(set(children)) == 20
        for child in children:
            assert await ids(session, child) == [at]
            assert there(await session.snapshot(Job, conversation=child)).n == 1


def test_histories_in_memory_are_bounded_by_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of forks is as long as its segments: a number of histories would bound nothing."""
    monkeypatch.setattr(lineage, "KEPT_SEGMENTS", 10)
    kept = lineage.Lineages()

    def history(length: int) -> tuple[lineage.Segment, ...]:
        return tuple(lineage.Segment(id, id, id) for id in range(length))

    for id in range(1, 5):
        kept.keep(id, history(3))
    assert [id for id in range(1, 5) if kept.get(id)] == [2, 3, 4]
    assert kept.get(2), "used: it is not the next to go"
    kept.keep(5, history(4))
    assert [id for id in range(1, 6) if kept.get(id)] == [2, 4, 5]
    kept.keep(5, history(2))
    kept.forget(2)
    kept.forget(2)
    kept.keep(6, history(1_000))
    assert [id for id in range(1, 7) if kept.get(id)] == [6], "the one in use stays, and nothing beside it"
    kept.keep(7, history(10))
    assert [id for id in range(1, 8) if kept.get(id)] == [7]
    assert kept._segments == 10


async def test_a_history_that_left_memory_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule K117."""
    monkeypatch.setattr(lineage, "KEPT_SEGMENTS", 4)
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        chain, notes = [place], []
        for n in range(8):
            notes.append(await note(session, chain[-1], n))
            chain.append(await fork(session, chain[-1], notes[-1]))
        for _ in range(2):
            for at, one in enumerate(chain):
                assert await ids(session, one) == notes[: at + 1]
