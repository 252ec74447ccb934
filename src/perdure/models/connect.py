"""pydantic-ai's model for an endpoint, with a connection that lasts as long as one request."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

import httpx2
from pydantic_ai.models import Model

from perdure.harness.model import ModelError
from perdure.models.endpoints import COMPATIBLE, OWN, Endpoint, Protocol, is_address

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from pydantic_ai.providers import Provider as LibraryProvider

NO_KEY: Final = "no-key"
"""Sent where no key is wanted: the SDK insists on one."""

_OPENAIS: Final = re.compile(r"(?:[^/]*/)?(?:gpt-(?!oss)|chatgpt-|o\d)")
"""Models that are OpenAI's wherever they are served."""

LIBRARY: Final[dict[Protocol, tuple[str, ...]]] = {
    "openai": (
        "pydantic_ai.models.openai",
        "pydantic_ai.providers.openai",
        "pydantic_ai.providers.openai_compatible",
        "perdure.models.chat",
        "perdure.models.verbatim",
    ),
    "anthropic": ("pydantic_ai.models.anthropic", "pydantic_ai.providers.anthropic"),
}
LIBRARY["openai-chat"] = LIBRARY["openai"]


def load(protocol: Protocol) -> None:
    """Import what speaks the protocol, and read what it trusts."""
    _trust()
    for module in LIBRARY[protocol]:
        import_module(module)


@asynccontextmanager
async def connected(
    endpoint: Endpoint,
    name: str,
    *,
    connect_ms: int,
    stall_ms: int,
    on_response: Callable[[httpx2.Response], Awaitable[None]],
) -> AsyncGenerator[Model]:
    """The library's model, usable within the block. Raises ModelError without a key where one is needed.

    ``on_response`` is called when the provider begins to answer.
    """
    if not endpoint.reachable:
        raise ModelError("other", f"{endpoint.name} has no address, or {endpoint.sdk} is not installed")
    if endpoint.address is not None and not is_address(endpoint.address):
        set_it = f"set {endpoint.url_variable} to one" if endpoint.url_variable else "pass another base_url"
        raise ModelError("other", f"the address of {endpoint.name} is none, like https://host/v1: {set_it}")
    key = endpoint.key
    if key is None:
        if endpoint.name in OWN or (endpoint.key_variable is not None and endpoint.name != COMPATIBLE):
            raise ModelError("authentication", f"{endpoint.name} needs a key: {endpoint.key_hint}")
        key = NO_KEY
    if not (key.isascii() and key.isprintable()):
        # A line end at its end, mostly. It cannot be sent, which would look like a connection that fails.
        raise ModelError(
            "authentication", f"the key for {endpoint.name} has characters that none has: {endpoint.key_hint}"
        )
    timeout = httpx2.Timeout(stall_ms / 1000, connect=connect_ms / 1000)
    async with httpx2.AsyncClient(
        timeout=timeout, verify=_trust(), follow_redirects=True, event_hooks={"response": [on_response]}
    ) as http:
        if endpoint.protocol == "anthropic":
            yield _anthropic(endpoint, name, key, http)
        else:
            yield _openai(endpoint, name, key, http)


@cache
def _trust() -> ssl.SSLContext:
    """Reading the certificates takes longer than a request's other preparations together."""
    return httpx2.create_ssl_context()


def _anthropic(endpoint: Endpoint, name: str, key: str, http: httpx2.AsyncClient) -> Model:
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    # Retries are the harness's: what the SDK resends nobody counts.
    client = AsyncAnthropic(api_key=key, base_url=endpoint.address, http_client=http, max_retries=0)
    return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))


def _openai(endpoint: Endpoint, name: str, key: str, http: httpx2.AsyncClient) -> Model:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    from perdure.models.chat import ChatModel
    from perdure.models.verbatim import send_as_is

    client = AsyncOpenAI(api_key=key, base_url=endpoint.address, http_client=http, max_retries=0)
    send_as_is(client)
    provider: LibraryProvider[AsyncOpenAI] = (
        OpenAIProvider(openai_client=client)
        if endpoint.name in OWN
        else OpenAICompatibleProvider(endpoint.name, openai_client=client)
    )
    if endpoint.protocol == "openai":
        return OpenAIResponsesModel(name, provider=provider)
    # The newer name of the limit is the only one that OpenAI's newer models take, and that older servers do not know:
    # those ignore it, and go on for ever.
    newer = endpoint.name in OWN or _OPENAIS.match(name) is not None
    profile = OpenAIModelProfile(openai_chat_supports_max_completion_tokens=newer)
    return ChatModel(name, provider=provider, profile=profile)
