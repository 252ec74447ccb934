"""Stores that were copied, and went on apart from each other, in the Space of one of them (S27, S135, S148)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from durable_kit import Nasty, World

from perdure.spaces.local import LocalSpaces


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Nasty]:
    world = Nasty(tmp_path)
    yield world
    await world.spaces.delete("one")


async def elsewhere(world: World) -> LocalSpaces:
    """From here on the store has a Space of its own; the one it had."""
    here = world.spaces
    world.spaces = LocalSpaces(world.folder / "elsewhere")
    return here


async def back(world: World, here: LocalSpaces) -> None:
    await world.spaces.delete("one")
    world.spaces = here


async def test_a_copy_that_worked_elsewhere_up_to_the_same_number_is_restored_s148(world: Nasty) -> None:
    """Its Space stands at an image of that number, which another life of the log made."""
    await world.bash("echo both > log; echo gone > gone")
    copy = world.storage.snapshot()
    await world.bash("echo original > log; echo mine > mine")
    number = await image(world)
    world.storage = copy
    here = await elsewhere(world)
    await world.bash("rm gone; echo copy > log")
    assert await image(world) == number, "or this shows nothing"
    await back(world, here)
    assert await world.bash("cat log; ls") == "copy\nlog\n"
    async with world.open():
        assert await world.recovered() == ["restored", "restored"], "elsewhere, and here"
        await world.check()


async def test_a_call_that_was_open_in_a_copy_is_not_taken_for_one_of_its_space_s150(world: Nasty) -> None:
    """Generation, boot and number are those of its intent; the image is another life's."""
    await world.bash("echo both > log")
    copy = world.storage.snapshot()
    await world.bash("echo original > log")
    world.storage = copy
    here = await elsewhere(world)
    await world.bash("echo copy > log")
    await world.cut_off("echo half >> log")
    await back(world, here)
    await world.undone("echo half >> log")
    assert world.lines() == ["copy"]


async def image(world: World) -> int:
    """The number of the log's image."""
    async with world.open():
        return (await world.state()).image
