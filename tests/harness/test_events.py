"""Events of a conversation (rules H149 and H151): from a snapshot on, what each commit did, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from harness.doubles import ManualClock, settle
from perdure.harness.conversation import Conversation
from perdure.harness.derived_events import derive
from perdure.harness.documents import COMPACTION, CompactionData, CompactionReason, Live, LiveCompaction
from perdure.harness.events import (
    Blocked,
    CompactionEnd,
    CompactionRetry,
    CompactionStart,
    EntryAppended,
    Event,
    Events,
    InboxChanged,
    MessageDelta,
    MessageEnd,
    MessageStart,
    Resumed,
    Retry,
    RunEnd,
    RunStart,
    Snapshot,
    ToolEnd,
    ToolStart,
    ToolUpdate,
    Turn,
    Unblocked,
    UsageChanged,
)
from perdure.harness.harness import Harness
from perdure.harness.hooks import HookRequest, Stop, gate_request
from perdure.harness.limits import Limits
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.harness.registry import Extension
from perdure.harness.room import LINGER_S
from perdure.harness.tool import ToolCall, tool
from perdure.harness.view import ConversationView, first_view
from perdure.kernel.entries import Entry
from perdure.kernel.observation import WatchEnded
from perdure.kernel.records import (
    Aborted,
    Completed,
    EntryRecord,
    Failed,
    Faulted,
    Orphaned,
    Outcome,
    SubmissionRecord,
    TaskError,
    TaskRecord,
    Terminal,
    to_raw,
)
from perdure.storage.memory import MemoryStorage
from perdure.tasks.definition import Next, Task
from perdure.tasks.run import Run
from perdure.testing.model import Fail, ScriptedModel, call, fail, say


class Note(Entry, kind="test.note"):
    text: str


@tool
async def work(call: ToolCall) -> str:
    """Work."""
    call.output("line 1\n")
    call.diagnostic("hm")
    await gate.wait()
    return "done"


gate = asyncio.Event()


@asynccontextmanager
async def opened(model: ScriptedModel) -> AsyncIterator[tuple[Harness, Conversation, ManualClock]]:
    global gate
    gate = asyncio.Event()
    clock = ManualClock()
    async with Harness.open(
        MemoryStorage(), models=model, extensions=[Extension("t", tools=[work])], clock=clock
    ) as harness:
        yield harness, await harness.root(), clock


async def until(events: Events, kind: type[Event]) -> list[Event]:
    """All events up to the first of a kind."""
    found: list[Event] = []
    async with asyncio.timeout(60):
        async for event in events:
            found.append(event)
            if isinstance(event, kind):
                return found
    raise AssertionError


def names(events: list[Event]) -> list[str]:
    """What happened, without what may come in any commit."""
    return [type(event).__name__ for event in events if not isinstance(event, (UsageChanged, Resumed))]


async def test_a_plain_answer_from_admission_to_the_end_of_the_run() -> None:
    async with opened(ScriptedModel(say("Hello."))) as (_, root, _), root.events() as events:
        assert isinstance(await anext(events), Snapshot)
        submission = await root.submit("Hi")
        answer = await submission.answer()
        found = await until(events, RunEnd)
    assert names(found)[:2] == ["RunStart", "EntryAppended"]
    assert names(found)[-2:] == ["MessageEnd", "RunEnd"]
    assert isinstance(found[0], Resumed), "the first input lets work run"
    start, end = found[1], found[-1]
    assert isinstance(start, RunStart)
    assert isinstance(end, RunEnd)
    assert start.inputs == end.inputs == (submission.id,)
    assert start.task == end.task
    ended = next(event for event in found if isinstance(event, MessageEnd))
    assert ended.entry is not None
    assert end.answer == ended.entry.id
    assert sum(isinstance(event, UsageChanged) for event in found) == 1
    assert answer.text == "Hello."


async def test_deltas_make_up_the_streamed_answer() -> None:
    hold = asyncio.Event()

    async def pace(request: object, number: int) -> None:
        if number == 3:
            await hold.wait()

    model = ScriptedModel(say("one two three four", thinking="hm", chunk=4), pace=pace)
    async with opened(model) as (_, root, clock), root.events() as events:
        await anext(events)
        await root.submit("Hi")
        await settle()
        await clock.advance(0.2)
        hold.set()
        found = await until(events, MessageEnd)
    begun = [event for event in found if isinstance(event, (MessageStart, MessageDelta, MessageEnd))]
    assert isinstance(begun[0], MessageStart)
    assert sum(isinstance(event, MessageStart) for event in begun) == 1
    deltas = [event for event in begun if isinstance(event, MessageDelta)]
    texts: dict[int, str] = {}
    for delta in deltas:
        texts[delta.index] = texts.get(delta.index, "") + delta.text
    assert deltas[0].part == "thinking"
    assert texts[0] == "hm"
    assert "one two three four".startswith(texts[1])
    assert texts[1]


async def test_a_round_of_tools() -> None:
    model = ScriptedModel([call("work"), say("Done.")])
    async with opened(model) as (_, root, clock), root.events() as events:
        await anext(events)
        submission = await root.submit("Go")
        await settle()
        await clock.advance(0.2)
        gate.set()
        await submission.answer()
        found = await until(events, RunEnd)
    kinds = names(found)
    for before, after in (
        ("RunStart", "MessageEnd"),
        ("MessageEnd", "Turn"),
        ("Turn", "ToolStart"),
        ("ToolStart", "ToolUpdate"),
        ("ToolUpdate", "ToolEnd"),
        ("ToolEnd", "RunEnd"),
    ):
        assert kinds.index(before) < kinds.index(after), (before, after)
    assert kinds.count("MessageStart") == kinds.count("MessageEnd") == 2
    started = next(event for event in found if isinstance(event, ToolStart))
    ended = next(event for event in found if isinstance(event, ToolEnd))
    updates = [event for event in found if isinstance(event, ToolUpdate)]
    assert started.task == ended.task == updates[0].task
    assert (started.name, ended.is_error, ended.code) == ("work", False, None)
    assert "".join(update.text for update in updates) == "line 1\n"
    assert [line for update in updates for line in update.diagnostics] == ["hm"]
    turn = next(event for event in found if isinstance(event, Turn))
    assert turn.turn == 1


async def test_a_call_that_never_ran_starts_and_ends() -> None:
    async with opened(ScriptedModel([call("nope"), say("Done.")])) as (_, root, _), root.events() as events:
        await anext(events)
        await (await root.submit("Go")).answer()
        found = await until(events, RunEnd)
    assert names(found).count("ToolStart") == 1
    ended = next(event for event in found if isinstance(event, ToolEnd))
    assert (ended.is_error, ended.code) == (True, "tool_unavailable")


async def test_the_queue_and_the_next_run() -> None:
    model = ScriptedModel([call("work"), say("One."), say("Two.")])
    async with opened(model) as (_, root, _), root.events() as events:
        await anext(events)
        await root.submit("First")
        await settle()
        second = await root.submit("Second")
        found = await until(events, InboxChanged)
        changed = found[-1]
        assert isinstance(changed, InboxChanged)
        assert [(item["id"], item["mode"]) for item in changed.items] == [(second.id, "follow_up")]
        changed.items.clear()
        gate.set()
        await second.answer()
        found = await until(events, RunEnd)
        found += await until(events, RunEnd)
        kinds = names(found)
        end = kinds.index("RunEnd")
        assert kinds.index("RunStart") > end
        emptied = [event for event in found if isinstance(event, InboxChanged)][-1]
        assert emptied.items == []


async def test_a_retry_is_told() -> None:
    model = ScriptedModel(fail("overloaded", times=1, then=say("Yes.")))
    async with opened(model) as (_, root, clock), root.events() as events:
        await anext(events)
        submission = await root.submit("Go")
        found = await until(events, Retry)
        told = found[-1]
        assert isinstance(told, Retry)
        assert (told.attempt, told.code) == (2, "overloaded")
        await clock.advance(10)
        await submission.answer()
        found = await until(events, RunEnd)
        assert not any(isinstance(event, Retry) for event in found)


async def test_a_run_that_ends_without_an_answer_says_why() -> None:
    async with opened(ScriptedModel(Fail("refused", "no"))) as (_, root, _), root.events() as events:
        await anext(events)
        submission = await root.submit("Go")
        await submission.wait()
        found = await until(events, RunEnd)
        end = found[-1]
        assert isinstance(end, RunEnd)
        assert (end.answer, end.reason) == (None, "model_error")
        ended = [event for event in found if isinstance(event, MessageEnd)]
        assert len(ended) == 1
        assert names(found).count("MessageStart") == 1


async def test_an_aborted_stream_ends_its_message() -> None:
    hold = asyncio.Event()

    async def pace(request: object, number: int) -> None:
        if number == 2:
            await hold.wait()

    model = ScriptedModel(say("one two three four", chunk=4), pace=pace)
    async with opened(model) as (_, root, clock), root.events() as events:
        await anext(events)
        await root.submit("Hi")
        await settle()
        await clock.advance(0.2)
        await root.abort()
        found = await until(events, RunEnd)
    end = found[-1]
    assert isinstance(end, RunEnd)
    assert end.reason == "aborted"
    (ended,) = [event for event in found if isinstance(event, MessageEnd)]
    assert ended.entry is not None
    (message,) = decode_messages(ended.entry.raw_messages)
    assert isinstance(message, AssistantMessage)
    assert message.stop_reason == "aborted"


async def test_a_client_that_attaches_before_the_first_token_sees_that_it_is_busy() -> None:
    hold = asyncio.Event()

    async def pace(request: object, number: int) -> None:
        await hold.wait()

    async with opened(ScriptedModel(say("Hi."), pace=pace)) as (_, root, _):
        submission = await root.submit("Hi")
        async with root.events() as events:
            first = await anext(events)
            assert isinstance(first, Snapshot)
            assert first.busy
            assert isinstance(first.view, dict)
            assert len(first.view["entries"]) == 1  # pyright: ignore[reportArgumentType]
            hold.set()
            await submission.answer()
            assert names(await until(events, RunEnd))[-1] == "RunEnd"


async def test_entries_of_an_application_are_events() -> None:
    async with opened(ScriptedModel(say("x"))) as (_, root, _), root.events() as events:
        await anext(events)
        async with root.commit() as tx:
            tx.append(Note(text="mine"))
        (event,) = await until(events, EntryAppended)
        assert isinstance(event, EntryAppended)
        assert Note.read(event.entry).text == "mine"


async def test_a_blocked_task_is_an_event_and_in_the_snapshot() -> None:
    class Job(Task[int, None], kind="test.job"):
        async def start(self, run: Run[int, None, None]) -> Next[None]:
            async with run.commit() as tx:
                return tx.complete(None)

    async with opened(ScriptedModel(say("x"))) as (harness, root, _):
        harness.resume()
        async with root.events() as events:
            await anext(events)
            async with root.commit() as tx:
                task = tx.create_task(Job, 1)
            (event,) = await until(events, Blocked)
            assert isinstance(event, Blocked)
            assert (event.task, event.kind, event.reason) == (task.id, "test.job", "missing_task")
        async with root.events() as events:
            first = await anext(events)
            assert isinstance(first, Snapshot)
            assert [(b.task, b.reason) for b in first.blocked] == [(task.id, "missing_task")]


async def test_a_slow_consumer_gets_a_fresh_snapshot() -> None:
    async with (
        opened(ScriptedModel(say("x"))) as (harness, root, _),
        root.events() as events,
        root.events() as quick,
    ):
        await anext(quick)
        for number in range(150):
            async with root.commit() as tx:
                tx.append(Note(text=str(number)))
            (event,) = await until(quick, EntryAppended)
            assert isinstance(event, EntryAppended)
        first = await anext(events)
        assert isinstance(first, Snapshot)
        assert isinstance(first.view, dict)
        shown = len(first.view["entries"])  # pyright: ignore[reportArgumentType]
        assert shown == 100
        rest = [await anext(events) for _ in range(150 - shown)]
        assert [event.seq for event in rest] == list(range(first.seq + 1, harness.session.seq + 1))


async def test_nothing_is_worked_out_that_nobody_hears_h261() -> None:
    """For a minute after the last consumer left it still is: that one may come back."""
    async with opened(ScriptedModel(say("x"))) as (harness, root, clock), root.view():
        async with root.events() as events:
            await anext(events)
        async with root.commit() as tx:
            tx.append(Note(text="kept at hand"))
        (room,) = harness.views._rooms[root.id].values()
        assert len(room.moments.value.events) == 1
        await clock.advance(LINGER_S + 1)
        async with root.commit() as tx:
            tx.append(Note(text="unheard"))
        assert room.moments.value.events == ()
        assert room.moments.oldest is room.moments.newest, "and none of it is kept"
        async with root.events() as events:
            assert isinstance(await anext(events), Snapshot)


async def test_events_end_with_the_session() -> None:
    async with opened(ScriptedModel(say("x"))) as (harness, root, _), root.events() as events:
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await settle()
        report = await harness.close()
        assert report.unreleased == (f"watch of events of conversation {root.id}",)
        with pytest.raises(WatchEnded, match="session_closed"):
            await waiting


async def test_an_event_is_json_and_comes_back() -> None:
    async with opened(ScriptedModel([call("work"), say("Done.")])) as (_, root, _), root.events() as events:
        first = await anext(events)
        gate.set()
        await (await root.submit("Go")).answer()
        found = [first, *await until(events, RunEnd)]
    data = msgspec.json.encode(found)
    assert b'"type":"tool_end"' in data
    assert msgspec.json.decode(data, type=list[Event]) == found


async def test_a_message_that_leaves_nothing_ends_so() -> None:
    async with opened(ScriptedModel(say("x"))) as (_, root, _), root.events() as events:
        await anext(events)
        async with root.commit() as tx:
            live = await tx.draft(Live)
            live.message = {"task": 7, "model": "m", "attempt": 1, "content": []}
        async with root.commit() as tx:
            (await tx.draft(Live)).message = None
        found = await until(events, MessageEnd)
        assert found[-1] == MessageEnd(seq=found[-1].seq, cursor=found[-1].cursor, task=7, entry=None)
        assert names(found) == ["MessageStart", "MessageEnd"]


# --- compactions -------------------------------------------------------------------------------------------------


def compaction(reason: CompactionReason, attempt: int = 1, until: int | None = None) -> LiveCompaction:
    failed = until is not None
    return {
        "reason": reason,
        "started_at": 1,
        "attempt": attempt,
        "until": until,
        "code": "overloaded" if failed else None,
        "message": "too much" if failed else None,
    }


EMPTY: Any = {"live": {}, "inbox": {}, "agent": {}, "usage": {}, "meta": {}}


def living(**live: Any) -> ConversationView:
    return first_view(1, window=10, marker=None, entries=[], documents={**EMPTY, "live": live})


async def compacting(root: Conversation, **changes: LiveCompaction | None) -> None:
    async with root.commit() as tx:
        live = await tx.draft(Live)
        for key, value in changes.items():
            if value is None:
                del live.compactions[key[1:]]
            else:
                live.compactions[key[1:]] = value


def summary(task: int, reason: CompactionReason, id: int = 50, head: int = 40) -> EntryRecord:
    data = to_raw(msgspec.to_builtins(CompactionData(task=task, reason=reason, tokens_before=9)))
    return EntryRecord(id=id, seq=9, created_at=0, conversation_id=1, kind=COMPACTION, head=head, raw_data=data)


async def test_compactions_are_told_whoever_began_them_h150() -> None:
    async with opened(ScriptedModel(say("x"))) as (_, root, _), root.events() as events:
        await anext(events)
        await compacting(root, _7=compaction("manual"), _8=compaction("background"))
        await compacting(root, _8=compaction("background", attempt=2, until=500))
        await compacting(root, _8=compaction("background", attempt=2), _7=None)
        async with root.commit() as tx:
            live = await tx.draft(Live)
            del live.compactions["8"]
            live.compaction_failure = {
                "task": 8,
                "reason": "background",
                "at": 1,
                "code": "overloaded",
                "message": "still",
                "run": None,
            }
        found = [await anext(events) for _ in range(5)]
    told = [
        (type(event).__name__, event.task)
        for event in found
        if isinstance(event, (CompactionStart, CompactionRetry, CompactionEnd))
    ]
    assert told == [
        ("CompactionStart", 7),
        ("CompactionStart", 8),
        ("CompactionRetry", 8),
        ("CompactionEnd", 7),
        ("CompactionEnd", 8),
    ]
    retry, stale, failed = found[2:]
    assert isinstance(retry, CompactionRetry)
    assert (retry.attempt, retry.until, retry.code, retry.message) == (2, 500, "overloaded", "too much")
    assert isinstance(stale, CompactionEnd)
    assert (stale.reason, stale.outcome, stale.entry) == ("manual", "stale", None)
    assert isinstance(failed, CompactionEnd)
    assert (failed.outcome, failed.code, failed.message) == ("failed", "overloaded", "still")


def told(before: ConversationView, after: ConversationView, **records: Any) -> CompactionEnd:
    (event,) = [
        event
        for event in derive(before, after, seq=9, **{"entries": [], "submissions": [], **records})
        if not isinstance(event, InboxChanged)
    ]
    assert isinstance(event, CompactionEnd)
    return event


def test_a_compaction_that_is_placed_ends_with_its_entry_h150() -> None:
    entry = summary(7, "threshold")
    end = told(living(compactions={"7": compaction("threshold")}), living(), entries=[entry])
    assert (end.task, end.reason, end.outcome, end.entry) == (7, "threshold", "placed", entry)


def waiting_summary(task: int) -> ConversationView:
    """The task is done; what it made waits for a boundary."""
    data: Any = msgspec.to_builtins(CompactionData(task=task, reason="manual", tokens_before=9))
    entry = {"kind": COMPACTION, "messages": [], "data": data, "head": 40, "edits": []}
    inbox: Any = {"items": [{"id": 60, "mode": "write", "entry": entry}]}
    return first_view(1, window=10, marker=None, entries=[], documents={**EMPTY, "inbox": inbox})


def test_a_summary_that_waits_for_a_boundary_ends_there_h150() -> None:
    going, waiting, over = living(compactions={"7": compaction("manual")}), waiting_summary(7), living()
    (event,) = derive(going, waiting, seq=8, entries=[], submissions=[], tasks=[ended(Completed())])
    assert isinstance(event, InboxChanged), "it has not ended"
    entry = summary(7, "manual")
    assert told(waiting, over, entries=[entry]).outcome == "placed"
    for reason, outcome in (("stale", "stale"), ("aborted", "aborted")):
        end = told(waiting, over, submissions=[unanswered(60, reason)])
        assert (end.task, end.reason, end.outcome, end.message) == (7, "manual", outcome, "so it is")


def ended(outcome: Outcome) -> TaskRecord:
    return TaskRecord(
        id=7, conversation_id=1, kind="pi.compaction", version=1, created_at=0, state=Terminal(outcome=outcome)
    )


def unanswered(id: int, reason: str) -> SubmissionRecord:
    return SubmissionRecord(
        id=id,
        conversation_id=1,
        type="input",
        digest="",
        status="unanswered",
        reason=reason,
        detail="so it is",
        created_at=0,
    )


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Failed(TaskError("declined", "not now")), ("declined", "declined", "not now")),
        (Failed(TaskError("nothing_to_compact", "short")), ("declined", "nothing_to_compact", "short")),
        (Failed(TaskError("stale", "behind")), ("stale", "stale", "behind")),
        (Failed(TaskError("deadline", "late")), ("failed", "deadline", "late")),
        (Faulted(TaskError("raised", "oh")), ("failed", "raised", "oh")),
        (Aborted("no more"), ("aborted", None, "no more")),
        (Orphaned("missing_task"), ("aborted", None, "missing_task")),
    ],
)
def test_a_compaction_that_is_not_placed_says_why_h150(outcome: Outcome, said: tuple[str, str | None, str]) -> None:
    end = told(living(compactions={"7": compaction("manual")}), living(), tasks=[ended(outcome)])
    assert (end.outcome, end.code, end.message) == said


@pytest.mark.parametrize("reason", ["limit", "gate"])
def test_a_run_that_a_limit_or_a_gate_ends_says_so_h149(reason: str) -> None:
    before, after = living(run={"task": 7, "inputs": [5], "started_at": 1, "turn": 1}), living()
    submission = unanswered(5, reason)
    (end,) = derive(before, after, seq=9, entries=[], submissions=[submission])
    assert end == RunEnd(seq=9, task=7, inputs=(5,), reason=reason, detail="so it is")


async def test_a_real_limit_and_a_real_gate_end_a_run_with_their_reason_h149() -> None:
    @gate_request
    async def closed(asked: HookRequest) -> Stop | None:
        return Stop("not at night")

    for limits, hooks, reason in ((Limits(turns=1), [], "limit"), (Limits(), [closed], "gate")):
        model = ScriptedModel([call("nope"), say("Done.")])
        night = Extension("night", hooks=hooks)
        async with Harness.open(MemoryStorage(), models=model, limits=limits, extensions=[night]) as harness:
            root = await harness.root()
            async with root.events() as events:
                await anext(events)
                await root.submit("Go")
                end = (await until(events, RunEnd))[-1]
                assert isinstance(end, RunEnd)
                assert (end.answer, end.reason) == (None, reason)
                assert end.detail


async def test_parked_work_that_is_retried_is_unblocked_h267() -> None:
    class Job(Task[int, None], kind="test.job"):
        async def start(self, run: Run[int, None, None]) -> Next[None]:
            async with run.commit() as tx:
                return tx.complete(None)

    async with opened(ScriptedModel(say("x"))) as (harness, root, _), root.events() as events:
        harness.tasks.registry.install(Job())
        harness.resume()
        async with root.commit() as tx:
            task = tx.create_task(Job, 1)
            tx.put_task(msgspec.structs.replace(task, restarts=5))
        blocked = (await until(events, Blocked))[-1]
        assert isinstance(blocked, Blocked)
        assert (blocked.reason, blocked.detail) == ("parked", "cut off 5 times")
        assert "retry_task()" in blocked.remedy
        await harness.retry_task(task.id)
        unblocked = (await until(events, Unblocked))[-1]
        assert isinstance(unblocked, Unblocked)
        assert (unblocked.task, unblocked.ended) == (task.id, False)
