"""Starts the processes of a campaign: each is forked from one that has imported everything, so that lives are cheap.

    python -m perdure.testing.campaign.nursery

reads a line of JSON a command and answers each with one: ``{"start": Life}`` gives ``{"pid": n}``, ``{"reap": n}``
gives ``{"status": n}`` once that process has ended. A process keeps its number until it is reaped, so that nobody
else's is ever killed in its place.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import msgspec

from perdure.testing.campaign.driver import Life, main

_LATER = ("perdure.harness.arguments", "pydantic")
"""What a life would import only when it needs it."""


class _Command(msgspec.Struct, frozen=True, omit_defaults=True):
    start: Life | None = None
    reap: int | None = None


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    pid: int = 0
    status: int = 0


class Nursery:
    """The runner's end. Not for use by several threads at once."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # this module
            [sys.executable, "-m", "perdure.testing.campaign.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, life: Life) -> int:
        """The number of a new process."""
        return self._ask(_Command(start=life)).pid

    def reap(self, pid: int) -> int:
        """Wait until it has ended, and forget it; its exit code, or minus the signal that ended it."""
        return self._ask(_Command(reap=pid)).status

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, command: _Command) -> _Answer:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(msgspec.json.encode(command) + b"\n")
        stdin.flush()
        return msgspec.json.decode(stdout.readline(), type=_Answer)


def _serve() -> None:
    os.umask(0o022)
    for name in _LATER:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its runner
    alive: set[int] = set()
    while line := sys.stdin.buffer.readline():
        command = msgspec.json.decode(line, type=_Command)
        if command.start is not None:
            answer = _Answer(pid=_born(command.start))
            alive.add(answer.pid)
        else:
            assert command.reap is not None, "one of the two"
            answer = _Answer(status=os.waitstatus_to_exitcode(os.waitpid(command.reap, 0)[1]))
            alive.discard(command.reap)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    for pid in alive:  # The runner is gone; one that is frozen would stay so for ever.
        os.kill(pid, signal.SIGKILL)


def _born(life: Life) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        random.seed()
        said = os.open(Path(life.folder) / "driver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (said, 1), (said, 2)):
            os.dup2(descriptor, place)
        os.closerange(3, 256)
        status = main(life)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
