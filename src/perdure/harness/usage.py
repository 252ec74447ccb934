"""What models and tools have used, added up attempt by attempt in ``pi.usage`` (rules H76, H157, H158, H240, H241).

Costs are added as integers, billionths of a dollar: a token of the cheapest models costs some tens of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import cast

import msgspec
from msgspec import structs

from perdure.harness.documents import DeletedUsage, ModelTotals, ToolTotals, UsageTotals
from perdure.harness.messages import Usage


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a model, and what is known of it."""

    model: str
    """``provider:name``."""
    at: int
    """When it was sent, in milliseconds UTC."""
    usage: Usage | None = None
    """As far as the provider told."""
    cost: int | None = None
    """Billionths of a US dollar; None: not known."""


MOST_TOKENS = 10**9
"""What an attempt may have used of one kind; more is no count. A total of a billion such still fits its 64 bits."""


def countable(usage: object) -> Usage | None:
    """What a provider told of an attempt, or None for what no totals can hold: adapters pass on what servers say."""
    if not isinstance(usage, Usage):
        return None
    for count in cast("tuple[object, ...]", structs.astuple(usage)):
        if type(count) is not int or not 0 <= count <= MOST_TOKENS:
            return None
    return usage


def add_attempt(totals: UsageTotals, attempt: Attempt) -> None:
    """Count the attempt in a draft, with what it used and cost."""
    model, usage = attempt.model, countable(attempt.usage)
    if model not in totals.models:
        totals.models[model] = ModelTotals(
            requests=0, input=0, output=0, cache_read=0, cache_write=0, reasoning=0, unpriced=0
        )
    entry = totals.models[model]
    unpriced = unpriced_of(entry)
    entry["unpriced"] = unpriced + 1 if attempt.cost is None else unpriced
    entry["requests"] += 1
    if attempt.cost is not None:
        entry["cost_nano_usd"] = entry.get("cost_nano_usd", 0) + attempt.cost
    if usage is None:
        return
    entry["input"] += usage.input
    entry["output"] += usage.output
    if usage.cache_read:
        entry["cache_read"] += usage.cache_read
    if usage.cache_write:
        entry["cache_write"] += usage.cache_write
    if usage.reasoning:
        entry["reasoning"] += usage.reasoning


def unpriced_of(totals: ModelTotals) -> int:
    return totals.get("unpriced", totals["requests"])


class UsageSummary(msgspec.Struct, frozen=True):
    """Totals of one conversation or of many. Failed and aborted attempts are in them."""

    models: Mapping[str, ModelTotals] = msgspec.field(default_factory=dict[str, ModelTotals])
    """Requests, tokens and cost by ``provider:name``."""
    tools: Mapping[str, ToolTotals] = msgspec.field(default_factory=dict[str, ToolTotals])
    """Calls, and what their results reported, by tool name."""
    turns: int = 0
    """Responses of models in runs. A summary is none of them."""
    run_ms: int = 0
    """Time in runs that have ended, with what they waited for; milliseconds."""

    @property
    def requests(self) -> int:
        return sum(totals["requests"] for totals in self.models.values())

    @property
    def costs(self) -> Mapping[str, Decimal]:
        """US dollars by ``provider:name``, of the models of which a price is known (rule H158)."""
        return {
            model: _dollars(totals["cost_nano_usd"])
            for model, totals in self.models.items()
            if "cost_nano_usd" in totals
        }

    @property
    def cost(self) -> Decimal | None:
        """US dollars, of all attempts whose price is known: all but ``unpriced``. None, never 0, if that is none."""
        known = [totals["cost_nano_usd"] for totals in self.models.values() if "cost_nano_usd" in totals]
        return _dollars(sum(known)) if known else None

    @property
    def unpriced(self) -> int:
        """Requests that ``cost`` leaves out: the price of the model is not known, or what they used was not told."""
        return sum(map(unpriced_of, self.models.values()))

    @property
    def tokens(self) -> Usage:
        """Of all models together."""
        return sum(
            (
                Usage(
                    input=totals["input"],
                    output=totals["output"],
                    cache_read=totals["cache_read"],
                    cache_write=totals["cache_write"],
                    reasoning=totals["reasoning"],
                )
                for totals in self.models.values()
            ),
            Usage(),
        )


def summed(documents: Iterable[UsageTotals | DeletedUsage]) -> UsageSummary:
    """The totals of several conversations in one."""
    models: dict[str, ModelTotals] = {}
    tools: dict[str, ToolTotals] = {}
    turns = run_ms = 0
    for document in documents:
        turns += document.turns
        run_ms += document.run_ms
        for model, totals in document.models.items():
            models[model] = _add_model(models[model], totals) if model in models else ModelTotals(**totals)
        for tool, used in document.tools.items():
            known = tools.setdefault(tool, ToolTotals(calls=0, usage={}))
            known["calls"] += used["calls"]
            for unit, amount in used["usage"].items():
                known["usage"][unit] = known["usage"].get(unit, 0) + amount
    return UsageSummary(models, tools, turns, run_ms)


def _dollars(nano: int) -> Decimal:
    return Decimal(f"{nano}e-9")  # exact; arithmetic would round as the thread's context says


def _add_model(a: ModelTotals, b: ModelTotals) -> ModelTotals:
    both = ModelTotals(
        requests=a["requests"] + b["requests"],
        input=a["input"] + b["input"],
        output=a["output"] + b["output"],
        cache_read=a["cache_read"] + b["cache_read"],
        cache_write=a["cache_write"] + b["cache_write"],
        reasoning=a["reasoning"] + b["reasoning"],
        unpriced=unpriced_of(a) + unpriced_of(b),
    )
    if "cost_nano_usd" in a or "cost_nano_usd" in b:
        both["cost_nano_usd"] = a.get("cost_nano_usd", 0) + b.get("cost_nano_usd", 0)
    return both
