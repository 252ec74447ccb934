"""Hooks of a generation: requests, gates, responses, answers, rounds (rules H124 to H132 and H220 to H227)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hooks_kit import Ear, names, user, world
from kit import Audit, Commits, Hold, Reports, kinds, live, opened, queue, rest, transcript, until

from perdure.harness.conversation import Conversation
from perdure.harness.documents import ASSISTANT, USER
from perdure.harness.hooks import (
    HookRequest,
    HookResponse,
    HookRound,
    RequestChange,
    Stop,
    after_response,
    after_tool,
    after_tools,
    before_request,
    before_tool,
    gate_request,
    on_yield,
)
from perdure.harness.messages import (
    AssistantMessage,
    SystemMessage,
    Text,
    ToolCallPart,
    Usage,
    UserMessage,
    decode_messages,
)
from perdure.harness.registry import Extension
from perdure.harness.settings import RetryPolicy
from perdure.harness.submission import Unanswered
from perdure.harness.tool import tool
from perdure.kernel.records import NULL, Failed
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say

# --- before a request ---------------------------------------------------------------------------------------------


async def test_a_request_is_changed_at_its_end_and_nothing_of_it_is_stored_h222() -> None:
    seen: list[HookRequest] = []

    @before_request
    async def first(asked: HookRequest) -> RequestChange:
        seen.append(asked)
        return RequestChange(add=[SystemMessage("It is noon."), user("be quick")], thinking="low", max_output=7)

    @before_request
    async def second(asked: HookRequest) -> RequestChange:
        seen.append(asked)
        return RequestChange(max_output=9)

    model = Ear(say("done"))
    async with world(model, first, second) as (_, root):
        submission = await root.submit("hi")
        await submission.wait()
        (sent,) = model.asked
        assert list(sent.messages) == [*seen[0].request.messages, SystemMessage("It is noon."), user("be quick")]
        assert (sent.thinking, sent.max_output) == ("low", 9)
        assert (seen[1].request.thinking, seen[1].request.max_output) == ("low", 7)
        assert (seen[0].conversation_id, seen[0].turn) == (root.id, 0)
        assert await transcript(root) == ["user hi", "assistant done"]


async def test_every_attempt_is_asked_about_anew_h222() -> None:
    attempts: list[int] = []

    @before_request
    async def count(asked: HookRequest) -> None:
        attempts.append(asked.request.attempt)

    model = ScriptedModel(fail("overloaded", times=2, then=say("at last")))
    async with world(model, count, retry=RetryPolicy(first_ms=1, jitter=0)) as (_, root):
        assert (await (await root.submit("hi")).answer()).text == "at last"
    assert attempts == [1, 2, 3]


async def test_a_request_that_was_cut_off_is_asked_about_again_h222_h221() -> None:
    asked: list[int] = []

    @before_request
    async def count(request: HookRequest) -> None:
        asked.append(len(request.request.messages))

    storage, hold = MemoryStorage(), Hold(1)
    async with world(ScriptedModel(say("a long answer", chunk=2), pace=hold), count, storage=storage) as (
        harness,
        root,
    ):
        await root.submit("hi")
        await hold.reached.wait()
        await rest()
        copy = storage.snapshot()
        hold.release()
    async with world(ScriptedModel(say("a long answer")), count, storage=copy) as (harness, root):
        harness.resume()
        await root.idle()
    assert asked == [1, 1]


@pytest.mark.parametrize(
    "change",
    [
        RequestChange(add=[AssistantMessage(content=(), provider="a", model="b", stop_reason="stop")]),  # type: ignore
        RequestChange(add=[UserMessage(())]),
        RequestChange(add=[SystemMessage("")]),
        RequestChange(add=[user("\ud800")]),
        RequestChange(add=[UserMessage((Text("one"), Text("")))]),
        RequestChange(max_output=0),
        RequestChange(max_output=1.5),  # type: ignore
        RequestChange(max_output=True),
        RequestChange(thinking="very"),  # type: ignore
        "text",
    ],
)
async def test_a_change_that_cannot_be_sent_is_reported_and_skipped_h132(change) -> None:
    @before_request
    async def odd(asked: HookRequest) -> RequestChange:
        return change

    model, reports = Ear(say("done")), Reports()
    async with world(model, odd, reports=reports) as (_, root):
        assert (await (await root.submit("hi")).answer()).text == "done"
        (sent,) = model.asked
        assert (len(sent.messages), sent.thinking, sent.max_output) == (1, "off", None)
    assert names(reports) == ["a hook before_request"]
    assert [(r.kind, r.extension, r.conversation) for r in reports] == [("pi.generation", "hooks", 1)]


async def test_nothing_that_is_in_a_request_can_be_taken_out_h222() -> None:
    refused: list[str] = []

    @before_request
    async def add(asked: HookRequest) -> RequestChange:
        return RequestChange(add=[user("be quick")])

    @before_request
    async def clear(asked: HookRequest) -> None:
        for part in (asked.request.messages, asked.request.tools):
            try:
                part.clear()  # type: ignore[attr-defined]
            except AttributeError:
                refused.append("refused")

    model = Ear(say("done"))
    async with world(model, clear, add, clear) as (_, root):
        await (await root.submit("hi")).answer()
    (sent,) = model.asked
    assert refused == ["refused"] * 4
    assert (len(sent.messages), len(sent.tools)) == (2, 1)


# --- gates --------------------------------------------------------------------------------------------------------


async def test_a_gate_stops_a_request_before_anything_of_it_is_there_h130_h223() -> None:
    @before_request
    async def add(asked: HookRequest) -> RequestChange:
        return RequestChange(add=[user("secret")])

    @gate_request
    async def gate(asked: HookRequest) -> Stop | None:
        return Stop("no secrets today") if asked.request.messages[-1] == user("secret") else None

    model = Ear(say("never"))
    async with world(model, add, gate) as (harness, root):
        commits = Commits(harness)
        submission = await root.submit("hi")
        with pytest.raises(Unanswered) as caught:
            await submission.answer()
        assert (caught.value.reason, caught.value.detail) == ("gate", "no secrets today")
        assert model.asked == []
        assert await transcript(root) == ["user hi"]
        assert len(commits.durable) == 2
        task = next(task for task in commits.durable[-1].batch.tasks if task.kind == "pi.generation")
        assert isinstance(task.outcome, Failed)
        assert task.outcome.error.code == "gate"
        assert (await root.usage()).models == {}
        assert not await root.busy()


async def test_a_gate_that_raises_stops_and_says_nothing_of_why_h130() -> None:
    @gate_request
    async def broken(asked: HookRequest) -> None:
        raise RuntimeError("secret")

    @gate_request
    async def odd(asked: HookRequest) -> Stop:
        return Stop(7)  # pyright: ignore[reportArgumentType]

    for hook in (broken, odd):
        model, reports = Ear(say("never")), Reports()
        async with world(model, hook, reports=reports) as (_, root):
            record = await (await root.submit("hi")).wait()
            assert (record.reason, record.detail) == ("gate", "a gate failed; the request was not sent")
            assert model.asked == []
        assert names(reports) == ["a hook gate_request"]


async def test_a_gate_that_stops_a_later_turn_keeps_what_came_before_and_the_queue_h130_h50() -> None:
    hold = asyncio.Event()

    @gate_request
    async def one(asked: HookRequest) -> Stop | None:
        await hold.wait()
        return Stop("one is enough") if asked.turn == 1 else None

    async with world(ScriptedModel([call("look", at=1), say("never")]), one) as (_, root):
        submission = await root.submit("hi")
        waiting = await root.submit("more")
        hold.set()
        assert (await submission.wait()).reason == "gate"
        assert await kinds(root) == ["pi.user", "pi.assistant", "pi.tool-result"]
        assert await queue(root) == [waiting.id]


async def test_gates_let_pass_what_they_do_not_stop_h130() -> None:
    @gate_request
    async def pass_on(asked: HookRequest) -> None:
        """Lets everything pass."""

    async with world(ScriptedModel(say("done")), pass_on) as (harness, root):
        commits = Commits(harness)
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert len(commits.durable) == 2


# --- responses ----------------------------------------------------------------------------------------------------


async def test_a_message_is_replaced_before_it_is_stored_h224() -> None:
    seen: list[str] = []

    @after_response
    async def shout(asked: HookResponse) -> AssistantMessage:
        seen.append(asked.message.text)
        return msgspec.structs.replace(
            asked.message,
            content=(Text(asked.message.text.upper()),),
            provider="me",
            model="mine",
            usage=Usage(input=1),
        )

    @after_response
    async def hear(asked: HookResponse) -> None:
        seen.append(asked.message.text)

    async with world(ScriptedModel(say("done", usage=Usage(input=3, output=4))), shout, hear) as (_, root):
        answer = await (await root.submit("hi")).answer()
        assert answer.text == "DONE"
        assert (answer.message.provider, answer.message.model) == ("test", "scripted")
        assert answer.message.usage == Usage(input=3, output=4)
        assert (await root.usage()).models["test:scripted"]["input"] == 3
    assert seen == ["done", "DONE"]


async def test_a_replaced_message_may_call_tools_and_is_stored_as_json_h224() -> None:
    @after_response
    async def act(asked: HookResponse) -> AssistantMessage | None:
        if asked.turn:
            return None
        part = ToolCallPart("x", "look", msgspec.Raw(b' {"at": 5} '))
        return msgspec.structs.replace(asked.message, content=(Text("a\ud800"), part))

    async with world(ScriptedModel([say("words"), say("done")]), act) as (_, root):
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert (await transcript(root))[1:3] == ["assistant a?", "tool-result seen 5"]


@pytest.mark.parametrize("wrong", ["error", "calls", "text"])
async def test_a_message_that_no_model_may_give_is_skipped_h132(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.harness.asking.MOST_CALLS", 1)

    @after_response
    async def odd(asked: HookResponse) -> AssistantMessage:
        if wrong == "error":
            return msgspec.structs.replace(asked.message, stop_reason="error")
        if wrong == "calls":
            return msgspec.structs.replace(asked.message, content=(ToolCallPart("x", "look"),) * 2)
        return "text"  # pyright: ignore[reportReturnType]

    reports = Reports()
    async with world(ScriptedModel(say("done")), odd, reports=reports) as (_, root):
        assert (await (await root.submit("hi")).answer()).text == "done"
    assert names(reports) == ["a hook after_response"]


async def test_a_failed_request_has_no_response_h224() -> None:
    @after_response
    async def never(asked: HookResponse) -> None:
        raise AssertionError

    async with world(ScriptedModel(fail("malformed")), never) as (_, root):
        assert (await (await root.submit("hi")).wait()).reason == "model_error"


# --- rounds -------------------------------------------------------------------------------------------------------


async def test_a_round_is_told_before_its_boundary_h226() -> None:
    rounds: list[HookRound] = []
    transcripts: list[list[str]] = []

    @after_tools
    async def note(round: HookRound) -> None:
        rounds.append(round)
        transcripts.append(await kinds(root))

    @after_tools
    async def broken(round: HookRound) -> None:
        raise RuntimeError

    reports = Reports()
    replies = [calls(call("look", at=1), call("nobody"), call("look", at=2)), say("done")]
    async with world(ScriptedModel(replies), note, broken, reports=reports) as (harness, root):
        commits = Commits(harness)
        assert (await (await root.submit("hi")).answer()).text == "done"
        # admitted, answered, three results, the boundary by itself, the answer
        assert len(commits.durable) == 7
        (told,) = rounds
        assert (told.conversation_id, told.turn) == (root.id, 1)
        assert [ended.call.name for ended in told.calls] == ["look", "nobody", "look"]
        assert [ended.result.text for ended in told.calls][::2] == ["seen 1", "seen 2"]
        assert told.calls[1].result.code == "tool_unavailable"
        assert transcripts == [[USER, ASSISTANT, *["pi.tool-result"] * 3]]
        for ended in told.calls:
            task = await harness.session.task(ended.id)
            assert task is not None
            assert task.kind == "pi.tool"
    assert names(reports) == ["a hook after_tools"]


async def test_a_round_that_began_many_entries_ago_is_found_h226(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.harness.rounds.MAX_SCAN", 2)
    hold, rounds = asyncio.Event(), list[HookRound]()

    @tool
    async def wait(at: int) -> str:
        """Wait."""
        await hold.wait()
        return str(at)

    @after_tools
    async def note(round: HookRound) -> None:
        rounds.append(round)

    model = ScriptedModel([calls(*(call("wait", at=n) for n in range(3))), say("done")])
    async with opened(model, tools=(wait,), extensions=[Extension("hooks", hooks=[note])]) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await until(lambda: any(task.kind == "pi.tool" for task in harness.session.live.settled.values()))
        for n in range(5):
            await root.write(Audit(n=n))
        hold.set()
        await submission.wait()
    assert [ended.result.text for ended in rounds[0].calls] == ["0", "1", "2"]


async def test_a_hook_for_another_conversation_leaves_the_commits_alone_h226_h227() -> None:
    async def note(round: HookRound) -> None:
        raise AssertionError

    hooks = [after_tools(conversation=99)(note), after_tools(conversation=99, subtree=True)(note)]
    async with world(ScriptedModel([call("look", at=1), say("done")]), *hooks) as (harness, root):
        commits = Commits(harness)
        await (await root.submit("hi")).wait()
        assert len(commits.durable) == 4


async def test_a_round_below_a_subtree_is_told_from_the_first_one_on_h226_h128() -> None:
    told: list[int] = []

    @after_tools(conversation=1, subtree=True)
    async def note(round: HookRound) -> None:
        told.append(round.conversation_id)

    async with world(ScriptedModel([call("look", at=1), say("done")]), note) as (harness, root):
        at = root
        for _ in range(2):
            async with at.commit() as tx:
                task = tx.new_task(kind="app.parent", version=1, phase="start", input=NULL)
            at = await harness.create_conversation(owner=task.id)
        commits = Commits(harness)
        await (await at.submit("hi")).wait()
        assert told == [at.id]
        assert len(commits.durable) == 5


# --- all of them --------------------------------------------------------------------------------------------------


async def test_no_hook_costs_no_read_and_no_commit_h227(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(ScriptedModel([call("look", at=1), say("done")])) as (harness, root):

        async def never(*_: object) -> bool:
            raise AssertionError

        monkeypatch.setattr("perdure.harness.hook_runner.HookRunner._applies", never)
        commits = Commits(harness)
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert len(commits.durable) == 4


async def test_hooks_apply_where_their_scope_says_h128() -> None:
    asked: list[tuple[str, int]] = []

    def noted(name: str):
        async def note(request: HookRequest) -> None:
            asked.append((name, request.conversation_id))

        return note

    async with opened(ScriptedModel(say("done"))) as harness:
        root = await harness.root()
        other = await harness.create_conversation()

        async def below(conversation: Conversation) -> Conversation:
            """A conversation owned by a task of another."""
            async with conversation.commit() as tx:
                task = tx.new_task(kind="app.parent", version=1, phase="start", input=NULL)
            return await harness.create_conversation(owner=task.id)

        child = await below(root)
        grandchild = await below(child)
        harness.registry.add_hook(before_request(noted("all")))
        harness.registry.add_hook(before_request(conversation=child.id)(noted("child")))
        harness.registry.add_hook(before_request(conversation=child.id, subtree=True)(noted("below child")))
        harness.registry.add_hook(before_request(conversation=root.id, subtree=True)(noted("below root")))
        remove = harness.registry.add_hook(before_request(noted("gone")))
        remove()
        for conversation in (root, child, grandchild, other):
            await (await conversation.submit("hi")).wait()
    assert asked == [
        ("all", root.id),
        ("below root", root.id),
        ("all", child.id),
        ("child", child.id),
        ("below child", child.id),
        ("below root", child.id),
        ("all", grandchild.id),
        ("below child", grandchild.id),
        ("below root", grandchild.id),
        ("all", other.id),
    ]


@pytest.mark.parametrize(
    "decorate", [before_request, gate_request, after_response, on_yield, after_tools, before_tool, after_tool]
)
async def test_a_hook_that_never_returns_ends_with_the_run_h221(decorate) -> None:
    reached, stopped = asyncio.Event(), list[str]()

    async def hang(*asked: object) -> None:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("stopped")

    replies = [call("look", at=1), say("done")]
    async with world(ScriptedModel(replies), decorate(hang)) as (_, root):
        submission = await root.submit("hi")
        await reached.wait()
        await root.abort()
        assert (await submission.wait()).reason == "aborted"
        assert stopped == ["stopped"]
        assert (await live(root)).run is None


async def test_the_hosts_own_hooks_are_asked_first_h220() -> None:
    order: list[str] = []

    def noted(name: str):
        async def note(response: HookResponse) -> None:
            order.append(name)

        return after_response(note)

    async with world(ScriptedModel(say("done")), noted("extension")) as (harness, root):
        harness.registry.add_hook(noted("host"))
        harness.registry.install(Extension("later", hooks=[noted("later")]))
        await (await root.submit("hi")).wait()
    assert order == ["host", "extension", "later"]


async def test_messages_are_as_they_were_stored_h224() -> None:
    """What a hook is told is what the entry holds, if none changes it."""
    told: list[AssistantMessage] = []

    @after_response
    async def note(asked: HookResponse) -> None:
        told.append(asked.message)

    async with world(ScriptedModel(say("done", thinking="well")), note) as (_, root):
        answer = await (await root.submit("hi")).answer()
        assert decode_messages(answer.entry.raw_messages) == told
