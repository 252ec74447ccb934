"""What the providers demand of a request, each rule as strict as the strictest of its servers is.

``check`` gives every breach in words; a request with any is refused like the provider would refuse it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Iterator, Sequence
from typing import Any

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")


EFFORTS = {
    "gpt-5.4": ("none", "low", "medium", "high", "xhigh"),
    "gpt-5.1": ("none", "low", "medium", "high"),
    "gpt-5-pro": ("high",),
    "gpt-5": ("minimal", "low", "medium", "high"),
    "o3": ("low", "medium", "high"),
    "gpt-4.1": (),
}
"""What models take as an effort, the longest beginning of a name first; of others it is not known."""


def bad_effort(model: str, effort: object) -> Iterator[str]:
    known = next((efforts for name, efforts in EFFORTS.items() if model.startswith(name)), None)
    if effort is not None and known is not None and effort not in known:
        yield f"Unsupported value: {effort!r} is not supported with the {model!r} model"


class Rules(ABC):
    def __init__(self) -> None:
        self.issued: set[str] = set()
        """Names of calls that this server gave."""

    def check(self, body: dict[str, Any]) -> list[str]:
        return list(self.breaches(body))

    @abstractmethod
    def breaches(self, body: dict[str, Any]) -> Iterator[str]: ...

    @abstractmethod
    def transcript(self, body: dict[str, Any]) -> list[Any]:
        """What a cache is keyed by, in order: tools and messages, without marks for the cache itself."""


def unknown(body: dict[str, Any], known: str) -> Iterator[str]:
    extra = set(body) - set(known.split())
    if extra:
        yield f"unknown fields: {sorted(extra)}"


def blank(text: object) -> bool:
    return not isinstance(text, str) or not text.strip()


def is_object(text: object) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except ValueError:
        return False


def bad_image(media: str, data: str) -> bool:
    try:
        return media not in IMAGES or not b64decode(data, validate=True)
    except ValueError:
        return True


def data_url(url: object) -> Iterator[str]:
    found = re.fullmatch(r"data:([a-z/]+);base64,(.*)", url, re.DOTALL) if isinstance(url, str) else None
    if found is None or bad_image(found[1], found[2]):
        yield "an image that is none"


class ChatRules(Rules):
    def __init__(self, *, system_first: bool = False) -> None:
        super().__init__()
        self.system_first = system_first
        """Templates of many local models take a system message only at the beginning."""

    def transcript(self, body: dict[str, Any]) -> list[Any]:
        return [body.get("tools"), *body["messages"]]

    def breaches(self, body: dict[str, Any]) -> Iterator[str]:
        yield from unknown(
            body,
            "model messages stream stream_options tools tool_choice parallel_tool_calls max_completion_tokens "
            "max_tokens reasoning_effort prompt_cache_key temperature",
        )
        if body.get("stream") is not True or body.get("stream_options") != {"include_usage": True}:
            yield "not a stream with usage"
        yield from bad_effort(body["model"], body.get("reasoning_effort"))
        names = [tool["function"]["name"] for tool in body.get("tools", [])]
        if len(names) != len(set(names)) or not all(map(NAME.fullmatch, names)):
            yield f"names of tools: {names}"
        if any(tool["function"]["parameters"].get("type") != "object" for tool in body.get("tools", [])):
            yield "a tool whose parameters are no object"
        messages: list[dict[str, Any]] = body["messages"]
        if not messages:
            yield "no messages"
        yield from self._messages(messages)

    def _messages(self, messages: Sequence[dict[str, Any]]) -> Iterator[str]:
        waiting: list[str] = []
        seen: set[str] = set()
        previous = ""
        for at, message in enumerate(messages):
            role = message["role"]
            where = f"messages[{at}] ({role})"
            if waiting and role != "tool":
                yield f"{where}: calls without a result: {waiting}"
                waiting = []
            if role in ("system", "developer"):
                if blank(message["content"]):
                    yield f"{where}: empty"
                if self.system_first and at > 0:
                    yield f"{where}: System message must be at the beginning."
            elif role == "user":
                if previous == "user" and self.system_first:
                    yield f"{where}: roles must alternate"
                yield from (f"{where}: {fault}" for fault in self._user(message["content"]))
            elif role == "assistant":
                if previous == "assistant":
                    yield f"{where}: two answers in a row"
                calls = message.get("tool_calls") or []
                if not calls and blank(message.get("content")):
                    yield f"{where}: neither words nor calls"
                if "content" in message and blank(message["content"]):
                    yield f"{where}: blank words, or none that are null"
                for made in calls:
                    if not 0 < len(made["id"]) <= 40 or made["id"] in seen:
                        yield f"{where}: name of a call: {made['id']!r}"
                    if not is_object(made["function"]["arguments"]):
                        yield f"{where}: arguments are no object: {made['function']['arguments']!r}"
                    seen.add(made["id"])
                    waiting.append(made["id"])
            elif role == "tool":
                if not waiting or message["tool_call_id"] != waiting[0]:
                    yield f"{where}: a result of {message['tool_call_id']!r}, but {waiting} are waited for"
                else:
                    waiting.pop(0)
                if blank(message["content"]):
                    yield f"{where}: empty"
            else:
                yield f"{where}: no such role"
            previous = role
        if waiting:
            yield f"calls without a result at the end: {waiting}"
        if previous in ("assistant", ""):
            yield "nothing to answer"
        if not any(message["role"] == "user" for message in messages):
            yield "no message of a user"

    def _user(self, content: object) -> Iterator[str]:
        if isinstance(content, str):
            if blank(content):
                yield "empty"
            return
        assert isinstance(content, list)
        if not content:
            yield "empty"
        for part in content:
            if part["type"] == "text":
                if blank(part["text"]):
                    yield "an empty text"
            elif part["type"] == "image_url":
                yield from data_url(part["image_url"]["url"])
            else:
                yield f"a part of type {part['type']}"


class AnthropicRules(Rules):
    def __init__(self) -> None:
        super().__init__()
        self.signed: dict[str, str] = {}
        """What was thought, by its signature."""
        self.redacted: set[str] = set()
        self.system_inline = False

    def transcript(self, body: dict[str, Any]) -> list[Any]:
        def bare(value: object) -> object:
            if isinstance(value, dict):
                return {name: bare(item) for name, item in value.items() if name != "cache_control"}
            return [bare(item) for item in value] if isinstance(value, list) else value

        whole: Any = bare([body.get("tools"), body.get("system"), *body["messages"]])
        return whole

    def breaches(self, body: dict[str, Any]) -> Iterator[str]:
        yield from unknown(
            body, "model messages stream max_tokens system tools tool_choice thinking output_config temperature"
        )
        if body.get("stream") is not True or not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
            yield "not a stream with max_tokens"
        names = [tool["name"] for tool in body.get("tools", [])]
        if len(names) != len(set(names)) or not all(map(NAME.fullmatch, names)):
            yield f"names of tools: {names}"
        if any(tool["input_schema"].get("type") != "object" for tool in body.get("tools", [])):
            yield "a tool whose input is no object"
        if json.dumps(body).count('"cache_control"') > 4:
            yield "more than 4 cache breakpoints"
        system = body.get("system")
        if system == "" or (isinstance(system, list) and any(blank(block["text"]) for block in system)):
            yield "an empty system prompt"
        thinking = body.get("thinking") or {}
        if thinking.get("type") == "enabled" and not 1024 <= thinking["budget_tokens"] < body["max_tokens"]:
            yield "a budget of thinking below 1024 or above max_tokens"
        messages = body["messages"]
        if not messages or messages[0]["role"] != "user":
            yield "the first message is not the user's"
            return
        if messages[-1]["role"] == "assistant":
            yield "nothing to answer"
        yield from self._messages(messages)
        last = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
        if (
            thinking.get("type") == "enabled"
            and last is not None
            and last["content"][-1]["type"] == "tool_use"
            and last["content"][0]["type"] not in ("thinking", "redacted_thinking")
        ):
            yield "Expected `thinking` or `redacted_thinking`, but found `tool_use`"

    def _messages(self, messages: Sequence[dict[str, Any]]) -> Iterator[str]:
        waiting: list[str] = []
        seen: set[str] = set()
        previous = ""
        for at, message in enumerate(messages):
            role, content = message["role"], message["content"]
            where = f"messages[{at}] ({role})"
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if not content:
                yield f"{where}: empty"
            if role == "system":
                if not self.system_inline:
                    yield f"{where}: role 'system' is not supported on this model"
                if previous != "user":
                    yield f"{where}: a system message stands behind a user's"
                yield from (f"{where}: {fault}" for fault in self._texts(content))
                previous = role
                continue
            if role == (previous if previous != "system" else ""):
                yield f"{where}: roles must alternate"
            if previous == "system" and role == "user":
                yield f"{where}: a system message stands before an answer"
            yield from (f"{where}: {fault}" for fault in self._texts(content))
            if role == "user":
                results = [block for block in content if block["type"] == "tool_result"]
                if results and content[: len(results)] != results:
                    yield f"{where}: results of tools come first"
                if [block["tool_use_id"] for block in results] != waiting:
                    yield f"{where}: calls without a result right behind them, or the other way round: {waiting}"
                waiting = []
                for block in results:
                    yield from (f"{where}: {fault}" for fault in self._result(block))
            elif role == "assistant":
                for block in content:
                    if block["type"] == "tool_use":
                        if not NAME.fullmatch(block["id"]) or block["id"] in seen:
                            yield f"{where}: name of a call: {block['id']!r}"
                        if not isinstance(block["input"], dict):
                            yield f"{where}: input is no object"
                        seen.add(block["id"])
                        waiting.append(block["id"])
                    elif block["type"] == "thinking":
                        if self.signed.get(block["signature"]) != block["thinking"]:
                            yield f"{where}: Invalid `signature` in `thinking` block"
                    elif block["type"] == "redacted_thinking" and block["data"] not in self.redacted:
                        yield f"{where}: Invalid `data` in `redacted_thinking` block"
                if content and content[-1]["type"] in ("thinking", "redacted_thinking"):
                    yield f"{where}: the last block is thinking"
            else:
                yield f"{where}: no such role"
            previous = role
        if waiting:
            yield f"calls without a result at the end: {waiting}"

    def _texts(self, content: Sequence[dict[str, Any]]) -> Iterator[str]:
        for block in content:
            if block["type"] == "text" and blank(block["text"]):
                yield "text content blocks must contain non-whitespace text"
            if block["type"] == "image" and bad_image(block["source"]["media_type"], block["source"]["data"]):
                yield "an image that is none"

    def _result(self, block: dict[str, Any]) -> Iterator[str]:
        content = block["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not content:
            yield "an empty result"
        yield from self._texts(content)


class ResponsesRules(Rules):
    def __init__(self) -> None:
        super().__init__()
        self.encrypted: dict[str, tuple[str, str]] = {}
        """By item: its content, and what was thought."""
        self.calls: dict[str, tuple[str, str | None]] = {}
        """By item: the name of the call, and the reasoning before it."""
        self.texts: dict[str, str] = {}
        self.phases: dict[str, str] = {}

    def transcript(self, body: dict[str, Any]) -> list[Any]:
        return [body.get("tools"), body.get("instructions"), *body["input"]]

    def breaches(self, body: dict[str, Any]) -> Iterator[str]:
        yield from unknown(
            body,
            "model input stream tools tool_choice parallel_tool_calls max_output_tokens reasoning include store "
            "prompt_cache_key prompt_cache_options temperature text background",
        )
        if body.get("background"):
            if body.get("stream") or body.get("store") is not True:
                yield "in the background, but a stream or not stored"
        elif body.get("stream") is not True or body.get("store") is not False:
            yield "not a stream that is not stored"
        yield from bad_effort(body["model"], (body.get("reasoning") or {}).get("effort"))
        names = [tool["name"] for tool in body.get("tools", [])]
        if len(names) != len(set(names)) or not all(map(NAME.fullmatch, names)):
            yield f"names of tools: {names}"
        waiting: list[str] = []
        seen: set[str] = set()
        items: list[dict[str, Any]] = body["input"]
        if not items:
            yield "no input"
        previous = ""
        for at, item in enumerate(items):
            kind = item.get("type", "message")
            what = item["role"] if kind == "message" else kind
            where = f"input[{at}] ({what})"
            # Words of the same answer may follow a call, if that is how the answer was.
            if waiting and what != "function_call_output" and not (what == "function_call" or "id" in item):
                yield f"{where}: calls without an output: {waiting}"
                waiting = []
            if previous == "reasoning" and what not in ("assistant", "function_call"):
                yield f"{where}: reasoning was provided without its required following item"
            yield from (f"{where}: {fault}" for fault in self._item(kind, item, items[:at], waiting, seen))
            previous = what
        if waiting:
            yield f"calls without an output at the end: {waiting}"
        if previous in ("assistant", "reasoning", ""):
            yield "nothing to answer"

    def _item(
        self,
        kind: str,
        item: dict[str, Any],
        before: Sequence[dict[str, Any]],
        waiting: list[str],
        seen: set[str],
    ) -> Iterator[str]:
        if kind == "message":
            yield from self._message(item)
        elif kind == "reasoning":
            known = self.encrypted.get(item["id"])
            if known is None or item.get("encrypted_content") != known[0]:
                yield f"the encrypted content of {item['id']} could not be verified"
            elif "".join(part["text"] for part in item["summary"]) != known[1]:
                yield "a summary that was not given"
        elif kind == "function_call":
            if not 0 < len(item["call_id"]) <= 64 or item["call_id"] in seen:
                yield f"name of a call: {item['call_id']!r}"
            if not is_object(item["arguments"]):
                yield f"arguments are no object: {item['arguments']!r}"
            if "id" in item:
                call, reasoning = self.calls.get(item["id"], ("", None))
                if call != item["call_id"]:
                    yield f"item {item['id']} was not found"
                if reasoning and not any(one.get("id") == reasoning for one in before):
                    yield f"{item['id']} was provided without its required reasoning item {reasoning}"
            seen.add(item["call_id"])
            waiting.append(item["call_id"])
        elif kind == "function_call_output":
            if not waiting or item["call_id"] != waiting[0]:
                yield f"an output of {item['call_id']!r}, but {waiting} are waited for"
            else:
                waiting.pop(0)
            output = item["output"]
            if isinstance(output, str):
                output = [{"type": "input_text", "text": output}]
            yield from self._content(output)
        else:
            yield "no such item"

    def _message(self, item: dict[str, Any]) -> Iterator[str]:
        content = item["content"]
        if isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        if item["role"] == "assistant":
            if "id" in item:
                if "".join(part["text"] for part in content) != self.texts.get(item["id"]):
                    yield f"item {item['id']} was not found"
                if item.get("phase") != self.phases.get(item["id"]):
                    yield "without its phase"
        elif item["role"] not in ("user", "system", "developer"):
            yield "no such role"
        yield from self._content(content)

    def _content(self, content: Sequence[dict[str, Any]]) -> Iterator[str]:
        if not content:
            yield "empty"
        for part in content:
            if part["type"] in ("input_text", "output_text"):
                if blank(part["text"]):
                    yield "an empty text"
            elif part["type"] == "input_image":
                yield from data_url(part["image_url"])
            else:
                yield f"a part of type {part['type']}"
