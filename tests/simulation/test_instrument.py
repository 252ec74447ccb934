"""An instrument that cannot fail proves nothing: planted faults are all found (rules P2 to P7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from perdure.kernel.records import NULL, ROOT_CONVERSATION
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.kernel.storage import Batch
from perdure.storage.memory import MemoryStorage
from perdure.testing.faults import Fault
from perdure.testing.normal import Rules, normal_form, read_records
from perdure.testing.scenarios.kernel import Progress, Step, all_or_nothing, atomic, once, open_session
from perdure.testing.simulation import Exploration, Host, Plan, Scenario, explore, simulate


def scenario(program: Callable[[Host], Awaitable[None]], **options) -> Scenario:
    return Scenario(name="planted", program=program, **options)


def problems(exploration: Exploration) -> str:
    assert exploration.failures, "the planted fault was not found"
    return "\n".join(problem for failure in exploration.failures for problem in failure.problems)


async def steps(session, numbers: range) -> None:
    for number in numbers:
        async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            if await once(tx, f"step-{number}"):
                tx.append(Step(number=number))


# --- programs --------------------------------------------------------------------------------------------------


def test_a_program_that_submits_twice_after_a_crash_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                tx.append(Step(number=1))
                tx.new_submission(type="write", status="done", digest="")
            await steps(session, range(2, 4))

    assert "entries: 4 instead of 3" in problems(explore(scenario(program)))


def test_a_life_that_ends_before_it_opens_the_store_is_one_like_others_p5() -> None:
    async def program(host: Host) -> None:
        await asyncio.sleep(1)  # it starts something else first
        async with open_session(host) as session:
            await steps(session, range(1, 3))

    plan = Plan(scenario="planted", faults=(Fault("after", 2), Fault("step", 1), Fault("after", 2)))
    result = simulate(scenario(program), plan)
    assert [life.opened for life in result.lives] == [True, False, True]
    assert result.ok, result


def test_check_tells_what_failed_and_how_to_repeat_it_p7() -> None:
    async def program(host: Host) -> None:
        host.effect("charge")
        async with open_session(host) as session:
            await steps(session, range(1, 3))

    found = explore(scenario(program, safe=frozenset({"charge"})))
    with pytest.raises(AssertionError, match=r"runs failed\n(.*\n)*.*effect 'charge' took place 2 times") as raised:
        found.check()
    assert "replay: perdure crash --mode simulation --scenario planted" in str(raised.value)


def test_check_does_not_pass_a_program_that_commits_nothing_p13() -> None:
    async def program(host: Host) -> None:
        async with Session.open(host.storage, clock=host.clock, entropy=host.entropy):
            pass

    found = explore(scenario(program))
    assert not found.failures
    with pytest.raises(AssertionError, match="commits nothing"):
        found.check()


def test_check_passes_what_went_well_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            await steps(session, range(1, 3))

    explore(scenario(program)).check()


def test_a_safe_effect_that_is_not_idempotent_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                first = await once(tx, "intent")
            host.effect("charge")
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                if await once(tx, "outcome"):
                    tx.append(Step(number=1))
            assert first is not None

    found = explore(scenario(program, safe=frozenset({"charge"})))
    assert "effect 'charge' took place 2 times (2 attempts)" in problems(found)


def test_an_effect_with_a_key_that_changes_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            host.effect("charge", key=session.info.writer)  # another one each time the store is opened
            await steps(session, range(1, 2))

    assert "took place 2 times" in problems(explore(scenario(program, safe=frozenset({"charge"}))))


def test_the_same_effect_with_a_stable_key_passes_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            host.effect("charge", key=session.info.log_id)
            await steps(session, range(1, 2))

    found = explore(scenario(program, safe=frozenset({"charge"})))
    assert not found.failures, found.failures[0]
    assert found.reruns > 0


def test_an_unsafe_effect_attempted_again_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            done = await session.request(ROOT_CONVERSATION, "step-1")
            if done is None:
                host.effect("launch")  # before its intent is stored
            await steps(session, range(1, 3))

    found = explore(scenario(program, unsafe=frozenset({"launch"})))
    assert "effect 'launch' was attempted 2 times" in problems(found)


def test_an_effect_nobody_declared_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host):
            host.effect("surprise")

    assert "effect 'surprise' is not in the scenario" in problems(explore(scenario(program)))


def test_an_effect_that_does_not_happen_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            await steps(session, range(1, 2))

    both = explore(scenario(program, safe=frozenset({"charge"}), unsafe=frozenset({"launch"})))
    assert "effect 'charge' took place 0 times" in problems(both)
    assert "effect 'launch' never took place" in problems(both)


def test_telling_the_world_before_the_commit_has_settled_is_found_k20() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session, session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            if await once(tx, "step-1"):
                tx.append(Step(number=1))
                host.heard(session.seq + 1)

    assert "somebody outside was told of commit 2, but the last one stored is 1" in problems(explore(scenario(program)))


def test_half_a_step_is_found_in_the_store_of_a_crash_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            for number in range(1, 5):
                async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                    if await once(tx, f"step-{number}"):
                        tx.append(Step(number=number))
                async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                    progress = await tx.draft(Progress)  # belongs into the commit before
                    progress.steps = number

    def together(records):
        document = records.document("app.progress", ROOT_CONVERSATION)
        if (document or {"steps": 0})["steps"] != len(records.of("app.step")):
            yield "they are apart"

    assert "they are apart" in problems(explore(scenario(program, always=together)))


def test_unfinished_tasks_and_submissions_are_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session, session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            if await once(tx, "step-1"):
                tx.new_task(kind="app.work", version=1, phase="start", input=NULL)
                tx.new_submission(type="write", status="queued", digest="", request_id="late")

    found = problems(explore(scenario(program)))
    assert "app.work task 3 is still pending" in found
    assert "submission 4 (late) is still queued" in found
    assert "queued are [4], the inbox holds []" in found


def test_a_program_that_hangs_is_found_and_shown_p2() -> None:
    async def program(host: Host) -> None:
        async with open_session(host):
            await asyncio.get_running_loop().create_future()

    assert "nothing will ever happen again" in problems(explore(scenario(program)))


def test_what_a_program_leaves_running_is_found_p2() -> None:
    async def forever() -> None:
        while True:
            await asyncio.sleep(10)

    kept = []

    async def program(host: Host) -> None:
        async with open_session(host):
            kept.append(asyncio.create_task(forever(), name="left behind"))

    assert "task 'left behind' still runs" in problems(explore(scenario(program)))


def test_errors_and_reports_nobody_looks_at_are_found_p2() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            asyncio.get_running_loop().call_soon(lambda: 1 // 0)
            host.report(Report(type="told", message="it failed", error=ValueError("of this")))
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                await asyncio.sleep(2)
                await once(tx, "step-1")

    found = problems(explore(scenario(program)))
    assert "nobody caught" in found
    assert "ZeroDivisionError" in found
    assert "a report of type line_held" in found
    assert "a report of type told: it failed (ValueError: of this)" in found


def test_a_program_that_raises_is_found_p2() -> None:
    async def program(host: Host) -> None:
        async with open_session(host):
            raise ValueError("by itself")

    assert "the program raised ValueError: by itself" in problems(explore(scenario(program)))


def test_a_process_that_dies_of_itself_for_ever_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host):
            host.die()
            await host.clock.sleep(1)

    assert "it would never come to an end" in problems(explore(scenario(program)))


def test_an_unsteady_scenario_is_held_against_the_invariants_alone_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session, session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            if await once(tx, "step-1"):
                tx.append(Step(number=host.life))

    assert "instead of" in problems(explore(scenario(program)))
    assert not explore(scenario(program, steady=False)).failures


def test_effects_that_need_not_be_declared_may_not_happen_twice_p5() -> None:
    async def program(host: Host) -> None:
        async with open_session(host) as session:
            host.effect("with a key", key="key")
            host.effect("without")
            await steps(session, range(1, 3))

    found = problems(explore(scenario(program, any_effects=True)))
    assert "effect 'without' took place 2 times" in found
    assert "with a key" not in found


def test_a_restarted_process_learns_nothing_but_what_is_outside_p5() -> None:
    seen: list[dict[str, object]] = []

    async def program(host: Host) -> None:
        seen.append(dict(host.notes))
        async with open_session(host) as session:
            host.notes[f"life {host.life}"] = session.seq
            await steps(session, range(1, 3))

    simulate(scenario(program), Plan(scenario="planted", faults=(Fault("after", 2), Fault("after", 0))))
    assert [sorted(notes) for notes in seen] == [[], ["life 1"], ["life 1"]]


# --- stores ----------------------------------------------------------------------------------------------------


class LosesTheLastCommit(MemoryStorage):
    """Acknowledges before it stores: a crash loses what was acknowledged last."""

    def __init__(self) -> None:
        super().__init__()
        self._before = super().snapshot()

    def commit(self, batch: Batch):
        self._before = super().snapshot()
        return super().commit(batch)

    def snapshot(self) -> MemoryStorage:
        lossy = LosesTheLastCommit()
        lossy._contents = self._before._contents.copy()
        if lossy._contents.seq == 0:
            lossy._contents = self._contents.copy()
        return lossy


class TearsCommits(MemoryStorage):
    """Stores the records of a commit, but not its documents."""

    def commit(self, batch: Batch):
        return super().commit(batch if batch.seq < 3 else structs.replace(batch, documents=()))

    def snapshot(self) -> MemoryStorage:
        copy = TearsCommits()
        copy._contents = self._contents.copy()
        return copy


class RewritesHistory(MemoryStorage):
    """A recovery that changes what was written."""

    def snapshot(self) -> MemoryStorage:
        copy = RewritesHistory()
        copy._contents = contents = self._contents.copy()
        for id, entry in contents.entries.items():
            contents.entries[id] = structs.replace(entry, created_at=entry.created_at + 1)
        return copy


class ForgetsItsFence(MemoryStorage):
    """A new owner has the epoch of the old one."""

    def snapshot(self) -> MemoryStorage:
        copy = ForgetsItsFence()
        copy._contents = self._contents.copy()
        copy._contents.epoch = 0
        return copy


@pytest.mark.parametrize(
    ("store", "found"),
    [
        (LosesTheLastCommit, "the process was told of commit"),
        (TearsCommits, "entries, but the document says"),
        (RewritesHistory, "changed or went away"),
        (ForgetsItsFence, "its epoch went from"),
    ],
)
def test_a_store_that_breaks_its_word_is_found_p3(store: type[MemoryStorage], found: str) -> None:
    exploration = explore(scenario(atomic, always=all_or_nothing, storage=store))
    assert found in problems(exploration)


# --- faults and plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["after:3", "before:1", "step:120", "fail:2", "unacknowledged:2", "read:9"])
def test_a_fault_is_written_as_it_is_read_p7(text: str) -> None:
    assert str(Fault.parse(text)) == text


def test_a_bare_number_is_a_kill_after_that_commit_p7() -> None:
    assert Fault.parse("3") == Fault("after", 3)


@pytest.mark.parametrize("text", ["", "three", "after:", "after:-1", "never:3", "after:3:4"])
def test_what_is_no_fault_is_refused_p7(text: str) -> None:
    with pytest.raises(ValueError, match="is no fault"):
        Fault.parse(text)


def test_a_failure_prints_the_command_that_replays_it_p7() -> None:
    plan = Plan(scenario="fork", seed=4, faults=(Fault("after", 3), Fault("before", 1)), order_seed=9)
    command = "perdure crash --mode simulation --scenario fork --seed 4 --kill after:3,before:1 --order-seed 9"
    assert plan.command() == command
    result = simulate(scenario(atomic, ends=lambda _: ["it is as it is"]), plan)
    assert command in str(result)


@pytest.mark.parametrize("order_seed", [None, 1, 2])
def test_a_plan_repeats_exactly_p16(order_seed: int | None) -> None:
    plan = Plan(scenario="planted", faults=(Fault("after", 3), Fault("step", 20)), order_seed=order_seed)
    runs = [simulate(scenario(atomic), plan) for _ in range(2)]
    assert runs[0].lives == runs[1].lives
    assert runs[0].records == runs[1].records


@pytest.mark.parametrize(("fault", "stored"), [("after:3", 3), ("before:3", 2), ("fail:3", 2), ("unacknowledged:3", 3)])
def test_a_fault_leaves_exactly_the_commits_before_it_p3(fault: str, stored: int) -> None:
    seen: list[int] = []

    async def program(host: Host) -> None:
        async with open_session(host) as session:
            seen.append(session.info.seq)
            await steps(session, range(1, 5))

    result = simulate(scenario(program), Plan(scenario="planted", faults=(Fault.parse(fault),)))
    assert result.ok, result
    assert seen == [0, stored]


def test_a_fault_beyond_the_end_of_a_program_ends_the_run_with_it_p5() -> None:
    result = simulate(scenario(atomic), Plan(scenario="planted", faults=(Fault("after", 100), Fault("after", 1))))
    assert [life.ended for life in result.lives] == ["done"]
    assert result.reached == []


# --- the normal form -------------------------------------------------------------------------------------------


def test_ids_and_times_do_not_matter_but_everything_else_does_p6() -> None:
    def form(numbers: list[int], *, skip: int = 0, later: float = 0.0):
        async def program(host: Host) -> None:
            await asyncio.sleep(later)
            async with open_session(host) as session, session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                for _ in range(skip):
                    tx.new_id()
                for number in numbers:
                    tx.append(Step(number=number))

        return simulate(scenario(program)).form

    assert form([1, 2]) == form([1, 2], skip=5, later=60.0)
    assert form([1, 2]) != form([2, 1])
    assert form([1, 2]) != form([1])


def test_entries_declared_unordered_are_compared_in_any_order_p6() -> None:
    async def records(numbers: list[int]):
        storage = MemoryStorage()
        session = await open_at(storage)
        async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            for number in numbers:
                tx.append(Step(number=number))
        await session.close()
        return await read_records(storage)

    async def open_at(storage):
        from perdure.kernel.session import Session

        session = await Session.start(storage)
        async with session.commit() as tx:
            tx.create_conversation(owner=None, root=True)
        return session

    rules = Rules(unordered=frozenset({"app.step"}))
    one, other = (asyncio.run(records(numbers)) for numbers in ([1, 2], [2, 1]))
    assert normal_form(one, rules) == normal_form(other, rules)
    assert normal_form(one) != normal_form(other)
