"""Contexts kept in memory: what a turn reads, and what is let go of (rule H62)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from doubles import ManualClock
from kit import Audit, Note, opened, rest

from perdure.harness import contexts as module
from perdure.harness.context import weight
from perdure.harness.messages import UserMessage
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Edit
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, say


class Counting(MemoryStorage):
    """Counts the entries that are read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    async def entries(self, *args, **more):
        found = await super().entries(*args, **more)
        self.read += len(found)
        return found


async def test_a_turn_reads_nothing_of_the_history_h62() -> None:
    storage = Counting()
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model, storage=storage) as harness:
        root = await harness.root()
        for _ in range(20):
            await (await root.submit("hi")).wait()
        assert storage.read == 0
        assert len(model.requests[-1].messages) == 39


async def test_messages_are_shared_between_requests_h62() -> None:
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model) as harness:
        root = await harness.root()
        for _ in range(5):
            await (await root.submit("hi")).wait()
        older, newer = model.requests[-2].messages, model.requests[-1].messages
        assert all(a is b for a, b in zip(older, newer, strict=False))
        assert len(older) == len(newer) - 2


async def test_after_a_reopen_it_is_read_once_from_the_newest_head_on_h56_h62(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_SCAN", 3)
    storage = Counting()
    script = lambda request: say("x")  # noqa: E731
    async with opened(ScriptedModel(script), storage=storage) as harness:
        root = await harness.root()
        for _ in range(10):
            await (await root.submit("long ago")).wait()
        await root.reset("go on")
        for _ in range(4):
            await (await root.submit("lately")).wait()
    model = ScriptedModel(script)
    async with opened(model, storage=storage) as harness:
        root = await harness.root()
        storage.read = 0
        for _ in range(3):
            await (await root.submit("now")).wait()
        assert storage.read <= 12, "the reset, what followed it, and no more"
        assert [m.text for m in model.requests[0].messages if isinstance(m, UserMessage)] == [
            "go on",
            *["lately"] * 4,
            "now",
        ]


async def test_what_no_adapter_looks_at_stays_encoded_h62() -> None:
    """A long history takes what it takes in storage, not what its objects would."""
    storage = MemoryStorage()
    async with opened(ScriptedModel(lambda request: say("x")), storage=storage) as harness:
        root = await harness.root()
        for _ in range(20):
            await (await root.submit("hi")).wait()
    model = ScriptedModel(lambda request: say(str(len(request.messages)) + str(request.messages[-1])[:4]))
    async with opened(model, storage=storage) as harness:
        root = await harness.root()
        assert (await (await root.submit("now")).answer()).text == "41User"
        context = harness._host.contexts._held[root.id].context
        assert [type(piece).__name__ for piece in context._list[1:]] == [*["bytes"] * 40, "UserMessage"]


async def test_opening_and_looking_read_no_history_h62() -> None:
    storage = Counting()
    async with opened(ScriptedModel(lambda request: say("x")), storage=storage) as harness:
        root = await harness.root()
        for _ in range(5):
            await (await root.submit("hi")).wait()
    async with opened(ScriptedModel(say("x")), storage=storage) as harness:
        storage.read = 0
        await harness.root()
        harness.resume()
        await harness.inspect()
        await rest()
        assert storage.read == 0


async def test_what_was_committed_by_hand_is_seen_h55() -> None:
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model) as harness:
        root = await harness.root()
        answer = await (await root.submit("hi")).answer()
        async with root.commit() as tx:
            old = tx.append(Note(text="by hand"))
            tx.append(Audit(n=1))
        async with root.commit() as tx:
            tx.append(Audit(n=2), edits=[Edit(entry=answer.entry.id)])
        await (await root.submit("more")).wait()
        assert [m.text for m in model.requests[-1].messages] == ["hi", "by hand", "more"]
        async with root.commit() as tx:
            tx.append(Note(text="far back"), head=old.id)
        async with root.commit() as tx:
            tx.append(Note(text="further back"), head=answer.entry.id)
        await (await root.submit("last")).wait()
        assert model.requests[-1].messages[0].text == "further back"


async def test_unreadable_messages_are_left_out_and_reported_once() -> None:
    class Broken(Note, kind="app.broken2"):
        def messages(self) -> Sequence[JsonValue]:
            return [{"role": "wizard"}]

    reports = []
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model, reports=reports) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            tx.append(Broken(text="x"))
        for _ in range(2):
            await (await root.submit("hi")).wait()
        assert [report.type for report in reports] == ["entry_unreadable"]
        assert [m.text for m in model.requests[-1].messages] == ["hi", "x", "hi"]


@pytest.mark.parametrize(("bound", "most"), [("MOST_CONVERSATIONS", 2), ("MOST_BYTES", 3_000)])
async def test_the_longest_unused_is_let_go_of_and_read_again_h62(monkeypatch, bound, most) -> None:
    monkeypatch.setattr(module, bound, most)
    storage = Counting()
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model, storage=storage) as harness:
        several = [await harness.create_conversation() for _ in range(4)]
        for _ in range(2):
            for conversation in several:
                await (await conversation.submit("hi")).wait()
        assert storage.read > 0
        assert all(len(request.messages) == 3 for request in list(model.requests)[4:])


async def test_what_contexts_weigh_is_counted_through_edits_heads_and_evictions_h62(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_CONVERSATIONS", 2)
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model) as harness:
        contexts = harness._host.contexts
        for n in range(3):
            conversation = await harness.create_conversation()
            answer = await (await conversation.submit("hi " * 1000)).answer()
            await conversation.write(Note(text="short"), edits=[Edit(entry=answer.entry.id)])
            await (await conversation.submit("more")).wait()
            if n == 2:
                await conversation.reset("begin anew")
                await conversation.write(Note(text="back"), head="self")
                await (await conversation.submit("more")).wait()
        held = contexts._held
        assert len(held) == 2
        for one in held.values():
            assert one.context.bytes == sum(one.context._weights)
            assert one.pending_bytes == sum(map(weight, one.pending))
        assert contexts._bytes == sum(one.counted for one in held.values())
        assert min(one.bytes for one in held.values()) < 3_000 < max(one.bytes for one in held.values())


async def test_what_is_written_and_never_asked_for_counts_too(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 50_000)
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model) as harness:
        contexts = harness._host.contexts
        written, used = await harness.create_conversation(), await harness.create_conversation()
        for conversation in (written, used):
            await (await conversation.submit("hi")).wait()
        for _ in range(60):
            await written.write(Note(text="x" * 1_000))
        assert [*contexts._held] == [used.id]
        assert contexts._bytes == sum(one.bytes for one in contexts._held.values()) < 50_000
        await (await written.submit("and now?")).wait()
        assert len(model.requests[-1].messages) == 63


async def test_a_conversation_may_be_deleted_while_its_history_is_read() -> None:
    class Slow(MemoryStorage):
        hold: asyncio.Event | None = None

        async def entries(self, *args, **more):
            found = await super().entries(*args, **more)
            if self.hold is not None:
                await self.hold.wait()
            return found

    storage = Slow()
    async with opened(ScriptedModel(lambda request: say("x")), storage=storage) as harness:
        one = await harness.create_conversation()
        await (await one.submit("hi")).wait()
        contexts = harness._host.contexts
        contexts._drop(one.id)
        storage.hold = asyncio.Event()
        reading = asyncio.ensure_future(contexts.messages(one.id, 10**9))
        await rest()
        await one.delete()
        storage.hold.set()
        assert len(await reading) == 2
        assert (one.id in contexts._held, contexts._bytes) == (False, 0)


async def test_what_was_not_used_for_long_is_let_go_of(monkeypatch) -> None:
    clock = ManualClock()
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model, clock=clock) as harness:
        one, two = await harness.root(), await harness.create_conversation()
        await (await one.submit("hi")).wait()
        contexts = harness._host.contexts
        assert one.id in contexts._held
        await clock.advance(module.RETENTION_S + 1)
        await (await two.submit("hi")).wait()
        assert one.id not in contexts._held
        await (await one.submit("hi")).wait()
        assert len(model.requests[-1].messages) == 3


async def test_many_pending_entries_are_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING", 5)
    model = ScriptedModel(lambda request: say("x"))
    async with opened(model) as harness:
        root = await harness.root()
        for n in range(10):
            await root.write(Audit(n=n))
        assert root.id not in harness._host.contexts._held
        await (await root.submit("hi")).wait()
        assert [m.text for m in model.requests[-1].messages] == ["hi"]


async def test_readers_that_come_at_once_read_once_and_miss_nothing_h62() -> None:
    storage = Counting()
    async with opened(ScriptedModel(lambda request: say("x")), storage=storage) as harness:
        root = await harness.root()
        for _ in range(5):
            await (await root.submit("hi")).wait()
    async with opened(ScriptedModel(lambda request: say("x")), storage=storage) as harness:
        root = await harness.root()
        storage.read = 0
        contexts = harness._host.contexts
        loads = [asyncio.ensure_future(contexts.load(root.id)) for _ in range(3)]
        await root.write(Note(text="meanwhile"))
        await asyncio.gather(*loads)
        newest = (await root.entries(order="descending", limit=1))[0].id
        storage_read = storage.read
        messages = await contexts.messages(root.id, newest)
        assert [m.text for m in messages][-1] == "meanwhile"
        assert storage.read == storage_read
        # An older point is derived without touching what is held.
        assert len(await contexts.messages(root.id, newest - 1)) == len(messages) - 1
        assert len(await contexts.messages(root.id, newest)) == len(messages)
