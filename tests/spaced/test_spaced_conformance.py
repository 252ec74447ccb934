"""What any daemon of this protocol must do, told over the wire alone.

By default against a daemon of its own; against another one with its address and the file of its token:

    SPACED_ADDRESS=tcp:127.0.0.1:4711 SPACED_TOKEN_FILE=token pytest tests/spaced/test_spaced_conformance.py

That Space is taken over, and its workspace is emptied.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from spaced_wire import CHUNK, TOKEN, Driver, Refused, Space, Wire, chunked, file_entry, hang_up, key, sha


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    address = os.environ.get("SPACED_ADDRESS")
    if address:
        yield address, Path(os.environ["SPACED_TOKEN_FILE"]).read_text().strip()
        return
    space = Space(tmp_path_factory.mktemp("conformance")).up()
    yield space.address, TOKEN
    space.down()


def arrive(where: tuple[str, str], **more: str) -> Driver:
    """A driver of a log of its own, one epoch above whoever was there."""
    address, token = where
    wire = Wire(address, token)
    epoch = (wire.hello["fence"] or {"epoch": 0})["epoch"] + 1
    wire.close()
    return Driver(address, token, epoch=epoch, **{"log": secrets.token_hex(8), **more})  # type: ignore[arg-type]


@pytest.fixture
def taken(where: tuple[str, str]) -> Iterator[Driver]:
    """It has advanced, and the workspace is empty and image 1."""
    driver = arrive(where)
    driver.advance()
    driver.restore(1, [], {})
    yield driver
    hang_up()


def refused(call: object) -> str:
    with pytest.raises(Refused) as caught:
        call()  # type: ignore[operator]
    return caught.value.code


def test_hello_tells_what_it_is(where: tuple[str, str]) -> None:
    hello = Wire(*where).hello
    assert hello["protocol"] == 1
    assert hello["containment"] in ("cgroup2", "cgroup1", "none")
    assert hello["boot"]
    assert hello["instance"]
    hang_up()


def test_no_token_no_answer(where: tuple[str, str]) -> None:
    """Rule S3."""
    wire = Wire(where[0], None)
    assert refused(lambda: wire.call("status")) == "unauthorized"
    wire = Wire(where[0], None)
    assert refused(lambda: wire.call("hello", token=where[1] + "x", protocol=1)) == "unauthorized"
    hang_up()


def test_one_call_from_start_to_settle(taken: Driver) -> None:
    """Rules S13, S19, S23, S26, S28, S31."""
    result, output = taken.ask_body(
        "start",
        key=key(),
        shell="echo out; echo err >&2; mkdir d; printf x > d/f; exit 3",
        wait_ms=30_000,
        length=1000,
        until_exit=True,
    )
    assert (result["state"], result["cause"], result["code"], result["left"]) == ("exited", "exit", 3, 0)
    assert output == b"out\nerr\n"
    scan, body = taken.ask_body("scan", freeze=True, sync=True, inline_bytes=1000)
    assert [(change["change"], change["path"], change["kind"]) for change in scan["changes"]] == [
        ("added", "d", "directory"),
        ("added", "d/f", "file"),
    ]
    assert scan["changes"][1]["sha256"] == sha(b"x")
    assert body == b"x"
    settled = taken.ask("settle", commit=2, scan=scan["scan"], floor={"call": 2, "attempt": 0}, thaw=True)
    assert settled["image"]["commit"] == 2
    assert settled["floor"] == {"call": 2, "attempt": 0}
    assert taken.state() == "cut_off"
    assert taken.ask("scan")["changes"] == []


def test_takeover_adopts_or_kills(where: tuple[str, str], taken: Driver) -> None:
    """Rules S10 to S12, S15."""
    taken.start("sleep 1000", call=1)
    taken.start("sleep 1000", call=2)
    assert taken.run("exit 5", call=3)["code"] == 5
    second = arrive(where, log=taken.log)
    answer = second.advance(keep=[key(1), key(3)])
    assert [command["state"] for command in answer["commands"]] == ["running", "exited"]
    assert second.state(call=2) == "cut_off"
    assert refused(lambda: taken.ask("scan")) == "stale_epoch"
    assert refused(taken.advance) == "stale_epoch"
    assert second.ask("kill", key=key(1), cause="aborted")["cause"] == "aborted"
    assert second.call("status")[0]["living"] == 0


def test_a_wait_ends_when_a_newer_driver_comes(where: tuple[str, str], taken: Driver) -> None:
    """Rule S11."""
    taken.start("sleep 1000")
    taken.send_asked("wait", key=key(), wait_ms=30_000)
    arrive(where).advance()
    assert refused(taken.receive) == "stale_epoch"


def test_void_floor_and_conflict(taken: Driver) -> None:
    """Rules S14, S21, S25."""
    assert taken.ask("void", key=key(4))["state"] == "void"
    assert refused(lambda: taken.start("true", call=4)) == "void"
    taken.run("true", call=5)
    assert refused(lambda: taken.start("false", call=5)) == "conflict"
    taken.ask("settle", floor={"call": 6, "attempt": 0})
    assert refused(lambda: taken.start("true", call=5, attempt=9)) == "below_floor"
    assert refused(lambda: taken.write("f", b"", call=5, attempt=9)) == "below_floor"


def test_an_undo_brings_back_the_image(taken: Driver) -> None:
    """Rules S33 to S35."""
    big = os.urandom(CHUNK + 1)
    taken.write("keep", b"kept")
    taken.restore(2, [file_entry("keep", b"kept"), file_entry("d/big", big, 0o600)], chunked(b"kept", big))
    taken.run("echo more >> keep; rm -r d; mkdir -p e/f; ln -s keep l; sleep 1000 &", call=2)
    answer = taken.restore(2, None, chunked(b"kept", big), floor={"call": 2, "attempt": 2})
    assert answer["image"]["commit"] == 2
    assert taken.call("status")[0]["living"] == 0
    assert [entry["path"] for entry in taken.ask("walk")["entries"]] == ["d", "d/big", "keep"]
    assert taken.ask_body("read", path="d/big")[1] == big
    assert taken.ask("stat", path="d/big")["mode"] == 0o600


def test_images_of_a_number_that_differ_in_the_nonce_are_others(taken: Driver) -> None:
    """Rules S27, S28, S33."""
    taken.write("f", b"x")
    scan = taken.ask("scan")
    settled = taken.ask("settle", commit=2, nonce="mine", scan=scan["scan"])
    assert (settled["image"]["commit"], settled["image"]["nonce"]) == (2, "mine")
    assert taken.ask("scan")["base"] == {"log": taken.log, "commit": 2, "nonce": "mine"}
    taken.ask("settle", commit=2, nonce="another")
    assert taken.ask("scan")["base"] is None, "nothing is known of it"
    assert not taken.ask("restore_begin", commit=2, nonce="another")["known"]
    begun = taken.ask("restore_begin", commit=2, nonce="another")
    taken.ask("restore_image", b"[]", restore=begun["restore"])
    taken.ask("restore_plan", restore=begun["restore"])
    answer = taken.ask("restore_apply", restore=begun["restore"], preserve="none")
    assert (answer["image"]["commit"], answer["image"]["nonce"]) == (2, "another")
    assert not taken.ask("restore_begin", commit=2)["known"]
    assert taken.ask("restore_begin", commit=2, nonce="another")["known"]


def test_a_restore_that_did_not_end_leaves_no_image(where: tuple[str, str], taken: Driver) -> None:
    """Rules S24, S27."""
    begun = taken.ask("restore_begin", commit=9)
    taken.ask("restore_image", json.dumps([file_entry("f", b"x")]).encode(), restore=begun["restore"])
    assert refused(lambda: taken.start("true")) == "no_image"
    second = arrive(where, log=taken.log)
    assert second.advance()["image"] is None
    assert refused(lambda: second.start("true")) == "no_image"


def test_paths_stay_inside(taken: Driver) -> None:
    """Rule S36."""
    taken.run("ln -s / root; ln -s .. up")
    for path in ("../x", "/etc/passwd", "root/etc/passwd", "up/x"):
        assert refused(lambda path=path: taken.ask("read", path=path)) == "outside_workspace"
        assert refused(lambda path=path: taken.write(path, b"x")) == "outside_workspace"
