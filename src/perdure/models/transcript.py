"""A request's messages as pydantic-ai takes them, so that every provider's rules hold whatever the transcript.

- Turns alternate and begin with the user's: what stands between two answers is one turn, results of tools first.
  Where a user's turn is missing, a note stands in for it.
- What the prompt says anew, in the middle of a conversation, is a system message there or a note in the user's turn
  (``inline``). It never changes what stands before it, so a provider's cache keeps hitting.
- Calls have names of their own, of letters that every provider takes, and each is followed by its result.
- Nothing is empty. Arguments are JSON objects.
- Thinking goes back, signed as it came, to the model that thought it; to others it is not told.
- Of a longer transcript, the beginning is told in the same bytes as before.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic_ai import messages as library
from pydantic_ai.models import Model

from perdure.harness.messages import (
    AssistantMessage,
    Image,
    Message,
    SystemMessage,
    Text,
    Thinking,
    ToolCallPart,
    ToolResultMessage,
    UserPart,
)
from perdure.harness.model import ModelError
from perdure.kernel.errors import NotJson
from perdure.kernel.json import decode_json, encode_json
from perdure.models.endpoints import Endpoint
from perdure.models.kept import ITEM, KeptItem, read_kept

NOTE: Final = "<system-note>\nThis comes from the application, not from the user.\n\n{text}\n</system-note>"
NOTHING_BEFORE: Final = "What came before is not shown."
GO_ON: Final = "Go on."
NO_WORDS: Final = "(an empty message)"
NO_OUTPUT: Final = "(no output)"
IMAGES: Final = "Images that {name} ({label}) gave:"
INVALID: Final = "invalid_json"
"""The key under which arguments are told that were no JSON object."""

_LABEL = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""What the strictest of providers take for a call's name."""


@dataclass(slots=True)
class _Turn:
    """What stands between two answers, in order."""

    leading: str | None = None
    results: list[library.ToolReturnPart] = field(default_factory=list[library.ToolReturnPart])
    images: list[UserPart] = field(default_factory=list[UserPart])
    """Of results, where those can hold none."""
    told: list[str | list[UserPart]] = field(default_factory=list[str | list[UserPart]])
    """A system message, or what the user's turn says."""

    @property
    def silent(self) -> bool:
        return not (self.results or self.told)


class _Labels:
    """Names for calls: the model's where they can be used, and each only once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._open: dict[str, deque[str]] = {}

    def call(self, label: str) -> str:
        given = label.partition(ITEM)[0]
        fitting = given if _LABEL.fullmatch(given) else f"call_{hashlib.sha256(given.encode()).hexdigest()[:24]}"
        name, again = fitting, 1
        while name in self._taken:
            again += 1
            name = f"{fitting[:32]}_{again}"
        self._taken.add(name)
        self._open.setdefault(label, deque()).append(name)
        return name

    def result(self, label: str) -> str | None:
        """The first call of that name that has no result; None if there is none."""
        waiting = self._open.get(label)
        if not waiting:
            return None
        name = waiting.popleft()
        if not waiting:
            del self._open[label]
        return name

    def check(self) -> None:
        if self._open:
            raise ModelError("malformed", f"the call {next(iter(self._open))!r} has no result right behind it")


class _Writer:
    def __init__(self, model: Model, endpoint: Endpoint, name: str, inline: bool) -> None:
        self._model = model
        self._endpoint = endpoint
        self._name = name
        self._inline = inline
        # Chat Completions has no images in results of tools.
        self._images_apart = endpoint.protocol == "openai-chat"
        self._labels = _Labels()
        self._turn = _Turn()
        self.messages: list[library.ModelMessage] = []

    def add(self, message: Message, *, first: bool) -> None:
        match message:
            case SystemMessage(text) if first:
                self._turn.leading = text or None
            case SystemMessage(text):
                if text.strip():
                    self._turn.told.append(text if self._inline else [Text(NOTE.format(text=text))])
            case AssistantMessage():
                self._answer(message)
            case ToolResultMessage():
                label = self._labels.result(message.call_id)
                if label is not None:
                    self._result(message, label)
            case _:
                self._turn.told.append(list(_said(message.content, NO_WORDS)))

    def end(self) -> None:
        self._labels.check()
        self._close_turn()

    def _answer(self, message: AssistantMessage) -> None:
        own = message.provider == self._endpoint.name and message.model == self._name
        parts = self._parts(message, own)
        if not any(isinstance(part, (library.TextPart, library.ToolCallPart)) for part in parts):
            return  # thinking alone is no answer that could be told
        self._labels.check()
        self._close_turn()
        if not own:
            # Not every server takes words between a call and its result.
            parts.sort(key=lambda part: isinstance(part, library.ToolCallPart))
        for part in parts:
            if isinstance(part, library.ToolCallPart):
                given, _, item = part.tool_call_id.partition(ITEM)
                part.tool_call_id = self._labels.call(part.tool_call_id)
                part.id = item if own and item and part.tool_call_id == given else None
        self.messages.append(
            library.ModelResponse(
                parts=parts,
                model_name=message.model,
                provider_name=self._model.system if own else None,
                provider_url=getattr(self._model, "base_url", None) if own else None,
                canonical_system=self._model.canonical_system if own else None,
            )
        )

    def _parts(self, message: AssistantMessage, own: bool) -> list[library.ModelResponsePart]:
        system = self._model.system if own else None
        parts: list[library.ModelResponsePart] = []
        behind = KeptItem()
        for part in message.content:
            kept, behind = behind, KeptItem()
            match part:
                case Thinking(text, signature):
                    signed = read_kept(signature) if own else None
                    if signed is None:
                        continue
                    behind = signed.next or behind
                    if text or signed.signature or signed.details:
                        parts.append(
                            library.ThinkingPart(
                                text,
                                id=signed.id,
                                signature=signed.signature,
                                provider_name=system,
                                provider_details=signed.details or None,
                            )
                        )
                case Text(text):
                    if text.strip():
                        parts.append(
                            library.TextPart(
                                text, id=kept.id, provider_name=system, provider_details=kept.details or None
                            )
                        )
                case ToolCallPart():
                    parts.append(
                        library.ToolCallPart(
                            part.name,
                            _arguments(part),
                            tool_call_id=part.id,
                            provider_name=system,
                            provider_details=kept.details or None,
                        )
                    )
        return parts

    def _result(self, message: ToolResultMessage, label: str) -> None:
        said = _said(message.content, NO_OUTPUT)
        images = [part for part in said if isinstance(part, Image)] if self._images_apart else []
        if images:
            said = [part for part in said if isinstance(part, Text)] or [Text(NO_WORDS)]
            self._turn.images += [Text(IMAGES.format(name=message.name, label=label)), *images]
        self._turn.results.append(
            library.ToolReturnPart(
                message.name,
                _joined(said),
                tool_call_id=label,
                outcome="failed" if message.is_error else "success",
            )
        )

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, _Turn()
        if turn.silent:
            turn.told.append([Text(NOTE.format(text=GO_ON if self.messages else NOTHING_BEFORE))])
        parts: list[library.ModelRequestPart] = []
        if turn.leading is not None:
            parts.append(library.SystemPromptPart(turn.leading))
        parts += turn.results
        said = turn.images
        for told in turn.told:
            if isinstance(told, str):
                _say(parts, said)
                parts.append(library.SystemPromptPart(told))
                said = []
            else:
                said += told
        _say(parts, said)
        if not self.messages and not any(isinstance(part, library.UserPromptPart) for part in parts):
            # Only system messages: a conversation begins with a user all the same.
            _say(parts, [Text(NOTE.format(text=NOTHING_BEFORE))])
        self.messages.append(library.ModelRequest(parts=parts))


def to_library(
    messages: Sequence[Message], model: Model, endpoint: Endpoint, name: str, *, inline: bool
) -> list[library.ModelMessage]:
    """The messages for ``model``, which is ``name`` at the endpoint. Raises ModelError if nobody could take them."""
    writer = _Writer(model, endpoint, name, inline)
    for at, message in enumerate(messages):
        writer.add(message, first=at == 0)
    writer.end()
    return writer.messages


def _said(content: Sequence[UserPart], instead: str) -> Sequence[UserPart]:
    """The parts that say anything; ``instead``, if none does."""
    said = [part for part in content if isinstance(part, Image) or part.text.strip()]
    return said or [Text(instead)]


def _say(parts: list[library.ModelRequestPart], said: Sequence[UserPart]) -> None:
    """One message: some servers take no two of a user in a row."""
    if said:
        parts.append(library.UserPromptPart(_joined(said)))


def _joined(said: Sequence[UserPart]) -> str | list[str | library.BinaryContent]:
    """One text, unless there are images: some servers take no list of texts."""
    texts = [part.text for part in said if isinstance(part, Text)]
    return "\n\n".join(texts) if len(texts) == len(said) else [_content(part) for part in said]


def _content(part: UserPart) -> str | library.BinaryContent:
    if isinstance(part, Text):
        return part.text
    try:
        return library.BinaryContent(b64decode(part.data, validate=True), media_type=part.media_type)
    except NotBase64:
        raise ModelError("malformed", f"an image ({part.media_type}) whose data is not base64") from None


def _arguments(part: ToolCallPart) -> str:
    """As the model wrote them, if that is an object."""
    text = bytes(part.arguments).decode("utf-8", "replace")
    try:
        value = decode_json(part.arguments)
    except NotJson:
        return encode_json({INVALID: text}).decode()
    if isinstance(value, dict):
        return text
    return encode_json({INVALID: value if isinstance(value, str) else text}).decode()
