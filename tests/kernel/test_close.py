"""Closing (rules K80 to K87)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kernel.samples import Label, Note, Scratch, Tally, begin, conversation, new_task, tally, there
from kernel.stores import HeldStorage, rest
from perdure.kernel.context import Context
from perdure.kernel.errors import ContextCancelled, SessionClosed, SessionFailed, StorageBusy, StorageError
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Straggler
from perdure.kernel.transaction import Transaction


async def test_a_close_lets_admitted_commits_settle() -> None:
    """Rule K81: the store is closed after the last of them; its callers return as ever."""
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.hold()
    writers = [begin(tally(session, n)) for n in (1, 2)]
    await rest()
    closing = begin(session.close())
    await rest()
    assert (closing.done(), storage.closes) == (False, 0)
    await storage.settle(1)
    assert (closing.done(), storage.closes) == (False, 0)
    await storage.settle()
    report = await closing
    await asyncio.gather(*writers)
    assert (report.seq, report.stragglers, report.unreleased, storage.closes) == (2, (), (), 1)
    assert session.close_report is report


async def test_a_close_seals_admission() -> None:
    """Rule K81: what asks, what waits in the line and what is in its block is not admitted any more."""
    storage = HeldStorage()
    session = await Session.start(storage)
    place = await conversation(session)
    entered, leave = asyncio.Event(), asyncio.Event()
    ends: list[type[BaseException]] = []

    async def block(*, reads: bool) -> None:
        async with session.commit() as tx:
            (await tx.draft(Tally)).n = 7
            entered.set()
            await leave.wait()
            if reads:
                try:
                    await tx.entry(1)
                except SessionClosed as error:
                    ends.append(type(error))
                    raise

    inside = begin(block(reads=True))
    await entered.wait()
    waiting = begin(tally(session, 1))
    await rest()
    await session.close()
    leave.set()
    for task in (inside, waiting):
        with pytest.raises(SessionClosed):
            await task
    assert ends == [SessionClosed]
    assert len(storage.batches) == 1
    for call in (
        lambda: tally(session, 2),
        lambda: session.entry(1),
        lambda: session.entries(place),
        lambda: session.snapshot(Tally),
        lambda: session.state(Tally).__aenter__(),
    ):
        with pytest.raises(SessionClosed):
            await call()
    assert session.failed is None


async def test_a_turn_handed_over_as_the_session_closes_begins_no_block() -> None:
    """Rule K81: the next in line has its turn, and has not run yet."""
    session = await Session.start(HeldStorage())
    entered: list[int] = []

    async def write(n: int) -> None:
        async with session.commit() as tx:
            entered.append(n)
            (await tx.draft(Tally)).n = n

    async with session.commit():
        waiting = begin(write(1))
        await rest()
        closing = begin(session.close())
    await closing
    with pytest.raises(SessionClosed):
        await waiting
    assert entered == []


async def test_a_block_that_is_open_at_a_close_is_rolled_back_however_late_it_leaves() -> None:
    """Rule K81: also where it writes without reading any more."""
    storage = HeldStorage()
    session = await Session.start(storage)
    with pytest.raises(SessionClosed):
        async with session.commit() as tx:
            draft = await tx.draft(Tally)
            draft.n = 1
            await begin(session.close())
            draft.n = 2
    assert storage.batches == []
    assert session.failed is None
    async with Session.open(storage) as again:
        assert await again.snapshot(Tally) is None


async def test_a_read_under_way_at_a_close_does_not_fail_the_session() -> None:
    """Rules K81 and K128: a store that was closed under it is no fault of the store."""

    class Slow(HeldStorage):
        async def entry(self, id: int) -> None:
            while self.closes == 0:
                await asyncio.sleep(0)
            raise StorageError("not open")

    session = await Session.start(Slow())
    reading = begin(session.entry(1))
    await rest()
    await session.close()
    with pytest.raises(SessionClosed):
        await reading
    assert session.failed is None


async def test_closing_twice_gives_the_same_report() -> None:
    """Rule K85: at once or later; the store is closed once."""
    storage = HeldStorage()
    session = await Session.start(storage)
    one, two = await asyncio.gather(session.close(), session.close())
    assert one is two
    assert await session.close() is one
    assert storage.closes == 1


async def test_cancelling_the_wait_for_a_close_cancels_only_the_wait() -> None:
    """Rule K80: by asyncio and by a context."""
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.hold()
    writing = begin(tally(session, 1))
    await rest()
    closing = begin(session.close())
    await rest()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    context = Context()
    closing = begin(session.close(context=context))
    await rest()
    context.cancel()
    with pytest.raises(ContextCancelled):
        await closing
    assert storage.closes == 0
    await storage.settle()
    await writing
    assert (await session.close()).seq == 1
    assert storage.closes == 1


async def test_leaving_the_block_of_open_closes_however_it_is_left() -> None:
    """Rule K81."""
    storage = HeldStorage()
    with pytest.raises(LookupError):
        async with Session.open(storage) as session:
            await tally(session, 1)
            raise LookupError
    assert storage.closes == 1
    async with Session.open(storage) as again:
        assert there(await again.snapshot(Tally)).n == 1


async def test_running_code_is_stopped_with_the_drain_bound_and_may_write_its_state_back() -> None:
    """Rules K81, K82 and K84: ten seconds by default; only internal transactions are admitted meanwhile."""
    for given, expected in ((None, 10_000), (50, 50)):
        storage = HeldStorage()
        session = await (Session.start(storage) if given is None else Session.start(storage, drain_ms=given))
        asked: list[int] = []

        async def stop(drain_ms: int, session: Session = session, asked: list[int] = asked) -> Sequence[Straggler]:
            asked.append(drain_ms)
            async with Transaction(session, internal=True) as tx:
                (await tx.draft(Tally)).n = 5
            with pytest.raises(SessionClosed):
                await tally(session, 6)
            return ()

        session.on_stop(stop)
        report = await session.close()
        assert (asked, report.seq, storage.closes) == ([expected], 1, 1)
        async with Session.open(storage) as again:
            assert there(await again.snapshot(Tally)).n == 5


async def test_floors_are_stopped_from_the_top() -> None:
    """Rule K81: what was registered last rests on what was registered before it."""
    session = await Session.start(HeldStorage())
    order: list[str] = []

    async def lower(_: int) -> Sequence[Straggler]:
        order.append("lower")
        return ()

    async def upper(_: int) -> Sequence[Straggler]:
        order.append("upper")
        return ()

    session.on_stop(lower)
    session.on_stop(upper)
    await session.close()
    assert order == ["upper", "lower"]


async def test_code_that_does_not_stop_is_named_and_keeps_the_store_until_it_returns() -> None:
    """Rules K85 to K87: nobody can open the store beside it; its live tasks stay as they are in the store."""
    storage = HeldStorage()
    reports: list[Report] = []
    session = await Session.start(storage, on_report=reports.append)
    place = await conversation(session)
    async with session.commit(conversation_id=place) as tx:
        task = new_task(tx)
        (await tx.draft(Scratch, task=task.id)).n = 1
    ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def stop(_: int) -> Sequence[Straggler]:
        return [Straggler("app.stubborn 7", "the stack", ended)]

    session.on_stop(stop)
    report = await session.close()
    assert report.stragglers == ("app.stubborn 7",)
    assert [(r.type, "app.stubborn 7" in r.message, "the stack" in r.message) for r in reports] == [
        ("not_stopped", True, True)
    ]
    assert storage.closes == 0
    with pytest.raises(StorageBusy):
        await Session.start(storage)
    for use in (lambda: tally(session, 1), lambda: session.task(task.id)):
        with pytest.raises(SessionClosed):
            await use()
    ended.set_result(None)
    await rest()
    assert storage.closes == 1
    async with Session.open(storage) as again:
        assert (again.seq, again.live.settled) == (2, {task.id: task})


async def test_a_floor_that_cannot_stop_its_code_does_not_keep_the_store() -> None:
    """Rule K81: it is reported, the others are stopped, the store is closed."""
    storage = HeldStorage()
    reports: list[Report] = []
    session = await Session.start(storage, on_report=reports.append)
    stopped: list[bool] = []
    error = RuntimeError("a bug")

    async def good(_: int) -> Sequence[Straggler]:
        stopped.append(True)
        return ()

    async def bad(_: int) -> Sequence[Straggler]:
        raise error

    session.on_stop(good)
    session.on_stop(bad)
    await session.close()
    assert (stopped, storage.closes) == ([True], 1)
    assert [(r.type, r.error) for r in reports] == [("stop_failed", error)]


async def test_unfinished_work_is_kept_as_it_is() -> None:
    """Rule K83: a close writes no outcome and no commit of its own."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
            asked = tx.new_submission(type="input", status="queued", digest="d", request_id="r")
    assert len(storage.batches) == 2
    async with Session.open(storage) as again:
        assert again.live.settled == {task.id: task}
        assert await again.task(task.id) == task
        assert await again.submission(asked.id) == asked


async def test_a_commit_that_fails_during_a_close_is_told_and_the_store_is_closed() -> None:
    """Rules K81 and K129."""
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.hold()
    writers = [begin(tally(session, n)) for n in (1, 2)]
    await rest()
    closing = begin(session.close())
    await rest()
    error = await storage.refuse()
    with pytest.raises(StorageError):
        await writers[0]
    with pytest.raises(SessionFailed):
        await writers[1]
    report = await closing
    assert (report.seq, storage.closes, session.failed, report.failed) == (0, 1, error, error)


async def test_a_close_that_could_not_write_everything_says_so() -> None:
    """Rules K84 and K129: what a stopper commits is refused. Nobody awaits that commit but the close itself."""
    storage = HeldStorage()
    session = await Session.start(storage)
    place = await conversation(session)

    async def stop(_: int) -> Sequence[Straggler]:
        async with Transaction(session, internal=True) as tx:
            tx.append(Note(), conversation=place)
        return []

    session.on_stop(stop)
    storage.hold()
    closing = begin(session.close())
    await rest()
    error = await storage.refuse()
    report = await closing
    assert report.failed is error


async def test_a_block_that_stays_in_the_line_does_not_hold_up_a_close() -> None:
    """Rules K81 and K82: it can commit nothing any more, so what the close itself has to write goes past it."""
    storage = HeldStorage()
    session = await Session.start(storage)
    place = await conversation(session)
    leave = asyncio.Event()
    wrote: list[int] = []

    async def block() -> None:
        async with session.commit() as tx:
            tx.append(Note(n=1), conversation=place)
            await leave.wait()

    async def stop(_: int) -> Sequence[Straggler]:
        async with Transaction(session, internal=True) as tx:
            wrote.append(tx.append(Note(n=2), conversation=place).id)
            leave.set()
            with pytest.raises(SessionClosed):
                await inside
            await tx.conversation(place)
        return []

    session.on_stop(stop)
    inside = begin(block())
    await rest()
    async with asyncio.timeout(60):
        report = await session.close()
    assert (report.seq, report.failed, len(wrote)) == (2, None, 1)
    async with Session.open(storage) as again:
        assert [entry.id for entry in await again.entries(place)] == wrote


async def test_an_error_in_closing_the_store_reaches_whoever_closes() -> None:
    """Rule K147: every caller of close, and the host."""

    class Stubborn(HeldStorage):
        async def close(self) -> None:
            raise OSError("cannot close")

    reports: list[Report] = []
    session = await Session.start(Stubborn(), on_report=reports.append)
    for _ in range(2):
        with pytest.raises(OSError, match="cannot close"):
            await session.close()
    assert [r.type for r in reports] == ["close_failed"]


async def test_documents_that_are_being_loaded_at_a_close_harm_nothing() -> None:
    """Rule K81."""
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.read_gate = asyncio.Event()
    loading = begin(session.snapshot(Label, key="a"))
    await rest()
    await session.close()
    storage.read_gate.set()
    with pytest.raises(SessionClosed):
        await loading
    assert session.failed is None


async def test_a_handle_kept_from_a_closed_session_says_so() -> None:
    """Rule K93: a transaction object of before."""
    session = await Session.start(HeldStorage())
    place = await conversation(session)
    kept = session.commit(conversation_id=place)
    await session.close()
    with pytest.raises(SessionClosed):
        async with kept as tx:
            tx.append(Note())
