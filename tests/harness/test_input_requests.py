"""Request ids: one submission each, for ever (rules H31 to H35)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kit import Audit, Commits, Hold, Note, opened, transcript

from perdure.harness.harness import Harness
from perdure.harness.inbox import ConversationBusy
from perdure.harness.messages import Text
from perdure.kernel.errors import RequestConflict
from perdure.kernel.records import Edit
from perdure.storage.memory import MemoryStorage
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.model import ScriptedModel, fail, say


def untyped(value: Any) -> Any:
    return value


def talk(**more) -> ScriptedModel:
    return ScriptedModel({"hi": say("hello"), "more": say("more it is"), "bad": fail("malformed")}, **more)


async def test_a_repeated_request_id_gives_the_same_submission_whatever_became_of_it_h31() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi", request_id="r1")
        commits = Commits(harness)
        assert await root.submit("hi", request_id="r1") == first
        assert await root.submit("hi", request_id="r1", mode="reject") == first, "it is not refused as busy"
        assert not commits.durable
        hold.release()
        await first.wait()
        assert await root.submit("hi", request_id="r1") == first
        assert (await first.answer()).text == "hello"
        assert await transcript(root) == ["user hi", "assistant hello"]


async def test_a_failed_or_withdrawn_submission_holds_its_request_id_too_h31() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        failing = await root.submit("bad", request_id="r1")
        queued = await root.submit("hi", request_id="r2")
        assert await queued.abort() == "withdrawn"
        hold.release()
        await failing.wait()
        assert await root.submit("bad", request_id="r1") == failing
        assert await root.submit("hi", request_id="r2") == queued
        assert (await queued.record()).reason == "aborted"


async def test_other_content_is_a_conflict_h32_h33() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        note = (await (await root.write(Note(text="x"), request_id="w1")).record()).entry or 0
        await (await root.submit("hi", request_id="r1")).wait()
        for other in (
            root.submit("more", request_id="r1"),
            root.write(Note(text="hi"), request_id="r1"),
            root.reset("hi", request_id="r1"),
            root.write(Note(text="y"), request_id="w1"),
            root.write(Audit(n=1), request_id="w1"),
            root.write(Note(text="x"), head="self", request_id="w1"),
            root.write(Note(text="x"), edits=[Edit(entry=note)], request_id="w1"),
        ):
            with pytest.raises(RequestConflict, match="other content"):
                await other
        assert len(await transcript(root)) == 3


async def test_the_mode_is_no_part_of_the_content_h33() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        first = await root.submit("hi", request_id="r1", mode="steer")
        assert await root.submit("hi", request_id="r1", mode="follow_up") == first


async def test_writes_and_resets_take_request_ids_h30_h31() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        write = await root.write(Note(text="x"), request_id="w")
        reset = await root.reset("go", request_id="z")
        assert await root.write(Note(text="x"), request_id="w") == write
        assert await root.reset("go", request_id="z") == reset
        assert await transcript(root) == ["app.note x", "reset go"]


async def test_it_holds_across_a_reopen_h34() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        first = await (await harness.root()).submit("hi", request_id="r1")
        await first.wait()
    async with opened(talk(), storage=storage) as harness:
        root = await harness.root()
        again = await root.submit("hi", request_id="r1")
        assert again.id == first.id
        assert (await again.answer()).text == "hello"
        with pytest.raises(RequestConflict):
            await root.submit("more", request_id="r1")


async def test_a_race_has_one_winner_h34() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        several = await asyncio.gather(
            *(root.submit("hi", request_id="r1") for _ in range(8)),
            *(root.submit("more", request_id="r1") for _ in range(8)),
            return_exceptions=True,
        )
        won = {submission for submission in several if not isinstance(submission, BaseException)}
        lost = [error for error in several if isinstance(error, BaseException)]
        assert len(won) == 1
        assert len(lost) == 8
        assert all(isinstance(error, RequestConflict) for error in lost)
        await won.pop().wait()
        assert len(await transcript(root)) == 2


async def test_an_id_belongs_to_its_conversation_and_a_fork_inherits_none_h35() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        first = await root.submit("hi", request_id="r1")
        answer = await first.answer()
        other = await harness.create_conversation()
        fork = await root.fork(answer.entry.id)
        for conversation in (other, fork):
            submission = await conversation.submit("more", request_id="r1")
            assert submission != first
            assert (await submission.answer()).text == "more it is"


async def test_a_refused_submission_takes_no_id_h26_h31() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        with pytest.raises(ConversationBusy):
            await root.submit("more", mode="reject", request_id="r1")
        hold.release()
        await first.wait()
        assert (await (await root.submit("hi", request_id="r1")).answer()).text == "hello"


@pytest.mark.parametrize("wrong", [5, 5.5, True, b"x", ["r"], {"r": 1}], ids=repr)
async def test_a_request_id_that_is_no_text_is_refused_and_spoils_nothing_k209(wrong: Any, tmp_path: Path) -> None:
    """SQLite would take 5 for "5" and keep what cannot be read: the session would end at each look at it."""
    store = tmp_path / "agent.db"
    async with Harness.open(SqliteStorage(store), models=talk()) as harness:
        root = await harness.root()
        for call in (root.submit("hi", request_id=wrong), root.write(Note(text="x"), request_id=wrong)):
            with pytest.raises(TypeError, match=r"a request id is a text, not \w+ .*; use str\(\) of it"):
                await call
        assert await root.entries() == []
        assert (await (await root.submit("hi", request_id="5")).answer()).text == "hello"
    async with Harness.open(SqliteStorage(store), models=talk()) as harness:
        assert (await (await (await harness.root()).submit("hi", request_id="5")).answer()).text == "hello"


@pytest.mark.parametrize("wrong", [b"hi", [5], ["hi"], [Text(untyped(5))], 5, None], ids=repr)
async def test_content_that_is_none_is_refused_at_the_call_k35(wrong: Any) -> None:
    """It would be kept, and no model would ever read it."""
    async with opened(talk()) as harness:
        root = await harness.root()
        with pytest.raises((TypeError, ValueError)):
            await root.submit(wrong)
        assert await root.entries() == []
        assert not await root.busy()
