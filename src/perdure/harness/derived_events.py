"""Which events a commit is: worked out from the view before it, the view after it, and its records (rule H149).

Pure. What is compared is compared by identity where views share what stayed the same: a commit costs what it changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec

from perdure.harness.documents import (
    ASSISTANT,
    COMPACTION,
    TOOL_RESULT,
    CompactionData,
    CompactionFailure,
    CompactionReason,
    InboxItem,
    LiveCompaction,
    LiveDeferred,
    LiveMessage,
    LiveRetry,
    LiveRun,
    LiveTool,
    ModelTotals,
    ToolResultData,
    ToolTotals,
)
from perdure.harness.events import (
    ApprovalDecided,
    ApprovalRequested,
    CompactionEnd,
    CompactionOutcome,
    CompactionRetry,
    CompactionStart,
    EntryAppended,
    Event,
    InboxChanged,
    MessageDelta,
    MessageEnd,
    MessageStart,
    QuestionAsked,
    QuestionOutcome,
    QuestionOver,
    ResponseDeferred,
    Retry,
    RunEnd,
    RunStart,
    ToolEnd,
    ToolStart,
    ToolUpdate,
    Turn,
    UsageChanged,
)
from perdure.harness.person import EXPIRED
from perdure.harness.view import ConversationView
from perdure.kernel.json import JsonValue
from perdure.kernel.records import (
    Aborted,
    Completed,
    EntryRecord,
    Failed,
    Faulted,
    Orphaned,
    Outcome,
    SubmissionRecord,
    TaskRecord,
)

_TOLD_OTHERWISE = (ASSISTANT, TOOL_RESULT, COMPACTION)
"""Entries with an event of their own."""


class _Live(msgspec.Struct, frozen=True):
    """``pi.live`` as its JSON is."""

    run: LiveRun | None
    message: LiveMessage | None
    tools: dict[str, LiveTool]
    retry: LiveRetry | None
    deferred: LiveDeferred | None
    compactions: dict[str, LiveCompaction]
    failure: CompactionFailure | None


def derive(
    before: ConversationView,
    after: ConversationView,
    *,
    seq: int,
    entries: Sequence[EntryRecord],
    submissions: Sequence[SubmissionRecord],
    tasks: Sequence[TaskRecord] = (),
) -> tuple[Event, ...]:
    """The events of one commit, which led from one view to the other; the records are those that it wrote."""
    was, now = _live(before), _live(after)
    answers = [entry for entry in entries if entry.kind == ASSISTANT]
    results = [entry for entry in entries if entry.kind == TOOL_RESULT]
    events: list[Event] = []
    events += _message(was.message, now.message, answers, seq)
    if was.run is not now.run:
        events += _turn(was.run, now.run, seq)
    events += _tools(was.tools, now.tools, results, tasks, seq)
    if before.tree["usage"] is not after.tree["usage"]:
        usage = cast("dict[str, dict[str, ModelTotals]]", after.tree["usage"])
        tools = cast("dict[str, dict[str, ToolTotals]]", after.tree["usage"])
        events.append(UsageChanged(seq=seq, models=usage.get("models", {}), tools=tools.get("tools", {})))
    if was.run is not now.run:
        events += _run(was.run, now.run, submissions, seq)
    events += (EntryAppended(seq=seq, entry=e) for e in entries if e.kind not in _TOLD_OTHERWISE)
    changed = was.compactions is not now.compactions or before.tree["inbox"] is not after.tree["inbox"]
    if changed or any(entry.kind == COMPACTION for entry in entries):
        events += _compactions(before, after, was, now, entries, submissions, tasks, seq)
    retry = now.retry
    if retry is not None and retry is not was.retry:
        events.append(Retry(seq=seq, **retry))
    deferred = now.deferred
    if deferred is not None and deferred is not was.deferred:
        events.append(ResponseDeferred(seq=seq, **deferred))
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
        deferred=cast("LiveDeferred | None", live.get("deferred")),
        compactions=cast("dict[str, LiveCompaction]", live.get("compactions", {})),
        failure=cast("CompactionFailure | None", live.get("compaction_failure")),
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
    was: Mapping[str, LiveTool],
    now: Mapping[str, LiveTool],
    results: Sequence[EntryRecord],
    tasks: Sequence[TaskRecord],
    seq: int,
) -> Iterator[Event]:
    for entry in results:
        data = entry.data_as(ToolResultData)
        shown = was.get(str(data.task))
        if shown is None or shown["state"] != "running":
            yield ToolStart(seq=seq, task=data.task, call_id=data.call_id, name=data.name, caller=data.caller)
        yield ToolEnd(
            seq=seq,
            task=data.task,
            call_id=data.call_id,
            name=data.name,
            is_error=data.is_error,
            code=data.code,
            entry=entry,
            caller=data.caller,
        )
    if was is now:
        return
    for key, tool in was.items():
        if key not in now:
            yield from _questions(int(key), tool, None, tasks, seq)
    for key, tool in now.items():
        old = was.get(key)
        if tool is old:
            continue
        yield from _questions(int(key), old, tool, tasks, seq)
        if tool["state"] == "approval":
            yield from _approval(int(key), old, tool, seq)
        if tool["state"] != "running":
            continue
        if old is None or old["state"] != "running":
            yield ToolStart(
                seq=seq, task=int(key), call_id=tool["call_id"], name=tool["name"], caller=tool.get("caller")
            )
        update = _update(int(key), old, tool, seq)
        if update is not None:
            yield update


def _questions(
    call: int, old: LiveTool | None, tool: LiveTool | None, tasks: Sequence[TaskRecord], seq: int
) -> Iterator[Event]:
    was = {} if old is None else old.get("questions", {})
    now = {} if tool is None else tool.get("questions", {})
    if was is now:
        return
    for task in sorted(was.keys() - now.keys(), key=int):
        outcome = next((record.outcome for record in tasks if record.id == int(task)), None)
        yield QuestionOver(seq=seq, task=int(task), call=call, outcome=_answered(outcome))
    for task, question in now.items():
        if task not in was:
            yield QuestionAsked(
                seq=seq, task=int(task), call=call, text=question["text"], expires_at=question["expires_at"]
            )


def _answered(outcome: Outcome | None) -> QuestionOutcome:
    """How a question ended, whose task has its outcome from this commit, or is aborted after it."""
    if isinstance(outcome, Completed):
        return "answered"
    return "expired" if isinstance(outcome, Failed) and outcome.error.code == EXPIRED else "withdrawn"


def _approval(task: int, old: LiveTool | None, tool: LiveTool, seq: int) -> Iterator[Event]:
    now = tool.get("approval")
    assert now is not None, "it is set with the state"
    was = None if old is None else old.get("approval")
    if was is None:
        yield ApprovalRequested(
            seq=seq,
            task=task,
            call_id=tool["call_id"],
            name=tool["name"],
            arguments=now["arguments"],
            digest=now["digest"],
            expires_at=now["expires_at"],
        )
    if now["decision"] is not None and (was is None or was["decision"] is None):
        yield ApprovalDecided(seq=seq, task=task, **now["decision"])


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


def _compactions(
    before: ConversationView,
    after: ConversationView,
    was: _Live,
    now: _Live,
    entries: Sequence[EntryRecord],
    submissions: Sequence[SubmissionRecord],
    tasks: Sequence[TaskRecord],
    seq: int,
) -> Iterator[Event]:
    """A summary that is there may wait in the inbox for a boundary: its compaction has not ended yet.

    Those that ended come first: the next one may begin in the same commit.
    """
    begun: dict[int, CompactionReason] = {}
    if was.compactions is not now.compactions:
        begun.update((int(key), live["reason"]) for key, live in was.compactions.items())
    waiting: dict[int, int] = {}
    if before.tree["inbox"] is not after.tree["inbox"]:
        for data, submission in _summaries(before):
            begun[data.task], waiting[data.task] = data.reason, submission
    for entry in entries:
        if entry.kind == COMPACTION:
            data = entry.data_as(CompactionData)
            begun.pop(data.task, None)
            yield CompactionEnd(seq=seq, task=data.task, reason=data.reason, outcome="placed", entry=entry)
    if begun:
        still = {int(key) for key in now.compactions} | {data.task for data, _ in _summaries(after)}
        outcomes = {record.id: record.outcome for record in tasks if not record.live}
        settled = {record.id: record for record in submissions}
        for task in sorted(begun.keys() - still):
            withdrawn = settled.get(waiting.get(task, 0))
            if withdrawn is not None:
                outcome, code, message = ("stale" if withdrawn.reason == "stale" else "aborted"), None, withdrawn.detail
            else:
                outcome, code, message = _ended(task, now.failure, outcomes.get(task))
            yield CompactionEnd(
                seq=seq, task=task, reason=begun[task], outcome=outcome, entry=None, code=code, message=message
            )
    if was.compactions is now.compactions:
        return
    for key, new in now.compactions.items():
        old = was.compactions.get(key)
        if old is None:
            yield CompactionStart(seq=seq, task=int(key), reason=new["reason"])
        if new is not old and new["until"] is not None and (old is None or old["until"] != new["until"]):
            yield CompactionRetry(
                seq=seq,
                task=int(key),
                attempt=new["attempt"],
                until=new["until"],
                code=new["code"] or "",
                message=new["message"] or "",
            )


def _summaries(view: ConversationView) -> Iterator[tuple[CompactionData, int]]:
    """Those in the inbox, with their submissions."""
    inbox = cast("dict[str, list[InboxItem]]", view.tree["inbox"])
    for item in inbox.get("items", []):
        if item["entry"]["kind"] == COMPACTION:
            yield msgspec.convert(item["entry"]["data"], CompactionData), item["id"]


_MILD: Mapping[str, CompactionOutcome] = {
    "stale": "stale",
    "declined": "declined",
    "nothing_to_compact": "declined",
    "aborted": "aborted",
}
"""Codes of ends that are no faults."""


def _ended(
    task: int, failure: CompactionFailure | None, outcome: Outcome | None
) -> tuple[CompactionOutcome, str | None, str | None]:
    """How a compaction ended that placed nothing, with code and message of its failure."""
    if failure is not None and failure["task"] == task:
        code, message = failure["code"], failure["message"]
    elif isinstance(outcome, Failed | Faulted):
        code, message = outcome.error.code, outcome.error.message
    elif isinstance(outcome, Aborted | Orphaned):
        return "aborted", None, outcome.reason
    else:
        return "stale", None, None
    return _MILD.get(code, "failed"), code, message
