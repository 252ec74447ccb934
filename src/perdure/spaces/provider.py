"""Spaces and who makes them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from perdure.spaces.wire import Containment

if TYPE_CHECKING:
    from perdure.spaces.space import Space


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
    """The key to the Space."""
    containment: Containment
    """What its daemon can do about processes: "none" is best effort (rule S106)."""
    workspace: str | None = None
    """A directory of the user's that it works in, on this machine; None: it has its own."""

    def contained(self, containment: Containment) -> SpaceAddress:
        """The same, of a daemon that can do this about processes."""
        return replace(self, containment=containment)


class SpaceProvider(Protocol):
    """Makes, finds and deletes Spaces. Several processes may do so at once (rules S105, S107)."""

    async def open(self, name: str) -> Space:
        """The Space of this name with its daemon running, made if there is none or it was lost, then under a higher
        generation. Raises SpaceUnavailable."""
        ...

    async def find(self, name: str) -> Space | None:
        """As ``open``, but None where there is none or it was lost: nothing is made."""
        ...

    async def restart(self, name: str) -> Space:
        """End the daemon, which may hang, and start another; commands run on meanwhile. Raises SpaceUnavailable, also
        if there is no such Space."""
        ...

    async def delete(self, name: str) -> None:
        """Kill everything that lives in the Space, then remove it; the next of this name has a higher generation.
        Nothing happens if there is none."""
        ...
