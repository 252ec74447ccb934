"""The five records a store holds, as immutable values, and the moves each may make.

JSON inside a record is kept encoded (``msgspec.Raw``): it is encoded once when the record is built, written as it
is, and every read of ``data``, ``input`` and the like decodes a fresh value, so that changing what was read changes
nothing (rule K32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import msgspec

from perdure.kernel.errors import InvalidTransition
from perdure.kernel.json import JsonValue, check_json

T = TypeVar("T")

ROOT_CONVERSATION = 1
"""The id reserved for the root conversation."""
MAX_EPOCH = 2**62
"""What may be asked for: each open goes one higher by itself, and must find room to."""
MAX_RECORD_BYTES = 64 << 20
"""What the JSON of one record, or one write of a document, may take (rule K189)."""

Scope: TypeAlias = Literal["session", "conversation", "task"]
History: TypeAlias = Literal["latest", "rewindable"]
ForkPolicy: TypeAlias = Literal["as_of", "current", "initial"]
SubmissionType: TypeAlias = Literal["input", "write"]
SubmissionStatus: TypeAlias = Literal["queued", "placed", "done", "unanswered"]
"""It waits; it is in the transcript, and a run is about it; the last two are ends."""

_encoder = msgspec.json.Encoder()
NULL = msgspec.Raw(b"null")
EMPTY_LIST = msgspec.Raw(b"[]")
EMPTY_OBJECT = msgspec.Raw(b"{}")
_decode_object: Callable[[msgspec.Raw], dict[str, JsonValue]] = msgspec.json.Decoder(dict[str, object]).decode  # pyright: ignore[reportAssignmentType]


def to_raw(value: object, *, at: str = "$") -> msgspec.Raw:
    """Check that ``value`` is strict JSON and encode it once. Raises NotJson with the path of what is not."""
    check_json(value, at=at)
    return msgspec.Raw(_encoder.encode(value))


def from_raw(raw: msgspec.Raw) -> JsonValue:
    """A fresh, detached value."""
    return msgspec.json.decode(raw)


class ForkPoint(msgspec.Struct, frozen=True):
    conversation: int
    at: int
    """The entry through which the parent's history is shared."""


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    created_at: int
    parent: ForkPoint | None = None
    owner: int | None = None
    """The task that owns it, or None: ownerless."""
    shared_through: int | None = None
    """Of a deleted one the newest entry that forks still show (rule K196). No read finds such a record."""


class Edit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one entry does to an earlier entry's messages: leave them out, or put others in their place."""

    entry: int
    replace: msgspec.Raw = NULL
    """A JSON list of messages; null leaves the entry out. (A Raw or None cannot be decoded.)"""


class EntryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    seq: int
    created_at: int
    conversation_id: int
    kind: str
    raw_messages: msgspec.Raw = msgspec.field(default=EMPTY_LIST, name="messages")
    raw_data: msgspec.Raw = msgspec.field(default=NULL, name="data")
    head: int | None = None
    """The entry the model's context begins at (itself, or an earlier one); None: not a head marker."""
    edits: tuple[Edit, ...] = ()
    by_task: int | None = None

    @property
    def messages(self) -> list[JsonValue]:
        """What the model reads, decoded anew at each call."""
        return msgspec.json.decode(self.raw_messages)

    @property
    def data(self) -> JsonValue:
        """The entry's data, decoded anew at each call."""
        return from_raw(self.raw_data)

    def data_as(self, kind: type[T]) -> T:
        """The data as ``kind``. Raises msgspec.ValidationError if it does not fit."""
        return msgspec.json.decode(self.raw_data, type=kind)


class SubmissionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    conversation_id: int
    type: SubmissionType
    status: SubmissionStatus
    digest: str
    """Of the canonical JSON of its content: what a repeated request id is compared by."""
    created_at: int
    request_id: str | None = None
    entry: int | None = None
    """The entry it became, once placed or done."""
    answer: int | None = None
    """The answering entry, once an input is done."""
    reason: str | None = None
    detail: str | None = None

    @property
    def settled(self) -> bool:
        return self.status in ("done", "unanswered")


_SUBMISSION_MOVES: dict[tuple[SubmissionType, SubmissionStatus | None], tuple[SubmissionStatus, ...]] = {
    ("input", None): ("placed", "queued"),
    ("write", None): ("done", "queued"),
    ("input", "queued"): ("placed", "unanswered"),
    ("write", "queued"): ("done", "unanswered"),
    ("input", "placed"): ("done", "unanswered"),
}


def check_epoch(epoch: object) -> None:
    """Raises ValueError for an epoch that nobody could rise above, TypeError for what is none."""
    if type(epoch) is not int:
        raise TypeError(f"an epoch is a whole number, not {epoch!r}")
    if epoch > MAX_EPOCH:
        raise ValueError(f"an epoch is at most {MAX_EPOCH}, not {epoch}: nobody could rise above it")


def check_request_id(value: object) -> None:
    """Raise TypeError for what is no text, as a number: a store would not tell it from the text of its digits."""
    if not isinstance(value, str):
        raise TypeError(f"a request id is a text, not {type(value).__name__} {value!r}; use str() of it")


def check_submission_move(old: SubmissionRecord | None, new: SubmissionRecord) -> None:
    """Raise InvalidTransition unless ``new`` may follow ``old`` (None: it is being created)."""
    was = None if old is None else old.status
    if new.status not in _SUBMISSION_MOVES.get((new.type, was), ()):
        raise InvalidTransition(f"submission {new.id} ({new.type}) cannot go from {was or 'nothing'} to {new.status}")
    if old is not None and (old.digest, old.request_id, old.conversation_id, old.type, old.created_at) != (
        new.digest,
        new.request_id,
        new.conversation_id,
        new.type,
        new.created_at,
    ):
        raise InvalidTransition(f"submission {new.id} cannot change what it asked for")


# --- tasks -----------------------------------------------------------------------------------------------------


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """The task came to its end, with a result."""

    raw_result: msgspec.Raw = msgspec.field(default=NULL, name="result")
    """Its JSON."""

    @property
    def result(self) -> JsonValue:
        """What ``tx.complete(...)`` was given, as JSON."""
        return from_raw(self.raw_result)


class TaskError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a task failed or faulted: a short code, and a message for people."""

    code: str
    message: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The task's own code decided that it failed."""

    error: TaskError


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """It was aborted, and has stopped."""

    reason: str = "aborted"
    """As whoever aborted it, or its own ``on_abort``, gave it."""


class Faulted(msgspec.Struct, frozen=True, tag="faulted"):
    """The task's code raised, or returned without moving the task on."""

    error: TaskError
    """Its code is ``exception``, ``no_progress`` or ``restart_limit``."""


class Orphaned(msgspec.Struct, frozen=True, tag="orphaned"):
    """It was aborted while no fitting code could run its handler."""

    reason: str


Outcome: TypeAlias = Completed | Failed | Aborted | Faulted | Orphaned
WaitPolicy: TypeAlias = Literal["all_settled", "fail_fast"]


class _AtPhase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    phase: str
    raw_checkpoint: msgspec.Raw = msgspec.field(default=NULL, name="checkpoint")
    on: tuple[int, ...] = ()
    """The tasks it waits for; once the wait is over, those it waited for, so that a rerun finds them again."""
    signal: str | None = None
    """The signal it waits for, or waited for."""
    timed_out: bool = False
    """The deadline of that wait passed before the signal came."""

    @property
    def checkpoint(self) -> JsonValue:
        return from_raw(self.raw_checkpoint)


class Pending(_AtPhase, frozen=True, tag="pending"):
    """May run; nobody runs it."""


class Running(_AtPhase, frozen=True, tag="running"):
    """Its phase is running, or was when the process ended."""

    fresh: bool = False
    """Created running, and never yet started again: the first recovery counts no restart (rule T29)."""


class Waiting(_AtPhase, frozen=True, tag="waiting"):
    """Until every task of ``on`` is terminal, or the signal came, or the deadline passed."""

    policy: WaitPolicy = "all_settled"
    deadline: int | None = None


class Sleeping(_AtPhase, frozen=True, tag="sleeping"):
    until: int


class Completing(msgspec.Struct, frozen=True, tag="completing"):
    """Its outcome is decided and held until its ordinary owned work is terminal."""

    outcome: Outcome


class Terminal(msgspec.Struct, frozen=True, tag="terminal"):
    outcome: Outcome


TaskState: TypeAlias = Pending | Running | Waiting | Sleeping | Completing | Terminal
TaskStatus: TypeAlias = Literal["pending", "running", "waiting", "sleeping", "completing", "terminal"]


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    conversation_id: int
    kind: str
    version: int
    created_at: int
    state: TaskState
    raw_input: msgspec.Raw = msgspec.field(default=NULL, name="input")
    owner: int | None = None
    """The task that owns it (of the same conversation), or None: its conversation does."""
    background: bool = False
    abort_requested: bool = False
    abort_reason: str | None = None
    """Why it was marked, in the words of whoever aborted it."""
    nonce: str = ""
    """Random, stored with the intent: what the task's idempotency key rests on."""
    started_at: int | None = None
    ended_at: int | None = None
    restarts: int = 0
    raw_memos: msgspec.Raw = msgspec.field(default=EMPTY_OBJECT, name="memos")
    raw_signals: msgspec.Raw = msgspec.field(default=EMPTY_OBJECT, name="signals")

    @property
    def input(self) -> JsonValue:
        return from_raw(self.raw_input)

    @property
    def memos(self) -> dict[str, JsonValue]:
        return _decode_object(self.raw_memos)

    @property
    def signals(self) -> dict[str, JsonValue]:
        return _decode_object(self.raw_signals)

    @property
    def status(self) -> TaskStatus:
        return self.state.__struct_config__.tag  # pyright: ignore[reportReturnType]

    @property
    def live(self) -> bool:
        return type(self.state) is not Terminal

    @property
    def outcome(self) -> Outcome | None:
        """Decided, whether held (completing) or terminal; None while undecided."""
        return self.state.outcome if isinstance(self.state, (Completing, Terminal)) else None


def check_task_move(old: TaskRecord | None, new: TaskRecord) -> None:
    """Raise InvalidTransition unless ``new`` may follow ``old`` (None: it is being created)."""
    if new.background and new.owner is not None:
        raise InvalidTransition(f"task {new.id}: only a task owned by its conversation may be background")
    if old is None:
        if new.abort_requested or not isinstance(new.state, (Pending, Running)):
            raise InvalidTransition(f"task {new.id} must begin pending or running, not {new.status}")
        return
    if (old.conversation_id, old.kind, old.owner, old.background, old.nonce, old.created_at) != (
        new.conversation_id,
        new.kind,
        new.owner,
        new.background,
        new.nonce,
        new.created_at,
    ):
        raise InvalidTransition(f"task {new.id}: its kind, place and owner never change")
    if not old.live:
        raise InvalidTransition(f"task {new.id} is terminal; its record never changes again")
    if old.abort_requested and not new.abort_requested:
        raise InvalidTransition(f"task {new.id}: an abort mark is never taken back")
    if new.version < old.version:
        raise InvalidTransition(f"task {new.id}: a version never goes back ({old.version} to {new.version})")
    if isinstance(old.state, Completing) and new.outcome != old.state.outcome:
        raise InvalidTransition(f"task {new.id}: a held outcome is final")


# --- documents -------------------------------------------------------------------------------------------------


class DocumentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One incarnation of a document at an address; its value is bases and deltas beside it."""

    id: int
    kind: str
    scope: Scope
    scope_id: int = 0
    """The conversation or task it belongs to; 0 for session scope."""
    key: str = ""
    """Which one of a family; empty otherwise."""
    history: History = "latest"
    fork: ForkPolicy = "initial"
    """Stored with it, so that a fork needs no code of the document."""
    created_at: int
    created_seq: int
    retired_at: int | None = None
    retired_seq: int | None = None

    @property
    def address(self) -> Address:
        return Address(self.kind, self.scope, self.scope_id, self.key)


class Address(msgspec.Struct, frozen=True):
    """Where a document lives; at most one incarnation is alive there."""

    kind: str
    scope: Scope
    scope_id: int = 0
    key: str = ""

    def __str__(self) -> str:
        where = "" if self.scope == "session" else f" of {self.scope} {self.scope_id}"
        return f"{self.kind}{f'[{self.key}]' if self.key else ''}{where}"
