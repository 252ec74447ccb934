"""``pi.tool``: one call of a tool, from the model's words to the committed result (rules H86 to H103).

Two commits a call: the intent, before anything is executed, and the result. ``start`` leads to the intent,
``execute`` from there to the result. A call that nobody has to be asked about has its intent in the commit that stores
the model's answer (``foresee``). One that needs approval waits for a decision before its intent (``approval``).
What a call is while this process runs it is in ``opened``, how its tool is run in ``execution``. An ``execute`` that
finds no run of this process behind its intent comes after an interruption: what may be done is said in
``interruption``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from perdure.harness.approval import APPROVAL, Approvals, Asked, Permission
from perdure.harness.arguments import InvalidArguments, ToolDefinitionError
from perdure.harness.documents import Agent, Live, ToolInput
from perdure.harness.environment import EnvironmentLost, EnvironmentRefuses, EnvironmentUnusable
from perdure.harness.execution import Execution, handle_of
from perdure.harness.foresight import Foreseen, foresee
from perdure.harness.handle import CallStream
from perdure.harness.hook_runner import HookRunner
from perdure.harness.hooks import BeforeTool, HookCall
from perdure.harness.interruption import Interruptions, Known, Over
from perdure.harness.nested import CALLER_ENDED, NestedCalls, WaitTask
from perdure.harness.opened import OpenedCall, Openings, Refused, ScopedCall
from perdure.harness.output import DEFAULT_LIMITS
from perdure.harness.permission import Permissions, RuleGone, edited_arguments, permission_of
from perdure.harness.person import People
from perdure.harness.progress import ProgressWriter
from perdure.harness.registry import Registry
from perdure.harness.results import (
    ABORTED,
    INTERRUPTED,
    CallResult,
    asking_tool,
    committed_stream,
    error_result,
    live_tool,
    scope_result,
    with_edited_arguments,
    write_result,
)
from perdure.harness.scopes import (
    MAX_CRASHES,
    TOOL_TASK,
    CallIntent,
    EnvironmentFor,
    Scopes,
    given_up,
    leave,
    settle_aborted,
    view,
)
from perdure.harness.tool import AnyTool
from perdure.harness.tracing import Tracing
from perdure.kernel.errors import StaleEpochError
from perdure.kernel.json import JsonValue, same_json
from perdure.kernel.records import Orphaned, TaskRecord, from_raw, to_raw
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.tasks.definition import Next, Task
from perdure.tasks.errors import RunEnded
from perdure.tasks.run import Run

if TYPE_CHECKING:
    from perdure.harness.harness import Harness

EXECUTE: Final = "execute"
"""The phase of a call whose intent is committed."""


MOST_LOOKS: Final = 3
"""How often a call looks for a rule that decides it, where rules change meanwhile, before a person is asked."""


class ToolTask(Task[ToolInput, int | None], kind=TOOL_TASK, version=1, builtin=True):
    """Installed once a session, before its task runtime is made, with what it needs of the session.

    A nested call completes with the entry of its result, which is how its caller finds that.
    """

    def __init__(
        self,
        session: Session,
        *,
        registry: Registry,
        progress: ProgressWriter,
        environment_for: EnvironmentFor,
        wait: WaitTask,
        approvals: Approvals | None = None,
        harness: Harness | None = None,
        drain_ms: int = 10_000,
        tracing: Tracing | None = None,
    ) -> None:
        self._session = session
        self._registry = registry
        self._environment_for = environment_for
        self._hooks = HookRunner(session, registry)
        self._permissions = Permissions(session, approvals or Approvals())
        self._scopes = Scopes(session, registry, environment_for)
        self._openings = Openings(session, registry, environment_for)
        self._nested = NestedCalls(
            session, self._hooks, environment_for, begin=self.begin_call, look=self.foresee, wait=wait
        )
        self._execution = Execution(
            session,
            self._openings,
            hooks=self._hooks,
            progress=progress,
            drain_ms=drain_ms,
            tracing=tracing,
            nested=self._nested,
            harness=harness,
            people=People(session, wait=wait),
        )
        self._interruptions = Interruptions(
            session,
            registry,
            environment_for,
            openings=self._openings,
            scopes=self._scopes,
            drain_ms=drain_ms,
            tracing=tracing,
        )
        self._opened: dict[int, OpenedCall] = {}
        """Calls of this process with an intent and no result."""
        self._foreseen: dict[int, Foreseen] = {}
        """Those with an intent whose tool has not begun."""

    # --- to the intent -----------------------------------------------------------------------------------------

    def foresee(self, conversation_id: int, agent: Agent, input: ToolInput) -> Foreseen | None:
        """The intent of a call as its answer arrives (rule H185). None: the call's own task works it out, and tells
        what is wrong with it."""
        return foresee(self._registry, self._permissions, self._environment_for, conversation_id, agent, input)

    def begin_call(
        self, run: Run[Any, Any, Any], tx: Transaction, live: Live, agent: Agent, input: ToolInput, *, hooked: bool
    ) -> TaskRecord:
        """The task of a call, owned by the task of ``run`` and shown in ``pi.live``: at its intent if that can be
        foreseen. ``hooked``: before_tool hooks apply to it."""
        foreseen = None
        if input.after is None and not hooked:
            foreseen = self.foresee(run.conversation_id, agent, input)
        if foreseen is None:
            task = tx.create_task(ToolTask, input, owner=run.id)
        else:
            task = self.begin_foreseen(tx, input, foreseen, owner=run.id)
        live.tools[str(task.id)] = live_tool(input, running=foreseen is not None)
        return task

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

    async def start(self, run: Run[ToolInput, int | None, None]) -> Next[int | None]:
        after = run.input.after
        if after is None or after not in self._session.live.settled:
            return await self.begin(run)
        async with run.commit() as tx:
            live = await tx.draft(Live)
            live.tools[str(run.id)] = live_tool(run.input, running=False)
            return tx.wait([after], self.begin, None)

    async def begin(self, run: Run[ToolInput, int | None, None]) -> Next[int | None]:
        await self._nested.caller_at_work(run.input)
        with self._scopes.failing():
            try:
                opened = await self._prepare(run)
                with self._refusing(run):  # what looks at the arguments again may find them wrong now
                    if self._permissions.may_ask(opened.tool) and self._permissions.needed(run, opened):
                        return await self._ask(run, opened)
                return await self._enter(run, opened)
            except Refused as refused:
                return await self._finish(run, refused.result)

    async def _prepare(self, run: Run[ToolInput, int | None, None]) -> OpenedCall:
        """Resolve, repair, validate, before_tool, validate again. Raises Refused."""
        agent, tool = await self._resolve(run)
        with self._refusing(run):
            arguments = tool.signature.read(run.input.arguments)
            arguments = await self._ask_hooks(run, agent, tool, arguments)
            return await self._open(run, agent, tool, arguments)

    async def _resolve(self, run: Run[ToolInput, int | None, Any]) -> tuple[Agent, AnyTool]:
        agent = await self._openings.agent(run)
        tool = self._registry.called(agent, run.input)
        if tool is None:
            offered = ", ".join(other.name for other in self._registry.offered(agent)) or "none"
            raise Refused("tool_unavailable", f"There is no tool {run.input.name!r}. There are: {offered}.")
        return agent, tool

    @contextmanager
    def _refusing(self, run: Run[ToolInput, int | None, Any]) -> Generator[None]:
        """What is wrong with the arguments or the tool ends the call."""
        try:
            yield
        except InvalidArguments as error:
            raise Refused("invalid_arguments", str(error)) from None
        except ToolDefinitionError as error:
            self._openings.report(run, "tool_unusable", "a tool's definition cannot be used", error)
            raise Refused("tool_unavailable", "This tool cannot be used: its definition is faulty.") from None

    async def _ask_hooks(
        self, run: Run[ToolInput, int | None, Any], agent: Agent, tool: AnyTool, arguments: dict[str, JsonValue]
    ) -> dict[str, JsonValue]:
        asked = HookCall(id=run.id, conversation_id=run.conversation_id, tool=tool, arguments=arguments)
        arguments, block = await self._hooks.before_tool(self._registry.hooks(agent, BeforeTool), asked)
        if block is not None:
            raise Refused("blocked", f"The call was blocked: {block.reason}")
        return arguments

    async def _open(
        self,
        run: Run[ToolInput, int | None, Any],
        agent: Agent,
        tool: AnyTool,
        arguments: dict[str, JsonValue],
        permission: Permission | None = None,
    ) -> OpenedCall:
        environment = self._openings.environment(run, tool)
        values = tool.signature.values(arguments)
        scope = await self._scopes.of(environment)
        if scope is not None and await self._nested.held_above(run, scope):
            raise Refused("tool_unavailable", "A call above this one is at work in the same environment and holds it.")
        intent = CallIntent(
            arguments=to_raw(arguments, at="arguments"),
            replay=tool.replay,
            scoped=scope is not None,
            approval=permission,
        )
        return self._openings.open(run, tool, agent, values, intent, environment, scope)

    # --- approval ----------------------------------------------------------------------------------------------

    async def _ask(self, run: Run[ToolInput, int | None, None], opened: OpenedCall) -> Next[int | None]:
        """A rule decides, or the commit asks a person."""
        for _ in range(MOST_LOOKS):
            permission = await self._permissions.by_rule(opened)
            if permission is None:
                break
            intent = msgspec.structs.replace(opened.intent, approval=permission)
            with suppress(RuleGone):  # it decides no more since just now; another may
                return await self._enter(run, msgspec.structs.replace(opened, intent=intent))
        async with run.commit() as tx:
            asked = self._permissions.question(opened, at=tx.at)
            live = await tx.draft(Live)
            live.tools[str(run.id)] = asking_tool(run.input, asked)
            return tx.wait_signal(APPROVAL, self.approval, asked, deadline=asked.expires_at)

    async def approval(self, run: Run[ToolInput, int | None, Asked]) -> Next[int | None]:
        """A decision is there, or the question has expired (rules H110 to H114)."""
        await self._nested.caller_at_work(run.input)
        with self._scopes.failing():
            try:
                return await self._enter(run, await self._allowed(run))
            except Refused as refused:
                return await self._finish(run, refused.result)

    async def _allowed(self, run: Run[ToolInput, int | None, Asked]) -> OpenedCall:
        """The call as it was allowed. Raises Refused."""
        decision = self._permissions.decided(run)
        agent, tool = await self._resolve(run)
        with self._refusing(run):
            arguments = decision.arguments
            if arguments is None:
                arguments = cast("dict[str, JsonValue]", from_raw(run.checkpoint.arguments))
            elif not same_json(await self._ask_hooks(run, agent, tool, arguments), arguments):
                # What would run then is not what was allowed.
                raise Refused("blocked", "The call was blocked: a check would change the arguments that were allowed.")
            permission = permission_of(run.checkpoint, decision, tool.name, arguments)
            return await self._open(run, agent, tool, arguments, permission)

    async def _enter(self, run: Run[ToolInput, int | None, Any], opened: OpenedCall) -> Next[int | None]:
        """The environment's scope, if it has one, takes the call up before its intent. Raises Refused, RuleGone."""
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

    async def _intend(self, run: Run[ToolInput, int | None, Any], opened: OpenedCall) -> Next[int | None]:
        """What the tool prepares for its intent, and the intent."""
        tool = opened.tool
        handle = handle_of(run, opened, CallStream())
        try:
            value = await tool.prepare_intent(opened.values, handle, opened.environment)
            raw = to_raw(value, at=f"{tool.name}.intent")
        except (EnvironmentUnusable, EnvironmentLost, StaleEpochError):
            raise
        except Exception as error:  # the tool's own code; nothing of the call was done
            return await self._finish(run, error_result("tool_error", self._openings.words(run, error)))
        finally:
            handle.end()
        return await self._commit_intent(
            run, msgspec.structs.replace(opened, intent=msgspec.structs.replace(opened.intent, intent=raw))
        )

    # From any checkpoint on, here and below: what a phase does there does not rest on it.
    async def _commit_intent(self, run: Run[ToolInput, int | None, Any], opened: OpenedCall) -> Next[int | None]:
        """The commit that allows the execution. Raises Refused, RuleGone."""
        try:
            async with run.commit() as tx:
                if opened.intent.approval is not None and not isinstance(run.checkpoint, CallIntent):
                    await self._permissions.check(tx, run, opened)
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

    async def execute(self, run: Run[ToolInput, int | None, CallIntent]) -> Next[int | None]:
        await self._nested.caller_at_work(run.input)
        with self._scopes.failing():
            opened = self._opened.get(run.id) or self._opening(run)
            if opened is not None and opened.intent.attempt != run.checkpoint.attempt:
                opened = None
            lost: EnvironmentLost | None = None
            for losses in range(MAX_CRASHES + 1):
                try:
                    return await (self._run_again(run, losses) if opened is None else self._perform(run, opened))
                except EnvironmentLost as error:
                    lost, opened = error, None
            raise given_up(lost)

    def _opening(self, run: Run[ToolInput, int | None, CallIntent]) -> OpenedCall | None:
        known = self._foreseen.get(run.id)
        if known is None:
            return None
        return self._openings.open(run, known.tool, known.agent, known.values, known.intent, known.environment, None)

    async def _perform(self, run: Run[ToolInput, int | None, CallIntent], opened: OpenedCall) -> Next[int | None]:
        self._opened[run.id] = opened
        self._foreseen.pop(run.id, None)
        abandoned = True
        try:
            result = await self._execution.result(run, opened)
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

    async def _finish(
        self, run: Run[ToolInput, int | None, Any], result: CallResult, scoped: ScopedCall | None = None
    ) -> Next[int | None]:
        """The commit that ends the call."""
        intent = run.checkpoint
        if isinstance(intent, CallIntent) and intent.approval is not None and intent.approval.edited:
            result = with_edited_arguments(result, intent.arguments, nested=run.input.caller is not None)
        try:
            async with run.commit() as tx:
                if scoped is not None:
                    scope, call = scoped
                    await scope.before_result(tx, call, result)
                entry = await write_result(tx, run.id, run.conversation_id, run.input, result)
                if run.aborting:
                    moved = tx.abort(run.record.abort_reason or "aborted")
                else:
                    tx.abort_owned(CALLER_ENDED)
                    moved = tx.complete(None if run.input.caller is None else entry.id)
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

    async def _run_again(self, run: Run[ToolInput, int | None, CallIntent], losses: int) -> Next[int | None]:
        """The call has an intent, and no run of this process any more."""
        decided = await self._interruptions.decide(run, losses)
        if isinstance(decided, Over):
            return await self._finish(run, decided.result, decided.scoped)
        if isinstance(decided, Known):
            return await self._finish(run, await self._execution.concluded(run, decided.opened, decided.result))
        if decided.intent.attempt != run.checkpoint.attempt:
            return await self._commit_intent(run, decided)
        if run.restarts and self._nested.goes_on(run):
            async with run.commit() as tx:
                tx.went_on()
        return await self._perform(run, decided)

    async def on_abort(self, run: Run[ToolInput, int | None, object]) -> Next[int | None]:
        """The code has stopped. The result is the error ``aborted``, with the output so far."""
        intent = run.checkpoint
        if not isinstance(intent, CallIntent):
            return await self._finish(run, error_result("aborted", ABORTED))
        with self._scopes.failing():
            opened = self._opened.get(run.id)
            if opened is not None:
                stream, output = opened.stream, opened.stream.end()
            else:
                stream, output = await self._openings.committed(run)
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
            if (edited := edited_arguments(record)) is not None:
                result = with_edited_arguments(result, edited, nested=input.caller is not None)
        else:
            result = error_result("tool_error", "The call failed before the tool began.")
        await write_result(tx, record.id, record.conversation_id, input, result)

    def _forget(self, id: int) -> None:
        self._opened.pop(id, None)
        self._foreseen.pop(id, None)
