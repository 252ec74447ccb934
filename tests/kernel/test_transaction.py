"""What a transaction reads, writes and refuses (rules K20 to K27, K41 to K49, K56 to K58, K63)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kernel.samples import Job, Label, Note, Tally, begin, conversation, ended, new_task, note, tally, there
from kernel.stores import HandClock, HeldStorage, rest
from perdure.kernel.context import Context
from perdure.kernel.document import Document
from perdure.kernel.errors import (
    ContextCancelled,
    InsideTransaction,
    InvalidRead,
    InvalidTransition,
    NotFound,
    NotJson,
    RequestConflict,
    SessionClosed,
    TooLarge,
    TransactionClosed,
)
from perdure.kernel.records import NULL, Edit, Faulted, Pending, SubmissionRecord, TaskError, Terminal, to_raw
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction


async def test_an_exception_rolls_everything_back() -> None:
    """Rule K43: nothing is stored, nothing published, and the exception comes out as it is."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        await tally(session, 1)
        heard: list[int] = []
        session.observe(lambda settled: heard.append(settled.seq))
        async with session.state(Tally) as state:
            made: list[int] = []
            with pytest.raises(LookupError):
                async with session.commit(conversation_id=place) as tx:
                    tx.append(Note(n=1))
                    task = new_task(tx)
                    asked = tx.new_submission(type="input", status="queued", digest="d", request_id="r")
                    made += [task.id, tx.create_conversation(owner=task.id).id, asked.id]
                    (await tx.draft(Tally)).n = 2
                    (await tx.draft(Job)).n = 2
                    raise LookupError
            assert state.value.n == 1
        assert len(storage.batches) == 2
        assert heard == []
        assert await session.entries(place) == []
        assert await session.task(made[0]) is None
        assert await session.conversation(made[1]) is None
        assert await session.submission(made[2]) is None
        assert await session.request(place, "r") is None
        assert await session.snapshot(Job, conversation=place) is None
        async with session.commit() as tx:
            assert list(tx.live_tasks()) == []
            read = there(await tx.read(Tally))
            assert read.n == 1


async def test_a_block_without_writes_makes_no_commit() -> None:
    """Rule K44: and has no number."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        async with session.commit() as tx:
            assert await tx.read(Tally) is None
            tx.new_id()
        with pytest.raises(TransactionClosed):
            _ = tx.seq
        assert storage.batches == []
        assert session.seq == 0


async def test_a_draft_that_changes_nothing_makes_no_commit() -> None:
    """Rule K50: only operations are stored."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 1)
        await tally(session, 1)
        assert len(storage.batches) == 1


async def test_everything_of_a_transaction_is_dead_once_its_block_has_ended() -> None:
    """Rule K51: its methods and its drafts."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit() as tx:
            draft = await tx.draft(Tally)
            draft.n = 1
            with pytest.raises(TransactionClosed):
                _ = tx.seq
        assert tx.seq == 2
        uses = [
            lambda: tx.new_id(),
            lambda: tx.create_conversation(owner=None),
            lambda: tx.append(Note(n=1), conversation=place),
            lambda: new_task(tx, place),
            lambda: tx.new_submission(type="write", status="done", digest="d", conversation=place),
            lambda: tx.reply(1, ok=True),
            lambda: draft.n,
            lambda: setattr(draft, "n", 2),
        ]
        for use in uses:
            with pytest.raises(TransactionClosed):
                use()
        waits = [
            lambda: tx.conversation(place),
            lambda: tx.entry(1),
            lambda: tx.submission(1),
            lambda: tx.task(1),
            lambda: tx.request(place, "r"),
            lambda: tx.entries(place),
            lambda: tx.head(place),
            lambda: tx.conversations(),
            lambda: tx.tasks(),
            lambda: tx.submissions(),
            lambda: tx.read(Tally),
            lambda: tx.draft(Tally),
            lambda: tx.retire(Tally),
            lambda: tx.fork(place, 1),
        ]
        for wait in waits:
            with pytest.raises(TransactionClosed):
                await wait()
        with pytest.raises(TransactionClosed):
            async with tx:
                pass


# --- reading its own writes ------------------------------------------------------------------------------------


async def test_own_writes_are_seen_by_id_and_by_scan() -> None:
    """Rule K45."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        first = await note(session, place, 1)
        async with session.commit(conversation_id=place) as tx:
            second = tx.append(Note(n=2), head="self")
            third = tx.append(Note(n=3))
            task = new_task(tx)
            asked = tx.new_submission(type="input", status="queued", digest="d", request_id="r")
            other = tx.create_conversation(owner=task.id)
            elsewhere = tx.append(Note(n=9), conversation=other.id)

            assert await tx.entry(second.id) == second
            assert await tx.task(task.id) == task
            assert await tx.submission(asked.id) == asked
            assert await tx.conversation(other.id) == other
            assert await tx.request(place, "r") == asked
            assert await tx.request(other.id, "r") is None

            assert [e.id for e in await tx.entries()] == [first, second.id, third.id]
            assert [e.id for e in await tx.entries(order="descending")] == [third.id, second.id, first]
            assert [e.id for e in await tx.entries(limit=2)] == [first, second.id]
            assert [e.id for e in await tx.entries(order="descending", limit=2)] == [third.id, second.id]
            assert [e.id for e in await tx.entries(first=second.id, last=second.id)] == [second.id]
            assert [e.id for e in await tx.entries(other.id)] == [elsewhere.id]
            assert (await tx.head()) == second
            assert (await tx.head(last=first)) is None
            assert [c.id for c in await tx.conversations()] == [place, other.id]
            assert [c.id for c in await tx.conversations(owner=task.id)] == [other.id]
            assert [c.id for c in await tx.conversations(owner=None)] == [place]
            assert [c.id for c in await tx.conversations(after=place)] == [other.id]
            assert [t.id for t in await tx.tasks(conversation_id=place, kind="app.task", live=True)] == [task.id]
            assert await tx.tasks(kind="app.other") == []
            assert await tx.tasks(live=False) == []
            assert [s.id for s in await tx.submissions(status="queued")] == [asked.id]
            assert await tx.submissions(status="placed") == []


async def test_a_scan_shows_a_record_as_this_transaction_left_it() -> None:
    """Rule K45: one that no longer fits is gone, one that fits now is there, none comes twice."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            tasks = [new_task(tx).id for _ in range(4)]
            asked = [tx.new_submission(type="write", status="queued", digest="d").id for _ in range(4)]
        async with session.commit(conversation_id=place) as tx:
            tx.put_task(ended(await tx.task(tasks[1])))
            await tx.put_submission(msgspec.structs.replace(await tx.submission(asked[1]), status="done"))
            left = [tasks[0], tasks[2], tasks[3]]
            assert [t.id for t in await tx.tasks(live=True)] == left
            assert [t.id for t in await tx.tasks(live=True, limit=2)] == left[:2]
            assert [t.id for t in await tx.tasks(live=False)] == [tasks[1]]
            assert [t.id for t in await tx.tasks()] == tasks
            assert [t.id for t in tx.live_tasks()] == left
            assert tx.live_task(tasks[1]) is None
            assert (await tx.task(tasks[1])).status == "terminal"
            assert [s.id for s in await tx.submissions(status="queued")] == [asked[0], asked[2], asked[3]]
            assert [s.id for s in await tx.submissions(status="queued", limit=2)] == [asked[0], asked[2]]
            assert [s.id for s in await tx.submissions(status="done")] == [asked[1]]


async def test_a_full_page_is_filled_past_records_that_no_longer_fit() -> None:
    """Rule K45: a page shorter than asked for means the end of the scan, so it is never short before."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            ids = [new_task(tx).id for _ in range(1_500)]
        async with session.commit() as tx:
            for id in ids[:1_200]:
                tx.put_task(ended(await tx.task(id)))
            page = await tx.tasks(live=True, limit=1_000)
            assert [t.id for t in page] == ids[1_200:]
            assert len(await tx.tasks(limit=1_000)) == 1_000
            raise_nothing = await tx.tasks(live=True, limit=5)
            assert [t.id for t in raise_nothing] == ids[1_200:1_205]


@pytest.mark.parametrize("limit", [0, -1, 1_001])
async def test_a_bad_limit_is_refused_also_with_own_writes(limit: int) -> None:
    """Rules K131 and K139: an invalid read request fails the call, not the session."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            new_task(tx)
            tx.append(Note())
            tx.new_submission(type="write", status="done", digest="d")
            tx.create_conversation(owner=None)
            for scan in (tx.tasks, tx.submissions, tx.conversations, tx.entries):
                with pytest.raises(InvalidRead):
                    await scan(limit=limit)
        assert session.failed is None
        assert session.seq == 2


async def test_point_reads_of_what_is_not_there_raise() -> None:
    """Rule K45."""
    async with Session.open(HeldStorage()) as session, session.commit() as tx:
        for read in (tx.conversation, tx.entry, tx.submission, tx.task, tx.entries, tx.head):
            with pytest.raises(NotFound):
                await read(99)
        assert await tx.request(99, "r") is None


# --- ids -------------------------------------------------------------------------------------------------------


async def test_ids_increase_over_all_kinds_and_none_is_used_twice() -> None:
    """Rules K23, K27 and K48: those of a rolled-back transaction stay unused while the store is open."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        used = [await conversation(session)]
        rolled_back: list[int] = []
        with pytest.raises(LookupError):
            async with session.commit(conversation_id=used[0]) as tx:
                rolled_back += [tx.append(Note()).id, new_task(tx).id, tx.new_id()]
                (await tx.draft(Tally)).n = 1
                raise LookupError
        async with session.commit(conversation_id=used[0]) as tx:
            used += [tx.append(Note()).id, new_task(tx).id]
            used.append(tx.new_submission(type="write", status="done", digest="d").id)
            used.append(tx.create_conversation(owner=None).id)
            (await tx.draft(Tally)).n = 1
        used.append(storage.batches[-1].documents[0].record.id)
        assert used == sorted(set(used))
        assert min(used[1:]) > max(rolled_back) + 1, "the rolled-back draft had an id too"
    async with Session.open(storage) as session:
        assert await note(session, used[0]) > max(used)


async def test_the_first_id_is_the_roots() -> None:
    """Rule K24: reserved even if others are created first."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        other = await conversation(session)
        root = await conversation(session, root=True)
        assert (other, root) == (2, 1)
        assert [c.id for c in await session.conversations()] == [1, 2]
        assert await note(session, root) == 3


async def test_a_second_root_is_refused_before_it_is_staged() -> None:
    """Rules K24 and K63: in the same transaction, a later one, while the first is staged, and after reopening."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        with pytest.raises(InvalidTransition):
            async with session.commit() as tx:
                tx.create_conversation(owner=None, root=True)
                tx.create_conversation(owner=None, root=True)
        storage.hold()
        first = begin(conversation(session, root=True))
        await rest()
        second = begin(conversation(session, root=True))
        await rest()
        await storage.settle()
        await first
        with pytest.raises(InvalidTransition):
            await second
        assert session.failed is None
    async with Session.open(storage) as session:
        with pytest.raises(InvalidTransition):
            await conversation(session, root=True)
        assert session.failed is None


async def test_records_carry_the_commits_number_and_time() -> None:
    """Rules K13, K16 and K44: milliseconds from the session's clock, one time for the whole commit."""
    clock = HandClock()
    async with Session.open(HeldStorage(), clock=clock) as session:
        place = await conversation(session)
        clock.now += 1.5
        async with session.commit(conversation_id=place) as tx:
            entry = tx.append(Note())
            clock.now += 5
            task, later = new_task(tx), tx.append(Note())
            asked = tx.new_submission(type="write", status="done", digest="d")
        stored = there(await session.entry(entry.id))
        assert stored == entry
        assert (stored.seq, tx.seq) == (2, 2)
        assert {stored.created_at, later.created_at, task.created_at, asked.created_at} == {1_700_001_001_500}


async def test_the_owner_of_a_conversation_is_stated() -> None:
    """Rule K47."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            with pytest.raises(TypeError):
                tx.create_conversation()  # pyright: ignore[reportCallIssue]
            task = new_task(tx)
            child = tx.create_conversation(owner=task.id)
        stored = there(await session.conversation(child.id))
        assert stored.owner == task.id


async def test_a_place_is_named_or_the_transactions_own() -> None:
    """Rule K49."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit() as tx:
            for use in (lambda: tx.append(Note()), lambda: new_task(tx)):
                with pytest.raises(ValueError):
                    use()
            for wait in (tx.entries(), tx.head(), tx.draft(Job)):
                with pytest.raises(ValueError):
                    await wait
        async with session.commit(conversation_id=place) as tx:
            (await tx.draft(Job)).n = 1
            assert tx.append(Note()).conversation_id == place
            assert new_task(tx).conversation_id == place
            read = there(await tx.read(Job, conversation=place))
            assert read.n == 1


# --- what is refused before it is staged -----------------------------------------------------------------------


async def test_records_in_a_conversation_that_is_not_there_are_refused() -> None:
    """Rule K63."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        uses = [
            lambda tx: tx.append(Note(), conversation=99),
            lambda tx: new_task(tx, 99),
            lambda tx: tx.new_submission(type="write", status="done", digest="d", conversation=99),
        ]
        for use in uses:
            with pytest.raises(NotFound):
                async with session.commit() as tx:
                    use(tx)
        async with session.commit() as tx:
            with pytest.raises(NotFound):
                await tx.draft(Job, conversation=99)
        assert storage.batches == []
        assert session.failed is None


async def test_what_a_record_names_and_is_not_there_is_refused() -> None:
    """Rules K16 and K63: a head or an edit is of an earlier entry that its conversation shows, an owner is a task."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place, other = await conversation(session), await conversation(session)
        first, elsewhere = await note(session, place), await note(session, other)
        for id in (99, 2**70, elsewhere):
            for names in ({"head": id}, {"edits": [Edit(entry=id)]}):
                with pytest.raises(NotFound, match=f"entry {id}"):
                    async with session.commit(conversation_id=place) as tx:
                        tx.append(Note(), **names)  # pyright: ignore[reportArgumentType]
        with pytest.raises(NotFound, match="entry"):
            async with session.commit(conversation_id=place) as tx:
                later = tx.new_id() + 2
                tx.append(Note(), head=later)
                assert tx.append(Note()).id == later
        for owner in (99, 2**70):
            with pytest.raises(NotFound, match=f"task {owner}"):
                async with session.commit() as tx:
                    tx.create_conversation(owner=owner)
        assert len(storage.batches) == 4
        async with session.commit(conversation_id=place) as tx:
            second = tx.append(Note(), head=first)
            tx.append(Note(), head=second.id, edits=[Edit(entry=first), Edit(entry=second.id)])
            fork = await tx.fork(place, first)
            tx.append(Note(), conversation=fork.id, head=first)
            tx.create_conversation(owner=new_task(tx).id)
        assert session.failed is None


async def test_text_that_no_store_can_hold_is_refused() -> None:
    """Rules K35 and K63: in every text of a record, by the name of the record and not by the text."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
        fault = Terminal(Faulted(TaskError("app", "a file named \udcff")))
        uses = {
            "entry": lambda tx: tx.append_record("app.\ud800"),
            "task": lambda tx: tx.put_task(msgspec.structs.replace(task, state=fault)),
            "submission": lambda tx: tx.new_submission(
                type="write", status="done", digest="d", request_id="\ud800", conversation=place
            ),
        }
        for what, use in uses.items():
            with pytest.raises(NotJson, match=rf"{what} \d+.*lone surrogate"):
                async with session.commit(conversation_id=place) as tx:
                    use(tx)
        with pytest.raises(NotJson, match="lone surrogate"):
            async with session.commit() as tx:
                await tx.draft(Label, key="\ud800")
        with pytest.raises(NotJson, match="lone surrogate"):
            await session.snapshot(Label, key="\ud800")
        assert len(storage.batches) == 2
        assert session.failed is None


async def ask(session: Session, place: int, request_id: str, digest: str) -> SubmissionRecord:
    async with session.commit(conversation_id=place) as tx:
        return tx.new_submission(type="write", status="done", digest=digest, request_id=request_id)


async def test_a_request_id_is_used_once_in_a_conversation() -> None:
    """Rules K63 and K119: with other content it conflicts; conversations do not share request ids."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place, other = await conversation(session), await conversation(session)
        first = await ask(session, place, "r", "d")
        assert (await ask(session, other, "r", "e")).id != first.id
        with pytest.raises(RequestConflict) as conflict:
            await ask(session, place, "r", "e")
        assert (conflict.value.request_id, conflict.value.submission) == ("r", first.id)
        with pytest.raises(InvalidTransition):
            await ask(session, place, "r", "d")
        assert session.failed is None
        storage.hold()
        staged = begin(ask(session, place, "s", "d"))
        await rest()
        late = begin(ask(session, place, "s", "e"))
        await rest()
        await storage.settle()
        await staged
        with pytest.raises(RequestConflict):
            await late
        with pytest.raises(RequestConflict):
            async with session.commit(conversation_id=place) as tx:
                tx.new_submission(type="write", status="done", digest="d", request_id="t")
                tx.new_submission(type="write", status="done", digest="e", request_id="t")
        assert session.failed is None
    async with Session.open(storage) as session:
        with pytest.raises(RequestConflict):
            await ask(session, place, "r", "e")
        held = await session.request(place, "r")
        assert held == first


async def test_looking_a_request_id_up_first_costs_no_second_read() -> None:
    """Rule K63: the refusal is checked with what the transaction knows already."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            found = await tx.request(place, "r")
            assert found is None
            tx.new_submission(type="write", status="done", digest="d", request_id="r")
        assert storage.reads["request"] == 1


async def test_a_repeated_request_gives_back_what_is_there() -> None:
    """Rule K132: the check that a caller makes after looking it up."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        first = await ask(session, place, "r", "d")
        async with session.commit() as tx:
            found = there(await tx.request(place, "r"))
            assert found == first
            tx.check_request(found, "d")
            with pytest.raises(RequestConflict):
                tx.check_request(found, "e")


async def test_a_terminal_task_never_moves_again() -> None:
    """Rules K7 and K63: neither in the transaction that ended it, nor staged, nor after it left memory."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
        async with session.commit() as tx:
            tx.put_task(ended(task))
            with pytest.raises(InvalidTransition):
                tx.put_task(task)
        async with session.commit() as tx:
            with pytest.raises(InvalidTransition):
                tx.put_task(task)
            with pytest.raises(InvalidTransition):
                tx.put_task(msgspec.structs.replace(task, id=99, state=Pending(phase="start")))
        found = there(await session.task(task.id))
        assert found.status == "terminal"


async def test_submissions_move_only_as_their_life_allows() -> None:
    """Rules K20 to K22: every pair of states, at creation and after."""
    allowed = {
        ("input", None): {"placed", "queued"},
        ("write", None): {"done", "queued"},
        ("input", "queued"): {"placed", "unanswered"},
        ("write", "queued"): {"done", "unanswered"},
        ("input", "placed"): {"done", "unanswered"},
    }
    states = ["queued", "placed", "done", "unanswered"]
    reach = {
        ("input", "queued"): ["queued"],
        ("input", "placed"): ["placed"],
        ("input", "done"): ["placed", "done"],
        ("input", "unanswered"): ["queued", "unanswered"],
        ("write", "queued"): ["queued"],
        ("write", "done"): ["done"],
        ("write", "unanswered"): ["queued", "unanswered"],
    }
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)

        async def at(tx: Transaction, type: str, path: list[str]) -> SubmissionRecord:
            record = tx.new_submission(type=type, status=path[0], digest="d")  # pyright: ignore[reportArgumentType]
            for status in path[1:]:
                record = msgspec.structs.replace(record, status=status)
                await tx.put_submission(record)
            return record

        async with session.commit(conversation_id=place) as tx:
            for type in ("input", "write"):
                for status in states:
                    if status in allowed[type, None]:
                        await at(tx, type, [status])
                    else:
                        with pytest.raises(InvalidTransition):
                            await at(tx, type, [status])
            for (type, was), path in reach.items():
                for status in states:
                    record = await at(tx, type, path)
                    moved = msgspec.structs.replace(record, status=status)
                    if status in allowed.get((type, was), set()):
                        await tx.put_submission(moved)
                    else:
                        with pytest.raises(InvalidTransition):
                            await tx.put_submission(moved)


async def test_a_submission_never_changes_what_it_asked_for() -> None:
    """Rule K17; and one that is not there cannot be moved."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            record = tx.new_submission(type="input", status="queued", digest="d", request_id="r")
        for change in (
            {"digest": "e"},
            {"request_id": "s"},
            {"conversation_id": 9},
            {"type": "write"},
            {"created_at": 1},
        ):
            async with session.commit() as tx:
                with pytest.raises(InvalidTransition):
                    await tx.put_submission(msgspec.structs.replace(record, status="unanswered", **change))
        async with session.commit() as tx:
            with pytest.raises(NotFound):
                await tx.put_submission(msgspec.structs.replace(record, id=99, status="unanswered"))
        async with session.commit() as tx:
            await tx.put_submission(
                msgspec.structs.replace(record, status="unanswered", reason="aborted", detail="by hand")
            )
        stored = there(await session.submission(record.id))
        assert (stored.status, stored.reason, stored.detail) == ("unanswered", "aborted", "by hand")


async def test_mail_is_answered_once() -> None:
    """Rules K63 and K74: in one commit, in a later one, while the answer is staged, and only if it is there."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        one, two = storage.post("app.ask", {}, now=0), storage.post("app.ask", {}, now=0)
        async with session.commit() as tx:
            tx.reply(one, ok=True, result={"n": 1})
            with pytest.raises(InvalidTransition):
                tx.reply(one, ok=False)
        found = storage.reply(one)
        assert found is not None
        assert (found.ok, bytes(found.result)) == (True, b'{"n":1}')

        async def answer(mail: int) -> None:
            async with session.commit() as tx:
                tx.reply(mail, ok=False)

        for mail in (one, 99):
            with pytest.raises(NotFound):
                await answer(mail)
        storage.hold()
        first = begin(answer(two))
        await rest()
        second = begin(answer(two))
        await rest()
        await storage.settle()
        await first
        with pytest.raises(NotFound):
            await second
        assert session.failed is None
        assert session.staged.replies == set(), "what has settled is not kept"


async def test_values_that_are_not_json_are_refused_at_the_write() -> None:
    """Rules K35 to K38: with their path, and nothing of that write is staged."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            draft = await tx.draft(Tally)
            with pytest.raises(NotJson) as refused:
                draft.log = ["a", "\ud800"]
            assert refused.value.path == "app.tally.log[1]"
            with pytest.raises(NotJson):
                tx.reply(1, ok=True, result={"n": float("nan")})
            assert draft.log == []
        assert (await session.snapshot(Tally)) is not None


# --- the line --------------------------------------------------------------------------------------------------


async def test_transactions_are_staged_one_after_the_other_in_the_order_they_asked() -> None:
    """Rule K41."""
    async with Session.open(HeldStorage()) as session:
        order: list[str] = []

        async def write(n: int) -> None:
            async with session.commit() as tx:
                order.append(f"in {n}")
                await rest()
                (await tx.draft(Tally)).n = n
                order.append(f"out {n}")

        await asyncio.gather(*(write(n) for n in range(4)))
        assert order == [f"{what} {n}" for n in range(4) for what in ("in", "out")]


async def test_a_session_call_inside_ones_own_block_raises_at_once() -> None:
    """Rule K57: each of them, and the transaction goes on."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        await tally(session, 1)
        calls = [
            lambda: session.conversation(place),
            lambda: session.entry(1),
            lambda: session.submission(1),
            lambda: session.task(1),
            lambda: session.request(place, "r"),
            lambda: session.entries(place),
            lambda: session.head(place),
            lambda: session.conversations(),
            lambda: session.tasks(),
            lambda: session.submissions(),
            lambda: session.snapshot(Tally),
            lambda: session.close(),
            lambda: session.commit().__aenter__(),
            lambda: session.state(Tally).__aenter__(),
            lambda: session.watch(Tally).__aenter__(),
        ]
        async with asyncio.timeout(60), session.commit() as tx:
            for call in calls:
                with pytest.raises(InsideTransaction):
                    await call()
            (await tx.draft(Tally)).n = 2
        found = there(await session.snapshot(Tally))
        assert found.n == 2


async def test_another_task_may_read_while_a_block_is_open() -> None:
    """Rule K57 is about the task's own block only."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 1)
        async with session.commit() as tx:
            (await tx.draft(Tally)).n = 2
            found = there(await begin(session.snapshot(Tally)))
            assert found.n == 1


async def test_a_transaction_that_holds_the_line_too_long_is_reported() -> None:
    """Rule K58: once, with what it is about; it goes on. A quick one is not."""
    reports: list[Report] = []
    async with Session.open(HeldStorage(), line_bound_ms=0, on_report=reports.append) as session:
        place = await conversation(session)
        reports.clear()
        async with session.commit(conversation_id=place) as tx:
            await rest()
            tx.append(Note())
        assert [(r.type, r.conversation) for r in reports] == [("line_held", place)]
        assert tx.seq == 2
    reports.clear()
    async with Session.open(HeldStorage(), on_report=reports.append) as session:
        await conversation(session)
    assert reports == []


async def test_waiting_for_settlement_does_not_hold_the_line() -> None:
    """Rules K58 and K59."""
    reports: list[Report] = []
    storage = HeldStorage()
    async with Session.open(storage, line_bound_ms=0, on_report=reports.append) as session:
        storage.hold()
        place = begin(conversation(session))
        await rest()
        assert not place.done()
        await storage.settle()
        await place
    assert reports == []


# --- derivations -----------------------------------------------------------------------------------------------


async def test_a_derivation_sees_and_adds_to_every_transaction() -> None:
    """Rule K69: on the candidate records, in the same commit, also one that answers an awaitable."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)

        def mark(tx: Transaction) -> None:
            if tx.new_entries:
                tx.append(Note(n=-2), conversation=place)

        async def read(tx: Transaction) -> None:
            for entry in tx.new_entries:
                assert await tx.entry(entry.id) == entry
                tx.append(Note(n=-1), conversation=entry.conversation_id)
            (await tx.draft(Tally)).n += len(tx.new_entries)

        session.derive(mark)
        session.derive(lambda tx: read(tx) if tx.new_entries else None)
        await note(session, place, 1)
        assert there(await session.snapshot(Tally)).n == 4
        assert [entry.data for entry in await session.entries(place)] == [{"n": 1}, {"n": -2}, {"n": -1}, {"n": -1}]
        assert len(storage.batches) == 2


async def test_a_derivation_that_raises_refuses_the_transaction() -> None:
    """Rule K69: nothing of it is stored, and the line goes on."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)

        def refuse(tx: Transaction) -> None:
            if tx.new_entries:
                raise LookupError("no entries today")

        session.derive(refuse)
        with pytest.raises(LookupError):
            await note(session, place)
        await tally(session, 1)
        assert len(storage.batches) == 2


async def test_what_ends_while_a_derivation_reads_is_not_staged() -> None:
    """Rules K78 and K81: the session closes, or the context is cancelled, after the last line of the block."""
    for how in ("close", "context"):
        storage = HeldStorage()
        session = await Session.start(storage)
        context = Context()

        async def slow(tx: Transaction, session: Session = session, context: Context = context, how: str = how) -> None:
            if how == "close":
                await begin(session.close())
            else:
                context.cancel()

        session.derive(slow)
        with pytest.raises((SessionClosed, ContextCancelled)):
            async with session.commit(context=context) as tx:
                (await tx.draft(Tally)).n = 1
        assert storage.batches == []
        assert session.failed is None
        await session.close()


async def test_a_refused_transaction_still_waits_for_what_it_saw() -> None:
    """Rule K66: also when a derivation, the fork rule or a check refuses it."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        storage.hold()
        earlier = begin(tally(session, 1))
        await rest()

        async def refused() -> None:
            async with session.commit() as tx:
                await tx.read(Tally)
                tx.append(Note(), conversation=99)

        late = begin(refused())
        await rest()
        assert not late.done()
        await storage.settle()
        await earlier
        with pytest.raises(NotFound):
            await late
        assert await session.entries(place) == []


async def test_entries_keep_heads_edits_and_the_task_that_wrote_them() -> None:
    """Rule K16."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        first = await note(session, place)
        async with Transaction(session, conversation_id=place, by_task=77) as tx:
            edits = (Edit(entry=first), Edit(entry=first, replace=to_raw([{"text": "b"}])))
            entry = tx.append_record("app.raw", data=to_raw({"a": 1}), messages=to_raw(["m"]), head=first, edits=edits)
            own = tx.append_record("app.raw", head="self")
        stored = there(await session.entry(entry.id))
        assert stored == entry
        assert (stored.head, stored.edits, stored.by_task) == (first, edits, 77)
        assert (stored.data, stored.messages) == ({"a": 1}, ["m"])
        head = there(await session.head(place))
        assert (head.id, head.head) == (own.id, own.id)
        head = there(await session.head(place, last=entry.id))
        assert head.head == first
        assert (own.data, own.messages) == (None, [])


async def test_a_new_task_has_a_random_nonce_of_its_own() -> None:
    """Rule K30."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            one, two = new_task(tx), new_task(tx)
        assert one.nonce != two.nonce
        assert len(one.nonce) == 32
        assert one.raw_input == NULL


class Blob(Document, kind="app.blob", scope="session"):
    text: str = ""


async def test_what_is_too_large_is_refused_by_name_and_the_session_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule K189."""
    monkeypatch.setattr("perdure.kernel.transaction.MAX_RECORD_BYTES", 1_000)
    large = to_raw("x" * 1_000)
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        with pytest.raises(TooLarge, match=r"entry \d+ \(app.raw\) would take 1,0\d\d bytes"):
            async with session.commit(conversation_id=place) as tx:
                tx.append_record("app.raw", data=large)
        with pytest.raises(TooLarge, match=r"task \d+ \(app.work\)"):
            async with session.commit(conversation_id=place) as tx:
                tx.new_task(kind="app.work", version=1, phase="start", input=large)
        with pytest.raises(TooLarge, match=r"document app.blob would take"):
            async with session.commit() as tx:
                (await tx.draft(Blob)).text = "x" * 1_000
        assert await session.entries(place) == []
        await note(session, place)


WRONG: list[Callable[[Any], object]] = [
    lambda tx: tx.append_record(5),
    lambda tx: tx.append_record("app.raw", by_task="4"),
    lambda tx: tx.append_record("app.raw", data=msgspec.Raw(b"{no json")),
    lambda tx: tx.append_record("app.raw", data=msgspec.Raw(b'{"a": NaN}')),
    lambda tx: tx.new_task(kind="app.work", version="1", phase="start", input=NULL),
    lambda tx: tx.new_submission(type="write", status="done", digest=5),
    lambda tx: tx.new_submission(type="write", status="done", digest="d", request_id=5),
    lambda tx: tx.new_submission(type="write", status="done", digest="d", request_id=True),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
async def test_a_record_that_could_not_be_read_again_is_refused_k209(number: int) -> None:
    """Untyped callers give what they have; a store that took it could not be read any more."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        with pytest.raises((NotJson, TypeError)):
            async with session.commit(conversation_id=place) as tx:
                WRONG[number](tx)
        await note(session, place)
        assert len(await session.entries(place)) == 1


async def test_a_fork_at_what_is_no_id_is_refused_k209() -> None:
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        entry = await note(session, place)
        for wrong in (str(entry), float(entry)):
            with pytest.raises((NotJson, NotFound, TypeError)):
                async with session.commit() as tx:
                    untyped: Any = tx
                    await untyped.fork(place, wrong)
        assert [record.id for record in await session.conversations()] == [place]
