"""Commands that run in the background on this machine, and what is known of them later (rules H366 to H368).

Each has a record and its output beside the kept outputs, on disk before its process is there. What runs is known in the
memory of the host that runs it; a record without an end whose host is gone is that of a command that is lost, since the
next host of the workspace ends what the dead one left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import msgspec

from perdure.harness.environment import (
    BackgroundCommand,
    BackgroundState,
    CommandNotStarted,
    NoSuchCommand,
    ProcessesRemain,
)
from perdure.tools.command import CommandOutput, CommandSpec, run
from perdure.tools.processes import HostMark
from perdure.tools.spills import Spills
from perdure.tools.threads import Threads

MOST_RUNNING = 8
MOST_KEPT = 32
"""Commands that have ended; the oldest go, with their outputs."""
MOST_OUTPUT = 64 * 1024 * 1024
MOST_READ = 1024 * 1024
MOST_WAIT_MS = 10 * 60 * 1000
SHOWN = 200
"""Characters of a command that are kept."""
STOPPED = "as asked"
UNKEPT = "its output is kept in part: the disk is full"
OUTPUT_LIMIT = f"it wrote more than {MOST_OUTPUT >> 20} MiB; what came before is kept"
_NAME = re.compile(r"command-([0-9a-f]{8})\.json")
_ID = re.compile(r"[0-9a-f]{8}")

Cause: TypeAlias = Literal["exit", "stopped", "closed", "output_limit", "remains"]
_REASONS: dict[Cause, str] = {
    "exit": "",
    "stopped": STOPPED,
    "closed": "the session closed",
    "output_limit": OUTPUT_LIMIT,
    "remains": "parts of it could not be ended",
}


class _Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is on disk of a command; whoever reads it may be another process."""

    id: str
    command: str
    host: str
    """The mark of the process that runs it."""
    started_at: int
    cause: Cause | None = None
    """None: it has not ended, as far as anybody wrote."""
    exit_code: int | None = None
    signal: int | None = None
    unkept: bool = False
    """The disk did not take all of its output."""


@dataclass(slots=True)
class _Output(CommandOutput):
    """All of it in one file."""

    file: int = -1
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, data: bytes) -> None:
        if self.unkept:
            return
        room = MOST_OUTPUT - self.size
        kept = await self.threads.call(_write, self.file, data[:room])
        self.size += kept
        self.unkept = kept < min(len(data), room)  # The disk is full: a gap would be read as output.
        self.tell()

    async def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            await self.threads.call(os.close, file)

    def tell(self) -> None:
        """Whoever waits looks again."""
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(slots=True)
class _Running:
    path: str
    record: _Record
    output: _Output
    loop: asyncio.AbstractEventLoop
    owner: object
    """The environment, which lives as long as this."""
    task: asyncio.Task[None] | None = None
    cause: Cause = "closed"
    """Why it is told to end, if it is; by the event loop, when that closes."""


_running: dict[str, _Running] = {}
"""By the path of its record: several environments of one process may be of one workspace."""


class LocalBackground:
    """The commands of one workspace. ``specify`` makes a command's specification; ``owner``: the environment."""

    def __init__(
        self, owner: object, spills: Spills, threads: Threads, files: Threads, specify: Callable[[str], CommandSpec]
    ) -> None:
        self._owner = owner
        self._spills = spills
        self._threads = threads
        self._files = files
        self._specify = specify
        self._starting = asyncio.Lock()

    async def start(self, command: str) -> BackgroundCommand:
        """Raises CommandNotStarted."""
        async with self._starting:  # Else several see the same room.
            return await self._start(command)

    async def _start(self, command: str) -> BackgroundCommand:
        check_room(sum(running.owner is self._owner for running in _running.values()))
        spec = self._specify(command)
        record = _Record(
            id=secrets.token_hex(4),
            command=command[:SHOWN],
            host=HostMark.own().text,
            started_at=time.time_ns() // 1_000_000,
        )
        try:
            path, file = await self._files.call(self._begin, record)
        except OSError as error:
            raise CommandNotStarted(f"its output cannot be kept: {(error.strerror or str(error)).lower()}") from error
        output = _Output(self._spills, self._files, None, file=file)
        running = _Running(path, record, output, asyncio.get_running_loop(), self._owner)
        started = asyncio.Event()
        _running[path] = running
        spec = replace(spec, on_start=started.set, output_bytes=MOST_OUTPUT)
        running.task = asyncio.create_task(self._supervise(running, spec))
        starting = asyncio.create_task(started.wait())
        try:
            await asyncio.wait({starting, running.task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._end(running, "stopped")
            raise
        finally:
            starting.cancel()
        if not started.is_set():
            await self._files.call(_remove, path)
            running.task.result()
        return await self._files.call(self._look, path)

    async def all(self) -> tuple[BackgroundCommand, ...]:
        return tuple(await self._files.call(self._look_at_all))

    async def read(
        self, id: str, *, offset: int, length: int, wait_ms: int, until_exit: bool
    ) -> tuple[BackgroundCommand, bytes]:
        """Raises NoSuchCommand, ValueError."""
        check_range(offset, length, wait_ms)
        path = self._path(id)
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_ms / 1000
        while (running := _running.get(path)) is not None and running.loop is asyncio.get_running_loop():
            left = deadline - clock()
            if left <= 0 or (not until_exit and running.output.size > offset):
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.output.changed.wait(), left)
        command = await self._files.call(self._look, path)
        length = min(length, command.output_bytes - offset)  # What came since is not of what is told.
        data = await self._files.call(_read, _output_of(path), offset, length) if length > 0 else b""
        return command, data

    async def stop(self, id: str) -> BackgroundCommand:
        """Raises NoSuchCommand."""
        path = self._path(id)
        running = _running.get(path)
        if running is not None:
            if running.loop is not asyncio.get_running_loop():
                raise NoSuchCommand(f"command {id} is run by another event loop of this process; stop it there")
            await self._end(running, "stopped")
        command = await self._files.call(self._look, path)
        if command.state == "running":
            raise NoSuchCommand(f"command {id} is {command.reason}; only that can stop it")
        return command

    async def end(self) -> None:
        """All that this environment runs, because its session closes."""
        mine = [running for running in _running.values() if running.owner is self._owner]
        here = [running for running in mine if running.loop is asyncio.get_running_loop()]
        await asyncio.gather(*(self._end(running, "closed") for running in here))

    # --- one that runs

    async def _supervise(self, running: _Running, spec: CommandSpec) -> None:
        """Its whole life. What becomes of it is written before anybody is told."""
        path, record = running.path, running.record
        try:
            result = await run(spec, running.output, self._threads)
        except CommandNotStarted:
            raise
        except ProcessesRemain:
            record.cause = "remains"
        except BaseException:
            record.cause = running.cause
            raise
        else:
            record.unkept = running.output.unkept
            if result.output_limit:
                record.cause = "output_limit"
            else:
                record.cause, record.exit_code, record.signal = "exit", result.exit_code, result.signal
        finally:
            with contextlib.suppress(OSError):  # Without its record the command is told to be lost, which it is.
                if record.cause is not None:
                    _store(path, record, flush=False)
            _running.pop(path, None)
            running.output.tell()
            with contextlib.suppress(OSError):
                _reclaim(os.path.dirname(path))

    async def _end(self, running: _Running, cause: Cause) -> None:
        """It has ended when this returns, also when the caller is cancelled."""
        task = running.task
        assert task is not None
        running.cause = cause
        task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        if not task.cancelled():
            task.exception()  # Seen; the record tells what became of it.
        _running.pop(running.path, None)  # Cancelled before it began, it did nothing itself.
        if cancelled is not None:
            raise cancelled

    # --- on disk

    def _path(self, id: str) -> str:
        """Of a record. Raises NoSuchCommand for what is no id."""
        if _ID.fullmatch(id) is None:
            raise no_such(id)
        return os.path.join(self._spills.directory, f"command-{id}.json")

    def _begin(self, record: _Record) -> tuple[str, int]:
        path = self._path(record.id)
        _store(path, record, flush=True)
        try:
            return path, os.open(
                _output_of(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except BaseException:
            _remove(path)
            raise

    def _look_at_all(self) -> list[BackgroundCommand]:
        found: list[BackgroundCommand] = []
        for name in os.listdir(self._spills.directory):
            if _NAME.fullmatch(name):
                with contextlib.suppress(NoSuchCommand):
                    found.append(self._look(os.path.join(self._spills.directory, name)))
        return sorted(found, key=lambda command: (command.started_at, command.id))

    def _look(self, path: str) -> BackgroundCommand:
        """How a command is. Raises NoSuchCommand."""
        record = _load(path)
        runner = _runner(record, path)
        if record.cause is None and runner is None:
            record = _load(path)  # How it ended is written before it is nobody's: only what is read now may be lost.
        state, reason = _state(record, path, runner)
        size = 0
        with contextlib.suppress(OSError):
            size = os.stat(_output_of(path)).st_size
        return BackgroundCommand(
            id=record.id,
            command=record.command,
            state=state,
            exit_code=record.exit_code,
            signal=record.signal,
            started_at=record.started_at,
            output_bytes=size,
            reason=reason,
        )


def _runner(record: _Record, path: str) -> str | None:
    """Who runs it, as far as that is not this process; None: nobody."""
    if path in _running:
        return ""
    host, own = HostMark.parse(record.host), HostMark.own()
    if host is not None and host != own and host.machine == own.machine and not host.is_dead(own.machine):
        return f"run by process {host.pid}"
    return None


def _state(record: _Record, path: str, runner: str | None) -> tuple[BackgroundState, str]:
    running = _running.get(path)
    unkept = UNKEPT if record.unkept or (running is not None and running.output.unkept) else ""
    if record.cause is not None:
        return ("exited" if record.cause == "exit" else "stopped"), _REASONS[record.cause] or unkept
    if runner is None:
        return "lost", "the process that ran it ended without stopping it; what it left running is ended by the next"
    return "running", runner or unkept


def check_room(running: int) -> None:
    """Raises CommandNotStarted where as many run as may."""
    if running >= MOST_RUNNING:
        raise CommandNotStarted(f"{MOST_RUNNING} commands run in the background already; stop one of them first")


def check_range(offset: int, length: int, wait_ms: int) -> None:
    """Raises ValueError for what is no range of an output, or too long a wait."""
    if offset < 0 or not 0 <= length <= MOST_READ or not 0 <= wait_ms <= MOST_WAIT_MS:
        raise ValueError(
            f"an output is read from 0 or later, at most {MOST_READ} bytes and {MOST_WAIT_MS} ms at a time, "
            f"not {offset}, {length} and {wait_ms}"
        )


def no_such(id: str) -> NoSuchCommand:
    return NoSuchCommand(f"no command in the background has the id {id[:40]!r}, or not any more")


def _output_of(path: str) -> str:
    return path.removesuffix(".json") + ".log"


def _write(file: int, data: bytes) -> int:
    """As much as the disk takes; how much that was."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(file, view) :]
    return len(data) - len(view)


def _read(path: str, offset: int, length: int) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        return os.pread(file, length, offset)
    finally:
        os.close(file)


def _store(path: str, record: _Record, *, flush: bool) -> None:
    """Whole or not at all. How a command ended is not flushed: if that is lost, so is the command."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(file, msgspec.json.encode(record))
        if flush:
            os.fsync(file)
    finally:
        os.close(file)
    os.replace(temporary, path)


def _load(path: str) -> _Record:
    """Raises NoSuchCommand."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=_Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise no_such(os.path.basename(path)[8:16]) from error


def _remove(path: str) -> None:
    for name in (path, _output_of(path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _reclaim(directory: str) -> None:
    """What is over the bound of those that have ended, and of those whose host is gone, goes: what was so first."""
    machine = HostMark.own().machine
    ended: list[tuple[int, str]] = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if _NAME.fullmatch(name) and path not in _running:
            with contextlib.suppress(NoSuchCommand, FileNotFoundError):
                record = _load(path)
                host = HostMark.parse(record.host)
                if record.cause is not None or host is None or host.machine != machine or host.is_dead(machine):
                    ended.append((os.stat(path).st_mtime_ns, path))
    for _, path in sorted(ended)[:-MOST_KEPT]:
        _remove(path)
