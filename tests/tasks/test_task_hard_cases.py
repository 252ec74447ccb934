"""Cases found by attacking the runtime: races with a close, odd user code, records of older versions, clean-ups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

import msgspec
import pytest
from msgspec import structs
from task_world import ROOT, World, settle

from perdure.kernel.errors import SessionClosed
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Aborted, Completed, Completing, Failed, Faulted, Orphaned, TaskRecord
from perdure.kernel.transaction import Transaction
from perdure.tasks import Next, Run, StoredTask, Task, WorkBlocked
from perdure.tasks.inspect import Wake


class Hang(Task[str, str], kind="t.hang"):
    """Runs until it is stopped, or goes on with the signal."""

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("go", self.end, None)

    async def end(self, run: Run[str, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete(run.input)


class TestMigratedRuns:
    async def test_T31_the_first_move_of_a_migrated_run_is_its_own(self, world: World) -> None:
        """A phase that goes round by itself: the checkpoint it commits is not put back to the migrated one."""
        effects: list[int] = []

        class V1(Task[None, int], kind="t.loop", version=1):
            async def start(self, run: Run[None, int, int | None]) -> Next[int]:
                async with run.commit() as tx:
                    return tx.wait_signal("go", self.start, 3)

        class V2(Task[None, int], kind="t.loop", version=2):
            async def start(self, run: Run[None, int, int]) -> Next[int]:
                effects.append(run.checkpoint)
                async with run.commit() as tx:
                    return tx.complete(run.checkpoint) if run.checkpoint > 31 else tx.go(self.start, run.checkpoint + 1)

            @classmethod
            def migrate(cls, stored: StoredTask) -> StoredTask:
                assert isinstance(stored.checkpoint, int)
                return structs_replace(stored, version=2, checkpoint=stored.checkpoint * 10)

        async with world.open(V1):
            id = await world.create(V1)
            await settle()
        async with world.open(V2):
            await world.runtime.send_signal(id, "go", None)
            assert isinstance(await world.runtime.wait(id), Completed)
            assert effects == [30, 31, 32]


def structs_replace(stored: StoredTask, *, version: int, checkpoint: JsonValue) -> StoredTask:
    return StoredTask(version=version, input=stored.input, phase=stored.phase, checkpoint=checkpoint)


class TestProgress:
    async def test_T18_waiting_again_for_what_has_ended_is_no_progress(self, world: World) -> None:
        class Again(Task[str, None], kind="t.again"):
            async def start(self, run: Run[str, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    if run.input == "signal":
                        return tx.wait_signal("go", self.start, None)
                    return tx.wait([int(run.input)] if run.input else [], self.start, None)

        async with world.open(Again, Hang):
            ended = await world.create(Hang, "x")
            await world.runtime.send_signal(ended, "go", None)
            await world.runtime.wait(ended)
            for input in (str(ended), "signal", ""):
                id = await world.create(Again, input)
                if input == "signal":
                    await world.runtime.send_signal(id, "go", None)
                await settle()
                outcome = await world.outcome(id)
                assert isinstance(outcome, Faulted)
                assert outcome.error.code == "no_progress"


class TestOddCode:
    async def test_K133_any_exception_of_a_phase_faults_its_task_alone(self, world: World) -> None:
        class Odd(BaseException):
            pass

        class Mute(Exception):
            def __str__(self) -> str:
                raise LookupError("no words")

        class Raises(Task[str, None], kind="t.raises"):
            async def start(self, run: Run[str, None, None]) -> Next[None]:
                raise Odd("odd") if run.input == "odd" else Mute

        async with world.open(Raises):
            for input, text in (("odd", "Odd: odd"), ("mute", "Mute")):
                outcome = await world.runtime.wait(await world.create(Raises, input))
                assert isinstance(outcome, Faulted)
                assert outcome.error.message.startswith(text)
            assert world.session.failed is None

    @pytest.mark.parametrize("where", ["migrate", "type"])
    async def test_K133_T31_whatever_decoding_raises_blocks_that_task_alone(self, world: World, where: str) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise LookupError("no words")

        class Picky(msgspec.Struct):
            name: str

            def __post_init__(self) -> None:
                if self.name == "bad":
                    raise KeyError(self.name)

        class Old(Task[dict[str, str], None], kind="t.picky"):
            async def start(self, run: Run[dict[str, str], None, None]) -> Next[None]: ...

        class New(Task[Picky, None], kind="t.picky", version=1 if where == "type" else 2):
            async def start(self, run: Run[Picky, None, None]) -> Next[None]: ...

            @classmethod
            def migrate(cls, stored: StoredTask) -> StoredTask:
                raise Mute

        async with world.open(Old, resume=False):
            id = await world.create(Old, {"name": "bad"})
        async with world.open(New):
            with pytest.raises(WorkBlocked) as refused:
                await world.runtime.wait(id)
            assert refused.value.reason == "migration_failed"
            assert world.session.failed is None


class TestCleanUps:
    @pytest.mark.parametrize("slow", [False, True])
    @pytest.mark.parametrize("place", ["here", "known to nobody", "new"])
    async def test_T60_work_a_clean_up_makes_is_work_like_any(self, world: World, slow: bool, place: str) -> None:
        other = 0
        made: list[int] = []

        class Leaves(Task[None, None], kind="t.leaves"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                raise RuntimeError

            def cleanup(self, tx: Transaction, record: TaskRecord) -> Awaitable[None] | None:
                where = {"here": ROOT, "known to nobody": other}.get(place) or tx.create_conversation(owner=None).id
                made.extend((tx.create_task(Hang, "x", conversation=where).id, where))
                return asyncio.sleep(0) if slow else None

        async with world.open(Leaves, Hang):
            other = await world.conversation(None)
        async with world.open(Leaves, Hang):
            await world.runtime.wait(await world.create(Leaves))
            id, where = made
            await settle()
            assert await world.status(id) == "waiting", "it ran"
            await world.runtime.abort_conversation(where)
            assert isinstance(await world.outcome(id), Aborted)

    async def test_T60_K133_a_clean_up_that_meets_a_cancelled_future_ends_its_task(self, world: World) -> None:
        class Unlucky(Task[None, None], kind="t.unlucky"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.wait_signal("never", self.start, None)

            def cleanup(self, tx: Transaction, record: TaskRecord) -> Awaitable[None]:
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.cancel()
                return future

        async with world.open(Unlucky):
            id = await world.create(Unlucky)
            await settle()
            await world.runtime.abort_task(id)
            assert isinstance(await world.outcome(id), Aborted)
            assert [report.task for report in world.reported("cleanup_failed")] == [id]

    async def test_T60_a_clean_up_makes_nothing_in_the_name_of_who_commits(self, world: World) -> None:
        """The commit that ends the task may be its owner's own: what the clean-up makes is not the owner's."""
        made: list[int] = []

        class Below(Task[None, None], kind="t.below"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.wait_signal("never", self.start, None)

            def cleanup(self, tx: Transaction, record: TaskRecord) -> None:
                made.append(tx.create_task(Hang, "x", conversation=ROOT).id)

        class Fails(Task[None, None], kind="t.fails"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    tx.create_task(Below, None)
                await settle()
                async with run.commit() as tx:
                    return tx.fail("failed", "by its own word")

        async with world.open(Below, Fails, Hang):
            outcome = await world.runtime.wait(await world.create(Fails))
            assert isinstance(outcome, Failed)
            assert (await world.task(made[0])).owner is None

    async def test_T60_a_signal_a_clean_up_sends_is_heard(self, world: World) -> None:
        class Sends(Task[int, None], kind="t.sends"):
            async def start(self, run: Run[int, None, None]) -> Next[None]:
                raise RuntimeError

            def cleanup(self, tx: Transaction, record: TaskRecord) -> None:
                waiting = tx.live_task(int(str(record.input)))
                assert waiting is not None
                tx.put_task(structs.replace(waiting, raw_signals=msgspec.Raw(b'{"go":1}')))

        async with world.open(Sends, Hang):
            waiting = await world.create(Hang, "x")
            await settle()
            await world.runtime.wait(await world.create(Sends, waiting))
            await settle()
            assert await world.status(waiting) == "terminal"


class TestClosing:
    async def test_K81_a_close_as_a_first_intent_is_committed_hangs_nothing(self, world: World) -> None:
        inside, go = asyncio.Event(), asyncio.Event()

        class Intends(Task[None, None], kind="t.intends"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    tx.append_record("app.intent")
                    inside.set()
                    with suppress(asyncio.CancelledError):
                        await go.wait()
                raise AssertionError("refused")

        async with world.open(Intends):
            id = await world.create(Intends)
            await inside.wait()
            closing = asyncio.ensure_future(world.session.close())
            await settle()
            go.set()
            await settle()
            assert closing.done()
            await closing
            record = world.storage._contents.tasks[id]
            assert (record.status, record.restarts) == ("pending", 0)

    async def test_K81_an_abort_that_meets_a_close_starts_nothing(self, world: World) -> None:
        inside, go = asyncio.Event(), asyncio.Event()

        class Handles(Hang, kind="t.handles"):
            async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
                await asyncio.Event().wait()
                raise AssertionError

        async def before(tx: Transaction) -> None:
            inside.set()
            await go.wait()

        async with world.open(Handles):
            id = await world.create(Handles, "x")
            await settle()
            aborts = [asyncio.ensure_future(world.runtime.abort_task(id))]
            await settle()
            assert await world.status(id) == "running"
            aborts.append(asyncio.ensure_future(world.runtime.abort_conversation(ROOT, before=before)))
            await inside.wait()
            closing = asyncio.ensure_future(world.session.close())
            await settle()
            go.set()
            for abort in aborts:
                with pytest.raises(SessionClosed):
                    await abort
            await closing
            assert world.storage._contents.tasks[id].status == "pending"


class TestBlockedAndAborted:
    async def test_T47_work_that_blocks_in_the_commit_that_ends_what_is_waited_for(self, world: World) -> None:
        class Other(Hang, kind="t.other"):
            pass

        async with world.open(Hang, Other):
            blocked, ends = await world.create(Other, "x"), await world.create(Hang, "x")
            await settle()
            world.registry.remove("t.other")
            wait = asyncio.ensure_future(world.runtime.wait(ends))
            await settle()
            async with world.session.commit() as tx:
                await world.runtime.put_signal(tx, blocked, "go", None)
                record = tx.live_task(ends)
                assert record is not None
                tx.put_task(structs.replace(record, state=Completing(Completed())))
            assert world.runtime.blocked(blocked) == "missing_task"
            assert await wait == Completed()

    async def test_T49_a_marked_task_is_due_whatever_it_waited_for(self, world: World) -> None:
        class Handles(Hang, kind="t.handles"):
            async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
                await asyncio.Event().wait()
                raise AssertionError

        async with world.open(Handles):
            id = await world.create(Handles, "x")
            await settle()
            async with world.session.commit() as tx:
                record = tx.live_task(id)
                assert record is not None
                world.runtime.mode = "off"  # the process ends with the mark, before anything follows from it
                tx.put_task(structs.replace(record, abort_requested=True))
            await world.crash()
        async with world.open(Handles, resume=False):
            assert await world.status(id) == "waiting"
            assert world.runtime.wake() == Wake(True, None)
        async with world.open(resume=False):
            assert world.runtime.wake() == Wake(True, None), "it will be settled orphaned"

    async def test_T56_T82_a_parked_owner_that_was_aborted_is_not_blocked_any_more(self, world: World) -> None:
        gate = asyncio.Event()

        class Handles(Hang, kind="t.handles"):
            async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
                await gate.wait()
                return await super().on_abort(run)

        class Owner(Task[None, None], kind="t.owner"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                if await run.memo("made", True) and not list(run.host.tree.owned(run.id, run.host.before)):
                    async with run.commit() as tx:
                        tx.create_task(Handles, "x")
                await asyncio.Event().wait()
                raise AssertionError

        async with world.open(Owner, Handles, restart_limit=1):
            id = await world.create(Owner)
            await settle()
            await world.crash()
        async with world.open(Owner, Handles, restart_limit=1):
            await settle()
            assert world.runtime.blocked(id) == "parked"
            abort = asyncio.ensure_future(world.runtime.abort_task(id))
            await settle()
            assert isinstance((await world.task(id)).state, Completing)
            assert world.runtime.blocked(id) is None
            wait = asyncio.ensure_future(world.runtime.wait(id))
            await settle()
            gate.set()
            assert await wait == Orphaned("parked")
            await abort

    async def test_T47_T68_a_marked_task_needs_nothing_it_waited_for(self, world: World) -> None:
        gate = asyncio.Event()

        class Handles(Hang, kind="t.handles"):
            async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
                await gate.wait()
                return await super().on_abort(run)

        class Waiter(Task[int, None], kind="t.waiter"):
            async def start(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    if run.input < 0:
                        return tx.wait([-run.input], self.end, None)
                    tx.create_task(Handles, "below")
                    return tx.wait([run.input], self.end, None)

            async def end(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Waiter, Handles, Hang):
            world.registry.remove("t.hang")
            blocked = await world.create(Hang, "x")
            marked = await world.create(Waiter, blocked)
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_task(marked))
            await settle()
            assert await world.status(marked) == "waiting"
            wait = asyncio.ensure_future(world.runtime.wait(marked))
            await settle()
            assert not wait.done()
            gate.set()
            assert await wait == Aborted("aborted")
            await abort

    async def test_T43_retry_leaves_what_is_not_parked(self, world: World) -> None:
        class Stuck(Task[None, None], kind="t.stuck"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                await asyncio.Event().wait()
                raise AssertionError

        async with world.open(Stuck, restart_limit=3):
            id = await world.create(Stuck)
            await settle()
            await world.crash()
        async with world.open(Stuck, restart_limit=3):
            await settle()
            await world.crash()
        async with world.open(Stuck, restart_limit=3, resume=False):
            restarts = (await world.task(id)).restarts
            assert restarts == 1
            await world.runtime.retry_task(id)
            assert (await world.task(id)).restarts == restarts
