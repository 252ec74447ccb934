"""Owned work, held outcomes, waits, background and idle (rules T50-T70, T84, T85)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from task_world import ROOT, World, settle, until

from perdure.kernel.context import Context
from perdure.kernel.document import Document
from perdure.kernel.errors import ContextCancelled, InvalidTransition, NotFound
from perdure.kernel.records import (
    Aborted,
    Completed,
    Completing,
    Failed,
    Faulted,
    Outcome,
    Running,
    TaskRecord,
    Terminal,
    Waiting,
    WaitPolicy,
)
from perdure.kernel.transaction import Transaction
from perdure.tasks import InvalidMove, Next, OwnerEnded, Run, Task, WaitCycle

Body = Callable[[Run[Any, Any, Any]], Awaitable[Next[Any]]]


class Play(Task[str, Any], kind="t.play"):
    """Does what the test wrote under the name it was given."""

    parts: dict[str, Body]

    async def start(self, run: Run[str, Any, None]) -> Next[Any]:
        return await self.parts[run.input](run)

    async def then(self, run: Run[str, Any, Any]) -> Next[Any]:
        return await self.parts[f"{run.input} then"](run)


class Handled(Play, kind="t.handled"):
    async def on_abort(self, run: Run[str, Any, object]) -> Next[Any]:
        return await self.parts[f"{run.input} abort"](run)


@pytest.fixture(autouse=True)
def parts() -> dict[str, Body]:
    Play.parts = {}
    return Play.parts


def gated(gate: asyncio.Event, end: str = "complete") -> Body:
    async def body(run: Run[Any, Any, Any]) -> Next[Any]:
        await gate.wait()
        async with run.commit() as tx:
            return tx.complete(run.input) if end == "complete" else tx.fail("no", "no")

    return body


async def done(run: Run[Any, Any, Any]) -> Next[Any]:
    async with run.commit() as tx:
        return tx.complete({str(id): type(outcome).__name__ for id, outcome in run.results.items()})


def waits_for(world: World, names: list[str], policy: WaitPolicy = "all_settled") -> Body:
    """Create owned children of these names and wait for them."""

    async def body(run: Run[Any, Any, Any]) -> Next[Any]:
        async with run.commit() as tx:
            ids = [tx.create_task(Play, name).id for name in names]
            return tx.wait(ids, Play().then, None, policy=policy)

    return body


def named(world: World, name: str) -> TaskRecord:
    (found,) = [t for t in world.storage._contents.tasks.values() if t.input == name]
    return found


async def terminal(world: World, name: str) -> Outcome:
    tasks = world.storage._contents.tasks
    await until(lambda: any(t.input == name and not t.live for t in tasks.values()))
    outcome = named(world, name).outcome
    assert outcome is not None
    return outcome


class TestHolding:
    async def test_T54_T55_T58_an_outcome_is_held_until_owned_work_has_ended(self, world: World, parts) -> None:
        gate = asyncio.Event()
        parts["leaf"] = gated(gate)

        async def own(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                tx.create_task(Play, "leaf")
                tx.append_record("app.written-with-the-outcome")
                return tx.complete("mine")

        parts["owner"] = own
        async with world.open(Play):
            id = await world.create(Play, "owner")
            await settle()
            record = await world.task(id)
            assert isinstance(record.state, Completing)
            assert isinstance(record.outcome, Completed)
            assert record.ended_at is None
            assert len(await world.session.entries(ROOT)) == 1, "T59: it lands at once"
            waiting, idle = asyncio.ensure_future(world.runtime.wait(id)), asyncio.ensure_future(world.runtime.idle())
            await settle()
            assert not waiting.done()
            assert not idle.done()
            (held,) = [live for live in await world.runtime.inspect() if live.status == "completing"]
            assert held.waits_for == (named(world, "leaf").id,)
            seq = world.session.seq
            gate.set()
            assert await waiting == record.outcome
            await idle
            assert world.session.seq == seq + 1, "both end in one commit"

    async def test_T56_a_held_outcome_needs_no_code_over_a_crash(self, world: World, parts) -> None:
        gate = asyncio.Event()
        parts["leaf"] = gated(gate)

        async def own(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                tx.create_task(Other, "leaf")
                return tx.complete("mine")

        class Other(Play, kind="t.other"):
            pass

        parts["owner"] = own
        async with world.open(Play, Other):
            id = await world.create(Play, "owner")
            await settle()
            await world.crash()
        gate.set()
        async with world.open(Other, resume=False):
            assert await world.status(id) == "completing"
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert world.reported("task_blocked") == []

    async def test_T61_a_held_failure_aborts_the_work_below(self, world: World, parts) -> None:
        async def own(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                tx.create_task(Play, "leaf")
            async with run.commit() as tx:
                return tx.fail("no", "no")

        parts["owner"] = own
        parts["leaf"] = gated(asyncio.Event())
        async with world.open(Play):
            id = await world.create(Play, "owner")
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Failed)
            assert named(world, "leaf").outcome == Aborted("owner ended")

    async def test_T60_a_fault_aborts_below_and_cleans_up_in_the_final_commit(self, world: World, parts) -> None:
        gate = asyncio.Event()
        cleaned: list[tuple[int, str, bool]] = []

        class Note(Document, kind="app.note", scope="conversation"):
            text: str = ""

        class Clean(Play, kind="t.clean"):
            def cleanup(self, tx: Transaction, record: TaskRecord) -> Awaitable[None] | None:
                tx.append_record("app.cleaned", conversation=record.conversation_id)
                cleaned.append((record.id, record.status, tx.by_task == record.id))
                return self._more(tx, record)

            async def _more(self, tx: Transaction, record: TaskRecord) -> None:
                note = await tx.draft(Note, conversation=record.conversation_id)
                note.text = "cleaned"

        async def own(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                tx.create_task(Handled, "leaf")
            raise RuntimeError

        async def slow_abort(run: Run[Any, Any, Any]) -> Next[Any]:
            await gate.wait()
            async with run.commit() as tx:
                return tx.abort("done")

        parts["owner"] = own
        parts["leaf"] = gated(asyncio.Event())
        parts["leaf abort"] = slow_abort
        async with world.open(Play, Clean, Handled):
            id = await world.create(Clean, "owner")
            await settle()
            assert isinstance((await world.task(id)).state, Completing)
            assert cleaned == []
            gate.set()
            assert isinstance(await world.runtime.wait(id), Faulted)
            assert cleaned == [(id, "terminal", False)]
            (entry,) = await world.session.entries(ROOT)
            assert entry.seq == world.session.seq
            note = await world.session.snapshot(Note, conversation=ROOT)
            assert note is not None
            assert note.text == "cleaned"

    async def test_T60_no_clean_up_for_outcomes_of_the_tasks_own(self, world: World, parts) -> None:
        cleaned: list[str] = []

        class Clean(Handled, kind="t.clean"):
            def cleanup(self, tx: Transaction, record: TaskRecord) -> None:
                cleaned.append(str(record.input))

        class CleanPlain(Play, kind="t.clean-plain"):
            def cleanup(self, tx: Transaction, record: TaskRecord) -> None:
                cleaned.append(str(record.input))

        async def abort(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                return tx.abort("mine")

        parts |= {
            "completes": done,
            "fails": gated_now("fail"),
            "handles": gated(asyncio.Event()),
            "handles abort": abort,
            "plain": gated(asyncio.Event()),
        }
        async with world.open(Clean, CleanPlain):
            for name in ("completes", "fails"):
                await world.runtime.wait(await world.create(Clean, name))
            await world.runtime.abort_task(await world.create(Clean, "handles"))
            assert cleaned == []
            await world.runtime.abort_task(await world.create(CleanPlain, "plain"))
            assert cleaned == ["plain"]

    async def test_T60_a_clean_up_that_raises_is_reported_and_the_task_ends(self, world: World, parts) -> None:
        class Dirty(Play, kind="t.dirty"):
            def cleanup(self, tx: Transaction, record: TaskRecord) -> Awaitable[None] | None:
                if record.input == "sync":
                    raise RuntimeError("sync")
                return self._fail()

            async def _fail(self) -> None:
                raise RuntimeError("async")

        async def fault(run: Run[Any, Any, Any]) -> Next[Any]:
            raise ValueError

        parts |= {"sync": fault, "async": fault}
        async with world.open(Dirty):
            for name in ("sync", "async"):
                assert isinstance(await world.runtime.wait(await world.create(Dirty, name)), Faulted)
        assert [str(r.error) for r in world.reported("cleanup_failed")] == ["sync", "async"]

    async def test_T54_a_terminal_record_over_live_work_is_refused(self, world: World, parts) -> None:
        from msgspec import structs

        parts["owner"] = parts["leaf"] = gated(asyncio.Event())
        async with world.open(Play):
            id = await world.create(Play, "owner")
            await world.create(Play, "leaf", owner=id)
            with pytest.raises(InvalidTransition, match="T54"):
                async with world.session.commit() as tx:
                    tx.put_task(structs.replace(await tx.task(id), state=Terminal(Completed())))
            assert await world.status(id) == "running"

    async def test_K113_task_scoped_documents_retire_with_the_task(self, world: World, parts) -> None:
        class Scratch(Document, kind="app.scratch", scope="task"):
            text: str = ""

        async def write(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                draft = await tx.draft(Scratch, task=run.id)
                draft.text = "x"
            assert await run.session.snapshot(Scratch, task=run.id) is not None
            async with run.commit() as tx:
                return tx.complete(None)

        parts["writer"] = write
        async with world.open(Play):
            id = await world.create(Play, "writer")
            await world.runtime.wait(id)
            assert await world.session.snapshot(Scratch, task=id) is None


def gated_now(end: str) -> Body:
    gate = asyncio.Event()
    gate.set()
    return gated(gate, end)


class TestWaiting:
    async def test_T62_T66_resumes_in_the_commit_of_the_last_end_with_all_outcomes(self, world: World, parts) -> None:
        gates = [asyncio.Event(), asyncio.Event()]
        parts |= {"a": gated(gates[0]), "b": gated(gates[1], "fail"), "w then": done}
        parts["w"] = waits_for(world, ["a", "b"])
        async with world.open(Play):
            id = await world.create(Play, "w")
            await settle()
            gates[1].set()
            await settle()
            assert await world.status(id) == "waiting", "all_settled waits for every one"
            seq = world.session.seq
            gates[0].set()
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            expected = {str(named(world, "a").id): "Completed", str(named(world, "b").id): "Failed"}
            assert outcome.result == expected
            assert world.session.seq == seq + 2

    async def test_T62_waiting_for_ended_tasks_resumes_at_once(self, world: World, parts) -> None:
        parts |= {"a": done, "w then": done, "empty then": done}

        async def body(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                return tx.wait([named(world, "a").id] * 2 if run.input == "w" else [], Play().then, None)

        parts |= {"w": body, "empty": body}
        async with world.open(Play):
            await world.runtime.wait(await world.create(Play, "a"))
            seq = world.session.seq
            outcome = await world.runtime.wait(await world.create(Play, "w"))
            assert isinstance(outcome, Completed)
            assert outcome.result == {str(named(world, "a").id): "Completed"}
            assert world.session.seq == seq + 3, "the wait's own commit sets it running again"
            assert isinstance(await world.runtime.wait(await world.create(Play, "empty")), Completed)

    async def test_T62_results_are_there_after_a_crash(self, world: World, parts) -> None:
        gate = asyncio.Event()
        parts |= {"a": done}
        parts["w"] = waits_for(world, ["a"])

        async def slow(run: Run[Any, Any, Any]) -> Next[Any]:
            await gate.wait()
            return await done(run)

        parts["w then"] = slow
        async with world.open(Play):
            id = await world.create(Play, "w")
            await until(lambda: isinstance(world.session.live.settled[id].state, Running))
            await settle()
            await world.crash()
        gate.set()
        async with world.open(Play):
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == {str(named(world, "a").id): "Completed"}

    async def test_T65_fail_fast_aborts_the_rest_and_resumes_after_all(self, world: World, parts) -> None:
        gate, abort_gate = asyncio.Event(), asyncio.Event()

        async def slow_abort(run: Run[Any, Any, Any]) -> Next[Any]:
            await abort_gate.wait()
            async with run.commit() as tx:
                return tx.abort("compensated")

        async def body(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                ids = [tx.create_task(Play, "bad").id, tx.create_task(Handled, "good").id]
                return tx.wait(ids, Play().then, None, policy="fail_fast")

        parts |= {"bad": gated(gate, "fail"), "good": gated(asyncio.Event()), "good abort": slow_abort}
        parts |= {"w": body, "w then": done}
        async with world.open(Play, Handled):
            id = await world.create(Play, "w")
            await settle()
            gate.set()
            await terminal(world, "bad")
            await settle()
            assert named(world, "good").abort_requested
            assert await world.status(id) == "waiting", "T66"
            abort_gate.set()
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert sorted(outcome.result.values()) == ["Aborted", "Failed"]  # pyright: ignore
            assert named(world, "good").abort_reason == "sibling did not complete"

    async def test_T65_a_held_failure_already_aborts_the_rest(self, world: World, parts) -> None:
        abort_gate = asyncio.Event()

        async def slow_abort(run: Run[Any, Any, Any]) -> Next[Any]:
            await abort_gate.wait()
            async with run.commit() as tx:
                return tx.abort("compensated")

        async def holds(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                tx.create_task(Handled, "below")
            async with run.commit() as tx:
                return tx.fail("no", "no")

        parts |= {"holds": holds, "below": gated(asyncio.Event()), "below abort": slow_abort}
        parts |= {"good": gated(asyncio.Event()), "w then": done}
        parts["w"] = waits_for(world, ["holds", "good"], "fail_fast")
        async with world.open(Play, Handled):
            await world.create(Play, "w")
            await terminal(world, "good")
            assert named(world, "holds").status == "completing"
            abort_gate.set()
            await terminal(world, "w")

    async def test_T65_a_child_that_had_failed_before_the_wait_counts(self, world: World, parts) -> None:
        async def body(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                bad = tx.create_task(Play, "bad").id
            await world.runtime.wait(bad)
            async with run.commit() as tx:
                good = tx.create_task(Play, "good").id
                return tx.wait([bad, good], Play().then, None, policy="fail_fast")

        parts |= {"bad": gated_now("fail"), "good": gated(asyncio.Event()), "w": body, "w then": done}
        async with world.open(Play):
            assert isinstance(await world.runtime.wait(await world.create(Play, "w")), Completed)
            assert isinstance(named(world, "good").outcome, Aborted)

    async def test_T63_T64_fail_fast_needs_owned_children(self, world: World, parts) -> None:
        errors: list[str] = []

        async def body(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                own = tx.create_task(Play, "own").id
            try:
                async with run.commit() as tx:
                    tx.wait([own, named(world, "other").id], Play().then, None, policy="fail_fast")
            except InvalidMove as error:
                errors.append(str(error))
            async with run.commit() as tx:
                return tx.wait([own, named(world, "other").id], Play().then, None)

        parts |= {"other": done, "own": done, "w": body, "w then": done}
        async with world.open(Play):
            await world.runtime.wait(await world.create(Play, "other"))
            await world.runtime.wait(await world.create(Play, "w"))
        assert len(errors) == 1
        assert "does not own" in errors[0]

    async def test_T67_T68_missing_ids_and_cycles_are_refused_by_name(self, world: World, parts) -> None:
        errors: dict[str, Exception] = {}
        ready = asyncio.Event()

        def tries(on: Callable[[Run[Any, Any, Any]], list[int]]) -> Body:
            async def body(run: Run[Any, Any, Any]) -> Next[Any]:
                await ready.wait()
                try:
                    async with run.commit() as tx:
                        tx.append_record("app.never")
                        tx.wait(on(run), Play().then, None)
                except Exception as error:
                    errors[run.input] = error
                async with run.commit() as tx:
                    return tx.complete(None)

            return body

        async def waits(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                return tx.wait([named(world, "closes").id], Play().then, None)

        parts |= {
            "missing": tries(lambda run: [4711]),
            "itself": tries(lambda run: [run.id]),
            "owner": gated(ready),
            "child": tries(lambda run: [named(world, "owner").id]),
            "grandchild": tries(lambda run: [named(world, "owner").id]),
            "waits": waits,
            "waits then": done,
            "closes": tries(lambda run: [named(world, "waits").id]),
        }
        async with world.open(Play):
            owner = await world.create(Play, "owner")
            child = await world.create(Play, "child", owner=owner)
            room = await world.conversation(child)
            await world.create(Play, "grandchild", conversation=room)
            for name in ("missing", "itself", "closes"):
                await world.create(Play, name)
            await world.create(Play, "waits")
            await until(lambda: named(world, "waits").status == "waiting")
            ready.set()
            await world.runtime.idle()
            assert await world.session.entries(ROOT) == []
        ids = {name: named(world, name).id for name in parts if " " not in name}
        assert isinstance(errors["missing"], NotFound)
        assert "4711" in str(errors["missing"])
        cycles = {name: e.cycle for name, e in errors.items() if isinstance(e, WaitCycle)}
        assert cycles == {
            "itself": (ids["itself"], ids["itself"]),
            "child": (ids["child"], ids["owner"], ids["child"]),
            "grandchild": (ids["grandchild"], ids["owner"], ids["child"], ids["grandchild"]),
            "closes": (ids["closes"], ids["waits"], ids["closes"]),
        }
        assert str(ids["waits"]) in str(errors["closes"])

    async def test_T77_cancelling_a_wait_leaves_the_work_and_other_waits(self, world: World, parts) -> None:
        gate = asyncio.Event()
        parts["a"] = gated(gate)
        async with world.open(Play):
            id = await world.create(Play, "a")
            context = Context()
            cancelled = asyncio.ensure_future(world.runtime.wait(id))
            bounded = asyncio.ensure_future(world.runtime.wait(id, context=context))
            idle = asyncio.ensure_future(world.runtime.idle())
            kept = asyncio.ensure_future(world.runtime.wait(id))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await world.runtime.wait(id)
            await settle()
            cancelled.cancel()
            idle.cancel()
            context.cancel("no longer")
            with pytest.raises(ContextCancelled, match="no longer"):
                await bounded
            await settle()
            assert cancelled.cancelled()
            assert idle.cancelled()
            assert not (await world.task(id)).abort_requested
            gate.set()
            assert isinstance(await kept, Completed)
            assert world.runtime.waits._everyone() == []

    async def test_a_wait_for_a_missing_task_is_refused(self, world: World) -> None:
        async with world.open(Play):
            with pytest.raises(NotFound):
                await world.runtime.wait(99)
            with pytest.raises(NotFound):
                await world.runtime.idle(99)


class TestOwners:
    async def test_T52_ended_and_aborted_owners_are_refused(self, world: World, parts) -> None:
        parts["a"] = done
        async with world.open(Play):
            id = await world.create(Play, "a")
            await world.runtime.wait(id)
            room_before = world.session.seq
            with pytest.raises(OwnerEnded, match=f"task {id}"):
                await world.create(Play, "a", owner=id)
            with pytest.raises(OwnerEnded):
                await world.conversation(id)
            assert world.session.seq == room_before

    async def test_T52_a_conversation_whose_owner_ended_takes_no_new_work_after_a_reopen(
        self, world: World, parts
    ) -> None:
        gate = asyncio.Event()
        parts |= {"a": gated(gate), "b": done}
        async with world.open(Play):
            id = await world.create(Play, "a")
            room = await world.conversation(id)
            await world.runtime.wait(await world.create(Play, "b", conversation=room))
            gate.set()
            await world.runtime.wait(id)
        async with world.open(Play):
            with pytest.raises(OwnerEnded):
                await world.create(Play, "b", conversation=room)
            with pytest.raises(NotFound):
                await world.create(Play, "b", conversation=4711)

    async def test_T5_the_owner_is_of_the_same_conversation(self, world: World, parts) -> None:
        parts["a"] = gated(asyncio.Event())
        async with world.open(Play):
            id = await world.create(Play, "a")
            with pytest.raises(OwnerEnded, match="conversation"):
                await world.create(Play, "a", owner=id, conversation=await world.conversation(None))

    async def test_T69_background_is_for_tasks_a_conversation_owns(self, world: World, parts) -> None:
        parts["a"] = gated(asyncio.Event())
        async with world.open(Play):
            id = await world.create(Play, "a")
            with pytest.raises(InvalidTransition, match="background"):
                await world.create(Play, "a", owner=id, background=True)
            background = await world.create(Play, "a", background=True)
            assert (await world.task(background)).background

    async def test_T69_a_background_task_made_in_a_phase_is_the_conversations(self, world: World, parts) -> None:
        async def body(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                ids = [tx.create_task(Play, "a").owner, tx.create_task(Play, "a", background=True).owner]
                return tx.complete(ids)

        parts |= {"a": done, "w": body}
        async with world.open(Play):
            id = await world.create(Play, "w")
            outcome = await world.runtime.wait(id)
            assert isinstance(outcome, Completed)
            assert outcome.result == [id, None]


class TestIdle:
    async def test_T70_T84_T85_idle_looks_at_ordinary_work_only(self, world: World, parts) -> None:
        gate = asyncio.Event()
        parts |= {"a": gated(gate), "bg": gated(asyncio.Event())}
        async with world.open(Play):
            await world.runtime.idle()
            await world.runtime.idle(ROOT)
            background = await world.create(Play, "bg", background=True)
            room = await world.conversation(background)
            await world.create(Play, "a", conversation=room)
            await world.runtime.idle()
            await world.runtime.idle(ROOT)
            in_room = asyncio.ensure_future(world.runtime.idle(room))
            await settle()
            assert not in_room.done(), "under the conversation itself it is ordinary"
            other = await world.conversation(None)
            await world.create(Play, "a", conversation=other)
            everywhere = asyncio.ensure_future(world.runtime.idle())
            await world.runtime.idle(ROOT)
            await settle()
            assert not everywhere.done()
            gate.set()
            await in_room
            await everywhere

    async def test_T84_idle_reaches_through_owned_conversations(self, world: World, parts) -> None:
        gate = asyncio.Event()
        parts |= {"a": done, "deep": gated(gate)}

        async def body(run: Run[Any, Any, Any]) -> Next[Any]:
            async with run.commit() as tx:
                room = tx.create_conversation(owner=run.id)
                tx.create_task(Play, "deep", conversation=room.id, owner=None)
                return tx.complete(None)

        parts["w"] = body
        async with world.open(Play):
            await world.create(Play, "w")
            idle = asyncio.ensure_future(world.runtime.idle(ROOT))
            await settle()
            assert not idle.done()
            gate.set()
            await idle
        assert {t.status for t in world.storage._contents.tasks.values()} == {"terminal"}


async def test_state_types_are_what_they_say(world: World, parts) -> None:
    parts |= {"a": gated(asyncio.Event()), "w then": done}
    parts["w"] = waits_for(world, ["a"])
    async with world.open(Play):
        id = await world.create(Play, "w")
        await settle()
        state = (await world.task(id)).state
        assert isinstance(state, Waiting)
        (live,) = [live for live in await world.runtime.inspect() if live.id == id]
        assert (live.status, live.waits_for, live.phase) == ("waiting", state.on, "then")


async def test_what_has_ended_leaves_nothing_behind_in_memory(world: World, parts) -> None:
    parts |= {"a": done, "b": done, "w then": done}

    async def body(run: Run[Any, Any, Any]) -> Next[Any]:
        async with run.commit() as tx:
            room = tx.create_conversation(owner=run.id)
            ids = [tx.create_task(Play, "b").id, tx.create_task(Play, "b", owner=None, conversation=room.id).id]
            return tx.wait([named(world, "a").id, *ids], Play().then, None)

    parts["w"] = body
    async with world.open(Play):
        await world.runtime.wait(await world.create(Play, "a"))
        await world.runtime.wait(await world.create(Play, "w"))
        await settle()
        tree, runtime = world.runtime.tree, world.runtime
        kept = [tree._children, tree._conversations, tree._tasks, tree._waiters]
        kept += [runtime.invocations, runtime.blocked_tasks, runtime._due, runtime._errands]
        assert not any(kept), kept
