"""What a command asks of the process that has a store open, and what became of it (rules K72 to K75)."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Final

from perdure.cli.errors import CommandError
from perdure.cli.inspect import holder_line
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.kernel.storage import MailReply
from perdure.storage import jsonl_mailbox, sqlite_mailbox
from perdure.storage.lock import read_holder

POLL_S: Final = 0.1
TAKEN_S: Final = 10.0
"""How long an open store may take to take a request up, before that is said instead."""


async def post(path: Path, kind: str, body: JsonValue) -> int:
    """Leave a request in the store's mailbox. Raises what writing to it raises."""
    return await asyncio.to_thread(_mailbox(path).post, path, kind, body, now=time.time_ns() // 1_000_000)


async def reply(path: Path, mail: int, until: float, *, wait: bool) -> MailReply | None:
    """What the owner answered; None where there is no owner (unless ``wait``), or it takes too long."""
    while True:
        try:
            found = await asyncio.to_thread(_mailbox(path).reply, path, mail)
        except NotFound as error:
            raise CommandError("the request was taken up, and what became of it is not kept any more") from error
        if found is not None or time.monotonic() > until or not (wait or has_owner(path)):
            return found
        await asyncio.sleep(POLL_S)


def _mailbox(path: Path) -> ModuleType:
    return jsonl_mailbox if os.path.isdir(path) else sqlite_mailbox


def has_owner(path: Path) -> bool:
    """Whether a process that has not ended has the store open."""
    holder = holder_line(read_holder(f"{os.path.realpath(path)}.lock"))
    return holder is not None and holder.state != "ended"
