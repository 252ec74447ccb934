"""Hooks: code of a host or an extension that is asked while a task does its work (rules H124 to H132, H220 to H227).

What each kind is told and may answer, where it applies, and the decorators that make them. Every hook runs inside a
phase of the task it is about: it has no deadline of its own, an abort of the task ends it, and after a crash it may
be asked again. ``hook_runner`` asks them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeAlias, TypeVar, cast, get_args, overload

import msgspec

from perdure.harness.documents import CompactionReason
from perdure.harness.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCallPart,
    ToolResultMessage,
    UserMessage,
)
from perdure.harness.model import ModelRequest, ThinkingLevel
from perdure.harness.tool import AnyTool, ToolResult
from perdure.kernel.json import JsonValue

# --- what hooks are told ------------------------------------------------------------------------------------------


class HookCall(msgspec.Struct, frozen=True, kw_only=True):
    """The call a hook is asked about."""

    id: int
    """Of its task."""
    conversation_id: int
    tool: AnyTool
    arguments: dict[str, JsonValue]
    """The hook's own copy; changing it changes nothing."""

    @property
    def name(self) -> str:
        """The tool's."""
        return self.tool.name


class HookRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is about to be sent: an attempt each, and once more if a crash cut it off."""

    id: int
    """Of the generation task."""
    conversation_id: int
    turn: int
    """Responses the run had before."""
    request: ModelRequest
    """As the hooks before left it. Read only."""


class HookResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A complete message of the model, before its commit. What was streamed of it may be in ``pi.live`` already."""

    id: int
    """Of the generation task."""
    conversation_id: int
    turn: int
    """Responses the run had before."""
    message: AssistantMessage
    """As the hooks before left it."""


class HookAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A message without calls: the run ends with it, unless a hook continues the run."""

    id: int
    """Of the generation task."""
    conversation_id: int
    turn: int
    """Responses the run had before."""
    continued: int
    """How often hooks have continued the run already."""
    message: AssistantMessage


class EndedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a round, and what came of it."""

    id: int
    """Of its task."""
    call: ToolCallPart
    """As the model wrote it."""
    result: ToolResultMessage
    """As the model reads it."""


class HookRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round of tools that is complete: every call has its result, and both are stored."""

    id: int
    """Of the generation task."""
    conversation_id: int
    turn: int
    """Responses the run had, the one with these calls included."""
    calls: tuple[EndedCall, ...]
    """In the order of the message."""


class HookCompaction(msgspec.Struct, frozen=True, kw_only=True):
    """A compaction before its summary is asked for."""

    id: int
    """Of the compaction task."""
    conversation_id: int
    reason: CompactionReason
    tokens: int
    """Of the context now, as estimated."""
    messages: Sequence[Message]
    """What would be summarised. Read only."""
    instructions: str | None = None
    """What whoever asked for it wants of the summary."""


# --- what they may answer -----------------------------------------------------------------------------------------


class Block(msgspec.Struct, frozen=True):
    """Of before_tool: the call does not run; the model reads the reason."""

    reason: str


class Stop(msgspec.Struct, frozen=True):
    """Of gate_request: the request is not sent, and the run's inputs end unanswered, ``gate``, with this reason."""

    reason: str


class RequestChange(msgspec.Struct, frozen=True, kw_only=True):
    """Of before_request: what is different in this one request. Nothing of it is stored.

    What is in the request already stays as it is, so that a provider's cache of it keeps hitting.
    """

    add: Sequence[SystemMessage | UserMessage] = ()
    """Messages behind all others."""
    thinking: ThinkingLevel | None = None
    """None: as it is."""
    max_output: int | None = None
    """Tokens; None: as it is."""


class Decline(msgspec.Struct, frozen=True):
    """Of before_compact: the context stays as it is; the compaction ends with this reason."""

    reason: str


class Summary(msgspec.Struct, frozen=True):
    """Of before_compact: the summary, which no model is asked for then."""

    text: str


# --- the kinds ----------------------------------------------------------------------------------------------------

BeforeToolFunction: TypeAlias = Callable[[HookCall], Awaitable[Mapping[str, JsonValue] | Block | None]]
AfterToolFunction: TypeAlias = Callable[[HookCall, ToolResult], Awaitable[ToolResult | None]]
BeforeRequestFunction: TypeAlias = Callable[[HookRequest], Awaitable[RequestChange | None]]
GateRequestFunction: TypeAlias = Callable[[HookRequest], Awaitable[Stop | None]]
AfterResponseFunction: TypeAlias = Callable[[HookResponse], Awaitable[AssistantMessage | None]]
OnYieldFunction: TypeAlias = Callable[[HookAnswer], Awaitable[str | UserMessage | None]]
AfterToolsFunction: TypeAlias = Callable[[HookRound], Awaitable[None]]
BeforeCompactFunction: TypeAlias = Callable[[HookCompaction], Awaitable[Decline | Summary | None]]

F = TypeVar("F", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True, slots=True)
class ScopedHook(Generic[F]):
    """A function and the conversations it applies to (rule H128). Raises TypeError, ValueError for what is neither."""

    point: ClassVar[str]
    """Where it is asked, in the word of its decorator."""
    task: ClassVar[str]
    """The kind of the task it is asked in."""

    function: F
    conversation: int | None = None
    """None: all of them."""
    subtree: bool = False
    """With a conversation: also everything owned below it."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a hook {self.point} is an async function, not {self.function!r}")
        if self.conversation is not None and type(self.conversation) is not int:  # it would apply nowhere
            raise TypeError(f"a hook {self.point} is given the id of its conversation, not {self.conversation!r}")
        if self.subtree and self.conversation is None:
            raise ValueError("subtree=True needs the conversation it is about; without one a hook applies everywhere")

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def applies_to(self, conversation_id: int) -> bool | None:
        """None: only the owners of the conversation tell."""
        if self.conversation is None or self.conversation == conversation_id:
            return True
        return None if self.subtree else False


class BeforeTool(ScopedHook[BeforeToolFunction]):
    """Decorate an async function to be asked before a call of a tool.

    It returns arguments in place of the call's (checked like the model's), a Block, or None. One that raises blocks
    the call.
    """

    __slots__ = ()
    point = "before_tool"
    task = "pi.tool"


class AfterTool(ScopedHook[AfterToolFunction]):
    """Decorate an async function to be told of the result of a call that ran.

    It returns a result in its place (checked like the tool's), or None.
    """

    __slots__ = ()
    point = "after_tool"
    task = "pi.tool"


class BeforeRequest(ScopedHook[BeforeRequestFunction]):
    """Decorate an async function to be asked before a request is sent. It returns a RequestChange, or None."""

    __slots__ = ()
    point = "before_request"
    task = "pi.generation"


class GateRequest(ScopedHook[GateRequestFunction]):
    """Decorate an async function to decide whether a request is sent.

    It returns a Stop, or None to let it pass. One that raises stops the request. It is asked of the request as it
    would be sent, before anything of it is; requests for summaries are not asked about.
    """

    __slots__ = ()
    point = "gate_request"
    task = "pi.generation"


class AfterResponse(ScopedHook[AfterResponseFunction]):
    """Decorate an async function to be told of a model's message before it is stored.

    It returns a message in its place (checked like the model's), or None. Who said it, and what it used, stay as
    they were.
    """

    __slots__ = ()
    point = "after_response"
    task = "pi.generation"


class OnYield(ScopedHook[OnYieldFunction]):
    """Decorate an async function to be asked at a final answer.

    It returns what a user would say next, which continues the run with its inputs open, or None: how the run ends
    then is how they end. It is not said if the final boundary places an input or a reset.
    """

    __slots__ = ()
    point = "on_yield"
    task = "pi.generation"


class AfterTools(ScopedHook[AfterToolsFunction]):
    """Decorate an async function to be told of a complete round of tools, before the boundary after it."""

    __slots__ = ()
    point = "after_tools"
    task = "pi.generation"


class BeforeCompact(ScopedHook[BeforeCompactFunction]):
    """Decorate an async function to be asked before a compaction asks for its summary.

    It returns a Decline, the Summary itself, or None.
    """

    __slots__ = ()
    point = "before_compact"
    task = "pi.compaction"


Hook: TypeAlias = (
    BeforeTool | AfterTool | BeforeRequest | GateRequest | AfterResponse | OnYield | AfterTools | BeforeCompact
)

H = TypeVar("H", bound=Hook)
H_co = TypeVar("H_co", bound=Hook, covariant=True)


def check_hook(hook: Hook) -> None:
    """Raises TypeError for what untyped code takes for a hook. A kind of somebody's own would never be asked."""
    if type(hook) not in get_args(Hook):
        raise TypeError(f"{hook!r} is no hook; decorate the function, as with @before_tool")


class Installed(msgspec.Struct, Generic[H_co], frozen=True):
    """A hook and the extension it came with; None: the host's own."""

    extension: str | None
    hook: H_co


class HookDecorator(Generic[F, H_co]):
    """``@before_tool`` applies everywhere; ``@before_tool(conversation=5)`` to one conversation, and with
    ``subtree=True`` also to everything owned below it."""

    def __init__(self, kind: type[H_co]) -> None:
        self._make = cast("Callable[[F, int | None, bool], H_co]", kind)
        self.__name__ = kind.point
        self.__doc__ = kind.__doc__

    @overload
    def __call__(self, function: F, /) -> H_co: ...
    @overload
    def __call__(self, /, *, conversation: int | None = None, subtree: bool = False) -> Callable[[F], H_co]: ...
    def __call__(
        self, function: F | None = None, /, *, conversation: int | None = None, subtree: bool = False
    ) -> H_co | Callable[[F], H_co]:
        if function is not None:
            return self._make(function, conversation, subtree)
        return lambda function: self._make(function, conversation, subtree)


before_tool = HookDecorator[BeforeToolFunction, BeforeTool](BeforeTool)
after_tool = HookDecorator[AfterToolFunction, AfterTool](AfterTool)
before_request = HookDecorator[BeforeRequestFunction, BeforeRequest](BeforeRequest)
gate_request = HookDecorator[GateRequestFunction, GateRequest](GateRequest)
after_response = HookDecorator[AfterResponseFunction, AfterResponse](AfterResponse)
on_yield = HookDecorator[OnYieldFunction, OnYield](OnYield)
after_tools = HookDecorator[AfterToolsFunction, AfterTools](AfterTools)
before_compact = HookDecorator[BeforeCompactFunction, BeforeCompact](BeforeCompact)
