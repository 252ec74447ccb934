"""Samples of a long run, and whether it stayed flat: pure functions, used by soak.py.

A run is cut into six parts of equal length. The first is for warming up: caches fill until their age limit. What the
second and the last show is compared by their medians, each figure with a tolerance of its own; what a turn adds to
the database, by the second and third together beside the last two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PARTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One moment of a run. Sizes in MB, but for ``store``; counters since the beginning."""

    at: float
    """Seconds since the beginning."""
    turns: int
    cpu: float
    """Seconds."""
    rss: float
    anonymous: float
    open_files: int
    threads: int
    tasks: int
    """Of asyncio, not done."""
    objects: int
    """That the garbage collector knows, after a collection."""
    store: int
    """Bytes of the database, without its write-ahead log."""
    wal: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much more the end may show than the beginning: a share of it, or so much if that is more."""

    share: float
    least: float

    def allows(self, early: float, late: float) -> bool:
        return late <= early + max(self.share * early, self.least)


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure of the second part beside the same of the last."""

    name: str
    unit: str
    early: float
    late: float
    tolerance: Tolerance

    @property
    def flat(self) -> bool:
        return self.tolerance.allows(self.early, self.late)


FIGURES: tuple[tuple[str, str, Callable[[Sample], float], Tolerance], ...] = (
    ("memory (RSS)", "MB", lambda sample: sample.rss, Tolerance(0.03, 3)),
    ("anonymous memory", "MB", lambda sample: sample.anonymous, Tolerance(0.03, 3)),
    ("Python objects", "", lambda sample: sample.objects, Tolerance(0.03, 2_000)),
    ("open files", "", lambda sample: sample.open_files, Tolerance(0, 2)),
    ("threads", "", lambda sample: sample.threads, Tolerance(0, 1)),
    ("asyncio tasks", "", lambda sample: sample.tasks, Tolerance(0, 5)),
    ("write-ahead log", "MB", lambda sample: sample.wal, Tolerance(0.1, 1)),
)
"""Those that are levels; growth per turn is judged beside them."""


def parts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Six parts of equal time. Raises ValueError where one after the first has fewer than three samples."""
    first, last = samples[0].at, samples[-1].at
    found: list[list[Sample]] = [[] for _ in range(PARTS)]
    for sample in samples:
        found[min(PARTS - 1, int(PARTS * (sample.at - first) / (last - first)))].append(sample)
    if min(map(len, found[1:])) < 3:
        raise ValueError("too few samples to judge: make the run longer, or sample more often")
    return found


def growth(part: Sequence[Sample]) -> float:
    """Bytes the database grew per turn."""
    return (part[-1].store - part[0].store) / max(1, part[-1].turns - part[0].turns)


def cpu(part: Sequence[Sample]) -> float:
    """CPU ms per turn, of all there is to do for one."""
    return 1e3 * (part[-1].cpu - part[0].cpu) / max(1, part[-1].turns - part[0].turns)


def judge(samples: Sequence[Sample]) -> list[Finding]:
    """Every figure, early and late."""
    cut = parts(samples)
    early, late = cut[1], cut[-1]
    findings = [
        Finding(name, unit, statistics.median(map(look, early)), statistics.median(map(look, late)), tolerance)
        for name, unit, look, tolerance in FIGURES
    ]
    # A database file grows in steps, at checkpoints: two parts together even them out.
    grown = growth(cut[1] + cut[2]), growth(cut[-2] + cut[-1])
    findings.append(Finding("database per turn", "bytes", *grown, Tolerance(0.15, 100)))
    return findings


def slope(samples: Sequence[Sample]) -> float:
    """Bytes of memory (RSS) a turn, by a straight line through all samples after the first part."""
    settled = [sample for part in parts(samples)[1:] for sample in part]
    fitted = statistics.linear_regression([sample.turns for sample in settled], [sample.rss for sample in settled])
    return fitted.slope * 2**20


def table(samples: Sequence[Sample]) -> str:
    """Markdown: a row a figure."""
    rows = ["| figure | second sixth | last sixth | at most | flat |", "|---|---|---|---|---|"]
    for found in judge(samples):
        most = found.early + max(found.tolerance.share * found.early, found.tolerance.least)
        name = f"{found.name}, {found.unit}" if found.unit else found.name
        rows.append(f"| {name} | {found.early:.5g} | {found.late:.5g} | {most:.5g} | {'yes' if found.flat else 'NO'} |")
    return "\n".join(rows)
