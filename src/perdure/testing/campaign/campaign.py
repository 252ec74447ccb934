"""``perdure crash --mode steps|transactional|stale``: many runs, or one again (rules P8, P13 to P16)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from perdure.testing.campaign import stale, steps, transactional
from perdure.testing.campaign.judge import walk
from perdure.testing.campaign.nursery import Nursery
from perdure.testing.campaign.play import Outcome, Play, play, undisturbed
from perdure.testing.campaign.script import VARIANTS, Kind, Tree
from perdure.testing.campaign.tally import Claims, Tally


@dataclass(frozen=True, slots=True)
class Case:
    """One run to be made."""

    name: str
    """What repeats it: a seed, or the name of a step."""
    script: int | Kind
    attack: Callable[[Play], None]
    together: bool = False
    crash_points: bool = False


def transactional_cases(seeds: Sequence[int]) -> list[Case]:
    return [
        Case(str(seed), seed % VARIANTS, transactional.attack(seed), together=seed // VARIANTS % 2 == 1)
        for seed in seeds
    ]


def stale_cases(seeds: Sequence[int]) -> list[Case]:
    return [Case(str(seed), seed % VARIANTS, stale.attack(seed)) for seed in seeds]


def steps_cases(every: int = 1) -> list[Case]:
    """All of them, or every n-th."""
    return [Case(case.name, case.kind, steps.attack(case), crash_points=True) for case in steps.all_cases()[::every]]


class Campaign:
    """Runs cases, ``jobs`` at a time, and says what was found."""

    def __init__(self, *, jobs: int = 1, echo: Callable[[str], None] = print, parent: Path | None = None) -> None:
        self._jobs = jobs
        self._echo = echo
        self._parent = parent
        self._references: dict[int | Kind, Tree | str] = {}
        self._referring = threading.Lock()
        self._nurseries: SimpleQueue[Nursery] = SimpleQueue()

    def run(self, mode: str, cases: Sequence[Case], claims: Claims) -> int:
        """The exit code: 0 if every run was consistent and they saw what they claim."""
        found = Tally()
        with self._open(), ThreadPoolExecutor(self._jobs) as pool:
            for case, outcome in zip(cases, pool.map(self._one, cases), strict=True):
                found.add(outcome.tally)
                if outcome.wrong:
                    self._tell(mode, case, outcome)
        self._echo(found.summary(mode))
        broken = list(claims.broken(found))
        for what in broken:
            self._echo(f"this proves too little: {what}")
        return 1 if found.failed or broken else 0

    @contextmanager
    def _open(self) -> Generator[None]:
        nurseries = [Nursery() for _ in range(self._jobs)]
        try:
            for nursery in nurseries:
                self._nurseries.put(nursery)
            yield
        finally:
            for nursery in nurseries:
                nursery.close()

    def _one(self, case: Case) -> Outcome:
        nursery = self._nurseries.get()
        try:
            reference = self._reference(nursery, case.script)
            return play(
                nursery,
                case.script,
                case.attack,
                reference=reference,
                together=case.together,
                crash_points=case.crash_points,
                parent=self._parent,
            )
        finally:
            self._nurseries.put(nursery)

    def _reference(self, nursery: Nursery, script: int | Kind) -> Tree:
        """The workspace of a run of this script that nobody disturbs. Made once."""
        with self._referring:
            if script not in self._references:
                trees: list[Tree] = []

                outcome = play(
                    nursery,
                    script,
                    undisturbed,
                    parent=self._parent,
                    after=lambda world: trees.append(walk(world.workspace)),
                )
                self._references[script] = "; ".join(outcome.wrong) or trees[0]
            found = self._references[script]
        if isinstance(found, str):
            raise AssertionError(f"a run that nobody disturbed went wrong: {found}")
        return found

    def _tell(self, mode: str, case: Case, outcome: Outcome) -> None:
        self._echo(f"{mode} {case.name} went wrong; what is left of it is in {outcome.folder}")
        for what in outcome.wrong[:10]:
            self._echo(f"  {what}")
        which = f"--seed {case.name} --runs 1" if case.name.isdigit() else f"--only {case.name}"
        self._echo(f"  again: perdure crash --mode {mode} {which}")


def run_transactional(*, runs: int, seed: int, jobs: int = 1, echo: Callable[[str], None] = print) -> int:
    cases = transactional_cases(range(seed, seed + runs))
    return Campaign(jobs=jobs, echo=echo).run("transactional", cases, transactional.claims(runs))


def run_steps(*, only: str | None = None, every: int = 1, jobs: int = 1, echo: Callable[[str], None] = print) -> int:
    cases = steps_cases(every)
    if only is not None:
        cases = [case for case in steps_cases() if only in case.name]
    if not cases:
        echo(f"there is no step {only!r}; a failing run prints its name, and a part of it is enough")
        return 2
    claims = steps.CLAIMS if only is None and every == 1 else Claims()
    return Campaign(jobs=jobs, echo=echo).run("steps", cases, claims)


def run_stale(*, runs: int, seed: int, jobs: int = 1, echo: Callable[[str], None] = print) -> int:
    cases = stale_cases(range(seed, seed + runs))
    return Campaign(jobs=jobs, echo=echo).run("stale", cases, stale.claims(runs))
