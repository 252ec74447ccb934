"""Runs that hooks continue after an answer (rules H131 and H225)."""

from __future__ import annotations

import asyncio

import pytest
from hooks_kit import names, user, world
from kit import Commits, Note, Reports, kinds, live, transcript

from perdure.harness import continuing
from perdure.harness.documents import ASSISTANT, USER
from perdure.harness.hooks import HookAnswer, on_yield
from perdure.harness.limits import Limits
from perdure.harness.messages import UserMessage
from perdure.testing.model import ScriptedModel, call, say


async def test_a_run_is_continued_with_its_inputs_open_h131() -> None:
    asked: list[HookAnswer] = []
    turns: list[tuple[int, int]] = []

    @on_yield
    async def again(answer: HookAnswer) -> str | None:
        asked.append(answer)
        run = (await live(root)).run
        assert run is not None
        turns.append((run["turn"], run.get("continued", 0)))
        return "Are you sure?" if answer.continued == 0 else None

    @on_yield
    async def later(answer: HookAnswer) -> UserMessage | None:
        return user("never said") if answer.continued == 0 else None

    async with world(ScriptedModel({"hi": say("yes"), "Are you sure?": say("very")}), again, later) as (harness, root):
        commits = Commits(harness)
        submission = await root.submit("hi")
        assert (await submission.answer()).text == "very"
        assert await transcript(root) == ["user hi", "assistant yes", "user Are you sure?", "assistant very"]
        assert [entry.kind for entry in await submission.run()] == [USER, ASSISTANT, USER, ASSISTANT]
        # The answer, the words behind it and the next request are one commit.
        assert len(commits.durable) == 3
        said = (await root.entries(limit=3))[2]
        assert said.by_task == asked[0].id
        assert turns == [(0, 0), (1, 1)]
        assert [(a.turn, a.continued, a.message.text) for a in asked] == [(0, 0, "yes"), (1, 1, "very")]
        assert (await root.usage()).models["test:scripted"]["requests"] == 2


async def test_a_round_of_tools_does_not_yield_h131() -> None:
    turns: list[int] = []

    @on_yield
    async def note(answer: HookAnswer) -> None:
        turns.append(answer.turn)

    async with world(ScriptedModel([call("look", at=1), say("done")]), note) as (_, root):
        await (await root.submit("hi")).wait()
    assert turns == [1]


@pytest.mark.parametrize("mode", ["steer", "follow_up", "reset"])
async def test_what_a_boundary_places_ends_the_run_instead_h131_h225(mode) -> None:
    hold, reached = asyncio.Event(), asyncio.Event()

    @on_yield
    async def again(answer: HookAnswer) -> str | None:
        reached.set()
        await hold.wait()
        return "go on" if answer.message.text == "one" else None

    async with world(ScriptedModel({"hi": say("one"), "more": say("two")}), again) as (_, root):
        first = await root.submit("hi")
        await reached.wait()
        second = await root.reset() if mode == "reset" else await root.submit("more", mode=mode)
        hold.set()
        assert (await first.answer()).text == "one"
        await second.wait()
        assert "user go on" not in await transcript(root)
        last = "reset" if mode == "reset" else "assistant two"
        assert (await transcript(root))[-1] == last
        assert not await root.busy()


async def test_writes_at_the_boundary_stand_before_what_is_said_h131_h43() -> None:
    hold, reached = asyncio.Event(), asyncio.Event()

    @on_yield
    async def again(answer: HookAnswer) -> str | None:
        reached.set()
        await hold.wait()
        return None if answer.continued else "go on"

    async with world(ScriptedModel({"hi": say("one"), "go on": say("two")}), again) as (_, root):
        first = await root.submit("hi")
        await reached.wait()
        await root.write(Note(text="aside"))
        hold.set()
        assert (await first.answer()).text == "two"
        assert await transcript(root) == [
            "user hi",
            "assistant one",
            "app.note aside",
            "user go on",
            "assistant two",
        ]


async def test_a_run_is_continued_a_bounded_number_of_times_h225(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuing, "MOST_CONTINUATIONS", 3)

    @on_yield
    async def forever(answer: HookAnswer) -> str:
        return "and then?"

    reports = Reports()
    async with world(ScriptedModel(say("so")), forever, reports=reports) as (_, root):
        for _ in range(2):  # each run has its own
            await (await root.submit("hi")).wait()
        assert (await kinds(root)).count(ASSISTANT) == 8
    assert [report.type for report in reports] == ["continuations_exhausted"] * 2


async def test_a_continued_run_ends_as_it_ends_then_h131_h159() -> None:
    @on_yield
    async def again(answer: HookAnswer) -> str:
        return "go on"

    async with world(ScriptedModel(say("one")), again, conversation_limits=Limits(turns=2)) as (_, root):
        record = await (await root.submit("hi")).wait()
        assert (record.status, record.reason) == ("unanswered", "limit")
        assert await kinds(root) == [USER, ASSISTANT, USER, ASSISTANT, USER]
        assert not await root.busy()


async def test_words_that_say_nothing_are_skipped_h132() -> None:
    @on_yield
    async def empty(answer: HookAnswer) -> str:
        return ""

    @on_yield
    async def odd(answer: HookAnswer) -> str:
        return 7  # pyright: ignore[reportReturnType]

    @on_yield
    async def broken(answer: HookAnswer) -> str:
        raise asyncio.CancelledError

    reports = Reports()
    async with world(ScriptedModel(say("done")), empty, odd, broken, reports=reports) as (_, root):
        assert (await (await root.submit("hi")).answer()).text == "done"
    assert names(reports) == ["a hook on_yield"] * 3
