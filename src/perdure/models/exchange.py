"""One request and its answer: the transcript sent by pydantic-ai, what streams told as events, failures as ours."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import msgspec
from pydantic_ai import messages as library
from pydantic_ai.direct import model_request_stream
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.profiles.anthropic import ANTHROPIC_THINKING_BUDGET_MAP as BUDGETS
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from perdure.harness.messages import AssistantMessage, Usage
from perdure.harness.model import (
    Finished,
    ModelError,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ThinkingLevel,
    ToolCallDelta,
    ToolSpec,
)
from perdure.models.answer import answer, usage_of
from perdure.models.connect import connected
from perdure.models.endpoints import OWN, Endpoint
from perdure.models.failures import failure
from perdure.models.halves import Halves
from perdure.models.transcript import to_library

NOTHING: Final = Usage()


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """With one endpoint."""

    endpoint: Endpoint
    connect_ms: int
    stall_ms: int
    deadline_ms: int

    async def stream(self, request: ModelRequest, name: str) -> AsyncGenerator[ModelEvent]:
        """Ends with one Finished, or raises ModelError. However it ends, the connection is closed by then."""
        endpoint = self.endpoint
        streamed: StreamedResponse | None = None
        began = False

        async def on_response(_: object) -> None:
            nonlocal began
            began = True

        try:
            async with connected(
                endpoint, name, connect_ms=self.connect_ms, stall_ms=self.stall_ms, on_response=on_response
            ) as model:
                inline = _inline(endpoint, model)
                sent = to_library(request.messages, model, endpoint, name, inline=inline)
                async with model_request_stream(
                    model,
                    sent,
                    model_settings=self._settings(request, model, sent),
                    model_request_parameters=ModelRequestParameters(function_tools=_tools(request.tools)),
                ) as streamed:
                    # An async generator, whatever its type says. Closed here, not by the garbage collector.
                    events = cast("AsyncGenerator[library.ModelResponseStreamEvent]", aiter(streamed))
                    calls: dict[int, library.ToolCallPart] = {}
                    halves = Halves()
                    try:
                        async for event in events:
                            told = _told(event, calls, halves)
                            if told is not None:
                                yield told
                    finally:
                        await events.aclose()
                message: AssistantMessage = answer(streamed.get(), endpoint, name)
        except ModelError:
            raise
        except Exception as error:
            used = usage_of(streamed.usage) if streamed is not None else NOTHING
            # Not as its cause: the library's errors quote requests, and hold the headers that were sent.
            raise failure(error, endpoint, usage=None if used == NOTHING else used, began=began) from None
        yield Finished(message)

    def _settings(self, request: ModelRequest, model: Model, sent: list[library.ModelMessage]) -> ModelSettings:
        endpoint = self.endpoint
        settings: dict[str, object] = {"request_timeout": self.deadline_ms / 1000}
        if request.max_output is not None:
            settings["max_tokens"] = request.max_output
        if request.thinking != "off":
            settings["thinking"] = _level(request, endpoint, model)
        elif endpoint.name in OWN or endpoint.protocol == "anthropic":
            settings["thinking"] = False  # servers of other people may not know how it is switched off
        if endpoint.protocol == "anthropic":
            # Breakpoints on single blocks, which every server of this protocol knows.
            settings |= dict.fromkeys(
                ("anthropic_cache_instructions", "anthropic_cache_tool_definitions", "anthropic_cache_messages"), True
            )
            if request.thinking != "off" and _cannot_think_yet(model, sent):
                settings["thinking"] = False
        elif endpoint.protocol == "openai":
            settings["openai_store"] = False  # the transcript is here; what was thought comes back encrypted
        if endpoint.name in OWN and endpoint.protocol != "anthropic" and request.session_key:
            settings["openai_prompt_cache_key"] = request.session_key
        settings |= endpoint.settings
        return cast("ModelSettings", cast("object", settings))


def _inline(endpoint: Endpoint, model: Model) -> bool:
    """Whether system messages may stand in the middle."""
    if endpoint.system_messages is not None:
        return endpoint.system_messages == "inline"
    own = endpoint.name in OWN and endpoint.address is None
    return own and model.profile.get("supports_inline_system_prompts", False)


def _level(request: ModelRequest, endpoint: Endpoint, model: Model) -> ThinkingLevel | Literal[False]:
    """The level to be asked for; the library finds the nearest that a model has, where it knows them (rule H250)."""
    level = request.thinking
    if endpoint.protocol != "anthropic":
        # OpenAI's models since gpt-5.1, whose levels it does not know, all refuse this one.
        known = model.profile.get("openai_reasoning_efforts", ())
        return "low" if level == "minimal" and level not in known else level
    if request.max_output is None or model.profile.get("anthropic_supports_adaptive_thinking", False):
        return level
    # A budget is a part of what may be answered: at most half of it, so that there is an answer.
    levels = get_args(ThinkingLevel)
    fitting = [each for each in levels[1 : levels.index(level) + 1] if BUDGETS[each] <= request.max_output // 2]
    return fitting[-1] if fitting else False


def _cannot_think_yet(model: Model, sent: Sequence[library.ModelMessage]) -> bool:
    """Models that think within a budget refuse to begin to after a call that they made without."""
    if model.profile.get("anthropic_supports_adaptive_thinking", False):
        return False
    for message in reversed(sent):
        if isinstance(message, library.ModelResponse):
            called = any(isinstance(part, library.ToolCallPart) for part in message.parts)
            return called and not isinstance(message.parts[0], library.ThinkingPart)
    return False


def _tools(specs: Sequence[ToolSpec]) -> list[ToolDefinition]:
    return [
        ToolDefinition(
            name=spec.name,
            description=spec.description,
            parameters_json_schema=msgspec.json.decode(spec.parameters, type=dict[str, Any]),
            strict=False,  # the schema as it is; the harness checks arguments itself
        )
        for spec in specs
    ]


def _told(
    event: library.ModelResponseStreamEvent, calls: dict[int, library.ToolCallPart], halves: Halves
) -> ModelEvent | None:
    match event:
        case library.PartStartEvent(index=index, part=part):
            match part:
                case library.TextPart(content=text):
                    return _delta(TextDelta, halves.join(index, text))
                case library.ThinkingPart(content=text):
                    return _delta(ThinkingDelta, halves.join(index, text))
                case library.ToolCallPart() if index not in calls:
                    calls[index] = part
                    written = halves.join(index, _written(part.args))
                    return ToolCallDelta(index, part.tool_call_id, part.tool_name, written)
                case _:
                    return None
        case library.PartDeltaEvent(index=index, delta=delta):
            match delta:
                case library.TextPartDelta(content_delta=text):
                    return _delta(TextDelta, halves.join(index, text))
                case library.ThinkingPartDelta(content_delta=text) if text:
                    return _delta(ThinkingDelta, halves.join(index, text))
                case library.ToolCallPartDelta(args_delta=args) if args and index in calls:
                    call = calls[index]
                    written = halves.join(index, _written(args))
                    return ToolCallDelta(index, call.tool_call_id, call.tool_name, written) if written else None
                case _:
                    return None
        case _:
            return None


def _delta(kind: type[TextDelta | ThinkingDelta], text: str) -> ModelEvent | None:
    return kind(text) if text else None


def _written(args: object) -> str:
    return args if isinstance(args, str) else "" if args is None else msgspec.json.encode(args).decode()
