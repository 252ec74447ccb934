"""The folder of a run, the processes in it, and what the runner does to them. Nothing here uses the product."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

from perdure.testing.campaign.driver import SPACE, Life
from perdure.testing.campaign.nursery import Nursery
from perdure.testing.campaign.script import RUN_VARIABLE

PATIENCE_S: Final = 90.0
"""What does not happen within this long does not happen."""

Event: TypeAlias = dict[str, Any]
"""One line of a driver."""


class Stuck(Exception):
    """Something that had to happen did not."""


def until(what: str, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for it. Raises Stuck."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while not condition():
        if time.monotonic() > deadline:
            raise Stuck(f"in {seconds:g} s it did not come to this: {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


class Process:
    """One life, as the runner sees it."""

    def __init__(self, world: World, life: Life) -> None:
        self._world = world
        self._events = os.open(life.events, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._buffer = b""
        self._eof = False
        self.status: int | None = None
        self.failure = ""
        self.finished = False
        self.pid = world.nursery.start(life)

    def next(self, seconds: float = PATIENCE_S) -> Event | None:
        """Its next event; None once it has ended. Raises Stuck."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if self._eof:
                return None
            self._read(deadline)
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: Event = json.loads(line)
        self._world.record(event)
        self.finished = self.finished or "finished" in event
        if "failed" in event:
            self.failure = f"{event['failed']}: {event['message']}"
        return event

    def _read(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Stuck("the driver neither says anything nor ends")
        if not select.select([self._events], [], [], min(left, 0.5))[0]:
            # A pipe that was never opened has no end.
            self._eof = self.ended() and not select.select([self._events], [], [], 0)[0]
            return
        data = os.read(self._events, 65536)
        self._buffer += data
        self._eof = not data

    def wait_for(self, what: str, wanted: Callable[[Event], bool]) -> Event:
        """Its next event that is wanted. Raises Stuck, also if it ends before."""
        while (event := self.next()) is not None:
            if wanted(event):
                return event
        raise Stuck(f"the driver ended before it said: {what} ({self.failure})")

    def ended(self) -> bool:
        """Whether it has ended; it need not be reaped."""
        return state_of(self.pid) in ("", "Z", "X")

    def stopped(self) -> bool:
        return state_of(self.pid) == "T"

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def reap(self) -> int:
        """Its end, which has come or is near."""
        if self.status is None:
            self.status = self._world.nursery.reap(self.pid)
            os.close(self._events)
            self._world.record({"ended": self.pid, "status": self.status})
        return self.status


class World:
    """A run's folder. ``agent.db``, ``spaces/``, ``gates/``, what was told in ``events.jsonl``."""

    def __init__(self, nursery: Nursery, parent: Path | None = None) -> None:
        self.nursery = nursery
        self.folder = Path(tempfile.mkdtemp(prefix="perdure-crash-", dir=parent)).resolve()
        (self.folder / "gates").mkdir()
        self._lives: list[Process] = []
        self._began = time.monotonic()
        self._told = (self.folder / "events.jsonl").open("a")

    # --- places

    @property
    def space(self) -> Path:
        return self.folder / "spaces" / SPACE

    @property
    def workspace(self) -> Path:
        return self.space / "workspace"

    @property
    def store(self) -> Path:
        return self.folder / "agent.db"

    def record(self, event: Event) -> None:
        self._told.write(json.dumps({"t": round(time.monotonic() - self._began, 3), **event}) + "\n")
        self._told.flush()

    def lines(self, name: str = "log.txt") -> list[str]:
        """Of a file of the workspace, now; empty if there is none."""
        try:
            return (self.workspace / name).read_text().splitlines()
        except OSError:
            return []

    # --- lives

    def start(self, life: Life) -> Process:
        """A process that lives as ``life`` says, in this folder."""
        os.mkfifo(life.events)
        process = Process(self, life)
        self._lives.append(process)
        return process

    def pipe(self) -> str:
        """A name for the pipe of one more life."""
        return str(self.folder / f"life-{len(self._lives) + 1}")

    def open_gate(self, step: int) -> None:
        (self.folder / "gates" / str(step)).touch()

    # --- what is done to the Space

    def daemon(self) -> int | None:
        """The process that serves the Space, by its own word; its shims have the same words as it."""
        try:
            pid = int(json.loads((self.space / "state" / "address").read_bytes())["pid"])
            serves = str(self.space / "state").encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if serves and state_of(pid) not in ("", "Z", "X") else None

    def kill_daemon(self) -> bool:
        """SIGKILL; whether there was one."""
        pid = self.daemon()
        if pid is None:
            return False
        self.record({"runner": "kill daemon", "pid": pid})
        send(pid, signal.SIGKILL, lambda: self.daemon() == pid)
        return True

    def living(self) -> list[int]:
        """Everything that lives in the Space: its daemon, shims, commands and what they left."""
        found: list[int] = []
        for name in os.listdir("/proc"):
            if name.isdigit() and self._lives_here(int(name)):
                found.append(int(name))
        return found

    def _lives_here(self, pid: int) -> bool:
        try:
            return f"{RUN_VARIABLE}={self.folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def lose_space(self) -> None:
        """The folder and the processes of the Space are gone, as if its machine were."""
        self.record({"runner": "lose the Space"})
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.space, self.folder / f"lost-{time.monotonic_ns()}")
        until("nothing lives in the Space", lambda: not self.kill_living())

    def kill_living(self) -> list[int]:
        """SIGKILL to everything that lives in the Space; what it was. What is started meanwhile may be missed."""
        living = self.living()
        self.record({"runner": "kill what lives in the Space", "pids": living})
        for pid in living:
            send(pid, signal.SIGKILL, lambda pid=pid: self._lives_here(pid))
        return living

    def go_on(self) -> bool:
        """SIGCONT to what lives in the Space and is stopped; whether anything was."""
        stopped = [pid for pid in self.living() if state_of(pid) == "T"]
        for pid in stopped:
            send(pid, signal.SIGCONT, lambda pid=pid: self._lives_here(pid))
        return bool(stopped)

    # --- the end

    def end(self, *, keep: bool) -> None:
        """Kill what is left of the run; ``keep`` its folder."""
        for process in self._lives:
            process.kill()
            process.reap()
        self.lose_space()
        self._told.close()
        if not keep:
            shutil.rmtree(self.folder)


def send(pid: int, number: signal.Signals, still: Callable[[], bool]) -> None:
    """A signal for the process that has this number now, if it is ``still`` the one that was meant."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if still():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def state_of(pid: int) -> str:
    """The letter the system gives it; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return stat.rpartition(b")")[2].split()[0].decode()
