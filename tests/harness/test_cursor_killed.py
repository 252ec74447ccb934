"""A process that streams is killed, and its client comes back to the next one (rules H262, H263, H266)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from perdure import AssistantMessage, Harness, SqliteStorage
from perdure.events import EntryAppended, Event, MessageEnd, Resumed, RunEnd, Snapshot
from perdure.harness.messages import decode_messages
from perdure.testing.model import ScriptedModel, say

STORY = "It was a dark and stormy night; the rain fell in torrents."

HOST = """
import asyncio, json, sys
from perdure import Harness, SqliteStorage
from perdure.events import MessageDelta
from perdure.testing.model import ScriptedModel, say

async def pace(request, number):
    if number == 6:
        await asyncio.Event().wait()

async def main(path, story):
    model = ScriptedModel(say(story, chunk=5), pace=pace)
    async with Harness.open(SqliteStorage(path), models=model, partial_interval_ms=1) as harness:
        root = await harness.root()
        async with root.events() as events:
            await anext(events)
            await root.submit("Tell.", request_id="tell")
            text = ""
            async for event in events:
                text += event.text if isinstance(event, MessageDelta) else ""
                print(json.dumps([event.cursor, text]), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def stream_and_be_killed(path: Path) -> tuple[str, str]:
    """The last cursor a client got, and the text it had seen by then."""
    process = subprocess.Popen([sys.executable, "-c", HOST, str(path), STORY], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            cursor, text = json.loads(line)
            if text:
                return cursor, text
        raise AssertionError("it ended before it streamed")
    finally:
        process.kill()
        process.communicate()


def answer(event: Event) -> AssistantMessage:
    assert isinstance(event, MessageEnd)
    assert event.entry is not None
    (message,) = decode_messages(event.entry.raw_messages)
    assert isinstance(message, AssistantMessage)
    return message


async def test_a_stream_of_a_killed_process_does_not_look_alive_h263_h266(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    cursor, text = stream_and_be_killed(path)
    async with Harness.open(SqliteStorage(path), models=ScriptedModel(say(STORY))) as harness:
        root = await harness.root()
        async with root.events(after=cursor) as events:
            snapshot = await anext(events)
            assert isinstance(snapshot, Snapshot)
            assert (snapshot.reason, snapshot.busy, snapshot.running) == ("cursor", True, False)
            message = snapshot.view["live"]["message"]  # pyright: ignore
            partial = "".join(part["text"] for part in message["content"])  # pyright: ignore
            assert partial.startswith(text), "what was seen was stored"
            assert STORY.startswith(partial)
            submission = await root.submit("Tell.", request_id="tell")
            found: list[Event] = []
            while not (found and isinstance(found[-1], RunEnd)):
                found.append(await anext(events))
            assert isinstance(found[0], Resumed)
            first, last = [answer(event) for event in found if isinstance(event, MessageEnd)]
            assert (first.stop_reason, first.text) == ("aborted", partial)
            assert last.text == STORY == (await submission.answer()).text
            last_cursor = found[-1].cursor
    async with Harness.open(SqliteStorage(path)) as harness:
        root = await harness.root()
        async with root.events(after=last_cursor) as events:
            async with root.commit() as tx:
                tx.append_record(kind="app.mark")
            event = await anext(events)
            assert isinstance(event, EntryAppended), "a clean end needs no snapshot, also in the next process"
