"""The counterexamples of the protocol's model, one test a rule: each with the daemon held or killed at the step that
would let it happen. Rules of the driver's side (what it reads when, what it commits first) are tested with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from spaced_wire import Driver, Refused, Space, Wire, alive, chunked, eventually, file_entry, key

MakeSpace = Callable[..., Space]


def held(space: Space, point: str) -> None:
    """Wait until something is held at a point."""
    wire = Wire(space.address)
    eventually(lambda: point in wire.call("armed")[0]["held"])
    wire.close()


def release(space: Space, point: str) -> None:
    wire = Wire(space.address)
    wire.call("release", point=point)
    wire.close()


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code


def pid_in(space: Space, name: str) -> int:
    """The pid a command wrote into a file."""
    path = space.workspace / name
    return int(eventually(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text()))


SLEEPER = "echo $$ > pid; exec sleep 1000"


def test_a_void_key_never_starts_and_the_next_attempt_does(driver: Driver) -> None:
    """void_new_attempt: going on under the voided key would be stuck for ever (rule S21)."""
    assert driver.ask("void", key=key())["state"] == "void"
    assert refused(lambda: driver.start("true")) == "void"
    assert driver.state() == "void"
    assert driver.run("true", attempt=2)["state"] == "exited"
    assert driver.ask("void", key=key(attempt=2))["state"] == "exited"


def test_a_file_request_leaves_no_trace_in_the_ledger_so_it_is_undone(space: Space, driver: Driver) -> None:
    """file_undo: absent says nothing about file requests; an undo removes them, and below its floor none comes late."""
    driver.write("f", b"once", call=5)
    second = space.driver(2)
    second.advance()
    assert second.state(call=5) == "absent"
    second.restore(1, None, {}, floor={"call": 5, "attempt": 2})
    assert space.files() == {}
    assert refused(lambda: second.write("f", b"late", call=5, attempt=1)) == "below_floor"


def test_an_advance_keeps_only_what_it_is_told_to_keep(space: Space, driver: Driver) -> None:
    """run_adoptable: a command that nobody may adopt does not live on (rules S11, S12)."""
    driver.start("echo $$ > kept; exec sleep 1000", call=1)
    driver.start("echo $$ > other; exec sleep 1000", call=2)
    kept, other = pid_in(space, "kept"), pid_in(space, "other")
    second = space.driver(2)
    answer = second.advance(keep=[key(1), key(9)])
    assert [command["state"] for command in answer["commands"]] == ["running", "absent"]
    assert alive(kept)
    assert not alive(other)
    assert second.state(call=2) == "cut_off"
    second.advance()
    assert alive(kept), "what was kept belongs to the new epoch: its own advance does not kill it"
    third = space.driver(3)
    third.advance()
    assert not alive(kept)


def test_a_file_request_admitted_before_an_advance_has_no_effect_after_it(space: Space, driver: Driver) -> None:
    """admit_atomic (rule S5)."""
    driver.call("arm", point="write.admitted", action="hold")
    driver.send_asked("write", b"late", path="f", call=1, attempt=1, nonce="n")
    held(space, "write.admitted")
    space.driver(2).advance()
    assert refused(driver.receive) == "stale_epoch"
    assert space.files() == {}


def test_a_write_held_beside_its_file_leaves_nothing_when_overtaken(space: Space, driver: Driver) -> None:
    """admit_atomic, one step later (rules S5, S37)."""
    driver.call("arm", point="write.staged", action="hold")
    driver.send_asked("write", b"late", path="f", call=1, attempt=1, nonce="n")
    held(space, "write.staged")
    space.driver(2).advance()
    assert refused(driver.receive) == "stale_epoch"
    assert list(space.workspace.iterdir()) == []


def test_an_undo_at_work_ends_when_a_newer_driver_advances(space: Space, driver: Driver) -> None:
    """drain: an undo of an older epoch changes nothing after the advance (rules S5, S11)."""
    for name in "abc":
        driver.write(name, b"x")
    driver.call("arm", point="restore.swap", action="hold", skip=1)
    begun = driver.ask("restore_begin", commit=1, floor={"call": 1, "attempt": 2})
    driver.ask("restore_plan", restore=begun["restore"])
    driver.send_asked("restore_apply", restore=begun["restore"], preserve="none")
    held(space, "restore.swap")
    before = space.files()
    assert len(before) == 2
    second = space.driver(2)
    assert second.advance()["image"] is None
    assert refused(driver.receive) == "stale_epoch"
    assert space.files() == before
    second.restore(1, None, {})
    assert space.files() == {}


def test_a_shim_looks_at_the_fence_on_disk_before_it_starts_anything(space: Space, driver: Driver) -> None:
    """shim_fence: no daemon is there to refuse it (rule S13)."""
    driver.call("arm", point="shim.before_started", action="hold")
    driver.send_asked("start", key=key(), shell="touch ran")
    held(space, "shim.before_started")
    shim = stopped_shim(space)
    space.again("--testing-crash-points")
    second = space.driver(2)
    second.advance()
    cont(shim)
    eventually(lambda: not alive(shim))
    assert second.state() == "absent"
    assert space.files() == {}


def stopped_shim(space: Space) -> int:
    """The pid of the shim that holds: a stopped process with the daemon's own command line."""

    def look() -> int | None:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        state = file.read().rpartition(")")[2].split()[0]
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        line = file.read()
                except OSError:
                    continue
                if state == "T" and str(space.state).encode() in line:
                    return int(name)
        return None

    return int(eventually(look))


def cont(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def test_below_the_floor_nothing_starts_and_nothing_is_written(space: Space, driver: Driver) -> None:
    """floor (rule S25)."""
    assert driver.run("echo x > f")["state"] == "exited"
    driver.restore(1, None, {}, floor={"call": 1, "attempt": 2})
    assert refused(lambda: driver.start("true", attempt=1, ordinal=2)) == "below_floor"
    assert refused(lambda: driver.write("f", b"x", attempt=1)) == "below_floor"
    assert driver.ask("settle", floor={"call": 1, "attempt": 0})["floor"] == {"call": 1, "attempt": 2}
    assert driver.run("true", attempt=2)["state"] == "exited"


def test_a_shim_refuses_a_key_below_the_floor(space: Space, driver: Driver) -> None:
    """forget_floor: the void of a forgotten key is gone, the floor is not (rules S13, S26)."""
    driver.call("arm", point="shim.before_started", action="hold")
    driver.send_asked("start", key=key(), shell="touch ran")
    held(space, "shim.before_started")
    other = driver.twin(space.address)
    assert other.ask("void", key=key())["state"] == "void"
    other.ask("settle", floor={"call": 2, "attempt": 0})
    release(space, "shim.before_started")
    assert refused(driver.receive) == "below_floor"
    assert space.files() == {}


def test_a_shim_refuses_a_key_that_was_voided_while_it_was_forked(space: Space, driver: Driver) -> None:
    """void, at the last moment (rules S13, S21)."""
    driver.call("arm", point="shim.before_started", action="hold")
    driver.send_asked("start", key=key(), shell="touch ran")
    held(space, "shim.before_started")
    assert driver.twin(space.address).ask("void", key=key())["state"] == "void"
    release(space, "shim.before_started")
    assert refused(driver.receive) == "void"
    assert driver.state() == "void"
    assert space.files() == {}


def test_a_write_that_was_staged_is_not_renamed_once_its_call_is_undone(space: Space, driver: Driver) -> None:
    """floor, against a request of the same driver (rules S5, S25, S33)."""
    driver.call("arm", point="write.staged", action="hold")
    driver.send_asked("write", b"late", path="f", call=1, attempt=1, nonce="n")
    held(space, "write.staged")
    driver.twin(space.address).ask("restore_begin", commit=1, floor={"call": 1, "attempt": 2})
    release(space, "write.staged")
    assert refused(driver.receive) == "below_floor"
    assert space.files() == {}


def test_advance_and_undo_kill_shims_that_have_not_started(space: Space, driver: Driver) -> None:
    """kill_pending (rule S11)."""
    driver.call("arm", point="shim.before_started", action="hold")
    driver.send_asked("start", key=key(), shell="touch ran")
    held(space, "shim.before_started")
    shim = stopped_shim(space)
    second = space.driver(2)
    second.advance()
    assert not alive(shim)
    assert refused(driver.receive) in ("stale_epoch", "busy")
    second.call("arm", point="shim.before_started", action="hold")
    second.send_asked("start", key=key(), shell="touch ran")
    held(space, "shim.before_started")
    shim = stopped_shim(space)
    second.twin(space.address).ask("restore_begin", commit=1, floor={"call": 1, "attempt": 2})
    assert not alive(shim)
    assert refused(second.receive) in ("below_floor", "busy")


def test_an_overtaken_advance_stops_and_kills_nothing_of_the_newer(space: Space, driver: Driver) -> None:
    """older_only (rule S12)."""
    driver.call("arm", point="advance.fenced", action="hold")
    driver.send_advance()
    held(space, "advance.fenced")
    second = space.driver(2)
    second.advance()
    second.start(SLEEPER)
    assert refused(driver.receive) == "stale_epoch"
    assert alive(pid_in(space, "pid"))
    assert second.state() == "running"


@pytest.mark.parametrize("point", ["advance.fenced", "advance.cut", "advance.killed"])
def test_advancing_again_does_all_of_it_again(space: Space, driver: Driver, point: str) -> None:
    """readvance: the daemon died in the middle of the first one (rule S12)."""
    driver.start(SLEEPER)
    pid = pid_in(space, "pid")
    second = space.driver(2)
    second.call("arm", point=point, action="kill")
    second.send_advance()
    with pytest.raises(ConnectionError):
        second.receive()
    space.ended()
    space.up()
    again = space.driver(2)
    assert (
        refused(lambda: again.call("look", keys=[], epoch=2, connection=1, boot=again.hello["boot"]))
        == "stale_connection"
    )
    assert refused(again.advance) == "stale_connection", "the number has to be a higher one"
    again.advance()
    assert not alive(pid)
    assert again.state() == "cut_off"


def test_a_space_without_an_image_record_changes_nothing(make_space: MakeSpace) -> None:
    """mark (rules S24, S27)."""
    space = make_space().up()
    (space.workspace / "users").write_text("own")
    driver = space.driver(1)
    assert driver.advance()["image"] is None
    assert refused(lambda: driver.start("true")) == "no_image"
    assert refused(lambda: driver.write("f", b"x")) == "no_image"
    assert driver.ask("scan")["image"] is None
    driver.settle_first(4)
    assert driver.ask("scan")["base"] == {"log": "log-1", "commit": 4, "nonce": ""}
    other = space.driver(2, log="log-2")
    assert other.advance()["floor"] is None
    assert refused(lambda: other.start("true")) == "no_image", "an image of another log is none"
    assert space.files() == {"users": b"own"}


@pytest.mark.parametrize(
    ("point", "skip"),
    [
        ("restore.begin", 0),
        ("restore.floor", 0),
        ("restore.killed", 0),
        ("restore.staged", 0),
        ("restore.swap", 0),
        ("restore.swap", 1),
        ("restore.swap", 3),
        ("restore.swapped", 0),
    ],
)
def test_a_restore_that_was_killed_leaves_no_image_record_and_is_done_again(
    space: Space, driver: Driver, point: str, skip: int
) -> None:
    """undo_unmark (rules S27, S33, S34)."""
    driver.run("mkdir d; echo a > a; echo b > d/b; ln -s a l")
    image = [{"path": "d", "kind": "directory", "mode": 0o755}, file_entry("d/b", b"other"), file_entry("c", b"c")]
    driver.call("arm", point=point, action="kill", skip=skip)
    with pytest.raises(ConnectionError):
        driver.restore(2, image, chunked(b"other", b"c"), floor={"call": 1, "attempt": 2})
    space.ended()
    space.up()
    second = space.driver(2)
    answer = second.advance()
    if point == "restore.begin":
        assert answer["image"]["commit"] == 1
        assert answer["floor"] is None
        assert second.state() == "exited"
    else:
        assert answer["image"] is None
        assert answer["floor"] == {"call": 1, "attempt": 2}
        assert second.state() == "cut_off", "condemn: the decision to undo is on disk before the first change"
    assert second.restore(2, image, chunked(b"other", b"c"))["image"]["commit"] == 2
    assert space.files() == {"c": b"c", "d/b": b"other"}


def test_a_restore_that_set_its_record_is_done(space: Space, driver: Driver) -> None:
    """undo_unmark, the other end (rule S27)."""
    driver.call("arm", point="restore.image", action="kill")
    with pytest.raises(ConnectionError):
        driver.restore(2, [file_entry("c", b"c")], chunked(b"c"))
    space.ended()
    space.up()
    assert space.driver(2).advance()["image"]["commit"] == 2
    assert space.files() == {"c": b"c"}


def test_after_an_undo_its_call_reads_as_cut_off_whatever_was_recorded(space: Space, driver: Driver) -> None:
    """undo_first, condemn (rule S25): a driver that finds the undone attempt open does not adopt its exit."""
    driver.run("echo x > f")
    driver.restore(1, None, {}, floor={"call": 1, "attempt": 2})
    second = space.driver(2)
    second.advance(keep=[key()])
    found = second.ask("look", keys=[key()])["commands"][0]
    assert (found["state"], found["below_floor"]) == ("cut_off", True)


def test_undoing_kills_everything_that_lives(space: Space, driver: Driver) -> None:
    """undo_kills: running commands and leftovers of any call (rule S33)."""
    driver.run("setsid sh -c 'echo $$ > left; exec sleep 1000' >/dev/null 2>&1 &", call=1)
    driver.start("echo $$ > running; exec sleep 1000", call=2)
    left, running = pid_in(space, "left"), pid_in(space, "running")
    driver.ask("restore_begin", commit=1, floor={"call": 2, "attempt": 2})
    assert not alive(left)
    assert not alive(running)


def test_the_image_record_names_the_boot_it_was_set_in(make_space: MakeSpace) -> None:
    """boot_mark (rule S27)."""
    space = make_space()
    space.patches = ["boot=first"]
    driver = space.up().driver(1)
    driver.advance()
    driver.settle_first()
    space.patches = ["boot=second"]
    space.again()
    second = space.driver(2)
    answer = second.advance()
    assert (answer["image"]["boot"], answer["boot"]) == ("first", "second")


def test_a_cut_off_is_on_disk_before_the_first_signal_and_beats_an_exit(space: Space, driver: Driver) -> None:
    """cut_first (rule S15): the daemon dies in between, and the command ends well."""
    driver.start("echo $$ > pid; while [ ! -e go ]; do sleep 0.01; done; echo done > done")
    pid_in(space, "pid")
    second = space.driver(2)
    second.call("arm", point="advance.cut", action="kill")
    second.send_advance()
    with pytest.raises(ConnectionError):
        second.receive()
    space.ended()
    (space.workspace / "go").touch()
    eventually(lambda: (space.workspace / "done").exists())
    space.up()
    third = space.driver(3)
    third.advance(keep=[key()])
    assert third.state() == "cut_off"


def test_an_advance_answers_when_the_killed_are_gone(space: Space, driver: Driver) -> None:
    """gone_first (rule S11)."""
    script = "trap '' TERM HUP INT; for i in 1 2 3; do (setsid sleep 1000 & echo $! >> pids; wait) & done; wait"
    driver.start(script)
    pids = eventually(lambda: (space.workspace / "pids").exists() and (space.workspace / "pids").read_text().split())
    eventually(lambda: len((space.workspace / "pids").read_text().split()) == 3)
    pids = (space.workspace / "pids").read_text().split()
    space.driver(2).advance()
    assert [pid for pid in pids if alive(int(pid))] == []


def test_after_a_restart_of_the_machine_requests_are_refused_and_exits_do_not_count(make_space: MakeSpace) -> None:
    """boot_bound (rules S4, S19)."""
    space = make_space()
    space.patches = ["boot=first"]
    driver = space.up().driver(1)
    driver.advance()
    driver.settle_first()
    assert driver.run("echo x > f")["state"] == "exited"
    space.patches = ["boot=second"]
    space.again()
    late = space.driver(1)
    late.admission = driver.admission
    assert refused(lambda: late.ask("scan")) == "stale_boot"
    late.number = 1
    late.advance(keep=[key()])
    assert late.state() == "unknown"


def test_an_undo_of_an_earlier_connection_changes_nothing_after_the_next_advance(space: Space, driver: Driver) -> None:
    """conn_fence (rules S9, S10): the same driver, its connection broken, its undo still at work."""
    driver.write("f", b"first")
    driver.call("arm", point="restore.floor", action="hold")
    driver.send_asked("restore_begin", commit=1, floor={"call": 1, "attempt": 2})
    held(space, "restore.floor")
    driver.sock.close()
    again = space.driver(1)
    again.number = 1
    again.advance()
    again.restore(1, None, {}, floor={"call": 1, "attempt": 2})
    again.write("f", b"second", attempt=2)
    assert again.call("armed")[0]["held"] == []
    assert space.files() == {"f": b"second"}
    assert again.ask("scan")["image"]["commit"] == 1


def test_a_capture_flushes_the_workspace_before_it_answers(make_space: MakeSpace) -> None:
    """sync_capture (rule S31)."""
    space = make_space("--testing-crash-points")
    log = space.folder / "syncs"
    log.touch()
    space.patches = [f"syncs={log}"]
    driver = space.up().driver(1)
    driver.advance()
    driver.settle_first()
    assert log.read_text() == ""
    driver.run("echo x > f")
    driver.call("arm", point="scan.synced", action="hold")
    driver.send_asked("scan", freeze=True, sync=True)
    held(space, "scan.synced")
    assert log.read_text() == "sync\n"
    release(space, "scan.synced")
    scan = driver.receive()[0]
    driver.ask("settle", commit=2, scan=scan["scan"])
    driver.ask("scan", freeze=True, sync=True)
    assert log.read_text().count("sync") <= 2, "nothing written, nothing to flush, but for what was too fresh to tell"


def test_record_and_liveness_of_a_command_are_one(space: Space, driver: Driver) -> None:
    """atomic_look (rules S19, S20): an exit that is on disk is never unknown; a shim without one is never running."""
    driver.call("arm", point="shim.exit", action="kill")
    assert driver.run("exit 3", call=1)["state"] == "exited"
    driver.call("arm", point="shim.before_exit", action="kill")
    assert driver.run("exit 3", call=2)["state"] == "unknown"
    driver.call("arm", point="shim.started", action="kill")
    assert driver.run("exit 3", call=3)["state"] == "unknown"
    driver.call("arm", point="shim.running", action="kill")
    assert driver.run("exit 3", call=4)["state"] == "unknown"
    driver.call("arm", point="shim.before_started", action="kill")
    assert refused(lambda: driver.run("exit 3", call=5)) == "busy"
    assert driver.state(call=5) == "absent"
    driver.call("arm", point="shim.exit", action="hold")
    driver.send_asked("start", key=key(6), shell="exit 3", wait_ms=30_000)
    held(space, "shim.exit")
    other = driver.twin(space.address)
    assert other.state(call=6) in ("running", "exited")
    release(space, "shim.exit")
    assert driver.receive()[0]["code"] == 3


def test_what_a_shim_wrote_but_did_not_tell_is_told_after_the_daemon_was_killed(space: Space, driver: Driver) -> None:
    """Rules S19, S22: the exit was recorded while no daemon was there."""
    driver.start("echo $$ > pid; while [ ! -e go ]; do sleep 0.01; done; echo out; exit 7")
    pid_in(space, "pid")
    space.kill()
    (space.workspace / "go").touch()
    space.up()
    second = space.driver(2)
    second.advance(keep=[key()])
    result = second.ask("wait", key=key(), wait_ms=30_000)
    assert (result["state"], result["code"]) == ("exited", 7)
    assert second.output() == b"out\n"


def test_an_advance_names_the_generation(driver: Driver) -> None:
    """gen_commit, the daemon's part: the driver learns what it is to commit."""
    assert driver.hello["generation"] == 1
    assert driver.advance()["generation"] == 1


def test_a_shim_that_was_killed_while_it_idled_is_replaced(space: Space, driver: Driver) -> None:
    """Rule S22: nothing was handed to it yet."""
    for call in range(1, 6):
        assert driver.run("echo $PPID > shim", call=call)["code"] == 0
        shim = int((space.workspace / "shim").read_text())
        os.kill(shim, signal.SIGKILL)
        eventually(lambda pid=shim: not alive(pid))
