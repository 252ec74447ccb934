"""The process of an MCP server: it and all that it started end with the host, however that ends (rule H391).

The server leads a process group. A small shell in the same group waits for the end of a pipe that only the host holds
open; when the host is gone, whatever became of it, it gives the group a moment and kills it. As long as the shell is in
the group, no stranger can get the group's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

GRACE_S: Final = 2
"""Seconds that a server has to end once its input is closed, and again after SIGTERM."""
LOOK_S: Final = 0.002
GUARD: Final = f'trap "" TERM INT HUP; read -r _; sleep {GRACE_S}; kill -KILL 0'


class Input(Protocol):
    """What a server reads."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Raises OSError once nobody reads it any more."""
        ...


class Program(Protocol):
    """A server that was started: all that is used of it."""

    @property
    def stdin(self) -> Input: ...
    @property
    def stdout(self) -> asyncio.StreamReader: ...
    @property
    def exited(self) -> asyncio.Event: ...
    @property
    def code(self) -> int | None:
        """Its exit code, or less than 0: the signal that killed it. None while it runs."""
        ...

    async def end(self) -> None:
        """End it, whatever it does."""
        ...


class Start(Protocol):
    """Starts a server. A simulation, which has no processes, brings another than ``start``."""

    async def __call__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path | None, stderr: int | None, limit: int
    ) -> Program:
        """``limit``: the bytes of the longest line that is read of it. Raises OSError."""
        ...


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells the exit itself: a grandchild may hold the pipes open for much longer."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit=limit, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class ServerProcess:
    """A server that runs."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Exit, guard: subprocess.Popen[bytes]) -> None:
        self._transport = transport
        self._guard = guard
        process = asyncio.subprocess.Process(transport, protocol, asyncio.get_running_loop())
        assert process.stdin is not None, "it was started with pipes"
        assert process.stdout is not None, "it was started with pipes"
        self.pid = process.pid
        self.stdin: asyncio.StreamWriter = process.stdin
        self.stdout: asyncio.StreamReader = process.stdout
        self.exited = protocol.exited

    @property
    def code(self) -> int | None:
        return self._transport.get_returncode()

    async def end(self) -> None:
        """End it and all of its group: its input is closed, then it is asked to end, then it is killed."""
        try:
            self.stdin.close()
            if not await self._ended():
                self._signal(signal.SIGTERM)
                await self._ended()
        finally:
            self._signal(signal.SIGKILL)  # what it left behind, and the guard
            try:
                await self._gone()
            finally:
                self._transport.close()
                self._end_guard()

    def _end_guard(self) -> None:
        """Whatever cut the wait short: it was killed, so that waiting for it takes next to no time."""
        assert self._guard.stdin is not None, "it was started with a pipe"
        self._guard.kill()  # nothing happens if its end was seen
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(GRACE_S)
        self._guard.stdin.close()

    async def _gone(self) -> None:
        """Both were killed; not waited for in a thread, all of which tools may hold."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.exited.wait()
                while self._guard.poll() is None:
                    await asyncio.sleep(LOOK_S)

    async def _ended(self) -> bool:
        try:
            await asyncio.wait_for(self.exited.wait(), GRACE_S)
        except TimeoutError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        # The guard is in the group and was not waited for: the id is still the group's own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


async def start(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path | None, stderr: int | None, limit: int
) -> ServerProcess:
    """Start a server. ``limit``: the bytes of the longest line that is read of it. Raises OSError."""
    transport, protocol = await asyncio.get_running_loop().subprocess_exec(
        lambda: _Exit(limit),
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=dict(env),
        cwd=cwd,
        process_group=0,
    )
    try:
        guard = subprocess.Popen(  # noqa: ASYNC220, S603  (a shell that only waits; started once a server)
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            process_group=transport.get_pid(),
        )
    except BaseException:
        transport.kill()
        transport.close()
        raise
    return ServerProcess(transport, protocol, guard)
