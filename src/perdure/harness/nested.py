"""Nested calls: a tool calls tools (rules H109, H340 to H346).

Each is a ``pi.tool`` task of its own, owned by the calling task. Which task a key stands for is a memo of the caller,
written in the commit that creates the task: so a rerun finds it, finished or not, and nothing is called twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias, cast

import msgspec

from perdure.harness.documents import Agent, Live, ToolErrorCode, ToolInput, ToolResultData
from perdure.harness.handle import CallConflict, CallRefused
from perdure.harness.hook_runner import HookRunner
from perdure.harness.hooks import BeforeTool
from perdure.harness.results import ABORTED
from perdure.harness.scopes import TOOL_TASK, EnvironmentFor, stored_intent
from perdure.harness.tool import ToolResult
from perdure.kernel.json import JsonValue, digest
from perdure.kernel.records import (
    Aborted,
    Completed,
    Orphaned,
    Outcome,
    TaskRecord,
    from_raw,
    to_raw,
)
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.tasks.run import Run
from perdure.tasks.values import MAX_NAME

MAX_CALLS: Final = 256
"""Nested calls that one call may make."""
MAX_DEPTH: Final = 8
"""How many callers a call may have above it."""
PREFIX: Final = "pi.call:"
"""Before the key, in the name of the memo."""
CALLER_ENDED: Final = "the call that made it has ended"


class BeginCall(Protocol):
    """Creates a call's task: ``ToolTask.begin_call``."""

    def __call__(
        self, run: Run[Any, Any, Any], tx: Transaction, live: Live, agent: Agent, input: ToolInput, *, hooked: bool
    ) -> TaskRecord: ...


LookAtCall: TypeAlias = Callable[[int, Agent, ToolInput], object]
"""Looks at a call without making it: ``ToolTask.foresee``."""
WaitTask: TypeAlias = Callable[[int], Awaitable[Outcome]]
"""How a task ends, once it has; also through blocked work, which is shown at the caller's own waiters (T47)."""


class _Made(msgspec.Struct, frozen=True):
    """The memo of a nested call."""

    task: int
    digest: str
    """Of the tool's name and the arguments."""


class NestedCalls:
    """One a session."""

    def __init__(
        self,
        session: Session,
        hooks: HookRunner,
        environment_for: EnvironmentFor,
        *,
        begin: BeginCall,
        look: LookAtCall,
        wait: WaitTask,
    ) -> None:
        self._session = session
        self._hooks = hooks
        self._environment_for = environment_for
        self._begin = begin
        self._look = look
        self._wait = wait
        self._at_work: set[int] = set()
        """Calls whose tool runs in this process."""
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        """Nested calls that stand until their caller is at work again, by that caller."""

    # --- by the caller -----------------------------------------------------------------------------------------

    async def call(
        self, run: Run[ToolInput, int | None, Any], name: str, arguments: Mapping[str, JsonValue], key: str
    ) -> ToolResult:
        """Make the call, or find the one of that key, and wait for its result. Cancelling it cancels the wait alone.

        Raises CallRefused, CallConflict, NotJson.
        """
        if type(key) is not str or not 0 < len(key) <= MAX_NAME - len(PREFIX):
            raise CallRefused(f"a key is a text of 1 to {MAX_NAME - len(PREFIX)} characters, not {key!r:.50}")
        raw = to_raw(dict(arguments), at="arguments")
        wanted = digest([name, from_raw(raw)])
        record = self._session.live.settled.get(run.id)
        made = None if record is None else _memos(record).get(PREFIX + key)
        if made is None:
            made = await self._make(run, name, raw, key, wanted)
        found = msgspec.convert(from_raw(made), _Made)
        if found.digest != wanted:
            raise CallConflict(
                f"call {run.id} of {run.input.name!r} made another call with the key {key!r}; use a key for each"
            )
        return await self._result(await self._wait(found.task))

    async def _make(
        self, run: Run[ToolInput, int | None, Any], name: str, arguments: msgspec.Raw, key: str, digest: str
    ) -> msgspec.Raw:
        """The memo of the key, with the task in the same commit if it is new."""
        if run.input.depth >= MAX_DEPTH:
            raise CallRefused(f"{run.input.name!r} has {MAX_DEPTH} callers above it, and may make no call itself")
        input = ToolInput(
            call_id=f"{run.input.call_id}/{key}",
            name=name,
            arguments=arguments,
            caller=run.id,
            depth=run.input.depth + 1,
        )
        agent = await self._session.snapshot(Agent, conversation=run.conversation_id) or Agent()
        # The first look at a tool's types takes long, and is not for inside a transaction; the next takes microseconds.
        self._look(run.conversation_id, agent, input)
        async with run.commit() as tx:
            caller = tx.live_task(run.id)
            assert caller is not None, "the run's commit found it"
            memos = _memos(caller)
            if (known := memos.get(PREFIX + key)) is not None:
                return known
            if sum(memo.startswith(PREFIX) for memo in memos) >= MAX_CALLS:
                raise CallRefused(f"call {run.id} of {run.input.name!r} made {MAX_CALLS} calls; a call makes no more")
            agent = await tx.read(Agent) or Agent()
            hooked = bool(await self._hooks.applying(BeforeTool, run.conversation_id, tx=tx))
            task = self._begin(run, tx, await tx.draft(Live), agent, input, hooked=hooked)
            made: JsonValue = {"task": task.id, "digest": digest}
            tx.memo(PREFIX + key, made)
        return to_raw(made)

    async def _result(self, outcome: Outcome) -> ToolResult:
        """What the caller is given: the same whether it waited, or found the call ended after a rerun.

        Usage and diagnostics are those of the nested call and stay with it.
        """
        if isinstance(outcome, Completed):
            id = outcome.result
            assert isinstance(id, int), "a nested call completes with the entry of its result"
            entry = await self._session.entry(id)
            assert entry is not None, "an outcome and its entry are one commit"
            data = entry.data_as(ToolResultData)
            code = cast("ToolErrorCode | None", data.code)  # this package wrote it
            return ToolResult(data.content, details=from_raw(data.details), is_error=data.is_error, code=code)
        if isinstance(outcome, Aborted | Orphaned):
            return ToolResult(ABORTED, is_error=True, code="aborted")
        return ToolResult(outcome.error.message, is_error=True, code="tool_error")

    def goes_on(self, run: Run[ToolInput, int | None, Any]) -> bool:
        """Whether something below a call that was cut off is under way and not parked: a crash is counted there, and
        waiting long is no fault of the caller (rule H351)."""
        owned = run.host.tree.owned(run.id, self._session.live.settled.get)
        return any(record.restarts < run.host.restart_limit for record in owned)

    def began(self, id: int) -> None:
        """A call's tool runs in this process from now on: its nested calls may go on."""
        self._at_work.add(id)
        for future in self._waiting.pop(id, ()):
            if not future.done():
                future.set_result(None)

    def ended(self, id: int) -> None:
        self._at_work.discard(id)

    # --- by the nested call ------------------------------------------------------------------------------------

    async def caller_at_work(self, input: ToolInput) -> None:
        """Return once the caller runs in this process.

        After an interruption it is decided first whether the caller is run again; if not, what it called is aborted
        before it begins anything.
        """
        caller = input.caller
        if caller is None or caller in self._at_work:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, set()).add(future)
        try:
            await future
        finally:
            others = self._waiting.get(caller)
            if others is not None:
                others.discard(future)
                if not others:
                    del self._waiting[caller]

    async def held_above(self, run: Run[ToolInput, int | None, Any], scope: object) -> bool:
        """Whether a call above this one, its caller or one that owns its conversation, is inside the same environment's
        scope: it would have to end before this one has its turn there."""
        above = run.input.caller
        conversation_id = run.conversation_id
        while True:
            if above is None:
                conversation = await self._session.conversation(conversation_id)
                if conversation is None or conversation.owner is None:
                    return False
                above = conversation.owner
            record = self._session.live.settled.get(above)
            if record is None:
                return False
            intent = stored_intent(record)
            conversation_id = record.conversation_id
            if intent is not None and intent.scoped:
                environment = self._environment_for(conversation_id)
                if environment is not None and environment.scope is scope:
                    return True
            above = None
            if record.kind == TOOL_TASK:
                above = msgspec.json.decode(record.raw_input, type=ToolInput).caller
            if above is None:
                above = record.owner  # a run, whose conversation is looked at next


def _memos(record: TaskRecord) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(record.raw_memos, type=dict[str, msgspec.Raw])
