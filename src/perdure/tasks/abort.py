"""Aborting: durable marks, code that is stopped and joined, and waiting until all of it has ended (rules T71-T83).

The marks are the only thing an abort writes itself. That they reach the owned work, that the handlers run bottom-up
and what becomes of tasks without one follows from the records (derive.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, cast

from perdure.kernel.context import Context
from perdure.kernel.records import TaskRecord
from perdure.kernel.reports import Report
from perdure.kernel.session import Straggler
from perdure.kernel.transaction import Transaction
from perdure.tasks.derive import mark
from perdure.tasks.errors import NotStopped
from perdure.tasks.invocation import Invocation

if TYPE_CHECKING:
    from perdure.tasks.runtime import TaskRuntime

Before = Callable[[Transaction], Awaitable[None]]
"""What a caller writes in the same commit as the marks."""


async def abort_task(runtime: TaskRuntime, id: int, *, reason: str, context: Context | None) -> None:
    async with runtime.session.commit(context=context) as tx:
        record = tx.live_task(id)
        if record is None:
            await tx.task(id)  # NotFound, or it has ended already
            return
        scope = {id, *(below.id for below in runtime.tree.below(id, tx.live_task))}
        runtime.enable_aborts()
        _mark(runtime, tx, [record], reason)
    await _ended(runtime, {id}, scope, context)


async def abort_conversation(
    runtime: TaskRuntime,
    id: int,
    *,
    reason: str,
    background: bool,
    before: Before | None,
    context: Context | None,
) -> None:
    async with runtime.session.commit(conversation_id=id, context=context) as tx:
        await tx.conversation(id)
        if before is not None:
            await before(tx)
        if background:
            targets = await _everything_under(runtime, tx, id)
            scope = {record.id for record in targets}
        else:
            targets = list(runtime.tree.owned_by_conversation(id, tx.live_task))
            scope = {record.id for record in targets}
            for record in targets:
                scope.update(below.id for below in runtime.tree.below(record.id, tx.live_task))
        runtime.enable_aborts()
        _mark(runtime, tx, targets, reason)
    await _ended(runtime, scope, scope, context)


def _mark(runtime: TaskRuntime, tx: Transaction, targets: Iterable[TaskRecord], reason: str) -> None:
    for record in targets:
        if not record.abort_requested:
            tx.put_task(mark(runtime, record, reason))


async def _everything_under(runtime: TaskRuntime, tx: Transaction, conversation_id: int) -> list[TaskRecord]:
    """Every live task below a conversation, background boundaries crossed (T80): found by climbing from each.

    An owner in between may have ended, so its record may have to be read.
    """
    under: dict[int, bool] = {conversation_id: True}
    found: list[TaskRecord] = []
    for record in list(tx.live_tasks()):
        climbed: list[int] = []
        here = record.conversation_id
        while here not in under:
            climbed.append(here)
            owner = (await tx.conversation(here)).owner
            if owner is None:
                under[here] = False
            else:
                here = (await tx.task(owner)).conversation_id
        for passed in climbed:
            under[passed] = under[here]
        if under[here]:
            found.append(record)
    return found


async def _ended(runtime: TaskRuntime, targets: set[int], scope: set[int], context: Context | None) -> None:
    """Return once every target is terminal. Raises NotStopped if code of the scope does not stop."""
    live = runtime.session.live.settled
    left = set(targets)

    def check() -> bool | None:
        while left:  # none is looked at again once it has ended
            id = left.pop()
            if id in live:
                left.add(id)
                break
        else:
            return True
        late = [invocation.name for id, invocation in runtime.overdue.items() if id in scope]
        if late:
            raise NotStopped(sorted(late))
        return None

    only = next(iter(targets)) if len(targets) == 1 else None
    await runtime.waits.until(check, task=only, context=context)


# --- stopping code ----------------------------------------------------------------------------------------------


async def watch_stop(runtime: TaskRuntime, invocation: Invocation) -> None:
    """After an invocation was asked to stop: report it, with its stack, if the drain bound passes first (T86)."""
    await join(runtime, [invocation], runtime.drain_ms)
    if not invocation.task.done():
        runtime.overdue[invocation.id] = invocation
        runtime.session.report(
            Report(
                type="not_stopped",
                message=f"{invocation.name} did not stop within {runtime.drain_ms} ms:\n{invocation.stack()}",
                task=invocation.id,
                kind=invocation.kind,
            )
        )
        runtime.waits.stir()


async def stop_all(runtime: TaskRuntime, drain_ms: int) -> list[Straggler]:
    """Stop every invocation and join it within the bound; those still at work afterwards are named."""
    invocations = list(runtime.invocations.values())
    for invocation in invocations:
        invocation.stop()
    await join(runtime, invocations, drain_ms)
    return [
        Straggler(i.name, i.stack(), cast("asyncio.Future[object]", i.task)) for i in invocations if not i.task.done()
    ]


async def join(runtime: TaskRuntime, invocations: list[Invocation], drain_ms: int) -> None:
    """Wait for invocations to end, at most that long on the session's clock."""
    waiting: set[asyncio.Task[None]] = {i.task for i in invocations if not i.task.done()}
    if not waiting:
        return
    bound: asyncio.Task[None] = asyncio.ensure_future(_sleep(runtime, drain_ms))
    try:
        while waiting and not bound.done():
            await asyncio.wait([*waiting, bound], return_when=asyncio.FIRST_COMPLETED)
            waiting = {task for task in waiting if not task.done()}
    finally:
        bound.cancel()


async def _sleep(runtime: TaskRuntime, ms: int) -> None:
    await runtime.session.clock.sleep(ms / 1000)
