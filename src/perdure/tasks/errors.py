"""What goes wrong with tasks, by name. Every message says which task, why, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, TypeAlias

from perdure.kernel.errors import PerdureError

BlockedReason: TypeAlias = Literal["missing_task", "task_too_old", "migration_failed", "parked"]
"""Why a task cannot run though it is due (rules T31, T42)."""

ADVICE: dict[BlockedReason, str] = {
    "missing_task": "install a task of its kind",
    "task_too_old": "install code of its version or a later one",
    "migration_failed": "install code whose migrate() understands what is stored",
    "parked": "its runs were cut off too often: find out why, then retry_task() or abort_task()",
}


MAX_ERROR_TEXT = 500


def error_text(error: BaseException) -> str:
    """What the user's code raised, in bounded, storable words; even if its own ``__str__`` raises."""
    name = type(error).__name__
    try:
        text = f"{name}: {error}"
    except Exception as worse:  # the user's code again
        text = f"{name}, whose text cannot be made: {type(worse).__name__}"
    return text[:MAX_ERROR_TEXT].encode("utf-8", "replace").decode()


def is_own_failure(error: BaseException, own: asyncio.Task[None] | None = None) -> bool:
    """Whether user code failed by itself: it was not its asyncio task that was cancelled, nor the process told to end,
    nor its coroutine closed.

    To be asked where the error was caught. ``own``: the asyncio task that runs it; a coroutine is closed from outside.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() == 0
    if isinstance(error, GeneratorExit):
        return own is not None and _runs_now(own)
    return not isinstance(error, (KeyboardInterrupt, SystemExit))


def _runs_now(task: asyncio.Task[None]) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs any more
        return False


class TaskDefinitionError(PerdureError, TypeError):
    """A task class, or what it says of its types and phases, makes no sense."""


class WorkBlocked(PerdureError):
    """What was waited for cannot go on by itself (rule T47). Nothing was changed."""

    def __init__(self, task: int, reason: BlockedReason, kind: str, detail: str = "") -> None:
        super().__init__(
            f"task {task} ({kind}) is blocked: {reason}{f', {detail}' if detail else ''}; {ADVICE[reason]}"
        )
        self.task = task
        self.reason: BlockedReason = reason
        self.kind = kind


class NotStopped(PerdureError):
    """Code was asked to stop and did not within the drain bound (rule T87). Its abort marks stay."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"did not stop within the drain bound: {', '.join(names)}; the reports have the stacks")
        self.names = tuple(names)


class OwnerEnded(PerdureError):
    """New owned work needs a live, unaborted owner of the same conversation (rules T5, T52)."""


class WaitCycle(PerdureError):
    """A wait would never end: each task of the cycle needs the next one to end first (rule T68)."""

    def __init__(self, cycle: Sequence[int]) -> None:
        super().__init__(
            f"task {cycle[0]} would wait for itself: {' -> '.join(map(str, cycle))} "
            "(a task waits for what it names, and for what it owns)"
        )
        self.cycle = tuple(cycle)


class InvalidMove(PerdureError, ValueError):
    """A phase asked for a next state it may not have."""


class NoProgress(PerdureError):
    """A phase ended without having committed a next state (rules T18, T19)."""


class RunEnded(PerdureError):
    """A run, or something made by it, was used after its phase had moved on, was aborted, or had ended."""


class TaskEnded(PerdureError):
    """The task is terminal; nothing can be sent to it any more."""
