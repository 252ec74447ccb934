"""What a run has used, in one line."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from perdure.cli.style import Line, line
from perdure.harness.usage import UsageSummary

LEAST: Final = Decimal("0.001")
"""Dollars; what is less would be shown as nothing."""


def spent(before: UsageSummary, after: UsageSummary) -> Line:
    """The difference between two totals of a conversation, and the newer total; of the cost that alone, if known."""
    was, now = before.tokens, after.tokens
    words = [f"{now.input - was.input:,} in"]
    if cached := now.cache_read - was.cache_read:
        words.append(f"{cached:,} read from cache")
    if written := now.cache_write - was.cache_write:
        words.append(f"{written:,} written to cache")
    words.append(f"{now.output - was.output:,} out")
    if reasoning := now.reasoning - was.reasoning:
        words.append(f"{reasoning:,} of it thinking")
    total = now.input + now.cache_read + now.cache_write + now.output
    words.append(f"{total:,} tokens in all")
    if after.cost is not None:
        cost = "less than $0.001" if 0 < after.cost < LEAST else f"${after.cost:.3f}"
        missing = f", {after.unpriced:,} of {after.requests:,} requests not counted" if after.unpriced else ""
        words.append(f"{cost} in all{missing}")
    return line(f"  {' · '.join(words)}", "dim")
