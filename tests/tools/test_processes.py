"""Which processes a command has: none that lives is taken for gone, whatever it does while it is looked for (T90)."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_kit import kill_and_see_gone

from perdure.tools import processes
from perdure.tools.processes import Process

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@dataclass(frozen=True)
class Command:
    leader: int
    child: int

    def found(self) -> list[int]:
        return [process.pid for process in processes.of_command(self.leader, "tag")]


@pytest.fixture
def command() -> Iterator[Command]:
    """Its leader has ended, is not reaped, and left a child in a session of its own."""
    process = subprocess.Popen(
        ["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"],
        stdout=subprocess.PIPE,
        env={**os.environ, processes.TAG: "tag"},
        start_new_session=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield Command(process.pid, child)
    finally:
        kill_and_see_gone(child)
        process.communicate()


def listing_at_first(monkeypatch: pytest.MonkeyPatch, pids: list[int]) -> None:
    real, looks = os.listdir, []

    def listdir(path: str) -> list[str]:
        looks.append(path)
        return [str(pid) for pid in pids] if len(looks) == 1 else real(path)

    monkeypatch.setattr(os, "listdir", listdir)


def test_what_the_leader_left_in_another_session_is_found(command: Command) -> None:
    assert command.found() == [command.child]


def test_a_look_in_which_somebody_vanished_is_repeated(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have left a child that came too late to be listed."""
    listing_at_first(monkeypatch, [command.leader, 999999999])
    assert command.found() == [command.child]


def test_a_look_in_which_the_leader_ended_is_repeated(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    listing_at_first(monkeypatch, [command.leader])
    real, looks = processes._row, []

    def row(pid: int) -> processes._Row | None:
        known = real(pid)
        looks.append(pid)
        if known is None or len(looks) > 1:
            return known
        return dataclasses.replace(known, state="S")

    monkeypatch.setattr(processes, "_row", row)
    assert command.found() == [command.child]


def test_one_that_is_just_beginning_another_program_is_looked_at_again(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables cannot be read for a moment."""
    real, looks = processes._tags, []

    def tags(pid: int) -> list[str] | None:
        looks.append(pid)
        return None if pid == command.child and looks.count(pid) < 20 else real(pid)

    monkeypatch.setattr(processes, "_tags", tags)
    assert command.found() == [command.child]


def test_what_cannot_be_looked_at_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no command of a host that lives is ended for it."""
    mark = processes.HostMark.own()
    machine = processes._machine()
    assert not mark.is_dead(machine)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", full)
    assert not mark.is_dead(machine)
    with pytest.raises(OSError, match="Too many open files"):
        processes.of_command(os.getpid(), "tag")


def test_a_reused_pid_is_nobody_that_is_known() -> None:
    """Signals go to the process that was found, not to whoever has its pid by now."""
    own = processes._row(os.getpid())
    assert own is not None
    assert processes.send(Process(own.pid, own.started + 1), signal.SIGKILL)
