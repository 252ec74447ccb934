"""The numbered rules in docs/rules: numbered without a gap, and cited only where they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {"K": "kernel.md", "T": "tasks.md", "H": "harness.md", "P": "proof.md", "S": "spaces.md"}
BLOCKS = {
    "S": [1, 100, 130],  # the daemon; its client and providers; the durable mode
    # of all; compaction; hooks and gates; limits; events; telemetry; approvals;
    # repair, reconcile, control; nested calls; coding tools; MCP; deferred responses
    "H": [1, 200, 220, 240, 260, 280, 300, 320, 340, 360, 380, 400],
    "K": [1, 220],  # of all; upkeep
}
"""Where the numbers of a part of the rules begin."""
DEFINITION = re.compile(r"^(?:- |\| )\*\*([KTHPS])(\d+)\*\*", re.MULTILINE)
CITATION = re.compile(r"\b[Rr]ules?((?:(?:,| and| to|-)?\s*[KTHPS]\d[\d.]*)+)")


def defined(letter: str) -> list[int]:
    text = (ROOT / "docs" / "rules" / FILES[letter]).read_text(encoding="utf-8")
    found = DEFINITION.findall(text)
    assert {other for other, _ in found} == {letter}
    return [int(number) for _, number in found]


@pytest.mark.parametrize("letter", sorted(FILES))
def test_every_number_is_given_once_and_none_is_left_out(letter: str) -> None:
    firsts = BLOCKS.get(letter, [1])
    numbers = sorted(defined(letter))
    for first, following in zip(firsts, [*firsts[1:], 10_000], strict=True):
        block = [number for number in numbers if first <= number < following]
        assert block == list(range(first, first + len(block)))


def test_every_cited_rule_exists() -> None:
    rules = {f"{letter}{number}" for letter in FILES for number in defined(letter)}
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/*.md")]
    missing = [
        f"{path.relative_to(ROOT)}: {number}"
        for path in sources
        for cited in CITATION.findall(path.read_text(encoding="utf-8"))
        for number in re.findall(r"[KTHPS]\d+(?:\.\d+)*", cited)
        if number not in rules
    ]
    assert missing == []
