"""The workloads on pi-durable-python, on its SQLite storage. Runs in a virtual environment of its own.

Its adapter sets ``PRAGMA synchronous = NORMAL`` in WAL mode: a commit outlives the process, not a loss of power.
``durability=power`` sets FULL, which flushes at every commit.
"""

# The peer is not installed where this file is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import time
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

from common import (
    A_MESSAGE,
    AHEAD,
    ANSWER,
    BODY,
    DELTA,
    INTERVAL_MS,
    KEEP,
    NO_INTERVAL_MS,
    QUESTION,
    RESERVE,
    SOME,
    SUMMARY,
    WINDOW,
    Figures,
    Long,
    Meter,
    Reopening,
    Streams,
    child,
    import_figures,
    main,
    payload_figures,
    reopen_in_children,
    rss_mb,
    stored_bytes,
    turn_figures,
)

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

    def __init__(self, *, tool: bool = False, deltas: int = 0, pace: float = 0.0) -> None:
        self.model = Model(provider="scripted", model_id="one", context_window=10**9, max_tokens=8192)
        self.tool, self.deltas, self.pace, self.calls = tool, deltas, pace, 0
        self.began = 0.0
        """When the first delta of the newest stream was given."""

    def get_model(self, _provider, _model):
        return self.model

    def stream_simple(self, _model, request, _options=None):
        if self.tool and request["messages"][-1]["role"] == "user":
            self.calls += 1
            call = {"type": "toolCall", "id": f"c{self.calls}", "name": "echo", "arguments": {"text": "hello"}}
            return Answering(self._events(0), message([call], "toolUse"))
        text = DELTA * self.deltas if self.deltas else ANSWER
        return Answering(self._events(self.deltas), message([{"type": "text", "text": text}]))

    stream = stream_simple

    async def _events(self, deltas: int):
        yield {"type": "start", "partial": message([], "pending")}
        text = ""
        for number in range(deltas):
            text += DELTA  # it wants the whole partial message with every delta
            await asyncio.sleep(self.pace)
            if number == 0:
                self.began = time.perf_counter()
            partial = message([{"type": "text", "text": text}], "pending")
            yield {"type": "text_delta", "delta": DELTA, "partial": partial}


class Remembering(Scripted):
    """Has a window, says how long a request was, and sums up."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(provider="scripted", model_id="one", context_window=WINDOW, max_tokens=8192)
        self.summaries = 0

    def stream_simple(self, _model, request, _options=None):
        return Answering(self._events(0), self._answer(request, ANSWER))

    stream = stream_simple

    async def complete_simple(self, _model, request, _options=None):
        self.summaries += 1
        return self._answer(request, SUMMARY)

    def _answer(self, request, text: str) -> dict:
        made = message([{"type": "text", "text": text}])
        length = A_MESSAGE * len(request["messages"])
        made["usage"] = {**USAGE, "input": length, "output": A_MESSAGE, "totalTokens": length + A_MESSAGE}
        return made


class Progress:
    """Counts commits of a harness: those with only a partial answer, and the others."""

    def __init__(self, harness) -> None:
        self.partials, self.others = 0, 0
        self.first_at: float | None = None
        harness.subscribe_commits(self._see)

    def _see(self, publication, _context) -> None:
        changes = publication["changes"]
        if len(changes) == 1 and is_partial(changes[0]):
            self.partials += 1
            self.first_at = self.first_at or time.perf_counter()
        else:
            self.others += 1


def is_partial(change: dict) -> bool:
    if change["type"] != "document" or change["record"]["kind"] != "pi.live" or change["value"] is None:
        return False
    return "message" in change["value"].get("generation", {})


class Counted:
    """Counts what is handed to a storage, as JSON."""

    def __init__(self, storage) -> None:
        self.payload, self.commits = 0, 0
        self._commit = storage.commit
        storage.commit = self.commit

    async def commit(self, writes, context):
        self.payload += sum(len(json.dumps(w, separators=(",", ":"), ensure_ascii=False).encode()) for w in writes)
        self.commits += 1
        return await self._commit(writes, context)


async def open_storage(folder: Path, durability: str = "default"):
    database = await open_posix_sqlite_database(str(folder / "s.sqlite3"))
    if durability == "power":
        await database.exec("PRAGMA synchronous = FULL")
    (synchronous,) = (await database.get("PRAGMA synchronous")).values()
    (journal,) = (await database.get("PRAGMA journal_mode")).values()
    assert (journal, synchronous) == ("wal", 2 if durability == "power" else 1), "what the table says of its storage"
    return await SqliteStorage.open(database)


async def open_harness(storage, models: Scripted, *, interval_ms: int = INTERVAL_MS, **more):
    registry = create_registry()
    if models.tool:

        async def execute(arguments, _api, _context):
            return {"output": [{"type": "text", "text": "echo " + arguments["text"]}]}

        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        echo = define_tool({"name": "echo", "description": "Echo", "execute": execute, "parameters": schema})
        registry.install(define_extension({"name": "echo", "tools": [echo]}))
    settings = {"progress": {"partial_interval_ms": interval_ms}, **more}
    return await Harness.open(storage, {"models": models, "registry": registry, "settings": settings}, CONTEXT)


async def open_root(folder: Path, models: Scripted, *, interval_ms: int = INTERVAL_MS, durability: str = "default"):
    harness = await open_harness(await open_storage(folder, durability), models, interval_ms=interval_ms)
    return harness, await harness.root(CONTEXT, {"agent": agent(models)})


def agent(models: Scripted) -> dict:
    return {**AGENT, **({"tools": ["echo"]} if models.tool else {})}


async def turn(conversation, number: int) -> None:
    submission = await conversation.submit({"type": "input", "content": QUESTION % number}, CONTEXT)
    settled = await submission.wait(CONTEXT)
    assert settled["status"] == "done", settled


# --- commits and turns ---------------------------------------------------------------------------------------


async def document(folder: Path, n: int = 2000) -> Figures:
    counter = define_doc(
        {
            "kind": "app.counter",
            "version": 1,
            "scope": "session",
            "initial": lambda: {"count": 0},
            "checkpoint_when": lambda _value, _ops, _info: False,
        }
    )
    session = create_session(await open_storage(folder))

    async def add(tx) -> None:
        (await tx.doc(counter)).count += 1

    meter = Meter()
    for _ in range(n):
        await meter.time(session.commit(add, CONTEXT))
    await session.close(CONTEXT)
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms()}


async def entry(folder: Path, n: int = 2000) -> Figures:
    session = create_session(await open_storage(folder))

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


async def turns(folder: Path, n: int = 200, tool: int = 0, durability: str = "default", counted: int = 10) -> Figures:
    models = Scripted(tool=bool(tool))
    harness, root = await open_root(folder, models, durability=durability)
    meter = Meter()
    for number in range(n):
        await meter.time(turn(root, number))
    await harness.close(CONTEXT)
    stored = stored_bytes(folder)
    if not counted:
        return {}
    harness, root = await open_root(folder, models, durability=durability)
    await turn(root, n)
    seen = Progress(harness)
    for number in range(counted):
        await turn(root, n + number)
    await harness.close(CONTEXT)
    return turn_figures(meter, commits=seen.others / counted, stored=stored)


async def many(
    folder: Path, conversations: int = 100, n: int = 10, tool: int = 0, durability: str = "default"
) -> Figures:
    models = Scripted(tool=bool(tool))
    harness = await open_harness(await open_storage(folder, durability), models)
    options = {"ownership": {"kind": "ownerless"}, "agent": agent(models)}
    handles = [await harness.create_conversation(options, CONTEXT) for _ in range(conversations)]

    async def one(conversation) -> None:
        for number in range(n):
            await turn(conversation, number)

    meter = Meter()
    await meter.time(asyncio.gather(*(one(handle) for handle in handles)))
    await harness.close(CONTEXT)
    return {"cpu": meter.total_cpu, "turns_per_s": conversations * n / meter.total_wall}


# --- a conversation that is compacted -------------------------------------------------------------------------


async def long(folder: Path, n: int = 50_000) -> Figures:
    models = Remembering()
    policy = {"reserve_tokens": RESERVE, "keep_recent_tokens": KEEP, "background_tokens": AHEAD}
    figures = Long(folder, n)
    harness = await open_harness(await open_storage(folder), models, compaction=policy)
    root = await harness.root(CONTEXT, {"agent": agent(models)})
    for number in range(n):
        await figures.turn(turn(root, number))
    await harness.close(CONTEXT)
    return figures.figures(compactions=models.summaries)


# --- a long session ------------------------------------------------------------------------------------------


async def build(folder: Path, entries: int = 100_000) -> Figures:
    """A session with so many entries, left in the folder for ``reopen``."""
    harness, root = await open_root(folder, Scripted())
    for start in range(0, entries, 500):

        async def add(tx, start: int = start) -> None:
            for number in range(start, min(start + 500, entries)):
                if number % 2:
                    text = message([{"type": "text", "text": BODY}])
                    await tx.append_entry(AssistantEntry, root.id, {"model": [text]})
                else:
                    await tx.append_entry(UserEntry, root.id, user(BODY))

        await harness.commit(add, CONTEXT)
    await harness.close(CONTEXT)
    return {"stored_mb": stored_bytes(folder) / 2**20}


async def reopen(_: Path, store: str, children: int = 3) -> Figures:
    return reopen_in_children(__file__, Path(store), children)


async def reopened(folder: Path) -> Figures:
    reopening = Reopening()
    held = []

    async def open_it() -> None:
        held.extend(await open_root(folder, Scripted()))

    await reopening.step("open", open_it())
    harness, root = held
    await reopening.step("newest_50", root.entries({}, 50, None, CONTEXT))
    await reopening.step("first_turn", turn(root, 1))
    await reopening.step("second_turn", turn(root, 2))
    await harness.close(CONTEXT)
    return reopening.figures


# --- streams -------------------------------------------------------------------------------------------------


async def stream(folder: Path, deltas: int = 2000, pace_ms: float = 0, answers: int = 5) -> Figures:
    models = Scripted(deltas=deltas, pace=pace_ms / 1000)
    streams = Streams(deltas)

    async def bare() -> None:
        async for _ in models.stream_simple(None, {"messages": [{"role": "user"}]}):
            pass

    one, root = await open_root(folder / "one", models)
    other, other_root = await open_root(folder / "other", models, interval_ms=NO_INTERVAL_MS)
    seen = Progress(one), Progress(other)
    for number in range(answers):
        await streams.round(turn(root, number), turn(other_root, number), bare())
    await one.close(CONTEXT)
    await other.close(CONTEXT)
    return streams.figures(partials=seen[0].partials / answers, partials_without=seen[1].partials / answers)


async def partial(folder: Path, n: int = 30, deltas: int = 60, pace_ms: float = 5) -> Figures:
    """From the first delta to the commit that shows it."""
    models = Scripted(deltas=deltas, pace=pace_ms / 1000)
    late = []
    harness, root = await open_root(folder, models)
    seen = Progress(harness)
    for number in range(n):
        seen.first_at = None
        await turn(root, number)
        assert seen.first_at is not None, "a partial was committed"
        late.append(1e3 * (seen.first_at - models.began))
    await harness.close(CONTEXT)
    late.sort()
    return {"first_partial": late[n // 2], "first_partial_9_in_10": late[9 * n // 10]}


async def payload(folder: Path, tool: int = 0, deltas: int = 0, pace_ms: float = 0, n: int = 10) -> Figures:
    models = Scripted(tool=bool(tool), deltas=deltas, pace=pace_ms / 1000)
    storage = await open_storage(folder)
    counted = Counted(storage)
    harness = await open_harness(storage, models)
    root = await harness.root(CONTEXT, {"agent": agent(models)})
    await turn(root, 0)
    counted.payload, counted.commits = 0, 0
    for number in range(n):
        await turn(root, number)
    payload, commits = counted.payload / n, counted.commits / n
    await harness.close(CONTEXT)
    # A change of a document comes with its id alone.
    return payload_figures(payload=payload, kept=payload, commits=commits, text=len(DELTA) * deltas)


# --- watches, idle conversations, imports --------------------------------------------------------------------


async def watch(folder: Path, watchers: int = 1, commits: int = 500, writers: int = 1) -> Figures:
    harness, root = await open_root(folder, Scripted())
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

    async def write(count: int) -> None:
        for _ in range(count):
            await harness.commit(add, CONTEXT)

    async def work() -> None:
        await asyncio.gather(*(write(commits // writers) for _ in range(writers)))
        await done.wait()

    meter = Meter()
    await meter.time(work())
    await harness.close(CONTEXT)
    return {"cpu": meter.total_cpu, "wall": meter.total_wall}


async def idle(folder: Path, conversations: int = 10_000) -> Figures:
    harness, root = await open_root(folder, Scripted())
    await turn(root, 0)
    options = {"ownership": {"kind": "ownerless"}, "agent": AGENT}
    before = rss_mb()
    handles = []
    for _ in range(0, conversations, 100):
        handles += await asyncio.gather(*(harness.create_conversation(options, CONTEXT) for _ in range(100)))
    created = rss_mb() - before
    (folder / "ids.json").write_text(json.dumps([handle.id for handle in handles]))
    await harness.close(CONTEXT)
    return {"created_mb": created, **child(__file__, "touched", folder=folder)}


async def touched(folder: Path) -> Figures:
    """A turn in some of the conversations that ``idle`` made, and then nothing. All of them would take it too long."""
    ids = json.loads((folder / "ids.json").read_text())[:SOME]
    harness, root = await open_root(folder, Scripted())
    await turn(root, 0)

    async def touch(id: int) -> None:
        await turn(await harness.conversation(id, CONTEXT), 1)

    before = rss_mb()
    for start in range(0, len(ids), 20):
        await asyncio.gather(*(touch(id) for id in ids[start : start + 20]))
    added = rss_mb() - before
    await harness.close(CONTEXT)
    return {"some_touched_mb": added}


async def importing(_: Path) -> Figures:
    return import_figures(
        __file__,
        package="import pi_durable",
        agent="import pi_durable; from pi_durable.storage.sqlite.posix import open_posix_sqlite_storage",
    )


CELLS = (document, entry, turns, many, long, build, reopen, reopened, stream, partial, payload, watch, idle, touched)

if __name__ == "__main__":
    main({cell.__name__: cell for cell in CELLS} | {"import": importing})
