"""The derived contexts of the conversations in use, kept in memory and extended by what settles (rule H62).

One that is not here is read from the newest head on, page by page; then every settled entry is added as it comes.
Bounded by number, by size and by age.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

import msgspec
from msgspec import structs

from perdure.harness.context import Messages, ModelContext, Replaceable, weight
from perdure.harness.documents import ASSISTANT, TOOL_RESULT
from perdure.harness.prompt import Shown, matters
from perdure.harness.tokens import Count
from perdure.kernel.records import NULL, EntryRecord
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Settled
from perdure.kernel.storage import MAX_SCAN
from perdure.kernel.transaction import Transaction

MOST_CONVERSATIONS = 1_000
MOST_BYTES = 256 * 1024 * 1024
"""Of all conversations together, roughly; the one in use stays whatever its size."""
MOST_PENDING = 1_000
"""Entries a conversation may get between two requests before it is let go of."""
WITH_DATA = frozenset({ASSISTANT, TOOL_RESULT})
"""Entries whose data tells the context which results belong to which calls."""
RETENTION_S = 600.0


class _Held(msgspec.Struct):
    """One conversation's context. It lags behind what settled: entries wait until a request wants them."""

    context: ModelContext
    shown: Shown = msgspec.field(default_factory=Shown)
    """As of ``newest``."""
    newest: int = 0
    """The newest settled entry."""
    pending: deque[EntryRecord] = msgspec.field(default_factory=deque[EntryRecord])
    """Settled entries the context has not been fed yet."""
    used_at: float = 0.0
    loaded: asyncio.Future[None] | None = None
    """Done once its history has been read; None: there was nothing to read."""
    reported: int = 0
    pending_bytes: int = 0
    counted: int = 0
    """Its share of the bytes in memory, as it was last weighed."""

    def note(self, entry: EntryRecord) -> None:
        if entry.id > self.newest:
            self.newest = entry.id
            # A conversation may be written to for weeks and never asked: what no request will need is not kept.
            self.pending_bytes += weight(entry)
            self.pending.append(entry if entry.kind in WITH_DATA else structs.replace(entry, raw_data=NULL))
            if matters(entry):
                self.shown.feed(entry)

    @property
    def loading(self) -> bool:
        return self.loaded is not None and not self.loaded.done()

    def feed(self, through: int) -> bool:
        """Feed the context what waits for it. False: it is of no use any more (see ModelContext.feed)."""
        while self.pending and self.pending[0].id <= through:
            entry = self.pending.popleft()
            self.pending_bytes -= weight(entry)
            if not self.context.feed(entry):
                return False
        return True

    @property
    def bytes(self) -> int:
        return self.context.bytes + self.pending_bytes


class Contexts:
    """Made once a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: OrderedDict[int, _Held] = OrderedDict()
        """By conversation, the longest unused first."""
        self._bytes = 0
        """What they weigh together; one that is being read, only once it is there."""
        session.observe(self._observe)

    def _observe(self, settled: Settled) -> None:
        for conversation in settled.batch.conversations:
            if conversation.parent is None and conversation.id not in self._held:
                # Its history is known without reading: it begins here.
                self._keep(conversation.id, _Held(ModelContext()))
        for id in settled.batch.deleted:
            self._drop(id)
        for entry in settled.batch.entries:
            held = self._held.get(entry.conversation_id)
            if held is not None:
                held.note(entry)
                if held.loading:
                    continue
                if len(held.pending) > MOST_PENDING:
                    self._drop(entry.conversation_id)
                else:
                    self._weigh(held)
        if self._bytes > MOST_BYTES:
            self._let_go()

    def shown(self, tx: Transaction, conversation_id: int) -> tuple[Shown, int] | None:
        """The sections a transaction sees shown, and the newest entry it sees; None: ``load`` first.

        Costs what is staged and not settled yet.
        """
        held = self._held.get(conversation_id)
        if held is None or held.loading:
            return None
        self._touch(conversation_id, held)
        shown, newest, own = held.shown, held.newest, False
        for entries in (self._session.staged.entries.values(), tx.new_entries):
            for entry in entries:
                if entry.conversation_id == conversation_id and entry.id > newest:
                    newest = entry.id
                    if matters(entry):
                        if not own:
                            shown, own = shown.copy(), True
                        shown.feed(entry)
        return shown, newest

    def count(self, tx: Transaction, conversation_id: int) -> Count | None:
        """The tokens of the context as a transaction sees it; None: not known here, ``load`` and ask in a later one.

        Costs what is new since it was last asked.
        """
        found = self._fed(conversation_id)
        if found is None:
            return None
        count = found.count
        own = False
        for entries in (self._session.staged.entries.values(), tx.new_entries):
            for entry in entries:
                if entry.conversation_id == conversation_id and entry.id > found.through:
                    if entry.head is not None and entry.head != entry.id:
                        return None  # what it keeps is known once it is settled and fed
                    if entry.head is not None or not own:
                        count, own = Count() if entry.head is not None else count.copy(), True
                    count.feed(entry)
        return count

    def cut(self, conversation_id: int, keep: int, *, least: int) -> int | None:
        """The first entry to keep if the newest settled ``keep`` tokens are (see ModelContext.cut); None also if the
        history is not in memory."""
        found = self._fed(conversation_id)
        live = self._session.live.settled  # a result that is staged has not come to the context yet

        def alive(task: int) -> bool:
            record = live.get(task)
            return record is not None and record.conversation_id == conversation_id

        return None if found is None else found.cut(keep, least=least, alive=alive)

    def settled(self, conversation_id: int) -> ModelContext | None:
        """The context through the newest settled entry; None: ``load`` first. Only to be read, and at once."""
        return self._fed(conversation_id)

    def _fed(self, conversation_id: int) -> ModelContext | None:
        """The context, fed with all that has settled. A request that was pinned before and is not built yet reads its
        history anew then, which is rare: a conversation has one run, and that one asks as it pins the next."""
        held = self._held.get(conversation_id)
        if held is None or held.loading:
            return None
        if held.pending:
            if not held.feed(held.newest):
                self._drop(conversation_id)
                return None
            self._report_invalid(conversation_id, held)
        return held.context

    async def replaceable(self, conversation_id: int, cut: int, through: int) -> Replaceable | None:
        """What stands before ``cut`` in the context through that entry; None: nothing. Not inside a transaction."""
        held = await self._ready(conversation_id, through)
        if held.context.through != through:
            held = await self._read(conversation_id, _Held(ModelContext()), through)
        return held.context.before(cut)

    async def load(self, conversation_id: int) -> None:
        """Read the conversation's history as far as a model sees it. Not inside a transaction."""
        await self._ready(conversation_id, None)

    async def messages(self, conversation_id: int, through: int) -> Messages:
        """What a model sees of the conversation through that entry. Not inside a transaction."""
        held = await self._ready(conversation_id, through)
        if held.context.through <= through:
            if held.feed(through):
                self._report_invalid(conversation_id, held)
                self._touch(conversation_id, held)
                return held.context.messages()
            # A head came that reaches back before what is held.
            self._drop(conversation_id)
        # That, or an older point than was asked for last, as when somebody looks at a past request.
        return (await self._read(conversation_id, _Held(ModelContext()), through)).context.messages()

    async def _ready(self, conversation_id: int, through: int | None) -> _Held:
        """The conversation's context, read through that entry at least, by whoever came first."""
        while True:
            held = self._held.get(conversation_id)
            if held is None:
                return await self._load(conversation_id, through)
            if held.loaded is None or held.loaded.done():
                self._touch(conversation_id, held)
                return held
            await asyncio.wait([held.loaded])

    async def _load(self, conversation_id: int, through: int | None) -> _Held:
        held = _Held(ModelContext(), loaded=asyncio.get_running_loop().create_future())
        assert held.loaded is not None
        self._held[conversation_id] = held
        try:
            await self._read(conversation_id, held, through)
        except BaseException:
            if self._held.get(conversation_id) is held:
                self._drop(conversation_id)
            raise
        finally:
            held.loaded.set_result(None)
        self._touch(conversation_id, held)
        return held

    async def _read(self, conversation_id: int, held: _Held, through: int | None) -> _Held:
        """Read from the newest head at or below ``through`` on, to the end; what settles meanwhile is noted."""
        session = self._session
        marker = await session.head(conversation_id, last=through)
        held.context = ModelContext(marker)
        first = held.context.start
        met: deque[EntryRecord] = deque()
        shown = Shown()
        newest = 0
        while True:
            page = await session.entries(conversation_id, first=first, limit=MAX_SCAN)
            for entry in page:
                newest = entry.id
                if matters(entry):
                    shown.feed(entry)
                if through is None or entry.id <= through:
                    if not held.context.feed(entry):
                        # A head settled after the first read, and reaches back before it.
                        return await self._read(conversation_id, held, through)
                else:
                    met.append(entry)
            if len(page) < MAX_SCAN:
                break
            first = page[-1].id + 1
        noted, held.pending, held.pending_bytes = held.pending, met, sum(map(weight, met))
        held.shown, held.newest = shown, newest
        for entry in noted:
            held.note(entry)
        self._report_invalid(conversation_id, held)
        return held

    def _report_invalid(self, conversation_id: int, held: _Held) -> None:
        for id in held.context.invalid[held.reported :]:
            self._session.report(
                Report(
                    type="entry_unreadable",
                    message=f"the messages of entry {id} are not what a model reads; the context leaves them out",
                    conversation=conversation_id,
                )
            )
        held.reported = len(held.context.invalid)

    # --- bounds -----------------------------------------------------------------------------------------------

    def _keep(self, conversation_id: int, held: _Held) -> None:
        self._held[conversation_id] = held
        self._touch(conversation_id, held)

    def _drop(self, conversation_id: int) -> None:
        held = self._held.pop(conversation_id, None)
        if held is not None:
            self._bytes -= held.counted

    def _touch(self, conversation_id: int, held: _Held) -> None:
        """It is used: it comes last in line to be let go of. Those that have to go now, go."""
        if self._held.get(conversation_id) is not held:
            return  # deleted while it was read
        held.used_at = self._session.clock.monotonic()
        self._held.move_to_end(conversation_id)
        self._weigh(held)
        self._let_go()

    def _weigh(self, held: _Held) -> None:
        self._bytes += held.bytes - held.counted
        held.counted = held.bytes

    def _let_go(self) -> None:
        """The newest used one stays, whatever its size, and so does what is being read."""
        long_ago = self._session.clock.monotonic() - RETENTION_S
        while len(self._held) > 1:
            id, oldest = next(iter(self._held.items()))
            too_many = len(self._held) > MOST_CONVERSATIONS or self._bytes > MOST_BYTES
            if oldest.loading or not (too_many or oldest.used_at < long_ago):
                return
            self._drop(id)
