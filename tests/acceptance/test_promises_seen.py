"""What others see of an agent at work: whole commits, from the moment they look, however slowly they look.

Rules K1, K2, K43 (commits), K121 to K127 (watches), H147 to H151 (views and events).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from acceptance_kit import (
    ORDERS,
    STORE,
    Audit,
    Child,
    Job,
    Step,
    look,
    opened,
    records,
)

from perdure import Context, Conversation, Harness, NotJson
from perdure.harness.events import EntryAppended, Events, Snapshot
from perdure.kernel.errors import ContextCancelled
from perdure.kernel.json import JsonValue
from perdure.kernel.observation import WatchEnded
from perdure.kernel.ops import apply


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


# --- one commit is seen whole, or not at all --------------------------------------------------------------------


async def step_on(root: Conversation, n: int) -> None:
    """An entry, a document and a task, in one commit; and the same again, rolled back."""
    async with root.commit() as tx:
        tx.append(Audit(n=n))
        job = await tx.draft(Job)
        job.n = n
        job.notes.append(f"note {n}")
        tx.create_task(Step, n)
    with pytest.raises(ZeroDivisionError):
        async with root.commit() as tx:
            tx.append(Audit(n=10**6))
            job = await tx.draft(Job)
            job.n = 10**6
            tx.create_task(Step, 10**6)
            raise ZeroDivisionError


async def test_nobody_in_the_process_sees_a_part_of_a_commit(store: Path) -> None:
    """K1, K2, K43: a watch, a view, its watch, events and reads agree on every commit, whatever is asked first."""
    by_document: dict[int, int] = {}
    by_view: dict[int, int] = {}
    by_event: dict[int, int] = {}
    attached = asyncio.Semaphore(0)
    total = 60
    async with opened(store, tasks=(Step,)) as harness:
        session, root = harness.session, await harness.root()
        harness.resume()
        await step_on(root, 0)

        async def watch_document() -> None:
            async with session.watch(Job, conversation=1) as watch, root.view() as view:
                attached.release()
                async for frame in watch:
                    assert frame.value.notes[-1] == f"note {frame.value.n}"
                    by_document[frame.seq] = frame.value.n
                    assert Audit.read(view.value.entries[-1]).n >= frame.value.n
                    await look(session, ORDERS[frame.value.n % 6], frame.value.n)
                    if frame.value.n == total:
                        return

        async def watch_view() -> None:
            async with root.watch() as watch, session.state(Job, conversation=1) as job:
                attached.release()
                async for frame in watch:
                    n = Audit.read(frame.value.entries[-1]).n
                    by_view[frame.seq] = n
                    assert job.value.n >= n
                    await look(session, ORDERS[n % 6], n)
                    if n == total:
                        return

        async def watch_events() -> None:
            async with root.events() as events:
                attached.release()
                async for event in events:
                    if isinstance(event, EntryAppended):
                        n = by_event[event.seq] = Audit.read(event.entry).n
                        await look(session, ORDERS[n % 6], n)
                        if n == total:
                            return

        watching = [asyncio.ensure_future(watch()) for watch in (watch_document, watch_view, watch_events)]
        async with asyncio.timeout(30):
            await attached.acquire()
            await attached.acquire()
            await attached.acquire()
        least = 0
        for n in range(1, total + 1):
            await step_on(root, n)
            least = await look(session, ORDERS[n % 6], n)
        async with asyncio.timeout(30):
            await asyncio.gather(*watching)
        assert least == total
        await harness.idle()
        # Each began with what it found, as of the commit it found.
        began = [found.pop(min(found)) for found in (by_document, by_view)]
        assert began == [0, 0]
        assert list(by_event.values()) == list(range(1, total + 1))
        assert by_document == by_view == by_event


@pytest.mark.parametrize("keep", [False, True], ids=["opened anew", "kept open"])
async def test_no_other_process_sees_a_part_of_a_commit(keep: bool, tmp_path: Path, store: Path) -> None:
    """K1, K2, K159: it reads the file, and opens it read-only, while commits go on."""
    async with opened(store, tasks=(Step,)) as harness:
        root = await harness.root()
        harness.resume()
        await step_on(root, 0)
        async with Child.run("reader", tmp_path, commits=25, keep=keep) as child:
            await child.at("reading")
            ending = asyncio.ensure_future(child.end())
            n = 0
            while not ending.done() and n < 20_000:
                n += 1
                await step_on(root, n)
            assert (await ending)["looks"] >= 25
        await harness.idle()


async def test_a_commit_that_was_refused_leaves_nothing_for_anybody(store: Path) -> None:
    """K35, K43: one value that is no JSON, and nothing of the commit is there."""
    async with opened(store, tasks=(Step,)) as harness:
        root = await harness.root()
        await step_on(root, 0)
        before = harness.session.seq
        async with root.watch() as watch:
            await anext(watch)
            with pytest.raises(NotJson):
                async with root.commit() as tx:
                    tx.append(Audit(n=1))
                    (await tx.draft(Job)).n = 1
                    tx.create_task(Step, 1)
                    tx.append(Audit(n=2, words="\ud800"))
            assert harness.session.seq == before
            await step_on(root, 1)
            frame = await anext(watch)
            assert [Audit.read(entry).n for entry in frame.value.entries] == [0, 1]
    assert len(records(store, "tasks")) == 2


# --- late, slow, and gone ----------------------------------------------------------------------------------------


class Seen:
    """One way to watch, as numbers: what the watch says of each commit, or that it begins anew with a full value."""

    def __init__(self, way: str, harness: Harness, *, context: Context | None = None) -> None:
        self.way = way
        self._harness = harness
        self._context = context
        self._value: JsonValue = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[AsyncIterator[tuple[str, int]]]:
        session, root = self._harness.session, self._harness.handle(1)
        if self.way == "document":
            async with session.watch(Job, conversation=1, context=self._context) as watch:
                yield self._frames(watch, lambda job: job.to_json(), lambda job: job.n)
        elif self.way == "view":
            async with root.watch(context=self._context) as watch:
                yield self._frames(watch, lambda view: view.to_json(), lambda v: Audit.read(v.entries[-1]).n)
        else:
            async with root.events(context=self._context) as events:
                yield self._events(events)

    async def _frames(self, watch, to_json, number) -> AsyncIterator[tuple[str, int]]:
        async for frame in watch:
            value = to_json(frame.value)
            if frame.ops is None:
                yield "anew", number(frame.value)
            else:
                assert apply(self._value, frame.ops) == value, "the operations lead from one frame to the next"
                yield "next", number(frame.value)
            self._value = value

    async def _events(self, events: Events) -> AsyncIterator[tuple[str, int]]:
        async for event in events:
            if isinstance(event, Snapshot):
                assert isinstance(event.view, dict)
                yield "anew", event.view["entries"][-1]["data"]["n"]  # pyright: ignore
            elif isinstance(event, EntryAppended):
                yield "next", Audit.read(event.entry).n


WAYS = pytest.mark.parametrize("way", ["document", "view", "events"])


async def write(root: Conversation, n: int) -> None:
    async with root.commit() as tx:
        tx.append(Audit(n=n))
        job = await tx.draft(Job)
        job.n = n
        job.notes.append(str(n))


@asynccontextmanager
async def stage(store: Path) -> AsyncIterator[tuple[Harness, Conversation]]:
    async with opened(store) as harness:
        root = await harness.root()
        await write(root, 0)
        yield harness, root


@WAYS
async def test_a_late_consumer_begins_at_the_present_and_misses_nothing_after(way: str, store: Path) -> None:
    """K123, K124."""
    async with stage(store) as (harness, root):
        for n in range(1, 30):
            await write(root, n)
        async with Seen(way, harness).watching() as seen:
            for n in range(30, 40):
                await write(root, n)
            found = [await anext(seen) for _ in range(11)]
        assert found == [("anew", 29), *(("next", n) for n in range(30, 40))]


@WAYS
async def test_many_that_come_and_go_while_commits_go_on_miss_nothing_and_see_nothing_twice(
    way: str, store: Path
) -> None:
    """K122, K124."""
    async with stage(store) as (harness, root):

        async def look_for(steps: int) -> None:
            async with Seen(way, harness).watching() as seen:
                kind, n = await anext(seen)
                assert kind == "anew"
                assert [await anext(seen) for _ in range(steps)] == [("next", n + i + 1) for i in range(steps)]

        looking = [asyncio.ensure_future(look_for(steps)) for steps in (1, 3, 10, 1, 20, 2)]
        n = 0
        while not all(task.done() for task in looking) and n < 2_000:
            n += 1
            await write(root, n)
        await asyncio.gather(*looking)


@WAYS
async def test_a_slow_consumer_gets_one_full_value_in_place_of_what_it_missed(way: str, store: Path) -> None:
    """K125: 100 commits wait for it; one more and it begins anew with the newest. It holds up nobody meanwhile."""
    async with (
        stage(store) as (harness, root),
        Seen(way, harness).watching() as slow,
        Seen(way, harness).watching() as other,
    ):
        assert [await anext(slow), await anext(other)] == [("anew", 0), ("anew", 0)]
        for n in range(1, 101):
            await write(root, n)
            assert await anext(other) == ("next", n)
        assert [await anext(slow) for _ in range(100)] == [("next", n) for n in range(1, 101)]
        for n in range(101, 301):
            await write(root, n)
            assert await anext(other) == ("next", n)
        kind, newest = await anext(slow)
        assert kind == "anew"
        assert newest >= 201, "what it begins anew with is the newest of its time"
        assert [await anext(slow) for _ in range(300 - newest)] == [("next", n) for n in range(newest + 1, 301)]
        await write(root, 301)
        assert await anext(slow) == ("next", 301)


@WAYS
async def test_a_released_watch_ends_quietly_and_nothing_of_it_is_left(way: str, store: Path) -> None:
    """K121, K127."""
    async with stage(store) as (harness, root):
        async with Seen(way, harness).watching() as seen:
            assert await anext(seen) == ("anew", 0)
            await write(root, 1)
        with pytest.raises(StopAsyncIteration):
            await anext(seen)
        await write(root, 2)
        async with Seen(way, harness).watching() as again:
            assert await anext(again) == ("anew", 2)
    assert harness.closed is not None
    assert harness.closed.unreleased == ()


@WAYS
async def test_a_watch_that_is_open_at_close_is_named_and_told_why_it_ends(way: str, store: Path) -> None:
    """K81, K121, K127: after the frames that came before the end."""
    async with stage(store) as (harness, root), Seen(way, harness).watching() as seen:
        await write(root, 1)
        report = await harness.close()
        assert len(report.unreleased) == 1
        assert [await anext(seen), await anext(seen)] == [("anew", 0), ("next", 1)]
        with pytest.raises(WatchEnded) as raised:
            await anext(seen)
        assert raised.value.reason == "session_closed"


@WAYS
async def test_a_cancelled_context_ends_its_own_watch_alone(way: str, store: Path) -> None:
    """K126, K127."""
    context = Context()
    async with (
        stage(store) as (harness, root),
        Seen(way, harness, context=context).watching() as cancelled,
        Seen(way, harness).watching() as other,
    ):
        assert await anext(cancelled) == ("anew", 0)
        waiting = asyncio.ensure_future(anext(cancelled))
        await asyncio.sleep(0)
        context.cancel("enough")
        with pytest.raises(ContextCancelled, match="enough"):
            await waiting
        await write(root, 1)
        assert [await anext(other), await anext(other)] == [("anew", 0), ("next", 1)]


async def test_a_document_that_is_retired_ends_its_watch_and_the_next_of_its_name_is_another(store: Path) -> None:
    """K112, K127."""
    async with stage(store) as (harness, root):
        async with harness.session.watch(Job, conversation=1) as watch:
            await anext(watch)
            async with root.commit() as tx:
                await tx.retire(Job)
            async with root.commit() as tx:
                (await tx.draft(Job)).n = 5
            with pytest.raises(WatchEnded) as raised:
                await anext(watch)
            assert raised.value.reason == "retired"
        async with harness.session.watch(Job, conversation=1) as watch:
            assert (await anext(watch)).value.n == 5
