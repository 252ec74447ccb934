"""docs/coverage.md and the guide's page of guarantees: what they name as proof is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "docs" / "coverage.md", ROOT / "docs" / "guide" / "what-is-guaranteed.md"]
NAMED = re.compile(r"`(tests/[^`]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_is_named_is_there(page: Path) -> None:
    missing: list[str] = []
    for named in NAMED.findall(page.read_text(encoding="utf-8")):
        path, _, test = named.partition("::")
        there = (ROOT / path).exists()
        if not there or (test and f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8")):
            missing.append(named)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_rule_that_is_named_is_there(page: Path) -> None:
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "rules").glob("*.md"))
    named = set(re.findall(r"\b[KTHPS]\d+\b", page.read_text(encoding="utf-8")))
    assert [number for number in sorted(named) if f"**{number}**" not in rules] == []
