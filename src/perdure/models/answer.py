"""An answer as pydantic-ai gives it, as ours: parts, what must go back with them, why it ended, what it used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import structs
from pydantic_ai import messages as library
from pydantic_ai.usage import RequestUsage

from perdure.harness.messages import (
    AssistantMessage,
    AssistantPart,
    StopReason,
    Text,
    Thinking,
    ToolCallPart,
    Usage,
)
from perdure.harness.model import ModelError
from perdure.kernel.errors import NotJson
from perdure.kernel.json import decode_json
from perdure.kernel.records import EMPTY_OBJECT, to_raw
from perdure.models.endpoints import Endpoint
from perdure.models.failures import CutOff, scrubbed
from perdure.models.halves import joined
from perdure.models.kept import ITEM, Kept, KeptItem, read_kept, wanted

CUT_OFF_ARGUMENTS: Final = to_raw("{")
"""Of a call that was cut off before its arguments began: not an object, so that it is not run without any."""

BROKEN_OFF: Final = frozenset({"error", "abort", "insufficient_system_resource"})
"""Why answers of Chat Completions end, by what their servers call it, that say nothing about the request."""


def answer(response: library.ModelResponse, endpoint: Endpoint, name: str) -> AssistantMessage:
    """The message. Raises CutOff if the stream ended before it was whole, ModelError if it is no answer."""
    usage = usage_of(response.usage)
    details = response.provider_details or {}
    finish = response.finish_reason
    if finish == "content_filter":
        said = details.get("refusal")
        words = f"{endpoint.name} refused to answer" + (f": {said}" if isinstance(said, str) and said else "")
        raise ModelError("refused", scrubbed(words, endpoint), usage=usage)
    if not _whole(response, endpoint):
        raise CutOff
    if details.get("finish_reason") in BROKEN_OFF:
        raise ModelError("overloaded", f"{endpoint.name} broke its answer off", usage=usage)
    if finish == "error":
        raise ModelError("other", f"{endpoint.name} reported that the answer failed", usage=usage)
    content = parts(response, endpoint)
    if finish == "length":
        content = _cut_short(content)
    stop: StopReason = (
        "length"
        if finish == "length"
        else "tool_use"
        if any(isinstance(part, ToolCallPart) for part in content)
        else "stop"
    )
    return AssistantMessage(content=content, provider=endpoint.name, model=name, stop_reason=stop, usage=usage)


def _whole(response: library.ModelResponse, endpoint: Endpoint) -> bool:
    """Whether the provider said that this was all. A connection that ends without a word looks like the end."""
    if response.state == "incomplete":
        return False
    if (response.provider_details or {}).get("finish_reason"):
        return True
    # Some servers of Chat Completions give no reason, but send the usage behind the last word.
    return endpoint.protocol == "openai-chat" and response.usage.unmeasured_requests == 0


def usage_of(usage: RequestUsage) -> Usage:
    """pydantic-ai counts what the cache had as input too."""
    cached = usage.cache_read_tokens + usage.cache_write_tokens
    return Usage(
        input=max(usage.input_tokens - cached, 0),
        output=usage.output_tokens,
        cache_read=usage.cache_read_tokens,
        cache_write=usage.cache_write_tokens,
        reasoning=usage.output_reasoning_tokens or usage.details.get("reasoning_tokens", 0),
    )


def parts(response: library.ModelResponse, endpoint: Endpoint) -> tuple[AssistantPart, ...]:
    found: list[AssistantPart] = []
    for part in response.parts:
        match part:
            case library.ThinkingPart():
                kept = Kept(id=part.id, signature=part.signature or None, details=wanted(part.provider_details))
                found.append(Thinking(joined(part.content), kept.encode()))
            case library.TextPart() if part.content:
                _keep(found, part.id, wanted(part.provider_details))
                found.append(Text(joined(part.content)))
            case library.ToolCallPart():
                _keep(found, None, wanted(part.provider_details))
                item = f"{ITEM}{part.id}" if part.id and endpoint.protocol == "openai" else ""
                found.append(ToolCallPart(f"{part.tool_call_id}{item}", part.tool_name, _arguments(part.args)))
            case _:
                pass  # nothing else was asked for
    return tuple(found)


def _keep(found: list[AssistantPart], id: str | None, details: Mapping[str, object]) -> None:
    """Keep what belongs to the next part with the thinking before it. A name alone is worth no thinking of its own."""
    behind = KeptItem(id=id, details=wanted(details))
    before = found[-1] if found else None
    if isinstance(before, Thinking):
        if not behind.empty:
            kept = read_kept(before.signature) or Kept()
            found[-1] = structs.replace(before, signature=structs.replace(kept, next=behind).encode())
    elif behind.details:
        found.append(Thinking("", Kept(next=behind).encode()))


def _arguments(args: str | Mapping[str, object] | None) -> msgspec.Raw:
    """The JSON the model wrote, or a text of what it wrote instead."""
    if args is None:
        return EMPTY_OBJECT
    written = joined(args).encode() if isinstance(args, str) else msgspec.json.encode(args)
    if not written.strip():
        return EMPTY_OBJECT
    try:
        decode_json(written)
    except NotJson:
        return to_raw(written.decode())
    return msgspec.Raw(written)


def _cut_short(content: tuple[AssistantPart, ...]) -> tuple[AssistantPart, ...]:
    """The limit was reached: a last call without arguments was about to get some."""
    last = content[-1] if content else None
    if isinstance(last, ToolCallPart) and last.arguments == EMPTY_OBJECT:
        return (*content[:-1], structs.replace(last, arguments=CUT_OFF_ARGUMENTS))
    return content
