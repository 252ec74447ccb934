"""The tree of owners and the graph of waits, against plain definitions of them (rules T50, T53, T68, T84, T85)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from perdure.kernel.records import Pending, TaskRecord, Waiting
from perdure.tasks.ownership import WorkTree


@dataclass
class Work:
    """Conversations and live tasks; the plain truth the tree is judged by."""

    owners: dict[int, int | None] = field(default_factory=dict)
    """Conversation -> owner task."""
    tasks: dict[int, TaskRecord] = field(default_factory=dict)

    def above(self, record: TaskRecord) -> int | None:
        return record.owner if record.owner is not None else self.owners[record.conversation_id]

    def chain(self, record: TaskRecord) -> list[TaskRecord]:
        """The task and every task above it."""
        found = [record]
        while (above := self.above(found[-1])) is not None:
            found.append(self.tasks[above])
        return found

    def below(self, id: int) -> set[int]:
        """Ordinary owned work by its definition: below, with no background task on the way (T53)."""
        found: set[int] = set()
        for record in self.tasks.values():
            chain = self.chain(record)
            ids = [r.id for r in chain]
            if record.id != id and id in ids and not any(r.background for r in chain[: ids.index(id)]):
                found.add(record.id)
        return found

    def tree(self) -> WorkTree:
        tree = WorkTree()
        for id, owner in self.owners.items():
            tree.add_conversation(id, owner)
        for record in self.tasks.values():
            tree.add_task(record)
            if isinstance(record.state, Waiting):
                tree.add_wait(record.id, record.state.on, self.tasks.get)
        return tree


@st.composite
def works(draw: st.DrawFn) -> Work:
    work = Work({1: None})
    next_id = 2
    for _ in range(draw(st.integers(1, 14))):
        choice = draw(st.integers(0, 3))
        tasks = sorted(work.tasks)
        if choice == 0:
            owner = draw(st.sampled_from([None, *tasks]))
            work.owners[next_id] = owner
        elif choice == 1 and tasks:
            parent = work.tasks[draw(st.sampled_from(tasks))]
            work.tasks[next_id] = _task(next_id, parent.conversation_id, parent.id)
        else:
            conversation = draw(st.sampled_from(sorted(work.owners)))
            work.tasks[next_id] = _task(next_id, conversation, None, background=draw(st.booleans()))
        next_id += 1
    for id in sorted(work.tasks):
        if draw(st.booleans()):
            on = draw(st.lists(st.sampled_from(sorted(work.tasks)), max_size=3, unique=True))
            state = Waiting(phase="p", on=tuple(on))
            record = work.tasks[id]
            work.tasks[id] = _task(id, record.conversation_id, record.owner, record.background, state)
    return work


def _task(
    id: int, conversation: int, owner: int | None, background: bool = False, state: Pending | Waiting | None = None
) -> TaskRecord:
    return TaskRecord(
        id=id,
        conversation_id=conversation,
        kind="t",
        version=1,
        created_at=0,
        owner=owner,
        background=background,
        state=state or Pending(phase="p"),
    )


@given(works())
def test_T53_ordinary_owned_work_is_all_below_without_what_is_behind_background(work: Work) -> None:
    tree = work.tree()
    for id in work.tasks:
        below = [record.id for record in tree.below(id, work.tasks.get)]
        assert len(below) == len(set(below))
        assert set(below) == work.below(id)
        assert tree.owns_live(id, work.tasks.get) == bool(work.below(id))
        position = {id: place for place, id in enumerate(below)}
        for found in below:
            above = work.above(work.tasks[found])
            assert above == id or position[above or 0] < position[found], "owners come before what they own"


@given(works())
def test_T85_ordinary_to_the_root_means_no_background_above(work: Work) -> None:
    tree = work.tree()
    for record in work.tasks.values():
        plain = not any(r.background for r in work.chain(record))
        assert tree.ordinary_to_root(record, work.tasks.get) == plain


@given(works())
def test_T85_below_an_ended_owner_nothing_is_ordinary(work: Work) -> None:
    tree = work.tree()
    for gone in work.tasks:
        left = {id: record for id, record in work.tasks.items() if id != gone}
        for record in left.values():
            if gone in [r.id for r in work.chain(record)]:
                assert not tree.ordinary_to_root(record, left.get)


@given(works(), st.data())
def test_T68_a_wait_closes_a_cycle_exactly_when_the_named_need_the_waiter(work: Work, data: st.DataObject) -> None:
    if not work.tasks:
        return
    tree = work.tree()
    ids = sorted(work.tasks)
    waiter = data.draw(st.sampled_from(ids))
    on = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3))

    def needs(id: int) -> set[int]:
        state = work.tasks[id].state
        waited = {other for other in state.on if other in work.tasks} if isinstance(state, Waiting) else set[int]()
        owned = {r.id for r in work.tasks.values() if work.above(r) == id and not r.background}
        return waited | owned

    reached, todo = set(on), list(on)
    while todo:
        for other in needs(todo.pop()) - reached:
            reached.add(other)
            todo.append(other)
    cycle = tree.cycle(waiter, on, work.tasks.get)
    assert (cycle is not None) == (waiter in reached)
    if cycle is not None:
        assert cycle[0] == cycle[-1] == waiter
        assert cycle[1] in on
        for step, following in pairwise(cycle[1:]):
            assert following in needs(step)


@given(works())
def test_what_look_does_not_know_is_not_there(work: Work) -> None:
    tree = work.tree()
    for id in work.tasks:
        assert list(tree.below(id, lambda _: None)) == []
        assert tree.waiters(id, lambda _: None) == []
    for record in work.tasks.values():
        tree.forget_task(record)
    assert not tree._children
    assert not tree._tasks
    assert not tree._waiters


def test_what_no_longer_stands_is_forgotten_when_there_is_much_of_it(monkeypatch) -> None:
    """Conversations without tasks, work of transactions that were rolled back, waits that were given up."""
    monkeypatch.setattr("perdure.tasks.ownership.FEW", 10)
    tree = WorkTree()
    live = {1000: _task(1000, 1, None), 1001: _task(1001, 1, 1000)}
    tree.add_conversation(1, None)
    for record in live.values():
        tree.add_task(record)
    for id in range(2, 200):
        tree.trim(live.__contains__)
        tree.add_conversation(id, 1000)
        tree.add_task(_task(2000 + id, 1, 1000))
        tree.add_task(_task(3000 + id, 1, None))
        tree.add_wait(4000 + id, [1001], live.get)
    assert tree.knows(1)
    assert tree.knows(199)
    for edges in (tree._owners, tree._tasks[1], tree._children[1000], tree._waiters[1001], tree._conversations[1000]):
        assert len(edges) <= 15
    assert [record.id for record in tree.owned_by_conversation(1, live.get)] == [1000]
    assert [record.id for record in tree.owned(1000, live.get)] == [1001]


@given(works(), st.data())
def test_T47_held_up_is_who_needs_one_of_them_to_end(work: Work, data: st.DataObject) -> None:
    tree = work.tree()
    for record in work.tasks.values():
        if isinstance(record.state, Waiting):
            tree.add_wait(record.id, record.state.on, work.tasks.get)
    blocked = data.draw(st.lists(st.sampled_from(sorted(work.tasks)), unique=True, max_size=3)) if work.tasks else []
    held = tree.held_up(blocked, work.tasks.get)
    for id in work.tasks:
        reached, todo = {id}, [id]
        while todo:
            for other in tree.needs(work.tasks[todo.pop()], work.tasks.get):
                if other.id not in reached:
                    reached.add(other.id)
                    todo.append(other.id)
        assert (id in held) == bool(reached & set(blocked))
        assert id not in held or held[id] in reached & set(blocked)
