"""A conversation's history as segments: whose entries it shows, in which id range, through its forks (rule 1.5).

Segments are ascending and disjoint in entry id, because a fork's own entries are all newer than the one it forked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.kernel.storage import Segment


def fork(parent: Sequence[Segment], at: int, child: int) -> tuple[Segment, ...]:
    """The history of a conversation forked from one with history ``parent`` at entry ``at``."""
    shared = [
        s if s.last is not None and s.last <= at else Segment(s.conversation_id, s.first, at)
        for s in parent
        if s.first <= at
    ]
    return (*shared, Segment(child, at + 1, None))


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


__all__ = ["Segment", "contains", "fork"]
