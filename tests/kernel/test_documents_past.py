"""The past of rewindable documents, in memory and through forks (rules K111 and K118)."""

from __future__ import annotations

import pytest

from kernel.samples import Draft, Job, Live, Tally, conversation, job, note, there
from kernel.stores import HeldStorage
from perdure.kernel.document import Document
from perdure.kernel.errors import NotFound
from perdure.kernel.session import Session


async def fork(session: Session, place: int, at: int) -> int:
    async with session.commit() as tx:
        return (await tx.fork(place, at)).id


async def seen(session: Session, place: int, at: int) -> int | None:
    read = await session.snapshot(Job, conversation=place, at=at)
    return None if read is None else read.n


async def test_a_snapshot_at_an_entry_is_the_state_of_that_entrys_commit() -> None:
    """Rule K111: what the same commit wrote is in it, what came later is not, before there was one it is None."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        before = await note(session, place)
        one = await job(session, place, 1)
        between = await note(session, place)
        two = await job(session, place, 2)
        expected = [(before, None), (one, 1), (between, 1), (two, 2)]
        assert [await seen(session, place, at) for at, _ in expected] == [n for _, n in expected]
    async with Session.open(storage) as session:
        assert [await seen(session, place, at) for at, _ in expected] == [n for _, n in expected]


async def test_the_incarnation_that_lived_then_is_read() -> None:
    """Rule K111: not the one that lives at the address now."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await job(session, place, 1)
        async with session.commit(conversation_id=place) as tx:
            await tx.retire(Job)
        gone = await note(session, place)
        two = await job(session, place, 2)
        assert [await seen(session, place, at) for at in (one, gone, two)] == [1, None, 2]
        async with session.commit(conversation_id=place) as tx:
            await tx.retire(Job)
        assert [await seen(session, place, at) for at in (one, gone, two)] == [1, None, 2]


async def test_the_past_is_found_through_forks() -> None:
    """Rule K111: at an inherited entry the ancestor's state, at an own entry the fork's."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await job(session, place, 1)
        two = await job(session, place, 2)
        child = await fork(session, place, one)
        three = await job(session, child, 30)
        grandchild = await fork(session, child, three)
        four = await job(session, grandchild, 40)
        assert [await seen(session, place, at) for at in (one, two)] == [1, 2]
        assert [await seen(session, child, at) for at in (one, three)] == [1, 30]
        assert [await seen(session, grandchild, at) for at in (one, three, four)] == [1, 30, 40]


async def test_an_entry_the_conversation_does_not_show_is_not_a_point_of_its_past() -> None:
    """Rule K111: another conversation's, the parent's after the fork, the fork's, one that is not there."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await job(session, place, 1)
        two = await job(session, place, 2)
        child = await fork(session, place, one)
        three = await job(session, child, 3)
        for where, at in ((child, two), (place, three), (place, 999), (place, child)):
            with pytest.raises(NotFound):
                await seen(session, where, at)
        assert session.failed is None


async def test_latest_history_has_no_past_to_ask_for() -> None:
    """Rule K111: a mistake of the caller, said so."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        at = await note(session, place)
        for kind, where in ((Live, place), (Draft, place), (Tally, None)):
            with pytest.raises(ValueError, match="rewindable"):
                await session.snapshot(kind, conversation=where, at=at)


async def test_the_past_is_read_with_the_version_stored_then() -> None:
    """Rules K109 and K111: migrated in memory, each from its own version."""

    class Job2(Document, kind="app.job", scope="conversation", history="rewindable", fork="as_of", version=2):
        tens: int = 0

        @classmethod
        def migrate(cls, value: object, version: int) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
            assert isinstance(value, dict)
            return {"tens": value["n"] * 10}

    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        one = await job(session, place, 1)
        async with session.commit(conversation_id=place) as tx:
            (await tx.draft(Job2)).tens += 5
        two = await note(session, place)
        values = [there(await session.snapshot(Job2, conversation=place, at=at)).tens for at in (one, two)]
        assert values == [10, 15]
        child = await fork(session, place, one)
        assert there(await session.snapshot(Job2, conversation=child)).tens == 10
        assert there(await session.snapshot(Job, conversation=child)).n == 1
