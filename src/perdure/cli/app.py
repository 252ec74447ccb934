"""The commands and their options. What a command needs is imported when it runs."""

from __future__ import annotations

import io
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import perdure
from perdure.cli.approvals.commands import app as approvals
from perdure.cli.errors import run_command as _run
from perdure.cli.people import app as questions
from perdure.cli.space.commands import app as space

app = typer.Typer(
    help="perdure: durable agents. An agent that is killed goes on exactly where its log says it was.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class ExportFormat(StrEnum):
    """What an export is written as."""

    jsonl = "jsonl"
    markdown = "markdown"


class CrashMode(StrEnum):
    """What a crash campaign attacks."""

    simulation = "simulation"
    steps = "steps"
    transactional = "transactional"
    stale = "stale"


app.add_typer(space, name="space")
app.add_typer(approvals, name="approvals")
app.add_typer(questions, name="questions")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack some of what a store holds
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
def chat(
    text: Annotated[str | None, typer.Argument(help="Sent first.")] = None,
    db: Annotated[
        Path | None,
        typer.Option("--db", help="The store; made if it is not there. Without it: ~/.local/share/perdure/chat.db."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="provider:name, or scripted to try it without a key. Otherwise the conversation's own, "
            "PERDURE_MODEL, or the one asked last."
        ),
    ] = None,
    thinking: Annotated[
        str | None,
        typer.Option(
            help="How long the model may think: off, minimal, low, medium or high. Otherwise as it was before."
        ),
    ] = None,
    limit_usd: Annotated[
        float | None,
        typer.Option(help="What a conversation may cost in all, in US dollars: beyond it no request is sent."),
    ] = None,
    limit_turns: Annotated[
        int | None, typer.Option(help="How many answers of the model a conversation may have in all.")
    ] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOOL", help="Ask before each call of this tool, or of those a pattern names; may be repeated."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Go on in the conversation of that name, or make one.")] = None,
    conversation: Annotated[str | None, typer.Option(help="Go on in this one: its id or name.")] = None,
    resume: Annotated[bool, typer.Option("--continue", help="Go on in the newest conversation.")] = False,
    new: Annotated[
        bool, typer.Option("--new", help="A new conversation, also where one was left in the middle of a run.")
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where files and commands are. Otherwise where the conversation was, or here."),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(
            "--space", help="Like --dir, and a Space: its files stay equal to the store, a command outlives a kill."
        ),
    ] = None,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Also if another process has the store and is frozen: it adds nothing more."),
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Only lines: no colours, nothing redrawn.")] = False,
) -> None:
    """Talk to an agent that works with files and commands. Kill it, start it again: it is where it was."""
    if sum((conversation is not None, resume, new)) > 1:
        raise typer.BadParameter("only one of --continue, --conversation and --new makes sense")
    if conversation is not None and name is not None:
        raise typer.BadParameter("--conversation and --name each say which conversation; give one of them")
    if directory is not None and space is not None:
        raise typer.BadParameter("--dir and --space each say where files and commands are; give one of them")
    from perdure.cli.chat.run import Options
    from perdure.cli.chat.run import chat as run_chat

    options = Options(
        text=text,
        db=db,
        model=model,
        thinking=thinking,
        limit_usd=limit_usd,
        limit_turns=limit_turns,
        ask=tuple(ask or ()),
        name=name,
        conversation=conversation,
        resume=resume,
        new=new,
        plain=plain,
        directory=directory,
        takeover=takeover,
        space=space,
    )
    raise typer.Exit(_run("chat", run_chat(options)))


Store = Annotated[
    Path | None, typer.Argument(help="A store, a file or a directory; it may be in use. Otherwise that of the chat.")
]
Which = Annotated[str | None, typer.Option("--conversation", help="Its id or name. Otherwise the newest one.")]


@app.command()
def ls(
    file: Store = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """List the conversations of a store: which are busy, what waits, and when something was last said."""
    from perdure.cli.ls import listed, render
    from perdure.cli.stores import store_or_own

    render(_run("ls", listed(store_or_own(file))), as_json=as_json)


@app.command()
def show(
    file: Store = None,
    conversation: Which = None,
    window: Annotated[
        int | None, typer.Option(min=1, max=900, help="How many entries, counted from the newest. Otherwise 40.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every entry, also those before the model's context begins.")
    ] = False,
    before: Annotated[int | None, typer.Option(min=1, help="A page of all entries: those before this one.")] = None,
    after: Annotated[int | None, typer.Option(min=0, help="A page of all entries: those after this one.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=1000, help="How many a page has; alone, the newest. Otherwise 40.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No colours.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a line: the entries as they are stored.")
    ] = False,
) -> None:
    """Show what was said in a conversation."""
    paged = (before, after, limit) != (None, None, None)
    if before is not None and after is not None:
        raise typer.BadParameter("--before and --after each say where a page is; give one of them")
    if paged and everything:
        raise typer.BadParameter("--all shows all entries at once; leave out --before, --after and --limit")
    if window is not None and (paged or everything):
        raise typer.BadParameter("--window is of the newest entries; with --all leave it out, of a page give --limit")
    from perdure.cli.show import Page
    from perdure.cli.show import show as run_show
    from perdure.cli.stores import store_or_own
    from perdure.cli.style import colours_of

    _run(
        "show",
        run_show(
            store_or_own(file),
            conversation=conversation,
            window=window or 40,
            everything=everything,
            page=Page(before=before, after=after, limit=limit or 40) if paged else None,
            colours=colours_of(plain=plain, terminal=sys.stdout.isatty()),
            as_json=as_json,
        ),
    )


@app.command()
def send(
    file: Annotated[Path, typer.Argument(help="A store, a file or a directory, in use or not.")],
    text: Annotated[str, typer.Argument(help="What to say.")],
    conversation: Which = None,
    steer: Annotated[bool, typer.Option("--steer", help="Join the run that is under way, after its calls.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answer, and print it.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 600.0,
    request_id: Annotated[
        str | None, typer.Option(help="Sent again with the same id, it is the same input and not another one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say something in a conversation from another terminal. Where nobody has the store open, it is kept for later."""
    from perdure.cli.send import Wanted, render
    from perdure.cli.send import send as run_send

    wanted = Wanted(
        text=text, conversation=conversation, steer=steer, request_id=request_id, wait=wait, timeout_s=timeout
    )
    raise typer.Exit(render(_run("send", run_send(file, wanted)), wait=wait, as_json=as_json))


@app.command()
def export(
    file: Store = None,
    format: Annotated[ExportFormat, typer.Option(help="What to write.")] = ExportFormat.jsonl,
    conversation: Which = None,
    everything: Annotated[bool, typer.Option("--all", help="Every conversation of the store.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new file. Otherwise standard output.")
    ] = None,
) -> None:
    """Write a conversation as JSON lines or as Markdown, every entry of it, also while it goes on."""
    from perdure.cli.export import export as run_export
    from perdure.cli.stores import store_or_own

    if everything and conversation is not None:
        raise typer.BadParameter("--all and --conversation exclude each other")
    work = run_export(
        store_or_own(file), format=format.value, conversation=conversation, everything=everything, output=output
    )
    _run("export", work)


@app.command()
def rm(
    file: Annotated[Path, typer.Argument(help="A store, a file or a directory, in use or not.")],
    conversations: Annotated[list[str], typer.Argument(metavar="CONVERSATION...", help="Their ids or names.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="First end what goes on in them.")] = False,
) -> None:
    """Delete conversations for ever, with all that they own. Conversations that were forked from them stay."""
    from perdure.cli.rm import rm as run_rm

    raise typer.Exit(_run("rm", run_rm(file, conversations, yes=yes, abort=abort)))


@app.command()
def prune(
    file: Annotated[Path, typer.Argument(help="A store that no process has open.")],
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="How long nobody said anything in them: 30d, 12h, 90m or 60s.")
    ],
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only those that have it; may be repeated.")
    ] = None,
    named: Annotated[bool, typer.Option("--named", help="Also those that have a name.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which, and delete none; the store may be in use then.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Delete for ever the conversations that nobody touched for long, but for the root and what is under way."""
    from perdure.cli.prune import policy_of, render
    from perdure.cli.prune import prune as run_prune

    policy = policy_of(older_than, label or [], named=named)
    render(_run("prune", run_prune(file, policy, dry_run=dry_run)), as_json=as_json)


@app.command()
def backup(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A store, a file or a directory; it may be in use.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where nothing is yet.")],
) -> None:
    """Copy a store as of one commit, while it is in use. The copy is a store of its own."""
    from perdure.cli.backup import backup as run_backup
    from perdure.cli.text import counted

    commits = _run("backup", run_backup(source, target))
    typer.echo(f"{target}: a copy of {source} as of {counted(commits, 'commit')}")


@app.command()
def size(
    file: Store = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what takes how much in a store, and which conversations take most."""
    from perdure.cli.size import measured, render
    from perdure.cli.stores import store_or_own

    render(_run("size", measured(store_or_own(file))), as_json=as_json)


@app.command()
def vacuum(
    file: Annotated[Path, typer.Argument(help="A store that no process has open.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Give the disk back what was deleted from a store. It needs room for two more copies of what stays."""
    from perdure.cli.size import render_vacuum
    from perdure.cli.size import vacuum as run_vacuum

    render_vacuum(_run("vacuum", run_vacuum(file)), as_json=as_json)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A store, a file or a directory; it may be in use.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what lives in a store, what waits, and what stands still and why, without disturbing it."""
    from perdure.cli.inspect import look, render

    render(_run("inspect", look(file)), as_json=as_json)


@app.command()
def crash(
    mode: Annotated[
        CrashMode,
        typer.Option(
            help="What to attack. simulation: every commit, in one process with virtual time. The others kill real "
            "processes of an agent that works in a Space: steps, at each step of a call and of its recovery; "
            "transactional, at random; stale freezes and replaces them."
        ),
    ] = CrashMode.simulation,
    runs: Annotated[int, typer.Option(min=1, help="How many runs to draw. steps has its own.")] = 25,
    seed: Annotated[int, typer.Option(help="The first run's seed; each further run takes the next.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Runs at a time, of real processes.")] = 1,
    only: Annotated[str | None, typer.Option(help="steps: those with this in their name, as failing runs say.")] = None,
    every: Annotated[int, typer.Option(min=1, help="steps: only every n-th of them.")] = 1,
    scenario: Annotated[str | None, typer.Option(help="simulation: only this scenario; yours as module:NAME.")] = None,
    kill: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT,...",
            help="simulation: repeat one run: one fault for each life, as a failing run prints them. "
            "3 or after:3 kills after the third commit.",
        ),
    ] = None,
    order_seed: Annotated[
        int | None, typer.Option(help="simulation: repeat one run: its order of tasks, as a failing run prints it.")
    ] = None,
) -> None:
    """Crash the package on purpose and compare what comes back with what was never interrupted."""
    simulates = mode is CrashMode.simulation
    if not simulates and (scenario, kill, order_seed) != (None, None, None):
        raise typer.BadParameter("--scenario, --kill and --order-seed are of the mode simulation")
    if mode is not CrashMode.steps and (only, every) != (None, 1):
        raise typer.BadParameter("--only and --every are of the mode steps")
    if simulates and jobs != 1:
        raise typer.BadParameter("--jobs is of the modes that run real processes")
    if simulates:
        from perdure.testing.crash import run_simulation

        faults = None if kill is None else kill.split(",")
        raise typer.Exit(
            run_simulation(runs=runs, seed=seed, scenario=scenario, kill=faults, order_seed=order_seed, echo=typer.echo)
        )
    from perdure.testing.campaign import campaign

    if mode is CrashMode.steps:
        raise typer.Exit(campaign.run_steps(only=only, every=every, jobs=jobs, echo=typer.echo))
    run = campaign.run_transactional if mode is CrashMode.transactional else campaign.run_stale
    raise typer.Exit(run(runs=runs, seed=seed, jobs=jobs, echo=typer.echo))
