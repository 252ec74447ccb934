"""Models of real providers, through pydantic-ai (rules H170, H179). Importing this imports no provider.

    models = ProviderModels("anthropic:claude-sonnet-5")
    async with Harness.open(storage, models=models) as harness: ...

or, with the key in the environment, ``Harness.open(storage, models="anthropic:claude-sonnet-5")``. It is installed
with ``pip install 'perdure[models]'``. What models of one's own are sent and answer is here too, beside the protocol
``perdure.Models``.

What the prompt says anew in the middle of a conversation is told where it changed, so that provider's caches keep
hitting: as a system message to models that are known to take one there, at their provider's own address; else as a
note in the user's turn, marked as the application's (``Endpoint.system_messages`` decides otherwise). A note has the
weight of a user's words, so what users must not override belongs into the first instructions.
"""

from __future__ import annotations

from perdure.harness.model import (
    Deferred,
    DeferredFailed,
    Defers,
    Finished,
    ModelEvent,
    ModelInfo,
    Price,
    Priced,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolSpec,
)
from perdure.models.endpoints import Endpoint
from perdure.models.provider import MissingExtra, ProviderModels

__all__ = [
    "Deferred",
    "DeferredFailed",
    "Defers",
    "Endpoint",
    "Finished",
    "MissingExtra",
    "ModelEvent",
    "ModelInfo",
    "Price",
    "Priced",
    "ProviderModels",
    "TextDelta",
    "ThinkingDelta",
    "ToolCallDelta",
    "ToolSpec",
]
