"""Lines with styles, and how a terminal is told of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

Style: TypeAlias = Literal[
    "plain", "bold", "dim", "user", "tool", "added", "removed", "hunk", "good", "error", "warning", "queued", "steering"
]
Span: TypeAlias = tuple[Style, str]
Line: TypeAlias = tuple[Span, ...]
"""What stands in one line, without its end."""

Colours: TypeAlias = Literal["none", "few", "all"]
"""none: no escape sequence at all. few: bold and dim, for people who want no colours."""

_CODES: Final[Mapping[Style, str]] = {
    "plain": "",
    "bold": "1",
    "dim": "2",
    "user": "1;34",
    "tool": "36",
    "added": "32",
    "removed": "31",
    "hunk": "36",
    "good": "32",
    "error": "1;31",
    "warning": "33",
    "queued": "33",
    "steering": "1;35",
}
_FEW: Final[Mapping[Style, str]] = {"user": "1", "error": "1", "steering": "1"}


def line(text: str = "", style: Style = "plain") -> Line:
    return ((style, text),) if text else ()


def code_of(style: Style, colours: Colours) -> str:
    """The numbers of the style's SGR sequence; empty: none."""
    if colours == "none":
        return ""
    return _CODES[style] if colours == "all" or style in ("bold", "dim") else _FEW.get(style, "")


def rendered(line: Line, colours: Colours) -> str:
    """The line as it is written to a terminal, without its end."""
    return "".join(span(style, text, colours) for style, text in line)


def span(style: Style, text: str, colours: Colours) -> str:
    code = code_of(style, colours)
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def colours_of(*, plain: bool, terminal: bool) -> Colours:
    """What the program's output may have (``NO_COLOR``, ``TERM=dumb``, ``--plain``)."""
    if plain or not terminal or os.environ.get("TERM", "dumb") == "dumb":
        return "none"
    return "few" if os.environ.get("NO_COLOR") else "all"
