"""A durable Space under an agent: what becomes of calls and files when something ends in between (S130 to S162)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from durable_kit import World, go

from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.tool import tool
from perdure.kernel.contents import digest_of
from perdure.spaces.environment import CallOver
from perdure.testing.model import Call, Calls, Say, call


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.spaces.delete("one")


WAIT = "echo one >> log; while [ ! -e ../gate ]; do sleep 0.02; done; echo two >> log; echo said"


async def begun(world: World, *replies: Call | Calls | Say, line: str = "one") -> None:
    """A process whose call is under way when it ends."""
    async with world.open(*replies) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: line in world.lines())
        await world.crash()


async def test_a_command_that_still_runs_is_reattached_s152(world: World) -> None:
    await begun(world, call("bash", command=WAIT))
    async with world.open(call("bash", command=WAIT)) as harness:
        harness.resume()
        await world.until(lambda: any(r.type == "call_reattached" for r in world.reports))
        world.gate.touch()
        assert await go(harness) == "done"
        assert world.lines() == ["one", "two"]
        assert await world.results() == [(None, "said\n")]
        assert await world.recovered() == ["reattached"]
        await world.check()


async def test_a_command_that_ended_meanwhile_is_adopted_s153(world: World) -> None:
    await begun(world, call("bash", command=WAIT))
    world.gate.touch()
    await world.until(lambda: "two" in world.lines())
    await asyncio.sleep(0.3)  # until its shim has recorded the exit, which nothing here can see
    async with world.open(call("bash", command=WAIT)) as harness:
        assert await go(harness) == "done"
        assert world.lines() == ["one", "two"]
        assert await world.results() == [(None, "said\n")]
        assert await world.recovered() in (["adopted"], ["reattached"])
        await world.check()


async def test_a_tool_of_several_commands_is_undone_and_run_again_s157(world: World) -> None:
    await begun(world, call("twice"), line="two")
    world.gate.touch()
    async with world.open(call("twice")) as harness:
        assert await go(harness) == "done"
        assert world.lines() == ["one", "two"]
        assert await world.results() == [(None, "both")]
        assert await world.recovered() == ["rerun"]
        await world.check()


async def test_what_may_not_run_again_is_undone_and_interrupted_s159(world: World) -> None:
    await begun(world, call("outside"), line="out")
    async with world.open(call("outside")) as harness:
        assert await go(harness) == "done"
        assert world.lines() == []
        assert [code for code, _ in await world.results()] == ["interrupted"]
        assert await world.recovered() == ["interrupted"]
        await world.check()


async def test_a_command_that_acts_outside_is_undone_and_interrupted_s159(world: World) -> None:
    await begun(world, call("bash", command=WAIT, outside=True), line="one")
    await world.spaces.delete("one")
    async with world.open() as harness:
        assert await go(harness) == "done"
        assert world.lines() == []
        assert [code for code, _ in await world.results()] == ["interrupted"]
        assert await world.recovered() == ["restored", "interrupted"]
        await world.check()


async def test_a_command_that_acts_outside_is_gone_on_with_where_it_can_be_s153(world: World) -> None:
    await begun(world, call("bash", command=WAIT, outside=True), line="one")
    world.gate.touch()
    async with world.open() as harness:
        assert await go(harness) == "done"
        assert await world.results() == [(None, "said\n")]
        assert await world.recovered() in (["adopted"], ["reattached"])
        await world.check()


async def test_a_host_may_want_undone_calls_interrupted_s159(world: World) -> None:
    await begun(world, call("twice"), line="two")
    async with world.open(call("twice"), rerun="interrupt") as harness:
        assert await go(harness) == "done"
        assert world.lines() == []
        assert [code for code, _ in await world.results()] == ["interrupted"]
        await world.check()


async def test_a_daemon_that_dies_under_a_command_is_nobodys_result_s160(world: World) -> None:
    async with world.open(call("bash", command=WAIT)) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "one" in world.lines())
        await world.kill_daemon()
        await world.until(lambda: any(r.type == "call_reattached" for r in world.reports))
        world.gate.touch()
        assert await go(harness) == "done"
        assert world.lines() == ["one", "two"]
        assert await world.results() == [(None, "said\n")]
        await world.check()


async def test_a_lost_space_comes_back_from_the_log_s150(world: World) -> None:
    async with world.open(call("bash", command="echo kept > kept; ln -s kept link; mkdir -m 700 empty")) as harness:
        assert await go(harness) == "done"
        await world.check()
    await world.spaces.delete("one")
    async with world.open(call("bash", command="cat kept")) as harness:
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        assert (await world.results())[-1] == (None, "kept\n")
        assert os.readlink(world.workspace / "link") == "kept"
        assert (world.workspace / "empty").stat().st_mode & 0o777 == 0o700
        await world.check()


async def test_a_space_lost_under_a_call_is_restored_and_the_call_run_again_s150(world: World) -> None:
    async with world.open(call("bash", command="echo zero >> log"), call("bash", command=WAIT)) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "one" in world.lines())
        await world.spaces.delete("one")
        await world.until(lambda: world.lines() == ["zero", "one"])
        world.gate.touch()
        assert await go(harness) == "done"
        assert world.lines() == ["zero", "one", "two"]
        assert await world.recovered() == ["restored", "rerun"]
        await world.check()


async def test_what_others_change_between_calls_is_kept_and_committed_s145(world: World) -> None:
    async with world.open(call("write", path="a", content="agent\n")) as harness:
        assert await go(harness) == "done"
        (world.workspace / "mine").write_text("user\n")
        (world.workspace / "a").write_text("edited by hand\n")
        submission = await (await harness.root()).submit("go", request_id="two")
        await submission.answer()
        assert (world.workspace / "mine").read_text() == "user\n"
        assert (await world.state()).external == 2, "the first image, and this change"
        await world.check()


async def test_what_no_image_holds_any_more_is_reclaimed_s163(world: World) -> None:
    big = "head -c 300000 /dev/urandom > big"
    async with world.open(
        call("bash", command=big), call("bash", command=big), call("bash", command="rm big")
    ) as harness:
        assert await go(harness) == "done"
        await world.check()
    async with world.open(call("bash", command="echo a > a")) as harness:
        submission = await (await harness.root()).submit("go", request_id="two")
        await submission.answer()

        async def stored() -> int:
            return (await world.storage.size()).contents

        for _ in range(6000):
            if await stored() == 2:
                break
            await asyncio.sleep(0.01)
        assert await stored() == 2, "the two bytes of a"
        await world.check()


async def test_the_pin_of_a_call_that_ended_without_its_scope_is_let_go_s163(world: World) -> None:
    data = b"left behind"
    async with world.open(call("bash", command="echo a > a")) as harness:
        await harness.session.contents.put({digest_of(data): data}, pin=900_000)
        assert await go(harness) == "done"
        for _ in range(6000):
            if not await harness.session.contents.has([digest_of(data)]):
                break
            await asyncio.sleep(0.01)
        assert await harness.session.contents.pins() == []
        assert not await harness.session.contents.has([digest_of(data)])


async def test_a_handle_that_outlives_its_call_does_nothing_s114(world: World) -> None:
    kept: list[ExecutionEnvironment] = []

    @tool(effects="space")
    async def leak(environment: ExecutionEnvironment) -> str:
        """Leak."""
        await environment.write_file("a", b"in time")
        kept.append(environment)
        return "leaked"

    async with world.open(call("leak"), tools=(leak,)) as harness:
        assert await go(harness) == "done"
        for work in (kept[0].write_file("a", b"late"), kept[0].read_file("a"), kept[0].exec("echo late > a")):
            with pytest.raises(CallOver):
                await work
        assert world.lines("a") == ["in time"]
        await world.check()


async def test_a_call_that_ended_without_its_scope_is_undone_before_the_next_s157(world: World) -> None:
    await begun(world, call("twice"), line="two")
    async with world.open(call("twice"), restart_limit=1) as harness:
        root = await harness.root()
        harness.resume()
        await world.until(lambda: any(r.type == "task_blocked" for r in world.reports))
        await root.abort()
        assert [code for code, _ in await world.results()] == ["aborted"]
        submission = await root.submit("go", request_id="two")
        world.gate.touch()
        assert (await submission.answer()).text == "done"
        assert world.lines() == ["one", "two"], "of the second call alone"
        await world.check()


async def test_an_existing_tree_is_the_first_image_s145(world: World) -> None:
    space = await world.spaces.open("one")
    (world.workspace / "old").mkdir()
    (world.workspace / "old" / "file").write_text("there before\n")
    assert space.name == "one"
    async with world.open(call("bash", command="cat old/file")) as harness:
        assert await go(harness) == "done"
        assert await world.results() == [(None, "there before\n")]
        await world.check()


async def test_a_call_that_leaves_what_no_image_holds_is_undone_s140(world: World) -> None:
    async with world.open(call("bash", command="echo a > a; mkfifo pipe")) as harness:
        assert await go(harness) == "done"
        ((code, text),) = await world.results()
        assert code is None
        assert "special files" in text
        assert "pipe" in text
        assert list(world.workspace.iterdir()) == []
        await world.check()


async def test_a_change_made_during_an_undone_call_is_in_the_recovery_folder_s142(world: World) -> None:
    await begun(world, call("twice"), line="two")
    (world.workspace / "mine").write_text("typed while the agent worked\n")
    world.gate.touch()
    async with world.open(call("twice")) as harness:
        assert await go(harness) == "done"
        assert not (world.workspace / "mine").exists()
        (report,) = [r for r in world.reports if r.type == "space_recovery"]
        kept = [p for p in (world.folder / "spaces" / "one").rglob("mine") if "recovery" in str(p)]
        assert [p.read_text() for p in kept] == ["typed while the agent worked\n"]
        assert "moved to" in report.message
        await world.check()


async def test_two_conversations_have_the_space_one_after_the_other_s146(world: World) -> None:
    script = "n=$(cat n 2>/dev/null || echo 0); sleep 0.05; echo $((n + 1)) > n"
    async with world.open(call("bash", command=script), call("bash", command=script)) as harness:
        handles = [await harness.create_conversation() for _ in range(3)]
        submissions = [await handle.submit("go") for handle in handles]
        for submission in submissions:
            assert (await submission.answer()).text == "done"
        assert (world.workspace / "n").read_text() == "6\n"
        await world.check()


async def test_an_abort_stops_the_command_and_the_log_has_what_it_left_s161(world: World) -> None:
    async with world.open(call("bash", command=WAIT)) as harness:
        root = await harness.root()
        await root.submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "one" in world.lines())
        await root.abort()
        assert [code for code, _ in await world.results()] == ["aborted"]
        await world.check()
        world.gate.touch()
        submission = await root.submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        await world.check()
