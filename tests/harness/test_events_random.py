"""Clients that come and go by cursor, over work by chance and restarts: what they put together from events is what the
view shows (rules H149, H150, H260 to H263)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, cast

import pytest

from harness.compaction_kit import asks_for_summary
from harness.kit import Note
from perdure import Extension, Harness, MemoryStorage, RetryPolicy, tool
from perdure.harness.conversation import Conversation
from perdure.harness.documents import COMPACTION
from perdure.harness.events import (
    CompactionEnd,
    CompactionStart,
    EntryAppended,
    Event,
    InboxChanged,
    MessageDelta,
    MessageEnd,
    MessageStart,
    RunEnd,
    RunStart,
    Snapshot,
    ToolEnd,
    ToolStart,
    ToolUpdate,
    UsageChanged,
)
from perdure.harness.handle import ToolCall
from perdure.harness.messages import AssistantMessage, ToolCallPart, ToolResultMessage, decode_messages
from perdure.harness.model import ModelRequest
from perdure.kernel.errors import PerdureError
from perdure.kernel.json import JsonValue
from perdure.testing.model import Reply, ScriptedModel, call, calls, fail, say

CLIENTS = 3


@tool(replay="safe")
async def work(call: ToolCall, lines: int) -> None:
    """Work, and show it: that is the result."""
    for line in range(lines):
        call.output(f"line {line}\n")
        await pause(50)
    if lines == 3:
        raise ValueError("on cue")


async def pause(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


def script(seed: int, request: ModelRequest) -> Reply:
    chance = Random(f"{seed} {len(request.messages)}")  # the same for each attempt
    if asks_for_summary(request):
        return chance.choice([say("summary"), fail("refused"), fail("overloaded", times=1, then=say("summary"))])
    match chance.randrange(8):
        case 0 | 1:
            return calls(*(call("work", lines=chance.randrange(4)) for _ in range(chance.randrange(1, 4))), text="now")
        case 2:
            return fail("overloaded", times=chance.randrange(1, 3), then=say("later"), partial="some of it")
        case 3:
            return fail("malformed", partial="some of it")
        case 4:
            return call("not_there")
        case _:
            return say("word " * chance.randrange(1, 40), thinking="hm")


class Client:
    """It keeps nothing but its cursor and what it was told."""

    def __init__(self) -> None:
        self.cursor: str | None = None
        self.run: int | None = None
        self.message: list[str] | None = None
        self.tools: dict[int, str] = {}
        self.inbox: list[int] = []
        self.compactions: set[int] = set()
        self.entries: list[int] = []
        self.usage: dict[str, Any] = {}

    def take(self, event: Event) -> None:
        self.cursor = event.cursor
        match event:
            case Snapshot():
                shown = shown_by(event.view)
                self.run, self.message, self.tools = shown["run"], shown["message"], shown["tools"]
                self.inbox, self.compactions, self.usage = shown["inbox"], shown["compactions"], shown["usage"]
                self.entries = shown["entries"]
            case RunStart():
                assert self.run is None
                self.run = event.task
            case RunEnd():
                assert self.run == event.task
                self.run = None
            case MessageStart():
                assert self.message is None
                self.message = []
            case MessageDelta():
                assert self.message is not None
                self.message += [""] * (event.index + 1 - len(self.message))
                self.message[event.index] += event.text
            case MessageEnd():
                assert self.message is not None
                if event.entry is not None:
                    said = cast("AssistantMessage", decode_messages(event.entry.raw_messages)[0])
                    parts = [part.text for part in said.content if not isinstance(part, ToolCallPart)]
                    assert all(whole.startswith(part) for whole, part in zip(parts, self.message, strict=False))
                self.message = None
                self._entry(event)
            case ToolStart():
                assert event.task not in self.tools
                self.tools[event.task] = ""
            case ToolUpdate():
                self.tools[event.task] = event.text if event.anew else self.tools[event.task] + event.text
            case ToolEnd():
                shown, result = self.tools.pop(event.task), decode_messages(event.entry.raw_messages)[0]
                assert event.is_error or cast("ToolResultMessage", result).text.startswith(shown)
                self._entry(event)
            case InboxChanged():
                self.inbox = [item["id"] for item in event.items]
            case CompactionStart():
                assert event.task not in self.compactions
                self.compactions.add(event.task)
            case CompactionEnd():
                self.compactions.remove(event.task)
                self._entry(event)
            case UsageChanged():
                self.usage = {"models": event.models, "tools": event.tools}
            case EntryAppended():
                self._entry(event)
            case _:
                pass

    def _entry(self, event: MessageEnd | ToolEnd | CompactionEnd | EntryAppended) -> None:
        if event.entry is not None:
            assert event.entry.id not in self.entries, "told once"
            self.entries.append(event.entry.id)

    def agrees_with(self, view: JsonValue) -> None:
        shown = shown_by(view)
        entries = shown.pop("entries")
        assert {name: getattr(self, name) for name in shown} == shown
        # The view leaves out what was before its head and its window.
        assert sorted(self.entries)[-len(entries) :] == entries[-len(self.entries) :]


def shown_by(view: JsonValue) -> dict[str, Any]:
    """What of a view's JSON a client keeps."""
    parts = cast("Mapping[str, Any]", view)
    live, items = parts["live"], parts["inbox"]["items"]
    waiting = {item["entry"]["data"]["task"] for item in items if item["entry"]["kind"] == COMPACTION}
    return {
        "run": None if live["run"] is None else live["run"]["task"],
        "message": None if live["message"] is None else [part["text"] for part in live["message"]["content"]],
        "tools": {int(id): tool["output"] for id, tool in live["tools"].items() if tool["state"] == "running"},
        "inbox": [item["id"] for item in items],
        "compactions": {int(id) for id in live["compactions"]} | waiting,
        "usage": {"models": parts["usage"]["models"], "tools": parts["usage"]["tools"]},
        "entries": [entry["id"] for entry in parts["entries"]],
    }


async def follow(client: Client, conversation: Conversation, chance: Random) -> None:
    """Comes, takes some events, and goes, again and again, until the session ends."""
    while True:
        try:
            async with conversation.events(after=client.cursor) as events:
                for _ in range(chance.choice([1, 2, 5, 20, 150])):
                    client.take(await anext(events))
        except PerdureError:
            return
        await pause(chance.choice([0, 0, 3, 30]))


async def act(conversation: Conversation, chance: Random) -> None:
    match chance.randrange(10):
        case 0 | 1 | 2:
            await conversation.submit("word " * chance.randrange(1, 1500), mode=chance.choice(["follow_up", "steer"]))
        case 3:
            await conversation.abort(background=chance.random() < 0.5)
        case 4:
            await conversation.reset("begin anew")
        case 5:
            await conversation.write(Note(text="note"))
        case 6:
            await conversation.compact()
        case 7:
            async with conversation.commit() as tx:
                tx.append(Note(text="one"))
                tx.append(Note(text="two"))
        case _:
            await pause(chance.randrange(200))


@asynccontextmanager
async def opened(storage: MemoryStorage, seed: int, chance: Random) -> AsyncIterator[Harness]:
    async def pace(request: ModelRequest, event: int) -> None:
        await pause(chance.choice([0, 0, 1, 30]))

    async with Harness.open(
        storage,
        models=ScriptedModel(partial(script, seed), pace=pace, context_window=3000, max_output=500),
        extensions=[Extension("work", tools=[work])],
        retry=RetryPolicy(first_ms=1, jitter=0),
        partial_interval_ms=0,
    ) as harness:
        yield harness


@pytest.mark.parametrize("seed", range(12))
async def test_what_clients_put_together_is_what_is_there_h149_h150_h261_h263(seed: int) -> None:
    chance, storage = Random(seed), MemoryStorage()
    clients = [Client() for _ in range(CLIENTS)]
    for last in (False, False, True):
        async with opened(storage, seed, chance) as harness:
            root = await harness.root()
            following = [asyncio.ensure_future(follow(client, root, Random(seed))) for client in clients]
            for _ in range(12):
                await act(root, chance)
            if chance.random() < 0.5 or last:
                await asyncio.wait_for(harness.idle(), 20)
            if last:
                for task in following:
                    task.cancel()
                await asyncio.gather(*following, return_exceptions=True)
                async with root.commit() as tx:
                    end = tx.append(Note(text="the end")).id
                async with root.view() as view:
                    for client in clients:
                        async with root.events(after=client.cursor) as events, asyncio.timeout(20):
                            while end not in client.entries:
                                client.take(await anext(events))
                        client.agrees_with(view.value.to_json())
            elif chance.random() < 0.7:
                storage = storage.snapshot()
                harness.session.fail(ConnectionError("the test's crash"))
        await asyncio.gather(*following, return_exceptions=True)
        for task in following:
            if not task.cancelled():
                task.result()
