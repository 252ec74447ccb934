"""What a driver does in which order, with the log and a real daemon: the counterexamples of the protocol's model that
are the driver's to keep off. Those of the daemon are in ``tests/spaced/test_spaced_model.py``; one, ``layer_log``, is
of layers, which there are none of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from durable_kit import World, alive, go

from perdure.kernel.errors import SessionFailed, StaleEpochError
from perdure.kernel.records import NULL
from perdure.kernel.session import Session
from perdure.spaces.client import SpaceClient
from perdure.spaces.documents import SpaceState
from perdure.spaces.hold import Hold
from perdure.storage import sqlite_takeover
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.model import call


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.spaces.delete("one")


async def test_a_driver_that_was_superseded_takes_no_new_space_s147(world: World, tmp_path: Path) -> None:
    """gen_commit: nobody has that Space yet, so its daemon would have it; the log has to refuse it."""
    path = tmp_path / "store.db"
    async with Session.open(SqliteStorage(path)) as old, Session.open(SqliteStorage(path), takeover=True) as new:
        late, hold = Hold(old, world.spaces, "one"), Hold(new, world.spaces, "one")
        with pytest.raises(StaleEpochError):
            await late.take(keep=[])
        async with await (await world.spaces.open("one")).connect() as client:
            assert (await client.status()).fence is None
        advanced = await hold.take(keep=[])
        state = await new.snapshot(SpaceState, key="one")
        assert state is not None
        assert (state.generation, state.connected) == (advanced.generation, 1)
        await late.close()
        await hold.close()


async def test_the_log_has_a_generation_before_the_space_has_the_driver_s147(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gen_commit, each time: a Space that was made anew is committed before it is advanced."""
    advance, seen = SpaceClient.advance, list[tuple[int, int]]()

    async def advancing(client: SpaceClient, **fields: Any) -> Any:
        state = await world.harness.session.snapshot(SpaceState, key="one")
        seen.append((client.address.generation, 0 if state is None else state.generation))
        return await advance(client, **fields)

    monkeypatch.setattr(SpaceClient, "advance", advancing)
    async with world.open(call("bash", command="echo one > log")) as harness:
        assert await go(harness) == "done"
    await world.spaces.delete("one")
    async with world.open(call("bash", command="cat log")) as harness:
        submission = await (await harness.root()).submit("go", request_id="two")
        assert (await submission.answer()).text == "done"
        assert (await world.results())[-1] == (None, "one\n")
    assert seen == [(1, 1), (2, 2)]


async def test_what_was_committed_until_the_fence_is_what_is_kept_k175(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """read_after_fence: the holder commits once more while the store is taken over, just before the fence rises."""
    path, loop, made = tmp_path / "store.db", asyncio.get_running_loop(), list[int]()
    raise_fence = sqlite_takeover.raise_fence
    async with Session.open(SqliteStorage(path)) as old:

        async def last() -> None:
            async with old.commit() as tx:
                conversation = tx.create_conversation(owner=None)
                task = tx.new_task(kind="app.open", version=1, phase="start", input=NULL, conversation=conversation.id)
            made.append(task.id)

        def rising(*args: Any, **fields: Any) -> Any:
            asyncio.run_coroutine_threadsafe(last(), loop).result(30)
            return raise_fence(*args, **fields)

        monkeypatch.setattr(sqlite_takeover, "raise_fence", rising)
        async with Session.open(SqliteStorage(path), takeover=True) as new:
            assert list(new.live.settled) == made
            assert new.seq == old.seq == 1
            async with new.commit() as tx:
                assert tx.create_conversation(owner=None).id > made[0]


async def test_an_undo_is_complete_before_another_attempt_is_committed_s158(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """undo_first: a process that ends between the two would find an attempt that nobody undoes any more."""
    async with world.open(call("twice")) as harness:
        await (await harness.root()).submit("go", request_id="one")
        harness.resume()
        await world.until(lambda: "two" in world.lines())
        await world.crash()
    apply, attempts = SpaceClient.restore_apply, list[int]()

    async def applying(client: SpaceClient, *args: Any, **fields: Any) -> Any:
        state = await world.state()
        assert state.open is not None
        attempts.append(state.open.attempt)
        done = await apply(client, *args, **fields)
        if len(attempts) == 1:
            world.storage = world.storage.snapshot()
            world.harness.session.fail(ConnectionError("killed"))
        return done

    monkeypatch.setattr(SpaceClient, "restore_apply", applying)
    world.gate.touch()
    async with world.open(call("twice")) as harness:
        with pytest.raises(SessionFailed):
            await go(harness)
    async with world.open(call("twice")) as harness:
        assert await go(harness) == "done"
        assert world.lines() == ["one", "two"]
        assert await world.recovered() == ["rerun"]
        await world.check()
    assert attempts == [1, 1]


async def test_another_log_at_the_same_epoch_has_the_space_for_itself_s148(world: World, tmp_path: Path) -> None:
    """A new log begins at the epoch, and with the numbers of calls, that an earlier one had there. It is given none of
    that one's results, and ends what it left running, and its driver."""
    other = World(tmp_path)
    leave = "echo $$ > ../left; while :; do sleep 0.05; done"
    script = f"echo first >> log; setsid sh -c '{leave}' > /dev/null 2>&1 & while [ ! -s ../left ]; do sleep 0.01; done"
    async with world.open(call("bash", command=f"{script}; echo said by the first")) as first:
        assert await go(first) == "done"
        assert await world.results() == [(None, "said by the first\n")]
        left = int((world.workspace.parent / "left").read_text())
        async with other.open(call("bash", command="echo second >> log; echo said by the second")) as second:
            assert await go(second) == "done"
            assert await other.results() == [(None, "said by the second\n")]
            assert (second.session.info.epoch, first.session.info.epoch) == (2, 1)
            assert other.lines() == ["first", "second"]
            assert not alive(left)
            submission = await (await first.root()).submit("go", request_id="two")
            with pytest.raises((SessionFailed, StaleEpochError)):
                await submission.wait()
            assert isinstance(first.session.failed, StaleEpochError)
            assert other.lines() == ["first", "second"]
            await other.check()
