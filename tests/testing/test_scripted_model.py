"""The scripted model (rules H172 to H174)."""

from __future__ import annotations

import pytest

from perdure.harness.messages import Message, Text, ToolCallPart, UserMessage
from perdure.harness.model import Finished, ModelError, ModelEvent, ModelRequest, TextDelta, ToolCallDelta
from perdure.testing.model import ScriptedModel, call, calls, dialogue, fail, say, turns


def request(*messages: Message, attempt: int = 1) -> ModelRequest:
    return ModelRequest(model="test:scripted", messages=messages or (said("hello"),), attempt=attempt)


def said(text: str) -> UserMessage:
    return UserMessage((Text(text),))


async def events(model: ScriptedModel, request: ModelRequest) -> list[ModelEvent]:
    return [event async for event in model.stream(request)]


async def answer(model: ScriptedModel, request: ModelRequest):
    last = (await events(model, request))[-1]
    assert isinstance(last, Finished)
    return last.message


async def test_the_same_request_gives_the_same_answer_h173() -> None:
    model = ScriptedModel(calls(call("look", at="x"), call("look", at="y"), text="let me see"))
    once = await events(model, request())
    assert await events(ScriptedModel(model.script), request()) == once


async def test_deltas_add_up_to_the_message_h174() -> None:
    model = ScriptedModel(calls(call("look", at="a rather long place"), text="a text of some length, let me see"))
    *deltas, last = await events(model, request())
    assert isinstance(last, Finished)
    text, part = last.message.content
    assert isinstance(text, Text)
    assert isinstance(part, ToolCallPart)
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == text.text
    assert "".join(d.arguments for d in deltas if isinstance(d, ToolCallDelta)).encode() == bytes(part.arguments)
    assert len(deltas) > 3


async def test_turns_go_by_the_answers_in_the_context_h173() -> None:
    model = ScriptedModel(turns(say("one"), say("two")))
    first = await answer(model, request())
    assert first.text == "one"
    assert (await answer(model, request(said("hello"), first, said("more")))).text == "two"


async def test_dialogue_goes_by_what_the_user_said_last_h173() -> None:
    model = ScriptedModel(dialogue({"a": [call("look"), say("A")], "b": say("B")}))
    asked = await answer(model, request(said("a")))
    assert asked.tool_calls
    assert (await answer(model, request(said("a"), asked))).text == "A"
    assert (await answer(model, request(said("a"), asked, said("b")))).text == "B"
    with pytest.raises(ModelError) as error:
        await events(model, request(said("c")))
    assert error.value.code == "refused"
    assert "'c'" in str(error.value)


async def test_it_fails_on_cue_as_often_as_told_h174() -> None:
    model = ScriptedModel(fail("overloaded", times=2, then=say("at last"), partial="well", retry_after_ms=5))
    for attempt in (1, 2):
        with pytest.raises(ModelError) as error:
            await events(model, request(attempt=attempt))
        assert (error.value.code, error.value.retry_after_ms, error.value.retryable) == ("overloaded", 5, True)
    assert (await answer(model, request(attempt=3))).text == "at last"
    assert model.closed == 3


async def test_every_call_without_a_label_gets_one_of_its_own_h173() -> None:
    model = ScriptedModel(calls(call("look"), call("look")))
    first = await answer(model, request())
    second = await answer(model, request(said("hello"), first))
    ids = [made.id for message in (first, second) for made in message.tool_calls]
    assert len(set(ids)) == 4


def test_a_failure_that_ends_needs_what_follows() -> None:
    with pytest.raises(ValueError, match="then="):
        fail("overloaded", times=1)
