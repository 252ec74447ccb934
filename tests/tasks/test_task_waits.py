"""Waits by themselves: checks that are looked at, and ended by failure or cancellation alone (rule T77)."""

from __future__ import annotations

import asyncio

import pytest

from perdure.kernel.context import Context
from perdure.kernel.errors import ContextCancelled
from perdure.tasks.waits import Waits


async def test_a_wait_is_looked_at_when_its_task_ends_or_something_stirs() -> None:
    waits, answers = Waits(), dict[str, int]()
    one = asyncio.ensure_future(waits.until(lambda: answers.get("one"), task=1, context=None))
    scope = asyncio.ensure_future(waits.until(lambda: answers.get("scope"), task=None, context=None))
    await asyncio.sleep(0)
    answers["one"] = 1
    waits.ended([2])
    await asyncio.sleep(0)
    assert not one.done()
    waits.ended([1])
    assert await one == 1
    answers["scope"] = 2
    waits.stir()
    assert await scope == 2
    assert await waits.until(lambda: 3, task=1, context=None) == 3
    assert waits._everyone() == []


async def test_an_error_of_its_check_ends_that_wait_alone() -> None:
    waits = Waits()
    broken = False

    def check() -> int | None:
        if broken:
            raise ValueError
        return None

    first = asyncio.ensure_future(waits.until(check, task=1, context=None))
    second = asyncio.ensure_future(waits.until(lambda: None, task=1, context=None))
    await asyncio.sleep(0)
    broken = True
    waits.stir()
    with pytest.raises(ValueError):
        await first
    assert not second.done()
    second.cancel()


async def test_after_a_failure_nobody_waits_any_more() -> None:
    waits = Waits()
    before = asyncio.ensure_future(waits.until(lambda: None, task=1, context=None))
    await asyncio.sleep(0)
    waits.fail(OSError("closed"))
    with pytest.raises(OSError, match="closed"):
        await before
    with pytest.raises(OSError, match="closed"):
        await waits.until(lambda: None, task=2, context=None)
    assert await waits.until(lambda: 1, task=2, context=None) == 1, "what has ended is still told"


async def test_T77_a_context_ends_its_own_wait() -> None:
    waits, context = Waits(), Context()
    bounded = asyncio.ensure_future(waits.until(lambda: None, task=1, context=context))
    other = asyncio.ensure_future(waits.until(lambda: None, task=1, context=None))
    await asyncio.sleep(0)
    context.cancel("enough")
    with pytest.raises(ContextCancelled, match="enough"):
        await bounded
    with pytest.raises(ContextCancelled):
        await waits.until(lambda: 1, task=1, context=context)
    assert not other.done()
    other.cancel()
    await asyncio.sleep(0)
    assert waits._everyone() == []
