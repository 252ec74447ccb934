"""Whose turn it is in a durable Space, and what an abort leaves of a call whose process had ended (S146, S161)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from durable_kit import World, alive, go

from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.tool import tool
from perdure.testing.model import call, calls


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.spaces.delete("one")


async def test_calls_that_only_read_overlap_and_one_that_writes_waits_for_them_s146(world: World) -> None:
    seen: list[str] = []
    both_in = asyncio.Event()

    @tool(effects="read", replay="safe")
    async def reading(environment: ExecutionEnvironment) -> str:
        """Wait until another reads too."""
        text = (await environment.read_file("there")).decode()
        seen.append("reads")
        if seen.count("reads") == 2:
            both_in.set()
        await both_in.wait()
        seen.append("has read")
        return text

    @tool(effects="space")
    async def writing(environment: ExecutionEnvironment) -> str:
        """Write."""
        seen.append("writes")
        await environment.write_file("there", b"then")
        return "written"

    first = call("bash", command="printf now > there")
    round = calls(call("reading"), call("reading"), call("writing"))
    async with world.open(first, round, tools=(reading, writing)) as harness:
        async with asyncio.timeout(60):
            assert await go(harness) == "done"
        assert sorted(text for _, text in (await world.results())[1:]) == ["now", "now", "written"]
        assert seen == ["reads", "reads", "has read", "has read", "writes"]
        await world.check()


async def test_a_call_that_is_aborted_once_its_process_has_ended_is_undone_s161(world: World) -> None:
    """Its command still runs, and could be gone on with."""
    command = "echo $$ > ../pid; echo one >> log; while [ ! -e ../gate ]; do sleep 0.02; done; echo two >> log"
    replies = call("bash", command="echo zero >> log"), call("bash", command=command)
    async with world.open(*replies) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "one" in world.lines())
        await world.crash()
    pid = int((world.workspace.parent / "pid").read_text())
    async with world.open(*replies) as harness:
        await (await harness.root()).abort()
        assert [code for code, _ in await world.results()] == [None, "aborted"]
        assert world.lines() == ["zero"]
        assert not alive(pid)
        assert await world.recovered() == ["interrupted"]
        await world.check()
