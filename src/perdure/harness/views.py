"""Everybody who looks at conversations: one live view a conversation, shared by all its observers.

A view is loaded when the first observer comes and kept up by settled commits until the last one leaves; a commit
that nobody looks at costs nothing here, and one that many look at is worked out once (rules K121 to K127). For a short
while it is kept up for those who may come back with a cursor.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from itertools import islice
from typing import Final

from perdure.harness.cursor import Cursor, Kind, log_mark, read_cursor
from perdure.harness.events import BlockedTask, Events, Standing
from perdure.harness.room import LINGER_S, Room, ViewWatch
from perdure.harness.view import (
    DEFAULT_WINDOW,
    PART_OF,
    PARTS,
    ConversationView,
    Part,
    advance,
    document_value,
    first_view,
    head_of,
)
from perdure.kernel.context import Context
from perdure.kernel.documents import DocumentChange
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.kernel.observation import Source, State
from perdure.kernel.records import Address, EntryRecord, TaskRecord
from perdure.kernel.session import Session, Settled
from perdure.tasks.blocking import Blocked
from perdure.tasks.errors import ADVICE
from perdure.tasks.runtime import TaskRuntime

MAX_WINDOW: Final = 900
MAX_PAGE: Final = 1000
MOST_BLOCKED: Final = 100
"""Tasks that a snapshot names; ``inspect()`` has them all."""
MOST_READS: Final = 5
"""At what another process keeps changing; then what was seen is taken as it is."""
MOST_LINGERING: Final = 100
"""Conversations that are kept up though nobody looks: those that were left last."""


class View(State[ConversationView]):
    """A conversation's live view: ``value`` is the newest, ``before`` reads what the window does not show."""

    def __init__(self, source: Source[ConversationView], session: Session) -> None:
        super().__init__(source)
        self._session = session

    async def before(self, entry: int, *, limit: int = 100, context: Context | None = None) -> list[EntryRecord]:
        """Up to ``limit`` entries of the active transcript before an entry, oldest first."""
        if not 1 <= limit <= MAX_PAGE:
            raise ValueError(f"a page has 1 to {MAX_PAGE} entries, not {limit}")
        view = self.value
        if entry <= view.start:
            return []
        found = await self._session.entries(
            view.conversation_id,
            first=view.start,
            last=entry - 1,
            order="descending",
            limit=limit,
            context=context,
        )
        return found[::-1]


class Views:
    """The live views of one session. Made before the task runtime is: what a commit did is told before what becomes of
    tasks by it, so that a cursor behind the latter is behind all of the commit (rule H263)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._runtime: TaskRuntime | None = None
        self._rooms: defaultdict[int, dict[int, Room]] = defaultdict(dict)
        """By conversation and window."""
        self._lingering: OrderedDict[Room, float] = OrderedDict()
        """Those that nobody is in, and since when, on the monotonic clock."""
        self._log = log_mark(session.info.log_id)
        self._mark = b""
        """Random, of this opening of the store."""
        self._made = 0
        self._loading: defaultdict[int, list[list[Settled]]] = defaultdict(list)
        """By conversation: what settles while one is being loaded."""
        session.observe(self._settled)

    def attach(self, runtime: TaskRuntime) -> None:
        """The session's runtime, as soon as it is there."""
        self._runtime = runtime
        runtime.on_blocked(self._on_blocked)
        runtime.on_unblocked(self._on_unblocked)
        runtime.on_resumed(self._on_resumed)

    @asynccontextmanager
    async def state(
        self, conversation_id: int, *, window: int = DEFAULT_WINDOW, context: Context | None = None
    ) -> AsyncGenerator[View]:
        """Raises NotFound."""
        room = await self._room(conversation_id, window, context)
        with self._session.observing(View(room.values, self._session)) as view:
            yield view

    @asynccontextmanager
    async def watch(
        self,
        conversation_id: int,
        *,
        after: str | None = None,
        window: int = DEFAULT_WINDOW,
        context: Context | None = None,
    ) -> AsyncGenerator[ViewWatch]:
        """Raises NotFound, CursorError."""
        cursor = self._cursor(after, "view", conversation_id)
        room = await self._room(conversation_id, window, context)
        with self._session.observing(room.watch(cursor, context)) as watch:
            yield watch

    @asynccontextmanager
    async def events(
        self,
        conversation_id: int,
        *,
        after: str | None = None,
        window: int = DEFAULT_WINDOW,
        context: Context | None = None,
    ) -> AsyncGenerator[Events]:
        """Raises NotFound, CursorError."""
        cursor = self._cursor(after, "events", conversation_id)
        room = await self._room(conversation_id, window, context)
        watch, events = room.listen(cursor, context)
        with self._session.observing(watch):
            yield events

    def _cursor(self, text: str | None, kind: Kind, conversation_id: int) -> Cursor | None:
        if text is None:
            return None
        session = self._session
        # Where the store is open for reading only another process commits: the newest commit is not known.
        newest = None if session.info.read_only else session.seq
        return read_cursor(text, kind, log=self._log, conversation=conversation_id, seq=newest)

    # --- loading -----------------------------------------------------------------------------------------------

    async def _room(self, conversation_id: int, window: int, context: Context | None) -> Room:
        """A room that stands at the newest settled commit. Attach to it before anything else is awaited."""
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"a window has 1 to {MAX_WINDOW} entries, not {window}")
        self._session.check_open()
        if self._session.info.read_only:
            # Nobody tells what another process commits: each looks anew, and shares nothing (rule H270).
            return self._make(await self._look(conversation_id, window, context))
        room = self._rooms[conversation_id].get(window) if conversation_id in self._rooms else None
        if room is not None:
            self._lingering.pop(room, None)
            return room
        with self._collecting(conversation_id) as settled:
            view = await self._load(conversation_id, window, context, settled)
            self._session.check_open()
        # Another one may have been loaded meanwhile.
        room = self._rooms[conversation_id].get(window)
        if room is None:
            room = self._rooms[conversation_id][window] = self._make(view)
        self._lingering.pop(room, None)
        return room

    def _make(self, view: ConversationView) -> Room:
        session = self._session
        if not self._mark:
            self._mark = sha256(session.entropy.token().encode()).digest()[:4]
        self._made += 1
        room = Room(
            view,
            session.seq,
            self._standing(view.conversation_id),
            log=self._log,
            mark=self._mark + (self._made & 0xFFFF_FFFF).to_bytes(4),
            now=session.clock.monotonic,
            on_left=self._left,
            kept_up=not session.info.read_only,
        )
        session.add_source(room.values)
        session.add_source(room.moments)
        return room

    async def _load(
        self, conversation_id: int, window: int, context: Context | None, settled: list[Settled]
    ) -> ConversationView:
        """What was read, brought up to date with what settled meanwhile."""
        session = self._session
        marker = await session.head(conversation_id)
        newest = await session.entries(
            conversation_id, first=head_of(marker), order="descending", limit=window + 1, context=context
        )
        documents: dict[Part, JsonValue] = {}
        read_at: dict[Part, int] = {}
        for part, kind in PARTS.items():
            address = Address(kind.definition.kind, "conversation", conversation_id)
            documents[part] = document_value(part, (await session.load_document(address, context)).settled)
            read_at[part] = session.seq
        view = first_view(conversation_id, window=window, marker=marker, entries=newest[::-1], documents=documents)
        last = newest[0].id if newest else 0
        for commit in settled:
            if conversation_id in commit.batch.deleted:
                raise NotFound(f"there is no conversation {conversation_id}")
            entries, changes = _of(commit, conversation_id)
            view, _ = advance(
                view,
                [entry for entry in entries if entry.id > last],
                [change for change in changes if commit.seq > read_at[PART_OF[change.record.kind]]],
            )
        return view

    async def _look(self, conversation_id: int, window: int, context: Context | None) -> ConversationView:
        """Another process may commit between two reads. What is read twice as the same was so in between."""
        view = await self._load(conversation_id, window, context, [])
        for _ in range(MOST_READS):
            before, view = view, await self._load(conversation_id, window, context, [])
            if view.tree == before.tree and [e.id for e in view.entries] == [e.id for e in before.entries]:
                break
        return view

    @contextmanager
    def _collecting(self, conversation_id: int) -> Generator[list[Settled]]:
        settled: list[Settled] = []
        self._loading[conversation_id].append(settled)
        try:
            yield settled
        finally:
            # By identity: two that collected the same commits are equal.
            rest = [other for other in self._loading[conversation_id] if other is not settled]
            if rest:
                self._loading[conversation_id] = rest
            else:
                del self._loading[conversation_id]

    def _left(self, room: Room) -> None:
        """Nobody looks any more."""
        if self._rooms.get(room.view.conversation_id, {}).get(room.view.window) is not room:
            self._let_go(room)  # of a deleted conversation, or of a store that is only looked at
        elif room.remembers and not self._session.closing:
            self._lingering[room] = self._session.clock.monotonic()
            self._expire()
        else:
            self._drop(room)

    def _expire(self) -> None:
        """Drop those that were left too long ago, and the oldest of too many."""
        now = self._session.clock.monotonic()
        while self._lingering:
            room, since = next(iter(self._lingering.items()))
            if now - since <= LINGER_S and len(self._lingering) <= MOST_LINGERING:
                return
            del self._lingering[room]
            self._drop(room)

    def _drop(self, room: Room) -> None:
        conversation_id = room.view.conversation_id
        rooms = self._rooms[conversation_id]
        del rooms[room.view.window]
        if not rooms:
            del self._rooms[conversation_id]
        self._let_go(room)

    def _let_go(self, room: Room) -> None:
        self._lingering.pop(room, None)
        self._session.drop_source(room.values)
        self._session.drop_source(room.moments)

    # --- keeping up --------------------------------------------------------------------------------------------

    def _settled(self, settled: Settled) -> None:
        if not self._rooms and not self._loading:
            return
        if self._lingering:
            self._expire()
        for conversation_id in settled.batch.deleted:
            for room in self._rooms.pop(conversation_id, {}).values():
                room.retire()
                self._let_go(room)
        touched = {entry.conversation_id for entry in settled.batch.entries}
        touched |= {change.record.scope_id for change in settled.documents if change.record.kind in PART_OF}
        touched.update(settled.batch.deleted)
        for conversation_id in touched:
            for collected in self._loading.get(conversation_id, ()):
                collected.append(settled)
            rooms = self._rooms.get(conversation_id)
            if rooms:
                entries, changes = _of(settled, conversation_id)
                for room in rooms.values():
                    room.settle(settled, entries, changes)

    def _on_blocked(self, record: TaskRecord) -> None:
        assert self._runtime is not None, "it tells"
        for room in self._rooms.get(record.conversation_id, {}).values():
            why = self._runtime.blocked_tasks[record.id]
            room.block(self._session.seq, _blocked(record, why), self._standing(record.conversation_id))

    def _on_unblocked(self, record: TaskRecord) -> None:
        for room in self._rooms.get(record.conversation_id, {}).values():
            room.unblock(self._session.seq, record, self._standing(record.conversation_id))

    def _on_resumed(self) -> None:
        for conversation_id, rooms in self._rooms.items():
            for room in rooms.values():
                room.resume(self._session.seq, self._standing(conversation_id))

    def _standing(self, conversation_id: int) -> Standing:
        assert self._runtime is not None, "it is there before anybody looks"
        live, blocked = self._session.live.settled, self._runtime.blocked_tasks
        found = (
            _blocked(live[id], why)
            for id, why in blocked.items()
            if id in live and live[id].conversation_id == conversation_id
        )
        return Standing(self._runtime.mode == "on", tuple(islice(found, MOST_BLOCKED)))


def _blocked(record: TaskRecord, why: Blocked) -> BlockedTask:
    return BlockedTask(record.id, record.kind, why.reason, why.detail, ADVICE[why.reason])


def _of(settled: Settled, conversation_id: int) -> tuple[list[EntryRecord], list[DocumentChange]]:
    """What of a commit is this conversation's."""
    return (
        [entry for entry in settled.batch.entries if entry.conversation_id == conversation_id],
        [
            change
            for change in settled.documents
            if change.record.kind in PART_OF and change.record.scope_id == conversation_id
        ],
    )
