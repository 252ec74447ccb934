"""Paging through all history by cursor, while it grows and is forked (rules K230, H154)."""

from __future__ import annotations

import asyncio
import random

import pytest
from kit import Note, opened

from perdure.harness.conversation import Conversation
from perdure.kernel.errors import InvalidRead
from perdure.testing.model import ScriptedModel, say


async def backwards(conversation: Conversation, limit: int, *, before: int | None = None) -> list[int]:
    """All before an entry, asked for page by page, as a client does that scrolls up."""
    found: list[int] = []
    while True:
        last = before - 1 if before is not None else None
        page = await conversation.entries(last=last, order="descending", limit=limit)
        await asyncio.sleep(0)  # others go on between two pages; reads of memory do not wait
        assert len(page) <= limit
        found += [entry.id for entry in page]
        if len(page) < limit:
            return found[::-1]
        before = page[-1].id


async def forwards(conversation: Conversation, limit: int, *, after: int = 0) -> list[int]:
    found: list[int] = []
    while page := await conversation.entries(first=after + 1, limit=limit):
        await asyncio.sleep(0)
        assert len(page) <= limit
        found += [entry.id for entry in page]
        after = page[-1].id
    return found


async def long(conversation: Conversation, count: int) -> None:
    """Turns and notes, with resets and heads into what is older."""
    for number in range(count):
        await (await conversation.submit(f"say {number}")).wait()
        if number % 7 == 3:
            await conversation.reset("begin anew")
        if number % 7 == 5:
            newest = await conversation.entries(order="descending", limit=3)
            await conversation.write(Note(text="in short"), head=newest[-1].id)


async def test_pages_reach_back_past_every_reset_and_head_k230() -> None:
    async with opened(ScriptedModel(lambda _: say("yes"))) as harness:
        root = await harness.root()
        await long(root, 20)
        everything = [entry.id for entry in await root.entries(limit=1000)]
        assert everything == sorted(set(everything))
        async with root.view() as view:
            assert view.value.start > everything[0], "the model's context begins later"
            assert view.value.entries[0].id > everything[0]
        for limit in (1, 7, len(everything), 1000):
            assert await backwards(root, limit) == everything
            assert await forwards(root, limit) == everything
        for limit in (0, 1001, -1):
            with pytest.raises(InvalidRead, match="1 to 1000"):
                await root.entries(limit=limit)
        assert await root.entries(first=everything[-1] + 1) == []
        assert await root.entries(last=0) == []


async def test_pages_stand_while_entries_are_appended_and_conversations_forked_k230() -> None:
    async with opened(ScriptedModel(lambda _: say("yes"))) as harness:
        root = await harness.root()
        await long(root, 10)
        begun = [entry.id for entry in await root.entries(limit=1000)]
        fork = await root.fork(begun[12])
        chance = random.Random(5)
        done = asyncio.Event()

        async def grow() -> None:
            for _ in range(15):
                await (await root.submit("more")).wait()
                if chance.random() < 0.3:
                    await root.fork(chance.choice(begun))
                await fork.write(Note(text="of the fork"))
            done.set()

        async def scroll() -> int:
            looks = 0
            while not done.is_set():
                assert await backwards(root, chance.randrange(1, 9), before=begun[-1] + 1) == begun
                assert (await backwards(fork, 3))[:13] == begun[:13]
                looks += 1
            return looks

        async def follow() -> list[int]:
            """One cursor, that goes on where it was."""
            seen: list[int] = []
            while True:
                ended = done.is_set()
                seen += await forwards(root, 2, after=seen[-1] if seen else 0)
                if ended:
                    return seen
                await asyncio.sleep(0)

        _, looks, seen = await asyncio.gather(grow(), scroll(), follow())
        assert looks >= 2
        assert seen == [entry.id for entry in await root.entries(limit=1000)], "nothing twice, nothing missed"
        assert len(seen) == len(begun) + 30
        own = [entry for entry in await fork.entries(limit=1000) if entry.conversation_id == fork.id]
        assert len(own) == 15
        assert await forwards(fork, 4, after=begun[12]) == [entry.id for entry in own]


async def test_conversations_are_paged_while_they_come_and_go_h154() -> None:
    async with opened() as harness:
        await harness.root()
        made = [await harness.create_conversation() for _ in range(25)]
        first = await harness.conversations(limit=10)
        await made[3].delete()
        await made[20].delete()
        new = await harness.create_conversation()
        found = [info.id for info in first]
        while page := await harness.conversations(after=found[-1], limit=10):
            found += [info.id for info in page]
        assert found == [1, *(c.id for c in made if c is not made[20]), new.id]
