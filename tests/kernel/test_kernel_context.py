"""Contexts: deadlines, cancellation, values; and what of a wait they end (rules K80, K88 to K91)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kernel.samples import Label, Note, Tally, begin, conversation, note, tally, there
from kernel.stores import HeldStorage, rest
from perdure.kernel.context import BACKGROUND, Context, bounded
from perdure.kernel.errors import ContextCancelled, ContextDeadline
from perdure.kernel.session import Session


def soon() -> float:
    return asyncio.get_running_loop().time() + 0.001


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_wait_ends_with_its_context() -> None:
    """Rule K88: by cancellation of it or of one above it, with the reason; by its deadline."""
    for cancelled in ("self", "parent", "grandparent"):
        grandparent = Context()
        parent = grandparent.child()
        context = parent.child()
        waiting = begin(bounded(for_ever(), context))
        await rest()
        assert not waiting.done()
        {"self": context, "parent": parent, "grandparent": grandparent}[cancelled].cancel("enough")
        with pytest.raises(ContextCancelled, match="enough"):
            await waiting
        assert (context.cancelled, context.ended) == ("enough", True)
        assert (grandparent.cancelled is None) == (cancelled != "grandparent")
    with pytest.raises(ContextDeadline):
        await bounded(for_ever(), Context(deadline=soon()))
    with pytest.raises(TimeoutError):
        await bounded(for_ever(), Context().child(timeout=0.001))


async def test_a_context_that_has_ended_begins_no_wait() -> None:
    """Rule K88: nothing of the call is run, and nothing is left behind that was never awaited."""
    ran: list[bool] = []

    async def call() -> None:
        ran.append(True)

    context = Context()
    context.cancel()
    with pytest.raises(ContextCancelled):
        await bounded(call(), context)
    with pytest.raises(ContextDeadline):
        await bounded(call(), Context(deadline=asyncio.get_running_loop().time() - 1))
    assert ran == []


async def test_what_comes_in_time_comes_through() -> None:
    """Rule K88: results and errors, and the context goes on."""

    async def give() -> int:
        await asyncio.sleep(0)
        return 7

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError

    context = Context(deadline=asyncio.get_running_loop().time() + 3600)
    assert await bounded(give(), context) == 7
    with pytest.raises(LookupError):
        await bounded(fail(), context)
    assert await bounded(give(), None) == await bounded(give(), BACKGROUND) == 7
    assert (context.cancelled, context.ended) == (None, False)
    context.check()
    assert context._callbacks == {}


async def test_a_child_has_the_tighter_deadline_and_the_parents_values() -> None:
    """Rule K89."""
    now = asyncio.get_running_loop().time()
    parent = Context(deadline=now + 10, values={"a": 1, "b": 1})
    assert parent.child(timeout=3600).deadline == now + 10
    near = parent.child(timeout=1, values={"b": 2}).deadline
    assert near is not None
    assert near < now + 10
    child = parent.child(values={"b": 2})
    assert (dict(parent.values), dict(child.values)) == ({"a": 1, "b": 1}, {"a": 1, "b": 2})
    with pytest.raises(TypeError):
        child.values["c"] = 3  # pyright: ignore[reportIndexIssue]
    child.cancel()
    assert parent.cancelled is None


async def test_background_never_ends() -> None:
    """Rule K90: but a child of it may."""
    with pytest.raises(RuntimeError):
        BACKGROUND.cancel()
    BACKGROUND.check()
    assert (BACKGROUND.deadline, BACKGROUND.cancelled, dict(BACKGROUND.values)) == (None, None, {})
    child = BACKGROUND.child()
    child.cancel("enough")
    with pytest.raises(ContextCancelled):
        child.check()
    assert BACKGROUND.cancelled is None


async def test_the_first_reason_stays() -> None:
    """Rule K88."""
    context = Context()
    context.cancel("first")
    context.cancel("second")
    assert context.cancelled == "first"


async def test_cancelling_the_callers_task_is_delivered_as_that() -> None:
    """Rule K88: also when the context ends in the same moment, so that asyncio's own time-outs work."""
    for at_once in (False, True):
        context = Context()
        waiting = begin(bounded(for_ever(), context))
        await rest()
        if at_once:
            context.cancel()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()

    async def timed() -> None:
        async with asyncio.timeout(0.001):
            await bounded(for_ever(), Context(deadline=asyncio.get_running_loop().time() + 3600))

    with pytest.raises(TimeoutError) as timeout:
        await timed()
    assert not isinstance(timeout.value, ContextDeadline)


async def test_a_timer_that_comes_early_is_still_the_deadline() -> None:
    """Rule K88: event loops run timers within their clock's resolution, a little before the time."""
    loop = asyncio.get_running_loop()
    context = Context(deadline=loop.time() + 3600)
    waiting = begin(bounded(for_ever(), context))
    await rest()
    (end,) = context._callbacks.values()
    end()  # what the timer calls
    with pytest.raises(ContextDeadline):
        await waiting


CALLS: dict[str, Callable[[Session, Context], Awaitable[object]]] = {
    "conversation": lambda s, c: s.conversation(99, context=c),
    "entry": lambda s, c: s.entry(99, context=c),
    "submission": lambda s, c: s.submission(99, context=c),
    "task": lambda s, c: s.task(99, context=c),
    "request": lambda s, c: s.request(2, "r", context=c),
    "entries": lambda s, c: s.entries(2, context=c),
    "head": lambda s, c: s.head(2, context=c),
    "lineage": lambda s, c: s.entries(99, context=c),
    "conversations": lambda s, c: s.conversations(context=c),
    "tasks": lambda s, c: s.tasks(context=c),
    "submissions": lambda s, c: s.submissions(context=c),
    "snapshot": lambda s, c: s.snapshot(Tally, context=c),
    "state": lambda s, c: s.state(Tally, context=c).__aenter__(),
    "watch": lambda s, c: s.watch(Tally, context=c).__aenter__(),
}


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize("how", ["cancelled", "deadline", "before"])
async def test_every_call_of_a_session_takes_a_context(call: str, how: str) -> None:
    """Rules K80, K89 and K131: it ends that wait alone, and the session is none the worse."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        await note(session, place)
        storage.read_gate = asyncio.Event()
        context = Context(deadline=soon()) if how == "deadline" else Context()
        if how == "before":
            context.cancel()
        calling = begin(CALLS[call](session, context))  # pyright: ignore[reportArgumentType]
        await rest()
        if how == "cancelled":
            assert not calling.done()
            context.cancel()
        with pytest.raises(ContextDeadline if how == "deadline" else ContextCancelled):
            await calling
        storage.read_gate.set()
        assert session.failed is None
        assert len(await session.entries(place)) == 1


async def test_a_context_bounds_the_wait_for_the_line() -> None:
    """Rule K78: the transaction that gave up leaves its place to the next."""
    async with Session.open(HeldStorage()) as session:
        context = Context()
        async with session.commit() as tx:

            async def write(context: Context | None, n: int) -> None:
                async with session.commit(context=context) as tx:
                    (await tx.draft(Label, key=str(n))).n = n

            waiting = [begin(write(context, 1)), begin(write(None, 2)), begin(write(Context(deadline=soon()), 3))]
            await rest()
            context.cancel()
            with pytest.raises(ContextCancelled):
                await waiting[0]
            with pytest.raises(ContextDeadline):
                await waiting[2]
            (await tx.draft(Tally)).n = 1
        await waiting[1]
        assert session.seq == 2
        assert await session.snapshot(Label, key="1") is None


async def test_a_transaction_whose_context_ends_before_admission_rolls_back() -> None:
    """Rule K78."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        context = Context()
        with pytest.raises(ContextCancelled):
            async with session.commit(context=context) as tx:
                (await tx.draft(Tally)).n = 1
                context.cancel()
        assert storage.batches == []
        assert await session.snapshot(Tally) is None


async def test_a_context_that_ends_after_admission_changes_nothing() -> None:
    """Rules K79 and K91: the commit settles, and its caller is told so."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        context = Context()
        storage.hold()

        async def write() -> int:
            async with session.commit(context=context) as tx:
                (await tx.draft(Tally)).n = 1
            return tx.seq

        writing = begin(write())
        await rest()
        context.cancel()
        await rest()
        assert not writing.done()
        await storage.settle()
        assert await writing == 1
        assert there(await session.snapshot(Tally)).n == 1


async def test_pythons_own_timeouts_work_in_every_call() -> None:
    """Rule K88: asyncio.timeout around a call and around a block; the line and the session go on."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        place = await conversation(session)
        storage.read_gate = gate = asyncio.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await session.entries(place)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001), session.commit(conversation_id=place) as tx:
                tx.append(Note())
                await tx.entries()
        gate.set()
        await tally(session, 1)
        assert session.seq == 2
        assert await session.entries(place) == []


async def test_a_commit_without_a_context_carries_no_values() -> None:
    """Rule K91."""
    async with Session.open(HeldStorage()) as session:
        heard: list[dict[str, object]] = []
        session.observe(lambda settled: heard.append(dict(settled.values)))
        await tally(session, 1)
        async with session.commit(context=Context(values={"user": "ada"}).child(values={"n": 1})) as tx:
            (await tx.draft(Tally)).n = 2
        assert heard == [{}, {"user": "ada", "n": 1}]
