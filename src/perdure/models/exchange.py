"""One request and its answer: the transcript sent by pydantic-ai, what streams told as events, failures as ours."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

import msgspec
from pydantic_ai import exceptions
from pydantic_ai import messages as library
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.profiles.anthropic import ANTHROPIC_THINKING_BUDGET_MAP as BUDGETS
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from perdure.harness.messages import AssistantMessage, Usage
from perdure.harness.model import (
    Deferred,
    DeferredFailed,
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

        def used() -> Usage:
            return usage_of(streamed.usage) if streamed is not None else NOTHING

        async with self._connected(name, used) as model:
            sent = to_library(request.messages, model, endpoint, name, inline=_inline(endpoint, model))
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
        yield Finished(message)

    # --- in the background ---------------------------------------------------------------------------------------

    async def begin(self, request: ModelRequest, name: str) -> Deferred | Finished:
        """Have the answer made in the background. Finished: it was there at once. Raises ModelError."""
        endpoint = self.endpoint
        async with self._connected(name) as model:
            sent = to_library(request.messages, model, endpoint, name, inline=_inline(endpoint, model))
            response = await model_request(
                model,
                sent,
                model_settings=self._settings(request, model, sent, background=True),
                model_request_parameters=ModelRequestParameters(function_tools=_tools(request.tools)),
            )
            return _deferred(response, endpoint, name)

    async def fetch(self, name: str, handle: str) -> Deferred | Finished:
        """Raises DeferredFailed if the response has ended without an answer, ModelError if that is not known."""
        endpoint = self.endpoint
        async with self._connected(name) as model:
            asked = [library.ModelRequest(parts=[]), _pending(model, handle)]
            try:
                response = await model_request(model, asked, model_settings=cast("ModelSettings", endpoint.settings))
            except exceptions.SuspendedResponseExpired:
                raise DeferredFailed("expired", f"{endpoint.name} does not have the response any more") from None
            except exceptions.ModelAPIError as error:
                if not error.provider_error_code or isinstance(error, exceptions.ModelHTTPError):
                    raise
                told = failure(error, endpoint, usage=None, began=True)  # it is what the response says of itself
                used = NOTHING if told.code == "rate_limit" else None  # it was refused before anything was made
                raise DeferredFailed(told.code, str(told), usage=used) from None
            try:
                return _deferred(response, endpoint, name)
            except ModelError as error:
                raise DeferredFailed(error.code, str(error), usage=error.usage) from None

    async def cancel(self, name: str, handle: str) -> None:
        """Raises ModelError."""
        async with self._connected(name) as model:
            await model.cancel_suspended_response(_pending(model, handle))

    @asynccontextmanager
    async def _connected(self, name: str, used: Callable[[], Usage] = Usage) -> AsyncGenerator[Model]:
        """The library's model, whose errors become ours. ``used``: what is known to be used when one comes."""
        began = False

        async def on_response(_: object) -> None:
            nonlocal began
            began = True

        try:
            async with connected(
                self.endpoint, name, connect_ms=self.connect_ms, stall_ms=self.stall_ms, on_response=on_response
            ) as model:
                yield model
        except ModelError:
            raise
        except Exception as error:
            usage = used()
            # Not as its cause: the library's errors quote requests, and hold the headers that were sent.
            raise failure(error, self.endpoint, usage=None if usage == NOTHING else usage, began=began) from None

    def _settings(
        self, request: ModelRequest, model: Model, sent: list[library.ModelMessage], *, background: bool = False
    ) -> ModelSettings:
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
            settings["openai_store"] = background  # the transcript is here; what was thought comes back encrypted
            if background:
                settings["openai_background"] = True
        if endpoint.name in OWN and endpoint.protocol != "anthropic" and request.session_key:
            settings["openai_prompt_cache_key"] = request.session_key
        settings |= endpoint.settings
        return cast("ModelSettings", cast("object", settings))


def _pending(model: Model, handle: str) -> library.ModelResponse:
    """What the library asks for, or cancels, by its name."""
    return library.ModelResponse(
        parts=[],
        provider_response_id=handle,
        provider_name=model.system,
        provider_details={"background": True},
        state="suspended",
    )


def _deferred(response: library.ModelResponse, endpoint: Endpoint, name: str) -> Deferred | Finished:
    """What a response that is made in the background has come to. Raises ModelError if it has failed."""
    status = (response.provider_details or {}).get("finish_reason")
    if status in ("queued", "in_progress"):
        handle = response.provider_response_id
        if not handle:
            raise ModelError("malformed", f"{endpoint.name} makes the answer in the background, and does not name it")
        return Deferred(handle=handle)
    if status == "cancelled":
        words = f"the response was cancelled at {endpoint.name}"
        raise ModelError("cancelled", words, usage=usage_of(response.usage))
    if not any(isinstance(part, library.ThinkingPart) and part.signature for part in response.parts):
        # It names items that the provider keeps for a while; the transcript outlives them.
        for part in response.parts:
            if isinstance(part, (library.TextPart, library.ThinkingPart, library.ToolCallPart)):
                part.id = None
    return Finished(answer(response, endpoint, name))


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
