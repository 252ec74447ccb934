"""``perdure size`` and ``perdure vacuum``: what a store takes on disk, and giving back what it no longer needs
(rules K220 to K224)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from perdure.cli.stores import looking, name_of, owning
from perdure.cli.text import counted, printable
from perdure.cli.text import size as bytes_as
from perdure.kernel.storage import RowCounts, SizeReport, VacuumReport

SHOWN = 10
"""Conversations that are listed."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """As ``--json`` prints it: the report, and the names of the conversations in it."""

    size: SizeReport
    names: dict[int, str]


async def measured(path: Path) -> Measured:
    """Raises what opening the store raises."""
    async with looking(path) as session:
        size = await session.storage.size()
        names = {each.id: await name_of(session, each.id) for each in size.biggest if not each.deleted}
    return Measured(size=size, names={id: name for id, name in names.items() if name})


def render(found: Measured, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    size, rows = found.size, found.size.rows
    log = f", {bytes_as(size.log)} of it the write-ahead log" if size.log else ""
    typer.echo(f"{bytes_as(size.total)} on disk{log}")
    for what, amount, many, more in _parts(size, rows):
        if many:
            typer.echo(f"  {what:<14} {bytes_as(amount):>10}  {many:,}{more}")
    typer.echo(f"  {'free':<14} {bytes_as(size.free):>10}  {_advice(size)}".rstrip())
    if size.biggest:
        typer.echo("The conversations that take most:")
    for each in size.biggest[:SHOWN]:
        said = "deleted; forks still show this of it" if each.deleted else printable(found.names.get(each.id, ""))
        typer.echo(f"  {each.id:<14} {bytes_as(each.bytes):>10}  {_entries(each.entries)}  {said}".rstrip())


def _parts(size: SizeReport, rows: RowCounts) -> list[tuple[str, int, int, str]]:
    return [
        ("conversations", size.conversations, rows.conversations, ""),
        ("entries", size.entries, rows.entries, ""),
        ("submissions", size.submissions, rows.submissions, ""),
        ("tasks", size.tasks, rows.tasks, ""),
        ("documents", size.documents, rows.documents, f" in {counted(rows.states, 'state')}"),
        ("contents", size.contents, rows.contents, ", before they were made smaller"),
        ("mailbox", size.mailbox, rows.mail, ""),
    ]


def _entries(count: int) -> str:
    return f"{count:,} {'entry' if count == 1 else 'entries'}"


def _advice(size: SizeReport) -> str:
    """A vacuum is worth its time where a quarter of the file is free."""
    return "perdure vacuum gives them back" if size.free * 4 > size.total else ""


async def vacuum(path: Path) -> VacuumReport:
    """By this process, which opens the store for it. Raises StorageBusy if another has it, CommandError, and
    StorageError."""
    async with owning(path) as session:
        return await session.storage.vacuum()


def render_vacuum(report: VacuumReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        sizes = f"{bytes_as(report.before)} before, {bytes_as(report.after)} now"
        typer.echo(f"gave back {bytes_as(report.freed)}: {sizes}")
