"""Transcripts sent by OpenAI's SDK as they are made, but for contents that are null.

It would hold every field against the types of its parameters first, which takes longer than a millisecond a message,
and all the while stops everything else in the process. What is in ``extra_body`` it leaves alone.

The library says of an answer without words that its content is null. No server needs that, and some refuse it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, cast

from openai import AsyncOpenAI

Create: TypeAlias = Callable[..., Awaitable[object]]
"""One of the SDK's methods with dozens of parameters."""


def send_as_is(client: AsyncOpenAI) -> None:
    """For both APIs, on this client alone."""
    vars(client.responses)["create"] = _sparing(client.responses.create, "input")
    vars(client.chat.completions)["create"] = _sparing(client.chat.completions.create, "messages")


def _sparing(create: Create, transcript: str) -> Create:
    async def sparing(**given: object) -> object:
        body = cast("Mapping[str, object] | None", given.get("extra_body"))
        items = cast("Sequence[Mapping[str, object]]", given[transcript])
        given["extra_body"] = {**(body or {}), transcript: [_without_null(item) for item in items]}
        given[transcript] = []
        return await create(**given)

    return sparing


def _without_null(item: Mapping[str, object]) -> Mapping[str, object]:
    if "content" not in item or item["content"] is not None:
        return item
    return {name: value for name, value in item.items() if name != "content"}
