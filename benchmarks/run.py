"""Runs the workloads on perdure and on pi-durable-python in turn, and prints the medians and their ratios.

    python benchmarks/run.py [--rounds 3] [--only turns,many] [--quick] [--write] [--save samples.json]

The peer gets a virtual environment of its own (.venv-peer), made at the first run. Every measurement is a process of
its own; in every second round the peer goes first. CPU time is what to compare: it counts every thread of the process;
wall times depend on the disk and on what else the machine does. ``--write`` puts the table into README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from table import CELLS, HEAD, Cell, Line, between_markers, lines

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
PEER_VENV = HERE.parent / ".venv-peer"
PEER = "pi-durable-python==1.4.0"
SIDES = ("ours", "peer")
TIMEOUT_S = 1_800


def peer_python() -> Path:
    python = PEER_VENV / "bin" / "python"
    if not python.exists():
        print(f"Making {PEER_VENV.name} with {PEER}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", PEER], check=True)
    return python


def pythons() -> dict[str, Path]:
    """What runs each side."""
    return {"ours": Path(sys.executable), "peer": peer_python()}


def run(
    python: Path, side: str, cell: str, options: Mapping[str, object], *, under: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run one workload of one side in a process of its own, which ``under`` may be the beginning of the command of."""
    # Byte code is cached on both sides, as users have it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if side == "peer":
        environment.pop("PYTHONPATH", None)
    command = [*under, str(python), str(HERE / f"{side}.py"), cell]
    command += [f"{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"{side} {cell} failed:\n{done.stderr[-2000:]}")
    return done


class Bench:
    """Both sides, and the stores that some cells begin with: made once, then only copied."""

    def __init__(self, scratch: Path) -> None:
        self._pythons = pythons()
        self._scratch = scratch
        self._built: dict[tuple[str, str, str], Path] = {}

    def measure(self, side: str, cell: Cell, options: Mapping[str, object]) -> dict[str, float]:
        if cell.built is None:
            return self._run(side, cell.name, options)
        key = (side, cell.built, repr(sorted(options.items())))
        if key not in self._built:
            folder = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=self._scratch))
            self._run(side, cell.built, {**options, "folder": folder})
            self._built[key] = folder
        return self._run(side, cell.name, {"store": self._built[key]})

    def _run(self, side: str, cell: str, options: Mapping[str, object]) -> dict[str, float]:
        done = run(self._pythons[side], side, cell, options)
        return json.loads(done.stdout.splitlines()[-1])

    def rounds(self, cell: Cell, count: int, *, quick: bool) -> list[tuple[dict[str, float], dict[str, float]]]:
        options = {**cell.options, **cell.quick} if quick else cell.options
        found: list[tuple[dict[str, float], dict[str, float]]] = []
        for number in range(min(count, cell.most_rounds or count)):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            measured = {side: self.measure(side, cell, options) for side in order}
            found.append((measured["ours"], measured["peer"]))
        return found


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{os.cpu_count()} cores{f' ({models[0]})' if models else ''}"


def heading(rounds: int, seconds: float, found: list[Line]) -> str:
    goals = sum(len(line.goals) for line in found)
    unmet = sum(len(line.unmet) for line in found)
    return (
        f"{time.strftime('%Y-%m-%d')}, CPython {platform.python_version()}, {machine()}; {PEER.replace('==', ' ')}. "
        f"Medians of {rounds} rounds, {seconds / 60:.0f} minutes. A ratio above 1 is in perdure's favour. "
        f"{goals - unmet} of {goals} goals met."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help=f"some of {', '.join(dict.fromkeys(cell.name for cell in CELLS))}")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that everything runs")
    parser.add_argument("--write", action="store_true", help="put the whole table into README.md")
    parser.add_argument("--save", type=Path, help="write what every round measured to this file, as JSON")
    arguments = parser.parse_args()
    only = {str(name) for name in arguments.only.split(",") if name}
    if unknown := only - {cell.name for cell in CELLS}:
        parser.error(f"there is no workload {', '.join(sorted(unknown))}")
    if arguments.rounds < 1:
        parser.error("a median needs at least one round")
    if arguments.write and (only or arguments.quick):
        parser.error("the README gets the whole table in its full sizes: --write goes with neither --only nor --quick")

    begun = time.monotonic()
    found: list[Line] = []
    samples: list[dict[str, object]] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as scratch:
        bench = Bench(Path(scratch))
        for cell in CELLS:
            if only and cell.name not in only:
                continue
            rounds = bench.rounds(cell, arguments.rounds, quick=arguments.quick)
            samples.append({"cell": cell.name, "label": cell.label, "rounds": rounds})
            for line in lines(cell, rounds):
                found.append(line)
                print(line, flush=True)
            if arguments.save is not None:
                arguments.save.write_text(json.dumps(samples, indent=1))
    said = heading(arguments.rounds, time.monotonic() - begun, found)
    print(f"\n{said}")
    if arguments.quick:
        print("These were small sizes, whatever the rows say: nothing to compare with.")
    if arguments.write:
        table = "\n".join([said, "", HEAD, *map(str, found)])
        README.write_text(between_markers(README.read_text(), table))


if __name__ == "__main__":
    main()
