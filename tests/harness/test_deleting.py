"""Deleting conversations of a harness (rules H156, H180 to H184, K192 to K197)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit import Hold, Note, kinds, live, opened, queue, rest, transcript, until

from perdure.events import Snapshot
from perdure.harness.conversation import Conversation
from perdure.harness.documents import DeletedUsage, Meta, UsageTotals
from perdure.harness.harness import Harness
from perdure.harness.messages import AssistantMessage, UserMessage
from perdure.harness.model import ModelRequest
from perdure.harness.submission import Unanswered
from perdure.harness.tool import tool
from perdure.kernel.errors import ConversationOpen, InvalidTransition, NotFound
from perdure.kernel.json import JsonValue
from perdure.kernel.observation import WatchEnded
from perdure.kernel.records import from_raw
from perdure.kernel.session import Session
from perdure.storage.memory import MemoryStorage
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.testing.model import Reply, ScriptedModel, call, say


def talk(**more) -> ScriptedModel:
    def answer(request: ModelRequest) -> Reply:
        return say(f"answer to {[m.text for m in request.messages if isinstance(m, UserMessage)][-1]}")

    return ScriptedModel(answer, **more)


async def asked(harness: Harness, text: str = "hi", **more: Any) -> Conversation:
    conversation = await harness.create_conversation(**more)
    await (await conversation.submit(text, request_id="r")).answer()
    return conversation


async def gone(harness: Harness, conversation: Conversation) -> None:
    for read in (conversation.info(), conversation.entries(), harness.conversation(conversation.id)):
        with pytest.raises(NotFound):
            await read
    assert conversation.id not in [info.id for info in await harness.conversations()]


class Child(Task[int, int], kind="app.child"):
    """Makes a conversation of its own, and ends."""

    async def start(self, run: Run[int, int, None]) -> Next[int]:
        async with run.commit() as tx:
            child = tx.create_conversation(owner=run.id)
            tx.append(Note(text="of the child"), conversation=child.id)
            return tx.complete(child.id)


async def test_a_conversation_is_deleted_with_all_it_owns_h156() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        harness.tasks.registry.install(Child())
        root = await harness.root()
        conversation = await asked(harness, name="mine")
        async with conversation.commit() as tx:
            tx.create_task(Child, 1)
        await conversation.idle()
        (child,) = [info for info in await harness.conversations() if info.record.owner is not None]
        submission = (await harness.session.submissions(conversation_id=conversation.id))[0]
        tasks = [node.id for node in await harness.task_graph()]
        assert len(tasks) == 2
        assert sorted(await conversation.delete()) == [conversation.id, child.id]
        await gone(harness, conversation)
        await gone(harness, harness.handle(child.id))
        assert await harness.task_graph() == []
        assert [info.id for info in await harness.conversations()] == [root.id]
        for ask in (
            harness.submission(submission.id),
            conversation.submit("again"),
            conversation.submit("hi", request_id="r"),
            conversation.set_name("x"),
            conversation.fork(submission.answer or 0),
            conversation.delete(),
        ):
            with pytest.raises(NotFound):
                await ask
        assert not await conversation.busy()
        assert await harness.session.snapshot(Meta, conversation=conversation.id) is None
    async with opened(talk(), storage=storage) as harness:
        await gone(harness, harness.handle(conversation.id))
        another = await harness.create_conversation()
        assert another.id > child.id, "K197: no id is given again"


async def test_one_that_is_not_closed_is_refused_and_goes_on_h181() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        conversation = await harness.create_conversation()
        submission = await conversation.submit("hi")
        await hold.reached.wait()
        with pytest.raises(ConversationOpen, match=r"pi\.generation task \d+ is running; end or abort that first"):
            await conversation.delete()
        hold.release()
        assert (await submission.answer()).text == "answer to hi"
        await conversation.delete()
        await gone(harness, conversation)


async def test_the_root_stays_k194() -> None:
    async with opened(talk()) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        for abort in (False, True):
            with pytest.raises(InvalidTransition, match=r"root conversation.*reset\(\)"):
                await root.delete(abort=abort)
        assert (await submission.answer()).text == "answer to hi", "nothing was aborted for it"


class Sleeper(Task[int, int], kind="app.sleeper"):
    async def start(self, run: Run[int, int, None]) -> Next[int]:
        async with run.commit() as tx:
            tx.create_conversation(owner=run.id)
            return tx.sleep(tx.at + 10**9, self.later, None)

    async def later(self, run: Run[int, int, None]) -> Next[int]:
        async with run.commit() as tx:
            return tx.complete(0)


async def test_a_deletion_aborts_first_if_it_is_asked_to_h181() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        harness.tasks.registry.install(Sleeper())
        conversation, other = await harness.create_conversation(), await harness.create_conversation()
        first = await conversation.submit("one")
        waiting = await conversation.submit("two")
        written = await conversation.write(Note(text="three"))
        async with conversation.commit() as tx:
            tx.create_task(Sleeper, 1, background=True)
        beside = await other.submit("four")
        await until(lambda: len(harness.session.live.settled) == 3)
        await until(lambda: any(t.status == "sleeping" for t in harness.session.live.settled.values()))
        (child,) = [info for info in await harness.conversations() if info.record.owner is not None]
        with pytest.raises(ConversationOpen, match=r"belongs to app\.sleeper task"):
            await harness.handle(child.id).delete(abort=True)
        assert await conversation.busy(), "nothing was aborted for it"
        ends = [asyncio.ensure_future(s.answer()) for s in (first, waiting)]
        ending = asyncio.ensure_future(written.wait())
        await rest()
        assert await conversation.delete(abort=True) == [conversation.id, child.id]
        for end in ends:
            with pytest.raises(Unanswered, match="aborted"):
                await end
        assert (await ending).status == "unanswered"
        await gone(harness, conversation)
        hold.release()
        assert (await beside.answer()).text == "answer to four", "what is beside it goes on"
        assert harness.session.live.settled == {}


async def test_several_go_in_one_commit_or_none_does_k195() -> None:
    async with opened(talk()) as harness:
        one, two = await asked(harness), await asked(harness)
        seq = harness.session.seq
        with pytest.raises(NotFound):
            await harness.delete_conversations([one.id, 999])
        assert await kinds(one) == ["pi.user", "pi.assistant"]
        assert await harness.delete_conversations([one.id, two.id, one.id]) == [one.id, two.id]
        assert harness.session.seq == seq + 1
        await gone(harness, one)
        await gone(harness, two)


def said(model: ScriptedModel) -> list[str]:
    """What the model was asked last, without what it is told by the host."""
    return [m.text for m in model.requests[-1].messages if isinstance(m, UserMessage | AssistantMessage)]


async def test_a_fork_goes_on_after_what_it_was_forked_from_is_deleted_k196() -> None:
    model = talk()
    storage = MemoryStorage()
    async with opened(model, storage=storage, instructions="Be brief.") as harness:
        trunk = await asked(harness, "one")
        await trunk.set_agent(instructions="Be kind.")
        answer = await (await trunk.submit("two")).answer()
        await (await trunk.submit("three")).answer()
        fork = await trunk.fork(answer.entry.id)
        before = await transcript(fork)
        await trunk.delete()
        assert await transcript(fork) == before
        await (await fork.submit("four")).answer()
        assert said(model)[-4:] == ["answer to one", "two", "answer to two", "four"]
        again = await fork.fork(answer.entry.id)
        assert (await again.agent()).instructions == (await fork.agent()).instructions == "Be kind."
        shown = await transcript(fork)
    async with opened(model, storage=storage, instructions="Be brief.") as harness:
        fork, again = harness.handle(fork.id), harness.handle(again.id)
        assert await transcript(fork) == shown
        async with fork.view() as view:
            assert len(view.value.entries) == len(shown)
        await (await again.submit("five")).answer()
        assert said(model)[-4:] == ["answer to one", "two", "answer to two", "five"]
        await harness.delete_conversations([fork.id, again.id])
        size = await harness.session.storage.size()
        assert size.entries == 0


async def test_views_watches_and_events_end_retired_h182() -> None:
    async with opened(talk()) as harness:
        conversation, other = await asked(harness), await asked(harness)
        async with (
            conversation.view() as view,
            conversation.watch() as watch,
            conversation.events() as events,
            other.view() as beside,
        ):
            await anext(watch)
            assert isinstance(await anext(events), Snapshot)
            await conversation.delete()
            for stream in (watch, events):
                with pytest.raises(WatchEnded) as raised:
                    await anext(stream)
                assert raised.value.reason == "retired"
            assert view.ended == "retired"
            assert len(view.value.entries) == 2, "the last value is kept"
            assert beside.ended is None
        with pytest.raises(NotFound):
            async with conversation.view():
                pass


async def test_a_view_that_is_being_opened_meanwhile_finds_nothing_h182() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        conversation = await asked(harness)
        read = storage.entries
        reading, gate = asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **options: Any) -> Any:
            found = await read(*args, **options)
            reading.set()
            await gate.wait()
            return found

        storage.entries = slow  # type: ignore[method-assign]

        async def look() -> None:
            async with conversation.view():
                pass

        looking = asyncio.ensure_future(look())
        await reading.wait()
        await conversation.delete()
        gate.set()
        with pytest.raises(NotFound):
            await looking


async def test_what_a_deleted_conversation_used_stays_in_the_sum_h184() -> None:
    @tool(replay="safe")
    async def look(place: str) -> str:
        """Look."""
        return f"{place} is there"

    def script(request: ModelRequest) -> Reply:
        last = request.messages[-1]
        return call("look", place="x") if isinstance(last, UserMessage) else say("done")

    storage = MemoryStorage()
    async with opened(ScriptedModel(script), storage=storage, tools=(look,)) as harness:
        all = [await asked(harness) for _ in range(3)]
        before, one = await harness.usage(), await all[0].usage()
        assert (one.requests, one.tools["look"]["calls"]) == (2, 1)
        await all[0].delete()
        assert await harness.usage() == before
        await harness.delete_conversations([all[1].id, all[2].id])
        assert await harness.usage() == before
        kept = await harness.session.snapshot(DeletedUsage)
        assert kept is not None
        assert kept.tools["look"]["calls"] == 3
        # A program that deletes in a transaction of its own counts too.
        late = await asked(harness)
        async with harness.session.commit() as tx:
            await tx.delete_conversation(late.id)
        assert (await harness.usage()).requests == before.requests + 2
    async with opened(talk(), storage=storage) as harness:
        assert (await harness.usage()).requests == before.requests + 2
        empty = await harness.create_conversation()
        await empty.delete()
        assert (await harness.usage()).requests == before.requests + 2


async def test_a_deletion_while_the_sum_is_made_costs_and_doubles_nothing_h184(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(talk()) as harness:
        all = [await asked(harness) for _ in range(3)]
        before = await harness.usage()
        snapshot, waiting = Session.snapshot, [all[0], all[2]]

        async def deleting(self: Session, kind: Any, **more: Any) -> Any:
            found = await snapshot(self, kind, **more)
            if kind is UsageTotals and more["conversation"] == all[1].id and waiting:
                await waiting.pop().delete()  # one that would be next, then one that is counted already
            return found

        monkeypatch.setattr(Session, "snapshot", deleting)
        assert await harness.usage() == before
        assert not waiting


# --- by mail ---------------------------------------------------------------------------------------------------------


async def answered(storage: MemoryStorage, mail: int) -> tuple[bool, Any]:
    await until(lambda: mail in storage._contents.replies)
    await rest()
    reply = storage._contents.replies[mail]
    return reply.ok, from_raw(reply.result)


async def test_any_process_may_ask_for_a_deletion_h183() -> None:
    storage = MemoryStorage()
    hold = Hold()
    async with opened(talk(pace=hold), storage=storage) as harness:
        hold.release()
        one, two = await asked(harness), await asked(harness)
        mail = storage.post("delete", {"conversations": [one.id, two.id]}, now=0)
        late = storage.post("input", {"conversation_id": one.id, "content": "hi", "request_id": "r"}, now=0)
        assert await answered(storage, mail) == (True, {"deleted": [one.id, two.id]})
        await gone(harness, one)
        ok, why = await answered(storage, late)
        assert (ok, why["error"]) == (False, "NotFound"), "K197"


async def test_by_mail_too_what_is_not_closed_is_aborted_only_if_asked_h181_h183() -> None:
    storage = MemoryStorage()
    hold = Hold()
    async with opened(talk(pace=hold), storage=storage) as harness:
        conversation = await harness.create_conversation()
        submission = await conversation.submit("hi")
        await hold.reached.wait()
        ok, why = await answered(storage, storage.post("delete", {"conversations": [conversation.id]}, now=0))
        assert (ok, why["error"]) == (False, "ConversationOpen")
        assert "pi.generation" in why["message"]
        assert await conversation.busy()
        waiting = asyncio.ensure_future(submission.answer())
        await rest()
        mail = storage.post("delete", {"conversations": [conversation.id], "abort": True}, now=0)
        assert await answered(storage, mail) == (True, {"deleted": [conversation.id]})
        with pytest.raises(Unanswered, match="aborted"):
            await waiting
        wrong: tuple[JsonValue, ...] = ({"conversations": [conversation.id], "abort": True}, {"conversations": "all"})
        for body in wrong:
            assert not (await answered(storage, storage.post("delete", body, now=0)))[0]


async def test_a_deletion_posted_to_a_closed_store_is_done_at_the_next_open_k74() -> None:
    storage = MemoryStorage()
    hold = Hold()
    async with opened(talk(pace=hold), storage=storage) as harness:
        conversation = await harness.create_conversation()
        await conversation.submit("hi")
        await hold.reached.wait()
    mail = storage.post("delete", {"conversations": [conversation.id], "abort": True}, now=0)
    async with opened(talk(), storage=storage) as harness:
        assert await answered(storage, mail) == (True, {"deleted": [conversation.id]})
        await gone(harness, harness.handle(conversation.id))


# --- names -----------------------------------------------------------------------------------------------------------


async def test_names_may_be_changed_taken_away_and_given_twice_h154_h180() -> None:
    async with opened(talk()) as harness:
        one = await harness.create_conversation(name="plan", labels={"a": "b"})
        two = await harness.create_conversation(name="plan")
        assert [info.name for info in await harness.conversations()] == ["plan", "plan"]
        await one.set_name("old plan")
        await two.set_name(None)
        assert [(info.name, info.labels) for info in await harness.conversations()] == [
            ("old plan", {"a": "b"}),
            (None, {}),
        ]
        assert (await live(one)).run is None
        assert await queue(one) == []
