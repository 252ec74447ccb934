"""Deleting conversations from a session (rules K192 to K198)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kernel.samples import Job, Live, Note, Scratch, begin, conversation, ended, job, new_task, note, there
from kernel.stores import HeldStorage, rest
from perdure.kernel.errors import ConversationOpen, InvalidTransition, NotFound, SessionFailed, StorageError
from perdure.kernel.observation import WatchEnded
from perdure.kernel.records import ROOT_CONVERSATION, TaskRecord
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.storage.memory import MemoryStorage
from perdure.storage.sqlite import SqliteStorage


async def task_in(session: Session, where: int) -> TaskRecord:
    async with session.commit() as tx:
        return new_task(tx, where)


async def end(session: Session, task: TaskRecord) -> None:
    async with session.commit() as tx:
        tx.put_task(ended(await tx.task(task.id)))


async def owned_by(session: Session, task: TaskRecord) -> int:
    async with session.commit() as tx:
        return tx.create_conversation(owner=task.id).id


async def delete(session: Session, id: int) -> list[int]:
    async with session.commit() as tx:
        return await tx.delete_conversation(id)


async def ask(session: Session, where: int, status: Any, type: Any = "input") -> int:
    async with session.commit() as tx:
        return tx.new_submission(type=type, status=status, digest="", request_id="r", conversation=where).id


async def not_found(*reads: Awaitable[object]) -> None:
    for read in reads:
        with pytest.raises(NotFound):
            await read


async def test_a_conversation_goes_with_all_it_owns_and_with_nothing_else_k192_k195() -> None:
    storage = MemoryStorage()
    async with Session.open(storage) as session:
        top, beside = await conversation(session), await conversation(session)
        task = await task_in(session, top)
        child = await owned_by(session, task)
        below = await task_in(session, child)
        grandchild = await owned_by(session, below)
        async with session.commit() as tx:
            (await tx.draft(Scratch, task=below.id)).n = 1
        entries = [await job(session, where, 1) for where in (top, child, grandchild)]
        asked = await ask(session, top, "done", "write")
        kept = await job(session, beside, 7)
        for each in (below, task):
            await end(session, each)
        async with session.commit() as tx:
            assert sorted(await tx.delete_conversation(top)) == [top, child, grandchild]
            assert tx.deleted_conversations == {top, child, grandchild}
            await not_found(*(tx.conversation(id) for id in (top, child, grandchild)))
            await not_found(tx.task(task.id), tx.submission(asked), tx.entries(top), tx.head(child))
            assert await tx.read(Job, conversation=child) is None
            assert await tx.request(top, "r") is None
            assert [c.id for c in await tx.conversations()] == [beside]
            assert await tx.tasks() == await tx.submissions() == []
            await not_found(tx.delete_conversation(child), tx.draft(Job, conversation=top), tx.fork(top, entries[0]))
        next_id = session.next_id
        assert [c.id for c in await session.conversations()] == [beside]
        assert await session.tasks() == await session.submissions() == []
        for id in (top, child, grandchild):
            assert await session.conversation(id) is None
            await not_found(session.entries(id), session.head(id))
            assert await session.snapshot(Job, conversation=id) is None
        assert await session.entry(entries[1]) is None
        assert await session.task(task.id) is None
        assert await session.submission(asked) is None
    async with Session.open(storage) as session:
        assert session.next_id == next_id, "K197: an id is given once"
        assert [entry.id for entry in await session.entries(beside)] == [kept]
        assert there(await session.snapshot(Job, conversation=beside)).n == 7


async def _live_task(session: Session, where: int) -> None:
    await task_in(session, where)


async def _live_task_below(session: Session, where: int) -> None:
    task = await task_in(session, where)
    child = await owned_by(session, task)
    await end(session, task)
    await task_in(session, child)


async def _queued(session: Session, where: int) -> None:
    await ask(session, where, "queued")


async def _placed(session: Session, where: int) -> None:
    await ask(session, where, "placed")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_live_task, r"app\.task task \d+ is pending"),
        (_live_task_below, r"task \d+ of conversation \d+, which it owns, is pending"),
        (_queued, r"submission \d+ is queued"),
        (_placed, r"submission \d+ is placed"),
    ],
)
async def test_what_is_not_closed_is_refused_and_stays_k193(
    make: Callable[[Session, int], Awaitable[None]], why: str
) -> None:
    async with Session.open(MemoryStorage()) as session:
        where = await conversation(session)
        entry = await job(session, where, 3)
        await make(session, where)
        seq = session.seq
        async with session.commit() as tx:
            with pytest.raises(ConversationOpen, match=why) as raised:
                await tx.delete_conversation(where)
            assert raised.value.conversation == where
            assert not tx.deleted_conversations
        assert session.seq == seq
        assert [e.id for e in await session.entries(where)] == [entry]
        assert there(await session.snapshot(Job, conversation=where)).n == 3


async def test_what_a_live_task_owns_is_refused_and_goes_once_that_has_ended_k193() -> None:
    async with Session.open(MemoryStorage()) as session:
        where = await conversation(session)
        task = await task_in(session, where)
        child = await owned_by(session, task)
        with pytest.raises(ConversationOpen, match=rf"belongs to app\.task task {task.id}, which is pending"):
            await delete(session, child)
        await end(session, task)
        assert await delete(session, child) == [child]
        assert await session.conversation(where) is not None


async def test_work_that_ends_in_the_same_transaction_does_not_keep_it_k193() -> None:
    async with Session.open(MemoryStorage()) as session:
        where = await conversation(session)
        task, asked = await task_in(session, where), await ask(session, where, "queued")
        async with session.commit() as tx:
            tx.put_task(ended(await tx.task(task.id)))
            record = await tx.submission(asked)
            await tx.put_submission(structs.replace(record, status="unanswered", reason="aborted"))
            assert await tx.delete_conversation(where) == [where]
            # K195: nor does the transaction itself find any more what it wrote there before.
            assert await tx.tasks() == await tx.tasks(conversation_id=where) == []
            assert await tx.submissions() == await tx.submissions(conversation_id=where) == []
        assert await session.task(task.id) is None
        assert await session.conversation(where) is None


async def test_the_root_is_never_deleted_k194() -> None:
    async with Session.open(MemoryStorage()) as session:
        await conversation(session, root=True)
        with pytest.raises(InvalidTransition, match="root conversation is not deleted"):
            await delete(session, ROOT_CONVERSATION)
        assert await session.conversation(ROOT_CONVERSATION) is not None


async def test_a_transaction_does_not_delete_what_it_writes_to() -> None:
    async with Session.open(MemoryStorage()) as session:
        where, other = await conversation(session), await conversation(session)
        entry = await job(session, where, 1)

        async def made(tx: Transaction) -> None:
            await tx.delete_conversation(tx.create_conversation(owner=None).id)

        async def forked(tx: Transaction) -> None:
            await tx.fork(where, entry)
            await tx.delete_conversation(where)

        async def drafted(tx: Transaction) -> None:
            await tx.draft(Job, conversation=where)
            await tx.delete_conversation(where)

        for write in (made, forked, drafted):
            async with session.commit() as tx:
                with pytest.raises(InvalidTransition, match="delete it in another"):
                    await write(tx)
                tx.append(Note(n=9), conversation=other)

        def appended(tx: Transaction) -> None:
            tx.append(Note(n=1), conversation=where)

        def begun(tx: Transaction) -> None:
            new_task(tx, where)

        for late in (appended, begun):
            with pytest.raises(NotFound):
                async with session.commit() as tx:
                    await tx.delete_conversation(where)
                    late(tx)
        assert [e.id for e in await session.entries(where)] == [entry], "what is refused deletes nothing"


async def test_no_transaction_begins_before_a_deletion_has_settled_k195() -> None:
    storage = HeldStorage()
    async with Session.open(storage) as session:
        where, other = await conversation(session), await conversation(session)
        storage.hold()
        deleting = begin(delete(session, where))
        await rest()
        writing, beside = begin(note(session, where)), begin(note(session, other))
        await rest()
        assert len(storage.batches[2:]) == 1, "the others wait for it"
        assert await session.conversation(where) is not None, "what has not settled is not seen"
        await storage.settle()
        assert await deleting == [where]
        await not_found(writing)
        assert [e.id for e in await session.entries(other)] == [await beside]


async def test_a_deletion_that_storage_refuses_deletes_nothing() -> None:
    storage = HeldStorage()
    async with Session.open(storage) as session:
        where = await conversation(session)
        entry = await job(session, where, 1)
        storage.hold()
        deleting = begin(delete(session, where))
        await rest()
        waiting = begin(note(session, where))
        await rest()
        left = storage.snapshot()
        await storage.refuse()
        with pytest.raises(StorageError):
            await deleting
        with pytest.raises(SessionFailed):
            await waiting
    async with Session.open(left) as session:
        assert [e.id for e in await session.entries(where)] == [entry]


async def test_a_read_that_was_on_its_way_does_not_bring_it_back_k195() -> None:
    storage = HeldStorage()
    async with Session.open(storage) as session:
        where = await conversation(session)
        await job(session, where, 1)
    async with Session.open(storage) as session:
        gate = storage.late_gate = asyncio.Event()
        record, lineage = begin(session.conversation(where)), begin(session.lineage(where))
        await rest()
        storage.late_gate = None
        assert await delete(session, where) == [where]
        gate.set()
        assert await record is not None, "it was there when it was read"
        assert await lineage
        assert await session.conversation(where) is None
        await not_found(session.entries(where), note(session, where))


async def test_a_document_that_is_being_read_is_deleted_all_the_same_k195() -> None:
    storage = HeldStorage()
    async with Session.open(storage) as session:
        where = await conversation(session)
        await job(session, where, 1)
    async with Session.open(storage) as session:
        gate = storage.late_gate = asyncio.Event()
        reading = begin(session.snapshot(Job, conversation=where))
        await rest()
        storage.late_gate = None
        deleting = begin(delete(session, where))
        await rest()
        gate.set()
        assert await deleting == [where]
        await reading
        assert await session.snapshot(Job, conversation=where) is None


async def test_states_and_watches_of_it_end_retired_k198() -> None:
    async with Session.open(MemoryStorage()) as session:
        where, other = await conversation(session), await conversation(session)
        for each in (where, other):
            async with session.commit(conversation_id=each) as tx:
                (await tx.draft(Live)).n = each
        watching = session.watch(Live, conversation=where)
        async with (
            watching as watch,
            session.state(Live, conversation=where) as state,
            session.state(Live, conversation=other) as beside,
        ):
            assert (await anext(watch)).value.n == where
            await delete(session, where)
            with pytest.raises(WatchEnded) as raised:
                await anext(watch)
            assert raised.value.reason == state.ended == "retired"
            assert state.value.n == where
            assert beside.ended is None


async def test_a_fork_goes_on_and_looks_back_as_before_k196(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with Session.open(SqliteStorage(path)) as session:
        trunk = await conversation(session)
        entries = [await job(session, trunk, n) for n in range(1, 6)]

        async def forked(where: int, at: int) -> int:
            async with session.commit() as tx:
                return (await tx.fork(where, at)).id

        fork = await forked(trunk, entries[3])
        second = await forked(fork, entries[1])
        own = await job(session, fork, 10)
        assert await delete(session, trunk) == [trunk]
        assert await session.entry(entries[4]) is None, "nobody shows it"
    async with Session.open(SqliteStorage(path)) as session:
        assert [e.id for e in await session.entries(fork)] == [*entries[:4], own]
        assert [e.id for e in await session.entries(second)] == entries[:2]
        for n, entry in enumerate(entries[:4], 1):
            assert there(await session.snapshot(Job, conversation=fork, at=entry)).n == n
        await not_found(session.snapshot(Job, conversation=fork, at=entries[4]))
        late = await forked(fork, entries[2])
        assert there(await session.snapshot(Job, conversation=late)).n == 3, "as of the entry it was forked at"
        await not_found(forked(trunk, entries[0]), session.entries(trunk), note(session, trunk))
        assert trunk not in [c.id for c in await session.conversations()]
        for id, kept in ((fork, 3), (late, 2), (second, 0)):
            assert await delete(session, id) == [id]
            assert [await session.entry(e) is not None for e in entries] == [True] * kept + [False] * (5 - kept)
        assert await session.conversations() == []
        assert await session.storage.check() == []
        size = await session.storage.size()
        assert (size.entries, size.documents) == (0, 0)


async def test_who_only_looks_sees_what_another_process_deleted_k195(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with Session.open(SqliteStorage(path)) as session:
        where = await conversation(session)
        await job(session, where, 1)
        async with Session.open(SqliteStorage(path), read_only=True) as reader:
            assert len(await reader.entries(where)) == 1
            assert await reader.conversation(where) is not None
            await delete(session, where)
            assert await reader.conversation(where) is None
            await not_found(reader.entries(where))
            assert await reader.snapshot(Job, conversation=where) is None


async def test_a_derivation_hears_of_it_and_may_refuse_it() -> None:
    async with Session.open(MemoryStorage()) as session:
        where = await conversation(session)
        heard: list[set[int]] = []

        def refuse(tx: Transaction) -> None:
            if tx.deleted_conversations:
                heard.append(set(tx.deleted_conversations))
                raise PermissionError

        session.derive(refuse)
        with pytest.raises(PermissionError):
            await delete(session, where)
        assert heard == [{where}]
        assert await session.conversation(where) is not None
