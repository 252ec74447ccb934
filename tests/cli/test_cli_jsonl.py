"""The commands on a store of JSONL files: a directory is taken where a file is (rules K77, K150, K159, K184)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner, Result

from perdure import Extension, Harness, tool
from perdure.cli.app import app
from perdure.storage.jsonl import JsonlStorage
from perdure.testing.model import ScriptedModel, call, say

MODEL = ScriptedModel({"Dig.": [call("dig", depth=3), say("Dug.")], "More.": say("More it is.")})


@tool
async def dig(depth: int) -> str:
    """Dig."""
    return f"a hole of {depth}"


TOOLS = [Extension("app", tools=[dig])]


def perdure(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words: str | Path) -> str:
    result = perdure(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


async def dug(path: Path) -> None:
    async with Harness.open(JsonlStorage(path), models=MODEL, extensions=TOOLS) as harness:
        garden = await harness.create_conversation(name="garden")
        assert (await (await garden.submit("Dig.")).answer()).text == "Dug."


def test_a_closed_store_is_shown_checked_and_tidied(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    asyncio.run(dug(path))
    assert "garden" in done("ls", path)
    shown = done("show", path, "--conversation", "garden")
    assert "> Dig." in shown
    assert "a hole of 3" in shown
    assert json.loads(done("inspect", path, "--json"))["bytes"] > 1000
    done("export", path, "--conversation", "garden", "--output", tmp_path / "garden.jsonl")
    assert '"text":"Dig."' in (tmp_path / "garden.jsonl").read_text()
    assert "on disk" in done("size", path)
    done("backup", path, tmp_path / "copy")
    assert "garden" in done("ls", tmp_path / "copy")
    assert "kept in the mailbox" in perdure("send", path, "More.", "--conversation", "garden").output
    assert json.loads(done("inspect", path, "--json"))["mail"] == 1
    assert "deleted conversation" in done("rm", tmp_path / "copy", "garden", "--yes")
    assert "garden" not in done("ls", tmp_path / "copy")
    assert "gave back" in done("vacuum", tmp_path / "copy")
    assert "would delete 0 of" in done("prune", tmp_path / "copy", "--older-than", "1d", "--dry-run")


async def test_a_store_in_use_is_sent_to(tmp_path: Path) -> None:
    """K72, K74, K75, K77."""
    path = tmp_path / "agent"
    async with Harness.open(JsonlStorage(path), models=MODEL, extensions=TOOLS) as harness:
        await harness.root()
        harness.resume()
        words = ("send", path, "More.", "--conversation", "1", "--wait", "--timeout", "60")
        assert await asyncio.to_thread(done, *words) == "More it is.\n"
        busy = await asyncio.to_thread(perdure, "vacuum", path)
        assert busy.exit_code == 1
        assert "is open already: it is held by process" in busy.stderr
        assert "deleted" in await asyncio.to_thread(done, "rm", path, str(await _another(harness)), "--yes")


async def _another(harness: Harness) -> int:
    return (await harness.create_conversation()).id
