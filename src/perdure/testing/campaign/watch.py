"""What the process that is killed tells of itself, and where it stands still: around commits and scope methods.

A point is ``commit.NAME.before`` or ``.after`` (the batch is about to be handed to the store; it is stored and nobody
was told), or ``METHOD.begin`` or ``.end`` of the Space's part in a call.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from typing_extensions import override

from perdure.harness.calls import EXECUTE
from perdure.harness.documents import TOOL_RESULT, ToolInput, ToolResultData
from perdure.harness.environment import CallOutcome, CallScope, OpenCall, RecoverRun, Recovery, ScopeResult
from perdure.harness.scopes import TOOL_TASK, CallIntent
from perdure.kernel.json import JsonValue
from perdure.kernel.records import Running, TaskRecord
from perdure.kernel.session import Session
from perdure.kernel.storage import Batch
from perdure.kernel.transaction import Transaction
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.campaign.script import number_of

Action: TypeAlias = Literal["kill", "stop"]
"""SIGKILL of the process itself; SIGSTOP of itself, to be let go on or killed by the runner."""


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process stands still, once."""

    point: str
    action: Action
    step: int = 0
    """0: of any step."""


class Watch:
    """Tells each point on a descriptor, a line of JSON each."""

    def __init__(self, descriptor: int, stands: Sequence[Stand]) -> None:
        self._descriptor = descriptor
        self._stands = deque(stands)
        """In their order: a later one counts once the earlier ones are over."""
        self._steps: dict[int, int] = {}
        """Of each call's task."""

    def tell(self, **event: object) -> None:
        os.write(self._descriptor, msgspec.json.encode(event) + b"\n")

    def at(self, point: str, step: int, **more: object) -> None:
        """The process is at this point now."""
        chosen = self._stands[0] if self._stands else None
        if chosen is None or chosen.point != point or chosen.step not in (0, step):
            self.tell(at=point, step=step, **more)
            return
        self._stands.popleft()
        self.tell(at=point, step=step, stands=chosen.action, **more)
        os.kill(os.getpid(), signal.SIGKILL if chosen.action == "kill" else signal.SIGSTOP)

    def know(self, task: TaskRecord) -> int:
        """The step of a call's task."""
        if task.id not in self._steps:
            self._steps[task.id] = number_of(msgspec.json.decode(task.raw_input, type=ToolInput).call_id)
        return self._steps[task.id]

    def step(self, session: Session | None, call: OpenCall) -> int:
        if call.id not in self._steps and session is not None:
            task = session.live.settled.get(call.id) or session.live.staged.get(call.id)
            return 0 if task is None else self.know(task)
        return self._steps.get(call.id, 0)

    def named(self, batch: Batch) -> tuple[str, int] | None:
        """What a commit is for a campaign, and of which step; None: nothing that is attacked."""
        for entry in batch.entries:
            if entry.kind == TOOL_RESULT:
                return "outcome", number_of(entry.data_as(ToolResultData).call_id)
        kinds = {write.record.kind for write in batch.documents}
        for task in batch.tasks:
            if task.kind == TOOL_TASK and isinstance(task.state, Running):
                step = self.know(task)
                if task.created_at == batch.at:
                    return "call", step
                if task.state.phase == EXECUTE and "pi.space" in kinds:
                    intent = msgspec.json.decode(task.state.raw_checkpoint, type=CallIntent)
                    return "intent" if intent.attempt == 1 else "attempt", step
        if "pi.space-image" in kinds:
            return "external", 0
        return ("connect", 0) if "pi.space" in kinds else None


class WatchedStorage(SqliteStorage):
    """The real storage, which tells of its commits."""

    watch: Watch

    @override
    def commit(self, batch: Batch) -> asyncio.Future[None]:
        named = self.watch.named(batch)
        if named is None:
            return super().commit(batch)
        name, step = named
        self.watch.at(f"commit.{name}.before", step)
        stored = super().commit(batch)

        def tell(stored: asyncio.Future[None]) -> None:
            if not stored.cancelled() and stored.exception() is None:
                self.watch.at(f"commit.{name}.after", step)

        stored.add_done_callback(tell)
        return stored


class WatchedScope:
    """A Space's part in calls, which tells of what it is asked."""

    def __init__(self, inner: CallScope, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch
        self._session: Session | None = None

    def _at(self, point: str, call: OpenCall, **more: object) -> None:
        self._watch.at(point, self._watch.step(self._session, call), **more)

    async def attach(self, session: Session, open_calls: Sequence[OpenCall]) -> None:
        self._session = session
        await self._inner.attach(session, open_calls)

    async def detach(self) -> None:
        await self._inner.detach()

    async def enter(self, call: OpenCall) -> None:
        self._at("enter.begin", call)
        await self._inner.enter(call)
        self._at("enter.end", call)

    async def before_intent(self, tx: Transaction, call: OpenCall) -> JsonValue:
        return await self._inner.before_intent(tx, call)

    async def capture(self, call: OpenCall, outcome: CallOutcome) -> ScopeResult | None:
        self._at("capture.begin", call)
        result = await self._inner.capture(call, outcome)
        self._at("capture.end", call)
        return result

    async def before_result(self, tx: Transaction, call: OpenCall, outcome: CallOutcome) -> None:
        await self._inner.before_result(tx, call, outcome)

    async def leave(self, call: OpenCall, *, outcome: bool) -> None:
        self._at("leave.begin", call)
        await self._inner.leave(call, outcome=outcome)
        self._at("leave.end", call)

    async def recover(self, call: OpenCall) -> Recovery:
        self._at("recover.begin", call)
        recovery = await self._inner.recover(call)
        decided = recovery.attempt if isinstance(recovery, RecoverRun) else "over"
        self._at("recover.end", call, decided=decided)
        return recovery
