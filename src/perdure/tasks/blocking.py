"""Whether code fits a record: looked up by kind each time it is to run (rules T30-T33)."""

from __future__ import annotations

import msgspec

from perdure.kernel.json import copy_json
from perdure.kernel.records import Completing, TaskRecord, Terminal, to_raw
from perdure.tasks.definition import StoredTask
from perdure.tasks.errors import BlockedReason, TaskDefinitionError, error_text
from perdure.tasks.registry import AnyTask, TaskRegistry


class Blocked(msgspec.Struct, frozen=True):
    """Why a task cannot run."""

    reason: BlockedReason
    detail: str = ""


class Fit(msgspec.Struct, frozen=True):
    """Code that fits, and what the record holds, as that code has it."""

    task: AnyTask
    input: object
    checkpoint: object
    phase: str
    migrated: StoredTask | None
    """Set if the record is of an older version: what the run's next commit stores in its place."""


def quick_verdict(record: TaskRecord, registry: TaskRegistry, restart_limit: int) -> AnyTask | Blocked:
    """What the record's kind, version and restarts say, without looking at its values."""
    if record.restarts >= restart_limit and not record.abort_requested:
        return Blocked("parked", f"cut off {record.restarts} times")
    task = registry.find(record.kind)
    if task is None:
        return Blocked("missing_task")
    if task.version < record.version:
        return Blocked("task_too_old", f"the record is of version {record.version}, the code of {task.version}")
    return task


def resolve(record: TaskRecord, registry: TaskRegistry, restart_limit: int) -> Fit | Blocked:
    """Find the code and decode what is stored, migrating it in memory if the code is newer."""
    task = quick_verdict(record, registry, restart_limit)
    if isinstance(task, Blocked):
        return task
    state = record.state
    assert not isinstance(state, (Completing, Terminal)), "no code runs for a decided outcome"
    definition = task.definition
    phase, raw_input, raw_checkpoint = state.phase, record.raw_input, state.raw_checkpoint
    migrated: StoredTask | None = None
    try:
        if task.version > record.version:
            migrated = _migrate(task, record)
            phase = migrated.phase
            raw_input, raw_checkpoint = to_raw(migrated.input), to_raw(migrated.checkpoint)
        codec = definition.phase(phase)
        return Fit(task, definition.input.decode(raw_input), codec.decode(raw_checkpoint), phase, migrated)
    except (_Unmigrated, TaskDefinitionError) as error:
        return Blocked("migration_failed", str(error))
    except Exception as error:  # decoding runs code of the user's types too: its failure blocks this task only
        shapes = "what migrate() returned" if migrated else "what is stored"
        return Blocked(
            "migration_failed", f"{shapes} does not fit the types of version {task.version}: {error_text(error)}"
        )


class _Unmigrated(Exception):
    pass


def _migrate(task: AnyTask, record: TaskRecord) -> StoredTask:
    state = record.state
    assert not isinstance(state, (Completing, Terminal))
    stored = StoredTask(version=record.version, input=record.input, phase=state.phase, checkpoint=state.checkpoint)
    try:
        made = task.migrate(stored)
        copy_json([made.input, made.checkpoint])
    except Exception as error:  # the task's own code: its failure blocks this task only
        raise _Unmigrated(f"migrate() raised {error_text(error)}") from error
    if made.version != task.version:
        raise _Unmigrated(f"no migration leads from version {record.version} to {task.version}")
    return made
