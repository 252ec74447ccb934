"""A program at the other end of two pipes, in the simulation's own loop: what stands for a server's process (rule P37).

Only the process and its pipes are made up. What is written at one end comes out at the other, in order; of a program
that was killed, what it had written can still be read, and writing to it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeAlias

GRACE_S: Final = 2.0
"""Virtual seconds that a program has to end once its input is closed."""
KILLED: Final = -9
"""The exit code of one that was killed."""

Main: TypeAlias = Callable[["SimulatedProgram"], Awaitable[None]]


class SimulatedProgram:
    """One that runs until ``main`` returns, it is killed, or its host is. Its host uses it as the ``Program`` of
    ``perdure.tools.mcp.process``; ``main`` uses ``lines`` and ``say``."""

    def __init__(self, main: Main, *, limit: int) -> None:
        """``limit``: bytes of the longest line that either end reads."""
        self.stdout = asyncio.StreamReader(limit)
        self.exited = asyncio.Event()
        self.code: int | None = None
        self._input = asyncio.StreamReader(limit)
        self._task = asyncio.create_task(self._run(main), name="a simulated program")

    @property
    def stdin(self) -> SimulatedProgram:
        return self

    def write(self, data: bytes) -> None:
        if self.code is None:
            self._input.feed_data(data)

    async def drain(self) -> None:
        """Raises BrokenPipeError once it has ended."""
        if self.code is not None:
            raise BrokenPipeError("the program has ended")

    async def end(self) -> None:
        try:
            if self.code is None:
                self._input.feed_eof()
            await asyncio.wait((self._task,), timeout=GRACE_S)
        finally:
            self.kill()
        await asyncio.gather(self._task, return_exceptions=True)

    def kill(self) -> None:
        """Now. On its way to an end it can say nothing more; its code looks at ``code`` before it does anything."""
        self._exit(KILLED)
        self._task.cancel()

    # --- for the program itself ----------------------------------------------------------------------------------

    async def lines(self) -> AsyncIterator[str]:
        """What it is told, until its input is closed."""
        while line := await self._input.readline():
            yield line.decode()

    def say(self, text: str) -> None:
        if self.code is None:
            self.stdout.feed_data(text.encode())

    async def _run(self, main: Main) -> None:
        code = 1
        try:
            await main(self)
            code = 0
        finally:
            self._exit(code)

    def _exit(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.stdout.feed_eof()
            self.exited.set()
