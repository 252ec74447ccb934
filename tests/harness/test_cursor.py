"""Cursors: a client that comes back goes on where it was (rules H260 to H266)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import Hold

from harness.doubles import ManualClock, settle
from perdure.harness.conversation import Conversation
from perdure.harness.cursor import ALL, Cursor, CursorError, log_mark
from perdure.harness.events import (
    Blocked,
    EntryAppended,
    Event,
    Events,
    InboxChanged,
    MessageDelta,
    MessageEnd,
    MessageStart,
    Resumed,
    RunEnd,
    Snapshot,
    Unblocked,
)
from perdure.harness.harness import Harness
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.harness.room import LINGER_S
from perdure.harness.views import MOST_LINGERING
from perdure.kernel.entries import Entry
from perdure.kernel.json import JsonValue, same_json
from perdure.kernel.observation import MAX_PENDING
from perdure.kernel.ops import apply
from perdure.kernel.records import EntryRecord
from perdure.kernel.session import Session
from perdure.kernel.storage import Storage
from perdure.storage.memory import MemoryStorage
from perdure.storage.sqlite import SqliteStorage
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.testing.model import ScriptedModel, call, fail, say

STORY = "one two three four five six seven eight"


class Note(Entry, kind="test.note"):
    text: str


class Job(Task[int, None], kind="test.job"):
    async def start(self, run: Run[int, None, None]) -> Next[None]:
        async with run.commit() as tx:
            return tx.complete(None)


@asynccontextmanager
async def opened(
    model: ScriptedModel | None = None, storage: Storage | None = None, clock: ManualClock | None = None
) -> AsyncIterator[tuple[Harness, Conversation, ManualClock]]:
    clock = clock or ManualClock()
    async with Harness.open(
        storage or MemoryStorage(), models=model or ScriptedModel(say("Hello.")), clock=clock
    ) as harness:
        yield harness, await harness.root(), clock


async def note(root: Conversation, *texts: str) -> None:
    """All of them in one commit."""
    async with root.commit() as tx:
        for text in texts:
            tx.append(Note(text=text))


async def take(root: Conversation, after: str | None, most: int, until: type[Event] | None = None) -> list[Event]:
    """What a client is told that comes with this cursor, up to ``most`` events, and leaves again."""
    found: list[Event] = []
    async with root.events(after=after) as events, asyncio.timeout(60):
        while len(found) < most and not (until is not None and found and isinstance(found[-1], until)):
            found.append(await anext(events))
    return found


async def nothing_comes(events: Events) -> None:
    waiting = asyncio.ensure_future(anext(events))
    await settle()
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def shown(view: JsonValue) -> str:
    """The text of the partial answer in a snapshot."""
    message = view["live"]["message"]  # pyright: ignore
    return "".join(part["text"] for part in message["content"]) if message else ""  # pyright: ignore


# --- the text --------------------------------------------------------------------------------------------------


NUMBERS = st.integers(0, 2**63 - 1)


CURSORS = st.builds(
    Cursor,
    kind=st.sampled_from(["events", "view"]),
    log=st.binary(min_size=7, max_size=7),
    stream=st.binary(min_size=8, max_size=8),
    conversation=NUMBERS,
    seq=NUMBERS,
    number=st.integers(0, ALL),
    index=st.integers(0, ALL),
    whole=st.booleans(),
    quiet=st.booleans(),
    running=st.booleans(),
)


@given(CURSORS)
def test_a_cursor_is_a_short_text_that_comes_back_h260(cursor: Cursor) -> None:
    text = cursor.encode()
    assert Cursor.decode(text) == cursor
    assert len(text) == 60
    assert text.replace("-", "").replace("_", "").isalnum(), "it can stand in a URL and in a header"


@given(st.integers(0, 59), st.characters())
def test_a_damaged_cursor_is_an_error_h264(at: int, char: str) -> None:
    text = Cursor(kind="events", log=b"1234567", stream=b"12345678", conversation=1, seq=2, number=3).encode()
    broken = text[:at] + char + text[at + 1 :]
    for wrong in (text[:at], text + char, "", "x" * 10_000, *([broken] if broken != text else [])):
        with pytest.raises(CursorError, match="start without a cursor") as caught:
            Cursor.decode(wrong)
        assert caught.value.fault == "damaged"


def test_a_cursor_of_another_version_says_so_h264() -> None:
    import base64
    import binascii

    body = bytes([9]) + b"whatever a later release puts there"
    text = base64.urlsafe_b64encode(body + binascii.crc32(body).to_bytes(4)).decode()
    with pytest.raises(CursorError, match="another release") as caught:
        Cursor.decode(text)
    assert caught.value.fault == "version"
    with pytest.raises(TypeError):
        Cursor.decode(7)  # pyright: ignore


async def test_cursors_from_elsewhere_are_errors_that_say_why_h264() -> None:
    async with opened() as (harness, root, _):
        await note(root, "a")
        (first,) = await take(root, None, 1)
        other = await harness.create_conversation()
        with pytest.raises(CursorError, match="another conversation"):
            await take(other, first.cursor, 1)
        with pytest.raises(CursorError, match=r"not one of watch\(\)"):
            async with root.watch(after=first.cursor):
                pass
        async with opened() as (_, elsewhere, _):
            with pytest.raises(CursorError, match="another store"):
                await take(elsewhere, first.cursor, 1)
        past = harness.session.storage
        assert isinstance(past, MemoryStorage)
        copy = past.snapshot()
        await note(root, "b")
        async with root.events() as events:
            ahead = (await anext(events)).cursor
    async with opened(storage=copy) as (_, root, _):
        with pytest.raises(CursorError, match="ahead of the store") as caught:
            await take(root, ahead, 1)
        assert caught.value.fault == "ahead"
        assert not root._harness.views._rooms, "a refused cursor leaves nothing behind"


# --- going on --------------------------------------------------------------------------------------------------


async def test_a_client_that_comes_back_after_every_event_is_told_all_once_h261() -> None:
    """Batches of several events too: a cursor is behind its very event."""
    hold = Hold(3)
    async with opened(ScriptedModel([call("nope"), say(STORY, chunk=4)], pace=hold)) as (_, root, clock):
        async with root.events() as whole:
            first = await anext(whole)
            submission = await root.submit("Go")
            await settle()
            told: list[Event] = []
            cursor = first.cursor
            hold.release()
            while not (told and isinstance(told[-1], RunEnd)):
                await clock.advance(0.2)
                (event,) = await take(root, cursor, 1)
                told.append(event)
                cursor = event.cursor
            assert (await submission.answer()).text == STORY
            expected = [await anext(whole) for _ in told]
        assert not any(isinstance(event, Snapshot) for event in told)
        assert told == expected
        assert len({event.cursor for event in told}) == len(told)


async def test_a_client_that_stays_away_too_long_gets_a_snapshot_that_says_so_h262() -> None:
    async with opened() as (harness, root, _):
        (first,) = await take(root, None, 1)
        assert isinstance(first, Snapshot)
        assert first.reason == "start"
        for number in range(MAX_PENDING):
            await note(root, str(number))
        found = await take(root, first.cursor, MAX_PENDING)
        assert [Note.read(event.entry).text for event in found if isinstance(event, EntryAppended)] == [
            str(number) for number in range(MAX_PENDING)
        ]
        await note(root, "one more")
        (again,) = await take(root, first.cursor, 1)
        assert isinstance(again, Snapshot)
        assert (again.reason, again.seq) == ("cursor", harness.session.seq)
        assert len(again.view["entries"]) == MAX_PENDING + 1  # pyright: ignore


async def test_what_was_told_is_kept_for_a_minute_h261() -> None:
    async with opened() as (_, root, clock):
        (first,) = await take(root, None, 1)
        await clock.advance(LINGER_S - 1)
        await note(root, "in time")
        (event,) = await take(root, first.cursor, 1)
        assert isinstance(event, EntryAppended)
        await clock.advance(LINGER_S + 1)
        await note(root, "too late")
        (event,) = await take(root, event.cursor, 1)
        assert isinstance(event, Snapshot)
        assert event.reason == "cursor"


async def test_a_bounded_number_of_conversations_is_kept_h261() -> None:
    async with opened() as (harness, root, _):
        (first,) = await take(root, None, 1)
        for _ in range(MOST_LINGERING):
            await take(await harness.create_conversation(), None, 1)
        assert len(harness.views._rooms) == len(harness.views._lingering) == MOST_LINGERING
        assert root.id not in harness.views._rooms, "the one that was left first went"
        (event,) = await take(root, first.cursor, 1)
        assert isinstance(event, Snapshot)


async def test_a_conversation_in_which_nothing_happened_needs_no_snapshot_h263() -> None:
    """Its events are no longer kept, or were made through another window."""
    async with opened() as (_, root, clock):
        await (await root.submit("Hi")).answer()
        (first,) = await take(root, None, 1)
        for window in (200, 7):
            await clock.advance(LINGER_S + 1)
            async with root.events(after=first.cursor, window=window) as events:
                assert events.cursor == first.cursor
                await nothing_comes(events)
                await note(root, f"news {window}")
                event = await anext(events)
                assert isinstance(event, EntryAppended)
            first = event


async def test_a_slow_client_that_came_with_a_cursor_gets_a_fresh_snapshot_h151() -> None:
    async with opened() as (_, root, _):
        (first,) = await take(root, None, 1)
        async with root.events(after=first.cursor) as events:
            for number in range(150):
                await note(root, str(number))
            fresh = await anext(events)
            assert isinstance(fresh, Snapshot)
            assert fresh.reason == "behind"
            await note(root, "and on")
            (event,) = await take(root, fresh.cursor, 1)
            assert event == await anext(events)


async def test_the_rest_of_a_batch_comes_in_the_middle_of_it_h261() -> None:
    async with opened() as (_, root, _):
        (first,) = await take(root, None, 1)
        await note(root, "a", "b", "c")
        a, b = await take(root, first.cursor, 2)
        (c,) = await take(root, b.cursor, 1)
        assert [Note.read(event.entry).text for event in (a, b, c) if isinstance(event, EntryAppended)] == list("abc")
        async with root.events(after=c.cursor) as events:
            await nothing_comes(events)


async def test_a_batch_of_which_a_part_is_missing_is_no_end_h263() -> None:
    """The store is opened anew at the same commit, but the client has not got all of it."""
    storage = MemoryStorage()
    async with opened(storage=storage) as (_, root, _):
        (first,) = await take(root, None, 1)
        await note(root, "a", "b")
        a, b = await take(root, first.cursor, 2)
    async with opened(storage=storage) as (_, root, _):
        (event,) = await take(root, a.cursor, 1)
        assert isinstance(event, Snapshot)
        async with root.events(after=b.cursor) as events:
            await nothing_comes(events)


def added(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, MessageDelta))


def answer(event: Event) -> AssistantMessage:
    assert isinstance(event, MessageEnd)
    assert event.entry is not None
    (message,) = decode_messages(event.entry.raw_messages)
    assert isinstance(message, AssistantMessage)
    return message


@pytest.mark.parametrize("at_hand", [True, False])
async def test_text_is_not_doubled_on_reconnect_in_the_middle_of_a_message_h261_h262(at_hand: bool) -> None:
    """With what followed at hand, and without: then the snapshot has the text so far, and deltas add to that."""
    first, second = Hold(4), Hold(6)

    async def pace(request, number: int) -> None:
        await first(request, number)
        await second(request, number)

    async with opened(ScriptedModel(say(STORY, chunk=4), pace=pace)) as (_, root, clock), root.events() as events:
        await anext(events)
        await root.submit("Tell")
        await clock.advance(0.2)
        text = ""
        while not text:
            text += added([await anext(events)])
        cursor = events.cursor
        first.release()
        await clock.advance(0.2)
        async with root.events(after=cursor, window=200 if at_hand else 50) as again:
            event = await anext(again)
            if at_hand:
                text += added([event])
            else:
                assert isinstance(event, Snapshot)
                assert event.busy
                assert event.running
                text = shown(event.view)
            seen = text
            assert STORY.startswith(text)
            second.release()
            await clock.advance(0.2)
            while not isinstance(event, MessageEnd):
                event = await anext(again)
                assert not isinstance(event, MessageStart)
                text += added([event])
        assert STORY.startswith(text)
        assert len(text) >= len(seen) > 0
        assert answer(event).text == STORY


async def test_a_client_that_attaches_before_the_first_token_and_comes_back_sees_it_h261() -> None:
    hold = Hold()
    async with opened(ScriptedModel(say("Hi."), pace=hold)) as (_, root, _):
        await root.submit("Hi")
        (first,) = await take(root, None, 1)
        assert isinstance(first, Snapshot)
        assert first.busy
        hold.release()
        found = await take(root, first.cursor, 100, RunEnd)
        assert not any(isinstance(event, Snapshot) for event in found)
        assert [answer(event).text for event in found if isinstance(event, MessageEnd)] == ["Hi."]


# --- over a restart ----------------------------------------------------------------------------------------------


async def test_a_cursor_outlives_the_process_where_nothing_happened_since_h263() -> None:
    storage = MemoryStorage()
    async with opened(storage=storage) as (_, root, _):
        await (await root.submit("Hi")).answer()
        (last,) = await take(root, None, 1)
    async with opened(storage=storage) as (_, root, _), root.events(after=last.cursor) as events:
        await nothing_comes(events)
        await note(root, "news")
        news = await anext(events)
        assert isinstance(news, EntryAppended)
    async with opened(storage=storage) as (_, root, _):
        (event,) = await take(root, last.cursor, 1)
        assert isinstance(event, Snapshot), "something happened since that one"
        assert event.reason == "cursor"
        async with root.events(after=news.cursor) as events:
            await nothing_comes(events)


async def test_a_stream_of_a_process_that_was_killed_does_not_look_alive_h263_h266() -> None:
    """Killed in mid-stream. The snapshot says that nothing runs; later the partial ends as an aborted answer."""
    storage = MemoryStorage()
    async with opened(ScriptedModel(say(STORY, chunk=4), pace=Hold(4)), storage=storage) as (_, root, clock):
        async with root.events() as events:
            await anext(events)
            await root.submit("Tell")
            await clock.advance(0.2)
            text = ""
            while not text:
                text += added([await anext(events)])
            cursor = events.cursor
        crash = storage.snapshot()
    async with (
        opened(ScriptedModel(say(STORY)), storage=crash) as (harness, root, _),
        root.events(after=cursor) as events,
    ):
        snapshot = await anext(events)
        assert isinstance(snapshot, Snapshot)
        assert (snapshot.reason, snapshot.busy, snapshot.running) == ("cursor", True, False)
        assert shown(snapshot.view) == text, "not doubled"
        await nothing_comes(events)
        harness.resume()
        found = [await anext(events)]
        assert isinstance(found[0], Resumed)
        while not isinstance(found[-1], RunEnd):
            found.append(await anext(events))
        ends = [answer(event) for event in found if isinstance(event, MessageEnd)]
        assert [end.stop_reason for end in ends] == ["aborted", "stop"]
        assert STORY.startswith(ends[0].text)
        assert ends[0].text == text
        assert ends[1].text == STORY


async def test_a_client_that_knew_that_nothing_ran_is_told_that_it_does_h266() -> None:
    storage = MemoryStorage()
    async with opened(storage=storage) as (_, root, _):
        (still,) = await take(root, None, 1)
        assert isinstance(still, Snapshot)
        assert not still.running
    async with opened(storage=storage) as (harness, root, _):
        harness.resume()
        (event,) = await take(root, still.cursor, 1)
        assert isinstance(event, Snapshot)
        assert event.running


async def test_blocked_work_of_before_is_told_anew_h263() -> None:
    storage = MemoryStorage()
    async with opened(storage=storage) as (harness, root, _):
        harness.resume()
        async with root.commit() as tx:
            tx.create_task(Job, 1)
        (last,) = await take(root, None, 1)
        assert isinstance(last, Snapshot)
        assert len(last.blocked) == 1
    async with opened(storage=storage) as (harness, root, _), root.events(after=last.cursor) as events:
        event = await anext(events)
        assert isinstance(event, Snapshot)
        assert event.blocked == ()
        harness.resume()
        assert isinstance(await anext(events), Resumed)
        assert isinstance(await anext(events), Blocked)


async def test_a_store_that_is_read_only_takes_any_cursor_of_it() -> None:
    storage = MemoryStorage()
    async with opened(storage=storage) as (_, root, _):
        (last,) = await take(root, None, 1)
        await note(root, "more")
        async with Harness.open(storage.snapshot(), read_only=True) as reader:
            (event,) = await take(reader.handle(1), last.cursor, 1)
            assert isinstance(event, Snapshot)
            assert not event.running


async def test_a_cursor_behind_unblocked_work_is_behind_all_of_its_commit_h263() -> None:
    storage, hold = MemoryStorage(), Hold()
    async with opened(ScriptedModel(fail("refused"), pace=hold), storage) as (_, root, _):
        failing = await root.submit("a")
        await hold.reached.wait()
        await root.submit("b")
        hold.release()
        await failing.wait()
        async with root.commit() as tx:
            tx.create_task(Job, 1)
        async with root.events() as events:
            first = await anext(events)
            assert isinstance(first, Snapshot)
            if not first.blocked:
                assert isinstance(await anext(events), Blocked)
            await root.abort()
            # One commit marks the task, which unblocks it, and withdraws what waits. Who is killed behind it, and goes
            # on behind the newest event, has had all of it.
            told = [await anext(events), await anext(events)]
            assert [(type(event), event.seq) for event in told] == [
                (InboxChanged, told[0].seq),
                (Unblocked, told[0].seq),
            ]
            assert [Cursor.decode(event.cursor).quiet for event in told] == [False, True]


async def test_what_another_process_said_is_not_passed_over_h270(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(storage=SqliteStorage(path)) as (_, root, _):
        await note(root, "before")
        async with Harness.open(SqliteStorage(path), read_only=True) as reader:
            looking = reader.handle(1)
            async with looking.watch() as watch:
                assert len((await anext(watch)).value.entries) == 1
            await note(root, "one")
            (quiet,) = await take(root, None, 1)
            await note(root, "two")
            # It is ahead of what the reader knew as it opened the store, and yet something followed it.
            (event,) = await take(looking, quiet.cursor, 1)
            assert isinstance(event, Snapshot)
            assert event.reason == "cursor"
            assert len(event.view["entries"]) == 3  # pyright: ignore
            async with looking.view() as view:
                assert len(view.value.entries) == 3, "what was looked at before is not shown again"
                await note(root, "three")
                async with looking.view() as later:
                    assert (len(view.value.entries), len(later.value.entries)) == (3, 4)


async def test_what_is_seen_of_another_process_is_of_one_moment_h270(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hold = tmp_path / "store.db", Hold()
    read = Session.entries
    async with opened(ScriptedModel(say("Hello."), pace=hold), SqliteStorage(path)) as (_, root, _):
        submission = await root.submit("Hi")
        await hold.reached.wait()

        async def and_then_it_goes_on(session: Session, conversation_id: int, **more: Any) -> list[EntryRecord]:
            found = await read(session, conversation_id, **more)
            if session.info.read_only:
                hold.release()
                await submission.wait()
            return found

        async with Harness.open(SqliteStorage(path), read_only=True) as reader:
            monkeypatch.setattr(Session, "entries", and_then_it_goes_on)
            async with reader.handle(1).view() as view:
                seen = (view.value.busy, [entry.kind for entry in view.value.entries])
    assert seen == (False, ["pi.user", "pi.assistant"])


# --- blocked work ------------------------------------------------------------------------------------------------


async def test_blocked_work_has_a_remedy_and_is_told_when_it_goes_on_h267() -> None:
    async with opened() as (harness, root, _):
        harness.resume()
        async with root.events() as events:
            await anext(events)
            async with root.commit() as tx:
                one = tx.create_task(Job, 1)
                two = tx.create_task(Job, 2)
            blocked = [await anext(events), await anext(events)]
            assert [(event.task, event.remedy) for event in blocked if isinstance(event, Blocked)] == [
                (one.id, "install a task of its kind"),
                (two.id, "install a task of its kind"),
            ]
            await harness.abort_task(one.id)
            ended = await anext(events)
            assert isinstance(ended, Unblocked)
            assert (ended.task, ended.kind, ended.ended) == (one.id, "test.job", True)
            harness.tasks.registry.install(Job())
            gone_on = await anext(events)
            assert isinstance(gone_on, Unblocked)
            assert (gone_on.task, gone_on.ended) == (two.id, False)
            (again,) = await take(root, None, 1)
            assert isinstance(again, Snapshot)
            assert again.blocked == ()


async def test_one_client_s_time_out_ends_its_own_wait_only_h151() -> None:
    async with opened() as (_, root, _), root.events() as one, root.events() as other:
        await anext(one)
        await anext(other)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(one)
        waiting = asyncio.ensure_future(anext(other))
        await settle()
        await note(root, "x")
        assert await waiting == await anext(one)


# --- frames ------------------------------------------------------------------------------------------------------


async def test_a_watch_goes_on_behind_a_frame_h265() -> None:
    async with opened() as (_, root, clock):
        async with root.watch() as watch:
            frame = await anext(watch)
        json: JsonValue = frame.value.to_json()
        for number in range(5):
            await note(root, f"{number}a")
            await note(root, f"{number}b")
            for _ in range(2):
                async with root.watch(after=frame.cursor) as watch:
                    frame = await anext(watch)
                assert frame.ops is not None
                json = apply(json, frame.ops)
                assert same_json(json, frame.value.to_json())
        await note(root, "another window is other JSON")
        async with root.watch(after=frame.cursor, window=3) as watch:
            assert (await anext(watch)).ops is None
        await clock.advance(LINGER_S + 1)
        await note(root, "too late")
        async with root.watch(after=frame.cursor) as watch:
            anew = await anext(watch)
            assert anew.ops is None
            assert len(anew.value.entries) == 12


async def test_a_watch_begins_anew_in_another_opening_of_the_store_h265() -> None:
    storage = MemoryStorage()
    async with opened(storage=storage) as (_, root, _), root.watch() as watch:
        frame = await anext(watch)
    async with opened(storage=storage) as (_, root, _), root.watch(after=frame.cursor) as watch:
        assert (await anext(watch)).ops is None


async def test_a_slow_watch_that_came_with_a_cursor_begins_anew_k125() -> None:
    async with opened() as (_, root, _), root.watch() as quick:
        frame = await anext(quick)
        async with root.watch(after=frame.cursor) as slow:
            for number in range(250):
                await note(root, str(number))
            frame = await anext(slow)
            assert frame.ops is None
            json: JsonValue = frame.value.to_json()
            while len(frame.value.entries) < 200:
                frame = await anext(slow)
                assert frame.ops is not None
                json = apply(json, frame.ops)
                assert same_json(json, frame.value.to_json())


def test_the_mark_of_a_log_tells_stores_apart() -> None:
    assert len({log_mark(f"{number:032x}") for number in range(1000)}) == 1000
