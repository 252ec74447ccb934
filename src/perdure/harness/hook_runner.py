"""Asking hooks: which apply to a conversation, in which order, and what becomes of one that raises
(rules H128, H132, H220).

They are asked in the order of their installation, the host's own first; each sees what the ones before made of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from perdure.harness.documents import Agent
from perdure.harness.foreign import cancelled_itself
from perdure.harness.hooks import (
    AfterTool,
    BeforeCompact,
    BeforeTool,
    Block,
    Decline,
    H,
    Hook,
    HookCall,
    HookCompaction,
    Installed,
    Summary,
)
from perdure.harness.registry import Registry
from perdure.harness.tool import ToolResult
from perdure.kernel.json import JsonValue, check_json, copy_json
from perdure.kernel.reports import Report
from perdure.kernel.session import Session

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

    async def applying(self, kind: type[H], conversation_id: int) -> Sequence[Installed[H]]:
        """The hooks of a kind that apply to a conversation. Reads nothing if there are none of that kind at all, and
        owners only for a subtree that may hold the conversation."""
        if not self._registry.has_hooks(kind):
            return ()
        agent = await self._session.snapshot(Agent, conversation=conversation_id) or Agent()
        return await self.among(self._registry.hooks(agent, kind), conversation_id)

    async def among(self, hooks: Sequence[Installed[H]], conversation_id: int) -> Sequence[Installed[H]]:
        """Those whose scope holds the conversation."""
        return [installed for installed in hooks if await self._applies(installed.hook, conversation_id)]

    async def _applies(self, hook: Hook, conversation_id: int) -> bool:
        told = hook.applies_to(conversation_id)
        return hook.conversation in await self._above(conversation_id) if told is None else told

    async def _above(self, conversation_id: int) -> frozenset[int]:
        """The conversations that own this one, through the tasks in between. Those edges never change."""
        known = self._owners.get(conversation_id)
        if known is not None:
            return known
        above: set[int] = set()
        at = conversation_id
        while True:
            record = await self._session.conversation(at)
            owner = None if record is None or record.owner is None else await self._session.task(record.owner)
            if owner is None:
                break
            if len(above) >= MAX_DEPTH:  # a guard that is not asked would be worse than a call that fails
                raise RuntimeError(f"conversation {conversation_id} has more than {MAX_DEPTH} owners above it")
            at = owner.conversation_id
            above.add(at)
        if len(self._owners) >= MOST_REMEMBERED:
            self._owners.clear()
        found = self._owners[conversation_id] = frozenset(above)
        return found

    # --- around a call of a tool -------------------------------------------------------------------------------

    async def before_tool(
        self, hooks: Sequence[Installed[BeforeTool]], call: HookCall
    ) -> tuple[dict[str, JsonValue], Block | None]:
        """The arguments after every hook, or the first Block. One that raises blocks (rule H129)."""
        arguments = call.arguments
        for installed in await self.among(hooks, call.conversation_id):
            try:
                answer = await installed.hook.function(_with(call, arguments))
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
                answer = await installed.hook.function(_with(call, call.arguments), result)
                if answer is not None:
                    result = _checked(answer, ToolResult)
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, call, error)
        return result

    # --- before a compaction -----------------------------------------------------------------------------------

    async def before_compact(self, compaction: HookCompaction) -> Decline | Summary | None:
        """What the first says that says anything (rule H144)."""
        for installed in await self.applying(BeforeCompact, compaction.conversation_id):
            try:
                answer = await installed.hook.function(compaction)
                if answer is not None:
                    answer = _checked(answer, Decline, Summary)
                    check_json(answer.reason if isinstance(answer, Decline) else answer.text)
                    return answer
            except (Exception, asyncio.CancelledError) as error:
                self._failed(installed, compaction, error)
        return None

    # --- those that raise --------------------------------------------------------------------------------------

    def _failed(
        self, installed: Installed[Hook], asked: Asked, error: BaseException, so: str = "it is skipped"
    ) -> None:
        """Report a hook that raised. A cancellation of what asks is none of the hook's: it goes on."""
        if isinstance(error, asyncio.CancelledError) and not cancelled_itself():
            raise error
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


def _checked(answer: A, *kinds: type) -> A:
    """What untyped code returns may be anything. Raises TypeError."""
    if not isinstance(answer, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"the hook returned a {type(answer).__name__}; it returns a {names}, or None")
    return answer


def _with(call: HookCall, arguments: dict[str, JsonValue]) -> HookCall:
    return HookCall(id=call.id, conversation_id=call.conversation_id, tool=call.tool, arguments=_plain(arguments))


def _plain(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    copied = copy_json(arguments, at="arguments")
    assert isinstance(copied, dict), "a copy is of the same type"
    return copied
