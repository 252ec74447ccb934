"""The screens' own threads and their holding back: nobody waits for a terminal (rule H151)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator

import pytest
from chat_paper import Paper

from perdure.cli.chat.run import Terminal
from perdure.cli.chat.screen import LONGEST_WORD, PlainScreen, whole_input
from perdure.cli.chat.terminal import MOST_WAITING, LineReader, Writer
from perdure.cli.secrets import Secrets
from perdure.cli.style import line


@pytest.fixture
def pipe() -> Generator[tuple[int, int]]:
    reading, writing = os.pipe()
    ends = [reading, writing]
    yield reading, writing
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def read_all(descriptor: int) -> str:
    found = b""
    while data := os.read(descriptor, 65536):
        found += data
    return found.decode()


async def test_what_is_written_comes_in_order(pipe: tuple[int, int]) -> None:
    writer = Writer(pipe[1], on_broken=lambda: None)
    for number in range(1000):
        writer.write(f"{number}\n")
    await writer.finish()
    os.close(pipe[1])
    assert read_all(pipe[0]).split() == [str(number) for number in range(1000)]


async def test_a_terminal_that_stands_still_holds_up_nobody(pipe: tuple[int, int]) -> None:
    writer = Writer(pipe[1], on_broken=lambda: None)
    await writer.room()
    text = "x" * 65536
    written = 0
    while not writer.crowded:  # it never waits, whatever becomes of the reader
        writer.write(text)
        written += len(text)
    assert written > MOST_WAITING
    waiting = asyncio.create_task(writer.room())
    reading = asyncio.create_task(asyncio.to_thread(read_all, pipe[0]))
    await waiting
    await writer.finish()
    os.close(pipe[1])
    assert len(await reading) == written


async def test_a_reader_that_is_gone_is_told_once(pipe: tuple[int, int]) -> None:
    told: list[bool] = []
    gone = asyncio.Event()

    def broken() -> None:
        told.append(True)
        gone.set()

    writer = Writer(pipe[1], on_broken=broken)
    os.close(pipe[0])
    writer.write("anybody?")
    await gone.wait()
    writer.write("nobody")
    await writer.room()
    await writer.finish()
    assert (told, writer.broken) == ([True], True)


async def test_lines_are_read_to_the_end(pipe: tuple[int, int]) -> None:
    reader = LineReader(pipe[0])
    os.write(pipe[1], "one\ntwo\\\nthree\r\n\nfour é ".encode() + b"\xff")
    assert await whole_input(reader) == ("one", 0)
    assert await whole_input(reader) == ("two\nthree", 4)
    assert await whole_input(reader) == ("", 16)
    os.close(pipe[1])
    assert await whole_input(reader) == ("four é �", 17)
    assert await whole_input(reader) is None
    assert await whole_input(reader) is None


async def test_many_lines_are_not_all_read_ahead(pipe: tuple[int, int]) -> None:
    reader = LineReader(pipe[0])
    os.write(pipe[1], b"".join(b"%d\n" % number for number in range(1000)))
    os.close(pipe[1])
    assert [(await reader.line() or ("",))[0] for _ in range(1000)] == [str(number) for number in range(1000)]
    assert await reader.line() is None


async def test_control_c_while_it_stops_is_answered_and_then_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    terminal = Terminal(plain=True)
    with terminal.signals():
        os.kill(os.getpid(), signal.SIGINT)
        while not terminal.impatient:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        while not ended:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        while not terminal.leaves:
            await asyncio.sleep(0)
    await terminal.finish()
    assert ended == [130]
    assert capfd.readouterr().out == ("Ctrl-C again ends this at once; the next start goes on as after a kill.\n")


# --- streaming ---------------------------------------------------------------------------------------------------


def screen(secrets: dict[str, str] | None = None) -> tuple[PlainScreen, Paper]:
    paper = Paper()
    return PlainScreen(paper, "none", Secrets(secrets or {}), asks=False), paper


def test_words_are_shown_once_they_are_whole() -> None:
    plain, paper = screen({"A_KEY": "secret-value"})
    shown: list[str] = []
    for chunk in ("Say ", "secret-", "val", "ue now", " and", "\n", "then", "日本"):
        plain.stream("plain", chunk)
        shown.append(paper.text)
    assert shown == [
        "Say ",
        "Say ",
        "Say ",
        "Say [A_KEY] ",
        "Say [A_KEY] now ",
        "Say [A_KEY] now and\n",
        "Say [A_KEY] now and\n",
        "Say [A_KEY] now and\nthen日本",
    ]
    plain.end_stream()
    assert paper.text.endswith("then日本\n")


def test_a_word_without_an_end_is_shown_all_the_same() -> None:
    plain, paper = screen()
    plain.stream("plain", "x" * LONGEST_WORD)
    assert paper.text == ""
    plain.stream("plain", "x")
    assert paper.text == "x" * (LONGEST_WORD + 1)


def test_lines_do_not_run_into_what_streams() -> None:
    plain, paper = screen()
    plain.stream("plain", "half a ")
    plain.put(line("a line"))
    plain.stream("plain", "sentence")
    plain.put()
    plain.end_stream()
    plain.end_stream()
    assert paper.text == "half a \na line\nsentence\n"
