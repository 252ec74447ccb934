"""An agent with several conversations is killed at random, again and again, and judged by what it did and left.

The judge counts the lines that tools appended to files, and reads the store with Python's own sqlite3. The kills follow
a fixed seed; where exactly they hit is up to the machine.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import monkey
import pytest
from acceptance_kit import STORE, lines, records

from perdure import Session, SqliteStorage
from perdure.harness.documents import Inbox, Live

KILLS = 15
LONGEST = 100
"""Lines of one life at most, before it is killed."""


def live(folder: Path, seed: str, most: int | None) -> tuple[list[dict[str, Any]], bool]:
    """One life of the agent, killed after so many lines: what it said, and whether it came to its end before."""
    command = [sys.executable, str(Path(__file__).with_name("monkey.py")), str(folder), seed]
    said: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                said.append(json.loads(line))
                if most is not None and len(said) >= most:
                    process.send_signal(signal.SIGKILL)
            # What was said before the kill arrived counts.
            words = process.stderr.read().decode()
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGKILL), f"it ended by itself with {process.returncode}:\n{words}"
    return said, process.returncode == 0


@pytest.mark.parametrize("seed", ["one", "two"])
async def test_an_agent_that_is_killed_at_random_loses_nothing_and_does_nothing_twice(
    seed: str, tmp_path: Path
) -> None:
    """H20, H34, H69, H77, H86 to H92, T1, T35, K1, K130."""
    chance = random.Random(f"kills {seed}")
    said: list[dict[str, Any]] = []
    kills = 0
    for _ in range(KILLS):
        more, ended = live(tmp_path, seed, chance.randint(1, LONGEST))
        said += more
        kills += not ended
    assert kills == KILLS, "there was too little work for so many kills"
    more, ended = live(tmp_path, seed, None)
    assert ended
    assert more[-1] == {"finished": True}
    judge_store(tmp_path / STORE, seed)
    judge_acknowledged(tmp_path / STORE, said + more)
    judge_effects(tmp_path, seed)
    await judge_documents(tmp_path / STORE)


def jobs(seed: str) -> list[str]:
    return [f"job {name}.{n}.{kind}" for name, kinds in monkey.plan(seed).items() for n, kind in enumerate(kinds)]


def judge_store(path: Path, seed: str) -> None:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        ((seq, next_id),) = store.execute("SELECT seq, next_id FROM meta").fetchall()
    conversations, entries = records(path, "conversations"), records(path, "entries")
    submissions, tasks = records(path, "submissions"), records(path, "tasks")
    assert len(conversations) == len(monkey.CONVERSATIONS), "each was made once"

    # Ids are of one order with commits, and were never given twice.
    every = [record["id"] for record in (*conversations, *entries, *submissions, *tasks)]
    assert len(every) == len(set(every))
    assert max(every) < next_id
    seqs = [entry["seq"] for entry in entries]
    assert seqs == sorted(seqs)
    assert seqs[-1] <= seq

    # Each request was admitted once, and answered with the end of its own work.
    wanted = [f"{before}{job}" for job in jobs(seed) for before in ("", "steer ", "note ")]
    assert Counter(s["request_id"] for s in submissions) == Counter(wanted)
    by_id = {entry["id"]: entry for entry in entries}
    for submission in submissions:
        assert submission["status"] == "done", submission
        assert text_of(by_id[submission["entry"]]) == submission["request_id"]
        if submission["type"] == "input":
            last = by_id[submission["answer"]]
            assert (last["kind"], last["messages"][0]["stop_reason"]) == ("pi.assistant", "stop")
            if submission["request_id"].startswith("job"):
                assert text_of(last) == monkey.answer(submission["request_id"])
    users = Counter(text_of(entry) for entry in entries if entry["kind"] in ("pi.user", "app.note"))
    assert users == Counter(wanted), "each landed in the transcript once"

    # Nothing is left, and everything came to the end that its own code decided.
    assert {task["state"]["type"] for task in tasks} == {"terminal"}
    assert {task["state"]["outcome"]["type"] for task in tasks} == {"completed"}
    shipped = Counter(task["input"] for task in tasks if task["kind"] == "app.ship")
    assert shipped == Counter(key(job).rpartition(".")[0] for job in jobs(seed))

    # Every call has exactly its result, after it, and before anything that a provider would stumble over.
    results = Counter(entry["data"]["task"] for entry in entries if entry["kind"] == "pi.tool-result")
    called = [task for entry in entries if entry["kind"] == "pi.assistant" for task in entry["data"].get("calls", ())]
    assert results == Counter(called)
    for conversation in conversations:
        open_calls = set[int]()
        for entry in (e for e in entries if e["conversation_id"] == conversation["id"]):
            if entry["kind"] == "pi.tool-result":
                open_calls.remove(entry["data"]["task"])
            elif entry["kind"] in ("pi.user", "pi.assistant", "app.note"):
                assert not open_calls, f"{entry['kind']} {entry['id']} comes between a call and its result"
                open_calls.update((entry.get("data") or {}).get("calls", ()))
        assert not open_calls


def text_of(entry: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in entry["messages"][0]["content"])


def key(job: str) -> str:
    return job.removeprefix("job ")


def judge_acknowledged(path: Path, said: list[dict[str, Any]]) -> None:
    """What any life was told is so, is so."""
    submissions = {s["id"]: s for s in records(path, "submissions")}
    entries = {entry["id"]: entry for entry in records(path, "entries")}
    for line in said:
        if "admitted" in line:
            assert submissions[line["admitted"]]["request_id"] == line["request_id"]
        elif "answered" in line:
            assert submissions[line["answered"]]["answer"] == line["entry"]
            assert text_of(entries[line["entry"]]) == line["text"]
    assert sum("admitted" in line for line in said) > len(submissions), "some were asked for again"


def judge_effects(folder: Path, seed: str) -> None:
    """What the tools did, by their own count, beside what the transcript says of it."""
    calls = [made for job in jobs(seed) for made in monkey.calls_of(job)]
    did = {name: [line.split() for line in lines(folder / name)] for name in ("charged", "looked", "shipped")}
    for effects in did.values():
        # An idempotency key is one call's, however often it ran, and no other's.
        keys = {(what, idempotency) for what, idempotency in effects}
        assert len(keys) == len({what for what, _ in keys}) == len({idempotency for _, idempotency in keys})
    charged = Counter(what for what, _ in did["charged"])
    assert max(charged.values()) == 1, "no unsafe call was executed twice"
    assert set(charged) <= {key for name, key in calls if name == "charge"}
    assert {what for what, _ in did["looked"]} == {key for name, key in calls if name == "look"}
    assert {what for what, _ in did["shipped"]} == {key(job).rpartition(".")[0] for job in jobs(seed)}
    said: dict[str, str | None] = {}
    for entry in records(folder / STORE, "entries"):
        if entry["kind"] == "pi.tool-result" and entry["data"]["name"] == "charge":
            code = entry["data"].get("code")
            if code is None:
                said[text_of(entry).removeprefix("charged ")] = None
            else:
                assert code == "interrupted", entry
    assert set(said) <= set(charged), "what is said to have been done was done"


async def judge_documents(path: Path) -> None:
    """Documents are as the entries of the same commits say, and nobody is busy."""
    happened = Counter(e["conversation_id"] for e in records(path, "entries") if e["kind"] == "app.happened")
    async with Session.open(SqliteStorage(path), read_only=True) as session:
        for conversation in await session.conversations():
            tally = await session.snapshot(monkey.Tally, conversation=conversation.id)
            assert tally is not None
            assert tally.n == happened[conversation.id] == 3 * monkey.JOBS
            assert len(tally.begun) == len(set(tally.begun)) == monkey.JOBS
            running = await session.snapshot(Live, conversation=conversation.id)
            assert running is not None
            assert (running.run, running.message, dict(running.tools), running.retry) == (None, None, {}, None)
            inbox = await session.snapshot(Inbox, conversation=conversation.id)
            assert inbox is None or len(inbox.items) == 0
