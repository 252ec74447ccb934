"""Characters that arrive in two halves.

JSON writes what is beyond the first 65,536 characters as two escapes. Servers that cut text where their own language
counts send one half in a delta and the other in the next. Each half alone is no text: it cannot be stored nor shown.
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = range(0xD800, 0xDC00)


def joined(text: str) -> str:
    """Halves that meet as the character they are; one without its other as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Halves:
    """Keeps the first half at a delta's end until the next delta of the same part brings the other."""

    def __init__(self) -> None:
        self._kept: dict[int, str] = {}

    def join(self, part: int, delta: str) -> str:
        """What can be told by now; may be empty."""
        text = self._kept.pop(part, "") + delta
        if text and ord(text[-1]) in _FIRST:
            self._kept[part] = text[-1]
            text = text[:-1]
        return joined(text)
