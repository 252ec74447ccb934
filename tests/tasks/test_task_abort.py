"""Aborting tasks and conversations, and code that ignores it (rules T71-T83, T86-T88, T91)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from msgspec import structs
from task_world import ROOT, World, settle, until

from perdure.kernel.errors import NotFound, SessionClosed
from perdure.kernel.records import Aborted, Completed, Failed, Faulted, Orphaned, Outcome, Running, TaskRecord
from perdure.kernel.transaction import Transaction
from perdure.tasks import InvalidMove, Next, NotStopped, OwnerEnded, Run, RunEnded, Task


class Hang(Task[str, str], kind="t.hang"):
    """Runs until it is stopped; without an abort handler."""

    log: list[str]

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        self.log.append(f"{run.input} runs")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append(f"{run.input} stopped")
            raise
        return Next("")


class Handled(Hang, kind="t.handled"):
    """With one, that waits for a gate if it has one."""

    gates: dict[str, asyncio.Event]

    async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
        self.log.append(f"{run.input} handles {run.restarts}")
        if run.input in self.gates:
            await self.gates[run.input].wait()
        async with run.commit() as tx:
            tx.append_record("app.compensated")
            return tx.abort(f"{run.input} compensated")


@pytest.fixture(autouse=True)
def log() -> list[str]:
    Hang.log = []
    Handled.gates = {}
    return Hang.log


def record_of(world: World, name: str) -> TaskRecord:
    (found,) = [t for t in world.storage._contents.tasks.values() if t.input == name]
    return found


def outcome_of(world: World, name: str) -> Outcome | None:
    return record_of(world, name).outcome


class TestOneTask:
    async def test_T71_T72_marked_stopped_then_handled(self, world: World, log) -> None:
        async with world.open(Handled):
            id = await world.create(Handled, "a")
            await settle()
            await world.runtime.abort_task(id, reason="too slow")
            assert log == ["a runs", "a stopped", "a handles 0"]
            assert await world.outcome(id) == Aborted("a compensated")
            record = await world.task(id)
            assert (record.abort_requested, record.abort_reason) == (True, "too slow")
            assert len(await world.session.entries(ROOT)) == 1

    async def test_T72_without_a_handler_it_is_aborted_with_the_reason(self, world: World, log) -> None:
        async with world.open(Hang):
            id = await world.create(Hang, "a")
            await settle()
            await world.runtime.abort_task(id, reason="too slow")
            assert await world.outcome(id) == Aborted("too slow")
            assert log == ["a runs", "a stopped"]

    @pytest.mark.parametrize("handled", [True, False])
    async def test_T72_waiting_sleeping_and_pending_tasks(self, world: World, log, handled: bool) -> None:
        class Still(Handled, kind="t.still"):
            async def start(self, run: Run[str, str, None]) -> Next[str]:
                async with run.commit() as tx:
                    if run.input == "waits":
                        return tx.wait_signal("never", self.start, None)
                    return tx.sleep(10**15, self.start, None)

        class StillPlain(Hang, kind="t.still-plain"):
            async def start(self, run: Run[str, str, None]) -> Next[str]:
                async with run.commit() as tx:
                    if run.input == "waits":
                        return tx.wait_signal("never", self.start, None)
                    return tx.sleep(10**15, self.start, None)

        kind = Still if handled else StillPlain
        async with world.open(kind):
            ids = [await world.create(kind, name) for name in ("waits", "sleeps")]
            await settle()
        async with world.open(kind, resume=False):
            ids.append(await world.create(kind, "pending"))
            for id in ids:
                seq = world.session.seq
                await world.runtime.abort_task(id)
                assert isinstance(await world.outcome(id), Aborted)
                assert world.session.seq == seq + (2 if handled else 1)
        assert len(log) == (3 if handled else 0)

    async def test_T81_any_task_may_be_named_ended_ones_do_nothing(self, world: World) -> None:
        async with world.open(Hang):
            id = await world.create(Hang, "a", background=True)
            await settle()
            await world.runtime.abort_task(id)
            seq = world.session.seq
            await world.runtime.abort_task(id)
            assert world.session.seq == seq
            with pytest.raises(NotFound):
                await world.runtime.abort_task(99)

    async def test_T72_what_a_stopped_run_writes_is_refused(self, world: World) -> None:
        refused: list[str] = []

        class Stubborn(Task[None, str], kind="t.stubborn"):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                try:
                    async with run.commit() as tx:
                        return tx.complete("done all the same")
                except Exception as error:
                    refused.append(type(error).__name__)
                    raise
                return Next("")

        async with world.open(Stubborn):
            id = await world.create(Stubborn)
            await settle()
            await world.runtime.abort_task(id)
            assert await world.outcome(id) == Aborted("aborted")
            assert len(refused) == 1
            assert world.reported("task_faulted") == []

    async def test_T71_a_run_whose_mark_is_staged_commits_nothing_more(self, world: World) -> None:
        """The mark and the run's commit race; whichever is first on the line decides."""
        go = asyncio.Event()
        errors: list[BaseException] = []

        class Racer(Task[None, str], kind="t.racer"):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                await go.wait()
                try:
                    async with run.commit() as tx:
                        return tx.complete("first")
                except RunEnded as error:
                    errors.append(error)
                    raise

        async with world.open(Racer):
            first, second = await world.create(Racer), await world.create(Racer)
            await settle()
            async with world.session.commit():
                go.set()  # both runs queue for the line now, before the aborts
                await settle()
                aborts = [asyncio.ensure_future(world.runtime.abort_task(id)) for id in (first, second)]
                await settle()
            await asyncio.gather(*aborts)
            assert {type(await world.outcome(id)) for id in (first, second)} == {Completed}
        go.clear()
        async with world.open(Racer):
            third = await world.create(Racer)
            await settle()
            async with world.session.commit():
                abort = asyncio.ensure_future(world.runtime.abort_task(third))
                await settle()
                go.set()
                await settle()
            await abort
            assert await world.outcome(third) == Aborted("aborted")
            assert len(errors) <= 1

    async def test_T57_aborting_a_held_outcome_ends_what_is_below(self, world: World, log) -> None:
        class Holder(Task[None, str], kind="t.holder"):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                async with run.commit() as tx:
                    tx.create_task(Handled, "below")
                    return tx.complete("held")

        async with world.open(Holder, Handled):
            id = await world.create(Holder)
            await settle()
            assert await world.status(id) == "completing"
            await world.runtime.abort_task(id)
            outcome = await world.outcome(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == "held"
            assert (await world.task(id)).abort_requested
            assert outcome_of(world, "below") == Aborted("below compensated")

    async def test_T81_a_task_may_abort_its_own_conversation(self, world: World) -> None:
        class Suicide(Task[None, str], kind="t.suicide"):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                await world.runtime.abort_conversation(ROOT)
                return Next("never comes back")

        async with world.open(Suicide):
            id = await world.create(Suicide)
            assert await world.runtime.wait(id) == Aborted("aborted")


class TestHandlers:
    async def test_T73_nested_foreground_abort_settles_bottom_up(self, world: World, log) -> None:
        seen: dict[str, list[str]] = {}

        class Level(Hang, kind="t.level"):
            async def start(self, run: Run[str, str, None]) -> Next[str]:
                depth = int(run.input)
                async with run.commit() as tx:
                    if depth == 3:
                        return tx.wait_signal("never", self.then, None)
                    room = tx.create_conversation(owner=run.id)
                    child = tx.create_task(Level, str(depth + 1), owner=None, conversation=room.id)
                    return tx.wait([child.id], self.then, None)

            async def then(self, run: Run[str, str, None]) -> Next[str]: ...

            async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
                seen[run.input] = [str(outcome) for outcome in run.results.values()]
                async with run.commit() as tx:
                    return tx.abort(f"level {run.input}")

        async with world.open(Level):
            await world.create(Level, "0")
            await until(lambda: len(world.session.live.settled) == 4)
            await settle()
            await world.runtime.abort_conversation(ROOT)
            assert list(seen) == ["3", "2", "1", "0"]
            assert seen["0"] == [str(Aborted("level 1"))], "a handler sees its children's final outcomes"
            assert world.session.live.settled == {}

    async def test_T72_the_owners_handler_waits_for_slow_children(self, world: World, log) -> None:
        Handled.gates["child"] = asyncio.Event()
        async with world.open(Handled):
            owner = await world.create(Handled, "owner")
            await world.create(Handled, "child", owner=owner)
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_task(owner))
            await settle()
            assert log[-1] == "child handles 0"
            assert not any(line.startswith("owner handles") for line in log)
            Handled.gates["child"].set()
            await abort
            assert log[-1] == "owner handles 0"

    async def test_T74_T75_a_handler_runs_again_after_a_crash_and_is_faulted_at_the_limit(
        self, world: World, log
    ) -> None:
        Handled.gates["a"] = asyncio.Event()
        async with world.open(Handled):
            id = await world.create(Handled, "a")
            for _ in range(3):  # what came before the mark counts for itself
                await settle()
                await world.crash()
                await world.start(Handled)
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_task(id))
            await settle()
            await world.crash()
            with pytest.raises(Exception, match="crash"):
                await abort
        for count in range(1, 5):
            async with world.open(Handled):
                await until(lambda count=count: log[-1] == f"a handles {count}")
                await world.crash()
        async with world.open(Handled):
            await world.runtime.idle()
            outcome = await world.outcome(id)
            assert isinstance(outcome, Faulted)
            assert outcome.error.code == "restart_limit"
            assert log.count("a handles 4") == 1

    async def test_T74_a_close_interrupts_a_handler_and_counts_nothing(self, world: World, log) -> None:
        Handled.gates["a"] = asyncio.Event()
        async with world.open(Handled):
            id = await world.create(Handled, "a")
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_task(id))
            await settle()
        with pytest.raises(SessionClosed):
            await abort
        Handled.gates.clear()
        async with world.open(Handled, resume=False):
            await settle()
            assert await world.status(id) == "pending"
            await world.runtime.idle()
            assert log[-1] == "a handles 0"
            assert isinstance(await world.outcome(id), Aborted)

    async def test_T83_what_a_handler_may_not_do(self, world: World) -> None:
        errors: list[Exception] = []

        class Greedy(Hang, kind="t.greedy"):
            async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
                moves: list[Any] = [
                    lambda tx: tx.create_task(Hang, "child"),
                    lambda tx: tx.create_conversation(owner=run.id),
                    lambda tx: tx.wait([], self.start, None),
                    lambda tx: tx.wait_signal("x", self.start, None),
                    lambda tx: tx.sleep(5, self.start, None),
                    lambda tx: tx.go(self.start, None),
                ]
                for move in moves:
                    try:
                        async with run.commit() as tx:
                            move(tx)
                    except Exception as error:
                        errors.append(error)
                assert await run.memo("compensated", True) is True
                async with run.commit() as tx:
                    tx.append_record("app.inline")
                async with run.commit() as tx:
                    return tx.complete("undone in time")

        async with world.open(Greedy, Hang):
            id = await world.create(Greedy, "a")
            await settle()
            await world.runtime.abort_task(id)
            outcome = await world.outcome(id)
            assert isinstance(outcome, Completed), "the handler decides the outcome"
            assert [type(e) for e in errors] == [OwnerEnded, OwnerEnded] + [InvalidMove] * 4
            assert len(await world.session.entries(ROOT)) == 1

    async def test_T72_a_handler_may_fail_or_fault(self, world: World) -> None:
        class Bad(Hang, kind="t.bad"):
            async def on_abort(self, run: Run[str, str, object]) -> Next[str]:
                if run.input == "raises":
                    raise RuntimeError("cannot")
                if run.input == "fails":
                    async with run.commit() as tx:
                        return tx.fail("cannot", "undo")
                return Next("no progress")

        async with world.open(Bad):
            for name, kind in (("raises", Faulted), ("fails", Failed), ("nothing", Faulted)):
                id = await world.create(Bad, name)
                await settle()
                await world.runtime.abort_task(id)
                assert type(await world.outcome(id)) is kind


class TestScopes:
    async def test_T78_T79_the_foreground_conversation(self, world: World, log) -> None:
        """Its ordinary work is aborted, and what stands behind background is not (T70)."""
        async with world.open(Hang, Handled):
            for name in ("one", "two"):
                await world.create(Handled, name)
            background = await world.create(Hang, "background", background=True)
            room = await world.conversation(background)
            await world.create(Hang, "in its room", conversation=room)
            other = await world.create(Hang, "elsewhere", conversation=await world.conversation(None))
            await settle()
            withdrawn: list[int] = []

            async def withdraw(tx: Transaction) -> None:
                tx.append_record("app.withdrawn")
                withdrawn.append(ROOT)

            await world.runtime.abort_conversation(ROOT, before=withdraw)
            assert [outcome_of(world, n) for n in ("one", "two")] == [
                Aborted("one compensated"),
                Aborted("two compensated"),
            ]
            for name in ("background", "in its room", "elsewhere"):
                assert record_of(world, name).status == "running"
                assert not record_of(world, name).abort_requested
            assert withdrawn == [ROOT]
            entries = await world.session.entries(ROOT)
            assert [e.kind for e in entries] == ["app.withdrawn", "app.compensated", "app.compensated"]
            await world.runtime.abort_task(other)

    async def test_T80_the_background_scope(self, world: World, log) -> None:
        async with world.open(Hang, Handled):
            tool = await world.create(Handled, "tool")
            inner = await world.conversation(tool)
            await world.create(Hang, "anchor", conversation=inner, background=True)
            anchor = record_of(world, "anchor").id
            room = await world.conversation(anchor)
            await world.create(Handled, "deep", conversation=room)
            await world.create(Hang, "deeper background", conversation=room, background=True)
            await world.create(Hang, "elsewhere", conversation=await world.conversation(None))
            await settle()
            await world.runtime.abort_conversation(ROOT)
            assert record_of(world, "tool").status == "terminal"
            assert record_of(world, "anchor").status == "running"
            await world.runtime.abort_conversation(ROOT, background=True)
            for name in ("anchor", "deep", "deeper background"):
                assert isinstance(outcome_of(world, name), Aborted), "through an owner that has ended, too"
            assert record_of(world, "elsewhere").status == "running"

    async def test_T70_a_parents_abort_stops_at_a_background_task(self, world: World, log) -> None:
        async with world.open(Hang, Handled):
            parent = await world.create(Handled, "parent")
            room = await world.conversation(parent)
            await world.create(Handled, "child", conversation=room)
            await world.create(Hang, "background", conversation=room, background=True)
            await settle()
            await world.runtime.abort_task(parent)
            assert isinstance(outcome_of(world, "child"), Aborted)
            assert record_of(world, "background").status == "running"

    async def test_T78_an_unknown_conversation_and_an_empty_one(self, world: World) -> None:
        async with world.open(Hang):
            seq = world.session.seq
            await world.runtime.abort_conversation(ROOT)
            assert world.session.seq == seq
            with pytest.raises(NotFound):
                await world.runtime.abort_conversation(99)

    async def test_T79_it_does_not_wait_for_work_that_came_later(self, world: World) -> None:
        Handled.gates["slow"] = asyncio.Event()
        async with world.open(Hang, Handled):
            await world.create(Handled, "slow")
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_conversation(ROOT))
            await settle()
            await world.create(Hang, "later")
            Handled.gates["slow"].set()
            await abort
            assert record_of(world, "later").status == "running"

    async def test_T77_cancelling_an_abort_keeps_its_marks(self, world: World, log) -> None:
        Handled.gates["a"] = asyncio.Event()
        async with world.open(Handled):
            id = await world.create(Handled, "a")
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_task(id))
            await settle()
            abort.cancel()
            await settle()
            Handled.gates["a"].set()
            assert await world.runtime.wait(id) == Aborted("a compensated")


class TestOrder:
    async def test_T39_an_abort_lets_only_handlers_run(self, world: World, log) -> None:
        async with world.open(Handled):
            id, other = await world.create(Handled, "a"), await world.create(Handled, "b")
            await settle()
        log.clear()
        async with world.open(Handled, resume=False):
            await world.runtime.abort_task(id)
            new = await world.create(Handled, "new")
            await settle()
            assert log == ["a handles 0"]
            assert await world.status(other) == "pending"
            assert await world.status(new) == "pending"
            world.runtime.resume()
            await settle()
            assert log == ["a handles 0", "b runs", "new runs"]

    async def test_T76_owed_marks_are_derived_at_open(self, world: World, log) -> None:
        async with world.open(Handled):
            owner = await world.create(Handled, "owner")
            child = await world.create(Handled, "child", owner=owner)
            await world.create(Handled, "grandchild", owner=child)
            await world.create(Handled, "background", background=True)
            await settle()
            await world.crash()
        # A store in which only the owner's own mark was committed.
        tasks = world.storage._contents.tasks
        tasks[owner] = structs.replace(tasks[owner], abort_requested=True, abort_reason="stop")
        async with world.open(Handled, resume=False):
            await settle()
            assert [record_of(world, n).abort_requested for n in ("owner", "child", "grandchild")] == [True] * 3
            assert not record_of(world, "background").abort_requested
            assert {t.status for t in tasks.values() if t.live} >= {"pending"}
            assert log.count("owner handles 0") == 0, "T37: nothing runs yet"
            world.runtime.resume()
            await until(lambda: not record_of(world, "owner").live)
            assert [line for line in log if "handles" in line] == [
                f"{name} handles 0" for name in ("grandchild", "child", "owner")
            ]

    async def test_T32_an_owed_mark_settles_nothing_for_lack_of_code_before_anything_may_run(
        self, world: World, log
    ) -> None:
        async with world.open(Handled):
            owner = await world.create(Handled, "owner")
            await world.create(Handled, "child", owner=owner)
            await settle()
            await world.crash()
        tasks = world.storage._contents.tasks
        tasks[owner] = structs.replace(tasks[owner], abort_requested=True, abort_reason="stop")
        async with world.open(resume=False):
            await settle()
            child = record_of(world, "child")
            assert (child.status, child.abort_requested) == ("pending", True)
            world.runtime.resume()
            await until(lambda: not record_of(world, "owner").live)
            assert outcome_of(world, "child") == Orphaned("missing_task")
            assert outcome_of(world, "owner") == Orphaned("missing_task")

    async def test_K62_a_task_aborted_before_its_creation_has_settled_never_runs(self, world: World, log) -> None:
        async with world.open(Hang):

            async def create() -> int:
                async with world.session.commit() as tx:
                    await settle()
                    return tx.create_task(Hang, "a", conversation=ROOT).id

            async def abort() -> None:
                async with world.session.commit() as tx:
                    (record,) = tx.live_tasks()
                    assert record.id not in world.session.live.settled
                    tx.put_task(structs.replace(record, abort_requested=True))

            await asyncio.gather(create(), abort())
            await world.runtime.idle()
            assert outcome_of(world, "a") == Aborted("aborted")
            assert log == []

    async def test_T35_a_crash_after_the_mark_loses_nothing(self, world: World, log) -> None:
        Handled.gates["child"] = asyncio.Event()
        async with world.open(Handled):
            owner = await world.create(Handled, "owner")
            await world.create(Handled, "child", owner=owner)
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_task(owner))
            await until(lambda: record_of(world, "owner").abort_requested)
            await world.crash()
            with pytest.raises(Exception, match="crash"):
                await abort
        Handled.gates.clear()
        async with world.open(Handled):
            await world.runtime.idle()
            assert [line for line in log if "handles" in line][-2:] in (
                ["child handles 0", "owner handles 0"],
                ["child handles 1", "owner handles 0"],
            )
            assert world.session.live.settled == {}


class Deaf(Task[str, str], kind="t.deaf"):
    """Ignores being cancelled, once, until its gate is open."""

    gate: asyncio.Event

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        await self.deep_inside()
        return Next("")

    async def deep_inside(self) -> None:
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await self.gate.wait()
                return


class TestDeafCode:
    @pytest.fixture(autouse=True)
    def gate(self) -> None:
        Deaf.gate = asyncio.Event()

    async def test_T86_T87_T88_reported_with_its_stack_and_the_marks_stay(self, world: World) -> None:
        async with world.open(Deaf, Hang):
            owner = await world.create(Hang, "owner")
            id = await world.create(Deaf, "a", owner=owner)
            await settle()
            aborts = [
                asyncio.ensure_future(world.runtime.abort_task(owner)),
                asyncio.ensure_future(world.runtime.abort_conversation(ROOT)),
            ]
            await world.clock.advance(9_999)
            assert not any(abort.done() for abort in aborts)
            await world.clock.advance(1)
            for abort in aborts:
                with pytest.raises(NotStopped) as raised:
                    await abort
                assert raised.value.names == (f"t.deaf.start (task {id})",)
            (report,) = world.reported("not_stopped")
            assert (report.task, report.kind) == (id, "t.deaf")
            assert "deep_inside" in report.message, "the stack goes to where the code stands"
            for task in (owner, id):
                assert (await world.task(task)).abort_requested
                assert await world.status(task) == "running", "T91: reported stopped only once it has"
            with pytest.raises(NotStopped):
                await world.runtime.abort_task(owner)
            Deaf.gate.set()
            await world.runtime.idle()
            assert await world.outcome(owner) == Aborted("aborted")

    async def test_T86_a_close_names_it_and_its_task_stays_running(self, world: World) -> None:
        async with world.open(Deaf, Hang):
            id, other = await world.create(Deaf, "a"), await world.create(Hang, "b")
            await settle()
            closing = asyncio.ensure_future(world.session.close())
            await world.clock.advance(10_000)
            report = await closing
            assert report.stragglers == (f"t.deaf.start (task {id})",)
            tasks = world.storage._contents.tasks
            assert isinstance(tasks[id].state, Running)
            assert tasks[other].status == "pending"
            Deaf.gate.set()
            await settle()
            assert isinstance(tasks[id].state, Running), "what it does afterwards is refused"
        await until(lambda: world.storage._info is None)

    async def test_T86_the_drain_bound_is_the_hosts(self, world: World) -> None:
        async with world.open(Deaf, drain_ms=50):
            id = await world.create(Deaf, "a")
            await settle()
            abort = asyncio.ensure_future(world.runtime.abort_task(id))
            await world.clock.advance(50)
            with pytest.raises(NotStopped):
                await abort
            Deaf.gate.set()
            await world.runtime.wait(id)

    async def test_code_that_stops_in_time_is_not_reported_and_leaves_no_timer(self, world: World) -> None:
        async with world.open(Hang):
            id = await world.create(Hang, "a")
            await settle()
            await world.runtime.abort_task(id)
            await settle()
            assert world.clock.sleeping == 0
        assert world.reports == []
