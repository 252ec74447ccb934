"""Text for people at a terminal: what a store or a command holds does not get to speak to the terminal."""

from __future__ import annotations

import re
from datetime import UTC, datetime

# C0 and C1, bidirectional and other invisible controls, line and paragraph separators, surrogates, tags.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
# What programs send to a terminal: control sequences, titles and links, character sets, single escapes.
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]+[0-~]|\x1b[0-~]|\x9b[0-?]*[ -/]*[@-~]"
)
_TAB = 4


def printable(text: str) -> str:
    """One line, in which whatever is no character to look at is written as an escape."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def lines_of(text: str) -> list[str]:
    """The lines of a text or of a command's output, each fit to be printed."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [one_line(line) for line in lines]


def one_line(line: str) -> str:
    """A line as a terminal would show it at the end: without colours, and of a progress bar the last state."""
    if line.isascii() and line.isprintable():
        return line
    line = _SEQUENCE.sub("", line).rstrip("\r")
    line = line.rpartition("\r")[2]
    return printable(line.expandtabs(_TAB))


def shortened(text: str, most: int) -> str:
    """At most so many characters of a line; an ellipsis says that there are more."""
    return text if len(text) <= most else text[: most - 1] + "…"


def counted(count: int, what: str) -> str:
    """``1 line``, ``2 lines``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def when(ms: int) -> str:
    """A time in ms UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(count: int) -> str:
    """Bytes in the unit that suits them."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("the last unit always fits")
