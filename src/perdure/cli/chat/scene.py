"""A snapshot of a conversation, typed, and what an answer on its way has become since it was told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from perdure.cli.entries import said_lines
from perdure.cli.style import Span
from perdure.cli.text import one_line
from perdure.events import BlockedTask, Snapshot
from perdure.harness.documents import (
    RESET,
    InboxItem,
    LiveDeferred,
    LiveMessage,
    LiveRetry,
    LiveRun,
    LiveTool,
    ModelTotals,
    ToolTotals,
)
from perdure.harness.messages import AssistantMessage, Message, Text, Thinking, UserMessage, decode_messages
from perdure.harness.usage import UsageSummary
from perdure.kernel.json import JsonValue
from perdure.kernel.records import EntryRecord


@dataclass(frozen=True, slots=True)
class Queued:
    """An input or a write in the queue."""

    mode: str
    text: str
    messages: list[Message]

    @property
    def span(self) -> Span:
        match self.mode:
            case "steer":
                return ("steering", "steering")
            case _:
                return ("queued", "queued  ")


@dataclass(frozen=True, slots=True)
class Scene:
    """A snapshot, typed."""

    seq: int
    busy: bool
    entries: list[EntryRecord]
    more: bool
    run: LiveRun | None
    message: LiveMessage | None
    tools: Mapping[str, LiveTool]
    retry: LiveRetry | None
    deferred: LiveDeferred | None
    queued: list[InboxItem]
    usage: UsageSummary
    blocked: Sequence[BlockedTask]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Scene:
        view = cast("dict[str, JsonValue]", snapshot.view)
        live = cast("dict[str, JsonValue]", view["live"])
        inbox = cast("dict[str, list[InboxItem]]", view["inbox"])
        return cls(
            seq=snapshot.seq,
            busy=snapshot.busy,
            entries=msgspec.json.decode(msgspec.json.encode(view["entries"]), type=list[EntryRecord]),
            more=view["more"] is True,
            run=cast("LiveRun | None", live.get("run")),
            message=cast("LiveMessage | None", live.get("message")),
            tools=cast("dict[str, LiveTool]", live.get("tools", {})),
            retry=cast("LiveRetry | None", live.get("retry")),
            deferred=cast("LiveDeferred | None", live.get("deferred")),
            queued=inbox.get("items", []),
            usage=usage_of(view["usage"]),
            blocked=snapshot.blocked,
        )


def usage_of(value: JsonValue) -> UsageSummary:
    usage = cast("dict[str, dict[str, ModelTotals]]", value)
    tools = cast("dict[str, dict[str, ToolTotals]]", value)
    return UsageSummary(models=usage.get("models", {}), tools=tools.get("tools", {}))


def queued_of(item: InboxItem) -> Queued:
    entry = item["entry"]
    try:
        messages = decode_messages(msgspec.Raw(msgspec.json.encode(entry["messages"])))
    except msgspec.MsgspecError:  # of a newer release
        messages = []
    said = [text for message in messages if isinstance(message, UserMessage) for text in said_lines(message.content)]
    if entry["kind"] == RESET:
        said.insert(0, "a new context:" if said else "a new context")
    elif not said:
        said = [one_line(entry["kind"])]
    return Queued(item["mode"], " ⏎ ".join(said), messages)


def parts_of(message: LiveMessage) -> dict[int, tuple[str, str]]:
    return {
        index: (part["type"], part["text"])
        for index, part in enumerate(message["content"])
        if part["type"] != "tool_call"
    }


def rest_of(told: list[tuple[str, str]], message: AssistantMessage) -> list[tuple[bool, str, str]] | None:
    """What is still to be told of an answer: whether it begins a part, of which type, and the text.

    None: what was told is not how it begins.
    """
    parts = [
        ("thinking" if isinstance(part, Thinking) else "text", part.text)
        for part in message.content
        if isinstance(part, (Text, Thinking)) and part.text
    ]
    told = [part for part in told if part[1]]
    if len(told) > len(parts):
        return None
    rest: list[tuple[bool, str, str]] = []
    for index, (type, text) in enumerate(parts):
        if index >= len(told):
            rest.append((True, type, text))
            continue
        was, said = told[index]
        if was != type or not text.startswith(said) or (index < len(told) - 1 and text != said):
            return None
        if len(text) > len(said):
            rest.append((False, type, text[len(said) :]))
    return rest
