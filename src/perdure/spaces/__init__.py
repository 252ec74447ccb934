"""Floor 5: Spaces, where an agent's files live and its commands run, with a daemon in each that keeps account of both.

    space = await LocalSpaces("spaces").open("build-42")
    space = await LocalSpaces.at("project")
    async with Harness.open(SqliteStorage("agent.db"), environment=durable_space(space), ...) as harness: ...

A Space comes from a provider and is reached by address and token. ``durable_space`` gives it to an agent, whose files
and commands then stay equal to its log. What is named here is the public face; names are loaded when they are first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.spaces.durable import DurableSpace as DurableSpace
    from perdure.spaces.durable import durable_space as durable_space
    from perdure.spaces.errors import SpaceConnectionLost as SpaceConnectionLost
    from perdure.spaces.errors import SpaceError as SpaceError
    from perdure.spaces.errors import SpaceProcessesRemain as SpaceProcessesRemain
    from perdure.spaces.errors import SpaceUnavailable as SpaceUnavailable
    from perdure.spaces.local import LocalSpaces as LocalSpaces
    from perdure.spaces.local_folder import SpaceMisplaced as SpaceMisplaced
    from perdure.spaces.provider import SpaceAddress as SpaceAddress
    from perdure.spaces.provider import SpaceProvider as SpaceProvider
    from perdure.spaces.space import Space as Space

_HOME = {
    "perdure.spaces.durable": (
        "DurableSpace",
        "durable_space",
    ),
    "perdure.spaces.errors": (
        "SpaceConnectionLost",
        "SpaceError",
        "SpaceProcessesRemain",
        "SpaceUnavailable",
    ),
    "perdure.spaces.local": ("LocalSpaces",),
    "perdure.spaces.local_folder": ("SpaceMisplaced",),
    "perdure.spaces.provider": (
        "SpaceAddress",
        "SpaceProvider",
    ),
    "perdure.spaces.space": ("Space",),
}
"""Module -> the public names that live there."""

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]  # one table, tested


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
