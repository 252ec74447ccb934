"""What the chat tells of a conversation's events, also where it could not keep up (rules H149, H151), and what it says
when it goes on after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
from chat_paper import Paper
from msgspec import structs

from perdure import Agent, Harness, SqliteStorage, coding_tools
from perdure.cli.chat.places import Places
from perdure.cli.chat.resumed import resumed
from perdure.cli.chat.scene import Scene
from perdure.cli.chat.screen import PlainScreen
from perdure.cli.chat.story import FOLLOWED, Story
from perdure.cli.inspect import HolderLine
from perdure.cli.secrets import Secrets
from perdure.cli.style import Line, rendered
from perdure.events import (
    Blocked,
    BlockedTask,
    CompactionEnd,
    CompactionRetry,
    CompactionStart,
    EntryAppended,
    Event,
    InboxChanged,
    MessageDelta,
    MessageEnd,
    MessageStart,
    QuestionAsked,
    QuestionOver,
    ResponseDeferred,
    Resumed,
    Retry,
    RunEnd,
    RunStart,
    Snapshot,
    ToolEnd,
    ToolStart,
    ToolUpdate,
    Unblocked,
    UsageChanged,
)
from perdure.harness.conversation import Conversation
from perdure.harness.documents import COMPACTION, InboxItem, LiveDeferred, LiveMessage, LiveTool, ToolResultData
from perdure.harness.environment import Effects
from perdure.harness.events import QuestionOutcome
from perdure.harness.messages import (
    AssistantMessage,
    Message,
    Text,
    Thinking,
    ToolCallPart,
    ToolResultMessage,
    UserMessage,
    encode_messages,
)
from perdure.harness.registry import Extension, Registry
from perdure.harness.tool import AnyTool, tool
from perdure.kernel.json import JsonValue
from perdure.kernel.records import EntryRecord, to_raw
from perdure.spaces.documents import SpaceState
from perdure.tasks.inspect import LiveTask
from perdure.testing.model import ScriptedModel, call, say

NOW = 1_000_000


def entry(id: int, kind: str, message: Message | None = None, data: JsonValue = None) -> EntryRecord:
    messages = [] if message is None else [message]
    return EntryRecord(
        id=id,
        seq=id,
        created_at=NOW,
        conversation_id=1,
        kind=kind,
        raw_messages=encode_messages(messages),
        raw_data=to_raw(data),
    )


def user(id: int, text: str) -> EntryRecord:
    return entry(id, "pi.user", UserMessage((Text(text),)))


def answer(
    id: int, *texts: str, thinking: str = "", calls: Sequence[tuple[int, str]] = (), stop: str = "stop"
) -> EntryRecord:
    parts = [Thinking(thinking)] if thinking else []
    content = (*parts, *map(Text, texts), *(ToolCallPart(f"c{task}", name) for task, name in calls))
    message = AssistantMessage(content=content, provider="test", model="m", stop_reason=cast("str", stop))  # type: ignore[arg-type]
    return entry(id, "pi.assistant", message, {"calls": [task for task, _ in calls]})


def result(id: int, task: int, text: str, name: str = "bash", code: str | None = None) -> EntryRecord:
    message = ToolResultMessage(call_id=f"c{task}", name=name, content=(Text(text),), is_error=code is not None)
    data = ToolResultData(task=task, call_id=f"c{task}", name=name, is_error=code is not None, code=code)
    return entry(id, "pi.tool-result", message, cast("JsonValue", msgspec.to_builtins(data)))


def item(id: int, text: str, mode: str = "follow_up") -> InboxItem:
    messages = cast("list[JsonValue]", [msgspec.to_builtins(UserMessage((Text(text),)))])
    return cast(
        "InboxItem",
        {
            "id": id,
            "mode": mode,
            "entry": {"kind": "pi.user", "messages": messages, "data": None, "head": None, "edits": []},
        },
    )


def live_tool(name: str, output: str = "", state: str = "running", dropped: int = 0) -> LiveTool:
    return cast(
        "LiveTool",
        {
            "call_id": "c",
            "name": name,
            "state": state,
            "output": output,
            "dropped_lines": dropped,
            "dropped_bytes": 0,
            "details": None,
            "diagnostics": [],
        },
    )


def partial(*texts: str) -> LiveMessage:
    content = [{"type": "text", "text": text, "id": "", "name": ""} for text in texts]
    return cast("LiveMessage", {"task": 5, "model": "test:m", "attempt": 1, "content": content})


def snapshot(
    *entries: EntryRecord,
    run: Sequence[int] | None = None,
    task: int = 5,
    message: LiveMessage | None = None,
    tools: dict[str, LiveTool] | None = None,
    retry: JsonValue = None,
    deferred: JsonValue = None,
    queued: Sequence[InboxItem] = (),
    more: bool = False,
    blocked: tuple[BlockedTask, ...] = (),
) -> Snapshot:
    view: JsonValue = {
        "entries": [msgspec.json.decode(msgspec.json.encode(each)) for each in entries],
        "more": more,
        "live": cast(
            "JsonValue",
            {
                "run": None if run is None else {"task": task, "inputs": list(run), "started_at": 0, "turn": 0},
                "message": message,
                "tools": tools or {},
                "retry": retry,
                "deferred": deferred,
            },
        ),
        "inbox": cast("JsonValue", {"items": list(queued)}),
        "usage": {},
        "agent": {},
        "meta": {},
    }
    return Snapshot(seq=100, busy=run is not None, view=view, blocked=blocked)


class Told:
    """A story on a plain screen."""

    def __init__(self, first: Snapshot | None = None, *, echoed: bool = False, follows: bool = True) -> None:
        self.paper = Paper()
        self.screen = PlainScreen(self.paper, "none", Secrets({}), asks=False)
        self.screen.follows = follows
        self.story = Story(self.screen, now=lambda: NOW, echoed=echoed)
        self.story.begin(Scene.of(first or snapshot()))

    def tell(self, *events: Event) -> str:
        """What these events add to what is shown."""
        before = len(self.paper.text)
        for event in events:
            self.story.tell(event)
        return self.paper.text[before:]


def delta(text: str, index: int = 0, part: str = "text", name: str = "") -> MessageDelta:
    return MessageDelta(seq=1, task=5, index=index, part=part, text=text, name=name)


START = (RunStart(seq=1, task=5, inputs=(3,)), MessageStart(seq=1, task=5))


def end(entry: EntryRecord | None) -> MessageEnd:
    return MessageEnd(seq=1, task=5, entry=entry)


def lines(shown: Sequence[Line]) -> list[str]:
    return [rendered(each, "none") for each in shown]


# --- answers -----------------------------------------------------------------------------------------------------


def test_what_streamed_is_told_once_and_its_end_from_the_entry() -> None:
    told = Told()
    assert told.tell(*START, delta("one two ")) == "one two "
    assert told.tell(end(answer(6, "one two three"))) == "three\n"


def test_an_answer_that_was_not_streamed_is_told_whole() -> None:
    assert Told().tell(*START, end(answer(6, "a", "b", thinking="hm"))) == "hm\na\nb\n"


def test_an_answer_that_is_not_what_streamed_is_told_as_it_is_stored() -> None:
    told = Told()
    told.tell(*START, delta("one two "))
    assert told.tell(end(answer(6, "three"))) == "\n— the answer, as it is stored:\nthree\n"


def test_a_request_that_is_sent_again_begins_anew() -> None:
    told = Told()
    told.tell(*START, delta("one "))
    assert told.tell(end(None)) == "\n— cut off; it is asked again\n"
    again = told.tell(Retry(seq=1, attempt=2, until=NOW + 4000, code="overloaded", message="too much"))
    assert again == "· overloaded: too much; asked again in 4 seconds\n"
    assert told.tell(MessageStart(seq=1, task=5), delta("one "), end(answer(6, "one two"))) == "one two\n"


async def test_what_a_tool_asks_a_person_is_shown_and_how_it_was_over_h333() -> None:
    told = Told()
    asked = QuestionAsked(seq=1, task=9, call=7, text="How many\nare you\x1b[31m?", expires_at=1)
    shown = told.tell(*START, started(), asked)
    assert "? bash  asks you, question 9\n  │ How many\n  │ are you?\n" in shown
    await told.screen.invitation()
    assert told.paper.text.endswith("  Enter answers · /later does not now\n")
    outcomes: list[tuple[int, QuestionOutcome, str]] = [
        (9, "answered", "was answered elsewhere"),
        (10, "expired", "expired: nobody answered in time"),
        (11, "withdrawn", "was withdrawn"),
    ]
    for task, outcome, words in outcomes:
        told.tell(structs.replace(asked, task=task))
        over = QuestionOver(seq=2, task=task, call=7, outcome=outcome)
        assert told.tell(over) == f"  question {task} {words}\n"
        assert told.tell(over) == ""
    told.tell(structs.replace(asked, task=12))
    told.story.questions.answered_here(12)
    assert told.tell(QuestionOver(seq=2, task=12, call=7, outcome="answered")) == ""


async def test_a_question_is_missed_by_a_screen_that_lags_and_told_to_be_over() -> None:
    told = Told()
    told.tell(*START, started(), QuestionAsked(seq=1, task=9, call=7, text="How many?", expires_at=1))
    await told.screen.invitation()
    assert "  question 9 is over\n" in told.tell(snapshot())
    assert told.story.questions.first is None


def test_calls_that_are_written_are_counted_and_not_told() -> None:
    told = Told()
    assert told.tell(*START, delta('{"co', 0, "tool_call", "bash"), delta('mmand"', 0, "tool_call", "bash")) == ""
    assert lines(told.story.running()) == ["▸ bash  10 characters so far"]
    told.tell(end(answer(6, calls=[(7, "bash")])))
    assert told.story.running() == []


# --- calls -------------------------------------------------------------------------------------------------------


def output(text: str, *, anew: bool = False, task: int = 7) -> ToolUpdate:
    return ToolUpdate(
        seq=1, task=task, text=text, anew=anew, dropped_lines=0, dropped_bytes=0, details=None, diagnostics=()
    )


def started(task: int = 7) -> ToolStart:
    return ToolStart(seq=1, task=task, call_id=f"c{task}", name="bash")


def ended(entry: EntryRecord, task: int = 7) -> ToolEnd:
    code = entry.data_as(ToolResultData).code
    return ToolEnd(seq=1, task=task, call_id="c", name="bash", is_error=code is not None, code=code, entry=entry)


def test_output_is_followed_up_to_a_bound_and_its_end_is_told() -> None:
    told = Told()
    assert told.tell(started()) == "▸ bash\n"
    assert told.tell(output("a\nb")) == "  │ a\n"
    assert told.tell(output("c\n")) == "  │ bc\n"
    many = [str(number) for number in range(100)]
    assert told.tell(output("\n".join(many) + "\n")).splitlines() == [f"  │ {each}" for each in many[: FOLLOWED - 2]]
    assert told.tell(output("later\n")) == ""
    everything = "\n".join(["a", "bc", *many, "later"])
    end = told.tell(ended(result(8, 7, everything))).splitlines()
    assert end == [
        *(f"  │ {number}" for number in range(18, 22)),
        "  ┆ 71 lines",
        *(f"  │ {number}" for number in range(93, 100)),
        "  │ later",
    ]


def test_of_a_call_that_was_broken_off_its_output_is_told() -> None:
    told = Told()
    told.tell(started(), output("a\n"))
    words = "The call was interrupted.\nOutput until then (2 lines were left out):\na\nb"
    assert told.tell(ended(result(8, 7, words, code="interrupted"))) == (
        "  │ b\n  ✗ interrupted; it is not run again by itself, and the model is told\n"
    )
    told.tell(started())
    assert told.tell(ended(result(9, 7, "The call was aborted.", code="aborted"))) == "  ✗ aborted\n"


def test_output_that_was_cut_meanwhile_is_not_told_twice() -> None:
    told = Told()
    told.tell(started(), output("a\nb\n"))
    assert told.tell(output("y\nz\n", anew=True)) == ""
    assert told.tell(ended(result(8, 7, "y\nz\nend", code="tool_error"))) == (
        "  │ y\n  │ z\n  │ end\n  ✗ failed: tool_error\n"
    )


def test_calls_beside_one_another_say_whose_output_it_is() -> None:
    told = Told()
    told.tell(started(7), started(8))
    assert told.tell(output("a\n", task=7)) == "▸ bash\n  │ a\n"
    assert told.tell(output("b\n", task=8), output("c\n", task=8)) == "▸ bash\n  │ b\n  │ c\n"
    assert told.tell(ended(result(9, 7, "a\n"), 7)) == "▸ bash\n"


def test_where_it_can_be_redrawn_a_call_is_told_once_it_has_ended() -> None:
    told = Told(follows=False)
    assert told.tell(started(), output("a\nb\nc\nd\ne\nf")) == ""
    assert lines(told.story.running()) == ["▸ bash", *(f"  │ {each}" for each in "bcdef")]
    assert told.tell(ended(result(8, 7, "a\nb\n"))) == "▸ bash\n  │ a\n  │ b\n"
    assert told.story.running() == []


# --- the queue ---------------------------------------------------------------------------------------------------


def test_the_queue_is_told_as_it_changes() -> None:
    told = Told()
    told.tell(*START)
    assert told.tell(InboxChanged(seq=1, items=[item(10, "later")])) == "queued    later\n"
    both = [item(10, "later"), item(11, "left\nor right", "steer")]
    assert told.tell(InboxChanged(seq=1, items=both)) == "steering  left ⏎ or right\n"
    assert told.story.waiting_inputs == 2
    # Placed: told as an input, with the mark of a steering one.
    placed = told.tell(EntryAppended(seq=1, entry=user(12, "left\nor right")), InboxChanged(seq=1, items=both[:1]))
    assert placed == "\n! left\n  or right\n"
    assert not told.story.has_ended(11)
    assert told.tell(InboxChanged(seq=1, items=[])) == "withdrawn later\n"
    assert told.story.has_ended(10)


def test_a_queued_reset_is_named() -> None:
    told = Told()
    reset = item(10, "go on", "write")
    reset["entry"]["kind"] = "pi.reset"
    assert told.tell(InboxChanged(seq=1, items=[reset])) == "queued    a new context: ⏎ go on\n"
    assert told.story.waiting_inputs == 0
    shown = told.tell(EntryAppended(seq=1, entry=entry(12, "pi.reset", UserMessage((Text("go on"),)))))
    assert shown == "\n— the model's context begins anew —\n\n> go on\n"
    assert told.tell(InboxChanged(seq=1, items=[])) == ""


def test_what_was_typed_stands_there_already_unless_it_waited() -> None:
    told = Told(echoed=True)
    told.story.typed("now")
    assert told.tell(EntryAppended(seq=1, entry=user(4, "now"))) == ""
    assert told.tell(EntryAppended(seq=1, entry=user(5, "now"))) == "\n> now\n"
    told.story.typed("later")
    told.tell(InboxChanged(seq=1, items=[item(10, "later")]))
    told.story.not_placed("later")
    assert told.tell(EntryAppended(seq=1, entry=user(6, "later")), InboxChanged(seq=1, items=[])) == "\n> later\n"


# --- runs --------------------------------------------------------------------------------------------------------


def test_the_end_of_a_run_says_what_it_used_and_why_there_is_no_answer() -> None:
    told = Told()
    totals = {"requests": 1, "input": 1200, "output": 34, "cache_read": 0, "cache_write": 0, "reasoning": 0}
    told.tell(*START, UsageChanged(seq=1, models={"test:m": totals}, tools={}))  # type: ignore[dict-item]
    done = told.tell(RunEnd(seq=1, task=5, inputs=(3,), answer=6))
    assert done == "  1,200 in · 34 out · 1,234 tokens in all\n"
    assert told.story.has_ended(3)
    more = {**totals, "requests": 2, "input": 1300, "output": 50, "cache_read": 900, "cache_write": 7, "reasoning": 9}
    told.tell(RunStart(seq=1, task=8, inputs=(7,)), UsageChanged(seq=1, models={"test:m": more}, tools={}))  # type: ignore[dict-item]
    failed = told.tell(RunEnd(seq=1, task=8, inputs=(7,), reason="model_error", detail="refused: no\x1b[1m"))
    assert failed == (
        "! the run ended without an answer. model_error: refused: no\n"
        "  100 in · 900 read from cache · 7 written to cache · 16 out · 9 of it thinking · 2,257 tokens in all\n"
    )
    assert "— aborted" in told.tell(RunEnd(seq=1, task=9, inputs=(8,), reason="aborted"))
    assert "— ended by the reset" in told.tell(RunEnd(seq=1, task=9, inputs=(8,), reason="reset"))


def test_blocked_work_is_said_with_what_to_do() -> None:
    told = Told()
    told.tell(*START)
    shown = told.tell(Blocked(seq=1, task=5, kind="pi.generation", reason="parked"))
    assert shown.startswith("! task 5 (pi.generation) cannot go on: parked; its runs were cut off too often")
    assert told.story.stuck
    told.tell(MessageStart(seq=1, task=5))
    assert not told.story.stuck
    first = Told(snapshot(run=[3], blocked=(BlockedTask(9, "app.x", "missing_task"),)))
    assert "! task 9 (app.x) cannot go on: missing_task; install a task of its kind\n" in first.paper.text
    assert first.story.stuck


def test_work_that_goes_on_is_said_to_h267() -> None:
    told = Told()
    told.tell(*START)
    told.tell(Blocked(seq=1, task=5, kind="pi.generation", reason="parked"))
    assert (
        told.tell(Unblocked(seq=1, task=5, kind="pi.generation", ended=False)) == "· task 5 (pi.generation) goes on\n"
    )
    assert not told.story.stuck
    assert told.tell(Resumed(seq=1)) == ""


WAITING: LiveDeferred = {
    "task": 5,
    "model": "test:m",
    "attempt": 1,
    "handle": "job\x1b[1m1",
    "sent": NOW,
    "polls": 0,
    "until": NOW,
    "code": None,
}


def test_a_response_that_is_made_in_the_background_is_told_h405() -> None:
    told = Told()
    told.tell(*START)
    first = ResponseDeferred(seq=1, **WAITING)
    assert told.tell(first) == "· test:m makes the answer in the background: job1\n"
    assert told.tell(msgspec.structs.replace(first, polls=1)) == "", "once is enough"
    failed = msgspec.structs.replace(first, polls=2, code="overloaded")
    assert told.tell(failed) == "· overloaded; job1 is asked for again\n"


def test_compactions_are_told_h150() -> None:
    told = Told()
    told.tell(*START)
    assert told.tell(CompactionStart(seq=1, task=9, reason="background")) == "· the context is being summed up\n"
    retry = CompactionRetry(seq=1, task=9, attempt=2, until=0, code="overloaded", message="busy\x1b[1m")
    assert told.tell(retry).startswith("· overloaded: busy; asked again in ")
    end = CompactionEnd(
        seq=1, task=9, reason="background", outcome="failed", entry=None, code="deadline", message="a\nb"
    )
    assert told.tell(end) == "! the context was not summed up: deadline: a b\n"
    assert told.tell(structs.replace(end, outcome="stale")) == ""
    late = structs.replace(end, reason="manual", outcome="stale", code=None, message=None)
    assert told.tell(late) == "! the context was not summed up: stale: the context begins anew by now\n"
    entry = EntryRecord(id=90, seq=1, created_at=0, conversation_id=1, kind=COMPACTION, head=1)
    assert told.tell(structs.replace(end, outcome="placed", entry=entry)) != "", "as any entry"


# --- catching up -------------------------------------------------------------------------------------------------


def test_what_was_missed_is_told_and_nothing_twice() -> None:
    entries = [
        user(3, "do it"),
        answer(6, "I will.", calls=[(7, "bash")]),
        result(8, 7, "done"),
        answer(9, "It is done."),
    ]
    told = Told(snapshot(entries[0], run=[3]))
    told.tell(MessageStart(seq=1, task=5), delta("I wi"))
    assert told.tell(snapshot(*entries)) == ("will.\n▸ bash\n  │ done\nIt is done.\n  0 in · 0 out · 0 tokens in all\n")
    assert told.story.has_ended(3)
    assert not told.story.busy
    assert told.tell(snapshot(*entries)) == ""


def test_a_stream_goes_on_where_it_was_told() -> None:
    told = Told(snapshot(user(3, "go"), run=[3]))
    told.tell(MessageStart(seq=1, task=5), delta("one "))
    assert told.tell(snapshot(user(3, "go"), run=[3], message=partial("one two three "))) == "two three "
    assert told.tell(end(answer(6, "one two three four"))) == "four\n"


def test_a_stream_that_ended_meanwhile_is_told_to_its_end() -> None:
    told = Told(snapshot(user(3, "go"), run=[3]))
    told.tell(MessageStart(seq=1, task=5), delta("one "))
    shown = told.tell(snapshot(user(3, "go"), answer(6, "one two", calls=[(7, "bash")]), run=[3]))
    assert shown == "two\n"
    other = Told(snapshot(user(3, "go"), run=[3]))
    other.tell(MessageStart(seq=1, task=5), delta("one "))
    assert "cut off" in other.tell(snapshot(user(3, "go"), run=[3]))


def test_entries_that_are_out_of_sight_are_said_to_be_missing() -> None:
    told = Told(snapshot(user(3, "go")))
    shown = told.tell(snapshot(user(30, "much later"), more=True))
    assert shown == "  ┆ entries in between: perdure show --all\n\n> much later\n"


def test_the_queue_and_calls_are_taken_over() -> None:
    told = Told(snapshot(user(3, "go"), run=[3], queued=[item(10, "a"), item(11, "b")]))
    told.tell(started(), output("x\n"))
    shown = told.tell(
        snapshot(
            user(3, "go"),
            run=[3],
            tools={"7": live_tool("bash", "x\ny\n"), "8": live_tool("bash")},
            queued=[item(11, "b"), item(12, "c")],
            retry={"attempt": 2, "until": NOW, "code": "overloaded", "message": "m"},
        )
    )
    assert shown == "withdrawn a\nqueued    c\n· overloaded: m; asked again in 0 seconds\n"
    assert told.tell(output("z\n")) == ""
    assert told.tell(ended(result(9, 7, "x\ny\nz"))) == "  │ y\n  │ z\n"


async def test_a_consumer_that_falls_behind_tells_the_same(tmp_path: Path) -> None:
    """Through the real stream of events: one consumer keeps up, the other looks again only at the end."""
    model = ScriptedModel({"go": [call("bash", command="echo out"), say("It is " + "long " * 50)]})
    places = Places()
    async with Harness.open(
        SqliteStorage(tmp_path / "a.db"), models=model, extensions=[coding_tools()], environment=places.environment_of
    ) as harness:
        await places.attach(harness.session)
        root = await harness.root(agent=Agent(cwd=str(tmp_path)))
        quick, slow = Told(), Told()
        async with root.events() as events, root.events() as late:
            assert isinstance(await anext(events), Snapshot)
            assert isinstance(await anext(late), Snapshot)
            for _ in range(40):
                submission = await root.submit("go")
                while not quick.story.has_ended(submission.id):
                    quick.tell(await anext(events))
            # So much has happened that the other one gets a snapshot in place of the beginning.
            first = await anext(late)
            assert isinstance(first, Snapshot)
            slow.tell(first)
            async with asyncio.timeout(60):
                while slow.paper.text.count("long \n") < 40:
                    slow.tell(await anext(late))
        assert quick.paper.text.count("> go\n▸ bash  echo out\n  │ out\nIt is long") == 40
        assert slow.paper.text.count("> go\n▸ bash  echo out\n  │ out\nIt is long") == 40


# --- after a crash -----------------------------------------------------------------------------------------------

KILLED = HolderLine(pid=77, host="here", since=0, state="ended")


def said_of(
    first: Snapshot,
    *,
    killed: HolderLine | None = KILLED,
    opened_at: int = 1,
    elsewhere: Sequence[int] = (),
    tools: Sequence[AnyTool] = (),
    space: SpaceState | None = None,
) -> list[str]:
    told = Told(first)
    registry = Registry()
    registry.install(coding_tools(), Extension("more", tools=tools))
    tasks = [
        LiveTask(
            id=100 + number,
            conversation_id=number,
            kind="pi.tool",
            version=1,
            owner=None,
            background=False,
            status="pending",
            phase="execute",
        )
        for number in (1, *elsewhere)
    ]
    found = resumed(
        Scene.of(first),
        told.story,
        conversation=1,
        killed=killed,
        opened_at=opened_at,
        registry=registry,
        agent=Agent(),
        tasks=tasks,
        space=space,
    )
    return lines(found)


def test_nothing_is_said_of_a_conversation_at_rest() -> None:
    assert said_of(snapshot(user(3, "go"), answer(4, "gone"))) == []
    # Nor of a run that mail has begun meanwhile: snapshots here are of runs that began at 0.
    assert said_of(snapshot(user(3, "go"), run=[3]), opened_at=0) == []


def test_each_call_is_told_with_what_becomes_of_it() -> None:
    calls = answer(6, calls=[(7, "bash"), (8, "read"), (9, "edit"), (10, "of another program")])
    first = snapshot(
        user(3, "go"),
        calls,
        run=[3],
        tools={
            "7": live_tool("bash", "\n".join(map(str, range(12))), dropped=100),
            "8": live_tool("read"),
            "9": live_tool("edit", state="waiting"),
            "10": live_tool("of another program"),
        },
    )
    unknown = "  was running, with the output above until then; it may have had its effect"
    assert said_of(first) == [
        "",
        "Process 77 was killed in the middle of a run. It goes on from what is stored.",
        "▸ bash",
        "  ┆ 104 lines",
        *(f"  │ {number}" for number in range(4, 12)),
        unknown,
        "▸ read",
        "  was running; it is safe to repeat and runs again",
        "▸ edit",
        "  had not begun; it runs now",
        "▸ of another program",
        unknown,
    ]


def test_a_call_in_a_space_is_told_by_what_its_tool_says_of_its_arguments() -> None:
    def which(arguments: Mapping[str, JsonValue]) -> Effects:
        return "space" if arguments["where"] == "here" else "world"

    @tool(effects=which)
    async def work(where: str) -> str:
        """Work."""
        return where

    parts = [ToolCallPart(f"c{at}", "work", to_raw({"where": where})) for at, where in ((7, "here"), (8, "there"))]
    message = AssistantMessage(content=tuple(parts), provider="test", model="m", stop_reason="tool_use")
    round = entry(6, "pi.assistant", message, {"calls": [7, 8]})
    first = snapshot(user(3, "go"), round, run=[3], tools={"7": live_tool("work"), "8": live_tool("work")})
    assert said_of(first, tools=[work], space=SpaceState())[2:] == [
        '▸ work  {"where": "here"}',
        "  was running in its Space: it is undone and runs again",
        '▸ work  {"where": "there"}',
        "  was running, with the output above until then; it may have had its effect",
    ]


def test_a_request_is_told_with_how_far_it_was() -> None:
    left = "The last chat was left in the middle of a run. It goes on from what is stored."
    assert said_of(snapshot(run=[3], message=partial("I think,\nthat")), killed=None)[1:] == [
        left,
        "  The answer was cut off, after “I think, that”. It is asked for again.",
    ]
    assert said_of(snapshot(run=[3]), killed=None)[1:] == [
        left,
        "  The answer had not begun. It is asked for again.",
    ]
    retry: JsonValue = {"attempt": 2, "until": NOW, "code": "overloaded", "message": "m"}
    assert said_of(snapshot(run=[3], retry=retry))[2:] == ["  The request had failed (overloaded). It is sent again."]
    waiting = said_of(snapshot(run=[3], deferred=cast("JsonValue", {**WAITING, "polls": 2})))[2]
    assert waiting.startswith("  test:m makes the answer in the background: job1, asked for 2 times, next at ")


def test_what_waits_and_what_goes_on_elsewhere_is_told() -> None:
    queued = [item(10, "later"), item(11, "left", "steer")]
    assert said_of(snapshot(queued=queued), elsewhere=(4, 2, 4))[1:] == [
        "This waits from before; the next input starts it.",
        "queued    later",
        "steering  left",
        "· Work of conversations 2, 4 goes on as well.",
    ]
    assert said_of(snapshot(), elsewhere=(9,)) == ["· Work of conversation 9 goes on as well."]


# --- places ------------------------------------------------------------------------------------------------------


async def test_each_conversation_works_in_its_own_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    model = ScriptedModel({"go": [call("bash", command="pwd"), say("gone")]})
    places = Places()
    async with Harness.open(
        SqliteStorage(tmp_path / "a.db"), models=model, extensions=[coding_tools()], environment=places.environment_of
    ) as harness:
        await places.attach(harness.session)
        directories: list[str | None] = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "gone"), None]
        talks: list[Conversation] = [
            await harness.create_conversation(agent=Agent(cwd=directory)) for directory in directories
        ]
        results: list[str] = []
        for talk in talks:
            entries = await (await talk.submit("go")).run()
            (found,) = [each for each in entries if each.kind == "pi.tool-result"]
            results.append(str(found.messages))
    assert f"{tmp_path}/a\\n" in results[0]
    assert f"{tmp_path}/b\\n" in results[1]
    assert all("tool_unavailable" in each for each in results[2:])
