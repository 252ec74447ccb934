"""How much there is of what in a store in memory (rule K220): every record as it would be encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from perdure.kernel.storage import MAX_BIGGEST, ConversationSize, RowCounts, SizeReport

if TYPE_CHECKING:
    from perdure.storage.memory import Contents, StoredHistory

_encode = msgspec.json.Encoder().encode


def measure(contents: Contents) -> SizeReport:
    """Costs an encoding of all there is."""
    entries = _sizes(contents.entries.values())
    submissions = _sizes(contents.submissions.values())
    tasks = _sizes(contents.tasks.values())
    documents = {id: _document(history) for id, history in contents.documents.items()}
    sizes = {
        "conversations": sum(_sizes(contents.conversations.values())),
        "entries": sum(entries),
        "submissions": sum(submissions),
        "tasks": sum(tasks),
        "documents": sum(documents.values()),
        "contents": sum(map(len, contents.contents.values())),
        # What was asked for is not kept once it is answered.
        "mailbox": sum(len(bytes(mail.body)) for mail in contents.mail.values() if mail.id not in contents.replies)
        + sum(len(bytes(reply.result)) for reply in contents.replies.values()),
    }
    owned: Counter[int] = Counter()
    for records, bytes_of in (
        (contents.entries, entries),
        (contents.submissions, submissions),
        (contents.tasks, tasks),
    ):
        for record, size in zip(records.values(), bytes_of, strict=True):
            owned[record.conversation_id] += size
    for id, history in contents.documents.items():
        if history.record.scope == "conversation":
            owned[history.record.scope_id] += documents[id]
    return SizeReport(
        **sizes,
        total=sum(sizes.values()),
        free=0,
        log=0,
        rows=RowCounts(
            conversations=len(contents.conversations),
            entries=len(contents.entries),
            submissions=len(contents.submissions),
            tasks=len(contents.tasks),
            documents=len(contents.documents),
            states=sum(len(history.bases) + len(history.deltas) for history in contents.documents.values()),
            contents=len(contents.contents),
            mail=len(contents.mail),
        ),
        biggest=tuple(
            ConversationSize(
                id=id,
                entries=len(contents.by_conversation.get(id, ())),
                bytes=size,
                deleted=contents.there(id) is None and id in contents.conversations,
            )
            for id, size in sorted(owned.items(), key=lambda item: (-item[1], item[0]))[:MAX_BIGGEST]
        ),
    )


def _sizes(records: Iterable[object]) -> list[int]:
    return [len(_encode(record)) for record in records]


def _document(history: StoredHistory) -> int:
    states = sum(len(base[2]) for base in history.bases) + sum(len(delta[1]) for delta in history.deltas)
    return len(_encode(history.record)) + states
