"""The agent asks the user in ``perdure chat``: what is an answer, and what never is (rules H329 to H334)."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from chat_paper import Paper
from chat_terminal import Terminal
from test_cli_chat import IDLE, Desk
from typing_extensions import override

from perdure.cli.chat.models import Catalogue
from perdure.cli.chat.questions import ANSWER, CHOOSE, Asking, Questions, answer_line, chosen
from perdure.cli.chat.screen import PlainScreen
from perdure.cli.chat.session import Chat
from perdure.cli.chat.story import Story
from perdure.cli.chat.terminal import LineReader, bytes_waiting
from perdure.cli.errors import CommandError
from perdure.cli.secrets import Secrets
from perdure.cli.style import line, rendered
from perdure.events import Events
from perdure.harness.conversation import Conversation
from perdure.harness.harness import Harness
from perdure.kernel.json import JsonValue

ASKS = "? ask_user  asks you, question "
INVITED = f"\n  {ANSWER}"
"""What is begun from now on is an answer."""


def invited(times: int) -> Callable[[str], bool]:
    return lambda shown: shown.count(INVITED) == times


def number(shown: str) -> str:
    return re.findall(r"asks you, question (\d+)", shown)[-1]


def asked(desk: Desk, *words: str) -> Terminal:
    """A chat whose agent has asked."""
    chat = desk.chat(*words)
    chat.see(IDLE)
    chat.enter("ask Which colour?")
    chat.see(ASKS, "  │ Which colour?", INVITED)
    return chat


# --- answers -----------------------------------------------------------------------------------------------------


def test_the_next_line_answers_and_an_empty_one_does_not_h334(desk: Desk) -> None:
    chat = asked(desk)
    chat.enter("")
    chat.see("! nothing is no answer")
    chat.enter("  ")
    chat.wait(lambda shown: shown.count("! nothing is no answer") == 2, "the second refusal")
    chat.enter("/etc")
    chat.see("! there is no command /etc")
    chat.enter("deep \\")
    chat.enter("blue")
    chat.see("answered: deep  ⏎ blue", "You answered: deep\nblue.", IDLE)
    chat.enter("and so on")
    chat.see("You said: and so on")
    assert "elsewhere" not in chat.text()


def test_a_choice_is_answered_by_its_number_or_its_text_h334(desk: Desk) -> None:
    chat = desk.chat()
    for times, (typed, meant) in enumerate((("2", "Friday"), ("monday", "Monday"), ("Sunday", "Sunday")), 1):
        chat.see(IDLE)
        chat.enter("choose Monday,Friday,Sunday")
        chat.wait(lambda shown, times=times: shown.count(f"\n  {CHOOSE}") == times, "the question")
        chat.see("  1  Monday\n  2  Friday\n  3  Sunday\n")
        if times == 1:
            chat.enter("4")
            chat.see("! that is none of the choices: type a number from 1 to 3, or its text")
        chat.enter(typed)
        chat.see(f"answered: {meant}", f"You answered: {meant}", IDLE) if times == 1 else chat.see(f"answered: {meant}")


def test_two_questions_are_asked_one_after_the_other_h334(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("twice")
    shown = chat.see("  │ The first?", INVITED, "? ask_user and 1 more")
    assert "│ The second?" not in shown
    # The second line was typed before the second question could be seen.
    chat.type("one\rtwo\r")
    shown = chat.see("  │ The second?", "is not asked any more; what was typed was not sent")
    chat.wait(invited(2), "the second invitation")
    chat.enter("three")
    chat.see("You answered: one | three.", IDLE)
    assert "> two" not in chat.text()


def test_what_was_typed_before_the_question_is_no_answer_h334(desk: Desk) -> None:
    desk.gates.hold("ask Which colour?/0")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("ask Which colour?")
    desk.gates.reached("ask Which colour?/0")
    chat.type("half a ")
    chat.see("> half a")
    desk.gates.open("ask Which colour?/0")
    chat.see(INVITED)
    chat.enter("line")
    chat.see("this was begun before the question could be read: it is an input", "queued    half a line")
    chat.enter("blue")
    chat.see("You answered: blue.", "> half a line", "You said: half a line", IDLE)


@pytest.mark.parametrize("how", [(), ("--plain",)], ids=["redrawn", "plain"])
def test_what_was_typed_before_the_chat_was_there_is_no_answer_h334(desk: Desk, how: tuple[str, ...]) -> None:
    """Neither a whole line nor the beginning of one."""
    asked(desk).kill()
    chat = desk.chat(*how)
    chat.type("too early\rhalf ")
    shown = chat.see("in the middle of a run", "  │ Which colour?", INVITED)
    assert "answered:" not in shown
    chat.see("queued    too early")
    chat.enter("way")
    chat.see("queued    half way")
    chat.enter("blue")
    chat.see("You answered: blue.", "You said: too early", "You said: half way")


def test_a_word_that_was_typed_before_a_call_was_shown_does_not_allow_it_h334(desk: Desk) -> None:
    chat = desk.chat("--ask", "bash")
    chat.see(IDLE)
    chat.enter("run touch one")
    chat.see("y allows it")
    chat.kill()
    again = desk.chat("--ask", "bash")
    again.type("y\r")
    again.see("! y: this was typed before the call could be read; type it again", "waits for your word")
    assert not (desk.work / "one").exists()
    again.see("\n  y allows it")
    again.enter("y")
    again.see("bash ended.", IDLE)


# --- not now, never, elsewhere -----------------------------------------------------------------------------------


def test_a_question_may_be_left_for_later_and_taken_up_again_h334(desk: Desk) -> None:
    chat = asked(desk)
    chat.enter("/later")
    chat.see("for later: /answer asks again, and perdure questions answer STORE", "1 question for later")
    chat.enter("something else")
    chat.see("queued    something else")
    chat.enter("/answer")
    chat.wait(invited(2), "the question once more")
    chat.enter("/answer blue")
    chat.see("answered: blue", "You answered: blue.", "You said: something else", IDLE)
    chat.enter("/answer")
    chat.see("Nothing is asked.")
    chat.enter("/later")
    chat.wait(lambda shown: shown.count("Nothing is asked.") == 2, "the second answer")
    chat.enter("/answer blue")
    chat.see("! no question is asked")


def test_control_c_withdraws_the_question_and_control_d_leaves_it_h334(desk: Desk) -> None:
    chat = asked(desk)
    chat.control("d")
    assert chat.end() == 0
    assert "Left in the middle of a run" in chat.text()
    again = desk.chat()
    again.see("asks a person, question", "  │ Which colour?", INVITED)
    again.control("c")
    again.see("was withdrawn", "— aborted", IDLE)
    again.enter("blue")
    again.see("You said: blue", IDLE)
    assert "answered: blue" not in again.text()


def test_what_ends_with_the_one_that_is_asked_is_not_asked_h334(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("twice")
    chat.see("  │ The first?", "and 1 more")
    chat.control("c")
    assert "  │ The second?" not in chat.see("— aborted", IDLE)


def test_an_answer_from_elsewhere_is_told_and_the_line_under_way_is_not_sent_h334(desk: Desk) -> None:
    chat = asked(desk)
    task = number(chat.text())
    chat.type("bl")
    chat.see("> bl")
    done = desk.piped("questions", "answer", str(desk.store), task, "green")
    assert (done.returncode, done.stdout) == (0, f"answered: question {task}\n")
    chat.see(f"question {task} was answered elsewhere", "You answered: green.")
    chat.enter("ue")
    chat.see(f"! question {task} is not asked any more; what was typed was not sent")
    assert "You said: blue" not in chat.text()


def test_a_chat_that_was_killed_asks_again_and_not_what_was_answered_meanwhile_h334(desk: Desk) -> None:
    chat = asked(desk)
    task = number(chat.text())
    chat.kill()
    again = desk.chat()
    again.see(f"{ASKS}{task}", "  │ Which colour?", INVITED)
    assert again.text().count("  │ Which colour?") == 1
    again.kill()
    assert desk.piped("questions", "answer", str(desk.store), task, "green").returncode == 0
    last = desk.chat()
    last.see("You answered: green.", IDLE)
    assert "asks you" not in last.text()


def test_questions_of_other_conversations_are_said_to_wait(desk: Desk) -> None:
    asked(desk).kill()
    other = desk.chat("--new")
    other.see("· 1 question of other conversations waits for a person: perdure questions ls", IDLE)


# --- plain, and without a terminal -------------------------------------------------------------------------------


def test_a_plain_terminal_asks_too_h334(desk: Desk) -> None:
    desk.env["PYTHONIOENCODING"] = "ascii"
    chat = desk.chat("--plain")
    chat.see("\n>")
    chat.enter("ask Which colour?")
    chat.see(ASKS, "  ? Which colour?", "  Enter answers ? /later does not now")
    chat.enter("")
    chat.see("! nothing is no answer")
    chat.enter("blue")
    chat.see("  answered: blue", "You answered: blue.")
    chat.control("d")
    assert chat.end() == 0


def pipe(desk: Desk) -> subprocess.Popen[str]:
    program = Path(sys.executable).parent / "perdure"
    return subprocess.Popen(
        [program, "chat", "--db", desk.store, "--model", "fake:one"],
        cwd=desk.work,
        env=desk.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def hear(process: subprocess.Popen[str], words: str) -> str:
    """All that is said until these words."""
    assert process.stdout is not None
    heard = ""
    while words not in heard:
        text = process.stdout.readline()
        assert text, heard
        heard += text
    return heard


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def test_a_program_that_reads_the_question_answers_it_by_the_next_line_h334(desk: Desk) -> None:
    with pipe(desk) as process:
        say(process, "ask Which colour?\n")
        hear(process, ANSWER)
        say(process, "blue\nand so on\n")
        hear(process, "You answered: blue.")
        hear(process, "You said: and so on")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_pipe_hears_of_an_answer_from_elsewhere_h334(desk: Desk) -> None:
    with pipe(desk) as process:
        say(process, "ask Which colour?\n")
        task = number(hear(process, ANSWER))
        assert desk.piped("questions", "answer", str(desk.store), task, "green").returncode == 0
        hear(process, f"question {task} was answered elsewhere")
        hear(process, "You answered: green.")
        say(process, "and so on\n")
        hear(process, "You said: and so on")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_lines_that_were_written_before_answer_only_if_they_say_so_h334(desk: Desk) -> None:
    words = ("chat", "--db", str(desk.store), "--model", "fake:one")
    done = desk.piped(*words, lines="ask Which colour?\nrun touch one\n")
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(
        r"Left while question \d+ waits for an answer; what the next line says was written before", done.stdout
    )
    assert not (desk.work / "one").exists()
    ended = desk.piped(*words)
    assert ended.returncode == 1
    assert re.search(r"Left while question \d+ waits for an answer; it still does\.", ended.stdout)
    told = desk.piped(*words, lines="/answer blue\nand so on\n")
    assert (told.returncode, told.stderr) == (0, "")
    assert "You answered: blue." in told.stdout
    assert "You said: and so on" in told.stdout


def test_a_pipe_leaves_where_the_question_is_for_later_h334(desk: Desk) -> None:
    with pipe(desk) as process:
        say(process, "ask Which colour?\n")
        hear(process, ANSWER)
        say(process, "/later\nand so on\n")
        said = hear(process, "Left while question ")
        assert said.endswith("waits for an answer; it still does.\n")
        assert process.wait(60) == 1
    told = desk.piped("chat", "--db", str(desk.store), "--model", "fake:one", lines="/answer blue\n")
    assert (told.returncode, told.stderr) == (0, "")
    assert "You answered: blue." in told.stdout
    assert "and so on" not in told.stdout


def test_a_closed_standard_input_is_the_end_of_it_and_no_file_h334(desk: Desk) -> None:
    program = Path(sys.executable).parent / "perdure"
    words = [program, "chat", "--db", desk.store, "--model", "fake:one", "ask Which colour?"]
    done = subprocess.run(
        words,
        cwd=desk.work,
        env=desk.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: os.close(0),
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "waits for an answer; it still does." in done.stdout
    assert desk.piped("inspect", str(desk.store)).returncode == 0


def test_a_question_does_not_speak_to_the_terminal_and_is_bounded_h334(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("hostile")
    chat.see("  │ red text \\u202e", "901 more lines: perdure questions ls --json shows all", INVITED)
    assert b"\x1b]0;owned" not in chat.raw
    chat.enter("\x1b[200~y\x07\x1b[201~")
    chat.see("You answered: y", IDLE)
    chat.enter("shout")
    chat.see("a question is a text of 1 to 10000 characters", "✗ failed", IDLE)


# --- by themselves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "typed", "answer"),
    [
        ({"type": "string"}, "  as it is ", "  as it is "),
        ({"enum": ["red", "blue"]}, " 2 ", "blue"),
        ({"enum": ["red", "blue"]}, "BLUE", "blue"),
        ({"enum": ["red", "blue"]}, "#1", "red"),
        ({"enum": ["a", "A"]}, "A", "A"),
        ({"enum": ["a", "A"]}, "á", None),
        ({"enum": ["2", "1"]}, "2", "2"),
        ({"enum": ["2", "1"]}, "#2", "1"),
        ({"enum": ["20", "10"]}, "1", None),
        ({"enum": [7, None]}, "7", 7),
        ({"enum": [7, None]}, "null", None),
        ({"const": "only"}, "1", "only"),
        ({"enum": ["red"]}, "0", None),
        ({"enum": ["red"]}, "²", None),
        ({"enum": ["red"]}, "2", None),
    ],
)
def test_what_is_chosen_h334(schema: dict[str, JsonValue], typed: str, answer: JsonValue) -> None:
    if answer is None and typed != "null":
        with pytest.raises(CommandError, match="none of the choices"):
            chosen(schema, typed)
    else:
        assert chosen(schema, typed) == answer


def test_all_of_a_choice_is_shown_h334() -> None:
    questions = Questions()
    schema: dict[str, JsonValue] = {"enum": ["no", "delete all\ryes", "\x1b[8mhidden\x1b[0m\nand more"]}
    questions._open[4] = Asking(4, "t", "Really?", schema)
    shown = [rendered(each, "none") for each in questions.present() or ()]
    assert shown[2:] == ["  1  no", "  2  delete all⟨U+000D⟩yes", "  3  ⟨U+001B⟩[8mhidden⟨U+001B⟩[0m ⏎ and more"]
    assert rendered(answer_line(chosen(schema, "2")), "none") == "  answered: delete all⟨U+000D⟩yes"


def test_those_for_later_are_asked_again_before_all_others_h334() -> None:
    questions = Questions()
    for task in (4, 5, 6):
        questions._open[task] = Asking(task, "t", "?", {"type": "string"})
    assert questions.present() is not None
    assert [questions.set_aside(), questions.set_aside()] == [Asking(4, "t", "?", {}), Asking(5, "t", "?", {})]
    assert (questions.first, questions.aside) == (Asking(6, "t", "?", {}), 2)
    questions.over(5)
    assert questions.bring_back() == 1
    assert questions.first == Asking(4, "t", "?", {})
    assert questions.behind == 1


async def test_half_a_line_of_a_terminal_counts_as_typed() -> None:
    master, slave = os.openpty()
    try:
        os.write(master, b"half")
        for _ in range(10_000):  # it is on its way through the kernel
            if bytes_waiting(slave) == 4:
                break
            await asyncio.sleep(0.001)
        reader = LineReader(slave)
        assert await reader.typed() == 4
        os.write(master, b" a line\n")
        assert await reader.line() == ("half a line", 0)
        os.write(master, b"next\n")
        assert await reader.line() == ("next", 12)
        reader.forget()
    finally:
        os.close(master)


async def test_a_line_is_about_what_was_asked_when_it_was_begun_h334() -> None:
    reading, writing = os.pipe()
    screen = PlainScreen(Paper(), "none", Secrets({}), asks=False)
    screen._reader = LineReader(reading)
    os.write(writing, b"before\nbegun ")
    screen.invite("one", line("how"))
    await screen.invitation()
    assert screen.invited == "one"
    os.write(writing, b"before too\nabout one\nbegun ")
    screen.invite("two", line("how"))
    await screen.invitation()
    os.write(writing, b"with one\nabout two\n")
    found = [await screen.next_input() for _ in range(5)]
    assert [each and each.about for each in found] == [None, None, "one", "one", "two"]
    screen.invite(None)
    await screen.invitation()
    os.write(writing, b"nothing\n")
    os.close(writing)
    last = await screen.next_input()
    assert last is not None
    assert last.about is None
    assert await screen.next_input() is None
    os.close(reading)


class Unread(Paper):
    """Nobody reads what is written, until then."""

    def __init__(self) -> None:
        super().__init__()
        self.read = asyncio.Event()

    @override
    async def written(self) -> None:
        await self.read.wait()


async def nothing_happens() -> AsyncIterator[object]:
    await asyncio.Event().wait()
    yield None


async def test_who_has_left_is_not_asked_any_more() -> None:
    paper = Unread()
    screen = PlainScreen(paper, "none", Secrets({}), asks=False)
    story = Story(screen, now=lambda: 0, echoed=False)
    conversation = cast("Conversation", SimpleNamespace(busy=None))
    chat = Chat(cast("Harness", None), conversation, screen, story, Catalogue(None))
    story.busy = True
    screen.invite("one", line("how"))
    chat.leave()
    await chat.answer_lines(cast("Events", nothing_happens()), None)
    paper.read.set()
    await screen.invitation()
    assert (screen.invited, paper.text) == (None, "")
