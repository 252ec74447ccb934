"""A call that waits for approval, as people see it: the exact arguments it would run with, line by line."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterator
from typing import Final

from perdure.cli.exact import EMPTY, could_be_json, exact, exact_name
from perdure.cli.style import Line, line
from perdure.cli.text import counted, shortened
from perdure.kernel.json import JsonValue

MOST_LINES: Final = 200
"""Lines of arguments that are shown."""
WIDEST: Final = 4_000
"""Characters of one of them."""


def argument_lines(arguments: JsonValue, *, indent: str = "  ") -> list[Line]:
    """Every argument by its name, so that two calls are never shown alike. What does not fit is counted, never left
    out silently."""
    raw = list(_lines(arguments))
    texts = [head + exact(text[:WIDEST]) for head, text in raw[:MOST_LINES]]
    shown = [line(f"{indent}{shortened(text, WIDEST)}") for text in texts]
    cut = len(raw) - MOST_LINES
    long = any(len(text) > WIDEST for text in (*texts, *(text for _, text in raw[:MOST_LINES])))
    if cut > 0 or long:
        what = f"{counted(cut, 'more line')}: " if cut > 0 else "lines that are too long: "
        shown.append(line(f"{indent}┆ {what}perdure approvals ls --json shows all", "warning"))
    return shown


def _lines(arguments: JsonValue) -> Iterator[tuple[str, str]]:
    """What stands before a line, and the line as it is in the call."""
    if not isinstance(arguments, dict):
        yield "", json.dumps(arguments, ensure_ascii=False)
        return
    for name, value in arguments.items():
        head = f"{exact_name(name)}: "
        if value == "":
            yield f"{head}{EMPTY}", ""
        elif isinstance(value, str) and "\n" in value:
            first, *rest = value.split("\n")
            yield head, first
            yield from (("│ ", text) for text in rest)
        elif isinstance(value, str) and not could_be_json(value):
            yield head, value
        else:
            yield head, json.dumps(value, ensure_ascii=False)


def who() -> str:
    """The user, as decisions and rules note who made them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "somebody without a name"
