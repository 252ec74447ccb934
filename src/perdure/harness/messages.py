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
    """A text that a model reads or wrote: part of an input, of an answer, of a result."""

    text: str


class Image(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="image"):
    """A picture in an input or in a result, for models that see."""

    media_type: str
    """Such as ``image/png``."""
    data: str
    """Base64."""


class Thinking(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="thinking", omit_defaults=True):
    """What a model thought before it answered, as far as its provider tells."""

    text: str
    signature: str | None = None
    """What the provider wants back unchanged with the next request."""


class ToolCallPart(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="tool_call"):
    """A call that a model asks for, as it wrote it."""

    id: str
    """The provider's label; it may repeat. The call's own id is its task's."""
    name: str
    arguments: msgspec.Raw = EMPTY_OBJECT
    """The JSON the model wrote; a JSON string when it was not valid JSON."""


UserPart: TypeAlias = Text | Image
AssistantPart: TypeAlias = Text | Thinking | ToolCallPart
StopReason: TypeAlias = Literal["stop", "length", "tool_use", "error", "aborted"]
"""Why a message ended: it was complete; it may not be longer; it calls tools; the request failed; it was cut off."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Tokens of one model attempt. ``input`` counts what was neither read from nor written to the cache."""

    input: int = 0
    output: int = 0
    """All that was written, thinking included."""
    cache_read: int = 0
    """Read from the provider's cache."""
    cache_write: int = 0
    """Written to it."""
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
    """What the host tells a model: first of all, and later what of that has changed."""

    text: str


class UserMessage(msgspec.Struct, frozen=True, gc=False, tag_field="role", tag="user"):
    """What a user, or a program in its place, says to a model."""

    content: tuple[UserPart, ...]

    @property
    def text(self) -> str:
        """Its texts, one behind the other."""
        return "".join(part.text for part in self.content if isinstance(part, Text))


class AssistantMessage(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="role", tag="assistant", omit_defaults=True
):
    """What a model answered in one response, whole."""

    content: tuple[AssistantPart, ...]
    """In the order in which it was written."""
    provider: str
    model: str
    """By the provider's own name, without ``provider:``."""
    stop_reason: StopReason
    usage: Usage = Usage()
    """What this response took."""
    error: str | None = None
    """Code and words of what ended it, for ``error`` and ``aborted``."""

    @property
    def text(self) -> str:
        """Its texts, one behind the other, without thinking."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def tool_calls(self) -> tuple[ToolCallPart, ...]:
        """The calls it asks for, in its order."""
        return tuple(part for part in self.content if isinstance(part, ToolCallPart))


class ToolResultMessage(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="role", tag="tool", omit_defaults=True
):
    """The result of a call, as the model reads it."""

    call_id: str
    """The label of the ToolCallPart it belongs to."""
    name: str
    """The tool's."""
    content: tuple[UserPart, ...]
    is_error: bool = False
    code: str | None = None
    """For errors the harness wrote: one of the codes of rule H101."""

    @property
    def text(self) -> str:
        """Its texts, one behind the other."""
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
