"""Tools by which an agent has other agents: ``subagent`` waits for the answer to one task (rules H117, H160 to H162);
those that ``persistent_subagents`` begin stay, and answer by messages (rules H163 to H165)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, get_args

from perdure.harness import persistent
from perdure.harness.conversation import Conversation
from perdure.harness.documents import Agent, LimitSettings
from perdure.harness.events import ToolStart, Turn
from perdure.harness.inbox import InputMode
from perdure.harness.limits import Limits
from perdure.harness.model import ThinkingLevel
from perdure.harness.output import DEFAULT_LIMITS, OutputLimits
from perdure.harness.subagents import ask_owned, depth_of
from perdure.harness.submission import Unanswered
from perdure.harness.tool import AnyTool, ToolCall, ToolError, ToolResult, tool
from perdure.kernel.json import JsonValue, check_json

MAX_DEPTH: Final = 3
"""Subagents below one another, where nothing else is said."""
MOST_NAME: Final = 100
PLAIN: Final = "subagent"
"""The name of the only one, where none are configured."""


@dataclass(frozen=True)
class Subagent:
    """An agent that others may give work to. Settings that are None are those of the conversation that asks it."""

    description: str = ""
    """What it is good for: its caller's model reads it."""
    _: KW_ONLY
    instructions: str = ""
    """What its model is told, behind what the host tells every one."""
    model: str | None = None
    """``provider:name``."""
    thinking: ThinkingLevel | None = None
    extensions: Sequence[str] | None = None
    """By name."""
    tools: Sequence[str] | None = None
    """By name, such as without those that change anything."""
    limits: Limits | None = None
    """Of its conversation; None: the host's for each."""

    def agent(self, above: Agent) -> Agent:
        """The settings of its conversation, below one with those."""
        extensions = above.extensions if self.extensions is None else list(self.extensions)
        tools = above.tools if self.tools is None else list(self.tools)
        return Agent(
            model=self.model or above.model,
            thinking=self.thinking or above.thinking,
            extensions=None if extensions is None else list(extensions),
            tools=None if tools is None else list(tools),
            added_tools=list(above.added_tools) if self.tools is None else [],
            instructions=self.instructions,
            cwd=above.cwd,
            limits=LimitSettings() if self.limits is None else self.limits.settings(),
        )


def subagent(
    agents: Mapping[str, Subagent] | None = None,
    *,
    name: str = "subagent",
    description: str | None = None,
    max_depth: int = MAX_DEPTH,
    output: OutputLimits = DEFAULT_LIMITS,
    timeout_ms: int | None = None,
) -> AnyTool:
    """A tool for tasks that another agent does, in a conversation of its own that the call owns.

    Its result is the text of the answer. The agent is asked once, whatever is killed meanwhile, and aborted with the
    call. ``agents``: whom the model may choose among, by name; None: one with the settings of whoever asks it.
    ``max_depth``: how many may be below one another. The host's ``environment`` is asked for one of each conversation,
    by its id. Raises TypeError, ValueError.
    """
    chosen = _chosen(agents)
    if max_depth < 1:
        raise ValueError(f"max_depth is 1 or more, not {max_depth}")

    async def ask(call: ToolCall, prompt: str, agent: str) -> ToolResult:
        return await _ask(call, prompt, agent, chosen[agent], max_depth)

    async def run(prompt: str, call: ToolCall) -> ToolResult:
        return await ask(call, prompt, next(iter(chosen)))

    async def run_one(agent: str, prompt: str, call: ToolCall) -> ToolResult:
        return await ask(call, prompt, agent)

    words = description or "Give a task to another agent, which works on it in a conversation of its own and answers."
    if _choice(chosen):
        words = _offer(words, chosen)
        run_one.__annotations__["agent"] = _names(chosen)
    document = "\n\nArgs:\n    prompt: The task, with all that has to be known for it.\n    agent: Who is to do it.\n"
    made: Any = run_one if _choice(chosen) else run  # functions of different parameters
    made.__doc__ = words + document
    return tool(name=name, description=words, replay="safe", output=output, timeout_ms=timeout_ms)(made)


async def _ask(call: ToolCall, prompt: str, name: str, asked: Subagent, max_depth: int) -> ToolResult:
    harness = call.harness
    if await depth_of(harness, call.conversation_id, most=max_depth) >= max_depth:
        raise ToolError(f"There are {max_depth} agents above this one already. Do it yourself.")
    above = await harness.handle(call.conversation_id).agent()
    submission = await ask_owned(call, prompt, agent=asked.agent(above), name=name)
    details: JsonValue = {"conversation": submission.conversation_id}
    call.details(details)
    async with _shown(call, submission.conversation):
        # Blocked work below is shown to those who wait for the call's own run, and can be helped there.
        await submission.wait(through_blocked=True)
    try:
        answer = await submission.answer()
    except Unanswered as error:
        why = f"{error.reason}: {error.detail}" if error.detail else error.reason
        return ToolResult(f"The agent gave no answer ({why}).", details=details, is_error=True, code="tool_error")
    return ToolResult(answer.text, details=details)


@contextlib.asynccontextmanager
async def _shown(call: ToolCall, conversation: Conversation) -> AsyncGenerator[None]:
    """What the agent does, a line for each turn and each call, as output of the call that waits for it."""

    async def follow() -> None:
        async with conversation.events(window=1) as events:
            async for event in events:
                if isinstance(event, Turn):
                    call.output(f"turn {event.turn}\n")
                elif isinstance(event, ToolStart):
                    call.output(f"  {event.name}\n")

    following = asyncio.ensure_future(follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])
        if not following.cancelled():
            following.exception()  # what is shown meanwhile is no part of the answer


def persistent_subagents(agents: Mapping[str, Subagent] | None = None, *, report: InputMode = "steer") -> list[AnyTool]:
    """Tools to begin agents that stay, send them messages, list and stop them (rules H163 to H165).

    None of them waits for an answer: that comes as an input of its own, put as ``report`` says. In a round with one
    that begins, tells or stops an agent the calls run one after the other (rule H358). ``agents``: as of ``subagent``.
    Raises ValueError.
    """
    chosen = _chosen(agents)
    if report not in get_args(InputMode) or report == "reject":
        raise ValueError(f"report is 'steer' or 'follow_up', not {report!r}")

    async def start(call: ToolCall, name: str, prompt: str, agent: str) -> ToolResult:
        if not name or len(name) > MOST_NAME:
            raise ToolError(f"A name has 1 to {MOST_NAME} characters.")
        above = await call.harness.handle(call.conversation_id).agent()
        id = await persistent.begin(call, name, prompt, agent=chosen[agent].agent(above), kind=agent, report=report)
        return ToolResult(f"{name!r} is at work. What it answers will be told.", details={"conversation": id})

    async def start_agent(name: str, prompt: str, call: ToolCall) -> ToolResult:
        return await start(call, name, prompt, next(iter(chosen)))

    async def start_one(agent: str, name: str, prompt: str, call: ToolCall) -> ToolResult:
        return await start(call, name, prompt, agent)

    words = "Begin an agent that stays and works beside you. What it answers is told to you as a message."
    made: Any = start_agent  # functions of different parameters
    if _choice(chosen):
        words, made = _offer(words, chosen), start_one
        start_one.__annotations__["agent"] = _names(chosen)
    made.__doc__ = f"{words}\n\nArgs:\n    name: What to call it.\n    prompt: Its first task.\n    agent: Who it is.\n"

    @tool(replay="safe", sequential=True)
    async def message_agent(name: str, prompt: str, call: ToolCall) -> str:
        """Send a message to an agent that was begun. What it answers is told to you as a message.

        Args:
            name: Whom to send it to.
            prompt: What to say.
        """
        await persistent.send(call, name, prompt, report=report)
        return "Sent."

    @tool(replay="safe", effects="read")
    async def list_agents(call: ToolCall) -> str:
        """The agents that were begun and not stopped, and whether they are at work."""
        there = persistent.running(call.harness, call.conversation_id)
        return "\n".join(f"{other.name}: {'at work' if other.busy else 'waits'}" for other in there) or "None."

    @tool(replay="safe", sequential=True)
    async def stop_agent(name: str, call: ToolCall) -> str:
        """Stop an agent that was begun; what it is doing is broken off.

        Args:
            name: Whom to stop.
        """
        await persistent.stop_by(call, name)
        return "Stopped."

    return [
        tool(name="start_agent", description=words, replay="safe", sequential=True)(made),
        message_agent,
        list_agents,
        stop_agent,
    ]


def _chosen(agents: Mapping[str, Subagent] | None) -> dict[str, Subagent]:
    """Whom a model may choose among. Raises TypeError, ValueError."""
    if agents is not None and not isinstance(agents, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # of untyped callers
        raise TypeError(f"subagents are given by name, as {{'reader': Subagent(...)}}, not as {type(agents).__name__}")
    chosen = dict(agents) if agents is not None else {PLAIN: Subagent()}
    if not chosen or not all(chosen):
        raise ValueError("subagents have names, and there is at least one")
    for key in chosen:
        check_json(key, at="agents")
    return chosen


def _choice(chosen: Mapping[str, Subagent]) -> bool:
    """Whether the model is told who there is."""
    return len(chosen) > 1 or any(known.description for known in chosen.values())


def _offer(words: str, chosen: Mapping[str, Subagent]) -> str:
    return "\n".join([words, *(f"- {key}: {known.description}" for key, known in chosen.items())])


def _names(chosen: Mapping[str, Subagent]) -> Any:  # a type that depends on a value
    return Literal[tuple(chosen)]
