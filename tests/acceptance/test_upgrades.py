"""A store that an earlier release left in the middle of its work: listed from its data, and gone on with. And one of a
later release, which is refused."""

from __future__ import annotations

import gzip
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import under_way
from acceptance_kit import STORE, kinds, lines, records, run
from under_way import APP, LONG, SCRIPT, Board

import perdure.spaces.documents  # defines documents that are looked at below
from perdure import Document, Harness, SqliteStorage, StorageFormatError, Task
from perdure.harness.documents import ToolResultData
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.storage.sqlite_schema import FORMAT_VERSION
from perdure.testing.model import USAGE, ScriptedModel

GOLDEN = sorted((Path(__file__).parent / "golden").glob("under-way-*.gz"))
SUMMARIES = sorted((Path(__file__).parent / "golden").glob("summary-*.gz"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    store = tmp_path / STORE
    unpack(request.param, store)
    return store


def unpack(golden: Path, store: Path) -> None:
    store.write_bytes(gzip.decompress(golden.read_bytes()))
    store.chmod(0o600)


def content(path: Path) -> bytes:
    return path.read_bytes()


async def test_whoever_only_looks_finds_what_was_under_way(old: Path) -> None:
    """K180, H69: without changing a byte."""
    before = content(old)
    async with Harness.open(SqliteStorage(old), read_only=True) as harness:
        infos = await harness.conversations()
        assert [info.name for info in infos] == [None, "pressing", "telling"]
        handles = [harness.handle(info.id) for info in infos]
        assert [await handle.busy() for handle in handles] == [False, True, True]
        inspection = await harness.inspect()
        assert sorted(task.kind for task in inspection.tasks) == ["pi.generation", "pi.generation", "pi.tool"]
        board = await harness.session.snapshot(Board, conversation=1)
        assert board is not None
        assert board.marks == ["before"]
    assert content(old) == before


async def test_an_open_call_and_a_streaming_answer_go_on(old: Path) -> None:
    """K180, H69, H92: nothing is pressed twice, no text is there twice, and what was sent again is known."""
    under_way.pressed.clear()
    async with Harness.open(SqliteStorage(old), models=ScriptedModel(SCRIPT), extensions=[APP]) as harness:
        root, pressing, telling = [harness.handle(info.id) for info in await harness.conversations()]
        hello = await root.submit("hello", request_id="hello-1")
        press = await pressing.submit("press", request_id="press-1")
        then = await pressing.submit("then", request_id="then-1")
        tell = await telling.submit("tell", request_id="tell-1")
        assert (await hello.answer()).text == "Hello."
        assert (await press.answer()).text == "It was cut off."
        assert (await then.answer()).text == "And then."
        assert (await tell.answer()).text == LONG
        assert under_way.pressed == []
        (result,) = [entry for entry in await pressing.entries() if entry.kind == "pi.tool-result"]
        assert result.data_as(ToolResultData).code == "interrupted"
        answers = [entry for entry in await telling.entries() if entry.kind == "pi.assistant"]
        broken, whole = [decode_messages(entry.raw_messages)[0] for entry in answers]
        assert isinstance(broken, AssistantMessage)
        assert isinstance(whole, AssistantMessage)
        assert (broken.stop_reason, whole.stop_reason) == ("aborted", "stop")
        assert LONG.startswith(broken.text)
        assert len(broken.text) > 50
        assert whole.text == LONG
        assert not (await harness.inspect()).tasks
    async with Harness.open(SqliteStorage(old), read_only=True) as harness:
        assert await harness.session.storage.check() == []


async def test_what_was_used_before_an_upgrade_is_told_and_gone_on_with(old: Path) -> None:
    """H157, H240: of an attempt that was cut off what it used is not known, but that it was made; nothing twice."""
    async with Harness.open(SqliteStorage(old), models=ScriptedModel(SCRIPT), extensions=[APP]) as harness:
        handles = [harness.handle(info.id) for info in await harness.conversations()]
        before = [await handle.usage() for handle in handles]
        assert [usage.requests for usage in before] == [1, 1, 0]
        await handles[1].idle()
        await handles[2].idle()
        after = [await handle.usage() for handle in handles]
        # The call's answer, what follows it, and the queued input; the request that was cut off, and its next attempt.
        assert [usage.requests for usage in after] == [1, 3, 2]
        assert [usage.tokens.input // USAGE.input for usage in after] == [1, 3, 1]
        assert (await harness.usage()).requests == 6
        assert [usage.turns for usage in after] == [0, 2, 1], "turns are counted since they are"
        await handles[0].set_agent(instructions="Be brief.")
        assert (await (await handles[0].submit("hello")).answer()).text == "Hello."
    async with Harness.open(SqliteStorage(old), read_only=True) as harness:
        assert (await harness.usage()).requests == 7
        assert (await harness.handle(1).agent()).instructions == "Be brief."


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.stem)
async def test_a_summary_that_was_under_way_is_asked_for_again_and_placed(path: Path, tmp_path: Path) -> None:
    """K180, H206: what the program "talker" of the kit left, killed in its first summary."""
    old, calm = tmp_path / "old", tmp_path / "calm"
    old.mkdir()
    calm.mkdir()
    unpack(path, old / STORE)
    assert "pi.compaction" not in kinds(old / STORE)
    assert records(old / STORE, "tasks")[-1]["kind"] == "pi.compaction"
    found, wanted = await run("talker", old, inputs=12), await run("talker", calm, inputs=12)
    assert found["transcript"] == wanted["transcript"]
    assert kinds(old / STORE).count("pi.compaction") == kinds(calm / STORE).count("pi.compaction") >= 1
    assert len(lines(old / "summaries")) == len(lines(calm / "summaries"))


async def test_a_store_of_a_later_release_is_refused_with_both_versions_and_left_as_it_is(old: Path) -> None:
    """K182, K187: for work, and for looking."""
    with closing(sqlite3.connect(old)) as store:
        store.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = content(old), sorted(os.listdir(old.parent))
    ways: list[dict[str, Any]] = [{}, {"read_only": True}, {"takeover": True}]
    for options in ways:
        with pytest.raises(StorageFormatError, match=rf"format {FORMAT_VERSION + 1}.* format {FORMAT_VERSION};"):
            async with Harness.open(SqliteStorage(old), models=ScriptedModel(SCRIPT), **options):
                raise AssertionError("it was opened")
    assert (content(old), sorted(os.listdir(old.parent))) == before


def all_below(kind: type[Any]) -> list[type[Any]]:
    return [found for sub in kind.__subclasses__() for found in (sub, *all_below(sub))]


def test_what_the_package_stores_has_the_version_of_the_format_k182() -> None:
    """An older release refuses a newer format as a whole. If it met a newer document in it, it would end inputs."""
    assert perdure.spaces.documents
    definitions = [kind.definition for parent in (Document, Task) for kind in all_below(parent)]
    built_in = {found.kind: found.version for found in definitions if found.kind.startswith("pi.")}
    assert {"pi.agent", "pi.live", "pi.inbox", "pi.usage", "pi.generation", "pi.tool", "pi.space"} <= built_in.keys()
    assert FORMAT_VERSION == 1, "a new format: say here which versions belong to it"
    assert set(built_in.values()) == {1}
