"""States and watches of documents (rules K112, K114, K121 to K127, K32)."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakSet

import pytest

from kernel.samples import Job, Label, Scratch, Tally, begin, conversation, ended, job, new_task, tally, there
from kernel.stores import HeldStorage, rest
from perdure.kernel.context import BACKGROUND, Context
from perdure.kernel.errors import ContextCancelled, ContextDeadline, NotFound
from perdure.kernel.json import same_json
from perdure.kernel.observation import MAX_PENDING, Frame, Source, WatchEnded
from perdure.kernel.ops import Append, Set, Splice, apply
from perdure.kernel.reports import Report
from perdure.kernel.session import Session


async def test_a_state_is_live_and_read_only() -> None:
    """Rule K121: the newest settled value and its commit; a rolled-back one is never seen."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 1)
        async with session.state(Tally) as state:
            assert (state.value.n, state.seq) == (1, 1)
            with pytest.raises(AttributeError):
                state.value.n = 7
            with pytest.raises(LookupError):
                async with session.commit() as tx:
                    (await tx.draft(Tally)).n = 9
                    assert state.value.n == 1
                    raise LookupError
            assert state.value.n == 1
            storage.hold()
            writing = begin(tally(session, 2))
            await rest()
            assert state.value.n == 1
            await storage.settle()
            assert (state.value.n, state.seq) == (2, 2)
            await writing
        assert state.ended == "stopped"
        await tally(session, 3)
        assert state.value.n == 2, "after its end it keeps the last value"


async def test_a_commit_that_leaves_the_document_alone_makes_no_frame() -> None:
    """Rule K122."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 1)
        async with session.watch(Tally) as watch, session.state(Tally) as state:
            await anext(watch)
            async with session.commit() as tx:
                (await tx.draft(Label, key="a")).n = 1
                (await tx.draft(Tally)).n = 1
            await tally(session, 2)
            frame = await anext(watch)
            assert (frame.seq, frame.value.n) == (3, 2)
            assert state.seq == 3


async def test_frames_are_exact_and_in_commit_order() -> None:
    """Rule K122: each one's operations lead from the frame before to it; with the context's values."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        async with session.watch(Tally) as watch:
            changes: list[Any] = [
                lambda draft: setattr(draft, "text", "ab"),
                lambda draft: setattr(draft, "text", draft.text + "c𝄞"),
                lambda draft: draft.log.extend(["x", "y", "z"]),
                lambda draft: draft.log.pop(1),
                lambda draft: (setattr(draft, "n", 5), draft.log.reverse()),
                lambda draft: setattr(draft, "log", []),
            ]
            for n, change in enumerate(changes):
                async with session.commit(context=Context(values={"n": n})) as tx:
                    change(await tx.draft(Tally))
            first = await anext(watch)
            assert (first.seq, first.ops, first.value) == (1, None, Tally())
            frame, value = first, first.value.to_json()
            for n in range(len(changes)):
                frame = await anext(watch)
                assert frame.seq == n + 2
                assert frame.values == {"n": n}
                assert frame.ops is not None
                value = apply(value, frame.ops)
                assert same_json(value, frame.value.to_json())
            assert frame.value == Tally(n=5, text="abc𝄞")


async def test_a_frame_costs_what_changed() -> None:
    """Rules K106 and K122: a token appended is a token in the frame."""
    async with Session.open(HeldStorage()) as session:
        async with session.commit() as tx:
            (await tx.draft(Tally)).text = "x" * 10_000
        async with session.watch(Tally) as watch:
            await anext(watch)
            async with session.commit() as tx:
                (await tx.draft(Tally)).text += "token"
            assert (await anext(watch)).ops == (Append(("text",), "token"),)


async def test_a_late_watch_begins_with_the_current_value() -> None:
    """Rule K123: no older frame is replayed."""
    async with Session.open(HeldStorage()) as session:
        for n in (1, 2, 3):
            await tally(session, n)
        async with session.watch(Tally) as watch:
            frame = await anext(watch)
            assert (frame.seq, frame.value.n, frame.ops) == (3, 3, None)
            waiting = begin(anext(watch))
            await rest()
            assert not waiting.done()
            await tally(session, 4)
            assert (await waiting).value.n == 4


async def test_attaching_while_commits_are_in_flight_misses_nothing_and_repeats_nothing() -> None:
    """Rule K124: at every moment between staging and settling, with the document in memory or not."""
    for retention in (0, 600_000):
        storage = HeldStorage()
        async with Session.open(storage, document_retention_ms=retention) as session:
            await tally(session, 0)
            storage.hold()
            writers = [begin(tally(session, n)) for n in range(1, 7)]
            await rest()
            assert len(storage.held) == 6
            watchers: list[asyncio.Task[list[tuple[int, int]]]] = []

            async def collect() -> list[tuple[int, int]]:
                seen: list[tuple[int, int]] = []
                async with session.watch(Tally) as watch:
                    async for frame in watch:
                        seen.append((frame.seq, frame.value.n))
                        if frame.value.n == 6:
                            return seen
                raise AssertionError

            for _ in range(6):
                watchers.append(begin(collect()))
                await asyncio.sleep(0)
                watchers.append(begin(collect()))
                await storage.settle(1)
                watchers.append(begin(collect()))
            await asyncio.gather(*writers)
            for watcher in watchers:
                if not watcher.done():
                    await asyncio.wait([watcher], timeout=60)
                seen = await watcher
                assert seen == [(n + 1, n) for n in range(seen[0][1], 7)]


async def test_attaching_during_a_slow_read_takes_what_settled_meanwhile() -> None:
    """Rule K124: the first frame is the value at attachment, not at the beginning of the call."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 1)
    async with Session.open(storage) as session:
        storage.read_gate = gate = asyncio.Event()

        async def first() -> tuple[int, int]:
            async with session.watch(Tally) as watch:
                frame = await anext(watch)
                return frame.seq, frame.value.n

        attaching = begin(first())
        writing = begin(tally(session, 2))
        await rest()
        gate.set()
        assert await attaching in ((1, 1), (2, 2))
        await writing
        assert await first() == (2, 2)


async def test_a_watch_at_retention_zero_is_not_left_behind() -> None:
    """Rules K114 and K124: a commit that settles between the read and the attachment does not part the watch from the
    document."""
    storage = HeldStorage()
    async with Session.open(storage, document_retention_ms=0) as session:
        await tally(session, 1)
        for n in range(2, 30):
            attaching = session.watch(Tally)
            watching = begin(attaching.__aenter__())
            others = [begin(label(session, str(k + 1))) for k in range(n % 5)]
            for _ in range(n % 7):
                await asyncio.sleep(0)
            watch = await watching
            await asyncio.gather(*others)
            await tally(session, n)
            async with asyncio.timeout(60):
                frames = [await anext(watch)]
                while frames[-1].value.n != n:
                    frames.append(await anext(watch))
            assert [frame.value.n for frame in frames] in ([n - 1, n], [n])
            await attaching.__aexit__(None, None, None)


async def test_a_document_let_go_of_between_its_reading_and_its_use_is_read_again() -> None:
    """Rules K114 and K124: in whatever moment of an attachment, or of a draft, that happens."""
    for turns in range(12):
        for drafting in (False, True):
            storage = HeldStorage()
            async with Session.open(storage, document_retention_ms=0) as session:
                await tally(session, 1)
                storage.read_gate = asyncio.Event()
                attaching = session.watch(Tally, context=Context())
                work = begin(attaching.__aenter__()) if not drafting else begin(tally(session, 2))
                await rest()
                storage.read_gate.set()
                for _ in range(turns):
                    await asyncio.sleep(0)
                session.documents.sweep()
                watch = await work
                await tally(session, 3)
                if watch is not None:
                    async with asyncio.timeout(60):
                        assert [(await anext(watch)).value.n for _ in range(2)] == [1, 3]
                    await attaching.__aexit__(None, None, None)
                assert there(await session.snapshot(Tally)).n == 3


async def label(session: Session, key: str) -> None:
    async with session.commit() as tx:
        (await tx.draft(Label, key=key)).n += 1


async def test_a_slow_consumer_gets_one_frame_in_place_of_too_many() -> None:
    """Rule K125: 100 wait; the next one replaces them by the newest whole value, and then it goes on exactly."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        async with session.watch(Tally) as slow, session.watch(Tally) as quick:
            for n in range(1, 100):
                await tally(session, n)
                assert (await anext(quick)).value.n == n - 1
            assert (await anext(quick)).value.n == 99
            first = await anext(slow)
            assert (first.value.n, first.ops) == (0, None)
            await tally(session, 100)
            assert [(await anext(slow)).value.n for _ in range(100)] == list(range(1, 101)), "100 are kept"

            for n in range(101, 202):
                await tally(session, n)
            frame = await anext(slow)
            assert (frame.value.n, frame.ops, frame.seq) == (201, None, session.seq)
            await tally(session, 202)
            frame = await anext(slow)
            assert (frame.value.n, frame.ops) == (202, (Set(("n",), 202),))


async def test_a_quick_consumer_gets_every_frame_of_a_burst() -> None:
    """Rules K122 and K125: that it is woken together with others, after a pause, makes no slow one of it."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        async with session.watch(Tally) as watch:
            seen: list[Frame[Tally]] = []

            async def consume() -> None:
                async for frame in watch:
                    seen.append(frame)
                    if frame.value.n == 400:
                        return

            consumer = begin(consume())
            for n in range(1, 401):
                await tally(session, n)
            await consumer
            assert [frame.value.n for frame in seen] == list(range(401))
            assert all(frame.ops for frame in seen[1:])


class Value:
    """One whose end can be seen."""


async def test_what_every_watch_has_taken_is_let_go() -> None:
    """Rule K125: memory holds what waits: twice as much at most for a watch that takes nothing."""
    source: Source[Value] = Source("values", seq=0, value=Value())
    values: WeakSet[Value] = WeakSet()

    def publish(first: int, last: int) -> None:
        for seq in range(first, last):
            value = Value()
            values.add(value)
            source.publish(Frame(seq, value, ()))

    state, watch = source.state(), source.watch()
    await anext(watch)
    for seq in range(1, 50):
        publish(seq, seq + 1)
        await anext(watch)
        assert len(values) == 1
    assert state.value in values
    publish(50, 1000)
    assert len(values) <= 200
    taken = [await anext(watch)]
    assert taken[0].ops is None
    while taken[-1].value is not source.value:
        taken.append(await anext(watch))
    assert len(taken) <= 100
    del taken
    assert len(values) == 1
    publish(1000, 1010)
    watch.finish("listener_error", None)
    publish(1010, 2000)
    frames = [await anext(watch) for _ in range(10)]
    assert [frame.seq for frame in frames] == list(range(1000, 1010))
    with pytest.raises(WatchEnded):
        await anext(watch)
    del frames
    assert len(values) <= 2, "the newest, and where the watch ended"


async def test_a_slow_consumer_holds_up_nobody() -> None:
    """Rule K125: what waits for it is bounded however much is committed."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        async with session.watch(Tally) as watch:
            for n in range(1, 350):
                await tally(session, n)
            seen = [await anext(watch)]
            while seen[-1].value.n < 349:
                seen.append(await anext(watch))
            assert len(seen) <= 100
            assert seen[0].ops is None
            value = seen[0].value.to_json()
            for frame in seen[1:]:
                assert frame.ops is not None
                value = apply(value, frame.ops)
                assert same_json(value, frame.value.to_json())


async def test_a_consumer_that_raises_ends_its_own_watch_alone() -> None:
    """Rules K126 and K127: listener_error, with the error; synchronous or not. Others get every frame."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        async with session.watch(Tally) as bad, session.watch(Tally) as worse, session.watch(Tally) as good:

            def raises(frame: Frame[Tally]) -> None:
                if frame.value.n == 1:
                    raise LookupError("the listener's own")

            async def raises_later(frame: Frame[Tally]) -> None:
                await asyncio.sleep(0)
                raises(frame)

            listening = [begin(bad.each(raises)), begin(worse.each(raises_later))]
            for n in (1, 2):
                await tally(session, n)
            await rest()
            for task, watch in zip(listening, (bad, worse), strict=True):
                with pytest.raises(LookupError):
                    await task
                assert watch.ended == "listener_error"
                assert isinstance(watch.cause, LookupError)
                with pytest.raises(WatchEnded):
                    while True:
                        await anext(watch)
            assert [(await anext(good)).value.n for _ in range(3)] == [0, 1, 2]
        assert session.failed is None


async def test_a_released_watch_stops_quietly() -> None:
    """Rule K127: stopped; a consumer that waits comes to its end, and frames that wait are let go of."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        async with session.watch(Tally) as watch:
            seen: list[int] = []

            async def consume() -> None:
                async for frame in watch:
                    seen.append(frame.value.n)

            consuming = begin(consume())
            await rest()
        await consuming
        assert seen == [0]
        assert (watch.ended, watch.cause) == ("stopped", None)
        watch.release()
        await tally(session, 1)
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
        assert there(session.documents.peek(session.documents.loaded()[0].address)).sources == {}


async def test_a_retired_document_ends_its_observers_and_they_never_switch() -> None:
    """Rules K112 and K127: after the frames that came before; also when it is made again in the same commit."""
    async with Session.open(HeldStorage()) as session:
        for at_once in (False, True):
            await tally(session, 1)
            async with session.watch(Tally) as watch, session.state(Tally) as state:
                await tally(session, 2)
                async with session.commit() as tx:
                    await tx.retire(Tally)
                    if at_once:
                        (await tx.draft(Tally)).n = 10
                if not at_once:
                    with pytest.raises(NotFound):
                        async with session.watch(Tally):
                            pass
                await tally(session, 11)
                assert [(await anext(watch)).value.n for _ in range(2)] == [1, 2]
                with pytest.raises(WatchEnded) as ended:
                    await anext(watch)
                assert ended.value.reason == "retired"
                assert (state.value.n, state.ended) == (2, "retired")
                async with session.watch(Tally) as anew:
                    assert (await anext(anew)).value.n == 11
            async with session.commit() as tx:
                await tx.retire(Tally)


async def test_the_document_of_an_ended_task_ends_its_observers() -> None:
    """Rules K113 and K127."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            task = new_task(tx)
            (await tx.draft(Scratch, task=task.id)).n = 1
        async with session.watch(Scratch, task=task.id) as watch:
            await anext(watch)
            async with session.commit() as tx:
                (await tx.draft(Scratch, task=task.id)).n = 2
                tx.put_task(ended(task))
            with pytest.raises(WatchEnded) as reason:
                await anext(watch)
            assert reason.value.reason == "retired"


async def test_a_context_ends_its_own_watch() -> None:
    """Rules K88 and K127: cancelled, while it waits or while frames wait for it; others go on."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        context = Context()
        async with session.watch(Tally, context=context.child()) as watch, session.watch(Tally) as other:
            await anext(watch)
            waiting = begin(anext(watch))
            await rest()
            context.cancel("enough")
            with pytest.raises(ContextCancelled, match="enough"):
                await waiting
            assert watch.ended == "cancelled"
            with pytest.raises(WatchEnded):
                await anext(watch)
            await tally(session, 1)
            assert [(await anext(other)).value.n for _ in range(2)] == [0, 1]
        context = Context()
        async with session.watch(Tally, context=context) as watch:
            await tally(session, 2)
            context.cancel()
            with pytest.raises(ContextCancelled):
                await anext(watch)
            assert watch.ended == "cancelled"
        late = Context(deadline=asyncio.get_running_loop().time() + 0.001)
        async with session.watch(Tally, context=late) as watch:
            await anext(watch)
            with pytest.raises(ContextDeadline):
                await anext(watch)


async def test_cancelling_a_wait_for_a_frame_cancels_that_wait_only() -> None:
    """Rule K80: the watch goes on where it was."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 0)
        async with session.watch(Tally) as watch:
            await anext(watch)
            waiting = begin(anext(watch))
            await rest()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await tally(session, 1)
            assert (await anext(watch)).value.n == 1


async def test_a_close_ends_what_was_not_released_and_names_it() -> None:
    """Rules K121 and K127: session_closed after the last frame; released ones are not named."""
    reports: list[Report] = []
    session = await Session.start(HeldStorage(), on_report=reports.append)
    place = await conversation(session)
    await tally(session, 1)
    await job(session, place, 1)
    states, watches = session.state(Tally), session.watch(Job, conversation=place)
    state, watch = await states.__aenter__(), await watches.__aenter__()
    async with session.state(Tally):
        pass
    report = await session.close()
    assert report.unreleased == ("state of app.tally", f"watch of app.job of conversation {place}")
    assert [r.type for r in reports] == ["unreleased", "unreleased"]
    assert state.ended == "session_closed"
    assert (await anext(watch)).value.n == 1
    with pytest.raises(WatchEnded) as ended:
        await anext(watch)
    assert ended.value.reason == "session_closed"
    for observing in (states, watches):
        await observing.__aexit__(None, None, None)


async def test_what_one_reader_changes_no_other_sees() -> None:
    """Rule K32: neither a state's value, nor a frame's value or operations, nor the document itself."""
    storage = HeldStorage()
    async with Session.open(storage) as session:
        await tally(session, 0)
        async with (
            session.watch(Tally) as one,
            session.watch(Tally) as two,
            session.state(Tally) as state,
            session.state(Tally) as other,
        ):
            async with session.commit() as tx:
                (await tx.draft(Tally)).log = ["a"]
            async with session.commit() as tx:
                (await tx.draft(Tally)).log.append("b")
            state.value.log.append("mine")
            assert state.value.log == other.value.log == ["a", "b"]
            for expected in ([], ["a"], ["a", "b"]):
                frame = await anext(one)
                assert frame.value.log == expected
                frame.value.log.append("mine")
                for op in frame.ops or ():
                    match op:
                        case Set(_, list() as value):
                            value.append("mine")
                        case Splice(insert=insert):
                            insert.append("mine")
                        case _:
                            raise AssertionError(op)
                again = await anext(two)
                assert again.value.log == expected
            async with session.commit() as tx:
                assert list((await tx.draft(Tally)).log) == ["a", "b"]
        assert there(await session.snapshot(Tally)).log == ["a", "b"]
    async with Session.open(storage) as session:
        assert there(await session.snapshot(Tally)).log == ["a", "b"]


async def test_two_observers_of_one_document_share_one_source_until_the_last_leaves() -> None:
    """Rule K114: and the document is let go of afterwards."""
    async with Session.open(HeldStorage(), document_retention_ms=0) as session:
        await tally(session, 1)
        async with session.state(Tally) as one:
            async with session.state(Tally) as two:
                await tally(session, 2)
                assert one.value.n == two.value.n == 2
            await tally(session, 3)
            assert (one.value.n, two.value.n) == (3, 2)
        await label(session, "a")
        await label(session, "b")
        assert session.documents.loaded() == []


async def test_nothing_can_be_observed_where_nothing_lives() -> None:
    """Rule K99: an observation is of one incarnation, so there must be one."""
    async with Session.open(HeldStorage()) as session:
        for observe in (session.state, session.watch):
            with pytest.raises(NotFound):
                async with observe(Tally):
                    pass
        assert session.documents.loaded()[0].sources == {}


async def test_a_watch_has_one_consumer() -> None:
    """Rule K122: two would each get half of the frames."""
    async with Session.open(HeldStorage()) as session:
        await tally(session, 1)
        async with session.watch(Tally) as watch:
            await anext(watch)
            first = begin(anext(watch))
            await rest()
            with pytest.raises(RuntimeError, match="one consumer"):
                await anext(watch)
            await tally(session, 2)
            assert (await first).value.n == 2


async def test_sources_of_floors_above_follow_the_same_rules() -> None:
    """Rules K121 to K127: published to by hand, in order, ended with the session."""
    session = await Session.start(HeldStorage())
    idle: list[bool] = []
    source = Source("the view", seq=5, value=[0], on_idle=lambda: idle.append(True))
    session.add_source(source)
    with session.observing(source.watch(BACKGROUND)) as watch, session.observing(source.state()) as state:
        source.publish(Frame(6, [1], None))
        with pytest.raises(AssertionError):
            source.publish(Frame(5, [2], None))
        assert (state.value, state.seq) == ([1], 6)
        assert [(await anext(watch)).seq for _ in range(2)] == [5, 6]
        assert idle == []
        await session.close()
        assert state.ended == watch.ended == "session_closed"
    late = source.state()
    assert (late.ended, late.value) == ("session_closed", [1])
    assert idle == [True, True]


async def test_a_session_that_failed_names_no_observers() -> None:
    """Rules K121 and K129: their end was the failure, and nobody had the time to release them."""
    reports: list[Report] = []
    session = await Session.start(HeldStorage(), on_report=reports.append)
    await tally(session, 1)
    async with session.state(Tally), session.watch(Tally) as watch:
        session.fail(OSError("the disk is gone"))
        report = await session.close()
        with pytest.raises(WatchEnded, match="session_failed"):
            async for _ in watch:
                pass
    assert report.unreleased == ()
    assert [r.type for r in reports] == ["session_failed"]


# --- going on behind a frame ---------------------------------------------------------------------------------------


def kept(keep: int, frames: int) -> Source[int]:
    source: Source[int] = Source("numbers", seq=0, value=0)
    source.keep = keep
    for seq in range(1, frames + 1):
        source.publish(Frame(seq, seq, ()))
    return source


async def test_a_watch_goes_on_behind_a_frame_that_is_at_hand_k123() -> None:
    """Nothing twice and nothing missed; it knows the number of each frame, also of those left at its end."""
    source = kept(3, 10)
    assert [number for number in range(12) if source.at_hand(number) is not None] == [7, 8, 9, 10]
    for after in (7, 9, 10):
        watch = source.watch(after=after)
        source.publish(Frame(source.seq + 1, source.seq + 1, ()))
        source.end("retired") if after == 10 else None
        found: list[tuple[int, int]] = []
        while not found or found[-1][0] < source.seq:
            frame = await anext(watch)
            assert frame.ops == ()
            found.append((frame.seq, watch.number))
        assert found == [(number, number) for number in range(after + 1, source.seq + 1)]
        watch.release()
    with pytest.raises(WatchEnded, match="retired"):
        await anext(watch)


async def test_behind_a_frame_that_is_gone_or_never_was_a_watch_begins_anew_k123() -> None:
    for source, after in ((kept(3, 10), 6), (kept(3, 10), 11), (kept(0, 10), 9)):
        watch = source.watch(after=after)
        frame = await anext(watch)
        assert (frame.ops, frame.value, watch.number) == (None, 10, 10)
        watch.release()


async def test_one_that_went_on_behind_a_frame_and_is_slow_begins_anew_k125() -> None:
    source = kept(MAX_PENDING, MAX_PENDING)
    whole, slow = source.watch(after=0), source.watch(after=0)
    assert [(await anext(whole)).value for _ in range(MAX_PENDING)] == list(range(1, MAX_PENDING + 1))
    source.publish(Frame(MAX_PENDING + 1, MAX_PENDING + 1, ()))
    frame = await anext(slow)
    assert (frame.ops, frame.value) == (None, MAX_PENDING + 1)
    assert (await anext(whole)).ops == ()
    whole.release()
    slow.release()
