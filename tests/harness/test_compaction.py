"""Compaction: when a run waits for one, when one runs beside it, and what becomes of it (rules H133 to H146, H200 to
H214)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compaction_kit import (
    BLOCKING,
    LONG,
    SUMMARY,
    UNTOLD,
    asks_for_summary,
    compactions,
    data_of,
    failure,
    fill,
    has_summary,
    held,
    model,
    summaries,
    summary_held,
    texts,
    turns,
)
from doubles import ManualClock, settle
from kit import Hold, Note, Reports, live, opened, queue, rest

from perdure.harness.compaction_policy import Compaction
from perdure.harness.hooks import Decline, HookCompaction, Summary, before_compact
from perdure.harness.messages import AssistantMessage, ToolResultMessage, Usage, UserMessage
from perdure.harness.registry import Extension
from perdure.harness.settings import RetryPolicy
from perdure.harness.tool import tool
from perdure.kernel.records import Aborted, Failed
from perdure.testing.model import call, calls, fail, say

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

    scripted = model(pace=held(hold))
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

    scripted = model(pace=summary_held(hold))
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


async def test_one_that_ends_while_a_run_sleeps_before_a_retry_is_placed_at_once_h207() -> None:
    clock = ManualClock()
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    def script(request):
        if texts(request.messages)[-1] == "go":
            return fail("overloaded", "busy", times=1, then=say("ok", usage=UNTOLD))
        return say("ok", usage=UNTOLD)

    scripted = model(script, pace=pace)
    async with opened(scripted, clock=clock) as harness:
        root = await harness.root()
        await fill(root, 6)
        submission = await root.submit("go")
        await hold.reached.wait()
        await settle()
        assert (await live(root)).retry is not None
        hold.release()
        await settle()
        assert len(await compactions(root)) == 1
        assert await queue(root) == []
        await clock.advance(10)
        assert (await submission.answer()).text == "ok"
        first, second = turns(scripted)[-2:]
        assert [has_summary(first.messages), has_summary(second.messages)] == [False, True]


async def test_only_one_is_begun_however_long_it_takes_h137_h209() -> None:
    hold = Hold()

    scripted = model(pace=summary_held(hold))
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
            assert len(summaries(scripted)) == run, "each run may once"
            assert len(turns(scripted)) == 3 + 2 * run
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


async def test_an_input_alone_is_no_history_also_before_the_prompt_h139_h202() -> None:
    """The prompt is told behind the first input: what it says is not what stays."""
    scripted = model(lambda request: fail("overflow", "too long for me"), window=4_000_000)
    async with opened(scripted, instructions="Be kind.") as harness:
        root = await harness.root()
        record = await (await root.submit("hi")).wait()
        assert (record.reason, record.detail) == ("model_error", "overflow: too long for me")
        assert len(scripted.requests) == 1


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


async def test_one_by_hand_that_fails_keeps_no_run_from_its_own_h210() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if texts(request.messages)[-1] == "hold":
            await hold(request, event)

    def summary(request):
        by_hand = "by hand" in texts(request.messages)[-1]
        return fail("refused", "not so") if by_hand else say(SUMMARY, usage=UNTOLD)

    @tool(replay="safe")
    async def look() -> str:
        """Look."""
        return LONG * 3

    def script(request):
        asked = texts(request.messages)[-1] == "hold"
        return calls(call("look"), usage=UNTOLD) if asked else say("ok", usage=UNTOLD)

    scripted = model(script, summary=summary, pace=pace)
    reports: Reports = []
    async with opened(scripted, tools=(look,), compaction=BLOCKING, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 6)
        submission = await root.submit("hold")
        await hold.reached.wait()
        assert isinstance(await harness.wait_task(await root.compact("by hand")), Failed)
        hold.release()
        assert (await submission.answer()).text == "ok"
        assert [data_of(entry).reason for entry in await compactions(root)] == ["threshold"]


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

    scripted = model(pace=summary_held(never))
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

    scripted = model(pace=summary_held(hold))
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

    scripted = model(pace=summary_held(hold))
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
