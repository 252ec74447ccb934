"""How many tokens a context takes: as the provider counted it, and estimates for what came later (rule H200).

A provider tells with each answer what the request took, exactly and with all that it adds by itself; what followed
that answer is estimated from its bytes. No model's own tokenizer is asked: there is none for most, and a turn would
pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.harness.documents import ASSISTANT
from perdure.harness.messages import (
    Image,
    Message,
    StopReason,
    ToolResultMessage,
    Usage,
    UserMessage,
    decode_messages,
    encode_messages,
)
from perdure.harness.model import ToolSpec
from perdure.kernel.records import NULL, EntryRecord

BYTES_PER_TOKEN = 4
"""Of JSON, roughly. Dense text takes more tokens, prose fewer; the next answer's usage puts it right."""
IMAGE_TOKENS = 1_500
"""Of an image, whatever its bytes."""
LEFT_OUT: frozenset[StopReason] = frozenset({"error", "aborted"})
"""Stop reasons of answers that the model never sees again (rule H60)."""


def tokens_of_bytes(count: int) -> int:
    return -(-count // BYTES_PER_TOKEN)


def tokens_of_raw(raw: bytes) -> int:
    """Of encoded messages, as estimated."""
    if raw == b"[]":
        return 0
    if b'"image"' in raw:
        try:
            return tokens_of(decode_messages(raw))
        except msgspec.MsgspecError:
            pass  # left out of every context
    return tokens_of_bytes(len(raw))


def tokens_of(messages: Sequence[Message]) -> int:
    """Of messages, as estimated."""
    images = [
        part
        for message in messages
        if isinstance(message, (UserMessage, ToolResultMessage))
        for part in message.content
        if isinstance(part, Image)
    ]
    size = len(encode_messages(messages)) - sum(len(image.data) for image in images)
    return tokens_of_bytes(size) + IMAGE_TOKENS * len(images)


def tokens_of_spec(spec: ToolSpec) -> int:
    """Of a tool as it is offered."""
    return tokens_of_bytes(len((spec.name + spec.description).encode()) + len(bytes(spec.parameters)))


def measured(usage: Usage) -> int | None:
    """What the context takes through an answer with this usage; None if the provider did not tell."""
    return usage.input + usage.cache_read + usage.cache_write + usage.output or None


class _Answered(msgspec.Struct, frozen=True):
    """As much of a stored answer as its count needs; the rest is not decoded."""

    stop_reason: StopReason
    usage: Usage = Usage()


_answers: msgspec.json.Decoder[list[_Answered]] = msgspec.json.Decoder(list[_Answered])


class Count:
    """The tokens of a context, fed with its entries from the newest head on, each at the cost of the entry."""

    __slots__ = ("exact", "since")

    def __init__(self, exact: int | None = None, since: int = 0) -> None:
        self.exact = exact
        """Through the newest answer whose usage is known; None: there is none since the head."""
        self.since = since
        """What came after that answer, or all there is, as estimated."""

    def feed(self, entry: EntryRecord) -> int:
        """Add an entry that is no head; what it takes by itself, as estimated."""
        raw = bytes(entry.raw_messages)
        estimate = tokens_of_raw(raw)
        if entry.kind == ASSISTANT:
            try:
                (answer,) = _answers.decode(raw)
            except (msgspec.MsgspecError, ValueError):
                answer = None  # of another program, or of no use to a model
            if answer is not None and answer.stop_reason in LEFT_OUT:
                return 0
            exact = None if answer is None else measured(answer.usage)
            if exact is not None:
                self.exact, self.since = exact, 0
                return estimate
        self.since += estimate
        for edit in entry.edits:
            if edit.replace != NULL:
                self.since += tokens_of_raw(bytes(edit.replace))
        return estimate

    def copy(self) -> Count:
        return Count(self.exact, self.since)

    @property
    def tokens(self) -> int:
        return (self.exact or 0) + self.since
