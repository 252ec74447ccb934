"""What is measured, what is shown of it, and the table of it: data and pure functions, used by run.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Figures: TypeAlias = Mapping[str, float]
Rounds: TypeAlias = Sequence[tuple[Figures, Figures]]
"""Of each round perdure's figures and the peer's."""


@dataclass(frozen=True, slots=True)
class Times:
    """The peer's figure is at least so many times ours (where more is better, ours the peer's)."""

    least: float

    def __str__(self) -> str:
        return f"at least {self.least:g}x"


@dataclass(frozen=True, slots=True)
class AtMost:
    """Ours is at most this, whatever the peer's is."""

    most: float

    def __str__(self) -> str:
        return f"at most {self.most:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a cell. A row may have several goals."""

    figure: str
    label: str
    goals: tuple[Times | AtMost, ...] = ()
    better: Literal["less", "more"] = "less"


def row(figure: str, label: str, *goals: Times | AtMost, better: Literal["less", "more"] = "less") -> Row:
    return Row(figure, label, goals, better)


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload: a function of ours.py and peer.py, called with these options in a process of its own."""

    name: str
    label: str
    rows: tuple[Row, ...]
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    quick: Mapping[str, object] = field(default_factory=dict[str, object])
    """In place of some options, to see that everything runs."""
    most_rounds: int | None = None
    """Fewer rounds than asked for: for what takes minutes and hardly varies."""
    built: str | None = None
    """The cell that makes the store it begins with, once for all rounds: it gets ``options``, this one the store."""


TURN = (row("cpu", "CPU a turn, ms"), row("wall", "wall time a turn, ms"))
STREAM = (
    row("cpu_over_bare_us_a_delta", "CPU over the bare model, us a delta, its partial commits included"),
    row("cpu_without_partials_us_a_delta", "the same without partial commits"),
    row("partials", "partial commits"),
    row("cpu_a_partial", "CPU a partial commit, ms"),
    row("share_of_budget", "CPU over the bare model / (30 us a delta + 1 ms a partial commit)", AtMost(1)),
)
PAYLOAD = (row("payload", "bytes handed to storage"), row("kept", "the same without unchanged document records"))
WATCH = (row("cpu", "CPU, s", Times(3)), row("wall", "wall time, s"))


def _watch(watchers: int, writers: int) -> Cell:
    how = "one after the other" if writers == 1 else f"by {writers} writers at a time"
    return Cell(
        "watch",
        f"500 commits {how}, watched by {watchers}",
        WATCH,
        {"watchers": watchers, "commits": 500, "writers": writers},
        {"watchers": min(watchers, 20), "commits": 100},
    )


def _equal(durability: str) -> tuple[Cell, Cell]:
    said = {"power": "both flush every commit", "process": "neither flushes"}[durability]
    return (
        Cell("turns", f"plain turns, {said}", TURN, {"n": 200, "durability": durability}, {"n": 20}),
        Cell(
            "many",
            f"100 conversations x 10 turns, {said}",
            (row("turns_per_s", "turns a second", better="more"),),
            {"conversations": 100, "n": 10, "durability": durability},
            {"conversations": 10, "n": 3},
        ),
    )


CELLS: tuple[Cell, ...] = (
    Cell("document", "one small document edit a commit", (row("cpu", "CPU a commit, ms"),), {"n": 2000}, {"n": 200}),
    Cell("entry", "one entry of 1 KB a commit", (row("cpu", "CPU a commit, ms"),), {"n": 2000}, {"n": 200}),
    Cell(
        "turns",
        "plain turns",
        (
            row("cpu", "CPU a turn, ms", Times(3)),
            row("wall", "wall time a turn, ms"),
            row("commits_a_turn", "commits a turn"),
            row("stored_a_turn", "bytes on disk a turn"),
        ),
        {"n": 200},
        {"n": 20},
    ),
    Cell(
        "turns",
        "turns with one tool call",
        (
            row("cpu", "CPU a turn, ms", Times(4)),
            row("wall", "wall time a turn, ms"),
            row("commits_a_turn", "commits a turn, without throttled progress", AtMost(8)),
            row("stored_a_turn", "bytes on disk a turn"),
        ),
        {"n": 200, "tool": 1},
        {"n": 20},
    ),
    Cell(
        "turns",
        "2,000 plain turns in one conversation",
        (
            row("cpu_101_200", "CPU a turn, turns 101-200, ms"),
            row("cpu_last_100", "CPU a turn, turns 1,901-2,000, ms", Times(8)),
            row("last_over_first", "the latter / the former", AtMost(1.15)),
            row("stored_a_turn", "bytes on disk a turn"),
        ),
        {"n": 2000},
        {"n": 210},
    ),
    Cell("payload", "payload, a plain turn", PAYLOAD, {"n": 10}),
    Cell("payload", "payload, a turn with one tool call", PAYLOAD, {"tool": 1, "n": 10}),
    Cell(
        "many",
        "100 conversations x 10 turns",
        (row("turns_per_s", "turns a second", Times(3), better="more"), row("cpu", "CPU, s")),
        {"conversations": 100, "n": 10},
        {"conversations": 10, "n": 3},
    ),
    *_equal("power"),
    *_equal("process"),
    Cell(
        "reopen",
        "a session with 100,000 entries, opened by a new process",
        (
            row("wall_open", "open and root, wall ms", AtMost(30)),
            row("cpu_open", "open and root, CPU ms"),
            row("wall_newest_50", "the newest 50 entries, wall ms", AtMost(10)),
            row("cpu_newest_50", "the newest 50 entries, CPU ms"),
            row("wall_first_turn", "first turn, wall ms", Times(10)),
            row("cpu_first_turn", "first turn, CPU ms", Times(10)),
            row("peak_mb_first_turn", "peak memory by then, MB", Times(3)),
            row("growth_mb_first_turn", "the same beyond what was imported, MB", Times(3)),
            row("cpu_second_turn", "second turn, CPU ms"),
            row("empty_cpu_second_turn", "second turn of an empty session, CPU ms"),
            row("second_over_empty", "the former / the latter", AtMost(1.15)),
        ),
        {"entries": 100_000},
        {"entries": 2000},
        built="build",
    ),
    Cell(
        "long",
        "50,000 turns in one conversation that is compacted (one round)",
        (
            row("cpu_early", "CPU a turn, turns 5,001-10,000, ms"),
            row("cpu_late", "CPU a turn, turns 45,001-50,000, ms", Times(1)),
            row("cpu_late_over_early", "the latter / the former", AtMost(1.15)),
            row("rss_early", "memory after 10,000 turns, MB"),
            row("rss_late", "memory after 50,000 turns, MB"),
            row("rss_late_over_early", "the latter / the former", AtMost(1.15)),
            row("stored_early", "bytes on disk a turn, turns 5,001-25,000"),
            row("stored_late", "bytes on disk a turn, turns 30,001-50,000"),
            row("stored_late_over_early", "the latter / the former", AtMost(1.15)),
            row("compactions", "compactions"),
        ),
        {"n": 50_000},
        {"n": 2_000},
        most_rounds=1,
    ),
    Cell("stream", "an answer of 2,000 deltas, as fast as they come", STREAM, {"deltas": 2000}, {"deltas": 500}),
    Cell(
        "stream",
        "an answer of 2,000 deltas, one a millisecond",
        STREAM,
        {"deltas": 2000, "pace_ms": 1, "answers": 3},
        {"deltas": 500},
    ),
    Cell(
        "payload",
        "payload, an answer of 2,000 deltas, one a millisecond",
        (
            *PAYLOAD,
            row("commits", "commits"),
            row("payload_of_allowed", "bytes handed to storage / (twice the text + 300 a commit)", AtMost(1)),
            row("kept_of_allowed", "the same without unchanged document records"),
        ),
        {"deltas": 2000, "pace_ms": 1, "n": 2},
        {"deltas": 500},
    ),
    Cell(
        "partial",
        "an answer of 60 deltas, one in 5 ms",
        (
            row("first_partial", "from the first delta to the commit of a partial, ms", AtMost(20)),
            row("first_partial_9_in_10", "the same, 9 of 10 within"),
        ),
        {"n": 30},
        {"n": 5},
    ),
    _watch(1, 1),
    _watch(100, 1),
    _watch(1, 10),
    _watch(100, 10),
    Cell(
        "idle",
        "10,000 idle conversations (one round)",
        (
            row("created_mb", "memory they add where they were created, MB", AtMost(100)),
            row("some_touched_mb", "memory that a turn in 1,000 of them adds after a reopen, MB"),
            row("touched_mb", "memory that a turn in each of them adds after a reopen, MB", AtMost(100)),
        ),
        {"conversations": 10_000},
        {"conversations": 200},
        most_rounds=1,
    ),
    Cell(
        "import",
        "a new interpreter",
        (
            row("cpu_package", "CPU of importing the package, ms", Times(1)),
            row("cpu_agent", "CPU of importing what an agent uses, ms", Times(1)),
            row("cpu_first_answer", "CPU from start to end: import, open, a turn with one tool call, close; ms"),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table, measured. A figure that one side does not have is NaN."""

    workload: str
    label: str
    ours: float
    theirs: float
    times: float
    """Median of the rounds' ratios; above 1 it is in our favour."""
    goals: tuple[Times | AtMost, ...]

    @property
    def unmet(self) -> list[Times | AtMost]:
        return [goal for goal in self.goals if not self._meets(goal)]

    def _meets(self, goal: Times | AtMost) -> bool:
        return self.times >= goal.least if isinstance(goal, Times) else self.ours <= goal.most

    def __str__(self) -> str:
        met = ", ".join(f"{goal}: {'met' if self._meets(goal) else '**not met**'}" for goal in self.goals)
        times = f"{number(self.times)}x" if self.times == self.times else ""
        ours, theirs = number(self.ours), number(self.theirs)
        return f"| {self.workload} | {self.label} | {ours} | {theirs} | {times} | {met} |"


HEAD = "| workload | figure | perdure | pi-durable-python | ratio | goal |\n|---|---|---|---|---|---|"


def number(value: float) -> str:
    """Three digits, four of what begins with 1; nothing for NaN."""
    if value != value:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    short = f"{value:.3g}"
    return f"{value:.4g}" if short.lstrip("-0.").startswith("1") else short


def lines(cell: Cell, rounds: Rounds) -> list[Line]:
    """The rows of a cell, from what its rounds measured."""
    found: list[Line] = []
    for wanted in cell.rows:
        pairs = [(ours.get(wanted.figure), theirs.get(wanted.figure)) for ours, theirs in rounds]
        mine = [ours for ours, _ in pairs if ours is not None]
        other = [theirs for _, theirs in pairs if theirs is not None]
        if not mine and not other:
            continue
        ratios = [
            ours / theirs if wanted.better == "more" else theirs / ours
            for ours, theirs in pairs
            if ours is not None and theirs is not None and ours > 0 and theirs > 0
        ]
        found.append(Line(cell.label, wanted.label, _median(mine), _median(other), _median(ratios), wanted.goals))
    return found


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


BEGIN, END = "<!-- table: written by run.py --write -->", "<!-- end of table -->"


def between_markers(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """``text`` with what is between the markers replaced. Raises ValueError where they are not there once each."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"a line {begin!r} and after it a line {end!r} say where the table goes")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{table.strip()}\n\n{end}{rest.split(end)[1]}"
