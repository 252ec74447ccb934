"""The model's context, derived entry by entry (rules H55 to H62)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from perdure.harness.context import ModelContext
from perdure.harness.documents import (
    ASSISTANT,
    SYSTEM,
    TOOL_RESULT,
    USER,
    AssistantData,
    SystemData,
    ToolResultData,
)
from perdure.harness.messages import (
    AssistantMessage,
    Message,
    StopReason,
    SystemMessage,
    Text,
    ToolCallPart,
    ToolResultMessage,
    UserMessage,
    encode_messages,
)
from perdure.kernel.records import EMPTY_LIST, NULL, Edit, EntryRecord

encode = msgspec.json.encode


def entry(
    id: int,
    kind: str,
    *messages: Message,
    data: object = None,
    head: int | None = None,
    edits: Sequence[Edit] = (),
) -> EntryRecord:
    return EntryRecord(
        id=id,
        seq=id,
        created_at=0,
        conversation_id=1,
        kind=kind,
        raw_messages=encode_messages(messages) if messages else EMPTY_LIST,
        raw_data=NULL if data is None else msgspec.Raw(encode(data)),
        head=head,
        edits=tuple(edits),
    )


def user(id: int, text: str, **more) -> EntryRecord:
    return entry(id, USER, UserMessage((Text(text),)), **more)


def answer(
    id: int, text: str, calls: Sequence[tuple[str, int]] = (), stop: StopReason | None = None, **more
) -> EntryRecord:
    message = AssistantMessage(
        content=(Text(text), *(ToolCallPart(call, "look") for call, _ in calls)),
        provider="scripted",
        model="m",
        stop_reason=stop or ("tool_use" if calls else "stop"),
    )
    return entry(id, ASSISTANT, message, data=AssistantData(calls=tuple(task for _, task in calls)), **more)


def result(id: int, call: str, task: int, text: str = "found") -> EntryRecord:
    message = ToolResultMessage(call_id=call, name="look", content=(Text(text),))
    return entry(id, TOOL_RESULT, message, data=ToolResultData(task=task, call_id=call, name="look"))


def system(id: int, text: str, baseline: bool = False) -> EntryRecord:
    return entry(id, SYSTEM, SystemMessage(text), data=SystemData(sections={"s": text}, baseline=baseline))


def scratch(entries: Sequence[EntryRecord]) -> ModelContext:
    """What a reader that comes fresh derives: from the newest head on."""
    marker = next((e for e in reversed(entries) if e.head is not None), None)
    start = 0 if marker is None or marker.head is None else marker.head
    context = ModelContext(marker)
    for e in entries:
        if e.id >= start:
            assert context.feed(e)
    return context


def shown(messages: Sequence[Message]) -> list[str]:
    """Messages in short: role and text, calls by id."""
    short: list[str] = []
    for m in messages:
        match m:
            case SystemMessage(text):
                short.append(f"system {text}")
            case UserMessage():
                short.append(f"user {m.text}")
            case AssistantMessage():
                short.append(" ".join(["assistant", m.text, *(f"call {c.id}" for c in m.tool_calls)]))
            case ToolResultMessage():
                short.append(f"result {m.call_id} {'missing' if m.is_error else m.text}")
    return short


def test_results_follow_their_call_in_call_order_whatever_order_they_came_in_h58() -> None:
    entries = [user(1, "go"), answer(2, "look", [("a", 90), ("b", 91)]), result(3, "b", 91), result(4, "a", 90)]
    assert shown(scratch(entries).messages()) == [
        "user go",
        "assistant look call a call b",
        "result a found",
        "result b found",
    ]


def test_what_came_between_a_call_and_its_result_stands_behind_the_result_h58() -> None:
    entries = [answer(2, "look", [("a", 90)]), user(3, "by the way"), result(4, "a", 90)]
    assert shown(scratch(entries).messages()) == ["assistant look call a", "result a found", "user by the way"]


def test_a_missing_result_is_made_up_as_an_error_h59() -> None:
    messages = scratch([answer(2, "look", [("a", 90), ("b", 91)]), result(4, "b", 91), user(5, "and?")]).messages()
    assert shown(messages) == ["assistant look call a call b", "result a missing", "result b found", "user and?"]
    made_up = messages[1]
    assert isinstance(made_up, ToolResultMessage)
    assert made_up.code == "interrupted"


def test_a_result_without_its_call_is_dropped_h59() -> None:
    entries = [
        user(1, "go"),
        result(2, "a", 90),
        answer(3, "look", [("b", 91)]),
        result(4, "a", 92),
        result(5, "b", 91),
    ]
    assert shown(scratch(entries).messages()) == ["user go", "assistant look call b", "result b found"]


def test_a_second_result_for_one_call_is_dropped_h59() -> None:
    entries = [answer(3, "look", [("b", 91)]), result(4, "b", 91, "first"), result(5, "b", 91, "second")]
    assert shown(scratch(entries).messages()) == ["assistant look call b", "result b first"]


def test_two_calls_with_one_id_stay_two_each_with_its_own_result_h59() -> None:
    entries = [answer(2, "look", [("a", 90), ("a", 91)]), result(3, "a", 91, "second"), result(4, "a", 90, "first")]
    assert shown(scratch(entries).messages()) == [
        "assistant look call a call a",
        "result a first",
        "result a second",
    ]


def test_one_id_in_two_answers_stays_two_h59() -> None:
    entries = [
        answer(2, "look", [("a", 90)]),
        result(3, "a", 90, "first"),
        answer(4, "look again", [("a", 91)]),
        result(5, "a", 91, "second"),
    ]
    assert shown(scratch(entries).messages())[1::2] == ["result a first", "result a second"]


def test_without_tasks_a_result_is_for_the_nearest_answer_with_its_id_in_order_h59() -> None:
    def plain(id: int, text: str) -> EntryRecord:
        return entry(id, "app.import", ToolResultMessage(call_id="a", name="look", content=(Text(text),)))

    old = answer(2, "one", [("a", 0)])
    new = answer(3, "two", [("a", 0), ("a", 0)])
    entries = [
        msgspec.structs.replace(old, kind="app.import"),
        msgspec.structs.replace(new, kind="app.import"),
        plain(4, "x"),
        plain(5, "y"),
        plain(6, "z"),
    ]
    assert shown(scratch(entries).messages()) == [
        "assistant one call a",
        "result a z",
        "assistant two call a call a",
        "result a x",
        "result a y",
    ]


def test_aborted_and_failed_answers_are_left_out_with_their_results_h60() -> None:
    entries = [
        user(1, "go"),
        answer(2, "half", [("a", 90)], stop="aborted"),
        result(3, "a", 90),
        answer(4, "broken", stop="error"),
        answer(5, "whole"),
    ]
    assert shown(scratch(entries).messages()) == ["user go", "assistant whole"]


def test_the_baseline_comes_first_and_deltas_where_they_stand_h61() -> None:
    entries = [user(1, "go"), system(2, "base", True), answer(3, "yes"), user(4, "more"), system(5, "delta")]
    assert shown(scratch(entries).messages()) == [
        "system base",
        "user go",
        "assistant yes",
        "user more",
        "system delta",
    ]


def test_the_newest_head_begins_the_context_h56() -> None:
    entries = [
        system(1, "old", True),
        user(2, "go"),
        user(3, "first reset", head=3),
        user(4, "more"),
        user(5, "second reset", head=5),
        system(6, "new", True),
        user(7, "on"),
    ]
    assert shown(scratch(entries).messages()) == ["system new", "user second reset", "user on"]


def test_a_head_that_points_back_comes_first_and_keeps_what_it_points_at_h56() -> None:
    entries = [
        system(1, "old", True),
        user(2, "long ago"),
        user(3, "kept"),
        system(4, "old delta"),
        answer(5, "kept too"),
        user(6, "summary", head=3),
        system(7, "new", True),
        user(8, "on"),
        user(9, "later summary", head=5),
    ]
    assert shown(scratch(entries[:8]).messages()) == [
        "system new",
        "user summary",
        "user kept",
        "assistant kept too",
        "user on",
    ]
    assert shown(scratch(entries).messages()) == ["user later summary", "assistant kept too", "user on"]


def test_the_newest_edit_of_an_entry_wins_h57() -> None:
    entries = [
        user(1, "one"),
        user(2, "two"),
        user(3, "three"),
        entry(
            4, "app.edit", edits=[Edit(entry=1), Edit(entry=2, replace=encode_messages([UserMessage((Text("2"),))]))]
        ),
        entry(5, "app.edit", edits=[Edit(entry=1, replace=encode_messages([UserMessage((Text("1"),))]))]),
    ]
    assert shown(scratch(entries).messages()) == ["user 1", "user 2", "user three"]


def test_omitting_a_call_drops_its_result_and_omitting_a_result_makes_one_up_h59() -> None:
    base = [user(1, "go"), answer(2, "look", [("a", 90)]), result(3, "a", 90), answer(4, "done")]
    without_call = [*base, entry(5, "app.edit", edits=[Edit(entry=2)])]
    assert shown(scratch(without_call).messages()) == ["user go", "assistant done"]
    without_result = [*base, entry(5, "app.edit", edits=[Edit(entry=3)])]
    assert shown(scratch(without_result).messages()) == [
        "user go",
        "assistant look call a",
        "result a missing",
        "assistant done",
    ]


def test_an_edit_can_give_messages_to_an_entry_that_had_none_h57() -> None:
    words = encode_messages([UserMessage((Text("now said"),))])
    entries = [
        entry(1, "app.note", data={"n": 1}),
        user(2, "go"),
        entry(3, "app.edit", edits=[Edit(entry=1, replace=words)]),
    ]
    assert shown(scratch(entries).messages()) == ["user now said", "user go"]


def test_messages_no_model_can_read_are_left_out_and_named() -> None:
    broken = msgspec.structs.replace(user(2, "x"), raw_messages=msgspec.Raw(b'[{"role":"wizard"}]'))
    context = scratch([user(1, "go"), broken])
    assert shown(context.messages()) == ["user go"]
    assert context.invalid == [2]


def test_a_head_behind_the_context_asks_for_a_new_one_h56() -> None:
    context = scratch([user(1, "a"), user(2, "reset", head=2), user(3, "b")])
    assert not context.feed(user(4, "far back", head=1))


def test_feeding_what_is_new_copies_and_changes_nothing_of_what_was_h62() -> None:
    context = scratch([system(1, "base", True), user(2, "go"), answer(3, "look", [("a", 90)]), result(4, "a", 90)])
    first = context.messages()
    inner = first._list
    context.feed(answer(5, "done"))
    context.feed(user(6, "more"))
    second = context.messages()
    assert second._list is inner
    assert all(a is b for a, b in zip(first, second, strict=False))
    assert (len(first), len(second)) == (4, 6)


def test_a_message_is_decoded_where_somebody_first_looks_at_it_h62() -> None:
    context = scratch([user(1, "go"), answer(2, "look", [("a", 90)]), result(3, "a", 90), answer(4, "done")])
    first, second = context.messages(), context.messages()
    assert all(type(piece) is bytes for piece in first._list[1:])
    last = first[-1]
    assert (first[-1], second[-1], second[3:][0]) == (last, last, last)
    assert first[-1] is last
    assert second[3] is last
    assert all(type(piece) is bytes for piece in first._list[1:-1])


# --- properties -----------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[EntryRecord]:
    """Any order of entries, the senseless ones included."""
    entries: list[EntryRecord] = []
    task = 1000
    tasks: list[tuple[str, int]] = []
    start = 0
    for id in range(1, draw(st.integers(1, 24)) + 1):
        what = draw(
            st.sampled_from(["user", "answer", "bad", "result", "stray", "system", "note", "edit", "head", "app"])
        )
        if what == "user":
            entries.append(user(id, f"u{id}"))
        elif what in ("answer", "bad"):
            calls: list[tuple[str, int]] = []
            for label in draw(st.lists(st.sampled_from("ab"), max_size=3)):
                task += 1
                calls.append((label, task))
            tasks.extend(calls)
            stop: StopReason | None = draw(st.sampled_from(["error", "aborted"])) if what == "bad" else None
            entries.append(answer(id, f"a{id}", calls, stop=stop))
        elif what == "result" and tasks:
            call, number = draw(st.sampled_from(tasks))
            entries.append(result(id, call, number, f"r{id}"))
        elif what == "system":
            entries.append(system(id, f"s{id}"))
        elif what == "edit" and entries:
            target = draw(st.sampled_from(entries)).id
            words = draw(st.sampled_from([NULL, encode_messages([UserMessage((Text(f"e{id}"),))])]))
            entries.append(entry(id, "app.edit", edits=[Edit(entry=target, replace=words)]))
        elif what == "head":
            # A head never reaches back before the active range: such a write settles stale (rule H47).
            start = draw(st.sampled_from([id, *(e.id for e in entries if e.id >= start)]))
            entries.append(user(id, f"h{id}", head=start))
        elif what == "app":
            # An application's own pair, matched by its label alone.
            entries.append(
                entry(
                    id,
                    "app.pair",
                    AssistantMessage(
                        content=(ToolCallPart("b", "look"),), provider="app", model="m", stop_reason="tool_use"
                    ),
                    ToolResultMessage(call_id="b", name="look", content=(Text(f"p{id}"),)),
                )
            )
        else:
            entries.append(entry(id, "app.note", data={"id": id}))
    return entries


def assert_well_formed(messages: Sequence[Message]) -> None:
    waiting: list[ToolCallPart] = []
    for message in messages:
        if isinstance(message, ToolResultMessage):
            assert waiting, "a result without a call"
            assert waiting.pop(0).id == message.call_id, "results come in the order of the calls"
            continue
        assert not waiting, "a call without a result"
        if isinstance(message, AssistantMessage):
            assert message.stop_reason not in ("error", "aborted")
            waiting = list(message.tool_calls)
    assert not waiting


@given(histories())
def test_whatever_the_entries_calls_and_results_are_paired_h58_h59(entries: list[EntryRecord]) -> None:
    assert_well_formed(scratch(entries).messages())


@given(histories())
def test_fed_one_by_one_it_is_what_a_fresh_reader_derives_h62(entries: list[EntryRecord]) -> None:
    context = ModelContext()
    handed_out: list[tuple[Sequence[Message], list[Message]]] = []
    for at, e in enumerate(entries):
        assert context.feed(e)
        view = context.messages()
        fresh = list(scratch(entries[: at + 1]).messages())
        assert list(view) == fresh
        handed_out.append((view, fresh))
    for view, then in handed_out:
        assert list(view) == then, "what was handed out never changes"


@given(histories())
def test_what_nobody_looked_at_meanwhile_is_the_same_h62(entries: list[EntryRecord]) -> None:
    context = ModelContext()
    handed_out: list[Sequence[Message]] = []
    for e in entries:
        assert context.feed(e)
        handed_out.append(context.messages())
    for at, view in enumerate(handed_out):
        assert list(view) == list(scratch(entries[: at + 1]).messages())


@given(histories())
def test_deriving_again_from_the_derived_changes_nothing_h58(entries: list[EntryRecord]) -> None:
    once = list(scratch(entries).messages())
    system_first = bool(once) and isinstance(once[0], SystemMessage)
    again = [
        entry(at + 1, SYSTEM if at == 0 and system_first else "app.any", message) for at, message in enumerate(once)
    ]
    assert list(scratch(again).messages()) == once
