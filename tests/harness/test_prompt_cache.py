"""What a provider's prompt cache can keep from one request to the next (rules H65, H66, H251 to H253).

A request is told as parts, in the order in which caches compare them: the offered tools, then each message in its
bytes. What two requests share is counted from the front.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from compaction_kit import LONG, asks_for_summary, fill, has_summary
from compaction_kit import model as small_model
from compaction_kit import turns as turns_of
from doubles import ManualClock
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Hold, Note, opened, rest, until

from perdure.harness.documents import Agent
from perdure.harness.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolResultMessage,
    UserMessage,
    encode_messages,
)
from perdure.harness.model import ModelInfo, ModelRequest
from perdure.harness.registry import ConversationInfo, Extension, PromptSection
from perdure.harness.settings import RetryPolicy
from perdure.harness.tool import tool
from perdure.kernel.records import Edit, to_raw
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, fail, say


@tool(replay="safe")
async def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


@tool(replay="safe")
async def hear(at: str = "") -> str:
    """Hear."""
    return f"heard {at}"


def script(request: ModelRequest):
    last = request.messages[-1]
    if isinstance(last, UserMessage) and last.text.startswith("tools"):
        return calls(call("look", at="here"), call("look", at="there"))
    if isinstance(last, UserMessage) and last.text.startswith("bad"):
        return fail("malformed")
    return say("ok")


class Mood:
    """A prompt section that says what the test wants."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.extension = Extension("mood", sections=[PromptSection("mood", self._render)])

    def _render(self, _: ConversationInfo) -> str:
        return self.text


# --- counting -------------------------------------------------------------------------------------------------------


def said(messages: Sequence[Message]) -> list[bytes]:
    return [bytes(encode_messages([message])) for message in messages]


def parts(request: ModelRequest) -> list[bytes]:
    return [msgspec.json.encode(request.tools), *said(request.messages)]


def shared(before: ModelRequest, after: ModelRequest) -> int:
    """How many parts from the front a cache has of the later one."""
    count = 0
    for one, other in zip(parts(before), parts(after), strict=False):
        if one != other:
            break
        count += 1
    return count


ROLES = {SystemMessage: "system", UserMessage: "user", AssistantMessage: "assistant", ToolResultMessage: "tool"}


def roles(messages: Sequence[Message]) -> list[str]:
    return [ROLES[type(message)] for message in messages]


def added(before: ModelRequest, after: ModelRequest) -> list[str]:
    """The roles of what comes behind all that was told before; nothing of that is told otherwise."""
    assert shared(before, after) == len(parts(before)), "the whole of it is the beginning of the next"
    return roles(after.messages[len(before.messages) :])


# --- what keeps all of it -------------------------------------------------------------------------------------------


async def test_a_turn_adds_the_answer_and_the_input_h251() -> None:
    model = ScriptedModel(script)
    async with opened(model, tools=(look,), instructions="Be kind.") as harness:
        root = await harness.root()
        for text in ("one", "two", "three"):
            await (await root.submit(text)).answer()
    first, second, third = model.requests
    # The baseline comes once; a leading system message is told first, wherever its entry stands.
    assert roles(first.messages) == ["system", "user"]
    assert added(first, second) == ["assistant", "user"]
    assert added(second, third) == ["assistant", "user"]
    assert len({request.session_key for request in model.requests}) == 1


async def test_a_round_of_tools_adds_its_calls_and_results_h251() -> None:
    """In the order of the calls, whichever ends first."""
    gate = asyncio.Event()

    @tool(name="look", replay="safe")
    async def slow(at: str = "") -> str:
        """Look."""
        if at == "here":
            await gate.wait()
        else:
            gate.set()
        return at

    model = ScriptedModel(script)
    async with opened(model, tools=(slow,)) as harness:
        root = await harness.root()
        await (await root.submit("tools")).answer()
        await (await root.submit("more")).answer()
    first, second, third = model.requests
    assert added(first, second) == ["assistant", "tool", "tool"]
    assert [getattr(message, "text", "") for message in second.messages[-2:]] == ["here", "there"]
    assert added(second, third) == ["assistant", "user"]


async def test_what_steers_and_what_is_written_is_added_behind_the_round_h251() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    @tool(name="look", replay="safe")
    async def slow(at: str = "") -> str:
        """Look."""
        begun.set()
        await gate.wait()
        return at

    model = ScriptedModel(script)
    async with opened(model, tools=(slow,)) as harness:
        root = await harness.root()
        first = await root.submit("tools")
        await begun.wait()
        await root.submit("steer", mode="steer")
        await root.write(Note(text="a note"))
        gate.set()
        await first.answer()
    assert added(*model.requests) == ["assistant", "tool", "tool", "user", "user"]


async def test_a_section_that_changes_is_added_as_a_delta_h65_h251() -> None:
    mood = Mood("Cheerful.")
    model = ScriptedModel(script)
    async with opened(model, extensions=[mood.extension], instructions="Be kind.") as harness:
        root = await harness.root()
        for number, text in enumerate(("Cheerful.", "Sober.", "Sober.", "Cheerful.", "")):
            mood.text = text
            await (await root.submit(str(number))).answer()
    first, changed, same, back, gone = model.requests
    assert roles(first.messages) == ["system", "user"]
    assert added(first, changed) == ["assistant", "user", "system"]
    assert added(changed, same) == ["assistant", "user"]
    assert added(same, back) == ["assistant", "user", "system"]
    assert added(back, gone) == ["assistant", "user", "system"]
    assert "Be kind." in first.messages[0].text  # pyright: ignore[reportAttributeAccessIssue]
    assert all(b"Be kind." not in told for told in said(gone.messages[1:])), "what did not change is not repeated"


async def test_a_retry_sends_the_same_bytes_h251() -> None:
    clock = ManualClock()
    model = ScriptedModel(fail("overloaded", times=2, partial="I would", then=say("ok")))
    async with opened(model, clock=clock, retry=RetryPolicy(jitter=0), instructions="Be kind.") as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        for seconds in (2, 4):
            await until(lambda: clock.sleeping == 1)
            await clock.advance(seconds)
        await submission.answer()
    first, second, third = model.requests
    assert parts(first) == parts(second) == parts(third)


async def test_what_failed_or_was_aborted_adds_nothing_of_its_own_h60_h251() -> None:
    hold = Hold(1)
    model = ScriptedModel(script, pace=hold)
    async with opened(model) as harness:
        root = await harness.root()
        await root.submit("never answered")
        await hold.reached.wait()
        await root.abort()
        hold.release()
        await (await root.submit("bad")).wait()
        await (await root.submit("good")).answer()
    first, second, third = model.requests
    assert added(first, second) == ["user"]
    assert added(second, third) == ["user"]


async def test_another_process_goes_on_with_the_same_bytes_h251() -> None:
    """Also with a request that was on its way, and with one behind a call that was cut off."""
    storage, hold = MemoryStorage(), Hold(1)

    async def pace(request: ModelRequest, event: int) -> None:
        if getattr(request.messages[-1], "text", "") == "more":
            await hold(request, event)

    model = ScriptedModel(script, pace=pace)
    async with opened(model, storage=storage, tools=(look,), instructions="Be kind.") as harness:
        root = await harness.root()
        await (await root.submit("tools")).answer()
        submission = await root.submit("more")
        await hold.reached.wait()
        await rest()
        storage = storage.snapshot()
    again = ScriptedModel(script)
    async with opened(again, storage=storage, tools=(look,), instructions="Be kind.") as harness:
        await (await harness.submission(submission.id)).answer()
        await (await (await harness.root()).submit("on")).answer()
    cut, resent, last = model.requests[-1], *again.requests
    assert parts(cut) == parts(resent)
    assert added(resent, last) == ["assistant", "user"]
    assert cut.session_key == resent.session_key == last.session_key


async def test_a_fork_begins_with_what_it_shares_h251() -> None:
    """Under a key of its own: where it is cached, the provider decides."""
    model = ScriptedModel(script)
    async with opened(model, instructions="Be kind.") as harness:
        root = await harness.root()
        answer = await (await root.submit("one")).answer()
        await (await root.submit("two")).answer()
        fork = await root.fork(answer.entry.id)
        await (await fork.submit("three")).answer()
    first, second, forked = model.requests
    assert added(first, forked) == ["assistant", "user"]
    assert shared(second, forked) == len(parts(forked)) - 1
    assert forked.session_key != first.session_key


# --- what changes beside the messages -------------------------------------------------------------------------------


async def test_other_tools_leave_the_messages_as_they_are_h252() -> None:
    model = ScriptedModel(script)
    async with opened(model, tools=(look, hear), instructions="Be kind.") as harness:
        root = await harness.root(agent=Agent(tools=["look"]))
        await (await root.submit("one")).answer()
        await root.set_agent(tools=["look", "hear"])
        await (await root.submit("two")).answer()
        await (await root.submit("three")).answer()
    first, changed, after = model.requests
    assert [tool.name for tool in changed.tools] == ["look", "hear"]
    assert shared(first, changed) == 0, "tools come first"
    assert said(changed.messages)[: len(first.messages)] == said(first.messages)
    assert roles(changed.messages[len(first.messages) :]) == ["assistant", "user"]
    assert added(changed, after) == ["assistant", "user"], "once"


async def test_the_order_in_which_tools_are_selected_changes_nothing_h252() -> None:
    model = ScriptedModel(script)
    async with opened(model, tools=(look, hear)) as harness:
        root = await harness.root(agent=Agent(tools=["look", "hear"]))
        await (await root.submit("one")).answer()
        await root.set_agent(tools=["hear", "look"])
        await (await root.submit("two")).answer()
        await root.set_agent(tools=None)
        await (await root.submit("three")).answer()
    first, second, third = model.requests
    assert added(first, second) == ["assistant", "user"]
    assert added(second, third) == ["assistant", "user"]


class Two(ScriptedModel):
    """Two models of one script."""

    def find(self, model: str) -> ModelInfo | None:
        return super().find("test:scripted") if model in ("test:scripted", "test:other") else None


async def test_another_model_and_level_leave_the_messages_as_they_are_h252() -> None:
    model = Two(script)
    async with opened(model, tools=(look,), instructions="Be kind.") as harness:
        root = await harness.root()
        await (await root.submit("one")).answer()
        await root.set_agent(model="test:other", thinking="high")
        await (await root.submit("two")).answer()
        await root.set_agent(model=None, thinking="off")
        await (await root.submit("three")).answer()
    first, other, back = model.requests
    assert [request.model for request in model.requests] == ["test:scripted", "test:other", "test:scripted"]
    assert added(first, other) == ["assistant", "user"]
    assert added(other, back) == ["assistant", "user"]


# --- what begins anew -----------------------------------------------------------------------------------------------


async def test_a_reset_begins_one_new_prefix_behind_the_same_prompt_h66_h253() -> None:
    model = ScriptedModel(script)
    async with opened(model, tools=(look,), instructions="Be kind.") as harness:
        root = await harness.root()
        await (await root.submit("one")).answer()
        await root.reset("from here on")
        for text in ("two", "three"):
            await (await root.submit(text)).answer()
    before, first, second = model.requests
    assert roles(first.messages) == ["system", "user", "user"]
    assert shared(before, first) == 2, "the tools and the prompt, which reads as before"
    assert added(first, second) == ["assistant", "user"], "once"


async def test_after_a_reset_the_prompt_is_told_whole_with_what_changed_h66_h253() -> None:
    mood = Mood("Cheerful.")
    model = ScriptedModel(script)
    async with opened(model, extensions=[mood.extension], instructions="Be kind.") as harness:
        root = await harness.root()
        await (await root.submit("one")).answer()
        mood.text = "Sober."
        await (await root.submit("two")).answer()
        await root.reset()
        for text in ("three", "four"):
            await (await root.submit(text)).answer()
    _, before, first, second = model.requests
    assert roles(before.messages) == ["system", "user", "assistant", "user", "system"]
    assert roles(first.messages) == ["system", "user"]
    assert shared(before, first) == 1, "the tools alone: the delta is in the prompt now"
    assert b"Sober." in said(first.messages)[0]
    assert b"Cheerful." not in said(first.messages)[0]
    assert added(first, second) == ["assistant", "user"], "once"


@pytest.mark.parametrize("changed", [False, True])
async def test_a_compaction_begins_one_new_prefix_h66_h253(changed: bool) -> None:
    mood = Mood("Cheerful.")
    model = small_model(script)
    async with opened(model, extensions=[mood.extension], tools=(look,), instructions="Be kind.") as harness:
        root = await harness.root()
        await fill(root, 4)
        if changed:
            mood.text = "Sober."
        await fill(root, 2)
        await harness.wait_task(await root.compact())
        for text in ("one", "two", "tools"):
            await (await root.submit(text)).answer()
    *_, before, first, second, third, fourth = turns_of(model)
    assert has_summary(first.messages)
    assert not has_summary(before.messages)
    assert roles(first.messages)[:2] == ["system", "user"]
    assert roles(first.messages).count("system") == 1, "the prompt is told once, whole"
    assert shared(before, first) == (1 if changed else 2)
    # What it keeps is the end of what was told, in the same bytes.
    kept = said(first.messages[2:-1])
    assert kept
    older = [told for message, told in zip(before.messages, said(before.messages), strict=True) if _is_said(message)]
    assert kept[:-1] == older[-len(kept) + 1 :]
    assert added(first, second) == ["assistant", "user"], "once"
    assert added(second, third) == ["assistant", "user"]
    assert added(third, fourth) == ["assistant", "tool", "tool"]


def _is_said(message: Message) -> bool:
    return not isinstance(message, SystemMessage)


async def test_a_blocking_compaction_in_a_run_begins_one_new_prefix_h253() -> None:
    model = small_model()
    async with opened(model, tools=(look,), instructions="Be kind.") as harness:
        root = await harness.root()
        await fill(root, 9)
        for text in (LONG, "one", "two"):
            await (await root.submit(text)).answer()
    asked = [index for index, request in enumerate(model.requests) if asks_for_summary(request)]
    assert asked, "it was compacted"
    anew = [pair for pair in pairwise(turns_of(model)) if shared(*pair) != len(parts(pair[0]))]
    assert [shared(*pair) for pair in anew] == [2] * len(asked), "the tools and the prompt, at each summary"


async def test_an_edit_keeps_what_stands_before_it_h57_h253() -> None:
    model = ScriptedModel(script)
    async with opened(model, instructions="Be kind.") as harness:
        root = await harness.root()
        for text in ("one", "two"):
            await (await root.submit(text)).answer()
        (entry,) = [each for each in await root.entries() if b'"two"' in bytes(each.raw_messages)]
        replaced: Any = [{"role": "user", "content": [{"type": "text", "text": "other"}]}]
        await root.write(Note(text="a note"), edits=[Edit(entry=entry.id, replace=to_raw(replaced))])
        for text in ("three", "four"):
            await (await root.submit(text)).answer()
    _, before, first, second = model.requests
    assert shared(before, first) == len(parts(before)) - 1, "all but the edited input, which was the last part"
    assert added(first, second) == ["assistant", "user"], "once"


# --- whatever happens -----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(["say", "tools", "bad", "steer", "note", "mood", "instructions", "abort", "rest", "reopen"]),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_without_a_head_every_request_begins_with_the_one_before_h251(steps: list[str]) -> None:
    async def play() -> None:
        mood, storage = Mood("0"), MemoryStorage()
        requests: list[ModelRequest] = []
        lives: list[list[str]] = [[]]
        for step in steps:
            lives[-1].append(step)
            if step == "reopen":
                lives.append([])
        for life in lives:
            model = ScriptedModel(script, pace=Hold(0))
            async with opened(
                model, storage=storage, tools=(look,), extensions=[mood.extension], instructions="x"
            ) as harness:
                root = await harness.root()
                for at, step in enumerate(life):
                    match step:
                        case "say" | "tools" | "bad":
                            await root.submit(f"{step} {at}")
                        case "steer":
                            await root.submit(f"steer {at}", mode="steer")
                        case "note":
                            await root.write(Note(text=f"note {at}"))
                        case "mood":
                            mood.text = f"{mood.text}+"
                        case "instructions":
                            await root.set_agent(instructions=f"{at} {len(requests)}")
                        case "abort":
                            await root.abort()
                        case "rest":
                            assert isinstance(model.pace, Hold)
                            model.pace.release()
                            await rest()
                            model.pace = Hold(0)
                        case _:
                            pass
                storage = storage.snapshot()
            requests += model.requests
        for before, after in pairwise(requests):
            assert shared(before, after) == len(parts(before)), (roles(before.messages), roles(after.messages))

    asyncio.run(play())
