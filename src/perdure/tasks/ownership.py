"""Who owns what, and who waits for whom, over the live tasks (rules T50-T53, T62-T68).

The tree keeps ids only and may know too much: a transaction that was rolled back leaves its ids here. So every
question takes ``look``, which gives the live record as the asker sees it (settled, or a transaction's candidate),
and what ``look`` does not know is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from perdure.kernel.records import TaskRecord, Waiting

Look: TypeAlias = Callable[[int], TaskRecord | None]
"""The live task of an id, or None if it is terminal or unknown."""

FEW = 20_000
"""Edges that may be added before it is asked which of them still stand."""


class WorkTree:
    """Edges between tasks and conversations."""

    def __init__(self) -> None:
        self._children: dict[int, set[int]] = {}
        """Task -> tasks it owns."""
        self._conversations: dict[int, set[int]] = {}
        """Task -> conversations it owns."""
        self._tasks: dict[int, set[int]] = {}
        """Conversation -> tasks it owns."""
        self._owners: dict[int, int | None] = {}
        """Conversation -> the task that owns it."""
        self._waiters: dict[int, set[int]] = {}
        """Task -> tasks that wait for it."""
        self._added = 0
        self._trim_at = FEW

    # --- keeping it --------------------------------------------------------------------------------------------

    def add_conversation(self, id: int, owner: int | None) -> None:
        if id in self._owners:
            return
        self._added += 1
        self._owners[id] = owner
        if owner is not None:
            self._conversations.setdefault(owner, set()).add(id)

    def knows(self, conversation_id: int) -> bool:
        return conversation_id in self._owners

    def add_task(self, record: TaskRecord) -> None:
        assert record.conversation_id in self._owners, "a task's conversation is added first"
        self._added += 1
        if record.owner is None:
            self._tasks.setdefault(record.conversation_id, set()).add(record.id)
        else:
            self._children.setdefault(record.owner, set()).add(record.id)

    def add_wait(self, waiter: int, on: Iterable[int], look: Look) -> None:
        """The waiter waits for those of the named tasks that are live."""
        for id in on:
            if look(id) is not None:
                waiters = self._waiters.setdefault(id, set())
                if waiter not in waiters:
                    self._added += 1
                    waiters.add(waiter)

    def forget_task(self, record: TaskRecord) -> None:
        """A task is terminal, for good."""
        holders, key = (self._tasks, record.conversation_id) if record.owner is None else (self._children, record.owner)
        siblings = holders.get(key)
        if siblings is not None:
            siblings.discard(record.id)
            if not siblings:
                del holders[key]
        self._children.pop(record.id, None)
        self._conversations.pop(record.id, None)
        self._waiters.pop(record.id, None)

    def trim(self, live: Callable[[int], bool]) -> None:
        """Forget what no longer stands: work of transactions that were rolled back, waits that were given up,
        conversations without tasks. Looks once as much was added as is kept. Not amid a transaction's records: those
        are not live yet.
        """
        if self._added < self._trim_at:
            return
        for edges in (self._tasks, self._children, self._waiters):
            for id, others in list(edges.items()):
                edges[id] = {other for other in others if live(other)}
                if not edges[id]:
                    del edges[id]
        self._owners = {id: owner for id, owner in self._owners.items() if id in self._tasks}
        self._conversations = {}
        for id, owner in self._owners.items():
            if owner is not None:
                self._conversations.setdefault(owner, set()).add(id)
        kept = sum(len(others) for edges in (self._tasks, self._children, self._waiters) for others in edges.values())
        self._added, self._trim_at = 0, FEW + kept

    # --- upwards -----------------------------------------------------------------------------------------------

    def conversation_owner(self, conversation_id: int) -> int | None:
        return self._owners[conversation_id]

    def owner_task(self, record: TaskRecord) -> int | None:
        """The task right above: its owner, or the owner of its conversation."""
        return record.owner if record.owner is not None else self._owners[record.conversation_id]

    def ordinary_to_root(self, record: TaskRecord, look: Look) -> bool:
        """Whether no background boundary stands between a live task and an ownerless conversation."""
        here: TaskRecord | None = record
        while here is not None:
            if here.background:
                return False
            above = self.owner_task(here)
            if above is None:
                return True
            here = look(above)
        # An ended owner has no live ordinary work (T54): the boundary stands somewhere above.
        return False

    # --- downwards ---------------------------------------------------------------------------------------------

    def owned(self, task_id: int, look: Look) -> Iterator[TaskRecord]:
        """The first level of a task's live ordinary owned work. What is further below hangs on these (T54)."""
        for id in self._children.get(task_id, ()):
            record = look(id)
            if record is not None:
                yield record
        for conversation_id in self._conversations.get(task_id, ()):
            yield from self.owned_by_conversation(conversation_id, look)

    def owned_by_conversation(self, conversation_id: int, look: Look) -> Iterator[TaskRecord]:
        """The live ordinary tasks a conversation owns itself."""
        for id in self._tasks.get(conversation_id, ()):
            record = look(id)
            if record is not None and not record.background:
                yield record

    def owns_live(self, task_id: int, look: Look) -> bool:
        """Whether a task has live ordinary owned work."""
        return next(self.owned(task_id, look), None) is not None

    def below(self, task_id: int, look: Look) -> Iterator[TaskRecord]:
        """All live ordinary owned work of a task, owners before what they own (T53)."""
        todo = list(self.owned(task_id, look))
        while todo:
            record = todo.pop()
            yield record
            todo.extend(self.owned(record.id, look))

    # --- sideways ----------------------------------------------------------------------------------------------

    def waiters(self, task_id: int, look: Look) -> list[TaskRecord]:
        """Live tasks that wait for this one."""
        found = (look(id) for id in self._waiters.get(task_id, ()))
        return [r for r in found if r is not None and isinstance(r.state, Waiting) and task_id in r.state.on]

    def needs(self, record: TaskRecord, look: Look) -> Iterator[TaskRecord]:
        """The live tasks that must end before this one can: what it waits for, and its first level of owned work.

        A task that is being aborted waits for nothing but its owned work any more.
        """
        if isinstance(record.state, Waiting) and not record.abort_requested:
            for id in record.state.on:
                other = look(id)
                if other is not None:
                    yield other
        yield from self.owned(record.id, look)

    def needed_by(self, record: TaskRecord, look: Look) -> Iterator[TaskRecord]:
        """The live tasks that cannot end before this one: ``needs``, the other way round."""
        owner = None if record.background else self.owner_task(record)
        above = None if owner is None else look(owner)
        if above is not None:
            yield above
        for waiter in self.waiters(record.id, look):
            if not waiter.abort_requested:
                yield waiter

    def held_up(self, by: Iterable[int], look: Look) -> dict[int, int]:
        """Every live task that cannot end before one of these does, and which; they themselves are among them."""
        held = {id: id for id in by if look(id) is not None}
        todo = list(held)
        for id in todo:  # grows while it is walked
            record = look(id)
            assert record is not None
            for other in self.needed_by(record, look):
                if other.id not in held:
                    held[other.id] = held[id]
                    todo.append(other.id)
        return held

    def cycle(self, waiter: int, on: Iterable[int], look: Look) -> list[int] | None:
        """The shortest cycle a wait would close, from the waiter round to itself; None if it closes none."""
        came = dict.fromkeys(on, waiter)
        todo = list(came)
        for id in todo:  # grows while it is walked: breadth first
            if id == waiter:
                way = [waiter]
                while not (way[1:] and way[-1] == waiter):
                    way.append(came[way[-1]])
                return way[::-1]
            record = look(id)
            for other in () if record is None else self.needs(record, look):
                if other.id not in came:
                    came[other.id] = id
                    todo.append(other.id)
        return None
