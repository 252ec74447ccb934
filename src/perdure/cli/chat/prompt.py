"""The screen of a terminal that can redraw: what is printed scrolls away above, what is live stands over the input."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final, TextIO, cast

from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.data_structures import Size
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import BufferControl, ConditionalContainer, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.layout.processors import BeforeInput
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import get_cwidth
from typing_extensions import override

from perdure.cli.chat.screen import Hands, Live, Screen
from perdure.cli.chat.terminal import Writer, bytes_waiting
from perdure.cli.secrets import Secrets
from perdure.cli.style import Colours, Line, Style, rendered, span

INPUT_ROWS: Final = 10
"""Of the input; a longer one scrolls."""
LEAST_COLUMNS: Final = 20


class PromptScreen(Screen):
    """An input line that stays where it is while answers stream above it."""

    follows = False

    def __init__(self, writer: Writer, colours: Colours, secrets: Secrets) -> None:
        super().__init__(writer, colours, secrets)
        self._live: Live | None = None
        self._row: tuple[Style, str] = ("plain", "")
        """The row that streams."""
        self._printed: list[str] = []
        self._scheduled = False
        self._hands: Hands | None = None
        self._history = InMemoryHistory()
        self._buffer = Buffer(multiline=True, history=self._history, on_text_changed=lambda _: self._begun())
        self._about: object = None
        """What was asked when the first character of the line was typed."""
        self._line = False
        """There is a line."""
        self._reads = asyncio.Event()
        """What is typed is read as it comes."""
        self._app: Application[None] = self._application()

    @override
    def show(self, live: Live) -> None:
        self._live = live

    @override
    def recall(self, inputs: Iterable[str]) -> None:
        for text in inputs:
            self._history.append_string(text)

    # --- printing ------------------------------------------------------------------------------------------------

    @override
    def put(self, *lines: Line) -> None:
        if lines:
            self._end_flow()
            self._print(row for line in lines for row in self._rows(self._hidden(line)))

    def _rows(self, line: Line) -> list[str]:
        """Words are kept together; a line of several styles is left to the terminal."""
        if len(line) != 1:
            return [rendered(line, self.colours)]
        ((style, text),) = line
        return [span(style, row, self.colours) for row in folded(text, self._columns)]

    @override
    def _flow(self, style: Style, text: str) -> None:
        row = self._row[1]
        *whole, last = text.split("\n")
        done: list[str] = []
        for part in whole:
            done += folded(row + part, self._columns)
            row = ""
        *full, row = folded(row + last, self._columns)
        self._print(span(style, each, self.colours) for each in (*done, *full))
        self._row = (style, row)
        self.refresh()

    @override
    def _end_flow(self) -> None:
        style, row = self._row
        if row:
            self._row = ("plain", "")
            self._print([span(style, row.rstrip(" "), self.colours)])

    def _print(self, lines: Iterable[str]) -> None:
        self._printed += (f"{line}\r\n" for line in lines)
        if self._printed and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        text, self._printed = "".join(self._printed), []
        if not text:
            return
        if self._app.is_running:
            self._app.renderer.erase()
        self.writer.write(text)
        self.refresh()

    @override
    def refresh(self) -> None:
        # A terminal that does not keep up is not given more to draw: the newest state will do.
        if self._app.is_running and not self.writer.crowded:
            self._app.invalidate()

    @override
    def ready(self) -> None:
        """The input is always open."""

    # --- drawing -------------------------------------------------------------------------------------------------

    @property
    def _columns(self) -> int:
        return max(LEAST_COLUMNS, self._size().columns - 1)

    def _size(self) -> Size:
        try:
            found = os.get_terminal_size(self.writer.descriptor)
        except OSError:  # it is gone, or never was one
            return Size(rows=24, columns=80)
        return Size(rows=found.lines or 24, columns=found.columns or 80)

    def _above(self) -> list[Line]:
        if self._live is None:
            return []
        lines = [self._row] if self._row[1] else []
        shown: list[Line] = [*((each,) for each in lines), *self._live.running(), *self._live.waiting()]
        most = max(1, self._size().rows - 5)
        return shown[-most:]

    def _below(self) -> list[Line]:
        return [] if self._live is None else [self._live.status()]

    def _text(self, lines: Sequence[Line]) -> ANSI:
        return ANSI("\n".join(rendered(self._hidden(line), self.colours) for line in lines))

    def _application(self) -> Application[None]:
        above = Window(FormattedTextControl(lambda: self._text(self._above())), dont_extend_height=True)
        below = Window(FormattedTextControl(lambda: self._text(self._below())), height=1)
        typed = Window(
            BufferControl(self._buffer, input_processors=[BeforeInput("> ", style="bold")]),
            height=lambda: Dimension(min=1, max=INPUT_ROWS),
            wrap_lines=True,
            dont_extend_height=True,
        )
        size = self._size
        return Application(
            layout=Layout(
                HSplit([ConditionalContainer(above, Condition(lambda: bool(self._above()))), typed, below]),
                focused_element=typed,
            ),
            key_bindings=self._keys(),
            # Cursor position requests are for terminals that answer; nothing here depends on the answer.
            output=Vt100_Output(cast("TextIO", _Out(self.writer)), size, os.environ.get("TERM"), enable_cpr=False),
            input=create_input(sys.stdin),
            color_depth=ColorDepth.DEPTH_4_BIT if self.colours == "all" else ColorDepth.DEPTH_1_BIT,
            erase_when_done=True,
        )

    # --- what is asked -------------------------------------------------------------------------------------------

    @override
    async def _told(self) -> None:
        self._flush()

    @override
    async def _sort(self, asked: object) -> None:
        await self._reads.wait()
        while self._app.is_running and bytes_waiting(0):
            await asyncio.sleep(0)  # the loop reads some of it meanwhile

    @override
    def _await_answer(self) -> None:
        """It goes where everything goes."""

    @override
    def interrupted(self) -> None:
        """The keys say what is taken back."""

    def _begun(self) -> None:
        if bool(self._buffer.text) != self._line:
            self._line = not self._line
            self._about = self.invited if self._line else None

    # --- typing --------------------------------------------------------------------------------------------------

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        @keys.add("c-j")
        def _(_event: KeyPressEvent) -> None:
            self._accept(steer=False)

        @keys.add("c-s")
        @keys.add("escape", "enter")
        @keys.add("escape", "c-j")
        def _(_event: KeyPressEvent) -> None:
            self._accept(steer=True)

        @keys.add("c-c")
        def _(_event: KeyPressEvent) -> None:
            busy = self._live is not None and self._live.busy
            if self._buffer.text and not busy:
                self._reset()
            elif self._hands is not None:
                self._hands.interrupt()

        @keys.add("c-d")
        def _(_event: KeyPressEvent) -> None:
            if self._buffer.text:
                self._buffer.delete()
            elif self._hands is not None:
                self._hands.leave()

        @keys.add("c-z")
        def _(event: KeyPressEvent) -> None:
            event.app.suspend_to_background()

        return keys

    def _accept(self, *, steer: bool) -> None:
        text = self._buffer.text
        if not steer and self._buffer.document.text_before_cursor.endswith("\\"):
            self._buffer.delete_before_cursor()
            self._buffer.insert_text("\n")
            return
        about = self._about if text else self.invited
        self._reset(append_to_history=bool(text.strip()))
        if self._hands is not None and (text.strip() or about is not None):
            self._hands.typed(text, steer=steer, about=about)

    def _reset(self, *, append_to_history: bool = False) -> None:
        self._buffer.reset(append_to_history=append_to_history)
        self._begun()

    @override
    async def read(self, hands: Hands) -> None:
        self._hands = hands
        # Told to end instead of cancelled: it gives the terminal back as it was.
        running = asyncio.ensure_future(
            self._app.run_async(pre_run=self._reads.set, set_exception_handler=False, handle_sigint=False)
        )
        try:
            await asyncio.wait([running])
            if running.exception() is not None and not isinstance(running.exception(), EOFError):
                running.result()
            hands.leave()
        finally:
            self._hands = None
            if not running.done():
                self._app.exit()
                await asyncio.wait([running])
            self._flush()


class _Out(io.TextIOBase):
    """The writer as a file."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @override
    def write(self, text: str, /) -> int:
        self._writer.write(text)
        return len(text)

    @override
    def fileno(self) -> int:
        return self._writer.descriptor

    @override
    def isatty(self) -> bool:
        return True


def folded(text: str, columns: int) -> list[str]:
    """A line in rows, broken between words. More text at its end leaves all rows but the last as they are."""
    if len(text) <= columns and text.isascii():
        return [text]
    rows: list[str] = []
    start = end = width = 0
    """The row goes from ``start``; ``end`` is behind its last complete word."""
    at = 0
    while at < len(text):
        wide = get_cwidth(text[at])
        if width + wide > columns and text[at] != " ":
            cut = end if end > start else at
            rows.append(text[start:cut].rstrip(" "))
            start = end = cut
            width = sum(get_cwidth(each) for each in text[start:at])
        width += wide
        at += 1
        if text[at - 1] == " " or wide == 2:
            end = at
    return [*rows, text[start:]]
