"""What a conversation at the end of a long chain of forks costs, beside one with the same history and no fork.

``python benchmarks/forks.py [DEPTH]`` (default 1000). Each link of the chain is forked at the newest entry of the one
before and has a turn of its own. CPU in ms, of all threads, on a file of this disk; the model answers at once.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from perdure import Harness, SqliteStorage
from perdure.harness.conversation import Conversation
from perdure.testing.model import ScriptedModel, say

TURNS = 50

Figures = dict[str, float]


def model() -> ScriptedModel:
    return ScriptedModel(lambda _request: say("All is well with it."))


async def make(path: Path, depth: int, *, forked: bool) -> int:
    """A history of ``depth`` turns; the conversation at its end."""
    async with Harness.open(SqliteStorage(path, durability="process"), models=model()) as harness:
        conversation = await harness.root()
        for number in range(depth):
            answer = await (await conversation.submit(f"Look after item {number}.")).answer()
            if forked:
                conversation = await conversation.fork(answer.entry.id)
        return conversation.id


async def look(path: Path, id: int) -> Figures:
    figures: Figures = {}
    begun = time.process_time()

    def lap(name: str, share: int = 1) -> None:
        nonlocal begun
        now = time.process_time()
        figures[name] = 1e3 * (now - begun) / share
        begun = time.process_time()

    async with Harness.open(SqliteStorage(path, durability="process"), models=model()) as harness:
        harness.resume()
        lap("open and resume")
        conversation: Conversation = harness.handle(id)
        newest = await conversation.entries(order="descending", limit=50)
        lap("the newest 50 entries, first read")
        for _ in range(TURNS):
            await conversation.entries(order="descending", limit=50)
        lap("the newest 50 entries, again", TURNS)
        for _ in range(TURNS):
            await conversation.entries(first=newest[-1].id, limit=10)
        lap("10 entries from an id on", TURNS)
        await (await conversation.submit("Once more.")).answer()
        lap("the first turn, with deriving the context")
        for _ in range(TURNS):
            await (await conversation.submit("And once more.")).answer()
        lap("a turn", TURNS)
        for _ in range(TURNS):
            await conversation.fork(newest[0].id)
        lap("a fork there", TURNS)
        async with conversation.view():
            lap("a view")
    return figures


async def main(depth: int) -> None:
    columns: list[tuple[str, Figures]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, forked in (("no fork", False), (f"{depth:,} forks", True)):
            path = Path(folder) / f"{forked}.db"
            id = await make(path, depth, forked=forked)
            await look(path, id)  # what is loaded once
            columns.append((name, await look(path, id)))
    print(f"| ms, after {depth:,} turns | {' | '.join(name for name, _ in columns)} |\n|---|{'---|' * len(columns)}")
    for what in columns[0][1]:
        print(f"| {what} | {' | '.join(f'{figures[what]:.2f}' for _, figures in columns)} |")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
