"""Starting the daemon of a local Space as a process of its own, which outlives this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from perdure.spaced import SPACED
from perdure.spaces.connection import MAX_SUN_PATH
from perdure.spaces.errors import SpaceNotReady, SpaceUnavailable
from perdure.spaces.local_folder import Folder, Record

ContainmentChoice: TypeAlias = Literal["auto", "cgroup2", "cgroup1", "none"]
_MAX_LINE = 65536
_END_S = 1.0
"""Between the end of a daemon's output and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How daemons are started."""

    python: str | None
    """The interpreter; None: this process's."""
    env: Mapping[str, str] | None
    """What the daemon, and so every command, has; None: this process's, as it is then."""
    containment: ContainmentChoice
    start_s: float
    testing_crash_points: bool


class _Serves(msgspec.Struct, frozen=True):
    """The line a daemon prints once it serves."""

    pid: int


def start(folder: Folder, record: Record, options: DaemonOptions) -> int:
    """Start a daemon and wait until it serves; its pid. Raises SpaceUnavailable with what it says, SpaceNotReady if
    somebody ended it first."""
    python = options.python or sys.executable
    if not python:
        raise SpaceUnavailable("this process does not know its Python; give LocalSpaces python=")
    words = [
        python, "-I", "-S", os.fspath(SPACED), "--workspace", folder.workspace(record), "--state", folder.state,
        "--space", folder.name, "--generation", str(record.generation), "--token-file", folder.token,
        "--containment", options.containment,
    ]  # fmt: skip
    if options.testing_crash_points:
        words.append("--testing-crash-points")
    with contextlib.ExitStack() as opened:
        kept: tuple[int, ...] = ()
        listen = folder.socket
        if len(os.fsencode(listen)) > MAX_SUN_PATH:
            descriptor = os.open(folder.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            kept, listen = (descriptor,), f"/proc/self/fd/{descriptor}/{os.path.basename(listen)}"
        words += ["--listen", f"unix:{listen}"]
        log = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        opened.callback(os.close, log)
        try:
            process = subprocess.Popen(  # noqa: S603  (the interpreter and the file are ours)
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=None if options.env is None else dict(options.env),
                start_new_session=True,
                pass_fds=kept,
            )
        except OSError as error:
            raise SpaceUnavailable(f"{python} could not be started: {error.strerror}") from error
    # Somebody must wait for it whenever it ends, for as long as this process lives.
    threading.Thread(target=process.wait, name="perdure-space", daemon=True).start()
    try:
        return _served(process, folder, options.start_s)
    except BaseException:
        process.kill()
        raise


def _served(process: subprocess.Popen[bytes], folder: Folder, seconds: float) -> int:
    assert process.stdout is not None
    with process.stdout as stdout:
        line = _line(stdout.fileno(), time.monotonic() + seconds)
    if line is None:
        raise SpaceUnavailable(f"the daemon of the Space {folder.name} did not serve within {seconds:g} s")
    try:
        return msgspec.json.decode(line, type=_Serves).pid
    except msgspec.MsgspecError:
        said, ended_by = _last_line(folder.log), _signal(process)
        if not said and ended_by is not None:
            raise SpaceNotReady(
                f"the daemon of the Space {folder.name} was ended from outside, by {ended_by}, before it served"
            ) from None
        said = said or "it ended without a word"
        raise SpaceUnavailable(f"the daemon of the Space {folder.name} could not start: {said}") from None


def _line(descriptor: int, deadline: float) -> bytes | None:
    """What comes until a line ends or everything does; None: neither did in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    line = b""
    while b"\n" not in line and len(line) < _MAX_LINE:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if poll.poll(left * 1000):
            block = os.read(descriptor, 4096)
            if not block:
                break
            line += block
    return line


def _signal(process: subprocess.Popen[bytes]) -> str | None:
    """What ended a process that has closed its output; None: it ended by itself, or lives on."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        number = -process.wait(_END_S)
        if number > 0:
            return f"signal {number} ({signal.strsignal(number)})"
    return None


def _last_line(path: str) -> str:
    """Empty if there is none, or no file: the folder may be gone by now."""
    try:
        with open(path, "rb") as file:
            lines = file.read(_MAX_LINE).decode("utf-8", "replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1][:2000] if lines else ""
