"""The shipped scenarios: each is one promise, killed wherever a commit ends."""

from __future__ import annotations

from collections.abc import Mapping

from perdure.testing.scenarios.approvals import APPROVALS
from perdure.testing.scenarios.chance import CHANCE
from perdure.testing.scenarios.clients import CLIENTS
from perdure.testing.scenarios.compaction import COMPACTION
from perdure.testing.scenarios.control import CONTROL
from perdure.testing.scenarios.deferral import DEFERRAL
from perdure.testing.scenarios.deletion import DELETION
from perdure.testing.scenarios.forks import FORKS
from perdure.testing.scenarios.hooks import HOOKS
from perdure.testing.scenarios.kernel import KERNEL
from perdure.testing.scenarios.limits import LIMITS
from perdure.testing.scenarios.mcp import MCP
from perdure.testing.scenarios.nested import NESTED
from perdure.testing.scenarios.people import PEOPLE
from perdure.testing.scenarios.runs import RUNS
from perdure.testing.scenarios.subagents import SUBAGENTS
from perdure.testing.scenarios.tasks import TASKS
from perdure.testing.scenarios.tools import TOOLS
from perdure.testing.simulation import Scenario

ALL = (
    *KERNEL,
    *DELETION,
    *FORKS,
    *TASKS,
    *RUNS,
    *DEFERRAL,
    *CLIENTS,
    *LIMITS,
    *COMPACTION,
    *TOOLS,
    *APPROVALS,
    *CONTROL,
    *PEOPLE,
    *NESTED,
    *SUBAGENTS,
    *MCP,
    *HOOKS,
    *CHANCE,
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in ALL}
"""By name."""

assert len(SCENARIOS) == len(ALL), "each scenario has a name of its own"
