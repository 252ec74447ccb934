"""Where the driver keeps outputs of commands that are too large for a result.

The Space forgets a command's output as soon as its call is over; what a result names must be readable later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from perdure.harness.environment import FileStat
from perdure.tools.command import CommandOutput
from perdure.tools.spills import Spills
from perdure.tools.threads import Threads
from perdure.tools.workspace import Workspace


class Outputs:
    """Files of mode 0600 in ``directory`` on the driver's machine, or in one private to this user; the oldest are
    reclaimed. ``name``: of the Space, so that results of an earlier process still find their files."""

    def __init__(self, name: str, directory: str | os.PathLike[str] | None = None) -> None:
        mark = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._spills = Spills(None if directory is None else os.fspath(directory), mark)
        self._threads = Threads("outputs", 2)

    def begin(self, on_output: Callable[[bytes], None] | None) -> CommandOutput:
        return CommandOutput(self._spills, self._threads, on_output)

    async def read(self, path: str, offset: int, length: int | None) -> bytes | None:
        """A range of a kept output; None: the path is not one's."""
        return await self._threads.call(self._read, path, offset, length)

    async def stat(self, path: str) -> FileStat | None:
        """None: the path is not that of a kept output, or it was reclaimed."""
        return await self._threads.call(self._stat, path)

    def _read(self, path: str, offset: int, length: int | None) -> bytes | None:
        if not self._spills.holds(path):
            return None
        return Workspace(os.path.dirname(path)).read(path, offset, length)

    def _stat(self, path: str) -> FileStat | None:
        return Workspace(os.path.dirname(path)).stat(path) if self._spills.holds(path) else None
