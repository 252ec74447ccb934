"""Where a text that does not occur in a file comes nearest to it: what a model needs to correct its edit. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

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
    wanted = old.split(b"\n")
    while wanted and not wanted[0].strip():
        wanted.pop(0)
    if not wanted:
        return None
    first = wanted[0].strip()
    # Of the places where it begins the same, the one where it goes on so for longest.
    best = max((_agreeing(data, start, wanted) for start in _lines_with(data, first)), default=None, key=_count)
    if best is not None:
        agreed, at = best
        return _departs(data, min(at, data.rfind(b"\n") + 1), wanted[min(agreed, len(wanted) - 1)])
    lines = data.split(b"\n", _COMPARED)[:_COMPARED]
    index = _most_alike([_text(line) for line in lines], _text(first))
    return None if index is None else _departs(data, sum(len(line) + 1 for line in lines[:index]), wanted[0])


def _count(place: tuple[int, int]) -> int:
    return place[0]


def _lines_with(data: bytes, text: bytes) -> Iterator[int]:
    """Where the first lines begin that have it."""
    at = -1
    for _ in range(_CANDIDATES):
        at = data.find(text, at + 1)
        if at < 0:
            return
        yield data.rfind(b"\n", 0, at) + 1
        at = _line_end(data, at)


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    return len(data) if end < 0 else end


def _agreeing(data: bytes, start: int, wanted: list[bytes]) -> tuple[int, int]:
    """How many lines from there are the text's, the first and the last perhaps in part; and where the next begins."""
    last = len(wanted) - 1
    for number, line in enumerate(wanted):
        there = data[start : _line_end(data, start)]
        if last and number == 0:
            fits = there.endswith(line)
        else:
            fits = there.startswith(line) if last and number == last else there == line
        if start > len(data) or not fits:
            return number, start
        start += len(there) + 1
    return len(wanted), start


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


def _departs(data: bytes, start: int, wanted: bytes) -> str:
    there = data[start : _line_end(data, start)]
    line = data.count(b"\n", 0, start) + 1
    if b"".join(there.split()) == b"".join(wanted.split()):
        return f"line {line} differs in white space: it is {_shown(there)}, and old_text has {_shown(wanted)}"
    hint = "" if _text(there).encode() == there else ", and bytes that are not UTF-8, which no old_text can name"
    return f"line {line} is {_shown(there)}{hint}, where old_text has {_shown(wanted)}"


def _shown(line: bytes) -> str:
    """A line with its white space to be seen. What follows the part that is shown is told."""
    text = _text(line)
    cut = text[:_LONGEST]
    return repr(cut) + (f" (and {len(text) - len(cut)} characters more)" if len(text) > len(cut) else "")


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
