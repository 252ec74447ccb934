"""Bounded windows over output: whole lines from its head or its tail, and exact counts of what is left out.

What a window shows depends on the bytes alone, not on the chunks they came in nor on when somebody looked.
Bytes that are not UTF-8 become U+FFFD first; all sizes and counts are those of the resulting text in UTF-8,
which for valid input is the input. A window holds little more than its limit in memory.
"""

from __future__ import annotations

import codecs
from typing import Literal, TypeAlias

import msgspec

DEFAULT_LIMIT_BYTES = 50 * 1024
DEFAULT_LIMIT_LINES = 2000
LEAST_BYTES = 4
"""A window takes at least the longest UTF-8 sequence."""

Keep: TypeAlias = Literal["head", "tail"]


class OutputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of an output is kept, and which end of it (rule H82)."""

    max_bytes: int = DEFAULT_LIMIT_BYTES
    max_lines: int = DEFAULT_LIMIT_LINES
    keep: Keep = "tail"
    """What is too much is left out before the end (``tail``) or behind the beginning (``head``)."""

    def __post_init__(self) -> None:
        self.window()

    def window(self) -> OutputWindow:
        """An empty one with these limits. Raises ValueError for limits that keep nothing."""
        return OutputWindow(limit_bytes=self.max_bytes, limit_lines=self.max_lines, keep=self.keep)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown and what is not. Line ends count with the line they end."""

    text: str
    total_bytes: int
    total_lines: int
    """A last line without its line end counts as one."""
    shown_lines: int
    """The partial one of a cut line counts as shown."""
    dropped_bytes: int
    dropped_lines: int
    cut_line: bool
    """One line alone exceeds the limit: a part of it is shown, cut between two characters."""

    @property
    def complete(self) -> bool:
        return not self.dropped_bytes


class OutputWindow:
    """Takes bytes in any chunks; ``window()`` tells at any time what is to be shown of those taken so far.

    Shown are as many whole lines from the chosen end as fit both limits. If not even the first of them fits,
    as much of it as fits is shown: its beginning for ``head``, its end for ``tail``.
    """

    __slots__ = (
        "_buffer",
        "_bytes",
        "_decoder",
        "_keep",
        "_last",
        "_limit_bytes",
        "_limit_lines",
        "_newlines",
    )

    def __init__(
        self,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        limit_lines: int = DEFAULT_LIMIT_LINES,
        keep: Keep = "tail",
    ) -> None:
        if limit_bytes < LEAST_BYTES or limit_lines < 1:
            raise ValueError(f"a window needs {LEAST_BYTES} bytes and 1 line, not {limit_bytes} and {limit_lines}")
        self._limit_bytes = limit_bytes
        self._limit_lines = limit_lines
        self._keep: Literal["head", "tail"] = keep
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = bytearray()  # head: the first limit + 1 bytes; tail: at least the last limit + 1
        self._bytes = 0
        self._newlines = 0
        self._last = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, however many."""
        self._take(self._decode(chunk))

    def window(self) -> Window:
        """The window over all bytes taken so far, as if they were all there is. More may follow."""
        pending, _ = self._decoder.getstate()
        if not pending:
            return self._window()
        whole = OutputWindow(limit_bytes=self._limit_bytes, limit_lines=self._limit_lines, keep=self._keep)
        whole._buffer = self._buffer.copy()
        whole._bytes, whole._newlines, whole._last = self._bytes, self._newlines, self._last
        whole._take(pending.decode("utf-8", "replace").encode())
        return whole._window()

    def _decode(self, chunk: bytes) -> bytes:
        pending, _ = self._decoder.getstate()
        if not pending and chunk.isascii():
            return chunk
        return self._decoder.decode(chunk).encode()

    def _take(self, text: bytes) -> None:
        if not text:
            return
        self._bytes += len(text)
        self._newlines += text.count(b"\n")
        self._last = text[-1:]
        most = self._limit_bytes + 1
        if self._keep == "head":
            self._buffer += text[: most - len(self._buffer)]
            return
        if len(text) >= most:
            self._buffer[:] = text[-most:]
            return
        self._buffer += text
        if len(self._buffer) > 2 * most:
            del self._buffer[:-most]

    def _window(self) -> Window:
        start, end = self._head() if self._keep == "head" else self._tail()
        shown = bytes(self._buffer[start:end])
        total_lines = self._newlines + (self._last not in (b"", b"\n"))
        cut = bool(shown) and len(shown) < self._bytes and self._is_cut(start, end)
        shown_lines = shown.count(b"\n") + (bool(shown) and not shown.endswith(b"\n"))
        return Window(
            text=shown.decode(),
            total_bytes=self._bytes,
            total_lines=total_lines,
            shown_lines=shown_lines,
            dropped_bytes=self._bytes - len(shown),
            dropped_lines=total_lines - shown_lines,
            cut_line=cut,
        )

    def _is_cut(self, start: int, end: int) -> bool:
        if self._keep == "head":
            return end < len(self._buffer) and self._buffer[end - 1] != ord("\n")
        return start > 0 and self._buffer[start - 1] != ord("\n")

    def _head(self) -> tuple[int, int]:
        buffer = self._buffer
        end = len(buffer)
        if end > self._limit_bytes:
            end = buffer.rfind(b"\n", 0, self._limit_bytes) + 1
            if end == 0:
                end = self._limit_bytes
                while _continues(buffer[end]):
                    end -= 1
                return 0, end
        at = -1
        for _ in range(self._limit_lines):
            at = buffer.find(b"\n", at + 1, end)
            if at < 0:
                return 0, end
        return 0, at + 1

    def _tail(self) -> tuple[int, int]:
        buffer = self._buffer
        end = len(buffer)
        start = 0
        if self._bytes > self._limit_bytes:
            # The byte before the limit decides whether a line begins at it; the buffer always holds that
            # byte.
            start = buffer.find(b"\n", end - self._limit_bytes - 1) + 1
            if start in (0, end):
                start = end - self._limit_bytes
                while _continues(buffer[start]):
                    start += 1
                return start, end
        at = end - 1 if self._last == b"\n" else end
        for _ in range(self._limit_lines):
            at = buffer.rfind(b"\n", start, at)
            if at < 0:
                return start, end
        return at + 1, end


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


DEFAULT_LIMITS = OutputLimits()


# --- output on its way --------------------------------------------------------------------------------------


class Bounded(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an output, and how much is not."""

    text: str
    dropped_bytes: int = 0
    dropped_lines: int = 0


def bound(text: str, limits: OutputLimits, *, dropped_bytes: int = 0, dropped_lines: int = 0) -> Bounded:
    """Bound a text of which something was dropped before at the end that is not kept."""
    window = limits.window()
    window.feed(text.encode("utf-8", "surrogatepass"))
    shown = window.window()
    return Bounded(
        text=shown.text,
        dropped_bytes=dropped_bytes + shown.dropped_bytes,
        dropped_lines=dropped_lines + shown.dropped_lines,
    )


class LiveOutput:
    """Takes output in any chunks and shows what is kept so far as a text that nearly always grows at its end
    only, so that showing it again costs what is new.

    For ``tail`` that text is up to twice the limit: it is cut back to the window each time another
    ``max_bytes`` have come. It always holds enough to be bounded again, which gives exactly the window over
    all the output: ``bound(shown, limits, dropped_bytes=..., dropped_lines=...)``, also after a crash, from
    what was committed.
    """

    def __init__(self, limits: OutputLimits) -> None:
        self.limits = limits
        self.dropped_bytes = 0
        self.dropped_lines = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown = bytearray()
        self._shown_lines = 0
        """For ``head``, once it is full."""
        self._full = False
        """For ``head``: what comes is only counted."""
        self._taken = 0
        """How much of ``_shown`` has been taken; -1: it was cut since, all of it is to be taken anew."""
        self._bytes = 0
        self._newlines = 0
        self._ends_line = True

    def feed(self, chunk: str | bytes) -> None:
        data = chunk.encode("utf-8", "surrogatepass") if isinstance(chunk, str) else chunk
        self._add(self._decoder.decode(data).encode())

    @property
    def changed(self) -> bool:
        return self._taken != len(self._shown)

    def take(self) -> tuple[bool, str]:
        """What is new since the last time; True with it: this is the whole text, in place of the old one."""
        anew = self._taken < 0
        text = bytes(self._shown if anew else self._shown[self._taken :]).decode()
        self._taken = len(self._shown)
        return anew, text

    def end(self) -> Bounded:
        """The window over all of it; nothing more is fed."""
        self._add(self._decoder.decode(b"", final=True).encode())
        return bound(
            self._shown.decode(),
            self.limits,
            dropped_bytes=self.dropped_bytes,
            dropped_lines=self.dropped_lines,
        )

    def _add(self, text: bytes) -> None:
        if not text:
            return
        before = self._bytes
        self._bytes += len(text)
        self._newlines += text.count(b"\n")
        self._ends_line = text.endswith(b"\n")
        if self.limits.keep == "head":
            self._add_head(text)
        else:
            self._add_tail(text, before)

    def _add_head(self, text: bytes) -> None:
        lines = self._newlines + (not self._ends_line)
        if not self._full:
            self._shown += text
            if self._bytes <= self.limits.max_bytes and lines <= self.limits.max_lines:
                return
            kept = self._window(self._shown)
            self._shown_lines = kept.shown_lines
            self._full = True
            self._cut(bytearray(kept.text.encode()))
        self.dropped_bytes = self._bytes - len(self._shown)
        self.dropped_lines = lines - self._shown_lines

    def _add_tail(self, text: bytes, before: int) -> None:
        # Where it is cut back depends on the text alone: at the first character at or after a multiple of the
        # limit.
        limit = self.limits.max_bytes
        mark = self._bytes - self._bytes % limit
        if mark <= before:
            self._shown += text
            return
        at = mark - before
        while at < len(text) and _continues(text[at]):
            at += 1
        self._shown += text[:at]
        kept = self._window(self._shown)
        if kept.dropped_bytes:
            start = len(self._shown) - len(kept.text.encode())
            if kept.cut_line:
                # One byte more than the limit: whoever bounds it again must see that its line begins earlier.
                start = len(self._shown) - limit - 1
                while _continues(self._shown[start]):
                    start -= 1
            self.dropped_bytes += start
            self.dropped_lines += self._shown.count(b"\n", 0, start)
            self._cut(self._shown[start:])
        self._shown += text[at:]

    def _window(self, text: bytearray) -> Window:
        window = self.limits.window()
        window.feed(bytes(text))
        return window.window()

    def _cut(self, shown: bytearray) -> None:
        self._shown = shown
        self._taken = -1
