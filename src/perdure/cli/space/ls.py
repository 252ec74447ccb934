"""``perdure space ls``: the Spaces of a directory, or of a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from perdure.cli.errors import CommandError
from perdure.cli.space.local import LocalLine, local_line, spaces_at
from perdure.cli.space.log import SpaceLine, space_lines
from perdure.cli.stores import looking
from perdure.cli.text import counted, printable, size


async def listed(place: Path) -> Sequence[SpaceLine | LocalLine]:
    """Raises CommandError, and what opening a store raises."""
    if not _is_store(place):
        return [local_line(found) for found in await spaces_at(place)]
    async with looking(place) as session:
        lines, _ = await space_lines(session)
        return lines


def _is_store(place: Path) -> bool:
    if not place.exists():
        raise CommandError(f"{place}: there is neither a directory nor a store")
    return not place.is_dir()


def render(lines: Sequence[SpaceLine | LocalLine], *, as_json: bool) -> None:
    """A line a Space: one of text, or one JSON object."""
    if as_json:
        for line in lines:
            typer.echo(msgspec.json.encode(line).decode())
        return
    if not lines:
        typer.echo("no Spaces yet")
    width = max((len(line.name) for line in lines), default=0)
    for line in lines:
        words = _local(line) if isinstance(line, LocalLine) else _logged(line)
        typer.echo("  ".join([f"{printable(line.name):<{width}}", *words]).rstrip())


def _local(line: LocalLine) -> list[str]:
    daemon = f"daemon {line.daemon}" if line.state == "running" else line.state
    containment = [] if line.containment is None else [f"containment {line.containment}"]
    return [f"generation {line.generation}", daemon, *containment, printable(line.workspace)]


def _logged(line: SpaceLine) -> list[str]:
    under_way = [] if line.open is None else [f"call {line.open} is under way"]
    return [
        f"generation {line.generation}",
        f"image {line.image}",
        f"{counted(line.files, 'file')}, {size(line.bytes)}",
        *under_way,
    ]
