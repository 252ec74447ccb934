"""What becomes of what is submitted: request ids, the boundaries at which queued input lands, forks.

Rules H24 to H36 (admission), H43 to H50 (boundaries), H53, K115 to K120 (forks).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from acceptance_kit import STORE, Audit, Hold, Job, Note, opened, records, run, transcript

from perdure import (
    Agent,
    Conversation,
    ConversationBusy,
    ModelRequest,
    NotFound,
    RequestConflict,
    Submission,
    Unanswered,
    UserMessage,
    tool,
)
from perdure.harness.messages import AssistantMessage, ToolResultMessage
from perdure.testing.model import Reply, ScriptedModel, call, fail, say


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


def script(request: ModelRequest) -> Reply:
    """Tells what it was told since its last answer. It works first if it is told to go, and fails if told to."""
    told: list[str] = []
    worked = False
    for message in request.messages:
        if isinstance(message, AssistantMessage) and not message.tool_calls:
            told, worked = [], False
        elif isinstance(message, UserMessage):
            told.append(message.text)
        elif isinstance(message, ToolResultMessage):
            worked = True
    if "go" in told and not worked:
        return call("work")
    if told[-1] == "fail":
        return fail("refused", "it will not")
    return say("to " + "+".join(told))


class Gate:
    """A tool that stands still until it is let through."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

        @tool(name="work")
        async def work() -> str:
            """Work."""
            self.reached.set()
            await self.open.wait()
            return "done"

        self.tool = work


async def answers(*submissions: Submission) -> list[str]:
    return [(await submission.answer()).text for submission in submissions]


async def why(submission: Submission) -> str | None:
    with pytest.raises(Unanswered) as raised:
        await submission.answer()
    return raised.value.reason


# --- request ids -----------------------------------------------------------------------------------------------


async def test_one_request_id_is_one_submission_whatever_became_of_it(store: Path) -> None:
    """H31, H34: while it is placed, queued, withdrawn, answered, and after each reopen."""
    hold = Hold()
    async with opened(store, ScriptedModel(script, pace=hold)) as harness:
        root = await harness.root()
        placed = await root.submit("a", request_id="a")
        queued = await root.submit("b", request_id="b")
        withdrawn = await root.submit("c", request_id="c")
        written = await root.write(Note(text="d"), request_id="d")
        reset = await root.reset("e", request_id="e")
        await withdrawn.abort()

        async def again(root: Conversation) -> list[Submission]:
            return [
                await root.submit("a", request_id="a"),
                await root.submit("b", request_id="b", mode="steer"),
                await root.submit("c", request_id="c", mode="reject"),
                await root.write(Note(text="d"), request_id="d"),
                await root.reset("e", request_id="e"),
            ]

        assert await again(root) == [placed, queued, withdrawn, written, reset]
        hold.release()
        assert await answers(placed, queued) == ["to a", "to e+b"]
        assert await again(root) == [placed, queued, withdrawn, written, reset]
        ids = [s.id for s in (placed, queued, withdrawn, written, reset)]
    for _ in range(2):
        async with opened(store, ScriptedModel(script)) as harness:
            found = await again(await harness.root())
            assert [submission.id for submission in found] == ids
            assert await answers(found[0], found[1]) == ["to a", "to e+b"]
            assert await why(found[2]) == "aborted"
            await harness.idle()
    assert [record["id"] for record in records(store, "submissions")] == ids


async def test_a_request_id_with_other_content_is_a_conflict(tmp_path: Path, store: Path) -> None:
    """H32, H33: other words, another kind of submission, another head; also in another process. Nothing is written."""
    async with opened(store, ScriptedModel(script)) as harness:
        root = await harness.root()
        submission = await root.submit("a", request_id="r")
        await submission.answer()
        written = await root.write(Note(text="w"), request_id="w")
        before = harness.session.seq
        with pytest.raises(RequestConflict) as raised:
            await root.submit("b", request_id="r")
        assert (raised.value.request_id, raised.value.submission) == ("r", submission.id)
        with pytest.raises(RequestConflict):
            await root.write(Note(text="a"), request_id="r")
        with pytest.raises(RequestConflict):
            await root.reset("a", request_id="r")
        with pytest.raises(RequestConflict):
            await root.write(Note(text="w"), head="self", request_id="w")
        assert (await root.write(Note(text="w"), request_id="w")) == written
        assert harness.session.seq == before
    assert (await run("agent", tmp_path, text="hi", request_id="r"))["refused"] == "RequestConflict"
    assert len(records(store, "submissions")) == 2


async def test_one_request_id_is_one_submission_when_many_ask_at_once(store: Path) -> None:
    """H34: of many, one is admitted, the model is asked once, and everybody has the one answer."""
    model = ScriptedModel(script)
    async with opened(store, model) as harness:
        root = await harness.root()
        found = await asyncio.gather(*(root.submit("a", request_id="r") for _ in range(40)))
        assert len(set(found)) == 1
        assert set(await answers(*found)) == {"to a"}
        others = await asyncio.gather(
            *(root.submit(text, request_id="s") for text in ("x", "y") * 10), return_exceptions=True
        )
        won = {s for s in others if isinstance(s, Submission)}
        assert len(won) == 1
        assert [type(s) for s in others] == [Submission, RequestConflict] * 10
        await harness.idle()
        assert len(model.requests) == 2
    assert len(records(store, "submissions")) == 2


async def test_a_request_id_belongs_to_its_conversation_and_no_fork_inherits_it(store: Path) -> None:
    """H31, H35."""
    async with opened(store, ScriptedModel(script)) as harness:
        root, other = await harness.root(), await harness.create_conversation()
        first = await root.submit("a", request_id="r")
        answer = await first.answer()
        assert (await other.submit("b", request_id="r")) != first
        fork = await root.fork(answer.entry.id)
        again = await fork.submit("c", request_id="r")
        assert again != first
        assert (await again.answer()).text == "to c"
        assert await harness.session.request(fork.id, "r") == await again.record()
        await harness.idle()


# --- what is queued lands at its boundary ------------------------------------------------------------------------


async def test_what_was_queued_during_a_tool_lands_after_the_round_or_the_answer(store: Path) -> None:
    """H24 to H28, H43, H44: writes first, then steers, each by id, after the tools; follow-ups after the answer."""
    gate = Gate()
    async with opened(store, ScriptedModel(script), tools=(gate.tool,)) as harness:
        root = await harness.root()
        go = await root.submit("go")
        await gate.reached.wait()
        f1 = await root.submit("f1")
        s1 = await root.submit("s1", mode="steer")
        w1 = await root.write(Note(text="w1"))
        s2 = await root.submit("s2", mode="steer")
        w2 = await root.write(Note(text="w2"))
        f2 = await root.submit("f2", mode="follow_up")
        shown = await root.write(Audit(n=1))
        with pytest.raises(ConversationBusy):
            await root.submit("no", mode="reject")
        assert [await s.status() for s in (go, f1, s1, w1, s2, w2, f2, shown)] == ["placed", *["queued"] * 6, "done"]
        assert await transcript(root) == ["user go", "assistant <tool_call>", "app.audit"]
        gate.open.set()
        assert await answers(go, s1, s2, f1, f2) == ["to go+w1+w2+s1+s2"] * 3 + ["to f1", "to f2"]
        assert await transcript(root) == [
            "user go",
            "assistant <tool_call>",
            "app.audit",
            "tool-result done",
            "app.note w1",
            "app.note w2",
            "user s1",
            "user s2",
            "assistant to go+w1+w2+s1+s2",
            "user f1",
            "assistant to f1",
            "user f2",
            "assistant to f2",
        ]
        assert {await w.status() for w in (w1, w2)} == {"done"}
        assert [e.kind for e in await go.run()] == [e.kind for e in (await root.entries())[:9]]
        assert len(records(store, "submissions")) == 8, "nothing was written of the refused one"


async def test_the_host_says_how_many_a_boundary_takes(store: Path) -> None:
    """H44: one steer a boundary, all follow-ups at once."""
    gate = Gate()
    model = ScriptedModel(script)
    async with opened(store, model, tools=(gate.tool,), steer="first", follow_up="all") as harness:
        root = await harness.root()
        go = await root.submit("go")
        await gate.reached.wait()
        f1 = await root.submit("f1")
        s1 = await root.submit("s1", mode="steer")
        s2 = await root.submit("s2", mode="steer")
        f2 = await root.submit("f2")
        gate.open.set()
        assert await answers(go, s1, f1, s2, f2) == ["to go+s1"] * 2 + ["to f1+s2+f2"] * 3
        assert (await transcript(root))[3:] == [
            "user s1",
            "assistant to go+s1",
            "user f1",
            "user s2",
            "user f2",
            "assistant to f1+s2+f2",
        ]


async def test_what_was_queued_during_an_answer_lands_after_it(store: Path) -> None:
    """H43: writes, then steers and follow-ups by id; a steer that came too late for its run opens the next one."""
    hold = Hold()
    async with opened(store, ScriptedModel(script, pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("first")
        await hold.reached.wait()
        f1 = await root.submit("f1")
        s1 = await root.submit("s1", mode="steer")
        await root.write(Note(text="w1"))
        f2 = await root.submit("f2")
        hold.release()
        assert await answers(first, f1, s1, f2) == ["to first", "to w1+f1+s1", "to w1+f1+s1", "to f2"]
        assert await transcript(root) == [
            "user first",
            "assistant to first",
            "app.note w1",
            "user f1",
            "user s1",
            "assistant to w1+f1+s1",
            "user f2",
            "assistant to f2",
        ]


async def test_a_reset_queued_during_a_tool_ends_the_run_there(store: Path) -> None:
    """H28, H29, H43: the boundary acts as final; what is for people waits behind the reset; a run begins anew."""
    gate, model = Gate(), ScriptedModel(script)
    async with opened(store, model, tools=(gate.tool,)) as harness:
        root = await harness.root()
        go = await root.submit("go")
        await gate.reached.wait()
        f1 = await root.submit("f1")
        reset = await root.reset("a handoff")
        w1 = await root.write(Note(text="w1"))
        shown = await root.write(Audit(n=1))
        s1 = await root.submit("s1", mode="steer")
        assert [await s.status() for s in (f1, reset, w1, shown, s1)] == ["queued"] * 5
        gate.open.set()
        assert await why(go) == "reset"
        assert await answers(f1, s1) == ["to a handoff+w1+f1+s1"] * 2
        assert await transcript(root) == [
            "user go",
            "assistant <tool_call>",
            "tool-result done",
            "reset a handoff",
            "app.note w1",
            "app.audit",
            "user f1",
            "user s1",
            "assistant to a handoff+w1+f1+s1",
        ]
        assert {await s.status() for s in (reset, w1, shown)} == {"done"}
        (reset_entry,) = [entry for entry in await root.entries() if entry.kind == "pi.reset"]
        assert reset_entry.head == reset_entry.id
        assert next(m for m in model.requests[-1].messages if isinstance(m, UserMessage)).text == "a handoff"


async def test_a_reset_queued_during_an_answer_lands_after_it(store: Path) -> None:
    """H29: the run that was on its way is answered."""
    hold = Hold()
    async with opened(store, ScriptedModel(script, pace=hold)) as harness:
        root = await harness.root()
        first = await root.submit("first")
        await hold.reached.wait()
        f1 = await root.submit("f1")
        entry = (await root.entries())[0]
        await root.reset("a handoff")
        stale = await root.write(Note(text="back"), head=entry.id)
        hold.release()
        assert await answers(first, f1) == ["to first", "to a handoff+f1"]
        record = await stale.wait()
        assert (record.status, record.reason) == ("unanswered", "stale"), "its head reaches back before the reset"
        assert await transcript(root) == [
            "user first",
            "assistant to first",
            "reset a handoff",
            "user f1",
            "assistant to a handoff+f1",
        ]


async def test_after_a_failed_run_the_queue_waits_for_the_next_input(store: Path) -> None:
    """H24 to H29 (idle, inbox not empty), H48, H50: also over a reopen."""
    hold = Hold()
    async with opened(store, ScriptedModel(script, pace=hold)) as harness:
        root = await harness.root()
        failing = await root.submit("fail")
        await hold.reached.wait()
        await root.submit("f1", request_id="f1")
        hold.release()
        assert await why(failing) == "model_error"
        assert not await root.busy()
    async with opened(store, ScriptedModel(script)) as harness:
        root = await harness.root()
        f1 = await root.submit("f1", request_id="f1")
        assert await f1.status() == "queued"
        with pytest.raises(ConversationBusy):
            await root.submit("no", mode="reject")
        written = await root.write(Note(text="w1"))
        shown = await root.write(Audit(n=1))
        assert [await s.status() for s in (written, shown, f1)] == ["done", "done", "queued"]
        assert not await root.busy(), "a write starts no run"
        f2 = await root.submit("f2")
        assert await answers(f1, f2) == ["to fail+w1+f1", "to f2"]
        assert [line for line in await transcript(root) if not line.startswith("assistant")] == [
            "user fail",
            "app.note w1",
            "app.audit",
            "user f1",
            "user f2",
        ]


# --- forks -----------------------------------------------------------------------------------------------------


async def test_a_fork_has_the_history_and_the_settings_of_its_entry(store: Path) -> None:
    """K115, K118, H8 to H12: history through the entry, settings as of it; no queue, usage or run of the parent's."""
    model = ScriptedModel(script)
    async with opened(store, model) as harness:
        root = await harness.root(agent=Agent(instructions="Be brief."))
        async with root.commit() as tx:
            (await tx.draft(Job)).n = 1
        first = await (await root.submit("one")).answer()
        await root.set_agent(instructions="Be long.", thinking="high")
        async with root.commit() as tx:
            (await tx.draft(Job)).n = 2
        await (await root.submit("two")).answer()
        fork = await root.fork(first.entry.id)
        shown = await transcript(fork)
        assert [line for line in shown if not line.startswith("system")] == ["user one", "assistant to one"]
        assert [e.id for e in await fork.entries()] == [e.id for e in (await root.entries()) if e.id <= first.entry.id]
        agent = await fork.agent()
        assert (agent.instructions, agent.thinking) == ("Be brief.", "off")
        job = await harness.session.snapshot(Job, conversation=fork.id)
        assert job is not None
        assert job.n == 1
        assert (await fork.usage()).models == {}
        with pytest.raises(NotFound):
            await root.fork(10**6)
        assert (await (await fork.submit("three")).answer()).text == "to three"
        system = " ".join(m.text for m in model.requests[-1].messages if m.__struct_config__.tag == "system")
        assert "Be brief." in system
        assert "Be long." not in system
        info = await fork.info()
        assert info.record.parent is not None
        assert (info.record.parent.conversation, info.record.parent.at) == (root.id, first.entry.id)


async def test_a_fork_and_its_parent_go_on_independently(store: Path) -> None:
    """K115, K116, K119: entries, settings, documents, runs and aborts of one are none of the other's; also reopened."""
    hold = Hold()
    async with opened(store, ScriptedModel(script, pace=hold)) as harness:
        root = await harness.root()
        hold.release()
        first = await (await root.submit("one")).answer()
        hold.__init__()
        running = await root.submit("two")
        queued = await root.submit("three")
        await hold.reached.wait()
        fork = await root.fork(first.entry.id)
        assert not await fork.busy(), "the parent's run is the parent's"
        assert await harness.session.submissions(conversation_id=fork.id) == []
        assert await harness.session.tasks(conversation_id=fork.id) == []
        own = await fork.submit("fork's own")
        await fork.set_agent(instructions="Fork.")
        async with fork.commit() as tx:
            (await tx.draft(Job)).n = 7
        assert await harness.session.snapshot(Job, conversation=root.id) is None
        assert (await root.agent()).instructions == ""
        await fork.abort()
        assert await why(own) == "aborted"
        assert await running.status() == "placed"
        assert await queued.status() == "queued"
        hold.release()
        assert await answers(running, queued) == ["to two", "to three"]
        assert (await (await fork.submit("again")).answer()).text == "to fork's own+again"
        grandchild = await fork.fork((await fork.entries())[-1].id)
        lineage = [await transcript(conversation) for conversation in (root, fork, grandchild)]
    async with opened(store, ScriptedModel(script)) as harness:
        for id, wanted in zip((root.id, fork.id, grandchild.id), lineage, strict=True):
            assert await transcript(await harness.conversation(id)) == wanted
    # Shared, not copied: no entry of the parent's is stored a second time.
    stored = [entry["conversation_id"] for entry in records(store, "entries")]
    assert stored.count(grandchild.id) == 0
    assert len(lineage[1]) - 2 == stored.count(fork.id)
