"""Telemetry under kills: the record comes to the same as without it, and every span of a life that ended well has ended
(rules H281, H283, H289)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from perdure import Harness
from perdure.kernel.storage import Storage
from perdure.testing.scenarios import SCENARIOS
from perdure.testing.simulation import Plan, edges, run_reference, simulate
from telemetry.otel_kit import Told, attributes_of

NAMES = [
    "abort",
    "failing-tools",
    "follow-up",
    "gated",
    "model-error",
    "parallel-tools",
    "poisoned-run",
    "retry",
    "steer",
    "turn",
    "unsafe-tool",
]


class Lives:
    """In place of ``Harness.open``: the same, with a back end for each life."""

    def __init__(self) -> None:
        self.all: list[Told] = []
        self.closed: list[Told] = []
        self._open = Harness.open

    @asynccontextmanager
    async def open(self, storage: Storage, **options) -> AsyncGenerator[Harness]:
        told = Told()
        self.all.append(told)
        try:
            async with self._open(storage, telemetry=told.telemetry, **options) as harness:
                yield harness
        except Exception:
            self.closed.append(told)
            raise
        self.closed.append(told)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_told_changes_nothing_and_ends_wherever_it_is_killed_h281_h283_h289(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = SCENARIOS[name]
    plain = run_reference(scenario)
    lives = Lives()
    monkeypatch.setattr(Harness, "open", staticmethod(lives.open))
    told = simulate(scenario, Plan(scenario=name), reference=plain)
    assert told.ok, told
    assert told.lives[0].commits == plain.lives[0].commits, "no commit more"
    for fault in edges(plain.lives[0].commits):
        lives.all.clear()
        lives.closed.clear()
        found = simulate(scenario, Plan(scenario=name, faults=(fault,)), reference=plain)
        assert found.ok, found
        assert all(told.spans.open == [] for told in lives.closed), fault
        assert lives.closed, "the last life comes to an end"
        traces: defaultdict[tuple[object, object], set[int]] = defaultdict(set)
        for told in lives.all:
            for span in told.named("invoke_agent"):
                attributes = attributes_of(span)
                assert span.context is not None
                traces[attributes["perdure.log.id"], attributes["perdure.task.id"]].add(span.context.trace_id)
        assert all(len(ids) == 1 for ids in traces.values()), "one trace a run, over all its lives"
        assert len({next(iter(ids)) for ids in traces.values()}) == len(traces)
