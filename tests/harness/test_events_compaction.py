"""Events of real compactions: waited for, in the background, by hand, failing, declined, aborted, late (rule H150)."""

from __future__ import annotations

import asyncio

import pytest
from compaction_kit import BLOCKING, SUMMARY, fill, model
from kit import Hold, opened

from perdure.harness.compaction_policy import Compaction
from perdure.harness.conversation import Conversation
from perdure.harness.documents import COMPACTION
from perdure.harness.events import CompactionEnd, CompactionRetry, CompactionStart, Event, Events, RunEnd, Snapshot
from perdure.kernel.json import JsonValue, same_json
from perdure.kernel.ops import apply
from perdure.testing.model import Fail, fail, say


async def until(events: Events, kind: type[Event]) -> list[Event]:
    found: list[Event] = []
    async with asyncio.timeout(60):
        while not (found and isinstance(found[-1], kind)):
            found.append(await anext(events))
    return found


def of_compactions(found: list[Event]) -> list[CompactionStart | CompactionRetry | CompactionEnd]:
    return [event for event in found if isinstance(event, (CompactionStart, CompactionRetry, CompactionEnd))]


async def by_hand(root: Conversation, events: Events) -> list[CompactionStart | CompactionRetry | CompactionEnd]:
    await anext(events)
    await root.compact()
    return of_compactions(await until(events, CompactionEnd))


@pytest.mark.parametrize("policy", [BLOCKING, Compaction()])
async def test_one_that_a_run_waits_for_and_one_in_the_background_h150(policy: Compaction) -> None:
    async with opened(model(), compaction=policy) as harness:
        root = await harness.root()
        await fill(root, 9 if policy is BLOCKING else 6)
        async with root.events() as events, root.watch(window=4) as watch:
            frame = await anext(watch)
            json: JsonValue = frame.value.to_json()
            assert isinstance(await anext(events), Snapshot)
            await root.submit("and now?")
            found = await until(events, RunEnd)
            if not any(isinstance(event, CompactionEnd) for event in found):
                found += await until(events, CompactionEnd)
            start, end = of_compactions(found)
            assert isinstance(start, CompactionStart)
            assert isinstance(end, CompactionEnd)
            assert start.task == end.task
            assert start.reason == end.reason == ("threshold" if policy is BLOCKING else "background")
            assert (end.outcome, end.code) == ("placed", None)
            assert end.entry is not None
            assert end.entry.kind == COMPACTION
            while frame.seq < end.seq:
                frame = await anext(watch)
                assert frame.ops is not None
                json = apply(json, frame.ops)
                assert same_json(json, frame.value.to_json())
            assert frame.value.start == end.entry.head, "the view begins at the first kept entry"


async def test_one_by_hand_that_is_placed_or_has_nothing_to_do_h150() -> None:
    async with opened(model(), compaction=BLOCKING) as harness:
        root = await harness.root()
        async with root.events() as events:
            start, end = await by_hand(root, events)
            assert isinstance(end, CompactionEnd)
            assert (start.task, end.reason, end.outcome, end.code) == (
                end.task,
                "manual",
                "declined",
                "nothing_to_compact",
            )
        await fill(root, 6)
        async with root.events() as events:
            _, end = await by_hand(root, events)
            assert isinstance(end, CompactionEnd)
            assert end.outcome == "placed"


async def test_one_whose_summary_cannot_be_had_h150() -> None:
    async with opened(model(summary=lambda _: Fail("refused", "never")), compaction=BLOCKING, reports=[]) as harness:
        root = await harness.root()
        await fill(root, 6)
        async with root.events() as events:
            _, end = await by_hand(root, events)
            assert isinstance(end, CompactionEnd)
            assert (end.outcome, end.code, end.message) == ("failed", "refused", "never")


async def test_one_that_is_tried_again_h150() -> None:
    reply = fail("overloaded", times=1, then=say(SUMMARY))
    async with opened(model(summary=lambda _: reply), compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        async with root.events() as events:
            await anext(events)
            await root.compact()
            found = of_compactions(await until(events, CompactionRetry))
            retry = found[-1]
            assert isinstance(retry, CompactionRetry)
            assert (retry.attempt, retry.code) == (2, "overloaded")
            await harness.abort_task(retry.task)
            (end,) = of_compactions(await until(events, CompactionEnd))
            assert isinstance(end, CompactionEnd)
            assert (end.task, end.outcome) == (retry.task, "aborted")


async def test_a_summary_that_waits_for_the_boundary_of_a_run_ends_when_it_is_placed_h150() -> None:
    """Not when its task does, and it is told once."""
    hold = Hold()

    async def pace(request, number: int) -> None:
        if request.messages[-1].text == "slow":
            await hold(request, number)

    async with opened(model(pace=pace), compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        async with root.events() as events:
            await anext(events)
            submission = await root.submit("slow")
            await hold.reached.wait()
            task = await root.compact()
            await harness.tasks.wait(task)
            found = [await anext(events)]
            while not isinstance(found[-1], CompactionStart):
                found.append(await anext(events))
            hold.release()
            await submission.answer()
            found = of_compactions(await until(events, CompactionEnd))
            (end,) = found
            assert isinstance(end, CompactionEnd)
            assert (end.task, end.outcome) == (task, "placed")
            assert end.entry is not None
            assert end.seq >= (await submission.answer()).entry.seq
