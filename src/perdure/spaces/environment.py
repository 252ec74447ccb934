"""A Space's files and commands as one attempt of one call uses them.

Everything goes through the daemon, under the driver's admission. What says that the driver no longer has the Space,
that the call was undone, or that nobody can know what a request did, is SpaceConnectionLost or StaleEpochError:
never FileError, CommandNotStarted or a result, which a tool would show to the model (rule S111).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import TypeVar

from perdure.harness.environment import (
    BackgroundCommand,
    CallScope,
    CommandNotStarted,
    ExecResult,
    ExecutionEnvironment,
    FileError,
    FileKind,
    FileStat,
    FileTooLarge,
    Found,
    FoundPath,
    GrepLine,
    GrepLines,
    Listing,
    OpenCall,
    PathEscapes,
    ProcessesRemain,
)
from perdure.kernel.errors import StaleEpochError
from perdure.spaces import frames, wire
from perdure.spaces.background import BackgroundLog, NoLog, SpaceBackground, note_of, told
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import (
    ContentMissing,
    KeyBelowFloor,
    KeyConflict,
    KeyVoid,
    LostReason,
    NoImage,
    Restoring,
    SpaceBusy,
    SpaceConnectionLost,
    SpaceError,
    SpaceFault,
    SpaceFull,
    SpaceProcessesRemain,
    SpaceRefused,
    SpaceRequestInvalid,
    SpaceTooLarge,
)
from perdure.spaces.outputs import Outputs
from perdure.spaces.wire import Command, ExecKey, FileInfo, Limits
from perdure.tools.background import MOST_OUTPUT
from perdure.tools.command import INLINE_OUTPUT, CommandOutput
from perdure.tools.searching import TIME_S, check_find, check_grep
from perdure.tools.workspace import FULL, MAX_READ

T = TypeVar("T")

MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
BASH_OR_SH = ("/bin/sh", "-c", 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; fi; exec sh -c "$1"', "sh")
"""Runs a command string in bash where the Space has one, else in sh. The same words on every machine: a command that
is adopted must be the one that was started."""
_OUTPUT_CHUNK = 1024 * 1024
_MOST_LISTED = 10_000
_STARTS = 4
"""So often a command is started that the Space is too busy for, or whose shim was killed before it did anything."""

_LOST: dict[type[SpaceRefused], LostReason] = {
    KeyVoid: "void",
    KeyBelowFloor: "below_floor",
    KeyConflict: "conflict",
    NoImage: "no_image",
    Restoring: "restoring",
    ContentMissing: "restoring",
    SpaceFault: "unknown",
    SpaceRefused: "unknown",  # An error of the system that no class stands for: it may have come too late.
}


class CallOver(SpaceError):
    """The attempt this environment belongs to has ended."""


def _never() -> bool:
    return False


class SpaceEnvironment:
    """Files and commands of the Space that ``client`` has, for one attempt of one call.

    ``nonce``: the attempt's, as its intent stores it. Its commands get the ordinals 1, 2, ... in the order of
    ``exec``, so that an attempt that runs again is answered from the ledger (rule S113). ``shell``: what runs command
    strings. ``leaves_running``: asked when ``exec`` is cancelled; True: the command runs on, for the next driver.
    ``background``: what is known of commands in the background, and learns of new ones.
    """

    def __init__(
        self,
        client: SpaceClient,
        *,
        call: int,
        attempt: int,
        nonce: str,
        outputs: Outputs | None = None,
        shell: Sequence[str] = BASH_OR_SH,
        leaves_running: Callable[[], bool] = _never,
        background: BackgroundLog | None = None,
    ) -> None:
        self._client = client
        self._call = call
        self._attempt = attempt
        self._nonce = nonce
        self._outputs = outputs or Outputs(client.address.name)
        self._shell = tuple(shell)
        self._leaves_running = leaves_running
        self._background_log = background or NoLog()
        self._started = 0
        self._starting = asyncio.Lock()
        self._over = False

    @property
    def cwd(self) -> str:
        return self._client.seen.workspace

    @property
    def scope(self) -> CallScope | None:
        return None

    def for_call(self, call: OpenCall) -> ExecutionEnvironment:
        """Itself: a nested call is part of the call this was made for."""
        return self

    @property
    def commands(self) -> tuple[ExecKey, ...]:
        """The keys given out so far."""
        return tuple(self._key(ordinal) for ordinal in range(1, self._started + 1))

    def close(self) -> None:
        """The attempt has ended: from now on operations raise CallOver (rule S114)."""
        self._over = True

    # --- files

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"a range begins at 0 or later and is not negative: {offset}, {length}")
        inside = self._below(path)
        if inside is None:
            kept = await self._outputs.read(path, offset, length)
            if kept is None:
                raise self._escapes(path)
            return kept
        with self._asking(path):
            most = frames.BODY_BYTES
            read, data = await self._client.read(
                inside, offset=offset, length=most if length is None else min(length, most)
            )
            left = max(0, read.size - offset)
            wanted = left if length is None else min(length, left)
            if wanted > MAX_READ:
                raise FileTooLarge(path, f"{wanted} bytes are more than the {MAX_READ} one read takes; read a range")
            parts = [data]
            got = len(data)
            while data and got < wanted:
                _, data = await self._client.read(inside, offset=offset + got, length=min(wanted - got, most))
                parts.append(data)
                got += len(data)
            return b"".join(parts)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, expect: str | None = None) -> None:
        inside = self._inside(path)
        with self._asking(path):
            content: bytes | list[str] = data
            if len(data) > frames.BODY_BYTES:
                size, content = wire.CHUNK_BYTES, []
                for at in range(0, len(data), frames.BODY_BYTES):
                    end = min(at + frames.BODY_BYTES, len(data))
                    content += await self._client.put([data[i : min(i + size, end)] for i in range(at, end, size)])
            writing = self._client.write(
                inside,
                content,
                call=self._call,
                attempt=self._attempt,
                nonce=self._nonce,
                mode=mode,
                expect=expect,
            )
            await _settled(writing)

    async def stat(self, path: str) -> FileStat | None:
        inside = self._below(path)
        if inside is None:
            kept = await self._outputs.stat(path)
            if kept is None:
                raise self._escapes(path)
            return kept
        with self._asking(path):
            found = await self._client.stat(inside)
        return None if found is None else self._file_stat(found)

    async def list_dir(self, path: str, *, limit: int = _MOST_LISTED) -> Listing:
        if limit < 1:
            raise ValueError(f"a listing's limit is at least 1, not {limit}")
        inside = self._inside(path)
        with self._asking(path):
            found = await self._client.list_dir(inside, limit=min(limit, _MOST_LISTED))
        return Listing(entries=tuple(map(self._file_stat, found.entries)), more=found.more)

    async def find(
        self,
        path: str = ".",
        *,
        pattern: str | None = None,
        kind: FileKind | None = None,
        ignored: bool = False,
        limit: int = 1000,
    ) -> Found:
        check_find(limit)
        inside = self._inside(path)
        with self._asking(path):
            found = await self._client.walk(
                inside, pattern=pattern, kind=kind, ignored=ignored, limit=limit, wait_ms=round(TIME_S * 1000)
            )
        entries = (FoundPath(path=str(entry.path), kind=_kind(entry.kind), size=entry.size) for entry in found.entries)
        return Found(entries=tuple(entries), more=found.more, timed_out=found.timed_out)

    async def grep(
        self,
        pattern: str,
        *,
        path: str = ".",
        fixed: bool = False,
        ignore_case: bool = False,
        glob: str | None = None,
        context: int = 0,
        ignored: bool = False,
        limit: int = 100,
    ) -> GrepLines:
        check_grep(limit, context)
        inside = self._inside(path)
        with self._asking(path):
            found = await self._client.grep(
                pattern, path=inside, fixed=fixed, ignore_case=ignore_case, glob=glob, context=context,
                ignored=ignored, limit=limit, wait_ms=round(TIME_S * 1000),
            )  # fmt: skip
        lines = (
            GrepLine(path=str(match.path), line=match.line, text=str(match.text), context=match.context)
            for match in found.matches
        )
        return GrepLines(lines=tuple(lines), more=found.more, timed_out=found.timed_out, skipped=found.skipped)

    async def remove(self, path: str) -> None:
        inside = self._inside(path)
        with self._asking(path):
            await _settled(self._client.remove(inside, call=self._call, attempt=self._attempt, nonce=self._nonce))

    # --- commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """As ExecutionEnvironment says, but for what a command leaves running: that runs on (rule S112)."""
        argv = [*self._shell, command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("a command names at least its program")
        if timeout_ms is not None and not 1 <= timeout_ms <= MAX_TIMEOUT_MS:
            raise ValueError(f"a time-out is 1 ms to 7 days, not {timeout_ms} ms")
        directory = "" if cwd is None else self._inside(cwd)
        with self._asking(cwd or "."):
            self._started += 1
            key = self._key(self._started)
            output = self._outputs.begin(on_output)
            try:
                ended = await self._run(key, argv, directory, env or {}, timeout_ms, output)
            except (SpaceError, StaleEpochError, CommandNotStarted):
                raise  # There is nothing to stop, or nobody who could.
            except asyncio.CancelledError as cancelled:
                if not self._leaves_running():
                    await self._stop(key, cancelled)
                raise
            except BaseException:
                await self._stop(key, None)
                raise
            finally:
                await output.close()
        return _result(ended, output)

    async def start_background(self, command: str) -> BackgroundCommand:
        with self._asking("."):
            async with self._starting:  # Else several see the same room.
                return await self._start_background(command)

    async def _start_background(self, command: str) -> BackgroundCommand:
        await (await self._background()).check_room()
        self._started += 1
        key = self._key(self._started)
        try:
            found, _ = await self._start(
                key, [*self._shell, command], "", {}, None, until_exit=True, limits=Limits(output_bytes=MOST_OUTPUT)
            )
        except (SpaceBusy, SpaceFull, SpaceTooLarge, SpaceRequestInvalid) as error:
            raise CommandNotStarted(f"the command could not be started: {error}") from error
        except asyncio.CancelledError as cancelled:
            if not self._leaves_running():
                await self._stop(key, cancelled)
            raise
        if found.state not in ("running", "exited"):
            raise SpaceConnectionLost(_reason(found), f"command {key.ordinal} of the call is {found.state}")
        if found.cause == "not_started":
            raise CommandNotStarted(f"the command could not be started: {found.reason or found.errno}")
        note = note_of(key, command)
        self._background_log.add(note)
        return told(note, found)

    async def background(self) -> tuple[BackgroundCommand, ...]:
        with self._asking("."):
            return await (await self._background()).all()

    async def read_background(
        self, id: str, *, offset: int = 0, length: int = 0, wait_ms: int = 0, until_exit: bool = False
    ) -> tuple[BackgroundCommand, bytes]:
        with self._asking("."):
            return await (await self._background()).read(
                id, offset=offset, length=length, wait_ms=wait_ms, until_exit=until_exit
            )

    async def stop_background(self, id: str) -> BackgroundCommand:
        with self._asking("."):
            try:
                return await _settled((await self._background()).stop(id))
            except SpaceProcessesRemain as error:
                raise ProcessesRemain(error.pids) from error

    async def end_background(self) -> None:
        """Nothing: they are the Space's, and run on for the next driver (rule S169)."""

    async def _background(self) -> SpaceBackground:
        return SpaceBackground(self._client, await self._background_log.notes())

    async def _run(
        self,
        key: ExecKey,
        argv: list[str],
        cwd: str,
        env: Mapping[str, str],
        timeout_ms: int | None,
        output: CommandOutput,
    ) -> Command:
        """Start it, or find it started, and take its output until it has ended."""
        program = shlex.quote(argv[0])
        unwatched = output.on_output is None
        try:
            command, data = await self._start(key, argv, cwd, env, timeout_ms, unwatched)
        except (SpaceBusy, SpaceFull, SpaceTooLarge, SpaceRequestInvalid) as error:
            raise CommandNotStarted(f"{program} could not be started: {error}") from error
        while True:
            if command.state not in ("running", "exited"):
                raise SpaceConnectionLost(_reason(command), f"command {key.ordinal} of the call is {command.state}")
            running = command.state == "running"
            if not running:
                # What it left may go on writing; that is no longer its output.
                data = data[: max(0, command.output_size - output.size)]
            if data:
                await output.take(data)
            if not running and (not data or output.size >= command.output_size):
                break
            command, data = await self._client.wait(
                key,
                wait_ms=wire.MAX_WAIT_MS if running else 0,
                offset=output.size,
                length=_OUTPUT_CHUNK,
                until_exit=unwatched,
            )
        if command.cause == "not_started":
            where = cwd or "."
            raise CommandNotStarted(f"{program} could not be started in {where}: {command.reason or command.errno}")
        return command

    async def _start(
        self,
        key: ExecKey,
        argv: list[str],
        cwd: str,
        env: Mapping[str, str],
        timeout_ms: int | None,
        until_exit: bool,
        limits: Limits | None = None,
    ) -> tuple[Command, bytes]:
        """Its key never runs if this raises SpaceBusy. ``limits``: of one in the background; that is not waited for."""
        attempt = 0
        while True:
            try:
                return await self._client.start(
                    key,
                    argv=argv,
                    cwd=cwd,
                    env=env,
                    timeout_ms=timeout_ms,
                    limits=limits,
                    lasting=limits is not None,
                    wait_ms=0 if limits is not None else wire.MAX_WAIT_MS,
                    length=0 if limits is not None else _OUTPUT_CHUNK,
                    until_exit=until_exit,
                )
            except SpaceBusy:
                attempt += 1
                if attempt == _STARTS:
                    command = await self._client.void(key)
                    if command.state == "void":
                        raise
                    return command, b""  # It was on its way.
            await asyncio.sleep(0.05 * 2**attempt)

    async def _stop(self, key: ExecKey, cancelled: BaseException | None) -> None:
        """Kill the command and all it left, and wait until they are gone, whoever cancels that (rule S112)."""
        task = asyncio.create_task(self._void_or_kill(key))
        await until_ended(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            raise problem from cancelled

    async def _void_or_kill(self, key: ExecKey) -> None:
        # Its start may still be on its way; what is void never starts.
        if (await self._client.void(key)).state not in ("void", "cut_off"):
            await self._client.kill(key, "aborted")

    # --- helpers

    def _key(self, ordinal: int) -> ExecKey:
        return ExecKey(call=self._call, attempt=self._attempt, nonce=self._nonce, ordinal=ordinal)

    @contextlib.contextmanager
    def _asking(self, path: str) -> Generator[None]:
        """Refusals that mean that the call is not what it was are no results (rule S111)."""
        if self._over:
            raise CallOver("the call this environment belongs to has ended")
        try:
            yield
        except PathEscapes as error:
            raise self._escapes(error.path) from error
        except SpaceFull as error:
            raise FileError(path, FULL) from error
        except SpaceRequestInvalid as error:
            raise FileError(path, error.message) from error
        except SpaceRefused as error:
            if (reason := _LOST.get(type(error))) is None:
                raise
            raise SpaceConnectionLost(reason, str(error)) from error

    def _below(self, path: str) -> str | None:
        """The path relative to the workspace; None: it is an absolute one to somewhere else."""
        if not path.startswith("/"):
            return path
        root = self.cwd.rstrip("/") + "/"
        path = "/" + path.lstrip("/")
        return path[len(root) :] if (path + "/").startswith(root) else None

    def _inside(self, path: str) -> str:
        inside = self._below(path)
        if inside is None:
            raise self._escapes(path)
        return inside

    def _escapes(self, path: str) -> PathEscapes:
        return PathEscapes(path, f"leads out of the workspace {self.cwd}; use a path inside it")

    def _file_stat(self, info: FileInfo) -> FileStat:
        name = os.path.basename(self.cwd) if info.name in ("", ".") else str(info.name)
        return FileStat(name=name, kind=_kind(info.kind), size=info.size, mode=info.mode, modified_at=info.modified_at)


def _kind(told: str) -> FileKind:
    return told if told == "file" or told == "directory" or told == "symlink" else "other"


async def _settled(change: Coroutine[None, None, T]) -> T:
    """Its answer, also when cancelled: a change that is on its way must not come after the call is over (rule S116).

    Raises SpaceConnectionLost and StaleEpochError in place of the cancellation: then nobody knows.
    """
    task = asyncio.create_task(change)
    cancelled = await until_ended(task)
    if cancelled is None:
        return task.result()
    if not task.cancelled() and isinstance(problem := task.exception(), (SpaceConnectionLost, StaleEpochError)):
        raise problem from cancelled
    raise cancelled


async def until_ended(task: asyncio.Task[T]) -> asyncio.CancelledError | None:
    """Wait for the task, and for nothing less; a cancellation that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def _reason(command: Command) -> LostReason:
    if command.state == "cut_off":
        return "below_floor" if command.below_floor else "cut_off"
    return "void" if command.state == "void" else "absent" if command.state == "absent" else "unknown"


def _result(command: Command, output: CommandOutput) -> ExecResult:
    return ExecResult(
        exit_code=command.code,
        signal=command.signal,
        timed_out=command.cause == "timeout",
        output_limit=command.cause == "output_limit",
        duration_ms=command.duration_ms,
        output=bytes(output.recent if output.size <= INLINE_OUTPUT else output.recent[-INLINE_OUTPUT:]),
        output_bytes=output.size,
        output_path=output.spill.path if output.spill else None,
        output_kept=output.spill.kept if output.spill else 0,
    )
