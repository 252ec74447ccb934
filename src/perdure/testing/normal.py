"""What a store holds, in a form that two runs of one program share, one of them killed on its way (rule P6).

Ids become labels by order of appearance, owners before what they own, submissions by their request ids; times,
restarts and nonces are left out, and so are partial answers that a crash ended. Results of parallel calls stand in
the order of their calls. What is left
must be equal, but for three things: an ``interrupted`` stands for the result of an unsafe call; usage may be larger,
since repeated attempts are paid for; entries of kinds declared unordered are compared by their writers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import msgspec

from perdure.harness.documents import ASSISTANT, COMPACTION, TOOL_RESULT, AssistantData, ToolResultData
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.kernel.documents import materialise
from perdure.kernel.json import JsonValue, same_json
from perdure.kernel.records import (
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    Outcome,
    SubmissionRecord,
    TaskRecord,
    from_raw,
)
from perdure.kernel.storage import MAX_SCAN, Segment, Storage, StoreInfo

Normal: TypeAlias = dict[str, list[dict[str, JsonValue]]]
"""Lists of records by what they are: conversations, entries, submissions, tasks, documents."""

MAX_DIFFERENCES = 20
DERIVED = re.compile(r"(pi\.(?:subagent|message|report):)(\d+)")
"""Request ids that hold the id of a task."""

BUILTIN_IDS: Mapping[str, frozenset[str]] = {
    ASSISTANT: frozenset({"calls"}),
    TOOL_RESULT: frozenset({"task", "caller", "conversation"}),
    "pi.tool": frozenset({"after", "caller", "result"}),
    "pi.subagent": frozenset({"result"}),
    "pi.message": frozenset({"anchor", "conversation"}),
    "pi.inbox": frozenset({"id"}),
    "pi.live": frozenset({"task", "inputs", "run"}),
    COMPACTION: frozenset({"task", "cut", "through", "entry", "submission"}),
}
"""JSON fields of built-in kinds that hold record ids."""

GROWING = frozenset({"pi.usage", "pi.usage-deleted"})
"""Documents whose numbers may be larger after a crash."""
TIMES = frozenset({"run_ms"})
"""Numbers of those that are times, which say nothing about what was done."""
RANDOM = frozenset({"pi.provider"})
"""Documents that hold a nonce."""
DATED: Mapping[str, frozenset[str]] = {
    "pi.live": frozenset({"at"}),
    "pi.approval-rules": frozenset({"at"}),
    "pi.question": frozenset({"asked_at", "expires_at"}),
}
"""JSON fields of built-in documents and tasks that hold times, and last."""


@dataclass(frozen=True, slots=True)
class StoredDocumentValue:
    record: DocumentRecord
    version: int
    value: JsonValue


@dataclass(frozen=True, slots=True)
class Records:
    """Everything a store shows, each list in id order."""

    info: StoreInfo
    """Of the store itself: its id, its epoch, its commits."""
    conversations: Sequence[ConversationRecord]
    entries: Sequence[EntryRecord]
    """All that some conversation shows; those of deleted ones that forks show are among them."""
    submissions: Sequence[SubmissionRecord]
    tasks: Sequence[TaskRecord]
    documents: Sequence[StoredDocumentValue]
    """Those that live."""

    def of(self, kind: str) -> list[EntryRecord]:
        """The entries of one kind."""
        return [entry for entry in self.entries if entry.kind == kind]

    def document(self, kind: str, scope_id: int = 0, key: str = "") -> JsonValue:
        """The value of a document; None if none lives there."""
        for document in self.documents:
            record = document.record
            if (record.kind, record.scope_id, record.key) == (kind, scope_id, key):
                return document.value
        return None


async def read_records(storage: Storage) -> Records:
    """Read all of a store that nobody has open."""
    info = await storage.open(read_only=True, writer="judge", log_id="", now=0)
    try:
        conversations: list[ConversationRecord] = []
        while page := await storage.conversations(after=conversations[-1].id if conversations else 0):
            conversations += page
        tasks: list[TaskRecord] = []
        while page := await storage.tasks(after=tasks[-1].id if tasks else 0):
            tasks += page
        submissions: list[SubmissionRecord] = []
        while page := await storage.submissions(after=submissions[-1].id if submissions else 0):
            submissions += page
        shown: dict[int, EntryRecord] = {}
        documents = await _documents(storage, "session", 0)
        for conversation in conversations:
            for segment in await storage.lineage(conversation.id):
                shown.update({entry.id: entry for entry in await _entries(storage, segment)})
            documents += await _documents(storage, "conversation", conversation.id)
        for task in tasks:
            documents += await _documents(storage, "task", task.id)
        entries = [shown[id] for id in sorted(shown)]
        return Records(info, conversations, entries, submissions, tasks, documents)
    finally:
        await storage.close()


async def _entries(storage: Storage, segment: Segment) -> list[EntryRecord]:
    found: list[EntryRecord] = []
    first = segment.first
    while page := await storage.entries([segment], first=first, limit=MAX_SCAN):
        found += page
        first = page[-1].id + 1
    return found


async def _documents(storage: Storage, scope: str, scope_id: int) -> list[StoredDocumentValue]:
    found: list[StoredDocumentValue] = []
    for record in await storage.documents(scope, scope_id):
        stored = await storage.document(record.address)
        assert stored is not None, "a document that lives can be read"
        state = materialise(stored)
        found.append(StoredDocumentValue(record, state.version, state.value))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a scenario's own kinds need beside the built-in rules."""

    ids: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """JSON fields that hold record ids, by the kind of entry, task or document."""
    unordered: frozenset[str] = frozenset()
    """Kinds of entries that concurrent tasks append, in no order that means anything."""
    unsafe: frozenset[str] = frozenset()
    """Names of tools whose result may be ``interrupted``."""

    def ids_of(self, kind: str) -> frozenset[str]:
        """The JSON fields of a kind that hold record ids, with those of built-in kinds."""
        return BUILTIN_IDS.get(kind, frozenset()) | self.ids.get(kind, frozenset())


def normal_form(records: Records, rules: Rules | None = None) -> Normal:
    """The records as labels and plain JSON."""
    return _Normaliser(records, rules or Rules()).form()


def is_aborted_partial(entry: EntryRecord) -> bool:
    """Whether it is the partial answer of a request that was cut off."""
    if entry.kind != ASSISTANT:
        return False
    last = decode_messages(entry.raw_messages)[-1]
    return isinstance(last, AssistantMessage) and last.stop_reason == "aborted"


class _Normaliser:
    def __init__(self, records: Records, rules: Rules) -> None:
        self._records = records
        self._rules = rules
        self._labels: dict[int, str] = {}
        self._ranks: dict[int, int] = {}
        """Of conversations and tasks, owners before what they own."""

    def form(self) -> Normal:
        self._label_tree()
        records, rank = self._records, self._ranks
        submissions = sorted(
            records.submissions, key=lambda s: (rank.get(s.conversation_id, 0), self._request_id(s) or "", s.id)
        )
        for number, submission in enumerate(submissions, 1):
            self._labels[submission.id] = f"s{number}"
        by_conversation: dict[int, list[EntryRecord]] = defaultdict(list)
        for entry in records.entries:
            if not is_aborted_partial(entry):
                by_conversation[entry.conversation_id].append(entry)
        entries: list[EntryRecord] = []
        for conversation in sorted(by_conversation, key=lambda id: rank.get(id, 0)):
            ordered = self._ordered(by_conversation[conversation])
            for number, entry in enumerate(ordered, 1):
                self._labels[entry.id] = f"{self._label(conversation)}.{number}"
            entries += ordered
        documents = [self._document(document) for document in records.documents]
        return {
            "conversations": [self._conversation(c) for c in sorted(records.conversations, key=self._rank)],
            "entries": [self._entry(entry) for entry in entries],
            "submissions": [self._submission(submission) for submission in submissions],
            "tasks": [self._task(task) for task in sorted(records.tasks, key=self._rank)],
            "documents": sorted(documents, key=lambda d: (str(d["kind"]), str(d["of"]), str(d["key"]))),
        }

    # --- labels ------------------------------------------------------------------------------------------------

    def _label_tree(self) -> None:
        owned_tasks: dict[int, list[int]] = defaultdict(list)
        owned_conversations: dict[int | None, list[int]] = defaultdict(list)
        for task in self._records.tasks:
            owned_tasks[task.owner or task.conversation_id].append(task.id)
        # Calls of one caller have no order but that of their keys: they may be made at once.
        keys = {task.id: _key(task) for task in self._records.tasks}
        for owned in owned_tasks.values():
            owned.sort(key=lambda id: keys[id])
        for conversation in self._records.conversations:
            owned_conversations[conversation.owner].append(conversation.id)
        conversations = tasks = 0
        ahead = [(id, True) for id in reversed(owned_conversations[None])]
        while ahead:
            id, is_conversation = ahead.pop()
            self._ranks[id] = len(self._ranks)
            if is_conversation:
                conversations += 1
                self._labels[id] = f"c{conversations}"
            else:
                tasks += 1
                self._labels[id] = f"t{tasks}"
                ahead += [(below, True) for below in reversed(owned_conversations[id])]
            ahead += [(below, False) for below in reversed(owned_tasks[id])]

    def _label(self, id: int | None) -> JsonValue:
        return None if id is None else self._labels.get(id, "?")

    def _rank(self, record: ConversationRecord | TaskRecord) -> int:
        return self._ranks.get(record.id, len(self._ranks))

    def _ordered(self, entries: list[EntryRecord]) -> list[EntryRecord]:
        """As they are, but results after their calls, those of nested calls right before their caller's, and unordered
        kinds last, by writer."""
        results: dict[int, EntryRecord] = {}
        nested: dict[int, list[EntryRecord]] = defaultdict(list)
        for entry in entries:
            if entry.kind == TOOL_RESULT:
                data = entry.data_as(ToolResultData)
                if data.caller is not None:
                    nested[data.caller].append(entry)
                else:
                    results[data.task] = entry
        below = {entry.id for made in nested.values() for entry in made}
        entries = [entry for entry in entries if entry.id not in below]
        placed: list[EntryRecord] = []
        unordered: list[EntryRecord] = []
        moved: set[int] = set()
        for entry in entries:
            if entry.kind in self._rules.unordered:
                unordered.append(entry)
            elif entry.id not in moved:
                placed.append(entry)
                if entry.kind == ASSISTANT:
                    calls = entry.data_as(AssistantData).calls
                    after = [results[task] for task in calls if task in results and results[task].id > entry.id]
                    placed += (e for result in after for e in self._with_nested(result, nested))
                    moved.update(result.id for result in after)
        unordered.sort(key=lambda e: (self._ranks.get(e.by_task or 0, -1), bytes(e.raw_data), e.id))
        return placed + unordered

    def _with_nested(self, result: EntryRecord, nested: Mapping[int, list[EntryRecord]]) -> list[EntryRecord]:
        """A result behind those of the calls that its call made, by their keys."""
        made = sorted(nested.get(result.by_task or 0, ()), key=lambda e: self._ranks.get(e.by_task or 0, -1))
        return [*(e for entry in made for e in self._with_nested(entry, nested)), result]

    # --- records -----------------------------------------------------------------------------------------------

    def _conversation(self, record: ConversationRecord) -> dict[str, JsonValue]:
        parent = record.parent
        return {
            "conversation": self._label(record.id),
            "owner": self._label(record.owner),
            "parent": None if parent is None else self._label(parent.conversation),
            "at": None if parent is None else self._label(parent.at),
        }

    def _entry(self, record: EntryRecord) -> dict[str, JsonValue]:
        edits: list[JsonValue] = [
            {"entry": self._label(edit.entry), "replace": from_raw(edit.replace)} for edit in record.edits
        ]
        return {
            "entry": self._label(record.id),
            "kind": record.kind,
            "by_task": self._label(record.by_task),
            "messages": list(record.messages),
            "data": self._relabel(record.kind, record.data),
            "head": self._label(record.head),
            "edits": edits,
        }

    def _submission(self, record: SubmissionRecord) -> dict[str, JsonValue]:
        return {
            "submission": self._label(record.id),
            "conversation": self._label(record.conversation_id),
            "request_id": self._request_id(record),
            "type": record.type,
            "digest": record.digest,
            "status": record.status,
            "entry": self._label(record.entry),
            "answer": self._label(record.answer),
            "reason": record.reason,
            "detail": record.detail,
        }

    def _request_id(self, record: SubmissionRecord) -> str | None:
        """One that is derived from a task names it by its label."""
        derived = None if record.request_id is None else DERIVED.fullmatch(record.request_id)
        return record.request_id if derived is None else f"{derived[1]}{self._label(int(derived[2]))}"

    def _task(self, record: TaskRecord) -> dict[str, JsonValue]:
        state = record.state
        return {
            "task": self._label(record.id),
            "kind": record.kind,
            "version": record.version,
            "conversation": self._label(record.conversation_id),
            "owner": self._label(record.owner),
            "background": record.background,
            "abort_requested": record.abort_requested,
            "input": self._value(record.kind, record.input),
            "status": record.status,
            "phase": getattr(state, "phase", None),
            "outcome": self._relabel(record.kind, _plain(record.outcome)),
        }

    def _document(self, document: StoredDocumentValue) -> dict[str, JsonValue]:
        record = document.record
        return {
            "document": f"{record.kind}[{record.key}]",
            "kind": record.kind,
            "of": "" if record.scope == "session" else self._label(record.scope_id),
            "key": record.key,
            "version": document.version,
            "value": None
            if record.kind in RANDOM
            else self._relabel(record.kind, _timeless(record.kind, document.value)),
        }

    def _value(self, kind: str, value: JsonValue) -> JsonValue:
        return None if kind in RANDOM else self._relabel(kind, _timeless(kind, value))

    def _relabel(self, kind: str, value: JsonValue) -> JsonValue:
        names = self._rules.ids_of(kind)
        return self._relabelled(value, names, False) if names else value

    def _relabelled(self, value: JsonValue, names: frozenset[str], is_id: bool) -> JsonValue:
        if isinstance(value, dict):
            return {key: self._relabelled(item, names, key in names) for key, item in value.items()}
        if isinstance(value, list):
            return [self._relabelled(item, names, is_id) for item in value]
        if is_id and isinstance(value, int) and not isinstance(value, bool):
            return self._label(value)
        return value


def _key(task: TaskRecord) -> str:
    """Of a nested call its label, which ends with its key; of others nothing."""
    input = task.input
    if task.kind != "pi.tool" or not isinstance(input, dict) or input.get("caller") is None:
        return ""
    return str(input.get("call_id"))


def _timeless(kind: str, value: JsonValue) -> JsonValue:
    times = DATED.get(kind)
    if times is None or not isinstance(value, dict):
        return value
    return {key: _timeless(kind, item) for key, item in value.items() if key not in times}


def _plain(outcome: Outcome | None) -> JsonValue:
    return msgspec.json.decode(msgspec.json.encode(outcome))


# --- comparing -------------------------------------------------------------------------------------------------


def differences(expected: Normal, actual: Normal, rules: Rules | None = None) -> list[str]:
    """Where ``actual`` is not what an uninterrupted run left, one line each, the first few; empty when it is."""
    unsafe = (rules or Rules()).unsafe
    found: list[str] = []
    for name in expected:
        ours, theirs = expected[name], actual[name]
        if len(ours) != len(theirs):
            found.append(f"{name}: {len(theirs)} instead of {len(ours)}; {_extra(ours, theirs)}")
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            if name == "entries" and _is_interrupted(other, unsafe) and mine["kind"] == TOOL_RESULT:
                mine, other = _call_of(mine), _call_of(other)
            if name == "documents" and mine["kind"] in GROWING:
                found += _less(mine, other, f"{name}[{index}]", unsafe)
            else:
                found += _unequal(mine, other, f"{name}[{index}]")
    return found[:MAX_DIFFERENCES]


def _extra(expected: Sequence[Mapping[str, JsonValue]], actual: Sequence[Mapping[str, JsonValue]]) -> str:
    return f"{_kinds(actual)} instead of {_kinds(expected)}"


def _kinds(records: Iterable[Mapping[str, JsonValue]]) -> str:
    return ", ".join(str(r.get("kind") or r.get("request_id") or r.get("conversation")) for r in records) or "none"


def _is_interrupted(entry: Mapping[str, JsonValue], unsafe: frozenset[str]) -> bool:
    data = entry["data"]
    return (
        entry["kind"] == TOOL_RESULT
        and isinstance(data, dict)
        and data.get("code") == "interrupted"
        and data.get("name") in unsafe
    )


def _call_of(entry: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A result without what the tool answered."""
    data = cast("dict[str, JsonValue]", entry["data"])
    return {
        "entry": entry["entry"],
        "by_task": entry["by_task"],
        "call": [data.get("task"), data.get("call_id"), data.get("name")],
    }


def _unequal(expected: JsonValue, actual: JsonValue, at: str) -> list[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        found: list[str] = []
        for key in sorted(expected.keys() | actual.keys()):
            if key not in actual:
                found.append(f"{at}.{key}: missing")
            elif key not in expected:
                found.append(f"{at}.{key}: {_short(actual[key])}, which is not expected there")
            else:
                found += _unequal(expected[key], actual[key], f"{at}.{key}")
        return found
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        return [
            line
            for index, (mine, other) in enumerate(zip(expected, actual, strict=True))
            for line in _unequal(mine, other, f"{at}[{index}]")
        ]
    return [] if same_json(expected, actual) else [f"{at}: {_short(actual)} instead of {_short(expected)}"]


def _less(expected: JsonValue, actual: JsonValue, at: str, unsafe: frozenset[str]) -> list[str]:
    """Where a usage document has less than it must. Of unsafe tools nothing is asked: they may not have run."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        found: list[str] = []
        for key, value in expected.items():
            if key in unsafe or key in TIMES:
                continue
            if key not in actual:
                found.append(f"{at}.{key}: missing")
            else:
                found += _less(value, actual[key], f"{at}.{key}", unsafe)
        return found
    if isinstance(expected, (int, float)) and isinstance(actual, (int, float)):
        return [] if actual >= expected else [f"{at}: {actual}, less than {expected}"]
    return _unequal(expected, actual, at)


def _short(value: JsonValue) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 120 else f"{text[:117]}..."
