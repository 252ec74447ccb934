"""``perdure questions``: another process lists and answers, whether the host runs or not (H330, H331)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from typer.testing import CliRunner, Result

from perdure import Extension, Harness, SqliteStorage, Submission, ToolCall, tool
from perdure.cli.app import app
from perdure.testing.model import ScriptedModel, call, say


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
        assert (late.exit_code, "was answered already" in late.output) == (1, True)
        never = await perdure("questions", "answer", store, 1, "5")
        assert (never.exit_code, "there is no question 1" in never.output) == (1, True)


async def test_it_is_answered_while_nobody_has_the_store_h330_h331(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        task = await asked(harness)
    wrong = await perdure("questions", "answer", store, task, "many")
    assert (wrong.exit_code, "does_not_fit" in wrong.output) == (1, True)
    assert (await perdure("questions", "answer", store, task, "4")).exit_code == 0
    assert (await perdure("questions", "ls", store)).output == "nothing is asked\n"
    async with host(store) as (harness, submission):
        assert (await submission.answer()).text == "done"
        assert await booked(harness)


async def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "table.db"
    async with host(store) as (harness, _):
        await asked(harness)
    refused = await perdure("questions", "answer", store, 1, "\udcff")
    assert refused.exit_code == 1
