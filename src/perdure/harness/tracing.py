"""What becomes telemetry: runs, attempts, calls and compactions, as settled commits and a few places of code show them.

It exists only in a harness that was given telemetry (rule H281). Nothing of it is stored. Runs, calls and compactions
are told from the commits that change their tasks, so that what is told is what is in the record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

import msgspec

from perdure.harness.documents import COMPACTION
from perdure.harness.messages import AssistantMessage
from perdure.harness.model import Answers, Deferred, Finished, ModelError, ModelEvent, ModelRequest
from perdure.harness.registry import Registry
from perdure.harness.runlog import code_of, ending_of, failure_code, inputs_of, outcome_of
from perdure.harness.runs import GENERATION
from perdure.harness.scopes import TOOL_TASK
from perdure.harness.telemetry import (
    AttemptBegan,
    AttemptEnded,
    Began,
    CallBegan,
    CallEnded,
    CallRecovery,
    CommitStored,
    CompactionBegan,
    CompactionEnded,
    Ended,
    Fact,
    Left,
    Operation,
    Place,
    Retried,
    RunBegan,
    RunEnded,
    TasksChanged,
    Telemetry,
)
from perdure.harness.usage import countable
from perdure.kernel.records import Running, TaskRecord, Terminal
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Settled, Straggler
from perdure.kernel.storage import Batch
from perdure.tasks.runtime import TaskRuntime

T = TypeVar("T")

TOLD = frozenset({GENERATION, TOOL_TASK, COMPACTION})
"""Kinds of tasks that are operations."""


class _Named(msgspec.Struct, frozen=True):
    """What of the input of a call is looked at."""

    name: str


class _Reason(msgspec.Struct, frozen=True):
    """What of the input of a compaction is looked at."""

    reason: str


class Tracing:
    """Made before the task runtime is: it sees a commit before the code that the commit allows runs, and at the end it
    is told last, when none runs any more."""

    def __init__(self, telemetry: Telemetry, session: Session, registry: Registry) -> None:
        self._telemetry = telemetry
        self._session = session
        self._registry = registry
        self._tasks: TaskRuntime | None = None
        self._found = frozenset(session.live.settled)
        """Tasks that were live as the store was opened."""
        self._under_way: dict[int, Operation] = {}
        """By task, each begun after what it is a part of."""
        self._raised: dict[int, str] = {}
        """By call: the type of what its tool raised."""
        self._recovered: dict[int, CallRecovery] = {}
        self._counted = (0, 0)
        """Live and blocked tasks, as told."""
        self._broken = False
        session.on_staged(self._staged)
        session.observe(self._settled)
        session.on_stop(self._stop)

    def attach(self, tasks: TaskRuntime) -> None:
        """The session's runtime, as soon as it is there."""
        self._tasks = tasks
        tasks.on_blocked(lambda _: self._recount())  # neither takes a commit
        tasks.on_unblocked(lambda _: self._recount())
        if not self._session.info.read_only:  # else they are counted where the store is owned
            self._recount()  # what waits for long may not commit for long

    # --- what code tells ---------------------------------------------------------------------------------------

    def asked_for(self, models: Answers, record: TaskRecord) -> Answers:
        """The models, each of whose streams is told as an attempt of the task."""
        return _Asked(self, models, record)

    def fetched(self, request: ModelRequest, record: TaskRecord, outcome: AssistantMessage | ModelError) -> None:
        """What a deferred response came to: an attempt of its own, which has the tokens."""
        operation = self.begin_attempt(request, record)
        if operation is not None:
            how = _answered(outcome) if isinstance(outcome, AssistantMessage) else _failed(outcome)
            self.safely(lambda: operation.end(how))

    async def execute(self, record: TaskRecord, tool: str, call: Callable[[], Awaitable[object]]) -> object:
        """What the tool of a call gives or raises. It runs as a part of the call's operation."""
        operation = self._under_way.get(record.id) or self._begin_call(record, tool)
        try:
            with self.within(operation):
                return await call()
        except Exception as error:
            self._raised[record.id] = type(error).__name__
            raise
        finally:
            if operation is not None:
                self.safely(operation.done)

    def recovered(self, task: int, decision: CallRecovery) -> None:
        """What was decided about a call that had been cut off."""
        self._recovered[task] = decision

    def retried(self, code: str) -> None:
        self._tell(Retried(code))

    # --- what commits tell -------------------------------------------------------------------------------------

    def _staged(self, batch: Batch, stored: asyncio.Future[None]) -> None:
        clock, flushed = self._session.clock, not batch.progress
        handed = clock.monotonic()

        def tell(stored: asyncio.Future[None]) -> None:
            if not stored.cancelled() and stored.exception() is None:
                self._tell(CommitStored(seconds=clock.monotonic() - handed, flushed=flushed))

        stored.add_done_callback(tell)

    def _settled(self, settled: Settled) -> None:
        # The newest first: what a task owns ends before it does, also in one commit.
        for record in reversed(settled.batch.tasks):
            if record.kind in TOLD:
                if type(record.state) is Terminal:
                    self._end(record, settled)
                elif type(record.state) is Running and record.kind != TOOL_TASK:
                    self._operation(record)
        self._recount()

    def _end(self, record: TaskRecord, settled: Settled) -> None:
        operation = self._operation(record)
        self._under_way.pop(record.id, None)
        self._recovered.pop(record.id, None)
        raised = self._raised.pop(record.id, None)
        if operation is not None:
            how = self._ended(record, settled, raised)
            self.safely(lambda: operation.end(how))

    def _ended(self, record: TaskRecord, settled: Settled, raised: str | None) -> Ended:
        if record.kind == GENERATION:
            inputs = tuple(submission.id for submission in inputs_of(record, settled))
            return RunEnded(reason=ending_of(record, settled), submissions=inputs, seq=settled.seq)
        if record.kind == TOOL_TASK:
            return CallEnded(code=code_of(record, settled), raised=raised, seq=settled.seq)
        return CompactionEnded(outcome=outcome_of(record), code=failure_code(record), seq=settled.seq)

    def _recount(self) -> None:
        self._count(len(self._session.live.settled), 0 if self._tasks is None else len(self._tasks.blocked_tasks))

    def _count(self, live: int, blocked: int) -> None:
        before, self._counted = self._counted, (live, blocked)
        if before != self._counted:
            self._tell(TasksChanged(live - before[0], blocked - before[1]))

    async def _stop(self, _: int) -> Sequence[Straggler]:
        """What was staged settles first: it may end some of them."""
        with suppress(Exception):
            await self._session.wait_staged(None)
        for operation in reversed(self._under_way.values()):
            self.safely(lambda operation=operation: operation.end(Left()))
        self._under_way.clear()
        self._count(0, 0)
        return ()

    # --- operations --------------------------------------------------------------------------------------------

    def _operation(self, record: TaskRecord) -> Operation | None:
        """That of a task, begun here if it was not. None: the back end fails."""
        known = self._under_way.get(record.id)
        if known is not None:
            return known
        if record.kind == TOOL_TASK:
            return self._begin_call(record, None)
        place, resumed = self._place(record), record.id in self._found
        if record.kind == GENERATION:
            return self._begin(record, RunBegan(place=place, resumed=resumed))
        reason = msgspec.json.decode(record.raw_input, type=_Reason).reason
        return self._begin(record, CompactionBegan(place=place, reason=reason, resumed=resumed))

    def _begin_call(self, record: TaskRecord, tool: str | None) -> Operation | None:
        """``tool``: as its definition names it; None: as the model did, if there is one of that name."""
        if tool is None:
            wanted = msgspec.json.decode(record.raw_input, type=_Named).name
            tool = wanted if self._registry.has_tool(wanted) else None
        recovery = self._recovered.get(record.id)
        return self._begin(record, CallBegan(place=self._place(record), tool=tool, recovery=recovery))

    def _begin(self, record: TaskRecord, what: Began) -> Operation | None:
        operation = self._under(self._above(record), what)
        if operation is not None:
            self._under_way[record.id] = operation
        return operation

    def begin_attempt(self, request: ModelRequest, record: TaskRecord) -> Operation | None:
        what = AttemptBegan(
            place=self._place(record), model=request.model, attempt=request.attempt, max_output=request.max_output
        )
        return self._under(self._operation(record), what)

    def _under(self, above: Operation | None, what: Began) -> Operation | None:
        return self.safely(lambda: self._telemetry.begin(what, above))

    def _above(self, record: TaskRecord) -> Operation | None:
        """The run of a call or a compaction, or the call that owns the conversation of a run."""
        tree = None if self._tasks is None else self._tasks.tree
        owner = record.owner
        if owner is None and tree is not None and tree.knows(record.conversation_id):
            owner = tree.owner_task(record)
        above = None if owner is None else self._session.live.settled.get(owner)
        return None if above is None or above.kind not in TOLD else self._operation(above)

    def _place(self, record: TaskRecord) -> Place:
        session = self._session
        return Place(
            log_id=session.info.log_id, conversation_id=record.conversation_id, task=record.id, seq=session.seq
        )

    # --- back ends that fail -----------------------------------------------------------------------------------

    def within(self, operation: Operation | None) -> _Within:
        """What runs inside belongs to the operation; entered as often as one likes."""
        return _Within(self, None if operation is None else self.safely(operation.current))

    def _tell(self, fact: Fact) -> None:
        self.safely(lambda: self._telemetry.tell(fact))

    def safely(self, call: Callable[[], T]) -> T | None:
        """None also if it raises, which is reported once."""
        try:
            return call()
        except Exception as error:
            self.failed(error)
            return None

    def failed(self, error: Exception) -> None:
        """A back end's own code raised: no work rests on it (rule H287)."""
        if not self._broken:
            self._broken = True
            message = "telemetry raised; what it lacks from here on is not told again"
            self._session.report(Report(type="telemetry_failed", message=message, error=error))


class _Within:
    """An operation is current inside. Neither the beginning nor the end fails, and it sees no exception."""

    __slots__ = ("_current", "_entered", "_tracing")

    def __init__(self, tracing: Tracing, current: AbstractContextManager[object] | None) -> None:
        self._tracing = tracing
        self._current = current
        self._entered = False

    def __enter__(self) -> None:
        if self._current is not None:
            try:
                self._current.__enter__()
                self._entered = True
            except Exception as error:
                self._tracing.failed(error)

    def __exit__(self, *_: object) -> None:
        if self._entered:
            assert self._current is not None, "it was entered"
            self._entered = False
            try:
                self._current.__exit__(None, None, None)
            except Exception as error:
                self._tracing.failed(error)


class _Asked:
    """Answers for one task."""

    def __init__(self, tracing: Tracing, models: Answers, record: TaskRecord) -> None:
        self._tracing = tracing
        self._models = models
        self._record = record

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        return _Attempt(self._tracing, self._models, request, self._record)


class _Attempt(AsyncIterator[ModelEvent]):
    """A model's stream, event by event as it comes, and what it came to. Its operation is current only while the
    adapter's code runs."""

    def __init__(self, tracing: Tracing, models: Answers, request: ModelRequest, record: TaskRecord) -> None:
        self._tracing = tracing
        self._operation = tracing.begin_attempt(request, record)
        self._within = tracing.within(self._operation)
        self._begun = False
        try:
            with self._within:
                self._stream = models.stream(request)
        except BaseException as error:
            self._end(_failed(error))
            raise

    async def __anext__(self) -> ModelEvent:
        try:
            with self._within:
                event = await anext(self._stream)
        except StopAsyncIteration:
            self._end(AttemptEnded(error="no_message"))
            raise
        except BaseException as error:
            self._end(_failed(error))
            raise
        if not self._begun and self._operation is not None:
            self._begun = True
            self._tracing.safely(self._operation.first)
        if isinstance(event, Finished):
            self._end(_answered(event.message))
        elif isinstance(event, Deferred):
            self._end(AttemptEnded(stop_reason="deferred"))
        return event

    async def aclose(self) -> None:
        """Closes the adapter's, if that can be closed. The operation of one that nobody reads to its end is over."""
        close = getattr(self._stream, "aclose", None)
        try:
            if close is not None:
                with self._within:
                    await close()
        finally:
            self._end(AttemptEnded(error="aborted"))

    def _end(self, how: AttemptEnded) -> None:
        operation, self._operation = self._operation, None
        if operation is not None:
            self._tracing.safely(lambda: operation.end(how))


def _answered(message: AssistantMessage) -> AttemptEnded:
    stop, usage = message.stop_reason, countable(message.usage)
    failed = stop if stop in ("error", "aborted") else None
    return AttemptEnded(error=failed, usage=usage, model=message.model, stop_reason=stop)


def _failed(error: BaseException) -> AttemptEnded:
    if isinstance(error, ModelError):
        return AttemptEnded(error=error.code, usage=error.usage and countable(error.usage))
    return AttemptEnded(error=type(error).__name__)
