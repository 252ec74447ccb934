"""Conversations as JSON lines or as Markdown, a page of entries in memory at a time (rule H155)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

import msgspec

from perdure.harness.documents import ASSISTANT, COMPACTION, RESET, TOOL_RESULT, USER, Meta
from perdure.harness.messages import (
    AssistantMessage,
    Image,
    Message,
    Text,
    Thinking,
    ToolCallPart,
    ToolResultMessage,
    UserMessage,
    decode_messages,
)
from perdure.harness.results import result_messages
from perdure.kernel.context import Context
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.records import ConversationRecord, EntryRecord, from_raw
from perdure.kernel.session import Session

ExportFormat: TypeAlias = Literal["jsonl", "markdown"]

PAGE: Final = 100
"""Entries that are in memory at once."""


class ConversationLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="conversation"):
    """Before the entries of each conversation."""

    log_id: str
    """Of the store."""
    record: ConversationRecord
    name: str | None
    labels: dict[str, str]


class EntryLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="entry"):
    """One for each entry that the conversation shows, in order; those it shares with a parent are its own here."""

    conversation: int
    entry: EntryRecord


async def exported(
    session: Session, record: ConversationRecord, format: ExportFormat, context: Context | None = None
) -> AsyncGenerator[str]:
    """A conversation's text, piece by piece: every entry that it shows as the first piece is asked for."""
    if format not in ("jsonl", "markdown"):
        raise ValueError(f"the format is 'jsonl' or 'markdown', not {format!r}")
    try:
        meta = await session.snapshot(Meta, conversation=record.id, context=context) or Meta()
    except DocumentVersionError:  # written by a newer release
        meta = Meta()
    if format == "jsonl":
        head = ConversationLine(log_id=session.info.log_id, record=record, name=meta.name, labels=dict(meta.labels))
        yield f"{msgspec.json.encode(head).decode()}\n"
    else:
        yield f"# {_title(meta.name) or f'Conversation {record.id}'}\n\nBegun {_when(record.created_at)}.\n"
    async for entry in entries_of(session, record.id, context=context):
        if format == "jsonl":
            yield f"{msgspec.json.encode(EntryLine(conversation=record.id, entry=entry)).decode()}\n"
        else:
            yield _markdown(entry)
    if format == "markdown":
        yield "\n"


async def entries_of(
    session: Session, conversation: int, *, first: int = 0, context: Context | None = None
) -> AsyncGenerator[EntryRecord]:
    """Entries from ``first`` on, as they stand in the store now, a page of them in memory at a time."""
    newest = await session.entries(conversation, order="descending", limit=1, context=context)
    last = newest[0].id if newest else 0
    while True:
        page = await session.entries(conversation, first=first, last=last, limit=PAGE, context=context)
        for entry in page:
            yield entry
        if len(page) < PAGE:
            return
        first = page[-1].id + 1


# --- Markdown ----------------------------------------------------------------------------------------------------


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _title(name: str | None) -> str:
    return " ".join((name or "").split())


def _messages(entry: EntryRecord) -> list[Message]:
    """Its messages, as far as this release understands them."""
    try:
        return decode_messages(entry.raw_messages)
    except msgspec.MsgspecError:
        return []


def _markdown(entry: EntryRecord) -> str:
    match entry.kind:
        case k if k == USER:
            return _section("User", entry, _words(entry))
        case k if k == RESET:
            return _section("The context begins anew", entry, _words(entry))
        case k if k == COMPACTION:
            return _section("The context was compacted", entry, _words(entry))
        case k if k == ASSISTANT:
            return _section("Assistant", entry, _answer(entry))
        case k if k == TOOL_RESULT:
            return _result(entry)
        case kind if kind.startswith("pi."):
            return ""
        case kind:
            return _section(kind, entry, [fenced(msgspec.json.format(entry.raw_data, indent=2).decode(), "json")])


def _section(heading: str, entry: EntryRecord, parts: Sequence[str]) -> str:
    return "\n".join(["", f"## {heading}", "", f"*{_when(entry.created_at)}*", "", "\n\n".join(parts), ""])


def _words(entry: EntryRecord) -> list[str]:
    """What an input says; of an image, that it is one."""
    return [
        "\n".join(f"[image, {part.media_type}]" if isinstance(part, Image) else part.text for part in message.content)
        for message in _messages(entry)
        if isinstance(message, UserMessage)
    ]


def _answer(entry: EntryRecord) -> list[str]:
    parts: list[str] = []
    for message in _messages(entry):
        if not isinstance(message, AssistantMessage):
            continue
        for part in message.content:
            match part:
                case Thinking(text):
                    parts.append("\n".join(f"> {line}".rstrip() for line in text.splitlines()))
                case Text(text):
                    parts.append(text)
                case ToolCallPart():
                    parts.append(_call(part))
        if message.stop_reason in ("aborted", "error"):
            parts.append(f"*{message.stop_reason}{f': {message.error}' if message.error else ''}*")
    return parts


def _call(part: ToolCallPart) -> str:
    arguments = from_raw(part.arguments)
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if isinstance(command, str) and len(arguments) == 1:  # pyright: ignore[reportArgumentType]  # it is a dict
        return f"Calls `{part.name}`:\n\n{fenced(command, 'sh')}"
    return f"Calls `{part.name}`:\n\n{fenced(msgspec.json.format(part.arguments, indent=2).decode(), 'json')}"


def _result(entry: EntryRecord) -> str:
    return "".join(_ended(message) for message in result_messages(entry))


def _ended(result: ToolResultMessage) -> str:
    failed = f" failed{f' ({result.code})' if result.code else ''}" if result.is_error else ""
    return "\n".join(["", f"### Result of `{result.name}`{failed}", "", fenced(result.text, "text"), ""])


def fenced(text: str, info: str) -> str:
    """A block that nothing in the text can end."""
    ticks = max((len(run) for run in _runs(text)), default=0)
    fence = "`" * max(3, ticks + 1)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{fence}{info}\n{text}{end}{fence}"


def _runs(text: str) -> list[str]:
    """Its runs of back ticks."""
    return ["`" * len(run) for run in "".join(c if c == "`" else " " for c in text).split()]
