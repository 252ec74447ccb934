"""What becomes of a thinking level on its way to a provider (rule H250)."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import pytest
from model_kit import ask, local, models, user
from replies import say
from server import Provider, provider

from perdure import Harness, MemoryStorage
from perdure.harness.model import ThinkingLevel
from perdure.models.endpoints import Protocol

LEVELS: tuple[ThinkingLevel, ...] = get_args(ThinkingLevel)


def measure(body: dict[str, Any]) -> object:
    """What a request says of thinking, in the provider's own words."""
    if "reasoning_effort" in body:
        return body["reasoning_effort"]
    if "reasoning" in body:
        return body["reasoning"].get("effort")
    thinking = body.get("thinking")
    if thinking is None:
        return None
    if thinking["type"] == "adaptive":
        return body["output_config"]["effort"]
    return thinking.get("budget_tokens", thinking["type"])


async def sent(server: Provider, them: Any, level: ThinkingLevel, **request: Any) -> object:
    server.will(say("ok"))
    with warnings.catch_warnings():
        # The strict server takes older models as well.
        warnings.filterwarnings("ignore", "The model '.*' is deprecated", DeprecationWarning)
        await ask(them, user("hi"), thinking=level, **request)
    assert server.breaches == []
    return measure(server.bodies[-1])


@pytest.mark.parametrize(
    ("protocol", "model", "off", "minimal", "low", "medium", "high"),
    [
        ("openai", "gpt-5.4", "none", "low", "low", "medium", "high"),
        ("openai", "gpt-5", "minimal", "minimal", "low", "medium", "high"),
        ("openai", "gpt-5-pro", "high", "high", "high", "high", "high"),
        ("openai", "o3", "low", "low", "low", "medium", "high"),
        ("openai", "gpt-4.1", None, None, None, None, None),
        ("openai-chat", "gpt-5.1", "none", "low", "low", "medium", "high"),
        ("openai-chat", "gpt-5", "minimal", "minimal", "low", "medium", "high"),
        ("openai-chat", "gpt-4.1", None, None, None, None, None),
        ("anthropic", "claude-sonnet-5", "disabled", "low", "low", "medium", "high"),
        ("anthropic", "claude-opus-4-6", None, "low", "low", "medium", "high"),
        ("anthropic", "claude-haiku-4-5", None, 1024, 2048, 10000, 16384),
    ],
)
async def test_each_family_gets_a_level_that_it_has_h250(
    protocol: str, model: str, off: object, minimal: object, low: object, medium: object, high: object
) -> None:
    async with provider() as server:
        them = models(server, protocol, model=model)
        assert [await sent(server, them, level) for level in LEVELS] == [off, minimal, low, medium, high]


@pytest.mark.parametrize("protocol", ["openai", "openai-chat"])
async def test_a_model_that_is_not_known_to_think_is_asked_without_a_level_h250(protocol: Protocol) -> None:
    async with provider() as server:
        assert [await sent(server, local(server, protocol), level) for level in LEVELS] == [None] * 5


@pytest.mark.parametrize("protocol", ["openai", "openai-chat"])
async def test_what_a_server_of_ones_own_wants_is_set_at_its_endpoint_h250(protocol: Protocol) -> None:
    async with provider() as server:
        them = local(server, protocol, settings={"openai_reasoning_effort": "high"})
        assert [await sent(server, them, level) for level in ("off", "low")] == ["high", "high"]


@pytest.mark.parametrize(
    ("most", "budgets"),
    [
        (2_000, [None, None, None, None, None]),
        (2_048, [None, 1024, 1024, 1024, 1024]),
        (20_000, [None, 1024, 2048, 10000, 10000]),
        (40_000, [None, 1024, 2048, 10000, 16384]),
    ],
)
async def test_a_budget_of_thinking_leaves_half_of_what_may_be_answered_h250(most: int, budgets: list[object]) -> None:
    """The server refuses one that is not below max_tokens."""
    async with provider() as server:
        them = models(server, "anthropic", model="claude-haiku-4-5")
        assert [await sent(server, them, level, max_output=most) for level in LEVELS] == budgets


@pytest.mark.parametrize(("protocol", "efforts"), [("openai", ["low", "high", "none"]), ("anthropic", ["low", "high"])])
async def test_a_conversation_changes_its_level_h249(protocol: str, efforts: list[str]) -> None:
    levels: tuple[ThinkingLevel, ...] = ("minimal", "high", "off")
    async with provider(*(say("ok", thinking="hm") for _ in levels)) as server:
        async with Harness.open(MemoryStorage(), models=models(server, protocol)) as harness:
            root = await harness.root()
            for level in levels:
                await root.set_agent(thinking=level)
                await (await root.submit("hi")).answer()
        assert server.breaches == []
        assert [measure(body) for body in server.bodies][: len(efforts)] == efforts
        server.check_prefixes()
