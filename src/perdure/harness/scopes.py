"""The scopes of execution environments in one session: attached before they are asked anything, detached at its end.

What a scope does in a call is written in ``environment``; where it is asked, in ``calls``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

import msgspec

from perdure.harness.approval import Permission
from perdure.harness.documents import Agent, ToolInput
from perdure.harness.environment import (
    CallOutcome,
    CallScope,
    Effects,
    EnvironmentLost,
    EnvironmentUnusable,
    ExecutionEnvironment,
    RecoverResult,
    ScopeResult,
)
from perdure.harness.registry import Registry
from perdure.harness.tool import AnyTool, ReplayPolicy
from perdure.kernel.errors import StaleEpochError
from perdure.kernel.json import JsonValue
from perdure.kernel.records import NULL, Completing, TaskRecord, Terminal, from_raw
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Straggler

TOOL_TASK = "pi.tool"

MAX_CRASHES: Final = 5
"""So often a call is begun anew by its environment after its process or the environment went away; then it ends
interrupted, since it may be what ends them."""

EnvironmentFor: TypeAlias = Callable[[int], ExecutionEnvironment | None]
"""The execution environment of a conversation, as the host supplies it (rule H122)."""


class CallIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint of a call whose intent is committed: what runs, and what may be done after an interruption."""

    arguments: msgspec.Raw
    replay: ReplayPolicy
    attempt: int = 1
    intent: msgspec.Raw = NULL
    """What the tool's intent function gave."""
    scoped: bool = False
    """Whether the environment's scope takes part in this call."""
    scope_data: msgspec.Raw = NULL
    crashes: int = 0
    """How many attempts before this one ended with their process."""
    approval: Permission | None = None
    """By what it was allowed; None: nobody had to be asked."""


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """A call as its environment's scope sees it (environment.OpenCall)."""

    id: int
    conversation_id: int
    name: str
    arguments: JsonValue
    idempotency_key: str
    attempt: int
    scope_data: JsonValue
    replay_safe: bool
    effects: Effects
    adoptable: bool
    abort_requested: bool = False


def view(session: Session, record: TaskRecord, input: ToolInput, intent: CallIntent, tool: AnyTool | None) -> CallView:
    """A call with its intent. ``tool``: as it is now, or None if there is none any more."""
    arguments = from_raw(intent.arguments)

    def failed(error: BaseException) -> None:
        session.report(
            Report(
                type="effects_check_failed",
                message=f"{input.name}: effects did not say what a call changes; it is taken to change anything",
                task=record.id,
                kind=TOOL_TASK,
                conversation=record.conversation_id,
                error=error,
            )
        )

    return CallView(
        id=record.id,
        conversation_id=record.conversation_id,
        name=input.name,
        arguments=arguments,
        idempotency_key=f"{session.info.log_id}-{record.nonce}",
        attempt=intent.attempt,
        scope_data=from_raw(intent.scope_data),
        replay_safe=intent.replay == "safe" and tool is not None and tool.replay == "safe",
        effects="world" if tool is None else tool.effects_of(arguments, failed),
        adoptable=tool is not None and tool.adoptable,
        abort_requested=record.abort_requested,
    )


def stored_intent(record: TaskRecord) -> CallIntent | None:
    """The intent of a call that has one and no result yet."""
    state = record.state
    if record.kind != TOOL_TASK or isinstance(state, (Completing, Terminal)) or state.phase != "execute":
        return None
    return msgspec.json.decode(state.raw_checkpoint, type=CallIntent)


class Scopes:
    """Make it before the task runtime: at the session's end the calls stop first, then the scopes are detached."""

    def __init__(self, session: Session, registry: Registry, environment_for: EnvironmentFor) -> None:
        self._session = session
        self._registry = registry
        self._environment_for = environment_for
        self._attached: dict[int, tuple[CallScope, asyncio.Future[None]]] = {}
        session.on_stop(self._detach)

    async def of(self, environment: ExecutionEnvironment | None) -> CallScope | None:
        """The environment's scope, attached."""
        scope = None if environment is None else environment.scope
        if scope is None:
            return None
        known = self._attached.get(id(scope))
        if known is None:
            known = self._attached[id(scope)] = (scope, asyncio.ensure_future(self._attach(scope)))
        # Several calls may wait for it; one that is cancelled leaves it to the others.
        await asyncio.shield(known[1])
        return scope

    @contextmanager
    def failing(self) -> Generator[None]:
        """What an environment cannot go on from fails the session; it never becomes a result."""
        try:
            yield
        except (EnvironmentUnusable, StaleEpochError) as error:
            self._session.fail(error)
            raise

    async def _attach(self, scope: CallScope) -> None:
        calls: list[CallView] = []
        for record in sorted(self._session.live.settled.values(), key=lambda record: record.id):
            intent = stored_intent(record)
            if intent is None or not intent.scoped:
                continue
            environment = self._environment_for(record.conversation_id)
            if environment is not None and environment.scope is scope:
                agent = await self._session.snapshot(Agent, conversation=record.conversation_id) or Agent()
                input = msgspec.json.decode(record.raw_input, type=ToolInput)
                tool = self._registry.called(agent, input)
                calls.append(view(self._session, record, input, intent, tool))
        await scope.attach(self._session, calls)

    async def _detach(self, _: int) -> Sequence[Straggler]:
        for scope, attaching in self._attached.values():
            await asyncio.wait([attaching])
            if attaching.cancelled() or attaching.exception() is not None:
                continue  # it may be another session's
            try:
                await scope.detach()
            except Exception as error:
                self._session.report(
                    Report(type="detach_failed", message="an environment's scope did not detach", error=error)
                )
        return ()


async def leave(scope: CallScope, call: CallView, *, outcome: bool) -> None:
    """A scope is done with a call."""
    with suppress(EnvironmentLost):  # nothing of the call is in it any more, or its recovery looks at what is
        await scope.leave(call, outcome=outcome)


def given_up(lost: EnvironmentLost | None) -> EnvironmentUnusable:
    """What the session fails with after the last loss."""
    error = EnvironmentUnusable(f"the environment went away {MAX_CRASHES + 1} times under one call")
    error.__cause__ = lost
    return error


async def settle_aborted(scope: CallScope, call: CallView, result: CallOutcome, *, running: bool) -> ScopeResult | None:
    """What a scope says of an aborted call; None: the result stands. ``running``: it ran in this process until now."""
    if running:
        return await scope.capture(call, result)
    recovery = await scope.recover(call)
    return recovery.result if isinstance(recovery, RecoverResult) else None
