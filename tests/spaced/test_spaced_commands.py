"""What commands do to get away, and what they do not: on every kind of containment there is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spaced_wire import CONTAINMENTS, Driver, Refused, Space, alive, eventually, key

from perdure.spaced import spaced

MakeSpace = Callable[..., Space]


@pytest.fixture(params=CONTAINMENTS)
def contained(request: pytest.FixtureRequest, make_space: MakeSpace) -> Space:
    space = make_space("--containment", request.param, "--testing-crash-points")
    try:
        return space.up()
    except AssertionError as error:
        if "no such cgroup hierarchy" in str(error):
            pytest.skip(f"{request.param} cannot be written here")
        raise


@pytest.fixture
def driver(contained: Space) -> Driver:
    driver = contained.driver(1)
    driver.advance()
    driver.settle_first()
    return driver


def pids_in(space: Space, name: str, count: int = 1) -> list[int]:
    path = space.workspace / name
    eventually(lambda: path.exists() and len(path.read_text().split()) >= count)
    return [int(pid) for pid in path.read_text().split()]


DAEMONISED = {
    "background": "sleep 1000 & echo $! > pid",
    "nohup": "nohup sleep 1000 >/dev/null 2>&1 & echo $! > pid",
    "setsid": "setsid sh -c 'echo $$ > pid; exec sleep 1000' & sleep 0",
    "double fork": "(setsid sh -c '(sh -c \"echo \\$\\$ > pid; exec sleep 1000\") & exit' &) ; sleep 0",
    "own environment": "env -i /bin/sh -c 'echo $$ > pid; exec sleep 1000' & sleep 0",
    "ignores signals": "(trap '' TERM INT HUP; exec sh -c 'echo $$ > pid; exec sleep 1000') & sleep 0",
    "holds the output": "sh -c 'echo $$ > pid; exec sleep 1000' 3>&1 & sleep 0",
}


@pytest.mark.parametrize("how", sorted(DAEMONISED))
def test_what_a_command_leaves_is_seen_frozen_thawed_and_killed(contained: Space, driver: Driver, how: str) -> None:
    """It has ended when its own process has; what it left lives on until a restore (rules S17, S23, S31, S33)."""
    result = driver.run(DAEMONISED[how])
    assert (result["state"], result["code"]) == ("exited", 0)
    (pid,) = pids_in(contained, "pid")
    assert alive(pid)
    # What started it on its way may take a moment to end.
    eventually(lambda: driver.call("status")[0]["living"] == 1)
    scan = driver.ask("scan", freeze=True)
    assert scan["living"] == 1
    if how != "own environment" or contained.words[1] != "none":
        assert scan["left"] == [key()]
    assert frozen(pid)
    driver.ask("settle", thaw=True)
    eventually(lambda: not frozen(pid))
    driver.ask("restore_begin", commit=1, floor={"call": 1, "attempt": 2})
    assert not alive(pid)
    assert driver.call("status")[0]["living"] == 0


def frozen(pid: int) -> bool:
    """Whether it is stopped, or its cgroup says that it is frozen."""
    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
        return True
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, _, path = line.split(":", 2)
        for folder in ("", "/unified", "/freezer"):
            for name, word in (("cgroup.events", "frozen 1"), ("freezer.state", "FROZEN")):
                file = Path(f"/sys/fs/cgroup{folder}{path}/{name}")
                if file.exists() and word in file.read_text():
                    return True
    return False


def test_leftovers_survive_a_restart_of_the_daemon_and_the_next_epoch_kills_them(
    contained: Space, driver: Driver
) -> None:
    """Rules S11, S18, S22: also those that called setsid."""
    driver.run(DAEMONISED["setsid"])
    (left,) = pids_in(contained, "pid")
    driver.start("echo $$ > running; exec sleep 1000", call=2)
    (running,) = pids_in(contained, "running")
    contained.again()
    assert alive(left)
    assert alive(running)
    second = contained.driver(2)
    answer = second.advance(keep=[key(2)])
    assert answer["commands"][0]["state"] == "running"
    assert not alive(left)
    assert alive(running)
    third = contained.driver(3)
    third.advance()
    assert not alive(running)


def test_leftovers_of_the_same_epoch_are_thawed_by_its_next_advance(contained: Space, driver: Driver) -> None:
    """Rules S12, S31: the outcome was committed, and the daemon died before it thawed."""
    driver.run(DAEMONISED["background"])
    (left,) = pids_in(contained, "pid")
    driver.ask("scan", freeze=True)
    contained.again()
    again = contained.driver(1)
    again.number = 1
    again.advance()
    assert alive(left)
    eventually(lambda: not frozen(left))


def test_a_time_out_ends_the_command_and_all_it_started(contained: Space, driver: Driver) -> None:
    """Rules S16, S17: its cause is the time-out, it was not cut off."""
    script = "setsid sleep 1000 & echo $! > pids; trap '' TERM; echo $$ >> pids; sleep 1000"
    result = driver.run(script, timeout_ms=2_000)
    assert (result["state"], result["cause"]) == ("exited", "timeout")
    assert [pid for pid in pids_in(contained, "pids", 2) if alive(pid)] == []


@pytest.mark.parametrize("script", ["trap '' TERM; sleep 1000", "trap 'exit 0' TERM; sleep 1000 & wait", "sleep 1000"])
def test_an_abort_is_a_cause_of_exit(contained: Space, driver: Driver, script: str) -> None:
    """Rules S16, S17."""
    driver.start(f"echo $$ > pid; {script}")
    (pid,) = pids_in(contained, "pid")
    result = driver.ask("kill", key=key(), cause="aborted")
    assert (result["state"], result["cause"], result["signal"]) == ("exited", "aborted", signal.SIGKILL)
    assert not alive(pid)


def test_too_much_output_ends_the_command(driver: Driver) -> None:
    """Rules S7, S16."""
    result = driver.run("exec yes", limits={"output_bytes": 1 << 20})
    assert result["cause"] == "output_limit"
    assert result["output_size"] == 1 << 20


def test_a_command_that_closes_its_pipes_or_hands_them_down_ends_when_it_ends(driver: Driver) -> None:
    """Rule S23."""
    assert driver.run("exec >&- 2>&- <&-; exit 4", call=1)["code"] == 4
    assert driver.run("sleep 1000 & exit 5", call=2)["code"] == 5


def test_a_command_inherits_nothing_of_the_daemon(contained: Space, driver: Driver) -> None:
    """Rules S2, S3: no descriptor, not the lock, not the token; a session of its own; signals as they were."""
    driver.run("ls -l /proc/self/fd | sed 's/.* \\([0-9]* -> \\)/\\1/' | sort; cat /proc/self/stat; env")
    text = driver.output().decode()
    assert "lock" not in text
    assert "socket:" not in text
    assert contained.token.read_text().strip() not in text
    lines = [line for line in text.splitlines() if " -> " in line and "/proc/" not in line]
    assert len(lines) == 3, lines
    assert driver.run("kill -TERM $$; exit 9", call=2)["signal"] == signal.SIGTERM
    assert driver.run("kill -PIPE $$; exit 9", call=3)["signal"] == signal.SIGPIPE


def test_a_command_that_cannot_be_run_is_an_exit_that_says_so(driver: Driver) -> None:
    """It was started, as far as the ledger goes: the key is spent (rule S14)."""
    missing = driver.ask("start", key=key(1), argv=["no-such-program"], wait_ms=10_000)
    assert (missing["cause"], missing["errno"]) == ("not_started", "ENOENT")
    nowhere = driver.ask("start", key=key(2), shell="true", cwd="nowhere", wait_ms=10_000)
    assert (nowhere["cause"], nowhere["errno"]) == ("not_started", "ENOENT")
    outside = driver.ask("start", key=key(3), shell="true", cwd="../..", wait_ms=10_000)
    assert outside["cause"] == "not_started"
    driver.write("plain", b"no program", call=4)
    denied = driver.ask("start", key=key(4), argv=["./plain"], wait_ms=10_000)
    assert (denied["cause"], denied["errno"]) == ("not_started", "EACCES")


def test_a_key_is_idempotent_and_another_command_under_it_is_a_conflict(contained: Space, driver: Driver) -> None:
    """Rule S14."""
    first = driver.run("echo x >> f; echo out")
    assert first["fresh"]
    again = driver.ask("start", key=key(), shell="echo x >> f; echo out")
    assert (again["state"], again["fresh"]) == ("exited", False)
    with pytest.raises(Refused) as caught:
        driver.start("echo y >> f")
    assert caught.value.code == "conflict"
    assert contained.files() == {"f": b"x\n"}


def test_limits_reach_the_command(driver: Driver) -> None:
    result = driver.run("ulimit -n; ulimit -f", limits={"open_files": 77, "file_bytes": 1 << 20})
    assert result["code"] == 0
    assert driver.output().split() == [b"77", b"2048"]
    assert driver.run("head -c 3000000 /dev/zero > big", call=2, limits={"file_bytes": 1 << 20})["code"] != 0


def test_output_is_read_from_any_offset_while_it_grows(contained: Space, driver: Driver) -> None:
    """Rule S23."""
    driver.start("echo one; while [ ! -e go ]; do sleep 0.01; done; echo two")
    result, body = driver.ask_body("wait", key=key(), wait_ms=10_000, length=100)
    assert (result["state"], body) == ("running", b"one\n")
    (contained.workspace / "go").touch()
    result, body = driver.ask_body("wait", key=key(), wait_ms=10_000, offset=4, length=100)
    assert body == b"two\n"
    result, body = driver.ask_body("wait", key=key(), wait_ms=10_000, offset=8, length=100)
    assert (result["state"], body) == ("exited", b"")
    assert driver.output(offset=2) == b"e\ntwo\n"
    driver.ask("settle", floor={"call": 2, "attempt": 0})
    assert driver.output() == b""
    assert list((contained.state / "outputs").iterdir()) == []


def test_the_environment_and_the_command_are_stored_nowhere(contained: Space, driver: Driver) -> None:
    """Rules S8, S23."""
    secret = "sesame-4711"
    driver.run(f"test $SECRET = {secret} && echo fine", env={"SECRET": secret})
    assert driver.output() == b"fine\n"
    driver.start("sleep 1000", call=2, env={"SECRET": secret})
    driver.call("arm", point="shim.before_exit", action="kill")
    for path in contained.state.rglob("*"):
        if path.is_file() and path.parent.name != "outputs":
            assert secret.encode() not in path.read_bytes(), path
    assert secret not in json.dumps(driver.call("status")[0])


@pytest.mark.parametrize("environment", ["", "env -i PATH=$PATH "])
def test_what_a_command_left_does_not_fill_the_disk_with_its_output(contained: Space, environment: str) -> None:
    """Rules S7, S23: also one that shed its tag, and after the command was forgotten."""
    contained.patches = ["glance=0.02"]
    driver = contained.again().driver(1)
    driver.advance()
    driver.settle_first()
    loop = "while [ ! -e go ]; do sleep 0.01; done; head -c 3000000 /dev/zero; touch wrote; exec sleep 1000"
    left = f"{environment}setsid sh -c 'echo $$ > pid; {loop}' &"
    result = driver.run(f"{left} while [ ! -s pid ]; do :; done; echo done")
    assert (result["state"], result["output_size"]) == ("exited", 5)
    driver.ask("settle", floor={"call": 2, "attempt": 0})
    (output,) = (contained.state / "outputs").iterdir()
    (contained.workspace / "go").touch()
    eventually((contained.workspace / "wrote").exists)
    eventually(lambda: output.stat().st_size <= 5 + (1 << 20))
    assert output.read_bytes()[:5] == b"done\n"
    driver.ask("restore_begin", commit=1)
    (pid,) = pids_in(contained, "pid")
    assert not alive(pid)


def test_many_commands_at_once_are_bounded(driver: Driver) -> None:
    """Rule S7."""
    for call in range(1, 65):
        driver.start("sleep 1000", call=call)
    with pytest.raises(Refused) as caught:
        driver.start("true", call=65)
    assert caught.value.code == "busy"
    driver.ask("restore_begin", commit=1, floor={"call": 70, "attempt": 0})
    assert driver.call("status")[0]["living"] == 0


def test_a_terminated_daemon_leaves_its_commands_to_the_next(contained: Space, driver: Driver) -> None:
    """Rule S22."""
    driver.start("echo $$ > pid; exec sleep 1000")
    (pid,) = pids_in(contained, "pid")
    assert contained.process is not None
    contained.process.terminate()
    assert contained.ended() == 0
    assert alive(pid)
    contained.up()
    assert contained.driver(2).advance(keep=[key()])["commands"][0]["state"] == "running"
    os.kill(pid, signal.SIGKILL)


def test_shutdown_kills_everything_if_told(contained: Space, driver: Driver) -> None:
    driver.run(DAEMONISED["double fork"])
    (pid,) = pids_in(contained, "pid")
    driver.call("shutdown", kill=True)
    assert contained.ended() == 0
    assert not alive(pid)


@pytest.mark.parametrize("connected", [True, False])
def test_a_daemon_whose_state_is_removed_kills_what_lives_and_ends_s40(contained: Space, connected: bool) -> None:
    contained.patches = ["glance=0.001"]
    driver = contained.again().driver(1)
    driver.advance()
    driver.settle_first()
    driver.run("setsid sh -c 'echo $$ > left; exec sleep 1000' & sleep 0")
    driver.start("echo $$ > pid; sleep 1000", ordinal=2)
    (left,), (running,) = pids_in(contained, "left"), pids_in(contained, "pid")
    moved = contained.state.rename(contained.folder / "moved")
    for _ in range(3):
        driver.ask("wait", key=key(ordinal=2), wait_ms=10)  # longer than two looks are apart
    assert alive(running)  # a directory that was moved is still there
    if not connected:
        driver.close()
    shutil.rmtree(moved)
    assert contained.ended() == 0
    assert not alive(left)
    assert not alive(running)
    assert os.path.exists(contained.listen.partition(":")[2])  # it may be the socket of another daemon by now


def test_without_the_kernels_list_of_children_descent_is_found_by_parents(make_space: MakeSpace) -> None:
    """Rule S18."""
    space = make_space("--containment", "none")
    space.patches = ["no-children"]
    driver = space.up().driver(1)
    driver.advance()
    driver.settle_first()
    driver.run(DAEMONISED["own environment"])
    (pid,) = pids_in(space, "pid")
    driver.ask("restore_begin", commit=1)
    assert not alive(pid)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of a Space's."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        yield process
        process.kill()


def untouched(process: subprocess.Popen[bytes]) -> bool:
    """It neither ends nor stops: it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"?")
    return process.stdout.read(1) == b"?"


def test_a_number_that_is_another_processs_by_now_is_not_killed_s17(
    make_space: MakeSpace, stranger: subprocess.Popen[bytes]
) -> None:
    """Between the list of a process's children and a look at them one ends, and a stranger gets its number."""
    space = make_space("--containment", "none")
    number = space.folder / "number"
    number.write_text(str(stranger.pid))
    space.patches = [f"stranger={number}"]
    driver = space.up().driver(1)
    driver.advance()
    driver.settle_first()
    driver.run("setsid sh -c 'echo $$ > pid; exec sleep 1000' & sleep 0")
    (pid,) = pids_in(space, "pid")
    assert driver.call("status")[0]["living"] == 1
    driver.ask("freeze")
    driver.ask("restore_begin", commit=1)
    assert not alive(pid)
    assert untouched(stranger)


def test_a_signal_is_for_the_process_that_was_seen_s17(stranger: subprocess.Popen[bytes]) -> None:
    ticks = spaced.start_ticks(stranger.pid)
    assert ticks is not None
    assert not spaced.send_signal(stranger.pid, ticks - 1, signal.SIGKILL)
    assert not spaced.send_signal(stranger.pid, None, signal.SIGKILL)
    assert untouched(stranger)
    assert spaced.send_signal(stranger.pid, ticks, signal.SIGKILL)
    assert stranger.wait(20) == -signal.SIGKILL
    assert not spaced.send_signal(stranger.pid, ticks, signal.SIGKILL)


def test_what_left_a_group_before_its_pidfd_was_open_is_not_killed_s17(
    stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a group has no kill of its own."""
    group = spaced.Cgroup("/nowhere", 1)
    seen = iter([[stranger.pid], []])
    monkeypatch.setattr(group, "pids", lambda: next(seen))
    group.kill()
    assert untouched(stranger)
    monkeypatch.setattr(group, "pids", lambda: [stranger.pid])
    group.kill()
    assert stranger.wait(20) == -signal.SIGKILL


def test_a_group_is_killed_while_its_number_is_its_own_s17(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that took too long is waited for after its group was killed for the last time: then that number is
    anybody's."""
    shim = object.__new__(spaced.Shim)
    shim.id = "none"
    shim.job = {"timeout_ms": 1, "output_bytes": 1 << 20}
    shim.setting = spaced.Setting("/nowhere", "/nowhere", "none-such", 0, "", "", False)
    said: list[str] = []
    wait, kill = os.waitpid, os.killpg
    monkeypatch.setattr(os, "waitpid", lambda pid, flags: (said.append("wait"), wait(pid, flags))[1])
    monkeypatch.setattr(os, "killpg", lambda pid, number: (said.append("kill"), kill(pid, number))[1])
    command = os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ, setsid=True)
    output = os.open(os.devnull, os.O_RDONLY)
    end = shim._wait(command, output, None, time.monotonic())  # pyright: ignore[reportPrivateUsage]
    os.close(output)
    assert end == {"cause": "timeout", "signal": signal.SIGKILL}
    assert said.index("wait") == len(said) - 1, said


@pytest.mark.parametrize("containment", CONTAINMENTS)
def test_nothing_is_restored_and_nobody_admitted_while_something_lives_on(
    make_space: MakeSpace, containment: str
) -> None:
    """Rules S11, S18, S33: what SIGKILL does not end. Told with its pids, the workspace as it was."""
    space = make_space("--containment", containment)
    space.patches = ["immortal"]
    driver = space.up().driver(1)
    driver.advance()
    driver.settle_first()
    driver.run("setsid sh -c 'echo $$ > pid; exec sleep 1000' & sleep 0")
    (pid,) = pids_in(space, "pid")
    with pytest.raises(Refused) as caught:
        driver.ask("restore_begin", commit=1, floor={"call": 1, "attempt": 2})
    assert (caught.value.code, caught.value.error["pids"]) == ("processes_remain", [pid])
    assert "pid" in space.files()
    assert driver.call("status")[0]["image"] is None
    second = space.driver(2)
    with pytest.raises(Refused) as caught:
        second.advance()
    assert caught.value.code == "processes_remain"
    admission = {"epoch": 2, "connection": 1, "boot": second.hello["boot"]}
    with pytest.raises(Refused) as caught:
        second.call("scan", **admission)
    assert caught.value.code == "stale_connection"
    os.kill(pid, signal.SIGKILL)
    second.advance()
    second.restore(1, None, {})
    assert space.files() == {}
