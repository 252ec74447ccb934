"""A store that a process left in the middle of its work, killed by SIGKILL: for tests of the releases that come after.

``python under_way.py STORE`` makes one. golden/under-way-46bfb99.gz is what the release of that commit left, with its
write-ahead log folded in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator

from perdure import Document, Extension, Harness, SqliteStorage, field, tool
from perdure.events import MessageDelta
from perdure.harness.model import ModelEvent, ModelRequest
from perdure.testing.model import ScriptedModel, call, say

LONG = " ".join(f"word{n}" for n in range(200))
SCRIPT = {
    "hello": say("Hello."),
    "press": [call("press", what="red"), say("It was cut off.")],
    "tell": say(LONG, chunk=12),
    "then": say("And then."),
}
CUT_OFF = "word20"
"""The long answer was killed after this."""
pressed: list[str] = []
"""What was pressed in this process."""
begun = asyncio.Event()


class Board(Document, kind="app.board", version=1, scope="conversation", history="rewindable", fork="as_of"):
    marks: list[str] = field(default_factory=list)


@tool(replay="unsafe")
async def press(what: str) -> str:
    """Press a button, and wait for ever."""
    pressed.append(what)
    begun.set()
    await asyncio.Event().wait()
    return what


class Slow(ScriptedModel):
    """Its answers come piece by piece."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        async for event in super().stream(request):
            await asyncio.sleep(0.01)
            yield event


APP = Extension("app", tools=[press])


async def main(store: str) -> None:
    async with Harness.open(SqliteStorage(store), models=Slow(SCRIPT), extensions=[APP]) as harness:
        root = await harness.root()
        await (await root.submit("hello", request_id="hello-1")).answer()
        async with root.commit() as tx:
            (await tx.draft(Board)).marks.append("before")
        pressing = await harness.create_conversation(name="pressing")
        await pressing.submit("press", request_id="press-1")
        await begun.wait()
        await pressing.submit("then", request_id="then-1")
        telling = await harness.create_conversation(name="telling")
        told = ""
        async with telling.events() as events:
            await telling.submit("tell", request_id="tell-1")
            async for event in events:
                if isinstance(event, MessageDelta):
                    told += event.text
                if CUT_OFF in told:
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
