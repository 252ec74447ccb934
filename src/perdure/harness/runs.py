"""A run: every turn from an admitted input to its final answer. How one begins and how it ends (rules H14 to H16).

Both happen inside a transaction: a run is there, and the conversation busy, from the commit that admits its input;
it is over, its inputs settled and what waits decided about, in the commit of its last outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from perdure.harness.documents import GENERATION, Live, UnansweredReason, UsageTotals
from perdure.harness.host import Host
from perdure.harness.inbox import Placed, place, withdraw
from perdure.harness.prepare import prepare_along
from perdure.kernel.records import NULL, Pending, TaskRecord
from perdure.kernel.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Sequence

GENERATION_VERSION = 1
BEFORE_REQUEST = frozenset({"start", "compacted"})
"""Phases of a generation that prepare a request. Until one of them has, also while it sleeps or waits before it, none
is on its way, and no round is open: the context may change."""


class Answered(msgspec.Struct, frozen=True):
    """The run's inputs are done, with this entry as their answer."""

    entry: int


class NoAnswer(msgspec.Struct, frozen=True):
    """The run's inputs end without an answer."""

    reason: UnansweredReason
    detail: str | None = None


async def start_run(host: Host, tx: Transaction, conversation_id: int, inputs: Sequence[int]) -> TaskRecord:
    """Begin a run for placed inputs: its generation task and ``pi.live.run``.

    Where the conversation is in memory the first request is pinned in this commit, so that the task begins with it.
    """
    assert inputs, "a run answers something"
    task = tx.new_task(
        kind=GENERATION, version=GENERATION_VERSION, phase="start", input=NULL, conversation=conversation_id
    )
    pinned = await prepare_along(host, tx, conversation_id, task=task.id, turn=0, attempt=1)
    if pinned is not None:
        task = structs.replace(task, state=Pending(phase="request", raw_checkpoint=pinned.encode()))
        tx.put_task(task)
    live = await tx.draft(Live, conversation=conversation_id)
    assert live.run is None, "a conversation has one run at a time"
    live.run = {"task": task.id, "inputs": list(inputs), "started_at": tx.at, "turn": 0}
    return task


async def end_run(host: Host, tx: Transaction, conversation_id: int, ending: Answered | NoAnswer) -> None:
    """End the run, settle its inputs, and place what the host's settings let in now (rules H46, H48 to H50)."""
    await clear_run(tx, conversation_id, ending)
    if isinstance(ending, Answered):
        await final_boundary(host, tx, conversation_id)
    elif ending.reason in ("model_error", "no_model", "limit"):
        if host.settings.after_failure == "continue":
            await final_boundary(host, tx, conversation_id)
        elif host.settings.after_failure == "withdraw":
            await withdraw(tx, conversation_id, "run_failed", f"the run before it ended {ending.reason}")


async def reset_run(host: Host, tx: Transaction, conversation_id: int, placed: Placed) -> None:
    """A reset came at the boundary after tools: that one was the final one (rule H29)."""
    await end_placed(host, tx, conversation_id, NoAnswer("reset", "a reset was placed before the answer"), placed)


async def end_placed(
    host: Host, tx: Transaction, conversation_id: int, ending: Answered | NoAnswer, placed: Placed
) -> None:
    """End a run whose final boundary was placed before."""
    await clear_run(tx, conversation_id, ending)
    if placed.inputs:
        await start_run(host, tx, conversation_id, placed.inputs)


async def final_boundary(host: Host, tx: Transaction, conversation_id: int) -> None:
    """Place what waits; inputs start a run of their own."""
    placed = await place(tx, conversation_id, "final", host.settings)
    if placed.inputs:
        await start_run(host, tx, conversation_id, placed.inputs)


async def clear_run(tx: Transaction, conversation_id: int, ending: Answered | NoAnswer) -> None:
    """The conversation is no longer busy; the run's inputs are settled, its time is counted (rule H241). What waits
    keeps waiting."""
    live = await tx.draft(Live, conversation=conversation_id)
    assert live.run is not None, "only a run ends"
    for id in live.run["inputs"]:
        submission = await tx.submission(id)
        if isinstance(ending, Answered):
            settled = structs.replace(submission, status="done", answer=ending.entry)
        else:
            settled = structs.replace(submission, status="unanswered", reason=ending.reason, detail=ending.detail)
        await tx.put_submission(settled)
    totals = await tx.draft(UsageTotals, conversation=conversation_id)
    totals.run_ms += max(0, tx.at - live.run["started_at"])  # clocks of two processes may differ
    live.run = None
    live.message = None
    live.retry = None
    live.deferred = None
    if live.tools:
        live.tools = {}
