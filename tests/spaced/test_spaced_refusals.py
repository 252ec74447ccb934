"""What spaced refuses, how it says so, and that it lives on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spaced_wire import TOKEN, Driver, Refused, Space, Wire, chunked, dial, file_entry, key

from perdure.spaced import spaced

MakeSpace = Callable[..., Space]


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code


def alive_after(space: Space) -> None:
    wire = Wire(space.address)
    assert wire.call("status")[0]["space"] == "test"
    wire.close()


def start_refused(space: Space, *more: str) -> tuple[int, str]:
    process = subprocess.run(space.command(*more), capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
    return process.returncode, process.stderr.decode()


# --- who may talk


@pytest.mark.parametrize("token", ["", "wrong-token-wrong-token", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_a_wrong_token_gets_nothing_but_that(shared_space: Space, token: str) -> None:
    """Rule S3."""
    wire = Wire(shared_space.address, token=None)
    assert code_of(lambda: wire.call("hello", token=token, protocol=1)) == "unauthorized"
    with pytest.raises(ConnectionError):
        wire.call("status")
    alive_after(shared_space)


@pytest.mark.parametrize("op", ["status", "advance", "shutdown", "arm", "start", "read", "nonsense"])
def test_without_hello_nothing_is_answered(shared_space: Space, op: str) -> None:
    """Rule S3."""
    wire = Wire(shared_space.address, token=None)
    assert code_of(lambda: wire.call(op)) == "unauthorized"
    with pytest.raises(ConnectionError):
        wire.receive()
    alive_after(shared_space)


@pytest.mark.parametrize(
    "frame",
    [b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", struct.pack("!II", 3, 0) + b"[1]", struct.pack("!II", 2, 1 << 20) + b"{}"],
)
def test_what_is_no_hello_ends_the_connection(shared_space: Space, frame: bytes) -> None:
    """Rules S3, S7."""
    wire = Wire(shared_space.address, token=None)
    wire.sock.sendall(frame)
    assert code_of(wire.receive) == "unauthorized"
    with pytest.raises(ConnectionError):
        wire.receive()
    alive_after(shared_space)


def test_another_protocol_is_named(shared_space: Space) -> None:
    wire = Wire(shared_space.address, token=None)
    with pytest.raises(Refused) as caught:
        wire.call("hello", token=TOKEN, protocol=2)
    assert (caught.value.code, caught.value.error["protocol"]) == ("bad_request", 1)


def test_a_thousand_strangers_do_not_keep_the_driver_out(make_space: MakeSpace) -> None:
    """Rule S7: over tcp, most of them stuck in the middle of a frame."""
    space = make_space(listen="tcp:127.0.0.1:0").up()
    strangers: list[socket.socket] = []
    for number in range(1000):
        sock = dial(space.address)
        with contextlib.suppress(OSError):
            sock.sendall(b"\x00\x00"[: number % 3])
        strangers.append(sock)
    driver = space.driver(1)
    driver.advance()
    driver.settle_first()
    assert driver.run("echo fine")["code"] == 0
    open_still = 0
    for sock in strangers:
        sock.setblocking(False)
        try:
            open_still += sock.recv(1) != b""
        except BlockingIOError:
            open_still += 1
        except OSError:
            pass
    assert open_still <= spaced.STRANGERS


def test_connections_are_bounded_and_the_bound_is_named(make_space: MakeSpace) -> None:
    """Rule S7."""
    space = make_space("--connections", "5").up()
    wires = [Wire(space.address) for _ in range(5)]
    with pytest.raises(Refused) as caught:
        Wire(space.address)
    assert (caught.value.code, caught.value.error["limit"]) == ("busy", 5)
    wires.pop().close()
    deadline = time.monotonic() + 10
    while True:
        try:
            Wire(space.address)
            break
        except Refused:
            assert time.monotonic() < deadline


def test_a_client_that_says_nothing_is_let_go(space: Space) -> None:
    """Rule S7."""
    sock = dial(space.address)
    assert sock.recv(1) == b""


def test_a_client_that_does_not_read_is_let_go_and_holds_up_nobody(make_space: MakeSpace) -> None:
    """Rule S7: with the bound of 30 s made short."""
    space = make_space()
    space.patches = ["stall=1"]
    slow = space.up().driver(1)
    slow.advance()
    slow.settle_first()
    slow.write("big", bytes(8 << 20))
    slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.send_asked("read", path="big")
    other = slow.twin(space.address)
    assert other.ask("stat", path="big")["size"] == 8 << 20
    deadline = time.monotonic() + 20
    while other.call("status")[0]["connections"] > 1:
        assert time.monotonic() < deadline
    half = slow.twin(space.address)
    half.sock.sendall(struct.pack("!II", 100, 0) + b"{")
    assert half.sock.recv(1) == b""


def test_requests_sent_at_once_are_answered_one_by_one_in_order(shared: Driver) -> None:
    """One is in flight at a time, whatever arrives."""
    for number in range(20):
        if number % 2:
            shared.send_asked("scan", id=number)
        else:
            shared.send_asked("wait", id=number, key=key(), wait_ms=10)
    for number in range(20):
        head, _ = struct.unpack("!II", shared._exactly(8))
        answer = json.loads(shared._exactly(head))
        assert answer["id"] == number
        assert "result" in answer


# --- what may be asked


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"epoch": 2}, "stale_epoch"),
        ({"epoch": 0}, "stale_epoch"),
        ({"connection": 2}, "stale_connection"),
        ({"connection": 0}, "stale_connection"),
        ({"boot": "other"}, "stale_boot"),
        ({"epoch": None}, "bad_request"),
        ({"epoch": "1"}, "bad_request"),
        ({"boot": None}, "bad_request"),
        ({"surprise": 1}, "bad_request"),
    ],
)
@pytest.mark.parametrize("op", ["scan"])
def test_a_request_that_names_other_than_the_present_is_refused(
    driver: Driver, op: str, fields: dict[str, object], code: str
) -> None:
    """Rule S4."""
    assert code_of(lambda: driver.call(op, **{**driver.admission, **fields})) == code
    assert driver.ask("thaw") == {"living": 0}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"epoch": 0}, "bad_request"),
        ({"epoch": 1, "writer": "another"}, "stale_epoch"),
        ({"epoch": 1, "log": "another"}, "stale_epoch"),
        ({"connection": 1}, "stale_connection"),
        ({"keep": [{}]}, "bad_request"),
        ({"keep": "all"}, "bad_request"),
        ({"outcomes": [1]}, "bad_request"),
        ({"outcomes": [{"call": 1}]}, "bad_request"),
        ({"keep": [key()] * 2_001}, "too_large"),
        ({"log": "x" * 1000}, "too_large"),
    ],
)
def test_an_advance_that_may_not_be_changes_nothing(driver: Driver, fields: dict[str, object], code: str) -> None:
    """Rule S9."""
    good = {"log": "log-1", "epoch": 1, "writer": "writer-1", "connection": 2, "keep": [], "outcomes": []}
    assert code_of(lambda: driver.call("advance", **{**good, **fields})) == code
    assert driver.ask("thaw") == {"living": 0}
    assert driver.call("status")[0]["fence"]["connection"] == 1


def test_the_fence_is_on_disk(space: Space, driver: Driver) -> None:
    """Rules S6, S9."""
    space.driver(7, log="log-9").advance()
    space.again()
    fence = Wire(space.address).hello["fence"]
    assert (fence["epoch"], fence["log"], fence["writer"]) == (7, "log-9", "writer-7")
    assert code_of(space.driver(6, log="log-9").advance) == "stale_epoch"
    assert code_of(space.driver(7).advance) == "stale_epoch"


@pytest.mark.parametrize(
    "header",
    [
        {"op": "start"},
        {"op": "start", "key": {"call": 1, "attempt": 1, "nonce": "n"}, "shell": "true"},
        {"op": "start", "key": {"call": 1, "attempt": 1, "nonce": "n", "ordinal": 0}, "shell": "true"},
        {"op": "start", "key": {"call": 1, "attempt": True, "nonce": "n", "ordinal": 1}, "shell": "true"},
        {"op": "start", "key": {"call": 1 << 70, "attempt": 1, "nonce": "n", "ordinal": 1}, "shell": "true"},
        {"op": "start", "key": key(), "shell": "true\0"},
        {"op": "start", "key": key(), "argv": []},
        {"op": "start", "key": key(), "argv": [1]},
        {"op": "start", "key": key(), "argv": "true"},
        {"op": "start", "key": key(), "shell": "true", "argv": ["true"]},
        {"op": "start", "key": key(), "shell": "true", "env": {"A=B": "c"}},
        {"op": "start", "key": key(), "shell": "true", "env": {"A": 1}},
        {"op": "start", "key": key(), "shell": "true", "limits": {"surprise": 1}},
        {"op": "start", "key": key(), "shell": "true", "timeout_ms": 0},
        {"op": "start", "key": key(), "shell": "true", "wait_ms": 30_001},
        {"op": "start", "key": key(), "shell": "\ud800"},
        {"op": "wait", "key": key(), "offset": -1},
        {"op": "look", "keys": [key()] * 2_001},
        {"op": "read", "path": "\0"},
        {"op": "read", "path": {"b64": "!"}},
        {"op": "read", "path": {"b64": "YQ==", "more": 1}},
        {"op": "read", "path": 1},
        {"op": "read", "path": "x" * 5000},
        {"op": "write", "path": "f", "call": 1, "attempt": 1},
        {"op": "chunks", "items": [{"path": "f"}]},
        {"op": "settle", "scan": 1},
        {"op": "settle", "floor": {"call": 1}},
        {"op": "put", "surprise": 1},
        {"op": "glob", "pattern": "x" * 5000},
        {"op": "grep", "pattern": "("},
        {"op": "nonsense"},
    ],
)
def test_malformed_requests_are_refused_and_the_connection_goes_on(shared: Driver, header: dict[str, object]) -> None:
    """Rule S7."""
    shared.send_raw({**shared.admission, **header})
    assert code_of(shared.receive) in ("bad_request", "too_large", "unknown_scan")
    assert shared.ask("thaw") == {"living": 0}


@pytest.mark.parametrize("sizes", [(1 << 31, 0), (10, 1 << 31), (1 << 21, 0), (10, (16 << 20) + 1)])
def test_oversized_frames_end_their_connection_only(
    shared_space: Space, shared: Driver, sizes: tuple[int, int]
) -> None:
    """Rule S7."""
    other = shared.twin(shared_space.address)
    shared.sock.sendall(struct.pack("!II", *sizes) + b"x" * 100)
    with pytest.raises(Refused) as caught:
        shared.receive()
    assert caught.value.code == "too_large"
    assert caught.value.error["limit"] in (1 << 20, 16 << 20)
    with pytest.raises(ConnectionError):
        shared.receive()
    assert other.ask("thaw") == {"living": 0}


def test_crash_points_do_not_exist_unless_asked_for(make_space: MakeSpace) -> None:
    space = make_space().up()
    wire = Wire(space.address)
    assert code_of(lambda: wire.call("arm", point="shim.exit", action="kill")) == "bad_request"


# --- who may serve


def test_a_second_daemon_on_the_same_state_says_who_holds_it(space: Space) -> None:
    """Rule S2."""
    assert space.process is not None
    status, said = start_refused(space)
    assert status == 3
    assert f"process {space.process.pid}" in said
    alive_after(space)


def test_a_second_daemon_on_the_same_workspace_is_refused(space: Space, tmp_path: Path) -> None:
    """Rule S2."""
    assert space.process is not None
    other = Space(tmp_path / "other")
    other.workspace = space.workspace
    status, said = start_refused(other)
    assert status == 3
    assert str(space.workspace) in said
    assert str(space.process.pid) in said
    alive_after(space)


def test_shims_do_not_hold_the_lock_of_a_dead_daemon(space: Space, driver: Driver) -> None:
    """Rules S2, S22."""
    driver.start("sleep 1000")
    space.again()
    assert space.driver(2).advance(keep=[key()])["commands"][0]["state"] == "running"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--generation", "2"), "generation"),
        (("--space", "another"), "space"),
        (("--listen", "tcp:0.0.0.0:0"), "--allow-remote"),
        (("--listen", "nonsense"), "--listen"),
        (("--state", "{work}/state"), "beside"),
        (("--token-file", "{folder}/none"), "token"),
        (("--token-file", "{folder}/short"), "16"),
        (("--workspace", "{folder}/none"), "not a directory"),
    ],
)
def test_what_it_cannot_serve_it_says(space: Space, words: tuple[str, ...], says: str) -> None:
    """Rules S2, S3."""
    space.kill()
    (space.folder / "short").write_text("short")
    status, said = start_refused(space, *(word.format(work=space.workspace, folder=space.folder) for word in words))
    assert status == 2
    assert says in said
    assert TOKEN not in said


def test_an_address_that_is_not_loopback_can_be_meant(make_space: MakeSpace) -> None:
    """Rule S3."""
    space = make_space("--allow-remote", listen="tcp:0.0.0.0:0").up()
    assert space.address.startswith("tcp:0.0.0.0:")


# --- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB. Only root can mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def full(small_disk: Path) -> Iterator[Space]:
    """State and workspace on a disk that is full but for less than a page."""
    space = Space(small_disk / "space", "--testing-crash-points")
    space.up()
    yield space
    space.down()


def fill(space: Space) -> Path:
    path = space.folder / "fill"
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path


def test_a_full_disk_is_named_nothing_changes_and_the_daemon_lives_on(full: Space) -> None:
    """Rule S37; and the journal has room for what must be recorded (rule S6)."""
    driver = full.driver(1)
    driver.advance()
    driver.settle_first()
    driver.write("old", b"content")
    filler = fill(full)
    assert code_of(lambda: driver.write("old", bytes(100_000))) == "no_space"
    assert code_of(lambda: driver.write("new", bytes(100_000))) == "no_space"
    assert code_of(lambda: driver.ask("put", bytes(100_000))) == "no_space"
    assert full.files() == {"old": b"content"}
    result = driver.run("echo x > f", call=2)
    assert (result["state"], result["code"] != 0) == ("exited", True)
    scan = driver.ask("scan", freeze=True, sync=True)
    driver.ask("settle", commit=2, scan=scan["scan"], floor={"call": 3, "attempt": 0})
    driver.ask("restore_begin", commit=1, floor={"call": 3, "attempt": 2})
    second = full.driver(2)
    second.advance()
    filler.unlink()
    second.restore(2, [], {})
    assert full.files() == {}
    assert second.run("echo x > f", call=4)["code"] == 0


def test_a_restore_on_a_full_disk_changes_nothing_of_the_workspace(full: Space) -> None:
    """Rules S34, S37."""
    driver = full.driver(1)
    driver.advance()
    driver.settle_first()
    driver.write("mine", b"content")
    content = os.urandom(1 << 20)
    begun = driver.ask("restore_begin", commit=3)
    image = [file_entry("a", content), file_entry("b", content)]
    driver.ask("restore_image", json.dumps(image).encode(), restore=begun["restore"])
    driver.ask("restore_plan", restore=begun["restore"])
    for chunk in chunked(content).values():
        driver.ask("put", chunk)
    filler = fill(full)
    assert code_of(lambda: driver.ask("restore_apply", restore=begun["restore"], preserve="none")) == "no_space"
    assert full.files() == {"mine": b"content"}
    assert driver.call("status")[0]["image"] is None
    filler.unlink()
    driver.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert full.files() == {"a": content, "b": content}


def test_a_journal_that_cannot_grow_refuses_to_start_commands(full: Space) -> None:
    """Rule S6: what it still has room for are exits and undos."""
    driver = full.driver(1)
    driver.advance()
    driver.settle_first()
    filler = fill(full)
    refused = ""
    for call in range(1, 2000):
        try:
            driver.start("true", call=call, wait_ms=10_000)
        except Refused as error:
            refused = error.code
            break
    assert refused == "no_space"
    driver.ask("restore_begin", commit=1, floor={"call": 2000, "attempt": 0})
    filler.unlink()
    driver.restore(1, None, {})
    assert driver.run("true", call=3000)["code"] == 0


def test_the_daemon_is_started_by_file_and_by_nothing_else(tmp_path: Path) -> None:
    """Rule S1: isolated from every package, and from the user's site."""
    space = Space(tmp_path / "space")
    command = space.command()
    process = subprocess.run([sys.executable, "-I", "-S", *command[1:], "--help"], capture_output=True, timeout=30)
    assert process.returncode == 0
