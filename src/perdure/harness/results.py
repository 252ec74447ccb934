"""The result of a call, and its one commit: the entry, the usage, the call's end in ``pi.live`` (rules H96 to H101)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from perdure.harness.approval import Asked
from perdure.harness.control import Control, Handoff
from perdure.harness.documents import (
    TOOL_RESULT,
    Agent,
    Live,
    LiveTool,
    ToolErrorCode,
    ToolInput,
    ToolResultData,
    UsageTotals,
)
from perdure.harness.environment import ScopeResult
from perdure.harness.foreign import storable_text
from perdure.harness.handle import MAX_DETAILS, MAX_DIAGNOSTIC, MAX_DIAGNOSTICS, CallStream
from perdure.harness.messages import Image, Text, ToolResultMessage, UserPart, decode_messages, encode_messages
from perdure.harness.output import DEFAULT_LIMITS, LEAST_BYTES, Bounded, OutputLimits, bound
from perdure.harness.tool import ToolError, ToolResult
from perdure.kernel.records import NULL, EntryRecord, from_raw, to_raw
from perdure.kernel.transaction import Transaction

MAX_IMAGES: Final = 100
"""Images of one result."""
MAX_IMAGE_BYTES: Final = 20 * 1024 * 1024
"""Bytes of base64 that they may take together."""
WORDS: Final = OutputLimits(keep="head")
"""Of an error that the harness writes, beside the output of the call."""
MOST_ADDED_TOOLS: Final = 1_000
"""Of one conversation: the newest stay."""
INTERRUPTED: Final = "The call was interrupted, and whether it took effect is not known. Look before you repeat it."
ABORTED: Final = "The call was aborted."


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """As it will be stored."""

    content: tuple[UserPart, ...]
    is_error: bool = False
    code: ToolErrorCode | None = None
    details: msgspec.Raw = NULL
    diagnostics: tuple[str, ...] = ()
    usage: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    dropped_bytes: int = 0
    dropped_lines: int = 0
    control: Control | None = None
    add_tools: tuple[str, ...] = ()


def bounded_result(result: ToolResult, stream: CallStream, limits: OutputLimits) -> CallResult:
    """A tool's result within the limits, with what the call showed. Raises ToolError for too much of it."""
    if result.content is None:
        kept = [stream.end()]
        parts: list[UserPart] = [Text(_with_note(kept[0], limits))]
    else:
        parts, kept = _bounded_parts(result.parts, limits)
    images = [len(part.data) for part in parts if isinstance(part, Image)]
    if len(images) > MAX_IMAGES or sum(images) > MAX_IMAGE_BYTES:
        raise ToolError(
            f"the result has {len(images)} images of {sum(images)} bytes; at most {MAX_IMAGES} of {MAX_IMAGE_BYTES} "
            "are kept"
        )
    details = to_raw(stream.details if result.details is None else result.details, at="details")
    if len(details) > MAX_DETAILS:
        raise ToolError(f"the details of the result take {len(details)} bytes; at most {MAX_DETAILS} are kept")
    return CallResult(
        content=tuple(parts),
        is_error=result.is_error,
        code=result.code,
        details=details,
        diagnostics=_diagnostics((*stream.diagnostics, *result.diagnostics)),
        usage={name: float(amount) for name, amount in result.usage.items()},
        dropped_bytes=sum(k.dropped_bytes for k in kept),
        dropped_lines=sum(k.dropped_lines for k in kept),
        control=_storable(result.control),
        add_tools=tuple(result.add_tools),
    )


def error_result(
    code: ToolErrorCode, text: str, *, stream: CallStream | None = None, output: Bounded | None = None
) -> CallResult:
    """An error that the harness writes, with what the call showed and, if given, its output so far."""
    text = bound(text, WORDS).text  # words of others may be in it, such as a name that a model made up
    if output is not None and output.text:
        dropped = f" ({output.dropped_lines} lines were left out)" if output.dropped_lines else ""
        text = f"{text}\nOutput until then{dropped}:\n{output.text}"
    return CallResult(
        content=(Text(text),),
        is_error=True,
        code=code,
        details=NULL if stream is None else to_raw(stream.details),
        diagnostics=() if stream is None else tuple(stream.diagnostics),
        dropped_bytes=0 if output is None else output.dropped_bytes,
        dropped_lines=0 if output is None else output.dropped_lines,
    )


def with_edited_arguments(result: CallResult, arguments: msgspec.Raw, *, nested: bool) -> CallResult:
    """The result of a call whose arguments a person changed: the model is told with what it ran. What a tool gets of a
    nested call is what was made of it: there it is a diagnostic."""
    words = f"The arguments of this call were changed before it was allowed. It ran with: {bytes(arguments).decode()}"
    if nested:
        return replace(result, diagnostics=_diagnostics((words, *result.diagnostics)))
    return replace(result, content=(Text(f"{bound(words, WORDS).text}\n"), *result.content))


def tool_failed(text: str) -> ToolResult:
    """What a tool gives whose code failed."""
    return ToolResult(text, is_error=True, code="tool_error")


def scope_result(result: ScopeResult) -> CallResult:
    """What an environment's scope decided."""
    return CallResult(
        content=(Text(result.text),),
        is_error=result.is_error,
        details=NULL if result.details is None else result.details,
    )


def committed_stream(live: LiveTool | None, limits: OutputLimits) -> tuple[CallStream, Bounded]:
    """What an earlier run of the call had shown, as far as it was committed."""
    stream = CallStream(limits)
    if live is None:
        return stream, Bounded(text="")
    stream.details = live["details"]
    stream.diagnostics = list(live["diagnostics"])
    output = bound(live["output"], limits, dropped_bytes=live["dropped_bytes"], dropped_lines=live["dropped_lines"])
    return stream, output


def live_tool(input: ToolInput, *, running: bool) -> LiveTool:
    """The call's place in ``pi.live``."""
    live: LiveTool = {
        "call_id": input.call_id,
        "name": input.name,
        "state": "running" if running else "waiting",
        "output": "",
        "dropped_lines": 0,
        "dropped_bytes": 0,
        "details": None,
        "diagnostics": [],
    }
    if input.caller is not None:
        live["caller"] = input.caller
    return live


def asking_tool(input: ToolInput, asked: Asked) -> LiveTool:
    """The place in ``pi.live`` of a call that waits for a decision."""
    live = live_tool(input, running=False)
    live["state"] = "approval"
    live["approval"] = {
        "arguments": from_raw(asked.arguments),
        "digest": asked.digest,
        "asked_at": asked.asked_at,
        "expires_at": asked.expires_at,
        "decision": None,
    }
    return live


async def write_result(
    tx: Transaction, task_id: int, conversation_id: int, input: ToolInput, result: CallResult
) -> EntryRecord:
    """Stage all that the end of a call is. The result of a nested call is for its caller: no model reads the entry."""
    nested = input.caller is not None
    control = None if nested else result.control  # the round is its caller's
    message = ToolResultMessage(
        call_id=input.call_id,
        name=input.name,
        content=result.content,
        is_error=result.is_error,
        code=result.code,
    )
    data = ToolResultData(
        task=task_id,
        call_id=input.call_id,
        name=input.name,
        is_error=result.is_error,
        code=result.code,
        details=result.details,
        diagnostics=result.diagnostics,
        usage=result.usage,
        dropped_lines=result.dropped_lines,
        dropped_bytes=result.dropped_bytes,
        control="handoff" if isinstance(control, Handoff) else control,
        added_tools=result.add_tools,
        caller=input.caller,
        content=result.content if nested else (),
    )
    entry = tx.append_record(
        TOOL_RESULT,
        messages=encode_messages([] if nested else [message]),
        data=msgspec.Raw(msgspec.json.encode(data)),
        conversation=conversation_id,
        by_task=task_id,
    )
    live = await tx.draft(Live, conversation=conversation_id)
    live.tools.pop(str(task_id), None)
    if control is not None and live.run is not None:
        handoff = control.text if isinstance(control, Handoff) else None
        live.run.setdefault("control", []).append({"task": task_id, "handoff": handoff})
    if result.add_tools:
        await _add_tools(tx, conversation_id, result.add_tools)
    totals = await tx.draft(UsageTotals, conversation=conversation_id)
    known = totals.tools.setdefault(input.name, {"calls": 0, "usage": {}})
    known["calls"] += 1
    for name, amount in result.usage.items():
        known["usage"][name] = known["usage"].get(name, 0.0) + amount
    return entry


def result_messages(entry: EntryRecord) -> list[ToolResultMessage]:
    """What a ``pi.tool-result`` says, to a model or, of a nested call, to its caller; as far as this release
    understands it."""
    with suppress(msgspec.MsgspecError):
        said = [m for m in decode_messages(entry.raw_messages) if isinstance(m, ToolResultMessage)]
        if said:
            return said
        data = entry.data_as(ToolResultData)
        if data.caller is not None:
            return [
                ToolResultMessage(
                    call_id=data.call_id, name=data.name, content=data.content, is_error=data.is_error, code=data.code
                )
            ]
    return []


async def _add_tools(tx: Transaction, conversation_id: int, names: Sequence[str]) -> None:
    agent = await tx.draft(Agent, conversation=conversation_id)
    known = set(agent.added_tools)
    agent.added_tools.extend(name for name in dict.fromkeys(names) if name not in known)
    del agent.added_tools[:-MOST_ADDED_TOOLS]


def _storable(control: Control | None) -> Control | None:
    """Raises ToolError for a handoff that is too long."""
    if not isinstance(control, Handoff):
        return control
    text = storable_text(control.text)
    if (size := len(text.encode())) > MAX_DETAILS:
        raise ToolError(f"the handoff of the result takes {size} bytes; at most {MAX_DETAILS} are kept")
    return Handoff(text)


def _with_note(kept: Bounded, limits: OutputLimits) -> str:
    """The kept text, and a line that tells the model what is not there."""
    if not kept.dropped_bytes:
        return kept.text
    lines = f" in {kept.dropped_lines} whole lines" if kept.dropped_lines else ""
    what = f"{kept.dropped_bytes} bytes{lines}"
    if limits.keep == "tail":
        return f"[{what} before this are left out.]\n{kept.text}"
    return f"{kept.text}{'' if kept.text[-1:] in ('', chr(10)) else chr(10)}[{what} after this are left out.]"


def _bounded_parts(given: Sequence[UserPart], limits: OutputLimits) -> tuple[list[UserPart], list[Bounded]]:
    """The parts of a result, and what is kept of its texts: all of them together keep the limits."""
    parts: list[UserPart] = []
    texts: list[str] = []
    for part in given:
        # Texts that follow one another are one.
        if isinstance(part, Text):
            if not texts:
                parts.append(part)
            texts.append(part.text)
            continue
        if texts:
            parts[-1], texts = Text("".join(texts)), []
        parts.append(part)
    if texts:
        parts[-1] = Text("".join(texts))
    kept: list[Bounded] = []
    order = range(len(parts)) if limits.keep == "head" else range(len(parts) - 1, -1, -1)
    left: OutputLimits | None = limits
    for at in order:
        part = parts[at]
        if isinstance(part, Text):
            kept.append(bound(part.text, left) if left is not None else _left_out(part.text))
            parts[at] = Text(_with_note(kept[-1], limits))
            left = None if left is None else _rest(left, kept[-1])
    return parts, kept


def _rest(limits: OutputLimits, kept: Bounded) -> OutputLimits | None:
    """What the limits leave beside a text; None: nothing."""
    lines = kept.text.count("\n") + (kept.text[-1:] not in ("", "\n"))
    max_bytes, max_lines = limits.max_bytes - len(kept.text.encode()), limits.max_lines - lines
    if kept.dropped_bytes or max_bytes < LEAST_BYTES or max_lines < 1:
        return None
    return replace(limits, max_bytes=max_bytes, max_lines=max_lines)


def _left_out(text: str) -> Bounded:
    counted = DEFAULT_LIMITS.window()
    counted.feed(text.encode("utf-8", "surrogatepass"))
    seen = counted.window()
    return Bounded(text="", dropped_bytes=seen.total_bytes, dropped_lines=seen.total_lines)


def _diagnostics(all: Sequence[str]) -> tuple[str, ...]:
    return tuple(text[:MAX_DIAGNOSTIC].encode("utf-8", "replace").decode() for text in all[:MAX_DIAGNOSTICS])
