"""Compaction: when a run waits for one, when one runs beside it, and what becomes of it (rules H133 to H146, H200 to
H214)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from compaction_kit import (
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
from doubles import ManualClock, settle
from hypothesis import given
from hypothesis import strategies as st
from kit import Commits, Hold, Note, Reports, kinds, live, opened, queue, rest

from perdure.harness.compaction import CompactionResult
from perdure.harness.compaction_policy import Compaction, room_for
from perdure.harness.documents import COMPACTION
from perdure.harness.harness import Harness
from perdure.harness.hooks import Decline, HookCompaction, Summary, before_compact
from perdure.harness.messages import AssistantMessage, ToolResultMessage, Usage, UserMessage
from perdure.harness.registry import Extension
from perdure.harness.settings import RetryPolicy
from perdure.harness.tool import tool
from perdure.kernel.records import Aborted, Completed, Failed
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say

BLOCKING = Compaction(background_tokens=0)


# --- before a request -------------------------------------------------------------------------------------------


async def test_above_the_window_less_the_reserve_a_run_waits_for_a_compaction_h136() -> None:
    scripted = model()
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 9)
        submission = await root.submit("and now?")
        assert (await submission.answer()).text == "ok"
        (entry,) = await compactions(root)
        data = data_of(entry)
        assert (data.reason, data.model) == ("threshold", "test:scripted")
        assert data.tokens_before > 3_000
        sent = turns(scripted)[-1].messages
        assert has_summary(sent)
        assert texts(sent)[-1] == "and now?"
        assert len(summaries(scripted)) == 1
        assert (await live(root)).compactions == {}
        assert await failure(root) is None
        assert (await root.usage()).requests == 11


async def test_below_it_nothing_happens_h136() -> None:
    scripted = model()
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        for _ in range(6):
            await (await root.submit(LONG)).answer()
        assert await compactions(root) == []
        assert summaries(scripted) == []


async def test_a_long_run_of_tools_is_compacted_between_two_rounds_h136_h138() -> None:
    @tool(replay="safe")
    async def look() -> str:
        """Look."""
        return LONG

    def script(request):
        if has_summary(request.messages) and "begin" not in texts(request.messages) and len(request.messages) > 8:
            return say("done", usage=UNTOLD)
        return calls(call("look"), call("look"), usage=UNTOLD)

    scripted = model(script)
    async with opened(scripted, tools=(look,), compaction=BLOCKING) as harness:
        root = await harness.root()
        submission = await root.submit("begin")
        assert (await submission.answer()).text == "done"
        assert await compactions(root)
        for request in turns(scripted):
            open_calls: list[str] = []
            for message in request.messages:
                if isinstance(message, AssistantMessage):
                    assert not open_calls
                    open_calls = [part.id for part in message.tool_calls]
                elif isinstance(message, ToolResultMessage):
                    assert open_calls.pop(0) == message.call_id
                    assert message.code is None
            assert not open_calls
        assert (await submission.run())[-1].kind == "pi.assistant"


async def test_a_run_waits_once_a_request_and_sends_it_as_it_is_if_that_did_not_help_h141() -> None:
    """A prompt that alone is above the point: each input compacts what was new, once."""
    scripted = model()
    async with opened(scripted, compaction=BLOCKING, instructions="rule " * 2_500) as harness:
        root = await harness.root()
        for number in range(6):
            assert (await (await root.submit(f"{number} {LONG}")).answer()).text == "ok"
        asked = len(summaries(scripted))
        assert len(turns(scripted)) == 6
        assert 1 <= asked <= 5


# --- beside a request -------------------------------------------------------------------------------------------


async def test_a_background_compaction_runs_beside_the_run_and_is_placed_at_its_boundary_h137_h142() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if texts(request.messages)[-1] == "hold":
            await hold(request, event)

    scripted = model(pace=pace)
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, 6)
        submission = await root.submit("hold")
        await hold.reached.wait()
        await rest()
        assert len(summaries(scripted)) == 1
        assert await compactions(root) == []
        assert len(await queue(root)) == 1
        assert (await live(root)).compactions == {}
        hold.release()
        await submission.answer()
        (entry,) = await compactions(root)
        assert data_of(entry).reason == "background"
        assert not has_summary(turns(scripted)[-1].messages)
        await (await root.submit("and now?")).answer()
        assert has_summary(turns(scripted)[-1].messages)
        assert len(summaries(scripted)) == 1


async def test_one_that_ends_after_the_run_is_placed_and_starts_none_h52_h142() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    scripted = model(pace=pace)
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, 6)
        await (await root.submit("go")).answer()
        await hold.reached.wait()
        await root.idle()  # background work is not waited for
        (shown,) = (await live(root)).compactions.values()
        assert (shown["reason"], shown["attempt"], shown["until"]) == ("background", 1, None)
        sent = len(turns(scripted))
        hold.release()
        await rest()
        assert len(await compactions(root)) == 1
        assert len(turns(scripted)) == sent
        assert not await root.busy()
        await (await root.submit("and now?")).answer()
        assert has_summary(turns(scripted)[-1].messages)


async def test_only_one_is_begun_however_long_it_takes_h137_h209() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    scripted = model(pace=pace)
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, 6)
        for _ in range(2):
            await (await root.submit("short")).answer()
        assert len(summaries(scripted)) == 1
        waiting = await root.submit(LONG * 3)
        await rest()
        assert (await live(root)).run is not None
        assert len(summaries(scripted)) == 1, "the run waits for the one that is under way"
        hold.release()
        assert (await waiting.answer()).text == "ok"
        assert [data_of(entry).reason for entry in await compactions(root)] == ["background"]
        assert has_summary(turns(scripted)[-1].messages)


async def test_none_is_begun_in_the_background_with_0_tokens_h137() -> None:
    scripted = model()
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        await (await root.submit("short")).answer()
        await rest()
        assert summaries(scripted) == []


# --- after an overflow ------------------------------------------------------------------------------------------


def overflowing(limit: int):
    """Refuses as too long what has more than so many messages."""

    def script(request):
        if len(request.messages) > limit:
            return fail("overflow", "too long for me")
        return say("ok", usage=UNTOLD)

    return script


async def test_an_overflow_compacts_and_retries_once_h71_h139() -> None:
    scripted = model(overflowing(8), window=400_000)
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=4_000)) as harness:
        root = await harness.root()
        await fill(root, 4)
        submission = await root.submit("and now?")
        assert (await submission.answer()).text == "ok"
        (entry,) = await compactions(root)
        assert data_of(entry).reason == "overflow"
        assert has_summary(turns(scripted)[-1].messages)
        assert (await root.usage()).requests == 4 + 1 + 1 + 1
        # A later run may again.
        await fill(root, 2)
        await root.set_compaction(keep_recent_tokens=0)
        assert (await (await root.submit("once more")).answer()).text == "ok"
        assert len(await compactions(root)) == 2


async def test_a_second_overflow_of_the_run_ends_it_h139_h141() -> None:
    def script(request):
        too_long = texts(request.messages)[-1] == "and now?"
        return fail("overflow", "too long for me") if too_long else say("ok", usage=UNTOLD)

    scripted = model(script)
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=0, background_tokens=0)) as harness:
        root = await harness.root()
        await fill(root, 3)
        for run in (1, 2):
            record = await (await root.submit("and now?")).wait()
            assert (record.reason, record.detail) == ("model_error", "overflow: too long for me")
            assert len(summaries(scripted)) == 1
            # The second run finds nothing that a summary could stand for, and asks once.
            assert len(turns(scripted)) == 3 + 1 + run
        assert len(await compactions(root)) == 1
        assert (await (await root.submit("something else")).answer()).text == "ok"


@pytest.mark.parametrize("why", ["disabled", "no cut"])
async def test_an_overflow_without_a_way_out_ends_the_run_h139(why: str) -> None:
    scripted = model(lambda request: fail("overflow", "too long for me"))
    async with opened(scripted, compaction=Compaction(enabled=why != "disabled")) as harness:
        root = await harness.root()
        if why == "disabled":
            await fill(root, 4)
            await root.set_compaction(enabled=False)
        record = await (await root.submit("and now?")).wait()
        assert (record.reason, record.detail) == ("model_error", "overflow: too long for me")
        assert summaries(scripted) == []


async def test_an_overflow_whose_compaction_fails_names_both_h139_h212() -> None:
    scripted = model(overflowing(4), summary=lambda request: fail("refused", "not that"), window=400_000)
    reports: Reports = []
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=0), reports=reports) as harness:
        root = await harness.root()
        await fill(root, 2)
        record = await (await root.submit("and now?")).wait()
        assert record.reason == "model_error"
        assert record.detail == "overflow: too long for me; the compaction for it ended refused: not that"
        assert await failure(root) == ("overflow", "refused")
        assert [report.type for report in reports] == ["compaction_failed"]


# --- what does not help, and what fails -------------------------------------------------------------------------


async def test_a_summary_that_frees_nothing_ends_the_run_once_h140() -> None:
    scripted = model(summary=lambda request: say("long " * 4_000, usage=UNTOLD))
    reports: Reports = []
    async with opened(scripted, compaction=BLOCKING, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 9)
        record = await (await root.submit("and now?")).wait()
        assert record.reason == "model_error"
        assert (record.detail or "").startswith("compaction_ineffective: ")
        assert len(summaries(scripted)) == 1
        assert await compactions(root) == []
        assert await failure(root) == ("threshold", "compaction_ineffective")
        assert [report.type for report in reports] == ["compaction_failed"]


async def test_after_a_failure_the_request_is_sent_and_the_next_run_tries_again_h141_h210_h212() -> None:
    broken = True
    scripted = model(summary=lambda request: fail("refused", "not now") if broken else say(SUMMARY, usage=UNTOLD))
    reports: Reports = []
    async with opened(scripted, compaction=BLOCKING, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 9)
        assert (await (await root.submit("one")).answer()).text == "ok"
        assert await failure(root) == ("threshold", "refused")
        assert not has_summary(turns(scripted)[-1].messages)
        broken = False
        assert (await (await root.submit("two")).answer()).text == "ok"
        assert has_summary(turns(scripted)[-1].messages)
        assert await failure(root) is None
        assert len(summaries(scripted)) == 2
        assert [report.type for report in reports] == ["compaction_failed"]


async def test_a_failure_is_not_repeated_in_its_run_h210() -> None:
    @tool(replay="safe")
    async def look() -> str:
        """Look."""
        return "a little"

    def script(request):
        results = sum(isinstance(message, ToolResultMessage) for message in request.messages)
        return say("done", usage=UNTOLD) if results == 4 else replace(calls(call("look")), usage=UNTOLD)

    scripted = model(script, summary=lambda request: fail("refused", "not now"))
    reports: Reports = []
    async with opened(scripted, tools=(look,), compaction=BLOCKING, reports=reports) as harness:
        root = await harness.root()
        await root.set_compaction(enabled=False)
        for _ in range(8):
            await root.write(Note(text=LONG))
        await root.set_compaction(enabled=None)
        assert (await (await root.submit("one")).answer()).text == "done"
        assert len(turns(scripted)) == 5
        assert len(summaries(scripted)) == 1


async def test_what_passes_is_retried_asleep_and_shown_h145_h206() -> None:
    clock = ManualClock()
    busy = fail("overloaded", "busy", times=2, then=say(SUMMARY, usage=UNTOLD), usage=Usage(input=5))
    scripted = model(summary=lambda request: busy)
    async with opened(scripted, compaction=BLOCKING, clock=clock, retry=RetryPolicy(jitter=0)) as harness:
        root = await harness.root()
        await fill(root, 9)
        submission = await root.submit("and now?")
        await settle()
        (shown,) = (await live(root)).compactions.values()
        assert (shown["attempt"], shown["code"], shown["message"]) == (2, "overloaded", "busy")
        assert shown["until"] == clock.wall() + 2_000
        assert (await root.usage()).models["test:scripted"]["input"] == 5
        await clock.advance(2)
        await clock.advance(4)
        await settle()
        assert (await submission.answer()).text == "ok"
        assert len(summaries(scripted)) == 3
        assert (await root.usage()).requests == 9 + 3 + 1


async def test_a_summary_that_never_comes_has_a_deadline_and_the_session_goes_on_h146() -> None:
    clock = ManualClock()
    never = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await never(request, event)

    scripted = model(pace=pace)
    reports: Reports = []
    policy = Compaction(background_tokens=0, deadline_ms=60_000)
    async with opened(scripted, compaction=policy, clock=clock, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 9)
        submission = await root.submit("and now?")
        await never.reached.wait()
        await clock.advance(59)
        assert (await live(root)).compactions
        await clock.advance(2)
        assert (await submission.answer()).text == "ok"
        assert await failure(root) == ("threshold", "deadline")
        assert scripted.closed == len(scripted.requests), "the stream was closed"
        assert (await root.usage()).requests == 11


async def test_a_summary_that_was_cut_off_is_none() -> None:
    scripted = model(summary=lambda request: say("half a summ", stop="length", usage=UNTOLD))
    reports: Reports = []
    async with opened(scripted, compaction=BLOCKING, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 9)
        assert (await (await root.submit("and now?")).answer()).text == "ok"
        assert await failure(root) == ("threshold", "summary_cut_off")
        assert await compactions(root) == []


async def test_a_compaction_can_be_aborted_alone_h146() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    scripted = model(pace=pace)
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 9)
        submission = await root.submit("and now?")
        await hold.reached.wait()
        (id,) = map(int, (await live(root)).compactions)
        await harness.abort_task(id, reason="no need")
        assert (await submission.answer()).text == "ok"
        assert isinstance(await harness.wait_task(id), Aborted)
        assert await failure(root) == ("threshold", "aborted")
        assert (await live(root)).compactions == {}
        assert (await root.usage()).requests == 11, "what was sent counts"


async def test_an_abort_of_the_run_takes_the_compaction_it_waits_for_and_no_background_one_h208() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    scripted = model(pace=pace)
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, 6)
        await (await root.submit("begin")).answer()
        await hold.reached.wait()
        await root.abort()
        assert len((await live(root)).compactions) == 1
        await root.abort(background=True)
        assert (await live(root)).compactions == {}
        await root.set_compaction(background_tokens=0)
        await fill(root, 3)
        submission = await root.submit("and now?")
        await rest()
        (shown,) = (await live(root)).compactions.values()
        assert shown["reason"] == "threshold"
        await root.abort()
        assert (await live(root)).compactions == {}
        assert (await submission.wait()).reason == "aborted"
        assert await compactions(root) == []


async def test_no_summary_is_asked_for_at_a_limit_h213() -> None:
    scripted = model()
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, 6)
        await root.set_limits(turns=6)
        outcome = await harness.wait_task(await root.compact())
        assert isinstance(outcome, Failed)
        assert outcome.error.code == "limit"
        assert summaries(scripted) == []


# --- hooks ------------------------------------------------------------------------------------------------------


async def test_a_hook_may_decline_h144() -> None:
    asked: list[HookCompaction] = []

    @before_compact
    async def never(compaction: HookCompaction) -> Decline:
        asked.append(compaction)
        return Decline("not while I look")

    scripted = model()
    async with opened(scripted, compaction=BLOCKING, extensions=[Extension("hooks", hooks=[never])]) as harness:
        root = await harness.root()
        await fill(root, 9)
        assert (await (await root.submit("and now?")).answer()).text == "ok"
        assert summaries(scripted) == []
        assert await failure(root) == ("threshold", "declined")
        (compaction,) = asked
        assert (compaction.reason, compaction.instructions) == ("threshold", None)
        assert compaction.tokens > 3_000
        assert LONG in [message.text for message in compaction.messages if isinstance(message, UserMessage)]


async def test_a_hook_may_give_the_summary_h144() -> None:
    @before_compact
    async def mine(compaction: HookCompaction) -> Summary:
        return Summary(f"{len(compaction.messages)} messages")

    scripted = model()
    async with opened(scripted, compaction=BLOCKING, extensions=[Extension("hooks", hooks=[mine])]) as harness:
        root = await harness.root()
        await fill(root, 9)
        await (await root.submit("and now?")).answer()
        assert summaries(scripted) == []
        (entry,) = await compactions(root)
        assert data_of(entry).model is None
        assert has_summary(turns(scripted)[-1].messages)


# --- by hand ----------------------------------------------------------------------------------------------------


async def test_compact_in_an_idle_conversation_h142_h214() -> None:
    scripted = model()
    async with opened(scripted, compaction=Compaction(enabled=False)) as harness:
        root = await harness.root()
        await fill(root, 6)
        await root.set_compaction(enabled=False)
        id = await root.compact("Mind the numbers.")
        outcome = await harness.wait_task(id)
        assert isinstance(outcome, Completed)
        (entry,) = await compactions(root)
        assert (data_of(entry).task, data_of(entry).reason) == (id, "manual")
        assert msgspec.json.decode(outcome.raw_result, type=CompactionResult).entry == entry.id
        (request,) = summaries(scripted)
        assert "Mind the numbers." in texts(request.messages)[-1]
        assert request.tools == ()
        assert not await root.busy()
        assert [message.text for message in await context(harness, root) if isinstance(message, UserMessage)][1:] == [
            LONG
        ] * 3


async def test_compact_in_a_busy_conversation_waits_for_the_boundary_h142_h143() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if texts(request.messages)[-1] == "hold":
            await hold(request, event)

    scripted = model(pace=pace)
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        submission = await root.submit("hold")
        await hold.reached.wait()
        outcome = await harness.wait_task(await root.compact())
        assert isinstance(outcome, Completed)
        result = msgspec.json.decode(outcome.raw_result, type=CompactionResult)
        assert result.entry is None
        assert await queue(root) == [result.submission]
        hold.release()
        await submission.answer()
        assert len(await compactions(root)) == 1
        assert await queue(root) == []


@pytest.mark.parametrize("times", [0, 1, 2])
async def test_compact_with_little_to_compact_fails_h203_h214(times: int) -> None:
    scripted = model()
    async with opened(scripted) as harness:
        root = await harness.root()
        await fill(root, times)
        outcome = await harness.wait_task(await root.compact())
        assert isinstance(outcome, Failed)
        assert outcome.error.code == "nothing_to_compact"
        assert await failure(root) is None
        assert (await live(root)).compactions == {}


async def test_without_a_model_it_fails_no_model() -> None:
    reports: Reports = []
    async with opened(None, reports=reports) as harness:
        outcome = await harness.wait_task(await (await harness.root()).compact())
        assert isinstance(outcome, Failed)
        assert outcome.error.code == "no_model"


async def test_a_summary_that_waits_is_made_stale_by_a_reset_h47_h143() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if texts(request.messages)[-1] == "hold":
            await hold(request, event)

    scripted = model(pace=pace)
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        submission = await root.submit("hold")
        await hold.reached.wait()
        reset = await root.reset("anew")
        outcome = await harness.wait_task(await root.compact())
        assert isinstance(outcome, Completed)
        (_, queued) = await queue(root)
        hold.release()
        await submission.answer()
        assert await reset.status() == "done"
        assert (await (await harness.submission(queued)).wait()).reason == "stale"
        assert await compactions(root) == []
        assert texts(await context(harness, root)) == ["anew"]


async def test_of_two_under_way_the_one_with_the_older_cut_is_stale_h143() -> None:
    holds = [Hold(), Hold()]

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await holds[len(summaries(scripted)) - 1 if event == 0 else 0](request, event)

    scripted = model(pace=pace)
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 5)
        older = await root.compact()
        await holds[0].reached.wait()
        await fill(root, 3)
        newer = await root.compact()
        await holds[1].reached.wait()
        holds[1].release()
        assert isinstance(await harness.wait_task(newer), Completed)
        before = await context(harness, root)
        holds[0].release()
        outcome = await harness.wait_task(older)
        assert isinstance(outcome, Failed)
        assert outcome.error.code == "stale"
        assert list(await context(harness, root)) == list(before)
        assert await failure(root) is None
        assert (await root.usage()).requests == 10, "it was paid for"


async def test_after_a_failed_run_it_places_the_waiting_writes_and_starts_no_input_h27_h52() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if texts(request.messages)[-1] == "fails":
            await hold(request, event)

    def script(request):
        return fail("refused", "no") if texts(request.messages)[-1] == "fails" else say("ok", usage=UNTOLD)

    scripted = model(script, pace=pace)
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 6)
        failing = await root.submit("fails")
        await hold.reached.wait()
        waiting = await root.submit("waits")
        hold.release()
        assert (await failing.wait()).reason == "model_error"
        assert isinstance(await harness.wait_task(await root.compact()), Completed)
        assert len(await compactions(root)) == 1
        assert await queue(root) == [waiting.id]
        assert not await root.busy()


# --- what stays, and what a summary is asked with ----------------------------------------------------------------


async def test_the_newest_tokens_stay_word_for_word_and_the_history_too_h133_h135() -> None:
    scripted = model()
    async with opened(scripted, compaction=Compaction(keep_recent_tokens=900, enabled=False)) as harness:
        root = await harness.root()
        for number in range(8):
            await (await root.submit(f"{number} {LONG}")).answer()
        before = await kinds(root)
        await harness.wait_task(await root.compact())
        assert await kinds(root) == [*before, COMPACTION]
        said = texts(await context(harness, root))
        # An input takes some 400 tokens: of the newest two and a part of the one before 900 are made.
        assert [text.split()[0] for text in said[1:]] == ["5", "ok", "6", "ok", "7", "ok"]


async def test_a_second_summary_is_given_the_first_one_h205() -> None:
    scripted = model(summary=lambda request: say(f"summary {len(summaries(scripted))}", usage=UNTOLD))
    async with opened(scripted, compaction=Compaction(enabled=False)) as harness:
        root = await harness.root()
        for _ in range(2):
            for number in range(6):
                await (await root.submit(f"{number} {LONG}")).answer()
            assert isinstance(await harness.wait_task(await root.compact()), Completed)
        first, second = summaries(scripted)
        assert "<before>" not in texts(first.messages)[-1]
        assert "summary 1" in texts(second.messages)[-1]
        assert texts(await context(harness, root))[0].endswith("summary 2")
        assert len([text for text in texts(await context(harness, root)) if "summary" in text]) == 1


async def test_a_request_for_a_summary_that_is_too_long_is_sent_again_with_less_h205() -> None:
    def summary(request):
        long = len(texts(request.messages)[-1]) > 4_000
        return fail("overflow", "too long") if long else say(SUMMARY, usage=UNTOLD)

    scripted = model(summary=summary)
    async with opened(scripted, compaction=Compaction(enabled=False, keep_recent_tokens=0)) as harness:
        root = await harness.root()
        await fill(root, 9)
        await root.set_compaction(enabled=False)
        assert isinstance(await harness.wait_task(await root.compact()), Completed)
        sizes = [len(texts(request.messages)[-1]) for request in summaries(scripted)]
        assert len(sizes) >= 2
        assert sizes == sorted(sizes, reverse=True)


async def test_another_model_may_write_the_summaries() -> None:
    class Two(ScriptedModel):
        def find(self, model):
            found = super().find("test:scripted")
            return found if model in ("test:scripted", "test:small") else None

    scripted = Two(lambda request: say(SUMMARY, usage=UNTOLD), context_window=4_000)
    policy = Compaction(model="test:small", background_tokens=0)
    async with opened(scripted, compaction_by_model={"test:scripted": policy}) as harness:
        root = await harness.root()
        await fill(root, 9)
        await (await root.submit("and now?")).answer()
        assert [request.model for request in summaries(scripted)] == ["test:small"]
        (entry,) = await compactions(root)
        assert data_of(entry).model == "test:small"
        assert (await root.usage()).models["test:small"]["requests"] == 1


# --- settings ---------------------------------------------------------------------------------------------------


async def test_a_conversation_has_settings_of_its_own_h134() -> None:
    async with opened(model()) as harness:
        root = await harness.root()
        await root.set_compaction(enabled=False, reserve_tokens=5)
        await root.set_compaction(keep_recent_tokens=7)
        assert (await root.agent()).compaction == {"enabled": False, "reserve_tokens": 5, "keep_recent_tokens": 7}
        await root.set_compaction(enabled=None, reserve_tokens=None)
        assert (await root.agent()).compaction == {"keep_recent_tokens": 7}
        with pytest.raises(ValueError, match="background_tokens is a number of tokens"):
            await root.set_compaction(background_tokens=-1)
        with pytest.raises(ValueError, match="enabled is True or False"):
            await root.set_compaction(enabled=wrong)
        fork = await root.fork((await _one_entry(root)).id)
        assert (await fork.agent()).compaction == {"keep_recent_tokens": 7}


async def _one_entry(root):
    await root.write(Note(text="x"))
    return (await root.entries())[-1]


wrong: Any = "yes"


@pytest.mark.parametrize(
    "options",
    [
        {"reserve_tokens": -1},
        {"keep_recent_tokens": 1.5},
        {"background_tokens": True},
        {"deadline_ms": 0},
        {"model": "gpt"},
        {"enabled": 1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_h134(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Compaction(**options)


def test_what_is_no_policy_is_refused_h134() -> None:
    with pytest.raises(TypeError, match="a Compaction is wanted"):
        Harness.open(MemoryStorage(), compaction=wrong)
    with pytest.raises(ValueError, match="provider:name"):
        Harness.open(MemoryStorage(), compaction_by_model={"gpt": Compaction()})


@given(
    st.integers(1, 2_000_000),
    st.none() | st.integers(0, 3_000_000),
    st.none() | st.integers(0, 3_000_000),
    st.none() | st.integers(0, 3_000_000),
)
def test_whatever_is_set_the_points_are_in_order_h201(
    window: int, reserve: int | None, keep: int | None, background: int | None
) -> None:
    policy = Compaction(reserve_tokens=reserve, keep_recent_tokens=keep, background_tokens=background)
    room = room_for(policy, {}, window)
    assert 0 <= room.keep <= room.begins_above <= room.waits_above <= window
    assert room.waits_above * 2 >= window
    assert room.least >= 1
    assert room_for(policy, {"enabled": False}, window).enabled is False


# --- forks and reopens ------------------------------------------------------------------------------------------


async def test_forks_before_and_after_a_compaction_h55_h133() -> None:
    scripted = model()
    async with opened(scripted, compaction=Compaction(enabled=False)) as harness:
        root = await harness.root()
        for number in range(7):
            await (await root.submit(f"{number} {LONG}")).answer()
        last = (await root.entries(order="descending", limit=1))[0].id
        whole = texts(await context(harness, root))
        await harness.wait_task(await root.compact())
        (entry,) = await compactions(root)
        before, after = await root.fork(last), await root.fork(entry.id)
        assert texts(await context(harness, before)) == whole
        assert list(await context(harness, after)) == list(await context(harness, root))
        assert (await live(after)).compactions == {}
        for fork in (before, after):
            assert isinstance(await harness.wait_task(await fork.compact()), (Completed, Failed))
            assert (await (await fork.submit("and now?")).answer()).text == "ok"


async def test_a_reopen_after_a_compaction_gives_the_same_context_h55() -> None:
    storage = MemoryStorage()
    scripted = model()
    async with opened(scripted, storage=storage, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 9)
        await (await root.submit("and now?")).answer()
        assert await compactions(root)
        seen = list(await context(harness, root))
        counted = harness._host.contexts.settled(root.id)
        assert counted is not None
        tokens = counted.count.tokens
    async with opened(model(), storage=storage) as harness:
        root = await harness.root()
        assert list(await context(harness, root)) == seen
        again = harness._host.contexts.settled(root.id)
        assert again is not None
        assert again.count.tokens == tokens


async def test_a_turn_takes_no_further_commit_and_near_the_point_one_h186() -> None:
    scripted = model()
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await (await root.submit("hi")).answer()
        commits = Commits(harness)
        await (await root.submit("hi")).answer()
        assert len(commits.durable) == 2
        await fill(root, 9)
        commits.clear()
        await (await root.submit("hi")).answer()
        # Admission; the wait; the pinned summary request; its outcome; the request; the answer.
        assert len(commits.durable) == 6
