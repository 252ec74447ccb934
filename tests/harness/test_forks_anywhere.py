"""Forks at every kind of entry, deep ones, and heads that reach into what was inherited (rules K115 to K119, K196)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import Note, opened, transcript

from perdure import Harness, SqliteStorage
from perdure.harness.conversation import Conversation
from perdure.harness.documents import ASSISTANT, RESET, SYSTEM, TOOL_RESULT, USER
from perdure.harness.messages import SystemMessage, decode_messages
from perdure.harness.tool import tool
from perdure.kernel.errors import NotFound
from perdure.kernel.records import EntryRecord
from perdure.kernel.session import Session
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, say


@tool
async def work(what: str) -> str:
    """Work."""
    return f"{what} is done"


def script(request):
    last = next(message.text for message in reversed(request.messages) if not isinstance(message, SystemMessage))
    return call("work", what="it") if last == "work" else say(f"answer to {last}")


def sent(model: ScriptedModel) -> list[str]:
    """The words of the last request, but for prompt sections and for calls that have no result there."""
    return [
        message.text
        for message in model.requests[-1].messages
        if not isinstance(message, SystemMessage) and getattr(message, "code", None) != "interrupted" and message.text
    ]


async def told(conversation: Conversation) -> list[EntryRecord]:
    return await conversation.entries(limit=1000)


async def rich(harness: Harness) -> Conversation:
    """A root with an entry of every kind, changed instructions, and heads of both kinds."""
    root = await harness.root()
    await (await root.submit("one")).wait()
    await root.set_agent(instructions="Be brief.")
    await (await root.submit("work")).wait()
    await root.write(Note(text="a note"))
    await root.reset("begin anew")
    await (await root.submit("two")).wait()
    await root.set_agent(instructions="Be long.")
    await (await root.submit("work")).wait()
    kept = (await told(root))[-3].id
    await root.write(Note(text="what was before"), head=kept)  # as a compaction: the context begins at an older entry
    await (await root.submit("three")).wait()
    return root


async def test_a_fork_at_any_entry_goes_on_from_there_k115_k118() -> None:
    model = ScriptedModel(script)
    async with opened(model, tools=(work,), instructions="host") as harness:
        root = await rich(harness)
        entries = await told(root)
        assert {entry.kind for entry in entries} >= {USER, ASSISTANT, SYSTEM, TOOL_RESULT, RESET, Note.kind}
        for number, entry in enumerate(entries):
            fork = await root.fork(entry.id)
            assert await told(fork) == entries[: number + 1]
            assert await fork.agent() == await root.agent(at=entry.id)
            assert (await (await fork.submit("go on")).answer()).text == "answer to go on"
            marker = next((e for e in reversed(entries[: number + 1]) if e.head is not None), None)
            begins = 0 if marker is None or marker.head is None else marker.head
            active = [e for e in entries[: number + 1] if e.id >= begins and e is not marker]
            shown = [text for e in active if e.kind != SYSTEM for text in words(e) if text]
            summary = [] if marker is None else [text for text in words(marker) if text]
            assert [text for text in sent(model) if text not in summary] == [*shown, "go on"]
            assert set(summary) <= set(sent(model))
        assert await told(root) == entries, "nobody's fork shows in the root"


def words(entry: EntryRecord) -> list[str]:
    return [message.text for message in decode_messages(entry.raw_messages)]


async def test_a_head_of_a_fork_reaches_into_what_it_inherited_k115() -> None:
    model = ScriptedModel(script)
    storage = MemoryStorage()
    async with opened(model, storage=storage) as harness:
        trunk = await harness.create_conversation()
        for text in ("one", "two", "three"):
            await (await trunk.submit(text)).wait()
        entries = await told(trunk)
        two = next(entry.id for entry in entries if words(entry) == ["two"])
        fork = await trunk.fork(entries[-1].id)
        await fork.write(Note(text="one, in short"), head=two)
        await (await fork.submit("four")).wait()
        expected = ["two", "answer to two", "three", "answer to three", "four"]
        assert [text for text in sent(model) if text != "one, in short"] == expected
        assert "one, in short" in sent(model)
        async with fork.view() as view:
            assert view.value.start == two
            assert view.value.entries[0].id == two
            assert view.value.entries[0].conversation_id == trunk.id
        later = await fork.fork((await told(fork))[-1].id)
        early = await fork.fork(two)
        with pytest.raises(NotFound):
            await early.write(Note(text="no"), head=entries[-1].id)
        await (await trunk.submit("five")).wait()
        assert "one" in sent(model), "the trunk has no head"
        await trunk.delete()
        ids = (fork.id, later.id, early.id)
    async with opened(model := ScriptedModel(script), storage=storage) as harness:
        fork, later, early = map(harness.handle, ids)
        for each in (fork, later):
            await (await each.submit("five")).wait()
            assert [text for text in sent(model) if text != "one, in short"] == [*expected, "answer to four", "five"]
        await (await early.submit("six")).wait()
        assert sent(model) == ["one", "answer to one", "two", "six"], "the marker came after it"
        await fork.delete()
        await (await later.submit("seven")).wait()
        assert sent(model)[-1] == "seven"
        assert "four" in sent(model)
        assert (await transcript(later))[:2] == ["user one", "assistant answer to one"]


async def chain(session: Session, depth: int) -> int:
    """Forks of forks, each with a note of its own; the last of them."""
    place = 1
    async with session.commit(conversation_id=place) as tx:
        at = tx.append(Note(text="note 0")).id
    for number in range(1, depth + 1):
        async with session.commit() as tx:
            place = (await tx.fork(place, at)).id
        async with session.commit(conversation_id=place) as tx:
            at = tx.append(Note(text=f"note {number}")).id
    return place


async def test_a_turn_a_thousand_forks_deep_asks_the_store_what_one_does_k117(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counting: what is read to open, to derive the context, to go on and to page, is the same but for one page."""
    counts: list[list[int]] = []
    reads = 0
    read = SqliteStorage._read

    async def counting(self, look):
        nonlocal reads
        reads += 1
        return await read(self, look)

    monkeypatch.setattr(SqliteStorage, "_read", counting)
    for depth in (1, 1000):
        path = tmp_path / f"{depth}.db"
        async with opened(ScriptedModel(script), storage=SqliteStorage(path, durability="process")) as harness:  # pyright: ignore[reportArgumentType]
            await harness.root()
            place = await chain(harness.session, depth)
        model = ScriptedModel(script)
        laps: list[int] = []
        reads = 0
        async with opened(model, storage=SqliteStorage(path, durability="process")) as harness:  # pyright: ignore[reportArgumentType]
            harness.resume()
            laps.append(reads)
            deep = harness.handle(place)
            await (await deep.submit("go on")).wait()
            laps.append(reads)
            assert len(model.requests[-1].messages) == depth + 2
            for _ in range(5):
                await (await deep.submit("and on")).wait()
            laps.append(reads)
            newest = await deep.entries(order="descending", limit=20)
            await deep.entries(first=newest[0].id)
            await deep.fork(newest[0].id)
            laps.append(reads)
        counts.append([after - before for before, after in zip([0, *laps[:-1]], laps, strict=True)])
    shallow, long = counts
    assert long[0] <= shallow[0] + 1, "open and resume"
    assert long[1] <= shallow[1] + 2, "the first turn: one more page of a thousand entries"
    assert (long[2], long[3]) == (shallow[2], shallow[3]), "turns, pages and a fork"
