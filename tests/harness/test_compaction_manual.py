"""Compaction by hand, what stays, what a summary is asked with, settings, forks (rules H133 to H146, H200 to H214)."""

from __future__ import annotations

from typing import Any

import msgspec
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
    held,
    model,
    summaries,
    summary_held,
    texts,
    turns,
)
from hypothesis import given
from hypothesis import strategies as st
from kit import Commits, Hold, Note, Reports, kinds, live, opened, queue, rest

from perdure.cli.entries import entry_lines
from perdure.harness.compaction import CompactionResult
from perdure.harness.compaction_policy import Compaction, room_for
from perdure.harness.documents import COMPACTION
from perdure.harness.harness import Harness
from perdure.kernel.errors import ConversationOpen
from perdure.kernel.records import Completed, Failed
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, fail, say

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
        assert texts(await context(harness, root))[1:] == [LONG, "ok"] * 3


async def test_compact_in_a_busy_conversation_waits_for_the_boundary_h142_h143() -> None:
    hold = Hold()

    scripted = model(pace=held(hold))
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

    scripted = model(pace=held(hold))
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


def test_sizes_that_nobody_set_are_16384_20000_and_32768_tokens_or_a_quarter_of_the_window_h201() -> None:
    wide = room_for(Compaction(), {}, 1_000_000)
    assert (wide.enabled, wide.reserve, wide.keep, wide.background) == (True, 16_384, 20_000, 32_768)
    narrow = room_for(Compaction(), {}, 40_000)
    assert (narrow.enabled, narrow.reserve, narrow.keep, narrow.background) == (True, 10_000, 10_000, 10_000)


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


# --- others that go on meanwhile ----------------------------------------------------------------------------------


async def test_one_that_cannot_go_on_is_not_waited_for_h209() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    storage = MemoryStorage()
    async with opened(model(pace=pace), storage=storage) as harness:
        root = await harness.root()
        await fill(root, 6)
        await (await root.submit("short")).answer()
        await hold.reached.wait()
        await rest()
        crash = storage.snapshot()
    scripted = model()
    reports: Reports = []
    async with opened(scripted, storage=crash, restart_limit=1, reports=reports) as harness:
        root = await harness.root()
        (parked,) = map(int, (await live(root)).compactions)
        assert (await (await root.submit(LONG * 4)).answer()).text == "ok"
        assert harness.tasks.blocked(parked) == "parked"
        assert [data_of(entry).reason for entry in await compactions(root)] == ["threshold"]
        await harness.retry_task(parked)
        outcome = await harness.wait_task(parked)
        assert isinstance(outcome, Failed)
        assert outcome.error.code == "stale"
        assert (await live(root)).compactions == {}


async def test_a_conversation_is_deleted_with_the_compaction_under_way_in_it_h181() -> None:
    hold = Hold()

    async def pace(request, event) -> None:
        if asks_for_summary(request):
            await hold(request, event)

    async with opened(model(pace=pace)) as harness:
        await harness.root()
        other = await harness.create_conversation()
        await fill(other, 6)
        await (await other.submit("short")).answer()
        await hold.reached.wait()
        with pytest.raises(ConversationOpen):
            await other.delete()
        await other.delete(abort=True)
        assert [info.id for info in await harness.conversations()] == [1]


async def test_steers_and_resets_that_come_while_a_run_waits_keep_their_places_h45_h46() -> None:
    hold = Hold()

    scripted = model(pace=summary_held(hold))
    async with opened(scripted, compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 9)
        submission = await root.submit("first")
        await hold.reached.wait()
        steer = await root.submit("second", mode="steer")
        reset = await root.reset("anew")
        hold.release()
        assert (await submission.answer()).text == "ok"
        assert await reset.status() == "done"
        assert (await steer.answer()).text == "ok"
        assert len(await compactions(root)) == 1
        assert texts(turns(scripted)[-1].messages) == ["anew", "second"]


async def test_a_report_of_a_failure_has_no_word_of_the_provider_h211() -> None:
    scripted = model(summary=lambda request: fail("refused", "you said: SECRET"))
    reports: Reports = []
    async with opened(scripted, compaction=BLOCKING, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 9)
        await (await root.submit("and now?")).answer()
        (report,) = reports
        assert "SECRET" not in f"{report.message} {report.error}"
        shown = (await live(root)).compaction_failure
        assert shown is not None
        assert "SECRET" in shown["message"]


async def test_people_are_shown_a_compaction_as_a_line_and_the_summary_in_an_export_h155() -> None:
    async with opened(model(), compaction=BLOCKING) as harness:
        root = await harness.root()
        await fill(root, 9)
        await (await root.submit("and now?")).answer()
        (entry,) = await compactions(root)
        _, shown = entry_lines(entry, {})
        assert "was compacted by test:scripted (threshold)" in "".join(text for _, text in shown)
        exported = "".join([text async for text in root.export("markdown")])
        assert SUMMARY in exported[exported.index("## The context was compacted") :]
