"""A tool asks a person, and waits for the answer durably (rules H329 to H332)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from doubles import ManualClock, settle
from kit import live, opened, transcript
from pydantic import BaseModel

from perdure.events import Event, QuestionAsked, QuestionOver, ToolEnd, ToolStart
from perdure.harness.conversation import Conversation
from perdure.harness.handle import CallConflict, CallRefused, ToolCall
from perdure.harness.harness import Harness
from perdure.harness.person import MOST_QUESTIONS, AnswerRefused, PersonQuestion, QuestionExpired
from perdure.harness.registry import Extension
from perdure.harness.tool import AnyTool, ToolError, tool
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.storage import sqlite_mailbox
from perdure.storage.memory import MemoryStorage
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools.people import MOST_CHOICES, ask_user


class Size(msgspec.Struct):
    width: int


class Place(BaseModel):
    name: str
    floor: int = 0


@dataclass
class Seat:
    row: int


Ask = Callable[[ToolCall], Awaitable[object]]


def asking(ask: Ask) -> AnyTool:
    @tool(name="inquire", replay="safe")
    async def inquire(call: ToolCall) -> str:
        """Inquire."""
        return repr(await ask(call))

    return inquire


MODEL = [call("inquire"), say("done")]


async def open_questions(harness: Harness, count: int = 1) -> list[PersonQuestion]:
    committed = asyncio.Event()
    harness.session.observe(lambda _: committed.set())
    harness.resume()
    async with asyncio.timeout(60):
        while len(found := await harness.questions()) < count:
            committed.clear()
            await committed.wait()
    return found


@asynccontextmanager
async def asked(ask: Ask, **options: Any) -> AsyncIterator[tuple[Harness, Conversation]]:
    """A run whose tool asks."""
    async with opened(ScriptedModel(MODEL), tools=(asking(ask),), **options) as harness:
        root = await harness.root()
        await root.submit("Go.", request_id="go")
        yield harness, root


async def said(root: Conversation) -> str:
    await (await root.submit("Go.", request_id="go")).answer()
    return (await transcript(root))[2].removeprefix("tool-result ")


@pytest.mark.parametrize(
    ("kind", "answer", "given"),
    [
        (str, "blue", "'blue'"),
        (int, 4, "4"),
        (int, "4", "4"),
        (bool, "true", "True"),
        (bool, "No", "False"),
        (float, "4", "4.0"),
        (Seat, '{"row": 3}', "Seat(row=3)"),
        (Literal["red", "blue"], "red", "'red'"),
        (list[int], "[1, 2,]", "[1, 2]"),
        (list[str], "one", "['one']"),
        (Size, {"width": 3}, "Size(width=3)"),
        (Place, {"name": "hall"}, "Place(name='hall', floor=0)"),
    ],
)
async def test_the_answer_is_of_the_type_that_is_asked_for_h329_h331(kind: Any, answer: Any, given: str) -> None:
    async with asked(lambda call: call.ask("Which?", kind)) as (harness, root):
        (question,) = await open_questions(harness)
        assert (question.text, question.tool, question.conversation_id) == ("Which?", "inquire", root.id)
        shown = (await live(root)).tools[str(question.call)]
        assert shown.get("questions") == {str(question.task): {"text": "Which?", "expires_at": question.expires_at}}
        assert question.expires_at - question.asked_at == 86_400_000
        assert await question.answer(answer) is True
        assert await said(root) == given
        assert await harness.questions() == []


async def test_events_tell_of_a_question_and_of_its_end_h333() -> None:
    async with opened(ScriptedModel(MODEL), tools=(asking(how_many),)) as harness:
        root = await harness.root()
        async with root.events() as events:
            await root.submit("Go.", request_id="go")
            told: list[Event] = []
            async for event in events:
                if isinstance(event, (QuestionAsked, QuestionOver, ToolStart, ToolEnd)):
                    told.append(event)
                if isinstance(event, QuestionAsked):
                    (question,) = await harness.questions()
                    assert (event.task, event.call, event.text) == (question.task, question.call, "How many?")
                    assert event.expires_at == question.expires_at
                    await question.answer(4)
                if isinstance(event, ToolEnd):
                    break
        assert [type(event) for event in told] == [ToolStart, QuestionAsked, QuestionOver, ToolEnd]
        assert [event.outcome for event in told if isinstance(event, QuestionOver)] == ["answered"]


async def test_what_is_aborted_is_over_for_those_who_watch_h333() -> None:
    async with asked(how_many) as (harness, root), root.events() as events:
        (question,) = await open_questions(harness)
        await root.abort()
        async for event in events:
            if isinstance(event, QuestionOver):
                assert (event.task, event.outcome) == (question.task, "withdrawn")
                break


async def test_events_tell_that_nobody_answered_in_time_h333() -> None:
    clock = ManualClock()

    async def ask(call: ToolCall) -> str:
        return await call.ask("Which?", expire_after_ms=1_000)

    async with asked(ask, clock=clock) as (harness, root), root.events() as events:
        (question,) = await open_questions(harness)
        await settle()
        await clock.advance(1)
        async for event in events:
            if isinstance(event, QuestionOver):
                assert (event.task, event.outcome) == (question.task, "expired")
                break


async def test_what_does_not_fit_is_refused_and_the_question_stays_h331() -> None:
    async with asked(lambda call: call.ask("How many?", int)) as (harness, root):
        (question,) = await open_questions(harness)
        wrongs: list[JsonValue] = ["many", [1], None, True]
        for wrong in wrongs:
            with pytest.raises(AnswerRefused, match="does_not_fit") as caught:
                await question.answer(wrong)
            assert caught.value.reason == "does_not_fit"
        assert await harness.questions() == [question]
        await question.answer(3)
        assert await said(root) == "3"
        with pytest.raises(AnswerRefused, match="nothing is asked any more"):
            await question.answer(4)


async def test_only_questions_are_answered_h331() -> None:
    async with asked(lambda call: call.ask("How many?", int)) as (harness, root):
        (question,) = await open_questions(harness)
        for task, error in ((question.call, AnswerRefused), (999_999, NotFound)):
            with pytest.raises(error):
                await replace(question, task=task).answer(3)
        await question.answer(3)
        await said(root)


async def test_a_question_outlives_its_process_and_is_asked_once_h329() -> None:
    storage, asks = MemoryStorage(), []

    async def ask(call: ToolCall) -> str:
        asks.append(call.attempt)
        return await call.ask("Which?")

    async with asked(ask, storage=storage) as (harness, _):
        (first,) = await open_questions(harness)
    async with opened(storage=storage) as harness:  # nothing runs, and there is no tool
        (again,) = await harness.questions()
        assert again == first
        assert await again.answer("blue") is True
        assert await harness.questions() == []
    async with asked(ask, storage=storage) as (harness, root):
        assert await said(root) == "'blue'"
    assert asks == [1, 2]


async def test_an_unsafe_call_that_asked_is_interrupted_and_asks_no_more_h330() -> None:
    storage = MemoryStorage()

    @tool
    async def inquire(call: ToolCall) -> str:
        """Inquire."""
        return await call.ask("Which?")

    async with opened(ScriptedModel(MODEL), storage=storage, tools=(inquire,)) as harness:
        await (await harness.root()).submit("Go.", request_id="go")
        await open_questions(harness)
    async with opened(ScriptedModel(MODEL), storage=storage, tools=(inquire,)) as harness:
        assert (await said(await harness.root())).startswith("The call was interrupted")
        assert await harness.questions() == []


async def test_one_key_is_one_question_h329() -> None:
    async def ask(call: ToolCall) -> object:
        same = await asyncio.gather(call.ask("Which?"), call.ask("Which?"), call.ask("Which?", key="other"))
        again = await call.ask("Which?")
        with pytest.raises(CallConflict):
            await call.ask("Which one?", key="other")
        return [*same, again]

    async with asked(ask) as (harness, root):
        questions = await open_questions(harness, 2)
        assert [question.text for question in questions] == ["Which?", "Which?"]
        for question, answer in zip(questions, ("red", "blue"), strict=True):
            await question.answer(answer)
        assert await said(root) == "['red', 'red', 'blue', 'red']"


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("", {}),
        ("x" * 10_001, {}),
        ("Which?", {"expire_after_ms": 0}),
        ("Which?", {"expire_after_ms": 2**63 - 1}),
        ("Which?", {"key": ""}),
        ("Which?", {"key": "k" * 999}),
    ],
)
async def test_what_cannot_be_asked_is_refused_h329(question: str, options: Any) -> None:
    async def ask(call: ToolCall) -> None:
        with pytest.raises(CallRefused):
            await call.ask(question, **options)

    async with asked(ask) as (harness, root):
        assert await said(root) == "None"
        assert await harness.questions() == []


async def test_a_call_asks_a_bounded_number_of_questions_h329() -> None:
    async def ask(call: ToolCall) -> None:
        asks = [asyncio.ensure_future(call.ask(f"Number {n}?")) for n in range(MOST_QUESTIONS)]
        await asyncio.sleep(0)
        for waiting in asks:
            while not waiting.done() and len(await harness.questions()) < MOST_QUESTIONS:
                await asyncio.sleep(0)
        with pytest.raises(CallRefused, match=f"asked {MOST_QUESTIONS} questions"):
            await call.ask("One more?")
        for waiting in asks:
            waiting.cancel()

    async with asked(ask) as (harness, root):
        assert await said(root) == "None"
        assert await harness.questions() == [], "what the call has not waited for went with it"


async def test_at_its_time_a_question_is_over_h330() -> None:
    clock = ManualClock()

    async def ask(call: ToolCall) -> str:
        return await call.ask("Which?", expire_after_ms=1_000)

    async with asked(ask, clock=clock) as (harness, root):
        (question,) = await open_questions(harness)
        clock.now += 1.0
        assert await harness.questions() == []
        with pytest.raises(AnswerRefused) as caught:
            await question.answer("late")
        assert caught.value.reason == "expired"
        await clock.advance(0)
        assert await said(root) == "Nobody answered in time: Which?"
        (entry,) = [entry for entry in await root.entries() if entry.kind == "pi.tool-result"]
        assert b'"code":"expired"' in bytes(entry.raw_data)
        assert "questions" not in str((await live(root)).tools)


async def test_a_tool_may_go_on_without_an_answer_h330() -> None:
    clock = ManualClock()

    async def ask(call: ToolCall) -> str:
        try:
            return await call.ask("Which?", expire_after_ms=1_000)
        except QuestionExpired:
            return "any"

    async with asked(ask, clock=clock) as (harness, root):
        await open_questions(harness)
        await settle()
        await clock.advance(1)
        assert await said(root) == "'any'"


async def test_a_question_that_is_aborted_was_withdrawn_h330() -> None:
    async with asked(lambda call: call.ask("Which?")) as (harness, root):
        (question,) = await open_questions(harness)
        await harness.abort_task(question.task)
        assert await said(root) == "The question was withdrawn: Which?"


async def test_a_signal_past_the_check_is_no_answer_h331() -> None:
    async with asked(lambda call: call.ask("How many?", int)) as (harness, root):
        (question,) = await open_questions(harness)
        await harness.send_signal(question.task, "answer", "many")
        assert (await said(root)).startswith("What was answered is not what was asked for: ")


async def test_another_process_lists_and_answers_through_the_mailbox_h330_h331(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    async with Harness.open(
        SqliteStorage(path), models=ScriptedModel(MODEL), extensions=[Extension("t", tools=[asking(how_many)])]
    ) as harness:
        root = await harness.root()
        await root.submit("Go.", request_id="go")
        (question,) = await open_questions(harness)
        async with Harness.open(SqliteStorage(path), read_only=True) as other:
            assert await other.questions() == [question]
        wrong = sqlite_mailbox.post(path, "answer", {"task": question.task, "value": "many"}, now=1)
        right = sqlite_mailbox.post(path, "answer", {"task": question.task, "value": "4"}, now=1)
        late = sqlite_mailbox.post(path, "answer", {"task": question.task, "value": 5}, now=1)
        assert await said(root) == "4"
        replies = [sqlite_mailbox.reply(path, mail) for mail in (wrong, right, late)]
        assert [reply is not None and reply.ok for reply in replies][:2] == [False, True]


async def how_many(call: ToolCall) -> int:
    return await call.ask("How many?", int)


async def test_outside_a_harness_there_is_nobody_to_ask() -> None:
    with pytest.raises(CallRefused, match="can ask nobody here"):
        await ToolCall(name="t").ask("Which?")


# --- ask_user -------------------------------------------------------------------------------------------------------


async def test_the_model_asks_the_user_h332() -> None:
    model = ScriptedModel(
        [
            call("ask_user", question="Which day?", choices=["Monday", "Friday"]),
            call("ask_user", question="Why?"),
            say("done"),
        ]
    )
    async with opened(model, tools=(ask_user,)) as harness:
        root = await harness.root()
        submission = await root.submit("Go.")
        (question,) = await open_questions(harness)
        assert question.schema == {"enum": ["Monday", "Friday"], "type": "string"}
        with pytest.raises(AnswerRefused):
            await question.answer("Sunday")
        await question.answer("Friday")
        (question,) = await open_questions(harness)
        assert question.schema == {"type": "string"}
        await question.answer("Because.")
        await submission.answer()
        lines = await transcript(root)
        assert (lines[2], lines[4]) == ("tool-result Friday", "tool-result Because.")


async def test_too_many_choices_are_refused_h332() -> None:
    with pytest.raises(ToolError, match=f"at most {MOST_CHOICES}"):
        await ask_user(question="Which?", call=ToolCall(), choices=[str(n) for n in range(MOST_CHOICES + 1)])
