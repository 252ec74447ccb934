"""The execution of a call whose intent is committed: the tool's function, the hooks after it, the result within its
limits (rules H92 to H97)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.harness.documents import Live, ToolInput
from perdure.harness.environment import EnvironmentLost, EnvironmentUnusable
from perdure.harness.foreign import cancelled_itself
from perdure.harness.handle import AskPerson, CallStream, MakeCall, ToolCall
from perdure.harness.hook_runner import HookRunner
from perdure.harness.hooks import HookCall
from perdure.harness.nested import NestedCalls
from perdure.harness.opened import OpenedCall, Openings
from perdure.harness.patience import TimedOut, within
from perdure.harness.person import People, QuestionExpired
from perdure.harness.progress import ProgressWriter
from perdure.harness.results import CallResult, bounded_result, error_result, live_tool, tool_failed
from perdure.harness.scopes import TOOL_TASK, CallIntent
from perdure.harness.tool import ToolError, ToolResult
from perdure.harness.tracing import Tracing
from perdure.harness.wrappers import wrapped
from perdure.kernel.errors import StaleEpochError
from perdure.kernel.records import from_raw
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.tasks.run import Run

if TYPE_CHECKING:
    from perdure.harness.harness import Harness


class Execution:
    """One a session."""

    def __init__(
        self,
        session: Session,
        openings: Openings,
        *,
        hooks: HookRunner,
        progress: ProgressWriter,
        drain_ms: int,
        tracing: Tracing | None,
        nested: NestedCalls,
        harness: Harness | None,
        people: People,
    ) -> None:
        self._session = session
        self._nested = nested
        self._harness = harness
        self._people = people
        self._openings = openings
        self._hooks = hooks
        self._progress = progress
        self._drain_ms = drain_ms
        self._tracing = tracing

    async def result(self, run: Run[ToolInput, int | None, CallIntent], opened: OpenedCall) -> CallResult:
        """Execute, after_tool, validate the result, bound it."""
        return await self.concluded(run, opened, await self._execute(run, opened))

    async def concluded(
        self, run: Run[ToolInput, int | None, CallIntent], opened: OpenedCall, result: ToolResult
    ) -> CallResult:
        """What is stored of a result, whether the tool has just given it or the outside knew it."""
        tool = opened.tool
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

    async def _execute(self, run: Run[ToolInput, int | None, CallIntent], opened: OpenedCall) -> ToolResult:
        """Run the tool's function; whatever it raises is a result."""
        tool, stream = opened.tool, opened.stream
        make_call, ask_person = partial(self._nested.call, run), partial(self._people.ask, run)
        handle = handle_of(run, opened, stream, make_call=make_call, ask_person=ask_person, harness=self._harness)
        self._nested.began(run.id)
        progress = self._progress.open(run.conversation_id, _writer(run, stream))
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
        except QuestionExpired as error:
            return ToolResult(str(error), is_error=True, code="expired")
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
            return tool_failed(self._openings.words(run, error))
        finally:
            handle.end()
            progress.close()
            self._nested.ended(run.id)

    def _tell_overdue(self, run: Run[ToolInput, int | None, Any], stack: str) -> None:
        self._session.report(
            Report(
                type="not_stopped",
                message=f"{run.input.name} took too long and did not stop within {self._drain_ms} ms:\n{stack}",
                task=run.id,
                kind=TOOL_TASK,
                conversation=run.conversation_id,
            )
        )


def handle_of(
    run: Run[ToolInput, int | None, Any],
    opened: OpenedCall,
    stream: CallStream,
    *,
    make_call: MakeCall | None = None,
    harness: Harness | None = None,
    ask_person: AskPerson | None = None,
) -> ToolCall:
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
        make_call=make_call,
        harness=harness,
        ask_person=ask_person,
    )


def _writer(run: Run[ToolInput, int | None, Any], stream: CallStream) -> Callable[[Live], None]:
    key, input = str(run.id), run.input

    def write(live: Live) -> None:
        if key not in live.tools:
            live.tools[key] = live_tool(input, running=True)
        stream.write(live.tools[key])

    return write
