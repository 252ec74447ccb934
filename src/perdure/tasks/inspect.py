"""Looking at tasks without running anything (rules T38, T46, T49)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.kernel.records import Completing, Outcome, Sleeping, TaskRecord, TaskStatus, Terminal, Waiting
from perdure.tasks.alarm import due_at
from perdure.tasks.blocking import Blocked, quick_verdict
from perdure.tasks.errors import BlockedReason

if TYPE_CHECKING:
    from perdure.tasks.runtime import TaskRuntime


class LiveTask(msgspec.Struct, frozen=True, kw_only=True):
    """One live task: where it stands and, if it cannot go on, why."""

    id: int
    conversation_id: int
    kind: str
    version: int
    owner: int | None
    background: bool
    status: TaskStatus
    phase: str | None
    """None once its outcome is decided."""
    waits_for: tuple[int, ...] = ()
    """Live tasks it waits for; of a completing task those it owns."""
    signal: str | None = None
    due_at: int | None = None
    """When its sleep, or its wait's deadline, ends; ms UTC."""
    abort_requested: bool = False
    restarts: int = 0
    blocked: BlockedReason | None = None
    detail: str = ""
    """More about why it is blocked; may quote the error of its own code."""


class TaskNode(msgspec.Struct, frozen=True, kw_only=True):
    """A task in the graph, live or recently ended, with its edges upwards."""

    id: int
    conversation_id: int
    kind: str
    owner: int | None
    """The task right above: its owner, or the owner of its conversation; None if that is unknown or there is none."""
    background: bool
    status: TaskStatus
    outcome: Outcome | None
    blocked: BlockedReason | None


class Wake(msgspec.Struct, frozen=True):
    """When a host that may be suspended is next needed."""

    active: bool
    """Now: something runs or is due."""
    at: int | None
    """Otherwise at this time (ms UTC); None: only when something is sent to it."""


def why_blocked(runtime: TaskRuntime, record: TaskRecord) -> Blocked | None:
    """Why a task that is due cannot run, as far as can be told without running anything."""
    known = runtime.blocked_tasks.get(record.id)
    if known is not None or record.status not in ("pending", "running") or runtime.is_active(record.id):
        return known
    verdict = quick_verdict(record, runtime.registry, runtime.restart_limit)
    return verdict if isinstance(verdict, Blocked) else None


def live_task(runtime: TaskRuntime, record: TaskRecord) -> LiveTask:
    state = record.state
    blocked = why_blocked(runtime, record)
    look = runtime.session.live.settled.get
    waits_for: tuple[int, ...] = ()
    if isinstance(state, Waiting):
        waits_for = tuple(id for id in state.on if look(id) is not None)
    elif isinstance(state, Completing):
        waits_for = tuple(sorted(child.id for child in runtime.tree.owned(record.id, look)))
    return LiveTask(
        id=record.id,
        conversation_id=record.conversation_id,
        kind=record.kind,
        version=record.version,
        owner=record.owner,
        background=record.background,
        status=record.status,
        phase=None if isinstance(state, (Completing, Terminal)) else state.phase,
        waits_for=waits_for,
        signal=state.signal if isinstance(state, Waiting) else None,
        due_at=due_at(record),
        abort_requested=record.abort_requested,
        restarts=record.restarts,
        blocked=None if blocked is None else blocked.reason,
        detail="" if blocked is None else blocked.detail,
    )


def node(runtime: TaskRuntime, record: TaskRecord) -> TaskNode:
    tree = runtime.tree
    blocked = why_blocked(runtime, record) if record.live else None
    return TaskNode(
        id=record.id,
        conversation_id=record.conversation_id,
        kind=record.kind,
        owner=tree.owner_task(record) if tree.knows(record.conversation_id) else record.owner,
        background=record.background,
        status=record.status,
        outcome=record.outcome,
        blocked=None if blocked is None else blocked.reason,
    )


def wake(runtime: TaskRuntime) -> Wake:
    now, look = runtime.session.clock.wall(), runtime.session.live.settled.get
    earliest: int | None = None
    for record in runtime.session.live.settled.values():
        state = record.state
        if isinstance(state, Completing):
            continue  # what it owns is looked at itself
        if record.abort_requested:
            # Whatever it waited for: its handler's turn comes, or its end, once nothing is left below.
            due = runtime.is_active(record.id) or not runtime.tree.owns_live(record.id, look)
        elif isinstance(state, (Waiting, Sleeping)):
            at, due = due_at(record), False
            if at is not None:
                earliest = at if earliest is None else min(earliest, at)
        else:
            due = why_blocked(runtime, record) is None
        if due:
            return Wake(True, None)
    if earliest is not None and earliest <= now:
        return Wake(True, None)
    return Wake(False, earliest)
