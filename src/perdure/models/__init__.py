"""Models of real providers, through pydantic-ai (rules H170, H179). Importing this imports no provider.

    models = ProviderModels("anthropic:claude-sonnet-4-5")
    async with Harness.open(storage, models=models) as harness: ...

It is installed with ``pip install 'perdure[models]'``.
"""

from __future__ import annotations

from perdure.models.endpoints import Endpoint
from perdure.models.provider import MissingExtra, ProviderModels

__all__ = ["Endpoint", "MissingExtra", "ProviderModels"]
