"""How it is told, in a line, that a Space or a call in it went on after something was cut off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WENT_ON: Final[Mapping[str, str]] = {
    "call_adopted": "adopted, {why}; its outcome is taken from the daemon's ledger",
    "call_reattached": "reattached, {why}",
    "call_not_started": "started now, {why}",
    "call_rerun": "undone, and run again",
    "call_interrupted": "undone, and not run again",
    "call_restored": "undone: {why}",
    "space_restored": "restored from the log: {why}",
}
"""By the type of the report."""


def went_on(type: str, message: str) -> str | None:
    """None: the report is about something else."""
    if type not in WENT_ON:
        return None
    name, _, why = message.partition(": ")
    return f"{name}: {WENT_ON[type].format(why=why)}"
