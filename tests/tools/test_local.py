"""Commands of the local environment: stopped means gone, nothing hangs (rules T90, T91 and H115)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_kit import (
    DAEMONS,
    Until,
    alive,
    cancel_when_ready,
    kill_and_see_gone,
    pids,
    see_gone,
    time_out_when_ready,
)

from perdure.harness.environment import CommandNotStarted, ProcessesRemain
from perdure.tools import processes
from perdure.tools.local import LocalEnvironment

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


# --- how commands end ------------------------------------------------------------------------------------------


async def test_exit_codes_and_signals(env: LocalEnvironment) -> None:
    result = await env.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.signal, result.timed_out) == (3, None, False)
    assert result.output == b"out\nerr\n"
    result = await env.exec("kill -KILL $$")
    assert (result.exit_code, result.signal) == (None, signal.SIGKILL)
    assert (await env.exec(["printf", "%s", "no shell; $HOME"])).output == b"no shell; $HOME"


async def test_standard_input_is_empty(env: LocalEnvironment) -> None:
    assert (await env.exec("cat; echo end")).output == b"end\n"


async def test_what_holds_the_output_open_delays_nothing(env: LocalEnvironment, work: Path) -> None:
    """Even one that cannot be found: it left the session, its parent is gone and it dropped the environment."""
    script = """
    (env -i setsid bash -c 'echo $$ > hidden.tmp; mv hidden.tmp hidden.pid; exec sleep 600' &)
    while [ ! -e hidden.pid ]; do sleep 0.02; done; echo done
    """
    result = await env.exec(script)
    hidden = pids(work)["hidden"]
    try:
        assert (result.exit_code, result.output) == (0, b"done\n")
        assert alive(hidden)
        assert os.readlink(f"/proc/{hidden}/fd/1").startswith("pipe:")
    finally:
        os.kill(hidden, signal.SIGKILL)


async def test_an_endless_writer_that_cannot_be_found_delays_nothing(env: LocalEnvironment, work: Path) -> None:
    script = """
    (env -i setsid bash -c 'echo $$ > hidden.tmp; mv hidden.tmp hidden.pid; trap "" PIPE; exec yes' &)
    while [ ! -e hidden.pid ]; do sleep 0.02; done
    """
    try:
        result = await env.exec(script)
        assert result.exit_code == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids(work)["hidden"], signal.SIGKILL)


async def test_nothing_is_left_after_a_normal_exit(env: LocalEnvironment, work: Path) -> None:
    result = await env.exec(DAEMONS)
    assert (result.exit_code, result.output) == (0, b"ready\n")
    left = pids(work)
    assert len(left) == 5
    assert not [name for name, pid in left.items() if alive(pid)]


async def test_nothing_is_left_after_a_time_out(env: LocalEnvironment, work: Path) -> None:
    await time_out_when_ready(env, f"rm -f *.pid; {DAEMONS} sleep 600")
    left = pids(work)
    assert len(left) == 5
    assert not [name for name, pid in left.items() if alive(pid)]


@pytest.mark.parametrize("times", [1, 3])
async def test_nothing_is_left_when_the_caller_is_cancelled(env: LocalEnvironment, work: Path, times: int) -> None:
    task = await cancel_when_ready(env, DAEMONS + "sleep 600", times=times)
    assert task.cancelled()
    left = pids(work)
    assert len(left) == 5
    assert not [name for name, pid in left.items() if alive(pid)]


def test_nothing_is_left_when_the_event_loop_ends(env: LocalEnvironment, work: Path) -> None:
    async def main() -> None:
        until = Until()
        task = asyncio.create_task(env.exec(DAEMONS + "sleep 600", on_output=until))
        await until.seen.wait()
        assert not task.done()

    asyncio.run(main())
    left = pids(work)
    assert len(left) == 5
    assert not [name for name, pid in left.items() if alive(pid)]


STUBBORN = """
trap '' TERM
bash -c 'trap "" TERM; echo $$ > child.tmp; mv child.tmp child.pid; while :; do sleep 600; done' &
echo $$ > self.pid
while [ ! -e child.pid ]; do sleep 0.02; done
echo ready
while :; do sleep 600; done
"""


async def test_what_ignores_sigterm_is_killed(env: LocalEnvironment, work: Path) -> None:
    result = await time_out_when_ready(env, "rm -f *.pid" + STUBBORN)
    assert (result.exit_code, result.signal) == (None, signal.SIGKILL)
    assert not [name for name, pid in pids(work).items() if alive(pid)]
    task = await cancel_when_ready(env, STUBBORN)
    assert task.cancelled()
    assert not [name for name, pid in pids(work).items() if alive(pid)]


async def test_a_command_may_end_by_itself_within_the_grace(work: Path, tmp_path: Path) -> None:
    env = LocalEnvironment(work, output_dir=tmp_path / "outputs", grace_ms=60_000)
    result = await time_out_when_ready(env, "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.02; done")
    assert (result.exit_code, result.signal, result.timed_out) == (5, None, True)
    assert result.output.startswith(b"ready\n")
    assert result.output.endswith(b"bye\n")


async def test_a_stopped_command_is_ended_too(env: LocalEnvironment, work: Path) -> None:
    await time_out_when_ready(env, "echo $$ > self.pid; echo ready; kill -STOP $$")
    assert not alive(pids(work)["self"])


async def test_processes_that_cannot_be_ended_are_an_error_not_a_result(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo $$ > self.pid; echo ready; exec sleep 600"
    with monkeypatch.context() as refused:
        refused.setattr(processes, "send", lambda process, number: False)
        refused.setattr(processes, "kill_group", lambda leader: None)
        with pytest.raises(ProcessesRemain) as caught:
            await time_out_when_ready(env, script)
        assert pids(work)["self"] in caught.value.pids
        # Were it a cancellation, somebody would report the command stopped.
        task = await cancel_when_ready(env, script)
        assert isinstance(task.exception(), ProcessesRemain)
    for pid in (caught.value.pids[0], pids(work)["self"]):
        kill_and_see_gone(pid)


@pytest.mark.parametrize("missing", ["pidfd_open", "waitid"])
async def test_without_pidfds_a_thread_waits(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    if missing == "waitid":
        monkeypatch.delattr(os, "waitid")
    assert (await env.exec("echo out; exit 4")).exit_code == 4
    await time_out_when_ready(env, f"rm -f *.pid; {DAEMONS} sleep 600")
    assert not [name for name, pid in pids(work).items() if alive(pid)]


async def test_an_output_callback_that_raises_stops_the_command(env: LocalEnvironment, work: Path) -> None:
    def refuse(chunk: bytes) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        await env.exec("echo $$ > self.pid; echo output; sleep 600", on_output=refuse)
    assert not alive(pids(work)["self"])


@pytest.mark.parametrize("argv", [["/nonexistent/program"], ["true", "x" * 3_000_000], ["true", "nul\0"]])
async def test_a_command_that_cannot_start_says_why_without_its_arguments(
    env: LocalEnvironment, argv: list[str]
) -> None:
    with pytest.raises(CommandNotStarted, match=f"{argv[0]} could not be started") as caught:
        await env.exec(argv)
    assert len(str(caught.value)) < 300


async def test_options_that_mean_nothing_are_refused(env: LocalEnvironment) -> None:
    with pytest.raises(ValueError, match="time-out"):
        await env.exec("true", timeout_ms=0)
    with pytest.raises(ValueError, match="at least its program"):
        await env.exec([])


async def test_commands_run_side_by_side(env: LocalEnvironment) -> None:
    """Each waits for the other: in turn they would never end. Ending one leaves the other alone."""
    wait = "touch {0}; while [ ! -e {1} ]; do sleep 0.02; done; echo {0}"
    results = await asyncio.gather(env.exec(wait.format("a", "b")), env.exec(wait.format("b", "a")))
    assert [result.output for result in results] == [b"a\n", b"b\n"]


# --- surroundings ----------------------------------------------------------------------------------------------


async def test_variables_and_directory(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "sub").mkdir()
    monkeypatch.setenv("FROM_HOST", "host")
    show = "echo $FROM_HOST,$GIVEN,$ADDED,$PWD"
    inheriting = LocalEnvironment(work)
    result = await inheriting.exec(show, cwd="sub", env={"ADDED": "1"})
    assert result.output == f"host,,1,{work}/sub\n".encode()
    given = LocalEnvironment(work, env={"GIVEN": "2", "PATH": os.environ["PATH"]})
    assert (await given.exec(show)).output == f",2,,{work}\n".encode()


async def test_a_command_inherits_no_descriptor_and_leaves_none(env: LocalEnvironment, work: Path) -> None:
    secret = os.open(work, os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        result = await env.exec(["sh", "-c", "ls /proc/$$/fd"])
        assert str(secret) not in result.output.decode().split()
    finally:
        os.close(secret)

    async def everything() -> None:
        await env.exec("true")
        await env.exec("seq 1 20000")
        await env.exec("sleep 600", timeout_ms=1)
        await cancel_when_ready(env, "echo ready; sleep 600")
        with pytest.raises(CommandNotStarted):
            await env.exec(["/nonexistent"])

    await everything()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await everything()
    assert len(os.listdir("/proc/self/fd")) == before


# --- what the rest of the host does ----------------------------------------------------------------------------

OTHERS = """
import asyncio, os, signal, sys
from perdure.tools import command
from perdure.tools.local import LocalEnvironment
from perdure.tools.bash import bash

if sys.argv[2] == "ignored":  # as a parent that ignores it hands down
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
else:  # somebody waits for every child there is, and is faster than we
    spawn = command._Command._spawn
    def spawn_and_lose(self):
        spawn(self)
        os.waitpid(-1, 0)
    command._Command._spawn = spawn_and_lose

async def main():
    async with asyncio.timeout(60):
        answer = await bash(LocalEnvironment(sys.argv[1]), "echo out; exit 3")
    print(answer.details["exit_code"], answer.failed, answer.text)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["ignored", "waited for"])
async def test_an_exit_that_somebody_else_took_is_not_told_as_success(work: Path, how: str) -> None:
    """H115: nor does anybody wait for it for ever."""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", OTHERS, str(work), how], capture_output=True, text=True
    )
    assert done.stdout.startswith("None True out\n[How it ended is not known"), done.stderr


async def test_a_host_without_free_descriptors_starts_no_command(
    env: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await env.exec("true")

    def full() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", full)
    with pytest.raises(CommandNotStarted, match="Too many open files"):
        await env.exec("true")


async def test_what_was_missed_in_the_groups_of_a_command_is_ended(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T90: one that forks and ends, over and over, may not be there when it is looked for."""
    real, looks = processes.of_command, []

    def missing(leader: int, tag: str) -> list[processes.Process]:
        looks.append(leader)
        return [] if len(looks) == 1 else real(leader, tag)

    monkeypatch.setattr(processes, "of_command", missing)
    await env.exec("sleep 600 & echo $! > missed.pid")
    assert not alive(pids(work)["missed"])


async def test_a_command_whose_processes_cannot_be_looked_at_is_ended_all_the_same(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T90: and its descriptors are closed."""
    await env.exec("true")
    before = len(os.listdir("/proc/self/fd"))

    def full(leader: int, tag: str) -> list[processes.Process]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(processes, "of_command", full)
    with pytest.raises(OSError, match="Too many open files"):
        await env.exec("sleep 600 & echo $! > left.pid; sleep 600", timeout_ms=2_000)
    see_gone(pids(work)["left"])
    assert len(os.listdir("/proc/self/fd")) == before


HOST = """
import asyncio, sys
from perdure.tools.local import LocalEnvironment

async def main():
    env = LocalEnvironment(sys.argv[1])
    await env.exec(sys.stdin.read(), on_output=lambda chunk: print(chunk.decode(), end="", flush=True))

asyncio.run(main())
"""


@contextlib.contextmanager
def other_host(work: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process whose command has daemons in this workspace, ready."""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with host:
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(DAEMONS + "sleep 600")
        host.stdin.close()
        assert host.stdout.readline() == "ready\n"
        try:
            yield host
        finally:
            host.kill()
            host.wait()
            for process in processes.orphans(LocalEnvironment(work)._id):
                processes.send(process, signal.SIGKILL)


@pytest.mark.parametrize("first", ["exec", "write"])
async def test_what_a_killed_host_left_running_is_ended_before_anything_changes(
    env: LocalEnvironment, work: Path, first: str
) -> None:
    with other_host(work) as host:
        left = pids(work)
        host.kill()
        host.wait()
        assert len(left) == 5
        assert all(alive(pid) for pid in left.values())
        if first == "exec":
            await env.exec("true")
        else:
            await env.write_file("file", b"")
        assert not [name for name, pid in left.items() if alive(pid)]


async def test_what_a_living_host_runs_here_is_left_alone(env: LocalEnvironment, work: Path, tmp_path: Path) -> None:
    with other_host(work):
        await env.exec("true")
        assert all(alive(pid) for pid in pids(work).values())


async def test_another_workspace_is_left_alone(tmp_path: Path, work: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with other_host(work) as host:
        host.kill()
        host.wait()
        await LocalEnvironment(other).exec("true")
        assert all(alive(pid) for pid in pids(work).values())


async def test_a_cancelled_write_is_over_when_it_says_so(
    env: LocalEnvironment, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while the thread is in the middle: it ends first, so nothing lands after the caller was told."""
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()
    real = os.fsync

    def slow(file: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        real(file)

    await env.exec("true")
    monkeypatch.setattr(os, "fsync", slow)
    task = asyncio.create_task(env.write_file("file", b"data"))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert (work / "file").read_bytes() == b"data"
