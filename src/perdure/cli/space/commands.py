"""The commands of ``perdure space`` and their options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.errors import CommandError, run_command

app = typer.Typer(
    help="Spaces: where an agent's files are and its commands run.",
    no_args_is_help=True,
)

Store = Annotated[Path, typer.Argument(help="A store, a file or a directory; it may be in use.")]
Place = Annotated[Path, typer.Argument(metavar="DIR", help="Where Spaces are kept, or a workspace of one.")]
Name = Annotated[str | None, typer.Option("--name", help="Which Space, where there are several.")]


@app.command()
def ls(
    place: Annotated[Path, typer.Argument(metavar="DIR|STORE", help="Where Spaces are kept, a workspace, or a store.")],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """List the Spaces of a directory: which daemons run, and what they contain; or of a store: how far they are."""
    from perdure.cli.space.ls import listed, render

    render(run_command("space ls", listed(place)), as_json=as_json)


@app.command()
def show(
    store: Store,
    place: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Where Spaces are kept, or its workspace: tells of it too."),
    ] = None,
    name: Name = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show how far a Space is: its image, the call that has it, and how calls that were cut off went on."""
    from perdure.cli.space.show import render, shown

    render(run_command("space show", shown(store, place, name)), as_json=as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def shell(
    place: Place,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="One word: a command line. Several: a program and its arguments."),
    ] = None,
    name: Name = None,
) -> None:
    """Run a command, or a shell, in the workspace of a Space. What it changes is an external change of the log."""
    from perdure.cli.space.shell import become, workspace_of

    workspace = run_command("space shell", workspace_of(place, name))
    try:
        become(workspace, command or [])
    except CommandError as error:
        typer.echo(f"perdure space shell: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def diff(
    store: Store,
    place: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where Spaces are kept, a workspace, or any directory to compare.")
    ],
    name: Name = None,
    patch: Annotated[bool, typer.Option("--patch", "-p", help="Also what changed in small text files.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colours.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare a workspace, as it is on the disk, with the image in the log: by content, changing neither."""
    from perdure.cli.space.diff import differences, render
    from perdure.cli.style import colours_of

    found = run_command("space diff", differences(store, place, name, patch=patch))
    render(found, as_json=as_json, colours=colours_of(plain=plain, terminal=sys.stdout.isatty()))


@app.command()
def restore(
    store: Store,
    target: Annotated[Path, typer.Argument(metavar="NEW", help="A directory that is not there yet.")],
    name: Name = None,
) -> None:
    """Write the image in the log into a new directory: contents, modes, links and empty directories."""
    from perdure.cli.space.restore import render
    from perdure.cli.space.restore import restore as run_restore

    render(run_command("space restore", run_restore(store, target, name)))


Ended = Annotated[
    Path,
    typer.Argument(metavar="DIR|NAME", help="Where Spaces are kept, a workspace, or the name of a Space kept here."),
]


@app.command()
def stop(place: Ended, name: Name = None) -> None:
    """End the daemon of a Space and everything that lives in it. Its files and its state stay."""
    from perdure.cli.space.ending import stop as run_stop

    typer.echo(run_command("space stop", run_stop(place, name)))


@app.command()
def rm(
    place: Ended,
    name: Name = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a Space for ever, with what lives in it. A workspace that was yours before stays, and so does the log."""
    from perdure.cli.space.ending import rm as run_rm

    raise typer.Exit(run_command("space rm", run_rm(place, name, yes=yes)))
