"""Sending one request to a model: what streams, then its message or what went wrong (rules H70 and K133).

Whatever a model or its adapter raises is a failure of the attempt. Generations ask for answers so, compactions for
summaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from msgspec import Raw, structs

from perdure.harness.foreign import cancelled_itself, storable_text, words_of
from perdure.harness.messages import (
    AssistantMessage,
    AssistantPart,
    Thinking,
    ToolCallPart,
    Usage,
    decode_messages,
    encode_messages,
)
from perdure.harness.model import Answers, Deferred, Finished, ModelError, ModelEvent, ModelRequest
from perdure.harness.usage import countable
from perdure.kernel.errors import NotJson
from perdure.kernel.json import decode_json
from perdure.kernel.records import to_raw

MOST_CALLS = 500
"""In one answer; one with more is refused like a malformed one."""
MOST_HANDLE = 65_536
"""Characters of what a deferred response is fetched by."""

Raised: TypeAlias = Callable[[str, BaseException], None]
"""Told, in words, what an adapter's own code raised."""


async def ask(
    models: Answers,
    request: ModelRequest,
    *,
    heard: Callable[[ModelEvent], None],
    finished: Callable[[AssistantMessage], None],
    raised: Raised,
) -> AssistantMessage | ModelError:
    """``ask_or_defer`` of a request that may not be deferred."""
    outcome = await ask_or_defer(models, request, heard=heard, finished=finished, given=lambda _: None, raised=raised)
    assert not isinstance(outcome, Deferred), "the request does not allow it"
    return outcome


async def ask_or_defer(
    models: Answers,
    request: ModelRequest,
    *,
    heard: Callable[[ModelEvent], None],
    finished: Callable[[AssistantMessage], None],
    given: Callable[[Deferred], None],
    raised: Raised,
) -> AssistantMessage | Deferred | ModelError:
    """One attempt: the message, fit to be stored, or the handle it is fetched by, or the failure. The stream is closed
    when this returns or raises.

    ``heard`` is told each delta. ``finished`` is told the message as soon as it is there, also one that ends in error:
    what it used is known from then on, even if closing the stream takes long. ``given`` is told a handle as early.
    """
    stream: AsyncIterator[ModelEvent] | None = None
    error: ModelError | None = None
    message: AssistantMessage | Deferred | None = None
    try:
        stream = models.stream(request)
        async for event in stream:
            if isinstance(event, Finished):
                message = storable(event.message)
                finished(message)
                break
            if isinstance(event, Deferred):
                message = event
                given(event)
                break
            heard(event)
    except ModelError as failure:
        error = failure
    except (Exception, SystemExit, asyncio.CancelledError) as failure:  # an adapter's own code; a run ends by it
        if isinstance(failure, asyncio.CancelledError) and not cancelled_itself():
            raise
        raised("the model's adapter raised", failure)
        error = ModelError("other", f"the model's adapter raised {words_of(failure)}")
    finally:
        await _close(stream, raised)
    if error is not None:
        return error
    if message is None:
        return ModelError("other", "the stream ended without a message")
    if isinstance(message, Deferred):
        if not request.may_defer:
            return ModelError("other", "the model deferred an answer that it was to give at once")
        return unkept(message) or message
    return unusable(message) or message


def unusable(message: AssistantMessage) -> ModelError | None:
    """Why a whole message is a failure of its request all the same."""
    if message.stop_reason in ("error", "aborted"):
        return ModelError("other", message.error or f"the model ended {message.stop_reason}", usage=message.usage)
    if len(message.tool_calls) > MOST_CALLS:
        return ModelError("other", f"an answer with more than {MOST_CALLS} calls", usage=message.usage)
    return None


def unkept(told: Deferred) -> ModelError | None:
    """Why a handle that an adapter gave cannot be stored, if so."""
    handle = told.handle
    if type(handle) is str and 0 < len(handle) <= MOST_HANDLE and storable_text(handle) == handle:
        return None
    return ModelError("malformed", "the model deferred its answer, and gave no handle that can be stored")


async def _close(stream: AsyncIterator[ModelEvent] | None, raised: Raised) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        try:
            await close()
        except Exception as failure:  # as above; the attempt is over already
            raised("closing the model's stream raised", failure)


# --- messages as they are stored ----------------------------------------------------------------------------------


def storable(message: AssistantMessage) -> AssistantMessage:
    """The message as strict JSON holds it: arguments that are none become text, lone surrogates question marks, counts
    of tokens that are none untold.

    Raises TypeError, ValueError for one that could not be read back.
    """
    if countable(message.usage) is None:
        message = structs.replace(message, usage=Usage())
    if any(isinstance(part, ToolCallPart) for part in message.content):
        message = structs.replace(message, content=tuple(map(_with_json, message.content)))
    try:
        raw = encode_messages([message])
    except UnicodeEncodeError:
        message = structs.replace(
            message,
            content=tuple(_scrubbed(part) for part in message.content),
            provider=storable_text(message.provider),
            model=storable_text(message.model),
            error=None if message.error is None else storable_text(message.error),
        )
        raw = encode_messages([message])
    decode_messages(raw)
    return message


def _with_json(part: AssistantPart) -> AssistantPart:
    if isinstance(part, ToolCallPart):
        written = bytes(part.arguments)
        try:
            decode_json(written)
        except NotJson:
            return structs.replace(part, arguments=to_raw(written.decode("utf-8", "replace")))
        # Models write white space around it, which is no part of the value.
        return structs.replace(part, arguments=Raw(written.strip(b" \t\r\n")))
    return part


def _scrubbed(part: AssistantPart) -> AssistantPart:
    if isinstance(part, ToolCallPart):
        return structs.replace(part, id=storable_text(part.id), name=storable_text(part.name))
    if isinstance(part, Thinking) and part.signature is not None and storable_text(part.signature) != part.signature:
        part = structs.replace(part, signature=None)  # none that the provider would know again
    return structs.replace(part, text=storable_text(part.text))
