"""What the rooms of a harness share: the session, the settings, the code at hand, the contexts in memory."""

from __future__ import annotations

import msgspec

from perdure.harness.contexts import Contexts
from perdure.harness.hook_runner import HookRunner
from perdure.harness.limits import LimitCheck
from perdure.harness.model import Models
from perdure.harness.progress import ProgressWriter
from perdure.harness.registry import Registry
from perdure.harness.settings import Settings
from perdure.kernel.session import Session


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
