"""What stands beside a record's body, to be found by: the columns of its table in order, but for the body, the last."""

from __future__ import annotations

from typing import TypeAlias

from perdure.kernel.records import (
    ConversationRecord,
    DocumentRecord,
    EntryRecord,
    SubmissionRecord,
    TaskRecord,
)

Row: TypeAlias = tuple[int | str | bytes | None, ...]
Record: TypeAlias = ConversationRecord | EntryRecord | SubmissionRecord | TaskRecord | DocumentRecord

TABLES: dict[str, type[Record]] = {
    "conversations": ConversationRecord,
    "entries": EntryRecord,
    "submissions": SubmissionRecord,
    "tasks": TaskRecord,
    "documents": DocumentRecord,
}

NOBODY = 0
"""The owner of what is left of a deleted conversation, in its row: no task has this id, and no scan finds it."""


def conversation_row(record: ConversationRecord) -> Row:
    parent = record.parent
    owner = record.owner if record.shared_through is None else NOBODY
    if parent is None:
        return record.id, owner, None, None
    return record.id, owner, parent.conversation, parent.at


def entry_row(record: EntryRecord) -> Row:
    return record.id, record.conversation_id, record.head


def submission_row(record: SubmissionRecord) -> Row:
    return record.id, record.conversation_id, record.status, record.request_id


def task_row(record: TaskRecord) -> Row:
    return record.id, record.conversation_id, record.kind, int(record.live)


def document_row(record: DocumentRecord) -> Row:
    return (
        record.id,
        record.scope,
        record.scope_id,
        record.kind,
        record.key,
        record.created_seq,
        record.retired_seq,
    )


def row_of(record: Record) -> Row:
    if isinstance(record, EntryRecord):
        return entry_row(record)
    if isinstance(record, TaskRecord):
        return task_row(record)
    if isinstance(record, SubmissionRecord):
        return submission_row(record)
    if isinstance(record, ConversationRecord):
        return conversation_row(record)
    return document_row(record)
