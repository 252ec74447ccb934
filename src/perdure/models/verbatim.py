"""Transcripts sent by OpenAI's SDK as they are made.

It would hold every field against the types of its parameters first, which takes longer than a millisecond a message,
and all the while stops everything else in the process. What is in ``extra_body`` it leaves alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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
        given["extra_body"] = {**(body or {}), transcript: given[transcript]}
        given[transcript] = []
        return await create(**given)

    return sparing
