"""``subagent``: a tool that gives a task to another agent and waits for its answer (rules H117, H160 to H162)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from perdure.harness.conversation import Conversation
from perdure.harness.documents import Agent, LimitSettings
from perdure.harness.events import ToolStart, Turn
from perdure.harness.limits import Limits
from perdure.harness.model import ThinkingLevel
from perdure.harness.output import DEFAULT_LIMITS, OutputLimits
from perdure.harness.subagents import ask_owned, depth_of
from perdure.harness.submission import Unanswered
from perdure.harness.tool import AnyTool, ToolCall, ToolError, ToolResult, tool
from perdure.kernel.json import JsonValue, check_json

MAX_DEPTH: Final = 3
"""Subagents below one another, where nothing else is said."""
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
    thinking: ThinkingLevel | None = None
    extensions: Sequence[str] | None = None
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
    by its id. Raises ValueError.
    """
    chosen = dict(agents) if agents is not None else {PLAIN: Subagent()}
    if not chosen or not all(chosen):
        raise ValueError("subagents have names, and there is at least one")
    if max_depth < 1:
        raise ValueError(f"max_depth is 1 or more, not {max_depth}")
    for key in chosen:
        check_json(key, at="agents")

    async def ask(call: ToolCall, prompt: str, agent: str) -> ToolResult:
        return await _ask(call, prompt, agent, chosen[agent], max_depth)

    async def run(prompt: str, call: ToolCall) -> ToolResult:
        return await ask(call, prompt, next(iter(chosen)))

    async def run_one(agent: str, prompt: str, call: ToolCall) -> ToolResult:
        return await ask(call, prompt, agent)

    words = description or "Give a task to another agent, which works on it in a conversation of its own and answers."
    one_of_many = len(chosen) > 1 or any(known.description for known in chosen.values())
    if one_of_many:
        words = "\n".join([words, *(f"- {key}: {known.description}" for key, known in chosen.items())])
        names: Any = Literal[tuple(chosen)]  # a type that depends on a value
        run_one.__annotations__["agent"] = names
    document = "\n\nArgs:\n    prompt: The task, with all that has to be known for it.\n    agent: Who is to do it.\n"
    made: Any = run_one if one_of_many else run  # functions of different parameters
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
