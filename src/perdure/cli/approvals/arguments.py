"""A call that waits for approval, as people see it: the exact arguments it would run with, line by line."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterator
from typing import Final

from perdure.cli.style import Line, line
from perdure.cli.text import counted, printable, shortened
from perdure.kernel.json import JsonValue

MOST_LINES: Final = 200
"""Lines of arguments that are shown."""
WIDEST: Final = 4_000
"""Characters of one of them."""


def argument_lines(arguments: JsonValue, *, indent: str = "  ") -> list[Line]:
    """Every argument by its name. What does not fit is counted, never left out silently."""
    lines = list(_texts(arguments))
    shown = [line(f"{indent}{shortened(text, WIDEST)}") for text in lines[:MOST_LINES]]
    cut = len(lines) - MOST_LINES
    if cut > 0 or any(len(text) > WIDEST for text in lines[:MOST_LINES]):
        what = f"{counted(cut, 'more line')}: " if cut > 0 else "lines that are too long: "
        shown.append(line(f"{indent}┆ {what}perdure approvals ls --json shows all", "warning"))
    return shown


# Not as a terminal would show it at the end, like ``lines_of``: what is overwritten there would run all the same.
def _texts(arguments: JsonValue) -> Iterator[str]:
    if not isinstance(arguments, dict):
        yield printable(json.dumps(arguments, ensure_ascii=False))
        return
    for name, value in arguments.items():
        if isinstance(value, str):
            first, *rest = value.split("\n")
            yield f"{printable(name)}: {printable(first)}"
            yield from (f"  {printable(text)}" for text in rest)
        else:
            yield f"{printable(name)}: {printable(json.dumps(value, ensure_ascii=False))}"


def who() -> str:
    """The user, as decisions and rules note who made them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "somebody without a name"
