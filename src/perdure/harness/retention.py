"""Retention: conversations that nobody touched for long are deleted, in bounded batches (rules K225 to K229).

Whole conversations go and nothing else. Of one that is kept every part is promised to somebody: entries are history,
request ids hold for ever (rule H34), whoever knows a task may ask how it ended, and states of rewindable documents are
never rewritten (K103); older states of others were reclaimed when their next base was written (K102).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from perdure.harness.documents import Meta
from perdure.harness.mail import InputMail
from perdure.kernel.context import Context
from perdure.kernel.errors import ConversationOpen, DocumentVersionError, NotFound
from perdure.kernel.records import ROOT_CONVERSATION, ConversationRecord, EntryRecord
from perdure.kernel.storage import MAX_SCAN

if TYPE_CHECKING:
    from perdure.kernel.session import Session
    from perdure.kernel.transaction import Transaction

BATCH = 16
"""Conversations, with what they own, after which a commit takes no further one."""

MAX_LISTED = 1000
"""Conversations that a report names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which conversations are deleted: those without an owner, but for the root, in which nothing is live or queued,
    and which have been as they are for long enough."""

    older_than_ms: int
    """Since the newest entry of the conversation, or of what it owns; since its making, where there is none."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Only those that have all of these."""
    named: bool = False
    """Also those that have a name."""

    def __post_init__(self) -> None:
        # Also of untyped callers: what compares with nothing, as NaN does, would be older than everything.
        if type(self.older_than_ms) is not int or self.older_than_ms < 1:
            raise ValueError(f"Retention.older_than_ms must be an integer of at least 1, not {self.older_than_ms!r}")
        if type(self.named) is not bool:
            raise ValueError(f"Retention.named must be True or False, not {self.named!r}")
        try:
            msgspec.convert(self.labels, dict[str, str])
        except msgspec.ValidationError as error:
            raise ValueError(f"Retention.labels must be texts by text ({error})") from None


class RetentionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy came to, or with ``dry_run`` would come to."""

    dry_run: bool
    looked_at: int
    """Conversations without an owner, but for the root."""
    matched: int
    """Of these, how many were deleted."""
    owned: int
    """How many went with them."""
    open: int
    """How many were spared because something is live or queued in them or in what they own, or waits in the mailbox
    for them."""
    ids: tuple[int, ...]
    """Of the matched ones, the first ``MAX_LISTED``."""


class _Count(msgspec.Struct):
    """A report in the making."""

    looked_at: int = 0
    matched: int = 0
    owned: int = 0
    open: int = 0
    ids: list[int] = msgspec.field(default_factory=list[int])

    def add(self, id: int, owned: int) -> None:
        self.matched += 1
        self.owned += owned
        if len(self.ids) < MAX_LISTED:
            self.ids.append(id)

    def report(self, *, dry_run: bool) -> RetentionReport:
        return RetentionReport(
            dry_run=dry_run,
            looked_at=self.looked_at,
            matched=self.matched,
            owned=self.owned,
            open=self.open,
            ids=tuple(self.ids),
        )


async def apply_retention(
    session: Session, policy: Retention, *, dry_run: bool = False, context: Context | None = None
) -> RetentionReport:
    """Delete what the policy names, one commit a batch. Killed or cancelled in between, the next call does the rest.

    Costs some reads a conversation. Raises SessionClosed, SessionFailed, StorageError.
    """
    count = _Count()
    before = session.clock.wall() - policy.older_than_ms
    look = _outside(session, context)
    busy = await _busy(session, context) if dry_run else set[int]()
    batch: list[int] = []
    async for record in _ownerless(session, context):
        count.looked_at += 1
        closure = await _due(look, policy, record, before)
        if closure is None:
            continue
        if not dry_run:
            batch.append(record.id)
        elif busy.isdisjoint(closure):
            count.add(record.id, len(closure) - 1)
        else:
            count.open += 1
        if len(batch) == BATCH:
            await _delete(session, policy, batch, before, count, context)
            batch.clear()
    await _delete(session, policy, batch, before, count, context)
    return count.report(dry_run=dry_run)


async def _ownerless(session: Session, context: Context | None) -> AsyncGenerator[ConversationRecord]:
    """Those there were at the beginning, but for the root: what is made meanwhile is new."""
    after, end = 0, session.next_id
    while True:
        page = await session.conversations(owner=None, after=after, limit=MAX_SCAN, context=context)
        for record in page:
            if record.id != ROOT_CONVERSATION and record.id < end:
                yield record
        if len(page) < MAX_SCAN or page[-1].id >= end:
            return
        after = page[-1].id


async def _delete(
    session: Session, policy: Retention, ids: Sequence[int], before: int, count: _Count, context: Context | None
) -> None:
    """Delete those that are due still, judged again where nobody else writes, in commits of bounded size."""
    todo = deque(ids)
    while todo:
        deleted: list[tuple[int, int]] = []
        spared = 0
        async with session.commit(context=context) as tx:
            look, expected = _inside(tx), await _expected(session, context)
            while todo and sum(1 + owned for _, owned in deleted) < BATCH:
                id = todo.popleft()
                try:
                    closure = await _due(look, policy, await tx.conversation(id), before)
                    if closure is None:
                        continue
                    if expected.isdisjoint(closure):
                        deleted.append((id, len(await tx.delete_conversation(id)) - 1))
                    else:
                        spared += 1
                except NotFound:
                    pass  # somebody else deleted it since it was looked at
                except ConversationOpen:
                    spared += 1
        for id, owned in deleted:
            count.add(id, owned)
        count.open += spared


class _Look(NamedTuple):
    """How conversations are looked at: as settled, or in a transaction, where nothing changes meanwhile."""

    newest: Callable[[int], Awaitable[Sequence[EntryRecord]]]
    meta: Callable[[int], Awaitable[Meta | None]]
    closure: Callable[[int], Awaitable[list[int]]]


def _outside(session: Session, context: Context | None) -> _Look:
    async def newest(id: int) -> list[EntryRecord]:
        return await session.entries(id, order="descending", limit=1, context=context)

    async def meta(id: int) -> Meta | None:
        return await session.snapshot(Meta, conversation=id, context=context)

    async def closure(id: int) -> list[int]:
        return await session.reading(session.storage.closure(id), context)

    return _Look(newest, meta, closure)


def _inside(tx: Transaction) -> _Look:
    async def newest(id: int) -> list[EntryRecord]:
        return await tx.entries(id, order="descending", limit=1)

    async def meta(id: int) -> Meta | None:
        return await tx.read(Meta, conversation=id)

    return _Look(newest, meta, tx.closure)


async def _due(look: _Look, policy: Retention, record: ConversationRecord, before: int) -> list[int] | None:
    """What goes with a conversation that the policy names, itself first, as far as times, name and labels tell."""
    try:
        if record.created_at > before or await _touched(look, record.id, before):
            return None
        meta = await look.meta(record.id) or Meta()
        if meta.name is not None and not policy.named:
            return None
        if any(meta.labels.get(name) != value for name, value in policy.labels.items()):
            return None
        closure = await look.closure(record.id)
        for owned in closure[1:]:
            if await _touched(look, owned, before):
                return None
    except (NotFound, DocumentVersionError):
        return None  # it was deleted meanwhile; or a newer release named it, perhaps
    return closure


async def _touched(look: _Look, id: int, before: int) -> bool:
    newest = await look.newest(id)
    return bool(newest) and newest[0].created_at > before


async def _busy(session: Session, context: Context | None) -> set[int]:
    """Conversations in which something is live or queued, or for which something waits in the mailbox."""
    found = await _expected(session, context)
    found |= {task.conversation_id for task in session.live.settled.values()}
    for status in ("queued", "placed"):
        after = 0
        while page := await session.submissions(status=status, after=after, limit=MAX_SCAN, context=context):
            found.update(record.conversation_id for record in page)
            after = page[-1].id
    return found


async def _expected(session: Session, context: Context | None) -> set[int]:
    """Conversations in which somebody said something that the mailbox still has: where nobody works off the mailbox it
    may wait for long, and was said all the same."""
    found: set[int] = set()
    after = 0
    while page := await session.reading(session.storage.mail(after=after, limit=MAX_SCAN), context):
        for mail in page:
            if mail.kind == "input":
                with suppress(msgspec.MsgspecError):  # what makes no sense is refused once it is read
                    found.add(msgspec.json.decode(mail.body, type=InputMail).conversation_id)
        after = page[-1].id
    return found
