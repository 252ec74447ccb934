"""What a command says when it cannot do what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import typer

from perdure.kernel.errors import PerdureError

T = TypeVar("T")


class CommandError(PerdureError):
    """What is wrong, and what to do about it: for the person who typed the command."""


def run_command(command: str, work: Coroutine[None, None, T]) -> T:
    """Do what a command does; what it cannot do is one sentence and the exit code 1."""
    try:
        return asyncio.run(work)
    except PerdureError as error:
        from perdure.cli.secrets import Secrets

        typer.echo(Secrets().hide(f"perdure {command}: {error}"), err=True)
        raise typer.Exit(1) from error
