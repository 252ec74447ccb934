"""Records: immutable, strict JSON inside, and the moves a task record may make (rules K15 to K19, K30 to K40)."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import pytest

from kernel.samples import Note, conversation, there
from kernel.stores import HeldStorage
from perdure.kernel.entries import Entry
from perdure.kernel.errors import InvalidTransition, NotJson
from perdure.kernel.json import JsonValue
from perdure.kernel.records import (
    Aborted,
    Address,
    Completed,
    Completing,
    ConversationRecord,
    Edit,
    EntryRecord,
    Failed,
    Faulted,
    ForkPoint,
    Orphaned,
    Outcome,
    Pending,
    Running,
    Sleeping,
    SubmissionRecord,
    TaskError,
    TaskRecord,
    TaskState,
    Terminal,
    Waiting,
    check_task_move,
    to_raw,
)
from perdure.kernel.session import Session


class Part(msgspec.Struct, frozen=True):
    name: str
    sizes: tuple[int, ...] = ()
    ratio: float = 1.0


class Whole(Entry, kind="app.whole"):
    any: Any = None
    count: int = 0
    share: float = 0.0
    part: Part | None = None
    parts: list[Part] | None = None

    def messages(self) -> list[JsonValue]:
        return [self.any]


CYCLE: list[object] = []
CYCLE += [CYCLE, CYCLE]

NOT_JSON: list[tuple[object, str]] = [
    (math.nan, ""),
    (math.inf, ""),
    ({1, 2}, ""),
    (frozenset(), ""),
    (b"bytes", ""),
    ((1, 2), ""),
    ({1: 2}, ""),
    ({"a": [0, {"b": (1,)}]}, ".a[1].b"),
    ([0, b""], "[1]"),
    ("\ud800", ""),
    (2**63, ""),
    (-(2**63) - 1, ""),
    (CYCLE, "[0]"),
    (object(), ""),
    (1 + 2j, ""),
]


@pytest.mark.parametrize(("value", "path"), NOT_JSON)
def test_an_entry_refuses_what_is_not_json_with_its_path(value: object, path: str) -> None:
    """Rules K35 to K38: before the encoder could make something else of it."""
    with pytest.raises(NotJson) as refused:
        Whole(any=value).to_json()
    assert refused.value.path == f"app.whole.any{path}"


@pytest.mark.parametrize(
    "value", [None, True, 1, 1.0, -0.0, "é𝄞", [], {}, [1, [True, {"a": 1.0}]], 2**63 - 1, -(2**63)]
)
def test_an_entry_gives_back_what_it_was_given(value: JsonValue) -> None:
    """Rule K40: with the same types, as data and by its class."""
    data = Whole(any=value).to_json()
    record = EntryRecord(id=1, seq=1, created_at=1, conversation_id=1, kind="app.whole", raw_data=to_raw(data))
    assert repr(Whole.read(record).any) == repr(value)
    assert isinstance(record.data, dict)
    assert repr(record.data["any"]) == repr(value)


def test_parts_of_an_entry_are_structs() -> None:
    """Rule K40: they come back as what they were."""
    part = Part("a", sizes=(1, 2), ratio=0.5)
    entry = Whole(part=part, parts=[part, Part("b")])
    data = entry.to_json()
    assert isinstance(data, dict)
    assert data["part"] == {"name": "a", "sizes": [1, 2], "ratio": 0.5}
    record = EntryRecord(id=1, seq=1, created_at=1, conversation_id=1, kind="app.whole", raw_data=to_raw(data))
    assert Whole.read(record) == entry
    assert record.data_as(Whole) == entry


@pytest.mark.parametrize(
    "entry",
    [
        lambda: Whole(count="1"),  # pyright: ignore[reportArgumentType]
        lambda: Whole(count=True),
        lambda: Whole(share=1),
        lambda: Whole(any=Part("a")),
        lambda: Whole(part=Part("a", ratio=math.nan)),
        lambda: Whole(part=Part("a", sizes=[1])),  # pyright: ignore[reportArgumentType]
        lambda: Whole(part={"name": "a"}),  # pyright: ignore[reportArgumentType]
    ],
)
def test_an_entry_that_would_not_come_back_as_it_is_is_refused(entry: Any) -> None:
    """Rules K39 and K40: at the write, not when somebody reads it a month later."""
    with pytest.raises(NotJson, match=r"app\.whole"):
        entry().to_json()


async def test_a_refused_entry_is_not_appended() -> None:
    """Rule K35: neither for its data nor for its messages; the transaction goes on."""
    async with Session.open(HeldStorage()) as session:
        place = await conversation(session)
        async with session.commit(conversation_id=place) as tx:
            with pytest.raises(NotJson):
                tx.append(Whole(any={1}))
            with pytest.raises(NotJson, match=r"app\.whole\.messages"):
                tx.append(Loud())
            assert tx.new_entries == []
            kept = tx.append(Whole(any="hello"))
        stored = there(await session.entry(kept.id))
        assert Whole.read(stored) == Whole(any="hello")
        assert stored.messages == ["hello"]
        with pytest.raises(ValueError, match=r"app\.whole"):
            Note.read(stored)


class Loud(Entry, kind="app.whole"):
    def messages(self) -> list[JsonValue]:
        return [(1, 2)]  # pyright: ignore[reportReturnType]


def test_entry_declarations_that_make_no_sense_are_refused() -> None:
    """Rule K16: reserved kinds, no kind, fields that would hide what an entry has."""
    for kind in ("", "pi.mine"):
        with pytest.raises(TypeError):
            type("Bad", (Entry,), {}, kind=kind)
    for name in ("kind", "messages", "read", "to_json"):
        with pytest.raises(TypeError):
            type("Bad", (Entry,), {"__annotations__": {name: "int"}}, kind="app.bad")
    with pytest.raises(TypeError):
        Note(1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(AttributeError):
        Note(n=1).n = 2  # pyright: ignore[reportAttributeAccessIssue]


RECORDS = [
    ConversationRecord(id=2, created_at=1, parent=ForkPoint(1, 5), owner=7),
    EntryRecord(
        id=3,
        seq=2,
        created_at=1,
        conversation_id=2,
        kind="app.note",
        raw_messages=to_raw(["a"]),
        raw_data=to_raw({"n": 1.0}),
        head=3,
        edits=(Edit(entry=1), Edit(entry=2, replace=to_raw([]))),
        by_task=4,
    ),
    SubmissionRecord(id=4, conversation_id=2, type="input", status="placed", digest="d", created_at=1, request_id="r"),
]

OUTCOMES: list[Outcome] = [
    Completed(to_raw({"a": [1, 1.0, True]})),
    Failed(TaskError("no_stock", "there is none")),
    Aborted("by hand"),
    Faulted(TaskError("raised", "KeyError")),
    Orphaned("no code"),
]

STATES: list[TaskState] = [
    Pending(phase="start"),
    Running(phase="start", fresh=True),
    Waiting(phase="next", raw_checkpoint=to_raw(1), on=(3, 4), policy="fail_fast"),
    Waiting(phase="next", signal="approval", deadline=9),
    Sleeping(phase="next", until=9),
    *(Completing(outcome) for outcome in OUTCOMES),
    *(Terminal(outcome) for outcome in OUTCOMES),
]


def task(state: TaskState, **changes: Any) -> TaskRecord:
    record = TaskRecord(id=9, conversation_id=2, kind="app.task", version=2, created_at=1, state=state, nonce="n")
    return msgspec.structs.replace(record, **changes)


@pytest.mark.parametrize("record", [*RECORDS, *(task(state) for state in STATES)], ids=lambda r: type(r).__name__)
def test_a_record_is_the_same_after_it_was_stored(record: msgspec.Struct) -> None:
    """Rules K15 to K18 and K40."""
    again = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
    assert again == record
    assert msgspec.json.encode(again) == msgspec.json.encode(record)


@pytest.mark.parametrize("record", [*RECORDS, task(STATES[0])], ids=lambda r: type(r).__name__)
def test_a_record_is_immutable(record: msgspec.Struct) -> None:
    """Rule K31."""
    with pytest.raises(AttributeError):
        record.id = 7  # pyright: ignore[reportAttributeAccessIssue]


def test_json_in_a_record_is_detached() -> None:
    """Rule K32: every read decodes it anew."""
    record = task(
        Pending(phase="a", raw_checkpoint=to_raw([])),
        raw_input=to_raw([]),
        raw_memos=to_raw({"m": []}),
        raw_signals=to_raw({"s": []}),
    )
    state = record.state
    assert isinstance(state, Pending)
    reads: list[Any] = [
        lambda: record.input,
        lambda: record.memos["m"],
        lambda: record.signals["s"],
        lambda: state.checkpoint,
    ]
    for read in reads:
        read().append(1)
        assert read() == []
    record.memos["x"] = 1
    assert list(record.memos) == ["m"]


def test_a_task_begins_pending_or_running() -> None:
    """Rule K18, and rule T8 for what it may not begin as."""
    for state in STATES:
        if isinstance(state, (Pending, Running)):
            check_task_move(None, task(state))
            with pytest.raises(InvalidTransition):
                check_task_move(None, task(state, abort_requested=True))
        else:
            with pytest.raises(InvalidTransition):
                check_task_move(None, task(state))


def test_a_task_moves_while_it_is_live_and_never_again() -> None:
    """Rules K7, K8 and T56: a held outcome is final, an end is an end."""
    for old in STATES:
        for new in STATES:
            before, after = task(old), task(new)
            ended = isinstance(old, Terminal)
            changes_outcome = isinstance(old, Completing) and after.outcome != before.outcome
            if ended or changes_outcome:
                with pytest.raises(InvalidTransition):
                    check_task_move(before, after)
            else:
                check_task_move(before, after)


@pytest.mark.parametrize(
    "change",
    [
        {"conversation_id": 3},
        {"kind": "app.other"},
        {"owner": 5},
        {"background": True},
        {"nonce": "m"},
        {"created_at": 2},
        {"version": 1},
    ],
)
def test_what_a_task_is_never_changes(change: dict[str, Any]) -> None:
    """Rules K30 and T51: its place, kind, owner and nonce; its version only grows."""
    with pytest.raises(InvalidTransition):
        check_task_move(task(STATES[0]), task(STATES[1], **change))
    check_task_move(task(STATES[0]), task(STATES[1], version=3, raw_input=to_raw(1)))


def test_an_abort_mark_is_never_taken_back_and_background_is_of_conversations() -> None:
    """Rules T69 and T71."""
    marked = task(STATES[0], abort_requested=True)
    with pytest.raises(InvalidTransition):
        check_task_move(marked, task(STATES[1]))
    with pytest.raises(InvalidTransition):
        check_task_move(None, task(STATES[0], background=True, owner=3))
    check_task_move(None, task(STATES[0], background=True))


def test_a_tasks_status_and_outcome_are_read_from_its_state() -> None:
    """Rules T6 to T16."""
    names = [task(state).status for state in STATES]
    assert names[:5] == ["pending", "running", "waiting", "waiting", "sleeping"]
    assert set(names[5:10]) == {"completing"}
    assert set(names[10:]) == {"terminal"}
    assert [task(state).live for state in STATES] == [True] * 10 + [False] * 5
    assert [task(state).outcome for state in STATES] == [None] * 5 + OUTCOMES + OUTCOMES
    done = task(Terminal(OUTCOMES[0])).outcome
    assert isinstance(done, Completed)
    assert repr(done.result) == "{'a': [1, 1.0, True]}"


def test_addresses_of_one_place_are_one_key() -> None:
    """Rule K112: incarnations share the address."""
    assert Address("app.a", "session") == Address("app.a", "session", 0, "")
    assert len({Address("app.a", "task", 1), Address("app.a", "task", 2), Address("app.a", "conversation", 1)}) == 3


@pytest.mark.parametrize("value", [{1}, (1,), b"", math.nan, {1: 1}])
def test_to_raw_checks_before_it_encodes(value: object) -> None:
    """Rule K38."""
    with pytest.raises(NotJson):
        to_raw(value)


class Tagged(msgspec.Struct, frozen=True, tag="sealed"):
    n: int


class Sealed(Entry, kind="app.sealed"):
    state: Literal["open", "shut"] = "open"
    part: Tagged | None = None


@pytest.mark.parametrize("wrong", [{"state": "hunter2"}, {"part": {"type": "hunter2", "n": 1}}])
def test_what_is_wrong_with_an_entry_is_said_without_its_contents(wrong: dict[str, Any]) -> None:
    """Rule K136."""
    with pytest.raises(NotJson, match=r"app\.sealed") as refused:
        Sealed(**wrong).to_json()
    assert "hunter2" not in str(refused.value)
