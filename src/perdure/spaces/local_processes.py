"""Which process a daemon is, and what a Space that was lost left running.

A Space whose folder is gone cannot be asked to kill what lives in it, and its commands may name its workspace by
absolute paths, which are those of its next generation. They carry a tag of the daemon's in their environment; as
everywhere where nothing contains a process, one that drops it is not found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Generator

import msgspec

from perdure.spaces.errors import SpaceUnavailable

TAG = "PERDURE_SPACE"
"""The daemon gives it to every command: the Space's own name of itself, a slash, the command."""
GONE_S = 10.0
"""How long what was killed may take to be gone."""


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True):
    """A process, told from a later one of the same number."""

    pid: int
    started: int
    """Clock ticks after boot."""
    boot: str


def mark_of(pid: int) -> ProcessMark | None:
    """None: there is no such process."""
    started = _started(pid)
    return None if started is None else ProcessMark(pid=pid, started=started, boot=_boot())


def end(mark: ProcessMark, *, term_s: float) -> None:
    """SIGTERM, after ``term_s`` SIGKILL, and wait until it is gone. Raises SpaceUnavailable if it does not go."""
    with _held(mark) as handle:
        if handle is None:
            return
        for number, seconds in ((signal.SIGTERM, term_s), (signal.SIGKILL, GONE_S)):
            _send(handle, number)
            if _gone(handle, seconds):
                return
    raise SpaceUnavailable(f"the daemon of the Space, process {mark.pid}, is still there after SIGKILL")


def wait_gone(mark: ProcessMark, seconds: float) -> bool:
    with _held(mark) as handle:
        return handle is None or _gone(handle, seconds)


def kill(mark: ProcessMark) -> None:
    """SIGKILL, and no wait."""
    with _held(mark) as handle:
        if handle is not None:
            _send(handle, signal.SIGKILL)


@contextlib.contextmanager
def _held(mark: ProcessMark) -> Generator[int | None]:
    """A pidfd of the process, whose identity was checked when that was open; None: it is gone."""
    if mark.boot != _boot():
        yield None
        return
    try:
        handle = os.pidfd_open(mark.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle if _started(mark.pid) == mark.started else None
    finally:
        os.close(handle)


def _send(handle: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def kill_tagged(space: str) -> None:
    """Kill every process that carries the tag of the Space which calls itself so. Raises SpaceUnavailable if some
    do not go."""
    deadline = time.monotonic() + GONE_S
    while found := _tagged(space):
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, sorted(found)[:20]))
            raise SpaceUnavailable(
                f"processes {shown} of the lost Space are still there after SIGKILL; end them, then open it again"
            )
        for mark in found.values():
            with contextlib.suppress(PermissionError):
                kill(mark)
        time.sleep(0.005)


def _tagged(space: str) -> dict[int, ProcessMark]:
    """By pid. Who it is, is read first: what has the tag after that is that one, or has ended."""
    found: dict[int, ProcessMark] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or (mark := mark_of(int(name))) is None:
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = file.read()
            for variable in environ.split(b"\0"):
                key, _, value = variable.partition(b"=")
                if key == TAG.encode() and any(tag.startswith(f"{space}/".encode()) for tag in value.split()):
                    found[mark.pid] = mark
    return found


def _gone(handle: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _started(pid: int) -> int | None:
    """None if it has ended, also while nobody has waited for it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
