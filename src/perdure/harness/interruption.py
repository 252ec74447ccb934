"""What becomes of a call whose intent is committed and that no process runs any more (rules H91 to H93)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from perdure.harness.arguments import InvalidArguments, ToolDefinitionError
from perdure.harness.documents import Agent, ToolInput
from perdure.harness.environment import (
    CallScope,
    EnvironmentLost,
    EnvironmentUnusable,
    ExecutionEnvironment,
    RecoverInterrupted,
    RecoverResult,
)
from perdure.harness.execution import handle_of
from perdure.harness.foreign import cancelled_itself
from perdure.harness.handle import CallStream
from perdure.harness.opened import OpenedCall, Openings, ScopedCall
from perdure.harness.patience import TimedOut, within
from perdure.harness.reconcile import RECONCILE_TIMEOUT_MS, Done, NeverHappened, Unknown
from perdure.harness.registry import Registry
from perdure.harness.results import INTERRUPTED, CallResult, error_result, scope_result
from perdure.harness.scopes import MAX_CRASHES, CallIntent, EnvironmentFor, Scopes, view
from perdure.harness.telemetry import CallRecovery
from perdure.harness.tool import AnyTool, ToolResult
from perdure.harness.tracing import Tracing
from perdure.kernel.errors import StaleEpochError
from perdure.kernel.records import NULL, from_raw
from perdure.kernel.reports import Report, log_line
from perdure.kernel.session import Session
from perdure.tasks.run import Run

_log = logging.getLogger("perdure.calls")


class Over(msgspec.Struct, frozen=True):
    """The call is not run again; this is its result."""

    result: CallResult
    scoped: ScopedCall | None = None


class Known(msgspec.Struct, frozen=True):
    """The outside knows the call's result."""

    opened: OpenedCall
    result: ToolResult


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
        drain_ms: int,
        tracing: Tracing | None,
    ) -> None:
        self._session = session
        self._registry = registry
        self._environment_for = environment_for
        self._openings = openings
        self._scopes = scopes
        self._drain_ms = drain_ms
        self._tracing = tracing

    async def decide(self, run: Run[ToolInput, int | None, CallIntent], losses: int) -> OpenedCall | Known | Over:
        """The call has an intent, and no run of this process any more: may it be run again?

        ``losses``: how often this process lost its environment under it.
        """
        intent = run.checkpoint
        agent = await self._openings.agent(run)
        tool = self._registry.called(agent, run.input)
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
        elif tool is not None and tool.reconciles:
            return await self._reconcile(run, self._reopen(run, tool, agent, intent, environment, None))
        elif not call.replay_safe:
            return await self._interrupted(run)
        opened = self._reopen(run, tool, agent, intent, environment, scope)
        if opened is None:
            return await self._interrupted(run, "The tool cannot be run again as it is now.", scoped)
        self._decided(run, "run_again")
        return opened

    def _reopen(
        self,
        run: Run[ToolInput, int | None, CallIntent],
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

    # --- by asking the outside ---------------------------------------------------------------------------------

    async def _reconcile(
        self, run: Run[ToolInput, int | None, CallIntent], opened: OpenedCall | None
    ) -> OpenedCall | Known | Over:
        """Whatever its replay policy is: the outside knows better. A process that ends meanwhile asks again."""
        if opened is None:
            return await self._interrupted(run, "The tool cannot be asked about it as it is now.")
        opened_to_ask = msgspec.structs.replace(opened, stream=CallStream(opened.tool.output))
        answer = await self._asked(run, opened_to_ask)
        if isinstance(answer, NeverHappened):
            self._decided(run, "run_again")
            return opened
        if isinstance(answer, Unknown):
            return await self._interrupted(run, answer.reason)
        try:
            result = opened.tool.to_result(answer.result)
        except Exception as error:  # it took effect, whatever is wrong with what is told of it
            self._openings.report(run, "reconcile_failed", "the result that reconcile gave cannot be stored", error)
            return await self._interrupted(run)
        self._decided(run, "result")
        return Known(opened_to_ask, result)

    async def _asked(
        self, run: Run[ToolInput, int | None, CallIntent], opened: OpenedCall
    ) -> Done | NeverHappened | Unknown:
        handle = handle_of(run, opened, opened.stream)
        try:
            answer = await within(
                self._session.clock,
                RECONCILE_TIMEOUT_MS,
                partial(opened.tool.ask_outside, opened.values, handle, opened.environment),
                drain_ms=self._drain_ms,
                on_overdue=partial(self._tell_overdue, run),
            )
            if isinstance(answer, (Done, NeverHappened, Unknown)):
                return answer
            raise TypeError(f"reconcile says Done, NeverHappened or Unknown, not {type(answer).__name__}")
        except TimedOut:
            return Unknown(f"Asking about it took longer than {RECONCILE_TIMEOUT_MS} ms.")
        except (EnvironmentUnusable, EnvironmentLost, StaleEpochError):
            raise
        except asyncio.CancelledError:
            if not cancelled_itself():
                raise
            return Unknown("Asking about it was cancelled.")
        except Exception as error:
            if self._session.failed is not None or self._session.closing:
                raise
            self._openings.report(run, "reconcile_failed", "reconcile raised; the call ends interrupted", error)
            return Unknown()
        finally:
            handle.end()

    def _tell_overdue(self, run: Run[ToolInput, int | None, CallIntent], stack: str) -> None:
        self._session.report(
            Report(
                type="not_stopped",
                message=f"reconcile of {run.input.name} did not stop within {self._drain_ms} ms:\n{stack}",
                task=run.id,
                kind=run.record.kind,
                conversation=run.conversation_id,
            )
        )

    async def _interrupted(
        self,
        run: Run[ToolInput, int | None, CallIntent],
        reason: str = "",
        scoped: ScopedCall | None = None,
    ) -> Over:
        self._decided(run, "interrupted")
        stream, output = await self._openings.committed(run)
        text = f"{INTERRUPTED} {reason}" if reason else INTERRUPTED
        return Over(error_result("interrupted", text, stream=stream, output=output), scoped)

    def _decided(self, run: Run[ToolInput, int | None, CallIntent], decision: CallRecovery) -> None:
        log_line(_log, "recovered call task=%d conversation=%d decision=%s", run.id, run.conversation_id, decision)
        if self._tracing is not None:
            self._tracing.recovered(run.id, decision)
