"""The table of recovery, row by row and exhaustively (rules S150 to S158)."""

from __future__ import annotations

import itertools
from typing import get_args

import msgspec
import pytest

from perdure.spaces.documents import OpenIntent
from perdure.spaces.recovery import Decision, Stand, decide
from perdure.spaces.wire import CommandState, ImageRecord, Place

INTENT = OpenIntent(call=70, number=7, attempt=2, nonce="n", generation=3, boot="b1", image=5)
HERE = ImageRecord(log="L", commit=5, boot="b1")
STATES: tuple[CommandState, ...] = get_args(CommandState)


def stand(
    *,
    generation: int = 3,
    boot: str = "b1",
    image: ImageRecord | None = HERE,
    floor: Place | None = None,
    command: CommandState = "absent",
) -> Stand:
    return Stand(log="L", generation=generation, boot=boot, image=image, floor=floor, command=command)


@pytest.mark.parametrize("command", STATES)
@pytest.mark.parametrize("adoptable", [True, False])
@pytest.mark.parametrize(
    "lost",
    [
        stand(generation=4),
        stand(boot="b2"),
        stand(image=None),
        stand(image=ImageRecord(log="other", commit=5, boot="b1")),
        stand(image=ImageRecord(log="L", commit=4, boot="b1")),
        stand(image=ImageRecord(log="L", commit=5, boot="b0")),
        stand(image=ImageRecord(log="L", commit=5, nonce="another", boot="b1")),
    ],
)
def test_another_workspace_than_the_attempts_is_restored_s150(
    lost: Stand, command: CommandState, adoptable: bool
) -> None:
    found = Stand(
        log=lost.log, generation=lost.generation, boot=lost.boot, image=lost.image, floor=Place(call=9, attempt=0),
        command=command,
    )  # fmt: skip
    assert decide(INTENT, found, adoptable=adoptable) == "restore"


@pytest.mark.parametrize("command", STATES)
@pytest.mark.parametrize("adoptable", [True, False])
@pytest.mark.parametrize("floor", [Place(call=7, attempt=3), Place(call=8, attempt=1)])
def test_an_undo_that_began_is_done_again_s151(floor: Place, command: CommandState, adoptable: bool) -> None:
    assert decide(INTENT, stand(floor=floor, command=command), adoptable=adoptable) == "undo"


@pytest.mark.parametrize(
    ("command", "decision"),
    [
        ("running", "reattach"),
        ("exited", "adopt"),
        ("absent", "void"),
        ("void", "again"),
        ("cut_off", "undo"),
        ("unknown", "undo"),
    ],
)
@pytest.mark.parametrize("floor", [None, Place(call=7, attempt=2), Place(call=6, attempt=9)])
def test_an_adoptable_call_goes_by_its_command_s152_s156(
    command: CommandState, decision: Decision, floor: Place | None
) -> None:
    assert decide(INTENT, stand(command=command, floor=floor), adoptable=True) == decision


@pytest.mark.parametrize("command", STATES)
def test_any_other_call_is_undone_whatever_ran_s157(command: CommandState) -> None:
    assert decide(INTENT, stand(command=command), adoptable=False) == "undo"


def test_only_what_is_the_attempts_own_is_kept_s158() -> None:
    """Under its attempt a call goes on at its own image only, above the floor, and only if it is adoptable."""
    for generation, boot, record, floor, command, adoptable in itertools.product(
        (3, 4),
        ("b1", "b2"),
        (None, HERE, msgspec.structs.replace(HERE, commit=6)),
        (None, Place(call=7, attempt=3)),
        STATES,
        (True, False),
    ):
        found = stand(generation=generation, boot=boot, image=record, floor=floor, command=command)
        if decide(INTENT, found, adoptable=adoptable) in ("reattach", "adopt", "void", "again"):
            assert (generation, boot, record, floor, adoptable) == (3, "b1", HERE, None, True)
