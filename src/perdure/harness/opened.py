"""A call as this process runs it: its tool, what it is given, its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakSet

import msgspec

from perdure.harness.documents import Agent, Live, ToolErrorCode, ToolInput
from perdure.harness.environment import CallScope, ExecutionEnvironment
from perdure.harness.foreign import words_of
from perdure.harness.handle import CallStream
from perdure.harness.hooks import AfterTool, Installed
from perdure.harness.output import DEFAULT_LIMITS, Bounded
from perdure.harness.registry import Registry
from perdure.harness.results import committed_stream, error_result
from perdure.harness.scopes import TOOL_TASK, CallIntent, CallView, EnvironmentFor, view
from perdure.harness.tool import AnyTool
from perdure.harness.wrappers import Wrapper
from perdure.kernel.errors import PerdureError
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Straggler
from perdure.tasks.run import Run

ScopedCall: TypeAlias = tuple[CallScope, CallView]
"""A call that a scope takes part in, and that scope."""


class OpenedCall(msgspec.Struct, frozen=True, kw_only=True):
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


class Refused(Exception):
    """The call is over before its intent."""

    def __init__(self, code: ToolErrorCode, text: str) -> None:
        super().__init__()
        self.result = error_result(code, text)


class Openings:
    """Opens calls: what a call needs of the session, its conversation and its tool."""

    def __init__(self, session: Session, registry: Registry, environment_for: EnvironmentFor) -> None:
        self._session = session
        self._registry = registry
        self._environment_for = environment_for
        self._used: WeakSet[ExecutionEnvironment] = WeakSet()
        session.on_stop(self._end_background)

    async def _end_background(self, _: int) -> Sequence[Straggler]:
        """The calls have stopped; what they left in the background ends with the session where it must (rule H368)."""
        for environment in list(self._used):
            try:
                await environment.end_background()
            except Exception as error:
                message = "a command in the background was not ended"
                self._session.report(Report(type="background_left", message=message, error=error))
        return ()

    def open(
        self,
        run: Run[ToolInput, int | None, Any],
        tool: AnyTool,
        agent: Agent,
        values: Mapping[str, object],
        intent: CallIntent,
        environment: ExecutionEnvironment | None,
        scope: CallScope | None,
        *,
        rerun: bool = False,
    ) -> OpenedCall:
        call = view(self._session, run.record, run.input, intent, tool)
        mine = None
        if environment is not None and tool.uses_environment:
            mine = environment.for_call(call)
            self._used.add(environment)
        return OpenedCall(
            tool=tool,
            values=values,
            intent=intent,
            call=call,
            environment=mine,
            scope=scope,
            hooks=self._registry.hooks(agent, AfterTool),
            wrappers=self._registry.wrappers(agent),
            stream=CallStream(tool.output, rerun=rerun),
            rerun=rerun,
        )

    def environment(self, run: Run[ToolInput, int | None, Any], tool: AnyTool) -> ExecutionEnvironment | None:
        environment = self._environment_for(run.conversation_id) if tool.uses_environment else None
        if environment is None and tool.needs_environment:
            raise Refused("tool_unavailable", "This tool needs files or commands; this conversation has none.")
        return environment

    async def agent(self, run: Run[ToolInput, int | None, Any]) -> Agent:
        return await self._session.snapshot(Agent, conversation=run.conversation_id) or Agent()

    async def committed(self, run: Run[ToolInput, int | None, Any]) -> tuple[CallStream, Bounded]:
        """What the call had shown, as far as it was committed, within the limits of the tool there is now."""
        tool = self._registry.called(await self.agent(run), run.input)
        live = await self._session.snapshot(Live, conversation=run.conversation_id)
        shown = None if live is None else live.tools.get(str(run.id))
        return committed_stream(shown, DEFAULT_LIMITS if tool is None else tool.output)

    def words(self, run: Run[ToolInput, int | None, Any], error: Exception) -> str:
        """What the model is told of an exception in a tool."""
        if isinstance(error, PerdureError):
            return str(error)
        self.report(run, "tool_raised", "a tool raised; the call has an error result", error)
        return words_of(error)

    def report(self, run: Run[ToolInput, int | None, Any], type: str, message: str, error: Exception) -> None:
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
