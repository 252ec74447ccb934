"""What fails a session, what does not, and what everybody is told (rules K128 to K133, K135, K136)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kernel.samples import Job, Label, Live, Note, Tally, begin, conversation, job, note, tally, there
from kernel.stores import HeldStorage, rest
from perdure.kernel.context import Context
from perdure.kernel.errors import (
    ContextCancelled,
    InvalidRead,
    NotFound,
    PerdureError,
    SessionFailed,
    StorageCorrupt,
    StorageError,
)
from perdure.kernel.observation import WatchEnded
from perdure.kernel.records import Address
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Settled
from perdure.kernel.storage import Batch

OUTSIDE: dict[str, Callable[[Session], Awaitable[object]]] = {
    "conversation": lambda s: s.conversation(99),
    "entry": lambda s: s.entry(99),
    "submission": lambda s: s.submission(99),
    "task": lambda s: s.task(99),
    "request": lambda s: s.request(2, "r"),
    "lineage": lambda s: s.entries(99),
    "entries": lambda s: s.entries(2),
    "head": lambda s: s.head(2),
    "conversations": lambda s: s.conversations(),
    "tasks": lambda s: s.tasks(),
    "submissions": lambda s: s.submissions(),
    "document": lambda s: s.snapshot(Label, key="new"),
    "at": lambda s: s.snapshot(Job, conversation=2, at=3),
    "state": lambda s: s.state(Label, key="new").__aenter__(),
    "watch": lambda s: s.watch(Label, key="new").__aenter__(),
}


async def sample(storage: HeldStorage) -> Session:
    session = await Session.start(storage)
    place = await conversation(session)
    assert (place, await note(session, place)) == (2, 3)
    assert await session.entries(place)
    return session


@pytest.mark.parametrize("read", sorted(OUTSIDE))
@pytest.mark.parametrize("error", [StorageError("unreadable"), OSError("gone")], ids=["storage", "os"])
async def test_an_error_of_storage_in_a_read_fails_the_session(read: str, error: Exception) -> None:
    """Rules K128 and K129: whatever its type; the call that met it raises it, later ones SessionFailed with it."""
    storage = HeldStorage()
    session = await sample(storage)
    storage.read_error = error
    with pytest.raises(type(error)) as met:
        await OUTSIDE[read](session)
    assert met.value is error
    assert session.failed is error
    storage.read_error = None
    with pytest.raises(SessionFailed) as later:
        await OUTSIDE[read](session)
    assert later.value.cause is error
    with pytest.raises(SessionFailed):
        await tally(session, 1)
    await session.close()


INSIDE = ["conversation", "entry", "submission", "task", "request", "entries", "head", "conversations", "tasks"]
INSIDE += ["submissions", "read", "draft", "retire", "fork"]


@pytest.mark.parametrize("read", INSIDE)
async def test_an_error_of_storage_in_a_transactions_read_fails_the_session(read: str) -> None:
    """Rules K128 and K129: also when the block catches it, nothing of it is committed."""
    storage = HeldStorage()
    session = await sample(storage)
    error = StorageError("unreadable")
    with pytest.raises(SessionFailed) as failed:
        async with session.commit(conversation_id=2) as tx:
            storage.read_error = error
            reads: dict[str, Callable[[], Awaitable[object]]] = {
                "conversation": lambda: tx.conversation(99),
                "entry": lambda: tx.entry(99),
                "submission": lambda: tx.submission(99),
                "task": lambda: tx.task(99),
                "request": lambda: tx.request(2, "r"),
                "entries": tx.entries,
                "head": tx.head,
                "conversations": tx.conversations,
                "tasks": tx.tasks,
                "submissions": tx.submissions,
                "read": lambda: tx.read(Tally),
                "draft": lambda: tx.draft(Tally),
                "retire": lambda: tx.retire(Tally),
                "fork": lambda: tx.fork(2, 3),
            }
            with pytest.raises(StorageError) as met:
                await reads[read]()
            assert met.value is error
            storage.read_error = None
            with pytest.raises(SessionFailed):
                tx.append(Note())
            with pytest.raises(SessionFailed):
                await tx.entry(3)
    assert failed.value.cause is error
    assert len(storage.batches) == 2
    await session.close()


async def test_an_error_of_storage_in_a_commits_own_checks_fails_the_session() -> None:
    """Rule K128: the block's caller gets it."""
    storage = HeldStorage()
    session = await sample(storage)
    error = StorageError("unreadable")
    with pytest.raises(StorageError) as met:
        async with session.commit(conversation_id=2) as tx:
            tx.new_submission(type="write", status="done", digest="d", request_id="r")
            storage.read_error = error
    assert met.value is error
    assert session.failed is error
    assert len(storage.batches) == 2
    await session.close()


async def test_a_commit_that_storage_does_not_take_fails_the_session() -> None:
    """Rule K128: an error raised instead of a future."""

    class Refusing(HeldStorage):
        def commit(self, batch: Batch) -> asyncio.Future[None]:
            raise OSError("no")

    storage = Refusing()
    session = await Session.start(storage)
    with pytest.raises(OSError, match="no"):
        await tally(session, 1)
    assert isinstance(session.failed, OSError)
    with pytest.raises(SessionFailed):
        await tally(session, 1)
    await session.close()


async def test_a_commit_whose_future_is_cancelled_fails_the_session() -> None:
    """Rule K128."""
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.hold()
    writing = begin(tally(session, 1))
    await rest()
    _, future = storage.held.popleft()
    future.cancel()
    with pytest.raises(StorageError):
        await writing
    await session.close()


async def test_commits_that_settle_out_of_order_fail_the_session() -> None:
    """Rule K64: the order is part of what a store promises."""
    storage = HeldStorage()
    session = await Session.start(storage)
    storage.hold()
    writers = [begin(tally(session, n)) for n in (1, 2)]
    await rest()
    storage.held[1][1].set_result(None)
    results = await asyncio.gather(*writers, return_exceptions=True)
    assert all(isinstance(result, SessionFailed) for result in results)
    assert session.seq == 0
    storage.held.clear()
    await session.close()


async def test_everything_pending_learns_the_cause() -> None:
    """Rule K129: commits staged, a block open, one that waits for the line, a read under way, watches, observers."""
    storage = HeldStorage()
    session = await sample(storage)
    await tally(session, 1)
    heard: list[BaseException] = []
    session.on_failure(heard.append)

    async def watch() -> None:
        async with session.watch(Tally) as frames:
            async for _ in frames:
                pass

    async def state() -> str | None:
        async with session.state(Tally) as state:
            while state.ended is None:
                await asyncio.sleep(0)
            return state.ended

    leave = asyncio.Event()

    async def block() -> None:
        async with session.commit() as tx:
            (await tx.draft(Label, key="b")).n = 1
            await leave.wait()

    async def empty_block() -> None:
        async with session.commit():
            await leave.wait()

    watching, stating = begin(watch()), begin(state())
    storage.hold()
    staged = begin(tally(session, 2))
    await rest()
    inside = begin(block())
    await rest()
    waiting = begin(tally(session, 3))
    await rest()
    storage.read_gate = asyncio.Event()
    reading = begin(session.entry(3))
    await rest()
    storage.read_gate.set()
    storage.read_gate = None
    gated = asyncio.Event()
    storage.read_gate = gated
    slow = begin(session.entries(2))
    await rest()
    assert await reading is not None

    error = StorageError("unreadable")
    session.fail(error)
    leave.set()
    gated.set()
    storage.held.clear()
    for task in (staged, inside, waiting, slow):
        with pytest.raises(SessionFailed) as failed:
            await task
        assert failed.value.cause is error
    with pytest.raises(WatchEnded) as ended:
        await watching
    assert (ended.value.reason, ended.value.cause) == ("session_failed", error)
    assert await stating == "session_failed"
    assert heard == [error]
    await session.close()


async def test_an_answer_that_comes_after_the_failure_is_not_given_out() -> None:
    """Rule K129: a pending read learns the cause, though storage read it in time."""
    storage = HeldStorage()
    session = await sample(storage)
    storage.late_gate = asyncio.Event()
    reading = begin(session.entry(3))
    await rest()
    error = StorageError("unreadable")
    session.fail(error)
    storage.late_gate.set()
    with pytest.raises(SessionFailed) as failed:
        await reading
    assert failed.value.cause is error
    await session.close()


async def test_a_block_without_writes_raises_in_a_failed_session_too() -> None:
    """Rule K129."""
    session = await sample(HeldStorage())
    error = StorageError("unreadable")
    with pytest.raises(SessionFailed):
        async with session.commit():
            session.fail(error)
    await session.close()


async def test_a_failed_session_closes_itself_and_the_store_can_be_reopened() -> None:
    """Rules K129 and K130: recovers from what was committed."""
    storage = HeldStorage()
    reports: list[Report] = []
    session = await Session.start(storage, on_report=reports.append)
    await tally(session, 1)
    storage.hold()
    lost = begin(tally(session, 2))
    await rest()
    error = await storage.refuse()
    assert storage.closes == 1
    with pytest.raises(StorageError):
        await lost
    assert [(r.type, r.error) for r in reports] == [("session_failed", error)]
    report = await session.close()
    assert (report.seq, storage.closes) == (1, 1)
    async with Session.open(storage.snapshot()) as again:
        found = there(await again.snapshot(Tally))
        assert found.n == 1
        await tally(again, 3)
        assert again.seq == 2


async def test_the_first_cause_stays_the_cause() -> None:
    """Rules K129 and K186: what fails later, closing included, does not hide it."""

    class Stubborn(HeldStorage):
        async def close(self) -> None:
            raise OSError("cannot close")

    reports: list[Report] = []
    session = await Session.start(Stubborn(), on_report=reports.append)
    first = StorageError("the disk is full")
    session.fail(first)
    session.fail(StorageError("another"))
    await session.close()
    with pytest.raises(SessionFailed) as failed:
        await tally(session, 1)
    assert failed.value.cause is first
    assert [r.type for r in reports] == ["session_failed", "close_failed"]


async def test_an_invalid_read_does_not_fail_the_session() -> None:
    """Rule K131: a bad limit, an entry or conversation that is not there, a past that was not kept, no number."""
    storage = HeldStorage()
    session = await sample(storage)
    untyped: Any = session
    for wrong in (untyped.entries(2, limit="5"), untyped.entries(2, first=[1]), untyped.tasks(limit=[])):
        with pytest.raises(InvalidRead):
            await wrong
    with pytest.raises(InvalidRead):
        await session.entries(2, limit=0)
    with pytest.raises(InvalidRead):
        await session.tasks(limit=1_001)
    with pytest.raises(NotFound):
        await session.entries(99)
    with pytest.raises(NotFound):
        await session.snapshot(Job, conversation=2, at=99)
    with pytest.raises(ValueError):
        await session.snapshot(Live, conversation=2, at=3)
    with pytest.raises(NotFound):
        async with session.state(Tally):
            pass
    async with session.commit() as tx:
        for wait in (tx.entries(2, limit=0), tx.tasks(limit=0)):
            with pytest.raises(InvalidRead):
                await wait
    assert session.failed is None
    await session.close()


async def test_a_read_whose_caller_was_cancelled_does_not_fail_the_session() -> None:
    """Rule K131: whatever the store makes of the interruption, by asyncio or by a context."""

    class Interrupted(HeldStorage):
        async def entry(self, id: int) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise StorageError("interrupted") from None

    session = await sample(Interrupted())
    reading = begin(session.entry(3))
    await rest()
    reading.cancel()
    with pytest.raises(StorageError):
        await reading
    assert session.failed is None

    context = Context()
    bounded = begin(session.entry(3, context=context))
    await rest()
    context.cancel()
    with pytest.raises((ContextCancelled, StorageError)):
        await bounded
    assert session.failed is None
    await session.close()


async def test_a_cancelled_reader_of_a_document_harms_no_other_reader() -> None:
    """Rule K131: a read that several share goes on for the others."""
    storage = HeldStorage()
    session = await sample(storage)
    storage.read_gate = asyncio.Event()
    one, two = begin(session.snapshot(Tally)), begin(session.snapshot(Tally))
    await rest()
    one.cancel()
    await rest()
    storage.read_gate.set()
    assert await two is None
    assert one.cancelled()
    assert storage.reads["document"] == 1
    await session.close()


async def test_a_document_that_cannot_be_put_together_is_corruption() -> None:
    """Rule K128: an operation that does not fit, bytes that are not JSON; the error names the document, not its
    contents."""
    for damage in ("delta", "base"):
        storage = HeldStorage()
        async with Session.open(storage) as session:
            async with session.commit() as tx:
                (await tx.draft(Tally)).text = "hunter2" * 20
            await tally(session, 1)
        document = next(iter(storage._contents.documents.values()))
        if damage == "delta":
            document.deltas[-1] = (document.deltas[-1][0], b'[["a",["nowhere"],"hunter2"]]')
        else:
            document.bases[-1] = (*document.bases[-1][:2], b'{"text": "hunter2')
        session = await Session.start(storage)
        with pytest.raises(StorageCorrupt, match=r"app\.tally") as corrupt:
            await session.snapshot(Tally)
        assert "hunter2" not in str(corrupt.value)
        assert session.failed is corrupt.value
        await session.close()


async def test_an_observer_that_raises_fails_the_session_and_nobody_hangs() -> None:
    """Rules K65 and K129: what did not hear of a commit must not go on; the commit itself has settled."""
    storage = HeldStorage()
    session = await Session.start(storage)
    error = RuntimeError("a bug")

    def broken(settled: Settled) -> None:
        if settled.seq == 2:
            raise error

    session.observe(broken)
    await tally(session, 1)
    async with asyncio.timeout(60):
        await tally(session, 2)
    assert session.failed is error
    with pytest.raises(SessionFailed):
        await tally(session, 3)
    await session.close()
    async with Session.open(storage) as again:
        assert again.seq == 2


async def test_an_observer_of_failures_that_raises_harms_no_other() -> None:
    """Rule K129."""
    reports: list[Report] = []
    session = await Session.start(HeldStorage(), on_report=reports.append)
    heard: list[BaseException] = []

    def broken(cause: BaseException) -> None:
        raise RuntimeError("a bug")

    session.on_failure(broken)
    session.on_failure(heard.append)
    error = StorageError("unreadable")
    session.fail(error)
    await session.close()
    assert heard == [error]
    assert [r.type for r in reports] == ["session_failed", "observer_failed"]


async def test_a_call_that_raised_may_have_committed_and_the_request_id_tells() -> None:
    """Rule K132: the store kept it, the caller was told of a failure, the repeated call gets the truth."""
    storage = HeldStorage()
    session = await sample(storage)
    storage.hold()

    async def ask(session: Session) -> int:
        async with session.commit(conversation_id=2) as tx:
            found = await tx.request(2, "r")
            if found is not None:
                tx.check_request(found, "d")
                return found.id
            return tx.new_submission(type="write", status="done", digest="d", request_id="r").id

    asking = begin(ask(session))
    await rest()
    session.fail(StorageError("the connection broke"))
    await storage.settle()
    with pytest.raises(SessionFailed):
        await asking
    await session.close()
    async with Session.open(storage) as again:
        first = await ask(again)
        assert await ask(again) == first
        assert again.seq == session.info.seq + 3


async def test_a_host_callback_that_raises_harms_nobody() -> None:
    """Rules K133 and K135."""

    def broken(report: Report) -> None:
        raise RuntimeError("the host's own")

    session = await Session.start(HeldStorage(), on_report=broken)
    session.report(Report(type="app.test", message="something"))
    await tally(session, 1)
    await session.close()


async def test_reports_and_logs_say_what_they_are_about_and_no_contents(caplog: pytest.LogCaptureFixture) -> None:
    """Rules K135 and K136: ids, kinds, the type of an error; not its text, not what documents hold."""
    storage = HeldStorage()
    reports: list[Report] = []
    session = await Session.start(storage, on_report=reports.append)
    with caplog.at_level(logging.DEBUG):
        session.report(
            Report(
                type="app.test",
                message="something",
                task=7,
                kind="app.task",
                conversation=3,
                extension="app.ext",
                error=PerdureError("hunter2"),
            )
        )
        async with session.commit() as tx:
            (await tx.draft(Tally)).text = "hunter2"
        await job(session, await conversation(session), 1)
        storage.hold()
        lost = begin(tally(session, 2))
        await rest()
        await storage.refuse()
        await asyncio.wait([lost])
        assert lost.exception() is not None
        await session.close()
    assert "app.test: something task=7 kind=app.task conversation=3 extension=app.ext error=PerdureError" in caplog.text
    assert "hunter2" not in caplog.text
    assert [r.type for r in reports] == ["app.test", "session_failed"]
    assert str(reports[0]) in caplog.text  # what on_report=print prints


async def test_opening_that_cannot_read_what_is_live_lets_go_of_the_store() -> None:
    """Rule K128: the next opener does not find it taken."""
    storage = HeldStorage()
    storage.read_error = StorageError("unreadable")
    with pytest.raises(StorageError):
        await Session.start(storage)
    assert storage.closes == 1
    storage.read_error = None
    async with Session.open(storage) as session:
        assert session.seq == 0


def test_the_addresses_in_errors_name_kind_scope_and_key() -> None:
    """Rule K136: enough to find the document, nothing of its contents."""
    assert str(Address("app.a", "session")) == "app.a"
    assert str(Address("app.a", "task", 7, "k")) == "app.a[k] of task 7"
