"""What a harness tells a telemetry back end, and the protocol of one (rules H280 to H289).

Nothing in here carries content: ids that this package minted, names that are written in code, codes, counts and times.
Whoever adds a field decides by that (rule H285).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

import msgspec

from perdure.harness.messages import Usage

CallRecovery: TypeAlias = Literal["run_again", "result", "interrupted"]
"""What became of a call that was cut off after its intent: its tool runs again, its environment or the outside had
the result, or nobody can say what it did."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation belongs to."""

    log_id: str
    conversation_id: int
    task: int
    seq: int
    """The last settled commit as it begins."""


class RunBegan(msgspec.Struct, frozen=True, kw_only=True):
    """A run begins, or this process takes one up that another had begun."""

    place: Place
    resumed: bool


class AttemptBegan(msgspec.Struct, frozen=True, kw_only=True):
    """A request is sent to a model."""

    place: Place
    model: str
    """``provider:name``."""
    attempt: int
    max_output: int | None


class CallBegan(msgspec.Struct, frozen=True, kw_only=True):
    """The tool of a call is executed, or the call ends without that."""

    place: Place
    tool: str | None
    """None: the model named none that is installed."""
    recovery: CallRecovery | None
    """What was decided, if it had been cut off."""


class CompactionBegan(msgspec.Struct, frozen=True, kw_only=True):
    place: Place
    reason: str
    """A CompactionReason."""
    resumed: bool


Began: TypeAlias = RunBegan | AttemptBegan | CallBegan | CompactionBegan


class RunEnded(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    """``answered``, or why not, as its inputs say."""
    submissions: tuple[int, ...]
    """Those that it settled."""
    seq: int


class AttemptEnded(msgspec.Struct, frozen=True, kw_only=True):
    error: str | None = None
    """A code of ModelError, the type of what an adapter raised, or how the stream ended without a message."""
    usage: Usage | None = None
    model: str | None = None
    """As the provider names the one that answered."""
    stop_reason: str | None = None


class CallEnded(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    """``ok``, ``error`` if the tool says so itself, or the code of the harness (rule H101)."""
    raised: str | None
    """The type of what the tool raised."""
    seq: int


class CompactionEnded(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str
    """``completed``, ``failed``, ``aborted``, ``faulted`` or ``orphaned``."""
    code: str | None
    """Of its failure."""
    seq: int


class Left(msgspec.Struct, frozen=True):
    """The session ends and this does not: it goes on after the next open."""


Ended: TypeAlias = RunEnded | AttemptEnded | CallEnded | CompactionEnded | Left


class CommitStored(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    """From when storage had it to when storage had stored it."""
    flushed: bool
    """Progress need not be."""


class Retried(msgspec.Struct, frozen=True):
    """A request is sent again later."""

    code: str


class TasksChanged(msgspec.Struct, frozen=True):
    """By how much there are more or fewer of them."""

    live: int
    blocked: int


Fact: TypeAlias = CommitStored | Retried | TasksChanged


class Operation(Protocol):
    """Something that takes time: a span."""

    def current(self) -> AbstractContextManager[object]:
        """What runs inside belongs to it. It may be entered again once it was left, and hears of no exception."""
        ...

    def first(self) -> None:
        """The first event of an answer is there."""
        ...

    def done(self) -> None:
        """Its work is over. What it came to, ``end`` says later; without this, both are at once."""
        ...

    def end(self, how: Ended) -> None:
        """Called once."""
        ...


class Telemetry(Protocol):
    """Where it goes. Called on the event loop, so it must not block; what it raises is reported once and harms
    nothing (rule H287)."""

    def begin(self, what: Began, under: Operation | None) -> Operation:
        """``under``: what it is a part of, begun by this very object; None: of nothing in this process."""
        ...

    def tell(self, fact: Fact) -> None: ...
