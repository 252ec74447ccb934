"""Handles on submissions: waiting, answers, taking back; the queue after a failed run (H20 to H23, H37 to H54)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit import Commits, Hold, Note, opened, queue, rest, transcript
from pydantic import BaseModel

from perdure.harness.documents import Live
from perdure.harness.harness import Harness
from perdure.harness.parse import CannotParse
from perdure.harness.submission import Unanswered
from perdure.harness.tool import tool
from perdure.kernel.context import BACKGROUND
from perdure.kernel.errors import ContextCancelled, InvalidRead, NotFound, SessionClosed
from perdure.storage.memory import MemoryStorage
from perdure.storage.sqlite import SqliteStorage
from perdure.tasks.errors import WorkBlocked
from perdure.testing.model import ScriptedModel, call, fail, say


def talk(**more) -> ScriptedModel:
    return ScriptedModel(
        {
            "hi": say("hello"),
            "more": say("more it is"),
            "bad": fail("malformed", "what is this"),
            "steer": say("steered"),
        },
        **more,
    )


# --- looking and waiting --------------------------------------------------------------------------------------------


async def test_status_never_waits_and_starts_nothing_h22() -> None:
    storage = MemoryStorage()
    hold = Hold()
    async with opened(talk(pace=hold), storage=storage) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        queued = await root.submit("more")
        assert (await first.status(), await queued.status()) == ("placed", "queued")
        crash = storage.snapshot()
    model = talk()
    async with opened(model, storage=crash) as harness:
        assert await (await harness.submission(first.id)).status() == "placed"
        await harness.inspect()
        await rest()
        assert not model.requests


async def test_a_submission_is_found_again_after_a_reopen_h23() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        done = await (await harness.root()).submit("hi")
        await done.wait()
    async with opened(talk(), storage=storage) as harness:
        again = await harness.submission(done.id)
        assert (await again.answer()).text == "hello"
        assert [entry.kind for entry in await again.run()] == ["pi.user", "pi.assistant"]
        assert again.conversation == await harness.root()
        with pytest.raises(NotFound):
            await harness.submission(999)


async def test_an_id_that_came_as_text_is_the_number_it_names_or_nothing_k33(tmp_path: Path) -> None:
    """As from a command line: a wait by it ends like any other."""
    async with Harness.open(SqliteStorage(tmp_path / "agent.db"), models=ScriptedModel(say("x"))) as harness:
        root = await harness.root()
        made = await root.submit("hi")
        await made.wait()
    async with Harness.open(SqliteStorage(tmp_path / "agent.db"), models=ScriptedModel(say("x"))) as harness:
        untyped: Any = harness
        found = await untyped.submission(str(made.id))
        assert type(found.id) is int
        assert (await found.wait()).status == "done"
        assert (await untyped.conversation("1")) == await harness.root()
        with pytest.raises((NotFound, InvalidRead, TypeError)):
            await untyped.submission("none")


async def test_handles_are_equal_if_they_name_the_same_k33() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        assert root == harness.handle(1)
        assert hash(root) == hash(harness.handle(1))
        submission = await root.submit("hi")
        assert submission == await harness.submission(submission.id)
        assert submission != await root.submit("more")
        async with opened(talk()) as other:
            assert root != await other.root()


async def test_cancelling_a_wait_ends_that_wait_alone_k80() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        submission = await (await harness.root()).submit("hi")
        waits = [asyncio.ensure_future(submission.wait()) for _ in range(3)]
        await rest()
        waits[0].cancel()
        context = BACKGROUND.child()
        bounded = asyncio.ensure_future(submission.wait(context=context))
        await rest()
        context.cancel("enough")
        with pytest.raises(ContextCancelled):
            await bounded
        hold.release()
        assert (await waits[1]).status == "done"
        assert (await waits[2]).status == "done"
        assert waits[0].cancelled()


async def test_an_answer_is_an_event_not_a_poll_h21() -> None:
    """Nothing wakes up while a wait lasts: the loop has nothing to run until the stream goes on."""
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        submission = await (await harness.root()).submit("hi")
        waiting = asyncio.ensure_future(submission.wait())
        await rest()
        loop = asyncio.get_running_loop()
        assert not loop._ready  # pyright: ignore[reportAttributeAccessIssue]
        hold.release()
        assert (await waiting).status == "done"


async def test_a_wait_ends_with_the_session() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        submission = await (await harness.root()).submit("hi")
        waiting = asyncio.ensure_future(submission.wait())
        await rest()
        await harness.close()
        with pytest.raises(SessionClosed):
            await waiting
        with pytest.raises(SessionClosed):
            await submission.wait()


async def test_a_wait_on_blocked_work_says_so_t47() -> None:
    storage = MemoryStorage()
    hold = Hold()
    async with opened(talk(pace=hold), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        queued = await (await harness.root()).submit("more")
        crash = storage.snapshot()
    async with opened(talk(), storage=crash) as harness:
        task = harness.tasks.registry.find("pi.generation")
        harness.tasks.registry.remove("pi.generation")
        for id in (submission.id, queued.id):
            with pytest.raises(WorkBlocked) as blocked:
                await (await harness.submission(id)).wait()
            assert blocked.value.reason == "missing_task"
        through = asyncio.ensure_future((await harness.submission(queued.id)).wait(through_blocked=True))
        await rest()
        assert not through.done()
        assert task is not None
        harness.tasks.registry.install(task)
        assert (await through).status == "done"


async def test_work_that_becomes_blocked_ends_the_waits_for_it_t47_t48() -> None:
    entered = asyncio.Event()

    @tool
    async def slow() -> str:
        """Slow."""
        entered.set()
        await asyncio.Event().wait()
        return ""

    storage = MemoryStorage()
    model = ScriptedModel({"hi": [call("slow"), say("never")]})
    async with opened(model, storage=storage, tools=(slow,)) as harness:
        submission = await (await harness.root()).submit("hi")
        await entered.wait()
        crash = storage.snapshot()
    async with opened(model, storage=crash, tools=(slow,)) as harness:
        harness.tasks.registry.remove("pi.tool")
        submission = await harness.submission(submission.id)
        waiting = asyncio.ensure_future(submission.wait())
        with pytest.raises(WorkBlocked) as blocked:
            await waiting
        assert blocked.value.kind == "pi.tool"


# --- answers --------------------------------------------------------------------------------------------------------


async def test_an_answer_has_its_text_entry_and_message_h37() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        answer = await (await root.submit("hi")).answer()
        assert answer.text == answer.message.text == "hello"
        assert answer.entry == (await root.entries(order="descending", limit=1))[0]


async def test_an_unanswered_input_raises_with_reason_and_detail_h37_h41() -> None:
    async with opened(talk()) as harness:
        submission = await (await harness.root()).submit("bad")
        for ask in (submission.answer, submission.run):
            with pytest.raises(Unanswered) as ended:
                await ask()
            assert ended.value.reason == "model_error"
            assert ended.value.detail == "malformed: what is this"


class City(msgspec.Struct):
    name: str
    people: int


@dataclass
class CityData:
    name: str
    people: int


class CityModel(BaseModel):
    name: str
    people: int


@pytest.mark.parametrize("kind", [City, CityData, CityModel])
async def test_an_answer_is_parsed_as_a_type_h38(kind) -> None:
    model = ScriptedModel(say('```json\n{"name": "Lyon", "people": 522250}\n```'))
    async with opened(model) as harness:
        submission = await (await harness.root()).submit("Lyon?")
        city = await submission.answer(kind)
        assert city == kind(name="Lyon", people=522250)
        assert len(model.requests) == 1


async def test_plain_types_are_parsed_too_h38() -> None:
    async with opened(ScriptedModel(say("[1, 2, 3]"))) as harness:
        submission = await (await harness.root()).submit("count")
        assert await submission.answer(list[int]) == [1, 2, 3]
        assert await submission.answer(str) == "[1, 2, 3]"


async def test_the_model_is_asked_to_correct_itself_and_once_only_h38() -> None:
    def script(request):
        wrong = '{"name": "Lyon", "people": "many"}'
        asked = request.messages[-1].text
        return say('{"name": "Lyon", "people": 5}') if "could not be read as City" in asked else say(wrong)

    model = ScriptedModel(script)
    async with opened(model) as harness:
        submission = await (await harness.root()).submit("Lyon?")
        assert await submission.answer(City) == City("Lyon", 5)
        assert len(model.requests) == 2
        # Whoever asks again, after a restart too, finds the same correction.
        assert await submission.answer(City) == City("Lyon", 5)
        assert len(model.requests) == 2


async def test_corrections_are_bounded_h38() -> None:
    model = ScriptedModel(say("no idea"))
    async with opened(model) as harness:
        submission = await (await harness.root()).submit("Lyon?")
        with pytest.raises(CannotParse, match="not a City"):
            await submission.answer(City)
        assert len(model.requests) == 3


# --- taking back ----------------------------------------------------------------------------------------------------


async def test_a_queued_input_or_write_can_be_withdrawn_h53() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        queued = await root.submit("more")
        write = await root.write(Note(text="x"))
        assert await queued.abort() == "withdrawn"
        assert await write.abort() == "withdrawn"
        assert await queue(root) == []
        with pytest.raises(Unanswered, match="aborted"):
            await queued.answer()
        assert (await write.record()).reason == "aborted"
        hold.release()
        await first.wait()
        assert await transcript(root) == ["user hi", "assistant hello"]


async def test_a_placed_one_is_never_withdrawn_h53() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        submission = await (await harness.root()).submit("hi")
        assert await submission.abort() == "already_placed"
        hold.release()
        assert (await submission.answer()).text == "hello"
        assert await submission.abort() == "already_settled"


# --- after a failed run ---------------------------------------------------------------------------------------------


async def failed(harness, hold):
    root = await harness.root()
    failing = await root.submit("bad")
    follow_up = await root.submit("more")
    steer = await root.submit("steer", mode="steer")
    write = await root.write(Note(text="x"))
    hold.release()
    assert (await failing.wait()).reason == "model_error"
    return root, follow_up, steer, write


async def test_the_queue_is_kept_by_default_h48() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root, *queued = await failed(harness, hold)
        assert await queue(root) == [submission.id for submission in queued]
        assert not await root.busy()


async def test_the_host_may_let_it_continue_h48() -> None:
    hold = Hold()
    async with opened(talk(pace=hold), after_failure="continue") as harness:
        root, follow_up, steer, write = await failed(harness, hold)
        assert (await follow_up.answer()).text == "steered"
        assert (await steer.answer()).text == "steered"
        assert (await write.record()).status == "done"
        assert (await transcript(root))[2:] == ["app.note x", "user more", "user steer", "assistant steered"]


async def test_the_host_may_withdraw_it_h48() -> None:
    hold = Hold()
    async with opened(talk(pace=hold), after_failure="withdraw") as harness:
        root, follow_up, steer, write = await failed(harness, hold)
        for submission in (follow_up, steer):
            with pytest.raises(Unanswered) as ended:
                await submission.answer()
            assert ended.value.reason == "run_failed"
        assert await queue(root) == [write.id]


@pytest.mark.parametrize("setting", ["continue", "withdraw"])
async def test_a_run_that_ends_otherwise_keeps_the_queue_h50(setting) -> None:
    hold = Hold()
    async with opened(talk(pace=hold), after_failure=setting) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        second = await root.submit("more")
        task = (await harness.inspect()).tasks[0].id
        await harness.abort_task(task)
        assert (await first.record()).reason == "aborted"
        assert await queue(root) == [second.id]
        assert not await root.busy()


async def test_admission_and_boundaries_never_split_h24() -> None:
    """No commit shows an input placed without a run, or a run without its inputs."""
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        first = await root.submit("hi")
        second = await root.submit("more")
        hold.release()
        await first.wait()
        await second.wait()
        for settled in commits.all:
            placed = {s.id for s in settled.batch.submissions if s.status == "placed"}
            states = [Live.from_json(c.after) for c in settled.documents if c.record.kind == "pi.live"]
            if placed:
                assert [state.run["inputs"] for state in states if state.run] == [sorted(placed)]


async def test_an_answer_may_be_wanted_as_another_type_later_h38() -> None:
    async with opened(ScriptedModel(say("words"))) as harness:
        submission = await (await harness.root()).submit("hi")
        for kind in (int, bool, int):
            with pytest.raises(CannotParse):
                await submission.answer(kind)
        assert await submission.answer(str) == "words"


async def test_an_answer_nested_without_end_is_none_of_the_type_h38() -> None:
    class Box(msgspec.Struct):
        inside: object

    async with opened(ScriptedModel(say('{"inside":' + "[" * 100_000, chunk=0))) as harness:
        submission = await (await harness.root()).submit("hi")
        with pytest.raises(CannotParse):
            await submission.answer(Box)
