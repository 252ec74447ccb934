"""One conversation through one window: its live view and its events, and who looks at them.

What was told last stays at hand, in bounds, so that a client that comes back with a cursor goes on where it was
(rules H260 to H264).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec
from typing_extensions import override

from perdure.harness.cursor import Cursor, Stream
from perdure.harness.derived_events import derive
from perdure.harness.events import (
    Blocked,
    BlockedTask,
    Event,
    Events,
    Moment,
    Resumed,
    SnapshotReason,
    Standing,
    Unblocked,
)
from perdure.harness.view import ConversationView, advance
from perdure.kernel.context import Context
from perdure.kernel.documents import DocumentChange
from perdure.kernel.observation import MAX_PENDING, Frame, Source, Watch
from perdure.kernel.records import EntryRecord, TaskRecord
from perdure.kernel.session import Settled

LINGER_S: Final = 60.0
"""How long after its last consumer left a conversation's events and frames are kept at hand."""


class ViewFrame(Frame[ConversationView], frozen=True, kw_only=True):
    """A view after one commit, and what led to it from the frame before."""

    stream: Stream
    """What its cursor is made of."""
    number: int
    """Its place among the frames of the stream."""

    @property
    def cursor(self) -> str:
        """What comes after it: ``conversation.watch(after=frame.cursor)``."""
        return self.stream.cursor(self.seq, self.number)


class ViewWatch(Watch[ConversationView]):
    """A Watch of a conversation's view, whose frames have cursors.

    Made by ``conversation.watch()``.
    """

    def __init__(
        self, source: Source[ConversationView], stream: Stream, context: Context | None, after: int | None
    ) -> None:
        super().__init__(source, context, after=after)
        self._stream = stream

    @property
    @override
    def name(self) -> str:
        """For errors."""
        return f"watch of {self._source.name}"

    @override
    def __aiter__(self) -> AsyncIterator[ViewFrame]:
        return self

    @override
    async def __anext__(self) -> ViewFrame:
        frame = await super().__anext__()
        if isinstance(frame, ViewFrame):  # as all who watch share it
            return frame
        return ViewFrame(frame.seq, frame.value, None, frame.values, stream=self._stream, number=self.number)


class Room:
    """The view is kept up by whoever sees commits settle; a batch of events is worked out once for all who listen."""

    def __init__(
        self,
        view: ConversationView,
        seq: int,
        standing: Standing,
        *,
        log: bytes,
        mark: bytes,
        now: Callable[[], float],
        on_left: Callable[[Room], None],
        kept_up: bool = True,
    ) -> None:
        """``log`` and ``mark``: what its cursors know it again by. ``now``: seconds, monotonic. ``on_left``: nobody
        looks any more. ``kept_up``: whoever made it sees every commit; else what followed a cursor is never known."""
        self.view = view
        self._now = now
        self._on_left = on_left
        self._kept_up = kept_up
        self._unheard_since = 0.0
        name = f"conversation {view.conversation_id}"
        moment = Moment(view, standing)
        self.values: Source[ConversationView] = Source(name, seq=seq, value=view, on_idle=self._unseen)
        self.moments: Source[Moment] = Source(f"events of {name}", seq=seq, value=moment, on_idle=self._unheard)
        self._frames = Stream("view", log, mark, view.conversation_id)
        self._batches = Stream("events", log, mark, view.conversation_id)

    # --- who looks ---------------------------------------------------------------------------------------------

    @property
    def observed(self) -> bool:
        return self.values.observed or self.moments.observed

    @property
    def remembers(self) -> bool:
        """Somebody got cursors here that can still be used."""
        return self.values.keep > 0 or self.moments.keep > 0

    def watch(self, after: Cursor | None, context: Context | None) -> ViewWatch:
        """Behind a cursor only if its very frames are at hand: the JSON that operations are about may be another one
        in another window, or made by other code."""
        self.values.keep = MAX_PENDING
        known = None if after is None or not self._frames.has(after) else after.number
        return ViewWatch(self.values, self._frames, context, known)

    def listen(self, after: Cursor | None, context: Context | None) -> tuple[Watch[Moment], Events]:
        self.moments.keep = MAX_PENDING
        ready: Sequence[Event] = ()
        number: int | None = None
        reason: SnapshotReason = "start"
        if after is not None:
            if self._batches.has(after) and (frame := self.moments.at_hand(after.number)) is not None:
                number, ready = after.number, frame.value.events[after.index + 1 :]
            elif self._missed_nothing(after):
                number = self.moments.newest.number
            reason = "cursor" if number is None else "behind"
        watch = self.moments.watch(context, after=number)
        given = None if after is None else after.encode()
        return watch, Events(watch, self._batches, cursor=given, ready=ready, reason=reason)

    def _missed_nothing(self, after: Cursor) -> bool:
        """A cursor of another stream, with nothing to be told since: its commit is the last one here, nothing went on
        then, so that a restart cut nothing off, and nothing does now."""
        moment = self.moments.value
        stirred = moment.standing.running and not after.running
        still = self._kept_up and moment.quiet and not stirred
        return still and after.whole and after.quiet and after.seq >= self.moments.seq

    def _unseen(self) -> None:
        if not self.observed:
            self._on_left(self)

    def _unheard(self) -> None:
        self._unheard_since = self._now()
        self._unseen()

    @property
    def _heard(self) -> bool:
        """Somebody listens, or may come back for what is said now."""
        if self.moments.keep and not self.moments.observed and self._now() - self._unheard_since > LINGER_S:
            self.moments.keep = 0
        return self.moments.keep > 0

    # --- what happens ------------------------------------------------------------------------------------------

    def settle(self, settled: Settled, entries: Sequence[EntryRecord], changes: Sequence[DocumentChange]) -> None:
        before = self.view
        self.view, ops = advance(before, entries, changes)
        if not ops:
            return
        number = self.values.newest.number + 1
        self.values.publish(ViewFrame(settled.seq, self.view, ops, settled.values, stream=self._frames, number=number))
        events: Sequence[Event] = ()
        if self._heard:
            batch = settled.batch
            events = derive(
                before,
                self.view,
                seq=settled.seq,
                entries=entries,
                submissions=batch.submissions,
                tasks=batch.tasks,
            )
        self._tell(settled.seq, self.moments.value.standing, events, settled)

    def block(self, seq: int, task: BlockedTask, standing: Standing) -> None:
        event = Blocked(
            seq=seq, task=task.task, kind=task.kind, reason=task.reason, detail=task.detail, remedy=task.remedy
        )
        self._tell(seq, standing, (event,))

    def unblock(self, seq: int, task: TaskRecord, standing: Standing) -> None:
        ended = not task.live or task.abort_requested
        self._tell(seq, standing, (Unblocked(seq=seq, task=task.id, kind=task.kind, ended=ended),))

    def resume(self, seq: int, standing: Standing) -> None:
        self._tell(seq, standing, (Resumed(seq=seq),))

    def _tell(self, seq: int, standing: Standing, events: Sequence[Event], settled: Settled | None = None) -> None:
        moment = Moment(self.view, standing)
        if self._heard and events:
            number, last = self.moments.newest.number + 1, len(events) - 1
            moment = Moment(
                self.view,
                standing,
                tuple(
                    msgspec.structs.replace(
                        event, cursor=moment.cursor(self._batches, seq, number, index=index, whole=index == last)
                    )
                    for index, event in enumerate(events)
                ),
            )
        if settled is None:
            self.moments.publish(Frame(seq, moment, ()))
        else:
            self.moments.publish(Frame(seq, moment, (), settled.values))

    def retire(self) -> None:
        """The conversation is deleted (rule H182)."""
        for source in (self.values, self.moments):
            source.end("retired")
