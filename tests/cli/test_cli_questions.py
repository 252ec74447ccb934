"""``perdure questions``: another process lists and answers, whether the host runs or not (H330, H331)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from msgspec import structs
from typer.testing import CliRunner, Result

from perdure import Extension, Harness, SqliteStorage, Submission, ToolCall, tool
from perdure.cli.app import app
from perdure.harness.person import QUESTION
from perdure.kernel.records import TaskRecord
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools.people import ask_user


@tool(replay="safe")
async def book(call: ToolCall) -> str:
    """Book a table."""
    many = await call.ask("How many\nare you?", int)
    return f"booked for {many}"


async def perdure(*words: str | Path | int) -> Result:
    """The command, beside the loop of this test."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [str(word) for word in words]))


@asynccontextmanager
async def host(store: Path) -> AsyncIterator[tuple[Harness, Submission]]:
    model = ScriptedModel([call("book"), say("done")])
    async with Harness.open(SqliteStorage(store), models=model, extensions=[Extension("t", tools=[book])]) as harness:
        yield harness, await (await harness.root()).submit("Book.", request_id="book")


async def asked(harness: Harness) -> int:
    committed = asyncio.Event()
    harness.session.observe(lambda _: committed.set())
    harness.resume()
    async with asyncio.timeout(60):
        while not (found := await harness.questions()):
            committed.clear()
            await committed.wait()
    return found[0].task


async def booked(harness: Harness) -> bool:
    root = await harness.root()
    return any(b"booked for 4" in bytes(entry.raw_messages) for entry in await root.entries())


async def test_a_question_is_listed_and_answered_while_its_host_runs_h330_h331(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, submission):
        task = await asked(harness)
        listed = await perdure("questions", "ls", store)
        assert f"{task}  book  in conversation 1, asked " in listed.output
        assert '    How many\n    are you?\n    answer: {"type":"integer"}\n' in listed.output
        (line,) = (await perdure("questions", "ls", store, "--json")).output.splitlines()
        assert (json.loads(line)["text"], json.loads(line)["schema"]) == ("How many\nare you?", {"type": "integer"})
        assert "waits to be answered" in (await perdure("inspect", store)).output
        wrong = await perdure("questions", "answer", store, task, "many")
        assert (wrong.exit_code, "does_not_fit" in wrong.output) == (1, True)
        right = await perdure("questions", "answer", store, task, "4")
        assert (right.exit_code, right.output) == (0, f"answered: question {task}\n")
        assert (await submission.answer()).text == "done"
        assert await booked(harness)
        assert (await perdure("questions", "ls", store)).output == "nothing is asked\n"
        late = await perdure("questions", "answer", store, task, "5")
        assert late.exit_code == 1
        assert re.search(rf"question {task} was answered at \d{{4}}-.* UTC; that answer stands\n$", late.output)


async def test_it_is_answered_while_nobody_has_the_store_h330_h331(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        task = await asked(harness)
    wrong = await perdure("questions", "answer", store, task, "many")
    assert (wrong.exit_code, "does_not_fit" in wrong.output) == (1, True)
    assert (await perdure("questions", "answer", store, task, "4")).exit_code == 0
    assert (await perdure("questions", "ls", store)).output == "nothing is asked\n"
    again = await perdure("questions", "answer", store, task, "5")
    assert (again.exit_code, f"question {task} was answered at " in again.output) == (1, True)
    inspected = (await perdure("inspect", store)).output
    assert "was answered at " in inspected
    assert "waits to be answered" not in inspected
    async with host(store) as (harness, submission):
        assert (await submission.answer()).text == "done"
        assert await booked(harness)


@pytest.mark.parametrize("owned", [True, False])
async def test_those_who_answer_at_once_are_all_told_the_truth_h331(tmp_path: Path, owned: bool) -> None:
    """Where nobody has the store open, the commands themselves are in each other's way."""
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        task = await asked(harness)
        if owned:
            await all_at_once(store, task)
    if not owned:
        await all_at_once(store, task)


async def all_at_once(store: Path, task: int) -> None:
    program = Path(sys.executable).parent / "perdure"
    processes = [
        await asyncio.create_subprocess_exec(
            *map(str, (program, "questions", "answer", store, task, answer)), stdout=PIPE, stderr=PIPE
        )
        for answer in ("4", "5", "6")
    ]
    said = [(await process.communicate(), process.returncode) for process in processes]
    assert sorted(str(code) for _, code in said) == ["0", "1", "1"], said
    for (output, errors), code in said:
        words = b"answered: question %d\n" % task if code == 0 else b"question %d was answered at " % task
        assert words in (output if code == 0 else errors), said


async def test_a_command_that_is_interrupted_says_that_its_answer_is_kept_h331(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        task = await asked(harness)
        harness.session.storage.on_mail(lambda: None)  # a host that takes nothing up
        program = Path(sys.executable).parent / "perdure"
        process = await asyncio.create_subprocess_exec(
            *map(str, (program, "questions", "answer", store, task, "4")), stdout=PIPE, stderr=PIPE
        )
        while not await harness.session.storage.mail(limit=1):
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert b"not done yet: kept in the mailbox" in errors
        assert process.returncode != 0


async def test_why_a_question_takes_no_answer_is_said_h331(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        task = await asked(harness)
        (question,) = await harness.questions()
        await harness.abort_task(task, reason="not\x1b[31m now")
        await harness.idle()
    for id, words in (
        (999, f"there is no question 999; perdure questions ls {store} lists what is asked"),
        (task, f"question {task} was withdrawn at "),
        (task, "UTC: not⟨U+001B⟩[31m now\n"),
        (question.call, f"task {question.call} is no question; perdure questions ls {store} lists"),
    ):
        done = await perdure("questions", "answer", store, id, "4")
        assert (done.exit_code, words in done.output) == (1, True), done.output


@tool(replay="safe")
async def hurry(call: ToolCall) -> str:
    """Ask, and do not wait long."""
    return await call.ask("Now?\x1b]0;owned\x07", Literal["yes", "no\x1b[31m"], expire_after_ms=1)  # type: ignore[arg-type]


async def test_a_question_whose_time_is_over_says_so_h330(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    model = ScriptedModel([call("hurry"), say("done")])
    async with Harness.open(SqliteStorage(store), models=model, extensions=[Extension("t", tools=[hurry])]) as harness:
        await (await (await harness.root()).submit("Go.")).answer()
        (task,) = await harness.session.tasks(kind=QUESTION)
    done = await perdure("questions", "answer", store, task.id, "yes")
    assert (done.exit_code, f"question {task.id} expired at " in done.output) == (1, True), done.output


async def test_inspect_tells_what_is_asked_with_its_choices_and_since_when_h330(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    model = ScriptedModel([call("ask_user", question="Which\x1b]0;owned\x07\nday?", choices=["Monday", "\x1b[31m"])])
    async with Harness.open(
        SqliteStorage(store), models=model, extensions=[Extension("p", tools=[ask_user])]
    ) as harness:
        await (await harness.root()).submit("Go.")
        await asked(harness)
    shown = (await perdure("inspect", store)).output
    (line,) = [line for line in shown.splitlines() if "ask_user" in line and "answer" in line]
    assert re.search(r" answer +\d{4}-\d\d-\d\d .* UTC +\d{4}-.* UTC +Which day\? \(answer: one of ", line)
    assert line.endswith('(answer: one of "Monday", "\\u001b[31m")')
    assert "\x1b" not in shown
    (report,) = json.loads((await perdure("inspect", store, "--json")).output)["persons"]
    assert (report["wants"], report["until"] - report["since"]) == ("answer", 86_400_000)
    listed = (await perdure("questions", "ls", store)).output
    assert '    Which\n    day?\n    answer: one of "Monday", "\\u001b[31m"\n' in listed


async def test_a_question_of_a_newer_release_does_not_hide_the_rest(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        await asked(harness)
    with closing(sqlite3.connect(store)) as opened:
        ((id, body),) = opened.execute("SELECT id, body FROM tasks WHERE kind = 'pi.question'")
        record = msgspec.json.decode(body, type=TaskRecord)
        newer = structs.replace(record, raw_input=msgspec.Raw(b'{"shape":"another"}'))
        opened.execute("UPDATE tasks SET body = ? WHERE id = ?", (msgspec.json.encode(newer), id))
        opened.commit()
    done = await perdure("inspect", store, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["persons"] == []
    whys = {task["kind"]: task["why"] for task in json.loads(done.output)["tasks"]}
    assert whys["pi.question"].startswith("waits to be answered")


async def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    store = tmp_path / "typo.db"
    for words in (
        ("questions", "answer", store, 1, "4"),
        ("approvals", "allow", store, 1),
        ("approvals", "rules", "add", store, "pay"),
        ("approvals", "rules", "rm", store, 1),
    ):
        done = await perdure(*words)
        assert (done.exit_code, f"there is no store at {store}" in done.output) == (1, True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dsn", ["postgresql://ada:secret@db/shop", "host=db user=ada password=secret"])
async def test_a_session_in_postgresql_is_no_store_of_the_commands(dsn: str, tmp_path: Path) -> None:
    """And what may hold a password is not quoted."""
    for words in (
        ("inspect", dsn),
        ("ls", dsn),
        ("show", dsn),
        ("send", dsn, "hello"),
        ("export", dsn),
        ("size", dsn),
        ("prune", dsn, "--older-than", "30d"),
        ("vacuum", dsn),
        ("backup", dsn, "copy.db"),
        ("backup", tmp_path / "agent.db", dsn),
        ("rm", dsn, "1", "--yes"),
        ("questions", "ls", dsn),
        ("questions", "answer", dsn, 1, "yes"),
        ("approvals", "ls", dsn),
        ("approvals", "allow", dsn, 1),
        ("approvals", "rules", "rm", dsn, 1),
    ):
        done = await perdure(*words)
        assert (words, done.exit_code, done.stdout) == (words, 1, "")
        assert "do not take a session in PostgreSQL yet" in done.stderr
        assert "secret" not in done.output


async def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        await asked(harness)
    refused = await perdure("questions", "answer", store, 1, "\udcff")
    assert refused.exit_code == 1
