"""Harnesses on a simulated host, and what their scenarios have in common: scripted models, tools, entries.

Models are scripts, so that what they say depends on the request alone; what they are asked takes some virtual time,
so that partial answers are committed and a kill may come between two of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

from perdure.harness.approval import Approvals
from perdure.harness.compaction_policy import Compaction
from perdure.harness.conversation import Conversation
from perdure.harness.handle import ToolCall
from perdure.harness.harness import Harness
from perdure.harness.hooks import Hook
from perdure.harness.limits import Limits
from perdure.harness.messages import SystemMessage, UserMessage
from perdure.harness.model import ModelRequest, Models
from perdure.harness.registry import Extension
from perdure.harness.settings import AfterFailure, PollPolicy, RetryPolicy
from perdure.harness.submission import Submission, Unanswered
from perdure.harness.summary import TASK
from perdure.harness.tool import AnyTool, ToolResult, tool
from perdure.kernel.entries import Entry
from perdure.kernel.json import JsonValue
from perdure.testing.faulty_models import Cue, FaultyModels
from perdure.testing.model import Reply, Script, ScriptedModel
from perdure.testing.normal import Records, Rules
from perdure.testing.simulation import Host, Scenario

STORY = (
    "Once upon a time there was a process that was killed at every line, and told its story to the end all the same. "
)

Replies = Script | Sequence[Reply] | Mapping[str, Reply | Sequence[Reply]] | Reply


class Remark(Entry, kind="app.remark"):
    """A note for people; no model reads it."""

    text: str


class Fact(Entry, kind="app.fact"):
    """Something the model is told without being asked."""

    text: str

    def messages(self) -> Sequence[JsonValue]:
        return [{"role": "user", "content": [{"type": "text", "text": self.text}]}]


@asynccontextmanager
async def open_harness(
    host: Host,
    replies: Replies | None,
    *,
    tools: Sequence[AnyTool] = (),
    hooks: Sequence[Hook] = (),
    per_event: float = 0.06,
    retry: RetryPolicy | None = None,
    polling: PollPolicy | None = None,
    after_failure: AfterFailure = "keep",
    limits: Limits | None = None,
    conversation_limits: Limits | None = None,
    compaction: Compaction | None = None,
    approvals: Approvals | None = None,
    window: int = 1_000_000,
    cue: Callable[[ModelRequest], Cue | None] | None = None,
    extensions: Sequence[Extension] = (),
) -> AsyncGenerator[tuple[Harness, Conversation]]:
    """A harness on the host with a scripted model (None: without models), and its root conversation.

    ``window``: of the model, in tokens.
    """

    async def pace(_request: ModelRequest, _number: int) -> None:
        await host.clock.sleep(per_event)

    model: Models | None = None if replies is None else ScriptedModel(replies, pace=pace, context_window=window)
    if model is not None and cue is not None:
        model = FaultyModels(model, cue)
    async with Harness.open(
        host.storage,
        models=model,
        extensions=[Extension("scenario", tools=tools, hooks=hooks), *extensions],
        retry=retry,
        polling=polling,
        after_failure=after_failure,
        limits=limits,
        conversation_limits=conversation_limits,
        compaction=compaction,
        approvals=approvals,
        clock=host.clock,
        entropy=host.entropy,
        on_report=host.report,
    ) as harness:
        harness.session.observe(lambda settled: host.heard(settled.seq))
        yield harness, await harness.root()


def user_texts(request: ModelRequest) -> list[str]:
    return [message.text for message in request.messages if isinstance(message, UserMessage)]


def asks_for_summary(request: ModelRequest) -> bool:
    """Whether a compaction asks."""
    first = request.messages[0]
    return isinstance(first, SystemMessage) and first.text == TASK


async def ends(submission: Submission, reason: str) -> None:
    """Wait for an input that must end unanswered for this reason."""
    try:
        await submission.answer()
    except Unanswered as error:
        if error.reason != reason:
            raise
    else:
        raise AssertionError(f"submission {submission.id} was answered, and should have ended {reason}")


# --- tools -----------------------------------------------------------------------------------------------------


def measure(host: Host, *, sequential: bool = False) -> AnyTool:
    """A safe tool: it may run again, and what it does outside it does by its key."""

    @tool(name="measure", replay="safe", sequential=sequential)
    async def measure(place: str, call: ToolCall, seconds: int = 0) -> ToolResult:
        """Measure a place."""
        for part in range(seconds):
            call.output(f"{place}: {part}\n")
            call.details({"part": part})
            await host.clock.sleep(1)
        host.effect(f"measure {place}", key=call.idempotency_key)
        return ToolResult(f"{place} is 7", details={"place": place}, usage={"meters": 7})

    return measure


def launch(host: Host) -> AnyTool:
    """An unsafe tool: nobody could tell two launches apart."""

    @tool(name="launch")
    async def launch(rocket: str, call: ToolCall) -> str:
        """Launch a rocket."""
        call.output("ignition\n")
        await host.clock.sleep(0.5)
        host.effect(f"launch {rocket}")
        await host.clock.sleep(0.5)
        return f"{rocket} is away"

    return launch


def over_within(records: Records, kind: str, ms: int) -> Iterator[str]:
    """No task of that kind lasted longer, whatever was killed meanwhile."""
    for task in records.tasks:
        if task.kind == kind and task.ended_at is not None and task.ended_at - task.created_at > ms:
            yield f"{kind} task {task.id} lasted {task.ended_at - task.created_at} ms"


def effects(*names: str) -> frozenset[str]:
    return frozenset(names)


def scenario(
    program: Callable[[Host], Awaitable[None]],
    *,
    safe: frozenset[str] = frozenset(),
    unsafe: frozenset[str] = frozenset(),
    tools: frozenset[str] = frozenset(),
    reports: frozenset[str] = frozenset(),
    always: Callable[[Records], Iterator[str]] | None = None,
    ends: Callable[[Records], Iterator[str]] | None = None,
    name: str | None = None,
    deletes: bool = False,
    steady: bool = True,
    any_effects: bool = False,
    may_live: frozenset[str] = frozenset(),
    loses_calls: bool = False,
    require: Callable[[], None] | None = None,
) -> Scenario:
    """A scenario named after its program."""
    return Scenario(
        name=name or program.__name__.replace("_", "-"),
        program=program,
        safe=safe,
        unsafe=unsafe,
        rules=Rules(unsafe=tools, unordered=frozenset({Remark.kind})),
        reports=reports,
        always=always,
        ends=ends,
        deletes=deletes,
        steady=steady,
        any_effects=any_effects,
        may_live=may_live,
        loses_calls=loses_calls,
        require=require,
    )
