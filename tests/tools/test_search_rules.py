"""The search itself, without a process around it: against plain loops, against git, and with and without ripgrep
(rules H362 to H364, S41)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.spaced import spaced
from perdure.tools import search_child

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # re's opinion on [[ in a pattern

NAMES = st.sampled_from(["a", "b.py", "c.txt", "build", "a b", ".hidden", "B.py", "Z", "\udcff", "x\ny", "é"])
LINES = st.sampled_from(
    [b"alpha", b"ab", b"  a-b", b"", b"Alpha1", b"a\xffb", b"\xc3\xa9", b"x_y 12", b"a.b", b"\tq\r"]
)
CONTENT = st.lists(LINES, max_size=6).map(b"\n".join) | st.just(b"alpha\0beta\n") | st.just(b"a\n\n")
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), CONTENT, max_size=7)
PIECES = st.sampled_from(
    ["a", "b", "l", ".", "\\w", "\\d", "\\s", "\\b", "\\.", "^", "$", "[ab]", "[^a]", "[a-c]", "*", "+", "?", "{1,2}",
     "|", "(", ")", "(?:", "\\W", "é", "\\1", "(?i)", "\\Z", "{", "[[:alpha:]]", "--", "-", " ", "x_y", "{,2}", "+?"]
)  # fmt: skip
PATTERNS = st.lists(PIECES, max_size=5).map("".join)


@contextmanager
def grown(tree: dict[str, bytes]) -> Iterator[Path]:
    """A directory with these files, but for those whose place another has."""
    folder = tempfile.mkdtemp(prefix="search-")
    try:
        for path, content in tree.items():
            place = os.path.join(folder, path)
            try:
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with open(place, "xb") as file:
                    file.write(content)
            except OSError:
                continue
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def grep(root: Path, pattern: str, *, sieve: bool = False, **options: Any) -> Any:
    query = {
        "op": "grep", "path": "", "pattern": pattern, "fixed": False, "ignore_case": False, "glob": None, "context": 0,
        "ignored": True, "limit": 1000, **options,
    }  # fmt: skip
    chosen = search_child.sieve(str(root), query, shutil.which("rg")) if sieve else None
    try:
        return spaced.look_through(str(root), query, chosen)
    except spaced.Fail as fail:
        return fail.code


def walk(root: Path, **options: Any) -> list[bytes]:
    query = {"op": "walk", "path": "", "hidden": True, "limit": 10_000, **options}
    found = spaced.look_through(str(root), query)
    assert not found["more"]
    return [spaced.raw_of(entry["path"], "path") for entry in found["entries"]]


def files_below(root: Path) -> list[bytes]:
    found: list[bytes] = []
    for folder, _, names in os.walk(os.fsencode(root)):
        found += [os.path.relpath(os.path.join(folder, name), os.fsencode(root)) for name in names]
    return sorted(found, key=lambda path: path.split(b"/"))


def expected(root: Path, pattern: re.Pattern[bytes], context: int) -> list[tuple[bytes, int, bool]]:
    """(path, line, whether it only stands near a match), by the plainest loops."""
    found: list[tuple[bytes, int, bool]] = []
    for path in files_below(root):
        content = (root / os.fsdecode(path)).read_bytes()
        if b"\0" in content:
            continue
        lines = content.split(b"\n")[: -1 if content.endswith(b"\n") or not content else None]
        matching = {number for number, line in enumerate(lines) if pattern.search(line)}
        for number in range(len(lines)):
            if any(abs(number - other) <= context for other in matching):
                found.append((path, number + 1, number not in matching))
    return found


@given(TREES, PATTERNS, st.booleans(), st.integers(0, 2))
def test_grep_finds_what_plain_loops_find_in_the_order_of_the_walk_h364(
    tree: dict[str, bytes], pattern: str, ignore_case: bool, context: int
) -> None:
    with grown(tree) as root:
        got = grep(root, pattern, ignore_case=ignore_case, context=context)
        try:
            compiled = re.compile(pattern.encode(), re.IGNORECASE if ignore_case else 0)
        except re.error:
            assert got == "bad_request"
            return
        found = [(spaced.raw_of(m["path"], ""), m["line"], "context" in m) for m in got["matches"]]
        assert found == expected(root, compiled, context)


@pytest.mark.skipif(shutil.which("rg") is None, reason="there is no ripgrep here to compare with")
@settings(max_examples=60)
@given(TREES, PATTERNS, st.booleans(), st.booleans(), st.integers(1, 4))
def test_with_ripgrep_the_answer_is_the_same_h364(
    tree: dict[str, bytes], pattern: str, ignore_case: bool, fixed: bool, limit: int
) -> None:
    with grown(tree) as root:
        options: dict[str, Any] = {"ignore_case": ignore_case, "fixed": fixed, "limit": limit, "context": 1}
        assert grep(root, pattern, sieve=True, **options) == grep(root, pattern, **options)


@pytest.mark.parametrize(
    ("pattern", "asked"),
    [("alpha", True), ("a.*b$", True), (r"\bdef\s+\w+\(", True), (r"(a|b){2,3}c?", True), ("é", False),
     (r"(a)\1", False), ("(?<=a)b", False), ("(?i)a", False), (r"\Aa", False), ("[[a]", False), ("a++", False),
     ("a{,3}", False), ("[a--b]", False), ("[a&&b]", False), (r"\x41", False)],
)  # fmt: skip
def test_ripgrep_is_asked_only_for_what_both_read_alike_h364(pattern: str, asked: bool) -> None:
    query = {"op": "grep", "pattern": pattern, "fixed": False, "ignore_case": False}
    assert (search_child.sieve("/", query, "/usr/bin/rg") is not None) == asked


def test_a_ripgrep_that_fails_changes_nothing_h364(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"needle\n")
    query = {"op": "grep", "pattern": "needle", "fixed": False, "ignore_case": False}
    chosen = search_child.sieve(str(tmp_path), query, shutil.which("false"))
    assert chosen is not None
    assert chosen([b"f"]) == set(), "it says that there is none"
    (tmp_path / "rg").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "rg").chmod(0o755)
    broken = search_child.sieve(str(tmp_path), query, str(tmp_path / "rg"))
    assert broken is not None
    assert broken([b"f"]) is None, "any of them may have one"


IGNORES = st.lists(
    st.sampled_from(
        ["a", "*.py", "!b.py", "/a", "build/", "**/c.txt", "a/**", "a/*/b.py", "# no", "\\#x", "!*.txt", "?", "[ab]",
         "*", "!a/", "a b", "c.txt  ", "\\!x", "build/a", "/**/B.py", ".hidden", "[!a]", "a/b.py", "**", "[z-a]", "\\"]
    ),
    min_size=1,
    max_size=4,
).map(lambda lines: "\n".join(lines).encode())  # fmt: skip
PLACES = st.sampled_from(["", "a/", "build/", "a/build/"])


@settings(max_examples=60)
@given(TREES, st.dictionaries(PLACES, IGNORES, min_size=1, max_size=2))
def test_what_gitignore_files_name_is_what_git_ignores_h363_s41(
    tree: dict[str, bytes], ignores: dict[str, bytes]
) -> None:
    files = {f"{place}.gitignore": text for place, text in ignores.items()}
    with grown({**files, **tree}) as root:
        (root / ".git-config").write_text("")
        clean = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
        git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(root)]
        subprocess.run([*git, "init", "-q"], check=True, env=clean)
        listed = subprocess.run(
            [*git, "ls-files", "--others", "--exclude-standard", "-z"], check=True, capture_output=True, env=clean
        )
        told = sorted(filter(None, listed.stdout.split(b"\0")), key=lambda path: path.split(b"/"))
        assert walk(root, ignored=False, kind="file") == told


def test_rules_of_directories_above_hold_below_h363(tmp_path: Path) -> None:
    for path in ("a/b/x.log", "a/b/y.txt", "a/b/keep.log", ".git/config", "sub/.git/config"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "a" / ".gitignore").write_text("!keep.log\n")
    assert walk(tmp_path, path="a/b", ignored=False) == [b"a/b/keep.log", b"a/b/y.txt"]
    assert walk(tmp_path, path="./a//b/", ignored=False) == [b"a/b/keep.log", b"a/b/y.txt"]
    assert walk(tmp_path, ignored=False, kind="file") == [b".gitignore", b"a/.gitignore", b"a/b/keep.log", b"a/b/y.txt"]
    assert len(walk(tmp_path, kind="file")) == 7
    assert walk(tmp_path, path=".git", ignored=False) == [b".git/config"], "a directory that is named is looked at"


def test_of_a_long_gitignore_no_part_of_a_line_counts_s41(tmp_path: Path) -> None:
    """Its last would be another pattern."""
    (tmp_path / "x.log").touch()
    (tmp_path / "y.txt").touch()
    comment = b"#" * (spaced.IGNORE_BYTES - 8)
    (tmp_path / ".gitignore").write_bytes(comment + b"\n*.log\n*.txt\n")
    assert walk(tmp_path, ignored=False) == [b".gitignore", b"y.txt"], "the cut is in the last line"


@given(st.binary(max_size=300))
def test_no_content_of_a_gitignore_does_harm_s41(content: bytes) -> None:
    for run in spaced.ignore_runs(content):
        run.fits("a/b", "b", True)
