"""The small protocol by which the harness asks a model; adapters and the scripted model speak it (rules H167, H168)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from decimal import Decimal
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

import msgspec

from perdure.harness.messages import AssistantMessage, Message, Usage
from perdure.kernel.errors import PerdureError


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogue entry. Sizes in tokens."""

    provider: str
    name: str
    context_window: int
    """Of a whole request with its answer."""
    max_output: int
    """Of an answer."""

    @property
    def id(self) -> str:
        """``provider:name``, as a conversation's agent settings store it."""
        return f"{self.provider}:{self.name}"


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as offered to a model."""

    name: str
    description: str
    parameters: msgspec.Raw
    """JSON Schema of the arguments object."""


ThinkingLevel: TypeAlias = Literal["off", "minimal", "low", "medium", "high"]
"""How long a model may think before it answers, in its own measure; ``off``: as little as it can."""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whole. ``messages`` begins with at most one leading system message; later ones are deltas."""

    model: str
    """``provider:name``."""
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    """What it may call."""
    thinking: ThinkingLevel = "off"
    max_output: int | None = None
    """Tokens; None: as many as the model can."""
    session_key: str = ""
    """Stable per conversation, for a provider's cache routing."""
    attempt: int = 1
    """Counted from 1; each retry is one more."""
    may_defer: bool = False
    """A handle may be given in place of an answer: it is kept and polled (rule H400)."""


class TextDelta(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True):
    """More of what it thinks."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """Arguments text as it comes. A new ``index`` begins a new call."""

    index: int
    id: str
    name: str
    arguments: str


class Finished(msgspec.Struct, frozen=True):
    """The last event of a stream: the whole message, usage included."""

    message: AssistantMessage


class Deferred(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is made in the background: ask for it later, by its handle. It stands in place of Finished, where the
    request may be deferred; and ``fetch_deferred`` gives it while there is no answer yet (rule H168)."""

    handle: str
    """What the response is fetched by, also in another process; at most 65,536 characters. The newest one counts."""
    poll_after_ms: int | None = None
    """Not to be asked for before that time has passed; None: it says nothing of that."""


ModelEvent: TypeAlias = TextDelta | ThinkingDelta | ToolCallDelta | Deferred | Finished
"""What a stream yields: deltas as they come, and in the end exactly one Finished, or one Deferred."""

ModelErrorCode: TypeAlias = Literal[
    "overflow",
    "rate_limit",
    "overloaded",
    "connection",
    "malformed",
    "authentication",
    "refused",
    "cancelled",
    "expired",
    "other",
]
"""The context is too long; too many requests; the provider is busy; no answer came through; the answer makes no sense;
the key is wrong; the provider will not answer this; a deferred response was cancelled; it is not there any more, or
took too long; anything else."""
_CODES: frozenset[str] = frozenset(get_args(ModelErrorCode))
RETRYABLE: frozenset[ModelErrorCode] = frozenset({"rate_limit", "overloaded", "connection"})


class ModelError(PerdureError):
    """A request failed. What is not ``retryable`` is never sent again (rule H74).

    Adapters fill it with what servers say: an unknown code is ``other``, a wait that is no time is none.
    """

    def __init__(
        self, code: ModelErrorCode, message: str, *, retry_after_ms: int | None = None, usage: Usage | None = None
    ) -> None:
        super().__init__(message)
        self.code: ModelErrorCode = code if code in _CODES else "other"
        self.retry_after_ms: int | None = wait_ms(retry_after_ms)
        self.usage = usage

    @property
    def retryable(self) -> bool:
        """Its code is one of those that pass: ``rate_limit``, ``overloaded``, ``connection``."""
        return self.code in RETRYABLE


class DeferredFailed(ModelError):
    """A deferred response ended without an answer; asking for it again gives nothing else. For ``fetch_deferred``.

    What it used is in ``usage``: ``Usage()``, not None, says that it used nothing, so that nothing is paid twice if the
    request is sent anew (rule H403).
    """


def wait_ms(told: object) -> int | None:
    """Whole milliseconds; None for what is no time."""
    if isinstance(told, (int, float)) and not isinstance(told, bool) and 0 <= told < math.inf:
        return math.ceil(told)
    return None


class Answers(Protocol):
    """What answers requests."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Send the request. Ends with exactly one Finished, or one Deferred if the request may be deferred; or raises
        ModelError. Closing the iterator cancels it."""
        ...


@runtime_checkable
class Defers(Protocol):
    """Models that may defer an answer. Requests to others are never deferred (rules H168, H400)."""

    async def fetch_deferred(self, model: str, handle: str, /) -> Deferred | Finished:
        """The answer, or Deferred while there is none. ``model``: ``provider:name`` of the request.

        Raises DeferredFailed if there will be none; any other ModelError says that the asking failed.
        """
        ...

    async def cancel_deferred(self, model: str, handle: str, /) -> None:
        """Nobody wants the answer any more. One that has ended by then stays as it is. Raises ModelError."""
        ...


class Models(Answers, Protocol):
    """Where models come from. Those that are Priced too tell what they cost."""

    @property
    def default(self) -> str | None:
        """The model id for conversations whose agent settings name none."""
        ...

    def find(self, model: str) -> ModelInfo | None:
        """The catalogue entry, or None when this host cannot reach such a model."""
        ...


class Price(Protocol):
    """What one attempt cost in US dollars; None, never 0, if the model's price is not known (rule H158).

    It is asked once an attempt and never of a sum, since a price may rise with the length of a request. ``at``: when
    the request was sent, in milliseconds UTC. It is called in a thread, and may block for a while.
    """

    def __call__(self, model: str, usage: Usage, /, *, at: int) -> Decimal | None: ...


@runtime_checkable
class Priced(Protocol):
    """Models that may know prices; a method ``price`` is one. It is looked up once, when a harness is opened."""

    @property
    def price(self) -> Price | None:
        """None: of no model."""
        ...


ADAPTERS = "perdure.models"
"""The entry point group of adapters: under a provider's name a function ``(default: str) -> Models``."""


class NoAdapter(PerdureError, ValueError):
    """No installed adapter knows the provider."""


def installed_models(model: str) -> Models:
    """What the installed adapter for ``provider:name`` reaches, with that model as the default (rule H171).

    Raises NoAdapter.
    """
    provider, colon, name = model.partition(":")
    if not (provider and colon and name):
        raise NoAdapter(f"a model is named 'provider:name', not {model!r}")
    from importlib.metadata import entry_points  # costs more than the rest of the module, and is rarely asked

    found = entry_points(group=ADAPTERS)
    for adapter in found:
        if adapter.name == provider:
            make: Callable[[str], Models] = adapter.load()
            return make(model)
    known = ", ".join(sorted({adapter.name for adapter in found})) or "none"
    raise NoAdapter(f"no adapter for provider {provider!r} is installed; there are: {known}")
