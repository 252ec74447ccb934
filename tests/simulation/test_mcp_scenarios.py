"""The scenarios of an MCP server that dies: what they show, and that they find faults that are planted (rule P37)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from perdure.testing import crash
from perdure.testing.crash import draw, run_simulation
from perdure.testing.loop import run
from perdure.testing.model import call, say
from perdure.testing.scenarios import SCENARIOS
from perdure.testing.scenarios.mcp import DONE, MOST_SEQ, became, open_agent, results
from perdure.testing.scenarios.mcp_shop import Shop
from perdure.testing.simulation import Host, Plan, Run, Scenario, explore, run_reference, simulate
from perdure.testing.wire import KILLED, SimulatedProgram
from perdure.tools.mcp import calls, keeper
from perdure.tools.mcp.losses import NotTaken
from perdure.tools.mcp.settings import McpMissing


def outcomes(reference: Run) -> dict[str, str]:
    assert reference.ok, reference
    assert reference.records is not None
    return {what: became(result) for what, result in results(reference.records.entries)}


# --- what becomes of a call when only the server dies ----------------------------------------------------------


def test_a_safe_call_is_answered_wherever_the_server_dies_h387() -> None:
    reference = run_reference(SCENARIOS["mcp-safe-calls-lost"])
    assert set(outcomes(reference).values()) == {DONE}
    assert all(reference.world.attempts[what] > 1 for what in ("price milk", "price salt"))


def test_an_unsafe_call_is_never_made_twice_and_its_result_is_not_known_h387() -> None:
    reference = run_reference(SCENARIOS["mcp-unsafe-calls-lost"])
    assert outcomes(reference) == {
        "order cup": "interrupted",  # it was done
        "order pot": "interrupted",  # it was not
        "order plate": DONE,
        "order spoon": "interrupted",
        "order fork": DONE,
    }
    assert reference.world.attempts == {"order cup": 1, "order plate": 1, "order spoon": 1, "order fork": 1}


def test_a_tool_that_is_gone_when_the_server_is_back_cannot_be_asked_again_h387_h389() -> None:
    assert outcomes(run_reference(SCENARIOS["mcp-tools-changed"])) == {
        "look shelf": "interrupted",
        "order cup": "tool_unavailable",
        "buy cup": DONE,
        "buy pot": "interrupted",
    }


def test_a_server_that_stays_away_longer_than_calls_wait_h388() -> None:
    assert outcomes(run_reference(SCENARIOS["mcp-server-away"])) == {
        "price tea": "interrupted",  # it may have been done before
        "order cup": "tool_unavailable",
        "price salt": DONE,
        "order pot": DONE,
    }


def test_a_server_that_was_never_there_is_tried_again_however_long_that_takes_h386() -> None:
    async def program(host: Host) -> None:
        shop = Shop(host)
        shop.state.add("closed")
        replies = [call("shop_price", item="tea"), say("done")]
        async with open_agent(host, shop, replies, required=False) as (server, _, root):
            await host.clock.sleep(12 * 3600)
            assert not server.connected
            shop.reopen()
            await host.clock.sleep(keeper.MOST_WAIT_S)
            assert server.connected
            assert (await (await root.submit("Shop.", request_id="shop")).answer()).text == "done"

    late = simulate(Scenario(name="late", program=program, any_effects=True))
    assert outcomes(late) == {"price tea": DONE}


def test_the_server_dies_at_every_commit_and_the_host_anywhere_p37() -> None:
    scenario = SCENARIOS["mcp-lost-at-a-commit"]
    cut: set[str] = set()
    for seed in range(MOST_SEQ):
        reference = simulate(scenario, Plan(scenario=scenario.name, seed=seed))
        cut |= {what for what, how in outcomes(reference).items() if how == "interrupted"}
        result = simulate(scenario, draw(scenario.name, reference, seed), reference=reference)
        assert result.ok, result
    assert cut == {"order cup", "order pot", "order plate"}


# --- planted faults --------------------------------------------------------------------------------------------


def planted(name: str) -> str:
    found = explore(SCENARIOS[name], twice=0, storage_failures=False)
    assert found.failures, "the planted fault was not found"
    return "\n".join(problem for failure in found.failures for problem in failure.problems)


def test_an_unsafe_call_that_is_asked_again_is_found_p37(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = calls.ask

    async def careless(host, send, *, safe, check):
        return await ask(host, send, safe=lambda: True, check=check)

    monkeypatch.setattr("perdure.tools.mcp.mirror.ask", careless)
    assert "effect 'order cup' was attempted 2 times, and may be only once" in planted("mcp-unsafe-calls-lost")


def test_a_call_that_was_cut_off_and_is_said_to_be_untouched_is_found_p37(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.tools.mcp.connection.CutOff", NotTaken)
    assert "effect 'order cup' was attempted 2 times, and may be only once" in planted("mcp-unsafe-calls-lost")


def test_a_safe_call_that_is_given_up_is_found_p37(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_TRIES", 1)
    assert "of shop_price was interrupted, which only an unsafe one may be" in planted("mcp-safe-calls-lost")


def test_tools_that_are_not_replaced_are_found_p37(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper.Keeper, "_replace", lambda self, registry: None)
    assert "what is offered is ['shop_get_prompt'" in planted("mcp-tools-changed")


def test_a_model_that_is_not_told_what_is_not_known_is_found_p37(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "INTERRUPTED", "Try again.")
    assert "of order cup, which became interrupted, the model was told 'Try again." in planted("mcp-unsafe-calls-lost")


# --- without the extra -----------------------------------------------------------------------------------------


def lacking() -> None:
    raise McpMissing("mcp is not installed; pip install 'perdure[mcp]'")


def test_without_the_extra_a_campaign_leaves_them_out_and_says_so_p37(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: SCENARIOS[name] for name in ("atomic", "mcp-resources", "mcp-tools-added")}
    known |= {name: replace(known[name], require=lacking) for name in known if name.startswith("mcp")}
    monkeypatch.setattr(crash, "SCENARIOS", known)
    said: list[str] = []
    assert run_simulation(runs=6, echo=said.append) == 0
    assert said[0] == "left out: mcp-resources, mcp-tools-added (mcp is not installed; pip install 'perdure[mcp]')"
    assert said[1].startswith("SUMMARY mode=simulation scenarios=1 runs=6 ok=6")
    assert run_simulation(scenario="mcp-resources", echo=said.append) == 2
    assert said[-1] == "scenario mcp-resources cannot run: mcp is not installed; pip install 'perdure[mcp]'"


def test_importing_the_scenarios_needs_no_extra_p37() -> None:
    program = "import perdure.testing.scenarios, sys; assert not {'mcp', 'anyio', 'jsonschema_rs'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- the wire --------------------------------------------------------------------------------------------------


def in_a_program(main: Callable[[SimulatedProgram], Awaitable[None]], host) -> None:
    async def both() -> None:
        program = SimulatedProgram(main, limit=1000)
        try:
            await host(program)
        finally:
            await program.end()

    run(both())


def test_what_a_killed_program_had_written_can_be_read_and_nothing_more_p37() -> None:
    async def main(program: SimulatedProgram) -> None:
        async for line in program.lines():
            program.say(f"you said {line}")

    async def host(program: SimulatedProgram) -> None:
        program.write(b"one\n")
        await asyncio.sleep(1)
        program.kill()
        program.write(b"two\n")
        with pytest.raises(BrokenPipeError):
            await program.drain()
        await program.exited.wait()
        assert await program.stdout.read() == b"you said one\n"
        assert program.code == KILLED

    in_a_program(main, host)


@pytest.mark.parametrize(("deaf", "code"), [(False, 0), (True, KILLED)])
def test_a_program_ends_with_its_input_or_is_killed_p37(deaf: bool, code: int) -> None:
    async def main(program: SimulatedProgram) -> None:
        async for _ in program.lines():
            raise AssertionError("nobody said anything")
        while deaf:
            await asyncio.sleep(1)

    async def host(program: SimulatedProgram) -> None:
        await program.end()
        assert program.code == code
        assert await program.stdout.read() == b""

    in_a_program(main, host)


def test_a_program_that_fails_has_ended_p37() -> None:
    async def main(program: SimulatedProgram) -> None:
        raise ValueError("on purpose")

    async def host(program: SimulatedProgram) -> None:
        await program.exited.wait()
        assert program.code == 1

    in_a_program(main, host)
