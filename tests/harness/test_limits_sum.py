"""The session's sum, kept in memory, is what ``usage()`` would add up, whatever happens beside it (rule H248)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Hold, opened, rest

from perdure.harness import spent as spent_module
from perdure.harness.documents import DeletedUsage, UsageTotals
from perdure.harness.harness import Harness
from perdure.harness.limits import Limits
from perdure.harness.messages import Usage
from perdure.harness.spent import SessionSpent, Spent
from perdure.harness.tool import tool
from perdure.kernel.errors import ConversationOpen, SessionClosed
from perdure.kernel.session import Session
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say

FAR = Limits(turns=10**6)
"""A limit that makes the sum be known, and is never reached."""


@tool(replay="safe")
async def look() -> str:
    """Look."""
    await asyncio.sleep(0)
    return "seen"


def script(request):
    last = next((m.text for m in reversed(request.messages) if m.text), "")
    if last.startswith("tools"):
        return calls(call("look"), call("look"))
    if last.startswith("bad"):
        return fail("malformed", usage=Usage(input=3))
    return say(f"answer to {last}", usage=Usage(input=7, output=2, cache_read=1, cache_write=1))


def free(_model: str, _usage: Usage, /, *, at: int) -> Decimal | None:
    """What is known of some attempts only."""
    return Decimal(at % 5) / 1000 if at % 3 else None


async def added_up(harness: Harness) -> Spent:
    used = await harness.usage()
    tokens = used.tokens
    return Spent(
        cost_nano_usd=sum(totals.get("cost_nano_usd", 0) for totals in used.models.values()),
        unpriced=used.unpriced,
        tokens=tokens.input + tokens.output + tokens.cache_read + tokens.cache_write,
        turns=used.turns,
        tool_calls=sum(used["calls"] for used in used.tools.values()),
        run_ms=used.run_ms,
    )


def kept(harness: Harness) -> SessionSpent:
    return harness._host.limits._spent


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "tools", "bad", "create", "delete", "fork", "abort", "turn", "rest"]), st.integers(0, 5)
    ),
    max_size=16,
)


async def take(harness: Harness, model: ScriptedModel, step: str, which: int) -> None:
    all = await harness.conversations()
    conversation = harness.handle(all[which % len(all)].id)
    match step:
        case "say" | "tools" | "bad":
            await conversation.submit(step)
        case "create":
            await (await harness.create_conversation()).submit("say")
        case "delete" if conversation.id != 1:
            with suppress(ConversationOpen):
                await conversation.delete(abort=bool(which % 2))
        case "fork":
            for entry in (await conversation.entries())[-1:]:
                await (await conversation.fork(entry.id)).submit("say")
        case "abort":
            await conversation.abort()
        case "turn":
            for _ in range(which):
                await asyncio.sleep(0)
        case "rest":
            assert isinstance(model.pace, Hold)
            model.pace.release()
            await rest()
            model.pace = Hold(0, 1)
        case _:
            pass


@settings(max_examples=80, deadline=None)
@given(STEPS, STEPS, STEPS, st.sampled_from([1, 2, 500]))
def test_the_sum_in_memory_is_what_usage_adds_up_h248(
    before: list[Step], meanwhile: list[Step], after: list[Step], page: int
) -> None:
    """A life that leaves something behind; one in which the sum is read beside what goes on; then it is kept."""

    async def play() -> None:
        storage = MemoryStorage()
        model = ScriptedModel(script, pace=Hold(0, 1), price=free)
        async with opened(model, storage=storage, tools=(look,)) as harness:
            await harness.root()
            for step in before:
                await take(harness, model, *step)
        model = ScriptedModel(script, pace=Hold(0, 1), price=free)
        async with opened(model, storage=storage, tools=(look,), limits=FAR) as harness:
            loading = asyncio.ensure_future(kept(harness).load())
            for step in meanwhile:
                await take(harness, model, *step)
            await loading
            assert kept(harness)._sum == await added_up(harness)
            for step in after:
                await take(harness, model, *step)
            assert isinstance(model.pace, Hold)
            model.pace.release()
            await harness.idle()
            assert kept(harness)._sum == await added_up(harness)
            assert not kept(harness)._born

    known = spent_module.MAX_SCAN
    spent_module.MAX_SCAN = page
    try:
        asyncio.run(play())
    finally:
        spent_module.MAX_SCAN = known


@pytest.mark.parametrize("page", [1, 500])
@pytest.mark.parametrize("at", ["deleted ones", "the third"])
async def test_what_changes_while_the_sum_is_read_is_counted_once_h248(
    monkeypatch: pytest.MonkeyPatch, page: int, at: str
) -> None:
    """One that is counted already, the one that is being read, and ones that would be next are deleted or go on."""
    monkeypatch.setattr(spent_module, "MAX_SCAN", page)
    storage = MemoryStorage()
    async with opened(ScriptedModel(script), storage=storage) as harness:
        all = [await harness.create_conversation() for _ in range(5)]
        for conversation in all:
            await (await conversation.submit("say")).answer()
    async with opened(ScriptedModel(script), storage=storage) as harness:
        first, second, third, fourth, fifth = [harness.handle(conversation.id) for conversation in all]
        load_document = Session.load_document
        done: list[str] = []

        async def changing(self: Session, address, context=None):
            found = await load_document(self, address, context)
            here = (
                address.kind == DeletedUsage.definition.kind
                if at == "deleted ones"
                else address.kind == UsageTotals.definition.kind and address.scope_id == third.id
            )
            if here and not done:
                done.append("begun")
                await first.delete()
                await third.delete()
                await fourth.delete()
                await (await second.submit("say")).answer()
                await (await fifth.submit("say")).answer()
                born = await harness.create_conversation()
                await (await born.submit("say")).answer()
                gone = await harness.create_conversation()
                await (await gone.submit("say")).answer()
                await gone.delete()
            return found

        monkeypatch.setattr(Session, "load_document", changing)
        await kept(harness).load()
        assert done
        assert kept(harness)._sum == await added_up(harness)
        assert (await harness.usage()).turns == 9


async def test_whoever_waits_for_the_sum_reads_it_if_its_reader_is_cancelled_h248(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(script), storage=storage) as harness:
        await (await (await harness.root()).submit("say")).answer()
    async with opened(ScriptedModel(script), storage=storage) as harness:
        hold, begun = asyncio.Event(), asyncio.Event()
        conversations = Session.conversations

        async def held(self: Session, **more):
            begun.set()
            await hold.wait()
            return await conversations(self, **more)

        monkeypatch.setattr(Session, "conversations", held)
        one = asyncio.ensure_future(kept(harness).load())
        other = asyncio.ensure_future(kept(harness).load())
        await begun.wait()
        await rest()
        one.cancel()
        await rest()
        assert one.cancelled()
        assert not kept(harness).loaded
        hold.set()
        await other
        assert kept(harness)._sum == await added_up(harness)


async def test_a_reading_that_is_aborted_or_closed_leaves_the_input_to_the_next_life_h248(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(script), storage=storage, limits=FAR) as harness:
        root, begun = await harness.root(), asyncio.Event()
        with monkeypatch.context() as patch:

            async def never(self: Session, **more):
                begun.set()
                await asyncio.Event().wait()

            patch.setattr(Session, "conversations", never)
            aborted = await root.submit("say")
            await begun.wait()
            await root.abort()
            assert (await aborted.wait()).reason == "aborted"
            begun.clear()
            kept_for_later = await root.submit("say")
            await begun.wait()
            waiting = asyncio.ensure_future(kept_for_later.wait())
            await rest()
    with pytest.raises(SessionClosed):
        await waiting
    async with opened(ScriptedModel(script), storage=storage, limits=FAR) as harness:
        assert (await (await harness.submission(kept_for_later.id)).answer()).text == "answer to say"
