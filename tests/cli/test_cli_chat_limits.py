"""``perdure chat`` with limits and thinking levels (rules H159, H243 to H250)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_terminal import environment, piped, short_folder


class Desk:
    """Somebody's directory and store, and lines that are piped into a chat."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self.store = folder / "agent.db"
        self.env = environment(folder)

    def chat(self, *words: str, lines: str = "") -> subprocess.CompletedProcess[str]:
        return piped("chat", "--db", str(self.store), *words, cwd=self.work, env=self.env, lines=lines)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with short_folder() as folder:
        yield Desk(folder)


def test_a_limit_on_cost_is_said_and_the_next_chat_goes_on_h244_h246(desk: Desk) -> None:
    done = desk.chat("--model", "fake:priced", "--limit-usd", "0.2", lines="one\ntwo\nthree\n")
    assert done.returncode == 1
    assert "You said: two" in done.stdout
    assert "You said: three" not in done.stdout
    why = "! the run ended without an answer. limit: the conversation has cost 0.20 of 0.20 US dollars"
    assert why in " ".join(done.stdout.split())
    again = desk.chat("--continue", "--limit-usd", "0.3", lines="four\nfive\n")
    assert "You said: four" in again.stdout
    assert "the conversation has cost 0.30 of 0.30 US dollars" in again.stdout
    free = desk.chat("--continue", lines="six\n")
    assert (free.returncode, "You said: six" in free.stdout) == (0, True)


def test_a_limit_on_turns_and_unknown_prices_are_said_h244_h247(desk: Desk) -> None:
    done = desk.chat("--model", "fake:one", "--limit-turns", "2", "--limit-usd", "5", lines="one\ntwo\nthree\n")
    said = " ".join(done.stdout.split())
    assert "limit: the conversation has had 2 of 2 model responses" in said
    assert (
        said.count("a limit on cost cannot count 1 request of the conversation, the price of which is not known") == 1
    )


@pytest.mark.parametrize(("option", "value"), [("--limit-usd", "-1"), ("--limit-usd", "nan"), ("--limit-turns", "-3")])
def test_what_is_no_limit_is_refused_before_anything_is_made(desk: Desk, option: str, value: str) -> None:
    done = desk.chat("--model", "fake:one", option, value, "hello")
    assert done.returncode != 0
    assert "is a finite number, 0 or more" in " ".join(done.stderr.split())
    assert not desk.store.exists()


def test_thinking_is_set_shown_and_kept_h249(desk: Desk) -> None:
    done = desk.chat("--model", "fake:one", "--thinking", "low", lines="/thinking\n/thinking high\n/thinking most\n")
    assert "the model thinks low" in done.stdout
    assert "the model thinks high" in done.stdout
    assert "! thinking is one of off, minimal, low, medium, high, not 'most'" in done.stdout
    again = desk.chat("--continue", "--thinking", "off", lines="/thinking\n")
    assert "the model thinks as little as it can" in again.stdout
    kept = desk.chat("--continue", lines="/thinking medium\nhello\n")
    assert "You said: hello" in kept.stdout
    assert "the model thinks medium" in desk.chat("--continue", lines="/thinking\n").stdout


def test_a_level_that_is_none_is_refused_before_anything_is_made_h249(desk: Desk) -> None:
    done = desk.chat("--model", "fake:one", "--thinking", "most", "hello")
    assert done.returncode != 0
    assert "thinking is one of off, minimal, low, medium, high, not 'most'" in " ".join(done.stderr.split())
    assert not desk.store.exists()
