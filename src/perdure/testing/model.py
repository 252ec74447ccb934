"""A scripted model: what it answers is a pure function of the request (rules H172 to H174, H407).

A restart cannot derail it: whoever sends the same request again gets the same answer, whatever happened in between.

    model = ScriptedModel({"How many people live in Lyon?": [call("population", city="Lyon"), say("522,250")]})
    async with Harness.open(storage, models=model, ...) as harness: ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace as replace_struct

from perdure.harness.messages import (
    AssistantMessage,
    AssistantPart,
    StopReason,
    Text,
    Thinking,
    ToolCallPart,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from perdure.harness.model import (
    Deferred,
    DeferredFailed,
    Finished,
    ModelError,
    ModelErrorCode,
    ModelEvent,
    ModelInfo,
    ModelRequest,
    Price,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
)
from perdure.kernel.json import JsonValue
from perdure.kernel.records import to_raw

USAGE = Usage(input=10, output=10)
"""Of a reply that states none."""


@dataclass(frozen=True, slots=True)
class Say:
    """An answer in words."""

    text: str
    thinking: str = ""
    chunk: int = 16
    """Characters a delta. 0: no deltas, the whole message at once."""
    stop: StopReason = "stop"
    usage: Usage = USAGE


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool. ``id`` is the label the model gives it; None makes one that no other call has."""

    name: str
    arguments: msgspec.Raw
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Calls:
    """An answer that calls tools, with words before the calls."""

    calls: tuple[Call, ...]
    text: str = ""
    chunk: int = 16
    usage: Usage = USAGE


@dataclass(frozen=True, slots=True)
class Fail:
    """The request fails: the first ``times`` attempts of it (None: every one), then ``then`` is the reply.

    ``partial`` is streamed before the failure.
    """

    code: ModelErrorCode
    message: str = "it failed on cue"
    times: int | None = None
    then: Reply | None = None
    partial: str = ""
    retry_after_ms: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Defer:
    """``then`` is made in the background: there after ``polls`` polls that find nothing."""

    then: Say | Call | Calls | Fail
    polls: int = 1
    poll_after_ms: int | None = None


Reply: TypeAlias = Say | Call | Calls | Fail | Defer
"""What ``say``, ``call``, ``calls``, ``fail`` and ``defer`` make."""
Script: TypeAlias = Callable[[ModelRequest], Reply]
"""Must depend on nothing but the request."""


def say(text: str, *, thinking: str = "", chunk: int = 16, stop: StopReason = "stop", usage: Usage = USAGE) -> Say:
    """An answer in words, streamed ``chunk`` characters at a time, after ``thinking``."""
    return Say(text, thinking, chunk, stop, usage)


def call(tool: str, /, **arguments: JsonValue) -> Call:
    """A call with these arguments. For a label of one's own: ``replace(call(...), id="x")``."""
    return Call(tool, to_raw(arguments, at=tool))


def calls(*several: Call, text: str = "", usage: Usage = USAGE) -> Calls:
    """Several calls in one answer."""
    return Calls(several, text, usage=usage)


def fail(
    code: ModelErrorCode,
    message: str = "it failed on cue",
    *,
    times: int | None = None,
    then: Reply | None = None,
    partial: str = "",
    retry_after_ms: int | None = None,
    usage: Usage | None = None,
) -> Fail:
    """A failure, after ``partial`` was streamed. With ``times`` only so often, and ``then`` the answer; else always.

    Raises ValueError for ``times`` without ``then``.
    """
    if times is not None and then is None:
        raise ValueError("a failure that ends needs a reply to follow: then=")
    return Fail(code, message, times, then, partial, retry_after_ms, usage)


def defer(then: Say | Call | Calls | Fail, *, polls: int = 1, poll_after_ms: int | None = None) -> Defer:
    """A handle in place of an answer: ``polls`` polls find that it is still being made, the next one finds ``then``
    (rule H407). A failure is how the response ends: ``defer(fail("expired"))``.

    A request that may not be deferred gets ``then`` at once.
    """
    return Defer(then, polls, poll_after_ms)


def turns(*replies: Reply) -> Script:
    """The n-th answer in the model's context is ``replies[n]``; the last one is repeated from there on."""
    if not replies:
        raise ValueError("a script needs at least one reply")

    def script(request: ModelRequest) -> Reply:
        given = sum(isinstance(message, AssistantMessage) for message in request.messages)
        return replies[min(given, len(replies) - 1)]

    return script


_QUOTED: Final = 200
"""Characters of a text that has no reply, in the error."""


def dialogue(replies: Mapping[str, Reply | Sequence[Reply]], *, otherwise: Reply | None = None) -> Script:
    """Replies by what the user said last; of several, the n-th is given after n answers since then.

    A text that is not in ``replies`` gets ``otherwise``, and without one is refused.
    """

    def script(request: ModelRequest) -> Reply:
        given = 0
        messages = request.messages
        for at in range(len(messages) - 1, -1, -1):
            message = messages[at]
            given += isinstance(message, AssistantMessage)
            if isinstance(message, UserMessage):
                found = replies.get(message.text, otherwise)
                if found is None:
                    said = message.text if len(message.text) <= _QUOTED else message.text[:_QUOTED] + "…"
                    return Fail("refused", f"the script has no reply to what the user said last, {said!r}")
                if isinstance(found, (Say, Call, Calls, Fail, Defer)):
                    return found
                return found[min(given, len(found) - 1)]
        return Fail("malformed", "a request without a user message")

    return script


def echo(request: ModelRequest) -> Reply:
    """Says what the user said last, or what the tools answered last."""
    last = request.messages[-1]
    return say(last.text if isinstance(last, (UserMessage, ToolResultMessage)) else "")


Pace: TypeAlias = Callable[[ModelRequest, int], Awaitable[None]]


@dataclass(slots=True)
class ScriptedModel:
    """The Models of a harness that has only this one. What it answers depends on the request alone.

    ``script``: replies by what the user said last (a mapping), one after another (a sequence), a single one for all, or
    a function of the request. Its id is ``provider:name``. ``context_window`` and ``max_output`` are tokens.

    ``pace`` is awaited before the n-th event of every stream (from 0), also before a failure: a test holds or ends a
    stream there. It has no say in what is answered.
    """

    script: Script | Sequence[Reply] | Mapping[str, Reply | Sequence[Reply]] | Reply = echo
    name: str = "scripted"
    provider: str = "test"
    pace: Pace | None = None
    context_window: int = 1_000_000
    max_output: int = 100_000
    price: Price | None = None
    """What an attempt costs, such as ``lambda model, usage, /, *, at: Decimal("0.01")``; None: it is not known."""
    requests: deque[ModelRequest] = field(default_factory=lambda: deque[ModelRequest](maxlen=1000))
    """What it was sent, the newest 1000."""
    closed: int = 0
    """Streams that ended, in whatever way."""
    fetched: deque[str] = field(default_factory=lambda: deque[str](maxlen=1000))
    """Handles that were polled, the newest 1000."""
    cancelled: deque[str] = field(default_factory=lambda: deque[str](maxlen=1000))
    """Handles that were cancelled, the newest 1000."""
    _script: Script = field(init=False, repr=False)

    def __post_init__(self) -> None:
        script = self.script
        if isinstance(script, (Say, Call, Calls, Fail, Defer)):
            self._script = turns(script)
        elif callable(script):
            self._script = script
        elif isinstance(script, Mapping):
            self._script = dialogue(script)
        else:
            self._script = turns(*script)

    @property
    def default(self) -> str | None:
        return f"{self.provider}:{self.name}"

    def find(self, model: str) -> ModelInfo | None:
        if model != self.default:
            return None
        return ModelInfo(
            provider=self.provider,
            name=self.name,
            context_window=self.context_window,
            max_output=self.max_output,
        )

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        self.requests.append(request)
        try:
            reply = _due(self._script(request), request)
            if isinstance(reply, Defer):
                if request.may_defer:
                    if self.pace is not None:
                        await self.pace(request, 0)
                    yield _deferred(self, request, reply)
                    return
                reply = _at_once(reply, request)
            events = _events(self, request, reply)
            for number, event in enumerate(events):
                if self.pace is not None:
                    await self.pace(request, number)
                yield event
            if isinstance(reply, Fail):
                if self.pace is not None:
                    await self.pace(request, len(events))
                raise ModelError(reply.code, reply.message, retry_after_ms=reply.retry_after_ms, usage=reply.usage)
        finally:
            self.closed += 1

    async def fetch_deferred(self, model: str, handle: str, /) -> Deferred | Finished:
        """What a handle holds: another one with a poll less, the answer, or how it ended."""
        self.fetched.append(handle)
        if handle in self.cancelled:
            raise DeferredFailed("cancelled", "the response was cancelled")
        made = _made.decode(handle)
        if made.polls > 0:
            return Deferred(
                handle=replace_struct(made, polls=made.polls - 1).encode(), poll_after_ms=made.poll_after_ms
            )
        if made.message is None:
            raise DeferredFailed(made.code, made.said, usage=made.usage)
        return Finished(made.message)

    async def cancel_deferred(self, model: str, handle: str, /) -> None:
        self.cancelled.append(handle)


class _Made(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a handle holds. All of it, so that another process's model knows it too."""

    messages: int
    attempt: int
    """Of the request: an equal answer to another one has another handle."""
    message: AssistantMessage | None = None
    """None: it fails."""
    code: ModelErrorCode = "other"
    said: str = ""
    usage: Usage | None = None
    poll_after_ms: int | None = None
    polls: int

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


_made = msgspec.json.Decoder(_Made)


def _due(reply: Reply, request: ModelRequest) -> Reply:
    """What a reply is at this attempt."""
    while isinstance(reply, Fail) and reply.times is not None and request.attempt > reply.times:
        assert reply.then is not None, "checked by fail()"
        reply = reply.then
    return reply


def _at_once(reply: Defer, request: ModelRequest) -> Say | Call | Calls | Fail:
    then = _due(reply.then, request)
    return _at_once(then, request) if isinstance(then, Defer) else then


def _deferred(model: ScriptedModel, request: ModelRequest, reply: Defer) -> Deferred:
    made = _Made(
        messages=len(request.messages), attempt=request.attempt, polls=reply.polls, poll_after_ms=reply.poll_after_ms
    )
    then = _at_once(reply, request)
    if isinstance(then, Fail):
        made = replace_struct(made, code=then.code, said=then.message, usage=then.usage)
    else:
        last = _events(model, request, then)[-1]
        assert isinstance(last, Finished), "a stream ends with its message"
        made = replace_struct(made, message=last.message)
    return Deferred(handle=made.encode(), poll_after_ms=reply.poll_after_ms)


def _events(model: ScriptedModel, request: ModelRequest, reply: Say | Call | Calls | Fail) -> list[ModelEvent]:
    if isinstance(reply, Call):
        reply = Calls((reply,))
    if isinstance(reply, Fail):
        return [TextDelta(chunk) for chunk in _chunks(reply.partial, 16)]
    events: list[ModelEvent] = []
    parts: list[AssistantPart] = []
    if isinstance(reply, Say):
        if reply.thinking:
            events += [ThinkingDelta(chunk) for chunk in _chunks(reply.thinking, reply.chunk)]
            parts.append(Thinking(reply.thinking))
        stop: StopReason = reply.stop
    else:
        stop = "tool_use"
    if reply.text:
        events += [TextDelta(chunk) for chunk in _chunks(reply.text, reply.chunk)]
        parts.append(Text(reply.text))
    if isinstance(reply, Calls):
        for index, made in enumerate(reply.calls):
            # The place in the context tells calls of different turns apart, and is the same when it is sent again.
            labelled = made if made.id is not None else replace(made, id=f"call_{len(request.messages)}_{index}")
            assert labelled.id is not None
            text = bytes(labelled.arguments).decode()
            events += [ToolCallDelta(index, labelled.id, made.name, chunk) for chunk in _chunks(text, reply.chunk)]
            parts.append(ToolCallPart(labelled.id, made.name, made.arguments))
    message = AssistantMessage(
        content=tuple(parts),
        provider=model.provider,
        model=model.name,
        stop_reason=stop,
        usage=reply.usage,
    )
    events.append(Finished(message))
    return events


def _chunks(text: str, size: int) -> list[str]:
    if size <= 0:
        return []
    return [text[at : at + size] for at in range(0, len(text), size)]
