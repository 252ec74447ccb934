"""What a provider's failure means to the harness: one of the codes of ModelError, and words without secrets.

The words are the provider's own message, cut short; never the request, which is in some of its errors, nor a key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

import httpx2
from pydantic_ai import exceptions as library

from perdure.harness.messages import Usage
from perdure.harness.model import ModelError, ModelErrorCode
from perdure.models.endpoints import Endpoint

MOST_WORDS: Final = 500
"""Characters of a provider's message that are told."""

_OVERFLOW: Final = re.compile(
    r"prompt is too long|input is too long|maximum context length|context (?:length|window|size)"
    r"|exceed[a-z]* (?:the )?(?:available )?context|input token count|too many (?:input )?tokens"
    r"|maximum prompt length|reduce the length|context_length_exceeded|tokens to keep from the initial prompt",
    re.IGNORECASE,
)
"""How servers say that a request is longer than the model reads, where they give it no code."""

_REFUSED: Final = frozenset(
    {"content_filter", "content_policy_violation", "invalid_prompt", "ResponsibleAIPolicyViolation"}
)
_KEY: Final = re.compile(r"\b[sprk]k-[\w*.\-]{4,}|\bBearer\s+\S+", re.IGNORECASE)


class CutOff(Exception):
    """The stream ended before the answer did."""


def failure(error: Exception, endpoint: Endpoint, *, usage: Usage | None, began: bool) -> ModelError:
    """``began``: the answer was on its way, so that what cannot be read is the connection's fault."""
    code, words = _classified(error, endpoint, began)
    return ModelError(code, scrubbed(words, endpoint), retry_after_ms=_retry_after(error, code), usage=usage)


def scrubbed(words: str, endpoint: Endpoint) -> str:
    """Without keys, and not longer than is read."""
    if endpoint.key:
        words = words.replace(endpoint.key, "[key]")
    words = _KEY.sub("[key]", words)
    return words if len(words) <= MOST_WORDS else words[:MOST_WORDS] + " ..."


def _classified(error: Exception, endpoint: Endpoint, began: bool) -> tuple[ModelErrorCode, str]:
    who = endpoint.name
    match error:
        case CutOff():
            return "connection", f"the stream of {who} ended before the answer did"
        case library.ModelRequestTimeout():
            return "connection", f"{who} did not finish within {error.timeout:g} seconds"
        case library.ModelTimeoutError():
            return "connection", f"{who} was silent for too long{_phase(error)}"
        case library.ModelConnectionError():
            return "connection", f"the connection to {who} failed{_phase(error)}: {error.message}"
        case httpx2.TransportError():
            return "connection", f"the connection to {who} failed: {type(error).__name__}"
        case library.ModelAPIError():
            return _refusal(error, endpoint)
        case library.ContentFilterError():
            return "refused", f"{who} refused to answer"
        case library.UnexpectedModelBehavior():
            return "connection", f"{who} answered what is no answer"
        case library.UserError():
            return "other", f"the request cannot be made to {who}: {error}"
        case _ if began:
            return "connection", f"the answer of {who} could not be read: {type(error).__name__}"
        case _:
            return "other", f"the request to {who} could not be made: {type(error).__name__}: {error}"


def _phase(error: library.ModelConnectionError) -> str:
    return f" ({error.phase})" if error.phase else ""


def _refusal(error: library.ModelAPIError, endpoint: Endpoint) -> tuple[ModelErrorCode, str]:
    """An error that the provider sent."""
    status = error.status_code if isinstance(error, library.ModelHTTPError) else None
    # Without a body of its own, an event that says why an answer failed.
    said = _message(error.body) or (error.message if error.provider_error_code else "")
    answered = f"{endpoint.name} answered {status}" if status is not None else f"{endpoint.name} reported an error"
    words = f"{answered}: {said}" if said else answered
    if error.provider_error_code in _REFUSED:
        return "refused", words
    match error:
        case library.ModelContextWindowExceededError():
            return "overflow", words
        case library.ModelAuthenticationError():
            # The provider's words often hold parts of the key.
            return "authentication", f"{answered}, it does not accept the key or what it may do: {endpoint.key_hint}"
        case library.ModelQuotaExceededError():
            return "other", f"{words} (the account's quota or credit is used up)"
        case library.ModelNotFoundError():
            hint = error.suggested_model_id if isinstance(error, library.ModelHTTPError) else None
            return "other", f"{words} (did you mean {hint!r}?)" if hint else words
        case library.ModelRequestRejectedError():
            return ("overflow" if _OVERFLOW.search(said) else "malformed"), words
        case library.ModelRateLimitError():
            return "rate_limit", words
        case library.ModelUnavailableError() | library.ModelServerError():
            return "overloaded", words
        case _:
            pass
    if status == 413:
        return "overflow", words
    if status in (408, 409, 425):
        # Timed out, locked, too early: the request itself is as good as before.
        return "overloaded", words
    if status is None and not said:
        # The library found nothing that it could read as an error, nor as an answer.
        return "connection", f"{endpoint.name} answered what is no answer"
    return "other", words


def _message(body: object) -> str:
    """The message within an error's body, whatever its shape; empty if there is none."""
    if isinstance(body, str):
        return "" if body.lstrip().startswith("<") else body.strip()  # a proxy's page says nothing
    if not isinstance(body, Mapping):
        return ""
    fields = cast("Mapping[str, object]", body)
    inner = fields.get("error")
    if inner is not None:
        return _message(inner)
    for name in ("message", "detail"):
        found = fields.get(name)
        if isinstance(found, str):
            return found
        if isinstance(found, Sequence):
            # A list of problems: where and what, without the input that each quotes.
            return "; ".join(_problem(item) for item in cast("Sequence[object]", found[:5]))
    return ""


def _problem(item: object) -> str:
    if not isinstance(item, Mapping):
        return ""
    fields = cast("Mapping[str, object]", item)
    where = fields.get("loc")
    steps = ".".join(map(str, cast("Sequence[object]", where))) if isinstance(where, Sequence) else ""
    return f"{steps}: {fields.get('msg', '')}".strip(": ")


def _retry_after(error: Exception, code: ModelErrorCode) -> int | None:
    """Milliseconds the provider asks to wait: ``retry-after-ms``, or ``retry-after`` in seconds or as a date."""
    if code not in ("rate_limit", "overloaded") or not isinstance(error, library.ModelAPIError):
        return None
    return None if error.retry_after is None else math.ceil(error.retry_after * 1000)
