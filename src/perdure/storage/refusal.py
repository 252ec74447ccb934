"""What a commit is refused for that only stored records can tell, for backends that keep an index of them in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from perdure.kernel.records import Address
from perdure.kernel.storage import Batch


class Stored(Protocol):
    """What is stored, as the commit before left it."""

    def has_conversation(self, id: int) -> bool:
        """Also a deleted one of which forks still show something."""
        ...

    def has_entry(self, id: int) -> bool: ...

    def holder_of(self, conversation_id: int, request_id: str) -> int | None:
        """The submission that has this request id."""
        ...

    def alive_at(self, address: Address) -> int | None:
        """The document that lives there."""
        ...

    def waits(self, mail_id: int) -> bool:
        """Whether a request is there and has no answer."""
        ...

    def has_content(self, digest: str) -> bool: ...

    def is_there(self, conversation_id: int) -> bool:
        """Whether it exists and is not deleted."""
        ...

    def live_tasks(self, conversation_id: int) -> Collection[int]: ...

    def open_submissions(self, conversation_id: int) -> Collection[int]: ...

    def living_documents(self, conversation_id: int) -> Collection[int]:
        """Those of the conversation's own scope."""
        ...


def refusal_of(stored: Stored, batch: Batch) -> str | None:
    """Why the stored records do not admit this batch, if so. Looked at before anything is changed."""
    ids = [c.id for c in batch.conversations]
    if _twice(ids) or any(map(stored.has_conversation, ids)):
        return "a conversation is created twice"
    ids = [e.id for e in batch.entries]
    if _twice(ids) or any(map(stored.has_entry, ids)):
        return "an entry is written twice"
    asked: dict[tuple[int, str], int] = {}
    for submission in batch.submissions:
        if submission.request_id is not None:
            key = (submission.conversation_id, submission.request_id)
            holder = stored.holder_of(*key) or asked.setdefault(key, submission.id)
            if holder != submission.id:
                return f"submission {submission.id} has the request id of submission {holder}"
    gone = {w.record.id for w in batch.documents if w.record.retired_seq is not None}
    there: dict[Address, int] = {}
    for write in batch.documents:
        record = write.record
        if record.id in gone:
            continue
        others = {there.setdefault(record.address, record.id), stored.alive_at(record.address) or record.id}
        if others - gone - {record.id}:
            return f"document {record.id} is created where another one is alive"
    if _twice([w.record.id for w in batch.documents]):
        return "a document is written twice"
    ids = [r.mail_id for r in batch.replies]
    if _twice(ids) or not all(map(stored.waits, ids)):
        return "a request is answered that is not there or has its answer"
    new = {content.digest for content in batch.contents}
    if any(digest not in new and not stored.has_content(digest) for _, digest in batch.pins):
        return "a content is pinned that is not stored"
    return _deletion_refused(stored, batch) if batch.deleted else None


def _deletion_refused(stored: Stored, batch: Batch) -> str | None:
    """With what the batch itself writes."""
    gone = set(batch.deleted)
    if _twice(batch.deleted) or not all(map(stored.is_there, gone)):
        return "a conversation is deleted that is not there"
    tasks = {id: True for conversation in gone for id in stored.live_tasks(conversation)}
    tasks.update((task.id, task.live) for task in batch.tasks if task.conversation_id in gone)
    if any(tasks.values()):
        return "a conversation is deleted in which a task is live"
    submissions = {id: True for conversation in gone for id in stored.open_submissions(conversation)}
    submissions.update((s.id, not s.settled) for s in batch.submissions if s.conversation_id in gone)
    if any(submissions.values()):
        return "a conversation is deleted in which a submission is open"
    documents = {id: True for conversation in gone for id in stored.living_documents(conversation)}
    for record in (write.record for write in batch.documents):
        if record.scope == "conversation" and record.scope_id in gone:
            documents[record.id] = record.retired_seq is None
    if any(documents.values()):
        return "a conversation is deleted in which a document lives"
    return None


def _twice(ids: Iterable[int]) -> bool:
    all = list(ids)
    return len(set(all)) < len(all)
