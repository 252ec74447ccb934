"""What opening a store does to its tasks: what was running is pending again, and marks reach what they must (T35, T36).

Waiting, sleeping and completing tasks stay as they are. If nothing has to change, nothing is committed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec import structs

from perdure.kernel.errors import StorageCorrupt
from perdure.kernel.records import Completed, Running, TaskRecord, Waiting
from perdure.kernel.reports import log_line
from perdure.kernel.transaction import Transaction
from perdure.tasks.derive import OWNER_ABORTED, OWNER_ENDED, mark, stood_down

if TYPE_CHECKING:
    from perdure.tasks.runtime import TaskRuntime

_log = logging.getLogger("perdure.tasks")

PAGE = 1_000
"""Records one recovery commit changes at most."""


def recovered(record: TaskRecord) -> TaskRecord:
    """A task found running: pending where it stood, the cut-off run counted unless it was the first (T29, T40)."""
    state = record.state
    assert isinstance(state, Running)
    return structs.replace(stood_down(record), restarts=record.restarts + (0 if state.fresh else 1))


async def load_tree(runtime: TaskRuntime) -> None:
    """Learn who owns what is live."""
    session = runtime.session
    for record in session.live.settled.values():
        if not runtime.tree.knows(record.conversation_id):
            conversation = await session.conversation(record.conversation_id)
            if conversation is None:
                raise StorageCorrupt(f"task {record.id} is of conversation {record.conversation_id}, which is missing")
            runtime.tree.add_conversation(conversation.id, conversation.owner)
        runtime.tree.add_task(record)
        if isinstance(record.state, Waiting):
            runtime.tree.add_wait(record.id, record.state.on, session.live.settled.get)


async def recover(runtime: TaskRuntime) -> None:
    """Commit what opening must change. A failure here fails the session; what is recovered from is never deleted."""
    session = runtime.session
    changes = [id for id, record in sorted(session.live.settled.items()) if _changes(runtime, record)]
    if changes:
        log_line(_log, "recovered %d of %d live tasks", len(changes), len(session.live.settled))
    for first in range(0, len(changes), PAGE):
        async with session.commit() as tx:
            for id in changes[first : first + PAGE]:
                _recover(runtime, tx, id)


def _changes(runtime: TaskRuntime, record: TaskRecord) -> bool:
    return isinstance(record.state, Running) or _owed_mark(runtime, record) is not None


def _owed_mark(runtime: TaskRuntime, record: TaskRecord) -> str | None:
    """Why a task should bear an abort mark that it does not bear (T76)."""
    if record.abort_requested or record.background:
        return None
    above = runtime.tree.owner_task(record)
    owner = None if above is None else runtime.session.live.staged.get(above)
    if owner is None:
        return None
    if owner.abort_requested:
        return OWNER_ABORTED
    return None if owner.outcome is None or isinstance(owner.outcome, Completed) else OWNER_ENDED


def _recover(runtime: TaskRuntime, tx: Transaction, id: int) -> None:
    record = tx.live_task(id)
    assert record is not None, "recovery comes before anything else may end a task"
    if isinstance(record.state, Running):
        record = recovered(record)
    reason = _owed_mark(runtime, record)
    tx.put_task(record if reason is None else mark(runtime, record, reason))
