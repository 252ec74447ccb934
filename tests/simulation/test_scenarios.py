"""Every shipped scenario, killed at both edges of every commit, once and twice, in many orders (rules P2 to P6)."""

from __future__ import annotations

import pytest

from perdure.testing.crash import run_simulation
from perdure.testing.scenarios import SCENARIOS
from perdure.testing.scenarios.chance import CHANCE
from perdure.testing.simulation import explore

BY_CHANCE = [*(scenario.name for scenario in CHANCE), "decided-by-chance"]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in BY_CHANCE])
def test_a_scenario_comes_to_the_same_end_wherever_it_is_killed_p5(name: str) -> None:
    found = explore(SCENARIOS[name], twice=8, schedules=8, steps=8, reads=3)
    assert not found.failures, "\n".join(map(str, found.failures[:3]))
    assert all(found.faults[kind] for kind in ("after", "before", "fail", "unacknowledged", "step")), found.faults


@pytest.mark.parametrize("name", BY_CHANCE)
def test_programs_by_chance_keep_every_promise_p5(name: str) -> None:
    said: list[str] = []
    assert run_simulation(scenario=name, runs=60, seed=1, echo=said.append) == 0, "\n".join(said)
