"""One invocation: an asyncio task that runs a task's phases one after the other, until it leaves Running."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from contextvars import Context as ContextVars
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, cast

from perdure.kernel.context import BACKGROUND
from perdure.kernel.records import Faulted, Orphaned, Outcome, Running, TaskError, TaskRecord
from perdure.kernel.reports import Report
from perdure.kernel.transaction import Transaction
from perdure.tasks.blocking import Blocked, Fit
from perdure.tasks.derive import Host, decided, stood_down
from perdure.tasks.errors import NoProgress, error_text, is_own_failure
from perdure.tasks.run import Run

if TYPE_CHECKING:
    from perdure.kernel.session import Session

MAX_STACK = 50
"""Frames of a stack that is reported."""


class InvocationHost(Host, Protocol):
    """What an invocation asks of the runtime."""

    @property
    def session(self) -> Session: ...
    @property
    def running(self) -> bool:
        """Whether code may run at all: the session is neither closing nor failed."""
        ...

    def resolve(self, record: TaskRecord) -> Fit | Blocked: ...
    async def outcome(self, id: int) -> Outcome | None:
        """How a task ended, if it has."""
        ...


class Invocation:
    """Runs one task. Made when the commit that allows it has settled; ended when its asyncio task is done."""

    __slots__ = ("_host", "aborting", "context", "id", "kind", "phase", "stopping", "task")

    def __init__(self, host: InvocationHost, record: TaskRecord, variables: ContextVars) -> None:
        assert isinstance(record.state, Running)
        self._host = host
        self.id = record.id
        self.kind = record.kind
        self.phase = record.state.phase
        self.aborting = record.abort_requested
        """It runs the abort handler."""
        self.context = BACKGROUND.child()
        self.stopping = False
        """It was asked to stop."""
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(
            self._phases(), name=f"{record.kind} {record.id}", context=variables
        )

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.phase} (task {self.id})"

    def stop(self) -> None:
        """Ask the code to stop, once."""
        if not self.stopping:
            self.stopping = True
            self.context.cancel("its task is stopped")
            self.task.cancel()

    def stack(self) -> str:
        """Where the code stands, innermost last."""
        return stack_of(self.task.get_coro())

    # --- running -----------------------------------------------------------------------------------------------

    async def _phases(self) -> None:
        session = self._host.session
        try:
            while self._host.running and not self.stopping:
                record = session.live.settled.get(self.id)
                if record is None or not isinstance(record.state, Running):
                    return
                assert record.abort_requested == self.aborting, "a run whose task is marked was asked to stop"
                fit = self._host.resolve(record)
                if isinstance(fit, Blocked):
                    await self._stand_down(record, fit)
                    return
                outcomes = [(id, await self._host.outcome(id)) for id in record.state.on]
                # An abort handler may run while tasks that were waited for, but not owned, go on.
                results = {id: outcome for id, outcome in outcomes if outcome is not None}
                run: Run[Any, Any, Any] = Run(
                    session, self._host, record, fit, context=self.context, results=results, aborting=self.aborting
                )
                await self._phase(run)
                if not run.moved:
                    return
        finally:
            self.context.cancel("its run has ended")

    # The types of the run's values are the definition's business.
    async def _phase(self, run: Run[Any, Any, Any]) -> None:
        self.phase = "on_abort" if self.aborting else run.phase
        error: BaseException | None = None
        try:
            await getattr(run.fit.task, self.phase)(run)
        except BaseException as raised:
            if not is_own_failure(raised, self.task) or (self.stopping and isinstance(raised, asyncio.CancelledError)):
                raise
            error = raised  # the task's own code: its failure is the task's (rule T19)
        finally:
            run.ended = "its phase has ended"
        if not run.moved and error is None:
            error = NoProgress(f"{self.kind}.{self.phase} returned without having committed what comes next")
        if error is None or self.stopping or not self._host.running:
            return
        self._report_error(run, error)
        if not run.moved:
            await self._fault(run, error)

    def _report_error(self, run: Run[Any, Any, Any], error: BaseException) -> None:
        after = " after it had moved the task on, which stands" if run.moved else "; the task is faulted"
        said = "made no progress" if isinstance(error, NoProgress) else f"raised {type(error).__name__}"
        self._host.report(
            Report(
                type="task_error" if run.moved else "task_faulted",
                message=f"{self.kind}.{self.phase} {said}{after}",
                task=self.id,
                kind=self.kind,
                conversation=run.conversation_id,
                error=error,
            )
        )

    async def _fault(self, run: Run[Any, Any, Any], error: BaseException) -> None:
        code = "no_progress" if isinstance(error, NoProgress) else "exception"
        text = str(error) if isinstance(error, NoProgress) else error_text(error)
        async with self._commit(run.conversation_id) as tx:
            record = tx.live_task(self.id)
            if record is not None and record.state is run.state and record.abort_requested == self.aborting:
                tx.put_task(decided(record, Faulted(TaskError(code, text))))

    async def _stand_down(self, record: TaskRecord, blocked: Blocked) -> None:
        """No code fits at this phase boundary: the task waits for some, or, being aborted, is orphaned (T31, T82)."""
        async with self._commit(record.conversation_id) as tx:
            now = tx.live_task(self.id)
            if now is not None and now.state is record.state and now.abort_requested == self.aborting:
                tx.put_task(decided(now, Orphaned(blocked.reason)) if self.aborting else stood_down(now))

    def _commit(self, conversation_id: int) -> Transaction:
        return Transaction(self._host.session, conversation_id=conversation_id, by_task=self.id)


# The objects a suspended coroutine waits for have no common type.
def stack_of(coroutine: Coroutine[Any, Any, Any] | Any) -> str:
    """The suspended frames of a coroutine and what it awaits, innermost last."""
    lines: list[str] = []
    awaited: object = coroutine
    while awaited is not None and len(lines) < MAX_STACK:
        for prefix in ("cr", "gi", "ag"):
            code = cast("CodeType | None", getattr(awaited, f"{prefix}_code", None))
            if code is not None:
                frame = getattr(awaited, f"{prefix}_frame", None)
                line = code.co_firstlineno if frame is None else frame.f_lineno
                summary = traceback.FrameSummary(code.co_filename, line, code.co_qualname)
                lines.extend(traceback.format_list([summary]))
                awaited = getattr(awaited, f"{prefix}_await", None) or getattr(awaited, f"{prefix}_yieldfrom", None)
                break
        else:
            lines.append(f"  waiting for {type(awaited).__name__}\n")
            break
    return "".join(lines)
