"""Whether a call may be executed, as the pipeline of a call asks it (rules H110, H113, H114, H300 to H305)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from perdure.harness.approval import (
    APPROVAL,
    ApprovalQuestion,
    Approvals,
    Asked,
    Decision,
    Permission,
    call_digest,
)
from perdure.harness.approval_rules import ApprovalRule, ApprovalRules, deciding, rules_of
from perdure.harness.documents import ToolInput
from perdure.harness.opened import OpenedCall, Refused
from perdure.harness.scopes import TOOL_TASK, CallIntent
from perdure.harness.tool import AnyTool
from perdure.kernel.json import JsonValue
from perdure.kernel.records import TaskRecord, from_raw, to_raw
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.tasks.run import Run
from perdure.tasks.values import stored_value

EXPIRED = (
    "Nobody decided about this call in time, or it could not run in the time that was decided for; it was not run."
)
NOT_A_DECISION = "What was sent as a decision is none about these arguments; the call was not run."


class RuleGone(Exception):
    """The rule that allowed a call does not decide it any more."""


class Permissions:
    """One a session."""

    def __init__(self, session: Session, policy: Approvals) -> None:
        self._session = session
        self._policy = policy

    # --- before the question -----------------------------------------------------------------------------------

    def may_ask(self, tool: AnyTool) -> bool:
        """Whether calls of a tool may need approval. For one that needs none, it looks at two attributes."""
        return tool.requires_approval is not False or (bool(self._policy.tools) and self._policy.names(tool.name))

    def needed(self, run: Run[ToolInput, int | None, Any], opened: OpenedCall) -> bool:
        """Whether this call needs it. A function of the tool that raises says yes."""
        tool = opened.tool
        if self._policy.names(tool.name) or isinstance(tool.requires_approval, bool):
            return True
        arguments = _arguments(opened.intent)
        question = ApprovalQuestion(
            id=run.id,
            conversation_id=run.conversation_id,
            tool=tool.name,
            arguments=arguments,
            values=tool.signature.values(arguments),  # of its own: what it does to them does not run
        )
        try:
            return tool.requires_approval(question) is not False
        except (Exception, SystemExit) as error:  # the tool's own code
            self._session.report(
                Report(
                    type="approval_check_failed",
                    message=f"{tool.name}: requires_approval raised; a person is asked",
                    task=run.id,
                    kind=TOOL_TASK,
                    conversation=run.conversation_id,
                    error=error,
                )
            )
            return True

    async def by_rule(self, opened: OpenedCall) -> Permission | None:
        """What a rule says; None: none decides. Raises Refused where one denies the call."""
        name, arguments = opened.tool.name, _arguments(opened.intent)
        rule = _deciding(await self._session.snapshot(ApprovalRules), opened.tool, arguments)
        if rule is None:
            return None
        if rule.effect == "deny":
            raise Refused("denied", f"A rule denies this call{f': {rule.note}' if rule.note else '.'}")
        return Permission(digest=call_digest(name, arguments), rule=rule.id, by=rule.by)

    def question(self, opened: OpenedCall, *, at: int) -> Asked:
        return Asked(
            arguments=opened.intent.arguments,
            digest=call_digest(opened.tool.name, _arguments(opened.intent)),
            asked_at=at,
            expires_at=at + self._policy.expire_after_ms,
        )

    # --- after it ----------------------------------------------------------------------------------------------

    def decided(self, run: Run[ToolInput, int | None, Asked]) -> Decision:
        """The decision that the call waited for, an allowing one. Raises Refused."""
        asked = run.checkpoint
        if run.timed_out:
            raise Refused("expired", EXPIRED)
        decision = _decision(run.signal)
        if decision is None or (decision.digest, decision.expires_at) != (asked.digest, asked.expires_at):
            raise Refused("denied", NOT_A_DECISION)
        if not decision.allow:
            raise Refused("denied", f"The call was denied{f': {decision.reason}' if decision.reason else '.'}")
        return decision

    async def check(self, tx: Transaction, run: Run[ToolInput, int | None, Any], opened: OpenedCall) -> None:
        """In the commit of a call's intent: what allows it is there still, and is about exactly these arguments.

        Raises Refused, and RuleGone.
        """
        permission = opened.intent.approval
        assert permission is not None, "asked of calls that were allowed"
        name, arguments = run.input.name, _arguments(opened.intent)
        if call_digest(name, arguments) != permission.digest:
            raise Refused("denied", NOT_A_DECISION)
        if permission.expires_at is None:
            rule = _deciding(await tx.read(ApprovalRules), opened.tool, arguments)
            if rule is None or rule.id != permission.rule:
                raise RuleGone
            return
        if tx.at >= permission.expires_at:
            raise Refused("expired", EXPIRED)
        record = tx.live_task(run.id)
        decision = None if record is None else stored_decision(record)
        if decision is None or not decision.allow or (decision.edited or decision.digest) != permission.digest:
            raise Refused("denied", NOT_A_DECISION)


def permission_of(asked: Asked, decision: Decision, tool: str, arguments: Mapping[str, JsonValue]) -> Permission:
    """What a decision allows. Raises Refused if its edited arguments are not those it is bound to."""
    digest = call_digest(tool, dict(arguments))
    if digest != (decision.edited or asked.digest):
        raise Refused("denied", NOT_A_DECISION)
    return Permission(digest=digest, expires_at=asked.expires_at, by=decision.by, edited=decision.arguments is not None)


def edited_arguments(record: TaskRecord) -> msgspec.Raw | None:
    """With what a call ran, if a person changed its arguments."""
    decision = stored_decision(record)
    return None if decision is None or decision.arguments is None else to_raw(decision.arguments)


def stored_decision(record: TaskRecord) -> Decision | None:
    """What was sent about a call, if it is a decision."""
    held = stored_value(record.raw_signals, APPROVAL)
    return None if held is None else _decision(from_raw(held))


def _deciding(document: ApprovalRules | None, tool: AnyTool, arguments: dict[str, JsonValue]) -> ApprovalRule | None:
    """Raises InvalidArguments."""
    rules = rules_of(document)
    return deciding(rules, tool.name, arguments, tool.signature.taken(arguments)) if rules else None


def _decision(value: JsonValue) -> Decision | None:
    """A signal may be anything."""
    try:
        return msgspec.convert(value, Decision)
    except msgspec.MsgspecError:
        return None


def _arguments(intent: CallIntent) -> dict[str, JsonValue]:
    return cast("dict[str, JsonValue]", from_raw(intent.arguments))  # checked before they were stored
