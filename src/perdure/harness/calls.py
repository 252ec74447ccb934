"""``pi.tool``: one call of a tool, from the model's words to the committed result (rules H86 to H103).

Two commits a call: the intent, before anything is executed, and the result. ``start`` leads to the intent,
``execute`` from there to the result. A call that nobody has to be asked about has its intent in the commit that stores
the model's answer (``foresee``). An ``execute`` that finds no run of this process behind its intent comes after an
interruption: it asks the environment's scope, or the replay policies, what may be done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from perdure.harness.arguments import InvalidArguments, ToolDefinitionError
from perdure.harness.documents import Agent, Live, ToolErrorCode, ToolInput
from perdure.harness.environment import (
    CallScope,
    EnvironmentLost,
    EnvironmentRefuses,
    EnvironmentUnusable,
    ExecutionEnvironment,
    RecoverInterrupted,
    RecoverResult,
)
from perdure.harness.foreign import cancelled_itself, words_of
from perdure.harness.foresight import Foreseen, foresee
from perdure.harness.handle import CallStream, ToolCall
from perdure.harness.hook_runner import HookRunner
from perdure.harness.hooks import AfterTool, BeforeTool, HookCall, Installed
from perdure.harness.output import DEFAULT_LIMITS, Bounded
from perdure.harness.patience import TimedOut, within
from perdure.harness.progress import ProgressWriter
from perdure.harness.registry import Registry
from perdure.harness.results import (
    ABORTED,
    INTERRUPTED,
    CallResult,
    bounded_result,
    committed_stream,
    error_result,
    live_tool,
    scope_result,
    tool_failed,
    write_result,
)
from perdure.harness.scopes import (
    MAX_CRASHES,
    TOOL_TASK,
    CallIntent,
    CallView,
    EnvironmentFor,
    Scopes,
    given_up,
    leave,
    settle_aborted,
    view,
)
from perdure.harness.telemetry import CallRecovery
from perdure.harness.tool import AnyTool, ToolError, ToolResult
from perdure.harness.tracing import Tracing
from perdure.harness.wrappers import Wrapper, wrapped
from perdure.kernel.errors import PerdureError, StaleEpochError
from perdure.kernel.records import NULL, Orphaned, TaskRecord, from_raw, to_raw
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.tasks.definition import Next, Task
from perdure.tasks.errors import RunEnded
from perdure.tasks.run import Run

_log = logging.getLogger("perdure.calls")

EXECUTE: Final = "execute"
"""The phase of a call whose intent is committed."""

ScopedCall: TypeAlias = tuple[CallScope, CallView]
"""A call that a scope takes part in, and that scope."""


class _Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A call as this process runs it."""

    tool: AnyTool
    values: Mapping[str, object]
    intent: CallIntent
    call: CallView
    environment: ExecutionEnvironment | None
    """For this attempt of this call; None if the tool takes none."""
    scope: CallScope | None
    hooks: Sequence[Installed[AfterTool]]
    wrappers: Sequence[Wrapper]
    stream: CallStream
    rerun: bool
    """The same attempt ran before, in a process that ended."""

    @property
    def scoped(self) -> ScopedCall | None:
        return None if self.scope is None else (self.scope, self.call)


class _Refused(Exception):
    """The call is over before its intent."""

    def __init__(self, code: ToolErrorCode, text: str) -> None:
        super().__init__()
        self.result = error_result(code, text)


class ToolTask(Task[ToolInput, None], kind=TOOL_TASK, version=1, builtin=True):
    """Installed once a session, before its task runtime is made, with what it needs of the session."""

    def __init__(
        self,
        session: Session,
        *,
        registry: Registry,
        progress: ProgressWriter,
        environment_for: EnvironmentFor,
        drain_ms: int = 10_000,
        tracing: Tracing | None = None,
    ) -> None:
        self._session = session
        self._tracing = tracing
        self._drain_ms = drain_ms
        self._registry = registry
        self._progress = progress
        self._environment_for = environment_for
        self._hooks = HookRunner(session, registry)
        self._scopes = Scopes(session, registry, environment_for)
        self._opened: dict[int, _Opened] = {}
        """Calls of this process with an intent and no result."""
        self._foreseen: dict[int, Foreseen] = {}
        """Those with an intent whose tool has not begun."""

    # --- to the intent -----------------------------------------------------------------------------------------

    def foresee(self, conversation_id: int, agent: Agent, name: str, arguments: msgspec.Raw) -> Foreseen | None:
        """The intent of a call as its answer arrives (rule H185). None: the call's own task works it out, and tells
        what is wrong with it."""
        return foresee(self._registry, self._environment_for, conversation_id, agent, name, arguments)

    def begin_foreseen(self, tx: Transaction, input: ToolInput, foreseen: Foreseen, *, owner: int) -> TaskRecord:
        """The task of a call that stands at its intent; it is executed once this commit has settled."""
        record = tx.new_task(
            kind=TOOL_TASK,
            version=self.version,
            phase=EXECUTE,
            checkpoint=self.definition.phase(EXECUTE).encode(foreseen.intent),
            input=self.encode_input(input),
            owner=owner,
        )
        self._foreseen[record.id] = foreseen
        return record

    async def start(self, run: Run[ToolInput, None, None]) -> Next[None]:
        after = run.input.after
        if after is None or after not in self._session.live.settled:
            return await self.begin(run)
        async with run.commit() as tx:
            live = await tx.draft(Live)
            live.tools[str(run.id)] = live_tool(run.input, running=False)
            return tx.wait([after], self.begin, None)

    async def begin(self, run: Run[ToolInput, None, None]) -> Next[None]:
        with self._scopes.failing():
            try:
                opened = await self._prepare(run)
            except _Refused as refused:
                return await self._finish(run, refused.result)
            if opened.scope is None:
                return await self._intend(run, opened)
            lost: EnvironmentLost | None = None
            for _ in range(MAX_CRASHES):
                try:
                    await opened.scope.enter(opened.call)
                except EnvironmentRefuses as refusal:
                    return await self._finish(run, error_result("tool_unavailable", str(refusal)))
                except EnvironmentLost as error:
                    lost = error
                    continue
                try:
                    return await self._intend(run, opened)
                except EnvironmentLost as error:
                    lost = error  # nothing of the call is there yet
                finally:
                    if run.id not in self._opened:
                        await leave(opened.scope, opened.call, outcome=False)
            raise EnvironmentUnusable(f"the environment went away {MAX_CRASHES} times before one call") from lost

    async def _prepare(self, run: Run[ToolInput, None, None]) -> _Opened:
        """Resolve, repair, validate, before_tool, validate again. Raises _Refused."""
        agent = await self._agent(run)
        tool = self._registry.find_tool(agent, run.input.name)
        if tool is None:
            offered = ", ".join(other.name for other in self._registry.offered(agent)) or "none"
            raise _Refused("tool_unavailable", f"There is no tool {run.input.name!r}. There are: {offered}.")
        try:
            environment = self._environment(run, tool)
            arguments = tool.signature.read(run.input.arguments)
            asked = HookCall(id=run.id, conversation_id=run.conversation_id, tool=tool, arguments=arguments)
            arguments, block = await self._hooks.before_tool(self._registry.hooks(agent, BeforeTool), asked)
            if block is not None:
                raise _Refused("blocked", f"The call was blocked: {block.reason}")
            values = tool.signature.values(arguments)
        except InvalidArguments as error:
            raise _Refused("invalid_arguments", str(error)) from None
        except ToolDefinitionError as error:
            self._report(run, "tool_unusable", "a tool's definition cannot be used", error)
            raise _Refused("tool_unavailable", "This tool cannot be used: its definition is faulty.") from None
        scope = await self._scopes.of(environment)
        intent = CallIntent(arguments=to_raw(arguments, at="arguments"), replay=tool.replay, scoped=scope is not None)
        return self._open(run, tool, agent, values, intent, environment, scope)

    async def _intend(self, run: Run[ToolInput, None, None], opened: _Opened) -> Next[None]:
        """What the tool prepares for its intent, and the intent."""
        tool = opened.tool
        handle = self._handle(run, opened, CallStream())
        try:
            value = await tool.prepare_intent(opened.values, handle, opened.environment)
            raw = to_raw(value, at=f"{tool.name}.intent")
        except (EnvironmentUnusable, EnvironmentLost, StaleEpochError):
            raise
        except Exception as error:  # the tool's own code; nothing of the call was done
            return await self._finish(run, error_result("tool_error", self._words(run, error)))
        finally:
            handle.end()
        return await self._commit_intent(
            run, msgspec.structs.replace(opened, intent=msgspec.structs.replace(opened.intent, intent=raw))
        )

    # From any checkpoint on, here and below: what a phase does there does not rest on it.
    async def _commit_intent(self, run: Run[ToolInput, None, Any], opened: _Opened) -> Next[None]:
        """The commit that allows the execution."""
        try:
            async with run.commit() as tx:
                if opened.scope is not None:
                    data = await opened.scope.before_intent(tx, opened.call)
                    opened = msgspec.structs.replace(
                        opened,
                        intent=msgspec.structs.replace(opened.intent, scope_data=to_raw(data, at="scope_data")),
                        call=msgspec.structs.replace(opened.call, scope_data=data),
                    )
                live = await tx.draft(Live)
                live.tools[str(run.id)] = live_tool(run.input, running=True)
                self._opened[run.id] = opened
                return tx.go(self.execute, opened.intent)
        except BaseException:
            if not run.moved:
                self._opened.pop(run.id, None)
            raise

    # --- to the result -----------------------------------------------------------------------------------------

    async def execute(self, run: Run[ToolInput, None, CallIntent]) -> Next[None]:
        with self._scopes.failing():
            opened = self._opened.get(run.id) or self._opening(run)
            if opened is not None and opened.intent.attempt != run.checkpoint.attempt:
                opened = None
            lost: EnvironmentLost | None = None
            for losses in range(MAX_CRASHES + 1):
                try:
                    return await (self._recover(run, losses) if opened is None else self._perform(run, opened))
                except EnvironmentLost as error:
                    lost, opened = error, None
            raise given_up(lost)

    def _opening(self, run: Run[ToolInput, None, CallIntent]) -> _Opened | None:
        known = self._foreseen.get(run.id)
        if known is None:
            return None
        return self._open(run, known.tool, known.agent, known.values, known.intent, known.environment, None)

    async def _perform(self, run: Run[ToolInput, None, CallIntent], opened: _Opened) -> Next[None]:
        self._opened[run.id] = opened
        self._foreseen.pop(run.id, None)
        abandoned = True
        try:
            result = await self._result(run, opened)
            if opened.scope is not None:
                replaced = await opened.scope.capture(opened.call, result)
                result = result if replaced is None else scope_result(replaced)
            moved = await self._finish(run, result, opened.scoped)
            abandoned = False
            return moved
        except EnvironmentLost:
            abandoned = False  # it keeps its turn, and is recovered
            self._opened.pop(run.id, None)
            raise
        except (asyncio.CancelledError, RunEnded):
            # Being aborted, it goes on in on_abort from what is in memory. In a session that ends nothing does.
            abandoned = self._session.closing or self._session.failed is not None
            raise
        finally:
            if abandoned and self._opened.pop(run.id, None) is not None and opened.scope is not None:
                await leave(opened.scope, opened.call, outcome=run.moved)

    async def _result(self, run: Run[ToolInput, None, CallIntent], opened: _Opened) -> CallResult:
        """Execute, after_tool, validate the result, bound it."""
        tool = opened.tool
        result = await self._execute(run, opened)
        arguments = from_raw(opened.intent.arguments)
        assert isinstance(arguments, dict), "checked before they were stored"
        asked = HookCall(id=run.id, conversation_id=run.conversation_id, tool=tool, arguments=arguments)
        result = await self._hooks.after_tool(opened.hooks, asked, result)
        if result.code == "timeout":
            return error_result("timeout", result.text, stream=opened.stream, output=opened.stream.end())
        try:
            tool.check_result(result)
            return bounded_result(result, opened.stream, tool.output)
        except ToolError as error:
            return bounded_result(tool_failed(str(error)), opened.stream, tool.output)

    async def _execute(self, run: Run[ToolInput, None, CallIntent], opened: _Opened) -> ToolResult:
        """Run the tool's function; whatever it raises is a result."""
        tool, stream = opened.tool, opened.stream
        handle = self._handle(run, opened, stream)
        progress = self._progress.open(run.conversation_id, self._writer(run, stream))
        stream.touch = progress.touch
        if opened.rerun:
            progress.touch()
        call = wrapped(opened.wrappers, handle, partial(tool.run, opened.values, handle, opened.environment))
        if self._tracing is not None:
            call = partial(self._tracing.execute, run.record, tool.name, call)
        try:
            ended = await within(
                self._session.clock,
                tool.timeout_ms,
                call,
                drain_ms=self._drain_ms,
                on_overdue=partial(self._tell_overdue, run),
            )
            return tool.to_result(ended)
        except TimedOut:
            text = f"The call took longer than {tool.timeout_ms} ms and was stopped."
            return ToolResult(text, is_error=True, code="timeout")
        except (EnvironmentUnusable, EnvironmentLost, StaleEpochError):
            raise
        except asyncio.CancelledError:
            if not cancelled_itself():
                raise
            return tool_failed("The tool cancelled itself.")
        except Exception as error:
            if self._session.failed is not None or self._session.closing:
                raise
            return tool_failed(self._words(run, error))
        finally:
            handle.end()
            progress.close()

    def _tell_overdue(self, run: Run[ToolInput, None, Any], stack: str) -> None:
        self._session.report(
            Report(
                type="not_stopped",
                message=f"{run.input.name} took too long and did not stop within {self._drain_ms} ms:\n{stack}",
                task=run.id,
                kind=TOOL_TASK,
                conversation=run.conversation_id,
            )
        )

    async def _finish(
        self, run: Run[ToolInput, None, Any], result: CallResult, scoped: ScopedCall | None = None
    ) -> Next[None]:
        """The commit that ends the call."""
        try:
            async with run.commit() as tx:
                if scoped is not None:
                    scope, call = scoped
                    await scope.before_result(tx, call, result)
                await write_result(tx, run.id, run.conversation_id, run.input, result)
                moved = tx.abort(run.record.abort_reason or "aborted") if run.aborting else tx.complete(None)
        except (EnvironmentLost, RunEnded):
            raise
        except Exception:
            if scoped is not None and not run.moved:  # it faults: its end is written without the scope
                self._opened.pop(run.id, None)
                await leave(*scoped, outcome=False)
            raise
        self._forget(run.id)
        if scoped is not None:
            scope, call = scoped
            await leave(scope, call, outcome=True)
        return moved

    # --- after an interruption ---------------------------------------------------------------------------------

    async def _recover(self, run: Run[ToolInput, None, CallIntent], losses: int) -> Next[None]:
        """The call has an intent, and no run of this process any more: may it be run again?

        ``losses``: how often this process lost its environment under it.
        """
        intent = run.checkpoint
        agent = await self._agent(run)
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
                return await self._finish(run, scope_result(recovery.result), scoped)
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
        if intent.attempt != run.checkpoint.attempt:
            return await self._commit_intent(run, opened)
        return await self._perform(run, opened)

    def _reopen(
        self,
        run: Run[ToolInput, None, CallIntent],
        tool: AnyTool | None,
        agent: Agent,
        intent: CallIntent,
        environment: ExecutionEnvironment | None,
        scope: CallScope | None,
    ) -> _Opened | None:
        """The call as it is to be run again; None if the tool there is now does not take it."""
        if tool is None or (environment is None and tool.needs_environment):
            return None
        try:
            values = tool.signature.values(from_raw(intent.arguments))
        except (InvalidArguments, ToolDefinitionError):
            return None
        same_attempt = intent.attempt == run.checkpoint.attempt
        return self._open(run, tool, agent, values, intent, environment, scope, rerun=same_attempt)

    async def _interrupted(
        self,
        run: Run[ToolInput, None, CallIntent],
        reason: str = "",
        scoped: ScopedCall | None = None,
    ) -> Next[None]:
        self._decided(run, "interrupted")
        stream, output = await self._committed(run)
        text = f"{INTERRUPTED} {reason}" if reason else INTERRUPTED
        return await self._finish(run, error_result("interrupted", text, stream=stream, output=output), scoped)

    def _decided(self, run: Run[ToolInput, None, CallIntent], decision: CallRecovery) -> None:
        _log.info("recovered call task=%d conversation=%d decision=%s", run.id, run.conversation_id, decision)
        if self._tracing is not None:
            self._tracing.recovered(run.id, decision)

    async def on_abort(self, run: Run[ToolInput, None, object]) -> Next[None]:
        """The code has stopped. The result is the error ``aborted``, with the output so far."""
        intent = run.checkpoint
        if not isinstance(intent, CallIntent):
            return await self._finish(run, error_result("aborted", ABORTED))
        with self._scopes.failing():
            opened = self._opened.get(run.id)
            if opened is not None:
                stream, output = opened.stream, opened.stream.end()
            else:
                stream, output = await self._committed(run)
            result = error_result("aborted", ABORTED, stream=stream, output=output)
            scope = await self._scopes.of(self._environment_for(run.conversation_id)) if intent.scoped else None
            if scope is None:
                return await self._finish(run, result)
            call = view(self._session, run.record, run.input, intent, None if opened is None else opened.tool)
            running = opened is not None
            lost: EnvironmentLost | None = None
            for _ in range(MAX_CRASHES + 1):
                try:
                    decided = await settle_aborted(scope, call, result, running=running)
                    return await self._finish(run, result if decided is None else scope_result(decided), (scope, call))
                except EnvironmentLost as error:
                    lost, running = error, False
            raise given_up(lost)

    async def cleanup(self, tx: Transaction, record: TaskRecord) -> None:
        """The scheduler wrote the outcome: the call has a result all the same."""
        begun = record.id not in self._foreseen
        self._forget(record.id)
        input = msgspec.json.decode(record.raw_input, type=ToolInput)
        live = await tx.read(Live, conversation=record.conversation_id)
        shown = None if live is None else live.tools.get(str(record.id))
        stream, output = committed_stream(shown, DEFAULT_LIMITS)
        if isinstance(record.outcome, Orphaned):
            result = error_result("aborted", ABORTED, stream=stream, output=output)
        elif begun and shown is not None and shown["state"] == "running":
            result = error_result("interrupted", INTERRUPTED, stream=stream, output=output)
        else:
            result = error_result("tool_error", "The call failed before the tool began.")
        await write_result(tx, record.id, record.conversation_id, input, result)

    def _forget(self, id: int) -> None:
        self._opened.pop(id, None)
        self._foreseen.pop(id, None)

    # --- parts -------------------------------------------------------------------------------------------------

    def _open(
        self,
        run: Run[ToolInput, None, Any],
        tool: AnyTool,
        agent: Agent,
        values: Mapping[str, object],
        intent: CallIntent,
        environment: ExecutionEnvironment | None,
        scope: CallScope | None,
        *,
        rerun: bool = False,
    ) -> _Opened:
        call = view(self._session, run.record, run.input, intent, tool)
        return _Opened(
            tool=tool,
            values=values,
            intent=intent,
            call=call,
            environment=environment.for_call(call) if environment is not None and tool.uses_environment else None,
            scope=scope,
            hooks=self._registry.hooks(agent, AfterTool),
            wrappers=self._registry.wrappers(agent),
            stream=CallStream(tool.output, rerun=rerun),
            rerun=rerun,
        )

    def _handle(self, run: Run[ToolInput, None, Any], opened: _Opened, stream: CallStream) -> ToolCall:
        restarts = max(run.restarts, 1) if opened.rerun else 0
        return ToolCall(
            id=run.id,
            name=opened.tool.name,
            conversation_id=run.conversation_id,
            idempotency_key=run.idempotency_key,
            attempt=opened.intent.attempt + restarts,
            intent=from_raw(opened.intent.intent),
            stream=stream,
            context=run.context.child(),
            memo=run.memo,
        )

    def _writer(self, run: Run[ToolInput, None, Any], stream: CallStream) -> Callable[[Live], None]:
        key, input = str(run.id), run.input

        def write(live: Live) -> None:
            if key not in live.tools:
                live.tools[key] = live_tool(input, running=True)
            stream.write(live.tools[key])

        return write

    def _environment(self, run: Run[ToolInput, None, Any], tool: AnyTool) -> ExecutionEnvironment | None:
        environment = self._environment_for(run.conversation_id) if tool.uses_environment else None
        if environment is None and tool.needs_environment:
            raise _Refused("tool_unavailable", "This tool needs files or commands; this conversation has none.")
        return environment

    async def _agent(self, run: Run[ToolInput, None, Any]) -> Agent:
        return await self._session.snapshot(Agent, conversation=run.conversation_id) or Agent()

    async def _committed(self, run: Run[ToolInput, None, Any]) -> tuple[CallStream, Bounded]:
        """What the call had shown, as far as it was committed, within the limits of the tool there is now."""
        tool = self._registry.find_tool(await self._agent(run), run.input.name)
        live = await self._session.snapshot(Live, conversation=run.conversation_id)
        shown = None if live is None else live.tools.get(str(run.id))
        return committed_stream(shown, DEFAULT_LIMITS if tool is None else tool.output)

    def _words(self, run: Run[ToolInput, None, Any], error: Exception) -> str:
        """What the model is told of an exception in a tool."""
        if isinstance(error, PerdureError):
            return str(error)
        self._report(run, "tool_raised", "a tool raised; the call has an error result", error)
        return words_of(error)

    def _report(self, run: Run[ToolInput, None, Any], type: str, message: str, error: Exception) -> None:
        self._session.report(
            Report(
                type=type,
                message=f"{run.input.name}: {message}",
                task=run.id,
                kind=TOOL_TASK,
                conversation=run.conversation_id,
                error=error,
            )
        )
