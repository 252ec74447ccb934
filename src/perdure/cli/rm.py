"""``perdure rm``: conversations are deleted, by this process or by the one that has the store open (H156, H183)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer

from perdure.cli import mailbox
from perdure.cli.errors import CommandError
from perdure.cli.stores import all_named, chosen, looking, name_of, storage_of
from perdure.cli.text import counted, printable
from perdure.harness.deletion import count_deleted
from perdure.harness.harness import Harness
from perdure.kernel.errors import ConversationOpen, StorageBusy
from perdure.kernel.json import JsonValue
from perdure.kernel.session import Session

ABORTED_S = 60.0
"""How long another process may take to end what goes on in a conversation, before that is said instead."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """A conversation that is to be deleted."""

    id: int
    name: str | None
    owned: int
    """Conversations that go with it."""

    def __str__(self) -> str:
        name = f" “{printable(self.name)}”" if self.name else ""
        owned = f" and {counted(self.owned, 'conversation')} of its tasks" if self.owned else ""
        return f"conversation {self.id}{name}{owned}"


async def rm(path: Path, wanted: Sequence[str], *, yes: bool, abort: bool) -> int:
    """Ask, delete all of them or none, and say so; the exit code. Raises CommandError, and what opening raises."""
    doomed = await _look(path, wanted)
    if not yes and not _confirmed(doomed):
        typer.echo("Nothing was deleted.", err=True)
        return 1
    ids = [each.id for each in doomed]
    try:
        deleted = await _delete(path, ids, abort=abort)
    except StorageBusy:
        deleted = await _ask_owner(path, ids, abort=abort)
    except ConversationOpen as error:
        raise _still_open(str(error), abort=abort) from error
    if not deleted:
        typer.echo("not done yet: kept in the mailbox for whoever has the store open, or opens it next", err=True)
        return 3
    for each in doomed:
        typer.echo(f"deleted {each}")
    return 0


async def _look(path: Path, wanted: Sequence[str]) -> list[Doomed]:
    """What is meant, each once. Raises CommandError for a name that several have (rule H180)."""
    found: dict[int, Doomed] = {}
    async with looking(path) as session:
        for text in wanted:
            if not (text.isascii() and text.isdigit()) and len(ids := await all_named(session, text)) > 1:
                them = ", ".join(map(str, ids))
                raise CommandError(f"{len(ids)} conversations are named {text!r}: say which of {them} by its number")
            id = (await chosen(session, text)).id
            closure = await session.reading(session.storage.closure(id))
            found[id] = Doomed(id, await name_of(session, id), len(closure) - 1)
    return list(found.values())


def _confirmed(doomed: Sequence[Doomed]) -> bool:
    if not _at_a_terminal():
        raise CommandError("nobody is at a terminal to be asked; --yes deletes without asking")
    for each in doomed:
        typer.echo(str(each), err=True)
    return typer.confirm("Delete for ever?", err=True)


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


async def _delete(path: Path, ids: Sequence[int], *, abort: bool) -> bool:
    """By this process, which opens the store for it. What waits in the mailbox is left alone, if nothing is aborted."""
    if abort:
        async with Harness.open(storage_of(path)) as harness:
            await harness.delete_conversations(ids, abort=True)
        return True
    async with Session.open(storage_of(path)) as session:
        session.derive(count_deleted)
        async with session.commit() as tx:
            for id in ids:
                if id not in tx.deleted_conversations:
                    await tx.delete_conversation(id)
    return True


async def _ask_owner(path: Path, ids: Sequence[int], *, abort: bool) -> bool:
    """By the process that has the store open; False if it has not taken it up."""
    mail = await mailbox.post(path, "delete", {"conversations": list[JsonValue](ids), "abort": abort})
    until = time.monotonic() + (ABORTED_S if abort else mailbox.TAKEN_S)
    reply = await mailbox.reply(path, mail, until, wait=False)
    if reply is None:
        return False
    if not reply.ok:
        result: dict[str, JsonValue] = msgspec.json.decode(reply.result)
        message = printable(str(result.get("message")))
        if result.get("error") == ConversationOpen.__name__:
            raise _still_open(message, abort=abort)
        raise CommandError(message)
    return True


def _still_open(message: str, *, abort: bool) -> CommandError:
    return CommandError(message if abort else f"{message}; --abort ends what goes on in it")
