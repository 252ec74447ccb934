"""Checks of histories: pages, forks, heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from perdure.kernel.records import (
    ConversationRecord,
    ForkPoint,
)
from perdure.kernel.storage import Segment
from perdure.testing.conformance.subject import Subject, begun


async def a_history_is_read_by_pages_in_both_orders(subject: Subject) -> None:
    """K139: entries within an id range, ascending and descending, at most a limit."""
    line = await begun(subject)
    other = line.conversation()
    mine = [line.entry(1 if number % 2 else other.id) for number in range(20)]
    await line.commit(line.batch(conversations=[other], entries=mine))
    mine = [entry for entry in mine if entry.conversation_id == 1]
    storage = line.storage
    lineage = await storage.lineage(1)
    assert await storage.entries(lineage) == mine
    assert await storage.entries(lineage, order="descending") == mine[::-1]
    assert await storage.entries(lineage, limit=3) == mine[:3]
    assert await storage.entries(lineage, order="descending", limit=3) == mine[:-4:-1]
    assert await storage.entries(lineage, first=mine[2].id, last=mine[5].id) == mine[2:6]
    assert await storage.entries(lineage, first=mine[2].id + 1, last=mine[5].id - 1) == mine[3:5]
    assert await storage.entries(lineage, last=mine[5].id, order="descending", limit=2) == [mine[5], mine[4]]
    assert await storage.entries(lineage, first=mine[-1].id + 1) == []
    assert await storage.entries(lineage, first=9, last=8) == []
    assert await storage.entries(()) == []
    await storage.close()


async def a_fork_shares_what_came_before_it(subject: Subject) -> None:
    """K115, K116, K117: through the fork entry and no further, also when that entry was itself inherited."""
    line = await begun(subject)
    root = [line.entry(1) for _ in range(4)]
    child = line.conversation(parent=ForkPoint(1, root[1].id))
    own = [line.entry(child.id) for _ in range(2)]
    early = line.conversation(parent=ForkPoint(child.id, root[0].id))
    late = line.conversation(parent=ForkPoint(child.id, own[0].id))
    after = [line.entry(early.id), line.entry(late.id), line.entry(1)]
    await line.commit(line.batch(conversations=[child, early, late], entries=[*root, *own, *after]))
    storage = line.storage
    expected = {
        1: [*root, after[2]],
        child.id: [*root[:2], *own],
        early.id: [root[0], after[0]],
        late.id: [*root[:2], own[0], after[1]],
    }
    for conversation, entries in expected.items():
        lineage = await storage.lineage(conversation)
        assert await storage.entries(lineage) == entries
        assert await storage.entries(lineage, order="descending", limit=2) == entries[:-3:-1]
        assert_lineage(lineage, conversation)
    assert await storage.lineage(line.next_id) == ()
    await storage.close()


def assert_lineage(lineage: Sequence[Segment], conversation: int) -> None:
    assert lineage[-1].conversation_id == conversation, "its own entries come last"
    assert lineage[-1].last is None, "and it goes on"
    for before, after in pairwise(lineage):
        assert before.last is not None
        assert before.first <= before.last < after.first, "segments are disjoint and ascending"


async def a_chain_of_a_thousand_forks_is_one_history(subject: Subject) -> None:
    """K117: found in one call, read by pages from either end."""
    line = await begun(subject)
    entries = [line.entry(1, head=True)]
    conversations: list[ConversationRecord] = []
    for _ in range(1000):
        last = entries[-1]
        conversations.append(line.conversation(parent=ForkPoint(last.conversation_id, last.id)))
        entries.append(line.entry(conversations[-1].id))
    await line.commit(line.batch(conversations=conversations, entries=entries))
    storage = line.storage
    lineage = await storage.lineage(conversations[-1].id)
    assert len(lineage) == 1001
    assert_lineage(lineage, conversations[-1].id)
    assert await storage.entries(lineage, order="descending", limit=50) == entries[:-51:-1]
    assert await storage.entries(lineage, limit=50) == entries[:50]
    assert await storage.entries(lineage, first=entries[500].id, limit=50) == entries[500:550]
    assert await storage.head(lineage) == entries[0]
    await storage.close()


async def the_newest_head_marker_is_found(subject: Subject) -> None:
    """K139: at or below an entry, along the ancestry, and not what lies beyond a fork."""
    line = await begun(subject)
    marks = [line.entry(1, head=number in (1, 4)) for number in range(6)]
    fork = line.conversation(parent=ForkPoint(1, marks[2].id))
    own = line.entry(fork.id)
    await line.commit(line.batch(conversations=[fork], entries=[*marks, own]))
    storage = line.storage
    lineage = await storage.lineage(1)
    assert await storage.head(lineage) == marks[4]
    assert await storage.head(lineage, last=marks[4].id) == marks[4]
    assert await storage.head(lineage, last=marks[3].id) == marks[1]
    assert await storage.head(lineage, last=marks[0].id) is None
    assert await storage.head(await storage.lineage(fork.id)) == marks[1]
    await storage.close()


CHECKS = (
    a_history_is_read_by_pages_in_both_orders,
    a_fork_shares_what_came_before_it,
    a_chain_of_a_thousand_forks_is_one_history,
    the_newest_head_marker_is_found,
)
