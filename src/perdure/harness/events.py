"""What happens in a conversation, as typed events, derived from settled commits (rules H149 and H151).

A stream of events begins with a snapshot; what follows is exactly what came after it. A consumer that falls behind
gets a fresh snapshot in place of what it missed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import msgspec

from perdure.harness.documents import (
    ASSISTANT,
    TOOL_RESULT,
    InboxItem,
    LiveMessage,
    LiveRetry,
    LiveRun,
    LiveTool,
    ModelTotals,
    ToolResultData,
    ToolTotals,
)
from perdure.harness.view import ConversationView
from perdure.kernel.json import JsonValue, copy_json
from perdure.kernel.observation import Watch
from perdure.kernel.records import EntryRecord, SubmissionRecord
from perdure.tasks.errors import BlockedReason


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    seq: int
    """The commit it is of."""


class BlockedTask(msgspec.Struct, frozen=True):
    """A task that was to run and cannot."""

    task: int
    kind: str
    reason: BlockedReason


class Snapshot(_Event, frozen=True, kw_only=True, tag="snapshot"):
    """How the conversation is now: first of all, and in place of events that a slow consumer missed."""

    busy: bool
    view: JsonValue
    """A ConversationView's ``to_json()``."""
    blocked: tuple[BlockedTask, ...] = ()


class RunStart(_Event, frozen=True, kw_only=True, tag="run_start"):
    task: int
    """The generation task: what the events of one run have in common."""
    inputs: tuple[int, ...]
    """The submissions it answers."""


class RunEnd(_Event, frozen=True, kw_only=True, tag="run_end"):
    task: int
    inputs: tuple[int, ...]
    answer: int | None = None
    """The answering entry, or None: unanswered."""
    reason: str | None = None
    detail: str | None = None


class Turn(_Event, frozen=True, kw_only=True, tag="turn"):
    """A response of the model is complete and its calls begin."""

    task: int
    turn: int
    """Counted from 1 in each run."""


class MessageStart(_Event, frozen=True, kw_only=True, tag="message_start"):
    """An answer begins; what follows until its end is about it."""

    task: int | None


class MessageDelta(_Event, frozen=True, kw_only=True, tag="message_delta"):
    """Text that was added to a part of the answer. The first delta of an index begins that part."""

    task: int
    index: int
    part: str
    """text, thinking or tool_call."""
    text: str
    id: str = ""
    name: str = ""


class MessageEnd(_Event, frozen=True, kw_only=True, tag="message_end"):
    """The answer as it is stored; None: nothing of it was, it is tried again."""

    task: int | None
    entry: EntryRecord | None


class ToolStart(_Event, frozen=True, kw_only=True, tag="tool_start"):
    task: int
    """The call's own id."""
    call_id: str
    name: str


class ToolUpdate(_Event, frozen=True, kw_only=True, tag="tool_update"):
    """What a running call shows."""

    task: int
    text: str
    """Added to its output; with ``anew`` all that is shown of it, in place of what was."""
    anew: bool
    dropped_lines: int
    dropped_bytes: int
    details: JsonValue
    """As they are now."""
    diagnostics: tuple[str, ...]
    """New ones."""


class ToolEnd(_Event, frozen=True, kw_only=True, tag="tool_end"):
    task: int
    call_id: str
    name: str
    is_error: bool
    code: str | None
    entry: EntryRecord


class EntryAppended(_Event, frozen=True, kw_only=True, tag="entry"):
    """An entry that is neither an answer nor a result: an input, a reset, the prompt, an application's own."""

    entry: EntryRecord


class InboxChanged(_Event, frozen=True, kw_only=True, tag="inbox"):
    items: list[InboxItem]
    """All that waits now."""


class Retry(_Event, frozen=True, kw_only=True, tag="retry"):
    """A request failed and is sent again at ``until`` (ms UTC)."""

    attempt: int
    until: int
    code: str
    message: str


class UsageChanged(_Event, frozen=True, kw_only=True, tag="usage"):
    """The totals as they are now."""

    models: Mapping[str, ModelTotals]
    tools: Mapping[str, ToolTotals]


class Blocked(_Event, frozen=True, kw_only=True, tag="blocked"):
    """A task of the conversation cannot go on by itself (rule T48)."""

    task: int
    kind: str
    reason: BlockedReason


Event: TypeAlias = (
    Snapshot
    | RunStart
    | RunEnd
    | Turn
    | MessageStart
    | MessageDelta
    | MessageEnd
    | ToolStart
    | ToolUpdate
    | ToolEnd
    | EntryAppended
    | InboxChanged
    | Retry
    | UsageChanged
    | Blocked
)


# --- deriving --------------------------------------------------------------------------------------------------


class _Live(msgspec.Struct, frozen=True):
    """``pi.live`` as its JSON is."""

    run: LiveRun | None
    message: LiveMessage | None
    tools: dict[str, LiveTool]
    retry: LiveRetry | None


def derive(
    before: ConversationView,
    after: ConversationView,
    *,
    seq: int,
    entries: Sequence[EntryRecord],
    submissions: Sequence[SubmissionRecord],
) -> tuple[Event, ...]:
    """The events of one commit, which led from one view to the other. Costs what the commit changed."""
    was, now = _live(before), _live(after)
    answers = [entry for entry in entries if entry.kind == ASSISTANT]
    results = [entry for entry in entries if entry.kind == TOOL_RESULT]
    events: list[Event] = []
    events += _message(was.message, now.message, answers, seq)
    if was.run is not now.run:
        events += _turn(was.run, now.run, seq)
    events += _tools(was.tools, now.tools, results, seq)
    if before.tree["usage"] is not after.tree["usage"]:
        usage = cast("dict[str, dict[str, ModelTotals]]", after.tree["usage"])
        tools = cast("dict[str, dict[str, ToolTotals]]", after.tree["usage"])
        events.append(UsageChanged(seq=seq, models=usage.get("models", {}), tools=tools.get("tools", {})))
    if was.run is not now.run:
        events += _run(was.run, now.run, submissions, seq)
    events += (EntryAppended(seq=seq, entry=e) for e in entries if e.kind not in (ASSISTANT, TOOL_RESULT))
    retry = now.retry
    if retry is not None and retry is not was.retry:
        events.append(Retry(seq=seq, **retry))
    if before.tree["inbox"] is not after.tree["inbox"]:
        inbox = cast("dict[str, list[InboxItem]]", after.tree["inbox"])
        events.append(InboxChanged(seq=seq, items=inbox.get("items", [])))
    return tuple(events)


def _live(view: ConversationView) -> _Live:
    live = cast("dict[str, JsonValue]", view.tree["live"])
    return _Live(
        run=cast("LiveRun | None", live.get("run")),
        message=cast("LiveMessage | None", live.get("message")),
        tools=cast("dict[str, LiveTool]", live.get("tools", {})),
        retry=cast("LiveRetry | None", live.get("retry")),
    )


def _turn(was: LiveRun | None, now: LiveRun | None, seq: int) -> Iterator[Event]:
    if was is not None and now is not None and was["task"] == now["task"] and now["turn"] > was["turn"]:
        yield Turn(seq=seq, task=now["task"], turn=now["turn"])


def _run(
    was: LiveRun | None, now: LiveRun | None, submissions: Sequence[SubmissionRecord], seq: int
) -> Iterator[Event]:
    same = was is not None and now is not None and was["task"] == now["task"]
    if was is not None and not same:
        inputs = tuple(was["inputs"])
        settled = next((s for s in submissions if s.id in inputs and s.settled), None)
        yield RunEnd(
            seq=seq,
            task=was["task"],
            inputs=inputs,
            answer=None if settled is None else settled.answer,
            reason=None if settled is None else settled.reason,
            detail=None if settled is None else settled.detail,
        )
    if now is not None and not same:
        yield RunStart(seq=seq, task=now["task"], inputs=tuple(now["inputs"]))


def _message(
    was: LiveMessage | None, now: LiveMessage | None, answers: Sequence[EntryRecord], seq: int
) -> Iterator[Event]:
    if was is now and not answers:
        return
    begun = was
    for entry in answers:
        if begun is None:
            yield MessageStart(seq=seq, task=entry.by_task)
        yield MessageEnd(seq=seq, task=entry.by_task, entry=entry)
        begun = None
    if now is None:
        if begun is not None:
            yield MessageEnd(seq=seq, task=begun["task"], entry=None)
        return
    if begun is not None and (begun["task"], begun["attempt"]) != (now["task"], now["attempt"]):
        yield MessageEnd(seq=seq, task=begun["task"], entry=None)
        begun = None
    if begun is None:
        yield MessageStart(seq=seq, task=now["task"])
    shown = [] if begun is None else begun["content"]
    for index, part in enumerate(now["content"]):
        old = shown[index] if index < len(shown) else None
        if part is old:
            continue
        text = part["text"] if old is None else part["text"][len(old["text"]) :]
        if text or old is None:
            yield MessageDelta(
                seq=seq,
                task=now["task"],
                index=index,
                part=part["type"],
                text=text,
                id=part["id"],
                name=part["name"],
            )


def _tools(
    was: Mapping[str, LiveTool], now: Mapping[str, LiveTool], results: Sequence[EntryRecord], seq: int
) -> Iterator[Event]:
    for entry in results:
        data = entry.data_as(ToolResultData)
        shown = was.get(str(data.task))
        if shown is None or shown["state"] != "running":
            yield ToolStart(seq=seq, task=data.task, call_id=data.call_id, name=data.name)
        yield ToolEnd(
            seq=seq,
            task=data.task,
            call_id=data.call_id,
            name=data.name,
            is_error=data.is_error,
            code=data.code,
            entry=entry,
        )
    if was is now:
        return
    for key, tool in now.items():
        old = was.get(key)
        if tool is old or tool["state"] != "running":
            continue
        if old is None or old["state"] != "running":
            yield ToolStart(seq=seq, task=int(key), call_id=tool["call_id"], name=tool["name"])
        update = _update(int(key), old, tool, seq)
        if update is not None:
            yield update


def _update(task: int, old: LiveTool | None, tool: LiveTool, seq: int) -> ToolUpdate | None:
    output = "" if old is None else old["output"]
    noted = [] if old is None else old["diagnostics"]
    anew = not tool["output"].startswith(output)
    text = tool["output"] if anew else tool["output"][len(output) :]
    added = tool["diagnostics"][len(noted) :]
    details = tool["details"]
    dropped = (tool["dropped_lines"], tool["dropped_bytes"])
    if old is None:
        same = details is None and dropped == (0, 0)
    else:
        same = details is old["details"] and dropped == (old["dropped_lines"], old["dropped_bytes"])
    if same and not text and not added and not anew:
        return None
    return ToolUpdate(
        seq=seq,
        task=task,
        text=text,
        anew=anew,
        dropped_lines=tool["dropped_lines"],
        dropped_bytes=tool["dropped_bytes"],
        details=details,
        diagnostics=tuple(added),
    )


# --- consuming -------------------------------------------------------------------------------------------------


class Moment(msgspec.Struct, frozen=True):
    """What a commit did: the view after it, and its events."""

    view: ConversationView
    events: tuple[Event, ...] = ()


class Events:
    """An async iterator of a conversation's events, for one consumer.

    It ends as a Watch does: quietly when it is released, else with WatchEnded after the events before the end.
    """

    def __init__(self, watch: Watch[Moment], blocked: Callable[[], tuple[BlockedTask, ...]]) -> None:
        self._watch = watch
        self._blocked = blocked
        self._ready: deque[Event] = deque()
        """The rest of one batch."""

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            frame = await self._watch.__anext__()
            if frame.ops is None:
                view = frame.value.view
                return Snapshot(seq=frame.seq, busy=view.busy, view=view.to_json(), blocked=self._blocked())
            self._ready.extend(map(_own, frame.value.events))
        return self._ready.popleft()


def _own(event: Event) -> Event:
    """The event with values that no other consumer holds."""
    match event:
        case InboxChanged() | UsageChanged():
            return copy.deepcopy(event)
        case ToolUpdate() if event.details is not None:
            return msgspec.structs.replace(event, details=copy_json(event.details))
        case _:
            return event
