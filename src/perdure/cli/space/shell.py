"""``perdure space shell``: a command, or a shell, in the workspace of a Space of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import typer

from perdure.cli.errors import CommandError
from perdure.cli.space.local import chosen_local
from perdure.cli.text import printable

SHELL: Final = "/bin/sh"
SAID: Final = (
    "What is changed here is an external change: it is committed to the log before the agent's next call. "
    "While a call is under way it belongs to that call, and is undone with it."
)


async def workspace_of(place: Path, name: str | None) -> str:
    """Raises CommandError."""
    found = await chosen_local(place, name)
    if found.lost:
        raise CommandError(f"the folder of the Space {found.folder.name}, or its workspace {found.workspace}, is gone")
    return found.workspace


def become(workspace: str, command: Sequence[str]) -> NoReturn:
    """This process becomes the command. One word is a command line; without any it is a shell to type into.

    Raises CommandError.
    """
    typer.echo(f"{printable(workspace)}\n{SAID}", err=True)
    words = list(command) if len(command) > 1 else [SHELL, *(("-c", command[0]) if command else ())]
    try:
        os.chdir(workspace)
        os.execvp(words[0], words)  # noqa: S606  (the user's own command)
    except OSError as error:
        raise CommandError(f"{words[0]} cannot be run in {workspace}: {error.strerror}") from error
