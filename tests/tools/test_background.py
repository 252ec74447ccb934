"""Commands in the background of a local workspace (rules H366 to H368): read, waited for, stopped, bounded, lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_kit import alive, pids, see_gone

from perdure.harness.environment import BackgroundCommand, CommandNotStarted, NoSuchCommand
from perdure.harness.harness import Harness
from perdure.harness.tool import ToolError
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools import background, in_background
from perdure.tools.coding import coding_tools
from perdure.tools.local import LocalEnvironment

HOST = """
import asyncio, os, signal, sys
from perdure.tools.local import LocalEnvironment

async def main():
    env = LocalEnvironment(sys.argv[1], output_dir=sys.argv[2])
    command = await env.start_background(sys.argv[3])
    await env.read_background(command.id, wait_ms=60_000)
    print(command.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def ended(env: LocalEnvironment, id: str) -> BackgroundCommand:
    return (await env.read_background(id, wait_ms=60_000, until_exit=True))[0]


async def test_it_runs_while_its_output_is_read_and_stops_with_all_it_started_h366(
    env: LocalEnvironment, work: Path
) -> None:
    command = await env.start_background(
        "setsid bash -c 'echo $$ > away.pid; echo away; exec sleep 600' & echo $$ > own.pid; echo one; wait"
    )
    assert (command.state, command.exit_code) == ("running", None)
    size = 0
    while size < len("one\naway\n"):
        seen, data = await env.read_background(command.id, offset=size, length=100, wait_ms=60_000)
        assert seen.state == "running"
        size += len(data)
    assert [(one.id, one.state) for one in await env.background()] == [(command.id, "running")]
    stopped = await env.stop_background(command.id)
    assert (stopped.state, stopped.reason, stopped.output_bytes) == ("stopped", "as asked", 9)
    assert not any(alive(pid) for pid in pids(work).values())
    assert await env.stop_background(command.id) == stopped
    assert sorted((await env.read_background(command.id, length=100))[1].split()) == [b"away", b"one"]


@pytest.mark.parametrize(
    ("script", "code", "number"), [("exit 3", 3, None), ("true", 0, None), ("kill -9 $$", None, 9)]
)
async def test_its_end_can_be_waited_for_h366(
    env: LocalEnvironment, script: str, code: int | None, number: int | None
) -> None:
    command = await env.start_background(f"echo out; echo err >&2; {script}")
    seen = await ended(env, command.id)
    assert (seen.state, seen.exit_code, seen.signal) == ("exited", code, number)
    assert (await env.read_background(command.id, offset=4, length=3))[1] == b"err"


async def test_a_wait_ends_with_its_time_or_its_cancellation_and_the_command_goes_on_h366(
    env: LocalEnvironment,
) -> None:
    command = await env.start_background("sleep 600")
    assert (await env.read_background(command.id, wait_ms=1))[0].state == "running"
    waiting = asyncio.create_task(ended(env, command.id))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (await env.read_background(command.id))[0].state == "running"
    await env.end_background()
    assert [(one.state, one.reason) for one in await env.background()] == [("stopped", "the session closed")]


async def test_so_many_run_and_so_much_is_kept_h367(env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_OUTPUT", 100_000)
    loud = await env.start_background("yes")
    told = await ended(env, loud.id)
    assert (told.state, told.output_bytes) == ("stopped", 100_000)
    assert "MiB" in told.reason
    monkeypatch.setattr(background, "MOST_RUNNING", 2)
    for _ in range(2):
        await env.start_background("sleep 600")
    with pytest.raises(CommandNotStarted, match="2 commands run in the background already; stop one"):
        await env.start_background("sleep 600")
    await env.end_background()
    several = await asyncio.gather(*(env.start_background("sleep 600") for _ in range(4)), return_exceptions=True)
    assert [isinstance(one, CommandNotStarted) for one in several].count(False) == 2, "also of those that come at once"
    await env.end_background()
    monkeypatch.setattr(background, "MOST_KEPT", 3)
    for _ in range(4):
        await ended(env, (await env.start_background("true")).id)
    assert len(await env.background()) == 3
    with pytest.raises(NoSuchCommand, match=f"no command in the background has the id '{loud.id}'"):
        await env.read_background(loud.id)


@pytest.mark.parametrize("id", ["", "../x", "deadbee", "DEADBEEF", "a" * 500, "deadbeef"])
async def test_an_id_that_is_none_is_refused_h366(env: LocalEnvironment, id: str) -> None:
    for asked in (env.read_background(id), env.stop_background(id)):
        with pytest.raises(NoSuchCommand, match="no command in the background has the id"):
            await asked


async def test_an_output_that_the_disk_does_not_take_is_told_h367(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_write", lambda file, data: 0)
    told = await ended(env, (await env.start_background("echo hi")).id)
    assert (told.state, told.reason, told.output_bytes) == ("exited", background.UNKEPT, 0)
    assert (await in_background.listed(env)).text.endswith(
        "exited with code 0 (its output is kept in part: the disk is full)  echo hi"
    )


async def test_one_that_cannot_be_started_leaves_nothing_h366(work: Path, tmp_path: Path) -> None:
    env = LocalEnvironment(work, shell=["/no/shell", "-c"], output_dir=tmp_path / "outputs")
    with pytest.raises(CommandNotStarted, match="/no/shell could not be started"):
        await env.start_background("true")
    assert await env.background() == ()


async def test_a_full_disk_loses_the_rest_of_the_output_and_not_the_command_h367(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_write", lambda file, data: 0)  # pyright: ignore[reportUnknownLambdaType]
    command = await env.start_background("echo one; echo two; exit 4")
    told = await ended(env, command.id)
    assert (told.state, told.exit_code, told.output_bytes) == ("exited", 4, 0)


@pytest.mark.parametrize("was_here", [False, True])
async def test_after_a_kill_of_its_host_it_is_told_to_be_lost_and_is_ended_h368(
    env: LocalEnvironment, work: Path, tmp_path: Path, was_here: bool
) -> None:
    if was_here:  # Before that host, whose end this one outlives.
        await env.exec("true")
        assert await env.background() == ()
    script = """
        setsid bash -c 'echo $$ > away.tmp; mv away.tmp away.pid; exec sleep 600' &
        echo $$ > own.pid; while [ ! -e away.pid ]; do sleep 0.01; done; echo ready; wait"""
    words = [sys.executable, "-c", HOST, str(work), str(tmp_path / "outputs"), script]
    host = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
    assert host.returncode == -signal.SIGKILL, host.stderr
    id = host.stdout.strip()
    seen, data = await env.read_background(id, length=100)
    assert (seen.state, data) == ("lost", b"ready\n")
    assert "the process that ran it ended without stopping it" in seen.reason
    assert len(pids(work)) == 2
    assert not any(alive(pid) for pid in pids(work).values()), "whoever is told that it is lost can rely on it"
    assert (await env.stop_background(id)).state == "lost"
    text = (await in_background.output(env, id)).text
    assert text.startswith(f"ready\n[{id}: lost (the process that ran it ended")


async def test_one_that_another_process_runs_is_read_and_not_stopped_h368(
    env: LocalEnvironment, work: Path, tmp_path: Path
) -> None:
    script = HOST.replace("os.kill(os.getpid(), signal.SIGKILL)", "await asyncio.to_thread(sys.stdin.read)")
    words = [sys.executable, "-c", script, str(work), str(tmp_path / "outputs"), "echo ready; sleep 600"]
    host = await asyncio.create_subprocess_exec(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert host.stdout is not None
    id = (await host.stdout.readline()).decode().strip()
    seen, data = await env.read_background(id, length=100)
    assert (seen.state, seen.reason, data) == ("running", f"run by process {host.pid}", b"ready\n")
    with pytest.raises(NoSuchCommand, match="only that can stop it"):
        await env.stop_background(id)
    await host.communicate(b"")
    assert (await env.read_background(id))[0].reason == "the session closed", "its event loop ended"


async def test_it_ends_when_its_session_closes_h368(work: Path, tmp_path: Path) -> None:
    env = LocalEnvironment(work, output_dir=tmp_path / "outputs", grace_ms=200)
    model = ScriptedModel(
        {"go": [call("bash", command="echo $$ > own.pid; exec sleep 600", background=True), say("ok")]}
    )
    async with Harness.open(MemoryStorage(), models=model, extensions=[coding_tools()], environment=env) as harness:
        root = await harness.root()
        await (await root.submit("go")).answer()
        (one,) = await env.background()
        assert one.state == "running"
    assert [told.reason for told in await env.background()] == ["the session closed"]
    for pid in pids(work).values():
        see_gone(pid)


async def test_one_that_ends_while_it_is_looked_at_is_never_told_to_be_lost_h368(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(work / "gate")
    command = await env.start_background("read -r < gate; exit 3")
    load = background._load  # pyright: ignore[reportPrivateUsage]

    def load_just_before(path: str) -> object:
        record = load(path)
        if record.cause is None:
            (work / "gate").write_text("go\n")
            until = time.monotonic() + 60
            while path in background._running and time.monotonic() < until:  # pyright: ignore[reportPrivateUsage]
                time.sleep(0.001)
        return record

    monkeypatch.setattr(background, "_load", load_just_before)
    seen, _ = await env.read_background(command.id)
    assert (seen.state, seen.exit_code) == ("exited", 3)


async def test_no_more_output_is_given_than_is_told_of_h366(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = await env.start_background("echo one; exec sleep 600")
    await env.read_background(command.id, wait_ms=60_000)
    read = background._read  # pyright: ignore[reportPrivateUsage]

    def read_just_after(path: str, offset: int, length: int) -> bytes:
        with open(path, "ab") as file:
            file.write(b"two\n")
        return read(path, offset, length)

    monkeypatch.setattr(background, "_read", read_just_after)
    for offset in (0, 4, 8):
        seen, data = await env.read_background(command.id, offset=offset, length=100)
        assert (seen.output_bytes, len(data)) == (offset + 4, 4)


# --- what the tools say


LINES = st.lists(st.sampled_from([b"a\n", b"\n", b"longer line\n", b"\xff\n", "é".encode() * 20 + b"\n"]), max_size=30)


@given(LINES, st.binary(max_size=5), st.integers(1, 60), st.integers(1, 4))
def test_reading_on_shows_every_byte_once_in_whole_lines_h366(
    lines: list[bytes], rest: bytes, most: int, shown: int
) -> None:
    content = b"".join(lines) + rest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_background, "_SHOWN_BYTES", most)
        patch.setattr(in_background, "_SHOWN_LINES", shown)
        at = 0
        parts: list[bytes] = []
        while at < len(content):
            data = content[at : at + most]
            part = in_background._whole_lines(data, more=at + len(data) < len(content))  # pyright: ignore[reportPrivateUsage]
            assert part, "it gets on"
            assert part.count(b"\n") <= shown
            assert part.endswith(b"\n") or b"\n" not in part or at + len(part) == len(content)
            parts.append(part)
            at += len(part)
        assert b"".join(parts) == content


async def test_what_the_tools_say_h366(env: LocalEnvironment) -> None:
    os.mkfifo(Path(env.cwd) / "gate")
    started = await in_background.start(env, "seq 1 5000; read -r < gate; exit 3")
    id = started.details["id"]
    assert isinstance(id, str)
    assert started.text.startswith(f"Started in the background with the id {id}.")
    seen = await in_background.output(env, id, offset=0)
    while seen.details["output_bytes"] != 23_893:
        seen = await in_background.output(env, id, offset=0, wait_s=60, until="output")
    assert seen.text.splitlines()[0] == "1"
    after = seen.details["next_offset"]
    assert isinstance(after, int)
    assert seen.text.splitlines()[-1] == f"[{id}: running; bytes 0 to {after} of 23893. Read on with offset={after}.]"
    tail = await in_background.output(env, id)
    assert tail.text.splitlines()[-2:] == [
        "5000",
        f"[{id}: running; bytes {tail.details['offset']} to 23893 of 23893. Read on with offset=23893.]",
    ]
    assert (await in_background.listed(env)).text == f"{id}  running  seq 1 5000; read -r < gate; exit 3"
    await asyncio.to_thread((Path(env.cwd) / "gate").write_text, "go\n")
    assert (
        await in_background.output(env, id, offset=23_893, wait_s=60)
    ).text == f"[{id}: exited with code 3; bytes 23893 to 23893 of 23893.]"
    assert (await in_background.stop(env, id)).text == f"{id}: exited with code 3."
    for wrong in (in_background.output(env, id, offset=-1), in_background.output(env, id, wait_s=601)):
        with pytest.raises(ToolError, match="offset is 0 or more"):
            await wrong
    with pytest.raises(CommandNotStarted, match="NUL"):
        await in_background.start(env, "a\0b")
