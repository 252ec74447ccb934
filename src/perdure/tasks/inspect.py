"""Looking at tasks without running anything (rules T38, T46, T49)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from perdure.kernel.records import Completing, Outcome, Sleeping, TaskRecord, TaskStatus, Terminal, Waiting
from perdure.kernel.storage import MAX_SCAN
from perdure.tasks.alarm import due_at
from perdure.tasks.blocking import Blocked, quick_verdict
from perdure.tasks.errors import ADVICE, BlockedReason

if TYPE_CHECKING:
    from perdure.tasks.runtime import TaskRuntime


GRAPH_ENDED: Final = 200
"""Ended tasks that the graph shows at most."""
GRAPH_MS: Final = 3_600_000
"""For how long it shows one."""
LOOK_BACK: Final = MAX_SCAN
"""Of those that ended before this opening of the store it finds the ones among so many ids minted last."""


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    conversation_id: int
    kind: str
    version: int
    owner: int | None
    """The task of the same conversation that owns it; None: its conversation does."""
    background: bool
    status: TaskStatus
    phase: str | None
    """None once its outcome is decided."""
    waits_for: tuple[int, ...] = ()
    """Live tasks it waits for; of a completing task those it owns."""
    signal: str | None = None
    """What it waits to be sent."""
    due_at: int | None = None
    """When its sleep, or its wait's deadline, ends; ms UTC."""
    abort_requested: bool = False
    restarts: int = 0
    """How often it was cut off since it last got on."""
    created_at: int = 0
    started_at: int | None = None
    blocked: BlockedReason | None = None
    detail: str = ""
    """More about why it is blocked; may quote the error of its own code."""
    remedy: str = ""
    """What a person can do about it."""
    held_up_by: int | None = None
    """The blocked task that must end before this one can."""


class LiveTask(_Task, frozen=True, kw_only=True):
    """One live task: where it stands and, if it cannot go on, why."""


class TaskNode(_Task, frozen=True, kw_only=True):
    """A task in the graph, live or ended of late, with its edges."""

    parent: int | None = None
    """The task right above: its owner, or the owner of its conversation; None if that is unknown or there is none."""
    outcome: Outcome | None = None
    """How it ended, or how it will once what it owns has ended."""
    ended_at: int | None = None


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


def live_tasks(runtime: TaskRuntime) -> list[LiveTask]:
    """Every live task, by id."""
    held = _held_up(runtime)
    return [_live_task(runtime, record, held) for _, record in sorted(runtime.session.live.settled.items())]


async def graph(runtime: TaskRuntime) -> list[TaskNode]:
    """Every live task, and those that ended of late, by id."""
    session = runtime.session
    stored: list[TaskRecord] = []
    if len(runtime.ended) < GRAPH_ENDED:
        # Read first: what ends meanwhile is known from memory.
        stored = await session.tasks(live=False, after=max(0, session.next_id - LOOK_BACK), limit=LOOK_BACK)
    since = session.clock.wall() - GRAPH_MS
    found = {record.id: record for record in [*stored, *runtime.ended.values()]}
    ended = [r for r in found.values() if r.ended_at is not None and r.ended_at >= since]
    ended.sort(key=lambda record: record.ended_at or 0)
    records = {record.id: record for record in ended[-GRAPH_ENDED:]} | session.live.settled
    held = _held_up(runtime)
    return [_node(runtime, records[id], held) for id in sorted(records)]


def _held_up(runtime: TaskRuntime) -> dict[int, int]:
    live = runtime.session.live.settled
    blocked = [id for id, record in live.items() if why_blocked(runtime, record) is not None]
    return runtime.tree.held_up(blocked, live.get) if blocked else {}


def _live_task(runtime: TaskRuntime, record: TaskRecord, held: Mapping[int, int]) -> LiveTask:
    state = record.state
    blocked = why_blocked(runtime, record) if record.live else None
    look = runtime.session.live.settled.get
    waits_for: tuple[int, ...] = ()
    if isinstance(state, Waiting):
        waits_for = tuple(id for id in state.on if look(id) is not None)
    elif isinstance(state, Completing):
        waits_for = tuple(sorted(child.id for child in runtime.tree.owned(record.id, look)))
    blocker = held.get(record.id)
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
        created_at=record.created_at,
        started_at=record.started_at,
        blocked=None if blocked is None else blocked.reason,
        detail="" if blocked is None else blocked.detail,
        remedy="" if blocked is None else ADVICE[blocked.reason],
        held_up_by=None if blocker == record.id else blocker,
    )


def _node(runtime: TaskRuntime, record: TaskRecord, held: Mapping[int, int]) -> TaskNode:
    tree = runtime.tree
    return TaskNode(
        **structs.asdict(_live_task(runtime, record, held)),
        parent=tree.owner_task(record) if tree.knows(record.conversation_id) else record.owner,
        outcome=record.outcome,
        ended_at=record.ended_at,
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
