"""``perdure size`` and ``vacuum`` (rules K220 to K224), ``prune`` (K225 to K228) and the paging of ``show`` (K230)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from perdure import Conversation, Harness, SqliteStorage
from perdure.cli.app import app
from perdure.events import RunEnd, Snapshot
from perdure.kernel.clock import SystemClock
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


# --- prune -------------------------------------------------------------------------------------------------------

DAY = 86_400_000


class Past(SystemClock):
    """Forty days ago."""

    def wall(self) -> int:
        return super().wall() - 40 * DAY


@pytest.fixture
async def aged(tmp_path: Path) -> Path:
    """Conversations of forty days ago: a root, two plain ones, one with a label, one with a name; and one of today."""
    path = tmp_path / "agent.db"
    async with Harness.open(SqliteStorage(path), clock=Past()) as harness:
        await harness.root()
        for name, labels in ((None, None), (None, None), (None, {"kind": "test"}), ("mine", None)):
            await harness.create_conversation(name=name, labels=labels)
    async with host(path) as harness:
        await harness.create_conversation()
    return path


async def conversations(path: Path) -> int:
    return json.loads((await perdure("size", path, "--json")).output)["size"]["rows"]["conversations"]


async def test_what_is_old_is_pruned_k225_k228(aged: Path) -> None:
    assert (await perdure("prune", aged, "--older-than", "50d")).output == "deleted 0 of 5 conversations\n"
    before = content(aged)
    would = await perdure("prune", aged, "--older-than", "30d", "--dry-run")
    assert would.output.startswith("would delete 3 of 5 conversations\n")
    assert content(aged) == before
    labelled = json.loads(
        (await perdure("prune", aged, "--older-than", "30d", "--label", "kind=test", "--json")).output
    )
    assert (labelled["matched"], len(labelled["ids"]), labelled["dry_run"]) == (1, 1, False)
    done = await perdure("prune", aged, "--older-than", "960h")
    assert done.output.startswith("deleted 2 of 4 conversations\n")
    assert "perdure vacuum" in done.output
    assert await conversations(aged) == 3
    named = await perdure("prune", aged, "--older-than", "30d", "--named")
    assert named.output.startswith("deleted 1 of 2 conversations\n")


async def test_what_the_mailbox_has_for_a_conversation_keeps_it_k225(aged: Path) -> None:
    would = json.loads((await perdure("prune", aged, "--older-than", "30d", "--dry-run", "--json")).output)
    expecting = would["ids"][0]
    assert (await perdure("send", aged, "are you there?", "--conversation", str(expecting))).exit_code == 0
    for dry in (["--dry-run"], []):
        told = json.loads((await perdure("prune", aged, "--older-than", "30d", "--json", *dry)).output)
        assert (told["ids"], told["open"]) == (would["ids"][1:], 1)
    async with host(aged) as harness:
        harness.resume()
        conversation = harness.handle(expecting)
        async with conversation.events() as events, asyncio.timeout(60):
            async for event in events:
                if isinstance(event, RunEnd) or (isinstance(event, Snapshot) and len(await said(conversation)) == 2):
                    break
        assert await said(conversation) == ["pi.user", "pi.assistant"], "it was not lost"


async def said(conversation: Conversation) -> list[str]:
    return [entry.kind for entry in await conversation.entries()]


async def test_a_store_in_use_is_only_looked_at_by_a_dry_run_k228(aged: Path) -> None:
    async with host(aged):
        refused = await perdure("prune", aged, "--older-than", "30d")
        assert refused.exit_code == 1
        assert f"held by process {os.getpid()} on host" in refused.output
        would = await perdure("prune", aged, "--older-than", "30d", "--dry-run")
        assert would.output.startswith("would delete 3 of 5")


@pytest.mark.parametrize("wrong", ["30", "d", "0d", "-3d", "1.5d", "30 d", "30w", "9999999999d"])
async def test_an_age_that_is_none_is_refused(wrong: str, tmp_path: Path) -> None:
    done = await perdure("prune", tmp_path / "agent.db", f"--older-than={wrong}")
    assert done.exit_code == 2
    assert "30d" in done.output


@pytest.mark.parametrize("wrong", [["x"], ["=x"], ["a=1", "a=2"]])
async def test_a_label_that_is_none_is_refused(wrong: list[str], tmp_path: Path) -> None:
    labels = [word for label in wrong for word in ("--label", label)]
    done = await perdure("prune", tmp_path / "agent.db", "--older-than", "1d", *labels)
    assert done.exit_code == 2


# --- pages of show -----------------------------------------------------------------------------------------------


async def test_show_pages_through_all_there_is_k230(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    async with host(path) as harness:
        root = await harness.root()
        for number in range(6):
            await (await root.submit(f"say {number}")).wait()
            if number == 3:
                await root.reset("begin anew")
        ids = [entry.id for entry in await root.entries(limit=1000)]
    found: list[int] = []
    words = ["show", path, "--limit", "4"]
    while True:
        page = (await perdure(*words, "--json")).output.splitlines()
        if not page:
            break
        found = [json.loads(each)["id"] for each in page] + found
        words = ["show", path, "--limit", "4", "--before", str(found[0])]
    assert found == ids, "backwards, past the reset"
    found, after = [], 0
    while page := (await perdure("show", path, "--after", str(after), "--limit", "5", "--json")).output.splitlines():
        assert len(page) <= 5
        found += [json.loads(each)["id"] for each in page]
        after = found[-1]
    assert found == ids, "and forwards"
    middle = (await perdure("show", path, "--before", str(ids[8]), "--limit", "3")).output
    assert f"earlier entries: --before {ids[5]}" in middle
    assert f"later entries: --after {ids[7]}" in middle
    assert "begin anew" in (await perdure("show", path, "--after", "0", "--limit", "100")).output
    assert "no entries there" in (await perdure("show", path, "--before", "1")).output
    for wrong in (
        ["--before", "5", "--after", "3"],
        ["--all", "--limit", "3"],
        ["--limit", "1001"],
        ["--window", "3", "--before", "5"],
        ["--window", "3", "--all"],
    ):
        assert (await perdure("show", path, *wrong)).exit_code == 2


async def test_what_needs_a_store_makes_none_k187(tmp_path: Path) -> None:
    for words in (("vacuum",), ("prune", "--older-than", "1d"), ("prune", "--older-than", "1d", "--dry-run")):
        done = await perdure(words[0], tmp_path / "typo.db", *words[1:])
        assert done.exit_code == 1
        assert "there is no store at" in done.output
        assert not os.listdir(tmp_path)
