"""What is left of deleted conversations, and what of that goes in the end: the same in every backend (rule K196).

A deleted conversation that forks still show keeps its record, which says through which entry, its entries up to that
one, and the states that rewindable documents had by then. When the last such fork goes, it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from msgspec import structs

from perdure.kernel.errors import StorageError
from perdure.kernel.records import ConversationRecord, DocumentRecord


class Shelf(Protocol):
    """What a backend does to its records in the commit that deletes."""

    def conversation(self, id: int) -> ConversationRecord | None:
        """Its record, also of a deleted one of which something is left."""
        ...

    def forks(self, id: int) -> Sequence[ConversationRecord]:
        """Those forked from it, deleted ones of which something is left included."""
        ...

    def replace(self, record: ConversationRecord) -> None: ...

    def remove(self, id: int) -> None:
        """Drop the record."""
        ...

    def drop_work(self, id: int) -> None:
        """Drop its submissions, its tasks and their documents. Raises StorageError if any of it is live."""
        ...

    def drop_entries(self, id: int, through: int) -> int:
        """Drop its entries after that one; the commit of the newest that stays, or 0."""
        ...

    def drop_documents(self, id: int, seq: int) -> None:
        """Drop its documents but for those that ``keeps`` says, and of these what was written after that commit."""
        ...


def keeps(record: DocumentRecord, seq: int) -> bool:
    """Whether something of a deleted conversation's document is left, where its entries are up to that commit.

    Raises StorageError for one that lives: nobody could end it.
    """
    if record.retired_seq is None:
        raise StorageError(
            f"{record.address} lives, and its conversation is to be deleted; retire it in the same commit"
        )
    return record.history == "rewindable" and record.created_seq <= seq


def delete(shelf: Shelf, ids: Sequence[int]) -> None:
    """Delete these conversations, and what earlier ones had left for them alone. Raises StorageError.

    A fork is younger than what it was forked from, so the youngest come first: what its forks need of a conversation
    is known when its turn comes.
    """
    new, met = set(ids), set(ids)
    todo = [-id for id in new]
    heapify(todo)
    while todo:
        id = -heappop(todo)
        record = shelf.conversation(id)
        if record is None or (record.shared_through is not None) == (id in new):
            raise StorageError(f"conversation {id} is to be deleted, and is not there")
        if id in new:
            shelf.drop_work(id)
        through = max(map(_shown, shelf.forks(id)), default=None)
        if through is not None and through == record.shared_through:
            continue
        shelf.drop_documents(id, shelf.drop_entries(id, through or 0))
        if through is None:
            shelf.remove(id)
        else:
            shelf.replace(structs.replace(record, owner=None, shared_through=through))
        above = None if record.parent is None else shelf.conversation(record.parent.conversation)
        if above is not None and above.shared_through is not None and above.id not in met:
            met.add(above.id)
            heappush(todo, -above.id)


def _shown(fork: ConversationRecord) -> int:
    """The newest entry of its parent's history that a fork, or one of its own forks, shows."""
    assert fork.parent is not None, "a fork has a parent"
    at = fork.parent.at
    return at if fork.shared_through is None else min(at, fork.shared_through)
