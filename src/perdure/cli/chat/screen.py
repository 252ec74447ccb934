"""Where a chat is shown and typed: the protocol of screens, and the plain one, which only ever adds lines."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final, Literal, Protocol

from typing_extensions import override

from perdure.cli.chat.terminal import LineReader, Writer
from perdure.cli.secrets import Secrets
from perdure.cli.style import Colours, Line, Style, rendered, span
from perdure.cli.text import one_line

LONGEST_WORD: Final = 200
"""Characters of streamed text that are held back at most until a word is complete."""


class Hands(Protocol):
    """What a screen is given to tell of what the user does."""

    def typed(self, text: str, *, steer: bool) -> None:
        """A whole input or command."""

    def interrupt(self) -> None:
        """Ctrl-C."""

    def leave(self) -> None:
        """The input has ended, or the terminal is gone."""


class Live(Protocol):
    """What a screen that can redraw shows below what it has printed."""

    @property
    def busy(self) -> bool: ...

    def running(self) -> list[Line]:
        """The calls on their way."""
        ...

    def waiting(self) -> list[Line]:
        """The queue."""
        ...

    def status(self) -> Line: ...


class Screen(ABC):
    """Everything the chat says goes through here, and nothing that is a secret gets through."""

    follows: bool
    """It cannot redraw: what goes on is printed as it comes, and not only once it has ended."""

    def __init__(self, writer: Writer, colours: Colours, secrets: Secrets) -> None:
        self.writer = writer
        self.colours: Colours = colours
        self.secrets = secrets
        self._held = ""
        self._held_style: Style = "plain"

    @abstractmethod
    def put(self, *lines: Line) -> None:
        """Print whole lines."""

    @abstractmethod
    async def read(self, hands: Hands) -> None:
        """Take input until there is no more, or until this is cancelled."""

    @abstractmethod
    def _flow(self, style: Style, text: str) -> None:
        """Print a part of a line, or several lines; more of the last one may follow."""

    @abstractmethod
    def _end_flow(self) -> None:
        """The last line is complete."""

    @abstractmethod
    def show(self, live: Live) -> None:
        """What is live from now on."""

    @abstractmethod
    def recall(self, inputs: Iterable[str]) -> None:
        """Earlier inputs, oldest first: they may be wanted again."""

    @abstractmethod
    def refresh(self) -> None:
        """What is live has changed."""

    @abstractmethod
    def ready(self) -> None:
        """The next input may be typed."""

    def stream(self, style: Style, text: str) -> None:
        """Print text as it comes, a word at a time."""
        if style != self._held_style:
            self._release()
            self._held_style = style
        self._held += text
        cut = _last_break(self._held)
        if len(self._held) - cut > LONGEST_WORD:
            cut = len(self._held)
        if cut:
            words, self._held = self._held[:cut], self._held[cut:]
            self._flow(style, self._shown(words))

    def end_stream(self) -> None:
        self._release()
        self._end_flow()

    def _release(self) -> None:
        if self._held:
            words, self._held = self._held, ""
            self._flow(self._held_style, self._shown(words))

    def _shown(self, text: str) -> str:
        return "\n".join(one_line(part) for part in self.secrets.hide(text).split("\n"))

    def _hidden(self, line: Line) -> Line:
        return tuple((style, self.secrets.hide(text)) for style, text in line)

    async def room(self) -> None:
        """Wait until what was printed has mostly been seen."""
        await self.writer.room()


def _last_break(text: str) -> int:
    """Where the last complete word ends: behind a space or a character of a script that has none."""
    for at in range(len(text), 0, -1):
        if text[at - 1].isspace() or not text[at - 1].isascii():
            return at
    return 0


class PlainScreen(Screen):
    """Lines, one after the other, for a terminal without a redrawn part, a file or a pipe."""

    follows = True

    def __init__(self, writer: Writer, colours: Colours, secrets: Secrets, *, asks: bool) -> None:
        """``asks``: somebody types at a terminal, and is shown where."""
        super().__init__(writer, colours, secrets)
        self._asks = asks
        self._open: Literal["no", "flow", "prompt"] = "no"
        """What stands in the last line."""
        self._live: Live | None = None

    @override
    def put(self, *lines: Line) -> None:
        if not lines:
            return
        self._close()
        text = "".join(f"{rendered(self._hidden(line), self.colours)}\n" for line in lines)
        self.writer.write(text)

    @override
    def _flow(self, style: Style, text: str) -> None:
        if self._open == "prompt":
            self._close()
        *whole, last = text.split("\n")
        shown = [f"{span(style, each, self.colours)}\n" for each in whole]
        shown.append(span(style, last, self.colours))
        self.writer.write("".join(shown))
        if last or whole:
            self._open = "flow" if last else "no"

    @override
    def _end_flow(self) -> None:
        if self._open == "flow":
            self._close()

    def _close(self) -> None:
        if self._open != "no":
            self._open = "no"
            self.writer.write("\n")

    @override
    def show(self, live: Live) -> None:
        self._live = live

    @override
    def recall(self, inputs: Iterable[str]) -> None:
        """The terminal edits its lines by itself, and remembers none."""

    @override
    def refresh(self) -> None:
        """Nothing is redrawn here: what is live is printed as it comes."""

    @override
    def ready(self) -> None:
        if self._asks:
            # One run's end may be the next one's beginning.
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        if self._open == "no" and (self._live is None or not self._live.busy):
            self.writer.write("> ")
            self._open = "prompt"

    @override
    async def read(self, hands: Hands) -> None:
        reader = LineReader(0)
        while (text := await whole_input(reader)) is not None:
            # The terminal has shown it, with the end of the line.
            self._open = "no"
            hands.typed(text, steer=False)
            await asyncio.sleep(0)
        hands.leave()


async def whole_input(reader: LineReader) -> str | None:
    """The next input: a line that ends in a backslash goes on in the next one."""
    lines: list[str] = []
    while True:
        line = await reader.line()
        if line is None:
            return "\n".join(lines) if lines else None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
