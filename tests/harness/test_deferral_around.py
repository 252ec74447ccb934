"""What else happens to a conversation whose response is made in the background (rules H75, H404, H405)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from doubles import ManualClock
from kit import kinds, live, opened, rest, transcript

from perdure import Extension, ModelRequest, Unanswered
from perdure.harness.compaction_policy import Compaction
from perdure.storage.memory import MemoryStorage
from perdure.testing import ScriptedModel, call, defer, say
from perdure.tools.subagents import subagent

PAUSE = 10.0
"""Seconds between two polls."""


def later(text: str, polls: int = 0):
    return defer(say(text), polls=polls, poll_after_ms=int(PAUSE * 1000))


@asynccontextmanager
async def working(model: ScriptedModel, clock: ManualClock, storage: MemoryStorage | None = None, **options):
    async with opened(model, storage=storage, clock=clock, **options) as harness:
        yield harness, await harness.root()


async def test_input_that_comes_meanwhile_waits_and_is_answered_next_h75() -> None:
    model, clock = ScriptedModel({"one": later("1"), "two": later("2")}), ManualClock()
    async with working(model, clock) as (_, root):
        first = await root.submit("one")
        await rest()
        second = await root.submit("two", mode="steer")
        await rest()
        assert await transcript(root) == ["user one"]
        for _ in range(2):
            await clock.advance(PAUSE)
            await rest()
        assert [(await each.answer()).text for each in (first, second)] == ["1", "2"]
    assert len(model.requests) == 2


async def test_a_fork_waits_for_nothing_h75() -> None:
    model, clock = ScriptedModel({"one": later("1", polls=3), "two": say("2")}), ManualClock()
    async with working(model, clock) as (_, root):
        await root.submit("one")
        await rest()
        (entry,) = await root.entries()
        other = await root.fork(entry.id)
        assert (await live(other)).deferred is None
        assert (await (await other.submit("two")).answer()).text == "2"
        assert (await live(root)).deferred is not None
    assert not model.cancelled


async def test_a_conversation_that_is_deleted_cancels_its_response_h404() -> None:
    model, clock = ScriptedModel(later("never", polls=9)), ManualClock()
    async with working(model, clock) as (harness, _):
        other = await harness.create_conversation()
        await other.submit("one")
        await rest()
        await other.delete(abort=True)
        assert len(model.cancelled) == 1
        await clock.advance(10 * PAUSE)
    assert not model.fetched


async def test_a_summary_may_be_placed_meanwhile_h75_h142() -> None:
    def script(request: ModelRequest):
        return later("an answer. " * 40) if request.may_defer else say("in short")

    model, clock = ScriptedModel(script), ManualClock()
    compaction = Compaction(keep_recent_tokens=1, background_tokens=0)
    async with working(model, clock, compaction=compaction) as (harness, root):
        for number in range(2):
            submission = await root.submit(f"question {number}")
            await rest()
            await clock.advance(PAUSE)
            await submission.answer()
        last = await root.submit("the last question")
        await rest()
        task = await root.compact()
        await harness.wait_task(task)
        await clock.advance(PAUSE)
        assert (await last.answer()).text.startswith("an answer.")
        assert "pi.compaction" in await kinds(root)
        assert (await root.usage()).requests == 4
    assert len(model.fetched) == 3


async def test_an_agent_below_a_call_waits_and_is_aborted_with_it_h404_h162() -> None:
    script = {"Ask.": [call("subagent", prompt="Go."), say("done")], "Go.": later("never", polls=9)}
    model, clock, storage = ScriptedModel(script), ManualClock(), MemoryStorage()
    tools = Extension("agents", tools=[subagent()])
    async with working(model, clock, storage, extensions=[tools]) as (_, root):
        submission = (await root.submit("Ask.")).id
        await rest()
        await clock.advance(PAUSE)
    assert (len(model.requests), len(model.fetched)) == (2, 1)
    async with working(model, clock, storage, extensions=[tools]) as (harness, root):
        harness.resume()
        await rest()
        await clock.advance(PAUSE)
        assert (len(model.requests), len(model.fetched)) == (2, 2), "it is polled on, and nobody is asked again"
        await root.abort()
        with pytest.raises(Unanswered):
            await (await harness.submission(submission)).answer()
        await asyncio.sleep(0)
    assert len(model.cancelled) == 1
