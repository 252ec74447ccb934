"""Code that is missing, too old, does not migrate, or is replaced (rules T30-T34, T46-T48, T82)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from task_world import ROOT, World, settle, until

from perdure.kernel.json import JsonValue
from perdure.kernel.records import Completed, Orphaned, Terminal
from perdure.tasks import BlockedReason, Next, Run, StoredTask, Task, WorkBlocked


class OldOrder(msgspec.Struct, frozen=True):
    item: str


class Order(msgspec.Struct, frozen=True):
    items: list[str]


class ShipV1(Task[OldOrder, str], kind="t.ship", version=1):
    """Stops at its signal."""

    async def start(self, run: Run[OldOrder, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("go", self.send, "v1")

    async def send(self, run: Run[OldOrder, str, str]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(f"v1 {run.input.item} {run.checkpoint}")


class ShipV2(Task[Order, str], kind="t.ship", version=2):
    async def start(self, run: Run[Order, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("go", self.dispatch, {"from": "v2"})

    async def dispatch(self, run: Run[Order, str, dict[str, str]]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(f"v2 {run.input.items} {run.checkpoint['from']}")

    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        assert isinstance(stored.input, dict)
        checkpoint: JsonValue = None if stored.phase == "start" else {"from": stored.checkpoint}
        phase = "dispatch" if stored.phase == "send" else stored.phase
        return StoredTask(version=2, input={"items": [stored.input["item"]]}, phase=phase, checkpoint=checkpoint)


class ShipV2Bare(ShipV2, kind="t.ship", version=2):
    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        return Task.migrate(stored)


class ShipV2Raises(ShipV2, kind="t.ship", version=2):
    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        raise LookupError("cannot")


class ShipV2Wrong(ShipV2, kind="t.ship", version=2):
    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        return StoredTask(version=2, input={"items": "text"}, phase="dispatch", checkpoint={})


class ShipV2NoPhase(ShipV2, kind="t.ship", version=2):
    @classmethod
    def migrate(cls, stored: StoredTask) -> StoredTask:
        return StoredTask(version=2, input={"items": []}, phase="gone", checkpoint={})


class ShipV2Shapes(ShipV1, kind="t.ship", version=1):
    """Of the same version, but with another type of checkpoint: its author forgot to raise it."""

    async def send(self, run: Run[OldOrder, str, int]) -> Next[str]: ...  # pyright: ignore


async def waiting_at_send(world: World) -> int:
    """A v1 record that stands at its second phase, pending."""
    async with world.open(ShipV1):
        id = await world.create(ShipV1, OldOrder("book"))
        await settle()
    async with world.open(ShipV1, resume=False):
        await world.runtime.send_signal(id, "go", None)
    return id


BLOCKED: list[tuple[type[Task[Any, Any]] | None, BlockedReason]] = [
    (None, "missing_task"),
    (ShipV2Bare, "migration_failed"),
    (ShipV2Raises, "migration_failed"),
    (ShipV2Wrong, "migration_failed"),
    (ShipV2NoPhase, "migration_failed"),
    (ShipV2Shapes, "migration_failed"),
]


class TestBlocked:
    @pytest.mark.parametrize(("code", "reason"), BLOCKED)
    async def test_T31_T46_T47_T48_blocked_inspectable_and_waits_answered(
        self, world: World, code: type[Task[Any, Any]] | None, reason: BlockedReason
    ) -> None:
        id = await waiting_at_send(world)
        before = world.storage._contents.tasks[id]
        seen: list[tuple[int, str]] = []
        async with world.open(*([code] if code else []), resume=False) as opened:
            opened.runtime.on_blocked(
                lambda record: seen.append((record.id, opened.runtime.blocked_tasks[record.id].reason))
            )
            (live,) = await world.runtime.inspect()
            assert live.blocked == (reason if code is None else None), "nothing was run to find out more"
            assert world.reported("task_blocked") == []
            for wait in (world.runtime.wait(id), world.runtime.idle(), world.runtime.idle(ROOT)):
                with pytest.raises(WorkBlocked) as refused:
                    await wait
                assert (refused.value.task, refused.value.reason) == (id, reason)
            (live,) = await world.runtime.inspect()
            assert live.blocked == reason
            assert live.phase == "send"
            (report,) = world.reported("task_blocked")
            assert (report.task, report.kind, report.conversation) == (id, "t.ship", ROOT)
            assert seen == [(id, reason)]
            await settle()
        assert world.storage._contents.tasks[id] == before, "T31, T32: it is left as it is"

    async def test_T31_code_older_than_the_record(self, world: World) -> None:
        async with world.open(ShipV2, resume=False):
            id = await world.create(ShipV2, Order(["a"]))
        async with world.open(ShipV1):
            with pytest.raises(WorkBlocked) as refused:
                await world.runtime.wait(id)
            assert refused.value.reason == "task_too_old"
            (live,) = await world.runtime.inspect()
            assert live.blocked == "task_too_old"
            assert "version 2" in live.detail

    async def test_T33_installing_fitting_code_unblocks(self, world: World) -> None:
        id = await waiting_at_send(world)
        async with world.open():
            await settle()
            assert world.runtime.blocked(id) == "missing_task"
            world.registry.install(ShipV2Bare)
            assert world.runtime.blocked(id) == "migration_failed"
            assert len(world.reported("task_blocked")) == 2
            waiting = asyncio.ensure_future(world.runtime.wait(id, through_blocked=True))
            idle = asyncio.ensure_future(world.runtime.idle(through_blocked=True))
            await settle()
            assert not waiting.done()
            world.registry.install(ShipV2)
            outcome = await waiting
            await idle
            assert isinstance(outcome, Completed)
            assert outcome.result == "v2 ['book'] v1"
            assert world.runtime.blocked(id) is None

    async def test_T31_a_task_created_without_code_is_blocked_at_once(self, world: World) -> None:
        async with world.open():
            id = await world.create(ShipV1, OldOrder("x"))
            assert await world.status(id) == "pending"
            assert world.runtime.blocked(id) == "missing_task"
            world.registry.install(ShipV1)
            await settle()
            assert await world.status(id) == "waiting"

    async def test_T47_a_wait_that_needs_blocked_work_is_answered(self, world: World) -> None:
        class Owner(Task[None, None], kind="t.owner"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    child = tx.create_task(ShipV1, OldOrder("x"))
                    return tx.wait([child.id], self.after, None)

            async def after(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.complete(None)

        class Waiter(Task[int, None], kind="t.waiter"):
            async def start(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.wait([run.input], self.after, None)

            async def after(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Owner, Waiter):
            owner = await world.create(Owner)
            far = await world.create(Waiter, owner, conversation=await world.conversation(None))
            for id in (owner, far):
                with pytest.raises(WorkBlocked) as refused:
                    await world.runtime.wait(id)
                assert refused.value.reason == "missing_task"
            # One that waits already hears of it when it happens.
            world.registry.install(ShipV1)
            await settle()
            waiting = asyncio.ensure_future(world.runtime.wait(far))
            await settle()
            assert not waiting.done()
            (ship,) = [r.id for r in world.session.live.settled.values() if r.kind == "t.ship"]
            world.registry.remove("t.ship")
            await world.runtime.send_signal(ship, "go", 1)
            with pytest.raises(WorkBlocked):
                await waiting

    async def test_T82_aborting_a_blocked_task_orphans_it_with_the_reason(self, world: World) -> None:
        id = await waiting_at_send(world)
        async with world.open(resume=False):
            await world.runtime.abort_task(id)
            assert (await world.task(id)).state == Terminal(Orphaned("missing_task"))
            await world.runtime.idle()

    async def test_T82_each_reason(self, world: World) -> None:
        for code, reason in BLOCKED[1:]:
            id = await waiting_at_send(world)
            assert code is not None
            async with world.open(code):
                with pytest.raises(WorkBlocked):
                    await world.runtime.wait(id)
                await world.runtime.abort_task(id)
                assert await world.outcome(id) == Orphaned(reason)


class TestMigration:
    async def test_T31_newer_code_migrates_and_the_next_commit_stores_it(self, world: World) -> None:
        async with world.open(ShipV1):
            id = await world.create(ShipV1, OldOrder("book"))
            await settle()
        gate = asyncio.Event()

        class Slow(ShipV2, kind="t.ship", version=2):
            async def dispatch(self, run: Run[Order, str, dict[str, str]]) -> Next[str]:
                assert run.input == Order(["book"])
                await gate.wait()
                assert await run.memo("m", 1) == 1
                record = run.session.live.settled[run.id]
                assert (record.version, record.input) == (2, {"items": ["book"]})
                assert record.state.phase == "dispatch"  # pyright: ignore
                return await super().dispatch(run)

        async with world.open(Slow):
            await world.runtime.send_signal(id, "go", None)
            await settle()
            record = await world.task(id)
            assert (record.status, record.version, record.input) == ("running", 1, {"item": "book"}), "in memory only"
            gate.set()
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == "v2 ['book'] v1"
            assert (await world.task(id)).version == 2

    async def test_T31_a_migrated_record_is_not_migrated_again(self, world: World) -> None:
        id = await waiting_at_send(world)
        calls: list[int] = []

        class Twice(ShipV2, kind="t.ship", version=2):
            async def dispatch(self, run: Run[Order, str, dict[str, str]]) -> Next[str]:
                async with run.commit() as tx:
                    return tx.wait_signal("again", self.finish, run.checkpoint)

            async def finish(self, run: Run[Order, str, dict[str, str]]) -> Next[str]:
                async with run.commit() as tx:
                    return tx.complete(f"{run.input.items} {run.checkpoint['from']}")

            @classmethod
            def migrate(cls, stored: StoredTask) -> StoredTask:
                calls.append(stored.version)
                return super().migrate(stored)

        async with world.open(Twice):
            await settle()
            made = len(calls)
            assert made > 0
            assert set(calls) == {1}
            await world.runtime.send_signal(id, "again", None)
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == "['book'] v1"
            assert len(calls) == made

    async def test_T34_code_replaced_while_running_takes_over_at_the_next_phase(self, world: World) -> None:
        gate = asyncio.Event()

        class First(Task[None, str], kind="t.swap", version=1):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                await gate.wait()
                async with run.commit() as tx:
                    return tx.go(self.end, "1")

            async def end(self, run: Run[None, str, str]) -> Next[str]:
                async with run.commit() as tx:
                    return tx.complete(f"first {run.checkpoint}")

        class Second(Task[None, str], kind="t.swap", version=2):
            async def start(self, run: Run[None, str, None]) -> Next[str]: ...

            async def end(self, run: Run[None, str, int]) -> Next[str]:
                async with run.commit() as tx:
                    return tx.complete(f"second {run.checkpoint}")

            @classmethod
            def migrate(cls, stored: StoredTask) -> StoredTask:
                assert isinstance(stored.checkpoint, str)
                return StoredTask(version=2, input=stored.input, phase=stored.phase, checkpoint=int(stored.checkpoint))

        async with world.open(First):
            id = await world.create(First)
            await settle()
            world.registry.install(Second)
            await settle()
            gate.set()
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == "second 1"

    async def test_T34_code_removed_while_running_blocks_at_the_next_phase(self, world: World) -> None:
        gate = asyncio.Event()

        class Two(Task[None, None], kind="t.two"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                await gate.wait()
                async with run.commit() as tx:
                    return tx.go(self.end, 1)

            async def end(self, run: Run[None, None, int]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Two):
            id = await world.create(Two)
            await settle()
            world.registry.remove("t.two")
            gate.set()
            await until(lambda: world.runtime.blocked(id) == "missing_task")
            record = await world.task(id)
            assert (record.status, record.restarts) == ("pending", 0)
            assert record.state.phase == "end"  # pyright: ignore
            world.registry.install(Two)
            assert isinstance(await world.runtime.wait(id), Completed)

    async def test_T30_waiting_work_without_code_blocks_when_it_is_due(self, world: World) -> None:
        async with world.open(ShipV1):
            id = await world.create(ShipV1, OldOrder("x"))
            await settle()
        async with world.open():
            await settle()
            assert world.runtime.blocked(id) is None
            assert await world.status(id) == "waiting", "T36"
            await world.runtime.send_signal(id, "go", None)
            await settle()
            assert await world.status(id) == "pending"
            assert world.runtime.blocked(id) == "missing_task"
