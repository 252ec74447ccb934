"""What the rooms of a harness share: the session, the settings, the code at hand, the contexts in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from perdure.harness.contexts import Contexts
from perdure.harness.hook_runner import HookRunner
from perdure.harness.limits import LimitCheck
from perdure.harness.model import Answers, Models
from perdure.harness.progress import ProgressWriter
from perdure.harness.registry import Registry
from perdure.harness.settings import Settings
from perdure.kernel.records import TaskRecord
from perdure.kernel.session import Session

if TYPE_CHECKING:
    from perdure.harness.tracing import Tracing  # it names runs, which begin with a Host


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Made by ``Harness.open``, once."""

    session: Session
    settings: Settings
    models: Models | None
    registry: Registry
    hooks: HookRunner
    contexts: Contexts
    progress: ProgressWriter
    limits: LimitCheck
    is_blocked: Callable[[int], bool]
    """Whether a task cannot run though it is due, so that waiting for it may take for ever."""
    tracing: Tracing | None = None
    """None: without telemetry."""

    def asked_for(self, record: TaskRecord) -> Answers:
        """Whom a task asks for an answer; what is asked is told to telemetry."""
        assert self.models is not None, "a request is built for a model that is there"
        return self.models if self.tracing is None else self.tracing.asked_for(self.models, record)
