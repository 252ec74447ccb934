"""Models whose streams stop short on cue (rule P4). That a request fails, a script says itself: ``model.fail``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Literal, TypeAlias

from perdure.harness.model import Finished, ModelEvent, ModelInfo, ModelRequest, Models

Cue: TypeAlias = Literal["stall", "truncate"]
"""``stall``: nothing more ever comes. ``truncate``: the stream ends without its message."""


class FaultyModels:
    """``cue(request)`` says what is to go wrong, after so many events; None: nothing. It must depend on the request
    alone."""

    def __init__(self, models: Models, cue: Callable[[ModelRequest], Cue | None], *, after: int = 1) -> None:
        self._models = models
        self._cue = cue
        self._after = after

    @property
    def default(self) -> str | None:
        return self._models.default

    def find(self, model: str) -> ModelInfo | None:
        return self._models.find(model)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        cue = self._cue(request)
        count = 0
        async for event in self._models.stream(request):
            if cue is not None and (count == self._after or isinstance(event, Finished)):
                if cue == "stall":
                    await asyncio.get_running_loop().create_future()
                return
            yield event
            count += 1
