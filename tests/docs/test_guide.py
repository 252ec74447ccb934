"""The guide: what its pages say of a kill holds at every commit, and the index leads to every page."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from snippets import ROOT, Command, Program, matches, read, run

GUIDE = ROOT / "docs" / "guide"
KILLED = Path(__file__).parent / "killed.py"
MOST_COMMITS = 100

SURVIVORS = [
    ("persist-and-resume.md", "trip.py", "trip.py"),
    ("persist-and-resume.md", "pay.py", "pay.py"),
    ("persist-and-resume.md", "order.py", "order.py"),
    ("documents.md", "basket.py", "basket.py"),
    ("documents.md", "notes.py", "notes.py"),
    ("tasks.md", "ship.py", "ship.py"),
    ("tasks.md", "nod.py", "nod.py"),
    ("tasks.md", "fetch.py", "fetch.py"),
    ("inbox.md", "desk.py", "desk.py"),
    ("forks.md", "branch.py", "branch.py"),
    ("migrating.md", "old.py", "new.py"),
    ("limits.md", "spend.py", "spend.py"),
    ("deferred.md", "slow.py", "slow.py"),
    ("hooks.md", "guard.py", "guard.py"),
    ("compaction.md", "book.py", "book.py"),
    ("subagents.md", "edit.py", "edit.py"),
    ("subagents.md", "total.py", "total.py"),
    ("tools-and-replay.md", "charge.py", "charge.py"),
    ("from-pi-durable.md", "count.py", "count.py"),
    ("from-langgraph.md", "trip.py", "trip.py"),
]
"""A program that may be killed in place of any commit, and the one that then prints what its page shows last of it."""


@pytest.mark.parametrize(("page", "program", "successor"), SURVIVORS)
def test_killed_in_place_of_any_commit_a_program_is_gone_on_with_as_its_page_shows_h77(
    page: str, program: str, successor: str, tmp_path: Path
) -> None:
    check_kills(read((GUIDE / page).read_text(encoding="utf-8")), program, successor, tmp_path)


FORGETFUL = """
```python title="forgetful.py"
import asyncio

from perdure import Entry, Harness, SqliteStorage


class Line(Entry, kind="test.line"):
    number: int


async def main() -> None:
    async with Harness.open(SqliteStorage("lines.db")) as harness:
        root = await harness.root()
        done = len(await root.entries()) == 3
        for number in range(0 if done else 3):
            async with root.commit() as tx:
                tx.append(Line(number=number))
        print(f"{len(await root.entries())} lines")


asyncio.run(main())
```

```console
$ python forgetful.py
3 lines
```
"""


def test_a_program_that_begins_anew_after_a_kill_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"killed in place of commit 3, it printed\s+4 lines"):
        check_kills(read(FORGETFUL), "forgetful.py", "forgetful.py", tmp_path)


def check_kills(steps: Sequence[Program | Command], program: str, successor: str, place: Path) -> None:
    """Raise AssertionError unless the successor, killed once too, prints what is shown wherever the program was."""
    words, _ = last_run(steps, program)
    after, shown = last_run(steps, successor)
    assert shown, "a page shows what comes of it"
    kills = 0
    for number in range(1, MOST_COMMITS):
        folder = place / str(number)
        folder.mkdir()
        for step in steps:
            if isinstance(step, Program):
                (folder / step.name).write_text(step.text)
        got = run(killed_in_place_of(number, words), folder)
        if not got.endswith("Killed\n"):
            break  # it has no commit of that number
        kills += 1
        run(killed_in_place_of(1, after), folder)  # and once more, while it recovers
        got = run(after, folder)
        assert matches(shown, got), f"killed in place of commit {number}, it printed\n{got}"
    else:
        pytest.fail(f"it makes {MOST_COMMITS} commits and more")
    got = run(after, folder)
    assert matches(shown, got), f"after a run that nobody killed, it printed\n{got}"
    assert kills >= 2, "there was something to cut off"


def last_run(steps: Sequence[Program | Command], program: str) -> tuple[tuple[str, ...], str]:
    """How a page last calls a program, and what it shows of that."""
    runs = [step for step in steps if isinstance(step, Command) and step.words[1] == program]
    return runs[-1].words, runs[-1].shown


def killed_in_place_of(number: int, words: tuple[str, ...]) -> tuple[str, ...]:
    return (sys.executable, str(KILLED), str(number), *words[1:])


def test_the_index_leads_to_every_page_and_every_page_to_rules() -> None:
    index = (GUIDE / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in GUIDE.glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([a-z-]+\.md)(?:#[^)]*)?\)", index))
    without = [name for name in sorted(pages) if "](../rules/" not in (GUIDE / name).read_text(encoding="utf-8")]
    assert without == []


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    missing = [
        f"{name}#{anchor}" for name, anchor in links if anchor not in anchors(page.parent / name if name else page)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The names that headings have in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
