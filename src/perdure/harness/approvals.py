"""Pending approvals: found in the record, and decided (rules H111, H112, H303 to H305).

What is asked is the checkpoint of a waiting call, and a decision is a signal of its task: both are in the store, so
that any process can list the one and send the other, whether the host of the call runs or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import msgspec

from perdure.harness.approval import APPROVAL, ApprovalRefused, Asked, Decision, call_digest, check_words
from perdure.harness.documents import Agent, Live, ToolInput
from perdure.harness.scopes import TOOL_TASK
from perdure.kernel.context import Context
from perdure.kernel.json import JsonValue, copy_json
from perdure.kernel.records import TaskRecord, Waiting, from_raw, to_raw
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN
from perdure.kernel.transaction import Transaction
from perdure.tasks.values import stored_value

if TYPE_CHECKING:
    from perdure.harness.harness import Harness


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A call that waits for a decision, as the record has it."""

    task: int
    conversation_id: int
    tool: str
    arguments: dict[str, JsonValue]
    """The exact ones it would run with."""
    digest: str
    """Of tool and arguments: what a decision is bound to."""
    asked_at: int
    expires_at: int
    """ms UTC. A decision comes before it, and is used before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval(Question):
    """A pending approval, and the way to decide it. From ``harness.approvals()``."""

    _harness: Harness = field(repr=False, compare=False)

    async def allow(
        self, *, arguments: dict[str, JsonValue] | None = None, by: str | None = None, context: Context | None = None
    ) -> bool:
        """Let the call run, or let it run with other arguments, which are checked like the model's (rule H304).

        See ``Harness.decide``.
        """
        return await self._harness.decide(
            self.task, allow=True, digest=self.digest, arguments=arguments, by=by, context=context
        )

    async def deny(self, reason: str = "", *, by: str | None = None, context: Context | None = None) -> bool:
        """Do not let the call run; the model is told the reason. See ``Harness.decide``."""
        return await self._harness.decide(
            self.task, allow=False, digest=self.digest, reason=reason, by=by, context=context
        )


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody decides, also as it comes by mail."""

    task: int
    allow: bool
    digest: str
    reason: str = ""
    by: str | None = None
    arguments: dict[str, JsonValue] | None = None

    def check(self) -> None:
        """Raises TypeError, ValueError, NotJson."""
        check_words(self.reason, "reason")
        check_words(self.by, "by")
        if self.arguments is not None:
            if not self.allow:
                raise ValueError("a call that is denied has no arguments to run with")
            copy_json(self.arguments, at="arguments")


def approval(harness: Harness, question: Question) -> Approval:
    known = {each.name: getattr(question, each.name) for each in fields(question)}
    return Approval(**known, _harness=harness)


# --- listing ----------------------------------------------------------------------------------------------------


async def pending(session: Session, *, conversation_id: int | None = None) -> list[Question]:
    """Those that can be decided now, by task. A store that is open for reading only is read as it is now."""
    now = session.clock.wall()
    found = [question_of(record, now) for record in await live_tasks(session)]
    return [q for q in found if q is not None and conversation_id in (None, q.conversation_id)]


async def live_tasks(session: Session) -> list[TaskRecord]:
    """By id; of a store that is open for reading only, as it is now."""
    if not session.info.read_only:
        return sorted(session.live.settled.values(), key=lambda record: record.id)
    found: list[TaskRecord] = []
    while True:
        page = await session.tasks(live=True, after=found[-1].id if found else 0, limit=MAX_SCAN)
        found += page
        if len(page) < MAX_SCAN:
            return found


def question_of(record: TaskRecord, now: int) -> Question | None:
    """What is asked about a call, if it can be decided at that time (ms UTC)."""
    asked = asked_of(record)
    if asked is None or now >= asked.expires_at or decided(record):
        return None
    arguments = from_raw(asked.arguments)
    assert isinstance(arguments, dict), "checked before they were stored"
    return Question(
        task=record.id,
        conversation_id=record.conversation_id,
        tool=msgspec.json.decode(record.raw_input, type=ToolInput).name,
        arguments=arguments,
        digest=asked.digest,
        asked_at=asked.asked_at,
        expires_at=asked.expires_at,
    )


def asked_of(record: TaskRecord) -> Asked | None:
    """What is asked about a call, if it waits for that and is not being aborted."""
    state = record.state
    if record.kind != TOOL_TASK or type(state) is not Waiting or state.phase != APPROVAL or record.abort_requested:
        return None
    return msgspec.json.decode(state.raw_checkpoint, type=Asked)


def decided(record: TaskRecord) -> bool:
    return stored_value(record.raw_signals, APPROVAL) is not None


# --- deciding ---------------------------------------------------------------------------------------------------


async def decide(harness: Harness, tx: Transaction, wanted: Wanted) -> bool:
    """Store a decision; False if there is one, which stands.

    Raises NotFound, ApprovalRefused, InvalidArguments, TypeError, ValueError.
    """
    wanted.check()
    record = tx.live_task(wanted.task)
    if record is None:
        record = await tx.task(wanted.task)
        raise ApprovalRefused("ended", f"task {wanted.task} has ended; there is nothing to decide any more")
    if record.abort_requested:
        raise ApprovalRefused("ended", f"task {wanted.task} is being aborted; there is nothing to decide any more")
    if record.kind == TOOL_TASK and decided(record):
        return False
    asked = asked_of(record)
    if asked is None:
        raise ApprovalRefused(
            "not_asked", f"task {wanted.task} does not wait for an approval; harness.approvals() lists those that do"
        )
    if asked.digest != wanted.digest:
        raise ApprovalRefused(
            "other_arguments",
            f"task {wanted.task} asks about other arguments; harness.approvals() has those that it asks about now",
        )
    if tx.at >= asked.expires_at:
        raise ApprovalRefused("expired", f"the question of task {wanted.task} has expired; it is not run")
    arguments, edited = wanted.arguments, None
    if arguments is not None:
        arguments = await _checked(harness, tx, record, arguments)
        edited = call_digest(_name(record), arguments)
        if edited == asked.digest:
            arguments, edited = None, None
    decision = Decision(
        allow=wanted.allow,
        digest=asked.digest,
        expires_at=asked.expires_at,
        at=tx.at,
        reason=wanted.reason,
        by=wanted.by,
        arguments=arguments,
        edited=edited,
    )
    first = await harness.tasks.put_signal(tx, record.id, APPROVAL, msgspec.to_builtins(decision))
    assert first, "there was none, and nothing comes between"
    live = await tx.draft(Live, conversation=record.conversation_id)
    shown = live.tools.get(str(record.id))
    if shown is not None and "approval" in shown:
        shown["approval"]["decision"] = {
            "allow": wanted.allow,
            "reason": wanted.reason,
            "by": wanted.by,
            "edited": edited is not None,
        }
    return True


def missing_tool(harness: Harness, record: TaskRecord) -> bool:
    """Whether nobody here could check edited arguments of this call."""
    return not harness.registry.has_tool(_name(record))


async def _checked(
    harness: Harness, tx: Transaction, record: TaskRecord, arguments: dict[str, JsonValue]
) -> dict[str, JsonValue]:
    """Edited arguments, repaired and checked as the model's are."""
    agent = await tx.read(Agent, conversation=record.conversation_id) or Agent()
    tool = harness.registry.called(agent, msgspec.json.decode(record.raw_input, type=ToolInput))
    if tool is None:
        raise ApprovalRefused(
            "tool_unavailable",
            f"the tool {_name(record)!r} is not here, and edited arguments are checked by it; allow them as they are, "
            "or send the decision to the process that has it",
        )
    return tool.signature.read(to_raw(arguments, at="arguments"))


def _name(record: TaskRecord) -> str:
    return msgspec.json.decode(record.raw_input, type=ToolInput).name
