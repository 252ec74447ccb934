"""ls, find and grep in a directory of this machine (rules H178 and H362 to H365): bounds, names, links, time."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from local_kit import alive

from perdure.harness.environment import FileError, FileMissing, PathEscapes
from perdure.harness.output import DEFAULT_LIMIT_BYTES
from perdure.tools import looking, searching
from perdure.tools.local import LocalEnvironment
from perdure.tools.searching import Searcher
from perdure.tools.threads import Threads
from perdure.tools.workspace import Workspace

NASTY = ["a b", "new\nline", "\udcff\udcfe", "-rf", "it's", "$'x'", "\x1b[31m", "é", " ", "[ab]*?"]


@pytest.fixture
def nasty(work: Path) -> Path:
    for number, name in enumerate(NASTY):
        (work / name).write_text(f"needle {number}\n")
    return work


async def test_names_of_any_bytes_are_found_in_the_order_of_their_bytes_h362(
    env: LocalEnvironment, nasty: Path
) -> None:
    ordered = sorted(NASTY, key=os.fsencode)
    assert [entry.path for entry in (await env.find()).entries] == ordered
    assert [entry.name for entry in (await env.list_dir(".")).entries] == ordered
    assert [line.path for line in (await env.grep("needle")).lines] == ordered
    for name in NASTY:
        assert [line.path for line in (await env.grep("needle", path=name)).lines] == [name]


async def test_names_are_shown_in_one_line_as_bash_reads_them_h362(env: LocalEnvironment, nasty: Path) -> None:
    shown = (await looking.ls(env, ".")).text.splitlines()
    assert len(shown) == len(NASTY)
    quoted = [line for line in shown if line.startswith("$'") and line != "$'x'  9"]
    assert quoted == [r"$'\x1b[31m'  9", r"$'new\x0aline'  9", r"$'\xff\xfe'  9"]
    for line in quoted:
        word = line.removesuffix("  9")
        assert (await env.exec(f"cat {word}")).output.startswith(b"needle")


async def test_what_each_tool_shows_h178(env: LocalEnvironment, work: Path) -> None:
    (work / "src" / "deep").mkdir(parents=True)
    (work / "src" / "a.py").write_text("one\ntwo needle\nthree\nfour\nfive\nneedle\n")
    (work / "src" / "deep" / "b.txt").write_text("needle")
    (work / "link").symlink_to("src")
    os.mkfifo(work / "pipe")
    assert (await looking.ls(env, ".")).text == "link@\npipe=\nsrc/"
    assert (await looking.ls(env, "src")).text == "a.py  38\ndeep/"
    assert (await looking.find(env, ".", pattern="*.py")).text == "src/a.py"
    assert (await looking.find(env, ".", kind="directory")).text == "src/\nsrc/deep/"
    assert (await looking.find(env, "src", pattern="deep/*")).text == "src/deep/b.txt"
    assert (await looking.find(env, ".", pattern="none")).text == "[Nothing found.]"
    found = await looking.grep(env, "needle", context=1)
    assert found.text.splitlines() == [
        "src/a.py-1-one",
        "src/a.py:2:two needle",
        "src/a.py-3-three",
        "--",
        "src/a.py-5-five",
        "src/a.py:6:needle",
        "--",
        "src/deep/b.txt:1:needle",
    ]
    assert found.details == {"path": ".", "matches": 3, "skipped": 0, "complete": True}
    assert (await looking.grep(env, "needle", glob="*.txt")).text == "src/deep/b.txt:1:needle"
    assert (await looking.grep(env, "nothing")).text == "[No match.]"
    (work / "binary").write_bytes(b"needle\0")
    assert (await looking.grep(env, "needle", glob="binary")).text.endswith(
        "[Not searched, because binary, above 8 MiB, or not to be read: 1.]"
    )
    (work / "empty").mkdir()
    assert (await looking.ls(env, "empty")).text == "[The directory is empty.]"


async def test_nothing_leads_out_of_the_workspace_h362(env: LocalEnvironment, work: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("needle")
    (work / "out").symlink_to("..")
    (work / "file").symlink_to("../secret")
    (work / "loop").symlink_to(".")
    assert [entry.path for entry in (await env.find()).entries] == ["file", "loop", "out"]
    assert (await env.grep("needle")).lines == ()
    for path in ("..", "out", "file", "out/secret", str(tmp_path), "loop/../.."):
        with pytest.raises(PathEscapes, match="leads out of the workspace"):
            await env.grep("needle", path=path)
        with pytest.raises(PathEscapes):
            await env.find(path)
    with pytest.raises(FileMissing):
        await env.find("none")
    (work / "plain").write_text("x")
    with pytest.raises(FileError, match="not a directory"):
        await looking.ls(env, "plain")
    with pytest.raises(FileError, match="not a directory"):
        await env.find("plain")
    assert [entry.path for entry in (await env.find(str(work))).entries] == ["file", "loop", "out", "plain"]


async def test_an_environment_that_is_not_confined_searches_anywhere_h362(work: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "f").write_text("needle")
    (work / "f").write_text("needle")
    env = LocalEnvironment(work, confine=False, output_dir=tmp_path / "outputs")
    assert [line.path for line in (await env.grep("needle")).lines] == ["f"]
    assert [line.path for line in (await env.grep("needle", path="../other")).lines] == [str(tmp_path / "other" / "f")]
    assert [entry.path for entry in (await env.find(str(tmp_path), pattern="f")).entries] == [
        str(tmp_path / "other" / "f"),
        "f",
    ]


async def test_a_directory_of_a_hundred_thousand_names_is_bounded_h365(env: LocalEnvironment, work: Path) -> None:
    env._searcher._time_s = 300  # pyright: ignore[reportPrivateUsage]  # on a machine that is busy with other tests
    for number in range(100_000):
        os.close(os.open(work / f"{number:06}", os.O_CREAT | os.O_WRONLY))
    listing = await env.list_dir(".", limit=3)
    assert ([entry.name for entry in listing.entries], listing.more) == (["000000", "000001", "000002"], True)
    listed = await looking.ls(env, ".")
    assert listed.text.endswith(
        "000499  0\n[There are more than these 500; use find with a pattern, or a higher limit.]"
    )
    found = await looking.find(env, ".", limit=2000)
    assert len(found.text.encode()) <= DEFAULT_LIMIT_BYTES
    assert found.text.splitlines()[-2:] == [
        "[4 more lines do not fit.]",
        "[There are more than these 2000; narrow the pattern or the path.]",
    ]
    assert [entry.path for entry in (await env.find(pattern="*99999")).entries] == ["099999"]


async def test_huge_files_and_long_lines_are_bounded_h364(env: LocalEnvironment, work: Path) -> None:
    (work / "huge").touch()
    os.truncate(work / "huge", 1 << 40)
    (work / "long").write_bytes(b"x" * 5_000_000 + b"needle\n")
    (work / "many").write_bytes(b"needle\n" * 500_000)
    found = await env.grep("needle", limit=1000)
    assert (found.skipped, found.more, len(found.lines)) == (1, True, 1000)
    assert [len(line.text) for line in found.lines[:2]] == [1000, 6]
    answer = await looking.grep(env, "needle", limit=1000)
    assert len(answer.text.encode()) <= DEFAULT_LIMIT_BYTES


async def test_a_line_that_is_cut_is_told_h365(env: LocalEnvironment, work: Path) -> None:
    (work / "f").write_text("x" * 999 + "\n")
    assert (await looking.grep(env, "x")).text.count("\n") == 0
    (work / "f").write_text("x" * 1000 + "needle\n")
    assert (await looking.grep(env, "needle")).text == "f:1:" + "x" * 1000 + "\n[Lines are cut after 1000 bytes.]"


async def test_an_empty_pattern_of_names_is_none_h363(env: LocalEnvironment, work: Path) -> None:
    (work / "f").write_text("needle\n")
    assert (await looking.find(env, ".", pattern="")).text == "f"
    assert (await looking.grep(env, "needle", glob="")).text == "f:1:needle"


async def test_a_pattern_that_takes_for_ever_ends_and_says_so_h365(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "evil").write_bytes(b"a" * 5000)
    searcher = Searcher(Workspace(str(work)), Threads("test", 1), time_s=0.5)
    monkeypatch.setattr(LocalEnvironment, "grep", lambda self, pattern, **options: searcher.grep(pattern, **options))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(FileError, match="takes too long to search"):
        await looking.grep(LocalEnvironment(work), "(a+)+$b")


async def test_a_search_that_is_cancelled_is_ended_h365(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "evil").write_bytes(b"a" * 5000)
    started: list[int] = []
    real = searching._start  # pyright: ignore[reportPrivateUsage]

    def start() -> object:
        process = real()
        started.append(process.pid)
        return process

    monkeypatch.setattr(searching, "_start", start)
    env = LocalEnvironment(work)
    env._searcher._time_s = 300  # pyright: ignore[reportPrivateUsage]
    task = asyncio.create_task(env.grep("(a+)+$b"))
    while not started:
        await asyncio.sleep(0.005)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 100
    assert not alive(started[0])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", r"pattern: missing \)"), ("\ud800", "lone surrogate"), ("a{99999999999}", "pattern: ")],
)
async def test_a_pattern_that_is_none_says_so_h364(env: LocalEnvironment, pattern: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        await env.grep(pattern)


async def test_bounds_that_are_none_are_refused_h365(env: LocalEnvironment) -> None:
    for wrong in (
        looking.ls(env, ".", limit=0),
        looking.find(env, ".", limit=2001),
        looking.grep(env, "a", context=21),
    ):
        with pytest.raises(FileError, match=r"limit is|context is"):
            await wrong
    with pytest.raises(ValueError, match="1 to 10000"):
        await env.find(limit=10_001)
    with pytest.raises(ValueError, match="0 to 20"):
        await env.grep("a", context=21)
