"""``perdure export``: conversations as JSON lines or as Markdown, a page of entries in memory at a time."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO, TypeAlias

import msgspec

from perdure.cli.entries import Call, calls_of, messages_of, said_lines
from perdure.cli.errors import CommandError
from perdure.cli.show import entries_of
from perdure.cli.stores import chosen, looking
from perdure.cli.text import when
from perdure.harness.documents import ASSISTANT, RESET, TOOL_RESULT, USER, Meta, ToolResultData
from perdure.harness.messages import AssistantMessage, Text, Thinking, ToolCallPart, ToolResultMessage, UserMessage
from perdure.kernel.errors import DocumentVersionError
from perdure.kernel.records import ConversationRecord, EntryRecord, from_raw
from perdure.kernel.session import Session
from perdure.kernel.storage import MAX_SCAN

Format: TypeAlias = Literal["jsonl", "markdown"]


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


async def export(
    path: Path, *, format: Format, conversation: str | None, everything: bool, output: Path | None
) -> None:
    """Write to ``output``, a new file of mode 0600, or to standard output."""
    async with looking(path) as session:
        only = None if everything else await chosen(session, conversation)
        with _target(output) as file:
            async for record in _conversations(session, only):
                write = _jsonl(session, record) if format == "jsonl" else _markdown(session, record)
                async for text in write:
                    file.write(text)


async def _conversations(session: Session, only: ConversationRecord | None) -> AsyncGenerator[ConversationRecord]:
    if only is not None:
        yield only
        return
    after = 0
    while page := await session.conversations(after=after, limit=MAX_SCAN):
        for record in page:
            yield record
        after = page[-1].id


@contextmanager
def _target(output: Path | None) -> Generator[TextIO]:
    """Where it goes. A file that could not be written to its end is taken away again."""
    if output is None:
        with open(1, "w", encoding="utf-8", closefd=False) as file:
            yield file
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise CommandError(f"{output} is there already; export to a path where nothing is") from None
    except OSError as error:
        raise CommandError(f"{output} cannot be made ({error.strerror})") from error
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        output.unlink(missing_ok=True)
        raise


async def _meta(session: Session, conversation: int) -> Meta:
    try:
        return await session.snapshot(Meta, conversation=conversation) or Meta()
    except DocumentVersionError:  # written by a newer release
        return Meta()


# --- JSON lines --------------------------------------------------------------------------------------------------


async def _jsonl(session: Session, record: ConversationRecord) -> AsyncGenerator[str]:
    meta = await _meta(session, record.id)
    first = ConversationLine(log_id=session.info.log_id, record=record, name=meta.name, labels=dict(meta.labels))
    yield f"{msgspec.json.encode(first).decode()}\n"
    async for entry in entries_of(session, record.id):
        yield f"{msgspec.json.encode(EntryLine(conversation=record.id, entry=entry)).decode()}\n"


# --- Markdown ----------------------------------------------------------------------------------------------------


async def _markdown(session: Session, record: ConversationRecord) -> AsyncGenerator[str]:
    meta = await _meta(session, record.id)
    yield f"# {_title(meta.name) or f'Conversation {record.id}'}\n\nBegun {when(record.created_at)}.\n"
    calls: dict[int, Call] = {}
    async for entry in entries_of(session, record.id):
        calls.update(calls_of(entry))
        yield _entry(entry, calls)
        if entry.kind == TOOL_RESULT:
            calls.pop(entry.data_as(ToolResultData).task, None)
    yield "\n"


def _title(name: str | None) -> str:
    return " ".join((name or "").split())


def _entry(entry: EntryRecord, calls: dict[int, Call]) -> str:
    match entry.kind:
        case k if k == USER:
            return _section("User", entry, _words(entry))
        case k if k == RESET:
            return _section("The context begins anew", entry, _words(entry))
        case k if k == ASSISTANT:
            return _section("Assistant", entry, _answer(entry))
        case k if k == TOOL_RESULT:
            return _result(entry)
        case kind if kind.startswith("pi."):
            return ""
        case kind:
            return _section(kind, entry, [fenced(msgspec.json.format(entry.raw_data, indent=2).decode(), "json")])


def _section(heading: str, entry: EntryRecord, parts: Sequence[str]) -> str:
    return "\n".join(["", f"## {heading}", "", f"*{when(entry.created_at)}*", "", "\n\n".join(parts), ""])


def _words(entry: EntryRecord) -> list[str]:
    return [
        "\n".join(said_lines(message.content)) for message in messages_of(entry) if isinstance(message, UserMessage)
    ]


def _answer(entry: EntryRecord) -> list[str]:
    parts: list[str] = []
    for message in messages_of(entry):
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
    data = entry.data_as(ToolResultData)
    texts = [message.text for message in messages_of(entry) if isinstance(message, ToolResultMessage)]
    failed = f" failed{f' ({data.code})' if data.code else ''}" if data.is_error else ""
    return "\n".join(["", f"### Result of `{data.name}`{failed}", "", fenced("\n".join(texts), "text"), ""])


def fenced(text: str, info: str) -> str:
    """A block that nothing in the text can end."""
    ticks = max((len(run) for run in _runs(text)), default=0)
    fence = "`" * max(3, ticks + 1)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{fence}{info}\n{text}{end}{fence}"


def _runs(text: str) -> list[str]:
    """Its runs of back ticks."""
    return ["`" * len(run) for run in "".join(c if c == "`" else " " for c in text).split()]
