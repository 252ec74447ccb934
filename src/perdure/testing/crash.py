"""``perdure crash --mode simulation``: many runs of the shipped scenarios, or one again (rules P7, P13 to P16)."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from perdure.testing.faults import Fault
from perdure.testing.scenarios import SCENARIOS
from perdure.testing.simulation import (
    Exploration,
    Plan,
    Run,
    Scenario,
    edges,
    failures,
    run_reference,
    simulate,
)

MAX_KILLS = 3
"""Lives that end early in one run."""
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

    ``kill`` (``3``, ``"before:4"``, see Fault) or ``order_seed`` repeats one run of ``scenario``. Without them
    ``runs`` runs are drawn, each reproducible by the command that is printed if it fails.
    """
    if scenario is not None and scenario not in SCENARIOS:
        echo(f"there is no scenario {scenario!r}; the scenarios are: {', '.join(SCENARIOS)}")
        return 2
    with _quiet():
        if kill is None and order_seed is None:
            chosen = list(SCENARIOS.values()) if scenario is None else [SCENARIOS[scenario]]
            return _campaign(chosen, runs, seed, echo)
        if scenario is None:
            echo("--kill and --order-seed repeat a run of one scenario: name it with --scenario")
            return 2
        try:
            faults = tuple(Fault.parse(str(text)) for text in kill or ())
        except ValueError as error:
            echo(str(error))
            return 2
        return _replay(
            SCENARIOS[scenario], Plan(scenario=scenario, seed=seed, faults=faults, order_seed=order_seed), echo
        )


def _replay(scenario: Scenario, plan: Plan, echo: Callable[[str], None]) -> int:
    reference = run_reference(scenario, seed=plan.seed)
    result = simulate(scenario, plan, reference=_comparable(scenario, plan, reference))
    for number, life in enumerate(result.lives, 1):
        fault = f" by {life.fault}" if life.fault is not None and life.reached else ""
        echo(f"life {number}: {life.ended}{fault} after {life.commits} commits, {life.reads} reads, {life.steps} steps")
    echo(str(result))
    return 0 if result.ok else 1


def _comparable(scenario: Scenario, plan: Plan, reference: Run) -> Run | None:
    return reference if scenario.steady or plan.order_seed is None else None


def _campaign(scenarios: Sequence[Scenario], runs: int, seed: int, echo: Callable[[str], None]) -> int:
    found: dict[str, Exploration] = {}
    for number in range(runs):
        scenario = scenarios[(seed + number) % len(scenarios)]
        known = found.get(scenario.name)
        if known is None:
            reference = run_reference(scenario, seed=seed)
            known = found[scenario.name] = Exploration(reference=reference)
            if not reference.ok:
                known.add(reference, scenario)
                echo(str(reference))
        if not known.reference.ok:
            continue
        plan = draw(scenario.name, known.reference, seed + number)
        result = simulate(scenario, plan, reference=_comparable(scenario, plan, known.reference))
        known.add(result, scenario)
        if not result.ok:
            echo(str(result))
    return _summary(list(found.values()), echo)


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
    faults = tuple(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(1, MAX_KILLS)))
    order_seed = chance.randrange(1_000_000) if chance.random() < 0.5 else None
    return Plan(scenario=name, seed=seed, faults=faults, order_seed=order_seed)


def _summary(found: Sequence[Exploration], echo: Callable[[str], None]) -> int:
    runs = sum(each.runs for each in found)
    failed = sum(len(each.failures) for each in found)
    faults: Counter[str] = Counter()
    for each in found:
        faults.update(each.faults)
    kills = sum(count for kind, count in faults.items() if Fault.parse(f"{kind}:1").kills)
    recoveries = Counter(rerun=sum(each.reruns for each in found), interrupted=sum(each.interrupted for each in found))
    by_fault = " ".join(f"{kind}={count}" for kind, count in sorted(faults.items())) or "none"
    by_recovery = " ".join(f"{kind}={recoveries[kind]}" for kind in RECOVERIES)
    echo(
        f"SUMMARY mode=simulation scenarios={len(found)} runs={runs} ok={runs - failed} failed={failed} kills={kills} "
        f"faults: {by_fault} recoveries: {by_recovery}"
    )
    # A campaign that killed nobody proves nothing (rule P13).
    if runs and not failed and kills * 2 < runs:
        echo(f"only {kills} kills took place in {runs} runs: this proves too little")
        return 1
    return 1 if failed else 0


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
