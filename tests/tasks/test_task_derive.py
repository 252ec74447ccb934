"""What follows from a transaction's records, over random histories of transactions (rules T52-T61, T65, T66, T72)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from perdure.kernel.errors import InvalidTransition
from perdure.kernel.records import (
    Aborted,
    Completed,
    Completing,
    ConversationRecord,
    Failed,
    Faulted,
    Orphaned,
    Outcome,
    Pending,
    Running,
    TaskError,
    TaskRecord,
    Terminal,
    Waiting,
    check_task_move,
)
from perdure.kernel.reports import Report
from perdure.tasks import Next, OwnerEnded, Run, Task
from perdure.tasks.blocking import Blocked
from perdure.tasks.derive import Derivation, Mode, began, mark
from perdure.tasks.ownership import WorkTree
from perdure.tasks.registry import AnyTask


class Plain(Task[None, None], kind="t.plain"):
    async def start(self, run: Run[None, None, None]) -> Next[None]: ...


class Handler(Plain, kind="t.handler"):
    async def on_abort(self, run: Run[None, None, object]) -> Next[None]: ...


class FakeTransaction:
    """The part of a transaction that derivations use, over plain dicts."""

    def __init__(self, host: FakeHost) -> None:
        self.at = 7
        self.host = host
        self.new_conversations: dict[int, ConversationRecord] = {}
        self._own: dict[int, TaskRecord] = {}

    @property
    def changed_tasks(self) -> Mapping[int, TaskRecord]:
        return self._own

    def live_task(self, id: int) -> TaskRecord | None:
        own = self._own.get(id)
        return (own if own.live else None) if own is not None else self.host.live.get(id)

    def put_task(self, record: TaskRecord) -> None:
        old = self._own.get(record.id) or self.host.live.get(record.id)
        check_task_move(old, record)
        self._own[record.id] = record


class FakeHost:
    restart_limit = 3

    def __init__(self) -> None:
        self.tree = WorkTree()
        self.mode: Mode = "on"
        self.live: dict[int, TaskRecord] = {}
        self.every: dict[int, TaskRecord] = {}
        self.owners: dict[int, int | None] = {}
        self.active: set[int] = set()
        self.missing: set[str] = set()
        self.cleaned: list[int] = []
        self.reports: list[Report] = []
        self.derivation = Derivation(self)
        self.next_id = 1
        self.conversation(None)

    def before(self, id: int) -> TaskRecord | None:
        return self.live.get(id)

    def is_live(self, id: int) -> bool:
        return id in self.live

    def is_active(self, id: int) -> bool:
        return id in self.active

    def code(self, kind: str) -> AnyTask | None:
        return None if kind in self.missing else {"t.plain": Plain(), "t.handler": Handler()}[kind]

    def verdict(self, record: TaskRecord, *, closely: bool = False) -> AnyTask | Blocked:
        if record.restarts >= self.restart_limit and not record.abort_requested:
            return Blocked("parked")
        return self.code(record.kind) or Blocked("missing_task")

    def report(self, report: Report) -> None:
        self.reports.append(report)

    # --- doing ---

    def commit(self, tx: FakeTransaction) -> None:
        more = self.derivation(tx)  # pyright: ignore[reportArgumentType]
        assert more is None
        self.owners.update({c.id: c.owner for c in tx.new_conversations.values()})
        for record in tx.changed_tasks.values():
            self.every[record.id] = record
            if record.live:
                self.live[record.id] = record
                if isinstance(record.state, Running) and not record.abort_requested:
                    self.active.add(record.id)
                elif not isinstance(record.state, Running):
                    self.active.discard(record.id)
            else:
                self.live.pop(record.id, None)
                self.active.discard(record.id)
                self.tree.forget_task(record)

    def mint(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def conversation(self, owner: int | None) -> int:
        tx = FakeTransaction(self)
        id = self.mint()
        tx.new_conversations[id] = ConversationRecord(id=id, created_at=0, owner=owner)
        self.commit(tx)
        return id

    def create(
        self, conversation: int = 1, owner: int | None = None, kind: str = "t.plain", background: bool = False
    ) -> int:
        tx = FakeTransaction(self)
        id = self.mint()
        tx.put_task(new_task(id, conversation, owner, kind, background))
        self.commit(tx)
        return id

    def put(self, id: int, **changes: Any) -> None:
        tx = FakeTransaction(self)
        tx.put_task(structs.replace(self.live[id], **changes))
        self.commit(tx)

    def decide(self, id: int, outcome: Outcome) -> None:
        self.put(id, state=Completing(outcome))

    def abort(self, id: int) -> None:
        tx = FakeTransaction(self)
        tx.put_task(mark(self, self.live[id], "stop"))
        self.commit(tx)

    def stopped(self, id: int) -> None:
        """The code of a marked task has stopped; what the runtime then commits."""
        self.active.discard(id)
        tx = FakeTransaction(self)
        self.derivation.advance(tx, self.live[id])  # pyright: ignore[reportArgumentType]
        self.commit(tx)

    # --- the plain truth ---

    def chain(self, record: TaskRecord) -> Iterator[TaskRecord]:
        """The task and every task above it, ended ones too."""
        here: TaskRecord | None = record
        while here is not None:
            yield here
            above = here.owner if here.owner is not None else self.owners[here.conversation_id]
            here = None if above is None else self.every[above]

    def ordinary_above(self, record: TaskRecord) -> list[TaskRecord]:
        """The tasks whose ordinary owned work this one is."""
        found: list[TaskRecord] = []
        chain = list(self.chain(record))
        for below, above in pairwise(chain):
            if below.background:
                break
            found.append(above)
        return found


def new_task(id: int, conversation: int, owner: int | None, kind: str, background: bool) -> TaskRecord:
    return TaskRecord(
        id=id,
        conversation_id=conversation,
        kind=kind,
        version=1,
        created_at=0,
        state=Pending(phase="start"),
        owner=owner,
        background=background,
    )


DONE = Completed()
FAILED = Failed(TaskError("x", "y"))


def check_invariants(host: FakeHost) -> None:
    for record in host.every.values():
        owed = [r for r in host.live.values() if any(a.id == record.id for a in host.ordinary_above(r))]
        if isinstance(record.state, Terminal):
            assert not owed, "T54: terminal only when the ordinary owned work is"
            assert record.ended_at is not None
        elif isinstance(record.state, Completing):
            assert owed, "T54: terminal as soon as the ordinary owned work is"
        elif record.abort_requested and record.id not in host.active and not owed:
            assert record.kind == "t.handler", "T72: without a handler it ends once its work has"
            assert isinstance(record.state, Running), "T72: its handler's turn has come"
        if isinstance(record.state, Waiting) and not record.abort_requested:
            assert any(id in host.live for id in record.state.on), "T66: the last one's end resumes the waiter"
            if record.state.policy == "fail_fast":
                outcomes = [host.every[id].outcome for id in record.state.on]
                if any(o is not None and not isinstance(o, Completed) for o in outcomes):
                    rest = [host.live[id] for id in record.state.on if id in host.live]
                    assert all(r.abort_requested or r.outcome is not None for r in rest), "T65"
        bad = record.abort_requested or (record.outcome is not None and not isinstance(record.outcome, Completed))
        if bad and record.live:
            assert all(r.abort_requested for r in owed), "T61, T72: marks reach the owned work"


@settings(max_examples=150)
@given(st.data())
def test_T54_T61_T66_T72_hold_after_every_transaction(data: st.DataObject) -> None:
    host = FakeHost()
    for _ in range(data.draw(st.integers(1, 25))):
        live = sorted(host.live)
        step = data.draw(st.sampled_from(["create", "room", "finish", "wait", "abort", "stopped", "both"]))
        pick = data.draw(st.sampled_from(live)) if live else None
        record = None if pick is None else host.live[pick]
        free = record is not None and not record.abort_requested and not isinstance(record.state, Completing)
        if step == "create":
            kind = data.draw(st.sampled_from(["t.plain", "t.handler"]))
            try:
                if record is not None and data.draw(st.booleans()):
                    host.create(record.conversation_id, record.id, kind)
                else:
                    conversation = data.draw(st.sampled_from(sorted(host.owners)))
                    host.create(conversation, None, kind, background=data.draw(st.booleans()))
            except OwnerEnded:
                pass
        elif step == "room" and record is not None:
            try:
                host.conversation(record.id)
            except OwnerEnded:
                assert not free
        elif step == "finish" and record is not None:
            outcome = data.draw(st.sampled_from([DONE, FAILED, Aborted("x"), Faulted(TaskError("a", "b"))]))
            if not isinstance(record.state, Completing):
                host.decide(record.id, outcome)
        elif step == "wait" and record is not None and free:
            every = sorted(host.every)
            owned = [id for id in every if host.every[id].owner == record.id]
            if owned and data.draw(st.booleans()):
                on = data.draw(st.lists(st.sampled_from(owned), unique=True, max_size=3))
                refused = [host.every[id].outcome for id in on]
                if all(o is None or isinstance(o, Completed) for o in refused):
                    host.put(record.id, state=Waiting(phase="start", on=tuple(on), policy="fail_fast"))
            else:
                on = data.draw(st.lists(st.sampled_from(every), unique=True, max_size=3))
                if host.tree.cycle(record.id, on, host.live.get) is None:
                    host.put(record.id, state=Waiting(phase="start", on=tuple(on)))
        elif step == "abort" and record is not None:
            host.abort(record.id)
        elif step == "stopped" and record is not None and record.abort_requested:
            host.stopped(record.id)
        elif step == "both" and len(live) > 1:
            # Two outcomes in one transaction, in either order.
            tx = FakeTransaction(host)
            for id in data.draw(st.lists(st.sampled_from(live), min_size=2, max_size=2, unique=True)):
                if not isinstance(host.live[id].state, Completing):
                    tx.put_task(
                        structs.replace(host.live[id], state=Completing(data.draw(st.sampled_from([DONE, FAILED]))))
                    )
            host.commit(tx)
        check_invariants(host)


def test_T55_an_outcome_is_held_and_the_cascade_is_one_commit() -> None:
    host = FakeHost()
    top = host.create()
    middle = host.create(owner=top)
    leaf = host.create(owner=middle)
    waiter = host.create()
    host.put(waiter, state=Waiting(phase="start", on=(top,)))
    host.decide(top, DONE)
    host.decide(middle, DONE)
    assert [type(host.every[id].state) for id in (top, middle, leaf, waiter)] == [
        Completing,
        Completing,
        Running,
        Waiting,
    ]
    host.decide(leaf, DONE)
    assert [type(host.every[id].state) for id in (top, middle, leaf, waiter)] == [Terminal, Terminal, Terminal, Running]


def test_T57_aborting_a_held_outcome_marks_it_and_what_is_below() -> None:
    host = FakeHost()
    top = host.create(kind="t.handler")
    child = host.create(owner=top)
    host.decide(top, DONE)
    host.abort(top)
    assert host.every[top].outcome == DONE
    assert host.every[child].abort_requested
    host.stopped(child)
    assert host.every[top].state == Terminal(DONE)


def test_T28_a_new_task_runs_at_once_only_while_the_scheduler_does_and_code_fits() -> None:
    host = FakeHost()
    assert host.live[host.create()].state == Running(phase="start", fresh=True)
    for mode in ("off", "aborting"):
        host.mode = mode
        assert isinstance(host.live[host.create()].state, Pending)
    host.mode = "on"
    host.missing = {"t.plain"}
    assert isinstance(host.live[host.create()].state, Pending)


def test_T52_new_work_needs_a_live_unaborted_owner() -> None:
    host = FakeHost()
    ended = host.create()
    host.decide(ended, DONE)
    held = host.create()
    host.create(owner=held)
    host.decide(held, DONE)
    aborted = host.create(kind="t.handler")
    host.abort(aborted)
    elsewhere = host.create(conversation=host.conversation(None))
    for owner in (ended, held, aborted, elsewhere, 999):
        with pytest.raises(OwnerEnded, match=str(owner)):
            host.create(owner=owner)
    for owner in (ended, held, aborted, 999):
        with pytest.raises(OwnerEnded, match=str(owner)):
            host.conversation(owner)


def test_T52_the_owner_of_a_conversation_must_be_live_and_unaborted_too() -> None:
    host = FakeHost()
    owner = host.create(kind="t.handler")
    room = host.conversation(owner)
    keeps_it_live = host.create(conversation=room)
    host.create(conversation=room)
    host.put(owner, state=Completing(DONE))
    host.create(conversation=room)  # live: completed, and its work goes on
    host.abort(owner)
    assert host.live[keeps_it_live].abort_requested
    with pytest.raises(OwnerEnded):
        host.create(conversation=room)
    with pytest.raises(OwnerEnded):
        host.create(conversation=room, background=True)


def test_T52_judged_before_the_owners_own_move() -> None:
    """A task may end in the very commit in which it creates work, if it ends completed."""
    host = FakeHost()
    owner = host.create()
    tx = FakeTransaction(host)
    child = host.mint()
    tx.put_task(new_task(child, 1, owner, "t.plain", False))
    tx.put_task(structs.replace(host.live[owner], state=Completing(DONE)))
    host.commit(tx)
    assert isinstance(host.live[owner].state, Completing)
    other = host.create()
    tx = FakeTransaction(host)
    tx.put_task(new_task(host.mint(), 1, other, "t.plain", False))
    tx.put_task(structs.replace(host.live[other], state=Completing(FAILED)))
    with pytest.raises(OwnerEnded, match="same commit"):
        host.commit(tx)


def test_T72_marks_stop_at_background() -> None:
    host = FakeHost()
    top = host.create(kind="t.handler")
    room = host.conversation(top)
    ordinary = host.create(conversation=room, kind="t.handler")
    beyond = host.create(conversation=room, background=True)
    below_beyond = host.create(conversation=room, owner=beyond)
    host.abort(top)
    assert host.live[ordinary].abort_requested
    assert not host.live[beyond].abort_requested
    assert not host.live[below_beyond].abort_requested


def test_T82_a_blocked_task_is_settled_orphaned_by_its_mark() -> None:
    host = FakeHost()
    host.missing = {"t.handler"}
    missing = host.create(kind="t.handler")
    host.abort(missing)
    assert host.every[missing].state == Terminal(Orphaned("missing_task"))
    host.missing = set()
    parked = host.create(kind="t.handler")
    child = host.create(owner=parked, kind="t.handler")
    host.put(parked, state=Pending(phase="start"), restarts=3)
    host.abort(parked)
    assert host.every[parked].state == Completing(Orphaned("parked"))
    host.stopped(child)
    host.decide(child, Aborted("stop"))
    assert host.every[parked].state == Terminal(Orphaned("parked"))


def test_T75_a_handler_cut_off_to_the_limit_ends_faulted() -> None:
    host = FakeHost()
    id = host.create(kind="t.handler")
    host.abort(id)
    host.active.discard(id)
    for restarts in (1, 2):
        host.put(id, state=Pending(phase="start"), restarts=restarts)
        assert isinstance(host.live[id].state, Running)
    host.put(id, state=Pending(phase="start"), restarts=3)
    outcome = host.every[id].outcome
    assert isinstance(outcome, Faulted)
    assert outcome.error.code == "restart_limit"


def test_T41_marking_clears_the_restarts_of_before() -> None:
    host = FakeHost()
    id = host.create(kind="t.handler")
    host.put(id, restarts=2)
    host.abort(id)
    assert host.live[id].restarts == 0


def test_began_keeps_what_was_waited_for() -> None:
    record = new_task(5, 1, None, "t.plain", False)
    waited = structs.replace(record, state=Pending(phase="p", on=(3, 4), signal=None, timed_out=True))
    assert began(waited, 9).state == Running(phase="p", on=(3, 4), timed_out=True)
    assert began(waited, 9).started_at == 9
    assert began(structs.replace(waited, started_at=2), 9).started_at == 2


def test_T72_a_waiting_owner_stays_as_it_is_until_its_work_has_ended() -> None:
    for kind in ("t.handler", "t.plain"):
        host = FakeHost()
        owner = host.create(kind=kind)
        child = host.create(owner=owner, kind="t.handler")
        host.put(owner, state=Waiting(phase="start", on=(child,)))
        host.abort(owner)
        assert isinstance(host.live[owner].state, Waiting)
        host.stopped(child)
        assert isinstance(host.live[owner].state, Waiting)
        host.decide(child, Aborted("x"))
        state = host.every[owner].state
        assert isinstance(state, Running if kind == "t.handler" else Terminal)


def test_T54_nobody_else_makes_a_task_terminal() -> None:
    host = FakeHost()
    id = host.create()
    with pytest.raises(InvalidTransition, match="T54"):
        host.put(id, state=Terminal(DONE))


@pytest.mark.parametrize("kind", ["t.plain", "t.handler"])
def test_T54_T72_ending_many_costs_no_more_per_task(kind: str) -> None:
    """An owner of many is aborted: what one end costs does not grow with how many there are."""

    def looks(n: int) -> float:
        host = FakeHost()
        owner = host.create()
        host.active.discard(owner)
        children = [host.create(owner=owner, kind=kind) for _ in range(n)]
        host.active.clear()
        count = 0
        live_task = FakeTransaction.live_task

        def counted(tx: FakeTransaction, id: int) -> TaskRecord | None:
            nonlocal count
            count += 1
            return live_task(tx, id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeTransaction, "live_task", counted)
            host.abort(owner)
            for id in children:
                if id in host.live:
                    host.decide(id, Aborted("x"))
        assert isinstance(host.every[owner].state, Terminal)
        return count / n

    assert looks(400) < 1.5 * looks(40)


def test_a_conversation_is_known_as_its_first_task_is_added(monkeypatch) -> None:
    """However many the tree holds: it is trimmed between transactions, not amid the conversations of one."""
    monkeypatch.setattr("perdure.tasks.ownership.FEW", 5)
    host = FakeHost()
    for _ in range(20):
        tx = FakeTransaction(host)
        for _ in range(3):
            place = host.mint()
            tx.new_conversations[place] = ConversationRecord(id=place, created_at=0, owner=None)
            tx.put_task(new_task(host.mint(), place, None, "t.plain", False))
        host.commit(tx)
    assert len(host.live) == 60
