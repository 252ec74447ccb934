"""What tests of hooks share: a harness with hooks, a model that keeps what it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kit import Reports, opened

from perdure.harness.conversation import Conversation
from perdure.harness.harness import Harness
from perdure.harness.hooks import Hook
from perdure.harness.messages import Text, UserMessage
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension
from perdure.harness.tool import tool
from perdure.testing.model import ScriptedModel


@tool
async def look(at: int) -> str:
    """Look."""
    return f"seen {at}"


def user(text: str) -> UserMessage:
    return UserMessage((Text(text),))


class Ear:
    """A model that keeps what it is asked."""

    def __init__(self, replies, *, pace=None) -> None:
        self.asked: list[ModelRequest] = []
        self._model = ScriptedModel(replies, pace=pace)

    default = "test:scripted"

    def find(self, model: str):
        return self._model.find(model)

    def stream(self, request: ModelRequest):
        self.asked.append(request)
        return self._model.stream(request)


@asynccontextmanager
async def world(
    model, *hooks: Hook, reports: Reports | None = None, **options
) -> AsyncIterator[tuple[Harness, Conversation]]:
    async with opened(
        model, tools=(look,), extensions=[Extension("hooks", hooks=hooks)], reports=reports, **options
    ) as harness:
        yield harness, await harness.root()


def names(reports: Sequence) -> list[str]:
    return [report.message.split(": ")[1].split(" raised")[0] for report in reports if report.type == "hook_failed"]
