"""What entries look like to people: inputs, answers, calls and their results, in lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from perdure.cli.exact import exact, exact_words
from perdure.cli.style import Line, Style, line
from perdure.cli.text import counted, lines_of, one_line, shortened
from perdure.harness.documents import (
    ASSISTANT,
    COMPACTION,
    RESET,
    SYSTEM,
    TOOL_RESULT,
    USER,
    AssistantData,
    CompactionData,
    LiveTool,
    ToolResultData,
)
from perdure.harness.messages import (
    AssistantMessage,
    Image,
    Message,
    Text,
    Thinking,
    UserMessage,
    UserPart,
    decode_messages,
)
from perdure.harness.results import result_messages
from perdure.kernel.json import JsonValue
from perdure.kernel.records import EntryRecord, from_raw

HEADING: Final = 160
"""Characters of a call's heading."""
WIDEST: Final = 500
"""Characters of a line of output."""
HEAD: Final = 4
TAIL: Final = 8
"""Lines of a result that are shown: the first and the last."""
MOST_DIFF: Final = 80
"""Lines of a diff that are shown."""
BAR: Final = "  │ "


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the model wrote it."""

    name: str
    arguments: JsonValue = None


def messages_of(entry: EntryRecord) -> list[Message]:
    """Its messages, as far as this release understands them."""
    try:
        return decode_messages(entry.raw_messages)
    except msgspec.MsgspecError:
        return []


def answer_of(entry: EntryRecord) -> AssistantMessage | None:
    for message in messages_of(entry):
        if isinstance(message, AssistantMessage):
            return message
    return None


def calls_of(entry: EntryRecord) -> dict[int, Call]:
    """The calls of an answer, by their tasks."""
    message = answer_of(entry) if entry.kind == ASSISTANT else None
    if message is None or not message.tool_calls:
        return {}
    tasks = entry.data_as(AssistantData).calls
    calls = [Call(part.name, from_raw(part.arguments)) for part in message.tool_calls]
    return dict(zip(tasks, calls, strict=False))


def heading(call: Call) -> Line:
    """What a call is about, in a line."""
    about = exact_words(_about(call), HEADING)
    return (("tool", f"▸ {exact(call.name)}"), ("plain", f"  {about}" if about else ""))


def _about(call: Call) -> str:
    arguments = call.arguments
    if isinstance(arguments, dict):
        command, pattern, path = (arguments.get(name) for name in ("command", "pattern", "path"))
        if isinstance(command, str):
            return command
        if isinstance(pattern, str):
            return f"{pattern}  in {path}" if isinstance(path, str) else pattern
        if isinstance(path, str):
            return path
        if not arguments:
            return ""
    return "" if arguments is None else json.dumps(arguments, ensure_ascii=False)


# --- whole entries ---------------------------------------------------------------------------------------------


def entry_lines(entry: EntryRecord, calls: Mapping[int, Call]) -> list[Line]:
    """All that people are shown of an entry. ``calls``: those whose results may come."""
    if entry.kind == USER:
        return user_lines(entry)
    if entry.kind == ASSISTANT:
        message = answer_of(entry)
        return [] if message is None else answer_lines(message)
    if entry.kind == TOOL_RESULT:
        data = entry.data_as(ToolResultData)
        return [heading(calls.get(data.task, Call(data.name))), *result_lines(entry, data)]
    if entry.kind == RESET:
        return [(), line("— the model's context begins anew —", "dim"), *user_lines(entry)]
    if entry.kind == COMPACTION:
        return [(), line(_compaction(entry), "dim")]
    if entry.kind == SYSTEM:
        return []
    return [line(f"· {one_line(entry.kind)}", "dim"), *_said(_texts(messages_of(entry)), "plain")]


def _compaction(entry: EntryRecord) -> str:
    """That the context was compacted. The summary is the model's, and long."""
    try:
        data = entry.data_as(CompactionData)
    except msgspec.ValidationError:
        return "— the model's context was compacted —"
    by = "a hook" if data.model is None else one_line(data.model)
    return f"— the model's context, about {data.tokens_before:,} tokens, was compacted by {by} ({data.reason}) —"


def user_lines(entry: EntryRecord, mark: str = ">") -> list[Line]:
    """An input, with an empty line before it."""
    texts = _texts(messages_of(entry))
    first, *rest = texts or [""]
    if not texts:
        return []
    return [(), (("user", f"{mark} {first}"),), *(line(f"  {text}", "user") for text in rest)]


def answer_lines(message: AssistantMessage) -> list[Line]:
    """An answer: thinking, words, and what broke it off. Its calls are shown with their results."""
    shown: list[Line] = []
    for part in message.content:
        if isinstance(part, Thinking):
            shown += _said(lines_of(part.text), "dim")
        elif isinstance(part, Text):
            shown += _said(lines_of(part.text), "plain")
    return [*shown, *ending_lines(message)]


def ending_lines(message: AssistantMessage) -> list[Line]:
    """What is to be said of an answer that did not end by itself."""
    why = f": {one_line(message.error)}" if message.error else ""
    match message.stop_reason:
        case "aborted":
            return [line(f"— cut off{why}", "warning")]
        case "error":
            return [line(f"— failed{why}", "error")]
        case "length":
            return [line("— cut off at the longest answer the model gives", "warning")]
        case _:
            return []


def result_lines(entry: EntryRecord, data: ToolResultData, *, shown: Sequence[str] = ()) -> list[Line]:
    """A call's result. ``shown``: the lines of its output that were printed while it ran."""
    text = "\n".join(message.text for message in result_messages(entry))
    diff = _diff(data)
    if diff is not None:
        return [*diff_lines(diff), *_failure(data)]
    lines = _output_of(lines_of(text), data)
    if list(shown) == lines[: len(shown)]:
        lines = lines[len(shown) :]
    elif shown:
        lines = lines[-TAIL:]
    if not data.is_error and data.name == "read":
        return [line(f"{BAR}{counted(len(lines), 'line')}", "dim")]
    return [*excerpt(lines), *_failure(data)]


def _output_of(lines: Sequence[str], data: ToolResultData) -> list[str]:
    """Of a call that was broken off, the output alone: what else the model is told, people are told shorter."""
    if data.code in ("interrupted", "aborted"):
        for at, text in enumerate(lines):
            if text.startswith("Output until then"):
                return list(lines[at + 1 :])
        if data.code == "aborted":
            return []
    return list(lines)


def excerpt(lines: Sequence[str], *, head: int = HEAD, tail: int = TAIL) -> list[Line]:
    """The beginning and the end of some output."""
    left_out = len(lines) - head - tail
    if left_out <= 1:
        return [_output(text) for text in lines]
    return [
        *(_output(text) for text in lines[:head]),
        line(f"  ┆ {counted(left_out, 'line')}", "dim"),
        *(_output(text) for text in lines[len(lines) - tail :]),
    ]


def running_lines(tool: LiveTool) -> list[Line]:
    """The end of the output of a call that is open, or what it waits for."""
    if tool["state"] == "approval":
        return [line("  waits to be allowed; nothing of it was done", "warning")]
    asks = [
        line(f"  asks a person, question {task}: {shortened(' '.join(lines_of(question['text'])), WIDEST)}", "warning")
        for task, question in tool.get("questions", {}).items()
    ]
    output = lines_of(tool["output"])
    left_out = tool["dropped_lines"] + max(0, len(output) - TAIL)
    before = [line(f"  ┆ {counted(left_out, 'line')}", "dim")] if output and left_out else []
    return [*before, *excerpt(output[-TAIL:]), *asks]


def _output(text: str) -> Line:
    return line(f"{BAR}{shortened(text, WIDEST)}", "dim")


def diff_lines(diff: str) -> list[Line]:
    """A unified diff, coloured."""
    lines = lines_of(diff)
    shown = [line(f"  {shortened(text, WIDEST)}", _diff_style(text)) for text in lines[:MOST_DIFF]]
    if len(lines) > MOST_DIFF:
        shown.append(line(f"  ┆ {counted(len(lines) - MOST_DIFF, 'line')}", "dim"))
    return shown


def _diff_style(text: str) -> Style:
    match text[:1]:
        case "+":
            return "added"
        case "-":
            return "removed"
        case "@":
            return "hunk"
        case _:
            return "dim"


def _diff(data: ToolResultData) -> str | None:
    details = from_raw(data.details)
    found = details.get("diff") if isinstance(details, dict) else None
    return found if isinstance(found, str) else None


def _failure(data: ToolResultData) -> list[Line]:
    if not data.is_error:
        return []
    if data.code == "interrupted":
        return [line("  ✗ interrupted; it is not run again by itself, and the model is told", "warning")]
    if data.code == "aborted":
        return [line("  ✗ aborted", "warning")]
    return [line(f"  ✗ failed{f': {data.code}' if data.code else ''}", "error")]


def _said(lines: Sequence[str], style: Style) -> list[Line]:
    return [line(text, style) for text in lines]


def _texts(messages: Sequence[Message]) -> list[str]:
    lines: list[str] = []
    for message in messages:
        if isinstance(message, UserMessage):
            lines += said_lines(message.content)
        elif isinstance(message, AssistantMessage):
            lines += lines_of(message.text)
    return lines


def said_lines(content: Sequence[UserPart]) -> list[str]:
    """What an input says; of an image, that it is one."""
    lines: list[str] = []
    for part in content:
        lines += [f"[image, {one_line(part.media_type)}]"] if isinstance(part, Image) else lines_of(part.text)
    return lines
