"""Chat Completions as servers other than OpenAI's speak it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from openai.types.chat.chat_completion_chunk import Choice
from pydantic_ai.messages import ModelResponseStreamEvent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIStreamedResponse
from typing_extensions import override


@dataclass
class _Stream(OpenAIStreamedResponse):
    """Some servers tell a call's name again with each piece of its arguments; the library would add it up."""

    _names: dict[int, str] = field(default_factory=dict[int, str], init=False)
    """By the call's index, as it was told first."""

    @override
    def _map_tool_call_delta(self, choice: Choice) -> Iterable[ModelResponseStreamEvent]:
        for delta in choice.delta.tool_calls or ():
            if delta.function is not None and delta.function.name:
                first = self._names.get(delta.index)
                if first is None:
                    self._names[delta.index] = delta.function.name
                elif delta.function.name == first:
                    delta.function.name = None
        return super()._map_tool_call_delta(choice)


class ChatModel(OpenAIChatModel):
    @property
    @override
    def _streamed_response_cls(self) -> type[OpenAIStreamedResponse]:
        return _Stream
