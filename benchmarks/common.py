"""What both sides of a comparison share: the same words, sizes and way of measuring. Imports neither side."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path

import memory

QUESTION = "Please look after item number %05d of the list and tell me in a sentence how it went; keep it short."
ANSWER = "Item looked after. " + "All went well and nothing needs to be done about it now. " * 3
BODY = "x" * 200
DELTA = "word "
INTERVAL_MS = 100
"""Between two commits of a partial answer, on both sides."""
NO_INTERVAL_MS = 3_600_000
"""One that never ends: what deltas cost without their commits."""
SOME = 1_000
"""Of the idle conversations, those that both sides give a turn."""

WINDOW, RESERVE, KEEP, AHEAD = 32_000, 4_000, 4_000, 8_000
"""Of the long conversation's model: tokens of its context, kept free, kept verbatim, and how early a summary begins."""
A_MESSAGE = 75
"""Tokens that its model says of each message."""
LONGEST_QUESTION = 500
"""What is longer is asked by the harness: for a summary."""
SUMMARY = "What was asked for so far was looked after, and all went well. " * 20

Figures = dict[str, float]


class Meter:
    """CPU (all threads of the process) and wall time of the parts that count."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    async def time(self, work: Awaitable[object]) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        await work
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def median_ms(self, first: int = 0, last: int | None = None) -> float:
        return 1e3 * statistics.median(self.cpu[first:last])

    def wall_ms(self, first: int = 0, last: int | None = None) -> float:
        return 1e3 * statistics.median(self.wall[first:last])

    @property
    def total_cpu(self) -> float:
        return sum(self.cpu)

    @property
    def total_wall(self) -> float:
        return sum(self.wall)


def turn_figures(meter: Meter, *, commits: float, stored: int) -> Figures:
    """Of turns in one conversation, by 100 at each end where there are 200. ``stored``: bytes on disk after them."""
    n = len(meter.cpu)
    first, last = ((100, 200), n - 100) if n >= 200 else ((1, n // 2), n // 2)
    early, late = meter.median_ms(*first), meter.median_ms(last)
    return {
        "cpu": meter.median_ms(),
        "wall": meter.wall_ms(),
        "cpu_101_200": early,
        "cpu_last_100": late,
        "last_over_first": late / early,
        "commits_a_turn": commits,
        "stored_a_turn": stored / n,
    }


class Long:
    """A long conversation, by tenths: CPU, memory and bytes on disk a turn. The first is for warming up."""

    def __init__(self, folder: Path, turns: int) -> None:
        self._folder = folder
        self._tenth = turns // 10
        self._meter = Meter()
        self._marks: list[tuple[float, int]] = []
        """Memory and bytes on disk at the end of each tenth."""

    async def turn(self, work: Awaitable[object]) -> None:
        await self._meter.time(work)
        if len(self._meter.cpu) % self._tenth == 0:
            self._marks.append((rss_mb(), stored_bytes(self._folder)))

    def figures(self, *, compactions: int) -> Figures:
        """The second tenth (``early``) beside the last. CPU is the mean: it has the compactions in it."""
        tenth, marks = self._tenth, self._marks
        early, late = (1e3 * statistics.fmean(self._meter.cpu[start : start + tenth]) for start in (tenth, 9 * tenth))
        # A file grows in steps, at checkpoints: several tenths together even them out.
        grown = [(marks[last][1] - marks[first][1]) / ((last - first) * tenth) for first, last in ((0, 4), (5, 9))]
        return {
            "cpu_early": early,
            "cpu_late": late,
            "cpu_late_over_early": late / early,
            "rss_early": marks[1][0],
            "rss_late": marks[-1][0],
            "rss_late_over_early": marks[-1][0] / marks[1][0],
            "stored_early": grown[0],
            "stored_late": grown[1],
            "stored_late_over_early": grown[1] / grown[0],
            "compactions": compactions,
        }


def rss_mb() -> float:
    """Memory now, with what nobody holds any more collected."""
    gc.collect()
    return memory.status("VmRSS")


def stored_bytes(folder: Path) -> int:
    return memory.size_of(folder)


# --- children ------------------------------------------------------------------------------------------------


def child(script: str, cell: str, **options: object) -> Figures:
    """One cell in a new process of the same interpreter."""
    command = [sys.executable, script, cell, *(f"{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{cell} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def reopen_in_children(script: str, store: Path, children: int) -> Figures:
    """Medians of several new processes that open copies of ``store``, and of as many that open an empty one.

    The figures of the latter are called ``empty_...``.
    """
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as scratch:
        for number in range(children):
            full, empty = Path(scratch, f"full-{number}"), Path(scratch, f"empty-{number}")
            shutil.copytree(store, full)
            empty.mkdir()
            figures = child(script, "reopened", folder=full)
            figures |= {f"empty_{name}": value for name, value in child(script, "reopened", folder=empty).items()}
            figures["second_over_empty"] = figures["cpu_second_turn"] / figures["empty_cpu_second_turn"]
            found.append(figures)
            shutil.rmtree(full)
    return {name: statistics.median(figures[name] for figures in found) for name in found[0]}


class Reopening:
    """Times and memory of a process that opens a store, made right after its imports."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._imported = rss_mb()
        self.figures: Figures = {"imported_mb": self._imported}

    async def step(self, name: str, work: Awaitable[object]) -> None:
        await self._meter.time(work)
        self.figures[f"cpu_{name}"] = 1e3 * self._meter.cpu[-1]
        self.figures[f"wall_{name}"] = 1e3 * self._meter.wall[-1]
        peak = memory.status("VmHWM")
        self.figures[f"peak_mb_{name}"] = peak
        self.figures[f"growth_mb_{name}"] = peak - self._imported


def cpu_of_child(*arguments: str) -> float:
    """CPU ms of a new interpreter, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def import_figures(script: str, *, package: str, agent: str, samples: int = 15) -> Figures:
    """CPU ms over the bare interpreter: the package alone, and what an agent imports (a statement each).

    ``first_answer``: of a whole new process that imports, opens a new store, and takes a turn with one tool call.
    """
    codes = {"bare": "pass", "package": package, "agent": agent}
    times: dict[str, list[float]] = {name: [] for name in (*codes, "first_answer")}
    for number in range(samples + 1):
        for name, code in codes.items():
            times[name].append(cpu_of_child("-c", code))
        if number % 3 == 0:
            times["first_answer"].append(cpu_of_child(script, "turns", "n=1", "tool=1", "counted=0"))
    # The first of each compiles what is not compiled yet.
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    return {
        "cpu_bare": medians["bare"],
        "cpu_package": medians["package"] - medians["bare"],
        "cpu_agent": medians["agent"] - medians["bare"],
        "cpu_first_answer": medians["first_answer"],
    }


# --- streams -------------------------------------------------------------------------------------------------


class Streams:
    """Answers with partial commits, without, and of the model consumed bare: each in turn, so that what else the
    machine does falls on all three."""

    def __init__(self, deltas: int) -> None:
        self._deltas = deltas
        self._meters = Meter(), Meter(), Meter()

    async def round(self, committed: Awaitable[object], without: Awaitable[object], bare: Awaitable[object]) -> None:
        for meter, work in zip(self._meters, (committed, without, bare), strict=True):
            await meter.time(work)

    def figures(self, *, partials: float, partials_without: float) -> Figures:
        """Per answer: ``partials`` commits of a partial, and ``partials_without`` where none should be.

        ``share_of_budget``: of 30 us a delta plus 1 ms a partial commit. ``cpu_a_partial``: by the difference to the
        answers without.
        """
        committed, without, bare = (meter.cpu for meter in self._meters)
        over = 1e3 * statistics.median(a - b for a, b in zip(committed, bare, strict=True))
        plain = 1e3 * statistics.median(a - b for a, b in zip(without, bare, strict=True))
        figures = {
            "cpu_over_bare": over,
            "cpu_over_bare_us_a_delta": 1e3 * over / self._deltas,
            "cpu_without_partials_us_a_delta": 1e3 * plain / self._deltas,
            "partials": partials,
            "share_of_budget": over / (0.03 * self._deltas + partials),
        }
        if (more := partials - partials_without) >= 5:  # below, the difference is noise
            between = statistics.median(a - b for a, b in zip(committed, without, strict=True))
            figures["cpu_a_partial"] = 1e3 * between / more
        return figures


def payload_figures(*, payload: float, kept: float, commits: float, text: int) -> Figures:
    """What a turn hands to storage, in bytes of JSON: all of it, and without records that it only refers to.

    ``..._of_allowed``: of twice the streamed text and 300 bytes a commit.
    """
    figures: Figures = {"payload": payload, "kept": kept, "commits": commits}
    if text:
        allowed = 2 * text + 300 * commits
        figures |= {"payload_of_allowed": payload / allowed, "kept_of_allowed": kept / allowed}
    return figures


# --- the command line ----------------------------------------------------------------------------------------


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def main(cells: Mapping[str, Callable[..., Coroutine[None, None, Figures]]]) -> None:
    """``python ours.py CELL [name=value ...]``: run one cell, print its figures as one JSON line.

    It gets a new folder, removed afterwards, or the one that is there: ``folder=PATH``.
    """
    name, *options = sys.argv[1:]
    values = {key: _value(value) for key, value in (option.split("=", 1) for option in options)}
    given = values.pop("folder", None)
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as scratch:
        folder = Path(scratch) if given is None else Path(str(given))
        assert folder.is_dir(), folder
        figures = asyncio.run(cells[name](folder, **values))
    print(json.dumps({name: round(value, 6) for name, value in figures.items()}))


assert os.path.isdir("/proc/self"), "memory is read from /proc: these measurements run on Linux"
