"""Requests for summaries are held against limits like any other, and what they use counts (rules H146, H159, H240)."""

from __future__ import annotations

import asyncio

import pytest
from compaction_kit import LONG, compactions, failure, fill, model, summaries, turns
from doubles import ManualClock
from kit import live, opened, rest

from perdure.harness.limits import Limits
from perdure.harness.messages import Usage
from perdure.harness.settings import RetryPolicy
from perdure.harness.submission import Unanswered
from perdure.testing.model import fail, say

COSTLY = Usage(input=5_000, output=100)


async def test_at_a_limit_no_summary_is_asked_for_h159() -> None:
    scripted = model()
    async with opened(scripted, conversation_limits=Limits(turns=6)) as harness:
        root = await harness.root()
        await fill(root, 6)
        await harness.wait_task(await root.compact())
        assert await failure(root) == ("manual", "limit")
        assert await compactions(root) == []
        assert summaries(scripted) == []
        await root.set_limits(turns=None)
        await harness.wait_task(await root.compact())
        assert len(await compactions(root)) == 1


async def test_what_a_summary_used_ends_the_run_that_waited_for_it_h159_h244() -> None:
    """The summary is placed all the same: it was paid for, and the next run begins with it."""
    scripted = model(summary=lambda _: say("The goal is to test.", usage=COSTLY))
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, 9)
        before = await root.usage()
        await root.set_limits(tokens=5_000)
        late = await root.submit(LONG)
        with pytest.raises(Unanswered, match="the conversation has used 5,100 of 5,000 tokens") as raised:
            await late.answer()
        assert raised.value.reason == "limit"
        used = await root.usage()
        assert (used.turns, used.requests) == (before.turns, before.requests + 1), "a summary is no turn"
        assert len(await compactions(root)) == 1
        asked = len(turns(scripted))
        await root.set_limits(tokens=None)
        assert (await (await root.submit("on")).answer()).text == "ok"
        assert len(turns(scripted)) == asked + 1


@pytest.mark.parametrize("code", ["overloaded", "overflow"])
async def test_a_summary_is_not_asked_for_again_beyond_a_limit_h159(code) -> None:
    clock = ManualClock()
    scripted = model(summary=lambda _: fail(code, usage=COSTLY))
    async with opened(scripted, clock=clock, retry=RetryPolicy(jitter=0)) as harness:
        root = await harness.root()
        await fill(root, 6)
        await root.set_limits(tokens=2 * COSTLY.input)
        task = await root.compact()
        if code == "overloaded":
            async with asyncio.timeout(60):
                while not any(shown["until"] for shown in (await live(root)).compactions.values()):
                    await rest()
            await clock.advance(2)
        await harness.wait_task(task)
        assert await failure(root) == ("manual", "limit")
        assert len(summaries(scripted)) == 2
