"""The partial answer of a request on its way: what streamed so far, and what of it ``pi.live`` shows (rule H68)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from perdure.harness.documents import Live, LiveMessage, LivePart
from perdure.harness.foreign import storable_text
from perdure.harness.messages import AssistantPart, Text, Thinking, ToolCallPart
from perdure.harness.model import ModelEvent, TextDelta, ThinkingDelta, ToolCallDelta
from perdure.kernel.records import to_raw

PartType: TypeAlias = Literal["text", "thinking", "tool_call"]


class _Part(msgspec.Struct):
    type: PartType
    id: str = ""
    name: str = ""
    index: int = -1
    """Of a tool call, its place in the stream."""
    chunks: list[str] = msgspec.field(default_factory=list[str])
    shown: int = 0
    """So many chunks are in the document."""

    def rest(self) -> str:
        text = "".join(self.chunks[self.shown :])
        self.shown = len(self.chunks)
        return storable_text(text)


class Partial:
    """Gathers deltas, each at the cost of the delta; ``write`` puts what is new into ``pi.live``."""

    def __init__(self, task: int, model: str, attempt: int) -> None:
        self._task = task
        self._model = model
        self._attempt = attempt
        self._parts: list[_Part] = []
        self._first_dirty = 0
        """No part before this one has anything new."""
        self._written = False

    def add(self, event: ModelEvent) -> None:
        match event:
            case TextDelta(text):
                self._part("text").chunks.append(text)
            case ThinkingDelta(text):
                self._part("thinking").chunks.append(text)
            case ToolCallDelta(index, id, name, arguments):
                self._call(index, id, name).chunks.append(arguments)
            case _:
                pass  # the end of the stream brings the whole message

    def _part(self, type: Literal["text", "thinking"]) -> _Part:
        if not self._parts or self._parts[-1].type != type:
            self._parts.append(_Part(type))
        return self._parts[-1]

    def _call(self, index: int, id: str, name: str) -> _Part:
        # Several calls may stream at once; there are few of them.
        for at in range(len(self._parts) - 1, -1, -1):
            if self._parts[at].index == index:
                self._first_dirty = min(self._first_dirty, at)
                return self._parts[at]
        self._parts.append(_Part("tool_call", id, name, index))
        return self._parts[-1]

    def write(self, live: Live) -> None:
        """Show what is new. Nothing is shown for a run that has ended meanwhile."""
        if live.run is None or live.run["task"] != self._task:
            return
        if not self._written:
            self._written = True
            live.message = LiveMessage(task=self._task, model=self._model, attempt=self._attempt, content=[])
        message = live.message
        if message is None:
            return
        content = message["content"]
        for at in range(self._first_dirty, len(self._parts)):
            part = self._parts[at]
            if at >= len(content):
                content.append(
                    LivePart(type=part.type, text=part.rest(), id=storable_text(part.id), name=storable_text(part.name))
                )
            elif part.shown < len(part.chunks):
                content[at]["text"] += part.rest()
        self._first_dirty = max(len(self._parts) - 1, 0)

    def parts(self) -> tuple[AssistantPart, ...]:
        """All that came, as the parts of a message that was cut off."""
        return tuple(_cut_off(p.type, "".join(p.chunks), p.id, p.name) for p in self._parts)


def shown_parts(message: LiveMessage) -> tuple[AssistantPart, ...]:
    """What was committed of a partial, as the parts of a message that was cut off."""
    return tuple(_cut_off(p["type"], p["text"], p["id"], p["name"]) for p in message["content"])


def _cut_off(type: PartType, text: str, id: str, name: str) -> AssistantPart:
    if type == "text":
        return Text(text)
    if type == "thinking":
        return Thinking(text)
    # Arguments that may have an end to come are kept as text.
    return ToolCallPart(id, name, to_raw(text))
