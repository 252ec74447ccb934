"""What the test server is told to answer, without regard to the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Tokens:
    input: int = 100
    output: int = 20
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer. ``calls`` are names and the text of their arguments."""

    text: str = ""
    thinking: str = ""
    hidden: str = ""
    """Thinking that the provider shows to nobody, as the data it wants back (Anthropic)."""
    calls: tuple[tuple[str, str], ...] = ()
    stop: Literal["stop", "length", "refusal", "filter"] = "stop"
    tokens: Tokens = Tokens()
    phase: str | None = None
    """Of the text (OpenAI Responses)."""
    usage: bool = True
    """Whether the usage is told (Chat Completions)."""
    again: bool = False
    """A call's name and id are told with each piece of its arguments (Chat Completions)."""
    halves: bool = False
    """Text is cut between the halves of a character where it falls like that, as servers written in JavaScript do."""


How: TypeAlias = Literal["cut", "end", "stall", "garbage", "shape", "error", "event"]


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An answer of which only the first ``after`` events come.

    cut: the connection breaks. end: the stream ends as if that were all. stall: nothing more comes. garbage: no JSON.
    shape: JSON that is no event. error: the provider's error event ``code``. event: ``event``, then the end.
    """

    answer: Answer
    after: int
    how: How
    code: str = "overloaded"
    event: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """No answer, but a status."""

    status: int
    code: str = ""
    """The provider's code or type of the error."""
    message: str = "it failed on cue"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    """In place of the protocol's."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a response that is made in the background is when it is looked at (OpenAI Responses)."""

    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"] = "completed"
    answer: Answer = Answer()
    """``completed``: what it says; what it used in any case."""
    code: str = "server_error"
    """Why it failed."""


Reply: TypeAlias = Answer | Broken | Refusal | Made


def say(text: str, **rest) -> Answer:
    return Answer(text=text, **rest)


def call(*calls: tuple[str, str], **rest) -> Answer:
    return Answer(calls=calls, **rest)
