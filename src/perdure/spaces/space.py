"""A Space as its provider hands it out."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.spaces.client import SpaceClient
from perdure.spaces.link import ClientLimits
from perdure.spaces.provider import SpaceAddress, SpaceProvider
from perdure.spaces.wire import Containment


@dataclass(frozen=True, slots=True)
class Space:
    """A Space that was there when its provider was asked. It may be gone since: ``reopen`` asks again."""

    address: SpaceAddress
    """Where its daemon is reached."""
    provider: SpaceProvider
    """Who made it."""

    @property
    def name(self) -> str:
        """What the log knows it by."""
        return self.address.name

    @property
    def generation(self) -> int:
        """How often it was made anew, counted from 1."""
        return self.address.generation

    @property
    def containment(self) -> Containment:
        """What it can do about processes that try to get away: "none" is best effort (rule S106)."""
        return self.address.containment

    async def connect(self, *, limits: ClientLimits | None = None) -> SpaceClient:
        """A client; it has yet to advance. Raises SpaceUnavailable."""
        return await SpaceClient.connect(self.address, limits=limits)

    async def reopen(self) -> Space:
        """The Space as it is now: its daemon started if it had ended, a higher generation if it was lost."""
        return await self.provider.open(self.name)

    async def restart(self) -> Space:
        """The same with another daemon."""
        return await self.provider.restart(self.name)

    async def delete(self) -> None:
        """Kill everything that lives in it, then remove it."""
        await self.provider.delete(self.name)
