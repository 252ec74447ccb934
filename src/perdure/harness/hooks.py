"""Hooks of tool calls: code of a host that may change or block a call, or change its result (rules H124 to H132).

They run inside the phase of the call they are about. Which conversations one applies to is part of it: all, one,
or one and everything that is owned below it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, overload

import msgspec

from perdure.harness.foreign import cancelled_itself
from perdure.harness.tool import AnyTool, ToolResult
from perdure.kernel.json import JsonValue, copy_json
from perdure.kernel.reports import Report
from perdure.kernel.session import Session

MAX_DEPTH = 1000
"""How many owners above a conversation are looked at for the scope of a hook."""


class Block(msgspec.Struct, frozen=True):
    """What a before_tool hook returns to keep a call from running; the model reads the reason."""

    reason: str


class HookCall(msgspec.Struct, frozen=True, kw_only=True):
    """The call a hook is asked about."""

    id: int
    conversation_id: int
    tool: AnyTool
    arguments: dict[str, JsonValue]
    """The hook's own copy; changing it changes nothing."""

    @property
    def name(self) -> str:
        return self.tool.name


BeforeToolFunction: TypeAlias = Callable[[HookCall], Awaitable[Mapping[str, JsonValue] | Block | None]]
"""Returns arguments in place of the call's, a Block, or None to leave the call as it is."""
AfterToolFunction: TypeAlias = Callable[[HookCall, ToolResult], Awaitable[ToolResult | None]]
"""Returns a result in place of the tool's, or None to leave it as it is."""

F = TypeVar("F", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True, slots=True)
class ToolHook(Generic[F]):
    """A function and the conversations it applies to."""

    function: F
    conversation: int | None = None
    """None: all of them."""
    subtree: bool = False
    """With a conversation: also everything owned below it."""

    def __post_init__(self) -> None:
        if self.subtree and self.conversation is None:
            raise ValueError("subtree=True needs the conversation it is about; without one a hook applies everywhere")

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


class BeforeTool(ToolHook[BeforeToolFunction]):
    """Asked before a call; one that raises blocks it."""

    __slots__ = ()


class AfterTool(ToolHook[AfterToolFunction]):
    """Told of the result of a call that ran; one that raises is reported and skipped."""

    __slots__ = ()


Hook: TypeAlias = BeforeTool | AfterTool


@overload
def before_tool(function: BeforeToolFunction, /) -> BeforeTool: ...
@overload
def before_tool(
    *, conversation: int | None = None, subtree: bool = False
) -> Callable[[BeforeToolFunction], BeforeTool]: ...
def before_tool(
    function: BeforeToolFunction | None = None, /, *, conversation: int | None = None, subtree: bool = False
) -> BeforeTool | Callable[[BeforeToolFunction], BeforeTool]:
    """Decorate an async function to be asked before a call: everywhere, or where the options say.

    It may return other arguments (checked like the model's), a Block, or None.
    """
    if function is not None:
        return BeforeTool(function)
    return lambda function: BeforeTool(function, conversation, subtree)


@overload
def after_tool(function: AfterToolFunction, /) -> AfterTool: ...
@overload
def after_tool(
    *, conversation: int | None = None, subtree: bool = False
) -> Callable[[AfterToolFunction], AfterTool]: ...
def after_tool(
    function: AfterToolFunction | None = None, /, *, conversation: int | None = None, subtree: bool = False
) -> AfterTool | Callable[[AfterToolFunction], AfterTool]:
    """Decorate an async function to be told of a call's result: everywhere, or where the options say.

    It may return another result (checked like the tool's), or None.
    """
    if function is not None:
        return AfterTool(function)
    return lambda function: AfterTool(function, conversation, subtree)


class Installed(msgspec.Struct, frozen=True):
    """A hook and the extension it came with; None: the host's own."""

    extension: str | None
    hook: Hook


class HookRunner:
    """Asks the hooks that apply, in the order of their installation."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def before(self, hooks: Sequence[Installed], call: HookCall) -> tuple[dict[str, JsonValue], Block | None]:
        """The arguments after every hook, or the first Block. Each hook sees what the ones before made of them."""
        arguments = call.arguments
        for installed in hooks:
            hook = installed.hook
            if not isinstance(hook, BeforeTool) or not await self._applies(hook, call.conversation_id):
                continue
            try:
                answer = await hook.function(_with(call, arguments))
                if isinstance(answer, Block):
                    return arguments, answer
                if answer is not None:
                    arguments = _plain(dict(answer))
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and not cancelled_itself():
                    raise
                self._report(installed, call, "a before_tool hook raised; it blocks the call", error)
                return arguments, Block("a check of this call failed; it was not run")
        return arguments, None

    async def after(self, hooks: Sequence[Installed], call: HookCall, result: ToolResult) -> ToolResult:
        """The result after every hook."""
        for installed in hooks:
            hook = installed.hook
            if not isinstance(hook, AfterTool) or not await self._applies(hook, call.conversation_id):
                continue
            try:
                answer = await hook.function(_with(call, call.arguments), result)
                if answer is not None:
                    if not isinstance(answer, ToolResult):  # pyright: ignore[reportUnnecessaryIsInstance]  # untyped code
                        raise TypeError(f"an after_tool hook returns a ToolResult or None, not {type(answer).__name__}")
                    result = answer
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and not cancelled_itself():
                    raise
                self._report(installed, call, "an after_tool hook raised; it is skipped", error)
        return result

    async def _applies(self, hook: Hook, conversation_id: int) -> bool:
        if hook.conversation is None or hook.conversation == conversation_id:
            return True
        return hook.subtree and hook.conversation in await self._above(conversation_id)

    async def _above(self, conversation_id: int) -> set[int]:
        """The conversations that own this one, through the tasks in between. Those edges never change."""
        above: set[int] = set()
        for _ in range(MAX_DEPTH):
            record = await self._session.conversation(conversation_id)
            if record is None or record.owner is None:
                break
            owner = await self._session.task(record.owner)
            if owner is None:
                break
            conversation_id = owner.conversation_id
            above.add(conversation_id)
        return above

    def _report(self, installed: Installed, call: HookCall, message: str, error: BaseException) -> None:
        self._session.report(
            Report(
                type="hook_failed",
                message=f"{installed.hook.name}: {message}",
                task=call.id,
                kind="pi.tool",
                conversation=call.conversation_id,
                extension=installed.extension,
                error=error,
            )
        )


def _with(call: HookCall, arguments: dict[str, JsonValue]) -> HookCall:
    return HookCall(id=call.id, conversation_id=call.conversation_id, tool=call.tool, arguments=_plain(arguments))


def _plain(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    copied = copy_json(arguments, at="arguments")
    assert isinstance(copied, dict), "a copy is of the same type"
    return copied
