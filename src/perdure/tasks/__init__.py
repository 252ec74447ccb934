"""Floor 2: durable state machines. Definitions, scheduling, ownership, abort and recovery of tasks."""

from __future__ import annotations

from perdure.tasks.definition import Next, StoredTask, Task
from perdure.tasks.errors import (
    BlockedReason,
    InvalidMove,
    NoProgress,
    NotStopped,
    OwnerEnded,
    RunEnded,
    TaskDefinitionError,
    TaskEnded,
    WaitCycle,
    WorkBlocked,
)
from perdure.tasks.inspect import LiveTask, TaskNode, Wake
from perdure.tasks.registry import TaskRegistry
from perdure.tasks.run import Run
from perdure.tasks.runtime import TaskRuntime
from perdure.tasks.transaction import RunTransaction

__all__ = [
    "BlockedReason",
    "InvalidMove",
    "LiveTask",
    "Next",
    "NoProgress",
    "NotStopped",
    "OwnerEnded",
    "Run",
    "RunEnded",
    "RunTransaction",
    "StoredTask",
    "Task",
    "TaskDefinitionError",
    "TaskEnded",
    "TaskNode",
    "TaskRegistry",
    "TaskRuntime",
    "WaitCycle",
    "Wake",
    "WorkBlocked",
]
