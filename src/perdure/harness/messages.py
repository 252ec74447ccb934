"""What a model reads and answers, as immutable values; their JSON is what entries store in ``messages``.

Roles and parts are the field's: system, user, assistant, tool. Every part is tagged by ``type``, every message by
``role``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from perdure.kernel.records import EMPTY_OBJECT


class Text(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="image"):
    media_type: str
    data: str
    """Base64."""


class Thinking(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="thinking", omit_defaults=True):
    text: str
    signature: str | None = None
    """What the provider wants back unchanged with the next request."""


class ToolCallPart(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="tool_call"):
    id: str
    """The provider's label; it may repeat. The call's own id is its task's."""
    name: str
    arguments: msgspec.Raw = EMPTY_OBJECT
    """The JSON the model wrote; a JSON string when it was not valid JSON."""


UserPart: TypeAlias = Text | Image
AssistantPart: TypeAlias = Text | Thinking | ToolCallPart
StopReason: TypeAlias = Literal["stop", "length", "tool_use", "error", "aborted"]


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Tokens of one model attempt. ``input`` counts what was neither read from nor written to the cache."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0
    """Of ``output``, what was spent on thinking."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            input=self.input + other.input,
            output=self.output + other.output,
            cache_read=self.cache_read + other.cache_read,
            cache_write=self.cache_write + other.cache_write,
            reasoning=self.reasoning + other.reasoning,
        )


class SystemMessage(msgspec.Struct, frozen=True, gc=False, tag_field="role", tag="system"):
    text: str


class UserMessage(msgspec.Struct, frozen=True, gc=False, tag_field="role", tag="user"):
    content: tuple[UserPart, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, Text))


class AssistantMessage(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="role", tag="assistant", omit_defaults=True
):
    content: tuple[AssistantPart, ...]
    provider: str
    model: str
    stop_reason: StopReason
    usage: Usage = Usage()
    error: str | None = None
    """Code and words of what ended it, for ``error`` and ``aborted``."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def tool_calls(self) -> tuple[ToolCallPart, ...]:
        return tuple(part for part in self.content if isinstance(part, ToolCallPart))


class ToolResultMessage(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="role", tag="tool", omit_defaults=True
):
    call_id: str
    name: str
    content: tuple[UserPart, ...]
    is_error: bool = False
    code: str | None = None
    """For errors the harness wrote: one of the codes of rule H101."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, Text))


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolResultMessage

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[list[Message]] = msgspec.json.Decoder(list[Message])


def encode_messages(messages: Sequence[Message]) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(list(messages)))


def decode_messages(raw: msgspec.Raw | bytes) -> list[Message]:
    """Raises msgspec.ValidationError if an entry's messages are not of these shapes."""
    return _decoder.decode(raw)


def user_content(content: str | Sequence[UserPart]) -> tuple[UserPart, ...]:
    return (Text(content),) if isinstance(content, str) else tuple(content)
