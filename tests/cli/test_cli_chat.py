"""``perdure chat`` in a real terminal: what is typed, and what is seen (rules H14, H24, H53, H68, H147)."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_terminal import Gates, Terminal, environment, gates, piped, short_folder

ESCAPE = re.compile(rb"\x1b|\x9b|\x08")


class Desk:
    """Somebody's directory, store and terminals."""

    def __init__(self, folder: Path, gates: Gates) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        self.store = folder / "agent.db"
        self.gates = gates
        self.env = environment(folder, CHAT_GATES=str(gates.path))
        self._terminals: list[Terminal] = []

    def chat(self, *words: str, model: str | None = "fake:one", rows: int = 40, columns: int = 100) -> Terminal:
        chosen = () if model is None else ("--model", model)
        return self.perdure("chat", "--db", str(self.store), *chosen, *words, rows=rows, columns=columns)

    def perdure(self, *words: str, rows: int = 40, columns: int = 100) -> Terminal:
        terminal = Terminal(*words, cwd=self.work, env=self.env, rows=rows, columns=columns)
        self._terminals.append(terminal)
        return terminal

    def piped(self, *words: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        return piped(*words, cwd=self.work, env=self.env, lines=lines)

    def close(self) -> None:
        for terminal in self._terminals:
            terminal.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with short_folder() as folder, gates(folder) as made:
        desk = Desk(folder, made)
        yield desk
        desk.close()
        # A command whose host was killed may still wait at the fifo: an end of it lets the command go.
        with contextlib.suppress(OSError):
            os.close(os.open(desk.work / "gate", os.O_WRONLY | os.O_NONBLOCK))


def count(text: str, times: int) -> Callable[[str], bool]:
    return lambda shown: shown.count(text) == times


IDLE = "Enter sends"
BUSY = "● working"

# --- streaming, and what stands below ----------------------------------------------------------------------------


def test_an_answer_is_seen_while_it_comes_and_once_it_is_there(desk: Desk) -> None:
    desk.gates.hold("long/6")
    chat = desk.chat(columns=80)
    shown = chat.see("perdure chat · fake:one · ", IDLE)
    assert str(desk.work) in shown.replace("\n", "")
    chat.enter("long")
    desk.gates.reached("long/6")
    shown = chat.see("> long", "sentence number 1", BUSY)
    assert "number 12" not in shown
    desk.gates.open("long/6")
    shown = chat.see("sentence number 12 of a long answer.", "10 in · 10 out", IDLE)
    told = " ".join(shown.split())
    assert all(told.count(f"This is sentence number {number} of a long answer.") == 1 for number in range(1, 13))
    # Lines are broken between words.
    assert all(len(line) < 80 for line in shown.splitlines())
    assert "sentence number 1 of a long answer. This is sentence number 2 of a long\nanswer." in shown


def test_thinking_calls_and_diffs_have_their_looks(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("think about it")
    chat.see("First this, then that.\nTherefore yes.", IDLE)
    assert b"\x1b[2mFirst this, then that.\x1b[0m" in chat.raw
    chat.enter("write")
    chat.see("▸ write  notes.txt\n  │ Created notes.txt (14 bytes).", "write ended.")
    chat.enter("edit")
    chat.see("▸ edit  notes.txt\n  @@ -1,3 +1,3 @@\n   one\n  -two\n  +zwei\n   three\n", "edit ended.")
    assert b"\x1b[31m  -two\x1b[0m" in chat.raw
    assert b"\x1b[32m  +zwei\x1b[0m" in chat.raw
    chat.enter("read")
    chat.see("▸ read  notes.txt\n  │ 3 lines\n", "read ended.")
    chat.enter("both")
    chat.see("▸ bash  echo one\n  │ one\n▸ bash  echo two\n  │ two\n", "bash ended.")
    assert (desk.work / "notes.txt").read_text() == "one\nzwei\nthree\n"


def test_output_is_seen_while_its_command_runs_and_bounded_after(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("run seq 100; cat gate; exit 3")
    shown = chat.see("▸ bash  seq 100; cat gate; exit 3", "  │ 100", BUSY)
    assert "  │ 95\n" not in shown
    (desk.work / "gate").write_text("through\n")
    shown = chat.see("  ┆ 90 lines", "  │ through\n  │ [Exit code 3.]\n  ✗ failed\n", "bash failed.", IDLE)
    assert shown.count("▸ bash") == 1


# --- typing while it works ---------------------------------------------------------------------------------------


def test_enter_queues_and_an_exclamation_mark_or_a_key_steers(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("run cat gate")
    chat.see("▸ bash  cat gate", BUSY)
    chat.enter("markers after")
    chat.see("queued    markers after")
    chat.enter("!to the left")
    chat.see("steering  to the left")
    chat.type("to the right")
    chat.see("> to the right")
    chat.control("s")
    chat.see("steering  to the right")
    chat.type("straight on")
    chat.see("> straight on")
    chat.type("\x1b\r")
    chat.see("steering  straight on")
    assert "> markers" not in chat.text()
    (desk.work / "gate").write_text("through\n")
    # Steers join the run after its calls; the follow-up has a run of its own.
    chat.see("! to the left", "! to the right", "! straight on", "> markers after")
    shown = chat.see("straight on | markers after")
    order = [shown.index(text) for text in ("│ through", "! to the left", "You said", "> markers after")]
    assert order == sorted(order)
    chat.see(IDLE)
    assert not [line for line in chat.display() if line.startswith(("queued", "steering"))]


def test_a_line_goes_on_after_a_backslash_and_what_is_no_command_is_said(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("one\\")
    chat.enter("two")
    chat.see("> one\n  two\n", "You said: one\ntwo")
    chat.enter("/etc is a path")
    chat.see("! there is no command /etc; /help lists them.")
    chat.enter(" /etc is a path")
    chat.see("You said: /etc is a path")
    # Pasted text is one input, whatever ends its lines.
    chat.type("\x1b[200~three\rfour\x1b[201~")
    chat.enter("")
    chat.see("You said: three\nfour")


def test_commands(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    assert not chat.cooked
    chat.enter("/help")
    chat.see("steers: joins the run after the calls that are under way", "/reset [text]")
    chat.enter("/name the big one")
    chat.see("The conversation is named the big one.")
    chat.enter("/model fake:two")
    chat.see("From the next request on fake:two is asked.")
    chat.enter("/model nobody:x")
    chat.see("! no adapter for provider 'nobody' is installed")
    chat.enter("/abort")
    chat.see("Nothing runs.")
    chat.enter("before")
    chat.see("You said: before")
    chat.enter("/compact")
    chat.see("! the context was not summed up: nothing_to_compact")
    chat.enter("/reset go on from here")
    chat.see("— the model's context begins anew —", "> go on from here")
    chat.enter("markers")
    chat.see("go on from here | markers")
    assert "before | go on" not in chat.text()
    chat.enter("/quit")
    assert chat.end() == 0
    assert chat.cooked
    listed = desk.piped("ls", str(desk.store)).stdout
    assert "the big one" in listed


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


def test_control_c_aborts_and_the_next_one_leaves(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("run echo begun; cat gate")
    chat.see("│ begun", BUSY)
    chat.enter("and then")
    chat.see("queued    and then")
    chat.control("c")
    chat.see("✗ aborted", "— aborted", "withdrawn and then", IDLE)
    chat.enter("hello again")
    chat.see("You said: hello again", IDLE)
    chat.type("half an input")
    chat.see("> half an input")
    chat.control("c")  # takes back what is typed
    chat.wait(lambda shown: "> half an input" not in shown, "an empty input")
    chat.control("c")
    assert chat.end() == 0
    assert "middle of a run" not in chat.text()


def test_a_second_control_c_at_once_leaves_what_is_stopping(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    chat = desk.chat()
    chat.see(IDLE)
    # It takes two seconds of grace to stop, so that the second key finds it stopping.
    chat.enter("run trap '' TERM INT; echo begun; while true; do read line < gate; done")
    chat.see("│ begun", BUSY)
    chat.control("c")
    chat.see("● stopping")
    chat.control("c")
    assert chat.end() == 0
    assert "Left while the run was being ended; it does not go on." in chat.text()
    again = desk.chat("--continue")
    again.see("— aborted", IDLE)
    again.control("d")
    assert again.end() == 0


def test_signals_from_outside_do_what_keys_do(desk: Desk) -> None:
    desk.gates.hold("long/3")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("long")
    desk.gates.reached("long/3")
    chat.see("This is", BUSY)
    chat.process.send_signal(signal.SIGINT)
    chat.see("— aborted", IDLE)
    chat.process.send_signal(signal.SIGTERM)
    assert chat.end() == 0
    assert chat.cooked


# --- killed ------------------------------------------------------------------------------------------------------


def test_killed_in_a_tool_it_says_what_was_interrupted_and_goes_on(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("run echo so far; cat gate")
    chat.see("│ so far", BUSY)
    chat.enter("markers later")
    chat.see("queued    markers later")
    chat.enter("!meanwhile")
    chat.see("steering  meanwhile")
    chat.kill()
    told = desk.piped("show", str(desk.store)).stdout
    assert told.endswith("— a run is under way\n▸ bash  echo so far; cat gate\n  │ so far\n")
    again = desk.chat("--continue", model=None)
    shown = again.see("You said", "run echo so far; cat gate | meanwhile | markers later", IDLE)
    told = shown[shown.index("was killed") :]
    assert f"Process {chat.process.pid} was killed in the middle of a run. It goes on from what is stored." in shown
    order = [
        "▸ bash  echo so far; cat gate\n  │ so far\n  was running, with the output above until then",
        "queued    markers later\nsteering  meanwhile\n",
        "✗ interrupted; it is not run again by itself, and the model is told",
        "! meanwhile",
        "You said: meanwhile",
        "> markers later",
    ]
    places = [told.index(text) for text in order]
    assert places == sorted(places)


def test_killed_while_it_answers_it_asks_again(desk: Desk) -> None:
    desk.gates.hold("long/8")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("long")
    desk.gates.reached("long/8")
    chat.see("This is sentence number 2", BUSY)
    chat.kill()
    told = desk.piped("show", str(desk.store)).stdout
    assert "— a run is under way\nThis is sentence number 1 of a long answer." in told
    desk.gates.open("long/8")
    again = desk.chat(model=None)  # without --continue too: it was left in the middle of a run
    shown = again.see("sentence number 12", IDLE)
    assert "The answer was cut off, after “This is sentence number 1" in shown
    assert "— cut off: the process ended before the answer did" in shown
    told = " ".join(shown[shown.index("— cut off:") :].split())
    assert told.count("This is sentence number 1 of a long answer.") == 1


def test_what_waits_after_a_failed_run_is_told(desk: Desk) -> None:
    desk.gates.hold("fail/0")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("fail")
    desk.gates.reached("fail/0")
    chat.enter("wait for it")
    chat.see("queued    wait for it")
    desk.gates.open("fail/0")
    chat.see("! the run ended without an answer. model_error: authentication")
    chat.see("1 input waiting; the next one starts them")
    chat.kill()
    again = desk.chat(model=None)
    again.see("This waits from before; the next input starts it.", "queued    wait for it")
    again.enter("now")
    again.see("You said: wait for it", "You said: now", IDLE)


# --- what it is started with -------------------------------------------------------------------------------------


def test_conversations_are_found_again(desk: Desk) -> None:
    def once(*words: str, model: str | None = None, until: str = IDLE) -> str:
        chat = desk.chat(*words, model=model)
        chat.see(until, IDLE)
        chat.enter("/quit")
        assert chat.end() == 0
        return chat.text()

    # What is given on the command line is said when the chat is idle already: only the answer tells that it was.
    assert "conversation 2 in" in once("hello", model="fake:one", until="You said: hello")
    shown = once("hello two", "--name", "other", until="You said: hello two")
    assert "conversation 2 in" not in shown
    assert "> hello two\n" in shown
    shown = once("--continue")
    assert "“other”" in shown
    assert "> hello two\nYou said: hello two" in shown
    assert "> hello\n" in once("--conversation", "2")
    fresh = once("--new")
    assert "> hello" not in fresh
    number = re.search(r"conversation (\d+) in", fresh)
    assert number is not None
    # Nothing was said there, so that a new one need not be made.
    assert f"conversation {number[1]} in" in once()
    # The model of the conversation that was used last is asked, unless another is named.
    assert "perdure chat · fake:one · " in fresh
    assert "perdure chat · fake:two · " in once("--name", "other", model="fake:two")
    assert "perdure chat · fake:two · " in once("--name", "other")


def test_it_works_where_the_conversation_was(desk: Desk) -> None:
    other = desk.folder / "other"
    other.mkdir()
    chat = desk.chat("--dir", str(other))
    chat.see(IDLE)
    chat.enter("write")
    chat.see("write ended.", IDLE)
    chat.enter("/quit")
    assert chat.end() == 0
    assert (other / "notes.txt").exists()
    again = desk.chat("--continue")
    again.see(f"· {other}", IDLE)
    again.enter("read")
    again.see("│ 3 lines", IDLE)
    elsewhere = desk.piped("chat", "--db", str(desk.store), "--dir", str(desk.folder / "nowhere"))
    assert (elsewhere.returncode, elsewhere.stdout) == (1, "")
    assert "there is no such directory" in elsewhere.stderr


def test_its_own_store_is_private(desk: Desk) -> None:
    done = desk.piped("chat", "--model", "fake:one", "hello")
    assert (done.returncode, done.stderr) == (0, "")
    store = desk.folder / ".local" / "share" / "perdure" / "chat.db"
    assert store.stat().st_mode & 0o777 == 0o600
    assert store.parent.stat().st_mode & 0o777 == 0o700
    assert "You said: hello" in desk.piped("show").stdout


def test_a_store_that_is_open_elsewhere_is_said_to_be(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    done = desk.piped("chat", "--db", str(desk.store), "--model", "fake:one")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"held by process {chat.process.pid}" in done.stderr
    assert f"perdure send {desk.store} TEXT" in done.stderr


def test_a_store_is_taken_over_from_a_chat_that_is_frozen_k177(desk: Desk) -> None:
    chat = desk.chat()
    chat.see(IDLE)
    chat.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, chat.process.pid, os.WSTOPPED | os.WNOWAIT)
    words = ("chat", "--db", str(desk.store), "--model", "fake:one")
    refused = desk.piped(*words, "hello")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"kill -CONT {chat.process.pid}" in refused.stderr
    assert "perdure chat --takeover" in refused.stderr
    taken = desk.piped(*words, "--takeover", "hello")
    assert (taken.returncode, taken.stderr) == (0, "")
    assert "You said: hello" in taken.stdout
    chat.process.send_signal(signal.SIGCONT)
    chat.enter("late")
    assert chat.process.wait(timeout=60) == 1
    told = desk.piped("show", str(desk.store)).stdout
    assert "hello" in told
    assert "late" not in told


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "no model is chosen: --model provider:name, or set PERDURE_MODEL"),
        ("gpt", "a model is named provider:name"),
        ("nobody:x", "no adapter for provider 'nobody' is installed"),
        ("nobody:x", "pip install 'perdure[models]'"),
        ("keyless:x", "KEYLESS_API_KEY is not set"),
        ("broken:x", "lacks chat_fakes_that_are_missing; pip install 'perdure[models]'"),
    ],
)
def test_a_model_that_cannot_be_asked_is_said_with_what_to_do(desk: Desk, model: str | None, words: str) -> None:
    done = desk.piped("chat", "--db", str(desk.store), *(() if model is None else ("--model", model)))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("perdure chat: ")
    assert words in done.stderr
    assert "--model scripted" in done.stderr
    assert not desk.store.exists()


def test_the_environment_may_name_the_model(desk: Desk) -> None:
    desk.env["PERDURE_MODEL"] = "fake:env"
    done = desk.piped("chat", "--db", str(desk.store), "hello")
    assert (done.returncode, done.stderr) == (0, "")
    chat = desk.chat("--continue", model=None)
    chat.see("perdure chat · fake:env · ", IDLE)


def test_the_scripted_model_needs_nothing(desk: Desk) -> None:
    chat = desk.chat(model="scripted")
    chat.see("perdure chat · scripted:echo · ", IDLE)
    chat.enter("good morning")
    chat.see("> good morning\ngood morning\n")
    chat.enter("run echo a; echo b")
    chat.see("▸ bash  echo a; echo b\n  │ a\n  │ b\nIt ended with: b\n")


# --- plain, and without a terminal -------------------------------------------------------------------------------


def test_plain_has_no_escape_sequence_and_says_all_the_same(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    desk.gates.hold("long/6")
    chat = desk.chat("--plain", rows=200)
    chat.see("conversation 2", "\n>")
    chat.enter("long")
    desk.gates.reached("long/6")
    chat.see("This is sentence number 2")
    chat.enter("run seq 30; cat gate")
    chat.see("queued    run seq 30; cat gate")
    desk.gates.open("long/6")
    shown = chat.see("> run seq 30; cat gate\n▸ bash  seq 30; cat gate\n  │ 1\n", "  │ 20\n")
    assert "  │ 21\n" not in shown
    chat.enter("!by the way")
    chat.see("steering  by the way")
    (desk.work / "gate").write_text("through\n")
    chat.see("  │ through\n", "! by the way", "You said: by the way", "20 in · 20 out")
    chat.control("c")
    assert chat.end() == 0
    assert not ESCAPE.search(chat.raw)
    # What was typed is on the screen already, and is not told again.
    assert chat.text().count("> long") == 1


def test_plain_control_c_aborts_and_leaves(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    chat = desk.chat("--plain")
    chat.see("\n>")
    chat.enter("run echo begun; cat gate")
    chat.see("│ begun")
    chat.control("c")
    chat.see("✗ aborted", "— aborted")
    chat.wait(lambda shown: shown.rstrip("\n").endswith("\n>"), "the next prompt")
    chat.control("c")
    assert chat.end() == 0


def test_a_terminal_that_can_do_nothing_gets_plain_lines(desk: Desk) -> None:
    desk.env["TERM"] = "dumb"
    chat = desk.chat()
    chat.see("\n>")
    chat.enter("hello")
    chat.see("You said: hello")
    chat.control("d")
    assert chat.end() == 0
    assert not ESCAPE.search(chat.raw)


def test_no_color_leaves_the_colours_out(desk: Desk) -> None:
    desk.env["NO_COLOR"] = "1"
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("write")
    chat.see("write ended.")
    chat.enter("edit")
    chat.see("  +zwei", "edit ended.", IDLE)
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7][0-9;]*m", chat.raw)


def test_lines_of_a_pipe_are_answered_one_after_the_other(desk: Desk) -> None:
    lines = "first\nrun echo out; echo err >&2\n\n/name piped\nlast line \\\ngoes on\nno end"
    done = desk.piped("chat", "--db", str(desk.store), "--model", "fake:one", lines=lines)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "\n> first\nYou said: first\n  10 in · 10 out · 20 tokens in all\n"
        "\n> run echo out; echo err >&2\n▸ bash  echo out; echo err >&2\n  │ out\n  │ err\nbash ended.\n"
        "  20 in · 20 out · 60 tokens in all\n"
        "The conversation is named piped.\n"
        "\n> last line \n  goes on\nYou said: last line \ngoes on\n  10 in · 10 out · 80 tokens in all\n"
        "\n> no end\nYou said: no end\n  10 in · 10 out · 100 tokens in all\n"
    )


def test_what_a_model_costs_is_told_where_it_is_known(desk: Desk) -> None:
    done = desk.piped("chat", "--db", str(desk.store), "--model", "fake:priced", "hello")
    assert done.stdout.endswith("  10 in · 10 out · 20 tokens in all · $0.100 in all\n")


def test_a_pipe_that_gets_no_answer_ends_with_1(desk: Desk) -> None:
    done = desk.piped("chat", "--db", str(desk.store), "--model", "fake:one", lines="fail\nhello\n")
    assert done.returncode == 1
    assert "! the run ended without an answer. model_error: authentication" in done.stdout
    assert "You said: hello" in done.stdout


def test_an_interrupted_pipe_aborts_and_ends(desk: Desk) -> None:
    desk.gates.hold("long/4")
    program = Path(sys.executable).parent / "perdure"
    words = [program, "chat", "--db", desk.store, "--model", "fake:one"]
    process = subprocess.Popen(words, cwd=desk.work, env=desk.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"long\nhello\n")
    process.stdin.flush()
    desk.gates.reached("long/4")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"hello" not in output
    assert "busy" not in desk.piped("ls", str(desk.store)).stdout


def test_a_pipe_goes_on_where_a_killed_chat_was(desk: Desk) -> None:
    desk.gates.hold("long/4")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("long")
    desk.gates.reached("long/4")
    chat.see("This is", BUSY)
    chat.kill()
    desk.gates.open("long/4")
    done = desk.piped("chat", "--db", str(desk.store), lines="and now\n")
    assert (done.returncode, done.stderr) == (0, "")
    told = [done.stdout.index(text) for text in ("was killed", "sentence number 12", "> and now", "You said: and now")]
    assert told == sorted(told)


# --- harm --------------------------------------------------------------------------------------------------------


def test_a_terminal_is_not_spoken_to_by_models_and_keys_are_not_shown(desk: Desk) -> None:
    desk.env["SOME_API_KEY"] = "sk-it-must-not-be-shown-0123456789"
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("escape")
    chat.see("red text and a title  and \\u202eturned", IDLE)
    assert b"\x1b]0;owned" not in chat.raw
    chat.enter("leak")
    chat.see("I saw [SOME_API_KEY] there.", IDLE)
    chat.enter("fail")
    chat.see("the key [SOME_API_KEY] is not one", IDLE)
    chat.enter("run echo $SOME_API_KEY")
    chat.see("  │ [SOME_API_KEY]", "bash ended.")
    assert b"must-not-be-shown" not in chat.raw


def test_it_may_be_resized_while_it_streams(desk: Desk) -> None:
    desk.gates.hold("long/8")
    chat = desk.chat(columns=80, rows=30)
    chat.see(IDLE)
    chat.enter("long")
    desk.gates.reached("long/8")
    chat.see("sentence number 2", BUSY)
    chat.resize(12, 30)
    chat.wait(lambda _: any(line.startswith("● working") for line in chat._screen.display), "a redrawn status")
    chat.resize(40, 120)
    desk.gates.open("long/8")
    chat.see("sentence number 12", IDLE)
    chat.enter("/quit")
    assert chat.end() == 0


def test_a_window_that_is_closed_leaves_a_closed_store(desk: Desk) -> None:
    desk.gates.hold("long/8")
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("long")
    desk.gates.reached("long/8")
    chat.hang_up()
    chat.process.wait(60)
    desk.gates.open("long/8")
    assert "not open\n" in desk.piped("inspect", str(desk.store)).stdout
    again = desk.chat("--continue", model=None)
    again.see("The last chat was left in the middle of a run.", "sentence number 12", IDLE)


def test_a_reader_that_goes_away_ends_it(desk: Desk) -> None:
    program = Path(sys.executable).parent / "perdure"
    words = [program, "chat", "--db", desk.store, "--model", "fake:one"]
    process = subprocess.Popen(
        words, cwd=desk.work, env=desk.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(b"hello\nagain\n", timeout=60)
    assert (process.returncode, errors) == (1, b"")
    assert "not open\n" in desk.piped("inspect", str(desk.store)).stdout


def test_a_disk_that_is_full_ends_it_with_the_cause(desk: Desk) -> None:
    """Files may not grow beyond 300 KiB here: the store takes some of the lines and not all."""
    program = Path(sys.executable).parent / "perdure"
    words = [program, "chat", "--db", desk.store, "--model", "fake:one"]
    done = subprocess.run(
        words,
        cwd=desk.work,
        env=desk.env,
        input=("word " * 4000 + "\n") * 40,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300 * 1024, 300 * 1024)),
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "! the session ended: StorageError: " in done.stdout
    assert "could not be written to" in done.stdout
    again = desk.piped("chat", "--db", str(desk.store), "--continue", lines="hello\n")
    assert again.returncode == 0
    assert "You said: hello" in again.stdout


def test_what_another_terminal_sends_is_seen(desk: Desk) -> None:
    os.mkfifo(desk.work / "gate")
    chat = desk.chat()
    chat.see(IDLE)
    assert desk.piped("send", str(desk.store), "from there").returncode == 0
    chat.see("> from there", "You said: from there", IDLE)
    chat.enter("run cat gate")
    chat.see("▸ bash  cat gate", BUSY)
    assert desk.piped("send", str(desk.store), "more", "--steer").returncode == 0
    chat.see("steering  more")
    (desk.work / "gate").write_text("through\n")
    chat.see("! more", "You said: more", IDLE)


def test_a_conversation_that_is_deleted_from_another_terminal_ends_the_chat(desk: Desk) -> None:
    """Rules H182 and H183; and who deletes at a terminal is asked."""
    chat = desk.chat()
    chat.see(IDLE)
    chat.enter("hello")
    chat.see("You said: hello", IDLE)
    asked = desk.perdure("rm", str(desk.store), "2")
    asked.see("conversation 2", "Delete for ever? [y/N]:")
    asked.enter("y")
    asked.see("deleted conversation 2")
    assert asked.end() == 0
    chat.see("! the conversation was deleted")
    assert chat.end() == 1
    assert desk.piped("ls", str(desk.store)).stdout == "no conversations yet\n"
