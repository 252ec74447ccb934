"""A workspace that was removed, or that another directory was put in the place of (rule S39)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from durable_kit import Nasty

from perdure.harness.harness import Harness
from perdure.kernel.errors import SessionFailed
from perdure.spaces.errors import SpaceUnavailable
from perdure.spaces.local import LocalSpaces
from perdure.testing.model import call


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Nasty]:
    world = Nasty(tmp_path)
    yield world
    await world.spaces.delete("one")


async def more(world: Nasty, harness: Harness) -> None:
    """The same calls again, in the process there is."""
    world.requests += 1
    submission = await (await harness.root()).submit("go", request_id=f"call-{world.requests}")
    assert (await submission.answer()).text == "done"


async def rebuilt(world: Nasty) -> None:
    """What the log has is what is there."""
    before = world.seen()
    await world.spaces.delete("one")
    await world.bash(":")
    assert world.seen() == before


async def test_a_call_may_put_another_directory_in_the_place_of_its_workspace_s39(world: Nasty) -> None:
    await world.bash("echo old > old; mkdir kept; echo a > kept/a")
    results = await world.call(
        call("bash", command='here=$PWD; cd ..; rm -rf "$here"; mkdir "$here"; echo new > "$here/new"'),
        call("bash", command="ls; echo more > more"),
        call("read", path="more"),
    )
    assert [text for _, text in results[1:]] == ["new\n", "more\n"]
    assert sorted(world.seen()) == [b"more", b"new"]
    await rebuilt(world)


async def test_a_call_that_removes_its_workspace_leaves_an_empty_one_s39(world: Nasty) -> None:
    await world.bash("echo old > old")
    results = await world.call(
        call("bash", command='rm -rf "$PWD"'),
        call("write", path="d/new", content="new"),
        call("bash", command="ls"),
    )
    assert results[2] == (None, "d\n")
    assert sorted(world.seen()) == [b"d", b"d/new"]
    await rebuilt(world)


async def test_a_directory_that_others_put_there_between_calls_is_the_next_image_s39_s145(world: Nasty) -> None:
    async with world.open(call("bash", command="echo agent >> agent; ls")) as harness:
        await more(world, harness)
        world.workspace.rename(world.folder / "moved")
        world.workspace.mkdir()
        (world.workspace / "mine").write_text("mine")
        await more(world, harness)
        assert (await world.results())[-1] == (None, "agent\nmine\n")
        assert (world.workspace / "agent").read_text() == "agent\n"
        assert (world.folder / "moved" / "agent").read_text() == "agent\n", "nothing was done there"
        await world.check()


async def test_a_workspace_that_others_removed_between_calls_comes_back_s39_s150(world: Nasty) -> None:
    async with world.open(call("bash", command="echo agent >> agent")) as harness:
        await more(world, harness)
        shutil.rmtree(world.workspace)
        await more(world, harness)
        assert (world.workspace / "agent").read_text() == "agent\nagent\n"
        assert await world.recovered() == ["restored"]
        await world.check()


async def test_a_workspace_of_the_users_that_went_away_ends_the_session_s39(world: Nasty, tmp_path: Path) -> None:
    """Nobody makes a directory where the user removed one, nor works in the one that was moved."""
    project, moved = tmp_path / "project", tmp_path / "moved"
    project.mkdir()
    await world.spaces.open("one", workspace=project)
    with pytest.raises(SessionFailed, match=r"SpaceUnavailable: .*is gone"):
        async with world.open(call("bash", command="echo agent >> agent")) as harness:
            await more(world, harness)
            project.rename(moved)
            await more(world, harness)
    assert not project.exists()
    assert (moved / "agent").read_text() == "agent\n"
    moved.rename(project)
    async with world.open(call("bash", command="echo agent >> agent")) as harness:
        await more(world, harness)
    assert (project / "agent").read_text() == "agent\n" * 3, "the call that found nothing is made good first"


async def test_a_file_in_the_place_of_a_workspace_is_named_with_what_to_do_s39(world: Nasty, tmp_path: Path) -> None:
    await world.spaces.open("one")
    await world.spaces.stop("one")
    world.workspace.rmdir()
    world.workspace.write_text("mine")
    with pytest.raises(SpaceUnavailable, match=r"one/workspace, .* is no directory any more; move what is there away"):
        await world.spaces.open("one")
    world.workspace.unlink()
    project = tmp_path / "project"
    project.mkdir()
    space = await world.spaces.open("two", workspace=project)
    project.rmdir()
    project.write_text("mine")
    with pytest.raises(SpaceUnavailable, match=r"is no directory any more; .* put the directory back"):
        await world.spaces.open("two")
    project.unlink()
    with pytest.raises(SpaceUnavailable, match="is gone; put the directory back where it was"):
        await world.spaces.open("two")
    project.mkdir()
    await space.delete()


async def test_a_second_directory_of_a_name_is_not_made_like_the_first_s172(world: Nasty, tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "one", tmp_path / "b" / "one"
    for directory in (first, second):
        directory.mkdir(parents=True)
        (directory / "mine").write_text(str(directory))
    here = world.spaces
    try:
        for place, directory in (("a", first), ("b", second)):
            world.spaces = LocalSpaces(tmp_path / "kept" / place)
            await world.spaces.open("one", workspace=directory)
            if directory == first:
                await world.bash("echo agent > agent")
                continue
            with pytest.raises(SessionFailed, match=r"has its files in .*/a/one, and .*/b/one would be made like it"):
                await world.bash("echo agent >> agent")
            assert [path.name for path in second.iterdir()] == ["mine"]
            assert (second / "mine").read_text() == str(second)
            first.rename(tmp_path / "moved")
            await world.bash("cat agent")  # One that was moved is another matter.
            assert (second / "mine").read_text() == str(first)
    finally:
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "moved").rename(first)  # else it cannot be deleted
        for place in ("a", "b"):
            await LocalSpaces(tmp_path / "kept" / place).delete("one")
        world.spaces = here


async def test_a_call_that_was_cut_off_after_it_moved_its_workspace_is_undone_s39_s157(world: Nasty) -> None:
    await world.bash("echo old > old")
    before = world.seen()
    script = 'here=$PWD; cd ..; mv "$here" aside; mkdir "$here"; echo new > "$here/new"'
    await world.cut_off(script)
    await world.undone(script)
    assert world.seen() == before
    await rebuilt(world)
