"""``perdure chat --space`` in a real terminal: what becomes of a command when the chat or the daemon is killed (S147 to
S162), and what is said of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_terminal import PATIENCE_S, Terminal, environment, piped, short_folder

from perdure.spaces import LocalSpaces
from perdure.spaces.local_look import LocalLook, look

IDLE = "Enter sends"
BUSY = "● working"
WAIT = "run echo one >> log; echo so far; while [ ! -e ../gate ]; do sleep 0.05; done; echo two >> log; wc -l < log"


class Desk:
    """Somebody's directory, store and terminals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.site.mkdir()
        self.store = folder / "agent.db"
        self.env = environment(folder)
        self._terminals: list[Terminal] = []

    def chat(self, *words: str | Path, fresh: bool = True) -> Terminal:
        """``fresh``: in a Space, which a store knows afterwards."""
        begun = ("--model", "scripted", "--space", self.site) if fresh else ("--continue",)
        terminal = Terminal("chat", "--db", self.store, *begun, *words, cwd=self.folder, env=self.env)
        self._terminals.append(terminal)
        return terminal

    def piped(self, *words: str | Path, lines: str = "") -> tuple[int, str]:
        done = piped(*words, cwd=self.folder, env=self.env, lines=lines)
        return done.returncode, done.stdout + done.stderr

    def space(self) -> LocalLook:
        (found,) = asyncio.run(look(self.site))
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.02)

    def begun(self) -> Terminal:
        """A chat whose command runs."""
        chat = self.chat()
        chat.see(IDLE)
        chat.enter(WAIT)
        chat.see("│ so far", BUSY)
        return chat

    def kill_daemon(self) -> None:
        daemon = self.space().daemon
        assert daemon is not None
        os.kill(daemon, signal.SIGKILL)

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    @property
    def log(self) -> str:
        path = self.site / "log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        for terminal in self._terminals:
            terminal.close()
        self.open_gate()
        home = self.folder / ".site.perdure"
        if home.exists():
            asyncio.run(LocalSpaces(home).delete("site"))


@pytest.fixture
def desk() -> Iterator[Desk]:
    with short_folder() as folder:
        desk = Desk(folder)
        yield desk
        desk.close()


# --- killed ------------------------------------------------------------------------------------------------------


def test_a_command_outlives_a_killed_chat_and_is_gone_on_with_s152(desk: Desk) -> None:
    chat = desk.begun()
    assert "in the Space site, generation 1, no image yet" in chat.text()
    chat.kill()
    again = desk.chat(fresh=False)
    shown = again.see("↻ bash: reattached, its command was still running", BUSY)
    assert f"Process {chat.process.pid} was killed in the middle of a run. It goes on from what is stored." in shown
    assert "was running in its Space: its command goes on there, or is undone" in shown
    assert "in the Space site, generation 1, image 1" in shown
    desk.open_gate()
    again.see("It ended with: 2", IDLE)
    assert desk.log == "one\ntwo\n"


def test_a_command_that_ended_meanwhile_is_adopted_s153(desk: Desk) -> None:
    chat = desk.begun()
    chat.kill()
    desk.open_gate()

    def ended() -> bool:
        status = desk.space().status
        return status is not None and not status.commands

    desk.until(ended, "the end of the command")
    again = desk.chat(fresh=False)
    again.see("↻ bash: adopted, its command had ended", "It ended with: 2", IDLE)
    assert desk.log == "one\ntwo\n"


def test_a_killed_daemon_is_nobodys_result_s160(desk: Desk) -> None:
    chat = desk.begun()
    desk.kill_daemon()
    chat.see("↻ bash: reattached, its command was still running", BUSY)
    desk.open_gate()
    chat.see("It ended with: 2", IDLE)
    assert desk.log == "one\ntwo\n"


def test_chat_and_daemon_may_be_killed_again_and_again_s152(desk: Desk) -> None:
    desk.begun().kill()
    desk.kill_daemon()
    again = desk.chat(fresh=False)
    again.see("↻ bash: reattached, its command was still running", BUSY)
    desk.kill_daemon()
    again.kill()
    last = desk.chat(fresh=False)
    last.see("↻ bash: reattached, its command was still running", BUSY)
    desk.open_gate()
    last.see("It ended with: 2", IDLE)
    assert desk.log == "one\ntwo\n"


def test_what_the_daemon_knew_is_lost_and_the_command_is_undone_and_run_again_s150(desk: Desk) -> None:
    chat = desk.begun()
    chat.kill()
    found = desk.space()
    desk.kill_daemon()
    shutil.rmtree(found.folder.state)
    again = desk.chat(fresh=False)
    again.see("↻ bash: undone, and run again", BUSY)
    assert "in the Space site, generation 2" in again.text()
    desk.open_gate()
    again.see("It ended with: 2", IDLE)
    assert desk.log == "one\ntwo\n"
    again.kill()
    _, shown = desk.piped("space", "show", desk.store, desk.site)
    assert "rerun" in shown


def test_what_was_recovered_earlier_in_a_run_is_told_again_s162(desk: Desk) -> None:
    desk.begun().kill()
    found = desk.space()
    desk.kill_daemon()
    shutil.rmtree(found.folder.state)
    again = desk.chat(fresh=False)
    again.see("↻ bash: undone, and run again", "│ so far", BUSY)
    desk.until(lambda: desk.log == "one\n", "the command's second beginning")
    again.kill()
    last = desk.chat(fresh=False)
    shown = last.see("↻ bash: reattached", BUSY)
    assert ": rerun, the workspace was not that of the attempt any more; undone" in shown


# --- which Space -------------------------------------------------------------------------------------------------


def test_a_store_remembers_that_a_directory_is_a_space_s145(desk: Desk) -> None:
    first = desk.piped(
        "chat", "--db", desk.store, "--model", "scripted", "--space", desk.site, lines="run echo a > a\n"
    )
    assert first[0] == 0
    (desk.site / "mine").write_text("mine")
    code, shown = desk.piped("chat", "--db", desk.store, "--continue", lines="run cat mine; exit 3\n")
    assert code == 0
    assert "mine" in shown
    _, listed = desk.piped("space", "show", desk.store)
    assert "2 calls, 2 external changes" in listed
    # Also by another name of the directory.
    (desk.folder / "link").symlink_to(desk.site)
    desk.piped("chat", "--db", desk.store, "--new", "--dir", desk.folder / "link", lines="run true\n")
    assert "3 calls, 2 external changes" in desk.piped("space", "show", desk.store)[1]
    # And not of another one.
    desk.piped("chat", "--db", desk.store, "--new", "--dir", desk.folder, lines="run true\n")
    assert "3 calls, 2 external changes" in desk.piped("space", "show", desk.store)[1]


def test_a_directory_that_another_store_changed_is_not_brought_back_s141(desk: Desk) -> None:
    for store in ("agent.db", "other.db"):
        words = ("chat", "--db", desk.folder / store, "--model", "scripted", "--space", desk.site)
        assert desk.piped(*words, lines=f"run echo {store} >> log\n")[0] == 0
    code, said = desk.piped("chat", "--db", desk.store, "--continue", lines="run cat log\n")
    assert code == 1
    assert "was worked in with another store since" in said
    assert "perdure space restore" in said
    assert desk.log == "agent.db\nother.db\n"
    assert desk.piped("chat", "--db", desk.folder / "other.db", "--continue", lines="run cat log\n")[0] == 0


def test_two_directories_of_one_name_are_not_one_space_s105(desk: Desk) -> None:
    words = ("chat", "--db", desk.store, "--model", "scripted", "--space")
    assert desk.piped(*words, desk.site, lines="run echo a > a\n")[0] == 0
    other = desk.folder / "other" / "site"
    other.mkdir(parents=True)
    (other / "precious").write_text("mine")
    code, said = desk.piped(*words, other, lines="run true\n")
    assert code == 1
    assert "the Space site of this store has its files in" in said
    assert "--db" in said
    assert [path.name for path in other.parent.iterdir()] == ["site"]
    assert [path.name for path in other.iterdir()] == ["precious"]


def test_what_cannot_be_a_space_is_said(desk: Desk) -> None:
    words = ("chat", "--db", desk.store, "--model", "scripted")
    code, said = desk.piped(*words, "--space", desk.folder / "no")
    assert (code, said) == (1, f"perdure chat: --space {desk.folder}/no: there is no such directory\n")
    code, said = desk.piped(*words, "--space", "/")
    assert code == 1
    assert "the root directory has nothing beside it" in said
    code, said = desk.piped(*words, "--space", desk.site, "--dir", desk.site)
    assert code == 2
    assert not desk.store.exists() or desk.piped("ls", desk.store)[1] == "no conversations yet\n"
