"""Three protocols as their providers speak them: answers as events of a stream, errors as bodies."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

from replies import Answer, Made, Refusal, Tokens
from rules import AnthropicRules, ChatRules, ResponsesRules, Rules

BACKGROUND = "resp_background"
"""What every response that is made in the background is called."""
CHUNK = 7
"""Characters a delta."""


def chunks(text: str, halves: bool = False) -> list[str]:
    if halves:
        units = text.encode("utf-16-le")
        text = "".join(chr(int.from_bytes(units[at : at + 2], "little")) for at in range(0, len(units), 2))
    return [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]


def dumps(event: dict[str, Any]) -> str:
    """As characters, like providers do, where they are whole ones."""
    text = json.dumps(event, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(event)


R = TypeVar("R", bound=Rules, covariant=True)


class Dialect(ABC, Generic[R]):
    def __init__(self, rules: R) -> None:
        self._rules = rules
        self.number = count(1)

    @property
    def rules(self) -> R:
        return self._rules

    @abstractmethod
    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def frame(self, event: dict[str, Any]) -> str: ...

    @abstractmethod
    def error(self, refusal: Refusal) -> dict[str, Any]: ...

    @abstractmethod
    def failed(self, code: str) -> dict[str, Any]:
        """The event of an error on the way."""

    end = ""
    """What ends every stream."""


class Chat(Dialect[ChatRules]):
    """Chat Completions of OpenAI, and of those who copied it."""

    end = "data: [DONE]\n\n"

    def __init__(self) -> None:
        super().__init__(ChatRules())

    def frame(self, event: dict[str, Any]) -> str:
        return f"data: {dumps(event)}\n\n"

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return {
            "error": {"message": refusal.message, "type": "some_error", "code": refusal.code or None, "param": None}
        }

    def failed(self, code: str) -> dict[str, Any]:
        return {"error": {"message": "it failed on its way", "type": code, "code": code}}

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        id = f"chatcmpl-{next(self.number)}"

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return {
                "id": id,
                "object": "chat.completion.chunk",
                "created": 1_700_000_000,
                "model": body["model"],
                "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            }

        yield chunk({"role": "assistant", "content": ""})
        for text in chunks(answer.thinking, answer.halves):
            yield chunk({"reasoning_content": text})
        if answer.stop == "refusal":
            for text in chunks(answer.text, answer.halves):
                yield chunk({"refusal": text})
        else:
            for text in chunks(answer.text, answer.halves):
                yield chunk({"content": text})
        ids = [f"call_{next(self.number)}" for _ in answer.calls]
        for at, (name, _) in enumerate(answer.calls):
            call = {"index": at, "id": ids[at], "type": "function", "function": {"name": name, "arguments": ""}}
            yield chunk({"tool_calls": [call]})
        # The pieces of several calls in turn.
        pieces = [chunks(arguments, answer.halves) for _, arguments in answer.calls]
        for step in range(max(map(len, pieces), default=0)):
            for at, texts in enumerate(pieces):
                if step < len(texts):
                    piece: dict[str, Any] = {"index": at, "function": {"arguments": texts[step]}}
                    if answer.again:
                        piece |= {"id": ids[at], "type": "function"}
                        piece["function"]["name"] = answer.calls[at][0]
                    yield chunk({"tool_calls": [piece]})
        self.rules.issued.update(ids)
        finish = {"length": "length", "filter": "content_filter"}.get(answer.stop)
        yield chunk({}, finish or ("tool_calls" if answer.calls else "stop"))
        if answer.usage:
            tokens = answer.tokens
            prompt = tokens.input + tokens.cache_read + tokens.cache_write
            yield {
                "id": id,
                "object": "chat.completion.chunk",
                "created": 1_700_000_000,
                "model": body["model"],
                "choices": [],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": tokens.output,
                    "total_tokens": prompt + tokens.output,
                    "prompt_tokens_details": {
                        "cached_tokens": tokens.cache_read,
                        "cache_write_tokens": tokens.cache_write,
                    },
                    "completion_tokens_details": {"reasoning_tokens": tokens.reasoning},
                },
            }


class Anthropic(Dialect[AnthropicRules]):
    """The Messages API."""

    def __init__(self) -> None:
        super().__init__(AnthropicRules())

    def frame(self, event: dict[str, Any]) -> str:
        return f"event: {event.get('type', '?')}\ndata: {dumps(event)}\n\n"

    def error(self, refusal: Refusal) -> dict[str, Any]:
        kinds = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
        kinds |= {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}
        kind = refusal.code or kinds.get(refusal.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": "req_1"}

    def failed(self, code: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": f"{code}_error", "message": "it failed on its way"}}

    def usage(self, tokens: Tokens, *, output: int) -> dict[str, Any]:
        return {
            "input_tokens": tokens.input,
            "output_tokens": output,
            "cache_read_input_tokens": tokens.cache_read,
            "cache_creation_input_tokens": tokens.cache_write,
        }

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        message = {
            "id": f"msg_{next(self.number)}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(answer.tokens, output=1),
        }
        yield {"type": "message_start", "message": message}
        at = 0

        def block(at: int, start: dict[str, Any], deltas: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            yield {"type": "content_block_start", "index": at, "content_block": start}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": at, "delta": delta}
            yield {"type": "content_block_stop", "index": at}

        if answer.thinking:
            signature = "sig-" + hashlib.sha256(f"{next(self.number)}{answer.thinking}".encode()).hexdigest()
            self.rules.signed[signature] = answer.thinking
            deltas: list[dict[str, Any]] = [
                {"type": "thinking_delta", "thinking": text} for text in chunks(answer.thinking, answer.halves)
            ]
            deltas.append({"type": "signature_delta", "signature": signature})
            yield from block(at, {"type": "thinking", "thinking": "", "signature": ""}, deltas)
            at += 1
        if answer.hidden:
            self.rules.redacted.add(answer.hidden)
            yield from block(at, {"type": "redacted_thinking", "data": answer.hidden}, [])
            at += 1
        yield {"type": "ping"}
        if answer.text:
            deltas = [{"type": "text_delta", "text": text} for text in chunks(answer.text, answer.halves)]
            yield from block(at, {"type": "text", "text": ""}, deltas)
            at += 1
        for name, arguments in answer.calls:
            id = f"toolu_{next(self.number)}"
            self.rules.issued.add(id)
            deltas = [{"type": "input_json_delta", "partial_json": text} for text in chunks(arguments, answer.halves)]
            yield from block(at, {"type": "tool_use", "id": id, "name": name, "input": {}}, deltas)
            at += 1
        stop = {"length": "max_tokens", "refusal": "refusal", "filter": "refusal"}.get(answer.stop)
        usage = self.usage(answer.tokens, output=answer.tokens.output)
        if answer.tokens.reasoning:
            usage["output_tokens_details"] = {"thinking_tokens": answer.tokens.reasoning}
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": stop or ("tool_use" if answer.calls else "end_turn"), "stop_sequence": None},
            "usage": usage,
        }
        yield {"type": "message_stop"}


class Responses(Dialect[ResponsesRules]):
    """The Responses API of OpenAI."""

    def __init__(self) -> None:
        super().__init__(ResponsesRules())

    def frame(self, event: dict[str, Any]) -> str:
        return f"event: {event.get('type', '?')}\ndata: {dumps(event)}\n\n"

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return {
            "error": {"message": refusal.message, "type": "some_error", "code": refusal.code or None, "param": None}
        }

    def failed(self, code: str) -> dict[str, Any]:
        code = {"overloaded": "server_error"}.get(code, code)
        return {"type": "error", "code": code, "message": "it failed on its way", "param": None, "sequence_number": 99}

    def events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number, event in enumerate(self._events(answer, body)):
            yield {"sequence_number": number, **event}

    def made(self, made: Made, model: str) -> dict[str, Any]:
        """A stored response: what was thought is not told with it, but for its summary."""
        whole: dict[str, Any] = list(self._events(made.answer, {"model": model}))[-1]["response"]
        for item in whole["output"]:
            item.pop("encrypted_content", None)
            self.rules.encrypted.pop(item["id"], None)
        found = {**whole, "id": BACKGROUND, "background": True, "store": True}
        if made.status != "completed":
            found |= {"status": made.status, "output": []}
        if made.status in ("queued", "in_progress"):
            found["usage"] = None
        if made.status == "failed":
            found["error"] = {"code": made.code, "message": "it failed on its way"}
        return found

    def _events(self, answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        response: dict[str, Any] = {
            "id": f"resp_{next(self.number)}",
            "object": "response",
            "created_at": 1_700_000_000,
            "model": body["model"],
            "status": "in_progress",
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
        }
        output: list[dict[str, Any]] = []
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}

        def item(
            added: dict[str, Any], done: dict[str, Any], between: list[dict[str, Any]]
        ) -> Iterator[dict[str, Any]]:
            at = len(output)
            yield {"type": "response.output_item.added", "output_index": at, "item": added}
            for event in between:
                yield {"output_index": at, "item_id": added["id"], **event}
            yield {"type": "response.output_item.done", "output_index": at, "item": done}
            output.append(done)

        reasoning: str | None = None
        if answer.thinking:
            reasoning = f"rs_{next(self.number)}"
            encrypted = f"encrypted {reasoning}"
            self.rules.encrypted[reasoning] = (encrypted, answer.thinking)
            added = {"id": reasoning, "type": "reasoning", "summary": []}
            summary = {"type": "summary_text", "text": answer.thinking}
            between: list[dict[str, Any]] = [
                {
                    "type": "response.reasoning_summary_part.added",
                    "summary_index": 0,
                    "part": {"type": "summary_text", "text": ""},
                }
            ]
            between += [
                {"type": "response.reasoning_summary_text.delta", "summary_index": 0, "delta": text}
                for text in chunks(answer.thinking, answer.halves)
            ]
            between += [
                {"type": "response.reasoning_summary_text.done", "summary_index": 0, "text": answer.thinking},
                {"type": "response.reasoning_summary_part.done", "summary_index": 0, "part": summary},
            ]
            yield from item(added, {**added, "summary": [summary], "encrypted_content": encrypted}, between)
        if answer.text:
            yield from self._text(answer, item)
        for name, arguments in answer.calls:
            id, call_id = f"fc_{next(self.number)}", f"call_{next(self.number)}"
            self.rules.issued.add(call_id)
            self.rules.calls[id] = (call_id, reasoning)
            added = {"id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
            between = [
                {"type": "response.function_call_arguments.delta", "delta": text}
                for text in chunks(arguments, answer.halves)
            ]
            between.append({"type": "response.function_call_arguments.done", "name": name, "arguments": arguments})
            yield from item(
                {**added, "status": "in_progress"},
                {**added, "arguments": arguments, "status": "completed"},
                between,
            )
        tokens = answer.tokens
        total = tokens.input + tokens.cache_read + tokens.cache_write
        response = {
            **response,
            "output": output,
            "status": "completed",
            "usage": {
                "input_tokens": total,
                "input_tokens_details": {"cached_tokens": tokens.cache_read, "cache_write_tokens": tokens.cache_write},
                "output_tokens": tokens.output,
                "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
                "total_tokens": total + tokens.output,
            },
        }
        if answer.stop in ("length", "filter"):
            why = "max_output_tokens" if answer.stop == "length" else "content_filter"
            response |= {"status": "incomplete", "incomplete_details": {"reason": why}}
            yield {"type": "response.incomplete", "response": response}
        else:
            yield {"type": "response.completed", "response": response}

    def _text(self, answer: Answer, item: Any) -> Iterator[dict[str, Any]]:
        added: dict[str, Any] = {
            "id": f"msg_{next(self.number)}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        if answer.phase:
            added["phase"] = answer.phase
            self.rules.phases[added["id"]] = answer.phase
        if answer.stop == "refusal":
            part = {"type": "refusal", "refusal": answer.text}
            between: list[dict[str, Any]] = [
                {"type": "response.refusal.delta", "content_index": 0, "delta": text}
                for text in chunks(answer.text, answer.halves)
            ]
            between.append({"type": "response.refusal.done", "content_index": 0, "refusal": answer.text})
        else:
            part = {"type": "output_text", "text": answer.text, "annotations": []}
            empty = {**part, "text": ""}
            between = [{"type": "response.content_part.added", "content_index": 0, "part": empty}]
            between += [
                {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": []}
                for text in chunks(answer.text, answer.halves)
            ]
            between += [
                {"type": "response.output_text.done", "content_index": 0, "text": answer.text, "logprobs": []},
                {"type": "response.content_part.done", "content_index": 0, "part": part},
            ]
            self.rules.texts[added["id"]] = answer.text
        yield from item(added, {**added, "status": "completed", "content": [part]}, between)


DIALECTS: dict[str, Callable[[], Dialect[Rules]]] = {
    "/v1/chat/completions": Chat,
    "/v1/responses": Responses,
    "/v1/messages": Anthropic,
}
