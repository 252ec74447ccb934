"""The roadmap says exactly what the rules call planned."""

from __future__ import annotations

import re

from snippets import ROOT

RULE = re.compile(r"^(?:- |\| )\*\*([KTHPS]\d+)\*\*(.*(?:\n  .*)*)", re.MULTILINE)
SPAN = re.compile(r"\b([KTHPS])(\d+)(?:\s+to\s+[KTHPS](\d+))?\b")


def test_the_roadmap_names_every_planned_rule_and_no_other() -> None:
    pages = sorted((ROOT / "docs" / "rules").glob("*.md"))
    planned = {
        number
        for page in pages
        for number, text in RULE.findall(page.read_text(encoding="utf-8"))
        if "*(planned)*" in text
    }
    assert planned
    named: set[str] = set()
    for letter, first, last in SPAN.findall((ROOT / "ROADMAP.md").read_text(encoding="utf-8")):
        named |= {f"{letter}{number}" for number in range(int(first), int(last or first) + 1)}
    assert named == planned
