"""What others see of an agent at work: whole commits, from the moment they look, however slowly they look.

Rules K1, K2, K43 (commits), K121 to K127 (watches), H147 to H151 (views and events).
"""

from __future__ import annotations

import asyncio
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

from perdure import Conversation, NotJson
from perdure.harness.events import EntryAppended


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
