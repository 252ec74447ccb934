"""``perdure space show``: how far a Space is, by its log and, where that is said, on this machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from perdure.cli.inspect import console_for_tables, table
from perdure.cli.space.local import LocalLine, chosen_local, local_line, told
from perdure.cli.space.log import RecoveryLine, SpaceLine, chosen_space, recovery_lines, space_line
from perdure.cli.stores import looking
from perdure.cli.text import counted, printable, size


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    store: str
    log: str
    space: SpaceLine
    recoveries: tuple[RecoveryLine, ...]
    """The oldest first."""
    local: LocalLine | None
    """None: no directory was named."""


async def shown(store: Path, place: Path | None, name: str | None) -> Shown:
    """Raises CommandError, and what opening a store raises."""
    local = None if place is None else local_line(await chosen_local(place, name))
    async with looking(store) as session:
        space = await chosen_space(session, name if local is None else local.name)
        return Shown(
            store=str(store),
            log=session.info.log_id,
            space=await space_line(session, space),
            recoveries=tuple(await recovery_lines(session, space)),
            local=local,
        )


def render(found: Shown, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    space = found.space
    typer.secho(f"Space {printable(space.name)} in {printable(found.store)}", bold=True)
    typer.echo(f"image {space.image}: {counted(space.files, 'file')}, {size(space.bytes)}")
    typer.echo(
        f"generation {space.generation}; {counted(space.calls, 'call')}, {counted(space.external, 'external change')}"
    )
    if space.open is not None:
        typer.echo(f"call {space.open}, {printable(space.tool or 'of a tool')}, is under way: attempt {space.attempt}")
    if found.local is not None:
        for text in told(found.local):
            typer.echo(text)
        if found.local.log is not None and found.local.log != found.log:
            typer.echo("the workspace stands at an image of another log; the next call here restores this one's")
    if found.recoveries:
        table(console_for_tables(), "recoveries", found.recoveries)
