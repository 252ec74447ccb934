"""The line of what a run has used says what it cost, as far as that is known (rule H158)."""

from __future__ import annotations

import pytest

from perdure.cli.chat.usage import spent
from perdure.cli.style import rendered
from perdure.harness.documents import ModelTotals
from perdure.harness.usage import UsageSummary


def told(requests: int, unpriced: int, nano: int | None) -> str:
    totals = ModelTotals(
        requests=requests, input=9, output=1, cache_read=0, cache_write=0, reasoning=0, unpriced=unpriced
    )
    if nano is not None:
        totals["cost_nano_usd"] = nano
    return rendered(spent(UsageSummary(), UsageSummary(models={"test:m": totals})), "none")


@pytest.mark.parametrize(
    ("requests", "unpriced", "nano", "words"),
    [
        (2, 2, None, ""),
        (2, 0, 12_345_600_000, " · $12.346 in all"),
        (2, 0, 20_000, " · less than $0.001 in all"),
        (2, 0, 0, " · $0.000 in all"),
        (2, 1, 1_000_000, " · $0.001 in all, 1 of 2 requests not counted"),
    ],
)
def test_a_known_cost_is_told_and_what_it_leaves_out_h158(
    requests: int, unpriced: int, nano: int | None, words: str
) -> None:
    assert told(requests, unpriced, nano) == f"  9 in · 1 out · 10 tokens in all{words}"
