"""A Space as the execution environment of an agent: files and commands that stay equal to the log (S130 to S162)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from perdure.harness.environment import (
    BackgroundCommand,
    CallScope,
    CommandNotStarted,
    EnvironmentUnusable,
    ExecResult,
    ExecutionEnvironment,
    FileError,
    FileKind,
    FileStat,
    Found,
    GrepLines,
    Listing,
    NoSuchCommand,
    OpenCall,
)
from perdure.spaces.documents import BackgroundNote
from perdure.spaces.environment import SpaceEnvironment
from perdure.spaces.outputs import Outputs
from perdure.spaces.scope import SpaceScope
from perdure.spaces.settings import RerunPolicy, SpaceSettings
from perdure.spaces.space import Space


def durable_space(
    space: Space,
    *,
    mode: Literal["transactional"] = "transactional",
    rerun: RerunPolicy = "rerun",
    max_file_bytes: int = 1 << 30,
    preserve_bytes: int = 256 << 20,
) -> DurableSpace:
    """The environment for ``Harness.open(..., environment=durable_space(space))``.

    Every tool that takes the environment is part of it: its call and what it changed in the Space are one commit, and
    an interrupted one is gone on with, adopted, or undone and run again. What a tool does elsewhere is not undone.

    - ``mode``: "transactional": the image of the workspace is in the log.
    - ``rerun``: what becomes of a call with ``effects="space"`` whose effects were undone: "rerun", whatever its replay
      policy, or "interrupt".
    - ``max_file_bytes``: a call that leaves a larger file ends in an error and is undone.
    - ``preserve_bytes``: so much of what an undo replaces, and the log does not have, is moved to a recovery folder.

    Raises ValueError for what these cannot be.
    """
    if mode != "transactional":
        raise ValueError(f"mode is 'transactional', not {mode!r}; the others are not there yet")
    settings = SpaceSettings(rerun=rerun, max_file_bytes=max_file_bytes, preserve_bytes=preserve_bytes)
    return DurableSpace(space, settings)


class DurableSpace:
    """Made by ``durable_space``. Files and commands are there for calls; outside of one there is nothing to recover
    by, so its operations raise EnvironmentUnusable then."""

    def __init__(self, space: Space, settings: SpaceSettings) -> None:
        self._scope = SpaceScope(space.provider, space.name, settings)
        self._outputs = Outputs(space.name)
        self.name = space.name

    @property
    def cwd(self) -> str:
        return self._scope.client.seen.workspace

    @property
    def scope(self) -> CallScope | None:
        return self._scope

    def for_call(self, call: OpenCall) -> ExecutionEnvironment:
        return CallEnvironment(self._scope, self._outputs, call)

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        raise self._outside()

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, expect: str | None = None) -> None:
        raise self._outside()

    async def stat(self, path: str) -> FileStat | None:
        raise self._outside()

    async def list_dir(self, path: str, *, limit: int = 10_000) -> Listing:
        raise self._outside()

    async def find(
        self,
        path: str = ".",
        *,
        pattern: str | None = None,
        kind: FileKind | None = None,
        ignored: bool = False,
        limit: int = 1000,
    ) -> Found:
        raise self._outside()

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
        raise self._outside()

    async def remove(self, path: str) -> None:
        raise self._outside()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        raise self._outside()

    async def start_background(self, command: str) -> BackgroundCommand:
        raise self._outside()

    async def background(self) -> tuple[BackgroundCommand, ...]:
        raise self._outside()

    async def read_background(
        self, id: str, *, offset: int = 0, length: int = 0, wait_ms: int = 0, until_exit: bool = False
    ) -> tuple[BackgroundCommand, bytes]:
        raise self._outside()

    async def stop_background(self, id: str) -> BackgroundCommand:
        raise self._outside()

    async def end_background(self) -> None:
        """Nothing: they are the Space's, and run on for the next driver (rule S169)."""

    def _outside(self) -> EnvironmentUnusable:
        return EnvironmentUnusable(
            f"the durable Space {self.name} is used by calls of tools; take the environment as a parameter of one"
        )


class CallEnvironment:
    """The Space as one attempt of one call uses it. It exists before the attempt has its intent: until then it only
    reads, which is all that what prepares an intent may do."""

    def __init__(self, scope: SpaceScope, outputs: Outputs, call: OpenCall) -> None:
        self._scope = scope
        self._outputs = outputs
        self._call = call
        self._changing: SpaceEnvironment | None = None

    @property
    def cwd(self) -> str:
        return self._scope.client.seen.workspace

    @property
    def scope(self) -> CallScope | None:
        return None

    def for_call(self, call: OpenCall) -> ExecutionEnvironment:
        """Itself: a nested call is part of the call this is for."""
        return self

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self._scope.noting(self._call):
            return await self._reading().read_file(path, offset=offset, length=length)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, expect: str | None = None) -> None:
        if self._call.effects == "read":
            raise FileError(path, f"the tool {self._call.name} declares that it only reads; it may not write")
        with self._scope.noting(self._call):
            await self._writing().write_file(path, data, mode=mode, expect=expect)

    async def stat(self, path: str) -> FileStat | None:
        with self._scope.noting(self._call):
            return await self._reading().stat(path)

    async def list_dir(self, path: str, *, limit: int = 10_000) -> Listing:
        with self._scope.noting(self._call):
            return await self._reading().list_dir(path, limit=limit)

    async def find(
        self,
        path: str = ".",
        *,
        pattern: str | None = None,
        kind: FileKind | None = None,
        ignored: bool = False,
        limit: int = 1000,
    ) -> Found:
        with self._scope.noting(self._call):
            return await self._reading().find(path, pattern=pattern, kind=kind, ignored=ignored, limit=limit)

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
        with self._scope.noting(self._call):
            return await self._reading().grep(
                pattern, path=path, fixed=fixed, ignore_case=ignore_case, glob=glob, context=context,
                ignored=ignored, limit=limit,
            )  # fmt: skip

    async def remove(self, path: str) -> None:
        if self._call.effects == "read":
            raise FileError(path, f"the tool {self._call.name} declares that it only reads; it may not remove")
        with self._scope.noting(self._call):
            await self._writing().remove(path)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        if self._call.effects == "read":
            raise CommandNotStarted(f"the tool {self._call.name} declares that it only reads; it runs no commands")
        with self._scope.noting(self._call):
            return await self._writing().exec(command, cwd=cwd, env=env, timeout_ms=timeout_ms, on_output=on_output)

    async def start_background(self, command: str) -> BackgroundCommand:
        if self._call.effects == "read":
            raise CommandNotStarted(f"the tool {self._call.name} declares that it only reads; it runs no commands")
        with self._scope.noting(self._call):
            return await self._writing().start_background(command)

    async def background(self) -> tuple[BackgroundCommand, ...]:
        with self._scope.noting(self._call):
            return await self._reading().background()

    async def read_background(
        self, id: str, *, offset: int = 0, length: int = 0, wait_ms: int = 0, until_exit: bool = False
    ) -> tuple[BackgroundCommand, bytes]:
        with self._scope.noting(self._call):
            return await self._reading().read_background(
                id, offset=offset, length=length, wait_ms=wait_ms, until_exit=until_exit
            )

    async def stop_background(self, id: str) -> BackgroundCommand:
        if self._call.effects == "read":
            raise NoSuchCommand(f"the tool {self._call.name} declares that it only reads; it stops no commands")
        with self._scope.noting(self._call):
            return await self._writing().stop_background(id)

    async def end_background(self) -> None:
        """Nothing, as for the Space itself."""

    def _reading(self) -> SpaceEnvironment:
        self._scope.check_turn(self._call)
        if self._changing is not None:
            return self._changing
        return SpaceEnvironment(
            self._scope.client,
            call=0,
            attempt=0,
            nonce="",
            outputs=self._outputs,
            background=CallBackground(self._scope, self._call),
        )

    def _writing(self) -> SpaceEnvironment:
        self._scope.check_turn(self._call)
        if self._changing is None:
            intent = self._scope.intent(self._call)
            self._changing = SpaceEnvironment(
                self._scope.client,
                call=intent.number,
                attempt=intent.attempt,
                nonce=intent.nonce,
                outputs=self._outputs,
                leaves_running=lambda: self._scope.ending,
                background=CallBackground(self._scope, self._call),
            )
        return self._changing


class CallBackground:
    """What the log and the call know of commands in the background (background.BackgroundLog)."""

    def __init__(self, scope: SpaceScope, call: OpenCall) -> None:
        self._scope = scope
        self._call = call

    async def notes(self) -> Sequence[BackgroundNote]:
        return await self._scope.background(self._call)

    def add(self, note: BackgroundNote) -> None:
        self._scope.put_in_background(self._call, note)
