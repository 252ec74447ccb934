"""What a boundary places, and in which order (rules H43 to H46, H29)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.harness.boundary import Boundary, Placement, plan
from perdure.harness.documents import RESET, USER, InboxItem, InboxMode
from perdure.harness.settings import Take


def item(id: int, mode: InboxMode, kind: str = USER) -> InboxItem:
    return {"id": id, "mode": mode, "entry": {"kind": kind, "messages": [], "data": None, "head": None, "edits": []}}


QUEUE = [
    item(1, "follow_up"),
    item(2, "steer"),
    item(3, "write", "app.note"),
    item(4, "steer"),
    item(5, "follow_up"),
    item(6, "write", "app.note"),
]


@pytest.mark.parametrize(
    ("boundary", "steer", "follow_up", "writes", "inputs"),
    [
        ("after_tools", "all", "all", [3, 6], [2, 4]),
        ("after_tools", "first", "first", [3, 6], [2]),
        ("final", "all", "all", [3, 6], [1, 2, 4, 5]),
        ("final", "all", "first", [3, 6], [1, 2, 4]),
        ("final", "first", "first", [3, 6], [1, 2]),
        ("writes", "all", "all", [3, 6], []),
    ],
)
def test_writes_come_first_then_inputs_by_id_h43_h44_h45_h46(
    boundary: Boundary, steer: Take, follow_up: Take, writes: list[int], inputs: list[int]
) -> None:
    placement = plan(QUEUE, boundary, steer=steer, follow_up=follow_up)
    assert [i["id"] for i in placement.writes] == writes
    assert [i["id"] for i in placement.inputs] == inputs
    assert not placement.ends_run


def test_a_reset_after_tools_makes_the_boundary_final_h29() -> None:
    placement = plan([*QUEUE, item(7, "write", RESET)], "after_tools", steer="all", follow_up="all")
    assert placement.ends_run
    assert [i["id"] for i in placement.writes] == [3, 6, 7]
    assert [i["id"] for i in placement.inputs] == [1, 2, 4, 5]


def test_a_reset_elsewhere_ends_no_run_h29() -> None:
    assert not plan([item(7, "write", RESET)], "final", steer="all", follow_up="all").ends_run
    assert not plan([item(7, "write", RESET)], "writes", steer="all", follow_up="all").ends_run


def test_an_empty_queue_places_nothing() -> None:
    assert plan([], "final", steer="all", follow_up="all") == Placement((), (), False)


@given(
    st.lists(st.sampled_from(["follow_up", "steer", "write"]), max_size=12),
    st.sampled_from(["after_tools", "final", "writes"]),
    st.sampled_from(["first", "all"]),
    st.sampled_from(["first", "all"]),
)
def test_every_queue_empties_and_keeps_order_h43(modes, boundary, steer, follow_up) -> None:
    """No item is lost, taken twice or overtaken by a later one of its mode; final boundaries empty any queue."""
    queue = [item(id, mode) for id, mode in enumerate(modes, 1)]
    placement = plan(queue, boundary, steer=steer, follow_up=follow_up)
    taken = [*placement.writes, *placement.inputs]
    rest = [i for i in queue if i not in taken]
    assert len(taken) + len(rest) == len(queue)
    for mode in ("follow_up", "steer", "write"):
        assert all(a["id"] < b["id"] for a in taken for b in rest if a["mode"] == b["mode"] == mode)
    rounds = 0
    while queue:
        placement = plan(queue, "final", steer=steer, follow_up=follow_up)
        assert placement.writes or placement.inputs
        queue = [i for i in queue if i not in placement.writes and i not in placement.inputs]
        rounds += 1
    assert rounds <= len(modes)
