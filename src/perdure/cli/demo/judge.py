"""The demo's end check: its own count, from the files, with nothing of the product but its file format.

It opens the store with Python's own sqlite3, reads the workspace and the supplier's book, and knows what must be there
from the work that was asked for.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

from perdure.cli.demo.project import FILE_MODE, FILES, FIXED, JOBS, ORDERS, REPORT, SUPPLIER, TO_ORDER, orders_in
from perdure.cli.demo.space import workspace_of

Row = dict[str, Any]
"""A record's JSON as it stands in the file: the judge takes nobody's word for its types."""


def judge(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Each check: what was checked, and what is wrong (None: nothing)."""
    with closing(sqlite3.connect(f"file:{folder / 'agent.db'}?mode=ro", uri=True)) as store:
        submissions = [json.loads(body) for (body,) in store.execute("SELECT body FROM submissions ORDER BY id")]
        entries = [json.loads(body) for (body,) in store.execute("SELECT body FROM entries ORDER BY id")]
        tasks = [json.loads(body) for (body,) in store.execute("SELECT body FROM tasks ORDER BY id")]
    yield "each job was admitted once", one_each(submissions, [request_id for request_id, _ in JOBS])
    yield "each job has its answer", answered(submissions, entries)
    yield "nothing is left running", nothing_left(tasks)
    yield "every call is followed by exactly its result", well_formed(entries)
    yield "no unsafe call was executed twice", _ordered_once(folder)
    yield "no call in the Space was lost or interrupted", none_interrupted(entries)
    yield "the workspace holds what it must and nothing else, by hash", _workspace(folder)
    yield "the project's own tests pass", _tests_pass(folder)


def one_each(submissions: list[Row], request_ids: Iterable[str]) -> str | None:
    count = Counter(submission.get("request_id") for submission in submissions)
    wanted = dict.fromkeys(request_ids, 1)
    return None if dict(count) == wanted else f"submissions by request id: {dict(count)}"


def answered(submissions: list[Row], entries: list[Row]) -> str | None:
    by_id = {entry["id"]: entry for entry in entries}
    for submission in submissions:
        answer = by_id.get(submission.get("answer", 0))
        if submission["status"] != "done" or answer is None or answer["kind"] != "pi.assistant":
            return f"{submission.get('request_id')} is {submission['status']} with answer {submission.get('answer')}"
    return None


def nothing_left(tasks: list[Row]) -> str | None:
    left = [
        f"{task['kind']} {task['id']} {task['state']['type']}" for task in tasks if task["state"]["type"] != "terminal"
    ]
    return ", ".join(left) or None


def well_formed(entries: list[Row]) -> str | None:
    """In the transcript a provider would be sent: calls, then a result for each and no other, then something else."""
    open_calls: Counter[str] = Counter()
    for entry in entries:
        for message in entry.get("messages", []):
            role = message["role"]
            if role == "tool":
                if not open_calls[message["call_id"]]:
                    return f"entry {entry['id']} is a result of a call that is not open: {message['call_id']}"
                open_calls[message["call_id"]] -= 1
            elif role in ("user", "assistant") and +open_calls:
                return f"entry {entry['id']} comes before the results of {sorted(+open_calls)}"
            elif role == "assistant" and message["stop_reason"] not in ("aborted", "error"):
                open_calls.update(part["id"] for part in message["content"] if part["type"] == "tool_call")
    return f"calls without a result: {sorted(+open_calls)}" if +open_calls else None


def _ordered_once(folder: Path) -> str | None:
    book = folder / SUPPLIER / ORDERS
    ordered = orders_in(book.read_text()) if book.exists() else []
    return None if ordered == list(TO_ORDER) else f"the supplier's book says {ordered}"


def none_interrupted(entries: list[Row]) -> str | None:
    """What an order did outside nobody can know; what happened in the Space can be known, or taken back."""
    results = [entry["data"] for entry in entries if entry["kind"] == "pi.tool-result"]
    wrong = Counter(data["name"] for data in results if data.get("code") == "interrupted" and data["name"] != "order")
    return f"interrupted calls: {dict(wrong)}" if wrong else None


def _workspace(folder: Path) -> str | None:
    wanted = {
        **FILES,
        "stock.py": FILES["stock.py"].replace("have - want", FIXED, 1),
        "REPORT.md": REPORT,
    }
    hashes = {name: sha256(text.encode()).hexdigest() for name, text in wanted.items()}
    found = dict(_hashed(workspace_of(folder)))
    for name in sorted(hashes.keys() | found.keys()):
        if hashes.get(name) != found.get(name):
            return f"{name} is not as it must be"
    modes = {name: (workspace_of(folder) / name).stat().st_mode & 0o7777 for name in FILES}
    changed = sorted(name for name, mode in modes.items() if mode != FILE_MODE)
    return f"modes of {', '.join(changed)} are not as they were" if changed else None


def _hashed(workspace: Path) -> Iterator[tuple[str, str]]:
    """Everything there is, by name. Nothing but files belongs there."""
    for name in os.listdir(workspace):
        path = workspace / name
        plain = path.is_file() and not path.is_symlink()
        yield name, sha256(path.read_bytes()).hexdigest() if plain else "no file"


def _tests_pass(folder: Path) -> str | None:
    command = [sys.executable, "-B", "-m", "unittest", "-q"]
    done = subprocess.run(command, cwd=workspace_of(folder), capture_output=True, check=False, timeout=60)
    return None if done.returncode == 0 else f"exit code {done.returncode}"
