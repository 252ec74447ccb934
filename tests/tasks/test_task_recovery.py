"""Opening after a close and after a crash, restarts and parking, what runs when (rules T35-T49)."""

from __future__ import annotations

import asyncio

import pytest
from task_world import ROOT, START, World, settle, until

from perdure.kernel.errors import NotFound, SessionClosed, StorageError
from perdure.kernel.records import Completed, Faulted, Pending, Running, TaskRecord
from perdure.kernel.session import Session
from perdure.tasks import Next, Run, Task, TaskEnded, TaskRuntime, Wake, WorkBlocked
from perdure.tasks.inspect import GRAPH_MS
from perdure.tasks.recovery import recovered


class Gated(Task[str, int], kind="t.gated"):
    """Runs until the gate of its kind is open; counts its runs."""

    gate: asyncio.Event
    runs: list[str]

    async def start(self, run: Run[str, int, None]) -> Next[int]:
        self.runs.append(f"{run.input} start {run.restarts}")
        if run.input == "two phases":
            async with run.commit() as tx:
                return tx.go(self.second, 1)
        if run.input == "intent":
            async with run.commit() as tx:
                tx.append_record("app.intent")
        if run.input == "memo":
            await run.memo("intent", 1)
        await self.gate.wait()
        async with run.commit() as tx:
            return tx.complete(run.restarts)

    async def second(self, run: Run[str, int, int]) -> Next[int]:
        self.runs.append(f"{run.input} second {run.restarts}")
        await self.gate.wait()
        async with run.commit() as tx:
            return tx.complete(run.restarts)


@pytest.fixture(autouse=True)
def gate() -> None:
    Gated.gate = asyncio.Event()
    Gated.runs = []


async def crash_running(world: World, times: int, *, restart_limit: int = 5) -> None:
    """Open, let it run, crash; again and again."""
    for _ in range(times):
        async with world.open(Gated, restart_limit=restart_limit):
            before = len(Gated.runs)
            await until(lambda before=before: len(Gated.runs) > before)
            await settle()
            await world.crash()


class TestRestarts:
    @pytest.mark.parametrize(("what", "restarts"), [("plain", 0), ("intent", 1), ("memo", 1), ("two phases", 1)])
    async def test_T29_the_first_recovery_counts_nothing_before_a_checkpoint_or_intent(
        self, world: World, what: str, restarts: int
    ) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, what)
            await until(lambda: len(Gated.runs) >= (2 if what == "two phases" else 1))
            await settle()
            await world.crash()
        async with world.open(Gated, resume=False):
            record = await world.task(id)
            assert isinstance(record.state, Pending)
            assert record.restarts == restarts
            assert record.state.phase == ("second" if what == "two phases" else "start")

    async def test_T40_each_later_crash_counts_one(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
        await crash_running(world, 3)
        async with world.open(Gated):
            await until(lambda: len(Gated.runs) > 3)
            assert (await world.task(id)).restarts == 3
            Gated.gate.set()
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == 3

    async def test_T40_a_close_counts_nothing(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "intent")
            await until(lambda: len(Gated.runs) == 1)
            await settle()
        assert world.closed is not None
        assert world.closed.stragglers == ()
        assert world.storage._contents.tasks[id].status == "pending"
        for _ in range(10):
            async with world.open(Gated):
                before = len(Gated.runs)
                await until(lambda before=before: len(Gated.runs) > before)
                assert (await world.task(id)).restarts == 0

    async def test_T41_progress_clears_the_count(self, world: World) -> None:
        class Careful(Task[None, int], kind="t.careful"):
            async def start(self, run: Run[None, int, None]) -> Next[int]:
                Gated.runs.append("start")
                await Gated.gate.wait()
                async with run.commit() as tx:
                    return tx.go(self.second, 1)

            async def second(self, run: Run[None, int, int]) -> Next[int]:
                Gated.runs.append("second")
                await asyncio.Event().wait()
                return Next("")

        for _ in range(3):
            async with world.open(Careful):
                if not world.session.live.settled:
                    await world.create(Careful)
                await settle()
                await world.crash()
        Gated.gate.set()
        async with world.open(Careful):
            (record,) = world.session.live.settled.values()
            assert record.restarts == 2
            await until(lambda: "second" in Gated.runs)
            (record,) = world.session.live.settled.values()
            assert record.restarts == 0

    async def test_T42_T43_at_the_limit_it_is_parked_and_retry_runs_it_again(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
        await crash_running(world, 5)
        async with world.open(Gated):
            await settle()
            assert len(Gated.runs) == 1 + 5, "it runs no more"
            (live,) = await world.runtime.inspect()
            assert (live.blocked, live.status, live.restarts) == ("parked", "pending", 5)
            assert [r.task for r in world.reported("task_blocked")] == [id]
            with pytest.raises(WorkBlocked) as refused:
                await world.runtime.wait(id)
            assert (refused.value.task, refused.value.reason) == (id, "parked")
            assert world.runtime.blocked(id) == "parked"
            await world.runtime.retry_task(id)
            await until(lambda: len(Gated.runs) == 7)
            assert world.runtime.blocked(id) is None
            assert (await world.task(id)).restarts == 0
            await world.crash()
        await crash_running(world, 4)
        async with world.open(Gated):
            await settle()
            assert world.runtime.blocked(id) == "parked"

    async def test_T42_the_limit_is_the_hosts(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
        await crash_running(world, 1, restart_limit=1)
        async with world.open(Gated, restart_limit=1):
            await settle()
            assert world.runtime.blocked(id) == "parked"
        async with world.open(Gated, restart_limit=2):
            await until(lambda: len(Gated.runs) == 2)

    async def test_T42_one_poisonous_task_leaves_the_others_alone(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
        await crash_running(world, 5)
        Gated.gate.set()
        async with world.open(Gated):
            other = await world.create(Gated, "y")
            assert isinstance(await world.runtime.wait(other), Completed)
            assert world.runtime.blocked(id) == "parked"

    async def test_T43_retry_of_other_tasks(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
            await world.runtime.retry_task(id)  # running: nothing to do
            Gated.gate.set()
            await world.runtime.wait(id)
            with pytest.raises(TaskEnded):
                await world.runtime.retry_task(id)
            with pytest.raises(NotFound):
                await world.runtime.retry_task(999)

    async def test_a_run_cancelled_by_others_counts_like_a_crash(self, world: World) -> None:
        async with world.open(Gated, restart_limit=2):
            id = await world.create(Gated, "x")
            for count in (1, 2):
                await until(lambda count=count: len(Gated.runs) == count)
                (running,) = [task for task in asyncio.all_tasks() if task.get_name() == f"t.gated {id}"]
                running.cancel()
                await settle()
                assert (await world.task(id)).restarts == count
            assert world.runtime.blocked(id) == "parked"

    def test_T29_T40_pure(self) -> None:
        def record(fresh: bool, restarts: int) -> TaskRecord:
            state = Running(phase="p", on=(1,), fresh=fresh)
            return TaskRecord(
                id=2, conversation_id=1, kind="t", version=1, created_at=0, restarts=restarts, state=state
            )

        assert recovered(record(True, 0)).restarts == 0
        assert recovered(record(False, 2)).restarts == 3
        assert recovered(record(False, 2)).state == Pending(phase="p", on=(1,))


class TestOpening:
    async def test_T36_nothing_to_recover_commits_nothing(self, world: World) -> None:
        async with world.open(Gated):
            await world.create(Gated, "x")
            seq = world.session.seq
        async with world.open(Gated, resume=False):
            await settle()
            assert world.session.seq == seq + 1, "the close's one"
            assert await world.runtime.inspect()

    async def test_T36_recovery_is_one_commit_for_all(self, world: World) -> None:
        async with world.open(Gated):
            ids = [await world.create(Gated, "two phases") for _ in range(7)]
            await settle()
            await world.crash()
            seq = world.session.seq
        async with world.open(Gated, resume=False):
            assert world.session.seq == seq + 1
            assert {(await world.task(id)).restarts for id in ids} == {1}
            world.runtime.resume()
            await settle()
            assert world.session.seq == seq + 2, "and one commit sets all of them running"

    async def test_T36_recovery_is_bounded_by_pages(self, world: World, monkeypatch) -> None:
        monkeypatch.setattr("perdure.tasks.recovery.PAGE", 3)
        monkeypatch.setattr("perdure.tasks.runtime.PAGE", 2)
        async with world.open(Gated):
            ids = [await world.create(Gated, "two phases") for _ in range(7)]
            await settle()
            await world.crash()
            seq = world.session.seq
        async with world.open(Gated):
            assert world.session.seq == seq + 3
            await settle()
            assert {await world.status(id) for id in ids} == {"running"}
        assert {world.storage._contents.tasks[id].status for id in ids} == {"pending"}

    async def test_T37_T38_nothing_runs_until_asked(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
        Gated.runs.clear()
        async with world.open(Gated, resume=False):
            await world.runtime.inspect()
            await world.runtime.task_graph()
            world.runtime.wake()
            await world.session.tasks()
            new = await world.create(Gated, "new")
            await settle()
            assert Gated.runs == []
            assert await world.status(new) == "pending"
            waiting = asyncio.ensure_future(world.runtime.wait(id))
            await until(lambda: len(Gated.runs) == 2)
            Gated.gate.set()
            assert isinstance(await waiting, Completed)
            assert isinstance(await world.runtime.wait(new), Completed)

    async def test_T37_idle_asks_for_progress(self, world: World) -> None:
        Gated.gate.set()
        async with world.open(Gated, resume=False):
            id = await world.create(Gated, "x")
            await world.runtime.idle(ROOT)
            assert await world.status(id) == "terminal"

    async def test_T37_waiting_for_an_ended_task_starts_nothing(self, world: World) -> None:
        Gated.gate.set()
        async with world.open(Gated):
            done = await world.create(Gated, "x")
            await world.runtime.wait(done)
        async with world.open(Gated, resume=False):
            other = await world.create(Gated, "y")
            assert isinstance(await world.runtime.wait(done), Completed)
            await settle()
            assert await world.status(other) == "pending"

    async def test_T44_a_recovery_that_fails_fails_the_session(self, world: World, monkeypatch) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "two phases")
            await settle()
            await world.crash()
        commit = type(world.storage).commit

        def broken(*args: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(type(world.storage), "commit", broken)
        with pytest.raises(OSError, match="disk full"):
            await world.start(Gated)
        assert isinstance(world.session.failed, OSError)
        assert world.session._closed is not None
        await world.session._closed
        monkeypatch.setattr(type(world.storage), "commit", commit)
        async with world.open(Gated, resume=False):
            assert (await world.task(id)).restarts == 1, "T45: what it recovers from is still there"

    async def test_T44_a_derivation_that_refuses_recovery_fails_the_session(self, world: World) -> None:
        async with world.open(Gated):
            await world.create(Gated, "two phases")
            await settle()
            await world.crash()
        session = await Session.start(world.storage)

        def refuse(tx: object) -> None:
            raise ValueError("no")

        session.derive(refuse)
        with pytest.raises(ValueError):
            await TaskRuntime(session, world.registry).recover()
        assert isinstance(session.failed, ValueError)
        await session.close()

    async def test_a_read_only_store_can_be_looked_at_and_runs_nothing(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
            await settle()
            await world.crash()
        session = await Session.start(world.storage, read_only=True)
        runtime = TaskRuntime(session, world.registry)
        await runtime.recover()
        (live,) = await runtime.inspect()
        assert (live.id, live.status) == (id, "running")
        with pytest.raises(StorageError, match="reading only"):
            await runtime.wait(id)
        await session.close()

    async def test_waits_end_with_the_session_and_the_work_is_kept(self, world: World) -> None:
        async with world.open(Gated):
            id = await world.create(Gated, "x")
            waits = [asyncio.ensure_future(world.runtime.wait(id)), asyncio.ensure_future(world.runtime.idle())]
            await settle()
            runtime = world.runtime
        for wait in waits:
            with pytest.raises(SessionClosed):
                await wait
        with pytest.raises(SessionClosed):
            await runtime.wait(id)
        assert world.storage._contents.tasks[id].live


class TestWake:
    async def test_T49_active_or_the_earliest_or_nothing(self, world: World) -> None:
        class Nap(Task[int, None], kind="t.nap"):
            async def start(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    if run.input < 0:
                        return tx.wait_signal("never", self.after, None, deadline=None)
                    return tx.sleep(run.input, self.after, None)

            async def after(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Gated, Nap):
            assert world.runtime.wake() == Wake(False, None)
            await world.create(Nap, -1)
            await settle()
            assert world.runtime.wake() == Wake(False, None)
            await world.create(Nap, START + 500)
            await world.create(Nap, START + 300)
            await settle()
            assert world.runtime.wake() == Wake(False, START + 300)
            id = await world.create(Gated, "x")
            assert world.runtime.wake() == Wake(True, None)
            Gated.gate.set()
            await world.runtime.wait(id)
            assert world.runtime.wake() == Wake(False, START + 300)
        async with world.open(Gated, resume=False):
            assert world.runtime.wake() == Wake(False, START + 300)
            world.clock.now += 300
            assert world.runtime.wake() == Wake(True, None)

    async def test_T49_pending_work_is_active_and_blocked_work_is_not(self, world: World) -> None:
        async with world.open(Gated):
            await world.create(Gated, "x")
        async with world.open(Gated, resume=False):
            assert world.runtime.wake() == Wake(True, None)
        async with world.open(resume=False):
            assert world.runtime.wake() == Wake(False, None)


class TestGraph:
    async def test_H152_H269_live_and_recently_ended_tasks_with_their_edges(self, world: World) -> None:
        async with world.open(Gated):
            top = await world.create(Gated, "x")
            child = await world.create(Gated, "x", owner=top)
            room = await world.conversation(top)
            guest = await world.create(Gated, "x", conversation=room)
            nodes = {node.id: node for node in await world.runtime.task_graph()}
            assert {id: node.parent for id, node in nodes.items()} == {top: None, child: top, guest: top}
            assert {id: node.owner for id, node in nodes.items()} == {top: None, child: top, guest: None}
            assert {(node.status, node.phase) for node in nodes.values()} == {("running", "start")}
            assert all(node.outcome is None and node.started_at is not None for node in nodes.values())
            Gated.gate.set()
            await world.runtime.idle()
            done = await world.runtime.task_graph()
            assert [(node.id, node.status) for node in done] == [(id, "terminal") for id in sorted([top, child, guest])]
            assert all(isinstance(node.outcome, Completed) and node.ended_at is not None for node in done)

    async def test_H152_ended_ones_are_shown_for_an_hour_and_in_bounds(self, world: World, monkeypatch) -> None:
        Gated.gate.set()
        monkeypatch.setattr("perdure.tasks.inspect.GRAPH_ENDED", 3)
        async with world.open(Gated):
            ids = [await world.create(Gated, "x") for _ in range(5)]
            for id in ids:
                await world.runtime.wait(id)
            assert [node.id for node in await world.runtime.task_graph()] == ids[2:]
            await world.clock.advance(GRAPH_MS + 1)
            late = await world.create(Gated, "y")
            await world.runtime.wait(late)
            assert [node.id for node in await world.runtime.task_graph()] == [late]

    async def test_H152_ended_ones_of_before_the_opening_are_found(self, world: World, monkeypatch) -> None:
        Gated.gate.set()
        async with world.open(Gated):
            ids = [await world.create(Gated, "x") for _ in range(3)]
            for id in ids:
                await world.runtime.wait(id)
        async with world.open(resume=False):
            nodes = await world.runtime.task_graph()
            assert [(node.id, node.status) for node in nodes] == [(id, "terminal") for id in ids]
            monkeypatch.setattr("perdure.tasks.inspect.LOOK_BACK", world.session.next_id - ids[1])
            assert [node.id for node in await world.runtime.task_graph()] == ids[2:], "as far as it looks back"

    async def test_H153_T46_every_task_says_why_it_stands_still_and_what_to_do(self, world: World) -> None:
        """One without code, and who waits for it."""

        class Waits(Task[int, None], kind="t.waits"):
            async def start(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.wait([run.input], self.after, None)

            async def after(self, run: Run[int, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Gated, Waits):
            gated = await world.create(Gated, "x")
            waits = await world.create(Waits, gated)
            await settle()
        for resume in (False, True):
            async with world.open(Waits, resume=resume):
                await settle()
                live = {task.id: task for task in await world.runtime.inspect()}
                assert (live[gated].blocked, live[gated].remedy) == ("missing_task", "install a task of its kind")
                assert (live[gated].held_up_by, live[waits].held_up_by) == (None, gated)
                assert (live[waits].blocked, live[waits].waits_for) == (None, (gated,))
                nodes = {node.id: node for node in await world.runtime.task_graph()}
                assert (nodes[waits].held_up_by, nodes[gated].blocked) == (gated, "missing_task")
        async with world.open(Gated, Waits):
            await settle()
            assert not [task for task in await world.runtime.inspect() if task.blocked or task.held_up_by]


async def test_a_fault_after_a_crash_is_the_same_fault(world: World) -> None:
    """A phase that faults while its commit cannot be stored faults when it is run again."""

    class Bad(Task[None, None], kind="t.bad"):
        async def start(self, run: Run[None, None, None]) -> Next[None]:
            raise RuntimeError("bad")

    async with world.open(Bad):
        async with world.session.commit(conversation_id=ROOT) as tx:
            id = tx.create_task(Bad, None).id
        await world.crash()
    async with world.open(Bad):
        assert isinstance(await world.runtime.wait(id), Faulted)
