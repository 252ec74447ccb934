"""Daemons for tests: each in a folder of its own, gone with all it runs when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spaced_wire import Driver, Space, hang_up

CONTAINMENTS = ("cgroup2", "cgroup1", "none")


@pytest.fixture
def make_space(tmp_path: Path) -> Iterator[Callable[..., Space]]:
    made: list[Space] = []

    def make(*words: str, name: str = "space", **more: object) -> Space:
        space = Space(tmp_path / name, *words, **more)  # type: ignore[arg-type]
        made.append(space)
        return space

    yield make
    hang_up()
    for space in made:
        space.down()
    hang_up()


@pytest.fixture
def space(make_space: Callable[..., Space]) -> Space:
    """A running daemon that can be held and killed at its crash points."""
    return make_space("--testing-crash-points").up()


@pytest.fixture
def driver(space: Space) -> Driver:
    """A driver that has advanced; the empty workspace is image 1."""
    driver = space.driver(1)
    driver.advance()
    driver.settle_first()
    return driver
