"""What happens in a conversation, as typed events, and how one consumer takes them (rules H149 to H151).

A stream begins with a snapshot, or behind a cursor; what follows is exactly what came after it. A consumer that falls
behind gets a fresh snapshot in place of what it missed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from perdure.harness.cursor import ALL, Stream
from perdure.harness.documents import CompactionReason, InboxItem, ModelTotals, ToolTotals
from perdure.harness.view import ConversationView
from perdure.kernel.json import JsonValue, copy_json
from perdure.kernel.observation import Frame, Watch
from perdure.kernel.records import EntryRecord
from perdure.tasks.errors import BlockedReason


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    seq: int
    """The commit it is of."""
    cursor: str = ""
    """What comes after it: ``conversation.events(after=event.cursor)``, also from another process, later."""


class BlockedTask(msgspec.Struct, frozen=True):
    """A task that was to run and cannot."""

    task: int
    kind: str
    """Of the task, such as ``pi.tool``."""
    reason: BlockedReason
    detail: str = ""
    """May quote the error of its own code."""
    remedy: str = ""
    """What a person can do about it."""


SnapshotReason: TypeAlias = Literal["start", "cursor", "behind"]
"""No cursor was given; what came behind the cursor is no longer at hand; the consumer was too slow."""


class Snapshot(_Event, frozen=True, kw_only=True, tag="snapshot"):
    """How the conversation is now: in place of all that was told before, the text of a partial answer too."""

    busy: bool
    """A run goes on."""
    view: JsonValue
    """A ConversationView's ``to_json()``."""
    blocked: tuple[BlockedTask, ...] = ()
    """Tasks of the conversation that cannot go on by themselves."""
    running: bool = True
    """Work may run here. False from the opening of the store until resume(), or where it is open for reading only:
    what the view shows as under way then stands still, and no more of it comes until a ``resumed`` event."""
    reason: SnapshotReason = "start"
    """Why there is a snapshot here."""


class Resumed(_Event, frozen=True, kw_only=True, tag="resumed"):
    """Work runs from now on; what a crash cut off is recovered."""


class RunStart(_Event, frozen=True, kw_only=True, tag="run_start"):
    """The agent begins to work on inputs; a RunEnd with the same task ends it."""

    task: int
    """The generation task: what the events of one run have in common."""
    inputs: tuple[int, ...]
    """The submissions it answers."""


class RunEnd(_Event, frozen=True, kw_only=True, tag="run_end"):
    """A run is over, and its inputs are answered or unanswered."""

    task: int
    """As in its RunStart."""
    inputs: tuple[int, ...]
    """The submissions that end with it; some may have joined after its beginning."""
    answer: int | None = None
    """The answering entry, or None: unanswered."""
    reason: str | None = None
    """Why unanswered, such as ``aborted``, ``limit`` or ``gate``: as Unanswered has it."""
    detail: str | None = None


class Turn(_Event, frozen=True, kw_only=True, tag="turn"):
    """A response of the model is complete and its calls begin."""

    task: int
    """Of the run."""
    turn: int
    """Counted from 1 in each run."""


class MessageStart(_Event, frozen=True, kw_only=True, tag="message_start"):
    """An answer begins; what follows until its end is about it."""

    task: int | None
    """Of the run; None: no run wrote it."""


class MessageDelta(_Event, frozen=True, kw_only=True, tag="message_delta"):
    """Text that was added to a part of the answer. The first delta of an index begins that part."""

    task: int
    """Of the run."""
    index: int
    """Which part of the answer, from 0."""
    part: str
    """text, thinking or tool_call."""
    text: str
    """Of a tool call: more of the JSON of its arguments."""
    id: str = ""
    """Of a tool call: the provider's label."""
    name: str = ""
    """Of a tool call: the tool's."""


class MessageEnd(_Event, frozen=True, kw_only=True, tag="message_end"):
    """The answer as it is stored; None: nothing of it was, it is tried again."""

    task: int | None
    """As in its MessageStart."""
    entry: EntryRecord | None


class ToolStart(_Event, frozen=True, kw_only=True, tag="tool_start"):
    """A call is stored, and runs or waits to; a ToolEnd with the same task ends it."""

    task: int
    """The call's own id."""
    call_id: str
    """The label that the model, or the tool that calls, has given it; it may repeat."""
    name: str
    """The tool's."""
    caller: int | None = None
    """The call that made this one; None: the model did."""


class ToolUpdate(_Event, frozen=True, kw_only=True, tag="tool_update"):
    """What a running call shows."""

    task: int
    """The call's own id."""
    text: str
    """Added to its output; with ``anew`` all that is shown of it, in place of what was."""
    anew: bool
    dropped_lines: int
    """How many lines of its output are not shown, in all."""
    dropped_bytes: int
    details: JsonValue
    """As they are now."""
    diagnostics: tuple[str, ...]
    """New ones."""


class ToolEnd(_Event, frozen=True, kw_only=True, tag="tool_end"):
    """A call has its result."""

    task: int
    """As in its ToolStart."""
    call_id: str
    name: str
    is_error: bool
    code: str | None
    """Of an error that the harness wrote, such as ``interrupted`` or ``denied`` (rule H101)."""
    entry: EntryRecord
    """The result as it is stored."""
    caller: int | None = None
    """The call that made this one, and that its result goes to; None: the model."""


class ApprovalRequested(_Event, frozen=True, kw_only=True, tag="approval_requested"):
    """A call waits for a decision (rule H268): ``harness.decide(event.task, digest=event.digest, allow=...)``."""

    task: int
    """The call's own id."""
    call_id: str
    name: str
    """The tool's."""
    arguments: JsonValue
    """The exact ones it would run with."""
    digest: str
    """Of these."""
    expires_at: int
    """ms UTC."""


class ApprovalDecided(_Event, frozen=True, kw_only=True, tag="approval_decided"):
    """What was decided about it. The call goes on, or ends denied."""

    task: int
    """The call's own id."""
    allow: bool
    reason: str
    """Why, of one that denies."""
    by: str | None
    """Who decided, as they say."""
    edited: bool
    """It is to run with other arguments than those that were asked about."""


class QuestionAsked(_Event, frozen=True, kw_only=True, tag="question_asked"):
    """A call asks a person, and waits (rule H333): ``harness.questions()`` has what is asked, and takes the answer."""

    task: int
    """Of the question."""
    call: int
    """The call that asks."""
    text: str
    """What is asked."""
    expires_at: int
    """ms UTC."""


QuestionOutcome: TypeAlias = Literal["answered", "expired", "withdrawn"]


class QuestionOver(_Event, frozen=True, kw_only=True, tag="question_over"):
    """It was answered, or is not asked any more."""

    task: int
    """As in its QuestionAsked."""
    call: int
    outcome: QuestionOutcome
    """``answered``, ``expired``, or ``withdrawn``: it was aborted, or its call is over."""


class EntryAppended(_Event, frozen=True, kw_only=True, tag="entry"):
    """An entry that is neither an answer nor a result: an input, a reset, the prompt, an application's own."""

    entry: EntryRecord


class InboxChanged(_Event, frozen=True, kw_only=True, tag="inbox"):
    """What waits in the conversation's queue is another than before."""

    items: list[InboxItem]
    """All that waits now."""


class Retry(_Event, frozen=True, kw_only=True, tag="retry"):
    """A request failed and is sent again at ``until`` (ms UTC)."""

    attempt: int
    """The one that failed, from 1."""
    until: int
    code: str
    """A ModelError's."""
    message: str


class ResponseDeferred(_Event, frozen=True, kw_only=True, tag="response_deferred"):
    """The run waits for a response that its provider makes in the background; told again with each poll that brought
    none (rule H405)."""

    task: int
    """Of the run."""
    model: str
    """``provider:name``."""
    attempt: int
    """Of the request, from 1."""
    handle: str
    """What the provider knows the response by."""
    sent: int
    """When it was asked for (ms UTC)."""
    polls: int
    """How often it was polled by now."""
    until: int
    """When it is polled next (ms UTC)."""
    code: str | None
    """Why this poll failed, a ModelError's; None: it did not."""


class CompactionStart(_Event, frozen=True, kw_only=True, tag="compaction_start"):
    """The context of the model is being summed up."""

    task: int
    """Of the compaction."""
    reason: CompactionReason


class CompactionRetry(_Event, frozen=True, kw_only=True, tag="compaction_retry"):
    """A summary could not be had and is asked for again at ``until`` (ms UTC)."""

    task: int
    attempt: int
    """The one that failed, from 1."""
    until: int
    code: str
    """A ModelError's."""
    message: str


CompactionOutcome: TypeAlias = Literal["placed", "stale", "declined", "failed", "aborted"]
"""The context begins with it; the context had begun anew meanwhile; a hook, or nothing to sum up, said no; there is
no summary, see the code; it was aborted."""


class CompactionEnd(_Event, frozen=True, kw_only=True, tag="compaction_end"):
    """A compaction is over, with a summary or without one."""

    task: int
    """As in its CompactionStart."""
    reason: CompactionReason
    outcome: CompactionOutcome
    entry: EntryRecord | None
    """If it was placed."""
    code: str | None = None
    """Why it failed."""
    message: str | None = None


class UsageChanged(_Event, frozen=True, kw_only=True, tag="usage"):
    """The totals as they are now."""

    models: Mapping[str, ModelTotals]
    """By ``provider:name``."""
    tools: Mapping[str, ToolTotals]
    """By the tool's name."""


class Blocked(_Event, frozen=True, kw_only=True, tag="blocked"):
    """A task of the conversation cannot go on by itself (rule T48)."""

    task: int
    kind: str
    reason: BlockedReason
    detail: str = ""
    """May quote the error of its own code."""
    remedy: str = ""
    """What a person can do about it."""


class Unblocked(_Event, frozen=True, kw_only=True, tag="unblocked"):
    """A task that was blocked is so no longer."""

    task: int
    kind: str
    ended: bool
    """It was aborted; else it goes on."""


Event: TypeAlias = (
    Snapshot
    | RunStart
    | RunEnd
    | Turn
    | MessageStart
    | MessageDelta
    | MessageEnd
    | ToolStart
    | ToolUpdate
    | ToolEnd
    | ApprovalRequested
    | ApprovalDecided
    | QuestionAsked
    | QuestionOver
    | EntryAppended
    | InboxChanged
    | Retry
    | ResponseDeferred
    | CompactionStart
    | CompactionRetry
    | CompactionEnd
    | UsageChanged
    | Blocked
    | Unblocked
    | Resumed
)
"""What ``conversation.events()`` gives; tell them apart with ``isinstance`` or ``match``."""


# --- consuming -------------------------------------------------------------------------------------------------


class Standing(msgspec.Struct, frozen=True):
    """What no record says: whether work may run, and what of it was to run and cannot."""

    running: bool
    blocked: tuple[BlockedTask, ...]


class Moment(msgspec.Struct, frozen=True):
    """What a commit did: the view after it, and its events. Blocked work and a resume are moments of their own."""

    view: ConversationView
    standing: Standing
    events: tuple[Event, ...] = ()

    @property
    def quiet(self) -> bool:
        """Nothing goes on that a crash would leave to be told of."""
        return not self.standing.blocked and not self.view.busy and not self.view.compacting

    def cursor(self, stream: Stream, seq: int, number: int, *, index: int = ALL, whole: bool = True) -> str:
        """Behind this moment, or behind one of its events."""
        running = self.standing.running
        return stream.cursor(seq, number, index=index, whole=whole, quiet=self.quiet, running=running)


class Events:
    """An async iterator of a conversation's events, for one consumer.

    Made by ``conversation.events()``.

    It ends as a Watch does: quietly when it is released, else with WatchEnded after the events before the end.
    """

    def __init__(
        self,
        watch: Watch[Moment],
        stream: Stream,
        *,
        cursor: str | None = None,
        ready: Sequence[Event] = (),
        reason: SnapshotReason = "start",
    ) -> None:
        """``ready``: what of the batch at its beginning is still to come. ``reason``: why, if a snapshot comes next."""
        self._watch = watch
        self._stream = stream
        self._ready: deque[Event] = deque(map(_own, ready))
        """The rest of one batch."""
        self._reason: SnapshotReason = reason
        self.cursor = cursor
        """Behind the event that was given last, or where it began; None: at no place yet."""

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            frame = await self._watch.__anext__()
            if frame.ops is None:
                self._ready.append(self._snapshot(frame))
            else:
                self._ready.extend(map(_own, frame.value.events))
            self._reason = "behind"
        event = self._ready.popleft()
        self.cursor = event.cursor
        return event

    def _snapshot(self, frame: Frame[Moment]) -> Snapshot:
        moment = frame.value
        return Snapshot(
            seq=frame.seq,
            cursor=moment.cursor(self._stream, frame.seq, self._watch.number),
            busy=moment.view.busy,
            view=moment.view.to_json(),
            blocked=moment.standing.blocked,
            running=moment.standing.running,
            reason=self._reason,
        )


def _own(event: Event) -> Event:
    """The event with values that no other consumer holds."""
    match event:
        case InboxChanged() | UsageChanged():
            return copy.deepcopy(event)
        case ApprovalRequested():
            return msgspec.structs.replace(event, arguments=copy_json(event.arguments))
        case ToolUpdate() if event.details is not None:
            return msgspec.structs.replace(event, details=copy_json(event.details))
        case _:
            return event
