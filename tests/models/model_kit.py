"""What tests of model adapters share: asking a model at the test server, and parts of transcripts."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import msgspec
from server import KEY, Provider

from perdure.harness.messages import (
    AssistantMessage,
    AssistantPart,
    Image,
    Message,
    SystemMessage,
    Text,
    ToolCallPart,
    ToolResultMessage,
    UserMessage,
    UserPart,
)
from perdure.harness.model import Finished, ModelError, ModelEvent, ModelRequest, ToolSpec
from perdure.models import Endpoint, ProviderModels
from perdure.models.endpoints import Protocol

PROTOCOLS = ("openai", "openai-chat", "anthropic")
NAMES = {"openai": "gpt-5.4", "openai-chat": "gpt-5", "anthropic": "claude-sonnet-5"}

PNG = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(16)).decode()
PICTURE = Image("image/png", PNG)

LOOK = ToolSpec(
    name="look",
    description="Look at something.",
    parameters=msgspec.Raw(
        b'{"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], '
        b'"additionalProperties": false}'
    ),
)


def models(
    server: Provider, protocol: str, *, model: str | None = None, key: str | None = KEY, **options: Any
) -> ProviderModels:
    """ProviderModels whose default is asked at the test server. ``options``: of ProviderModels."""
    options.setdefault("base_url", server.url(protocol))
    return ProviderModels(f"{protocol}:{model or NAMES[protocol]}", api_key=key, **options)


def local(server: Provider, protocol: Protocol = "openai-chat", *, name: str = "local", model: str = "qwen3", **fields):
    """ProviderModels whose default is a server of one's own."""
    endpoint = Endpoint(name=name, protocol=protocol, base_url=server.url(protocol), api_key=KEY, **fields)
    return ProviderModels(f"{name}:{model}", endpoints=[endpoint])


def user(*content: str | UserPart) -> UserMessage:
    return UserMessage(tuple(Text(part) if isinstance(part, str) else part for part in content))


def system(text: str) -> SystemMessage:
    return SystemMessage(text)


def result(call_id: str, *content: str | UserPart, error: bool = False, name: str = "look") -> ToolResultMessage:
    return ToolResultMessage(call_id=call_id, name=name, content=user(*content).content, is_error=error)


def called(id: str, arguments: object = None, name: str = "look") -> ToolCallPart:
    raw = json.dumps({"at": "it"} if arguments is None else arguments).encode()
    return ToolCallPart(id, name, msgspec.Raw(raw))


def answered(*content: AssistantPart | str, provider: str = "test", model: str = "other") -> AssistantMessage:
    parts = tuple(Text(part) if isinstance(part, str) else part for part in content)
    return AssistantMessage(content=parts, provider=provider, model=model, stop_reason="stop")


async def stream(models: ProviderModels, *messages: Message, **request) -> list[ModelEvent]:
    assert models.default is not None
    asked = ModelRequest(model=models.default, messages=messages, **request)
    return [event async for event in models.stream(asked)]


async def ask(models: ProviderModels, *messages: Message, **request) -> AssistantMessage:
    events = await stream(models, *messages, **request)
    assert [event for event in events if isinstance(event, Finished)] == events[-1:]
    assert isinstance(events[-1], Finished)
    return events[-1].message


async def fails(models: ProviderModels, *messages: Message, **request) -> ModelError:
    try:
        await stream(models, *messages, **request)
    except ModelError as error:
        return error
    raise AssertionError("it did not fail")
