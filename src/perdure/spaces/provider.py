"""Spaces and who makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from perdure.spaces.wire import Containment


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceAddress:
    """Where a Space's daemon is reached. Who knows the token has the Space; its repr does not show it (rule S101)."""

    name: str
    """The Space's durable identity."""
    generation: int
    """Raised each time the Space is made anew; what an older one held is lost."""
    address: str
    """``unix:/PATH`` or ``tcp:HOST:PORT``."""
    token: str = field(repr=False)
    containment: Containment
    """What its daemon can do about processes: "none" is best effort."""


class SpaceProvider(Protocol):
    """Makes, finds and deletes Spaces. Every method may be called by several processes at once."""

    async def open(self, name: str) -> SpaceAddress:
        """The Space of this name, made if there is none or it was lost (then under a higher generation), with its
        daemon running. Raises SpaceUnavailable."""
        ...

    async def find(self, name: str) -> SpaceAddress | None:
        """As ``open``, but None where there is none or it was lost; nothing is made."""
        ...

    async def restart(self, name: str) -> SpaceAddress:
        """End a daemon that hangs, if there is one, and start another. What its commands do goes on meanwhile.
        Raises SpaceUnavailable, also if there is no such Space."""
        ...

    async def delete(self, name: str) -> None:
        """Kill everything that lives in the Space, then remove it. Nothing happens if there is none."""
        ...
