"""Views over heads that reach back, as compactions write them: windows, paging and exact frames (rules H147, H148)."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.doubles import ManualClock
from perdure.harness.conversation import Conversation
from perdure.harness.documents import Live
from perdure.harness.harness import Harness
from perdure.harness.view import ConversationView, advance, first_view
from perdure.harness.views import View
from perdure.kernel.entries import Entry
from perdure.kernel.json import JsonValue, same_json
from perdure.kernel.ops import apply
from perdure.kernel.records import EntryRecord
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, say


class Note(Entry, kind="test.note"):
    text: str


EMPTY: Any = {"live": {}, "inbox": {}, "agent": {}, "usage": {}, "meta": {}}


# --- the pure step -------------------------------------------------------------------------------------------------


def page_back(view: ConversationView, known: list[EntryRecord], limit: int) -> list[int]:
    """All of the active transcript, as a reader that pages back from the window finds it."""
    found = [entry.id for entry in view.entries]
    while found:
        page = [entry.id for entry in known if view.start <= entry.id < found[0]][-limit:]
        if not page:
            break
        found = page + found
    return found


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_window_and_pages_are_the_active_transcript_wherever_heads_point_h147(
    backs: list[int | None], window: int, limit: int
) -> None:
    """Before the window, before the range that was active, at itself: nothing is missed, nothing comes twice."""
    view = first_view(1, window=window, marker=None, entries=[], documents=EMPTY)
    known: list[EntryRecord] = []
    for id, back in enumerate(backs, 1):
        head = None if back is None else max(1, id - back)
        entry = EntryRecord(id=id, seq=id, created_at=0, conversation_id=1, kind="test.note", head=head)
        known.append(entry)
        before = view.to_json()
        view, ops = advance(view, [entry], [])
        assert same_json(apply(before, ops), view.to_json())
        heads = [entry.head for entry in known if entry.head is not None]
        active = [entry.id for entry in known if entry.id >= (heads[-1] if heads else 0)]
        assert len(view.entries) <= window
        assert [entry.id for entry in view.entries] == active[len(active) - len(view.entries) :]
        assert view.more == (len(view.entries) < len(active))
        assert page_back(view, known, limit) == active


# --- in a harness --------------------------------------------------------------------------------------------------


async def shown(view: View, limit: int) -> list[int]:
    found = [entry.id for entry in view.value.entries]
    while page := await view.before(found[0], limit=limit):
        found = [*(entry.id for entry in page), *found]
    return found


async def test_paging_back_over_a_compaction_ends_at_its_first_kept_entry_h147() -> None:
    async with Harness.open(MemoryStorage(), models=ScriptedModel(say("x")), clock=ManualClock()) as harness:
        root = await harness.root()
        for number in range(12):
            await root.write(Note(text=str(number)))
        ids = [entry.id for entry in await root.entries(limit=50)]
        async with root.view(window=3) as view:
            for kept, count in ((ids[4], 8), (ids[9], 3)):
                await root.write(Note(text="what was before, summed up"), head=kept)
                active = [entry.id for entry in await root.entries(first=kept, limit=50)]
                assert len(active) >= count
                assert await shown(view, 2) == active
                assert view.value.more == (len(active) > 3)
                assert await view.before(kept) == []
                async with root.view(window=3) as anew:
                    assert same_json(anew.value.to_json(), view.value.to_json())


Step = tuple[Literal["note", "head", "begin", "retry", "fail", "place", "token"], int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["note", "head", "begin", "retry", "fail", "place", "token"]), st.integers(0, 7)),
    min_size=1,
    max_size=25,
)


async def step(root: Conversation, what: Step) -> None:
    """One commit, as a compaction beside a run makes them."""
    action, n = what
    entries = [entry.id for entry in await root.entries(limit=1000)]
    async with root.commit() as tx:
        live = await tx.draft(Live)
        key = str(100 + n % 3)
        match action:
            case "note":
                for number in range(n % 3 + 1):
                    tx.append(Note(text=str(number)))
            case "head":
                tx.append(Note(text="head"), head=entries[-1 - n % len(entries)] if entries else "self")
            case "begin":
                live.compactions[key] = {
                    "reason": "background",
                    "started_at": tx.at,
                    "attempt": 1,
                    "until": None,
                    "code": None,
                    "message": None,
                }
            case "retry" if key in live.compactions:
                live.compactions[key]["attempt"] += 1
                live.compactions[key]["until"], live.compactions[key]["code"] = tx.at + n, "overloaded"
            case "fail" if key in live.compactions:
                reason = live.compactions.pop(key)["reason"]
                live.compaction_failure = {
                    "task": int(key),
                    "reason": reason,
                    "at": tx.at,
                    "code": "deadline",
                    "message": "late",
                    "run": None,
                }
            case "place" if key in live.compactions and entries:
                del live.compactions[key]
                live.compaction_failure = None
                tx.append(Note(text="summary"), head=entries[-1 - n % len(entries)])
            case "token":
                if live.message is None:
                    live.message = {"task": 9, "model": "m", "attempt": 1, "content": []}
                    live.message["content"].append({"type": "text", "text": "", "id": "", "name": ""})
                live.message["content"][0]["text"] += "ab𝄞"[: n % 4]
            case _:
                tx.append(Note(text="else"))


@settings(deadline=None)
@given(STEPS, st.integers(1, 6))
def test_frames_are_exact_with_compactions_on_their_way_h148(steps: list[Step], window: int) -> None:
    """The operations of each frame lead from the JSON before to the JSON after; who looks anew sees no less."""

    async def play() -> None:
        async with Harness.open(MemoryStorage(), models=ScriptedModel(say("x")), clock=ManualClock()) as harness:
            root = await harness.root()
            async with root.watch(window=window) as watch, root.view(window=window) as view:
                frame = await anext(watch)
                json: JsonValue = frame.value.to_json()
                for what in steps:
                    seq = view.seq
                    await step(root, what)
                    if view.seq == seq:
                        continue  # it changed nothing that is shown
                    frame = await anext(watch)
                    assert frame.ops is not None
                    json = apply(json, frame.ops)
                    assert same_json(json, frame.value.to_json())
                    assert set(frame.value.live.compactions) == set(json["live"]["compactions"])  # pyright: ignore
                    assert frame.value.compacting == bool(frame.value.live.compactions)
                entries = await shown(view, 2) if view.value.entries else []
                if entries:
                    assert entries == [e.id for e in await root.entries(first=view.value.start, limit=1000)]

    asyncio.run(play())
