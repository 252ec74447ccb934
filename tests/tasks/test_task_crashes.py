"""A program of tasks killed after each of its commits, and again while it recovers, ends the same (rules T1, K130)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from task_world import ROOT, START, World, settle

from perdure.kernel.records import Aborted, Completed, Outcome, Sleeping
from perdure.kernel.session import Settled
from perdure.storage.memory import MemoryStorage
from perdure.tasks import Next, Run, Task

OUTSIDE: dict[str, str] = {}
"""What the outside world has seen, by idempotency key."""


class Part(msgspec.Struct, frozen=True):
    name: str


class Work(Task[Part, str], kind="t.work"):
    """A leaf with an effect between two commits."""

    async def start(self, run: Run[Part, str, None]) -> Next[str]:
        async with run.commit() as tx:
            tx.append_record("app.intent")
            return tx.go(self.effect, "intended")

    async def effect(self, run: Run[Part, str, str]) -> Next[str]:
        OUTSIDE.setdefault(run.idempotency_key, run.input.name)
        async with run.commit() as tx:
            if run.input.name.startswith("fails"):
                return tx.fail("no", run.input.name)
            if run.input.name.startswith("sleeps"):
                return tx.sleep(START + 5000, self.slept, None)
            if run.input.name.startswith("hears"):
                return tx.wait_signal("call", self.slept, None, deadline=START + 10**12)
            if run.input.name.startswith("never"):
                return tx.wait_signal("never", self.slept, None)
            return tx.complete(run.input.name)

    async def slept(self, run: Run[Part, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(f"{run.input.name} {run.signal}")

    async def on_abort(self, run: Run[Part, str, object]) -> Next[str]:
        async with run.commit() as tx:
            tx.append_record("app.undone")
            return tx.abort("undone")


class Lead(Task[Part, list[str]], kind="t.lead"):
    """Fans out, waits, and lets some of it be aborted."""

    async def start(self, run: Run[Part, list[str], None]) -> Next[list[str]]:
        async with run.commit() as tx:
            room = tx.create_conversation(owner=run.id)
            own = [tx.create_task(Work, Part(f"{kind} of {run.input.name}")).id for kind in ("does", "sleeps", "hears")]
            own.append(tx.create_task(Work, Part(f"guest of {run.input.name}"), owner=None, conversation=room.id).id)
            return tx.wait(own, self.risky, own)

    async def risky(self, run: Run[Part, list[str], list[int]]) -> Next[list[str]]:
        async with run.commit() as tx:
            both = [tx.create_task(Work, Part(f"{kind} of {run.input.name}")).id for kind in ("never", "fails")]
            return tx.wait(both, self.end, run.checkpoint, policy="fail_fast")

    async def end(self, run: Run[Part, list[str], list[int]]) -> Next[list[str]]:
        names: list[str] = []
        for id in run.checkpoint:
            record = await run.session.task(id)
            assert record is not None
            assert isinstance(record.outcome, Completed)
            names.append(str(record.outcome.result))
        async with run.commit() as tx:
            tx.create_task(Work, Part(f"never held of {run.input.name}"))
            tx.create_task(Work, Part(f"sleeps on of {run.input.name}"))
            return tx.complete(names)


async def play(world: World) -> None:
    """Do the host's part, as often as the program is opened, until all is done."""
    runtime = world.runtime
    live = world.session.live.settled
    for _ in range(40):
        await settle()
        names = {str(record.input["name"]): record for record in live.values()}  # pyright: ignore
        for name, record in names.items():
            if name.startswith("hears"):
                await runtime.send_signal(record.id, "call", "hello")
            if name.startswith("never held") and not record.abort_requested:
                await runtime.abort_task(record.id)
        at = runtime.wake().at
        if at is not None and any(isinstance(r.state, Sleeping) for r in live.values()):
            await world.clock.advance(max(at - world.clock.wall(), 0))
        if not live:
            return
    raise AssertionError(f"it never ended: {await runtime.inspect()}")


def ends(storage: MemoryStorage) -> dict[str, Outcome | None]:
    return {t.input["name"]: t.outcome for t in storage._contents.tasks.values()}  # pyright: ignore


def shape(storage: MemoryStorage) -> list[tuple[str, str]]:
    """Who wrote which entries."""
    names: dict[Any, str] = {t.id: t.input["name"] for t in storage._contents.tasks.values()}  # pyright: ignore
    return sorted((names[e.by_task], e.kind) for e in storage._contents.entries.values())


async def run_from(storage: MemoryStorage, *, snapshots: list[MemoryStorage] | None = None) -> MemoryStorage:
    """Open, do the rest, close; a copy of the store is kept after each commit."""
    world = World()
    world.storage = storage
    async with world.open(Lead, Work, resume=False):

        def keep(settled: Settled) -> None:
            if snapshots is not None:
                snapshots.append(world.storage.snapshot())

        world.session.observe(keep)
        if snapshots is not None:
            snapshots.append(world.storage.snapshot())
        if not storage._contents.tasks:
            await world.create(Lead, Part("first"))
        world.runtime.resume()
        await play(world)
    return storage


@pytest.fixture(autouse=True)
def outside() -> None:
    OUTSIDE.clear()


async def test_T1_killed_after_every_commit_it_ends_the_same() -> None:
    snapshots: list[MemoryStorage] = []
    whole = await run_from(MemoryStorage(), snapshots=snapshots)
    expected, entries = ends(whole), shape(whole)
    assert len(expected) == 9
    assert expected["never of first"] == Aborted("undone")
    assert expected["never held of first"] == Aborted("undone")
    assert len(snapshots) > 20
    for place, snapshot in enumerate(snapshots):
        if not snapshot._contents.tasks:
            continue
        OUTSIDE.clear()
        again: list[MemoryStorage] = []
        recovered = await run_from(snapshot.snapshot(), snapshots=again)
        assert ends(recovered) == expected, f"killed after commit {place}"
        assert shape(recovered) == entries, f"killed after commit {place}"
        # And killed once more, early in that recovery and somewhere later.
        for second in {0, 1, 2, 3, len(again) // 2} & set(range(len(again))):
            twice = await run_from(again[second].snapshot())
            assert ends(twice) == expected, f"killed after commits {place} and then {second}"
            assert shape(twice) == entries


async def test_K30_effects_of_one_task_carry_one_key_however_often_it_is_killed() -> None:
    snapshots: list[MemoryStorage] = []
    await run_from(MemoryStorage(), snapshots=snapshots)
    first = dict(OUTSIDE)
    for snapshot in snapshots[-6:]:
        await run_from(snapshot.snapshot())
    assert first == OUTSIDE
    assert len(set(first.values())) == len(first)


async def test_the_root_conversation_is_there(world: World) -> None:
    async with world.open(Lead, Work):
        assert await world.session.conversation(ROOT) is not None
