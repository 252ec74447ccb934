"""Runs the workloads on perdure and on pi-durable-python in turn, and prints the medians and their ratios.

    python benchmarks/run.py [--rounds 3] [--only turns,many] [--quick]

The peer gets a virtual environment of its own (.venv-peer), made at the first run. CPU time is what to compare: it
counts every thread of the process; wall times depend on the disk and on what else the machine does. Our storage is
power-safe (each commit is flushed); the peer's is not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEER_VENV = HERE.parent / ".venv-peer"
PEER = "pi-durable-python==1.4.0"

CELLS: list[tuple[str, list[str], list[str]]] = [
    ("document", ["n=2000"], ["n=300"]),
    ("entry", ["n=2000"], ["n=300"]),
    ("turns", ["n=200"], ["n=40"]),
    ("turns", ["n=200", "tool=1"], ["n=40", "tool=1"]),
    ("turns", ["n=2000"], ["n=220"]),
    ("many", ["conversations=100", "n=10"], ["conversations=20", "n=5"]),
    ("reopen", ["entries=100000"], ["entries=2000"]),
    ("stream", ["deltas=2000"], ["deltas=500"]),
    ("watch", ["watchers=1"], ["watchers=1", "commits=100"]),
    ("watch", ["watchers=100"], ["watchers=20", "commits=100"]),
    ("import", [], []),
]
"""Cell, its options, its options with --quick."""

MORE_IS_BETTER = ("turns_per_s",)
TIMEOUT_S = 900


def peer_python() -> Path:
    python = PEER_VENV / "bin" / "python"
    if not python.exists():
        print(f"Making {PEER_VENV.name} with {PEER}")
        subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", PEER], check=True)
    return python


def measure(python: str | Path, side: str, cell: str, options: list[str]) -> dict[str, float]:
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(python), str(HERE / f"{side}.py"), cell, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"{side} {cell} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that everything runs")
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    peer = peer_python()
    print("| workload | figure | perdure | pi-durable-python | ratio |\n|---|---|---|---|---|")
    for cell, options, quick in CELLS:
        if only and cell not in only:
            continue
        chosen = quick if arguments.quick else options
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for _ in range(arguments.rounds):
            ours.append(measure(sys.executable, "ours", cell, chosen))
            theirs.append(measure(peer, "peer", cell, chosen))
        for figure in ours[0]:
            mine = [sample[figure] for sample in ours]
            if figure not in theirs[0]:
                print(f"| {cell} {' '.join(chosen)} | {figure} | {statistics.median(mine):.4g} | | |", flush=True)
                continue
            other = [sample[figure] for sample in theirs]
            pairs = zip(mine, other, strict=True)
            ratios = [a / b if figure in MORE_IS_BETTER else b / a for a, b in pairs if a > 0 and b > 0]
            times = f"{statistics.median(ratios):.2f}x" if ratios else ""
            row = (
                f"{cell} {' '.join(chosen)}",
                figure,
                f"{statistics.median(mine):.4g}",
                f"{statistics.median(other):.4g}",
            )
            print(f"| {' | '.join(row)} | {times} |", flush=True)


if __name__ == "__main__":
    main()
