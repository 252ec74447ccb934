"""A crash between any two commits of a conversation: it resumes by itself to the same transcript (rule H77).

Killed right after and right before every commit, once more during each recovery, at random steps of the loop; with
every commit refused, and stored but not acknowledged.
"""

from __future__ import annotations

import pytest
from kit import Audit, Note

from perdure.harness.conversation import Conversation
from perdure.harness.harness import Harness
from perdure.harness.registry import Extension
from perdure.harness.settings import RetryPolicy
from perdure.harness.tool import ToolCall, tool
from perdure.testing.model import ScriptedModel, call, calls, fail, say
from perdure.testing.simulation import Host, Plan, Scenario, edges, explore, simulate

SCRIPT = {
    "plain": say("an answer of some length", chunk=4),
    "tools": [calls(call("look", at="a"), call("look", at="b"), text="let me see"), call("look", at="c"), say("seen")],
    "flaky": fail("overloaded", times=2, then=say("at last"), partial="well then"),
    "broken": fail("malformed"),
    "follow": say("followed"),
    "steer": say("steered"),
    "note": say("noted"),
    "handoff": say("handed off"),
}


def harness_of(host: Host, *, effects: bool = True):
    @tool(replay="safe")
    async def look(at: str, call: ToolCall) -> str:
        """Look."""
        call.output(f"looking at {at}\n")
        await host.clock.sleep(0.3)
        if effects:
            host.effect(f"look {at}", key=call.idempotency_key)
        return f"seen {at}"

    async def pace(request, event) -> None:
        await host.clock.sleep(0.03)

    return Harness.open(
        host.storage,
        models=ScriptedModel(SCRIPT, pace=pace),
        extensions=[Extension("tools", tools=[look])],
        instructions="Be brief.",
        retry=RetryPolicy(first_ms=100),
        clock=host.clock,
        entropy=host.entropy,
        on_report=host.report,
        after_failure="continue",
    )


async def one_turn(host: Host, root: Conversation) -> None:
    answer = await (await root.submit("plain", request_id="1")).answer()
    assert answer.text == "an answer of some length"


async def tool_turns(host: Host, root: Conversation) -> None:
    answer = await (await root.submit("tools", request_id="1")).answer()
    assert answer.text == "seen"


async def retries(host: Host, root: Conversation) -> None:
    answer = await (await root.submit("flaky", request_id="1")).answer()
    assert answer.text == "at last"


async def failure(host: Host, root: Conversation) -> None:
    failing = await root.submit("broken", request_id="1")
    after = await root.submit("follow", request_id="2")
    assert (await failing.wait()).reason == "model_error"
    assert (await after.answer()).text == "followed"


async def writes_and_follow_ups(host: Host, root: Conversation) -> None:
    await root.write(Audit(n=1), request_id="w1")
    first = await root.submit("plain", request_id="1")
    await first.wait()
    await root.write(Note(text="note"), request_id="w2")
    reset = await root.reset("go on", request_id="r")
    assert await reset.status() == "done"
    second = await root.submit("follow", request_id="2")
    assert (await second.answer()).text == "followed"


PROGRAMS = {
    "one_turn": (one_turn, frozenset()),
    "tool_turns": (tool_turns, frozenset({"look a", "look b", "look c"})),
    "retries": (retries, frozenset()),
    "failure": (failure, frozenset()),
    "writes_and_follow_ups": (writes_and_follow_ups, frozenset()),
}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_killed_at_every_commit_it_ends_as_if_nothing_had_been_h77(name) -> None:
    part, safe = PROGRAMS[name]

    async def program(host: Host) -> None:
        async with harness_of(host) as harness:
            await part(host, await harness.root())
            await harness.idle()

    exploration = explore(
        Scenario(name=f"test-{name}", program=program, safe=safe), twice=8, schedules=6, steps=10, reads=2
    )
    assert not exploration.failures, str(exploration.failures[0])
    assert exploration.runs > 10


async def a_busy_conversation(host: Host, root: Conversation) -> None:
    """Everything that can be queued, while a run with tools goes on."""
    first = await root.submit("tools", request_id="1")
    await host.clock.sleep(0.1)
    others = [
        await root.submit("follow", request_id="2"),
        await root.submit("steer", mode="steer", request_id="3"),
        await root.write(Note(text="note"), request_id="4"),
        await root.write(Audit(n=1), request_id="5"),
        await root.reset("handoff", request_id="6"),
        await root.submit("plain", mode="steer", request_id="7"),
    ]
    for submission in (first, *others):
        record = await submission.wait()
        assert record.status == "done" or record.reason == "reset", record


def test_whatever_is_queued_is_settled_wherever_it_is_killed_h43_h77() -> None:
    """Where what is queued lands depends on when the kill came; that all of it lands does not."""

    async def program(host: Host) -> None:
        async with harness_of(host, effects=False) as harness:
            root = await harness.root()
            await a_busy_conversation(host, root)
            await harness.idle()
            assert not await root.busy()
            inspection = await harness.inspect()
            assert (inspection.queued, inspection.placed, inspection.tasks) == ([], [], [])

    scenario = Scenario(name="test-busy", program=program, steady=False)
    reference = simulate(scenario)
    assert reference.ok, str(reference)
    for fault in edges(reference.lives[0].commits):
        result = simulate(scenario, Plan(scenario=scenario.name, faults=(fault,)))
        assert result.ok, str(result)
