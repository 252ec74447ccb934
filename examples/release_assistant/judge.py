"""What must be true in the end, from the files: ``python judge.py FOLDER``. Of who was killed it knows nothing."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from agent import BUDGET, NOTES, STORE, VERSION, WITH_ISSUES

Row = dict[str, Any]


def rows(store: Path, table: str) -> list[Row]:
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
        return [json.loads(body) for (body,) in database.execute(f"SELECT body FROM {table} ORDER BY id")]


def checks(folder: Path) -> Iterator[tuple[str, bool]]:
    releases = [json.loads(path.read_text()) for path in (folder / "registry").glob("*.json")]
    asked = (folder / "registry" / "asked.log").read_text().split()
    yield "it was released once, with its notes", releases == [{"version": VERSION, "notes": NOTES}]
    yield "the registry was asked under one key", len(set(asked)) == 1

    entries, tasks = rows(folder / STORE, "entries"), rows(folder / STORE, "tasks")
    submissions = rows(folder / STORE, "submissions")
    results = Counter(
        (entry["data"]["name"], entry["data"].get("code")) for entry in entries if entry["kind"] == "pi.tool-result"
    )
    tools = ["bash", "subagent", "write", "publish", *(["issues_blocking"] if WITH_ISSUES else [])]
    every = Counter((name, None) for name in tools)
    yield "each call has one result, and none was interrupted", results == every
    publishing = [task for task in tasks if task.get("input", {}).get("name") == "publish"]
    yield "publishing was one call, approved and not denied", len(publishing) == 1 == results["publish", None]
    yield "nothing is left running", all(task["state"]["type"] == "terminal" for task in tasks)
    ends = Counter(each["status"] for each in submissions)
    yield "the release was answered, and so was the writer's part", ends["done"] == 2
    yield "beyond the budget nothing was asked", ends["unanswered"] == 1
    answers = [entry for entry in entries if entry["kind"] == "pi.assistant"]
    yield "the budget was spent, and no more", len(answers) == BUDGET.turns

    checked = (folder / "project" / "checked").read_text()
    yield "the project was checked once, from its beginning to its end", checked == "begun\nended\n"
    yield "the notes are in the project", (folder / "project" / "NOTES.md").read_text() == NOTES


def judge(folder: Path) -> int:
    """How many of them are not true; each is told."""
    wrong = 0
    for what, true in checks(folder):
        print(f"{'✓' if true else '✗ NOT TRUE:'} {what}")
        wrong += not true
    return wrong


if __name__ == "__main__":
    sys.exit(1 if judge(Path(sys.argv[1])) else 0)
