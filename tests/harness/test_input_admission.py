"""Submitting, by the table of rules H24 to H29: idle, busy, and idle with a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from kit import Audit, Commits, Hold, Note, live, opened, queue, rest, transcript

from perdure.harness import inbox
from perdure.harness.documents import Live
from perdure.harness.inbox import ConversationBusy, InboxFull
from perdure.harness.submission import Unanswered
from perdure.harness.tool import tool
from perdure.kernel.errors import NotFound, NotJson
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Edit
from perdure.testing.model import ScriptedModel, call, fail, say


@tool(replay="safe")
async def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


def talk(**more) -> ScriptedModel:
    """Answers what was said last; ``tools`` makes it look once before."""
    return ScriptedModel(
        {
            "tools": [call("look", at="here"), say("done looking")],
            "hi": say("hello"),
            "more": say("more it is"),
            "steer": say("steered"),
            "note": say("noted"),
            "bad": fail("malformed"),
            "handoff": say("handed off"),
        },
        **more,
    )


# --- idle, nothing queued -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["follow_up", "steer", "reject"])
async def test_an_input_to_an_idle_conversation_is_one_commit_h24_h25_h26(mode) -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        submission = await root.submit("hi", mode=mode)
        (admission,) = commits.all
        batch = admission.batch
        assert [entry.kind for entry in batch.entries] == ["pi.user"]
        assert [(s.id, s.status, s.entry) for s in batch.submissions] == [
            (submission.id, "placed", batch.entries[0].id)
        ]
        assert [task.kind for task in batch.tasks] == ["pi.generation"]
        (change,) = [c for c in admission.documents if c.record.kind == "pi.live"]
        run = Live.from_json(change.after).run
        assert run is not None
        assert (run["task"], run["inputs"]) == (batch.tasks[0].id, [submission.id])
        hold.release()
        assert (await submission.answer()).text == "hello"


async def test_a_conversation_is_busy_from_admission_to_its_answer_h15_h16() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        assert not await root.busy()
        submission = await root.submit("hi")
        assert await root.busy()
        hold.release()
        await submission.wait()
        assert not await root.busy()


async def test_a_write_to_an_idle_conversation_is_appended_and_done_h27() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        submission = await root.write(Note(text="by the way"))
        record = await submission.record()
        assert record.status == "done"
        assert [entry.id for entry in await submission.run()] == [record.entry]
        assert not await root.busy()
        assert await transcript(root) == ["app.note by the way"]
        with pytest.raises(ValueError, match="is a write"):
            await submission.answer()


async def test_a_display_only_write_to_an_idle_conversation_is_appended_h28() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        assert await (await root.write(Audit(n=1))).status() == "done"
        assert await transcript(root) == ["app.audit"]


async def test_a_reset_begins_the_context_with_its_handoff_and_keeps_the_rest_h29_h30() -> None:
    model = talk()
    async with opened(model) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        submission = await root.reset("go on from here")
        record = await submission.record()
        assert (record.type, record.status) == ("write", "done")
        entry = await harness.session.entry(record.entry or 0)
        assert entry is not None
        assert (entry.kind, entry.head) == ("pi.reset", entry.id)
        await (await root.submit("more")).wait()
        assert [m.text for m in model.requests[-1].messages] == ["go on from here", "more"]
        assert await transcript(root) == [
            "user hi",
            "assistant hello",
            "reset go on from here",
            "user more",
            "assistant more it is",
        ]


async def test_a_reset_without_a_handoff_leaves_nothing_before_it_h29() -> None:
    model = talk()
    async with opened(model) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        await root.reset()
        await (await root.submit("more")).wait()
        assert [m.text for m in model.requests[-1].messages] == ["more"]


# --- busy ---------------------------------------------------------------------------------------------------------


async def test_a_follow_up_starts_the_next_run_after_the_final_answer_h24() -> None:
    hold = Hold()
    model = talk(pace=hold)
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        first = await root.submit("tools")
        second = await root.submit("more")
        assert await second.status() == "queued"
        assert await queue(root) == [second.id]
        hold.release()
        assert (await first.answer()).text == "done looking"
        assert (await second.answer()).text == "more it is"
        assert await queue(root) == []
        assert await transcript(root) == [
            "user tools",
            "assistant",
            "tool-result seen here",
            "assistant done looking",
            "user more",
            "assistant more it is",
        ]


async def test_a_steer_joins_the_run_after_the_round_of_tools_h25() -> None:
    hold = Hold()
    model = talk(pace=hold)
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        first = await root.submit("tools")
        second = await root.submit("steer", mode="steer")
        assert await second.status() == "queued"
        hold.release()
        assert (await first.answer()).text == "steered"
        assert (await second.answer()).entry == (await first.answer()).entry
        assert await transcript(root) == [
            "user tools",
            "assistant",
            "tool-result seen here",
            "user steer",
            "assistant steered",
        ]
        # It led to its own entry and the answer, not to what was before it.
        assert len(await second.run()) == 2


async def test_a_steer_that_meets_no_tools_opens_a_run_of_its_own_and_is_answered_h40() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        second = await root.submit("steer", mode="steer")
        hold.release()
        assert (await first.answer()).text == "hello"
        assert (await second.answer()).text == "steered"
        assert [entry.kind for entry in await second.run()] == ["pi.user", "pi.assistant"]


async def test_reject_raises_and_writes_nothing_in_a_busy_conversation_h26() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        commits = Commits(harness)
        with pytest.raises(ConversationBusy, match="busy with a run"):
            await root.submit("more", mode="reject")
        assert not commits.durable
        assert await queue(root) == []
        hold.release()
        await first.wait()


async def test_a_write_in_a_busy_conversation_waits_for_the_boundary_after_tools_h27() -> None:
    hold = Hold()
    model = talk(pace=hold)
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        first = await root.submit("tools")
        write = await root.write(Note(text="note"))
        assert await write.status() == "queued"
        hold.release()
        assert (await first.answer()).text == "noted"
        assert (await write.record()).status == "done"
        assert (await transcript(root))[2:4] == ["tool-result seen here", "app.note note"]


async def test_a_write_waits_for_the_final_boundary_where_no_tools_run_h27() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        write = await root.write(Note(text="note"))
        hold.release()
        await first.wait()
        assert (await write.record()).status == "done"
        assert await transcript(root) == ["user hi", "assistant hello", "app.note note"]
        assert not await root.busy()


async def test_a_display_only_write_is_appended_at_once_in_a_busy_conversation_h28() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        assert await (await root.write(Audit(n=1))).status() == "done"
        assert await transcript(root) == ["user hi", "app.audit"]
        hold.release()
        assert (await first.answer()).text == "hello"


async def test_a_display_only_write_goes_behind_a_queued_reset_h28() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        reset = await root.reset("handoff")
        audit = await root.write(Audit(n=1))
        assert await audit.status() == "queued"
        hold.release()
        await first.wait()
        assert (await reset.record()).status == (await audit.record()).status == "done"
        assert await transcript(root) == ["user hi", "assistant hello", "reset handoff", "app.audit"]


async def test_a_reset_after_tools_ends_the_run_and_its_inputs_h29() -> None:
    hold = Hold()
    model = talk(pace=hold)
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        first = await root.submit("tools")
        reset = await root.reset("handoff")
        hold.release()
        with pytest.raises(Unanswered) as ended:
            await first.answer()
        assert ended.value.reason == "reset"
        assert (await reset.record()).status == "done"
        assert not await root.busy()
        assert len(model.requests) == 1
        assert (await transcript(root))[-1] == "reset handoff"


async def test_the_boundary_a_reset_makes_final_places_follow_ups_too_h29_h46() -> None:
    hold = Hold()
    model = talk(pace=hold)
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        first = await root.submit("tools")
        second = await root.submit("more")
        await root.reset("handoff")
        hold.release()
        assert (await second.answer()).text == "more it is"
        assert (await first.record()).reason == "reset"
        assert [m.text for m in model.requests[-1].messages] == ["handoff", "more"]


async def test_a_reset_at_the_final_boundary_leaves_the_answer_h29() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        reset = await root.reset("handoff")
        hold.release()
        assert (await first.answer()).text == "hello"
        assert (await reset.record()).status == "done"


# --- idle with a queue, after a failed run --------------------------------------------------------------------------


async def failed_with_queue(harness, hold):
    """A conversation that is idle with one follow-up waiting: the run before it failed, and the host keeps."""
    root = await harness.root()
    failing = await root.submit("bad")
    waiting = await root.submit("more")
    hold.release()
    assert (await failing.wait()).reason == "model_error"
    assert not await root.busy()
    assert await queue(root) == [waiting.id]
    return root, waiting


@pytest.mark.parametrize("mode", ["follow_up", "steer"])
async def test_the_next_input_places_the_waiting_ones_first_h24_h25_h51(mode) -> None:
    hold = Hold()
    async with opened(talk(pace=hold), follow_up="all") as harness:
        root, waiting = await failed_with_queue(harness, hold)
        commits = Commits(harness)
        second = await root.submit("hi", mode=mode)
        assert len(commits.all[0].batch.submissions) == 2, "the boundary is in the commit of the admission"
        assert (await waiting.answer()).entry == (await second.answer()).entry
        assert (await transcript(root))[-3:] == ["user more", "user hi", "assistant hello"]


async def test_one_follow_up_a_run_leaves_the_new_one_queued_behind_h44_h51() -> None:
    hold = Hold()
    async with opened(talk(pace=hold), follow_up="first") as harness:
        root, waiting = await failed_with_queue(harness, hold)
        second = await root.submit("hi")
        assert (await waiting.answer()).text == "more it is"
        assert (await second.answer()).text == "hello"
        assert (await transcript(root))[-4:] == [
            "user more",
            "assistant more it is",
            "user hi",
            "assistant hello",
        ]


async def test_reject_is_busy_while_a_queue_waits_h26() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root, waiting = await failed_with_queue(harness, hold)
        with pytest.raises(ConversationBusy, match="inputs waiting"):
            await root.submit("hi", mode="reject")
        assert await queue(root) == [waiting.id]


async def test_a_write_places_writes_only_and_starts_no_waiting_input_h27() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root, waiting = await failed_with_queue(harness, hold)
        write = await root.write(Note(text="note"))
        assert (await write.record()).status == "done"
        assert await queue(root) == [waiting.id]
        assert not await root.busy()
        assert (await transcript(root))[-1] == "app.note note"


async def test_a_display_only_write_is_appended_beside_a_queue_h28() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root, waiting = await failed_with_queue(harness, hold)
        assert await (await root.write(Audit(n=1))).status() == "done"
        assert await queue(root) == [waiting.id]


async def test_a_reset_beside_a_queue_is_placed_and_starts_nothing_h29() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root, waiting = await failed_with_queue(harness, hold)
        assert await (await root.reset("handoff")).status() == "done"
        assert await queue(root) == [waiting.id]
        assert not await root.busy()


# --- heads and edits ------------------------------------------------------------------------------------------------


async def test_a_head_before_the_active_range_settles_stale_h47() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        note = (await (await root.write(Note(text="old"))).record()).entry
        first = await root.submit("hi")
        reset = await root.reset("handoff")
        late = await root.write(Note(text="summary"), head=note)
        hold.release()
        await first.wait()
        assert (await reset.record()).status == "done"
        record = await late.record()
        assert (record.status, record.reason) == ("unanswered", "stale")
        with pytest.raises(Unanswered, match="stale"):
            await late.run()
        # The same in an idle conversation.
        record = await (await root.write(Note(text="summary"), head=note)).record()
        assert (record.status, record.reason) == ("unanswered", "stale")


async def test_a_head_within_the_active_range_is_placed_h27() -> None:
    model = talk()
    async with opened(model) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        kept = (await (await root.write(Note(text="kept"))).record()).entry
        await root.write(Note(text="summary"), head=kept)
        await (await root.submit("more")).wait()
        assert [m.text for m in model.requests[-1].messages] == ["summary", "kept", "more"]


async def test_heads_and_edits_name_entries_of_the_conversation() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        other = await harness.create_conversation()
        foreign = (await (await other.write(Note(text="x"))).record()).entry or 0
        with pytest.raises(NotFound, match="shows no entry"):
            await root.write(Note(text="y"), head=foreign)
        with pytest.raises(NotFound, match="shows no entry"):
            await root.write(Note(text="y"), edits=[Edit(entry=foreign)])
        assert await transcript(root) == []


async def test_a_queued_edit_arrives_as_it_was_written_h57() -> None:
    hold = Hold()
    model = talk(pace=hold)
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        old = (await (await root.write(Note(text="wrong"))).record()).entry or 0
        first = await root.submit("tools")
        await root.write(Audit(n=2), edits=[Edit(entry=old)])
        hold.release()
        await first.wait()
        assert model.requests[-1].messages[0].text == "tools"


# --- what is refused ------------------------------------------------------------------------------------------------


async def test_messages_no_model_reads_are_refused_at_the_write() -> None:
    class Broken(Note, kind="app.broken"):
        def messages(self) -> Sequence[JsonValue]:
            return [{"role": "wizard"}]

    async with opened(talk()) as harness:
        root = await harness.root()
        with pytest.raises(ValueError, match="not what a model reads"):
            await root.write(Broken(text="x"))
        with pytest.raises(ValueError, match="needs content"):
            await root.submit([])
        with pytest.raises(ValueError, match="needs content"):
            await root.submit("")
        with pytest.raises(NotJson):
            await root.submit("lone \ud800")
        with pytest.raises(ValueError, match="mode is"):
            await root.submit("hi", mode="later")  # pyright: ignore
        with pytest.raises(NotFound):
            await harness.handle(999).submit("hi")
        assert await transcript(root) == []


async def test_a_queue_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(inbox, "MOST_QUEUED", 3)
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("hi")
        for _ in range(3):
            await root.write(Note(text="x"))
        with pytest.raises(InboxFull):
            await root.submit("more")
        hold.release()
        await first.wait()
        await rest()
        assert await queue(root) == []


async def test_concurrent_inputs_are_all_answered_in_order_h36() -> None:
    model = talk()
    async with opened(model) as harness:
        root = await harness.root()
        several = await asyncio.gather(*(root.submit("hi") for _ in range(5)))
        answers = [await submission.answer() for submission in several]
        assert len({answer.entry.id for answer in answers}) == 5
        assert (await live(root)).run is None
