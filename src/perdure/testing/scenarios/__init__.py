"""The shipped scenarios: each is one promise, killed wherever a commit ends."""

from __future__ import annotations

from collections.abc import Mapping

from perdure.testing.scenarios.harness import HARNESS
from perdure.testing.scenarios.kernel import KERNEL
from perdure.testing.scenarios.tasks import TASKS
from perdure.testing.simulation import Scenario

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in (*KERNEL, *TASKS, *HARNESS)}
