"""The commands of ``perdure approvals`` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.errors import run_command

app = typer.Typer(help="Calls that wait to be allowed or denied, and rules that decide some.", no_args_is_help=True)
rules = typer.Typer(help="Rules that decide calls in place of a person.", no_args_is_help=True)
app.add_typer(rules, name="rules")

Store = Annotated[Path, typer.Argument(help="A store, a file or a directory, in use or not.")]
Call = Annotated[int, typer.Argument(help="The call's number, as ls shows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="A JSON object a line.")]


@app.command()
def ls(store: Store, as_json: AsJson = False) -> None:
    """List the calls that wait, each with the exact arguments it would run with."""
    from perdure.cli.approvals.decide import render, waiting

    render(run_command("approvals ls", waiting(store)), as_json=as_json)


@app.command()
def allow(
    store: Store,
    call: Call,
    edit: Annotated[
        str | None, typer.Option(metavar="JSON", help="Let it run with these arguments instead, all of them.")
    ] = None,
) -> None:
    """Let a call run. Where nobody has the store open, it runs when its host comes back."""
    from perdure.cli.approvals.decide import decide

    raise typer.Exit(run_command("approvals allow", decide(store, call, allow=True, edit=edit)))


@app.command()
def deny(
    store: Store,
    call: Call,
    reason: Annotated[str, typer.Option(help="What the model is told.")] = "",
) -> None:
    """Do not let a call run; the model is told so and goes on."""
    from perdure.cli.approvals.decide import decide

    raise typer.Exit(run_command("approvals deny", decide(store, call, allow=False, reason=reason)))


@rules.command("ls")
def rules_ls(store: Store, as_json: AsJson = False) -> None:
    """List the rules: what each decides, who made it, when and why."""
    from perdure.cli.approvals.rules import listed, render

    render(run_command("approvals rules ls", listed(store)), as_json=as_json)


@rules.command("add")
def rules_add(
    store: Store,
    tool: Annotated[str, typer.Argument(help="A tool's name, or a pattern of names.")],
    exact: Annotated[
        list[str] | None, typer.Option("--is", metavar="NAME=JSON", help="An argument is exactly this value or text.")
    ] = None,
    matches: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATTERN", help="It is a text that fits; * stands for any characters."),
    ] = None,
    below: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="It is a path of this folder or below it.")
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="Not for calls with any other argument.")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="Deny such calls; this wins over rules that allow.")] = False,
    note: Annotated[str, typer.Option(help="Why, for those who read the list.")] = "",
) -> None:
    """Add a rule for calls that need approval. Calls that are asked about already still wait."""
    from perdure.cli.approvals.rules import Wanted, add

    wanted = Wanted(
        tool=tool, deny=deny, exact=exact or (), matches=matches or (), below=below or (), only=only, note=note
    )
    raise typer.Exit(run_command("approvals rules add", add(store, wanted)))


@rules.command("rm")
def rules_rm(store: Store, rule: Annotated[int, typer.Argument(help="Its number.")]) -> None:
    """Revoke a rule: it decides no call that has not begun."""
    from perdure.cli.approvals.rules import remove

    raise typer.Exit(run_command("approvals rules rm", remove(store, rule)))
