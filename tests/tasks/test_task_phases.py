"""Running phases: moves, faults, signals, memos, sleeping (rules T17-T28, K30, K62, K133)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from task_world import ROOT, START, World, settle, until

from perdure.kernel.errors import InvalidTransition, NotFound, NotJson, SessionFailed
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Completed, Failed, Faulted, Running, Sleeping, TaskError, Waiting
from perdure.tasks import InvalidMove, Next, Run, RunEnded, RunTransaction, Task, TaskEnded
from perdure.tasks.errors import TaskDefinitionError


class Count(Task[int, list[int]], kind="t.count"):
    """Goes through its phase as often as its input says."""

    async def start(self, run: Run[int, list[int], None]) -> Next[list[int]]:
        async with run.commit() as tx:
            return tx.go(self.step, [])

    async def step(self, run: Run[int, list[int], list[int]]) -> Next[list[int]]:
        async with run.commit() as tx:
            if len(run.checkpoint) == run.input:
                return tx.complete(run.checkpoint)
            return tx.go(self.step, [*run.checkpoint, len(run.checkpoint)])


class TestMoves:
    async def test_T18_phases_follow_each_other_to_an_outcome(self, world: World) -> None:
        async with world.open(Count):
            id = await world.create(Count, 3)
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == [0, 1, 2]
            record = await world.task(id)
            assert record.started_at == record.ended_at == START
            assert world.session.seq == 1 + 1 + 5, "a commit for the creation, and one a phase"

    async def test_T28_K62_created_running_and_called_once_its_commit_settled(self, world: World) -> None:
        seen: list[int] = []

        class Look(Task[None, None], kind="t.look"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                assert run.session.live.settled[run.id].state == Running(phase="start", fresh=True)
                seen.append(run.session.seq)
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Look):
            async with world.session.commit(conversation_id=ROOT) as tx:
                record = tx.create_task(Look, None)
                await settle()
                assert seen == [], "not before the commit"
            await world.runtime.wait(record.id)
            assert seen == [tx.seq]

    async def test_T20_the_next_state_commits_with_everything_else(self, world: World) -> None:
        class Parent(Task[None, int], kind="t.parent"):
            async def start(self, run: Run[None, int, None]) -> Next[int]:
                async with run.commit() as tx:
                    tx.append_record("app.note")
                    child = tx.create_task(Count, 0)
                    return tx.wait([child.id], self.after, child.id)

            async def after(self, run: Run[None, int, int]) -> Next[int]:
                child = run.results[run.checkpoint]
                assert isinstance(child, Completed)
                async with run.commit() as tx:
                    tx.append_record("app.note")
                    return tx.complete(run.checkpoint)

        async with world.open(Parent, Count):
            id = await world.create(Parent)
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert isinstance(outcome.result, int)
            child = await world.task(outcome.result)
            assert child.owner == id
            entries = await world.session.entries(ROOT)
            assert [e.by_task for e in entries] == [id, id]
            assert entries[0].seq + 2 + 1 <= entries[1].seq
            assert child.created_at == START

    async def test_T20_a_block_that_raises_writes_nothing_and_the_phase_may_try_again(self, world: World) -> None:
        class Twice(Task[None, str], kind="t.twice"):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                with pytest.raises(ValueError):
                    async with run.commit() as tx:
                        tx.append_record("app.note")
                        tx.complete("first")
                        raise ValueError
                async with run.commit() as tx:
                    return tx.complete("second")

        async with world.open(Twice):
            outcome = await world.runtime.wait(await world.create(Twice))
            assert isinstance(outcome, Completed)
            assert outcome.result == "second"
            assert await world.session.entries(ROOT) == []

    async def test_T13_a_task_fails_by_its_own_word(self, world: World) -> None:
        class Fail(Task[None, None], kind="t.fail"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.fail("too_late", "the shop is closed")

        async with world.open(Fail):
            outcome = await world.runtime.wait(await world.create(Fail))
            assert outcome == Failed(TaskError("too_late", "the shop is closed"))
            assert world.reports == []

    async def test_T2_what_does_not_fit_the_declared_types_is_refused(self, world: World) -> None:
        errors: list[BaseException] = []

        class Odd(Task[int, int], kind="t.odd"):
            async def start(self, run: Run[int, int, None]) -> Next[int]:
                moves: list[Any] = [
                    lambda tx: tx.complete("text"),
                    lambda tx: tx.go(self.later, "text"),
                    lambda tx: tx.go(Count().step, []),
                    lambda tx: tx.go(print, None),
                    lambda tx: tx.sleep(1.5, self.later, 1),
                    lambda tx: tx.sleep(True, self.later, 1),
                    lambda tx: tx.wait_signal("", self.later, 1),
                    lambda tx: tx.wait_signal("x", self.later, 1, deadline="soon"),
                    lambda tx: tx.fail(5, "x"),
                    lambda tx: tx.abort("no"),
                    lambda tx: tx.wait(range(2000), self.later, 1),
                ]
                for move in moves:
                    try:
                        async with run.commit() as tx:
                            move(tx)
                    except Exception as error:
                        errors.append(error)
                async with run.commit() as tx:
                    return tx.complete(0)

            async def later(self, run: Run[int, int, int]) -> Next[int]: ...

        async with world.open(Odd):
            await world.runtime.wait(await world.create(Odd, 1))
            kinds = [NotJson, NotJson, TaskDefinitionError, TaskDefinitionError]
            kinds += [InvalidMove, InvalidMove, InvalidTransition, InvalidMove, InvalidMove, InvalidMove, InvalidMove]
            assert [type(error) for error in errors] == kinds
            with pytest.raises(NotJson):
                await world.create(Odd, "text")

    async def test_one_block_makes_one_move(self, world: World) -> None:
        class Greedy(Task[None, str], kind="t.greedy"):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                async with run.commit() as tx:
                    first = tx.complete("first")
                    with pytest.raises(InvalidMove, match="one move"):
                        tx.complete("second")
                    return first

        async with world.open(Greedy):
            outcome = await world.runtime.wait(await world.create(Greedy))
            assert isinstance(outcome, Completed)
            assert outcome.result == "first"


class TestFaults:
    @pytest.fixture
    def faulty(self) -> type[Task[str, None]]:
        class Faulty(Task[str, None], kind="t.faulty"):
            async def start(self, run: Run[str, None, None]) -> Next[None]:
                if run.input == "raise":
                    raise RuntimeError("secret text")
                if run.input == "cancelled":
                    future = asyncio.get_running_loop().create_future()
                    future.cancel()
                    await future
                if run.input == "commit":
                    async with run.commit() as tx:
                        tx.append_record("app.note")
                if run.input == "block":
                    async with run.commit() as tx:
                        raise KeyError("in the block")
                if run.input == "same":
                    async with run.commit() as tx:
                        return tx.go(self.start, None)
                if run.input == "rolled back":
                    moved: Next[None] = Next("")
                    try:
                        async with run.commit() as tx:
                            moved = tx.complete(None)
                            raise ValueError
                    except ValueError:
                        return moved
                return None  # pyright: ignore

        return Faulty

    @pytest.mark.parametrize(
        ("what", "code", "text"),
        [
            ("raise", "exception", "RuntimeError: secret text"),
            ("cancelled", "exception", "CancelledError: "),
            ("commit", "no_progress", "t.faulty.start returned without having committed what comes next"),
            ("block", "exception", "KeyError: 'in the block'"),
            ("same", "no_progress", "goes to start with the checkpoint it has already"),
            ("rolled back", "no_progress", "without having committed"),
            ("nothing", "no_progress", "without having committed"),
        ],
    )
    async def test_T19_raising_or_no_progress_faults(
        self, world: World, faulty: type[Task[str, None]], what: str, code: str, text: str
    ) -> None:
        async with world.open(faulty):
            id = await world.create(faulty, what)
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Faulted)
            assert outcome.error.code == code
            assert text in outcome.error.message
            (report,) = world.reported("task_faulted")
            assert (report.task, report.kind, report.conversation) == (id, "t.faulty", ROOT)
            assert report.error is not None
            assert "secret" not in report.message, "K136: the record may hold the text, the log does not"

    async def test_T19_a_long_error_is_cut_and_made_storable(self, world: World) -> None:
        class Long(Task[None, None], kind="t.long"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                raise RuntimeError("\ud800" + "x" * 5000)

        async with world.open(Long):
            outcome = await world.runtime.wait(await world.create(Long))
            assert isinstance(outcome, Faulted)
            assert len(outcome.error.message) == 500
            assert outcome.error.message.startswith("RuntimeError: ?xx")

    async def test_K133_a_fault_is_the_tasks_alone(self, world: World, faulty: type[Task[str, None]]) -> None:
        async with world.open(faulty, Count):
            ids = [await world.create(faulty, "raise"), await world.create(Count, 1)]
            outcomes = [await world.runtime.wait(id) for id in ids]
            assert [type(o) for o in outcomes] == [Faulted, Completed]

    async def test_raising_after_the_move_leaves_the_move(self, world: World) -> None:
        class Late(Task[None, str], kind="t.late"):
            async def start(self, run: Run[None, str, None]) -> Next[str]:
                async with run.commit() as tx:
                    tx.go(self.second, 1)
                raise RuntimeError("too late")

            async def second(self, run: Run[None, str, int]) -> Next[str]:
                async with run.commit() as tx:
                    tx.complete("done")
                raise RuntimeError("too late again")

        async with world.open(Late):
            outcome = await world.runtime.wait(await world.create(Late))
            assert isinstance(outcome, Completed)
            await until(lambda: len(world.reported("task_error")) == 2)
            assert not world.reported("task_faulted")

    async def test_K128_a_failing_store_is_no_fault(self, world: World) -> None:
        class Write(Task[None, None], kind="t.write"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                await run.memo("begun", True)
                world.session.fail(OSError("disk gone"))
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Write):
            with pytest.raises(SessionFailed, match="disk gone"):
                await world.runtime.wait(await world.create(Write))
        assert not world.reported("task_faulted")
        assert [t.status for t in world.storage._contents.tasks.values()] == ["running"]


class TestHandles:
    async def test_a_run_is_dead_once_its_phase_has_ended(self, world: World) -> None:
        kept: list[Run[None, None, Any]] = []
        refused: list[str] = []

        class Keep(Task[None, None], kind="t.keep"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                kept.append(run)
                async with run.commit() as tx:
                    tx.go(self.second, 1)
                try:
                    async with run.commit() as tx:
                        tx.append_record("app.note")
                except RunEnded as error:
                    refused.append(str(error))
                return Next("")

            async def second(self, run: Run[None, None, int]) -> Next[None]:
                with pytest.raises(RunEnded):
                    kept[0].commit()
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Keep):
            await world.runtime.wait(await world.create(Keep))
            assert len(refused) == 1
            with pytest.raises(RunEnded, match="has ended"):
                kept[0].commit()
            with pytest.raises(RunEnded):
                await kept[0].memo("x", 1)
            with pytest.raises(RunEnded):
                _ = kept[0].session
            await until(lambda: kept[0].context.cancelled is not None)
            assert await world.session.entries(ROOT) == []

    async def test_K30_the_idempotency_key_rests_on_a_nonce_and_is_the_same_after_a_crash(self, world: World) -> None:
        keys: list[str] = []
        gate = asyncio.Event()

        class Key(Task[None, None], kind="t.key"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                keys.append(run.idempotency_key)
                await gate.wait()
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Key):
            id, other = await world.create(Key), await world.create(Key)
            await until(lambda: len(keys) == 2)
            await world.crash()
        gate.set()
        async with world.open(Key):
            await world.runtime.wait(id)
            await world.runtime.wait(other)
        assert sorted(keys[:2]) == sorted(keys[2:])
        assert len(set(keys)) == 2
        nonce = (await _stored(world, id)).nonce
        assert len(nonce) == 32
        assert any(key.endswith(nonce) for key in keys)

    async def test_phases_do_not_inherit_the_variables_of_whoever_committed(self, world: World) -> None:
        from contextvars import ContextVar

        variable: ContextVar[str] = ContextVar("variable", default="default")
        seen: list[str] = []

        class See(Task[None, None], kind="t.see"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                seen.append(variable.get())
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(See):
            variable.set("the committer's")
            await world.runtime.wait(await world.create(See))
        assert seen == ["default"]


async def _stored(world: World, id: int) -> Any:
    return world.storage._contents.tasks[id]


class Ask(Task[int | None, JsonValue], kind="t.ask"):
    """Waits for a signal; its input is a deadline."""

    async def start(self, run: Run[int | None, JsonValue, None]) -> Next[JsonValue]:
        async with run.commit() as tx:
            return tx.wait_signal("answer", self.answered, None, deadline=run.input)

    async def answered(self, run: Run[int | None, JsonValue, None]) -> Next[JsonValue]:
        async with run.commit() as tx:
            return tx.complete({"signal": run.signal, "timed_out": run.timed_out})


class TestSignals:
    async def test_T23_a_signal_ends_the_wait_for_it(self, world: World) -> None:
        async with world.open(Ask):
            id = await world.create(Ask)
            await settle()
            assert await world.status(id) == "waiting"
            await world.runtime.send_signal(id, "other", 1)
            await settle()
            assert await world.status(id) == "waiting"
            seq = world.session.seq
            assert await world.runtime.send_signal(id, "answer", {"ok": True})
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == {"signal": {"ok": True}, "timed_out": False}
            assert world.session.seq == seq + 2, "the signal's commit sets the waiter running"

    async def test_T24_a_signal_before_the_wait_counts_and_the_first_wins(self, world: World) -> None:
        gate = asyncio.Event()

        class Late(Task[None, JsonValue], kind="t.late"):
            async def start(self, run: Run[None, JsonValue, None]) -> Next[JsonValue]:
                await gate.wait()
                async with run.commit() as tx:
                    return tx.wait_signal("answer", self.answered, None)

            async def answered(self, run: Run[None, JsonValue, None]) -> Next[JsonValue]:
                async with run.commit() as tx:
                    return tx.complete(run.signal)

        async with world.open(Late):
            id = await world.create(Late)
            assert await world.runtime.send_signal(id, "answer", "first") is True
            assert await world.runtime.send_signal(id, "answer", "second") is False
            gate.set()
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == "first"

    async def test_T23_signals_survive_a_reopen_and_start_nothing(self, world: World) -> None:
        async with world.open(Ask):
            id = await world.create(Ask)
            await until(lambda: isinstance(world.session.live.settled[id].state, Waiting))
            await world.crash()
        async with world.open(Ask, resume=False):
            await world.runtime.send_signal(id, "answer", [1])
            await settle()
            assert await world.status(id) == "pending"
            await world.crash()
        async with world.open(Ask):
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == {"signal": [1], "timed_out": False}

    async def test_T8_a_deadline_ends_the_wait(self, world: World) -> None:
        async with world.open(Ask):
            id = await world.create(Ask, START + 5_000)
            await world.clock.advance(4_999)
            assert await world.status(id) == "waiting"
            await world.clock.advance(1)
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == {"signal": None, "timed_out": True}

    async def test_T8_a_timed_out_wait_stays_so_after_a_crash_even_if_the_signal_comes(self, world: World) -> None:
        gate = asyncio.Event()

        class Slow(Ask, kind="t.slow"):
            async def answered(self, run: Run[int | None, JsonValue, None]) -> Next[JsonValue]:
                await gate.wait()
                return await super().answered(run)

        async with world.open(Slow):
            id = await world.create(Slow, START + 10)
            await world.clock.advance(10)
            assert await world.status(id) == "running"
            await world.crash()
        gate.set()
        async with world.open(Slow, resume=False):
            await world.runtime.send_signal(id, "answer", 1)
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == {"signal": None, "timed_out": True}

    async def test_T23_what_cannot_be_sent_is_refused(self, world: World) -> None:
        async with world.open(Ask, Count):
            done = await world.create(Count, 0)
            await world.runtime.wait(done)
            id = await world.create(Ask)
            with pytest.raises(TaskEnded):
                await world.runtime.send_signal(done, "answer", 1)
            with pytest.raises(NotFound):
                await world.runtime.send_signal(999, "answer", 1)
            with pytest.raises(NotJson):
                await world.runtime.send_signal(id, "answer", {1, 2})  # pyright: ignore[reportArgumentType]
            with pytest.raises(InvalidTransition):
                await world.runtime.send_signal(id, "", 1)

    async def test_T23_a_signal_is_sent_with_other_writes_or_not_at_all(self, world: World) -> None:
        async with world.open(Ask):
            id = await world.create(Ask)
            with pytest.raises(ValueError):
                async with world.session.commit() as tx:
                    await world.runtime.put_signal(tx, id, "answer", 1)
                    raise ValueError
            await settle()
            assert await world.status(id) == "waiting"
            async with world.session.commit(conversation_id=ROOT) as tx:
                await world.runtime.put_signal(tx, id, "answer", 2)
                tx.append_record("app.decision")
            await world.runtime.wait(id)
            (entry,) = await world.session.entries(ROOT)
            assert entry.seq == tx.seq


class TestMemos:
    async def test_T26_the_first_writer_of_a_name_wins_across_crashes(self, world: World) -> None:
        seen: list[JsonValue] = []
        gate = asyncio.Event()

        class Remember(Task[None, JsonValue], kind="t.remember"):
            async def start(self, run: Run[None, JsonValue, None]) -> Next[JsonValue]:
                seen.append(await run.memo("draw", {"n": len(seen)}))
                seen.append(await run.memo("draw", "never"))
                await gate.wait()
                async with run.commit() as tx:
                    assert tx.memo("draw", 5) == {"n": 0}
                    assert tx.memo("inside", 6) == 6
                    assert tx.memo("inside", 7) == 6
                    return tx.complete(run.record.memos["draw"] if run.record.memos else None)

        async with world.open(Remember):
            id = await world.create(Remember)
            await until(lambda: len(seen) == 2)
            seq = world.session.seq
            await world.crash()
        async with world.open(Remember):
            await until(lambda: len(seen) == 4)
            gate.set()
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == {"n": 0}
            assert (await world.task(id)).memos == {"draw": {"n": 0}, "inside": 6}
        assert seen == [{"n": 0}] * 4
        assert seq == 3, "a memo that is there costs no commit"

    async def test_T26_memos_are_bounded_and_checked(self, world: World, monkeypatch) -> None:
        monkeypatch.setattr("perdure.tasks.values.MAX_NAMED", 2)
        errors: list[BaseException] = []

        class Many(Task[None, None], kind="t.many"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                for name, value in (("a", 1), ("b", {2}), ("b", 2), ("", 3), ("c", 3)):
                    try:
                        await run.memo(name, value)  # pyright: ignore
                    except Exception as error:
                        errors.append(error)
                async with run.commit() as tx:
                    return tx.complete(None)

        async with world.open(Many):
            id = await world.create(Many)
            await world.runtime.wait(id)
            assert (await world.task(id)).memos == {"a": 1, "b": 2}
        assert [type(e) for e in errors] == [NotJson, InvalidTransition, InvalidTransition]


class Sleeper(Task[int, int], kind="t.sleeper"):
    async def start(self, run: Run[int, int, None]) -> Next[int]:
        async with run.commit() as tx:
            return tx.sleep(run.input, self.woken, "slept")

    async def woken(self, run: Run[int, int, str]) -> Next[int]:
        assert run.checkpoint == "slept"
        async with run.commit() as tx:
            return tx.complete(tx.at)


class TestSleep:
    async def test_T21_sleeping_is_a_state_that_wakes_on_the_clock(self, world: World) -> None:
        async with world.open(Sleeper):
            id = await world.create(Sleeper, START + 3_600_000)
            await settle()
            until_then = Sleeping(phase="woken", raw_checkpoint=msgspec.Raw(b'"slept"'), until=START + 3_600_000)
            assert (await world.task(id)).state == until_then
            await world.clock.advance(3_599_999)
            assert await world.status(id) == "sleeping"
            await world.clock.advance(1)
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == START + 3_600_000

    async def test_T21_those_due_together_wake_in_one_commit(self, world: World) -> None:
        async with world.open(Sleeper):
            ids = [await world.create(Sleeper, START + 1000) for _ in range(5)]
            await settle()
            seq = world.session.seq
            await world.clock.advance(1000)
            for id in ids:
                await world.runtime.wait(id)
            assert world.session.seq == seq + 1 + 5

    async def test_T21_an_earlier_one_is_not_missed_behind_a_later(self, world: World) -> None:
        async with world.open(Sleeper):
            late = await world.create(Sleeper, START + 50_000)
            await settle()
            early = await world.create(Sleeper, START + 10)
            await settle()
            await world.clock.advance(10)
            assert await world.status(early) == "terminal"
            assert await world.status(late) == "sleeping"
            assert world.runtime.wake().at == START + 50_000

    async def test_T21_sleeping_goes_over_a_reopen_and_one_that_is_past_due_wakes_at_once(self, world: World) -> None:
        async with world.open(Sleeper):
            first, second = await world.create(Sleeper, START + 1000), await world.create(Sleeper, START + 9000)
            await settle()
        world.clock.now += 5000
        async with world.open(Sleeper, resume=False):
            await settle()
            assert await world.status(first) == "sleeping", "T37: nothing runs yet"
            world.runtime.resume()
            await settle()
            assert await world.status(first) == "terminal"
            assert await world.status(second) == "sleeping"
            await world.clock.advance(4000)
            assert await world.status(second) == "terminal"

    async def test_T22_a_clock_that_steps_back_delays_and_loses_nothing(self, world: World) -> None:
        async with world.open(Sleeper):
            id = await world.create(Sleeper, START + 30_000)
            await settle()
            world.clock.now -= 100_000
            await world.clock.advance(30_000)
            assert await world.status(id) == "sleeping"
            await world.clock.advance(99_999)
            assert await world.status(id) == "sleeping"
            await world.clock.advance(1)
            assert await world.status(id) == "terminal"

    async def test_T22_what_is_no_longer_due_when_its_commit_comes_is_set_again(self, world: World) -> None:
        async with world.open(Sleeper):
            id = await world.create(Sleeper, START + 1000)
            await settle()
            await world.runtime._wake_up([id])  # as if the clock had stepped back after the alarm rang
            assert await world.status(id) == "sleeping"
            await world.clock.advance(1000)
            assert await world.status(id) == "terminal"

    async def test_T22_a_clock_that_steps_forward_is_noticed_within_a_minute(self, world: World) -> None:
        async with world.open(Sleeper):
            id = await world.create(Sleeper, START + 86_400_000)
            await settle()
            world.clock.now += 86_400_000
            await world.clock.advance(60_000)
            assert await world.status(id) == "terminal"

    async def test_a_time_long_past_wakes_at_once(self, world: World) -> None:
        async with world.open(Sleeper):
            outcome = await world.runtime.wait(await world.create(Sleeper, 0))
            assert isinstance(outcome, Completed)

    async def test_the_alarm_forgets_what_no_longer_stands(self, world: World, monkeypatch) -> None:
        monkeypatch.setattr("perdure.tasks.alarm.FEW", 5)

        class Again(Task[None, None], kind="t.again"):
            async def start(self, run: Run[None, None, None]) -> Next[None]:
                async with run.commit() as tx:
                    return tx.go(self.ask, 0)

            async def ask(self, run: Run[None, None, int]) -> Next[None]:
                async with run.commit() as tx:
                    if run.checkpoint == 20:
                        return tx.complete(None)
                    return tx.wait_signal("x", self.ask, run.checkpoint + 1, deadline=START + 10**9 + run.checkpoint)

        async with world.open(Again):
            id = await world.create(Again)
            await world.runtime.send_signal(id, "x", 1)
            await world.runtime.wait(id)
            assert len(world.runtime._alarm._heap) <= 8


def test_the_transaction_of_a_run_is_typed() -> None:
    """Read by the type checker: a wrong checkpoint or result is an error in the editor."""

    class Typed(Task[int, str], kind="t.typed"):
        async def start(self, run: Run[int, str, None]) -> Next[str]:
            tx: RunTransaction[str]
            async with run.commit() as tx:
                tx.go(self.after, 5)  # pyright: ignore[reportArgumentType]
                tx.complete(5)  # pyright: ignore[reportArgumentType]
                tx.go(Count().step, [])  # pyright: ignore[reportArgumentType]
                return tx.go(self.after, "five")

        async def after(self, run: Run[int, str, str]) -> Next[str]:
            _: int = run.input
            async with run.commit() as tx:
                return tx.complete(run.checkpoint)

    assert Typed.kind == "t.typed"
