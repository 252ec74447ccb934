"""What a docstring says of a tool and of its parameters; Google's and numpy's sections are understood."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

_GOOGLE = re.compile(r"(?:Args|Arguments|Parameters|Params):\s*")
_NUMPY = re.compile(r"(?:Parameters|Other Parameters)\s*")
_GOOGLE_ITEM = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")
_NUMPY_ITEM = re.compile(r"(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")


def split_docstring(doc: str | None) -> tuple[str, dict[str, str]]:
    """The description (all but the section of parameters), and what that section says of each parameter."""
    if not doc:
        return "", {}
    lines = inspect.cleandoc(doc).splitlines()
    kept: list[str] = []
    found: dict[str, str] = {}
    at = 0
    while at < len(lines):
        underlined = at + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[at + 1]) is not None
        if underlined and _NUMPY.fullmatch(lines[at]):
            end = _end_of_numpy(lines, at + 2)
            found |= _numpy_items(lines[at + 2 : end])
            at = end
        elif _GOOGLE.fullmatch(lines[at]) and at + 1 < len(lines) and lines[at + 1].startswith((" ", "\t")):
            end = _end_of_indented(lines, at + 1)
            found |= _google_items(lines[at + 1 : end])
            at = end
        else:
            kept.append(lines[at])
            at += 1
    description = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in kept))
    return description.strip(), found


def _end_of_indented(lines: Sequence[str], at: int) -> int:
    while at < len(lines) and (not lines[at].strip() or lines[at].startswith((" ", "\t"))):
        at += 1
    return at


def _end_of_numpy(lines: Sequence[str], at: int) -> int:
    """The section ends where the next underlined title begins."""
    while at < len(lines):
        if at + 1 < len(lines) and lines[at].strip() and re.fullmatch(r"-{3,}\s*", lines[at + 1]):
            return at
        at += 1
    return at


def _google_items(lines: Sequence[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    current: list[str] | None = None
    for line in lines:
        item = _GOOGLE_ITEM.fullmatch(line.strip())
        if item is not None and len(line) - len(line.lstrip()) == indent:
            current = items.setdefault(item["name"], [])
            current.append(item["text"])
        elif current is not None:
            current.append(line.strip())
    return {name: _joined(text) for name, text in items.items()}


def _numpy_items(lines: Sequence[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        if not line.startswith((" ", "\t")) and (item := _NUMPY_ITEM.fullmatch(line.strip())) is not None:
            current = []
            for name in item["names"].split(","):
                items[name.strip().lstrip("*")] = current
        else:
            current.append(line.strip())
    return {name: _joined(text) for name, text in items.items()}


def _joined(lines: Sequence[str]) -> str:
    return " ".join(line for line in lines if line)
