"""What processes take that are more than this one: CPU of everything started from here, and flushes to disk; and the
programs that tell."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Clocks: TypeAlias = tuple[float, float]
"""CPU and wall, in seconds."""

FLUSHES = ("fsync", "fdatasync", "syncfs", "sync", "sync_file_range", "msync")


class Cpu:
    """CPU time of this process and of all it starts, those that ended and left its session among them.

    The kernel counts it for a control group that this process moves into. Where it may not make one, what /proc tells
    of the processes below this one is added up, which has the coarseness of ticks.
    """

    def __init__(self) -> None:
        self._group: Path | None = None
        self._home: Path | None = None

    @contextlib.contextmanager
    def counting(self) -> Generator[Cpu]:
        self._enter()
        try:
            yield self
        finally:
            self._leave()

    def seconds(self) -> float:
        if self._group is None:
            return _of_tree() / os.sysconf("SC_CLK_TCK")
        if (self._group / "cpuacct.usage").exists():
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        return int((self._group / "cpu.stat").read_text().split()[1]) / 1e6

    def begun(self) -> Clocks:
        return self._settled(), time.perf_counter()

    def ended(self) -> Clocks:
        wall = time.perf_counter()
        return self._settled(), wall

    def _settled(self) -> float:
        time.sleep(0.001)  # a process is accounted for what it did when it stops running
        return self.seconds()

    @property
    def how(self) -> str:
        return "of a control group" if self._group is not None else "of the processes below, in ticks"

    def _enter(self) -> None:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, own = line.split(":", 2)
            root = Path("/sys/fs/cgroup", "" if number == "0" else controllers)
            if number != "0" and "cpuacct" not in controllers.split(","):
                continue
            home = Path(f"{root}/{own}")
            group = home / f"perdure-bench-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                try:
                    (group / "cgroup.procs").write_text(str(os.getpid()))
                except OSError:
                    group.rmdir()
                    raise
                self._home, self._group = home, group
                return

    def _leave(self) -> None:
        if self._group is None or self._home is None:
            return
        for _ in range(50):  # what ends just now is in it for a moment more
            with contextlib.suppress(OSError):
                for pid in (self._group / "cgroup.procs").read_text().split():
                    (self._home / "cgroup.procs").write_text(pid)
                self._group.rmdir()
                break
            time.sleep(0.1)
        self._group = None


def _of_tree() -> int:
    """Ticks of this process and those below it, with their children that ended."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(words[1]), []).append(int(name))
                ticks[int(name)] = sum(map(int, words[11:15]))
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += parents.get(pid, [])
    return total


@dataclass
class Samples:
    """Of something done several times."""

    cpu: list[float] = field(default_factory=list[float])
    wall: list[float] = field(default_factory=list[float])

    def add(self, begun: Clocks, ended: Clocks, each: int = 1) -> None:
        self.cpu.append((ended[0] - begun[0]) / each)
        self.wall.append((ended[1] - begun[1]) / each)


_CALL = re.compile(rf"^\s*(?:\d+\s+)?(\d+\.\d+) (?:{'|'.join(FLUSHES)})\(", re.MULTILINE)


def flushes(trace: str, spans: list[tuple[float, float]]) -> list[int]:
    """How many flushes of a ``strace -f -ttt`` began in each span of time."""
    at = [float(found) for found in _CALL.findall(trace)]
    return [sum(begun <= moment <= ended for moment in at) for begun, ended in spans]


def have(program: str) -> bool:
    """Whether it is there; as root it is installed."""
    if shutil.which(program) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "install", "-y", "-qq", program], capture_output=True, check=False, env=environment)
    if shutil.which(program) is None:
        print(f"{program} is missing: its rows are left out", file=sys.stderr)
    return shutil.which(program) is not None
