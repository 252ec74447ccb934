"""Commands as they are in the wild, through calls of an agent in a durable Space: what becomes of them, what is left
alive, and what stays secret (S16 to S23, S101, S141, S161)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from durable_kit import Nasty, alive

from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.harness import Harness
from perdure.harness.registry import Extension
from perdure.harness.tool import tool
from perdure.spaces.durable import durable_space
from perdure.spaces.local import LocalSpaces
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.model import ScriptedModel, call, say


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Nasty]:
    world = Nasty(tmp_path)
    yield world
    await world.spaces.delete("one")


def noted(world: Nasty, name: str) -> int:
    """The process that wrote its number there, beside the workspace."""
    path = world.workspace.parent / name
    return int(path.read_text()) if path.exists() and path.read_text().endswith("\n") else 0


STAY = """cat > ../stay <<'END'
trap '' TERM HUP INT
echo $$ > "$1/pid"
while :; do sleep 0.05; done
END
"""
FORK = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.execvp("sh", ["sh", sys.argv[1] + "/stay", sys.argv[1]])
    os._exit(0)
"""
DAEMONS = {
    "setsid": 'setsid sh ../stay "$PWD/.." > /dev/null 2>&1 &',
    "nohup": 'nohup sh ../stay "$PWD/.." > /dev/null 2>&1 &',
    "a pipe it inherited": 'sh ../stay "$PWD/.." &',
    "double fork": f"python3 -c '{FORK}' \"$PWD/..\"",
    "no environment": 'env -i PATH="$PATH" setsid sh ../stay "$PWD/.." > /dev/null 2>&1 &',
}
"""What each leaves behind does not go by itself, whatever it is asked."""


@pytest.mark.parametrize("how", DAEMONS)
async def test_what_a_command_left_lives_on_until_an_undo_s17(how: str, world: Nasty) -> None:
    space = await world.spaces.open("one")
    if how == "no environment" and space.containment == "none":
        pytest.skip("without a cgroup what drops its environment is not found (rule S18)")
    start = call("bash", command=f"{STAY}{DAEMONS[how]}\nwhile [ ! -s ../pid ]; do sleep 0.01; done; echo said")
    fail = call("bash", command="echo a > a; mkfifo pipe")
    look = call("bash", command="kill -0 $(cat ../pid) && echo lives")
    results = await world.call(start, look, fail, call("bash", command="kill -0 $(cat ../pid) 2>&1 || echo gone"))
    assert results[0] == (None, "said\n")
    assert results[1] == (None, "lives\n"), "what an ended command left running runs on"
    assert "special files" in results[2][1]
    assert results[3][1].endswith("gone\n"), "an undo kills what lives in the Space"
    assert not alive(noted(world, "pid"))


@pytest.mark.parametrize("how", DAEMONS)
async def test_a_new_driver_finds_nothing_alive_that_an_older_one_started_s11(how: str, world: Nasty) -> None:
    space = await world.spaces.open("one")
    if how == "no environment" and space.containment == "none":
        pytest.skip("without a cgroup what drops its environment is not found (rule S18)")
    start = f"{STAY}{DAEMONS[how]}\nwhile [ ! -s ../pid ]; do sleep 0.01; done; echo said"
    assert await world.bash(start) == "said\n"
    pid = noted(world, "pid")
    assert alive(pid)
    await world.bash("true")
    assert not alive(pid)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exec <&- >&- 2>&-; sleep 0.1; exit 3", "[Exit code 3.]"),
        ("sleep 1000 & echo said; exit 4", "said\n[Exit code 4.]"),
        ("(sleep 1000; echo late) & echo said", "said\n"),
        ("kill -9 $$", "[Ended by signal 9.]"),
        ("kill -TERM $$", "[Ended by signal 15.]"),
        ("trap 'exit 0' TERM; kill -TERM 0; sleep 100", "[No output.]"),
        ("printf 'no newline'", "no newline"),
        ("printf 'a\\0b\\xff\\n'", "a\0b\N{REPLACEMENT CHARACTER}\n"),
        ("exec sh -c 'echo exec; exit 5'", "exec\n[Exit code 5.]"),
        ("cat; echo no input", "no input\n"),
        ("ulimit -f 1; head -c 5000 /dev/zero > f; echo $?", None),
        ("rm -rf ../workspace 2>/dev/null; cd /; echo here", "here\n"),
    ],
)
async def test_an_odd_end_is_what_it_is_s16(command: str, said: str | None, world: Nasty) -> None:
    text = await world.call(call("bash", command=command))
    assert text[0][0] is None
    assert said is None or text[0][1] == said
    assert (await world.call(call("bash", command="echo still > here; cat here"))) == [(None, "still\n")]


@pytest.mark.parametrize("trap", ["", "trap '' TERM INT HUP;", "trap 'exit 0' TERM INT HUP;"])
async def test_a_command_out_of_time_is_no_success_and_is_gone_s16(trap: str, world: Nasty) -> None:
    command = f"{trap} echo $$ > ../pid; (echo $BASHPID > ../child; exec sleep 1000) & while :; do sleep 0.02; done"
    ((code, text),) = await world.call(call("bash", command=command, timeout=3))
    assert code is None
    assert "Timed out" in text
    assert not alive(noted(world, "pid"))
    assert not alive(noted(world, "child"))


@pytest.mark.parametrize("trap", ["trap '' TERM INT HUP;", "trap 'exit 0' TERM INT HUP;"])
async def test_an_aborted_command_is_no_success_and_is_gone_s112(trap: str, world: Nasty) -> None:
    command = f"{trap} (echo $BASHPID > ../child; exec sleep 1000) & echo $$ > ../pid; while :; do sleep 0.02; done"
    async with world.open(call("bash", command=command)) as harness:
        root = await harness.root()
        await root.submit("go", request_id="call-1")
        harness.resume()
        await world.until(lambda: noted(world, "pid") > 0 and noted(world, "child") > 0)
        await root.abort()
        assert [code for code, _ in await world.results()] == ["aborted"]
        assert not alive(noted(world, "pid"))
        assert not alive(noted(world, "child"))
        await world.check()


async def test_output_beyond_what_a_result_holds_is_kept_whole_s115(world: Nasty) -> None:
    async with world.open(call("bash", command="seq 1 400000")) as harness:
        submission = await (await harness.root()).submit("go", request_id="call-1")
        assert (await submission.answer()).text == "done"
        ((code, text),) = await world.results()
        assert code is None
        assert text.count("\n") < 2100
        path = text.partition("The complete output is in ")[2].rstrip(".]")
        assert (await asyncio.to_thread(Path(path).read_text)).split() == [str(number) for number in range(1, 400_001)]
        assert world.seen() == {}, "none of it is in the workspace"


async def test_a_command_that_kills_what_runs_it_is_undone_a_bounded_number_of_times_s157(world: Nasty) -> None:
    command = "echo run >> ../runs; echo x > x; kill -9 $PPID; sleep 1000"
    async with world.open(call("bash", command=command)) as harness:
        submission = await (await harness.root()).submit("go", request_id="call-1")
        assert (await submission.answer()).text == "done"
        ((code, _),) = await world.results()
        assert code == "interrupted"
        assert len((world.workspace.parent / "runs").read_text().splitlines()) <= 10
        assert world.seen() == {}
        await world.check()


# --- secrets --------------------------------------------------------------------------------------------------------

OF_HOST, OF_TOOL, OF_CUT_OFF = "sEcReT-of-the-host-6d1f", "sEcReT-of-a-tool-77ab", "sEcReT-of-a-cut-off-tool-90c2"


@tool(effects="space")
async def with_secret(cut: bool, environment: ExecutionEnvironment) -> str:
    """Use a secret in a command, without saying it."""
    secret = OF_CUT_OFF if cut else OF_TOOL
    script = 'test ${#KEY} -gt 9 && test ${#HOST_KEY} -gt 9 && echo used >> log && printf "%s" "$KEY" | wc -c'
    done = await environment.exec(script, env={"KEY": secret, "GONE": secret})
    if cut:
        await environment.exec("touch ../changed; while [ ! -e ../gate ]; do sleep 0.02; done", env={"KEY": secret})
    # What cannot be started, times out or cannot be written is told in messages.
    await environment.exec(["sh", "-c", "sleep 100"], env={"KEY": secret}, timeout_ms=50)
    with pytest.raises(Exception, match="could not be started"):
        await environment.exec(["/nonexistent/program", "x"], env={"KEY": secret})
    with pytest.raises(Exception, match="NUL") as refused:
        await environment.exec("true", env={"KEY": secret + "\0"})
    assert secret not in str(refused.value)
    return done.output.decode()


async def test_no_secret_of_the_environment_is_in_the_ledger_the_log_or_a_message_s101(
    world: Nasty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOST_KEY", OF_HOST)
    store = tmp_path / "store.db"
    world.spaces = LocalSpaces(tmp_path / "spaces")  # whose daemon has what the host has now
    said: list[str] = []
    held: dict[str, bytes] = {}
    for cut in (True, False):
        space = await world.spaces.open("one")
        async with Harness.open(
            SqliteStorage(store),
            models=ScriptedModel({"go": [call("with_secret", cut=True), call("with_secret", cut=False), say("done")]}),
            extensions=[Extension("own", tools=[with_secret])],
            environment=durable_space(space, rerun="interrupt"),
            on_report=lambda report: said.append(repr(report)),
        ) as harness:
            submission = await (await harness.root()).submit("go", request_id="one")
            harness.resume()
            if cut:
                await world.until((world.workspace.parent / "changed").exists)
                held |= held_bytes(tmp_path)
                harness.session.fail(ConnectionError("killed"))
            else:
                assert (await submission.answer()).text == "done"
                world.harness = harness
                assert [code for code, _ in await world.results()] == ["interrupted", None]
                assert world.lines() == ["used"]
                held |= held_bytes(tmp_path)
    assert len(held) > 10
    said += [record.getMessage() for record in caplog.records]
    held["messages"] = "\n".join(said).encode()
    for place, content in held.items():
        for secret in (OF_HOST, OF_TOOL, OF_CUT_OFF, (tmp_path / "spaces" / "one" / "token").read_text()):
            if not place.endswith("/one/token"):
                assert secret.encode() not in content, place


def held_bytes(folder: Path) -> dict[str, bytes]:
    """Every byte of every file below."""
    found: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path)] = path.read_bytes()
    return found
