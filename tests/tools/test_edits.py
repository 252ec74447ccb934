"""Exact replacements: unique places, the diff, and doing and undoing by the intent (rule H116, edit)."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perdure.harness.environment import FileChanged, FileError
from perdure.tools import edits as editing
from perdure.tools.edits import Edit
from perdure.tools.nearest import nearest

FILE = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\nten\neleven\ntwelve\n"


def outcome(data: bytes, edits: list[Edit]) -> bytes:
    intent = editing.plan("f", data, edits)
    return editing.apply(data, editing.replacements(edits, intent))


def diff(data: bytes, edits: list[Edit]) -> str:
    return editing.diff(data, editing.replacements(edits, editing.plan("f", data, edits)))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([], "no edits"),
        ([Edit("", "x")], "edit 1: old_text is empty"),
        ([Edit("two", "2"), Edit("zwei", "2")], "edit 2: old_text does not occur"),
        ([Edit("two", "two")], "edit 1: old_text and new_text are the same"),
        ([Edit("seven", "7"), Edit("e", "E")], r"edit 2: old_text occurs 14 times \(at lines 1, 3, 3, 5, 7, ...\)"),
        ([Edit("two\nthree", "2"), Edit("three\n", "3")], "edits 1 and 2 overlap"),
    ],
)
def test_an_edit_that_does_not_apply_once_says_why(edits: list[Edit], message: str) -> None:
    with pytest.raises(FileError, match=message):
        editing.plan("f", FILE, edits)


@pytest.mark.parametrize(
    ("data", "old", "hint"),
    [
        (b"a\n    return x\nb\n", "\treturn x\n", r"line 2 differs in white space: it is '    return x'"),
        (
            b"def f(a):\n    one\n    two\n",
            "def f(a):\n    one\n    too\n",
            "line 3 is '    two', where old_text has '    too'",
        ),
        (b"x\ndef f(a):\n  1\ny\ndef f(a):\n  2\n  3\n", "def f(a):\n  2\n  4\n", "line 7 is '  3', where"),
        (b"alpha\ncolour = 1\n", "color = 1", "line 2 is 'colour = 1', where old_text has 'color = 1'"),
        (b"a\r\nb\nc\n", "a\nb\n", r"line 1 differs in white space: it is 'a\\r'"),
        (b"a\ncaf\xe9 one\n", "caf\ufffd one", "line 2 is 'caf. one', and bytes that are not UTF-8, which no old_text"),
        (b"a\nb", "a\nb\nc", "line 2 is 'b', where old_text has 'c'"),
        (b"alpha\n" + b"x" * 1000 + b"beta\n", "x" * 1000 + "gamma", r"is 'x+' \(and 804 characters more\)"),
    ],
)
def test_a_text_that_does_not_occur_is_told_where_it_nearly_does_h360(data: bytes, old: str, hint: str) -> None:
    with pytest.raises(FileError, match=rf"edit 1: old_text does not occur \(the nearest: .*{hint}"):
        editing.plan("f", data, [Edit(old, "new")])


@given(st.binary(max_size=200), st.text(min_size=1, max_size=30))
def test_looking_for_the_nearest_place_never_fails_and_is_bounded_h360(data: bytes, old: str) -> None:
    hint = nearest(data, old.encode())
    assert hint is None or len(hint) < 3000


def test_looking_for_the_nearest_place_takes_no_time_h360() -> None:
    """Of many long lines that are all a little alike, a few are compared closely."""
    data = b"".join(bytes(random.Random(seed).sample(range(97, 123), 26)) * 8 + b"\n" for seed in range(20_000))
    began = time.process_time()
    nearest(data, b"abcdefghijklmnopqrstuvwxyz" * 8)
    nearest(b"a\n" * 8_000_000, b"a\nb")
    assert time.process_time() - began < 2


def test_the_diff_of_lines_that_are_mostly_the_same_takes_no_time_h360() -> None:
    before, after = ("".join(f"}}\n{text}{number}\n" for number in range(490)) for text in ("old", "new"))
    began = time.process_time()
    edits = [Edit(before, after)]
    found = editing.replacements(edits, editing.plan("f", before.encode(), edits))
    assert editing.diff(before.encode(), found).startswith("@@ -1,980 +1,980 @@\n-}\n-old0\n")
    assert time.process_time() - began < 2


def test_edits_that_together_change_nothing_are_refused_h360() -> None:
    with pytest.raises(FileError, match="the edits together change nothing"):
        editing.plan("f", b"abc", [Edit("ab", "a"), Edit("c", "bc")])


LINES = st.lists(st.sampled_from([b"a", b"b b", b"\tc", b"", b"caf\xe9", "\u00e9".encode()]), min_size=1, max_size=8)


@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.data())
def test_line_ends_and_the_byte_order_mark_stay_h360(
    lines: list[bytes], end: bytes, marked: bool, data: st.DataObject
) -> None:
    """Unique lines of a file are replaced through a model's eyes, which sees neither CR nor the mark."""
    mark = b"\xef\xbb\xbf" if marked else b""
    numbered = [b"%d " % number + line for number, line in enumerate(lines)]
    before = mark + b"".join(line + end for line in numbered)
    chosen = data.draw(st.sets(st.integers(0, len(lines) - 1), min_size=1))
    edits = [Edit(f"{number} ", f"new\n{number}: ") for number in sorted(chosen)]
    after = outcome(before, edits)
    expected = [
        b"new" + end + b"%d: " % number + line if number in chosen else numbered[number]
        for number, line in enumerate(lines)
    ]
    assert after == mark + b"".join(line + end for line in expected)


def test_places_that_overlap_themselves_are_not_unique() -> None:
    with pytest.raises(FileError, match="2 times"):
        editing.plan("f", b"aaa", [Edit("aa", "b")])


def test_all_edits_apply_to_the_file_as_it_was() -> None:
    assert outcome(b"a b\n", [Edit("b", "a"), Edit("a", "b")]) == b"b a\n"


def test_line_ends_of_a_crlf_file_are_kept() -> None:
    assert outcome(b"a\r\nb\r\nc\r\n", [Edit("a\nb\n", "x\ny\nz\n")]) == b"x\r\ny\r\nz\r\nc\r\n"
    # A file of mixed line ends is taken as it is.
    assert outcome(b"a\r\nb\nc\n", [Edit("b\nc", "b")]) == b"a\r\nb\n"


def test_bytes_that_are_not_utf_8_stay_as_they_are() -> None:
    assert outcome(b"\xff\xfe a\n", [Edit("a", "\u00e9")]) == b"\xff\xfe \xc3\xa9\n"


def test_the_diff_shows_each_change_with_three_lines_around_it() -> None:
    assert diff(FILE, [Edit("eleven\n", ""), Edit("two", "2\n2b")]) == (
        "@@ -1,5 +1,6 @@\n one\n-two\n+2\n+2b\n three\n four\n five\n"
        "@@ -8,5 +9,4 @@\n eight\n nine\n ten\n-eleven\n twelve\n"
    )
    assert diff(b"a", [Edit("a", "b")]) == (
        "@@ -1,1 +1,1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
    )
    assert diff(b"a\n", [Edit("a\n", "")]) == "@@ -1,1 +0,0 @@\n-a\n"


texts = st.text(st.sampled_from("ab\n\r\u00e9"), max_size=6)


@st.composite
def files_and_edits(draw: st.DrawFn) -> tuple[str, list[Edit]]:
    """Letters that occur once with line ends between some of them, and replacements of some stretches."""
    letters = "abcdefghijklmnopqrstuvwxyz\u00e9\u20ac"
    count = draw(st.integers(1, len(letters)))
    text = "".join(letter + draw(st.sampled_from(["", "", "\n", "\n\n"])) for letter in letters[:count])
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), min_size=2, max_size=8)))
    edits = [
        Edit(text[start:end], new)
        for start, end in itertools.pairwise(cuts)
        if text[start:end].strip("\n") and draw(st.booleans()) and (new := draw(texts)) != text[start:end]
    ]
    return text, draw(st.permutations(edits))


@given(files_and_edits())
def test_reverting_gives_the_file_back_and_the_diff_tells_the_change(case: tuple[str, list[Edit]]) -> None:
    text, edits = case
    assume(edits)
    data = text.encode()
    intent = editing.plan("f", data, edits)
    ordered = editing.replacements(edits, intent)
    after = editing.apply(data, ordered)
    assert editing.digest(after) == intent.after
    assert editing.revert("f", after, ordered, intent) == data
    assert applied(text, editing.diff(data, ordered)) == after.decode()


def test_reverting_something_else_is_refused() -> None:
    edits = [Edit("two", "2")]
    intent = editing.plan("f", FILE, edits)
    with pytest.raises(FileChanged):
        editing.revert("f", b"one\n2\nmore\n", editing.replacements(edits, intent), intent)


def applied(text: str, patch: str) -> str:
    """Apply a unified diff, strictly."""
    lines = text.split("\n")
    old = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out: list[str] = []
    at = 0
    for line in patch.replace("\n\\ No newline at end of file\n", "\0").replace("\0", "\0\n").split("\n")[:-1]:
        body = line[1:-1] if line.endswith("\0") else line[1:] + "\n"
        if line.startswith("@@"):
            start, count = map(int, line.split()[1][1:].split(","))
            begin = start - 1 if count else start
            out += old[at:begin]
            at = begin
            continue
        if line[0] in " -":
            assert old[at] == body
            at += 1
        if line[0] in " +":
            out.append(body)
    return "".join(out + old[at:])


def test_the_search_for_edits_is_bounded() -> None:
    """It holds up the event loop."""
    data = b"".join(b"line %d\n" % number for number in range(100_000))
    edits = [Edit(f"line {number}\n", "x") for number in range(1000)]
    with pytest.raises(FileError, match=r"1000 edits at once are too many for \d+ bytes; make 2\d\d at a time"):
        editing.plan("file", data, edits)
    assert len(editing.plan("file", data, edits[100:300]).starts) == 200
