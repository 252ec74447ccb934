"""What was spent, as limits see it: of one conversation, and of the session, whose sum is kept in memory (rule H248).

The sum is read once, when it is first needed, and extended by what settles. It is a cache of ``pi.usage`` and
``pi.usage-deleted``, and equal to what ``Harness.usage`` would add up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypedDict, cast

import msgspec

from perdure.harness.documents import (
    GENERATION,
    DeletedUsage,
    ModelTotals,
    ToolTotals,
    UsageTotals,
)
from perdure.harness.usage import unpriced_of
from perdure.kernel.records import Address
from perdure.kernel.session import Session, Settled
from perdure.kernel.storage import MAX_SCAN

if TYPE_CHECKING:
    from perdure.kernel.json import JsonValue

_USAGE = UsageTotals.definition.kind
_DELETED = DeletedUsage.definition.kind


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What limits are held against; named as in documents.LimitSettings."""

    cost_nano_usd: int = 0
    """Of the attempts whose price is known."""
    unpriced: int = 0
    """Attempts whose price is not known."""
    tokens: int = 0
    """Read, written to the cache, read from it, and answered. Thinking is in what was answered."""
    turns: int = 0
    tool_calls: int = 0
    run_ms: int = 0

    def __add__(self, other: Spent) -> Spent:
        return self._with(other, 1)

    def __sub__(self, other: Spent) -> Spent:
        return self._with(other, -1)

    def _with(self, other: Spent, sign: int) -> Spent:
        return Spent(
            cost_nano_usd=self.cost_nano_usd + sign * other.cost_nano_usd,
            unpriced=self.unpriced + sign * other.unpriced,
            tokens=self.tokens + sign * other.tokens,
            turns=self.turns + sign * other.turns,
            tool_calls=self.tool_calls + sign * other.tool_calls,
            run_ms=self.run_ms + sign * other.run_ms,
        )


NOTHING = Spent()


class _Totals(TypedDict, total=False):
    """A usage document as its JSON is; of an older release without some of it."""

    models: dict[str, ModelTotals]
    tools: dict[str, ToolTotals]
    turns: int
    run_ms: int


def spent_of(document: JsonValue) -> Spent:
    """Of the value of a ``pi.usage`` or ``pi.usage-deleted``; None: there is none. Costs microseconds."""
    if document is None:
        return NOTHING
    totals = cast("_Totals", document)
    cost = unpriced = tokens = 0
    for model in totals.get("models", {}).values():
        cost += model.get("cost_nano_usd", 0)
        unpriced += unpriced_of(model)
        tokens += model["input"] + model["output"] + model["cache_read"] + model["cache_write"]
    return Spent(
        cost_nano_usd=cost,
        unpriced=unpriced,
        tokens=tokens,
        turns=totals.get("turns", 0),
        tool_calls=sum(tool["calls"] for tool in totals.get("tools", {}).values()),
        run_ms=totals.get("run_ms", 0),
    )


async def settled_spent(session: Session, conversation_id: int) -> Spent:
    """Of a conversation, without what is staged."""
    loaded = await session.load_document(Address(_USAGE, "conversation", conversation_id))
    return spent_of(loaded.settled.value)


class SessionSpent:
    """The sum over a session's conversations, deleted ones too. Made once a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sum: Spent | None = None
        """Of settled commits; None: nobody has asked for it yet."""
        self._loading: asyncio.Future[None] | None = None
        self.loaded = False
        # While it is read: what settles counts from where the reading has come to.
        self._through = 0
        """Conversations up to this one are in the sum."""
        self._born: set[int] = set()
        """Conversations that were created meanwhile: they are in it from their beginning."""
        self._with_deleted = False
        session.observe(self._observe)

    async def load(self) -> None:
        """Read what every conversation has used, once. Takes a read a conversation. Not inside a transaction."""
        while not self.loaded:
            if self._loading is None:
                await self._load()
            else:
                await asyncio.wait([self._loading])  # whoever reads may be cancelled: then this one reads

    async def within(self, conversation_id: int, own: Spent) -> Spent:
        """The sum, with the conversation's own part as somebody sees it (``own``), such as a transaction.

        What other conversations have staged, and have under way, is not in it.
        """
        settled = await settled_spent(self._session, conversation_id)
        assert self._sum is not None, "it is loaded first"
        return self._sum - settled + own

    def elapsed_elsewhere(self, at: int, conversation_id: int) -> int:
        """Milliseconds that the runs of all other conversations have lasted."""
        return sum(
            max(0, at - record.created_at)
            for record in self._session.live.settled.values()
            if record.kind == GENERATION and record.conversation_id != conversation_id
        )

    async def _load(self) -> None:
        self._loading = asyncio.get_running_loop().create_future()
        self._sum, self._through, self._with_deleted = NOTHING, 0, False
        try:
            await self._read()
            self.loaded = True
        finally:
            if not self.loaded:
                self._sum = None
            self._born.clear()
            self._loading.set_result(None)
            self._loading = None

    async def _read(self) -> None:
        # Between a value and its place in the sum there is no step of the event loop: what settles is in one of them.
        session = self._session
        deleted = await session.load_document(Address(_DELETED, "session", 0))
        self._add(deleted.settled.value)
        self._with_deleted = True
        while True:
            page = await session.conversations(after=self._through, limit=MAX_SCAN)
            for record in page:
                used = await session.load_document(Address(_USAGE, "conversation", record.id))
                if record.id not in self._born:
                    self._add(used.settled.value)
                self._through = record.id
            if len(page) < MAX_SCAN:
                return

    def _add(self, document: JsonValue) -> None:
        assert self._sum is not None, "it is being read"
        self._sum += spent_of(document)

    def _observe(self, settled: Settled) -> None:
        if self._sum is None:
            return
        if not self.loaded:
            self._born.update(conversation.id for conversation in settled.batch.conversations)
        for change in settled.documents:
            if self._counts(change.record.kind, change.record.scope_id):
                self._sum = self._sum - spent_of(change.before) + spent_of(change.after)

    def _counts(self, kind: str, conversation_id: int) -> bool:
        if kind == _USAGE:
            return self.loaded or conversation_id <= self._through or conversation_id in self._born
        return kind == _DELETED and (self.loaded or self._with_deleted)
