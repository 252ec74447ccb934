"""Doing something to a store that may be in use: by this process, or by the one that has it open (H111, H112)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import typer

from perdure.cli import mailbox
from perdure.cli.errors import CommandError
from perdure.cli.stores import storage_of
from perdure.cli.text import printable
from perdure.harness.harness import Harness
from perdure.kernel.errors import StorageBusy
from perdure.kernel.json import JsonValue
from perdure.kernel.storage import MailReply

KEPT: Final = "not done yet: kept in the mailbox for whoever has the store open, or opens it next with the tool"
NOT_YET: Final = 3
"""The exit code where what was asked for waits in the mailbox."""


async def done(
    path: Path, kind: str, body: dict[str, JsonValue], here: Callable[[Harness], Awaitable[dict[str, JsonValue]]] | None
) -> dict[str, JsonValue] | None:
    """What came of it; None: it waits in the mailbox. ``here``: how this process does it where no other has the store
    open; None: only a host can.

    Raises CommandError for what is refused, and what opening the store raises.
    """
    storage = storage_of(path)
    if not os.access(path, os.F_OK):
        raise CommandError(f"there is no store at {path}")  # opening would make one
    if here is not None:
        try:
            # Nothing runs: the host's work goes on with the host.
            async with Harness.open(storage) as harness:
                return await here(harness)
        except StorageBusy:
            pass  # its owner does it
    mail = await mailbox.post(path, kind, body)
    try:
        reply = await _taken(path, mail, itself=here is not None)
    except asyncio.CancelledError:
        typer.echo(KEPT, err=True)
        raise
    if reply is None:
        return None
    result: dict[str, JsonValue] = msgspec.json.decode(reply.result)
    if not reply.ok:
        raise CommandError(printable(str(result.get("message"))))
    return result


async def _taken(path: Path, mail: int, *, itself: bool) -> MailReply | None:
    """What its owner answered. Where that was a command, which is gone again, this process takes it up ``itself``."""
    until = time.monotonic() + mailbox.TAKEN_S
    while True:
        reply = await mailbox.reply(path, mail, until, wait=False)
        if reply is not None or not itself or time.monotonic() > until:
            return reply
        with contextlib.suppress(StorageBusy):
            async with Harness.open(storage_of(path)):  # what opens a store takes up its mail
                return await mailbox.reply(path, mail, until, wait=True)
        await asyncio.sleep(mailbox.POLL_S)
