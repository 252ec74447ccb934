"""Fixtures of the task tests."""

from __future__ import annotations

import pytest
from task_world import World


@pytest.fixture
def world() -> World:
    return World()
