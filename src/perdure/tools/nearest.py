"""Where a text that does not occur in a file comes nearest to it: what a model needs to correct its edit. Pure."""

from __future__ import annotations

import difflib

_COMPARED = 3000
"""Lines of a file that are compared with the text; further on only the same line is found, not one that is like it."""
_LONGEST = 200
"""Characters of a line that are compared and shown."""
_ALIKE = 0.6
"""Below that likeness (0 to 1) lines have nothing to do with each other."""
_CANDIDATES = 20
_CLOSELY = 50
"""Lines that are compared character by character; it is done on the event loop."""


def nearest(data: bytes, old: bytes) -> str | None:
    """Which line of the file is where the text departs from it, in words. None: nothing of the text is like it."""
    wanted = [line.decode("utf-8", "replace") for line in old.split(b"\n")]
    while wanted and not wanted[0].strip():
        wanted.pop(0)
    if not wanted:
        return None
    lines = [line.decode("utf-8", "replace") for line in data.split(b"\n")]
    first = wanted[0].strip()
    same = [index for index, line in enumerate(lines) if first in line or line.strip() == first]
    if same:
        # Of the places where it begins the same, the one where it goes on so for longest.
        at, agreed = max(
            ((index, _agreeing(lines, index, wanted)) for index in same[:_CANDIDATES]), key=lambda place: place[1]
        )
        index = min(at + agreed, len(lines) - 1)
        return _departs(index, lines[index], wanted[min(agreed, len(wanted) - 1)])
    best = _most_alike(lines[:_COMPARED], first)
    return None if best is None else _departs(best, lines[best], wanted[0])


def _agreeing(lines: list[str], start: int, wanted: list[str]) -> int:
    """How many lines from there are the text's, the first and the last perhaps in part."""
    count = 0
    last = len(wanted) - 1
    for number, line in enumerate(wanted):
        if start + number >= len(lines):
            break
        there = lines[start + number]
        fits = there == line
        if last and number == 0:
            fits = there.endswith(line)
        elif last and number == last:
            fits = there.startswith(line)
        if not fits:
            break
        count += 1
    return count


def _most_alike(lines: list[str], wanted: str) -> int | None:
    matcher = difflib.SequenceMatcher(None, autojunk=False)
    matcher.set_seq2(wanted[:_LONGEST])
    best, index, closely = _ALIKE, None, 0
    for number, line in enumerate(lines):
        matcher.set_seq1(line.strip()[:_LONGEST])
        if matcher.real_quick_ratio() <= best or matcher.quick_ratio() <= best:
            continue
        closely += 1
        if closely > _CLOSELY:
            break
        if (ratio := matcher.ratio()) > best:
            best, index = ratio, number
    return index


def _departs(index: int, there: str, wanted: str) -> str:
    if "".join(there.split()) == "".join(wanted.split()):
        return f"line {index + 1} differs in white space: it is {_shown(there)}, and old_text has {_shown(wanted)}"
    return f"line {index + 1} is {_shown(there)}, where old_text has {_shown(wanted)}"


def _shown(line: str) -> str:
    """A line with its white space to be seen. What follows the part that is shown is told."""
    cut = line[:_LONGEST]
    return repr(cut) + (f" (and {len(line) - len(cut)} characters more)" if len(line) > len(cut) else "")
