"""Documents in a session: made, read, kept in memory, retired, made again (rules K45, K53, K94, K98,
K99, K112 to K114)."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from kernel.samples import (
    Job,
    Label,
    Note,
    Scratch,
    Tally,
    begin,
    conversation,
    ended,
    job,
    new_task,
    note,
    tally,
    there,
)
from kernel.stores import HandClock, HeldStorage, rest
from perdure.kernel.document import Document
from perdure.kernel.documents import DocumentChange, LoadedDocument
from perdure.kernel.errors import DocumentFieldError, DraftClosed, NotFound
from perdure.kernel.ops import apply
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.storage.sqlite import SqliteStorage


async def test_only_a_draft_makes_a_document() -> None:
    """Rule K99: every other read of an absent one gives None."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        assert await session.snapshot(Tally) is None
        assert await session.snapshot(Job, conversation=place) is None
        async with session.commit(conversation_id=place) as tx:
            assert await tx.read(Tally) is None
            assert await tx.read(Job) is None
        assert len(storage.batches) == 1
        async with session.commit() as tx:
            await tx.draft(Tally)
        assert tx.seq == 2
        assert there(await session.snapshot(Tally)) == Tally()


async def test_a_document_made_in_a_rolled_back_block_does_not_exist() -> None:
    """Rules K43 and K99."""
    async with Session.open(HeldStorage()) as session:
        with pytest.raises(LookupError):
            async with session.commit() as tx:
                (await tx.draft(Tally)).n = 1
                raise LookupError
        assert await session.snapshot(Tally) is None
        async with session.commit() as tx:
            assert await tx.read(Tally) is None


async def test_a_transaction_reads_its_own_changes() -> None:
    """Rule K45: as a detached snapshot that later changes leave alone."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 1)
        async with session.commit() as tx:
            draft = await tx.draft(Tally)
            draft.n = 2
            read = there(await tx.read(Tally))
            draft.n = 3
            draft.log.append("a")
            assert (read.n, read.log) == (2, [])
            assert there(await tx.read(Tally)).log == ["a"]


async def test_there_is_one_draft_an_address_a_transaction() -> None:
    """Rule K53: however it was opened; as another class it is refused."""

    class Other(Document, kind="app.tally", scope="session", version=2):
        n: int = 0

    async with Session.open(HeldStorage()) as session, session.commit() as tx:
        first = await tx.draft(Tally)
        first.n = 1
        assert await tx.draft(Tally) is first
        with pytest.raises(ValueError):
            await tx.draft(Other)


async def test_a_family_has_one_document_a_key() -> None:
    """Rule K98: and only a family takes a key."""
    async with Session.open(HeldStorage()) as session:
        async with session.commit() as tx:
            (await tx.draft(Label, key="a")).n = 1
            (await tx.draft(Label, key="b")).n = 2
        assert [there(await session.snapshot(Label, key=key)).n for key in ("a", "b")] == [1, 2]
        assert await session.snapshot(Label, key="c") is None
        with pytest.raises(ValueError):
            await session.snapshot(Label)
        with pytest.raises(ValueError):
            await session.snapshot(Tally, key="a")


async def test_scopes_keep_documents_apart() -> None:
    """Rule K95: one of each conversation, one of each task; the scope's place must be named."""
    async with Session.open(HeldStorage()) as session:
        one, two = await conversation(session), await conversation(session)
        async with session.commit(conversation_id=one) as tx:
            task, other = new_task(tx), new_task(tx)
            (await tx.draft(Job)).n = 1
            (await tx.draft(Job, conversation=two)).n = 2
            (await tx.draft(Scratch, task=task.id)).n = 3
            with pytest.raises(ValueError):
                await tx.draft(Scratch)
        assert there(await session.snapshot(Job, conversation=one)).n == 1
        assert there(await session.snapshot(Job, conversation=two)).n == 2
        assert there(await session.snapshot(Scratch, task=task.id)).n == 3
        assert await session.snapshot(Scratch, task=other.id) is None
        with pytest.raises(ValueError):
            await session.snapshot(Job)
        with pytest.raises(ValueError):
            await session.snapshot(Scratch)


async def test_what_is_read_is_detached() -> None:
    """Rule K32: changing it changes neither the store nor what others read."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            (await tx.draft(Tally)).log = ["a"]
        read = there(await session.snapshot(Tally))
        read.log.append("b")
        assert there(await session.snapshot(Tally)).log == ["a"]
        async with session.commit() as tx:
            there(await tx.read(Tally)).log.append("c")
            assert (await tx.draft(Tally)).log == ["a"]
        with pytest.raises(AttributeError):
            read.n = 7
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Tally)).log == ["a"]


async def test_a_field_keeps_its_type_and_a_refused_write_changes_nothing() -> None:
    """Rules K39, K40 and K52."""
    async with Session.open(HeldStorage()) as session:
        items = ["a"]
        async with session.commit() as tx:
            draft = await tx.draft(Tally)
            draft.log = items
            items.append("b")
            with pytest.raises(DocumentFieldError):
                draft.n = "7"  # pyright: ignore[reportAttributeAccessIssue]
        assert there(await session.snapshot(Tally)) == Tally(log=["a"])


# --- retiring --------------------------------------------------------------------------------------------------


async def retire(session: Session) -> None:
    async with session.commit() as tx:
        await tx.retire(Tally)


async def test_a_retired_document_is_gone_and_a_new_one_is_another_incarnation() -> None:
    """Rule K112: with its own id, from the initial value."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 1)
        await retire(session)
        assert await session.snapshot(Tally) is None
        with pytest.raises(NotFound):
            await retire(session)
        async with session.commit() as tx:
            draft = await tx.draft(Tally)
            assert draft.n == 0
            draft.text = "new"
        ids = {write.record.id for batch in storage.batches for write in batch.documents}
        assert len(ids) == 2
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Tally)).text == "new"


async def test_retired_and_made_again_in_one_transaction() -> None:
    """Rule K112: the reads in between see nothing."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 1)
        async with session.commit() as tx:
            await tx.retire(Tally)
            assert await tx.read(Tally) is None
            with pytest.raises(NotFound):
                await tx.retire(Tally)
            draft = await tx.draft(Tally)
            draft.n += 5
            assert there(await tx.read(Tally)).n == 5
        assert there(await session.snapshot(Tally)).n == 5
        assert len(storage.batches[-1].documents) == 2
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Tally)).n == 5


async def test_a_document_is_changed_or_retired_in_one_transaction_not_both() -> None:
    """Rule K112."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 1)
        async with session.commit() as tx:
            (await tx.draft(Tally)).n = 2
            with pytest.raises(ValueError):
                await tx.retire(Tally)
        assert there(await session.snapshot(Tally)).n == 2


async def test_a_staged_retirement_is_seen_in_the_line_and_not_outside() -> None:
    """Rules K60 and K61."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 1)
        storage.hold()
        retiring = begin(retire(session))
        await rest()
        assert there(await session.snapshot(Tally)).n == 1
        again = begin(tally(session, 7))
        await rest()
        assert there(await session.snapshot(Tally)).n == 1
        await storage.settle(1)
        await retiring
        assert await session.snapshot(Tally) is None
        await storage.settle()
        await again
        assert there(await session.snapshot(Tally)).n == 7


async def test_observers_hear_what_each_document_was_and_became() -> None:
    """Rule K70: before and after, and operations that lead from one to the other; None where nothing lived."""
    heard: list[list[DocumentChange]] = []
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        session.observe(lambda settled: heard.append(list(settled.documents)))
        await tally(session, 1)
        await tally(session, 2)
        async with session.commit() as tx:
            await tx.retire(Tally)
            (await tx.draft(Tally)).n = 3
        at = await job(session, place, 4)
        async with session.commit() as tx:
            await tx.fork(place, at)
        await retire(session)
    whole = {"n": 0, "log": [], "text": ""}
    values = [[(change.before, change.after) for change in changes] for changes in heard]
    assert values == [
        [(None, {**whole, "n": 1})],
        [({**whole, "n": 1}, {**whole, "n": 2})],
        [({**whole, "n": 2}, None), (None, {**whole, "n": 3})],
        [(None, {"n": 4})],
        [(None, {"n": 4})],
        [({**whole, "n": 3}, None)],
    ]
    for change in (change for changes in heard for change in changes if change.after is not None):
        assert apply(change.before, change.ops) == change.after
    first, second = heard[2]
    assert (first.record.id != second.record.id, first.record.retired_seq, second.record.retired_seq) == (True, 4, None)


# --- documents of tasks ----------------------------------------------------------------------------------------


async def scratch(session: Session, place: int, n: int) -> int:
    async with session.commit(conversation_id=place) as tx:
        task = new_task(tx)
        (await tx.draft(Scratch, task=task.id)).n = n
    return task.id


async def finish(session: Session, task: int) -> None:
    async with session.commit() as tx:
        tx.put_task(ended(await tx.task(task)))


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
async def test_a_tasks_documents_retire_with_it(reopened: bool, loaded: bool) -> None:
    """Rule K113: in that very commit, whether they are in memory or not, and none but its own."""
    storage = HeldStorage()
    async with Session.open(storage, document_retention_ms=600_000 if loaded else 0) as session:
        place = await conversation(session)
        task, other = await scratch(session, place, 1), await scratch(session, place, 2)
        if not reopened:
            await finish(session, task)
            assert [write.record.scope_id for write in storage.batches[-1].documents] == [task]
            assert await session.snapshot(Scratch, task=task) is None
    async with Session.open(storage) as session:
        if reopened:
            if loaded:
                assert there(await session.snapshot(Scratch, task=task)).n == 1
            await finish(session, task)
        assert await session.snapshot(Scratch, task=task) is None
        assert there(await session.snapshot(Scratch, task=other)).n == 2
        assert [record.scope_id for record in await storage.documents("task", task)] == []


async def test_a_tasks_document_changed_in_its_last_commit_retires_too() -> None:
    """Rule K113: the draft does not keep it alive, and is dead like any other."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        task = await scratch(session, place, 1)
        async with session.commit() as tx:
            draft = await tx.draft(Scratch, task=task)
            draft.n = 2
            tx.put_task(ended(await tx.task(task)))
        with pytest.raises(DraftClosed):
            draft.n = 3
        assert await session.snapshot(Scratch, task=task) is None
        assert await storage.documents("task", task) == []


async def test_a_tasks_document_made_in_its_last_commit_is_never_stored() -> None:
    """Rule K113: nor one made in the commit that both creates and ends the task."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
        async with session.commit() as tx:
            (await tx.draft(Scratch, task=task.id)).n = 2
            tx.put_task(ended(task))
        async with session.commit(conversation_id=place) as tx:
            brief = new_task(tx)
            (await tx.draft(Scratch, task=brief.id)).n = 2
            tx.put_task(ended(brief))
        for id in (task.id, brief.id):
            assert await session.snapshot(Scratch, task=id) is None
            assert await storage.documents("task", id) == []


async def test_a_task_that_a_derivation_ends_takes_its_documents_along() -> None:
    """Rules K69 and K113."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        task = await scratch(session, place, 1)

        def finish_all(tx: Transaction) -> None:
            if tx.new_entries:
                for record in list(tx.live_tasks()):
                    tx.put_task(ended(record))

        session.derive(finish_all)
        await note(session, place)
        assert await session.snapshot(Scratch, task=task) is None
        assert await storage.documents("task", task) == []


async def test_an_ended_task_gets_no_new_documents() -> None:
    """Rule K113: nothing would ever retire them; nor does a task that is not there."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        task = await scratch(session, place, 1)
        async with session.commit() as tx:
            tx.put_task(ended(await tx.task(task)))
            assert there(await tx.read(Scratch, task=task)).n == 1
        async with session.commit() as tx:
            for id in (task, 99):
                with pytest.raises(NotFound):
                    await tx.draft(Scratch, task=id)


# --- memory ----------------------------------------------------------------------------------------------------


async def test_a_document_stays_in_memory_for_the_retention_after_its_last_use() -> None:
    """Rule K114: 10 minutes by default."""
    storage, clock = HeldStorage(), HandClock()
    async with Session.open(storage, clock=clock) as session:
        await tally(session, 1)
        for seconds, reads in ((599, 1), (599, 1), (601, 2), (599, 2)):
            clock.now += seconds
            await session.snapshot(Label, key=str(clock.now))  # loading another one is when old ones are let go of
            await session.snapshot(Tally)
            assert storage.documents_read["app.tally"] == reads


async def test_reading_alone_lets_go_of_what_is_not_used() -> None:
    """Rule K114: a session that never commits does not fill its memory."""
    storage, clock = HeldStorage(), HandClock()
    async with Session.open(storage, clock=clock, document_retention_ms=60_000) as session:
        for n in range(100):
            clock.now += 10
            await session.snapshot(Label, key=str(n + 1))
            assert len(session.documents.loaded()) <= 11


@pytest.mark.parametrize(("retention", "reads"), [(0, 4), (math.inf, 1)])
async def test_retention_may_be_nothing_or_for_ever(retention: float, reads: int) -> None:
    """Rule K114."""
    storage, clock = HeldStorage(), HandClock()
    async with Session.open(storage, clock=clock, document_retention_ms=retention) as session:
        place = await conversation(session)
        await job(session, place, 1)
        for n in range(3):
            clock.now += 1e9
            await session.snapshot(Label, key=str(n + 1))
            assert there(await session.snapshot(Job, conversation=place)).n == 1
        assert storage.documents_read["app.job"] == reads


async def test_an_observed_document_stays_in_memory() -> None:
    """Rule K114: until the observation ends, and from then on for the retention."""
    storage, clock = HeldStorage(), HandClock()
    async with Session.open(storage, clock=clock, document_retention_ms=60_000) as session:
        place = await conversation(session)
        await tally(session, 1)
        async with session.state(Tally) as state:
            clock.now += 3_600
            await note(session, place)
            await tally(session, 2)
            assert state.value.n == 2
            assert storage.reads["document"] == 1
            clock.now += 3_600
        clock.now += 59
        await note(session, place)
        await tally(session, 3)
        assert storage.reads["document"] == 1


async def test_a_commit_does_not_look_at_every_document_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule K114: what is observed costs a commit to something else nothing, also where nothing is retained."""
    looked: list[object] = []
    monkeypatch.setattr(LoadedDocument, "needed", property(lambda document: looked.append(document) or True))
    async with Session.open(HeldStorage(), document_retention_ms=0) as session:
        async with session.commit() as tx:
            for n in range(50):
                (await tx.draft(Label, key=str(n + 1))).n = n
        looked.clear()
        for n in range(50):
            await tally(session, n)
        assert len(looked) < 200


async def test_readers_of_one_document_share_one_read() -> None:
    """Rule K114: and all see the same."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 1)
    async with Session.open(storage) as session:
        storage.reads.clear()
        storage.read_gate = gate = asyncio.Event()
        readers = [begin(session.snapshot(Tally)) for _ in range(5)]
        writer = begin(tally(session, 2))
        await rest()
        gate.set()
        assert {there(await reader).n for reader in readers} <= {1, 2}
        await writer
        assert storage.reads["document"] == 1
        assert there(await session.snapshot(Tally)).n == 2


async def test_a_slow_read_of_a_place_not_yet_made_does_not_hide_what_is_made_there() -> None:
    """Rule K61: a read that began before the conversation was created ends after its document was written and let go
    of; later readers and writers see what was written."""
    storage = HeldStorage()
    async with Session.open(storage, document_retention_ms=0) as session:
        storage.late_gate = gate = asyncio.Event()
        early = begin(session.snapshot(Job, conversation=2))
        await rest()
        storage.late_gate = None
        async with session.commit() as tx:
            place = tx.create_conversation(owner=None).id
            assert place == 2
            (await tx.draft(Job, conversation=place)).n = 1
            tx.append(Note(), conversation=place)
        await tally(session, 1)
        gate.set()
        assert there(await early).n == 1
        assert there(await session.snapshot(Job, conversation=place)).n == 1
        await job(session, place, 2)
        assert there(await session.snapshot(Job, conversation=place)).n == 2


@pytest.mark.parametrize("wrong", [5, True, 1.5, b"k", ["k"], ("k",)], ids=repr)
async def test_a_key_that_is_no_text_is_refused_k209(wrong: Any) -> None:
    async with Session.open(HeldStorage()) as session:
        with pytest.raises(TypeError, match="a key is a text"):
            async with session.commit() as tx:
                await tx.draft(Label, key=wrong)
        with pytest.raises(TypeError, match="a key is a text"):
            await session.snapshot(Label, key=wrong)


@pytest.mark.parametrize("wrong", ["{}", "{}.0"])
async def test_a_conversation_that_is_no_number_has_no_documents_k209(wrong: str, tmp_path: Path) -> None:
    """SQLite would take "1" for 1, and keep a record that cannot be read."""
    async with Session.open(SqliteStorage(tmp_path / "store.db")) as session:
        place = await conversation(session)
        for other in (wrong.format(place), float(place), True):
            untyped: Any = other
            with pytest.raises((TypeError, NotFound)):
                async with session.commit() as tx:
                    await tx.draft(Job, conversation=untyped)
            with pytest.raises((TypeError, NotFound)):
                await session.snapshot(Job, conversation=untyped)
        await job(session, place, 1)
        assert there(await session.snapshot(Job, conversation=place)).n == 1
