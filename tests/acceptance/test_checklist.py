"""What a host tries before it relies on an agent: keys at providers, backups, modes of files, closing, contexts.

The rest of what is to be tried before is in the other files here; docs/coverage.md has the whole list.
"""

from __future__ import annotations

import inspect
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from acceptance_kit import LONG, SCRIPT, STORE, Child, Hold, lines, opened, records, run

from perdure import (
    Conversation,
    Harness,
    LocalEnvironment,
    SqliteStorage,
    Submission,
    coding_tools,
)
from perdure.cli.backup import backup
from perdure.kernel.session import CloseReport
from perdure.testing.model import ScriptedModel, call, say


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


async def test_a_safe_tool_with_a_providers_key_has_its_effect_once_wherever_it_is_killed_h94(tmp_path: Path) -> None:
    """Killed twice in the first call and once in the second: each is asked for again, under a key of its own."""
    for _ in range(2):
        async with Child.run("charger", tmp_path, points=["charged"]) as child:
            await child.at("charged")
    async with Child.run("charger", tmp_path, points=["charged"]) as child:
        await child.at("charged")
        child.go()
        await child.at("charged")
    assert (await run("charger", tmp_path))["answer"] == "paid"
    asked, charged = lines(tmp_path / "asked"), lines(tmp_path / "charges")
    assert (len(asked), len(charged)) == (5, 2)
    assert [asked.count(line.split()[0]) for line in charged] == [3, 2]


async def test_a_copy_of_a_store_at_work_goes_on_when_the_store_is_lost_k184(tmp_path: Path) -> None:
    """Made by another process, in the middle of a call: the same submission is answered from the copy."""
    work, other = tmp_path / "work", tmp_path / "other"
    work.mkdir()
    other.mkdir()
    async with Child.run("agent", work, text="work", request_id="r", points=["tool"]) as child:
        await child.at("tool")
        submission = child.said[-2]["submission"]
        assert await backup(work / STORE, other / STORE) > 0
    shutil.rmtree(work)
    again = await run("agent", other, text="work", request_id="r")
    assert (again["submission"], again["answer"]) == (submission, "worked")
    (result,) = [entry for entry in records(other / STORE, "entries") if entry["kind"] == "pi.tool-result"]
    assert result["data"]["code"] == "interrupted"


async def test_what_an_agent_stores_is_its_owners_alone_whatever_the_umask_k163(tmp_path: Path) -> None:
    """The store with its log and lock, a copy of it, and what its tools keep of long output."""
    old = os.umask(0)
    try:
        outputs = tmp_path / "outputs"
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        script = {"go": [call("bash", command="seq 100000"), say("done")]}
        async with Harness.open(
            SqliteStorage(tmp_path / STORE),
            models=ScriptedModel(script),
            extensions=[coding_tools()],
            environment=LocalEnvironment(workspace, output_dir=outputs),
        ) as harness:
            await (await (await harness.root()).submit("go")).answer()
            await backup(tmp_path / STORE, tmp_path / "copy.db")
            modes = {
                str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777
                for path in every(tmp_path)
                if workspace not in (path, *path.parents)
            }
            assert {STORE, f"{STORE}-wal", f"{STORE}.lock", "copy.db", "outputs"} <= modes.keys()
            assert any(name.startswith("outputs/") for name in modes), "it was long enough to be kept"
            assert {name for name, mode in modes.items() if mode & 0o077} == set()
    finally:
        os.umask(old)


def every(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


async def test_a_close_in_the_middle_of_work_keeps_it_and_lets_go_of_the_store_k81_k83(store: Path) -> None:
    """And an agent that is closed again and again on its way is no worse for it, nor parked (T40)."""
    for _ in range(8):
        hold = Hold(3)
        async with opened(store, ScriptedModel(SCRIPT, pace=hold)) as harness:
            await (await harness.root()).submit("long", request_id="r")
            await hold.reached.wait()
        assert harness.closed is not None
        assert harness.closed == CloseReport(harness.session.seq)
    async with opened(store, ScriptedModel(SCRIPT)) as harness:
        assert [task.restarts for task in (await harness.inspect()).tasks] == [0]
        submission = await (await harness.root()).submit("long", request_id="r")
        assert (await submission.answer()).text == LONG


@pytest.mark.parametrize("face", [Harness, Conversation, Submission], ids=lambda face: face.__name__)
def test_every_call_that_may_wait_takes_a_context_k89(face: type[Any]) -> None:
    waiting = [
        (name, inspect.signature(member))
        for name, member in inspect.getmembers(face, inspect.iscoroutinefunction)
        if not name.startswith("_")
    ]
    assert len(waiting) > 5
    # What is part of a transaction waits within its block.
    assert [name for name, face in waiting if not {"context", "tx"} & face.parameters.keys()] == []
