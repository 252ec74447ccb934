"""The workloads on pi-durable-python, on its SQLite storage. Runs in a virtual environment of its own."""

# The peer is not installed where this file is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from pi_durable import (
    AssistantEntry,
    Harness,
    Model,
    UserEntry,
    create_registry,
    create_session,
    define_doc,
    define_extension,
    define_tool,
)
from pi_durable.context import BACKGROUND_CONTEXT as CONTEXT
from pi_durable.storage.sqlite import SqliteStorage
from pi_durable.storage.sqlite.posix import open_posix_sqlite_database

from common import ANSWER, BODY, DELTA, QUESTION, Meter, main

AGENT = {"model": {"provider": "scripted", "modelId": "one"}}
USAGE = {
    "input": 10,
    "output": 10,
    "cacheRead": 0,
    "cacheWrite": 0,
    "totalTokens": 20,
    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0, "total": 0},
}


def message(content: list[dict], stop: str = "stop") -> dict:
    return {
        "role": "assistant",
        "content": content,
        "api": "scripted",
        "provider": "scripted",
        "model": "one",
        "usage": USAGE,
        "stopReason": stop,
        "timestamp": 1,
    }


def user(text: str) -> dict:
    return {"model": [{"role": "user", "content": text, "timestamp": 1}]}


class Answering:
    """Its stream: some events, and a result."""

    def __init__(self, events, result: dict) -> None:
        self._events, self._result = events, result

    def __aiter__(self):
        return self._events

    def result(self):
        future = asyncio.get_running_loop().create_future()
        future.set_result(self._result)
        return future


class Scripted:
    """Answers at once, or calls the tool first, or streams deltas."""

    def __init__(self, *, tool: bool = False, deltas: int = 0) -> None:
        self.model = Model(provider="scripted", model_id="one", context_window=10**9, max_tokens=8192)
        self.tool, self.deltas, self.calls = tool, deltas, 0

    def get_model(self, _provider, _model):
        return self.model

    def stream_simple(self, _model, request, _options=None):
        if self.tool and request["messages"][-1]["role"] == "user":
            self.calls += 1
            call = {"type": "toolCall", "id": f"c{self.calls}", "name": "echo", "arguments": {"text": "hello"}}
            answer = message([call], "toolUse")
        else:
            answer = message([{"type": "text", "text": DELTA * self.deltas if self.deltas else ANSWER}])

        async def events():
            yield {"type": "start", "partial": message([], "pending")}
            text = ""
            for _ in range(self.deltas):
                text += DELTA
                await asyncio.sleep(0)
                partial = message([{"type": "text", "text": text}], "pending")
                yield {"type": "text_delta", "delta": DELTA, "partial": partial}

        return Answering(events(), answer)

    stream = stream_simple


async def open_harness(folder: Path, models: Scripted):
    storage = await SqliteStorage.open(await open_posix_sqlite_database(str(folder / "s.sqlite3")))
    registry = create_registry()
    if models.tool:

        async def execute(arguments, _api, _context):
            return {"output": [{"type": "text", "text": "echo " + arguments["text"]}]}

        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        echo = define_tool({"name": "echo", "description": "Echo", "execute": execute, "parameters": schema})
        registry.install(define_extension({"name": "echo", "tools": [echo]}))
    return await Harness.open(storage, {"models": models, "registry": registry, "settings": {}}, CONTEXT)


def agent(models: Scripted) -> dict:
    return {**AGENT, **({"tools": ["echo"]} if models.tool else {})}


async def turn(conversation, number: int) -> None:
    submission = await conversation.submit({"type": "input", "content": QUESTION % number}, CONTEXT)
    settled = await submission.wait(CONTEXT)
    assert settled["status"] == "done", settled


async def document(folder: Path, n: int = 2000) -> dict[str, float]:
    counter = define_doc(
        {
            "kind": "app.counter",
            "version": 1,
            "scope": "session",
            "initial": lambda: {"count": 0},
            "checkpoint_when": lambda _value, _ops, _info: False,
        }
    )
    session = create_session(await SqliteStorage.open(await open_posix_sqlite_database(str(folder / "s.sqlite3"))))

    async def add(tx) -> None:
        (await tx.doc(counter)).count += 1

    meter = Meter()
    for _ in range(n):
        await meter.time(session.commit(add, CONTEXT))
    await session.close(CONTEXT)
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms()}


async def entry(folder: Path, n: int = 2000) -> dict[str, float]:
    session = create_session(await SqliteStorage.open(await open_posix_sqlite_database(str(folder / "s.sqlite3"))))

    async def create(tx):
        return (await tx.create_conversation({"ownership": {"kind": "ownerless"}}))["id"]

    conversation = await session.commit(create, CONTEXT)

    async def add(tx) -> None:
        await tx.append_entry(UserEntry, conversation, user(BODY * 5))

    meter = Meter()
    for _ in range(n):
        await meter.time(session.commit(add, CONTEXT))
    await session.close(CONTEXT)
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms()}


async def turns(folder: Path, n: int = 200, tool: int = 0) -> dict[str, float]:
    models = Scripted(tool=bool(tool))
    harness = await open_harness(folder, models)
    root = await harness.root(CONTEXT, {"agent": agent(models)})
    meter = Meter()
    for number in range(n):
        await meter.time(turn(root, number))
    await harness.close(CONTEXT)
    last = meter.median_ms(n - 100) if n >= 200 else meter.median_ms(n // 2)
    first = meter.median_ms(100, 200) if n >= 200 else meter.median_ms(1, n // 2)
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms(), "cpu_101_200": first, "cpu_last_100": last}


async def many(folder: Path, conversations: int = 100, n: int = 10) -> dict[str, float]:
    models = Scripted()
    harness = await open_harness(folder, models)
    options = {"ownership": {"kind": "ownerless"}, "agent": AGENT}
    handles = [await harness.create_conversation(options, CONTEXT) for _ in range(conversations)]

    async def one(conversation) -> None:
        for number in range(n):
            await turn(conversation, number)

    meter = Meter()
    await meter.time(asyncio.gather(*(one(handle) for handle in handles)))
    await harness.close(CONTEXT)
    return {"cpu": meter.total_cpu, "wall": meter.total_wall, "turns_per_s": conversations * n / meter.total_wall}


async def reopen(folder: Path, entries: int = 10_000) -> dict[str, float]:
    harness = await open_harness(folder, Scripted())
    root = await harness.root(CONTEXT, {"agent": AGENT})
    for start in range(0, entries, 500):

        async def add(tx, start: int = start) -> None:
            for number in range(start, start + 500):
                if number % 2:
                    text = message([{"type": "text", "text": BODY}])
                    await tx.append_entry(AssistantEntry, root.id, {"model": [text]})
                else:
                    await tx.append_entry(UserEntry, root.id, user(BODY))

        await harness.commit(add, CONTEXT)
    await harness.close(CONTEXT)
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
    held = []

    async def open_root() -> None:
        harness = await open_harness(folder, Scripted())
        held.extend([harness, await harness.root(CONTEXT)])

    await meter.time(open_root())
    harness, root = held
    await meter.time(root.entries({}, 50, None, CONTEXT))
    await meter.time(turn(root, 1))
    await meter.time(turn(root, 2))
    await harness.close(CONTEXT)
    names = ("open", "newest_50", "first_turn", "second_turn")
    return {f"cpu_{name}": round(1e3 * cpu, 3) for name, cpu in zip(names, meter.cpu, strict=True)}


async def stream(folder: Path, deltas: int = 2000) -> dict[str, float]:
    models = Scripted(deltas=deltas)
    harness = await open_harness(folder, models)
    root = await harness.root(CONTEXT, {"agent": AGENT})
    meter = Meter()
    await meter.time(turn(root, 1))

    async def bare() -> None:
        async for _ in models.stream_simple(None, {"messages": [{"role": "user"}]}):
            pass

    await meter.time(bare())
    await harness.close(CONTEXT)
    over = meter.cpu[0] - meter.cpu[1]
    return {"cpu": meter.cpu[0], "cpu_over_bare_us_a_delta": 1e6 * over / deltas, "wall": meter.wall[0]}


async def watch(folder: Path, watchers: int = 1, commits: int = 500) -> dict[str, float]:
    harness = await open_harness(folder, Scripted())
    root = await harness.root(CONTEXT, {"agent": AGENT})
    done = asyncio.Event()
    finished = 0
    for _ in range(watchers):
        watching = await root.watch(CONTEXT)

        def listener(value, _ops, _context) -> None:
            nonlocal finished
            if len(value["entries"]) == commits:
                finished += 1
                if finished == watchers:
                    done.set()

        watching.start(listener)

    async def add(tx) -> None:
        await tx.append_entry(UserEntry, root.id, user(BODY))

    async def work() -> None:
        for _ in range(commits):
            await harness.commit(add, CONTEXT)
        await done.wait()

    meter = Meter()
    await meter.time(work())
    await harness.close(CONTEXT)
    return {"cpu": meter.total_cpu, "wall": meter.total_wall}


async def importing(_: Path) -> dict[str, float]:
    samples = []
    for _ in range(7):
        before = os.times()
        subprocess.run([sys.executable, "-c", "import pi_durable"], check=True)
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
