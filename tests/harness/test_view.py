"""Views of a conversation (rules H147, H148 and K121 to K127): the window, exact frames, slow and late consumers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.doubles import ManualClock, settle
from perdure.harness.conversation import Conversation
from perdure.harness.documents import Live, Meta
from perdure.harness.harness import Harness
from perdure.harness.room import LINGER_S
from perdure.harness.view import ConversationView, advance, first_view, head_of
from perdure.kernel.entries import Entry
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue, same_json
from perdure.kernel.observation import WatchEnded
from perdure.kernel.ops import apply
from perdure.kernel.records import EntryRecord
from perdure.kernel.reports import Report
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, say


class Note(Entry, kind="test.note"):
    text: str


class Bench:
    def __init__(self, harness: Harness, root: Conversation, reports: list[Report]) -> None:
        self.harness = harness
        self.root = root
        self.reports = reports

    async def note(self, text: str, *, head: int | Literal["self"] | None = None) -> int:
        async with self.root.commit() as tx:
            return tx.append(Note(text=text), head=head).id

    async def notes(self, count: int) -> list[int]:
        return [await self.note(str(number)) for number in range(count)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    reports: list[Report] = []
    model = ScriptedModel(say("Hello."))
    async with Harness.open(MemoryStorage(), models=model, clock=ManualClock(), on_report=reports.append) as harness:
        yield Bench(harness, await harness.root(), reports)


def texts(view: ConversationView) -> list[JsonValue]:
    return [entry.data["text"] for entry in view.entries if entry.kind == "test.note"]  # pyright: ignore


# --- the view -----------------------------------------------------------------------------------------------------


async def test_a_view_shows_transcript_and_documents_and_is_kept_up(bench: Bench) -> None:
    await bench.note("first")
    async with bench.root.view() as view:
        before = view.value
        assert texts(before) == ["first"]
        assert not before.busy
        assert (before.agent.thinking, before.meta.name, before.inbox.items) == ("off", None, [])
        await bench.root.set_name("mine")
        await bench.note("second")
        assert view.value.meta.name == "mine"
        assert texts(view.value) == ["first", "second"]
        assert view.seq == bench.harness.session.seq
        assert texts(before) == ["first"], "a view that was read does not change"
        submission = await bench.root.submit("Hi")
        assert view.value.busy, "busy from the commit that admits the input (rule H16)"
        await submission.answer()
        assert not view.value.busy
        assert [entry.kind for entry in view.value.entries][2:] == ["pi.user", "pi.assistant"]
        assert view.value.usage.models["test:scripted"]["requests"] == 1


async def test_looking_starts_nothing(bench: Bench) -> None:
    bench.harness.tasks.resume = lambda: pytest.fail("a reader started the scheduler")
    async with bench.root.view() as view, bench.root.watch(), bench.root.events():
        await view.before(10)


async def test_a_window_shows_the_newest_and_pages_back(bench: Bench) -> None:
    ids = await bench.notes(7)
    async with bench.root.view(window=3) as view:
        assert [entry.id for entry in view.value.entries] == ids[4:]
        assert view.value.more
        assert [entry.id for entry in await view.before(ids[4], limit=2)] == ids[2:4]
        assert [entry.id for entry in await view.before(ids[2])] == ids[:2]
        assert await view.before(ids[0]) == []
        newest = await bench.note("newest")
        assert [entry.id for entry in view.value.entries] == [*ids[5:], newest]
        with pytest.raises(ValueError, match="a page has"):
            await view.before(newest, limit=0)
    with pytest.raises(ValueError, match="a window has"):
        async with bench.root.view(window=0):
            pass


async def test_the_transcript_begins_at_the_newest_head(bench: Bench) -> None:
    ids = await bench.notes(4)
    async with bench.root.view() as view:
        marker = await bench.note("kept from 2 on", head=ids[2])
        assert [entry.id for entry in view.value.entries] == [ids[2], ids[3], marker]
        assert not view.value.more
        assert await view.before(ids[2]) == []
        async with bench.root.view(window=2) as small:
            assert [entry.id for entry in small.value.entries] == [ids[3], marker]
            assert [entry.id for entry in await small.before(ids[3])] == [ids[2]]
        reset = await bench.note("anew", head="self")
        assert [entry.id for entry in view.value.entries] == [reset]
        assert not view.value.more
    async with bench.root.view() as view:
        assert [entry.id for entry in view.value.entries] == [reset]


async def test_a_head_that_reaches_back_tells_that_there_is_more_before_the_window(bench: Bench) -> None:
    ids = await bench.notes(2)
    reset = await bench.note("anew", head="self")
    async with bench.root.view() as view:
        back = await bench.note("back to 1", head=ids[1])
        assert [entry.id for entry in view.value.entries] == [reset, back]
        assert view.value.more
        assert [entry.id for entry in await view.before(reset)] == [ids[1]]


async def test_a_fork_shows_its_inherited_entries(bench: Bench) -> None:
    ids = await bench.notes(3)
    fork = await bench.root.fork(ids[1])
    await bench.note("only in the parent")
    async with fork.view() as view:
        assert texts(view.value) == ["0", "1"]
        await bench.note("neither")
        async with fork.commit() as tx:
            tx.append(Note(text="mine"))
        assert texts(view.value) == ["0", "1", "mine"]


async def test_an_unknown_conversation_has_no_view(bench: Bench) -> None:
    with pytest.raises(NotFound):
        async with bench.harness.handle(999).view():
            pass


async def test_a_store_open_for_reading_can_be_looked_at(bench: Bench) -> None:
    await bench.note("kept")
    storage = bench.harness.session.storage
    assert isinstance(storage, MemoryStorage)
    async with (
        Harness.open(storage.snapshot(), read_only=True) as harness,
        harness.handle(1).view() as view,
    ):
        assert texts(view.value) == ["kept"]


# --- frames -------------------------------------------------------------------------------------------------------


async def test_frames_are_exact_and_in_commit_order(bench: Bench) -> None:
    async with bench.root.watch(window=3) as watch:
        first = await anext(watch)
        assert first.ops is None
        json: JsonValue = first.value.to_json()
        await bench.notes(5)
        await bench.note("anew", head="self")
        await (await bench.root.submit("Hi")).answer()
        await bench.root.set_name("mine")
        seqs = [first.seq]
        while True:
            frame = await anext(watch)
            assert frame.ops
            json = apply(json, frame.ops)
            assert same_json(json, frame.value.to_json())
            seqs.append(frame.seq)
            if frame.value.meta.name == "mine":
                break
        assert seqs == sorted(set(seqs))


async def test_a_streamed_token_costs_the_token(bench: Bench) -> None:
    async with bench.root.commit() as tx:
        live = await tx.draft(Live)
        live.message = {
            "task": 5,
            "model": "m",
            "attempt": 1,
            "content": [{"type": "text", "text": "x" * 10_000, "id": "", "name": ""}],
        }
    async with bench.root.watch() as watch:
        await anext(watch)
        async with bench.root.commit() as tx:
            live = await tx.draft(Live)
            assert live.message is not None
            live.message["content"][0]["text"] += "y"
        frame = await anext(watch)
        assert frame.ops is not None
        (op,) = frame.ops
        assert op.path == ("live", "message", "content", 0, "text")
        assert op.text == "y"  # pyright: ignore[reportAttributeAccessIssue,reportUnknownMemberType]


async def test_frames_carry_the_values_of_the_commit(bench: Bench) -> None:
    from perdure.kernel.context import Context

    async with bench.root.watch() as watch:
        await anext(watch)
        async with bench.root.commit(context=Context(values={"trace": "abc"})) as tx:
            tx.append(Note(text="x"))
        assert (await anext(watch)).values["trace"] == "abc"


async def test_a_late_consumer_begins_at_the_present(bench: Bench) -> None:
    await bench.notes(3)
    async with bench.root.watch() as early:
        await bench.note("between")
        async with bench.root.watch() as late:
            frame = await anext(late)
            assert frame.ops is None
            assert texts(frame.value) == ["0", "1", "2", "between"]
        assert texts((await anext(early)).value) == ["0", "1", "2"]
        assert texts((await anext(early)).value) == ["0", "1", "2", "between"]


async def test_a_slow_consumer_gets_one_frame_with_the_newest_value(bench: Bench) -> None:
    async with bench.root.watch() as watch:
        await bench.notes(150)
        frames = [await anext(watch)]
        while frames[-1].seq < bench.harness.session.seq:
            frames.append(await anext(watch))
        assert len(frames) <= 101
        assert frames[0].ops is None
        replaced = [frame for frame in frames if frame.ops is None]
        assert len(replaced[-1].value.entries) == 100
        json: JsonValue = replaced[-1].value.to_json()
        for frame in frames[frames.index(replaced[-1]) + 1 :]:
            assert frame.ops
            json = apply(json, frame.ops)
        assert same_json(json, frames[-1].value.to_json())
        assert len(frames[-1].value.entries) == 150


async def test_observers_share_one_computed_frame(bench: Bench) -> None:
    async with bench.root.watch() as one, bench.root.watch() as two, bench.root.view() as view:
        await bench.note("x")
        await anext(one)
        await anext(two)
        a, b = await anext(one), await anext(two)
        assert view.value is a.value is b.value
        a.value.live.tools["x"] = b.value.live.tools.get("x")  # pyright: ignore[reportArgumentType]
        a.value.to_json().clear()
        assert not b.value.live.tools
        assert not view.value.live.tools


async def test_commits_of_others_cost_no_frame(bench: Bench) -> None:
    other = await bench.harness.create_conversation()
    async with bench.root.watch() as watch:
        await anext(watch)
        async with other.commit() as tx:
            tx.append(Note(text="elsewhere"))
        await bench.note("here")
        assert texts((await anext(watch)).value) == ["here"]


# --- attaching and leaving ----------------------------------------------------------------------------------------


async def test_nothing_is_missed_and_nothing_twice_while_a_view_is_loaded(bench: Bench) -> None:
    await bench.notes(3)
    stop = False
    written: list[str] = []

    async def write() -> None:
        number = 0
        while not stop:
            number += 1
            written.append(f"w{number}")
            await bench.note(f"w{number}", head="self" if number % 7 == 0 else None)
            await bench.root.set_name(f"n{number}")

    writing = asyncio.ensure_future(write())
    for _ in range(20):
        async with bench.root.watch() as watch:
            frame = await anext(watch)
            json: JsonValue = frame.value.to_json()
            ids = [entry.id for entry in frame.value.entries]
            assert ids == sorted(set(ids))
            for _ in range(5):
                frame = await anext(watch)
                assert frame.ops
                json = apply(json, frame.ops)
                assert same_json(json, frame.value.to_json())
        await settle()
    stop = True
    await writing
    async with bench.root.view() as view:
        assert written[-1] in texts(view.value)
        meta = await bench.harness.session.snapshot(Meta, conversation=1)
        assert meta is not None
        assert view.value.meta.name == meta.name


async def test_two_that_load_at_once_share_the_view(bench: Bench) -> None:
    await bench.notes(3)

    async def look() -> ConversationView:
        async with bench.root.view() as view:
            await bench.note("while both look")
            await settle()
            return view.value

    one, two = await asyncio.gather(look(), look())
    assert texts(one)[-1] == texts(two)[-1] == "while both look"
    assert not bench.harness.views._rooms
    assert not bench.harness.views._loading


async def test_what_is_released_is_forgotten_and_ends_quietly(bench: Bench) -> None:
    async with bench.root.view():
        pass
    assert not bench.harness.views._rooms
    async with bench.root.watch() as watch:
        await anext(watch)
    clock = bench.harness.session.clock
    assert isinstance(clock, ManualClock)
    await clock.advance(LINGER_S + 1)
    await bench.root.set_name("the next commit")
    assert not bench.harness.views._rooms, "a minute later a commit costs nothing more (rule H261)"
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    await bench.note("x")


async def test_unreleased_observers_are_named_and_end_with_the_session(bench: Bench) -> None:
    manager = bench.root.watch()
    watch = await manager.__aenter__()
    view = await bench.root.view().__aenter__()
    await anext(watch)
    report = await bench.harness.close()
    assert sorted(report.unreleased) == ["view of conversation 1", "watch of conversation 1"]
    with pytest.raises(WatchEnded, match="session_closed"):
        await anext(watch)
    assert view.ended == "session_closed"
    assert texts(view.value) == []


async def test_a_consumer_that_raises_ends_its_own_watch_only(bench: Bench) -> None:
    async with bench.root.watch() as one, bench.root.watch() as two:

        def listener(frame: object) -> None:
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await one.each(listener)
        assert one.ended == "listener_error"
        await bench.note("x")
        await anext(two)
        assert texts((await anext(two)).value) == ["x"]


# --- the pure step ------------------------------------------------------------------------------------------------


def record(id: int, head: int | None) -> EntryRecord:
    return EntryRecord(id=id, seq=id, created_at=0, conversation_id=1, kind="test.note", head=head)


def empty(window: int) -> ConversationView:
    documents: dict[object, JsonValue] = {"live": {}, "inbox": {}, "agent": {}, "usage": {}, "meta": {}}
    return first_view(1, window=window, marker=None, entries=[], documents=documents)  # pyright: ignore


def test_views_share_their_entries_and_keep_a_bounded_number_of_them() -> None:
    view, kept = empty(10), []
    for number in range(1, 1_001):
        view, _ = advance(view, [record(number, None)], [])
        kept.append(view)
        assert len(view._log) <= 21, "what is past is let go of"
    logs = {id(view._log) for view in kept}
    assert len(logs) <= 1_000 / 10, "one list for as many views as it shows entries"
    for at, view in enumerate(kept, 1):
        assert [entry.id for entry in view.entries] == list(range(max(1, at - 9), at + 1))


def test_a_view_from_which_two_go_on_is_neither() -> None:
    view, _ = advance(empty(3), [record(1, None)], [])
    one, _ = advance(view, [record(2, None)], [])
    other, _ = advance(view, [record(3, None)], [])
    assert [[entry.id for entry in each.entries] for each in (view, one, other)] == [[1], [1, 2], [1, 3]]


@given(st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=40), st.integers(1, 5), st.integers(0, 40))
def test_stepping_gives_what_reading_anew_gives(backs: list[int | None], window: int, split: int) -> None:
    """However much was there when the view was made, it ends as the same view."""
    documents: dict[object, JsonValue] = {"live": {}, "inbox": {}, "agent": {}, "usage": {}, "meta": {}}
    entries: list[EntryRecord] = []
    start = 0
    for id, back in enumerate(backs, 1):
        head = None if back is None else max(start, id - back)
        start = start if head is None else head
        entries.append(record(id, head))

    def read(known: list[EntryRecord]) -> ConversationView:
        marker = next((entry for entry in reversed(known) if entry.head is not None), None)
        begin = head_of(marker)
        active = [entry for entry in known if entry.id >= begin]
        return first_view(
            1,
            window=window,
            marker=marker,
            entries=active[-window - 1 :],
            documents=documents,  # pyright: ignore
        )

    view = read(entries[:split])
    for entry in entries[split:]:
        before = view.to_json()
        view, ops = advance(view, [entry], [])
        assert same_json(apply(before, ops), view.to_json())
    expected = read(entries)
    assert view.entries == expected.entries
    assert view.start == expected.start
    assert same_json(view.to_json(), expected.to_json())
