"""docs/coverage.md: what it names as proof is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "coverage.md"
NAMED = re.compile(r"`(tests/[^`]+)`")


def test_every_test_that_is_named_is_there() -> None:
    missing: list[str] = []
    for named in NAMED.findall(PAGE.read_text(encoding="utf-8")):
        path, _, test = named.partition("::")
        there = (ROOT / path).exists()
        if not there or (test and f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8")):
            missing.append(named)
    assert missing == []


def test_every_rule_that_is_named_is_there() -> None:
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "rules").glob("*.md"))
    named = set(re.findall(r"\b[KTHPS]\d+\b", PAGE.read_text(encoding="utf-8")))
    assert [number for number in sorted(named) if f"**{number}**" not in rules] == []
