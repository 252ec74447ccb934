"""The transaction of a running phase: the task's next state commits with all else it writes (rule T20)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import msgspec
from msgspec import structs
from typing_extensions import override

from perdure.kernel.errors import NotFound
from perdure.kernel.json import INT_MAX, JsonValue, check_json
from perdure.kernel.records import (
    Aborted,
    Completed,
    Completing,
    Failed,
    Outcome,
    Running,
    Sleeping,
    TaskError,
    TaskRecord,
    TaskState,
    Waiting,
    WaitPolicy,
    from_raw,
    to_raw,
)
from perdure.kernel.transaction import Transaction
from perdure.tasks.definition import Next
from perdure.tasks.derive import SIBLING_ENDED, mark, wait_is_over
from perdure.tasks.errors import InvalidMove, NoProgress, RunEnded, WaitCycle
from perdure.tasks.values import check_name, stored_value, with_value

if TYPE_CHECKING:
    from perdure.kernel.session import Session
    from perdure.tasks.run import Run

O = TypeVar("O")  # noqa: E741
C = TypeVar("C")

MAX_WAITED = 1_000
"""Tasks one wait may name."""


class RunTransaction(Transaction, Generic[O]):
    """Made by ``run.commit()``.

    One of ``go``, ``complete``, ``fail``, ``wait``, ``wait_signal``, ``sleep`` (in an abort handler ``abort``,
    ``complete`` or ``fail``) says what comes next, and ends the phase once the block has committed.
    """

    # The phase's own input and checkpoint types play no part here.
    def __init__(self, run: Run[Any, O, Any], session: Session) -> None:
        super().__init__(session, conversation_id=run.conversation_id, by_task=run.id, context=run.context)
        self.default_owner = run.id
        self._run = run
        self._next: Next[O] | None = None

    # --- the block ---------------------------------------------------------------------------------------------

    @override
    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            self._check_current()
        except RunEnded as error:
            await super().__aexit__(type(error), error, None)
            raise
        return self

    @override
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        if error is None:
            try:
                await self._check_wait()
                if self._next is None and run.state.fresh and self._has_intent():
                    own = self._own()
                    assert isinstance(own.state, Running), "without a move it is still where the run began"
                    self._stay(own, structs.replace(own.state, fresh=False))
            except BaseException as refusal:
                await super().__aexit__(type(refusal), refusal, refusal.__traceback__)
                raise
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            # Once it is staged it settles, even if this block ends by its caller's cancellation.
            if self._settled is not None:
                own = self.changed_tasks.get(run.id)
                if self._next is not None:
                    run.moved = True
                elif own is not None and isinstance(own.state, Running):
                    run.state = own.state

    def _check_current(self) -> None:
        """What the run rests on must still be so: nobody aborted the task or moved it on meanwhile."""
        run = self._run
        run.check()
        record = self.live_task(run.id)
        if run.moved or record is None or record.state is not run.state:
            # Identity: whatever moves a task makes a new state, and what only adds to its record keeps it.
            raise RunEnded(f"this run of {run.record.kind} task {run.id} has moved the task on already")
        if record.abort_requested and not run.aborting:
            raise RunEnded(f"{run.record.kind} task {run.id} is being aborted; what its run writes now is refused")

    def _has_intent(self) -> bool:
        """Whether this transaction stores something the run may later rest on (T29)."""
        records = self._tasks, self._entries, self._conversations, self._submissions, self._replies, self._retired
        return any(records) or (not self.progress and any(d.born or d.recorder.ops for d in self._drafts.values()))

    def _own(self) -> TaskRecord:
        record = self.live_task(self._run.id)
        assert record is not None, "checked as the block began"
        return record

    def _put(self, record: TaskRecord, state: TaskState, **changes: object) -> None:
        """The task's record with a new state; of an older version, its input is stored as migrated."""
        migrated = self._run.fit.migrated
        if migrated is not None and record.version < migrated.version:
            changes |= {"version": migrated.version, "raw_input": to_raw(migrated.input)}
        self.put_task(structs.replace(record, state=state, **changes))

    def _stay(self, record: TaskRecord, state: TaskState, **changes: object) -> None:
        """The task's record where it stands; of an older version, the checkpoint too is stored as migrated."""
        migrated = self._run.fit.migrated
        if migrated is not None and record.version < migrated.version:
            assert isinstance(state, Running), "its first write is not a move, so it is where the run began"
            state = structs.replace(state, phase=migrated.phase, raw_checkpoint=to_raw(migrated.checkpoint))
        self._put(record, state, **changes)

    # --- where the task goes next -------------------------------------------------------------------------------

    def go(self, phase: Callable[[Run[Any, O, C]], Coroutine[Any, Any, Next[O]]], checkpoint: C) -> Next[O]:
        """On to a phase with its checkpoint, at once. Raises NoProgress if that is where the task stands already."""
        self._not_aborting("go on to a phase")
        name, raw = self._at(phase, checkpoint)
        state = self._run.state
        if (name, raw) == (state.phase, state.raw_checkpoint) and self._run.fit.migrated is None:
            raise NoProgress(
                f"{self._run.record.kind} task {self._run.id} goes to {name} with the checkpoint it has already; "
                "change the checkpoint, wait or sleep"
            )
        return self._move(Running(phase=name, raw_checkpoint=raw))

    def complete(self, result: O) -> Next[O]:
        """The outcome: completed. Raises NotJson for what is not of the result type."""
        return self._decide(Completed(self._run.fit.task.definition.result.encode(result)))

    def fail(self, code: str, message: str) -> Next[O]:
        """The outcome: failed, by the task's own word. Work it still owns is aborted (T61)."""
        return self._decide(Failed(TaskError(_text(code, "code"), _text(message, "message"))))

    def abort(self, reason: str) -> Next[O]:
        """The outcome: aborted. Only an abort handler says so."""
        if not self._run.aborting:
            raise InvalidMove("abort() is for on_abort; a phase completes or fails, and abort_task() aborts a task")
        return self._decide(Aborted(_text(reason, "reason")))

    def wait(
        self,
        on: Sequence[int],
        then: Callable[[Run[Any, O, C]], Coroutine[Any, Any, Next[O]]],
        checkpoint: C,
        *,
        policy: WaitPolicy = "all_settled",
    ) -> Next[O]:
        """Wait until every named task is terminal, then go on in ``then``; ``run.results`` has their outcomes.

        Any tasks may be named, ended ones too. ``fail_fast``: only owned children; the first that ends or holds other
        than completed aborts the rest (T62-T66). As the block ends, NotFound, InvalidMove or WaitCycle may be raised.
        """
        self._not_aborting("wait")
        named = tuple(dict.fromkeys(on))
        if any(type(id) is not int for id in named):
            raise InvalidMove("a wait names tasks by their ids, which are ints")
        if len(named) > MAX_WAITED:
            raise InvalidMove(f"a wait names at most {MAX_WAITED} tasks, not {len(named)}")
        name, raw = self._at(then, checkpoint)
        return self._move(Waiting(phase=name, raw_checkpoint=raw, on=named, policy=policy))

    def wait_signal(
        self,
        name: str,
        then: Callable[[Run[Any, O, C]], Coroutine[Any, Any, Next[O]]],
        checkpoint: C,
        *,
        deadline: int | None = None,
    ) -> Next[O]:
        """Wait for a signal, or until ``deadline`` (ms UTC): ``run.signal`` has its value, or ``run.timed_out`` is set.

        A signal that came before the wait counts (T24).
        """
        self._not_aborting("wait")
        check_name(name)
        if deadline is not None:
            _time(deadline, "deadline")
        phase, raw = self._at(then, checkpoint)
        return self._move(Waiting(phase=phase, raw_checkpoint=raw, signal=name, deadline=deadline))

    def sleep(
        self, until: int, then: Callable[[Run[Any, O, C]], Coroutine[Any, Any, Next[O]]], checkpoint: C
    ) -> Next[O]:
        """Sleep until a time (ms UTC of the session's clock), over restarts too, then go on in ``then`` (T21)."""
        self._not_aborting("sleep")
        phase, raw = self._at(then, checkpoint)
        return self._move(Sleeping(phase=phase, raw_checkpoint=raw, until=_time(until, "until")))

    def abort_owned(self, reason: str) -> None:
        """Abort, with this commit, the ordinary work that the task owns: beside ``complete``, which alone would wait
        for it to end by itself (rules T54, T61)."""
        self.check_open()
        run = self._run
        for record in list(run.host.tree.owned(run.id, self.live_task)):
            if not record.abort_requested:
                self.put_task(mark(run.host, record, reason))

    def went_on(self) -> None:
        """Set the count of restarts back where the task stands: what it waits for goes on, and has a count of its own
        (rules T40 to T42)."""
        self.check_open()
        record = self._own()
        self._stay(record, record.state, restarts=0)

    def memo(self, name: str, value: JsonValue) -> JsonValue:
        """Like ``run.memo``, in this commit."""
        record = self._own()
        held = stored_value(record.raw_memos, name)
        if held is not None:
            return from_raw(held)
        added = with_value(record.raw_memos, name, to_raw(value, at=f"memo {name!r}"))
        assert added is not None, "the name is free"
        self._stay(record, record.state, raw_memos=added)
        return value

    # --- inside ------------------------------------------------------------------------------------------------

    def _at(self, phase: Callable[..., object], checkpoint: object) -> tuple[str, msgspec.Raw]:
        definition = self._run.fit.task.definition
        name = definition.name_of(phase)
        return name, definition.phase(name).encode(checkpoint)

    def _not_aborting(self, what: str) -> None:
        if self._run.aborting:
            raise InvalidMove(f"an abort handler cannot {what}; it decides the outcome (rule T83)")

    def _decide(self, outcome: Outcome) -> Next[O]:
        return self._move(Completing(outcome))

    def _move(self, state: TaskState) -> Next[O]:
        self.check_open()
        if self._next is not None:
            raise InvalidMove(f"this block has moved the task on already: {self._next}; one block makes one move")
        self._put(self._own(), state, restarts=0)
        self._next = Next(type(state).__name__.lower())
        return self._next

    async def _check_wait(self) -> None:
        """What a wait names must exist, and be able to end without this task (T64, T67, T68)."""
        run = self._run
        own = self.live_task(run.id)
        if self._next is None or own is None or not isinstance(own.state, Waiting):
            return
        self._check_waits_for_more(own, own.state)
        if not own.state.on:
            return
        state, kind, tree = own.state, own.kind, run.host.tree
        for conversation in self.new_conversations.values():
            tree.add_conversation(conversation.id, conversation.owner)
        for record in self.changed_tasks.values():
            if not tree.knows(record.conversation_id):
                tree.add_conversation(record.conversation_id, (await self.conversation(record.conversation_id)).owner)
            tree.add_task(record)
        failed = False
        for id in state.on:
            record = self.live_task(id)
            if record is None:
                try:
                    record = await self.task(id)
                except NotFound:
                    raise NotFound(f"{kind} task {run.id} waits for task {id}, which does not exist") from None
            if state.policy == "fail_fast" and record.owner != run.id:
                raise InvalidMove(
                    f"{kind} task {run.id} waits fail_fast for task {id}, which it does not own; "
                    "use all_settled (rule T63)"
                )
            failed = failed or (record.outcome is not None and not isinstance(record.outcome, Completed))
        cycle = tree.cycle(run.id, state.on, self.live_task)
        if cycle is not None:
            raise WaitCycle(cycle)
        if failed and state.policy == "fail_fast":
            for id in state.on:
                record = self.live_task(id)
                if record is not None and not record.abort_requested:
                    self.put_task(mark(run.host, record, SIBLING_ENDED))

    def _check_waits_for_more(self, own: TaskRecord, state: Waiting) -> None:
        """A wait that is over already, and leads to where the run stands, would go round for ever (T18, T19)."""
        was = self._run.state
        if was.timed_out or (was.phase, was.raw_checkpoint, was.on, was.signal) != (
            state.phase,
            state.raw_checkpoint,
            state.on,
            state.signal,
        ):
            return
        if wait_is_over(state, own, self.live_task):
            raise NoProgress(
                f"{own.kind} task {own.id} waits again for what it waited for already, and goes on where it stands; "
                "change the checkpoint, or wait for something else"
            )


def _text(value: str, what: str) -> str:
    if type(value) is not str:
        raise InvalidMove(f"{what} is a str, not {type(value).__name__}")
    check_json(value, at=what)
    return value


def _time(value: int, what: str) -> int:
    """A point in time, as the session's clock counts it."""
    if type(value) is not int or not 0 <= value <= INT_MAX:
        raise InvalidMove(f"{what} is a time in whole milliseconds UTC, not {value!r}")
    return value
