"""Contents between a Space and the log: what travels, what is held against what, and what happens when some is gone
(rules S138, S139, S143); and a command that its driver never started (S154, S155)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from durable_kit import World, go

from perdure.harness.harness import Harness
from perdure.kernel.errors import SessionFailed
from perdure.spaces.client import SpaceClient
from perdure.spaces.errors import SpaceUnavailable
from perdure.spaces.wire import ContentRange, ExecKey, Scan
from perdure.testing.model import call

MIB = 1 << 20


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.spaces.delete("one")


async def again(harness: Harness, request_id: str) -> str:
    submission = await (await harness.root()).submit("go", request_id=request_id)
    return (await submission.answer()).text


async def test_large_contents_travel_once_and_are_pinned_until_their_commit_s138(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, fetched = SpaceClient.chunks, list[int]()

    async def counted(client: SpaceClient, ranges: Sequence[ContentRange]) -> bytes:
        body = await chunks(client, ranges)
        fetched.append(len(body))
        return body

    monkeypatch.setattr(SpaceClient, "chunks", counted)
    make = call(
        "bash", command="for i in 1 2 3; do head -c 1048576 /dev/zero | tr '\\0' $i; done > large; cat large > b"
    )
    async with world.open(make) as harness:
        assert await go(harness) == "done"
        assert sum(fetched) == 3 * MIB, "two files of the same three chunks"
        await world.check()
        assert await harness.session.contents.pins() == [], "an image refers to them now"
    fetched.clear()
    async with world.open(call("bash", command="mv large c; cp b d; echo e > e")) as harness:
        assert await again(harness, "two") == "done"
        assert fetched == [], "the log has the large ones, and the small one came with the comparison"
        await world.check()


async def test_what_a_scan_tells_against_another_image_is_compared_anew_s139(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's index may stand elsewhere than the log: here it claims that nothing differs from an older image."""
    scan, wholes = SpaceClient.scan, list[bool]()

    async def elsewhere(client: SpaceClient, **fields: Any) -> tuple[Scan, bytes]:
        found, body = await scan(client, **fields)
        wholes.append(fields["full"])
        if fields["full"] or found.base is None:
            return found, body
        base = msgspec.structs.replace(found.base, commit=found.base.commit + 100)
        return msgspec.structs.replace(found, base=base, changes=(), next=None), body

    monkeypatch.setattr(SpaceClient, "scan", elsewhere)
    async with world.open(call("bash", command="echo a > a; mkdir d; echo b > d/b")) as harness:
        assert await go(harness) == "done"
        await world.check()
        assert world.lines("d/b") == ["b"]
    assert True in wholes


async def test_a_content_that_the_log_has_lost_ends_the_session_and_nothing_is_written_s143(world: World) -> None:
    async with world.open(call("bash", command="echo kept > kept; echo lost > lost")) as harness:
        assert await go(harness) == "done"
    contents = world.storage._contents.contents
    lost = {digest: contents.pop(digest) for digest, data in list(contents.items()) if data == b"lost\n"}
    assert len(lost) == 1
    await world.spaces.delete("one")
    async with world.open(call("bash", command="cat kept lost")) as harness:
        before = await harness.session.tasks()
        with pytest.raises(SessionFailed):
            await again(harness, "two")
        assert isinstance(harness.session.failed, SpaceUnavailable)
        assert "has lost the content" in str(harness.session.failed)
    assert list(world.workspace.iterdir()) == []
    contents.update(lost)
    async with world.open(call("bash", command="cat kept lost")) as harness:
        assert len(before) < len(await harness.session.tasks())
        assert len(await world.results()) == 1, "the failure is no call's result"
        assert await again(harness, "two") == "done"
        assert (await world.results())[-1] == (None, "kept\nlost\n")
        await world.check()


@pytest.mark.parametrize("voided", [False, True])
async def test_a_command_that_was_never_started_is_voided_and_started_by_another_attempt_s154_s155(
    voided: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start may still be on its way: under the void key it never runs. ``voided``: its own driver did that yet."""
    start, void, starts, voids = SpaceClient.start, SpaceClient.void, list[int](), list[int]()

    async def starting(client: SpaceClient, key: ExecKey, **fields: Any) -> Any:
        starts.append(key.attempt)
        if len(starts) == 1:
            world.storage = world.storage.snapshot()
            world.harness.session.fail(ConnectionError("killed"))
            raise ConnectionError("killed")
        return await start(client, key, **fields)

    async def voiding(client: SpaceClient, key: ExecKey) -> Any:
        if not voided and world.harness.session.failed is not None:
            raise ConnectionError("killed")
        voids.append(key.attempt)
        return await void(client, key)

    monkeypatch.setattr(SpaceClient, "start", starting)
    monkeypatch.setattr(SpaceClient, "void", voiding)
    async with world.open(call("bash", command="echo one >> log")) as harness:
        with pytest.raises(SessionFailed):
            await go(harness)
    assert voids == ([1] if voided else [])
    async with world.open(call("bash", command="echo one >> log")) as harness:
        assert await go(harness) == "done"
        assert await world.recovered() == ["not_started"]
        assert world.lines() == ["one"]
        await world.check()
    assert (starts, voids) == ([1, 2], [1])
