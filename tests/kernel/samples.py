"""Entries, documents and tasks that several test files use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from perdure.kernel.document import Document, field
from perdure.kernel.entries import Entry
from perdure.kernel.records import NULL, Completed, TaskRecord, Terminal
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction

T = TypeVar("T")


class Note(Entry, kind="app.note"):
    n: int = 0


class Tally(Document, kind="app.tally", scope="session"):
    n: int = 0
    log: list[str] = field(default_factory=list)
    text: str = ""


class Job(Document, kind="app.job", scope="conversation", history="rewindable", fork="as_of"):
    n: int = 0


class Live(Document, kind="app.live", scope="conversation", fork="current"):
    n: int = 0


class Draft(Document, kind="app.draft", scope="conversation"):
    n: int = 0


class Scratch(Document, kind="app.scratch", scope="task"):
    n: int = 0


class Label(Document, kind="app.label", scope="session", family=True):
    n: int = 0


async def conversation(session: Session, *, root: bool = False) -> int:
    async with session.commit() as tx:
        record = tx.create_conversation(owner=None, root=root)
    return record.id


async def note(session: Session, conversation: int, n: int = 0) -> int:
    async with session.commit(conversation_id=conversation) as tx:
        record = tx.append(Note(n=n))
    return record.id


async def tally(session: Session, n: int) -> None:
    async with session.commit() as tx:
        (await tx.draft(Tally)).n = n


async def job(session: Session, conversation: int, n: int) -> int:
    """Set the Job and append an entry, in one commit; the entry's id."""
    async with session.commit(conversation_id=conversation) as tx:
        (await tx.draft(Job)).n = n
        record = tx.append(Note(n=n))
    return record.id


def new_task(tx: Transaction, conversation: int | None = None) -> TaskRecord:
    return tx.new_task(kind="app.task", version=1, phase="start", input=NULL, conversation=conversation)


def ended(record: TaskRecord) -> TaskRecord:
    return msgspec.structs.replace(record, state=Terminal(Completed()))


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.ensure_future(work)


def there(value: T | None) -> T:
    assert value is not None
    return value
