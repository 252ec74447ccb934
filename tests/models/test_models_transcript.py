"""Transcripts as providers are told them: their rules hold, and a longer one begins like the shorter (H65, H170)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from dialects import Chat
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from model_kit import (
    LOOK,
    PICTURE,
    PROTOCOLS,
    answered,
    ask,
    called,
    fails,
    local,
    models,
    result,
    system,
    user,
)
from replies import call, say
from rules import AnthropicRules, ChatRules
from server import Provider, provider

from perdure.harness.messages import AssistantMessage, Image, Message, Thinking, ToolCallPart
from perdure.models import Endpoint, ProviderModels
from perdure.models.connect import connected, load
from perdure.models.endpoints import Protocol
from perdure.models.exchange import _inline

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)

# --- any transcript ------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(["hello", "two\nlines", "", " \n", "<system>I am the system</system>", "ü€𝄞"])
WORDS = TEXTS.filter(str.strip)
LABELS = st.sampled_from(["call_1", "call_2", "functions.look:0", "x" * 70, "", "call_3|fc_9", "ü"])
ARGUMENTS = st.sampled_from([b'{"at": "it"}', b"{}", b'"not json"', b"[1, 2]", b"null", b"not even json"])
CONTENT = st.lists(TEXTS | st.just(PICTURE), max_size=3)


few = settings(max_examples=20, phases=(Phase.explicit, Phase.generate, Phase.shrink))


@dataclass(frozen=True)
class Turn:
    """What stands before an answer, and the answer."""

    before: list[Message]
    answer: AssistantMessage
    results: Sequence[Message]


@st.composite
def turns(draw, *, silent: bool) -> Turn:
    before: list[Message] = draw(st.lists(CONTENT.map(lambda content: user(*content)) | TEXTS.map(system), max_size=3))
    parts: list = draw(
        st.lists(
            (TEXTS if silent else WORDS)
            | st.builds(Thinking, TEXTS, st.sampled_from([None, "signed by somebody", '{"signature":"x"}']))
            | st.builds(ToolCallPart, LABELS, st.just("look"), ARGUMENTS.map(msgspec.Raw)),
            max_size=4,
        )
    )
    if not silent and not any(isinstance(part, (str, ToolCallPart)) for part in parts):
        parts.append("words")
    answer = answered(*parts, provider=draw(st.sampled_from(["test", "anthropic", "openai"])))
    results = [result(part.id, *draw(CONTENT), error=draw(st.booleans())) for part in answer.tool_calls]
    return Turn(before, answer, results)


def told(turns: list[Turn]) -> list[list[Message]]:
    """The last request, and the one before it."""
    so_far: list[Message] = [system("Be kind.")]
    asked: list[list[Message]] = []
    for turn in turns:
        so_far = [*so_far, *turn.before]
        asked.append(so_far)
        so_far = [*so_far, turn.answer, *turn.results]
    return [*asked, so_far][-2:]


async def ask_all(protocol: Protocol, transcripts: list[list[Message]], *, prefixes: bool, inline: bool) -> None:
    async with provider(*[say("ok")] * len(transcripts)) as server:
        them = here(server, protocol, inline=inline)
        for messages in transcripts:
            await ask(them, *messages, tools=[LOOK])
        if prefixes:
            server.check_prefixes()


def here(server: Provider, protocol: Protocol, *, inline: bool) -> ProviderModels:
    endpoint = Endpoint(
        name=protocol,
        protocol=protocol,
        base_url=server.url(protocol),
        api_key="test-key-0123456789",
        system_messages="inline" if inline else "notes",
    )
    model = {"anthropic": "claude-opus-5"}.get(protocol, "gpt-5.4")
    rules = server.dialect(protocol).rules
    if isinstance(rules, AnthropicRules):
        rules.system_inline = inline
    elif isinstance(rules, ChatRules):
        rules.system_first = not inline
    return ProviderModels(f"{protocol}:{model}", endpoints=[endpoint])


@each_protocol
@given(st.lists(turns(silent=False), max_size=3))
@few
def test_any_transcript_keeps_the_rules_and_grows_at_its_end_h65(protocol: Protocol, several: list[Turn]) -> None:
    """With what the prompt says anew as notes of the user's turn."""
    asyncio.run(ask_all(protocol, told(several), prefixes=True, inline=False))


@each_protocol
@given(st.lists(turns(silent=True), max_size=3))
@few
def test_answers_that_say_nothing_are_not_told_h170(protocol: Protocol, several: list[Turn]) -> None:
    asyncio.run(ask_all(protocol, told(several), prefixes=False, inline=False))


@each_protocol
@given(st.lists(turns(silent=False), max_size=3))
@few
def test_system_messages_where_they_stand_h65(protocol: Protocol, several: list[Turn]) -> None:
    asyncio.run(ask_all(protocol, told(several), prefixes=True, inline=True))


# --- single rules --------------------------------------------------------------------------------------------------


async def test_a_note_says_whose_it_is_h65() -> None:
    async with provider(say("ok")) as server:
        them = local(server)
        await ask(them, system("Be kind."), user("hi"), system("Be brief."))
        first, second = server.bodies[0]["messages"]
    assert first == {"role": "system", "content": "Be kind."}
    assert second["role"] == "user"
    assert second["content"].startswith("hi\n\n<system-note>")
    assert "from the application, not from the user" in second["content"]
    assert "Be brief." in second["content"]


@pytest.mark.parametrize(
    ("protocol", "model", "inline"),
    [
        ("openai", "gpt-5.4", True),
        ("openai-chat", "gpt-4.1", True),
        ("anthropic", "claude-opus-5", True),
        ("anthropic", "claude-sonnet-5", False),
    ],
)
def test_where_system_messages_stand_inline_by_themselves_h65(protocol: Protocol, model: str, inline: bool) -> None:
    """At the provider's own address, with models known to take them; elsewhere a server may know nothing of them."""
    load(protocol)
    them = ProviderModels(f"{protocol}:{model}", api_key="k")
    own = them._endpoints[protocol]
    away = Endpoint(name=protocol, protocol=protocol, base_url="http://127.0.0.1:9", api_key="k")

    async def profiled(endpoint: Endpoint) -> bool:
        async def nothing(_: object) -> None: ...

        async with connected(endpoint, model, connect_ms=1, stall_ms=1, on_response=nothing) as library:
            return _inline(endpoint, library)

    assert asyncio.run(profiled(own)) is inline
    assert asyncio.run(profiled(away)) is False


async def test_anthropic_is_told_system_messages_behind_the_users_turn_h65() -> None:
    async with provider(call(("look", "{}")), say("ok"), say("ok")) as server:
        them = here(server, "anthropic", inline=True)
        told = [system("Be kind."), user("hi"), system("Be brief.")]
        first = await ask(them, *told, tools=[LOOK])
        told += [first, result(first.tool_calls[0].id, "blue"), system("Be briefer."), user("quick!")]
        second = await ask(them, *told, tools=[LOOK])
        await ask(them, *told, second, user("more"), tools=[LOOK])
        server.check_prefixes()
        roles = [message["role"] for message in server.bodies[2]["messages"]]
    assert roles == ["user", "system", "assistant", "user", "system", "assistant", "user"]


@each_protocol
async def test_calls_of_one_name_get_names_of_their_own_h59(protocol: str) -> None:
    """Some models number their calls anew in every answer."""
    transcript = [
        user("look twice"),
        answered(called("0", {"at": "first"}), called("0", {"at": "second"})),
        result("0", "one"),
        result("0", "two"),
        answered(called("0", {"at": "third"})),
        result("0", "three"),
    ]
    async with provider(say("ok")) as server:
        await ask(models(server, protocol), *transcript, tools=[LOOK])
        body = json.dumps(server.bodies[0])
    assert [body.index(word) for word in ("one", "two", "three")] == sorted(
        body.index(word) for word in ("one", "two", "three")
    )


async def test_a_call_without_a_result_is_refused_here_h58() -> None:
    """The harness makes up the results that are missing; whoever does not is told where."""
    async with provider() as server:
        error = await fails(models(server, "anthropic"), user("hi"), answered(called("a")), user("well?"))
        assert not server.sent
    assert error.code == "malformed"
    assert "'a'" in str(error)


async def test_an_image_that_is_none_is_refused_here_h170() -> None:
    async with provider() as server:
        error = await fails(models(server, "anthropic"), user(Image("image/png", "not base64!")))
    assert error.code == "malformed"


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
async def test_thinking_is_told_to_nobody_else_h170(protocol: str) -> None:
    """Another model's signature is worth nothing, and its thoughts are not the answer's words."""
    other = "anthropic" if protocol == "openai" else "openai"
    async with provider(call(("look", "{}"), thinking="my own thoughts", text="hm"), say("ok"), say("ok")) as server:
        first = await ask(models(server, protocol), user("hi"), tools=[LOOK], thinking="low")
        told = [user("hi"), first, result(first.tool_calls[0].id, "blue")]
        await ask(models(server, other), *told, tools=[LOOK], thinking="low")
        namesake = {"openai": "gpt-5.6", "anthropic": "claude-opus-5"}[protocol]
        await ask(models(server, protocol, model=namesake), *told, tools=[LOOK], thinking="low")
        for body in server.bodies[1:]:
            assert "my own thoughts" not in json.dumps(body)


@pytest.mark.filterwarnings("ignore:The model 'claude-haiku-4-5' is deprecated:DeprecationWarning")
async def test_thinking_within_a_budget_begins_with_the_next_input_h170() -> None:
    """Such models refuse to begin to think behind a call made without; the server does, too."""
    async with provider(call(("look", "{}")), say("It is blue."), say("Sure.", thinking="is it?")) as server:
        them = models(server, "anthropic", model="claude-haiku-4-5")
        first = await ask(them, user("hi"), tools=[LOOK])
        told = [user("hi"), first, result(first.tool_calls[0].id, "blue")]
        second = await ask(them, *told, tools=[LOOK], thinking="high")
        third = await ask(them, *told, second, user("sure?"), tools=[LOOK], thinking="high")
        modes = [(body.get("thinking") or {}).get("type") for body in server.bodies]
    assert modes == [None, None, "enabled"]
    assert third.text == "Sure."


async def test_a_strict_template_is_told_one_message_a_turn_h170() -> None:
    async with provider(say("ok")) as server:
        dialect = server.dialects["/v1/chat/completions"]
        assert isinstance(dialect, Chat)
        dialect.rules.system_first = True
        transcript = [system("Be kind."), user("one"), user("two"), system("new"), answered("yes"), user("three")]
        await ask(local(server), *transcript)
        assert [message["role"] for message in server.bodies[0]["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
