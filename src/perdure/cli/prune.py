"""``perdure prune``: conversations that nobody touched for long are deleted (rules K225 to K229)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from perdure.cli.stores import looking, owning
from perdure.cli.text import counted
from perdure.harness.deletion import count_deleted
from perdure.harness.retention import Retention, RetentionReport, apply_retention

_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_AGE = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_SHOWN = 20


def policy_of(older_than: str, labels: Sequence[str], *, named: bool) -> Retention:
    """Raises typer.BadParameter."""
    age = _AGE.fullmatch(older_than)
    if age is None:
        raise typer.BadParameter(f"--older-than is a number and a unit, as 30d, 12h, 90m or 60s, not {older_than!r}")
    wanted: dict[str, str] = {}
    for label in labels:
        name, equals, value = label.partition("=")
        if not name or not equals or name in wanted:
            raise typer.BadParameter(f"--label is KEY=VALUE, each key once, not {label!r}")
        wanted[name] = value
    return Retention(older_than_ms=int(age[1]) * _MS[age[2]], labels=wanted, named=named)


async def prune(path: Path, policy: Retention, *, dry_run: bool) -> RetentionReport:
    """By this process, which opens the store for it; what waits in the mailbox is left alone.

    Raises StorageBusy if another process has the store, CommandError and StorageError.
    """
    if dry_run:
        async with looking(path) as session:
            return await apply_retention(session, policy, dry_run=True)
    async with owning(path) as session:
        session.derive(count_deleted)
        return await apply_retention(session, policy)


def render(report: RetentionReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    did = "would delete" if report.dry_run else "deleted"
    owned = f", and {counted(report.owned, 'conversation')} of their tasks" if report.owned else ""
    typer.echo(f"{did} {report.matched:,} of {counted(report.looked_at, 'conversation')}{owned}")
    if report.ids:
        more = ", …" if report.matched > _SHOWN else ""
        typer.echo(f"  {', '.join(map(str, report.ids[:_SHOWN]))}{more}")
    if report.open:
        typer.echo(f"  {report.open:,} old enough, but something is live or waits in them")
    if report.matched and not report.dry_run:
        typer.echo("perdure vacuum gives the disk back")
