"""Answers of real protocols as events and messages (rules H167, H170), asked of a strict server on this machine."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import msgspec
import pytest
from model_kit import (
    LOOK,
    NAMES,
    PICTURE,
    PNG,
    PROTOCOLS,
    answered,
    ask,
    called,
    local,
    models,
    result,
    stream,
    system,
    user,
)
from openai._utils import _transform
from replies import Answer, Broken, Tokens, call, say
from server import provider

from perdure.harness.messages import Thinking, ToolCallPart, Usage
from perdure.harness.model import Finished, ModelRequest, TextDelta, ThinkingDelta, ToolCallDelta
from perdure.kernel.records import from_raw
from perdure.models.kept import read_kept

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


@each_protocol
async def test_words_stream_and_end_in_one_message_h167(protocol: str) -> None:
    async with provider(say("Good morning, and more.")) as server:
        events = await stream(models(server, protocol), user("hi"))
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == "Good morning, and more."
    assert len(events) == len(deltas) + 1
    assert isinstance(events[-1], Finished)
    message = events[-1].message
    assert message.text == "Good morning, and more."
    assert (message.provider, message.model, message.stop_reason) == (protocol, NAMES[protocol], "stop")


SMILES = "Grüße \U0001f600\U0001f680 für 日本語 \U0001f468\u200d\U0001f680 e\u0301 \u2028 \x85 fin \U0001f600"


@pytest.mark.filterwarnings("ignore:The provider sent a `function_call_arguments.done`")  # whole, the deltas in halves
@each_protocol
@pytest.mark.parametrize(("slivers", "halves"), [(1, False), (3, False), (0, True), (2, True)])
async def test_characters_that_arrive_in_pieces_are_whole_h167(protocol: str, slivers: int, halves: bool) -> None:
    """Bytes cut anywhere, and the two halves of a character in two deltas; the server wants back what it said."""
    arguments = json.dumps({"at": SMILES}, ensure_ascii=False)
    two = call(("look", arguments), text=SMILES, thinking=SMILES, halves=halves)
    async with provider(two, say(SMILES, halves=halves)) as server:
        server.slivers = slivers
        them = models(server, protocol)
        events = await stream(them, user(SMILES), tools=[LOOK], thinking="low")
        deltas = [event for event in events if not isinstance(event, Finished)]
        assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == SMILES
        assert "".join(delta.text for delta in deltas if isinstance(delta, ThinkingDelta)) == SMILES
        assert "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta)) == arguments
        for delta in deltas:
            msgspec.json.encode(delta)
        assert isinstance(events[-1], Finished)
        first = events[-1].message
        assert first.text == SMILES
        assert from_raw(first.tool_calls[0].arguments) == {"at": SMILES}
        told = [user(SMILES), first, result(first.tool_calls[0].id, SMILES)]
        assert (await ask(them, *told, tools=[LOOK], thinking="low")).text == SMILES


@each_protocol
async def test_half_a_character_that_stays_alone_is_told_as_none_h167(protocol: str) -> None:
    async with provider(say("a\ud83d b \ude00c")) as server:
        events = await stream(models(server, protocol), user("hi"))
        for event in events:
            msgspec.json.encode(event)
        assert isinstance(events[-1], Finished)
        assert events[-1].message.text == "a\ufffd b \ufffdc"
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == events[-1].message.text


@each_protocol
async def test_parallel_calls_stream_each_under_an_index_of_its_own_h167(protocol: str) -> None:
    two = call(("look", '{"at": "the sea"}'), ("look", '{"at": "the hills"}'), text="Looking.")
    async with provider(two) as server:
        events = await stream(models(server, protocol), user("look"), tools=[LOOK])
    streamed: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            assert event.name == "look"
            assert event.id
            streamed[event.index] = streamed.get(event.index, "") + event.arguments
    assert list(streamed.values()) == ['{"at": "the sea"}', '{"at": "the hills"}']
    assert isinstance(events[-1], Finished)
    message = events[-1].message
    assert message.stop_reason == "tool_use"
    assert message.text == "Looking."
    assert [from_raw(part.arguments) for part in message.tool_calls] == [{"at": "the sea"}, {"at": "the hills"}]
    assert len({part.id for part in message.tool_calls}) == 2


async def test_a_name_that_is_told_with_each_piece_of_a_call_is_one_name_h167() -> None:
    two = call(("look", '{"at": "the sea"}'), ("look", '{"at": "the hills"}'), again=True)
    async with provider(two, say("Blue.")) as server:
        them = local(server)
        events = await stream(them, user("look"), tools=[LOOK])
        assert {event.name for event in events if isinstance(event, ToolCallDelta)} == {"look"}
        assert isinstance(events[-1], Finished)
        calls = events[-1].message.tool_calls
        assert [(part.name, from_raw(part.arguments)) for part in calls] == [
            ("look", {"at": "the sea"}),
            ("look", {"at": "the hills"}),
        ]
        results = [result(part.id, "blue") for part in calls]
        await ask(them, user("look"), events[-1].message, *results, tools=[LOOK])


@each_protocol
async def test_usage_tells_the_cache_from_what_is_new_h76(protocol: str) -> None:
    tokens = Tokens(input=100, output=40, cache_read=700, cache_write=30, reasoning=25)
    async with provider(say("ok", tokens=tokens)) as server:
        message = await ask(models(server, protocol), user("hi"))
    assert message.usage == Usage(input=100, output=40, cache_read=700, cache_write=30, reasoning=25)


@each_protocol
async def test_thinking_streams_and_goes_back_as_it_came_h170(protocol: str) -> None:
    """The server checks what it signed, and that reasoning is followed by what followed it."""
    thought = call(("look", '{"at": "it"}'), thinking="I should look first.", text="A moment.", phase="commentary")
    again = say("It is blue.", thinking="That was easy.", phase="final_answer")
    async with provider(thought, again, say("Still blue.")) as server:
        them = models(server, protocol)
        events = await stream(them, user("what is it?"), tools=[LOOK], thinking="medium")
        thinking = [event.text for event in events if isinstance(event, ThinkingDelta)]
        assert len(thinking) > 1
        assert "".join(thinking) == "I should look first."
        assert isinstance(events[-1], Finished)
        first = events[-1].message
        told = [user("what is it?"), first, result(first.tool_calls[0].id, "blue")]
        second = await ask(them, *told, tools=[LOOK], thinking="medium")
        told += [second, user("and now?")]
        await ask(them, *told, tools=[LOOK], thinking="medium")
        server.check_prefixes()
        sent = json.dumps(server.bodies[-1])
    assert [part.text for part in first.content if isinstance(part, Thinking)] == ["I should look first."]
    assert "I should look first." in sent
    assert "That was easy." in sent


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
async def test_thinking_is_stored_as_text_so_that_a_restart_loses_nothing_h170(protocol: str) -> None:
    async with provider(say("A.", thinking="why", hidden="secret"), say("B.")) as server:
        first = await ask(models(server, protocol), user("a"), thinking="low")
        stored = msgspec.json.decode(msgspec.json.encode(first), type=type(first))
        assert stored == first
        await ask(models(server, protocol), user("a"), stored, user("b"), thinking="low")
        if protocol == "anthropic":
            kinds = [block["type"] for block in server.bodies[1]["messages"][1]["content"]]
            assert kinds == ["thinking", "redacted_thinking", "text"]


async def test_what_belongs_to_words_is_kept_without_thinking_too_h170() -> None:
    """OpenAI wants the phase of a message back."""
    async with provider(say("Let me see.", phase="commentary"), say("B.")) as server:
        them = models(server, "openai")
        first = await ask(them, user("a"))
        assert first.text == "Let me see."
        kept = [read_kept(part.signature) for part in first.content if isinstance(part, Thinking)]
        assert [one and one.next and one.next.details for one in kept] == [{"phase": "commentary"}]
        await ask(them, user("a"), first, user("b"))
        assert server.bodies[1]["input"][1]["phase"] == "commentary"


@pytest.mark.parametrize("stop", ["length", "stop"])
@each_protocol
async def test_the_reason_of_the_end_is_told_h167(protocol: str, stop) -> None:
    async with provider(say("As far as I", stop=stop)) as server:
        message = await ask(models(server, protocol), user("hi"), max_output=5)
        body = server.bodies[0]
    assert message.stop_reason == stop
    assert message.text == "As far as I"
    assert 5 in (body.get("max_tokens"), body.get("max_completion_tokens"), body.get("max_output_tokens"))


@each_protocol
async def test_arguments_that_are_no_json_are_kept_as_text_h167(protocol: str) -> None:
    async with provider(call(("look", '{"at": "the s'), stop="length")) as server:
        message = await ask(models(server, protocol), user("hi"), tools=[LOOK])
    assert from_raw(message.tool_calls[0].arguments) == '{"at": "the s'
    assert message.stop_reason == "length"


@each_protocol
async def test_a_call_cut_off_before_its_arguments_is_no_call_without_any_h167(protocol: str) -> None:
    async with provider(call(("look", ""), stop="length"), call(("look", ""))) as server:
        them = models(server, protocol)
        cut = await ask(them, user("hi"), tools=[LOOK])
        whole = await ask(them, user("hi"), tools=[LOOK])
    assert not isinstance(from_raw(cut.tool_calls[0].arguments), dict)
    assert from_raw(whole.tool_calls[0].arguments) == {}


@each_protocol
async def test_invalid_arguments_go_back_as_an_object_h170(protocol: str) -> None:
    """As a transcript has them after the harness said what is wrong with them."""
    wrong = [called("a", '{"at": "the s'), called("b", ["a list"]), called("c", None), ToolCallPart("d", "look")]
    wrong[2] = ToolCallPart("c", "look", msgspec.Raw(b"not json"))
    results = [result(part.id, "invalid", error=True) for part in wrong]
    async with provider(say("Sorry.")) as server:
        them = models(server, protocol)
        await ask(them, user("hi"), answered(*wrong), *results, tools=[LOOK])
        sent = json.dumps(server.bodies[0])
    for told in ("the s", "a list", "not json"):
        assert told in sent


@each_protocol
async def test_images_of_users_and_tools_arrive_h170(protocol: str) -> None:
    async with provider(call(("look", '{"at": "it"}'), ("look", '{"at": "that"}')), say("A cat.")) as server:
        them = models(server, protocol)
        asked = user("What is this?", PICTURE)
        first = await ask(them, asked, tools=[LOOK])
        one, two = (part.id for part in first.tool_calls)
        await ask(them, asked, first, result(one, "a photo:", PICTURE), result(two, PICTURE), tools=[LOOK])
        assert [json.dumps(body).count(PNG) for body in server.bodies] == [1, 3]
        server.check_prefixes()


@each_protocol
async def test_a_tools_error_is_told_as_one_h170(protocol: str) -> None:
    async with provider(call(("look", '{"at": "it"}')), say("I see.")) as server:
        them = models(server, protocol)
        first = await ask(them, user("look"), tools=[LOOK])
        await ask(them, user("look"), first, result(first.tool_calls[0].id, "too dark", error=True), tools=[LOOK])
        body = server.bodies[1]
    if protocol == "anthropic":
        block = body["messages"][-1]["content"][0]
        assert block["is_error"] is True
        assert block["content"][0]["text"] == "too dark"
    else:
        last = body["messages"][-1]["content"] if protocol == "openai-chat" else body["input"][-1]["output"]
        assert json.loads(last) == {"error": "too dark"}


@each_protocol
async def test_caches_are_asked_for_h170(protocol: str) -> None:
    async with provider(say("ok")) as server:
        await ask(models(server, protocol), system("Be kind."), user("hi"), tools=[LOOK], session_key="abc")
        body = server.bodies[0]
    if protocol == "anthropic":
        assert json.dumps(body).count('"cache_control"') == 3
        assert "cache_control" in body["tools"][-1]
        assert "cache_control" in body["system"][-1]
        assert "cache_control" in body["messages"][-1]["content"][-1]
    else:
        assert body["prompt_cache_key"] == "abc"


async def test_a_server_of_ones_own_is_asked_in_plain_terms_h170() -> None:
    """No fields that only OpenAI knows; nothing is thought unless asked for."""
    async with provider(say("ok")) as server:
        await ask(local(server), system("Be kind."), user("hi"), session_key="abc")
        assert set(server.bodies[0]) == {"model", "messages", "stream", "stream_options"}
        assert server.bodies[0]["model"] == "qwen3"
        assert server.sent[0].headers["authorization"].startswith("Bearer ")


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ("qwen3", "max_tokens"),
        ("openai/gpt-oss-20b", "max_tokens"),
        ("gpt-5.4", "max_completion_tokens"),
        ("openai/o5-mini", "max_completion_tokens"),
    ],
)
async def test_a_limit_is_sent_by_the_name_that_the_server_knows_h170(model: str, field: str) -> None:
    """One that does not know it would not stop."""
    async with provider(say("ok")) as server:
        await ask(local(server, model=model), user("hi"), max_output=5)
        assert {name: value for name, value in server.bodies[0].items() if "max" in name} == {field: 5}


async def test_settings_of_an_endpoint_win_h170() -> None:
    async with provider(say("ok")) as server:
        await ask(local(server, settings={"temperature": 0.25}), user("hi"))
        assert server.bodies[0]["temperature"] == 0.25


async def test_an_answer_without_usage_has_none_h76() -> None:
    async with provider(say("ok", usage=False)) as server:
        assert (await ask(local(server), user("hi"))).usage == Usage()


@each_protocol
async def test_closing_a_stream_closes_its_connection_h167(protocol: str) -> None:
    async with provider(Broken(answer=say("A very long story, and no end to it."), after=6, how="stall")) as server:
        them = models(server, protocol)
        assert them.default is not None
        async with aclosing(them.stream(ModelRequest(model=them.default, messages=[user("hi")]))) as events:
            async for _ in events:
                break
        await server.left.wait()


@each_protocol
async def test_cancelling_a_request_closes_its_connection_h167(protocol: str) -> None:
    async with provider(Broken(answer=say("A long story."), after=0, how="stall")) as server:
        asking = asyncio.create_task(ask(models(server, protocol), user("hi")))
        await server.stalled.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.left.wait()


async def test_an_empty_answer_is_an_answer_h167() -> None:
    async with provider(Answer(), say("B.")) as server:
        them = models(server, "anthropic")
        empty = await ask(them, user("a"))
        assert empty.content == ()
        # It is not told: there is nothing to tell.
        await ask(them, user("a"), empty, user("b"))
        assert [message["role"] for message in server.bodies[1]["messages"]] == ["user"]


@pytest.mark.parametrize("protocol", ["openai", "openai-chat"])
async def test_a_long_transcript_is_not_held_against_types_h62(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the SDK would do to each message does not grow with them."""
    counted = 0
    original = _transform._async_transform_recursive

    async def counting(*given, **rest):
        nonlocal counted
        counted += 1
        return await original(*given, **rest)

    monkeypatch.setattr(_transform, "_async_transform_recursive", counting)
    counts: list[int] = []
    async with provider(say("ok"), say("ok")) as server:
        for length in (1, 40):
            told = [message for at in range(length) for message in (user(f"{at}"), answered("yes"))]
            counted = 0
            await ask(models(server, protocol), *told, user("hi"), tools=[LOOK])
            counts.append(counted)
    assert counts[0] == counts[1] > 0
