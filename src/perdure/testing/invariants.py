"""What must hold of a store after any crash, and of one whose program has come to its end, by the records alone.

Nothing here asks the code that wrote them: whatever it says of itself, these count again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from perdure.harness.documents import ASSISTANT, TOOL_RESULT, AssistantData, ToolResultData
from perdure.harness.messages import AssistantMessage, ToolResultMessage, decode_messages
from perdure.kernel.errors import InvalidTransition
from perdure.kernel.json import JsonValue
from perdure.kernel.records import ROOT_CONVERSATION, EntryRecord, TaskRecord, check_submission_move
from perdure.testing.normal import Records, is_aborted_partial

GENERATION = "pi.generation"
LASTING = frozenset({"compaction_failure"})
"""What ``pi.live`` goes on to show when nothing is under way any more."""


def after_any_crash(records: Records) -> Iterator[str]:
    """What is wrong in a store at any moment."""
    yield from _ids(records)
    yield from _references(records)
    yield from _ownership(records)
    for conversation in records.conversations:
        own = [entry for entry in records.entries if entry.conversation_id == conversation.id]
        yield from _busy(records, conversation.id)
        yield from _usage(records, conversation.id, own)


def at_the_end(records: Records, *, may_live: frozenset[str] = frozenset()) -> Iterator[str]:
    """What is wrong in a store whose program has done its part. ``may_live``: kinds of tasks that go on."""
    for task in records.tasks:
        if task.live and task.kind not in may_live:
            yield f"{task.kind} task {task.id} is still {task.status}"
    for submission in records.submissions:
        if not submission.settled and not may_live:
            yield f"submission {submission.id} ({submission.request_id}) is still {submission.status}"
    for conversation in records.conversations:
        own = [entry for entry in records.entries if entry.conversation_id == conversation.id]
        yield from _transcript(own)
        live = cast("dict[str, JsonValue]", records.document("pi.live", conversation.id) or {})
        left = [name for name, value in live.items() if value and name not in LASTING]
        if left and not may_live:
            yield f"pi.live of conversation {conversation.id} still shows {', '.join(left)}"


def between(before: Records, after: Records, *, deletes: bool = False) -> Iterator[str]:
    """What later work changed of what was final before it. ``deletes``: conversations may have been deleted."""
    if after.info.epoch <= before.info.epoch:
        yield f"the store was opened again, but its epoch went from {before.info.epoch} to {after.info.epoch}"
    if after.info.log_id != before.info.log_id:
        yield "the log id changed"
    if after.info.seq < before.info.seq:
        yield f"commit {before.info.seq} was stored; now the last one is {after.info.seq}"
    if deletes:
        yield from _deleted(before, after)
        before = _without(before, {record.id for record in after.conversations})
    for name, old, new in (
        ("conversation", before.conversations, after.conversations),
        ("entry", before.entries, after.entries),
        ("ended task", [task for task in before.tasks if not task.live], after.tasks),
    ):
        kept = {record.id: record for record in new}
        for record in old:
            if kept.get(record.id) != record:
                yield f"{name} {record.id} changed or went away"
    submissions = {submission.id: submission for submission in after.submissions}
    for old_submission in before.submissions:
        new_submission = submissions.get(old_submission.id)
        if new_submission is None:
            yield f"submission {old_submission.id} went away"
        elif old_submission.settled and new_submission != old_submission:
            yield f"submission {old_submission.id} was {old_submission.status}, and changed"
        elif new_submission.status != old_submission.status and not new_submission.settled:
            try:
                check_submission_move(old_submission, new_submission)
            except InvalidTransition as error:
                yield str(error)
    yield from _partials(before, after)


def _deleted(before: Records, after: Records) -> Iterator[str]:
    """With a conversation goes all it had, and what it owned; but for entries that forks show (rules K192 and K196)."""
    left = {record.id for record in after.conversations}
    gone = {record.id for record in before.conversations} - left
    if ROOT_CONVERSATION in gone:
        yield "the root conversation went away"
    tasks = {task.id: task.conversation_id for task in before.tasks}
    for conversation in before.conversations:
        if conversation.owner is not None and tasks.get(conversation.owner) in gone and conversation.id in left:
            yield f"conversation {conversation.id} is there, but the one that owned it is deleted"
    for kind in (after.submissions, after.tasks):
        for record in kind:
            if record.conversation_id not in left:
                yield f"record {record.id} is of conversation {record.conversation_id}, which is deleted"
    for document in after.documents:
        record = document.record
        if record.scope == "conversation" and record.scope_id not in left:
            yield f"{record.address} lives, but its conversation is deleted"
    entries = {entry.id: entry for entry in before.entries}
    for entry in after.entries:
        if entry.conversation_id in gone and entries.get(entry.id, entry) != entry:
            yield f"entry {entry.id} of a deleted conversation changed"


def _without(records: Records, left: set[int]) -> Records:
    """What is of these conversations, or of none that is deleted."""
    return replace(
        records,
        conversations=[record for record in records.conversations if record.id in left],
        entries=[record for record in records.entries if record.conversation_id in left],
        submissions=[record for record in records.submissions if record.conversation_id in left],
        tasks=[record for record in records.tasks if record.conversation_id in left],
    )


# --- any moment ------------------------------------------------------------------------------------------------


def _ids(records: Records) -> Iterator[str]:
    ids = Counter(
        record.id
        for kind in (records.conversations, records.entries, records.submissions, records.tasks)
        for record in kind
    )
    ids.update(document.record.id for document in records.documents)
    for id, count in ids.items():
        if count > 1:
            yield f"id {id} is given to {count} records"
        if id >= records.info.next_id:
            yield f"id {id} is not below the next id, {records.info.next_id}"
    requests = Counter((s.conversation_id, s.request_id) for s in records.submissions if s.request_id is not None)
    for (conversation, request), count in requests.items():
        if count > 1:
            yield f"request id {request!r} has {count} submissions in conversation {conversation}"


def _references(records: Records) -> Iterator[str]:
    conversations = {record.id for record in records.conversations}
    entries = {record.id for record in records.entries}
    tasks = {record.id: record for record in records.tasks}
    for conversation in records.conversations:
        if conversation.owner is not None and conversation.owner not in tasks:
            yield f"conversation {conversation.id} is owned by task {conversation.owner}, which is not there"
        if conversation.parent is not None and conversation.parent.at not in entries:
            yield f"conversation {conversation.id} was forked at entry {conversation.parent.at}, which is not there"
    for entry in records.entries:
        of_deleted = entry.conversation_id not in conversations
        if entry.by_task is not None and entry.by_task not in tasks and not of_deleted:
            yield f"entry {entry.id} was written by task {entry.by_task}, which is not there"
        if entry.head is not None and entry.head != entry.id and entry.head not in entries:
            yield f"entry {entry.id} is a head at entry {entry.head}, which is not there"
    for submission in records.submissions:
        if submission.conversation_id not in conversations:
            yield f"submission {submission.id} is of conversation {submission.conversation_id}, which is not there"
        for id in (submission.entry, submission.answer):
            if id is not None and id not in entries:
                yield f"submission {submission.id} names entry {id}, which is not there"
        if submission.status == "unanswered" and submission.reason is None:
            yield f"submission {submission.id} is unanswered, and does not say why"
    for task in records.tasks:
        if task.conversation_id not in conversations:
            yield f"task {task.id} is of conversation {task.conversation_id}, which is not there"
        owner = None if task.owner is None else tasks.get(task.owner)
        if task.owner is not None and (owner is None or owner.conversation_id != task.conversation_id):
            yield f"task {task.id} is owned by task {task.owner}, which is not in its conversation"
        if task.live != (task.ended_at is None):
            yield f"task {task.id} is {task.status}, and its end is {task.ended_at}"


def _ownership(records: Records) -> Iterator[str]:
    """A task is terminal only when all ordinary work below it is (rule T54)."""
    conversation_owner = {conversation.id: conversation.owner for conversation in records.conversations}
    tasks = {task.id: task for task in records.tasks}

    def owner_of(task: TaskRecord) -> TaskRecord | None:
        above = task.owner if task.owner is not None else conversation_owner.get(task.conversation_id)
        return None if above is None else tasks.get(above)

    for task in records.tasks:
        if not task.live:
            continue
        below, above = task, owner_of(task)
        while above is not None and not below.background:
            if not above.live:
                yield f"task {above.id} ({above.kind}) is terminal, but task {task.id} below it is {task.status}"
            below, above = above, owner_of(above)
    for submission in records.submissions:  # nobody could start it any more (rule H357)
        owner = conversation_owner.get(submission.conversation_id)
        if not submission.settled and owner is not None and owner in tasks and not tasks[owner].live:
            yield f"submission {submission.id} is {submission.status} below task {owner}, which is terminal"


def _busy(records: Records, conversation: int) -> Iterator[str]:
    """``pi.live.run`` is set exactly while a run goes on; the inbox holds exactly what is queued."""
    live = cast("dict[str, JsonValue]", records.document("pi.live", conversation) or {})
    run = cast("dict[str, JsonValue] | None", live.get("run"))
    running = {t.id for t in records.tasks if t.live and t.kind == GENERATION and t.conversation_id == conversation}
    named: set[int] = set() if run is None else {cast("int", run["task"])}
    if named != running:
        yield f"conversation {conversation}: live generations are {sorted(running)}, pi.live names {sorted(named)}"
    placed = {s.id for s in records.submissions if s.conversation_id == conversation and s.status == "placed"}
    inputs: set[int] = set() if run is None else set(cast("list[int]", run["inputs"]))
    if placed != inputs:
        yield f"conversation {conversation}: placed inputs are {sorted(placed)}, its run answers {sorted(inputs)}"
    inbox = cast("dict[str, list[dict[str, JsonValue]]]", records.document("pi.inbox", conversation) or {})
    items = [cast("int", item["id"]) for item in inbox.get("items", [])]
    queued = sorted(s.id for s in records.submissions if s.conversation_id == conversation and s.status == "queued")
    if items != queued:
        yield f"conversation {conversation}: queued are {queued}, the inbox holds {items}"


def _usage(records: Records, conversation: int, entries: list[EntryRecord]) -> Iterator[str]:
    """What ``pi.usage`` says is what the entries say: it was added in the commits that wrote them (rules H76, H240)."""
    totals = cast("dict[str, dict[str, dict[str, Any]]]", records.document("pi.usage", conversation) or {})
    answers: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    turns = 0
    for message in (_answer(entry) for entry in entries):
        if message is not None:
            model = f"{message.provider}:{message.model}"
            answers[model] += 1
            tokens[model] += message.usage.input + message.usage.output
            turns += message.stop_reason not in ("error", "aborted")
    if totals.get("turns", 0) != turns:
        yield f"conversation {conversation} has {turns} answers, but pi.usage counts {totals.get('turns', 0)} turns"
    models = totals.get("models", {})
    for model in answers.keys() | models.keys():
        counted = models.get(model, {"requests": 0, "input": 0, "output": 0})
        # An attempt that failed before anything came, and is repeated, has no entry.
        if counted["requests"] < answers[model]:
            yield f"{answers[model]} answers of {model}, but pi.usage counts {counted['requests']} requests"
        taken = counted["input"] + counted["output"]
        if taken < tokens[model] or (taken > tokens[model] and counted["requests"] == answers[model]):
            yield f"the answers of {model} took {tokens[model]} tokens, and pi.usage counts {counted}"
    results = [entry.data_as(ToolResultData) for entry in entries if entry.kind == TOOL_RESULT]
    tools = totals.get("tools", {})
    for tool in {result.name for result in results} | tools.keys():
        counted = tools.get(tool, {"calls": 0, "usage": {}})
        used: Counter[str] = Counter()
        for result in results:
            if result.name == tool:
                used.update(cast("dict[str, int]", result.usage))
        if counted["calls"] != sum(result.name == tool for result in results) or counted["usage"] != used:
            yield f"pi.usage of {tool} is {counted}, and its results say {dict(used)}"


def _answer(entry: EntryRecord) -> AssistantMessage | None:
    if entry.kind != ASSISTANT:
        return None
    last = decode_messages(entry.raw_messages)[-1]
    return last if isinstance(last, AssistantMessage) else None


def _partials(before: Records, after: Records) -> Iterator[str]:
    """What a request had shown when its process ended is kept as an answer that was aborted (rule H69)."""
    for conversation in before.conversations:
        live = cast("dict[str, Any]", before.document("pi.live", conversation.id) or {})
        partial = live.get("message")
        if partial is None:
            continue
        later = cast("dict[str, Any]", after.document("pi.live", conversation.id) or {})
        if later.get("message") == partial:
            continue  # not looked at yet
        text = "".join(part["text"] for part in partial["content"] if part["type"] == "text")
        kept = [
            message.text
            for entry in after.entries
            if entry.by_task == partial["task"] and entry.seq > before.info.seq
            for message in [_answer(entry)]
            if message is not None and message.stop_reason == "aborted"
        ]
        if text not in kept:
            yield f"conversation {conversation.id} had shown {len(text)} characters of an answer; nothing kept them"


# --- the end ---------------------------------------------------------------------------------------------------


def _transcript(entries: list[EntryRecord]) -> Iterator[str]:
    """Each call has exactly one result, and no answer or input comes before the round is complete (rule H59); that of a
    nested call is for its caller alone (rule H341)."""
    open_calls: dict[int, str] = {}
    results: dict[int, int] = defaultdict(int)
    for entry in entries:
        if entry.kind == TOOL_RESULT:
            data = entry.data_as(ToolResultData)
            results[data.task] += 1
            if data.caller is not None:
                if entry.messages:
                    yield f"entry {entry.id} is the result of a nested call, and has messages for a model"
                if results[data.task] > 1:
                    yield f"entry {entry.id} is a second result of nested call {data.task}"
                continue
            (message,) = decode_messages(entry.raw_messages)
            if not isinstance(message, ToolResultMessage) or message.call_id != data.call_id:
                yield f"entry {entry.id} is no result of call {data.call_id}"
            if open_calls.pop(data.task, None) is None:
                yield f"entry {entry.id} is a result of task {data.task}, which was not called, or has one"
        elif entry.kind == ASSISTANT and not is_aborted_partial(entry):
            if open_calls:
                yield f"entry {entry.id} answers before calls {sorted(open_calls)} have their results"
            message = decode_messages(entry.raw_messages)[-1]
            calls = entry.data_as(AssistantData).calls
            if isinstance(message, AssistantMessage) and message.stop_reason != "error":
                if len(message.tool_calls) != len(calls):
                    yield f"entry {entry.id} calls {len(message.tool_calls)} tools by {len(calls)} tasks"
                open_calls.update(zip(calls, (call.id for call in message.tool_calls), strict=False))
        elif entry.kind == "pi.user" and open_calls:
            yield f"entry {entry.id} is an input before calls {sorted(open_calls)} have their results"
    if open_calls:
        yield f"calls {sorted(open_calls)} have no result"
