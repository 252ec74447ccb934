"""What has become of a question or an approval that is not open any more, in words (rules H303, H331)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from perdure.cli.errors import CommandError
from perdure.cli.exact import exact_words
from perdure.cli.stores import looking
from perdure.cli.text import when
from perdure.harness.approval import Decision
from perdure.harness.approvals import asked_of, decided
from perdure.harness.documents import TOOL_RESULT, ToolResultData
from perdure.harness.permission import stored_decision
from perdure.harness.person import EXPIRED, QUESTION, answered_at, has_answer, input_of
from perdure.harness.scopes import TOOL_TASK
from perdure.kernel.records import Aborted, Completed, Failed, Orphaned, TaskRecord
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN

WIDEST: Final = 200
"""Characters of a reason or a name in these sentences."""


async def question_over(path: Path, id: int) -> CommandError | None:
    """Why a question takes no answer; None: it is open. Raises what opening a store raises."""
    async with looking(path) as session:
        record = await session.task(id)
        if record is None:
            return CommandError(f"there is no question {id}; perdure questions ls {path} lists what is asked")
        if record.kind != QUESTION:
            return CommandError(f"task {id} is no question; perdure questions ls {path} lists what is asked")
        words = question_words(record, session.clock.wall())
        return None if words is None else CommandError(f"question {id} {words}")


def question_words(record: TaskRecord, now: int) -> str | None:
    """How a question is over, as far as its task tells; None: it can be answered at that time (ms UTC)."""
    outcome, ended = record.outcome, record.ended_at
    if has_answer(record) or isinstance(outcome, Completed):
        at = answered_at(record) or ended
        return f"was answered{'' if at is None else f' at {when(at)}'}; that answer stands"
    expires_at = input_of(record).expires_at
    if isinstance(outcome, Failed) and outcome.error.code == EXPIRED:
        return _expired(expires_at)
    if outcome is not None or record.abort_requested:
        return f"was withdrawn{_at(ended)}{_why(record)}"
    return _expired(expires_at) if now >= expires_at else None


def _expired(at: int) -> str:
    return f"expired at {when(at)}: nobody answered in time"


async def call_over(path: Path, id: int) -> CommandError | None:
    """Why a call cannot be decided about; None: it waits for that. Raises what opening a store raises."""
    async with looking(path) as session:
        record = await session.task(id)
        if record is None:
            return CommandError(f"there is no call {id}; perdure approvals ls {path} lists those that wait")
        if record.kind != TOOL_TASK:
            return CommandError(f"task {id} is no call; perdure approvals ls {path} lists those that wait")
        words = await _call_words(session, record)
        return None if words is None else CommandError(f"call {id} {words}")


async def _call_words(session: Session, record: TaskRecord) -> str | None:
    decision = decision_of(record)
    code = await _code(session, record)
    if decision is not None:
        words = decision_words(decision)
        if decision.allow and code == "expired":
            return f"{words}, and that expired at {when(decision.expires_at)}, before it could run"
        return f"{words}; that decision stands"
    if code == "expired":
        return f"expired{_at(record.ended_at)}: nobody decided in time, and it was not run"
    if record.abort_requested or isinstance(record.outcome, Aborted | Orphaned) or code == "aborted":
        return f"was aborted{_at(record.ended_at)}{_why(record)}; there is nothing to decide any more"
    if record.outcome is not None:
        return f"has ended{_at(record.ended_at)}; no person was asked about it"
    asked = asked_of(record)
    if asked is None:
        return "does not wait to be allowed; perdure approvals ls lists those that do"
    if session.clock.wall() >= asked.expires_at:
        return f"expired at {when(asked.expires_at)}: nobody decided in time, and it is not run"
    return None


def decision_of(record: TaskRecord) -> Decision | None:
    """What was decided about a call. A signal that is no decision denies it."""
    if not decided(record):
        return None
    return stored_decision(record) or Decision(allow=False, digest="", expires_at=0, at=0)


def decision_words(decision: Decision) -> str:
    what = "denied" if not decision.allow else "allowed" if decision.edited is None else "allowed with other arguments"
    by = f" by {_short(decision.by)}" if decision.by else ""
    return f"was {what}{_at(decision.at or None)}{by}"


async def _code(session: Session, record: TaskRecord) -> str | None:
    """The code of its result, if it has one. The entry is soon after the call: what waits keeps its run waiting."""
    if record.outcome is None:
        return None
    for entry in await session.entries(record.conversation_id, first=record.id, limit=MAX_SCAN):
        if entry.kind == TOOL_RESULT and (data := entry.data_as(ToolResultData)).task == record.id:
            return data.code
    return None


def _at(ms: int | None) -> str:
    return "" if ms is None else f" at {when(ms)}"


def _why(record: TaskRecord) -> str:
    outcome = record.outcome
    reason = outcome.reason if isinstance(outcome, Aborted | Orphaned) else record.abort_reason
    return f": {_short(reason)}" if reason else ""


def _short(text: str) -> str:
    return exact_words(text, WIDEST)
