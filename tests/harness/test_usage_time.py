"""Turns and time in runs, counted in commits that are there anyway (rules H240, H241)."""

from __future__ import annotations

from doubles import ManualClock
from kit import Commits, Hold, opened, rest, until

from perdure.harness.settings import RetryPolicy
from perdure.harness.tool import tool
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, fail, say


@tool(replay="safe")
async def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


async def test_each_response_that_came_to_a_message_is_a_turn_h240() -> None:
    clock = ManualClock()
    first = fail("overloaded", times=1, then=call("add", a=1, b=2))
    model = ScriptedModel([first, say("3"), fail("refused", partial="I")])
    async with opened(model, tools=(add,), clock=clock, retry=RetryPolicy(jitter=0)) as harness:
        root = await harness.root()
        submission = await root.submit("1 + 2?")
        await until(lambda: clock.sleeping == 1)
        assert (await root.usage()).turns == 0, "an attempt that failed is none"
        await clock.advance(2)
        await submission.answer()
        used = await root.usage()
        assert (used.turns, used.requests) == (2, 3)
        refused = await (await root.submit("more?")).wait()
        assert refused.reason == "model_error"
        used = await root.usage()
        assert (used.turns, used.requests) == (2, 4)
        assert (await harness.usage()).turns == 2


async def test_the_time_of_a_run_is_counted_when_it_ends_h241() -> None:
    clock, hold = ManualClock(), Hold(1)
    async with opened(ScriptedModel(say("x" * 100), pace=hold), clock=clock) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await hold.reached.wait()
        await clock.advance(3)
        assert (await root.usage()).run_ms == 0
        hold.release()
        await submission.answer()
        assert (await root.usage()).run_ms == 3000
        await clock.advance(5)
        await (await root.submit("hi")).answer()
        assert (await root.usage()).run_ms == 3000, "between runs no time is counted"
        assert (await harness.usage()).run_ms == 3000


async def test_an_aborted_run_has_its_time_too_h241() -> None:
    clock, hold = ManualClock(), Hold(1)
    async with opened(ScriptedModel(say("x" * 100), pace=hold), clock=clock) as harness:
        root = await harness.root()
        await root.submit("hi")
        await hold.reached.wait()
        await clock.advance(2)
        await root.abort()
        used = await root.usage()
    assert (used.turns, used.run_ms) == (0, 2000)


async def test_time_without_a_process_is_in_the_run_and_no_clock_takes_from_it_h241() -> None:
    storage, clock, hold = MemoryStorage(), ManualClock(), Hold(0)
    async with opened(ScriptedModel(say("x"), pace=hold), storage=storage, clock=clock) as harness:
        submission = await (await harness.root()).submit("hi")
        await hold.reached.wait()
    later = ManualClock()
    later.now = 60
    async with opened(ScriptedModel(say("x")), storage=storage, clock=later) as harness:
        await (await harness.submission(submission.id)).answer()
        assert (await harness.usage()).run_ms == 60_000
        later.now = 100
        hold = Hold(0)
    async with opened(ScriptedModel(say("x"), pace=hold), storage=storage, clock=later) as harness:
        submission = await (await harness.root()).submit("hi")
        await hold.reached.wait()
        later.now = 90
        hold.release()
        await submission.answer()
        assert (await harness.usage()).run_ms == 60_000, "a clock that was set back takes nothing away"


async def test_counting_takes_no_commit_h240() -> None:
    async with opened(ScriptedModel(say("x", chunk=0))) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).answer()
        await rest()
        assert len(commits.durable) == 2
        used = await root.usage()
    assert used.turns == 1


async def test_what_a_deleted_conversation_had_stays_in_the_sum_h184() -> None:
    clock, hold = ManualClock(), Hold(0)
    async with opened(ScriptedModel(say("x"), pace=hold), clock=clock) as harness:
        other = await harness.create_conversation()
        submission = await other.submit("hi")
        await hold.reached.wait()
        await clock.advance(1.5)
        hold.release()
        await submission.answer()
        before = await harness.usage()
        await other.delete()
        after = await harness.usage()
    assert (after.turns, after.run_ms) == (before.turns, before.run_ms) == (1, 1500)
