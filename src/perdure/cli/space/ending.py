"""``perdure space stop`` and ``rm``: what runs in a Space of this machine is ended, or all of the Space deleted."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from perdure.cli.errors import CommandError
from perdure.cli.space.local import chosen_local
from perdure.cli.text import printable
from perdure.spaces.local import LocalSpaces
from perdure.spaces.local_folder import NAME
from perdure.spaces.local_look import LocalLook, look


async def stop(place: Path, name: str | None) -> str:
    """What was ended. Raises CommandError and SpaceError."""
    found = await _meant(place, name)
    seen = await LocalSpaces(found.folder.directory).stop(found.folder.name)
    space = f"Space {found.folder.name}"
    if seen is None:
        return f"{space}: its folder was lost; what was known to be left of it was ended"
    ended = [] if found.daemon is None else [f"daemon {found.daemon}"]
    if seen.living:
        ended.append("1 process" if seen.living == 1 else f"{seen.living} processes")
    if not ended:
        return f"{space}: nothing ran"
    return f"{space}: ended {' and '.join(ended)}; its files and its state stay"


async def rm(place: Path, name: str | None, *, yes: bool) -> int:
    """Ask, delete, and say so; the exit code. Raises CommandError and SpaceError."""
    found = await _meant(place, name)
    own = found.record.workspace is None
    what = f"the Space {found.folder.name} in {printable(found.folder.directory)}"
    workspace = printable(found.workspace)
    if not yes:
        if not sys.stdin.isatty():
            raise CommandError("nobody is at a terminal to be asked; --yes deletes without asking")
        typer.echo(f"{what}, {'with' if own else 'without'} its workspace {workspace}", err=True)
        if not typer.confirm("Delete for ever?", err=True):
            typer.echo("Nothing was deleted.", err=True)
            return 1
    await LocalSpaces(found.folder.directory).delete(found.folder.name)
    typer.echo(f"deleted {what}" + ("" if own else f"; its workspace {workspace} stays"))
    return 0


async def _meant(place: Path, name: str | None) -> LocalLook:
    """A word names a Space of the current directory, unless it is a directory that has one."""
    word = str(place)
    if name is None and NAME.fullmatch(word) and not await look(place):
        return await chosen_local(Path(), word)
    return await chosen_local(place, name)
