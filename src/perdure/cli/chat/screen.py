"""Where a chat is shown and typed: the protocol of screens, and the plain one, which only ever adds lines."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, Protocol

from typing_extensions import override

from perdure.cli.chat.terminal import LineReader, TypedLine, Writer
from perdure.cli.secrets import Secrets
from perdure.cli.style import Colours, Line, Style, rendered, span
from perdure.cli.text import one_line

LONGEST_WORD: Final = 200
"""Characters of streamed text that are held back at most until a word is complete."""
MOST_MARKS: Final = 100
"""Things asked, of which it is known when they were."""


class Hands(Protocol):
    """What a screen is given to tell of what the user does."""

    def typed(self, text: str, *, steer: bool, about: object = None) -> None:
        """A whole input or command. ``about``: what was asked when it was begun (``Screen.invite``)."""

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
        self._inviting: asyncio.Task[None] | None = None
        self.invited: object = None
        """What a line that begins now is about; None: nothing that is asked."""

    def invite(self, asked: object, how: Line = ()) -> None:
        """From now on something is asked, or, with None, nothing is.

        What is typed is about it only if it was begun when all that was put so far had been seen: when it had been
        written, and what was typed before had been read. Then ``how`` is put.
        """
        self.end_invitation()
        if asked is not None or self.invited is not None:
            self.invited = None
            self._inviting = asyncio.get_running_loop().create_task(self._invite(asked, how))

    async def invitation(self) -> None:
        """Wait until what is asked has been seen."""
        if self._inviting is not None:
            await asyncio.wait([self._inviting])

    def end_invitation(self) -> None:
        """What is not asked yet is not asked any more: nothing more is put of it."""
        if self._inviting is not None:
            self._inviting.cancel()
            self._inviting = None

    async def _invite(self, asked: object, how: Line) -> None:
        await self._told()
        await self.writer.written()
        await self._sort(asked)
        self.invited = asked
        if asked is not None:
            self.put(how)
            self._await_answer()
        self.refresh()

    @abstractmethod
    async def _told(self) -> None:
        """What was put is with the writer."""

    @abstractmethod
    async def _sort(self, asked: object) -> None:
        """Take what was typed until now for what it is: not about what is asked from now on."""

    @abstractmethod
    def _await_answer(self) -> None:
        """Show where the answer goes."""

    @abstractmethod
    def interrupted(self) -> None:
        """Ctrl-C: what was typed of a line is taken back."""

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
        self._reader: LineReader | None = None
        self._marks: deque[tuple[int, object]] = deque(maxlen=MOST_MARKS)
        """From which byte on of what is typed something was asked."""

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
        asked = self.invited is not None
        if self._open == "no" and (asked or self._live is None or not self._live.busy):
            self.writer.write("? " if asked else "> ")
            self._open = "prompt"

    @override
    async def _told(self) -> None:
        """It always is."""

    @override
    async def _sort(self, asked: object) -> None:
        self._marks.append((await self.reader.typed(), asked))

    @override
    def _await_answer(self) -> None:
        self.ready()

    @override
    def interrupted(self) -> None:
        if self._reader is not None:
            self._reader.forget()

    @property
    def reader(self) -> LineReader:
        """Of standard input, from when it is first asked for."""
        if self._reader is None:
            self._reader = LineReader(0)
        return self._reader

    async def next_input(self) -> Input | None:
        """The next whole input; None: there are no more."""
        found = await whole_input(self.reader)
        if found is None:
            return None
        about = next((asked for mark, asked in reversed(self._marks) if mark <= found.begins), None)
        return Input(found.text, about)

    @override
    async def read(self, hands: Hands) -> None:
        while (found := await self.next_input()) is not None:
            # The terminal has shown it, with the end of the line.
            self._open = "no"
            hands.typed(found.text, steer=False, about=found.about)
            await asyncio.sleep(0)
        hands.leave()


class Input(NamedTuple):
    text: str
    about: object
    """What was asked when it was begun."""


async def whole_input(reader: LineReader) -> TypedLine | None:
    """The next input: a line that ends in a backslash goes on in the next one."""
    lines: list[str] = []
    begins = 0
    while True:
        line = await reader.line()
        if line is None:
            return TypedLine("\n".join(lines), begins) if lines else None
        begins = begins if lines else line.begins
        if not line.text.endswith("\\"):
            return TypedLine("\n".join([*lines, line.text]), begins)
        lines.append(line.text[:-1])
