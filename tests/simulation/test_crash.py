"""The simulation mode of the crash command (rules P7, P13 to P16)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from perdure.testing import crash
from perdure.testing.crash import run_simulation
from perdure.testing.scenarios.kernel import atomic, open_session
from perdure.testing.simulation import Host, Plan, Scenario

OWN = """
from perdure import Extension, Harness, Session, ToolCall, tool
from perdure.testing import Host, Scenario, ScriptedModel, call, say


async def program(host: Host) -> None:
    @tool(replay="safe")
    async def pay(call: ToolCall) -> str:
        host.effect("paid"{key})
        return "paid"

    async with Harness.open(
        host.storage,
        models=ScriptedModel([call("pay"), say("done")]),
        extensions=[Extension("shop", tools=[pay])],
        clock=host.clock,
        entropy=host.entropy,
        on_report=host.report,
    ) as harness:
        paying = await (await harness.root()).submit("Pay.", request_id="pay")
        assert (await paying.answer()).text == "done"


async def nothing(host: Host) -> None:
    pass


async def looking(host: Host) -> None:
    async with Session.open(host.storage, clock=host.clock, entropy=host.entropy):
        pass


PAYING = Scenario(name="whatever", program=program, safe=frozenset({{"paid"}}))
IDLE = Scenario(name="idle", program=nothing)
LOOKING = Scenario(name="looking", program=looking)
NUMBER = 7
"""


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_campaign_sums_up_what_it_did_p14(said: list[str]) -> None:
    assert run_simulation(runs=60, seed=1, echo=said.append) == 0
    (summary,) = said
    assert summary.startswith("SUMMARY mode=simulation scenarios=")
    assert " runs=60 ok=60 failed=0 kills=" in summary
    assert "recoveries: adopted=0 reattached=0 restored=0 rerun=" in summary


def test_a_seed_repeats_a_campaign_p16(said: list[str]) -> None:
    for seed in (3, 3, 4):
        run_simulation(runs=20, seed=seed, scenario="graph", echo=said.append)
    assert said[0] == said[1] != said[2]


def test_one_run_is_repeated_by_its_faults_p7(said: list[str]) -> None:
    assert run_simulation(scenario="graph", seed=5, kill=["after:3", "before:2"], order_seed=9, echo=said.append) == 0
    assert [line.partition(" after ")[0] for line in said[:3]] == [
        "life 1: killed by after:3",
        "life 2: killed by before:2",
        "life 3: done",
    ]
    assert "graph: ok" in said[3]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"scenario": "nowhere"}, "there is no scenario 'nowhere'"),
        ({"kill": [3]}, "name it with --scenario"),
        ({"scenario": "graph", "kill": ["never:3"]}, "is no fault"),
    ],
)
def test_what_makes_no_sense_is_refused_p15(options, complaint: str, said: list[str]) -> None:
    assert run_simulation(**options, echo=said.append) == 2
    assert complaint in said[0]


def planted(monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    monkeypatch.setattr(crash, "SCENARIOS", {scenario.name: scenario})


def test_one_inconsistent_run_fails_the_campaign_and_prints_its_command_p15(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    async def program(host: Host) -> None:
        async with open_session(host):
            host.effect("not idempotent")

    planted(monkeypatch, Scenario(name="planted", program=program, safe=frozenset({"not idempotent"})))
    assert run_simulation(runs=10, seed=1, echo=said.append) == 1
    assert any("replay: perdure crash --mode simulation --scenario planted --seed" in line for line in said)
    command = next(line for line in said if "replay:" in line).partition("replay: ")[2].split()
    kill = command[command.index("--kill") + 1].split(",")
    order = command[command.index("--order-seed") + 1] if "--order-seed" in command else None
    seed = command[command.index("--seed") + 1]
    again: list[str] = []
    repeated = run_simulation(
        scenario="planted",
        seed=int(seed),
        kill=kill,
        order_seed=None if order is None else int(order),
        echo=again.append,
    )
    assert repeated == 1
    assert "effect 'not idempotent' took place" in again[-1]


def test_a_scenario_that_fails_without_a_kill_fails_the_campaign_p15(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    async def program(_host: Host) -> None:
        await asyncio.get_running_loop().create_future()

    planted(monkeypatch, Scenario(name="planted", program=program))
    assert run_simulation(runs=3, echo=said.append) == 1
    assert "nothing will ever happen again" in said[0]
    assert "the program never opened its store" in said[0]


def test_a_campaign_that_kills_nobody_fails_p13(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    planted(monkeypatch, Scenario(name="planted", program=atomic))
    monkeypatch.setattr(crash, "draw", lambda name, _reference, seed: Plan(scenario=name, seed=seed))
    assert run_simulation(runs=5, echo=said.append) == 1
    assert "this proves too little" in said[-1]


def own(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, key: str) -> None:
    (folder / f"{module}.py").write_text(OWN.format(key=key))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_scenario_of_ones_own_is_drawn_and_its_failure_repeated_p36(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own("own_good", tmp_path, monkeypatch, key=", key=call.idempotency_key")
    assert run_simulation(scenario="own_good:PAYING", runs=20, echo=said.append) == 0
    assert " runs=20 ok=20 failed=0 kills=" in said[-1]
    assert run_simulation(scenario="own_good:IDLE", runs=20, echo=said.append) == 1
    assert " runs=20 ok=0 failed=20 kills=0 " in said[-1]
    assert run_simulation(scenario="own_good:LOOKING", runs=20, echo=said.append) == 0
    assert " runs=20 ok=20 failed=0 kills=" in said[-1]
    own("own_bad", tmp_path, monkeypatch, key="")
    assert run_simulation(scenario="own_bad:PAYING", runs=100, echo=said.append) == 1
    command = next(line for text in said for line in text.splitlines() if "replay: " in line and "own_bad" in line)
    words = command.partition("replay: ")[2].split()
    assert words[:6] == ["perdure", "crash", "--mode", "simulation", "--scenario", "own_bad:PAYING"]
    again = dict(zip(words[4::2], words[5::2], strict=True))
    assert run_simulation(scenario=again["--scenario"], kill=again["--kill"].split(","), echo=said.append) == 1
    assert any("effect 'paid' took place 2 times" in text for text in said)


def test_what_is_no_scenario_is_said_p36(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own("own_none", tmp_path, monkeypatch, key="")
    for name, why in (
        ("own_none:NUMBER", "is a int, and no Scenario"),
        ("own_none:NOBODY", "no attribute 'NOBODY'"),
        ("own_nowhere:PAYING", "No module named 'own_nowhere'"),
        (":PAYING", "there is no scenario ':PAYING'"),
        ("paying", "write module:NAME"),
    ):
        assert run_simulation(scenario=name, echo=said.append) == 2
        assert why in said[-1]
