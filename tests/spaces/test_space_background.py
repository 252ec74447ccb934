"""Commands in the background of a Space (rules S42, S168 to S171): they outlive calls, sessions, drivers and daemons.

What brings the workspace back kills them, and that is told.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from durable_kit import World
from space_kit import CALL, Daemon, advanced, daemon, key

from perdure.harness.environment import BackgroundCommand, CommandNotStarted, ExecutionEnvironment, NoSuchCommand
from perdure.harness.harness import Harness
from perdure.harness.tool import tool
from perdure.kernel.json import JsonValue
from perdure.spaces.background import GONE, KILLED
from perdure.spaces.client import SpaceClient
from perdure.spaces.environment import SpaceEnvironment
from perdure.spaces.errors import KeyBelowFloor
from perdure.spaces.wire import ExecKey, Limits, Place
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.model import Call, call
from perdure.tools import background, in_background

SERVE = "echo $$ > ../pid; echo ready; while [ ! -e ../gate ]; do sleep 0.02; done; echo over"


@tool(effects="space", adoptable=True)
async def held(environment: ExecutionEnvironment) -> str:
    """Starts a command in the background, and is not over before the gate is there."""
    started = await environment.start_background(f"echo one >> log; {SERVE}")
    while await environment.stat("open") is None:
        await asyncio.sleep(0.01)
    return started.id


def serve() -> Call:
    return call("bash", command=SERVE, background=True)


def output(**arguments: JsonValue) -> Call:
    return call("bash_output", **arguments)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.spaces.delete("one")


@pytest.fixture
async def made() -> AsyncIterator[Daemon]:
    async with daemon() as made:
        yield made


@asynccontextmanager
async def taken(made: Daemon, *, epoch: int, keep: Sequence[ExecKey]) -> AsyncIterator[SpaceClient]:
    """A later driver's client."""
    async with await SpaceClient.connect(made.address) as client:
        await client.advance(log="log", epoch=epoch, writer=f"w{epoch}", keep=keep)
        yield client


async def said(world: World, harness: Harness, *, request_id: str = "one") -> list[str]:
    submission = await (await harness.root()).submit("go", request_id=request_id)
    assert (await submission.answer()).text == "done"
    return [text for _, text in await world.results()]


def alive(world: World) -> bool:
    pid = (world.workspace.parent / "pid").read_text().strip()
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


READY: dict[str, JsonValue] = {"id": "1", "offset": 0, "wait": 60, "until": "output"}
RUNNING = "ready\n[1: running; bytes 0 to 6 of 6. Read on with offset=6.]"


async def test_it_outlives_its_call_and_is_read_and_stopped_by_later_ones_s168(world: World) -> None:
    async with world.open(serve(), output(**READY), output(), call("bash_stop", id="1"), output(id="1")) as harness:
        started, ready, listed, stopped, last = await said(world, harness)
        assert started.startswith("Started in the background with the id 1.")
        assert ready == RUNNING
        assert listed == f"1  running  {SERVE}"
        assert stopped == "1: stopped (as asked)."
        assert last == "ready\n[1: stopped (as asked); bytes 0 to 6 of 6.]"
        assert not alive(world)
        await world.check()


async def test_it_outlives_its_session_and_its_end_is_found_s169(world: World) -> None:
    async with world.open(serve(), output(**READY)) as harness:
        assert (await said(world, harness))[1] == RUNNING
    assert alive(world)
    world.gate.touch()
    async with world.open(output(id="1", offset=6, wait=60)) as harness:
        assert (await said(world, harness, request_id="two"))[
            2
        ] == "over\n[1: exited with code 0; bytes 6 to 11 of 11.]"
        await world.check()


async def test_it_outlives_a_killed_driver_and_a_killed_daemon_s169(world: World) -> None:
    async with world.open(serve(), output(**READY)) as harness:
        await said(world, harness)
        await world.crash()
    await world.kill_daemon()
    async with world.open(
        output(id="1", offset=0), call("write", path="f", content="x"), output(id="1", offset=0)
    ) as harness:
        assert (await said(world, harness, request_id="two"))[2::2] == [RUNNING, RUNNING]
        assert alive(world)
        await world.check()


async def test_a_restore_kills_it_and_that_is_told_s170(world: World) -> None:
    for_ever = call("bash", command="echo $$ > ../pid; echo ready; exec sleep 600", background=True)
    async with world.open(for_ever, output(**READY)) as harness:
        await said(world, harness)
    async with world.open(call("twice")) as harness:
        await (await harness.root()).submit("go", request_id="two")
        await world.until(lambda: "two" in world.lines())
        await world.crash()
    world.gate.touch()
    async with world.open(call("twice"), output(id="1")) as harness:
        assert (await said(world, harness, request_id="two"))[-1] == f"ready\n[1: lost ({KILLED}); bytes 0 to 6 of 6.]"
        assert not alive(world)
        await world.check()


async def test_with_its_space_it_is_gone_s170(world: World) -> None:
    async with world.open(serve(), output(**READY)) as harness:
        await said(world, harness)
    await world.spaces.delete("one")
    async with world.open(output(id="1"), call("bash_stop", id="1"), output(id="9")) as harness:
        *_, seen, stopped, none = await said(world, harness, request_id="two")
        assert seen == f"[1: lost ({GONE}); no output.]"
        assert stopped == f"1: lost ({GONE})."
        assert none.startswith("no command in the background has the id '9'")


async def test_a_call_that_is_cut_off_while_it_starts_one_finds_it_again_s168(world: World) -> None:
    tools = (held,)
    async with world.open(call("held"), tools=tools) as harness:
        await (await harness.root()).submit("go", request_id="one")
        await world.until(lambda: "one" in world.lines())
        await world.crash()
    async with world.open(call("held"), output(**READY), tools=tools) as harness:
        harness.resume()
        await world.until(lambda: any(report.type == "call_reattached" for report in world.reports))
        (world.workspace / "open").touch()
        assert await said(world, harness) == ["1", RUNNING]
        assert world.lines() == ["one"], "it was started once"
        assert [note["id"] for note in (await world.state()).background] == ["1"]
        await world.check()


@pytest.mark.parametrize("killed", [False, True])
async def test_a_stop_that_is_cut_off_stops_that_one_alone_s170(
    world: World, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Nothing of it has to be undone: it is done again."""
    real = SpaceEnvironment.stop_background
    reached = asyncio.Event()

    async def cut_off(self: SpaceEnvironment, id: str) -> BackgroundCommand:
        if killed:
            await real(self, id)
        reached.set()
        return await asyncio.Future()

    calls = [call("bash", command="sleep 600", background=True), serve(), call("bash_stop", id="1")]
    with monkeypatch.context() as cutting:
        cutting.setattr(SpaceEnvironment, "stop_background", cut_off)
        async with world.open(*calls, output()) as harness:
            await (await harness.root()).submit("go", request_id="one")
            await asyncio.wait_for(reached.wait(), 60)
            await world.crash()
    async with world.open(*calls, output()) as harness:
        *_, stopped, listed = await said(world, harness)
        assert stopped == "1: stopped (as asked)."
        assert listed == f"1  stopped (as asked)  sleep 600\n2  running  {SERVE}"
        assert await world.recovered() == ["not_started"]
        await world.check()


async def test_what_an_undone_call_started_is_in_no_log_s168(world: World) -> None:
    @tool(effects="world", replay="unsafe")
    async def lost(environment: ExecutionEnvironment) -> str:
        await environment.start_background(f"echo one >> log; {SERVE}")
        return await held(environment)

    async with world.open(call("lost"), tools=(lost,)) as harness:
        await (await harness.root()).submit("go", request_id="one")
        await world.until(lambda: "one" in world.lines())
        await world.crash()
    async with world.open(call("lost"), output(), tools=(lost,)) as harness:
        assert (await said(world, harness))[-1] == "[None.]"
        assert not alive(world)
        await world.check()


async def test_calls_go_on_beside_one_that_changes_files_all_the_time_s171(world: World) -> None:
    noise = call("bash", command="while :; do echo noise >> noise; done", background=True)
    more = [call("write", path=f"f{number}", content="x") for number in range(5)]
    async with world.open(noise, *more, call("bash_stop", id="1"), call("bash", command="ls")) as harness:
        await said(world, harness)
        assert [code for code, _ in await world.results()] == [None] * 8
        assert (await world.state()).external > 1, "what it wrote between calls is an image of its own"
        await world.check()


@pytest.mark.parametrize("number", range(1, 25))
async def test_killed_after_any_commit_it_is_started_once_and_what_is_told_is_true_s168(
    world: World, number: int
) -> None:
    serve = call("bash", command=f"echo one >> log; {SERVE}", background=True)
    replies = (serve, output(**READY), call("write", path="f", content="x"), output(), call("bash_stop", id="1"))
    async with world.open(*replies) as harness:
        reached = asyncio.Event()
        settled = 0

        def count(_: object) -> None:
            nonlocal settled
            settled += 1
            if settled >= number:
                reached.set()

        harness.session.observe(count)
        submission = await (await harness.root()).submit("go", request_id="one")
        answer = asyncio.ensure_future(submission.answer())
        killed = asyncio.ensure_future(reached.wait())
        await asyncio.wait({answer, killed}, return_when=asyncio.FIRST_COMPLETED)
        await world.crash()
        await asyncio.wait({answer, killed}) if killed.done() else killed.cancel()
        assert answer.done()
        answer.exception()
    async with world.open(*replies) as harness:
        started, _, _, listed, stopped = await said(world, harness)
        assert started.startswith("Started in the background with the id 1.")
        assert [note["id"] for note in (await world.state()).background] == ["1"]
        lost = f"1: lost ({KILLED})."
        assert stopped == lost if KILLED in listed else stopped in (lost, "1: stopped (as asked).")
        if stopped != lost:
            assert world.lines() == ["one"]
        assert len(world.lines()) <= 1
        assert not alive(world)
        await world.check()


DRIVER = """
import asyncio, os, signal, sys
from perdure import Extension, Harness, SqliteStorage, coding_tools, tool
from perdure.spaces import LocalSpaces, durable_space
from perdure.testing.model import ScriptedModel, call, say

@tool(effects="read", replay="safe")
async def unplug() -> str:
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    folder, command = sys.argv[1:]
    space = await LocalSpaces(folder + "/spaces").open("one")
    model = ScriptedModel({"go": [call("bash", command=command, background=True),
        call("bash_output", id="1", offset=0, wait=60, until="output"), call("unplug")]})
    async with Harness.open(SqliteStorage(folder + "/log.db"), models=model, environment=durable_space(space),
        extensions=[coding_tools(), Extension("own", tools=[unplug])]) as harness:
        await (await (await harness.root()).submit("go", request_id="one")).answer()

asyncio.run(main())
"""


async def test_a_real_kill_of_the_driver_leaves_it_running_s169(world: World) -> None:
    """A process that is killed by the system, with what it had in memory."""
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, str(world.folder), SERVE, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await host.communicate()
    assert host.returncode == -signal.SIGKILL, errors.decode()
    assert alive(world)

    @tool(effects="read", replay="safe")
    async def unplug() -> str:
        return "plugged"

    storage, world.storage = world.storage, SqliteStorage(world.folder / "log.db")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        replies = (serve(), output(**READY), call("unplug"), output(id="1", offset=0), call("bash_stop", id="1"))
        async with world.open(*replies, tools=(unplug,)) as harness:
            assert (await said(world, harness))[2:] == ["plugged", RUNNING, "1: stopped (as asked)."]
            assert not alive(world)
            await world.check()
    finally:
        world.storage = storage


async def test_so_many_run_at_once_s168(made: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.tools.background.MOST_RUNNING", 1)
    async with advanced(made) as client:
        env = SpaceEnvironment(client, **CALL)
        await in_background.start(env, "sleep 600")
        with pytest.raises(CommandNotStarted, match="1 commands run in the background already"):
            await env.start_background("sleep 600")
        monkeypatch.setattr("perdure.tools.background.MOST_RUNNING", 2)
        several = await asyncio.gather(*(env.start_background("sleep 600") for _ in range(3)), return_exceptions=True)
        assert [isinstance(one, CommandNotStarted) for one in several].count(False) == 1
        with pytest.raises(NoSuchCommand):
            await env.read_background("none")
        with pytest.raises(ValueError, match="an output is read from 0 or later"):
            await env.read_background("1", length=background.MOST_READ + 1)
        assert (await env.stop_background("1")).state == "stopped"


async def test_a_lasting_command_is_read_and_killed_below_the_floor_and_started_never_again_s42(made: Daemon) -> None:
    async with advanced(made) as client:
        argv = ["sh", "-c", "echo out; sleep 600"]
        await client.start(key(), argv=argv, lasting=True, limits=Limits(output_bytes=1000))
        await client.start(key(2), argv=argv)
        await client.wait(key(), wait_ms=10_000, length=1)
        await client.settle(commit=1, floor=Place(call=2, attempt=1), thaw=True)
        seen, data = await client.wait(key(), length=10)
        assert (seen.state, data) == ("running", b"out\n")
        assert (await client.wait(key(2)))[0].below_floor
        with pytest.raises(KeyBelowFloor):
            await client.start(key(), argv=argv, lasting=True, limits=Limits(output_bytes=1000))
        made.kill()
        made.start()
    async with taken(made, epoch=2, keep=[key()]) as client:
        assert (await client.look([key()])).commands[0].state == "running"
        assert (await client.kill(key(), "aborted")).cause == "aborted"
    async with taken(made, epoch=3, keep=[]) as client:
        seen, data = await client.wait(key(), length=10)
        assert (seen.state, seen.cause, data) == ("exited", "aborted", b"out\n")


async def test_of_lasting_commands_that_ended_so_many_are_kept_s42(made: Daemon) -> None:
    async with advanced(made) as client:
        for ordinal in range(1, 36):
            await client.start(key(ordinal), argv=["true"], lasting=True, wait_ms=10_000, until_exit=True)
        await client.settle(commit=1, floor=Place(call=2, attempt=1))
        looked = await client.look([key(ordinal) for ordinal in range(1, 36)])
        assert sum(command.state == "exited" for command in looked.commands) == 32
        assert [command.state for command in looked.commands[:3]] == ["cut_off"] * 3
        assert len(list((made.folder / "state" / "outputs").iterdir())) == 32
