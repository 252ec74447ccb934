"""What commands print: nothing that speaks to the terminal, words kept together, no secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from perdure.cli.chat.commands import Command, Said, parse
from perdure.cli.chat.prompt import folded
from perdure.cli.entries import Call, heading
from perdure.cli.errors import CommandError
from perdure.cli.secrets import Secrets
from perdure.cli.style import colours_of, line, rendered
from perdure.cli.text import counted, lines_of, one_line, printable, shortened, size
from perdure.kernel.json import JsonValue

TEXT = st.text(st.characters(exclude_categories=()))
CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066, 0xFEFF, 0xD800)]


@given(TEXT)
def test_no_text_speaks_to_the_terminal(text: str) -> None:
    for shown in (printable(text), one_line(text), *lines_of(text)):
        assert not any(control in shown for control in CONTROLS)
        shown.encode()


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Bset", "set"),
        ("10 %\r50 %\r100 %", "100 %"),
        ("with a line end\r", "with a line end"),
        ("a\tb", "a   b"),
        ("bell\x07", "bell\\x07"),
        ("turned \u202eround", "turned \\u202eround"),
        ("family \U0001f468\u200d\U0001f469, half width\u200c, space\u3000", None),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_programs_write_for_terminals(raw: str, shown: str | None) -> None:
    assert one_line(raw) == (raw if shown is None else shown)


def test_lines() -> None:
    assert lines_of("") == []
    assert lines_of("a\n\nb\n") == ["a", "", "b"]
    assert (shortened("abcdef", 4), shortened("abcd", 4)) == ("abc…", "abcd")
    assert (counted(1, "line"), counted(1234, "line")) == ("1 line", "1,234 lines")
    assert (size(12), size(2048), size(5 * 1024**4)) == ("12 B", "2.0 KiB", "5120.0 GiB")


# --- folding -----------------------------------------------------------------------------------------------------

WORDS = st.lists(st.text("abc日本é", min_size=1, max_size=9), max_size=12).map(" ".join)


@given(WORDS, st.integers(2, 12))
def test_rows_hold_all_words_and_fit(text: str, columns: int) -> None:
    rows = folded(text, columns)
    assert "".join(rows).replace(" ", "") == text.replace(" ", "")
    assert all(sum(map(get_cwidth, row.rstrip(" "))) <= columns for row in rows)


@given(WORDS, WORDS, st.integers(2, 12))
def test_rows_that_were_shown_stay_as_they_are(text: str, more: str, columns: int) -> None:
    """What has scrolled away cannot be broken anew."""
    done = folded(text, columns)[:-1]
    assert folded(text + more, columns)[: len(done)] == done


def test_words_are_kept_together() -> None:
    assert folded("one two three", 8) == ["one two", "three"]
    assert folded("unbreakable", 4) == ["unbr", "eaka", "ble"]
    assert folded("", 4) == [""]
    assert folded("日本語日本語", 4) == ["日本", "語日", "本語"]


# --- styles, secrets ---------------------------------------------------------------------------------------------


def test_styles_are_left_out_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert rendered(line("x", "added"), colours_of(plain=False, terminal=True)) == "\x1b[32mx\x1b[0m"
    assert rendered(line("x", "added"), colours_of(plain=True, terminal=True)) == "x"
    assert rendered(line("x", "added"), colours_of(plain=False, terminal=False)) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert rendered(line("x", "added"), colours_of(plain=False, terminal=True)) == "x"
    assert rendered(line("x", "dim"), colours_of(plain=False, terminal=True)) == "\x1b[2mx\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert rendered(line("x", "dim"), colours_of(plain=False, terminal=True)) == "x"


def test_values_of_variables_that_are_named_so_are_hidden() -> None:
    secrets = Secrets(
        {
            "OPENAI_API_KEY": "sk-12345678",
            "LONGER_TOKEN": "sk-12345678-and-more",
            "DB_PASSWORD": "hunter22",
            "SHORT_KEY": "abc",
            "PATH": "/usr/bin:/bin:/x",
            "SSH_KEY": "/home/me/.ssh/id",
            "KEYBOARD_LAYOUT": "dvorak-de",
        }
    )
    text = "sk-12345678-and-more sk-12345678 hunter22 abc /usr/bin:/bin:/x /home/me/.ssh/id dvorak-de"
    assert secrets.hide(text) == (
        "[LONGER_TOKEN] [OPENAI_API_KEY] [DB_PASSWORD] abc /usr/bin:/bin:/x /home/me/.ssh/id dvorak-de"
    )
    assert Secrets({}).hide(text) == text


# --- what is typed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("hello", Said("hello", False)),
        ("!left", Said("left", True)),
        ("! left ", Said("left", True)),
        (" !left", Said("!left", False)),
        (" /help", Said("/help", False)),
        ("a /b", Said("a /b", False)),
        ("/help", Command("help", "")),
        ("/name  two words ", Command("name", "two words")),
        ("/compact mind the numbers", Command("compact", "mind the numbers")),
        ("/reset", Command("reset", "")),
    ],
)
def test_what_is_typed_is_understood(typed: str, meant: Command | Said) -> None:
    assert parse(typed, steer=False) == meant


def test_a_key_steers_like_the_mark() -> None:
    assert parse("left", steer=True) == Said("left", True)


@pytest.mark.parametrize("typed", ["/", "/halp", "/etc/hosts", "/HELP"])
def test_what_is_no_command_is_an_error(typed: str) -> None:
    with pytest.raises(CommandError, match="there is no command"):
        parse(typed, steer=False)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        ({"command": "ls", "path": "notes"}, "ls"),
        ({"pattern": "TODO", "path": "src"}, "TODO  in src"),
        ({"pattern": "*.py"}, "*.py"),
        ({"path": "src"}, "src"),
        ({}, ""),
        ({"page": 1}, '{"page": 1}'),
    ],
)
def test_a_call_is_headed_by_what_it_is_about(arguments: JsonValue, about: str) -> None:
    assert "".join(text for _, text in heading(Call("tool", arguments))) == f"▸ tool{f'  {about}' if about else ''}"
