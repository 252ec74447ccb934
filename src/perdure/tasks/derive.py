"""What follows from a transaction's candidate records, derived before it is staged, in the same commit.

A new task begins running while the scheduler runs (T28). New owned work needs a live, unaborted owner (T52). A decided
outcome is held until the owned work has ended, and lets the owner above go on (T54, T55). A waiter resumes with the
last task it waits for (T66) or with its signal (T24). Abort marks reach the owned work (T72), and so does a held
outcome other than completed (T61).

Each rule only looks at records as they are now, so that one commit may carry a whole cascade: a child ends, its owner
becomes terminal, and the task that waited for that owner runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable
from inspect import isawaitable
from typing import Literal, Protocol, TypeAlias

from msgspec import structs

from perdure.kernel.errors import InvalidTransition
from perdure.kernel.records import (
    NULL,
    Aborted,
    Completed,
    Completing,
    Failed,
    Faulted,
    Orphaned,
    Outcome,
    Pending,
    Running,
    Sleeping,
    TaskError,
    TaskRecord,
    Terminal,
    Waiting,
)
from perdure.kernel.reports import Report
from perdure.kernel.transaction import Transaction
from perdure.tasks.blocking import Blocked
from perdure.tasks.errors import OwnerEnded, is_own_failure
from perdure.tasks.ownership import Look, WorkTree
from perdure.tasks.registry import AnyTask
from perdure.tasks.values import stored_value

Mode: TypeAlias = Literal["off", "aborting", "on"]
"""Nothing runs; only abort handlers run (T39); everything that is due runs."""

MAX_ROUNDS = 10
"""Clean-ups may write tasks, from which more may follow; more rounds than this are a runaway."""

OWNER_ABORTED = "owner aborted"
OWNER_ENDED = "owner ended"
SIBLING_ENDED = "sibling did not complete"


class Host(Protocol):
    """What the rules ask of the runtime beside the records."""

    @property
    def tree(self) -> WorkTree: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def restart_limit(self) -> int: ...
    def before(self, id: int) -> TaskRecord | None:
        """The live task as the transactions staged earlier leave it."""
        ...

    def is_live(self, id: int) -> bool:
        """Whether a task is live to anybody: as of the settled commits, or with the staged ones."""
        ...

    def is_active(self, id: int) -> bool:
        """Whether code of the task runs right now."""
        ...

    def verdict(self, record: TaskRecord, *, closely: bool = False) -> AnyTask | Blocked:
        """The code that fits it, or why none does. ``closely``: the stored values too, and not the versions alone."""
        ...

    def code(self, kind: str) -> AnyTask | None: ...
    def report(self, report: Report) -> None: ...


# --- single records: pure ---------------------------------------------------------------------------------------


def began(record: TaskRecord, at: int, *, fresh: bool = False) -> TaskRecord:
    """The record running at the place it stands."""
    state = record.state
    assert not isinstance(state, (Completing, Terminal)), "a decided task never runs again"
    running = Running(
        phase=state.phase,
        raw_checkpoint=state.raw_checkpoint,
        on=state.on,
        signal=state.signal,
        timed_out=state.timed_out,
        fresh=fresh,
    )
    return structs.replace(record, state=running, started_at=at if record.started_at is None else record.started_at)


def stood_down(record: TaskRecord, *, timed_out: bool = False) -> TaskRecord:
    """The record pending at the place it stands."""
    state = record.state
    assert not isinstance(state, (Completing, Terminal)), "a decided task is never pending again"
    pending = Pending(
        phase=state.phase,
        raw_checkpoint=state.raw_checkpoint,
        on=state.on,
        signal=state.signal,
        timed_out=timed_out or state.timed_out,
    )
    return structs.replace(record, state=pending)


def mark(host: Host, record: TaskRecord, reason: str) -> TaskRecord:
    """The record with its abort mark. A blocked task is settled orphaned (T82); marking is progress (T41)."""
    state = record.state
    if not isinstance(state, Completing) and not host.is_active(record.id):
        verdict = host.verdict(record, closely=True)
        # While nothing may run, lack of code settles nothing yet; that it is parked would be forgotten.
        if isinstance(verdict, Blocked) and (host.mode != "off" or verdict.reason == "parked"):
            state = Completing(Orphaned(verdict.reason))
    return structs.replace(record, abort_requested=True, abort_reason=reason, restarts=0, state=state)


def decided(record: TaskRecord, outcome: Outcome) -> TaskRecord:
    """The record holding its outcome."""
    return structs.replace(record, state=Completing(outcome))


def doomed(record: TaskRecord) -> bool:
    """Whether what it owns is to be aborted: it is itself, or it holds an outcome other than completed."""
    return record.abort_requested or not isinstance(record.outcome, Completed | None)


def wait_is_over(state: Waiting, record: TaskRecord, look: Look) -> bool:
    if state.signal is not None:
        return stored_value(record.raw_signals, state.signal) is not None
    return all(look(id) is None for id in state.on)


# --- the whole of a transaction ---------------------------------------------------------------------------------


class Derivation:
    """Registered with the session: called with each transaction before it is staged."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __call__(self, tx: Transaction) -> Awaitable[None] | None:
        if not tx.changed_tasks and not tx.new_conversations:
            return None
        self._host.tree.trim(self._host.is_live)
        candidate = _Candidate(self._host, tx)
        if self._unknown(tx):
            return self._go_on(candidate)
        self._derive(candidate)
        return self._go_on(candidate) if candidate.cleanups else None

    async def _go_on(self, candidate: _Candidate) -> None:
        """What has to read, or runs the clean-ups of tasks that ended; more may follow from what those write."""
        for _ in range(MAX_ROUNDS):
            await candidate.clean_up()
            for id in self._unknown(candidate.tx):
                self._host.tree.add_conversation(id, (await candidate.tx.conversation(id)).owner)
            self._derive(candidate)
            if not candidate.cleanups:
                return
        raise InvalidTransition("clean-ups keep ending tasks that need clean-ups")

    def _unknown(self, tx: Transaction) -> set[int]:
        """Conversations whose owner has to be read first."""
        tree, new = self._host.tree, tx.new_conversations
        ids = {record.conversation_id for record in tx.changed_tasks.values()}
        return {id for id in ids if id not in new and not tree.knows(id)}

    def _derive(self, candidate: _Candidate) -> None:
        tx = candidate.tx
        for conversation in tx.new_conversations.values():
            if candidate.is_new(conversation.id):
                self._host.tree.add_conversation(conversation.id, conversation.owner)
                if conversation.owner is not None:
                    self._check_owner(tx, conversation.owner, f"conversation {conversation.id}", direct=True)
        for record in list(tx.changed_tasks.values()):
            if self._host.before(record.id) is None and record.live and candidate.is_new(record.id):
                self._check_place(tx, record)
                candidate.born(record)
            candidate.look_at(record.id)
        candidate.run()

    def advance(self, tx: Transaction, record: TaskRecord) -> None:
        """Inside a transaction: decide a marked task that may be due; the rest follows as it is staged."""
        _Candidate(self._host, tx).decide(record)

    # --- who may own new work ----------------------------------------------------------------------------------

    def _check_place(self, tx: Transaction, record: TaskRecord) -> None:
        what = f"task {record.id} ({record.kind})"
        if record.owner is not None:
            owner = self._check_owner(tx, record.owner, what, direct=True)
            if owner.conversation_id != record.conversation_id:
                raise OwnerEnded(
                    f"{what} of conversation {record.conversation_id} cannot be owned by task {owner.id} of "
                    f"conversation {owner.conversation_id}; pass owner=None, or create it in the owner's conversation"
                )
        else:
            above = self._host.tree.conversation_owner(record.conversation_id)
            if above is not None:
                self._check_owner(tx, above, what, direct=False)

    def _check_owner(self, tx: Transaction, id: int, what: str, *, direct: bool) -> TaskRecord:
        """New owned work needs a live, unaborted owner (T52), judged before this transaction's own moves.

        What a task owns directly only its own code adds, and none of that runs once its outcome is held; the work of
        a conversation may go on below an owner that completed.
        """
        owner = self._host.before(id) or tx.changed_tasks.get(id)
        now = tx.changed_tasks.get(id, owner)
        why: str | None = None
        if owner is None or not owner.live:
            why = "has ended or does not exist"
        elif owner.abort_requested:
            why = "is being aborted"
        elif isinstance(owner.state, Completing) and (direct or not isinstance(owner.state.outcome, Completed)):
            why = "has its outcome already and only waits for the work it owns"
        elif now is not None and now.outcome is not None and not isinstance(now.outcome, Completed):
            why = "ends without completing in this same commit"
        if why is not None:
            raise OwnerEnded(f"{what} cannot be created: its owner, task {id}, {why}")
        assert owner is not None
        return owner


class _Candidate:
    """One transaction's records, worked through until nothing more follows."""

    def __init__(self, host: Host, tx: Transaction) -> None:
        self.host = host
        self.tx = tx
        self.look = tx.live_task
        self.todo: deque[int] = deque()
        self.queued: set[int] = set()
        """What is in ``todo``: however many of its children end, an owner is looked at once."""
        self.new: set[int] = set()
        """Tasks and conversations of this transaction that were seen."""
        self.over: set[int] = set()
        """Tasks that became terminal here."""
        self.spread: set[int] = set()
        """Tasks whose owned work was marked in this round."""
        self.cleanups: list[tuple[AnyTask, TaskRecord]] = []

    def is_new(self, id: int) -> bool:
        """Whether it is seen for the first time."""
        new = id not in self.new
        self.new.add(id)
        return new

    def look_at(self, id: int) -> None:
        if id not in self.queued:
            self.queued.add(id)
            self.todo.append(id)

    def put(self, record: TaskRecord) -> None:
        self.tx.put_task(record)
        self.look_at(record.id)

    def run(self) -> None:
        self.spread.clear()
        while self.todo:  # each step moves a record forward on its way to terminal, so this ends
            id = self.todo.popleft()
            self.queued.discard(id)
            record = self.tx.changed_tasks.get(id) or self.look(id)
            if record is not None:
                self.consider(record)

    def born(self, record: TaskRecord) -> None:
        host = self.host
        host.tree.add_task(record)
        if isinstance(record.state, Pending) and host.mode == "on" and not isinstance(host.verdict(record), Blocked):
            self.tx.put_task(began(record, self.tx.at, fresh=record.state.raw_checkpoint == NULL))

    def consider(self, record: TaskRecord) -> None:
        state = record.state
        if doomed(record):
            self.mark_owned(record)
        if isinstance(state, Completing):
            if not isinstance(state.outcome, Completed):
                self.fail_fast(record)
            if not self.host.tree.owns_live(record.id, self.look):
                self.end(record, state.outcome)
        elif isinstance(state, Terminal):
            if record.id not in self.over:
                raise InvalidTransition(
                    f"task {record.id} was put as terminal; put its outcome as completing, and it becomes terminal "
                    "once the work it owns has ended (rule T54)"
                )
        elif record.abort_requested:
            self.decide(record)
        elif isinstance(state, Waiting):
            self.host.tree.add_wait(record.id, state.on, self.look)
            if wait_is_over(state, record, self.look):
                self.tx.put_task(resumed(self.host, record, self.tx.at))

    # --- ending ------------------------------------------------------------------------------------------------

    def end(self, record: TaskRecord, outcome: Outcome) -> None:
        record = structs.replace(record, state=Terminal(outcome), ended_at=self.tx.at)
        self.tx.put_task(record)
        self.over.add(record.id)
        # Whoever this may let go on is looked at: its owner, and its waiters.
        above = self.host.tree.owner_task(record)
        if above is not None:
            self.look_at(above)
        for waiter in self.host.tree.waiters(record.id, self.look):
            self.look_at(waiter.id)
        # An outcome that the scheduler wrote does its clean-up in the commit that ends the task (T60).
        if not isinstance(outcome, (Completed, Failed)):
            task = self.host.code(record.kind)
            handled = task is not None and isinstance(outcome, Aborted) and task.definition.handles_abort
            if task is not None and task.definition.cleans_up and not handled:
                self.cleanups.append((task, record))

    async def clean_up(self) -> None:
        cleanups, self.cleanups = self.cleanups, []
        self.tx.default_owner = None  # whoever happens to commit does not own what is made here
        for task, record in cleanups:
            try:
                more = task.cleanup(self.tx, record)
                if isawaitable(more):
                    await more
            except BaseException as error:
                if not is_own_failure(error):
                    raise
                # The task's own code: the task ends all the same.
                self.host.report(
                    Report(
                        type="cleanup_failed",
                        message="the clean-up of an ended task raised; what it had written before stands",
                        task=record.id,
                        kind=record.kind,
                        conversation=record.conversation_id,
                        error=error,
                    )
                )

    # --- aborting ----------------------------------------------------------------------------------------------

    def mark(self, record: TaskRecord, reason: str) -> None:
        if not record.abort_requested:
            self.put(mark(self.host, record, reason))

    def mark_owned(self, record: TaskRecord) -> None:
        """Once: a task that was doomed before this transaction has marked what it owns, and gets no new work (T52)."""
        before = self.host.before(record.id)
        if record.id in self.spread or (before is not None and doomed(before)):
            return
        self.spread.add(record.id)
        reason = OWNER_ABORTED if record.abort_requested else OWNER_ENDED
        for child in list(self.host.tree.owned(record.id, self.look)):
            self.mark(child, reason)

    def fail_fast(self, ended: TaskRecord) -> None:
        """The first of a fail_fast wait that ends or holds other than completed aborts the rest (T65)."""
        for waiter in self.host.tree.waiters(ended.id, self.look):
            if isinstance(waiter.state, Waiting) and waiter.state.policy == "fail_fast" and not doomed(waiter):
                for id in waiter.state.on:
                    other = self.look(id)
                    if other is not None and id != ended.id:
                        self.mark(other, SIBLING_ENDED)

    def decide(self, record: TaskRecord) -> None:
        """What becomes of a marked task once its code has stopped and its owned work has ended (T72, T73)."""
        host = self.host
        if host.mode == "off" or host.is_active(record.id) or host.tree.owns_live(record.id, self.look):
            return
        task = host.verdict(record, closely=True)
        if isinstance(task, Blocked):
            self.put(decided(record, Orphaned(task.reason)))
        elif record.restarts >= host.restart_limit:
            error = TaskError("restart_limit", f"its abort handler was cut off {record.restarts} times")
            self.put(decided(record, Faulted(error)))
        elif not task.definition.handles_abort:
            self.put(decided(record, Aborted(record.abort_reason or "aborted")))
        elif not isinstance(record.state, Running):
            self.tx.put_task(began(record, self.tx.at))


def resumed(host: Host, record: TaskRecord, at: int, *, timed_out: bool = False) -> TaskRecord:
    """A waiting or sleeping task that is due: running if the scheduler runs and code fits, else pending."""
    assert isinstance(record.state, (Waiting, Sleeping))
    due = stood_down(record, timed_out=timed_out)
    if host.mode != "on" or isinstance(host.verdict(due), Blocked):
        return due
    return began(due, at)
