"""The benchmarks' own judgement: what a soak calls flat, and what the table says of a goal."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("a source distribution has no benchmarks", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import flat  # noqa: E402  # pyright: ignore[reportMissingImports]  # a folder of scripts, not a package
import table  # noqa: E402  # pyright: ignore[reportMissingImports]
import usage  # noqa: E402  # pyright: ignore[reportMissingImports]

FLAT = [
    flat.Sample(
        at=10.0 * number,
        turns=100 * number,
        cpu=0.2 * number,
        rss=50.0,
        anonymous=30.0,
        open_files=14,
        threads=3,
        tasks=9,
        objects=80_000,
        store=200_000 * number,
        wal=8.0,
    )
    for number in range(60)
]


def test_a_steady_run_is_flat():
    assert all(found.flat for found in flat.judge(FLAT))
    assert flat.slope(FLAT) == pytest.approx(0)


@pytest.mark.parametrize(
    ("name", "grow"),
    [
        ("memory (RSS)", lambda s: replace(s, rss=s.rss + s.turns / 1000)),  # a kilobyte a turn
        ("Python objects", lambda s: replace(s, objects=s.objects + s.turns)),
        ("open files", lambda s: replace(s, open_files=s.open_files + s.turns // 1000)),
        ("threads", lambda s: replace(s, threads=s.threads + s.turns // 1000)),
        ("asyncio tasks", lambda s: replace(s, tasks=s.tasks + s.turns // 500)),
        ("write-ahead log", lambda s: replace(s, wal=s.wal + s.turns / 1000)),
        ("database per turn", lambda s: replace(s, store=s.store + s.turns**2)),
    ],
)
def test_what_grows_is_named(name, grow):
    unsteady = [found.name for found in flat.judge([grow(sample) for sample in FLAT]) if not found.flat]
    assert unsteady == [name]


def test_what_fills_up_in_the_first_part_and_stays_is_flat():
    warm = [replace(sample, rss=50 + min(sample.turns, 1000) / 20, objects=80_000 + sample.at) for sample in FLAT]
    assert all(found.flat for found in flat.judge(warm))


def test_too_short_a_run_is_not_judged():
    with pytest.raises(ValueError, match="too few samples"):
        flat.judge(FLAT[:10])


CELL = table.Cell(
    "turns",
    "turns",
    (
        table.row("cpu", "CPU", table.Times(3)),
        table.row("rate", "rate", table.Times(3), better="more"),
        table.row("commits", "commits", table.AtMost(8)),
        table.row("mine", "mine", table.AtMost(8)),
        table.row("nobody's", "nobody's"),
    ),
)


def test_goals_are_judged_by_the_median_of_each_rounds_ratio():
    rounds = [
        ({"cpu": 1.0, "rate": 10.0, "commits": 9, "mine": 8}, {"cpu": 3.0, "rate": 1.0, "commits": 14}),
        ({"cpu": 2.0, "rate": 10.0, "commits": 9, "mine": 8}, {"cpu": 4.0, "rate": 4.0, "commits": 14}),
        ({"cpu": 1.0, "rate": 10.0, "commits": 9, "mine": 8}, {"cpu": 2.9, "rate": 3.0, "commits": 14}),
    ]
    cpu, rate, commits, mine = table.lines(CELL, rounds)
    assert (cpu.times, cpu.unmet) == (2.9, [table.Times(3)])
    assert rate.times == pytest.approx(10 / 3)
    assert rate.unmet == []
    assert commits.unmet == [table.AtMost(8)]
    assert mine.unmet == []
    assert str(cpu) == "| turns | CPU | 1 | 3 | 2.9x | at least 3x: **not met** |"
    assert str(mine) == "| turns | mine | 8 |  |  | at most 8: met |"


def test_the_table_goes_between_the_markers_and_touches_nothing_else():
    text = f"before\n\n{table.BEGIN}\n\nold\n\n{table.END}\nafter\n"
    written = table.between_markers(text, "| new |\n")
    assert written == f"before\n\n{table.BEGIN}\n\n| new |\n\n{table.END}\nafter\n"
    assert table.between_markers(written, "| new |") == written
    with pytest.raises(ValueError, match="say where the table goes"):
        table.between_markers("no markers", "| new |")


def test_the_readme_has_room_for_the_table():
    readme = (BENCHMARKS / "README.md").read_text()
    assert "| new |" in table.between_markers(readme, "| new |")


def test_a_flush_is_counted_once_where_it_began():
    trace = (
        "100 1000.000100 fsync(5) = 0\n"
        "101 1000.200000 fdatasync(7 <unfinished ...>\n"
        "100 1000.300000 syncfs(9)             = 0\n"
        "101 1002.000000 <... fdatasync resumed>) = 0\n"
        "101 1002.500000 +++ exited with 0 +++\n"
        "102 1003.000000 fsync(5) = 0\n"
    )
    assert usage.flushes(trace, [(1000.0, 1001.0), (1001.5, 2000.0)]) == [3, 1]


def test_the_readme_has_room_for_what_spaces_cost():
    readme = (BENCHMARKS / "README.md").read_text()
    begin, end = "<!-- spaces: written by spaces.py --write -->", "<!-- end of spaces -->"
    assert "| new |" in table.between_markers(readme, "| new |", begin, end)
