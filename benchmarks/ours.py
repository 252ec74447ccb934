"""The same workloads on perdure, on SqliteStorage as users get it: power-safe."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from common import ANSWER, BODY, DELTA, QUESTION, Meter, main
from perdure import Conversation, Document, Entry, Extension, Harness, Session, SqliteStorage, tool
from perdure.harness.documents import ASSISTANT, USER
from perdure.harness.messages import AssistantMessage, Text, Usage, UserMessage, encode_messages
from perdure.harness.model import Finished, ModelEvent, ModelInfo, ModelRequest, TextDelta
from perdure.testing.model import Reply, ScriptedModel, call, say


class Counter(Document, kind="app.counter", version=1, scope="session"):
    count: int = 0


class Note(Entry, kind="app.note"):
    text: str


@tool(replay="safe")
async def echo(text: str) -> str:
    """Echo."""
    return "echo " + text


def script(request: ModelRequest) -> Reply:
    if request.tools and isinstance(request.messages[-1], UserMessage):
        return call("echo", text="hello")
    return say(ANSWER, chunk=0)


class Deltas:
    """A model that streams, with nothing in the way; the floor a harness stands on."""

    default = "scripted:one"

    def __init__(self, deltas: int) -> None:
        self.deltas = deltas

    def find(self, model: str) -> ModelInfo | None:
        return ModelInfo(provider="scripted", name="one", context_window=10**9, max_output=8192)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        for _ in range(self.deltas):
            await asyncio.sleep(0)
            yield TextDelta(DELTA)
        text = Text(DELTA * self.deltas)
        yield Finished(answer((text,)))


def answer(content: tuple[Text, ...]) -> AssistantMessage:
    return AssistantMessage(
        content=content, provider="scripted", model="one", stop_reason="stop", usage=Usage(input=10, output=10)
    )


def open_harness(folder: Path, *, tools: bool = False) -> AbstractAsyncContextManager[Harness]:
    return Harness.open(
        SqliteStorage(folder / "s.db"),
        models=ScriptedModel(script),
        extensions=[Extension("echo", tools=[echo])] if tools else [],
    )


async def turn(conversation: Conversation, number: int) -> None:
    submission = await conversation.submit(QUESTION % number)
    await submission.wait()


async def document(folder: Path, n: int = 2000) -> dict[str, float]:
    meter = Meter()
    async with Session.open(SqliteStorage(folder / "s.db")) as session:

        async def add() -> None:
            async with session.commit() as tx:
                (await tx.draft(Counter)).count += 1

        for _ in range(n):
            await meter.time(add())
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms()}


async def entry(folder: Path, n: int = 2000) -> dict[str, float]:
    meter = Meter()
    async with Session.open(SqliteStorage(folder / "s.db")) as session:
        async with session.commit() as tx:
            conversation = tx.create_conversation(owner=None).id

        async def add() -> None:
            async with session.commit(conversation_id=conversation) as tx:
                tx.append(Note(text=BODY * 5))

        for _ in range(n):
            await meter.time(add())
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms()}


async def turns(folder: Path, n: int = 200, tool: int = 0) -> dict[str, float]:
    meter = Meter()
    async with open_harness(folder, tools=bool(tool)) as harness:
        root = await harness.root()
        before = harness.session.seq
        for number in range(n):
            await meter.time(turn(root, number))
        commits = (harness.session.seq - before) / n
    last = meter.median_ms(n - 100) if n >= 200 else meter.median_ms(n // 2)
    first = meter.median_ms(100, 200) if n >= 200 else meter.median_ms(1, n // 2)
    return {
        "cpu": meter.median_ms(),
        "wall": meter.wall_ms(),
        "cpu_101_200": first,
        "cpu_last_100": last,
        "commits_a_turn": commits,
    }


async def many(folder: Path, conversations: int = 100, n: int = 10) -> dict[str, float]:
    meter = Meter()
    async with open_harness(folder) as harness:
        handles = [await harness.create_conversation() for _ in range(conversations)]

        async def one(conversation: Conversation) -> None:
            for number in range(n):
                await turn(conversation, number)

        await meter.time(asyncio.gather(*(one(handle) for handle in handles)))
    return {"cpu": meter.total_cpu, "wall": meter.total_wall, "turns_per_s": conversations * n / meter.total_wall}


async def reopen(folder: Path, entries: int = 10_000) -> dict[str, float]:
    said = encode_messages([UserMessage(content=(Text(BODY),))])
    answered = encode_messages([answer((Text(BODY),))])
    async with open_harness(folder) as harness:
        root = await harness.root()
        for start in range(0, entries, 500):
            async with root.commit() as tx:
                for number in range(start, start + 500):
                    if number % 2:
                        tx.append_record(ASSISTANT, messages=answered)
                    else:
                        tx.append_record(USER, messages=said)
    child = subprocess.run(
        [sys.executable, __file__, "reopened"],
        env={**os.environ, "BENCH_STORE": str(folder)},
        capture_output=True,
        check=True,
    )
    return json.loads(child.stdout)


async def reopened(_: Path) -> dict[str, float]:
    folder = Path(os.environ["BENCH_STORE"])
    meter = Meter()
    opening = open_harness(folder)
    held: list[Conversation] = []

    async def open_root() -> None:
        harness = await opening.__aenter__()
        held.append(await harness.root())

    await meter.time(open_root())
    root = held[0]
    await meter.time(root.entries(limit=50))
    await meter.time(turn(root, 1))
    await meter.time(turn(root, 2))
    await opening.__aexit__(None, None, None)
    names = ("open", "newest_50", "first_turn", "second_turn")
    return {f"cpu_{name}": round(1e3 * cpu, 3) for name, cpu in zip(names, meter.cpu, strict=True)}


async def stream(folder: Path, deltas: int = 2000) -> dict[str, float]:
    models = Deltas(deltas)
    meter = Meter()
    async with Harness.open(SqliteStorage(folder / "s.db"), models=models) as harness:
        root = await harness.root()
        await meter.time(turn(root, 1))

        async def bare() -> None:
            async for _ in models.stream(ModelRequest(model="scripted:one", messages=())):
                pass

        await meter.time(bare())
    over = meter.cpu[0] - meter.cpu[1]
    return {"cpu": meter.cpu[0], "cpu_over_bare_us_a_delta": 1e6 * over / deltas, "wall": meter.wall[0]}


async def watch(folder: Path, watchers: int = 1, commits: int = 500) -> dict[str, float]:
    meter = Meter()
    async with open_harness(folder) as harness:
        root = await harness.root()
        ready = asyncio.Semaphore(0)

        async def consume() -> None:
            async with root.watch() as frames:
                ready.release()
                frames_seen = 0
                async for frame in frames:
                    frames_seen += 1
                    if frame.value.entries and len(frame.value.entries) >= min(commits, 200) and frame.seq >= last:
                        return

        last = harness.session.seq + commits
        consumers = [asyncio.ensure_future(consume()) for _ in range(watchers)]
        for _ in range(watchers):
            await ready.acquire()

        async def work() -> None:
            said = encode_messages([UserMessage(content=(Text(BODY),))])
            for _ in range(commits):
                async with root.commit() as tx:
                    tx.append_record(USER, messages=said)
            await asyncio.gather(*consumers)

        await meter.time(work())
    return {"cpu": meter.total_cpu, "wall": meter.total_wall}


async def importing(_: Path) -> dict[str, float]:
    samples: list[float] = []
    for _ in range(7):
        before = os.times()
        subprocess.run([sys.executable, "-c", "import perdure; perdure.Harness; perdure.SqliteStorage"], check=True)
        after = os.times()
        samples.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {"cpu": sorted(samples)[3]}


if __name__ == "__main__":
    main(
        {
            "document": document,
            "entry": entry,
            "turns": turns,
            "many": many,
            "reopen": reopen,
            "reopened": reopened,
            "stream": stream,
            "watch": watch,
            "import": importing,
        }
    )
