"""What a durable Space does when its daemon goes away under calls that read, or that hide it (S146, S149, S160)."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from durable_kit import World, go

from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.tool import tool
from perdure.kernel.errors import SessionFailed
from perdure.spaces.local import LocalSpaces
from perdure.testing.model import call, calls

WORLDS: dict[str, World] = {}
"""By the folder of a test: tools have no other way to it."""


@tool(effects="space")
async def hides(folder: str, environment: ExecutionEnvironment) -> str:
    """It takes a Space that is gone for a file that is not there."""
    world = WORLDS[folder]
    await environment.write_file("written", b"x")
    if not (world.folder / "killed").exists():
        (world.folder / "killed").touch()
        await world.kill_daemon()
    try:
        return (await environment.read_file("written")).decode()
    except Exception:
        return "nothing is there"


@tool(effects="read", replay="safe")
async def peeks(folder: str, environment: ExecutionEnvironment) -> str:
    """The same, of a tool that only reads."""
    world = WORLDS[folder]
    if not (world.folder / "killed").exists():
        (world.folder / "killed").touch()
        await world.kill_daemon()
    try:
        return (await environment.read_file("there")).decode()
    except Exception:
        return "nothing is there"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = WORLDS[str(tmp_path)] = World(tmp_path)
    yield world
    del WORLDS[str(tmp_path)]
    await world.spaces.delete("one")


async def test_a_read_that_lost_the_space_is_nobodys_result_s160(world: World) -> None:
    async with world.open(call("hides", folder=str(world.folder)), tools=(hides,)) as harness:
        assert await go(harness) == "done"
        assert await world.results() == [(None, "x")]
        assert await world.recovered() == ["rerun"]
        await world.check()


async def test_nor_is_it_of_a_call_that_only_reads_s160(world: World) -> None:
    first = call("bash", command="printf here > there")
    async with world.open(first, call("peeks", folder=str(world.folder)), tools=(peeks,)) as harness:
        assert await go(harness) == "done"
        assert (await world.results())[1:] == [(None, "here")]
        await world.check()


async def test_readers_at_once_take_the_space_once_s146(world: World) -> None:
    async with world.open(call("bash", command="printf here > there")) as harness:
        assert await go(harness) == "done"
        before = (await world.state()).connected
    async with world.open(calls(*(call("read", path="there") for _ in range(4)))) as harness:
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        assert [text for _, text in (await world.results())[1:]] == ["here"] * 4
        assert (await world.state()).connected == before + 1
        await world.check()


async def test_a_space_that_is_lost_as_it_is_opened_is_opened_again_s149(world: World) -> None:
    """Twice in a row: by a signal to its daemon before that serves, and by a folder that goes away."""
    starts = world.folder / "starts"
    python = world.folder / "python"
    python.write_text(
        f"""#!/bin/sh
echo >> {starts}
case $(wc -l < {starts}) in
2) kill -9 $$ ;;
3) mv {world.folder}/spaces/one {world.folder}/lost; exec {sys.executable} "$@" ;;
esac
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    world.spaces = LocalSpaces(world.folder / "spaces", python=str(python))
    first = call("bash", command="echo kept > kept")
    async with world.open(first, call("peeks", folder=str(world.folder)), tools=(peeks,)) as harness:
        assert await go(harness) == "done"
        assert len(starts.read_text()) == 4, "the first, the killed, the lost, and one that served"
        assert world.lines("kept") == ["kept"]
        assert await world.recovered() == ["restored"]
        await world.check()


async def test_a_daemon_that_always_dies_as_it_starts_fails_the_session_s149(world: World) -> None:
    """With what there is to know; the next open finds everything."""
    python = world.folder / "python"
    python.write_text(f'#!/bin/sh\n[ -e {world.folder}/killed ] && kill -9 $$\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    world.spaces = LocalSpaces(world.folder / "spaces", python=str(python))
    async with world.open(call("hides", folder=str(world.folder)), tools=(hides,)) as harness:
        with pytest.raises(SessionFailed, match=r"lost 6 times in a row, .* by signal 9 \(Killed\), before it served"):
            await go(harness)
    world.spaces = LocalSpaces(world.folder / "spaces")
    async with world.open(call("hides", folder=str(world.folder)), tools=(hides,)) as harness:
        assert await go(harness) == "done"
        assert await world.results() == [(None, "x")]
        await world.check()
