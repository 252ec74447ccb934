"""The fenced blocks of a Markdown page, and what a page may ask a reader to run.

A page is a story: its blocks are taken in order, in one new folder. ```` ```python title="geo.py" ```` is a program to
save under that name. ```` ```console ```` is what is typed (lines that begin with ``$ ``) and what it prints. Nothing
else is allowed in a fence, so that nothing on a page goes unproved, except ``text``, for drawings.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'python title="([a-z_]+\.py)"')
_PROGRAMS = ("perdure", "python", "pytest", "make")

# What is different each time, and therefore not compared: times, ids, sizes, numbers of commits.
_VARYING = [
    (re.compile(r"^ *\d+\.\ds ", re.MULTILINE), "0.0s "),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\b"), "<time>"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"\bprocess \d+ on \S+"), "process <pid> on <host>"),
    (re.compile(r"\b[\d.]+ KiB\b"), "<size>"),
    (re.compile(r"\bcommit \d+\b|\b\d+ commits\b"), "<commits>"),
    (re.compile(r"^line_held: .*\n", re.MULTILINE), ""),  # a machine that is busy with something else
]


class BadPage(AssertionError):
    """A page has a block that nobody can run."""


@dataclass(frozen=True)
class Program:
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    shown: str
    """What the page shows of its output; empty: nothing is said of it."""


def read(page: str) -> list[Program | Command]:
    """What a page has its reader do, in order. Raises BadPage."""
    steps: list[Program | Command] = []
    for info, text in _FENCE.findall(page):
        if info == "console":
            steps += _commands(text)
        elif match := _TITLE.fullmatch(info):
            steps.append(Program(match[1], text))
        elif info != "text":
            raise BadPage(f'a block is neither console nor python title="name.py": ```{info}')
    _check(steps)
    return steps


def _commands(text: str) -> Iterator[Command]:
    before, *rest = re.split(r"^\$ ", text, flags=re.MULTILINE)
    if before or not rest:
        raise BadPage(f"a console block begins with a command: {text!r}")
    for each in rest:
        line, _, shown = each.partition("\n")
        words = tuple(shlex.split(line, comments=True))
        if not words or words[0] not in _PROGRAMS:
            raise BadPage(f"a page may only call {', '.join(_PROGRAMS)}, not {line!r}")
        yield Command(words, shown)


def _check(steps: list[Program | Command]) -> None:
    """Every program is run, after it was shown."""
    shown: set[str] = set()
    run: set[str] = set()
    for step in steps:
        if isinstance(step, Program):
            shown.add(step.name)
        elif step.words[0] in ("python", "pytest"):
            name = step.words[1] if step.words[0] == "python" else step.words[-1]
            if name not in shown:
                raise BadPage(f"{name} is run and was not shown")
            run.add(name)
    if shown != run:
        raise BadPage(f"shown and never run: {', '.join(sorted(shown - run))}")


def matches(shown: str, got: str) -> bool:
    """Whether an output is as it is shown: ``...`` stands for anything in a line, and alone for any lines."""
    pattern = ""
    for line in _same(shown).splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.split("...")) + r"[ \t]*\n"
    return re.fullmatch(pattern, _same(got).rstrip("\n") + "\n") is not None


def _same(text: str) -> str:
    for varying, constant in _VARYING:
        text = varying.sub(constant, text)
    return text


def follow(step: Program | Command, folder: Path) -> None:
    """Do what a step says; raises AssertionError if it does not go as the page says."""
    if isinstance(step, Program):
        (folder / step.name).write_text(step.text)
        return
    words = step.words
    if words[0] == "make":
        words = _made_by(words, step.shown)
        if words is None:
            return
    got = run(words, folder)
    assert not step.shown or matches(step.shown, got), f"$ {shlex.join(words)} printed\n{got}\nand not\n{step.shown}"


def _made_by(words: tuple[str, ...], shown: str) -> tuple[str, ...] | None:
    """A target must exist. What it prints is that of the command it runs, with the seed that is shown."""
    command = ["make", "--no-print-directory", "--dry-run", *words[1:]]  # these tests may run under a make of their own
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert plan.returncode == 0, plan.stderr
    if not shown:
        return None
    last = plan.stdout.splitlines()[-1]
    assert last.endswith("/perdure demo"), f"make runs {last!r}, whose output is not shown on a page"
    seed = re.search(r"--seed (\d+)", shown)
    assert seed is not None, "the demo is shown with its seed"
    return ("perdure", "demo", "--seed", seed[1])


def run(words: tuple[str, ...], folder: Path) -> str:
    """What a command prints; it must end well, or with the word that a shell has for SIGKILL."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return f"{done.stdout}Killed\n"
    assert done.returncode == 0, f"$ {shlex.join(words)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
