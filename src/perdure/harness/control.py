"""How a result of a tool says that the run goes on, or does not (rules H104 to H108)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

MOST_ADDED: Final = 100
"""Names of tools that one result may add."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """The run ends, and the model's context begins anew."""

    text: str
    """What the new context begins with, as words of a user; empty: with nothing."""

    def __post_init__(self) -> None:
        if type(self.text) is not str:
            raise TypeError(f"a handoff is a text, not {type(self.text).__name__}")


Control: TypeAlias = Literal["terminate"] | Handoff
"""``terminate``: the run ends without asking the model again, if every result of the round says so."""
