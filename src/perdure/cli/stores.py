"""Which store and which conversation a command is about."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perdure.cli.errors import CommandError
from perdure.harness.documents import Meta
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.records import ConversationRecord
from perdure.kernel.session import Session
from perdure.kernel.storage import ANY, MAX_SCAN
from perdure.storage.jsonl import JsonlStorage
from perdure.storage.sqlite import SqliteStorage

LOOKED_BACK: Final = 2_000
"""Ids that are looked through for the newest entry, before all conversations are."""
_DSN: Final = re.compile(r"postgres(ql)?:/|(host|hostaddr|port|user|password|dbname|service) *=")


def default_store() -> Path:
    """The chat's own store: one a user (``XDG_DATA_HOME``)."""
    return data_home() / "chat.db"


def data_home() -> Path:
    found = os.environ.get("XDG_DATA_HOME", "")
    # A relative one is to be ignored, says the convention.
    base = Path(found) if os.path.isabs(found) else Path.home() / ".local" / "share"
    return base / "perdure"


def store_or_own(path: Path | None) -> Path:
    return default_store() if path is None else path


def make_room(store: Path) -> None:
    """Make the directory of a store, for its user alone. Raises CommandError."""
    try:
        if store == default_store():
            store.parent.parent.mkdir(parents=True, exist_ok=True)
            store.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{store.parent} cannot be made ({error.strerror}); name a store with --db") from error


def storage_of(path: Path) -> SqliteStorage | JsonlStorage:
    """What opens the store there: a directory is one of JSONL files, anything else is to be one SQLite file.

    Raises CommandError for what libpq would take.
    """
    check_place(path)
    return JsonlStorage(path, fsync=True) if os.path.isdir(path) else SqliteStorage(path)


def check_place(path: Path) -> None:
    """Raises CommandError for what libpq would take, and does not quote it: a password may be in it."""
    if _DSN.match(str(path)) and not os.path.lexists(path):
        raise CommandError(
            "a store is named by its file or directory; the commands do not take a session in PostgreSQL yet. Look "
            "at it in a program: Harness.open(PostgresStorage(dsn, session), read_only=True)"
        )


@asynccontextmanager
async def looking(path: Path) -> AsyncGenerator[Session]:
    """A store open for reading only, live or closed. Raises what opening it raises."""
    async with Session.open(storage_of(path), read_only=True) as session:
        yield session


@asynccontextmanager
async def owning(path: Path) -> AsyncGenerator[Session]:
    """A store that is there, open for this process alone. Raises what opening it raises."""
    storage = storage_of(path)
    if not os.access(path, os.F_OK):
        raise CommandError(f"there is no store at {path}")  # opening would make one
    async with Session.open(storage) as session:
        yield session


@dataclass(frozen=True, slots=True)
class Recent:
    """What a store was used for last."""

    active: int | None
    """The ownerless conversation of the newest entry."""
    unused: int | None
    """A conversation that was made after that entry, and in which nothing was said."""


async def recent(session: Session) -> Recent:
    """Ids grow with time, so the newest are looked at first: it costs what is new, not what is stored."""
    unused: int | None = None
    for id in range(session.next_id - 1, max(0, session.next_id - 1 - LOOKED_BACK), -1):
        entry = await session.entry(id)
        if entry is not None:
            record = await session.conversation(entry.conversation_id)
            if record is not None and record.owner is None:
                return Recent(record.id, unused)
        elif unused is None:
            record = await session.conversation(id)
            if record is not None and record.owner is None and record.parent is None:
                unused = record.id
    return Recent(await _last_conversation(session), unused)


async def _last_conversation(session: Session) -> int | None:
    last: int | None = None
    while True:
        page = await session.conversations(owner=None, after=last or 0, limit=MAX_SCAN)
        if not page:
            return last
        last = page[-1].id


async def chosen(session: Session, wanted: str | None) -> ConversationRecord:
    """The conversation a user means: by its id or name, or the newest one. Raises CommandError."""
    if wanted is None:
        newest = await recent(session)
        id = newest.active if newest.active is not None else newest.unused
        if id is None:
            raise CommandError("the store has no conversation yet")
    elif wanted.isascii() and wanted.isdigit():
        id = int(wanted)
    else:
        found = await named(session, wanted)
        if found is None:
            raise CommandError(f"there is no conversation named {wanted!r}; perdure ls lists those there are")
        id = found
    record = await session.conversation(id)
    if record is None:
        raise CommandError(f"there is no conversation {id}; perdure ls lists those there are")
    return record


async def named(session: Session, name: str) -> int | None:
    """The newest conversation of that name (rule H180). Costs a read a conversation."""
    found = await all_named(session, name)
    return found[-1] if found else None


async def all_named(session: Session, name: str) -> list[int]:
    """Every conversation of that name, by id. Costs a read a conversation."""
    found: list[int] = []
    after = 0
    while True:
        page = await session.conversations(owner=ANY, after=after, limit=MAX_SCAN)
        for record in page:
            if await name_of(session, record.id) == name:
                found.append(record.id)
        if len(page) < MAX_SCAN:
            return found
        after = page[-1].id


async def name_of(session: Session, conversation: int) -> str | None:
    try:
        meta = await session.snapshot(Meta, conversation=conversation)
    except DocumentVersionError:  # written by a newer release
        return None
    return None if meta is None else meta.name
