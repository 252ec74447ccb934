"""Floor 5: Spaces, where an agent's files live and its commands run, with a daemon in each that keeps account of both.

    space = await LocalSpaces("spaces").open("build-42")
    space = await LocalSpaces.at("project")

A Space comes from a provider and is reached by address and token. ``durable_space`` gives it to an agent.
"""

from __future__ import annotations

from perdure.spaces.errors import SpaceConnectionLost, SpaceError, SpaceUnavailable
from perdure.spaces.local import LocalSpaces
from perdure.spaces.local_folder import SpaceMisplaced
from perdure.spaces.provider import SpaceAddress, SpaceProvider
from perdure.spaces.space import Space

__all__ = [
    "LocalSpaces",
    "Space",
    "SpaceAddress",
    "SpaceConnectionLost",
    "SpaceError",
    "SpaceMisplaced",
    "SpaceProvider",
    "SpaceUnavailable",
]
