"""docs/coverage.md and the guide's page of guarantees: what they name as proof is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COVERAGE = ROOT / "docs" / "coverage.md"
PAGES = [COVERAGE, ROOT / "docs" / "guide" / "what-is-guaranteed.md"]
ROW = re.compile(r"^\| (?!(?:promise|fault) )(?P<promise>[^|]+) \| [^|]+ \| (?P<shown>[^|]+) \|$", re.MULTILINE)
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


def test_every_row_names_a_test_or_a_command() -> None:
    page = COVERAGE.read_text(encoding="utf-8")
    rows = list(ROW.finditer(page))
    heads = page.count("\n|---|---|---|\n")
    assert len(rows) == sum(line.startswith("|") for line in page.splitlines()) - 2 * heads, "a row has three cells"
    shown = re.compile(r"`(tests/|make |perdure )")
    assert [row["promise"] for row in rows if not shown.search(row["shown"])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_promise_rests_on_what_is_only_planned(page: Path) -> None:
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "rules").glob("*.md"))
    planned = {
        number for number, text in re.findall(r"\*\*([KTHPS]\d+)\*\*(.*(?:\n  .*)*)", rules) if "*(planned)*" in text
    }
    assert planned
    named = set(re.findall(r"\b[KTHPS]\d+\b", page.read_text(encoding="utf-8")))
    assert named & planned == set()
