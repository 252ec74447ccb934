"""The Space that the demo's agent works in, as the parent handles it: made, robbed of its daemon, deleted, ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from perdure.spaces import local_processes
from perdure.spaces.errors import SpaceError
from perdure.spaces.local import LocalSpaces
from perdure.spaces.local_look import look

SPACE: Final = "workshop"


def spaces_of(folder: Path) -> LocalSpaces:
    return LocalSpaces(folder / "spaces")


def workspace_of(folder: Path) -> Path:
    return folder / "spaces" / SPACE / "workspace"


def make(folder: Path) -> None:
    asyncio.run(spaces_of(folder).open(SPACE))


def kill_daemon(folder: Path) -> None:
    """With SIGKILL; what runs in the Space runs on."""
    for found in asyncio.run(look(folder / "spaces")):
        if found.record.daemon is not None:
            local_processes.kill(found.record.daemon)


def delete(folder: Path) -> None:
    """The files, what runs, the daemon's account of it: all is gone."""
    asyncio.run(spaces_of(folder).delete(SPACE))


def end(folder: Path) -> None:
    """Nothing runs any more; the files stay."""
    asyncio.run(_end(folder))


async def _end(folder: Path) -> None:
    if not await spaces_of(folder).names():
        return
    try:
        space = await spaces_of(folder).find(SPACE)
        if space is not None:
            async with await space.connect() as client:
                daemon = local_processes.mark_of(client.seen.pid)
                await client.shutdown(kill=True)
            if daemon is not None:
                await asyncio.to_thread(local_processes.end, daemon, term_s=local_processes.GONE_S)
    except SpaceError:
        await spaces_of(folder).delete(SPACE)  # then it ends without being asked
