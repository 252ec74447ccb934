"""What becomes of a call whose intent is committed and that no process runs any more (rule H93)."""

from __future__ import annotations

import logging

import msgspec

from perdure.harness.arguments import InvalidArguments, ToolDefinitionError
from perdure.harness.documents import Agent, ToolInput
from perdure.harness.environment import CallScope, ExecutionEnvironment, RecoverInterrupted, RecoverResult
from perdure.harness.opened import OpenedCall, Openings, ScopedCall
from perdure.harness.registry import Registry
from perdure.harness.results import INTERRUPTED, CallResult, error_result, scope_result
from perdure.harness.scopes import MAX_CRASHES, CallIntent, EnvironmentFor, Scopes, view
from perdure.harness.telemetry import CallRecovery
from perdure.harness.tool import AnyTool
from perdure.harness.tracing import Tracing
from perdure.kernel.records import NULL, from_raw
from perdure.kernel.session import Session
from perdure.tasks.run import Run

_log = logging.getLogger("perdure.calls")


class Over(msgspec.Struct, frozen=True):
    """The call is not run again; this is its result."""

    result: CallResult
    scoped: ScopedCall | None = None


class Interruptions:
    """One a session."""

    def __init__(
        self,
        session: Session,
        registry: Registry,
        environment_for: EnvironmentFor,
        *,
        openings: Openings,
        scopes: Scopes,
        tracing: Tracing | None,
    ) -> None:
        self._session = session
        self._registry = registry
        self._environment_for = environment_for
        self._openings = openings
        self._scopes = scopes
        self._tracing = tracing

    async def decide(self, run: Run[ToolInput, None, CallIntent], losses: int) -> OpenedCall | Over:
        """The call has an intent, and no run of this process any more: may it be run again?

        ``losses``: how often this process lost its environment under it.
        """
        intent = run.checkpoint
        agent = await self._openings.agent(run)
        tool = self._registry.find_tool(agent, run.input.name)
        call = view(self._session, run.record, run.input, intent, tool)
        environment = self._environment_for(run.conversation_id)
        scope = await self._scopes.of(environment) if intent.scoped else None
        scoped: ScopedCall | None = None
        if scope is not None:
            if self._reopen(run, tool, agent, intent, environment, scope) is None:
                call = msgspec.structs.replace(call, adoptable=False)  # no result can be made of its command
            scoped = (scope, call)
            recovery = await scope.recover(call)
            if isinstance(recovery, RecoverResult):
                self._decided(run, "result")
                return Over(scope_result(recovery.result), scoped)
            if isinstance(recovery, RecoverInterrupted):
                return await self._interrupted(run, recovery.reason, scoped)
            if recovery.attempt == "next":
                crashes = intent.crashes + run.restarts + losses
                if crashes >= MAX_CRASHES:
                    return await self._interrupted(run, f"It was cut off {crashes} times.", scoped)
                intent = msgspec.structs.replace(intent, attempt=intent.attempt + 1, crashes=crashes, scope_data=NULL)
        elif intent.scoped:
            return await self._interrupted(run, "Its environment is not there any more.")
        elif not call.replay_safe:
            return await self._interrupted(run)
        opened = self._reopen(run, tool, agent, intent, environment, scope)
        if opened is None:
            return await self._interrupted(run, "The tool cannot be run again as it is now.", scoped)
        self._decided(run, "run_again")
        return opened

    def _reopen(
        self,
        run: Run[ToolInput, None, CallIntent],
        tool: AnyTool | None,
        agent: Agent,
        intent: CallIntent,
        environment: ExecutionEnvironment | None,
        scope: CallScope | None,
    ) -> OpenedCall | None:
        """The call as it is to be run again; None if the tool there is now does not take it."""
        if tool is None or (environment is None and tool.needs_environment):
            return None
        try:
            values = tool.signature.values(from_raw(intent.arguments))
        except (InvalidArguments, ToolDefinitionError):
            return None
        same_attempt = intent.attempt == run.checkpoint.attempt
        return self._openings.open(run, tool, agent, values, intent, environment, scope, rerun=same_attempt)

    async def _interrupted(
        self,
        run: Run[ToolInput, None, CallIntent],
        reason: str = "",
        scoped: ScopedCall | None = None,
    ) -> OpenedCall | Over:
        self._decided(run, "interrupted")
        stream, output = await self._openings.committed(run)
        text = f"{INTERRUPTED} {reason}" if reason else INTERRUPTED
        return Over(error_result("interrupted", text, stream=stream, output=output), scoped)

    def _decided(self, run: Run[ToolInput, None, CallIntent], decision: CallRecovery) -> None:
        _log.info("recovered call task=%d conversation=%d decision=%s", run.id, run.conversation_id, decision)
        if self._tracing is not None:
            self._tracing.recovered(run.id, decision)
