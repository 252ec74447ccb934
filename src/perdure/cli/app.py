"""The commands and their options. What a command needs is imported when it runs."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import perdure
from perdure.kernel.errors import PerdureError

app = typer.Typer(
    help="perdure: durable agents. An agent that is killed goes on exactly where its log says it was.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class CrashMode(StrEnum):
    """What a crash campaign attacks."""

    simulation = "simulation"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {perdure.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Its options are the program's own; every command is a sub-command."""
    # What there is to say, the commands say themselves.
    logging.getLogger("perdure").addHandler(logging.NullHandler())


@app.command()
def demo(
    seed: Annotated[
        int | None, typer.Option(help="Repeat an earlier run's kills; drawn and printed otherwise.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No colours.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Work in this new folder and leave it there.")] = None,
) -> None:
    """Watch an agent killed nine times while it works: nothing lost, nothing done twice. No key, no network."""
    from perdure.cli.demo.parent import run_demo

    raise typer.Exit(run_demo(seed=seed, plain=plain, keep=keep))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A store made by SqliteStorage; it may be in use.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what lives in a store, what waits, and what stands still and why, without disturbing it."""
    from perdure.cli.inspect import look, render

    try:
        report = asyncio.run(look(file))
    except PerdureError as error:
        typer.echo(f"perdure inspect: {error}", err=True)
        raise typer.Exit(1) from error
    render(report, as_json=as_json)


@app.command()
def crash(
    mode: Annotated[CrashMode, typer.Option(help="What to attack.")] = CrashMode.simulation,
    runs: Annotated[int, typer.Option(min=1, help="How many runs to draw.")] = 25,
    seed: Annotated[int, typer.Option(help="The first run's seed; each further run takes the next.")] = 1,
    scenario: Annotated[str | None, typer.Option(help="Only this scenario.")] = None,
    kill: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT,...",
            help="Repeat one run: one fault for each life, as a failing run prints them. "
            "3 or after:3 kills after the third commit.",
        ),
    ] = None,
    order_seed: Annotated[
        int | None, typer.Option(help="Repeat one run: its order of tasks, as a failing run prints it.")
    ] = None,
) -> None:
    """Crash the package on purpose and compare what comes back with what was never interrupted."""
    from perdure.testing.crash import run_simulation

    assert mode is CrashMode.simulation, "the only mode so far"
    faults = None if kill is None else kill.split(",")
    raise typer.Exit(
        run_simulation(runs=runs, seed=seed, scenario=scenario, kill=faults, order_seed=order_seed, echo=typer.echo)
    )
