"""What the commands tell of a response that is made in the background, and how a chat fetches it (rules H75, H405)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perdure import Harness, ModelError, ModelRequest, SqliteStorage
from perdure.cli.app import app
from perdure.cli.chat import models
from perdure.cli.chat.models import Catalogue
from perdure.events import ResponseDeferred
from perdure.models import Deferred, Finished
from perdure.testing import ScriptedModel, defer, say


async def test_what_is_waited_for_is_told_in_words_h405(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    model = ScriptedModel(defer(say("never\x1b[1m " * 20), polls=9, poll_after_ms=3_600_000))
    async with Harness.open(SqliteStorage(path), models=model) as harness:
        root = await harness.root()
        async with root.events() as events:
            await root.submit("Think.")
            async for event in events:
                if isinstance(event, ResponseDeferred):
                    break
    shown, looked = [
        (await asyncio.to_thread(CliRunner().invoke, app, [word, str(path)])).output for word in ("show", "inspect")
    ]
    (line,) = [line for line in shown.splitlines() if "in the background" in line]
    assert line.startswith('— test:scripted makes the answer in the background: {"messages":1,"attempt":1')
    assert "not yet asked for, next at " in line
    assert 'test:scripted makes the answer in the background: {"messages":1,"attempt":1' in looked.replace("\n", " ")
    assert "\x1b[1m" not in shown + looked


async def test_a_chat_fetches_and_cancels_by_the_adapter_of_the_model_h75(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ScriptedModel(defer(say("at last"), polls=0))
    monkeypatch.setattr(models, "installed_models", lambda model: slow)
    asked, name = Catalogue(None), slow.default or ""
    (told,) = [event async for event in asked.stream(ModelRequest(model=name, messages=(), may_defer=True))]
    assert isinstance(told, Deferred)
    found = await asked.fetch_deferred(name, told.handle)
    assert isinstance(found, Finished)
    assert found.message.text == "at last"
    await asked.cancel_deferred(name, told.handle)
    assert list(slow.cancelled) == [told.handle]


async def test_an_adapter_without_deferred_responses_is_named_h75(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        default = "plain:m"
        find = ScriptedModel(say("x")).find
        stream = ScriptedModel(say("x")).stream

    monkeypatch.setattr(models, "installed_models", lambda model: Plain())
    with pytest.raises(ModelError, match="the adapter for plain:m knows no deferred responses"):
        await Catalogue(None).fetch_deferred("plain:m", "job")
