"""Floor 7: what proves the rest, for users too: the scripted model, the simulation, campaigns, conformance suites.

    from perdure.testing import Scenario, ScriptedModel, explore, say

What is named here is the public face; names are loaded when they are first used. A backend of one's own is held to the
suite in ``perdure.testing.conformance``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.testing.faults import Fault as Fault
    from perdure.testing.loop import NoOutside as NoOutside
    from perdure.testing.loop import SimulationStuck as SimulationStuck
    from perdure.testing.model import Reply as Reply
    from perdure.testing.model import ScriptedModel as ScriptedModel
    from perdure.testing.model import call as call
    from perdure.testing.model import calls as calls
    from perdure.testing.model import defer as defer
    from perdure.testing.model import dialogue as dialogue
    from perdure.testing.model import echo as echo
    from perdure.testing.model import fail as fail
    from perdure.testing.model import say as say
    from perdure.testing.model import turns as turns
    from perdure.testing.normal import Records as Records
    from perdure.testing.normal import Rules as Rules
    from perdure.testing.simulation import Exploration as Exploration
    from perdure.testing.simulation import Host as Host
    from perdure.testing.simulation import Plan as Plan
    from perdure.testing.simulation import Scenario as Scenario
    from perdure.testing.simulation import World as World
    from perdure.testing.simulation import explore as explore
    from perdure.testing.simulation import simulate as simulate

_HOME = {
    "perdure.testing.faults": ("Fault",),
    "perdure.testing.loop": ("NoOutside", "SimulationStuck"),
    "perdure.testing.model": (
        "Reply",
        "ScriptedModel",
        "call",
        "calls",
        "defer",
        "dialogue",
        "echo",
        "fail",
        "say",
        "turns",
    ),
    "perdure.testing.normal": ("Records", "Rules"),
    "perdure.testing.simulation": ("Exploration", "Host", "Plan", "Scenario", "World", "explore", "simulate"),
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
