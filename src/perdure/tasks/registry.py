"""The code at hand, by kind. It may change while tasks run (rules T30, T33, T34)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from perdure.tasks.definition import Task
from perdure.tasks.errors import TaskDefinitionError

AnyTask: TypeAlias = Task[Any, Any]
"""A definition whose types are its own business."""


class TaskRegistry:
    """One definition a kind. ``install`` and ``remove`` take effect at once; a running phase ends with its old code."""

    def __init__(self) -> None:
        self._tasks: dict[str, AnyTask] = {}
        self._observers: list[Callable[[], None]] = []

    def install(self, *tasks: AnyTask | type[AnyTask]) -> None:
        """Put definitions in place, whole or not at all; one of a kind already there is replaced.

        A class is made an instance without arguments; pass an instance if it needs some.
        Raises TaskDefinitionError, before anything is changed, if a type or phase of one cannot be resolved.
        """
        ready: dict[str, AnyTask] = {}
        for task in tasks:
            cls = task if isinstance(task, type) else type(task)
            if getattr(cls, "definition", None) is None:
                raise TaskDefinitionError(
                    f"{cls.__name__} names no kind; write class {cls.__name__}(..., kind='app.name')"
                )
            if cls.kind in ready:
                raise TaskDefinitionError(f"two definitions of {cls.kind} in one call")
            cls.definition.check()
            ready[cls.kind] = task() if isinstance(task, type) else task
        self._tasks.update(ready)
        self._changed()

    def remove(self, kind: str) -> None:
        """Take a definition out; nothing happens if there is none."""
        if self._tasks.pop(kind, None) is not None:
            self._changed()

    def find(self, kind: str) -> AnyTask | None:
        return self._tasks.get(kind)

    def on_change(self, observer: Callable[[], None]) -> None:
        """Call this after each change."""
        self._observers.append(observer)

    def _changed(self) -> None:
        for observer in self._observers:
            observer()
