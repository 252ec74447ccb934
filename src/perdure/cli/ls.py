"""``perdure ls``: the conversations of a store."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from perdure.cli.stores import looking
from perdure.cli.text import counted, printable, when
from perdure.harness.documents import Inbox, Live, Meta
from perdure.kernel.errors import DocumentVersionError, NotFound
from perdure.kernel.records import ConversationRecord
from perdure.kernel.session import Session

MOST = 1000
"""Conversations that are listed."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as ``--json`` prints it. Times are ms UTC."""

    id: int
    name: str | None
    busy: bool
    queued: int
    owner: int | None
    """The task it belongs to."""
    parent: int | None
    """The conversation it was forked from."""
    newest: int
    """When its newest entry was made, or itself."""


async def listed(path: Path) -> tuple[list[Listed], bool]:
    """In id order, and whether there are more."""
    async with looking(path) as session:
        page = await session.conversations(limit=MOST)
        found = [await _look(session, record) for record in page]
        return [each for each in found if each is not None], len(page) == MOST


async def _look(session: Session, record: ConversationRecord) -> Listed | None:
    """None: the process that has the store deleted it meanwhile."""
    live = inbox = meta = None
    try:
        live = await session.snapshot(Live, conversation=record.id)
        inbox = await session.snapshot(Inbox, conversation=record.id)
        meta = await session.snapshot(Meta, conversation=record.id)
    except DocumentVersionError:  # written by a newer release; the records beside it can still be told
        pass
    try:
        newest = await session.entries(record.id, order="descending", limit=1)
    except NotFound:
        return None
    return Listed(
        id=record.id,
        name=None if meta is None else meta.name,
        busy=live is not None and live.run is not None,
        queued=0 if inbox is None else len(inbox.items),
        owner=record.owner,
        parent=None if record.parent is None else record.parent.conversation,
        newest=max(record.created_at, newest[0].created_at) if newest else record.created_at,
    )


def render(found: tuple[list[Listed], bool], *, as_json: bool) -> None:
    """A line a conversation: one of text, or one JSON object."""
    conversations, more = found
    if as_json:
        for each in conversations:
            typer.echo(msgspec.json.encode(each).decode())
        return
    if not conversations:
        typer.echo("no conversations yet")
        return
    width = len(str(conversations[-1].id))
    for each in conversations:
        state = [
            "busy" if each.busy else "",
            f"{counted(each.queued, 'input')} waiting" if each.queued else "",
            f"of task {each.owner}" if each.owner is not None else "",
            f"forked from {each.parent}" if each.parent is not None else "",
        ]
        words = [f"{each.id:>{width}}", when(each.newest), ", ".join(filter(None, state)), printable(each.name or "")]
        typer.echo("  ".join(filter(None, words)))
    if more:
        typer.echo("There are more; only the first are listed.")
