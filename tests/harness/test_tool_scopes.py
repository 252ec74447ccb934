"""An environment's part in a call (rule H99): asked at its places, in order, and after an interruption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

import msgspec
import pytest

from harness.doubles import settle
from harness.tool_world import ROOT, ToolWorld, until
from perdure.harness.environment import (
    CallOutcome,
    Effects,
    EnvironmentLost,
    EnvironmentRefuses,
    EnvironmentUnusable,
    ExecutionEnvironment,
    OpenCall,
    RecoverInterrupted,
    RecoverResult,
    RecoverRun,
    Recovery,
    ScopeResult,
)
from perdure.harness.reconcile import Reconciled
from perdure.harness.results import INTERRUPTED
from perdure.harness.tool import ToolCall, ToolError, tool
from perdure.kernel.document import Document
from perdure.kernel.errors import SessionFailed
from perdure.kernel.json import JsonValue
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction


class Image(Document, kind="test.image", scope="session"):
    seq: int = 0


class Scope:
    """Writes down what it is asked; takes one call at a time; its outside world survives a crash."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.turn = asyncio.Lock()
        self.recovery: Recovery = RecoverInterrupted()
        self.captured: ScopeResult | None = None
        self.unusable_at = ""
        self.refused = ""
        self.lost_at = ""
        """The environment goes away there, once."""

    def note(self, what: str) -> None:
        self.asked.append(what)
        if what.split()[0] == self.unusable_at:
            raise EnvironmentUnusable("the machine is gone")
        if what.split()[0] == self.lost_at:
            self.lost_at = ""
            raise EnvironmentLost("the daemon is gone")

    async def attach(self, session: Session, open_calls: Sequence[OpenCall]) -> None:
        self.turn = asyncio.Lock()
        if open_calls:
            await self.turn.acquire()
        self.note(f"attach {[(call.name, call.attempt, call.scope_data) for call in open_calls]}")

    async def detach(self) -> None:
        self.note("detach")

    async def enter(self, call: OpenCall) -> None:
        if not self.refused and self.lost_at != "enter":
            await self.turn.acquire()
        self.note(f"enter {call.name}")
        if self.refused:
            raise EnvironmentRefuses(self.refused)

    async def before_intent(self, tx: Transaction, call: OpenCall) -> JsonValue:
        image = await tx.draft(Image)
        self.note(f"before_intent {call.attempt} {call.scope_data}")
        return {"base": image.seq}

    async def capture(self, call: OpenCall, outcome: CallOutcome) -> ScopeResult | None:
        self.note(f"capture {call.scope_data} {outcome.code}")
        return self.captured

    async def before_result(self, tx: Transaction, call: OpenCall, outcome: CallOutcome) -> None:
        (await tx.draft(Image)).seq += 1
        self.note(f"before_result {outcome.code}")

    async def leave(self, call: OpenCall, *, outcome: bool) -> None:
        self.turn.release()
        self.note(f"leave {outcome}")

    async def recover(self, call: OpenCall) -> Recovery:
        self.note(f"recover {call.attempt} {call.scope_data} safe={call.replay_safe} abort={call.abort_requested}")
        return self.recovery


class Environment:
    def __init__(self) -> None:
        self.scope = Scope()
        self.calls: list[OpenCall] = []

    def for_call(self, call: OpenCall) -> Environment:
        self.calls.append(call)
        return self

    async def end_background(self) -> None:
        """It leaves nothing in the background."""


class Bench:
    def __init__(self) -> None:
        self.world = ToolWorld()
        self.environment = Environment()
        self.world.environment = cast("ExecutionEnvironment", self.environment)
        self.runs: list[int] = []
        self.hang = True

        @tool(effects="space", adoptable=True)
        async def work(env: ExecutionEnvironment, call: ToolCall) -> str:
            """Work."""
            self.runs.append(call.attempt)
            if self.hang:
                self.hang = False
                await asyncio.Event().wait()
            return "done"

        self.work = work

    @property
    def asked(self) -> list[str]:
        return self.environment.scope.asked

    async def interrupt(self, recovery: Recovery) -> int:
        """A call that was running when its process ended; what was asked until then is forgotten."""
        await self.world.open(self.work)
        task = await self.world.call("work")
        await until(lambda: bool(self.runs))
        await settle()
        await self.world.crash()
        self.asked.clear()
        self.environment.scope.recovery = recovery
        await self.world.open(self.work)
        return task

    async def image(self) -> int:
        image = await self.world.session.snapshot(Image)
        assert image is not None
        return image.seq


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.world.close()


@pytest.mark.parametrize("wrong", [ValueError("on purpose"), SystemExit(3), None])
async def test_a_function_that_does_not_say_what_a_call_changes_is_reported_s159(
    bench: Bench, wrong: BaseException | None
) -> None:
    """It is taken to change anything; silently so it would never be adopted or undone, and nobody knew why."""

    def which(arguments: Mapping[str, JsonValue]) -> Effects:
        if wrong is not None:
            raise wrong
        return cast("Effects", "nothing")

    @tool(effects=which)
    async def work(env: ExecutionEnvironment) -> str:
        """Work."""
        return "done"

    await bench.world.open(work)
    assert (await bench.world.run("work")).text == "done"
    assert bench.environment.calls[-1].effects == "world"
    (report,) = bench.world.reports
    assert (report.type, report.kind, report.conversation) == ("effects_check_failed", "pi.tool", ROOT)
    assert report.error is wrong or (wrong is None and isinstance(report.error, TypeError))


async def test_a_scope_is_asked_at_its_places_in_order(bench: Bench) -> None:
    bench.hang = False
    await bench.world.open(bench.work)
    assert (await bench.world.run("work")).text == "done"
    await settle()
    assert bench.asked == [
        "attach []",
        "enter work",
        "before_intent 1 None",
        "capture {'base': 0} None",
        "before_result None",
        "leave True",
    ]
    assert await bench.image() == 1
    assert len(bench.world.commits) == 3
    call = bench.environment.calls[-1]
    assert (call.effects, call.adoptable, call.conversation_id, call.arguments) == ("space", True, ROOT, {})
    await bench.world.close()
    assert bench.asked[-1] == "detach"


async def test_one_call_at_a_time_is_what_the_scope_makes_of_entering(bench: Bench) -> None:
    bench.hang = False
    await bench.world.open(bench.work)
    tasks = [await bench.world.call("work") for _ in range(3)]
    for task in tasks:
        await bench.world.result(task)
    await settle()
    assert [what.split()[0] for what in bench.asked[1:]] == [
        "enter",
        "before_intent",
        "capture",
        "before_result",
        "leave",
    ] * 3


async def test_a_tool_without_the_environment_takes_no_part(bench: Bench) -> None:
    @tool
    async def ping() -> str:
        """Ping."""
        return "pong"

    await bench.world.open(ping)
    assert (await bench.world.run("ping")).text == "pong"
    assert bench.asked == []


async def test_a_capture_may_replace_the_result(bench: Bench) -> None:
    bench.hang = False
    bench.environment.scope.captured = ScopeResult(text="too large", is_error=True, details=msgspec.Raw(b'{"size":9}'))
    await bench.world.open(bench.work)
    result = await bench.world.run("work")
    assert (result.text, result.message.is_error, result.details) == ("too large", True, {"size": 9})


async def test_a_call_without_an_intent_leaves_without_an_outcome(bench: Bench) -> None:
    @bench.work.intent
    async def prepare(env: ExecutionEnvironment) -> JsonValue:
        raise ToolError("no")

    await bench.world.open(bench.work)
    assert (await bench.world.run("work")).code == "tool_error"
    await settle()
    assert bench.asked == ["attach []", "enter work", "leave False"]


async def test_an_aborted_call_is_captured_in_its_own_process(bench: Bench) -> None:
    await bench.world.open(bench.work)
    task = await bench.world.call("work")
    await until(lambda: bool(bench.runs))
    await bench.world.runtime.abort_task(task)
    assert (await bench.world.result(task)).code == "aborted"
    await settle()
    assert bench.asked[3:] == ["capture {'base': 0} aborted", "before_result aborted", "leave True"]
    assert bench.environment.scope.turn.locked() is False


async def test_after_a_crash_the_scope_decides_before_the_policy(bench: Bench) -> None:
    task = await bench.interrupt(RecoverRun("same"))
    assert (await bench.world.result(task)).text == "done"
    await settle()
    assert bench.asked == [
        "attach [('work', 1, {'base': 0})]",
        "recover 1 {'base': 0} safe=False abort=False",
        "capture {'base': 0} None",
        "before_result None",
        "leave True",
    ]


async def test_a_new_attempt_has_an_intent_of_its_own(bench: Bench) -> None:
    task = await bench.interrupt(RecoverRun("next"))
    assert (await bench.world.result(task)).text == "done"
    await settle()
    assert bench.asked[1:] == [
        "recover 1 {'base': 0} safe=False abort=False",
        "before_intent 2 None",
        "capture {'base': 0} None",
        "before_result None",
        "leave True",
    ]
    assert bench.runs == [1, 2]
    keys = {call.idempotency_key for call in bench.environment.calls}
    assert len(keys) == 1


async def test_the_scope_may_have_the_result(bench: Bench) -> None:
    task = await bench.interrupt(RecoverResult(ScopeResult(text="adopted", is_error=False)))
    assert (await bench.world.result(task)).text == "adopted"
    await settle()
    assert [what.split()[0] for what in bench.asked] == ["attach", "recover", "before_result", "leave"]
    assert bench.runs == [1]


async def test_the_scope_may_say_interrupted(bench: Bench) -> None:
    task = await bench.interrupt(RecoverInterrupted("It was undone."))
    result = await bench.world.result(task)
    assert result.code == "interrupted"
    assert "It was undone." in result.text
    await settle()
    assert bench.asked[-2:] == ["before_result interrupted", "leave True"]


async def test_an_aborted_call_of_an_earlier_process_is_recovered_as_aborted(bench: Bench) -> None:
    await bench.world.open(bench.work)
    task = await bench.world.call("work")
    await until(lambda: bool(bench.runs))
    await settle()
    await bench.world.crash()
    bench.asked.clear()
    await bench.world.open(bench.work, resume=False)
    await bench.world.runtime.abort_task(task)
    assert (await bench.world.result(task)).code == "aborted"
    await settle()
    assert bench.asked[1:] == [
        "recover 1 {'base': 0} safe=False abort=True",
        "before_result aborted",
        "leave True",
    ]


async def test_a_call_that_keeps_ending_its_process_is_given_up(bench: Bench) -> None:
    task = await bench.interrupt(RecoverRun("next"))
    for number in range(2, 6):
        bench.hang = True
        await until(lambda number=number: len(bench.runs) == number)
        await settle()
        await bench.world.crash()
        await bench.world.open(bench.work)
    result = await bench.world.result(task)
    assert result.code == "interrupted"
    assert "cut off 5 times" in result.text
    assert bench.runs == [1, 2, 3, 4, 5]


class Flaky:
    """A tool whose environment goes away under it, so many times."""

    def __init__(self, bench: Bench, losses: int) -> None:
        self.losses = losses
        self.attempts: list[int] = []

        @tool(effects="space")
        async def work(env: ExecutionEnvironment, call: ToolCall) -> str:
            """Work."""
            self.attempts.append(call.attempt)
            if len(self.attempts) <= self.losses:
                raise EnvironmentLost("the daemon is gone")
            return "done"

        self.tool = work


async def test_an_environment_lost_under_a_call_is_recovered_in_the_same_process_h187(bench: Bench) -> None:
    flaky = Flaky(bench, 1)
    bench.environment.scope.recovery = RecoverRun("next")
    await bench.world.open(flaky.tool)
    assert (await bench.world.run("work")).text == "done"
    await settle()
    assert [what.split()[0] for what in bench.asked] == [
        "attach",
        "enter",
        "before_intent",
        "recover",
        "before_intent",
        "capture",
        "before_result",
        "leave",
    ]
    assert flaky.attempts == [1, 2]
    assert bench.environment.scope.turn.locked() is False


@pytest.mark.parametrize(
    "recovery", [RecoverInterrupted("It was undone."), RecoverResult(ScopeResult(text="had", is_error=False))]
)
async def test_a_lost_environment_may_end_the_call_h187(bench: Bench, recovery: Recovery) -> None:
    flaky = Flaky(bench, 1)
    bench.environment.scope.recovery = recovery
    await bench.world.open(flaky.tool)
    result = await bench.world.run("work")
    assert (result.code, result.text) in (("interrupted", f"{INTERRUPTED} It was undone."), (None, "had"))
    assert flaky.attempts == [1]


@pytest.mark.parametrize("attempt", ["same", "next"])
async def test_an_environment_that_is_lost_each_time_is_given_up_h187(bench: Bench, attempt: str) -> None:
    flaky = Flaky(bench, 100)
    bench.environment.scope.recovery = RecoverRun("same" if attempt == "same" else "next")
    await bench.world.open(flaky.tool)
    task = await bench.world.call("work")
    if attempt == "next":
        assert "cut off 5 times" in (await bench.world.result(task)).text
        return
    with pytest.raises(SessionFailed) as caught:
        await bench.world.runtime.wait(task)
    assert isinstance(caught.value.cause, EnvironmentUnusable)
    assert len(flaky.attempts) == 6


async def test_an_environment_lost_at_the_capture_is_recovered_h187(bench: Bench) -> None:
    bench.hang = False
    scope = bench.environment.scope
    scope.lost_at = "capture"
    scope.recovery = RecoverRun("same")
    await bench.world.open(bench.work)
    assert (await bench.world.run("work")).text == "done"
    assert bench.runs == [1, 2]  # a rerun counts as one more for the tool
    assert [what.split()[0] for what in bench.asked[3:6]] == ["capture", "recover", "capture"]


async def test_an_environment_lost_before_the_intent_begins_again_h187(bench: Bench) -> None:
    bench.hang = False
    losses = [EnvironmentLost("gone")]

    @bench.work.intent
    async def prepare(env: ExecutionEnvironment) -> JsonValue:
        if losses:
            raise losses.pop()
        return None

    await bench.world.open(bench.work)
    assert (await bench.world.run("work")).text == "done"
    assert [what.split()[0] for what in bench.asked[1:5]] == ["enter", "leave", "enter", "before_intent"]


async def test_an_aborted_call_whose_environment_is_lost_is_recovered_as_aborted_h187(bench: Bench) -> None:
    await bench.world.open(bench.work)
    task = await bench.world.call("work")
    await until(lambda: bool(bench.runs))
    bench.environment.scope.lost_at = "capture"
    await bench.world.runtime.abort_task(task)
    assert (await bench.world.result(task)).code == "aborted"
    await settle()
    assert [what.split()[0] for what in bench.asked[3:]] == ["capture", "recover", "before_result", "leave"]


@pytest.mark.parametrize("place", ["recover", "before_result"])
async def test_an_environment_lost_while_a_call_is_aborted_is_asked_again_h187(bench: Bench, place: str) -> None:
    await bench.world.open(bench.work)
    task = await bench.world.call("work")
    await until(lambda: bool(bench.runs))
    scope = bench.environment.scope
    scope.lost_at = place
    scope.recovery = RecoverResult(ScopeResult(text="undone", is_error=True))
    if place == "recover":
        await bench.world.crash()
        await bench.world.open(bench.work, resume=False)
    await bench.world.runtime.abort_task(task)
    assert (await bench.world.result(task)).text == "undone"
    await settle()
    assert [what.split()[0] for what in bench.asked[-3:]] == ["recover", "before_result", "leave"]
    assert not bench.world.reports
    assert not scope.turn.locked()


async def test_an_environment_that_is_lost_while_it_is_entered_is_entered_again_h187(bench: Bench) -> None:
    bench.hang = False
    scope = bench.environment.scope
    scope.lost_at = "enter"
    await bench.world.open(bench.work)
    assert (await bench.world.run("work")).text == "done"
    assert [what.split()[0] for what in bench.asked[1:4]] == ["enter", "enter", "before_intent"]


async def test_an_environment_lost_as_a_call_without_an_intent_leaves_begins_again_h187(bench: Bench) -> None:
    bench.hang = False
    scope = bench.environment.scope

    @bench.work.intent
    async def prepare(env: ExecutionEnvironment) -> JsonValue:
        if len(bench.asked) == 2:
            scope.lost_at = "leave"
            raise EnvironmentLost("gone")
        return None

    await bench.world.open(bench.work)
    assert (await bench.world.run("work")).text == "done"
    assert [what.split()[0] for what in bench.asked[1:5]] == ["enter", "leave", "enter", "before_intent"]


async def test_an_environment_lost_behind_the_outcome_changes_nothing_of_it_h187(bench: Bench) -> None:
    bench.hang = False
    bench.environment.scope.lost_at = "leave"
    await bench.world.open(bench.work)
    assert (await bench.world.run("work")).text == "done"
    await settle()
    assert [what.split()[0] for what in bench.asked[-2:]] == ["before_result", "leave"]
    assert not bench.world.reports


async def test_an_environment_may_refuse_a_call_before_its_intent_h187(bench: Bench) -> None:
    bench.hang = False
    bench.environment.scope.refused = "the workspace holds a socket"
    await bench.world.open(bench.work)
    result = await bench.world.run("work")
    assert (result.code, result.text) == ("tool_unavailable", "the workspace holds a socket")
    await settle()
    assert bench.asked == ["attach []", "enter work"]


async def test_an_environment_that_is_gone_leaves_nothing_but_interrupted(bench: Bench) -> None:
    await bench.world.open(bench.work)
    task = await bench.world.call("work")
    await until(lambda: bool(bench.runs))
    await bench.world.crash()
    bench.world.environment = None
    await bench.world.open(bench.work)
    assert (await bench.world.result(task)).code == "interrupted"


@pytest.mark.parametrize("place", ["enter", "before_intent", "capture", "before_result"])
async def test_an_unusable_environment_fails_the_session_and_is_no_result(bench: Bench, place: str) -> None:
    bench.hang = False
    bench.environment.scope.unusable_at = place
    await bench.world.open(bench.work)
    task = await bench.world.call("work")
    with pytest.raises(SessionFailed) as caught:
        await bench.world.runtime.wait(task)
    assert isinstance(caught.value.cause, EnvironmentUnusable)
    bench.environment.scope.unusable_at = ""
    bench.world.storage = bench.world.storage.snapshot()
    await bench.world.session.close()
    await bench.world.open(bench.work, resume=False)
    assert await bench.world.results() == []


async def test_a_closing_session_leaves_the_call_open(bench: Bench) -> None:
    await bench.world.open(bench.work)
    await bench.world.call("work")
    await until(lambda: bool(bench.runs))
    await bench.world.close()
    assert bench.asked[-2:] == ["leave False", "detach"]


async def test_a_scope_recovers_a_call_and_the_outside_is_not_asked_h176(bench: Bench) -> None:
    @bench.work.reconcile
    async def never() -> Reconciled:
        raise AssertionError("asked outside about what the scope knows")

    task = await bench.interrupt(RecoverResult(ScopeResult(text="adopted", is_error=False)))
    assert (await bench.world.result(task)).text == "adopted"
