"""What the README and the guides show is run, and prints what they say."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from snippets import PAGES, ROOT, BadPage, Command, Program, follow, matches, read

from perdure.spaces import LocalSpaces

STORIES = [page for page in PAGES if "```" in page.read_text(encoding="utf-8")]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", STORIES, ids=named)
def test_what_a_page_shows_is_what_happens(page: Path, tmp_path: Path) -> None:
    try:
        for step in read(page.read_text(encoding="utf-8")):
            follow(step, tmp_path)
    finally:
        asyncio.run(end_spaces(list(tmp_path.rglob(".perdure"))))


async def end_spaces(homes: Iterable[Path]) -> None:
    """A page may leave daemons, which outlive its programs."""
    for home in homes:
        spaces = LocalSpaces(home.parent)
        for name in await spaces.names():
            await spaces.delete(name)


def test_the_readme_tells_the_whole_story() -> None:
    steps = read((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = {" ".join(step.words) for step in steps if isinstance(step, Command)}
    assert {"make demo", "make test", "make check", "perdure inspect agent.db"} <= commands
    assert sum(isinstance(step, Program) for step in steps) >= 3


def test_programs_on_pages_are_typed_and_formatted(tmp_path: Path) -> None:
    folders = [tmp_path / f"page{number}" for number in range(len(STORIES))]
    for page, folder in zip(STORIES, folders, strict=True):  # a folder each: programs of one page import one another
        folder.mkdir()
        for step in read(page.read_text(encoding="utf-8")):
            if isinstance(step, Program):
                assert not (folder / step.name).exists(), f"{named(page)} shows two programs {step.name}"
                (folder / step.name).write_text(step.text)
    tools = Path(sys.executable).parent
    config = ROOT / "pyproject.toml"
    roots = [{"root": folder.name, "extraPaths": [str(ROOT / "src")]} for folder in folders]
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extends": str(config), "include": ["."], "executionEnvironments": roots})
    )
    for command in (
        [tools / "ruff", "check", "--quiet", "--config", config, "--ignore", "ASYNC240,S607", tmp_path],
        [tools / "ruff", "format", "--check", "--config", config, tmp_path],
        [tools / "basedpyright", "--project", tmp_path / "pyrightconfig.json"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "ROADMAP.md"], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


# --- that these tests can fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        "```python\nprint(1)\n```\n",
        '```python title="a.py"\nprint(1)\n```\n',
        "```console\n$ python a.py\n```\n",
        "```console\n$ rm -rf /\n```\n",
        "```console\nhello\n```\n",
        "```\nhello\n```\n",
        "```yaml\na: 1\n```\n",
    ],
    ids=["untitled", "never run", "not shown", "another program", "no command", "no language", "another language"],
)
def test_a_block_that_nobody_runs_is_refused(page: str) -> None:
    with pytest.raises(BadPage):
        read(page)


@pytest.mark.parametrize(
    ("shown", "got", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\n", "a\nb\n", False),
        ("a\n...\nz\n", "a\nb\nc\nz\n", True),
        ("a\n...\nz\n", "a\nz\n", True),
        ("a\n...\nz\n", "a\nb\n", False),
        ("sub ... done\n", "sub 17 done\n", True),
        ("sub ... done\n", "sub 17\ndone\n", False),
        ("  0.1s ✓ a\n", " 12.3s ✓ a\n", True),
        ("  0.1s ✓ a\n", " 12.3s ✗ a\n", False),
        ("at commit 3, kept\n", "at commit 14, kept\n", True),
        ("order 7\n", "order 8\n", False),
    ],
)
def test_outputs_are_compared(shown: str, got: str, same: bool) -> None:
    assert matches(shown, got) is same


def test_a_page_that_says_something_wrong_fails(tmp_path: Path) -> None:
    page = '```python title="a.py"\nprint(1)\n```\n\n```console\n$ python a.py\n2\n```\n'
    program, command = read(page)
    follow(program, tmp_path)
    with pytest.raises(AssertionError, match="and not"):
        follow(command, tmp_path)
    with pytest.raises(AssertionError, match="No rule to make target"):
        follow(Command(("make", "coffee"), ""), tmp_path)
    (tmp_path / "a.py").write_text("raise SystemExit(3)")
    with pytest.raises(AssertionError, match="ended with 3"):
        follow(Command(("python", "a.py"), ""), tmp_path)
