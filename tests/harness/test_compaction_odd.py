"""Compaction in odd company (rules H133 to H146, H200 to H215)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from compaction_kit import (
    BLOCKING,
    LONG,
    SUMMARY,
    UNTOLD,
    asks_for_summary,
    compactions,
    context,
    data_of,
    failure,
    fill,
    has_summary,
    model,
    summaries,
    texts,
    turns,
)
from doubles import ManualClock
from kit import Audit, Hold, Note, Reports, live, opened, rest

from perdure.harness.compaction_policy import Compaction
from perdure.harness.documents import ASSISTANT
from perdure.harness.hooks import Decline, HookCompaction, Summary, before_compact
from perdure.harness.registry import Extension
from perdure.harness.tokens import tokens_of
from perdure.harness.tool import tool
from perdure.kernel.records import Completed, Failed
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say


async def test_deadline_and_reserve_are_those_of_the_policy_that_names_the_writer_h146_h205() -> None:
    clock = ManualClock()
    never = Hold()

    class Two(ScriptedModel):
        def find(self, model):
            found = super().find("test:scripted")
            return found if model in ("test:scripted", "test:small") else None

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await never(request, event)

    scripted = Two(lambda request: say(SUMMARY, usage=UNTOLD), context_window=4_000, max_output=4_000, pace=pace)
    policy = Compaction(model="test:small", deadline_ms=60_000, reserve_tokens=1_500, keep_recent_tokens=0)
    reports: Reports = []
    async with opened(scripted, compaction_by_model={"test:scripted": policy}, clock=clock, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 4)
        task = await root.compact()
        await never.reached.wait()
        (request,) = summaries(scripted)
        assert request.max_output == 1_500
        await clock.advance(61)
        outcome = await harness.wait_task(task)
        assert isinstance(outcome, Failed)
        assert outcome.error.code == "deadline"


async def test_an_overflow_whose_compaction_came_too_late_for_another_is_sent_again_h139_h143() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request) and "by hand" not in texts(request.messages)[-1]:
            await hold(request, event)

    def script(request):
        if texts(request.messages)[-1] == "and now?" and not has_summary(request.messages):
            return fail("overflow", "too long for me")
        return say("ok", usage=UNTOLD)

    scripted = model(script, pace=pace, window=400_000)
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=150_000)) as harness:
        root = await harness.root()
        await fill(root, 6)
        await root.set_compaction(keep_recent_tokens=150_000)
        submission = await root.submit("and now?")
        await hold.reached.wait()
        await root.set_compaction(keep_recent_tokens=0)
        assert isinstance(await harness.wait_task(await root.compact("by hand")), Completed)
        hold.release()
        assert (await submission.answer()).text == "ok"
        assert has_summary(turns(scripted)[-1].messages)


async def test_a_failure_stays_one_of_its_run_when_another_fails_after_it_h210() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if not asks_for_summary(request) and texts(request.messages)[-1] == "hold":
            await hold(request, event)

    @tool(replay="safe")
    async def look() -> str:
        """Look."""
        return "a little"

    def script(request):
        asked = texts(request.messages)[-1] == "hold"
        return calls(call("look"), usage=UNTOLD) if asked else say("ok", usage=UNTOLD)

    scripted = model(script, summary=lambda request: fail("refused", "not so"), pace=pace)
    reports: Reports = []
    async with opened(scripted, tools=(look,), compaction=BLOCKING, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 9)
        submission = await root.submit("hold")
        await hold.reached.wait()
        assert await failure(root) == ("threshold", "refused")
        assert isinstance(await harness.wait_task(await root.compact("by hand")), Failed)
        hold.release()
        assert (await submission.answer()).text == "ok"
        assert len(summaries(scripted)) == 2


wrong: Any = 5


@pytest.mark.parametrize("instructions", [wrong, None, "\ud800", ["x"]])
async def test_instructions_that_are_no_text_are_refused_h142(instructions: Any) -> None:
    async with opened(model()) as harness:
        root = await harness.root()
        with pytest.raises((TypeError, ValueError)):
            await root.compact(instructions)
        assert (await live(root)).compactions == {}


@pytest.mark.parametrize("unknown", [0, -1])
async def test_a_model_of_unknown_sizes_is_asked_for_a_summary_by_hand_alone_h201_h205(unknown: int) -> None:
    scripted = model(window=unknown)
    scripted.max_output = unknown
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=1_000)) as harness:
        root = await harness.root()
        for _ in range(6):
            await (await root.submit(LONG)).answer()
        assert summaries(scripted) == []
        assert isinstance(await harness.wait_task(await root.compact()), Completed)
        (request,) = summaries(scripted)
        assert request.max_output is not None
        assert request.max_output > 1_000
        assert texts(request.messages)[-1].count(LONG.strip()) == 3


@pytest.mark.parametrize("first", ["background", "overflow"])
async def test_an_overflow_beside_a_background_compaction_is_placed_whichever_comes_first_h139_h209(first: str) -> None:
    holds = [Hold(), Hold()]

    async def pace(request, event) -> None:
        if asks_for_summary(request) and event == 0:
            await holds[len(summaries(scripted)) - 1](request, event)

    def script(request):
        if texts(request.messages)[-1] == "and now?" and not has_summary(request.messages):
            return fail("overflow", "too long for me")
        return say("ok", usage=UNTOLD)

    scripted = model(script, pace=pace)
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, 7)
        submission = await root.submit("and now?")
        await holds[0].reached.wait()
        await holds[1].reached.wait()
        holds[first == "overflow"].release()
        await rest()
        for hold in holds:
            hold.release()
        assert (await submission.answer()).text == "ok"
        await rest()
        reasons = [data_of(entry).reason for entry in await compactions(root)]
        assert reasons == (["background", "overflow"] if first == "background" else ["overflow"])
        assert texts(turns(scripted)[-1].messages)[-1] == "and now?"
        assert (await live(root)).compactions == {}


async def test_a_result_on_its_way_to_storage_keeps_its_call_h138() -> None:
    class Late(MemoryStorage):
        held: list[Callable[[], None]] | None = None

        def _settle(self) -> None:
            if self.held is None:
                super()._settle()
            else:
                self.held.append(super()._settle)

    storage = Late()
    begun, go_on = asyncio.Event(), asyncio.Event()

    @tool(replay="safe")
    async def look() -> str:
        """Look."""
        begun.set()
        await go_on.wait()
        return "found"

    def script(request):
        return calls(call("look"), usage=UNTOLD) if texts(request.messages)[-1] == "go" else say("ok", usage=UNTOLD)

    async with opened(model(script), storage=storage, tools=(look,)) as harness:
        root = await harness.root()
        await fill(root, 3)
        submission = await root.submit("go")
        await begun.wait()
        await root.write(Audit(n=1))
        storage.held = held = []
        go_on.set()
        await rest()
        assert held, "the result is staged"
        contexts = harness._host.contexts
        cut = contexts.cut(root.id, 0, least=1)
        storage.held = None
        for settle in held:
            settle()
        assert (await submission.answer()).text == "ok"
        assert cut is not None
        (kept,) = await root.entries(first=cut, limit=1)
        assert kept.kind == ASSISTANT


async def test_a_hook_that_gives_white_space_gives_no_summary_and_one_that_declines_is_brief_h144() -> None:
    answers: list[Summary | Decline] = [Summary(" \n "), Decline("no " * 5_000)]

    @before_compact
    async def mine(compaction: HookCompaction) -> Summary | Decline:
        return answers.pop(0)

    extension = Extension("hooks", hooks=[mine])
    reports: Reports = []
    async with opened(model(), compaction=BLOCKING, extensions=[extension], reports=reports) as harness:
        root = await harness.root()
        await fill(root, 6)
        ends = [await harness.wait_task(await root.compact()) for _ in range(2)]
        assert [end.error.code for end in ends if isinstance(end, Failed)] == ["compaction_ineffective", "declined"]
        assert await compactions(root) == []
        shown = (await live(root)).compaction_failure
        assert shown is not None
        assert len(shown["message"]) <= 2_000


async def test_long_instructions_fit_the_window_too_h205() -> None:
    scripted = model()
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        task = await root.compact(f"first {'x' * 100_000} last")
        assert isinstance(await harness.wait_task(task), Completed)
        (request,) = summaries(scripted)
        assert tokens_of(request.messages) < 4_000
        said = texts(request.messages)[-1]
        assert "first xxx" in said
        assert "xxx last" in said
        assert LONG.strip() in said


@pytest.mark.parametrize("busy", [False, True])
async def test_a_beginning_of_somebody_else_that_came_meanwhile_is_not_replaced_h215(busy: bool) -> None:
    hold, busy_hold = Hold(), Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)
        elif texts(request.messages)[-1] == "hold":
            await busy_hold(request, event)

    async with opened(model(pace=pace), compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        submission = await root.submit("hold") if busy else None
        await rest()
        task = await root.compact()
        await hold.reached.wait()
        await root.write(Note(text="in my own words"), head=(await root.entries(limit=4))[2].id)
        hold.release()
        outcome = await harness.wait_task(task)
        busy_hold.release()
        if submission is not None:
            await submission.answer()
        assert isinstance(outcome, Failed)
        assert outcome.error.code == "stale"
        assert texts(await context(harness, root))[0] == "in my own words"
        assert isinstance(await harness.wait_task(await root.compact()), Completed)
        assert has_summary(await context(harness, root))


async def test_a_second_overflow_ends_the_run_though_more_could_be_cut_h139() -> None:
    """Once is for the run: what another compaction might still free does not count."""
    scripted = model(lambda request: fail("overflow", "too long for me"), window=20_000)
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=4_000, background_tokens=0)) as harness:
        root = await harness.root()
        await root.set_compaction(enabled=False)
        for _ in range(30):
            await root.write(Note(text=LONG))
        await root.set_compaction(enabled=None)
        record = await (await root.submit("and now?")).wait()
        assert (record.reason, record.detail) == ("model_error", "overflow: too long for me")
        assert (len(turns(scripted)), len(summaries(scripted))) == (2, 1)
        assert texts(await context(harness, root)).count(LONG) > 4, "there was more to cut"


async def test_a_run_that_waited_for_a_compaction_gets_none_for_an_overflow_h139() -> None:
    """Whatever it waited for, it has had its one."""
    scripted = model(
        lambda request: fail("overflow", "too long for me") if has_summary(request.messages) else say("ok"),
        window=20_000,
    )
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=4_000, background_tokens=0)) as harness:
        root = await harness.root()
        await root.set_compaction(enabled=False)
        for _ in range(45):
            await root.write(Note(text=LONG))
        await root.set_compaction(enabled=None)
        record = await (await root.submit("and now?")).wait()
        assert (record.reason, record.detail) == ("model_error", "overflow: too long for me")
        assert [data_of(entry).reason for entry in await compactions(root)] == ["threshold"]
        assert (len(turns(scripted)), len(summaries(scripted))) == (1, 1)
        assert texts(await context(harness, root)).count(LONG) > 4, "there was more to cut"
