"""A Space as one attempt of a call uses it (rules S111 to S115)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from space_kit import CALL, Daemon, advanced, daemon, key

from perdure.harness.environment import (
    CommandNotStarted,
    EnvironmentLost,
    ExecutionEnvironment,
    FileChanged,
    FileError,
    FileMissing,
    FileTooLarge,
    NotAFile,
    PathEscapes,
)
from perdure.kernel.errors import StaleEpochError
from perdure.spaces.client import SpaceClient
from perdure.spaces.environment import CallOver, SpaceEnvironment
from perdure.spaces.errors import SpaceConnectionLost
from perdure.spaces.local_processes import mark_of
from perdure.spaces.outputs import Outputs
from perdure.spaces.wire import Limits, Place
from perdure.tools.bash import bash
from perdure.tools.edits import Edit
from perdure.tools.files import edit, plan_edit, read


@pytest.fixture
async def made() -> AsyncIterator[Daemon]:
    async with daemon() as made:
        yield made


@pytest.fixture
async def client(made: Daemon) -> AsyncIterator[SpaceClient]:
    async with advanced(made) as client:
        yield client


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    return Outputs("test", tmp_path / "outputs")


@pytest.fixture
def env(client: SpaceClient, outputs: Outputs) -> SpaceEnvironment:
    return SpaceEnvironment(client, **CALL, outputs=outputs)


async def held(client: SpaceClient, point: str) -> None:
    """Wait until something is held at a crash point."""
    while point not in (await client.armed()).held:
        await asyncio.sleep(0.005)


async def pid_in(path: Path) -> int:
    """Wait until a command has written its pid."""
    while not (text := said(path)).endswith("\n"):
        await asyncio.sleep(0.005)
    return int(text)


def said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@asynccontextmanager
async def running(env: SpaceEnvironment, shell: str) -> AsyncIterator[asyncio.Task]:
    task = asyncio.create_task(env.exec(shell))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


# --- files


async def test_files_are_written_read_listed_and_removed(env: SpaceEnvironment, made: Daemon) -> None:
    as_protocol: ExecutionEnvironment = env
    assert as_protocol.cwd == str(made.workspace)
    await env.write_file("d/a.txt", b"0123456789", mode=0o640)
    assert await env.read_file("d/a.txt") == b"0123456789"
    assert await env.read_file("d/a.txt", offset=3, length=4) == b"3456"
    assert await env.read_file("d/a.txt", offset=8) == b"89"
    assert await env.read_file("d/a.txt", offset=100) == b""
    assert await env.read_file("d/a.txt", length=0) == b""
    found = await env.stat("d/a.txt")
    assert found is not None
    assert (found.name, found.kind, found.size, found.mode) == ("a.txt", "file", 10, 0o640)
    assert await env.stat("none/at/all") is None
    root = await env.stat("")
    assert root is not None
    assert (root.name, root.kind) == ("workspace", "directory")
    os.mkfifo(made.workspace / "d/pipe")
    (made.workspace / "d/link").symlink_to("a.txt")
    listing = await env.list_dir("d")
    assert [(entry.name, entry.kind) for entry in listing.entries] == [
        ("a.txt", "file"), ("link", "symlink"), ("pipe", "other"),
    ]  # fmt: skip
    assert (await env.list_dir("d", limit=1)).more
    await env.remove("d/link")
    (made.workspace / "d/pipe").unlink()
    await env.remove("d/a.txt")
    await env.remove("d")
    assert await env.stat("d") is None


async def test_paths_are_relative_or_below_the_workspace(env: SpaceEnvironment, made: Daemon) -> None:
    await env.write_file(f"{made.workspace}/d/a", b"x")
    assert await env.read_file(f"//{str(made.workspace)[1:]}/d/a") == b"x"
    assert await env.read_file("d/../d/./a") == b"x"
    (made.workspace / "out").symlink_to(made.folder)
    for path in ("/etc/passwd", "../token", f"{made.workspace}/../token", "out/token", f"{made.workspace}-x", "/"):
        with pytest.raises(PathEscapes):
            await env.read_file(path)
        with pytest.raises(PathEscapes):
            await env.write_file(path, b"")
    with pytest.raises(PathEscapes):
        await env.stat("/etc")
    with pytest.raises(PathEscapes):
        await env.list_dir("/")
    with pytest.raises(NotAFile):
        await env.read_file("d")
    with pytest.raises(FileMissing):
        await env.remove("none")
    with pytest.raises(FileError):
        await env.read_file("a\0b")


async def test_a_file_that_is_not_the_expected_one_is_not_replaced(env: SpaceEnvironment) -> None:
    await env.write_file("a", b"one")
    with pytest.raises(FileChanged):
        await env.write_file("a", b"two", expect=hashlib.sha256(b"other").hexdigest())
    await env.write_file("a", b"two", expect=hashlib.sha256(b"one").hexdigest())
    assert await env.read_file("a") == b"two"


async def test_large_files_go_in_parts_and_are_read_in_ranges(env: SpaceEnvironment, made: Daemon) -> None:
    data = os.urandom(1 << 20) * 17 + b"end"
    await env.write_file("large", data)
    assert (made.workspace / "large").read_bytes() == data
    assert await env.read_file("large") == data
    with (made.workspace / "huge").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(FileTooLarge):
        await env.read_file("huge")
    assert await env.read_file("huge", offset=64 << 20) == bytes(1 << 20)


async def test_a_name_that_is_not_utf8(env: SpaceEnvironment, made: Daemon) -> None:
    await env.write_file("\udcff", b"x")
    assert [entry.name for entry in (await env.list_dir(".")).entries] == ["\udcff"]
    assert os.listdir(os.fsencode(made.workspace)) == [b"\xff"]


async def test_the_tools_of_the_package_work_in_it(env: SpaceEnvironment) -> None:
    await env.write_file("a.py", b"print('wurld')\n")
    edits = [Edit(old_text="wurld", new_text="world")]
    await edit(env, "a.py", edits, await plan_edit(env, "a.py", edits))
    assert "world" in (await read(env, "a.py")).text
    answer = await bash(env, "python3 a.py && [[ a == a ]]")
    assert (answer.text, answer.failed) == ("world\n", False)


# --- commands


async def test_a_command_and_how_it_ended(env: SpaceEnvironment, made: Daemon) -> None:
    (made.workspace / "d").mkdir()
    chunks: list[bytes] = []
    result = await env.exec("pwd; echo $WORD >&2; exit 3", cwd="d", env={"WORD": "said"}, on_output=chunks.append)
    assert (result.exit_code, result.signal, result.timed_out) == (3, None, False)
    assert result.output == b"".join(chunks) == f"{made.workspace}/d\nsaid\n".encode()
    assert (result.output_bytes, result.output_path) == (len(result.output), None)
    assert (await env.exec(["printf", "%s", "a b"])).output == b"a b"
    assert (await env.exec("kill -9 $$")).signal == signal.SIGKILL
    assert env.commands == (key(1), key(2), key(3))


async def test_output_comes_while_the_command_runs(env: SpaceEnvironment, made: Daemon) -> None:
    """Each byte once, in order: the second half is written only after the first was seen."""
    seen = bytearray()

    def take(data: bytes) -> None:
        seen.extend(data)
        (made.workspace / "seen").touch()

    result = await env.exec("echo one; until [ -e seen ]; do sleep 0.01; done; echo two", on_output=take)
    assert bytes(seen) == result.output == b"one\ntwo\n"


async def test_a_large_output_is_kept_for_later(env: SpaceEnvironment, client: SpaceClient) -> None:
    """Rule S115: also after the Space has forgotten the command."""
    seen = bytearray()
    result = await env.exec("seq 1 400000", on_output=seen.extend)
    whole = b"".join(b"%d\n" % number for number in range(1, 400001))
    assert bytes(seen) == whole
    assert (result.output_bytes, result.output_kept) == (len(whole), len(whole))
    assert result.output == whole[-64 * 1024 :]
    assert result.output_path is not None
    await client.settle(floor=Place(call=2, attempt=1))
    assert await env.read_file(result.output_path) == whole
    assert await env.read_file(result.output_path, offset=2, length=4) == b"2\n3\n"
    kept = await env.stat(result.output_path)
    assert kept is not None
    assert kept.size == len(whole)
    with pytest.raises(PathEscapes):
        await env.read_file(os.path.dirname(result.output_path) + "/other")


async def test_an_output_that_was_cut_short_by_its_command_ends(env: SpaceEnvironment) -> None:
    result = await env.exec("echo a long line; sleep 0.2; : > /proc/self/fd/1; echo b")
    assert result.exit_code == 0


async def test_a_flood_of_output_is_stopped_and_told_h371(
    env: SpaceEnvironment, made: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SpaceClient.start

    async def limited(*args: Any, **options: Any) -> Any:
        return await real(*args, **{**options, "limits": Limits(output_bytes=1_000_000)})

    monkeypatch.setattr(SpaceClient, "start", limited)
    answer = await bash(env, "yes; true")
    assert answer.failed
    assert answer.text.endswith(".log.]\n[It wrote more than 256 MiB; the command was stopped.]")
    assert [path.stat().st_size for path in (made.folder / "state" / "outputs").iterdir()] == [1_000_000]


async def test_a_time_out_stops_all_of_the_command(env: SpaceEnvironment, made: Daemon) -> None:
    result = await env.exec("sleep 1000 & echo $! > pid; sleep 1000", timeout_ms=2_000)
    assert result.timed_out
    assert mark_of(await pid_in(made.workspace / "pid")) is None


async def test_what_a_command_leaves_running_runs_on(env: SpaceEnvironment, made: Daemon) -> None:
    """Rule S112."""
    result = await env.exec("sleep 1000 >/dev/null 2>&1 & echo $! > pid; echo done")
    assert (result.exit_code, result.output) == (0, b"done\n")
    assert mark_of(await pid_in(made.workspace / "pid")) is not None


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["no-such-program"], {}),
        (["true"], {"cwd": "none"}),
        (["/etc/passwd"], {}),
        (["a\0b"], {}),
        (["true", "\ud800"], {}),
        (["x" * 200_000], {}),
        (["true", *["x" * 100_000] * 12], {}),
        ("true", {"env": {"A=B": "secret"}}),
        ("true", {"env": {"A": "secret\0"}}),
    ],
)
async def test_a_command_that_cannot_be_started(
    env: SpaceEnvironment, client: SpaceClient, command: str | list[str], options: dict
) -> None:
    with pytest.raises(CommandNotStarted) as refused:
        await env.exec(command, **options)
    assert "secret" not in str(refused.value)
    assert client.admission is not None
    assert (await env.exec("echo next")).output == b"next\n"


async def test_options_that_make_no_sense(env: SpaceEnvironment) -> None:
    for timeout_ms in (0, 8 * 24 * 3600 * 1000):
        with pytest.raises(ValueError, match="time-out"):
            await env.exec("true", timeout_ms=timeout_ms)
    with pytest.raises(ValueError, match="program"):
        await env.exec([])
    with pytest.raises(PathEscapes):
        await env.exec("true", cwd="/")


# --- cancelling


async def test_a_cancelled_command_is_gone_with_all_it_left(env: SpaceEnvironment, made: Daemon) -> None:
    """Rule S112."""
    task = asyncio.create_task(env.exec("setsid sleep 1000 & echo $! > pid; sleep 1000"))
    pid = await pid_in(made.workspace / "pid")
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mark_of(pid) is None


@pytest.mark.parametrize("point", ["start.admitted", "shim.before_started"])
async def test_a_command_cancelled_before_it_started_never_does(
    env: SpaceEnvironment, client: SpaceClient, made: Daemon, point: str
) -> None:
    """Rule S112: its start is on its way, and what is cancelled must not begin when it arrives."""
    await client.arm(point, "hold")
    task = asyncio.create_task(env.exec("touch ran"))
    await held(client, point)
    task.cancel()
    while (await client.look([key()])).commands[0].state != "void":
        await asyncio.sleep(0.005)
    await client.release(point)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await env.exec("ls")).output == b""


@pytest.mark.parametrize(
    "point",
    [
        "start.forked",
        "shim.started",
        "start.answered",
    ],
)
async def test_a_command_cancelled_as_it_starts_is_gone(env: SpaceEnvironment, client: SpaceClient, point: str) -> None:
    """Rule S112."""
    await client.arm(point, "hold")
    task = asyncio.create_task(env.exec("sleep 1000"))
    await held(client, point)
    task.cancel()
    await asyncio.sleep(0)
    await client.release(point)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.look([key()])).commands[0].state in ("void", "exited", "unknown")
    assert (await client.status()).living == 0


@pytest.mark.parametrize("change", ["write", "remove"])
async def test_a_change_that_is_cancelled_comes_no_later(
    env: SpaceEnvironment, client: SpaceClient, made: Daemon, change: str
) -> None:
    """Rule S116."""
    await env.write_file("a", b"before")
    made.pause()  # The request lies in its socket.
    task = asyncio.create_task(env.write_file("a", b"after") if change == "write" else env.remove("a"))
    while not client._link._used:
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    made.go_on()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said(made.workspace / "a") == ("after" if change == "write" else "")


async def test_a_cancelled_change_whose_fate_is_unknown_is_no_cancellation(
    env: SpaceEnvironment, client: SpaceClient, made: Daemon
) -> None:
    """Rules S111 and S116."""
    await client.arm("write.admitted", "hold")
    task = asyncio.create_task(env.write_file("a", b""))
    await held(client, "write.admitted")
    task.cancel()
    await asyncio.sleep(0)
    made.kill()
    with pytest.raises(SpaceConnectionLost):
        await task


async def test_an_output_nobody_takes_stops_the_command(env: SpaceEnvironment, made: Daemon) -> None:
    def refuse(data: bytes) -> None:
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        await env.exec("echo $$ > pid; echo output; sleep 1000", on_output=refuse)
    assert mark_of(await pid_in(made.workspace / "pid")) is None


async def test_a_driver_that_leaves_lets_its_command_run(client: SpaceClient, made: Daemon, outputs: Outputs) -> None:
    """Rules S112 and S113: the next one finds it, with its output from the start."""
    leaving = SpaceEnvironment(client, **CALL, outputs=outputs, leaves_running=lambda: True)
    script = "echo $$ > pid; echo one; until [ -e go ]; do sleep 0.01; done; echo two; echo x >> runs"
    task = asyncio.create_task(leaving.exec(script))
    pid = await pid_in(made.workspace / "pid")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mark_of(pid) is not None
    async with await SpaceClient.connect(made.address) as following:
        await following.advance(log="log", epoch=2, writer="w2", keep=[key()])
        again = asyncio.create_task(SpaceEnvironment(following, **CALL, outputs=outputs).exec(script))
        (made.workspace / "go").touch()
        assert (await again).output == b"one\ntwo\n"
        assert (await SpaceEnvironment(following, **CALL, outputs=outputs).exec(script)).output == b"one\ntwo\n"
    assert (made.workspace / "runs").read_text() == "x\n"


# --- what is never a result


async def test_nothing_is_done_before_an_advance(made: Daemon, outputs: Outputs) -> None:
    """Rule S111."""
    async with await SpaceClient.connect(made.address) as client:
        env = SpaceEnvironment(client, **CALL, outputs=outputs)
        for operation in (env.read_file("a"), env.write_file("a", b""), env.stat("a"), env.list_dir(""),
                          env.remove("a"), env.exec("true")):  # fmt: skip
            with pytest.raises(SpaceConnectionLost) as lost:
                await operation
            assert lost.value.reason == "not_advanced"
            assert isinstance(lost.value, EnvironmentLost), "the harness recovers from it, it makes no result"
        await client.advance(log="log", epoch=1, writer="w1")
        for operation in (env.write_file("a", b""), env.remove("a"), env.exec("true")):
            with pytest.raises(SpaceConnectionLost) as lost:
                await operation
            assert lost.value.reason == "no_image"


async def test_a_newer_driver_ends_the_call_with_stale_epoch(
    env: SpaceEnvironment, client: SpaceClient, made: Daemon
) -> None:
    """Rule S111."""
    async with running(env, "echo $$ > pid; sleep 1000") as task, await SpaceClient.connect(made.address) as newer:
        pid = await pid_in(made.workspace / "pid")
        await newer.advance(log="log", epoch=2, writer="w2")
        with pytest.raises((StaleEpochError, SpaceConnectionLost)):
            await task
        assert mark_of(pid) is None
    with pytest.raises((StaleEpochError, SpaceConnectionLost)):
        await env.write_file("a", b"")
    assert not (made.workspace / "a").exists()


async def test_an_undone_call_does_nothing_more(env: SpaceEnvironment, client: SpaceClient, made: Daemon) -> None:
    """Rule S111."""
    await client.settle(floor=Place(call=1, attempt=2))
    for operation in (env.write_file("a", b""), env.remove("a"), env.exec("touch a")):
        with pytest.raises(SpaceConnectionLost) as lost:
            await operation
        assert lost.value.reason == "below_floor"
    assert not (made.workspace / "a").exists()


async def test_a_command_that_an_undo_ended_has_no_result(
    env: SpaceEnvironment, client: SpaceClient, made: Daemon
) -> None:
    """Rule S111."""
    async with running(env, "echo $$ > pid; sleep 1000") as task:
        await pid_in(made.workspace / "pid")
        await client.restore_begin(commit=0, floor=Place(call=1, attempt=2))
        with pytest.raises(SpaceConnectionLost) as lost:
            await task
        assert lost.value.reason == "below_floor"


async def test_a_void_key_a_conflict_and_an_unknown_end_are_no_results(
    env: SpaceEnvironment, client: SpaceClient, made: Daemon
) -> None:
    """Rule S111."""
    await client.void(key(1))
    await client.start(key(2), argv=["true"])
    await client.arm("shim.running", "kill", skip=1)
    for reason in ("void", "conflict"):
        with pytest.raises(SpaceConnectionLost) as lost:
            await env.exec("echo another")
        assert lost.value.reason == reason
    await client.arm("shim.running", "kill")
    with pytest.raises(SpaceConnectionLost) as lost:
        await env.exec("sleep 1000")
    assert lost.value.reason == "unknown"
    assert client.admission is not None


async def test_a_daemon_that_dies_is_no_result(env: SpaceEnvironment, client: SpaceClient, made: Daemon) -> None:
    """Rule S111: neither while the command runs, nor while it is being stopped."""
    async with running(env, "echo $$ > pid; sleep 1000") as task:
        pid = await pid_in(made.workspace / "pid")
        made.kill()
        with pytest.raises(SpaceConnectionLost):
            await task
    assert mark_of(pid) is not None
    made.start()
    await client.advance(log="log", epoch=1, writer="w1", keep=[key()])
    again = SpaceEnvironment(client, **CALL)
    task = asyncio.create_task(again.exec("echo $$ > pid; sleep 1000"))
    await client.arm("kill.recorded", "kill")
    await client.wait(key(), wait_ms=50)
    task.cancel()
    with pytest.raises(SpaceConnectionLost):
        await task


async def test_an_attempt_that_ended_does_nothing_more(env: SpaceEnvironment, made: Daemon) -> None:
    """Rule S114."""
    env.close()
    for operation in (env.read_file("a"), env.write_file("a", b""), env.exec("touch a")):
        with pytest.raises(CallOver):
            await operation
    assert not (made.workspace / "a").exists()


async def test_a_command_whose_shim_is_killed_before_it_did_anything_is_started_again_s111(
    env: SpaceEnvironment, client: SpaceClient, made: Daemon
) -> None:
    await client.arm("shim.before_started", "kill")
    result = await env.exec("echo once >> log; echo said")
    assert (result.exit_code, result.output) == (0, b"said\n")
    assert said(made.workspace / "log") == "once\n"
