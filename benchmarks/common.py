"""What both sides of a comparison share: the same words, sizes and way of measuring. Imports neither side."""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

QUESTION = "Please look after item number %05d of the list and tell me in a sentence how it went; keep it short."
ANSWER = "Item looked after. " + "All went well and nothing needs to be done about it now. " * 3
BODY = "x" * 200
DELTA = "word "


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
        return round(1e3 * statistics.median(self.cpu[first:last]), 4)

    def wall_ms(self, first: int = 0, last: int | None = None) -> float:
        return round(1e3 * statistics.median(self.wall[first:last]), 4)

    @property
    def total_cpu(self) -> float:
        return round(sum(self.cpu), 4)

    @property
    def total_wall(self) -> float:
        return round(sum(self.wall), 4)


def peak_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


Cell = Callable[[Path], Awaitable[dict[str, float]]]


def main(cells: dict[str, Callable[..., Awaitable[dict[str, float]]]]) -> None:
    """``python ours.py CELL [name=value ...]``: run one cell in a new folder, print its figures as one JSON line."""
    name, *options = sys.argv[1:]
    values = {key: int(value) for key, value in (option.split("=") for option in options)}
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
        figures = asyncio.run(cells[name](Path(folder), **values))
    figures.setdefault("peak_mb", peak_mb())
    print(json.dumps(figures))
