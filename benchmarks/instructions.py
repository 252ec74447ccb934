"""Counts the instructions of a turn on perdure and on pi-durable-python, and prints them with their ratio.

    python benchmarks/instructions.py [--quick] [--write]

They are the instructions of the whole process, all its threads, outside the kernel, as valgrind's callgrind counts
them, which is installed where that may be done. A count is the difference of two runs, one with more turns, so it is
that of the last turns and what both runs share falls out. It is the same on a loaded machine as on a quiet one, within
a hundredth. What it leaves out is what the kernel does and what waits cost: run.py's CPU times have that.
``--write`` puts the table into README.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from run import PEER, README, pythons, run
from table import between_markers
from usage import have

BEGIN, END = "<!-- instructions: written by instructions.py --write -->", "<!-- end of instructions -->"
CALLGRIND = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
ROWS: tuple[tuple[str, int, int, Mapping[str, object]], ...] = (
    ("a plain turn", 100, 200, {}),
    ("a turn with one tool call", 100, 200, {"tool": 1}),
    ("a plain turn", 1_900, 2_000, {}),
)
"""What, after how many turns, up to how many, and the options of the workload."""
HEAD = "| of | turns | perdure | pi-durable-python | ratio |\n|---|---|---|---|---|"


def counted(python: Path, side: str, turns: int, options: Mapping[str, object]) -> int:
    """The instructions of a process that opens a store and makes so many turns."""
    done = run(python, side, "turns", {"n": turns, "counted": 0, **options}, under=CALLGRIND)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr[-500:]
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first hundreds of turns only")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    arguments = parser.parse_args()
    if arguments.write and arguments.quick:
        parser.error("the README gets the whole table: --write does not go with --quick")
    if not have("valgrind"):
        sys.exit(1)
    os.environ["PYTHONHASHSEED"] = "0"
    said = [
        f"{time.strftime('%Y-%m-%d')}, CPython {platform.python_version()} ({platform.machine()}); "
        f"{PEER.replace('==', ' ')}. Millions of instructions a turn.",
        "",
        HEAD,
    ]
    print(HEAD, flush=True)
    for what, first, last, options in ROWS[:2] if arguments.quick else ROWS:
        each: dict[str, float] = {}
        for side, python in pythons().items():
            run(python, side, "turns", {"n": 1, "counted": 0, **options})  # compiles what was not imported before
            more, fewer = (counted(python, side, turns, options) for turns in (last, first))
            each[side] = (more - fewer) / (last - first) / 1e6
        ratio = each["peer"] / each["ours"]
        said.append(f"| {what} | {first + 1:,}-{last:,} | {each['ours']:.2f} | {each['peer']:.2f} | {ratio:.1f}x |")
        print(said[-1], flush=True)
    if arguments.write:
        README.write_text(between_markers(README.read_text(), "\n".join(said), BEGIN, END))


if __name__ == "__main__":
    main()
