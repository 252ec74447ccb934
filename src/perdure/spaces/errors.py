"""What can go wrong between a driver and a Space.

Three kinds matter to a driver. A **refusal** (SpaceRefused) is an answer: nothing was done, and the class says why.
A **lost connection** (SpaceConnectionLost) is no answer, or one that says the driver no longer has the Space: it
advances again and recovers from its log. **StaleEpochError** of the kernel says that a newer driver has it: it stops.
The last two are never a tool's result (rule S103). None of them carries a token, a command line, a variable or
contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from perdure.harness.environment import EnvironmentLost, EnvironmentUnusable, ProcessesRemain
from perdure.kernel.errors import PerdureError


class SpaceError(PerdureError):
    """The base of every error about a Space."""


class SpaceUnavailable(SpaceError, EnvironmentUnusable):
    """There is no daemon to talk to, or it is not the one that was meant; nothing was asked of it."""


class NobodyListens(SpaceUnavailable):
    """No daemon listens there: none runs, or not any more."""


class SpaceNotReady(SpaceUnavailable):
    """It may be otherwise in a moment: too many are connected, or the daemon or the whole Space went away just while it
    was opened or greeted."""


class SpaceUnauthorized(SpaceUnavailable):
    """The daemon knows another token."""


LostReason: TypeAlias = Literal[
    "closed",  # the connection ended before the answer, or the client was closed
    "timeout",  # no answer in time
    "malformed",  # what came is no answer of this protocol
    "restarted",  # another instance of the daemon answers
    "generation",  # another Space, or another generation of it, answers
    "not_advanced",  # this client has not advanced, or no longer
    "stale_connection",  # a later advance of the same writer has the Space
    "stale_boot",  # the machine of the Space was restarted
    "workspace_gone",  # its path names no directory of this Space any more
    "forgotten",  # the Space knows no fence, or an older one: its state was lost
    "void",
    "below_floor",
    "no_image",
    "restoring",
    "conflict",
    "cut_off",  # a fence or an undo ended the command
    "unknown",  # it was started, and nobody can know how it ended
    "absent",  # it should have been started and was not
]


class SpaceConnectionLost(SpaceError, EnvironmentLost):
    """The driver does not have the Space, or cannot know what became of its request: advance again and recover
    from the log, or halt. Never a tool's result."""

    def __init__(self, reason: LostReason, message: str) -> None:
        super().__init__(f"{message}; advance again and recover from the log")
        self.reason: LostReason = reason


class SpaceRefused(SpaceError):
    """The daemon answered with an error; nothing was done. ``code`` is that of the protocol."""

    def __init__(self, op: str, code: str, message: str) -> None:
        PerdureError.__init__(self, f"the Space refused {op}: {message} ({code})")
        self.op = op
        self.code = code
        self.message = message


class SpaceRequestInvalid(SpaceRefused):
    """The daemon does not understand the request: a bug, or a daemon of another version."""


class SpaceFault(SpaceRefused):
    """The daemon has a bug; its message says where. What the request did is not known."""


class SpaceTooLarge(SpaceRefused):
    """Over a bound of the protocol."""


class SpaceBusy(SpaceRefused):
    """Too many connections or commands; try later."""


class SpaceFull(SpaceRefused):
    """The disk of the Space is full; nothing was changed."""


class KeyVoid(SpaceRefused):
    """This key never starts."""


class KeyBelowFloor(SpaceRefused):
    """The call was undone or forgotten."""


class KeyConflict(SpaceRefused):
    """This key was started as another command."""


class NoImage(SpaceRefused):
    """The workspace does not stand at an image of this log."""


class Restoring(SpaceRefused):
    """A restore is under way, or another than the one that was named."""


class ScanForgotten(SpaceRefused):
    """Only the newest scan is kept; scan again."""


class ContentChanged(SpaceRefused):
    """A file, or the workspace, holds something else than it was seen to hold."""

    def __init__(self, op: str, message: str, path: str | None) -> None:
        super().__init__(op, "changed", message if path is None else f"{path}: {message}")
        self.path = path


class ContentMissing(SpaceRefused):
    """Contents were not put: at least those of ``digests``."""

    def __init__(self, op: str, message: str, digests: Sequence[str]) -> None:
        super().__init__(op, "missing", message)
        self.digests = tuple(digests)


class SpaceProcessesRemain(SpaceRefused, ProcessesRemain):
    """Processes live on after SIGKILL and 10 s, or cannot be proven gone."""

    def __init__(self, op: str, message: str, pids: Sequence[int]) -> None:
        shown = ", ".join(map(str, pids)) or "unnamed"
        SpaceRefused.__init__(self, op, "processes_remain", f"{message}; processes {shown}")
        self.pids = tuple(pids)
