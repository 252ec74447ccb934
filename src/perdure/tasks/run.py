"""What a phase holds while it runs: its input and checkpoint, and the way to commit what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from perdure.kernel.context import Context
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Outcome, Running, TaskRecord, from_raw
from perdure.tasks.blocking import Fit
from perdure.tasks.errors import RunEnded
from perdure.tasks.transaction import RunTransaction
from perdure.tasks.values import stored_value

if TYPE_CHECKING:
    from perdure.kernel.session import Session
    from perdure.tasks.derive import Host

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
C = TypeVar("C")


class Run(Generic[I, O, C]):
    """One call of one phase. It is dead, and what it commits refused, once the phase has moved on or was cancelled.

    ``input`` and ``checkpoint``: as the task's class declares them. ``results``: how the tasks it waited for ended, by
    id. ``aborting``: this is the abort handler. ``context``: cancelled with the run.
    """

    __slots__ = (
        "_session",
        "aborting",
        "checkpoint",
        "context",
        "ended",
        "fit",
        "host",
        "input",
        "moved",
        "phase",
        "record",
        "results",
        "state",
    )

    def __init__(
        self,
        session: Session,
        host: Host,
        record: TaskRecord,
        fit: Fit,
        *,
        context: Context,
        results: Mapping[int, Outcome],
        aborting: bool,
    ) -> None:
        assert isinstance(record.state, Running)
        self._session = session
        self.host = host
        self.record = record
        """As it was when the phase began."""
        self.state = record.state
        """As this run last left it: what its transactions must find."""
        self.fit = fit
        self.phase = fit.phase
        # Decoded as the definition declares them.
        self.input = cast("I", fit.input)
        self.checkpoint = cast("C", fit.checkpoint)
        self.context = context
        self.results = results
        self.aborting = aborting
        self.ended: str | None = None
        """Why this run is over, once it is."""
        self.moved = False
        """Whether its next state was committed."""

    @property
    def id(self) -> int:
        """The task's."""
        return self.record.id

    @property
    def conversation_id(self) -> int:
        """The conversation that the task is in."""
        return self.record.conversation_id

    @property
    def restarts(self) -> int:
        """How often its runs were cut off since it last made progress."""
        return self.record.restarts

    @property
    def idempotency_key(self) -> str:
        """For the outside world: the same in every run of this task, and in no other task anywhere (rule K30)."""
        return f"{self._session.info.log_id}-{self.record.nonce}"

    @property
    def session(self) -> Session:
        """Raises RunEnded once the run has ended."""
        self.check()
        return self._session

    @property
    def signal(self) -> JsonValue:
        """The value of the signal it waited for; None: it waited for none, or the deadline passed first."""
        if self.state.signal is None or self.state.timed_out:
            return None
        value = stored_value(self.record.raw_signals, self.state.signal)
        return None if value is None else from_raw(value)

    @property
    def timed_out(self) -> bool:
        """The deadline of the wait for a signal passed first."""
        return self.state.timed_out

    def check(self) -> None:
        """Raises RunEnded once the run has ended."""
        if self.ended is not None:
            raise RunEnded(f"this run of {self.record.kind} task {self.id} has ended: {self.ended}")

    def commit(self) -> RunTransaction[O]:
        """``async with run.commit() as tx: return tx.go(...)``: what the phase writes, and where it goes next.

        The task owns what it creates, and entries go to its conversation, unless said otherwise. Several commits in
        one phase are fine; the one with ``go``, ``complete``, ``wait`` and the like is the last.
        """
        self.check()
        return RunTransaction(self, self._session)

    async def memo(self, name: str, value: JsonValue) -> JsonValue:
        """Keep a JSON value under a name until the task is terminal; the first writer wins, and its value is returned.

        A commit of its own, if the name is new (rule T26). Raises NotJson, RunEnded.
        """
        self.check()
        record = self._session.live.settled.get(self.id)
        known = None if record is None else stored_value(record.raw_memos, name)
        if known is not None:
            return from_raw(known)
        async with self.commit() as tx:
            return tx.memo(name, value)
