"""The loop by itself: one round of events may hold one for what an earlier one of the round has ended."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.spaced import spaced


def of_a_shim(loop: spaced.Loop) -> tuple[spaced.ShimHandle, socket.socket, subprocess.Popen[bytes], list[str]]:
    """A handle of a process, the other end of its channel, and what it told of."""
    ended: list[str] = []

    def run_ended(name: str, _shim: object) -> None:
        ended.append(name)

    daemon: Any = SimpleNamespace(loop=loop, shims=set(), run_ended=run_ended, flushed_to=lambda place: None)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "1000"])
    ticks = spaced.start_ticks(process.pid)
    assert ticks is not None
    handle = spaced.ShimHandle(daemon, process.pid, ticks, ours)
    handle.current = "x"
    return handle, theirs, process, ended


@pytest.mark.parametrize("order", ["message first", "end first"])
def test_a_shim_that_says_its_last_and_dies_in_one_round(order: str) -> None:
    """Rule S19: what it said counts, whichever event comes first, and it has ended once."""
    loop = spaced.Loop()
    handle, theirs, process, ended = of_a_shim(loop)
    spaced.send_message(theirs, {"exit": [1, 2], "left": True})
    process.kill()
    process.wait()
    theirs.close()
    steps = [handle.on_message, handle.on_gone]
    for step in steps if order == "message first" else steps[::-1]:
        step(selectors.EVENT_READ)
    if order == "message first" and handle.channel is not None:
        handle.on_message(selectors.EVENT_READ)
    assert ended == ["x"]
    assert handle.left
    assert handle.gone
    close(loop)


def test_a_connection_that_was_closed_earlier_in_the_round() -> None:
    """Rule S7: a stranger is let go for another one, and was about to be read or written."""
    loop = spaced.Loop()
    ours, theirs = socket.socketpair()
    connection = spaced.Connection(loop, ours)
    theirs.sendall(b"x")
    connection.close()
    connection.on_ready(selectors.EVENT_READ | selectors.EVENT_WRITE)
    connection.close()
    theirs.close()
    close(loop)


def close(loop: spaced.Loop) -> None:
    loop.selector.close()
    os.close(loop._waker)
    os.close(loop._woken)


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_that_is_removed_as_it_is_asked_is_gone(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule S17: its files can be opened, and are no device any more when they are read or written."""
    for name in ("cgroup.kill", "cgroup.freeze", "cgroup.events", "cgroup.procs", "freezer.state"):
        (tmp_path / name).touch()

    def gone(*_: object) -> bytes:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(spaced.os, "write", gone)
    monkeypatch.setattr(spaced, "read_small", gone)
    group = spaced.Cgroup(str(tmp_path), version)
    group.freeze(True)
    assert group.is_frozen()
    group.kill()
    assert group.pids() == []
