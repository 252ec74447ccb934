"""A durable Space where its calls, tools, host or store are not what they were (S114 to S161)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from durable_kit import World, go

from perdure.harness import calls as module
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.harness import Harness
from perdure.harness.tool import tool
from perdure.kernel.errors import SessionFailed, StaleEpochError
from perdure.kernel.session import Settled
from perdure.spaces.client import SpaceClient
from perdure.spaces.durable import durable_space
from perdure.spaces.environment import CallOver
from perdure.spaces.errors import SpaceConnectionLost, SpaceFull, SpaceUnavailable
from perdure.spaces.turns import Turns
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, say
from perdure.tools.coding import coding_tools

WORLDS: dict[str, World] = {}
"""By the folder of a test: tools have no other way to it."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = WORLDS[str(tmp_path)] = World(tmp_path)
    yield world
    del WORLDS[str(tmp_path)]
    await world.spaces.delete("one")


GAZING: list[int] = []


@tool(effects="read", replay="safe")
async def gaze(environment: ExecutionEnvironment) -> str:
    """It looks, and goes on looking."""
    await environment.stat("there")
    GAZING.append(1)
    await asyncio.Event().wait()
    return "never"


@tool(effects="read", replay="safe", name="gaze")
async def glance(environment: ExecutionEnvironment) -> str:
    """The same tool in a later release."""
    return "nothing" if await environment.stat("there") is None else "there"


@tool(effects="space", name="gaze")
async def grasp(environment: ExecutionEnvironment) -> str:
    """The same tool in a release in which it writes."""
    await environment.write_file("grasped", b"x")
    return "grasped"


async def gazing(world: World, *, at_once: int) -> None:
    """A process that ends with so many calls that only read under way."""
    GAZING.clear()
    async with world.open(calls(*(call("gaze") for _ in range(at_once))), tools=(gaze,)) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: len(GAZING) == at_once)
        await world.crash()


async def test_calls_that_read_with_a_tool_that_is_gone_end_interrupted_s146(world: World) -> None:
    await gazing(world, at_once=2)
    async with world.open(tools=()) as harness:
        assert await go(harness) == "done"
        assert [code for code, _ in await world.results()] == ["interrupted", "interrupted"]
        assert not [report for report in world.reports if report.type == "task_faulted"]
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"


async def test_calls_that_read_with_a_tool_that_writes_by_now_s146(world: World) -> None:
    await gazing(world, at_once=2)
    async with world.open(tools=(grasp,)) as harness:
        assert await go(harness) == "done"
        assert not [report for report in world.reports if report.type == "task_faulted"]
        assert [code for code, _ in await world.results()] == ["interrupted", "interrupted"]
        assert not (world.workspace / "grasped").exists()
        await world.check()


async def test_a_call_that_reads_is_aborted_by_the_next_process_s146(world: World) -> None:
    await gazing(world, at_once=1)
    async with world.open(tools=(glance,)) as harness:
        await (await harness.root()).abort()
        assert [code for code, _ in await world.results()] == ["aborted"]
        assert not [report for report in world.reports if report.type == "task_faulted"]


@tool(effects="space", adoptable=True)
async def run(script: str, environment: ExecutionEnvironment) -> str:
    """One command."""
    return (await environment.exec(script)).output.decode()


@tool(effects="space", adoptable=True, name="run")
async def run_in(script: str, where: str, environment: ExecutionEnvironment) -> str:
    """The same tool in a release that takes another argument."""
    return (await environment.exec(f"cd {where}; {script}")).output.decode()


@tool(effects="space", adoptable=True, name="run")
async def run_strictly(script: str, environment: ExecutionEnvironment) -> str:
    """The same tool in a release whose command is another."""
    return (await environment.exec(f"set -u; {script}")).output.decode()


WAIT = "echo one >> log; while [ ! -e ../gate ]; do sleep 0.02; done; echo two >> log; echo said"


async def running(world: World) -> None:
    async with world.open(call("run", script=WAIT), tools=(run,)) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "one" in world.lines())
        await world.crash()


async def test_a_call_that_its_tool_no_longer_takes_is_undone_s157(world: World) -> None:
    await running(world)
    async with world.open(call("run", script="true", where="."), tools=(run_in,)) as harness:
        assert await go(harness) == "done"
        assert [code for code, _ in await world.results()] == ["interrupted"]
        assert world.lines() == []
        assert await world.recovered() == ["interrupted"]
        world.gate.touch()
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        assert world.lines() == []
        assert (await world.state()).external == 1, "the tree that was found"
        await world.check()


async def test_a_command_that_its_tool_would_not_start_any_more_is_undone_s156(world: World) -> None:
    await running(world)
    world.gate.touch()
    async with world.open(tools=(run_strictly,)) as harness:
        assert await go(harness) == "done"
        assert await world.results() == [(None, "said\n")]
        assert world.lines() == ["one", "two"]
        assert (await world.recovered())[-1] == "rerun"
        await world.check()


@tool(effects="space")
async def hides_a_newer_driver(folder: str, environment: ExecutionEnvironment) -> str:
    """It takes a refusal for a file that cannot be written."""
    space = await WORLDS[folder].spaces.open("one")
    async with await space.connect() as other:
        await other.advance(log="another", epoch=1_000, writer="another")
        try:
            await environment.write_file("a", b"x")
        except Exception:
            return "nothing was written"
    return "written"


async def test_a_tool_hides_no_refusal_as_stale_s160(world: World) -> None:
    tools = (hides_a_newer_driver,)
    async with world.open(call("hides_a_newer_driver", folder=str(world.folder)), tools=tools) as harness:
        with pytest.raises(SessionFailed):
            await go(harness)
        assert isinstance(harness.session.failed, StaleEpochError)
    space = await world.spaces.open("one")
    async with await space.connect() as client:
        fence = (await client.status()).fence
        assert fence is not None
        assert fence.log == "another"


async def test_a_restore_that_is_begun_anew_overwrites_nothing_it_moved_s142(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.open(call("bash", command="echo kept > kept")) as harness:
        assert await go(harness) == "done"
    mine = world.workspace / "mine"
    apply, tries = SpaceClient.restore_apply, 0

    async def cut_off(self: SpaceClient, *args: object, **options: object) -> object:
        nonlocal tries
        tries += 1
        done = await apply(self, *args, **options)  # pyright: ignore[reportArgumentType]
        if tries == 1:
            mine.write_text("second\n")
            await world.kill_daemon()
            raise SpaceConnectionLost("closed", "cut off")
        return done

    monkeypatch.setattr(SpaceClient, "restore_apply", cut_off)
    async with world.open(call("bash", command="cat kept; mkfifo pipe; echo first > mine")) as harness:
        # Undone, since no image holds the pipe; and whoever has the Space after the cut undoes it again.
        monkeypatch.setattr(harness.session.clock, "wall", lambda: 1_700_000_000_000)
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
    kept = [p for p in (world.folder / "spaces" / "one").rglob("mine") if "recovery" in str(p)]
    assert sorted({p.read_text() for p in kept}) == ["first\n", "second\n"]
    assert [r for r in world.reports if r.type == "space_recovery" and "cut off" in r.message]


async def test_a_store_from_a_backup_takes_nothing_of_its_later_life_for_the_users_s148(world: World) -> None:
    async with world.open(call("bash", command="echo old > log")) as harness:
        assert await go(harness) == "done"
    backup = world.storage.snapshot()
    # A later life of it is cut off under a call.
    async with world.open(call("bash", command=WAIT)) as harness:
        await (await harness.root()).submit("go", request_id="two")
        harness.resume()
        await world.until(lambda: "one" in world.lines())
        await world.crash()
    world.storage = backup
    world.gate.touch()
    async with world.open(call("bash", command="cat log")) as harness:
        submission = await (await harness.root()).submit("go", request_id="three")
        assert (await submission.answer()).text == "done"
        assert (await world.results())[-1] == (None, "old\n")
        assert (await world.state()).external == 1, "the tree that was found"
        await world.check()


def model() -> ScriptedModel:
    return ScriptedModel({"go": [call("write", path="a", content="x"), say("done")]})


async def test_one_environment_is_of_one_open_session_s146(world: World) -> None:
    environment = durable_space(await world.spaces.open("one"))
    both = [
        Harness.open(MemoryStorage(), models=model(), extensions=[coding_tools()], environment=environment)
        for _ in range(2)
    ]
    async with both[0] as first:
        assert await go(first) == "done"
        async with both[1] as second:
            with pytest.raises(SessionFailed):
                await go(second)
            assert isinstance(second.session.failed, SpaceUnavailable)
        os.remove(world.workspace / "a")
        submission = await (await first.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        assert (world.workspace / "a").read_text() == "x"


async def test_who_is_cancelled_as_its_turn_comes_has_none_s146() -> None:
    turns = Turns()
    await turns.take(1, shared=False)
    waiting = asyncio.create_task(turns.take(2, shared=False))
    await asyncio.sleep(0)  # until it waits
    waiting.cancel()
    turns.give(1)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(turns.take(3, shared=False), 1)


@tool(effects="space")
async def leaves_code(folder: str, environment: ExecutionEnvironment) -> str:
    """It is over, and its code is not."""
    LEFT[folder] = environment
    await environment.write_file("a", b"of the call")
    return "over"


LEFT: dict[str, ExecutionEnvironment] = {}


async def test_code_that_a_call_left_does_nothing_once_it_is_captured_s114(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scan = str(world.folder), SpaceClient.scan
    raised: list[Exception] = []

    async def scanned(self: SpaceClient, **options: bool) -> object:
        done = await scan(self, **options)
        if options.get("freeze"):
            try:
                await LEFT[folder].write_file("a", b"of nobody")
            except Exception as error:
                raised.append(error)
        return done

    monkeypatch.setattr(SpaceClient, "scan", scanned)
    async with world.open(call("leaves_code", folder=folder), tools=(leaves_code,)) as harness:
        assert await go(harness) == "done"
        assert [type(error) for error in raised] == [CallOver]
        assert (world.workspace / "a").read_text() == "of the call"


@tool(effects="space")
async def cut_off_once(folder: str, environment: ExecutionEnvironment) -> str:
    """Code of its first attempt asks on under the second."""
    world = WORLDS[folder]
    if folder not in LEFT:
        LEFT[folder] = environment
        await world.kill_daemon()
        await environment.write_file("a", b"x")
    with pytest.raises(CallOver):
        await LEFT[folder].write_file("a", b"of nobody")
    await environment.write_file("a", b"x")
    return "written"


async def test_code_of_an_attempt_that_was_cut_off_takes_nothing_from_the_next_s114(world: World) -> None:
    async with world.open(call("cut_off_once", folder=str(world.folder)), tools=(cut_off_once,)) as harness:
        assert await go(harness) == "done"
        assert await world.results() == [(None, "written")]
        assert await world.recovered() == ["rerun"]
        await world.check()


async def test_a_full_disk_before_a_call_is_told_to_the_model_s140(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    async def scanned(self: SpaceClient, **options: bool) -> object:
        if full:
            raise SpaceFull("scan", "no_space", "the disk is full")
        return await scan(self, **options)

    scan = SpaceClient.scan
    monkeypatch.setattr(SpaceClient, "scan", scanned)
    write = call("write", path="a", content="x")
    async with world.open(write) as harness:
        assert await go(harness) == "done"
        assert [code for code, _ in await world.results()] == ["tool_unavailable"]
        full = False
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        await world.check()


async def test_a_full_disk_after_a_call_undoes_it_s140(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scanned(self: SpaceClient, **options: bool) -> object:
        if options.get("freeze"):
            raise SpaceFull("scan", "no_space", "the disk is full")
        return await scan(self, **options)

    scan = SpaceClient.scan
    monkeypatch.setattr(SpaceClient, "scan", scanned)
    async with world.open(call("write", path="a", content="x")) as harness:
        assert await go(harness) == "done"
        ((_, text),) = await world.results()
        assert "the disk is full" in text
        assert "undone" in text
        await world.check()


async def test_two_environments_of_one_space_in_a_session_are_refused_s146(world: World) -> None:
    space = await world.spaces.open("one")
    async with Harness.open(
        MemoryStorage(), models=model(), extensions=[coding_tools()], environment=lambda _: durable_space(space)
    ) as harness:
        with pytest.raises(SessionFailed):
            submission = await (await harness.root()).submit("go")
            await submission.answer()
            submission = await (await harness.root()).submit("go")
            await submission.answer()
        assert isinstance(harness.session.failed, SpaceUnavailable)


async def test_a_store_from_a_backup_goes_on_above_the_floor_of_its_later_life_s148(world: World) -> None:
    async with world.open(call("bash", command="echo old > log")) as harness:
        assert await go(harness) == "done"
    backup = world.storage.snapshot()
    later = [call("bash", command=f"echo {number} > log") for number in range(5)]
    async with world.open(*later) as harness:
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
    world.storage = backup
    async with world.open(call("bash", command="cat log; echo new > log")) as harness:
        submission = await (await harness.root()).submit("go", request_id="three")
        assert (await submission.answer()).text == "done"
        assert (await world.results())[-1] == (None, "old\n")
        assert world.lines() == ["new"]
        await world.check()


async def test_a_call_open_in_a_backup_runs_again_above_the_floor_of_its_later_life_s148(world: World) -> None:
    async with world.open(call("twice")) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "two" in world.lines())
        await world.crash()
    backup = world.storage.snapshot()
    world.gate.touch()
    async with world.open(call("twice"), *(call("bash", command="echo later >> log") for _ in range(5))) as harness:
        assert await go(harness) == "done"
    world.storage = backup
    async with world.open(call("twice")) as harness:
        assert await go(harness) == "done"
        assert await world.results() == [(None, "both")]
        assert world.lines() == ["one", "two"]
        await world.check()


async def test_a_result_that_cannot_be_committed_keeps_no_turn_s146(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, broken = module.write_result, True

    async def written(*args: Any) -> None:
        nonlocal broken
        if broken:
            broken = False
            raise ValueError("it cannot be written")
        await write(*args)

    async with world.open(call("bash", command=WAIT)) as harness:
        root = await harness.root()
        await root.submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "one" in world.lines())
        monkeypatch.setattr(module, "write_result", written)
        await root.abort()
        world.gate.touch()
        submission = await root.submit("go", request_id="two")
        assert (await asyncio.wait_for(submission.answer(), 10)).text == "done"
        assert world.lines() == ["one", "two"], "of the second call alone"
        await world.check()


async def test_a_session_that_closes_at_an_outcome_leaves_the_space_at_its_image_s136(world: World) -> None:
    closing: list[asyncio.Task[Any]] = []
    async with world.open(call("write", path="a", content="x")) as harness:

        def observe(settled: Settled) -> None:
            if not closing and any(record.kind == "pi.tool" and not record.live for record in settled.batch.tasks):
                closing.append(asyncio.create_task(harness.close()))

        harness.session.observe(observe)
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: bool(closing))
        await closing[0]
    (world.workspace / "a").write_text("of the user")
    async with world.open(call("bash", command="cat a")) as harness:
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        assert (await world.results())[-1] == (None, "of the user")
        await world.check()
