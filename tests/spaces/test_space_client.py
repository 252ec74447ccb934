"""The client against a real daemon: who has the Space, what is refused, what is lost (rules S100 to S104)."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from space_kit import CALL, TOKEN, Daemon, advanced, daemon, key

from perdure.harness.environment import FileChanged, FileError, FileMissing, NotAFile, PathEscapes
from perdure.kernel.errors import StaleEpochError
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import (
    ContentMissing,
    KeyBelowFloor,
    KeyConflict,
    KeyVoid,
    NobodyListens,
    NoImage,
    ScanForgotten,
    SpaceConnectionLost,
    SpaceRequestInvalid,
    SpaceTooLarge,
    SpaceUnauthorized,
    SpaceUnavailable,
)
from perdure.spaces.link import ClientLimits
from perdure.spaces.provider import SpaceAddress
from perdure.spaces.wire import ContentRange, Entry, Place, SpacePath, decode_path, encode_path


@pytest.fixture
async def made() -> AsyncIterator[Daemon]:
    async with daemon() as made:
        yield made


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def everything_told(error: BaseException | None) -> str:
    """The texts of an error and of all behind it."""
    if error is None:
        return ""
    return f"{error!r} {error} {error.args}" + everything_told(error.__cause__ or error.__context__)


# --- connecting


async def test_another_generation_is_not_the_space_that_was_meant(made: Daemon) -> None:
    """Rule S100."""
    made.generation = 2
    with pytest.raises(SpaceUnavailable, match="generation 1 of the Space 'test' answers"):
        await SpaceClient.connect(made.address)
    made.generation = 1


async def test_a_wrong_token_is_told_and_shown_nowhere(made: Daemon) -> None:
    """Rule S101."""
    wrong = SpaceAddress(
        name="test", generation=1, address=made.where, token="wrong-token-0123456789", containment="none"
    )
    with pytest.raises(SpaceUnauthorized) as refused:
        await SpaceClient.connect(wrong)
    assert "wrong-token" not in everything_told(refused.value) + repr(wrong)
    async with await SpaceClient.connect(made.address) as client:
        assert TOKEN not in repr(client)


async def test_nobody_listens_is_told_after_trying_for_a_while(tmp_path: Path) -> None:
    address = SpaceAddress(name="test", generation=1, address=f"unix:{tmp_path}/none", token=TOKEN, containment="none")
    with pytest.raises(NobodyListens):
        await SpaceClient.connect(address, limits=ClientLimits(connect_s=0.05))


async def test_a_daemon_is_reached_over_tcp() -> None:
    async with daemon("tcp:127.0.0.1:0") as made, advanced(made) as client:
        assert made.where.startswith("tcp:127.0.0.1:")
        command, output = await client.start(key(), shell="echo over tcp", wait_ms=5000, length=100)
        assert (command.state, output) == ("exited", b"over tcp\n") or command.state == "running"


# --- who has the Space


async def test_nothing_is_asked_before_an_advance(made: Daemon) -> None:
    """Rule S102."""
    async with await SpaceClient.connect(made.address) as client:
        with pytest.raises(SpaceConnectionLost) as lost:
            await client.read("a")
        assert lost.value.reason == "not_advanced"
        assert (await client.status()).fence is None


async def test_a_newer_driver_is_stale_epoch_to_the_older(made: Daemon) -> None:
    """Rule S103: never a tool's result."""
    async with advanced(made, epoch=1) as old, await SpaceClient.connect(made.address) as new:
        await new.advance(log="log", epoch=2, writer="w2")
        with pytest.raises(StaleEpochError) as stale:
            await old.write("a", b"", **CALL)
        assert (stale.value.mine, stale.value.stored, stale.value.stored_writer) == (1, 2, "w2")
        assert old.admission is None
        with pytest.raises(StaleEpochError):
            await old.advance(log="log", epoch=1, writer="w1")
        with pytest.raises(StaleEpochError, match="w2"):
            await old.advance(log="log", epoch=2, writer="w1")
        assert (await new.stat("a")) is None


async def test_a_wait_under_way_ends_when_a_newer_driver_takes_the_space(made: Daemon) -> None:
    async with advanced(made, epoch=1) as old, await SpaceClient.connect(made.address) as new:
        await old.start(key(), shell="sleep 1000")
        waiting = asyncio.create_task(old.wait(key(), wait_ms=30_000))
        await asyncio.sleep(0)
        await new.advance(log="log", epoch=2, writer="w2")
        with pytest.raises((StaleEpochError, SpaceConnectionLost)):
            await waiting


async def test_a_later_advance_of_the_same_driver_is_a_lost_connection(made: Daemon) -> None:
    """Rule S103: it advances again and has the Space."""
    async with advanced(made) as one, await SpaceClient.connect(made.address) as other:
        await other.advance(log="log", epoch=1, writer="w1")
        with pytest.raises(SpaceConnectionLost) as lost:
            await one.read("a")
        assert lost.value.reason == "stale_connection"
        await one.advance(log="log", epoch=1, writer="w1")
        with pytest.raises(FileMissing):
            await one.read("a")


async def test_a_daemon_that_ends_takes_the_admission_with_it(made: Daemon) -> None:
    """Rule S102, and what ran is found again by the next daemon."""
    async with advanced(made) as client:
        await client.start(key(), shell="sleep 1000")
        waiting = asyncio.create_task(client.wait(key(), wait_ms=30_000))
        await client.look([key()])
        made.kill()
        with pytest.raises(SpaceConnectionLost) as lost:
            await waiting
        assert lost.value.reason == "closed"
        with pytest.raises(SpaceConnectionLost):
            await client.look([key()])
        made.start()
        with pytest.raises(SpaceConnectionLost):
            await client.look([key()])
        advance = await client.advance(log="log", epoch=1, writer="w1", keep=[key()])
        assert [command.state for command in advance.commands] == ["running"]
        assert (await client.kill(key(), "aborted")).cause == "aborted"


async def test_a_daemon_that_was_restarted_unseen_is_noticed(made: Daemon) -> None:
    async with advanced(made) as client:
        made.kill()
        made.start()
        with pytest.raises(SpaceConnectionLost):
            await client.look([key()])
        assert client.admission is None


async def test_a_failed_advance_leaves_nothing_admitted(made: Daemon) -> None:
    async with advanced(made, epoch=3) as client:
        with pytest.raises(StaleEpochError):
            await client.advance(log="log", epoch=2, writer="w1")
        with pytest.raises(SpaceConnectionLost):
            await client.read("a")


async def test_a_closed_client_ends_its_waits(made: Daemon) -> None:
    async with advanced(made) as client:
        await client.start(key(), shell="sleep 1000")
        waiting = asyncio.create_task(client.wait(key(), wait_ms=30_000))
        await client.look([key()])
        await client.aclose()
        with pytest.raises(SpaceConnectionLost):
            await waiting
        with pytest.raises(SpaceConnectionLost):
            await client.status()


# --- connections


async def test_a_kill_does_not_wait_behind_commands_that_are_waited_for(made: Daemon) -> None:
    """Rule S104."""
    limits = ClientLimits(waits=2, controls=1)
    async with await SpaceClient.connect(made.address, limits=limits) as client:
        await client.advance(log="log", epoch=1, writer="w1")
        await client.settle(commit=0)
        keys = [key(ordinal) for ordinal in (1, 2, 3)]
        for each in keys:
            await client.start(each, shell="sleep 1000")
        waits = [asyncio.create_task(client.wait(each, wait_ms=30_000)) for each in keys]
        for each in keys:
            assert (await client.kill(each, "aborted")).signal == 9
        for command, _ in await asyncio.gather(*waits):
            assert command.state == "exited"


async def test_a_cancelled_request_leaves_no_answer_to_the_next(made: Daemon) -> None:
    """Rule S102."""
    async with advanced(made) as client:
        await client.start(key(), shell="sleep 1000")
        for _ in range(5):
            waiting = asyncio.create_task(client.wait(key(), wait_ms=30_000))
            await client.look([key()])
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert client.admission is not None
        await client.write("a", b"content", **CALL)
        answers = await asyncio.gather(*(client.read("a") for _ in range(20)))
        assert {data for _, data in answers} == {b"content"}


async def test_connections_are_kept_and_bounded(made: Daemon) -> None:
    """Rule S104."""
    async with advanced(made) as client:
        await asyncio.gather(*(client.stat("a") for _ in range(100)))
        descriptors = os.listdir(f"/proc/{(await client.status()).pid}/fd")
        assert len(descriptors) < 60
        assert len(client._link._idle) <= 4


# --- what is refused


async def test_refusals_are_what_they_are_called(made: Daemon) -> None:
    """Rule S103."""
    async with await SpaceClient.connect(made.address) as client:
        await client.advance(log="log", epoch=1, writer="w1")
        with pytest.raises(NoImage):
            await client.start(key(), shell="true")
        await client.settle(commit=0)
        await client.void(key())
        with pytest.raises(KeyVoid):
            await client.start(key(), shell="true")
        await client.start(key(2), shell="true")
        with pytest.raises(KeyConflict):
            await client.start(key(2), shell="false")
        with pytest.raises(ScanForgotten):
            await client.scan_page(99, 0)
        with pytest.raises(ContentMissing) as missing:
            await client.write("a", ["0" * 64], **CALL)
        assert missing.value.digests == ("0" * 64,)
        with pytest.raises(SpaceRequestInvalid):
            await client.glob("[b-a]")
        with pytest.raises(SpaceTooLarge):
            await client.start(key(3), argv=["x" * 200_000])
        with pytest.raises(SpaceTooLarge):
            await client.write("a", bytes(17 << 20), **CALL)
        with pytest.raises(SpaceRequestInvalid) as invalid:
            await client.start(key(3), shell="echo \ud800 secret")
        assert "secret" not in everything_told(invalid.value)
        await client.settle(floor=Place(call=2, attempt=1))
        with pytest.raises(KeyBelowFloor):
            await client.start(key(4), shell="true")
        assert client.admission is not None, "a refusal takes nothing away"


async def test_what_is_wrong_with_a_file_is_a_file_error(made: Daemon) -> None:
    """Rule S103."""
    async with advanced(made) as client:
        (made.workspace / "out").symlink_to("/etc")
        os.mkfifo(made.workspace / "pipe")
        await client.write("d/a", b"one", **CALL)
        for path, kind in {
            "none": FileMissing,
            "../a": PathEscapes,
            "/etc/passwd": PathEscapes,
            "out/passwd": PathEscapes,
            "pipe": NotAFile,
            "d": NotAFile,
            "d/a/b": FileError,
            "nul\0": FileError,
            "x" * 5000: FileError,
            "\ud800": FileError,
        }.items():
            with pytest.raises(kind) as refused:
                await client.read(path)
            assert isinstance(refused.value, FileError)
        with pytest.raises(FileChanged):
            await client.write("d/a", b"two", expect=sha256(b"other"), **CALL)
        with pytest.raises(FileError, match="not empty"):
            await client.remove("d", **CALL)
        assert (await client.read("d/a"))[1] == b"one"


async def test_names_that_are_not_utf8_come_and_go_as_bytes(made: Daemon) -> None:
    async with advanced(made) as client:
        await client.write(b"d/\xff\xfe", b"raw", **CALL)
        listed = await client.list_dir("d")
        assert [entry.name for entry in listed.entries] == ["\udcff\udcfe"]
        assert (await client.read("d/\udcff\udcfe"))[1] == b"raw"
        assert os.listdir(os.fsencode(made.workspace / "d")) == [b"\xff\xfe"]
        with pytest.raises(FileMissing) as missing:
            await client.read("d/\udcfd")
        assert missing.value.path == "d/\udcfd"
    for path in ("", "a", "ä/\udcff", "\udcc3"):
        assert decode_path(encode_path(path)) == path


# --- images


async def test_a_scan_is_restored_from_what_it_told(made: Daemon) -> None:
    async with advanced(made) as client:
        big = os.urandom(3 * 1024 * 1024 + 17)
        (made.workspace / "big").write_bytes(big)
        (made.workspace / "empty").mkdir()
        (made.workspace / "link").symlink_to("big")
        (made.workspace / "small").write_text("hello")
        scan, inline = await client.scan(full=True, inline_bytes=1000, page=2)
        changes = list(scan.changes)
        following = scan.next
        while following is not None:
            page = await client.scan_page(scan.scan, following)
            changes += page.changes
            following = page.next
        assert [change.path for change in changes] == ["big", "empty", "link", "small"]
        entries = {change.path: change.entry() for change in changes}
        assert len(entries[SpacePath("big")].chunks) == 4
        assert inline == b"hello"
        await client.settle(commit=7, scan=scan.scan)
        wanted = [
            ContentRange(path="big", offset=at << 20, length=len(big[at << 20 : (at + 1) << 20]), sha256=digest)
            for at, digest in enumerate(entries[SpacePath("big")].chunks)
        ]
        assert await client.chunks(wanted) == big

        for name in ("big", "small", "link"):
            (made.workspace / name).unlink()
        (made.workspace / "small").mkdir()
        (made.workspace / "new").write_text("the user's")
        begun = await client.restore_begin(commit=7, floor=Place(call=1, attempt=2))
        assert begun.known
        await client.restore_image(begun.restore, entries.values())
        plan = await client.restore_plan(begun.restore)
        assert [each.path for each in plan.displaced] == ["new"]
        with pytest.raises(ContentMissing):
            await client.restore_apply(begun.restore)
        for content in [big[at : at + (1 << 20)] for at in range(0, len(big), 1 << 20)] + [b"hello"]:
            assert await client.put([content]) == (sha256(content),)
        assert await client.missing(plan.missing) == ()
        restored = await client.restore_apply(begun.restore, preserve=["new"])
        assert restored.image.commit == 7
        assert restored.preserved == 1
        assert restored.recovery is not None
        assert (made.workspace / "big").read_bytes() == big
        assert (made.workspace / "small").read_text() == "hello"
        assert not (made.workspace / "new").exists()


def test_an_image_is_sent_in_as_many_bodies_as_it_takes() -> None:
    from perdure.spaces.wire import batches

    entries = [Entry(path=SpacePath(f"d{number}"), kind="directory", mode=0o755) for number in range(100)]
    bodies = list(batches(entries, 300))
    assert max(map(len, bodies)) <= 300
    assert len(bodies) > 10
    assert b"".join(bodies).count(b'"path"') == 100
    assert list(batches([], 300)) == [b"[]"]
