"""The processes a command started: which they are, and how all of them are ended.

A command leads a session and a process group of its own, and its environment carries a tag that names the
workspace, the host process and the command. Its processes are those of that group or session, those that
carry the tag, and everything below any of them: what called setsid or was started by a double fork is found
by its tag. This is best effort: a process that leaves the session, drops the environment and whose parent has
ended is not found. It needs /proc; without it (macOS) only the process group is known.

Signals go through pidfds after the start time was compared, so no stranger that got a reused pid is hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

TAG = "PERDURE_EXEC"
"""Environment variable: the tags of this command and of those it runs inside of, separated by spaces."""
_MAX_TAGS = 16
_LOOKS = 5
"""How often the processes are listed at most while others end."""
_LOOKS_AT_UNTOLD = 100
"""How often at most while there is one that cannot be told."""
_PAUSE = 0.001
"""Seconds between two of these looks."""
_HAS_PROC = sys.platform == "linux" and os.path.exists("/proc/self/stat")
_GONE = "ZX"


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: int
    """Clock ticks after boot; with the pid, its identity."""


@dataclass(frozen=True, slots=True)
class _Row:
    pid: int
    parent: int
    group: int
    session: int
    state: str
    started: int
    kernel: bool
    """A thread of the kernel itself."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """Which process started a command: comparable only within one boot and one pid namespace."""

    machine: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> HostMark:
        pid = os.getpid()
        row = _row(pid)
        return cls(_machine(), pid, row.started if row else 0)

    @property
    def text(self) -> str:
        return f"{self.machine}.{self.pid}.{self.started}"

    @classmethod
    def parse(cls, text: str) -> HostMark | None:
        machine, _, rest = text.partition(".")
        pid, _, started = rest.partition(".")
        return cls(machine, int(pid), int(started)) if pid.isdigit() and started.isdigit() else None

    def is_dead(self, machine: str) -> bool:
        """Whether it certainly no longer runs: only a mark of this machine, seen from the same namespace,
        tells."""
        if self.machine != machine:
            return False
        try:
            row = _row(self.pid)
        except OSError:
            return False
        return row is None or row.state in _GONE or row.started != self.started


def tagged(env: dict[str, str], tag: str) -> dict[str, str]:
    """``env`` with the tag added to those it carries."""
    tags = [*env.get(TAG, "").split(), tag]
    return {**env, TAG: " ".join(tags[-_MAX_TAGS:])}


def of_command(leader: int, tag: str) -> list[Process]:
    """The command's processes that have not ended. ``leader`` must not have been reaped yet: its id is then
    its own. Raises OSError if they cannot be looked at."""
    if not _HAS_PROC:
        return _group(leader)

    row = _row(leader)
    ended = row is not None and row.state in _GONE
    return _look(lambda other: other == tag, since=row.started if row else 0, leader=leader, ended=ended)


def kill_group(leader: int) -> None:
    """Kill what is left of the leader's process group, all at once: nothing in it can fork its way out."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def group_remains(leader: int) -> bool:
    """Whether the group of a leader that was reaped still has processes; nobody else can have its id then."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def orphans(workspace: str) -> list[Process]:
    """Processes of commands of this workspace whose host process has died without ending them."""
    if not _HAS_PROC:
        return []
    machine = _machine()
    dead: dict[str, bool] = {}

    def is_orphan(tag: str) -> bool:
        name, _, rest = tag.partition(":")
        if name != workspace:
            return False
        host = rest.partition(":")[0]
        if host not in dead:
            mark = HostMark.parse(host)
            dead[host] = mark is not None and mark.is_dead(machine)
        return dead[host]

    return _look(is_orphan)


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal. False if this user may not; one that is gone counts as sent."""
    try:
        if not _HAS_PROC:
            os.killpg(process.pid, number)
            return True
        if not hasattr(os, "pidfd_open"):
            if _is(process):
                os.kill(process.pid, number)
            return True
        handle = os.pidfd_open(process.pid)
        try:
            if _is(process):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def _is(process: Process) -> bool:
    row = _row(process.pid)
    return row is not None and row.started == process.started


def _group(leader: int) -> list[Process]:
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return []
    return [Process(leader, 0)]


def _look(
    is_ours: Callable[[str], bool], *, since: int = 0, leader: int | None = None, ended: bool = False
) -> list[Process]:
    """The processes with such a tag that began since then, the leader's, and all below them.

    If there are none, it is looked again at what is new and what could not be told: a process that has ended (but for
    a leader that is known to have ``ended`` before) may have left a child that came too late to be listed, and one
    that is just beginning another program shows no tag.
    """
    seen: dict[int, _Row] = {}
    found: list[Process] = []
    for look in range(1, _LOOKS_AT_UNTOLD + 1):
        fresh, whole = _rows(seen)
        untold = False
        chosen: list[_Row] = []
        for row in fresh:
            seen[row.pid] = row
            if leader in (row.group, row.session):
                chosen.append(row)
            if row.started < since or row.kernel or (ended and row.pid == leader):
                continue
            if row.state in _GONE:
                whole = False
            elif (tags := _tags(row.pid)) is None:
                untold = True
                del seen[row.pid]
            elif any(is_ours(tag) for tag in tags):
                chosen.append(row)
        found = _closure(seen.values(), chosen)
        if found or (not untold and (whole or look >= _LOOKS)):
            break
        time.sleep(_PAUSE)
    return found


def _closure(rows: Iterable[_Row], chosen: list[_Row]) -> list[Process]:
    """The rows chosen and all below them, without the ended ones and without this process."""
    own = os.getpid()
    children: dict[int, list[_Row]] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row)
    found: dict[int, _Row] = {}
    while chosen:
        row = chosen.pop()
        if row.pid not in found and row.pid != own:
            found[row.pid] = row
            chosen.extend(children.get(row.pid, ()))
    return [Process(row.pid, row.started) for row in found.values() if row.state not in _GONE]


def _rows(seen: Container[int]) -> tuple[list[_Row], bool]:
    """The processes not seen before, and whether none of those listed had ended before it was looked at."""
    found: list[_Row] = []
    whole = True
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in seen:
            with contextlib.suppress(PermissionError):  # Another user's, hidden from this one.
                row = _row(int(name))
                found += [] if row is None else [row]
                whole = whole and row is not None
    return found, whole


def _row(pid: int) -> _Row | None:
    """None if there is no such process. Raises OSError if it cannot be looked at."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name stands in parentheses and may contain anything, these included.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Row(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started=int(fields[19]),
        kernel=bool(int(fields[6]) & 0x0020_0000),  # PF_KTHREAD
    )


def _tags(pid: int) -> list[str] | None:
    """None if it cannot be told now: it has ended, or it is about to begin another program."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except PermissionError:
        return []
    except (FileNotFoundError, ProcessLookupError):
        return None
    prefix = f"{TAG}=".encode()
    for variable in environ.split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode("ascii", "replace").split()
    return [] if environ else None


def _machine() -> str:
    """Boot and pid namespace, in which pids mean the same."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip().replace("-", "")[:16]
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{boot}-{namespace}"
