"""Faults planted in programs over the harness: each is found, wherever in the pipeline it sits (rules P4 to P6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from msgspec import structs

from perdure.harness.approval import Decision
from perdure.harness.generation import GenerationTask
from perdure.harness.hooks import HookCall, before_tool
from perdure.harness.interruption import Interruptions
from perdure.harness.model import ModelRequest
from perdure.harness.opened import Refused
from perdure.harness.permission import Permissions
from perdure.harness.tool import tool
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.tasks import recovery
from perdure.tasks.run import Run
from perdure.testing.crash import run_simulation
from perdure.testing.faulty_models import FaultyModels
from perdure.testing.model import Reply, ScriptedModel, call, say
from perdure.testing.normal import Rules
from perdure.testing.scenarios import SCENARIOS
from perdure.testing.scenarios.hosting import open_harness
from perdure.testing.simulation import Exploration, Host, Scenario, explore


def scenario(program: Callable[[Host], Awaitable[None]], **options) -> Scenario:
    return Scenario(name="planted", program=program, **options)


def found(scenario: Scenario) -> str:
    return problems(explore(scenario, twice=5))


def problems(exploration: Exploration) -> str:
    assert exploration.failures, "the planted fault was not found"
    return "\n".join(problem for failure in exploration.failures for problem in failure.problems)


def asks_for(tool, *, hooks=()):
    async def program(host: Host) -> None:
        async with open_harness(host, [call("pay"), say("paid")], tools=[tool(host)], hooks=hooks) as (_, root):
            await (await root.submit("Pay.", request_id="pay")).answer()

    return program


# --- tools -----------------------------------------------------------------------------------------------------


def test_a_tool_declared_safe_that_is_not_idempotent_is_found_p5() -> None:
    def pay(host: Host):
        @tool(replay="safe")
        async def pay() -> str:
            """Pay."""
            host.effect("pay")
            await host.clock.sleep(1)
            return "paid"

        return pay

    assert "effect 'pay' took place 2 times" in found(scenario(asks_for(pay), safe=frozenset({"pay"})))


def test_a_tool_whose_key_does_not_last_is_found_p5() -> None:
    def pay(host: Host):
        @tool(replay="safe")
        async def pay() -> str:
            """Pay."""
            host.effect("pay", key=host.entropy.token())
            await host.clock.sleep(1)
            return "paid"

        return pay

    assert "effect 'pay' took place 2 times" in found(scenario(asks_for(pay), safe=frozenset({"pay"})))


def test_an_unsafe_tool_declared_safe_is_found_p5() -> None:
    def pay(host: Host):
        @tool(replay="safe")
        async def pay() -> str:
            """Pay."""
            host.effect("pay")
            return "paid"

        return pay

    assert "effect 'pay' was attempted 2 times" in found(scenario(asks_for(pay), unsafe=frozenset({"pay"})))


def test_an_extension_that_acts_before_the_intent_of_the_call_is_found_p5() -> None:
    async def program(host: Host) -> None:
        @before_tool
        async def hasty(_asked: HookCall) -> None:
            host.effect("pay")

        await asks_for(harmless, hooks=[hasty])(host)

    def harmless(_host: Host):
        @tool(name="pay")
        async def pay() -> str:
            """Pay."""
            return "paid"

        return pay

    rules = Rules(unsafe=frozenset({"pay"}))
    assert "effect 'pay' was attempted 2 times" in found(scenario(program, unsafe=frozenset({"pay"}), rules=rules))


def test_two_calls_that_share_a_key_are_found_p5() -> None:
    def pay(host: Host):
        @tool(replay="safe")
        async def pay(to: str = "you") -> str:
            """Pay."""
            host.effect(f"pay {to}", key="the same for everybody")
            return "paid"

        return pay

    async def program(host: Host) -> None:
        replies = [call("pay", to="me"), call("pay", to="you"), say("paid")]
        async with open_harness(host, replies, tools=[pay(host)]) as (_, root):
            await (await root.submit("Pay.", request_id="pay")).answer()

    assert "effect 'pay you' took place 0 times" in found(scenario(program, safe=frozenset({"pay me", "pay you"})))


def test_a_safe_call_that_ends_interrupted_is_found_p6(monkeypatch: pytest.MonkeyPatch) -> None:
    async def give_up(self, run, losses):
        return await self._interrupted(run)

    monkeypatch.setattr(Interruptions, "decide", give_up)
    assert "was interrupted, which only an unsafe one may be" in problems(explore(SCENARIOS["parallel-tools"], twice=0))


def test_a_call_that_runs_without_its_approval_is_found_h110(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Permissions, "may_ask", lambda self, tool: False)
    said = problems(explore(SCENARIOS["approval-allowed"], twice=0))
    assert "has its intent, and nobody allowed it" in said


def test_a_call_that_is_asked_about_again_after_its_decision_is_found_h302(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(self, run):
        raise Refused("expired", "the decision was lost")

    monkeypatch.setattr(Permissions, "decided", forgotten)
    said = problems(explore(SCENARIOS["approval-unconsumed"], twice=0))
    assert "the calls ended ['expired', 'expired'], not [None, None]" in said


def test_a_denial_that_is_not_heard_is_found_h114(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unchecked(self, tx, run, intent):
        return None

    hears = Permissions.decided

    def deaf(self, run):
        return hears(self, run) if run.timed_out else msgspec.convert(run.signal, Decision)

    monkeypatch.setattr(Permissions, "decided", deaf)
    monkeypatch.setattr(Permissions, "check", unchecked)
    assert "effect 'launch one'" in problems(explore(SCENARIOS["approval-denied"], twice=0))
    said: list[str] = []
    assert run_simulation(scenario="decided-by-chance", runs=20, seed=1, echo=said.append) != 0
    assert " ran, and was denied" in "\n".join(said)


# --- programs and models ---------------------------------------------------------------------------------------


def test_an_input_without_a_request_id_is_found_p5() -> None:
    async def program(host: Host) -> None:
        async with open_harness(host, say("hello")) as (_, root):
            await (await root.submit("Hello?")).answer()

    assert "submissions: 2 instead of 1" in found(scenario(program))


def test_a_model_that_answers_by_more_than_the_request_is_found_p5() -> None:
    async def program(host: Host) -> None:
        def script(_request: ModelRequest) -> Reply:
            return say(f"this is life {host.life}")

        async with open_harness(host, script) as (_, root):
            await (await root.submit("Hello?", request_id="hello")).answer()

    assert '"this is life 2" instead of "this is life 1"' in found(scenario(program))


def test_a_tool_that_hangs_is_found_and_shown_p4() -> None:
    def pay(_host: Host):
        @tool
        async def pay() -> str:
            """Pay."""
            await asyncio.get_running_loop().create_future()
            return "never"

        return pay

    text = found(scenario(asks_for(pay)))
    assert "nothing will ever happen again" in text
    assert "pay (test_harness_instrument.py" in text


# --- the product -----------------------------------------------------------------------------------------------


def breaks(name: str, **options) -> str:
    return problems(explore(SCENARIOS[name], twice=5, **options))


def test_a_recovery_that_loses_the_phase_is_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    right = recovery.recovered

    def wrong(record):
        recovered = right(record)
        return structs.replace(recovered, state=structs.replace(recovered.state, phase="start"))

    monkeypatch.setattr(recovery, "recovered", wrong)
    assert "entries: " in breaks("phases")


def test_a_crash_that_is_not_counted_is_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "recovered", recovery.stood_down)
    assert "effect 'launch' was attempted 2 times" in breaks("unsafe-phase")


def test_a_key_of_its_own_for_each_run_is_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "idempotency_key", property(lambda run: run._session.entropy.token()))
    assert "took place 2 times" in breaks("parallel-tools")


def test_a_commit_that_returns_before_it_has_settled_is_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_session, _own):
        return None

    monkeypatch.setattr(Session, "wait_staged", at_once)
    assert "what was committed is not there" in breaks("beside")


def test_request_ids_that_are_forgotten_are_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgotten(_tx, _conversation, _request):
        return None

    monkeypatch.setattr(Transaction, "request", forgotten)
    assert "has this request id already" in breaks("turn")


def test_a_partial_answer_that_is_lost_is_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_self, _run):
        return None

    monkeypatch.setattr(GenerationTask, "_keep_partial", nothing)
    assert "characters of an answer; nothing kept them" in breaks("turn")


def test_attempts_that_are_not_counted_are_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.harness.generation.add_attempt", lambda *_: None)
    assert "but pi.usage counts 0 requests" in breaks("turn")


def test_a_run_whose_inputs_nobody_settles_is_found_p5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationTask, "derive", lambda _self, _tx: None)
    assert "live generations are []" in breaks("faulted-run")


# --- faulty models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cue", "events"), [(None, 4), ("truncate", 2)])
async def test_a_faulty_model_stops_short_on_cue_only_p4(cue, events: int) -> None:
    models = FaultyModels(ScriptedModel(say("123456789", chunk=3)), lambda _request: cue, after=2)
    assert models.default == "test:scripted"
    assert models.find("test:scripted") is not None
    request = ModelRequest(model="test:scripted", messages=())
    assert len([event async for event in models.stream(request)]) == events


async def test_a_stalling_model_never_ends_p4() -> None:
    models = FaultyModels(ScriptedModel(say("123456789", chunk=3)), lambda _request: "stall", after=2)
    seen: list[object] = []

    async def read() -> None:
        async for event in models.stream(ModelRequest(model="test:scripted", messages=())):
            seen.append(event)

    reading = asyncio.create_task(read())
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(seen), reading.done()) == (2, False)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
