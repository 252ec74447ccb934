"""What tokens cost, from the price list that comes with genai-prices; nothing is asked of the network."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from perdure.harness.messages import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo as Listed

PRICED: Final = {"openai": "openai", "openai-chat": "openai", "anthropic": "anthropic"}
"""The price list's name of a provider, by ours. Other endpoints are found in it by their address."""


@lru_cache(maxsize=1000)
def listed(provider: str, name: str, address: str | None) -> Listed | None:
    """The list's entry; None for a model it does not know. ``address``: of an endpoint that is no provider's own."""
    from genai_prices.data_snapshot import get_snapshot

    known = PRICED.get(provider)
    if known is None and address is None:
        return None
    try:
        _, model = get_snapshot().find_provider_model(name, None, known, None if known else address)
    except LookupError:
        return None
    return model


def price(provider: str, name: str, usage: Usage, *, address: str | None, at: int | None) -> Decimal | None:
    """What one attempt costs in US dollars; None, never 0, without a known price. ``at``: milliseconds UTC, or now."""
    if listed(provider, name, address) is None:
        return None
    from genai_prices import Usage as Tokens
    from genai_prices.data_snapshot import get_snapshot

    known = PRICED.get(provider)
    tokens = Tokens(
        input_tokens=usage.input + usage.cache_read + usage.cache_write,
        cache_read_tokens=usage.cache_read,
        cache_write_tokens=usage.cache_write,
        output_tokens=usage.output,
    )
    when = None if at is None else datetime.fromtimestamp(at / 1000, UTC)
    found = get_snapshot().calc(tokens, name, known, None if known else address, when)
    if found.model_price.input_mtok is None and found.model_price.output_mtok is None:
        return None  # known to the list, but not by what it costs
    return found.total_price
