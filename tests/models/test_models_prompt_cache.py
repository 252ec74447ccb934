"""What of a request a provider has told already, in its own protocol (rules H251 to H253)."""

from __future__ import annotations

from typing import Any

import pytest
from model_kit import NAMES, PROTOCOLS, models
from replies import call, say
from server import Provider, provider

from perdure import Agent, Extension, Harness, MemoryStorage, tool
from perdure.harness.model import ModelInfo

LONG = "word " * 300
PROMPT = {"openai": 3, "openai-chat": 2, "anthropic": 2}
"""Parts of a request before the conversation: the tools, the instructions where there is such a field, the prompt."""

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


@tool(replay="safe")
async def look(at: str) -> str:
    """Look."""
    return f"{at} is blue"


@tool(replay="safe")
async def hear(at: str) -> str:
    """Hear."""
    return f"{at} is silent"


def shared(server: Provider, before: int, after: int) -> tuple[int, int]:
    """How many parts of the later request the earlier one told, from the front; and how many that one had."""
    one, other = [
        server.dialects[sent.path].rules.transcript(sent.body) for sent in (server.sent[before], server.sent[after])
    ]
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count, len(one)


def kept(server: Provider, before: int, after: int) -> bool:
    count, whole = shared(server, before, after)
    return count == whole


@each_protocol
async def test_a_reset_and_a_compaction_begin_once_anew_h253(protocol: str) -> None:
    info = ModelInfo(provider=protocol, name=NAMES[protocol], context_window=4_000, max_output=1_000)
    async with provider(
        *(say(f"Answer {n}.") for n in range(4)), say("A summary."), say("Five."), say("Six.")
    ) as server:
        them = models(server, protocol, catalogue=[info])
        options: dict[str, Any] = {"extensions": [Extension("tools", tools=[look])], "instructions": "Be kind."}
        async with Harness.open(MemoryStorage(), models=them, **options) as harness:
            root = await harness.root()
            for text in ("one", "two"):
                await (await root.submit(text)).answer()
            await root.reset("from here on")
            await root.set_compaction(enabled=False)
            for _ in range(2):
                await (await root.submit(LONG * 3)).answer()
            await root.set_compaction(enabled=None)
            await harness.wait_task(await root.compact())
            for text in ("five", "six"):
                await (await root.submit(text)).answer()
        assert len(server.sent) == 7
        assert kept(server, 0, 1)
        assert shared(server, 1, 2)[0] == PROMPT[protocol], "after the reset"
        assert kept(server, 2, 3)
        assert shared(server, 3, 5)[0] == PROMPT[protocol], "after the compaction, whose own request is between"
        assert kept(server, 5, 6)


@each_protocol
async def test_other_tools_change_the_tools_alone_h252(protocol: str) -> None:
    async with provider(call(("look", '{"at": "it"}')), say("Two."), say("Three."), say("Four.")) as server:
        options: dict[str, Any] = {"extensions": [Extension("tools", tools=[look, hear])], "instructions": "Be kind."}
        async with Harness.open(MemoryStorage(), models=models(server, protocol), **options) as harness:
            root = await harness.root(agent=Agent(tools=["look"]))
            await (await root.submit("one")).answer()
            await root.set_agent(tools=["hear", "look"])
            for text in ("two", "three"):
                await (await root.submit(text)).answer()
        transcripts = [server.dialects[sent.path].rules.transcript(sent.body) for sent in server.sent]
        assert kept(server, 0, 1)
        assert shared(server, 1, 2)[0] == 0, "tools come first"
        assert transcripts[2][1 : len(transcripts[1])] == transcripts[1][1:]
        assert kept(server, 2, 3)


@each_protocol
async def test_another_level_leaves_the_messages_as_they_are_h252(protocol: str) -> None:
    """Also where an answer was thought about."""
    thought = call(("look", '{"at": "it"}'), thinking="I should look.", text="A moment.")
    async with provider(say("One."), thought, say("Two."), say("Three.")) as server:
        options: dict[str, Any] = {"extensions": [Extension("tools", tools=[look])], "instructions": "Be kind."}
        async with Harness.open(MemoryStorage(), models=models(server, protocol), **options) as harness:
            root = await harness.root()
            await (await root.submit("one")).answer()
            await root.set_agent(thinking="low")
            await (await root.submit("two")).answer()
            await root.set_agent(thinking="off")
            await (await root.submit("three")).answer()
        server.check_prefixes()
