"""The execution environment of one directory on this machine, with the rights of this process's user."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence

from perdure.harness.environment import (
    BackgroundCommand,
    CallScope,
    ExecResult,
    ExecutionEnvironment,
    FileKind,
    FileMissing,
    FileStat,
    Found,
    GrepLines,
    Listing,
    OpenCall,
)
from perdure.tools import processes
from perdure.tools.background import LocalBackground
from perdure.tools.command import MOST_OUTPUT, CommandOutput, CommandSpec, end, run
from perdure.tools.searching import Searcher, found_ripgrep
from perdure.tools.spills import Spills
from perdure.tools.threads import Threads
from perdure.tools.workspace import Workspace


class LocalEnvironment:
    """Files and commands in ``cwd``, a directory that exists.

    ``confine`` keeps the paths of file operations (and a command's starting directory) inside ``cwd``,
    however they are written and whatever links they meet. It is no sandbox: a command may do whatever this
    user may.

    ``env``: the variables commands start from; None: this process's, as they are when the command starts.
    ``shell``: what runs command strings, ``("/bin/bash", "-c")`` by default or ``sh`` where there is none.
    ``output_dir``: where outputs too large for a result are kept (files of mode 0600, the oldest reclaimed).
    ``grace_ms``: between SIGTERM and SIGKILL.

    When ``exec`` returns or raises, nothing that its command started runs any more (T90), on a normal exit, a
    time-out and a cancellation alike: background processes, and those that left its session, too. How they
    are found, and which are not, is told in ``perdure.tools.processes``. What is started in the background runs until
    it ends, is stopped, or the session or the event loop closes (rule H368). What a host that was killed left running
    in this workspace is ended before the first command or change of the next.
    """

    def __init__(
        self,
        cwd: str | os.PathLike[str],
        *,
        confine: bool = True,
        env: Mapping[str, str] | None = None,
        shell: Sequence[str] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        grace_ms: int = 2000,
    ) -> None:
        root: str = os.path.abspath(cwd)
        if not os.path.isdir(root):
            raise FileMissing(root, "is not a directory; make the workspace first")
        if grace_ms < 0:
            raise ValueError(f"grace_ms is negative: {grace_ms}")
        self._workspace = Workspace(root, confine=confine)
        self._env = None if env is None else dict(env)
        self._shell = list(shell) if shell is not None else [shutil.which("bash") or "/bin/sh", "-c"]
        self._grace_ms = grace_ms
        self._id = hashlib.sha256(os.fsencode(self._workspace.real_root)).hexdigest()[:16]
        self._spills = Spills(None if output_dir is None else os.fspath(output_dir), self._id)
        # Ending processes must not wait behind file operations on a disk that hangs.
        self._files = Threads("files", 4)
        self._commands = Threads("commands", 4)
        self._searcher = Searcher(self._workspace, Threads("search", 2), confine=confine, ripgrep=found_ripgrep())
        self._background = LocalBackground(self, self._spills, self._commands, self._files, self._specify)
        self._sweeping = asyncio.Lock()
        self._swept = False
        self._gone: set[str] = set()
        """Lost commands in the background of which nothing runs."""

    @property
    def cwd(self) -> str:
        return self._workspace.root

    @property
    def scope(self) -> CallScope | None:
        return None

    def for_call(self, call: OpenCall) -> ExecutionEnvironment:
        return self

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return await self._files.call(lambda: self._readable(path).read(path, offset, length))

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, expect: str | None = None) -> None:
        await self._sweep()
        await self._files.call(self._workspace.write, path, data, mode, expect)

    async def stat(self, path: str) -> FileStat | None:
        return await self._files.call(lambda: self._readable(path).stat(path))

    async def list_dir(self, path: str, *, limit: int = 10_000) -> Listing:
        if limit < 1:
            raise ValueError(f"a listing's limit is at least 1, not {limit}")
        return await self._files.call(self._workspace.list, path, limit)

    async def find(
        self,
        path: str = ".",
        *,
        pattern: str | None = None,
        kind: FileKind | None = None,
        ignored: bool = False,
        limit: int = 1000,
    ) -> Found:
        return await self._searcher.find(path, pattern=pattern, kind=kind, ignored=ignored, limit=limit)

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
        return await self._searcher.grep(
            pattern, path=path, fixed=fixed, ignore_case=ignore_case, glob=glob, context=context, ignored=ignored,
            limit=limit,
        )  # fmt: skip

    async def remove(self, path: str) -> None:
        await self._sweep()
        await self._files.call(self._workspace.remove, path)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        argv = [*self._shell, command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("a command names at least its program")
        if timeout_ms is not None and timeout_ms < 1:
            raise ValueError(f"a time-out is at least 1 ms, not {timeout_ms}")
        await self._sweep()
        directory = await self._files.call(self._workspace.directory, "." if cwd is None else cwd)
        spec = self._specification(argv, directory, env, timeout_ms)
        return await run(spec, CommandOutput(self._spills, self._files, on_output), self._commands)

    async def start_background(self, command: str) -> BackgroundCommand:
        await self._sweep()
        return await self._background.start(command)

    async def background(self) -> tuple[BackgroundCommand, ...]:
        return await self._seen(*await self._background.all())

    async def read_background(
        self, id: str, *, offset: int = 0, length: int = 0, wait_ms: int = 0, until_exit: bool = False
    ) -> tuple[BackgroundCommand, bytes]:
        command, data = await self._background.read(
            id, offset=offset, length=length, wait_ms=wait_ms, until_exit=until_exit
        )
        await self._seen(command)
        return command, data

    async def stop_background(self, id: str) -> BackgroundCommand:
        command = await self._background.stop(id)
        await self._seen(command)
        return command

    async def end_background(self) -> None:
        await self._background.end()

    async def _seen(self, *commands: BackgroundCommand) -> tuple[BackgroundCommand, ...]:
        """Nobody is told that a command is lost while something of it may run on: its host may have died only now."""
        lost = {command.id for command in commands if command.state == "lost"}
        if not lost <= self._gone:
            async with self._sweeping:
                await self._end_orphans()
                self._gone |= lost
        return commands

    def _specify(self, command: str) -> CommandSpec:
        """Of a command in the background."""
        return self._specification([*self._shell, command], self._workspace.directory("."), None, None)

    def _specification(
        self, argv: list[str], directory: str, env: Mapping[str, str] | None, timeout_ms: int | None
    ) -> CommandSpec:
        tag = f"{self._id}:{processes.HostMark.own().text}:{secrets.token_hex(8)}"
        variables = {**(os.environ if self._env is None else self._env), **(env or {})}
        return CommandSpec(
            argv=argv,
            cwd=directory,
            env=processes.tagged(variables, tag),
            tag=tag,
            timeout_ms=timeout_ms,
            grace_ms=self._grace_ms,
            output_bytes=MOST_OUTPUT,
        )

    def _readable(self, path: str) -> Workspace:
        """Kept outputs may be read, too, though they lie outside the workspace."""
        if os.path.isabs(path) and not self._workspace.contains(path) and self._spills.holds(path):
            return Workspace(os.path.dirname(path))
        return self._workspace

    async def _sweep(self) -> None:
        """Once: end what a dead host left running here. It would change files under the agent that is back."""
        if self._swept:
            return
        async with self._sweeping:
            if not self._swept:
                await self._end_orphans()

    async def _end_orphans(self) -> None:
        await end(lambda: processes.orphans(self._id), self._grace_ms, self._commands)
        self._swept = True
