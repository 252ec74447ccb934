"""``perdure size`` and ``vacuum`` (rules K220 to K224), ``prune`` and the paging of ``show``."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from perdure import Harness, SqliteStorage
from perdure.cli.app import app
from perdure.testing.model import ScriptedModel, say


async def perdure(*words: str | Path) -> Result:
    """The command, beside the loop of this test."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [str(word) for word in words]))


@asynccontextmanager
async def host(path: Path) -> AsyncGenerator[Harness]:
    model = ScriptedModel(lambda request: say(f"answer to {request.messages[-1].text[:20]}"))
    async with Harness.open(SqliteStorage(path), models=model) as harness:
        yield harness


@pytest.fixture
async def closed(tmp_path: Path) -> Path:
    """A root, and two conversations of which one is large and has a name."""
    path = tmp_path / "agent.db"
    async with host(path) as harness:
        root = await harness.root()
        await (await root.submit("hello")).wait()
        large = await harness.create_conversation(name="the large one\n")
        for _ in range(20):
            await (await large.submit("x" * 20_000)).wait()
        small = await harness.create_conversation()
        await (await small.submit("small")).wait()
    return path


def content(path: Path) -> bytes:
    return path.read_bytes()


async def test_sizes_are_shown_with_what_takes_most_k220(closed: Path) -> None:
    before = content(closed)
    done = await perdure("size", closed)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].endswith("on disk")
    assert any(line.split()[:1] == ["entries"] and "KiB" in line for line in lines)
    most = lines[lines.index("The conversations that take most:") + 1]
    assert most.endswith("the large one\\n")
    assert "entries" in most
    assert content(closed) == before, "it was only looked at"
    found = json.loads((await perdure("size", closed, "--json")).output)
    assert found["size"]["rows"]["conversations"] == 3
    assert found["size"]["total"] == len(before)
    async with host(closed) as harness:  # and while it is in use
        live = json.loads((await perdure("size", closed, "--json")).output)
        assert live["size"]["rows"] == found["size"]["rows"]
        report = await harness.size()
        assert (report.rows.entries, report.biggest[0].bytes) == (
            live["size"]["rows"]["entries"],
            live["size"]["biggest"][0]["bytes"],
        )


async def test_a_vacuum_gives_back_what_was_deleted_k221(closed: Path) -> None:
    long = os.stat(closed).st_size
    large = json.loads((await perdure("size", closed, "--json")).output)["size"]["biggest"][0]["id"]
    await perdure("rm", closed, str(large), "--yes")
    assert "perdure vacuum gives them back" in (await perdure("size", closed)).output
    done = await perdure("vacuum", closed)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("gave back ")
    assert os.stat(closed).st_size < long - 300_000
    again = json.loads((await perdure("vacuum", closed, "--json")).output)
    assert again["before"] >= again["after"] == os.stat(closed).st_size


async def test_a_store_in_use_is_not_vacuumed_from_outside_and_by_its_host_k223_k224(closed: Path) -> None:
    async with host(closed) as harness:
        refused = await perdure("vacuum", closed)
        assert refused.exit_code == 1
        assert f"held by process {os.getpid()} on host" in refused.output
        large = max((await harness.size()).biggest, key=lambda each: each.bytes).id
        await harness.delete_conversations([large])
        root = await harness.root()
        submission = await root.submit("in the middle of it")
        report = await harness.vacuum()
        assert report.freed > 300_000
        assert (await submission.answer()).text == "answer to in the middle of it"
        assert (await harness.size()).free == 0


async def test_no_store_is_said_k187(tmp_path: Path) -> None:
    for command in ("size", "vacuum"):
        done = await perdure(command, tmp_path / "nothing" / "agent.db")
        assert done.exit_code == 1
        assert "nothing" in done.output
