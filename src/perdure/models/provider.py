"""The Models of real providers: which there are, what is known of them, and requests passed on to the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from perdure.harness.messages import Usage
from perdure.harness.model import Deferred, Finished, ModelError, ModelEvent, ModelInfo, ModelRequest, NoAdapter
from perdure.kernel.json import JsonValue
from perdure.models.endpoints import BUILT_IN, Endpoint, Protocol, installed
from perdure.models.prices import PRICED, listed, price

if TYPE_CHECKING:
    from perdure.models.exchange import Exchange

UNKNOWN_WINDOW: Final = 128_000
"""Tokens, of a model that neither the host's catalogue nor the price list tells of."""
UNKNOWN_OUTPUT: Final = 32_000
"""Tokens, at most a quarter of the window, of a model that the host's catalogue does not tell of."""


class MissingExtra(NoAdapter):
    """The packages that reach providers are not installed."""


class ProviderModels:
    """Every model of the built-in endpoints, and of those given.

    ``openai`` is asked through the Responses API, ``openai-chat`` through Chat Completions, like
    ``openai-compatible``, which is any server that copied it; ``anthropic`` through the Messages API.

    default: ``provider:name`` for conversations whose agent names none; None: they must name one.
    base_url, api_key, settings, background: of the default's endpoint; see Endpoint. Without an address or a key the
        environment's counts: ``OPENAI_API_KEY`` and ``OPENAI_BASE_URL``, ``ANTHROPIC_API_KEY`` and
        ``ANTHROPIC_BASE_URL``, ``OPENAI_COMPATIBLE_API_KEY`` (if there is one) and ``OPENAI_COMPATIBLE_BASE_URL``. It
        is read at every request.
    endpoints: more, or others in place of built-in ones of the same name.
    catalogue: what the host knows better of single models than the price list, such as the window of a local one.
    connect_ms: how long a connection may take.
    stall_ms: how long an answer may stay silent, also before its first word; providers that think for minutes send
        signs of life. Then the request failed with ``connection``.
    deadline_ms: how long a request may take in all.

    A thinking level that a model has not becomes the nearest that it has. A model that is not known to think, such as
    one behind a server of one's own, is asked without: there ``settings`` say what its server wants.

    Each request has a connection of its own, which closing its stream closes; there is nothing to close here.

    Raises MissingExtra, and ValueError for a default that no endpoint serves.
    """

    def __init__(
        self,
        default: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        settings: Mapping[str, JsonValue] | None = None,
        background: bool | None = None,
        endpoints: Sequence[Endpoint] = (),
        catalogue: Sequence[ModelInfo] = (),
        connect_ms: int = 15_000,
        stall_ms: int = 300_000,
        deadline_ms: int = 3_600_000,
    ) -> None:
        for package in ("pydantic_ai", "genai_prices", "httpx2"):
            if not installed(package):
                raise MissingExtra(f"{package} is not installed; pip install 'perdure[models]'")
        for option, value in (("connect_ms", connect_ms), ("stall_ms", stall_ms), ("deadline_ms", deadline_ms)):
            if value < 1:
                raise ValueError(f"{option} must be at least 1, not {value}")
        names = [endpoint.name for endpoint in endpoints]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"there are several endpoints named {name!r}")
        self._endpoints = {endpoint.name: endpoint for endpoint in (*BUILT_IN, *endpoints)}
        self._default = default
        self._catalogue = {info.id: info for info in catalogue}
        self._limits = (connect_ms, stall_ms, deadline_ms)
        if default is not None:
            name, _, model = default.partition(":")
            if not (name and model):
                raise ValueError(f"a model is named 'provider:name', not {default!r}")
            if name not in self._endpoints:
                known = ", ".join(sorted(self._endpoints))
                raise ValueError(f"there is no endpoint {name!r}; there are: {known}")
            self._endpoints[name] = _changed(self._endpoints[name], base_url, api_key, settings, background)
            self._check(self._endpoints[name])
        elif any(value is not None for value in (base_url, api_key, settings, background)):
            raise ValueError(
                "base_url, api_key, settings and background are those of the default's endpoint; there is no default"
            )
        # The list is read now, not within the commit that first asks for a model.
        listed("openai", "gpt-5", None)

    @staticmethod
    def _check(endpoint: Endpoint) -> None:
        if not installed(endpoint.sdk):
            raise MissingExtra(f"{endpoint.sdk} is not installed; pip install 'perdure[models]'")
        if not endpoint.reachable:
            variable = f", or set {endpoint.url_variable}" if endpoint.url_variable else ""
            raise ValueError(f"where is {endpoint.name}? Pass base_url{variable}")

    @override
    def __repr__(self) -> str:
        return f"<ProviderModels, default {self._default!r}, endpoints {', '.join(sorted(self._endpoints))}>"

    @property
    def default(self) -> str | None:
        return self._default

    def find(self, model: str) -> ModelInfo | None:
        """Any name an endpoint is asked for counts as one it has: only the provider knows. None: no such endpoint.

        What neither the catalogue nor the price list tells is UNKNOWN_WINDOW and UNKNOWN_OUTPUT.
        """
        stated = self._catalogue.get(model)
        provider, _, name = model.partition(":")
        endpoint = self._endpoints.get(provider)
        if endpoint is None or not name or not endpoint.reachable:
            return None
        if stated is not None:
            return stated
        entry = listed(provider, name, _listed_at(endpoint))
        window = (entry and entry.context_window) or UNKNOWN_WINDOW
        return ModelInfo(
            provider=provider, name=name, context_window=window, max_output=min(UNKNOWN_OUTPUT, window // 4)
        )

    def price(self, model: str, usage: Usage, *, at: int | None = None) -> Decimal | None:
        """What one attempt cost in US dollars (rule H158); None, never 0, if the model's price is not known.

        Of one attempt: prices rise with the length of a request, so that of a sum would be wrong.
        ``at``: when it was, in milliseconds UTC; None: now.
        """
        provider, _, name = model.partition(":")
        endpoint = self._endpoints.get(provider)
        if endpoint is None or not name:
            return None
        return price(provider, name, usage, address=_listed_at(endpoint), at=at)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Ask the model. Providers are imported when the first is asked, in a thread, so that nothing stands still."""
        exchange, name = await self._exchange(request.model)
        if exchange.endpoint.background and request.may_defer:
            yield await exchange.begin(request, name)
            return
        async with aclosing(exchange.stream(request, name)) as events:
            async for event in events:
                yield event

    async def fetch_deferred(self, model: str, handle: str, /) -> Deferred | Finished:
        """The answer that an endpoint makes in the background, or the handle again while there is none (rule H408).

        Raises DeferredFailed if there will be none: ``expired`` if the provider does not have it any more.
        """
        exchange, name = await self._exchange(model)
        return await exchange.fetch(name, handle)

    async def cancel_deferred(self, model: str, handle: str, /) -> None:
        """Tell the provider that nobody wants that answer any more. Raises ModelError if it cannot be told."""
        exchange, name = await self._exchange(model)
        await exchange.cancel(name, handle)

    async def _exchange(self, model: str) -> tuple[Exchange, str]:
        """With the model's endpoint, and the model's name there."""
        provider, _, name = model.partition(":")
        endpoint = self._endpoints.get(provider)
        if endpoint is None or not name:
            raise ModelError("other", f"there is no endpoint for the model {model!r}")
        if endpoint.protocol not in _loaded:
            await asyncio.to_thread(_load, endpoint.protocol)
        from perdure.models.exchange import Exchange

        connect_ms, stall_ms, deadline_ms = self._limits
        exchange = Exchange(endpoint=endpoint, connect_ms=connect_ms, stall_ms=stall_ms, deadline_ms=deadline_ms)
        return exchange, name


_loaded: set[Protocol] = set()
"""What was imported to the end; sys.modules tells of what has begun."""


def _load(protocol: Protocol) -> None:
    from perdure.models import connect
    from perdure.models.exchange import Exchange as _  # noqa: F401

    connect.load(protocol)
    _loaded.add(protocol)


def _changed(
    endpoint: Endpoint,
    base_url: str | None,
    api_key: str | None,
    settings: Mapping[str, JsonValue] | None,
    background: bool | None,
) -> Endpoint:
    return replace(
        endpoint,
        base_url=endpoint.base_url if base_url is None else base_url,
        api_key=endpoint.api_key if api_key is None else api_key,
        settings=endpoint.settings if settings is None else settings,
        background=endpoint.background if background is None else background,
    )


def _listed_at(endpoint: Endpoint) -> str | None:
    """The address by which the price list knows an endpoint that is not a provider's own."""
    return None if endpoint.name in PRICED else endpoint.address
