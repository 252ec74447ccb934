"""A store that an earlier release left in the middle of its work: listed from its data, and gone on with."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import under_way
from under_way import APP, LONG, SCRIPT, Board

from perdure import Harness, SqliteStorage
from perdure.harness.documents import ToolResultData
from perdure.harness.messages import AssistantMessage, decode_messages
from perdure.testing.model import ScriptedModel

GOLDEN = sorted((Path(__file__).parent / "golden").glob("under-way-*.gz"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    store = tmp_path / "agent.db"
    store.write_bytes(gzip.decompress(request.param.read_bytes()))
    store.chmod(0o600)
    return store


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
