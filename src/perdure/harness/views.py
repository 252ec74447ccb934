"""Everybody who looks at conversations: one live view a conversation, shared by all its observers.

A view is loaded when the first observer comes and kept up by settled commits until the last one leaves; a commit
that nobody looks at costs nothing here, and one that many look at is worked out once (rules K121 to K127).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from perdure.harness.events import Blocked, BlockedTask, Events, Moment, derive
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
from perdure.kernel.observation import Frame, Source, State, Watch
from perdure.kernel.records import Address, EntryRecord, TaskRecord
from perdure.kernel.session import Session, Settled
from perdure.tasks.errors import BlockedReason
from perdure.tasks.runtime import TaskRuntime

MAX_WINDOW: Final = 900
MAX_PAGE: Final = 1000


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


class _Room:
    """One conversation through one window, and who looks at it."""

    def __init__(self, views: Views, view: ConversationView, seq: int) -> None:
        self._views = views
        self.view = view
        name = f"conversation {view.conversation_id}"
        self.values: Source[ConversationView] = Source(name, seq=seq, value=view, on_idle=self._left)
        self.moments: Source[Moment] = Source(f"events of {name}", seq=seq, value=Moment(view), on_idle=self._left)

    def settle(self, settled: Settled, entries: Sequence[EntryRecord], changes: Sequence[DocumentChange]) -> None:
        before = self.view
        self.view, ops = advance(before, entries, changes)
        if not ops:
            return
        self.values.publish(Frame(settled.seq, self.view, ops, settled.values))
        events = (
            derive(before, self.view, seq=settled.seq, entries=entries, submissions=settled.batch.submissions)
            if self.moments.observed
            else ()
        )
        self.moments.publish(Frame(settled.seq, Moment(self.view, events), (), settled.values))

    def block(self, seq: int, record: TaskRecord, reason: BlockedReason) -> None:
        event = Blocked(seq=seq, task=record.id, kind=record.kind, reason=reason)
        self.moments.publish(Frame(seq, Moment(self.view, (event,)), ()))

    def retire(self) -> None:
        """The conversation is deleted (rule H182)."""
        for source in (self.values, self.moments):
            source.end("retired")

    def _left(self) -> None:
        if not self.values.observed and not self.moments.observed:
            self._views.drop(self)


class Views:
    """The live views of one session."""

    def __init__(self, session: Session, runtime: TaskRuntime) -> None:
        self._session = session
        self._runtime = runtime
        self._rooms: defaultdict[int, dict[int, _Room]] = defaultdict(dict)
        """By conversation and window."""
        self._loading: defaultdict[int, list[list[Settled]]] = defaultdict(list)
        """By conversation: what settles while one is being loaded."""
        session.observe(self._settled)
        runtime.on_blocked(self._on_blocked)

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
        self, conversation_id: int, *, window: int = DEFAULT_WINDOW, context: Context | None = None
    ) -> AsyncGenerator[Watch[ConversationView]]:
        """Raises NotFound."""
        room = await self._room(conversation_id, window, context)
        with self._session.observing(room.values.watch(context)) as watch:
            yield watch

    @asynccontextmanager
    async def events(
        self, conversation_id: int, *, window: int = DEFAULT_WINDOW, context: Context | None = None
    ) -> AsyncGenerator[Events]:
        """Raises NotFound."""
        room = await self._room(conversation_id, window, context)
        with self._session.observing(room.moments.watch(context)) as watch:
            yield Events(watch, lambda: self._blocked(conversation_id))

    # --- loading -----------------------------------------------------------------------------------------------

    async def _room(self, conversation_id: int, window: int, context: Context | None) -> _Room:
        """A room that stands at the newest settled commit. Attach to it before anything else is awaited."""
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(f"a window has 1 to {MAX_WINDOW} entries, not {window}")
        self._session.check_open()
        room = self._rooms[conversation_id].get(window) if conversation_id in self._rooms else None
        if room is not None:
            return room
        with self._collecting(conversation_id) as settled:
            view = await self._load(conversation_id, window, context, settled)
            self._session.check_open()
        # Another one may have been loaded meanwhile.
        rooms = self._rooms[conversation_id]
        room = rooms.get(window)
        if room is None:
            room = rooms[window] = _Room(self, view, self._session.seq)
            self._session.add_source(room.values)
            self._session.add_source(room.moments)
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

    def drop(self, room: _Room) -> None:
        """Nobody looks any more."""
        conversation_id = room.view.conversation_id
        rooms = self._rooms.get(conversation_id, {})
        if rooms.get(room.view.window) is room:
            del rooms[room.view.window]
            if not rooms:
                del self._rooms[conversation_id]
        self._session.drop_source(room.values)
        self._session.drop_source(room.moments)

    # --- keeping up --------------------------------------------------------------------------------------------

    def _settled(self, settled: Settled) -> None:
        if not self._rooms and not self._loading:
            return
        for conversation_id in settled.batch.deleted:
            for room in self._rooms.pop(conversation_id, {}).values():
                room.retire()
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

    def _on_blocked(self, record: TaskRecord, reason: BlockedReason) -> None:
        for room in self._rooms.get(record.conversation_id, {}).values():
            room.block(self._session.seq, record, reason)

    def _blocked(self, conversation_id: int) -> tuple[BlockedTask, ...]:
        live = self._session.live.settled
        return tuple(
            BlockedTask(id, live[id].kind, blocked.reason)
            for id, blocked in self._runtime.blocked_tasks.items()
            if id in live and live[id].conversation_id == conversation_id
        )


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
