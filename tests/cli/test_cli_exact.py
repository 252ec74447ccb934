"""What a person decides about is shown so that nothing else looks like it (rule H309)."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.approvals.arguments import MOST_LINES, argument_lines
from perdure.cli.approvals.rules import words_of
from perdure.cli.entries import Call, heading
from perdure.cli.exact import ascii_json, exact, exact_words
from perdure.cli.style import rendered
from perdure.harness.approval_rules import ApprovalRule, ArgumentBelow, ArgumentIs, ArgumentMatches
from perdure.kernel.json import JsonValue

ODD = "\t\r\n\x07\x08\x1b\x7f\x9b\xa0\xad\u0301\u034f\u200b\u200d\u2028\u202e\u2066\u2800\u3164\ufe0f\U000e0041⟨⟩⏎\\ a"
texts = st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
arguments = st.dictionaries(st.sampled_from(["a", "b", "a: b", "│ a", ""]), values, max_size=3)


def shown(arguments: JsonValue) -> str:
    return "\n".join(rendered(each, "none") for each in argument_lines(arguments))


@given(texts)
def test_nothing_that_cannot_be_seen_is_left_of_a_text_h309(text: str) -> None:
    told = exact(text)
    assert all(char == " " or unicodedata.category(char)[0] not in "CZ" for char in told), told.encode()
    assert not told.endswith(" ")


@given(texts, texts)
def test_two_texts_are_never_shown_alike_h309(one: str, other: str) -> None:
    assert (exact(one) == exact(other)) == (one == other)
    assert (exact_words(one, 1_000) == exact_words(other, 1_000)) == (one == other)


@given(arguments, arguments)
def test_two_calls_are_never_shown_alike_h309(one: dict[str, JsonValue], other: dict[str, JsonValue]) -> None:
    assert (shown(one) == shown(other)) == (json.dumps(one) == json.dumps(other))


@pytest.mark.parametrize(
    ("disguised", "told"),
    [
        ("rm \u202e fdp.", "rm ⟨U+202E⟩ fdp."),  # turned round
        ("a\u200bb\u2060c\xadd", "a⟨U+200B⟩b⟨U+2060⟩c⟨U+00AD⟩d"),  # of no width
        ("\x1b[2K\x9b1Aecho", "⟨U+001B⟩[2K⟨U+009B⟩1Aecho"),  # what a terminal would do
        ("rm -r ~\recho hi", "rm -r ~⟨U+000D⟩echo hi"),
        ("rm\x08\x08ls", "rm⟨U+0008⟩⟨U+0008⟩ls"),
        ("/etc/p\u0430sswd", "/etc/p⟨U+0430⟩sswd"),  # a Cyrillic letter
        ("\u0441\u043e\u0440\u0443 x", "⟨U+0441⟩⟨U+043E⟩⟨U+0440⟩⟨U+0443⟩ x"),  # "copy", all of it Cyrillic
        ("src\u2044..\u2215x", "src⟨U+2044⟩..⟨U+2215⟩x"),  # other slashes
        ("\uff41\U0001d41b", "⟨U+FF41⟩⟨U+1D41B⟩"),  # wide, and bold
        ("\u212a\u212b", "⟨U+212A⟩⟨U+212B⟩"),  # the signs of Kelvin and Ångström
        ("cafe\u0301", "cafe⟨U+0301⟩"),  # not the é of one character
        ("rm\u0336", "rm⟨U+0336⟩"),
        ("a\xa0b", "a⟨U+00A0⟩b"),
        ("note ", "note⟨U+0020⟩"),
        (f"ls{' ' * 90}; rm -r ~", "ls⟨90 × U+0020⟩; rm -r ~"),
        ("\U000e0072\U000e006d", "⟨U+E0072⟩⟨U+E006D⟩"),  # tags
        ("\ufffe\ue000", "⟨U+FFFE⟩⟨U+E000⟩"),
        ("⟨U+202E⟩", "⟨U+27E8⟩U+202E⟨U+27E9⟩"),
    ],
)
def test_what_would_deceive_is_told_by_its_number_h309(disguised: str, told: str) -> None:
    assert exact(disguised) == told


@pytest.mark.parametrize(
    "text",
    [
        "plain \\u202e \\n 'text'",
        "café, Straße, naïve",
        "Привет, мир",
        "日本語 Python入門",
        "Γειά σου",
        "नमस्ते",
        "שלום",
        "🎉",
    ],
)
def test_what_people_write_is_left_to_be_read_h309(text: str) -> None:
    assert exact(text) == text


def test_no_argument_looks_like_another_h309() -> None:
    assert shown({"path": "x\npath: /etc", "n": "5", "m": 5, "e": "", "a: b": "null", "l": "[1]"}) == (
        '  path: x\n  │ path: /etc\n  n: "5"\n  m: 5\n  e: ⟨empty⟩\n  "a: b": "null"\n  l: "[1]"'
    )


def test_what_is_too_long_to_be_shown_is_said_to_be_h309() -> None:
    """However long it is, and of whatever signs, it takes no time."""
    told = shown({"text": "\u0430b" * 500_000, "more": "x\n" * 100_000})
    assert told.count("\n") == MOST_LINES
    assert told.endswith("99,802 more lines: perdure approvals ls --json shows all")
    assert len(told) < 10_000
    assert shown({"text": "a" * 5_000}).endswith("lines that are too long: perdure approvals ls --json shows all")


def test_a_rule_is_never_shown_as_another_h309() -> None:
    rule = ApprovalRule(
        tool="*\r1  deny x",
        arguments={"a, no other arguments": ArgumentIs("\x9b2K"), "b": ArgumentMatches('x", c is below "y')},
        by="root\u202e",
        note="why\x1b[2K",
    )
    assert words_of(rule) == (
        '0  allow "*\\r1  deny x" where "a, no other arguments" is "⟨U+009B⟩2K", b matches "x\\", c is below \\"y"'
        ' (1970-01-01 00:00:00 UTC by "root⟨U+202E⟩": "why\\u001b[2K")'
    )
    below = ApprovalRule(tool="w", arguments={"p": ArgumentBelow("\u0455rc")})
    assert 'p is below "⟨U+0455⟩rc"' in words_of(below)


def test_a_heading_says_what_runs_h309() -> None:
    told = rendered(heading(Call("bash", {"command": "rm -r ~\recho\x1b[8m hidden\nls"})), "none")
    assert told == "▸ bash  rm -r ~⟨U+000D⟩echo⟨U+001B⟩[8m hidden ⏎ ls"


@given(values)
def test_json_for_a_terminal_is_the_same_and_plain_h309(value: JsonValue) -> None:
    told = ascii_json(json.dumps(value, ensure_ascii=False).encode())
    assert json.loads(told) == value
    assert told.isascii()
    assert told.isprintable()
