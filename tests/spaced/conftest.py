"""Daemons for tests: each in a folder of its own, gone with all it runs when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spaced_wire import Driver, Space, Wire, hang_up


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


@pytest.fixture(scope="module")
def shared_space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    """One daemon for all tests of a module that leave it as it was."""
    space = Space(tmp_path_factory.mktemp("shared"), "--testing-crash-points").up()
    yield space
    space.down()


@pytest.fixture
def shared(shared_space: Space) -> Iterator[Driver]:
    """A driver of the shared daemon, of an epoch of its own; the workspace is its log's image 1."""
    wire = Wire(shared_space.address)
    epoch = (wire.hello["fence"] or {"epoch": 0})["epoch"] + 1
    driver = shared_space.driver(epoch, log=f"log-{epoch}")
    driver.advance()
    driver.settle_first()
    yield driver
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
