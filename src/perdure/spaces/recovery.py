"""What becomes of a call that was cut off: the table of rules S150 to S158, as a pure function.

``decide`` looks at what the log says of the open call and what its Space says after an advance. The first row that
matches wins. Nothing here acts: the scope does what is decided and, where the Space has moved on meanwhile, asks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from perdure.spaces.documents import OpenIntent
from perdure.spaces.wire import CommandState, ImageName, ImageRecord, Place

Decision: TypeAlias = Literal[
    "restore",  # the workspace is not the attempt's: bring back its base image, then another attempt or interrupted
    "undo",  # what the attempt did is taken back, then another attempt or interrupted
    "reattach",  # its command runs: go on with it, under the same attempt
    "adopt",  # its command has ended: take its exit and output, under the same attempt
    "void",  # its command was never started: see to it that it never is, then look again
    "again",  # nothing ran and nothing can: another attempt, nothing to undo
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """What the Space says, after this driver's advance."""

    log: str
    """The id of this driver's log."""
    generation: int
    boot: str
    image: ImageRecord | None
    floor: Place | None
    command: CommandState
    """Of the attempt's first command; that of one that is not adoptable is not looked at."""


def decide(intent: OpenIntent, stand: Stand, *, adoptable: bool) -> Decision:
    """``adoptable``: the tool's result is a function of its one command alone, and the call is to go on."""
    at_image = (
        stand.image is not None
        and stand.image.name == ImageName(log=stand.log, commit=intent.image, nonce=intent.image_nonce)
        and stand.image.boot == intent.boot
        and (stand.generation, stand.boot) == (intent.generation, intent.boot)
    )
    if not at_image:
        return "restore"
    if stand.floor is not None and (intent.number, intent.attempt) < (stand.floor.call, stand.floor.attempt):
        return "undo"
    if not adoptable:
        return "undo"
    match stand.command:
        case "running":
            return "reattach"
        case "exited":
            return "adopt"
        case "absent":
            return "void"
        case "void":
            return "again"
        case "cut_off" | "unknown":
            return "undo"


def reason(decision: Decision, stand: Stand) -> str:
    """Why, in words for the log."""
    match decision:
        case "restore":
            return "the workspace was not that of the attempt any more"
        case "reattach":
            return "its command was still running"
        case "adopt":
            return "its command had ended"
        case "void" | "again":
            return "its command had not been started"
        case "undo":
            return f"its command could not be adopted ({stand.command})"
