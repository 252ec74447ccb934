"""A conversation's history as segments: whose entries it shows, in which id range, through its forks (rules
K115 to K117).

Segments are ascending and disjoint in entry id, because a fork's own entries are all newer than the one it forked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from perdure.kernel.records import ConversationRecord
from perdure.kernel.storage import Segment

KEPT_SEGMENTS = 20_000
"""Of all histories in memory together; the one in use stays whatever its length."""


class Lineages:
    """The histories of the conversations in use, the longest unused first to be let go of."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Segment, ...]] = OrderedDict()
        self._segments = 0

    def get(self, conversation_id: int) -> tuple[Segment, ...] | None:
        found = self._kept.get(conversation_id)
        if found is not None:
            self._kept.move_to_end(conversation_id)
        return found

    def keep(self, conversation_id: int, segments: tuple[Segment, ...]) -> None:
        self.forget(conversation_id)
        self._kept[conversation_id] = segments
        self._segments += len(segments)
        while self._segments > KEPT_SEGMENTS and len(self._kept) > 1:
            self._segments -= len(self._kept.popitem(last=False)[1])

    def forget(self, conversation_id: int) -> None:
        self._segments -= len(self._kept.pop(conversation_id, ()))


def fork(parent: tuple[Segment, ...], at: int, child: int) -> tuple[Segment, ...]:
    """The history of a conversation forked from one with history ``parent`` at entry ``at``."""
    shared = parent[: bisect_right(parent, at, key=lambda segment: segment.first)]
    newest = shared[-1]
    if newest.last is None or newest.last > at:
        shared = (*shared[:-1], Segment(newest.conversation_id, newest.first, at))
    return (*shared, Segment(child, at + 1, None))


def of(record: ConversationRecord, parent: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The history of a conversation; ``parent`` is that of the one it was forked from, if it was."""
    if record.parent is None:
        return (Segment(record.id, 0, None),)
    return fork(parent, record.parent.at, record.id)


def contains(segments: Sequence[Segment], conversation_id: int, entry_id: int) -> bool:
    """Whether that conversation's entry of that id belongs to the history."""
    low, high = 0, len(segments)
    while low < high:
        middle = (low + high) // 2
        segment = segments[middle]
        if segment.last is not None and segment.last < entry_id:
            low = middle + 1
        elif segment.first > entry_id:
            high = middle
        else:
            return segment.conversation_id == conversation_id
    return False


__all__ = ["Lineages", "Segment", "contains", "fork", "of"]
