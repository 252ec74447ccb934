"""What models and tools have used: added up attempt by attempt in ``pi.usage``, summed on request (rules H76, H157)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from perdure.harness.documents import ModelTotals, ToolTotals, UsageTotals
from perdure.harness.messages import Usage


def add_attempt(totals: UsageTotals, model: str, usage: Usage | None) -> None:
    """Count one request to ``model`` (``provider:name``) in a draft, and what it used as far as the provider told."""
    if model not in totals.models:
        totals.models[model] = ModelTotals(requests=0, input=0, output=0, cache_read=0, cache_write=0, reasoning=0)
    entry = totals.models[model]
    entry["requests"] += 1
    if usage is None:
        return
    entry["input"] += usage.input
    entry["output"] += usage.output
    entry["cache_read"] += usage.cache_read
    entry["cache_write"] += usage.cache_write
    entry["reasoning"] += usage.reasoning


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """Totals of one conversation or of many. Failed and aborted attempts are in them."""

    models: Mapping[str, ModelTotals] = field(default_factory=dict[str, ModelTotals])
    """Requests and tokens by ``provider:name``."""
    tools: Mapping[str, ToolTotals] = field(default_factory=dict[str, ToolTotals])
    """Calls, and what their results reported, by tool name."""

    @property
    def requests(self) -> int:
        return sum(totals["requests"] for totals in self.models.values())

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


def summed(documents: Iterable[UsageTotals]) -> UsageSummary:
    """The totals of several conversations in one."""
    models: dict[str, ModelTotals] = {}
    tools: dict[str, ToolTotals] = {}
    for document in documents:
        for model, totals in document.models.items():
            models[model] = _add_model(models[model], totals) if model in models else ModelTotals(**totals)
        for tool, used in document.tools.items():
            known = tools.setdefault(tool, ToolTotals(calls=0, usage={}))
            known["calls"] += used["calls"]
            for unit, amount in used["usage"].items():
                known["usage"][unit] = known["usage"].get(unit, 0) + amount
    return UsageSummary(models, tools)


def _add_model(a: ModelTotals, b: ModelTotals) -> ModelTotals:
    return ModelTotals(
        requests=a["requests"] + b["requests"],
        input=a["input"] + b["input"],
        output=a["output"] + b["output"],
        cache_read=a["cache_read"] + b["cache_read"],
        cache_write=a["cache_write"] + b["cache_write"],
        reasoning=a["reasoning"] + b["reasoning"],
    )
