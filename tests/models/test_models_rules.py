"""The test server's own strictness: what breaks a provider's rule is refused by it, what keeps them all is not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeAlias

import pytest
from model_kit import PNG
from rules import AnthropicRules, ChatRules, ResponsesRules, Rules

Body: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Body], object]

ANTHROPIC: Body = {
    "model": "m",
    "max_tokens": 10,
    "stream": True,
    "system": "Be kind.",
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "signed"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {}},
                {"type": "tool_use", "id": "b", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "blue"},
                {"type": "tool_result", "tool_use_id": "b", "content": "red"},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
}

CHAT: Body = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}},
                {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "blue"},
        {"role": "tool", "tool_call_id": "b", "content": "red"},
    ],
}

RESPONSES: Body = {
    "model": "m",
    "stream": True,
    "store": False,
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "encrypted_content": "secret",
            "summary": [{"type": "summary_text", "text": "hm"}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "blue"},
    ],
}


def rules_of(kind: str) -> tuple[Rules, Body]:
    if kind == "anthropic":
        anthropic = AnthropicRules()
        anthropic.signed["signed"] = "hm"
        return anthropic, deepcopy(ANTHROPIC)
    if kind == "chat":
        return ChatRules(system_first=True), deepcopy(CHAT)
    responses = ResponsesRules()
    responses.encrypted["rs_1"] = ("secret", "hm")
    responses.calls["fc_1"] = ("a", "rs_1")
    return responses, deepcopy(RESPONSES)


def set_at(*path: str | int, to: object) -> Change:
    def change(body: Any) -> None:
        for step in path[:-1]:
            body = body[step]
        body[path[-1]] = to

    return change


def drop(*path: str | int) -> Change:
    def change(body: Any) -> None:
        for step in path[:-1]:
            body = body[step]
        del body[path[-1]]

    return change


BREACHES: list[tuple[str, str, Change]] = [
    ("anthropic", "first message is not the user's", drop("messages", 0)),
    ("anthropic", "alternate", set_at("messages", 1, "role", to="user")),
    ("anthropic", "right behind", drop("messages", 2, "content", 1)),
    ("anthropic", "right behind", set_at("messages", 2, "content", 0, "tool_use_id", to="b")),
    ("anthropic", "come first", lambda body: body["messages"][2]["content"].insert(0, {"type": "text", "text": "x"})),
    ("anthropic", "name of a call", set_at("messages", 1, "content", 2, "id", to="a")),
    ("anthropic", "name of a call", set_at("messages", 1, "content", 2, "id", to="a:b")),
    ("anthropic", "no object", set_at("messages", 1, "content", 1, "input", to="{}")),
    ("anthropic", "signature", set_at("messages", 1, "content", 0, "thinking", to="hmm")),
    ("anthropic", "signature", set_at("messages", 1, "content", 0, "signature", to="")),
    ("anthropic", "non-whitespace", set_at("messages", 0, "content", to=" ")),
    ("anthropic", "empty result", set_at("messages", 2, "content", 0, "content", to=[])),
    ("anthropic", "nothing to answer", lambda body: body["messages"].append({"role": "assistant", "content": "x"})),
    (
        "anthropic",
        "'system' is not supported",
        lambda body: body["messages"].append({"role": "system", "content": "x"}),
    ),
    ("anthropic", "at the end", drop("messages", 2)),
    ("anthropic", "unknown fields", set_at("logprobs", to=True)),
    ("anthropic", "max_tokens", drop("max_tokens")),
    ("chat", "at the beginning", lambda body: body["messages"].append({"role": "system", "content": "x"})),
    ("chat", "alternate", lambda body: body["messages"].insert(1, {"role": "user", "content": "x"})),
    ("chat", "waited for", drop("messages", 3)),
    ("chat", "at the end", drop("messages", 4)),
    ("chat", "without a result", lambda body: body["messages"].insert(4, {"role": "user", "content": "x"})),
    ("chat", "name of a call", set_at("messages", 2, "tool_calls", 1, "id", to="a")),
    ("chat", "no object", set_at("messages", 2, "tool_calls", 1, "function", "arguments", to='{"a')),
    ("chat", "neither words nor calls", drop("messages", 2, "tool_calls")),
    ("chat", "null", set_at("messages", 2, "content", to=None)),
    ("chat", "empty", set_at("messages", 1, "content", to="")),
    ("chat", "empty", set_at("messages", 3, "content", to="")),
    ("chat", "image", set_at("messages", 1, "content", to=[{"type": "image_url", "image_url": {"url": "x"}}])),
    ("chat", "usage", drop("stream_options")),
    ("chat", "not supported", lambda body: body.update(model="gpt-5.1", reasoning_effort="minimal")),
    ("responses", "not supported", lambda body: body.update(model="gpt-5.4", reasoning={"effort": "minimal"})),
    ("responses", "not stored", drop("store")),
    ("responses", "following item", drop("input", 2)),
    ("responses", "required reasoning item", drop("input", 1)),
    ("responses", "could not be verified", set_at("input", 1, "encrypted_content", to="other")),
    ("responses", "summary", set_at("input", 1, "summary", to=[])),
    ("responses", "was not found", set_at("input", 2, "id", to="fc_2")),
    ("responses", "no object", set_at("input", 2, "arguments", to="[]")),
    ("responses", "at the end", drop("input", 3)),
    ("responses", "waited for", set_at("input", 3, "call_id", to="b")),
    ("responses", "empty", set_at("input", 3, "output", to="")),
    ("responses", "image", set_at("input", 0, "content", 0, "image_url", to="data:image/png;base64,!")),
]


@pytest.mark.parametrize("kind", ["anthropic", "chat", "responses"])
def test_what_keeps_the_rules_is_taken_h170(kind: str) -> None:
    rules, body = rules_of(kind)
    assert rules.check(body) == []


@pytest.mark.parametrize(("kind", "words", "change"), BREACHES)
def test_each_breach_is_refused_h170(kind: str, words: str, change: Change) -> None:
    rules, body = rules_of(kind)
    change(body)
    assert any(words in breach for breach in rules.check(body)), rules.check(body)
