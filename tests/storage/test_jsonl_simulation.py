"""Whole programs on a JSONL store, on the simulated machine: killed at every commit, each refused (rules P2, P5).

The threads of the store are steps of the simulated loop here; its files are real.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from perdure.storage import jsonl, reading
from perdure.storage.jsonl import JsonlStorage
from perdure.testing.scenarios import SCENARIOS
from perdure.testing.simulation import explore

T = TypeVar("T")


class _Steps:
    """As ``worker.Worker``, on the loop itself."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()

    def post(self, job: Callable[[], None]) -> None:
        self._loop.call_soon(job)

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(job)
        return future

    def stop(self) -> None:
        """There is nothing to stop."""


class _Crashable(JsonlStorage):
    places = itertools.count()

    def __init__(self, root: Path) -> None:
        super().__init__(root / str(next(self.places)))
        self.root = root

    def snapshot(self) -> _Crashable:
        """What a kill leaves; this one is let go of, as the system would."""
        copy = _Crashable(self.root)
        if Path(self.path).exists():
            shutil.copytree(self.path, copy.path)
        if self._opening is not None and self._opening.lock is not None:
            self._opening.live.replace(None)
            self._opening.lock.drop()
        shutil.rmtree(self.path, ignore_errors=True)
        return copy


@pytest.mark.parametrize("name", ["parallel-tools", "delete-busy"])
def test_a_program_comes_to_the_same_end_wherever_it_is_killed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "Worker", _Steps)
    monkeypatch.setattr(reading, "MAIL_POLL_SECONDS", 5.0)
    scenario = replace(SCENARIOS[name], storage=lambda: _Crashable(tmp_path))
    exploration = explore(scenario, twice=2, schedules=1)
    exploration.check()
    assert exploration.reference.lives[0].commits > 5
