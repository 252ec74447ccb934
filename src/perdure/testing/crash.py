"""``perdure crash --mode simulation``: many runs of scenarios, or one again (rules P7, P13 to P16, P31)."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import get_args

from perdure.testing.faults import Fault, FaultKind
from perdure.testing.scenarios import SCENARIOS
from perdure.testing.simulation import (
    Plan,
    Run,
    Scenario,
    Tally,
    edges,
    failures,
    run_reference,
    simulate,
)

MAX_KILLS = 3
"""Lives that end early in one run."""
ENOUGH_RUNS = 400
"""From this many runs of all scenarios on, every kind of fault and recovery must have occurred."""
RECOVERIES = ("adopted", "reattached", "restored", "rerun", "interrupted")


def run_simulation(
    *,
    runs: int = 25,
    seed: int = 1,
    scenario: str | None = None,
    kill: Sequence[str | int] | None = None,
    order_seed: int | None = None,
    echo: Callable[[str], None] = print,
) -> int:
    """The exit code: 0 if every run came to the end it had to.

    ``scenario``: the name of a shipped one, or ``module:NAME`` of one's own, whose module is looked for in the working
    directory too (rule P36). ``kill`` (``3``, ``"before:4"``, see Fault) or ``order_seed`` repeats one run of it.
    Without them ``runs`` runs are drawn, each reproducible by the command that is printed if it fails.
    """
    try:
        found = None if scenario is None else find(scenario)
    except ValueError as error:
        echo(str(error))
        return 2
    if found is not None and (lacking := _lacking(found)):
        echo(f"scenario {found.name} cannot run: {lacking}")
        return 2
    with _quiet():
        if kill is None and order_seed is None:
            return _campaign(_at_hand(echo) if found is None else [found], runs, seed, echo)
        if found is None:
            echo("--kill and --order-seed repeat a run of one scenario: name it with --scenario")
            return 2
        try:
            faults = tuple(Fault.parse(str(text)) for text in kill or ())
        except ValueError as error:
            echo(str(error))
            return 2
        return _replay(found, Plan(scenario=found.name, seed=seed, faults=faults, order_seed=order_seed), echo)


def find(name: str) -> Scenario:
    """A shipped scenario, or ``module:NAME``, which is its name then, whatever it calls itself. Raises ValueError."""
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in SCENARIOS:
            raise ValueError(
                f"there is no scenario {name!r}; write module:NAME for one of yours; those that are shipped: "
                f"{', '.join(SCENARIOS)}"
            )
        return SCENARIOS[name]
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        value: object = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"there is no scenario {name!r}: {error}") from error
    if not isinstance(value, Scenario):
        raise ValueError(f"{name!r} is a {type(value).__name__}, and no Scenario")
    return replace(value, name=name)


def _lacking(scenario: Scenario) -> str:
    """What is not installed that it needs, and how to get it; empty if nothing is missing."""
    if scenario.require is not None:
        try:
            scenario.require()
        except ImportError as error:
            return str(error)
    return ""


def _at_hand(echo: Callable[[str], None]) -> list[Scenario]:
    """All shipped ones that can run here; of the others it is said why they are left out."""
    lacking = {scenario.name: _lacking(scenario) for scenario in SCENARIOS.values()}
    for why in sorted({*lacking.values()} - {""}):
        echo(f"left out: {', '.join(name for name in lacking if lacking[name] == why)} ({why})")
    return [scenario for scenario in SCENARIOS.values() if not lacking[scenario.name]]


def _replay(scenario: Scenario, plan: Plan, echo: Callable[[str], None]) -> int:
    result = simulate(scenario, plan, reference=run_reference(scenario, seed=plan.seed))
    for number, life in enumerate(result.lives, 1):
        fault = f" by {life.fault}" if life.fault is not None and life.reached else ""
        echo(f"life {number}: {life.ended}{fault} after {life.commits} commits, {life.reads} reads, {life.steps} steps")
    echo(str(result))
    return 0 if result.ok else 1


def _campaign(scenarios: Sequence[Scenario], runs: int, seed: int, echo: Callable[[str], None]) -> int:
    found = Tally()
    for number in range(seed, seed + runs):
        scenario = scenarios[number % len(scenarios)]
        reference = simulate(scenario, Plan(scenario=scenario.name, seed=number))
        result = reference
        if reference.ok:
            plan = draw(scenario.name, reference, number)
            result = simulate(scenario, plan, reference=reference)
        found.add(result, scenario)
        if not result.ok:
            echo(str(result))
    return _summary(found, scenarios, echo)


def draw(name: str, reference: Run, seed: int) -> Plan:
    """A run by chance: one to three faults anywhere, half of the runs in an order of tasks of their own."""
    chance = random.Random(f"{name} {seed}")  # noqa: S311  # reproducible is what it is for
    life = reference.lives[0]
    kinds: list[list[Fault]] = [
        edges(life.commits),
        edges(life.commits),
        failures(life.commits),
        [Fault("step", chance.randint(1, life.steps))],
        [Fault("read", chance.randint(1, max(1, life.reads)))],
    ]
    kinds = [kind for kind in kinds if kind]  # without a commit, none can fail
    faults = tuple(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(1, MAX_KILLS)))
    order_seed = chance.randrange(1_000_000) if chance.random() < 0.5 else None
    return Plan(scenario=name, seed=seed, faults=faults, order_seed=order_seed)


def _summary(found: Tally, scenarios: Sequence[Scenario], echo: Callable[[str], None]) -> int:
    kills = sum(count for kind, count in found.faults.items() if Fault.parse(f"{kind}:1").kills)
    by_fault = " ".join(f"{kind}={count}" for kind, count in sorted(found.faults.items())) or "none"
    recoveries = {"rerun": found.reruns, "interrupted": found.interrupted}
    by_recovery = " ".join(f"{kind}={recoveries.get(kind, 0)}" for kind in RECOVERIES)
    failed = len(found.failures)
    echo(
        f"SUMMARY mode=simulation scenarios={min(len(scenarios), found.runs)} runs={found.runs} "
        f"ok={found.runs - failed} failed={failed} kills={kills} "
        f"faults: {by_fault} recoveries: {by_recovery}"
    )
    if failed:
        return 1
    missing = list(_not_exercised(found, kills, whole=len(scenarios) == len(SCENARIOS)))
    for what in missing:
        echo(f"this proves too little: {what}")
    return 1 if missing else 0


def _not_exercised(found: Tally, kills: int, *, whole: bool) -> Iterator[str]:
    """What a campaign that size must have seen, and did not (rule P13)."""
    if kills * 3 < found.runs:
        yield f"only {kills} kills took place in {found.runs} runs"
    if whole and found.runs >= ENOUGH_RUNS:
        for kind in get_args(FaultKind):
            if not found.faults[kind]:
                yield f"no fault of kind {kind} took place"
        if not found.reruns or not found.interrupted:
            yield f"{found.reruns} safe effects were repeated, {found.interrupted} calls interrupted"


@contextmanager
def _quiet() -> Generator[None]:
    """Failures that were asked for are not worth a log line each."""
    log = logging.getLogger("perdure")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
