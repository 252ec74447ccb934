"""What questions to a person promise: asked once, whatever is killed, and over with an answer or their time
(rules H329 to H332)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import cast

from perdure.harness.handle import ToolCall
from perdure.harness.harness import Harness
from perdure.harness.person import QUESTION, AnswerRefused, PersonQuestion, QuestionExpired
from perdure.harness.submission import Submission
from perdure.harness.tool import AnyTool, tool
from perdure.kernel.json import JsonValue
from perdure.testing.model import call, calls, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import effects, ends, measure, open_harness, over_within, scenario
from perdure.testing.simulation import Host
from perdure.tools.people import ask_user


def book(host: Host, *, wait_s: int) -> AnyTool:
    """A tool that asks two things at a time each, and acts on what it was told."""

    @tool(name="book", replay="safe")
    async def book(place: str, call: ToolCall) -> str:
        """Book a table."""
        try:
            many = await call.ask(f"How many are you at {place}?", int, expire_after_ms=wait_s * 1000)
            kind = await call.ask("Inside?", bool, expire_after_ms=wait_s * 1000, key=f"inside {place}")
        except QuestionExpired:
            return "nobody answered, so nothing is booked"
        host.effect(f"book {place} for {many}", key=call.idempotency_key)
        return f"{place} for {many}, {'inside' if kind else 'outside'}"

    return book


ANSWERS: dict[str, JsonValue] = {
    "How many are you at Chez Luc?": "4",
    "How many are you at Roma?": 2,
    "Inside?": "true",
    "Which day?": "Monday",
}


async def answered(host: Host, harness: Harness, submission: Submission, *, answers: bool) -> None:
    """Somebody looks every second at what is asked, until the input has its answer."""
    harness.resume()
    while await submission.status() not in ("done", "unanswered"):
        await host.clock.sleep(1)
        for question in await harness.questions():
            if answers:
                await reply(question)


async def reply(question: PersonQuestion) -> None:
    with suppress(AnswerRefused):
        await question.answer({"no": "answer to anything"})
        raise AssertionError("that fits nothing")
    assert await question.answer(ANSWERS[question.text]) is True
    with suppress(AnswerRefused):  # it is over by now, or about to be
        assert await question.answer(ANSWERS[question.text]) is False, "the first answer stands"


async def question_answered(host: Host) -> None:
    """Two calls of a round ask, and the model by itself: each question is asked once, and each answer counts."""
    round = calls(call("book", place="Chez Luc"), call("book", place="Roma"), call("measure", place="sky"))
    replies = [round, call("ask_user", question="Which day?", choices=["Monday", "Friday"]), say("done")]
    tools = [book(host, wait_s=3_600), measure(host), ask_user]
    async with open_harness(host, replies, tools=tools) as (harness, root):
        submission = await root.submit("Book.", request_id="book")
        await answered(host, harness, submission, answers=True)
        assert (await submission.answer()).text == "done"


def asked_once(records: Records) -> Iterator[str]:
    """No question has a second task, and each is shown at its call exactly while it is asked."""
    asked = [(task.owner, _text(task.input)) for task in records.tasks if task.kind == QUESTION]
    if len(asked) != len(set(asked)):
        yield f"the questions are {asked}"
    live = cast("dict[str, dict[str, dict[str, dict[str, JsonValue]]]]", records.document("pi.live", 1) or {})
    shown = {int(task) for tool in live.get("tools", {}).values() for task in tool.get("questions", {})}
    open_ = {task.id for task in records.tasks if task.kind == QUESTION and task.live}
    if shown != open_:
        yield f"questions {sorted(open_)} are asked, and {sorted(shown)} are shown"


def _text(input: JsonValue) -> JsonValue:
    assert isinstance(input, dict)
    return input["text"]


async def question_expired(host: Host) -> None:
    """Nobody answers: the tool is told so, in its time, killed or not."""
    replies = [calls(call("book", place="Roma"), call("measure", place="sky")), say("done")]
    async with open_harness(host, replies, tools=[book(host, wait_s=20), measure(host)]) as (harness, root):
        submission = await root.submit("Book.", request_id="book")
        await answered(host, harness, submission, answers=False)
        assert (await submission.answer()).text == "done"


def over_in_time(records: Records) -> Iterator[str]:
    return over_within(records, QUESTION, 600_000)


async def question_aborted(host: Host) -> None:
    """The conversation is aborted while a person is asked: nothing is asked any more."""
    async with open_harness(host, [call("book", place="Roma"), say("no")], tools=[book(host, wait_s=3_600)]) as (
        harness,
        root,
    ):
        submission = await root.submit("Book.", request_id="book")
        harness.resume()
        while await submission.status() not in ("done", "unanswered"):
            await host.clock.sleep(1)
            if await harness.questions():
                await root.abort()
        await ends(submission, "aborted")
        assert await harness.questions() == []


PEOPLE = (
    scenario(
        question_answered, safe=effects("book Chez Luc for 4", "book Roma for 2", "measure sky"), always=asked_once
    ),
    scenario(question_expired, safe=effects("measure sky"), always=asked_once, ends=over_in_time),
    scenario(question_aborted, always=asked_once, steady=False),
)
