"""``perdure space restore``: the image of the log as a new directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from perdure.cli.errors import CommandError
from perdure.cli.space.log import chosen_space
from perdure.cli.stores import looking
from perdure.cli.text import counted, printable, size
from perdure.spaces.writeout import WrittenOut, write_out


@dataclass(frozen=True, slots=True)
class Restored:
    space: str
    image: int
    written: WrittenOut
    target: Path


async def restore(store: Path, target: Path, name: str | None) -> Restored:
    """Raises CommandError and SpaceError, and what opening a store raises; then nothing is left of the target."""
    async with looking(store) as session:
        space = await chosen_space(session, name)
        if space.state.image == 0:
            raise CommandError(f"the Space {space.name} has no image yet: it gets one with its first call")
        written = await write_out(session, space.tree, target)
        return Restored(space.name, space.state.image, written, target)


def render(done: Restored) -> None:
    what = f"{counted(done.written.files, 'file')}, {size(done.written.bytes)}"
    typer.echo(f"{printable(str(done.target))}: image {done.image} of the Space {printable(done.space)}, {what}")
