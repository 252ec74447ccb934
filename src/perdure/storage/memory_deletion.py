"""Deleting in a store in memory: the reference semantics (rules K192 to K197)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure.kernel.records import ConversationRecord
from perdure.storage.deletion import keeps

if TYPE_CHECKING:
    from perdure.storage.memory import Contents, StoredHistory


def closure_of(contents: Contents, conversation_id: int) -> list[int]:
    """A conversation and all that its tasks, and theirs, own."""
    if contents.there(conversation_id) is None:
        return []
    found = {conversation_id: None}
    for id in (todo := [conversation_id]):  # grows while it is walked
        tasks = {task.id for task in contents.tasks.values() if task.conversation_id == id}
        owned = [c.id for c in contents.conversations.values() if c.owner in tasks and c.shared_through is None]
        todo += [c for c in owned if c not in found]
        found.update(dict.fromkeys(owned))
    return list(found)


class MemoryShelf:
    """The records of a store, for ``deletion.delete``."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def conversation(self, id: int) -> ConversationRecord | None:
        return self._contents.conversations.get(id)

    def forks(self, id: int) -> Sequence[ConversationRecord]:
        found = self._contents.conversations.values()
        return [c for c in found if c.parent is not None and c.parent.conversation == id]

    def replace(self, record: ConversationRecord) -> None:
        self._contents.conversations[record.id] = record

    def remove(self, id: int) -> None:
        del self._contents.conversations[id]

    def drop_work(self, id: int) -> None:
        contents = self._contents
        for submission in [s for s in contents.submissions.values() if s.conversation_id == id]:
            del contents.submissions[submission.id]
            if submission.request_id is not None:
                del contents.requests[id, submission.request_id]
        for task in [t for t in contents.tasks.values() if t.conversation_id == id]:
            del contents.tasks[task.id]
            for document in _documents(contents, "task", task.id):
                self._drop(document.record.id)

    def drop_entries(self, id: int, through: int) -> int:
        contents = self._contents
        for ids in (contents.by_conversation.get(id, []), contents.heads.get(id, [])):
            kept = bisect_right(ids, through)
            for entry in ids[kept:]:
                contents.entries.pop(entry, None)
            del ids[kept:]
        left = contents.by_conversation.get(id)
        if left:
            return contents.entries[left[-1]].seq
        contents.by_conversation.pop(id, None)
        contents.heads.pop(id, None)
        return 0

    def drop_documents(self, id: int, seq: int) -> None:
        for document in _documents(self._contents, "conversation", id):
            if keeps(document.record, seq):
                document.bases[:] = [base for base in document.bases if base[0] <= seq]
                document.deltas[:] = [delta for delta in document.deltas if delta[0] <= seq]
            else:
                self._drop(document.record.id)

    def _drop(self, id: int) -> None:
        contents = self._contents
        record = contents.documents.pop(id).record
        for index, key in (
            (contents.at_address, record.address),
            (contents.in_scope, (record.scope, record.scope_id)),
        ):
            ids = index[key]  # pyright: ignore[reportArgumentType, reportUnknownVariableType]  # each with its own keys
            ids.remove(id)
            if not ids:
                del index[key]  # pyright: ignore[reportArgumentType]  # as above


def _documents(contents: Contents, scope: str, scope_id: int) -> list[StoredHistory]:
    return [contents.documents[id] for id in contents.in_scope.get((scope, scope_id), ())]
