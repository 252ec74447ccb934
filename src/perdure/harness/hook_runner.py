"""Asking hooks: which apply to a conversation, in which order, and what becomes of one that raises
(rules H128, H132, H220).

They are asked in the order of their installation, the host's own first; each sees what the ones before made of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar, get_args

from msgspec import structs

from perdure.harness.asking import storable, unusable
from perdure.harness.documents import Agent
from perdure.harness.foreign import cancelled_itself
from perdure.harness.hooks import (
    AfterResponse,
    AfterTool,
    AfterTools,
    BeforeCompact,
    BeforeRequest,
    BeforeTool,
    Block,
    Decline,
    GateRequest,
    H,
    Hook,
    HookAnswer,
    HookCall,
    HookCompaction,
    HookRequest,
    HookResponse,
    HookRound,
    Installed,
    OnYield,
    RequestChange,
    Stop,
    Summary,
)
from perdure.harness.inbox import Content, input_content
from perdure.harness.messages import (
    AssistantMessage,
    Image,
    SystemMessage,
    UserMessage,
    decode_messages,
    encode_messages,
)
from perdure.harness.model import ModelRequest, ThinkingLevel
from perdure.harness.registry import Registry
from perdure.harness.tool import ToolResult
from perdure.kernel.json import JsonValue, check_json, copy_json
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction

MAX_DEPTH = 1000
"""How many owners above a conversation are looked at for the scope of a hook."""
MOST_REMEMBERED = 10_000
"""Conversations whose owners are remembered."""

A = TypeVar("A")


class Asked(Protocol):
    """What a hook is asked about."""

    @property
    def id(self) -> int: ...
    @property
    def conversation_id(self) -> int: ...


class HookRunner:
    """Of one session. It remembers who owns whom, nothing else."""

    def __init__(self, session: Session, registry: Registry) -> None:
        self._session = session
        self._registry = registry
        self._owners: dict[int, frozenset[int]] = {}

    # --- which are asked ---------------------------------------------------------------------------------------

    async def applying(
        self, kind: type[H], conversation_id: int, *, tx: Transaction | None = None
    ) -> Sequence[Installed[H]]:
        """The hooks of a kind that apply to a conversation. Reads nothing if there are none of that kind at all, and
        owners only for a subtree that may hold the conversation.

        ``tx``: inside a transaction, which reads then.
        """
        if not self._registry.has_hooks(kind):
            return ()
        if tx is None:
            agent = await self._session.snapshot(Agent, conversation=conversation_id)
        else:
            agent = await tx.read(Agent, conversation=conversation_id)
        return await self.among(self._registry.hooks(agent or Agent(), kind), conversation_id, tx=tx)

    async def among(
        self, hooks: Sequence[Installed[H]], conversation_id: int, *, tx: Transaction | None = None
    ) -> Sequence[Installed[H]]:
        """Those whose scope holds the conversation."""
        return [installed for installed in hooks if await self._applies(installed.hook, conversation_id, tx)]

    async def _applies(self, hook: Hook, conversation_id: int, tx: Transaction | None) -> bool:
        told = hook.applies_to(conversation_id)
        return hook.conversation in await self._above(conversation_id, tx) if told is None else told

    async def _above(self, conversation_id: int, tx: Transaction | None) -> frozenset[int]:
        """The conversations that own this one, through the tasks in between. Those edges never change."""
        known = self._owners.get(conversation_id)
        if known is not None:
            return known
        above: set[int] = set()
        at = await self._owner(conversation_id, tx)
        while at is not None:
            if len(above) >= MAX_DEPTH:  # a guard that is not asked would be worse than a call that fails
                raise RuntimeError(f"conversation {conversation_id} has more than {MAX_DEPTH} owners above it")
            above.add(at)
            at = await self._owner(at, tx)
        if len(self._owners) >= MOST_REMEMBERED:
            self._owners.clear()
        found = self._owners[conversation_id] = frozenset(above)
        return found

    async def _owner(self, conversation_id: int, tx: Transaction | None) -> int | None:
        """The conversation of the task that owns this one."""
        reads = self._session if tx is None else tx
        record = await reads.conversation(conversation_id)
        owner = None if record is None or record.owner is None else await reads.task(record.owner)
        return None if owner is None else owner.conversation_id

    # --- around a call of a tool -------------------------------------------------------------------------------

    async def before_tool(
        self, hooks: Sequence[Installed[BeforeTool]], call: HookCall
    ) -> tuple[dict[str, JsonValue], Block | None]:
        """The arguments after every hook, or the first Block. One that raises blocks (rule H129)."""
        arguments = call.arguments
        for installed in await self.among(hooks, call.conversation_id):
            try:
                answer = await _heard(installed.hook.function(_with(call, arguments)))
                if isinstance(answer, Block):
                    return arguments, answer
                if answer is not None:
                    arguments = _plain(dict(answer))
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, call, error, "it blocks the call")
                return arguments, Block("a check of this call failed; it was not run")
        return arguments, None

    async def after_tool(self, hooks: Sequence[Installed[AfterTool]], call: HookCall, result: ToolResult) -> ToolResult:
        """The result after every hook."""
        for installed in await self.among(hooks, call.conversation_id):
            try:
                answer = await _heard(installed.hook.function(_with(call, call.arguments), result))
                if answer is not None:
                    result = _checked(answer, ToolResult)
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, call, error)
        return result

    # --- around a request --------------------------------------------------------------------------------------

    async def before_request(self, asked: HookRequest) -> ModelRequest | Stop:
        """The request as it is to be sent, or the first Stop of a gate (rules H222, H223). A gate that raises stops."""
        for installed in await self.applying(BeforeRequest, asked.conversation_id):
            try:
                change = await _heard(installed.hook.function(asked))
                if change is not None:
                    asked = structs.replace(asked, request=_changed(asked.request, _checked(change, RequestChange)))
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, asked, error)
        for installed in await self.applying(GateRequest, asked.conversation_id):
            try:
                stop = await _heard(installed.hook.function(asked))
                if stop is not None:
                    _check_words(_checked(stop, Stop).reason)
                    return stop
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, asked, error, "it stops the request")
                return Stop("a gate failed; the request was not sent")
        return asked.request

    async def after_response(self, asked: HookResponse) -> AssistantMessage:
        """The message after every hook (rule H224)."""
        for installed in await self.applying(AfterResponse, asked.conversation_id):
            try:
                answer = await _heard(installed.hook.function(asked))
                if answer is not None:
                    message = _replaced(asked.message, _checked(answer, AssistantMessage))
                    asked = structs.replace(asked, message=message)
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, asked, error)
        return asked.message

    async def on_yield(self, hooks: Sequence[Installed[OnYield]], asked: HookAnswer) -> Content | None:
        """What the first says that says anything (rule H131)."""
        for installed in hooks:
            try:
                said = await _heard(installed.hook.function(asked))
                if said is not None:
                    return input_content(said if isinstance(said, str) else _checked(said, UserMessage).content)
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, asked, error)
        return None

    async def after_tools(self, hooks: Sequence[Installed[AfterTools]], asked: HookRound) -> None:
        """Tell each of them."""
        for installed in hooks:
            try:
                await _heard(installed.hook.function(asked))
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, asked, error)

    # --- before a compaction -----------------------------------------------------------------------------------

    async def before_compact(self, compaction: HookCompaction) -> Decline | Summary | None:
        """What the first says that says anything (rule H144)."""
        for installed in await self.applying(BeforeCompact, compaction.conversation_id):
            try:
                answer = await _heard(installed.hook.function(compaction))
                if answer is not None:
                    answer = _checked(answer, Decline, Summary)
                    _check_words(answer.reason if isinstance(answer, Decline) else answer.text)
                    return answer
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, compaction, error)
        return None

    # --- those that raise --------------------------------------------------------------------------------------

    def _failed(
        self, installed: Installed[Hook], asked: Asked, error: BaseException, so: str = "it is skipped"
    ) -> None:
        """Report a hook that raised. A cancellation of what asks is none of the hook's: it goes on, whatever the hook
        made of it."""
        if not cancelled_itself():
            raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError from error
        hook = installed.hook
        self._session.report(
            Report(
                type="hook_failed",
                message=f"{hook.name}: a hook {hook.point} raised; {so}",
                task=asked.id,
                kind=hook.task,
                conversation=asked.conversation_id,
                extension=installed.extension,
                error=error,
            )
        )


async def _heard(answer: Awaitable[A]) -> A:
    """What a hook answers. One that catches the cancellation of what asks it does not make that go on (rule H221)."""
    try:
        heard = await answer
    except SystemExit:
        # It would end the event loop, and every other conversation with it.
        raise RuntimeError("the hook tried to end the process") from None
    if not cancelled_itself():  # somebody cancelled it
        raise asyncio.CancelledError
    return heard


def _checked(answer: A, *kinds: type) -> A:
    """What untyped code returns may be anything. Raises TypeError."""
    if not isinstance(answer, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"the hook returned a {type(answer).__name__}; it returns a {names}, or None")
    return answer


def _check_words(words: str) -> None:
    """Raises TypeError, NotJson for what cannot be stored."""
    check_json(_checked(words, str))


def _changed(request: ModelRequest, change: RequestChange) -> ModelRequest:
    """Raises TypeError, ValueError for what cannot be sent."""
    added = list(change.add)
    for message in added:
        _checked(message, SystemMessage, UserMessage)
        said = [message] if isinstance(message, SystemMessage) else message.content
        if not said or any(not part.text for part in said if not isinstance(part, Image)):  # models refuse it
            raise ValueError("a message that is added says nothing, or a part of it does")
    decode_messages(encode_messages(added))
    if change.thinking is not None and change.thinking not in get_args(ThinkingLevel):
        raise ValueError(f"{change.thinking!r} is no level of thinking")
    if change.max_output is not None and (type(change.max_output) is not int or change.max_output < 1):
        raise ValueError(f"max_output is a number of tokens, at least 1, not {change.max_output!r}")
    return structs.replace(
        request,
        messages=(*request.messages, *added) if added else request.messages,
        thinking=request.thinking if change.thinking is None else change.thinking,
        max_output=request.max_output if change.max_output is None else change.max_output,
    )


def _replaced(message: AssistantMessage, answer: AssistantMessage) -> AssistantMessage:
    """What a hook made of the message, as the model's. Raises TypeError, ValueError for what no model may say."""
    made = structs.replace(answer, provider=message.provider, model=message.model, usage=message.usage)
    made = storable(made)
    fault = unusable(made)
    if fault is not None:
        raise ValueError(str(fault))
    return made


def _with(call: HookCall, arguments: dict[str, JsonValue]) -> HookCall:
    return HookCall(id=call.id, conversation_id=call.conversation_id, tool=call.tool, arguments=_plain(arguments))


def _plain(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    copied = copy_json(arguments, at="arguments")
    assert isinstance(copied, dict), "a copy is of the same type"
    return copied
