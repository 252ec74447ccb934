"""Where a context may be cut, how its tokens are counted, what a summary is asked with (rules H138, H200 to H205)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_context import answer, entry, result, scratch, system, user

from perdure.harness.context import ModelContext
from perdure.harness.documents import ASSISTANT, COMPACTION, USER
from perdure.harness.messages import (
    AssistantMessage,
    Image,
    Message,
    SystemMessage,
    Text,
    ToolResultMessage,
    Usage,
    UserMessage,
    encode_messages,
)
from perdure.harness.summary import FEWEST_BYTES, PREAMBLE, joined, shortened, summary_message, summary_request
from perdure.harness.tokens import IMAGE_TOKENS, Count, tokens_of
from perdure.kernel.records import NULL, Edit, EntryRecord

DEAD: Callable[[int], bool] = lambda task: False  # noqa: E731


def compaction(id: int, head: int, text: str = "summary") -> EntryRecord:
    return entry(id, COMPACTION, summary_message(text), head=head)


def bare(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not isinstance(message, SystemMessage)]


def told(id: int, usage: Usage, text: str = "ok") -> EntryRecord:
    message = AssistantMessage(content=(Text(text),), provider="p", model="m", stop_reason="stop", usage=usage)
    return entry(id, ASSISTANT, message)


# --- transcripts by chance --------------------------------------------------------------------------------------


@st.composite
def transcripts(draw: st.DrawFn) -> tuple[list[EntryRecord], set[int]]:
    """Entries, and the tasks that are still live: calls of the last round whose results have not come."""
    entries: list[EntryRecord] = []
    ids = iter(range(1, 10_000))
    tasks = iter(range(10_000, 20_000))
    live: set[int] = set()
    steps = draw(
        st.lists(st.sampled_from(["user", "answer", "round", "system", "display", "edit", "head"]), max_size=14)
    )
    for number, step in enumerate(steps):
        text = "x" * draw(st.integers(0, 60))
        if step == "user":
            entries.append(user(next(ids), text or "hi"))
        elif step == "answer":
            entries.append(answer(next(ids), text or "ok", stop=draw(st.sampled_from(["stop", "aborted", "error"]))))
        elif step == "system":
            entries.append(system(next(ids), text))
        elif step == "display":
            entries.append(entry(next(ids), "app.audit"))
        elif step == "edit" and any(e.kind == USER for e in entries):
            target = draw(st.sampled_from([e.id for e in entries if e.kind == USER]))
            replace = draw(st.sampled_from([NULL, encode_messages([UserMessage((Text("edited"),))])]))
            entries.append(entry(next(ids), "app.edit", edits=[Edit(entry=target, replace=replace)]))
        elif step == "head" and entries:
            marker = next((e for e in reversed(entries) if e.head is not None), None)
            first = 0 if marker is None or marker.head is None else marker.head
            able = [e.id for e in entries if e.id >= first]
            entries.append(compaction(next(ids), draw(st.sampled_from(able)), text))
        elif step == "round":
            calls = [(f"c{draw(st.integers(0, 2))}", next(tasks)) for _ in range(draw(st.integers(1, 3)))]
            entries.append(answer(next(ids), text, calls))
            for call, task in draw(st.permutations(calls)):
                fate = draw(st.sampled_from(["comes", "comes", "never"]))
                if fate == "comes":
                    if draw(st.booleans()):
                        entries.append(user(next(ids), "between"))
                    entries.append(result(next(ids), call, task, text or "found"))
                elif number == len(steps) - 1:
                    live.add(task)
    return entries, live


@given(transcripts(), st.integers(0, 200), st.integers(1, 20))
def test_a_cut_separates_no_call_from_its_result_and_loses_nothing_h133_h138_h202(
    given_transcript: tuple[list[EntryRecord], set[int]], keep: int, least: int
) -> None:
    entries, live = given_transcript
    whole = scratch(entries)
    cut = whole.cut(keep, least=least, alive=live.__contains__)
    if cut is None:
        return
    found = whole.before(cut)
    assert found is not None
    before = bare([*found.marker, *found.messages])
    after = scratch([*entries, compaction(99_999, cut, "all that")])
    stays = bare(after.messages())[1:]
    # What is summarised and what stays are all there was, word for word and in order.
    assert [*before, *stays] == bare(whole.messages())
    assert bare(found.messages) or found.tokens >= least
    # Whatever comes of the calls that are under way, it finds its call.
    for message in before:
        if isinstance(message, AssistantMessage):
            assert not live.intersection(_tasks_of(entries, message))


def _tasks_of(entries: Sequence[EntryRecord], message: AssistantMessage) -> list[int]:
    """The tasks of a message's calls; messages that are equal are taken for the first of them that is live."""
    raw = encode_messages([message])
    found = [e for e in entries if e.kind == ASSISTANT and e.raw_messages == raw]
    return list(msgspec.json.decode(found[0].raw_data)["calls"]) if len(found) == 1 and message.tool_calls else []


@given(transcripts(), st.integers(0, 200))
def test_enough_stays_and_not_much_more_h135_h202(
    given_transcript: tuple[list[EntryRecord], set[int]], keep: int
) -> None:
    entries, live = given_transcript
    context = scratch(entries)
    cut = context.cut(keep, least=1, alive=live.__contains__)
    if cut is not None and context.count.exact is None:
        after = scratch([*entries, compaction(99_999, cut, "")])
        kept = after.count.since - Count().feed(compaction(99_999, cut, ""))
        newest = max(e.id for e in entries)
        assert kept >= keep or cut == newest or not context.count.since
        # Behind the cut there is no other place at which enough would stay.
        later = [e.id for e in entries if e.id > cut]
        for id in later:
            fewer = scratch([*entries, compaction(99_999, id, "")])
            if fewer.count.since - Count().feed(compaction(99_999, id, "")) >= keep:
                assert context.before(id) is None or _is_crossed(context, id)


def _is_crossed(context: ModelContext, id: int) -> bool:
    """Whether an earlier call waits for a result there; or it takes nothing, and is as good as the next."""
    at = context._place(id)
    assert at is not None
    return context._opened[at] > 0 or context._tokens(at) == 0


@given(transcripts(), st.lists(st.integers(0, 40), max_size=4))
def test_tokens_are_counted_alike_however_the_entries_came_h62_h200(
    given_transcript: tuple[list[EntryRecord], set[int]], looks: list[int]
) -> None:
    """Fed in pieces that were looked at in between, or in one go from the newest head on."""
    entries, _ = given_transcript
    context = ModelContext()
    for number, e in enumerate(entries):
        if not context.feed(e):
            return
        if number in looks:
            context.messages()
            context.cut(10, least=1, alive=DEAD)
    fresh = scratch(entries)
    edited = any(e.edits for e in entries)
    assert context.count.exact == fresh.count.exact
    assert edited or context.count.since == fresh.count.since
    assert bare(context.messages()) == bare(fresh.messages())


# --- cuts by hand -----------------------------------------------------------------------------------------------

WORDS = "x" * 4_000
"""About 1,000 tokens."""


def test_the_cut_goes_back_to_before_the_calls_h138() -> None:
    entries = [user(1, WORDS), answer(2, "", [("a", 90), ("b", 91)]), result(3, "a", 90), result(4, "b", 91, WORDS)]
    assert scratch(entries).cut(10, least=1, alive=DEAD) == 2


def test_a_call_under_way_stays_with_what_follows_and_a_dead_one_binds_nothing_h138_h202() -> None:
    entries = [user(1, WORDS), answer(2, "", [("a", 90)]), user(3, WORDS), user(4, WORDS)]
    assert scratch(entries).cut(10, least=1, alive=lambda task: task == 90) == 2
    assert scratch(entries).cut(10, least=1, alive=DEAD) == 4


def test_an_earlier_summary_alone_is_no_reason_for_another_h203() -> None:
    entries = [user(1, WORDS), user(2, "short"), user(3, WORDS), compaction(4, 2), user(5, WORDS)]
    assert scratch(entries).cut(10, least=500, alive=DEAD) == 5
    assert scratch(entries).cut(1_500, least=1, alive=DEAD) == 3
    assert scratch(entries).cut(1_500, least=500, alive=DEAD) is None
    assert scratch(entries[:4]).cut(1_000, least=100, alive=DEAD) is None


def test_the_newest_entry_stays_whatever_it_takes_h202() -> None:
    entries = [user(1, WORDS), user(2, WORDS)]
    assert scratch(entries).cut(0, least=1, alive=DEAD) == 2
    assert scratch(entries[:1]).cut(0, least=1, alive=DEAD) is None
    assert ModelContext().cut(0, least=1, alive=DEAD) is None


def test_what_stands_before_a_cut_is_told_apart_from_an_earlier_summary_h205() -> None:
    entries = [
        user(1, "old"),
        user(2, "kept"),
        system(3, "s", baseline=True),
        compaction(4, 2),
        user(5, "new"),
        user(6, "x"),
    ]
    found = scratch(entries).before(6)
    assert found is not None
    assert [message.text for message in bare(found.marker)] == [f"{PREAMBLE}summary"]
    assert [message.text for message in bare(found.messages)] == ["kept", "new"]
    assert scratch(entries).before(1) is None
    assert scratch(entries).before(2) is None, "nothing but the summary is before it"


# --- counting ---------------------------------------------------------------------------------------------------


def test_what_the_provider_counted_is_taken_and_the_rest_estimated_h200() -> None:
    used = Usage(input=100, cache_read=1_000, cache_write=10, output=5)
    context = scratch([user(1, WORDS), told(2, used), user(3, "x" * 400)])
    assert context.count.exact == 1_115
    assert 100 <= context.count.since <= 130


def test_after_a_head_all_is_estimated_again_h200() -> None:
    entries = [user(1, WORDS), told(2, Usage(input=100_000)), user(3, WORDS), compaction(4, 3)]
    context = scratch(entries)
    assert context.count.exact is None
    assert 1_000 <= context.count.since <= 1_100
    assert context.feed(told(5, Usage(input=700, output=1)))
    assert context.count.tokens == 701


def test_an_answer_without_usage_or_that_failed_measures_nothing_h60_h200() -> None:
    failed = AssistantMessage(
        content=(Text(WORDS),), provider="p", model="m", stop_reason="error", usage=Usage(input=9_000)
    )
    context = scratch([user(1, "hi"), told(2, Usage()), entry(3, ASSISTANT, failed)])
    assert context.count.exact is None
    assert context.count.since < 100


def test_an_image_is_counted_by_the_piece_h200() -> None:
    image = UserMessage((Image("image/png", "A" * 1_000_000), Text("see?")))
    assert IMAGE_TOKENS <= tokens_of([image]) < IMAGE_TOKENS + 100
    count = Count()
    count.feed(entry(1, USER, image))
    assert count.tokens == tokens_of([image])


def test_an_edit_that_makes_an_entry_short_leaves_more_before_the_cut_h57_h202() -> None:
    cleared = encode_messages([UserMessage((Text("gone"),))])
    entries = [user(1, WORDS), user(2, WORDS), user(3, WORDS), user(4, "x" * 400)]
    assert scratch(entries).cut(500, least=1, alive=DEAD) == 3
    edited = [*entries, entry(5, "app.edit", edits=[Edit(entry=3, replace=cleared)])]
    assert scratch(edited).cut(500, least=1, alive=DEAD) == 2


# --- what a summary is asked with -------------------------------------------------------------------------------


@given(
    st.lists(st.text(min_size=1, max_size=3_000), min_size=1, max_size=12),
    st.integers(1_500, 20_000),
    st.text(max_size=200),
)
def test_a_request_for_a_summary_fits_whatever_the_conversation_was_h205(
    said: list[str], tokens: int, instructions: str
) -> None:
    messages: list[Message] = [UserMessage((Text(text),)) for text in said]
    asked = summary_request([summary_message("earlier " * 300)], messages, instructions=instructions, tokens=tokens)
    # JSON escapes take more bytes than the text that is cut to size.
    plain = sum(len(message.text.encode()) for message in asked if isinstance(message, (SystemMessage, UserMessage)))
    assert plain <= max(tokens * 4, 8 * FEWEST_BYTES + 6_000)
    assert [type(message) for message in asked] == [SystemMessage, UserMessage]


def test_a_transcript_names_who_said_what_h205() -> None:
    failed = ToolResultMessage(call_id="a", name="look", content=(Text("no"),), is_error=True, code="timeout")
    (_, asked) = summary_request(
        [],
        [
            UserMessage((Text("see"), Image("image/png", "AAAA"))),
            *scratch([answer(2, "so", [("a", 90)]), result(3, "a", 90)]).messages(),
            failed,
            SystemMessage("the prompt"),
        ],
        instructions="be short",
        tokens=50_000,
    )
    assert isinstance(asked, UserMessage)
    assert (
        "[user]\nsee\n[an image, image/png]\n\n[assistant]\nso\n[calls look] {}\n\n[result of look]\nfound\n\n"
        "[result of look, failed: timeout]\nno"
    ) in asked.text
    assert "the prompt" not in asked.text
    assert "be short" in asked.text


@given(st.lists(st.text(max_size=300), min_size=1, max_size=20), st.integers(50, 3_000))
def test_of_too_much_the_middle_is_left_out_and_said_so(pieces: list[str], most: int) -> None:
    text = joined(pieces, most)
    if text != "\n\n".join(pieces):
        assert "left out" in text
        assert len(text.encode("utf-8", "replace")) <= most + 120


@pytest.mark.parametrize("text", ["é" * 100, "x" * 100, "😀" * 50])
def test_a_part_is_shortened_between_characters(text: str) -> None:
    short = shortened(text, 31)
    assert "\ufffd" not in short
    assert "bytes left out" in short
    assert shortened(text, 1_000) == text
