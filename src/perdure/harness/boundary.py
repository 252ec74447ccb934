"""Which queued submissions a boundary places, and in which order (rules H43 to H46, H29).

A boundary is a point where the transcript may take something in without tearing a call from its result:
after the tools of a turn, and after the final answer. Pure: what is placed is decided here, written in
``inbox``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from perdure.harness.documents import RESET, InboxItem, InboxMode
from perdure.harness.settings import Take

Boundary: TypeAlias = Literal["after_tools", "final", "writes"]
"""``writes`` is the boundary of a write or reset that finds a conversation idle with a queue: it starts no
input."""


class Placement(msgspec.Struct, frozen=True):
    """What a boundary places: the writes first, then the inputs, each by id."""

    writes: tuple[InboxItem, ...]
    inputs: tuple[InboxItem, ...]
    ends_run: bool
    """A reset came at the boundary after tools: it acts as the final one, the run's inputs end ``reset``."""


def plan(items: Sequence[InboxItem], boundary: Boundary, *, steer: Take, follow_up: Take) -> Placement:
    """What ``boundary`` takes from a queue that is in id order."""
    writes = tuple(item for item in items if item["mode"] == "write")
    ends_run = boundary == "after_tools" and any(item["entry"]["kind"] == RESET for item in writes)
    inputs: list[InboxItem] = []
    if boundary != "writes":
        inputs += _take(items, "steer", steer)
    if boundary == "final" or ends_run:
        inputs += _take(items, "follow_up", follow_up)
    inputs.sort(key=lambda item: item["id"])
    return Placement(writes, tuple(inputs), ends_run)


def _take(items: Sequence[InboxItem], mode: InboxMode, take: Take) -> list[InboxItem]:
    found = [item for item in items if item["mode"] == mode]
    return found if take == "all" else found[:1]
