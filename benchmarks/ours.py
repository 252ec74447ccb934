"""The workloads on perdure, on SqliteStorage. Its default is power-safe: a commit is flushed before it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal

from msgspec.json import encode
from typing_extensions import override

from common import (
    A_MESSAGE,
    AHEAD,
    ANSWER,
    BODY,
    DELTA,
    INTERVAL_MS,
    KEEP,
    LONGEST_QUESTION,
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
from perdure import Compaction, Conversation, Document, Entry, Extension, Harness, Session, SqliteStorage, tool
from perdure.harness.documents import ASSISTANT, USER
from perdure.harness.messages import AssistantMessage, Text, ToolCallPart, Usage, UserMessage, encode_messages
from perdure.harness.model import Finished, ModelEvent, ModelInfo, ModelRequest, TextDelta
from perdure.kernel.records import to_raw
from perdure.kernel.session import Settled
from perdure.kernel.storage import Batch

Durability = Literal["default", "power", "process"]


SOME_USAGE = Usage(input=10, output=10)


class Counter(Document, kind="app.counter", version=1, scope="session"):
    count: int = 0


class Note(Entry, kind="app.note"):
    text: str


@tool(replay="safe")
async def echo(text: str) -> str:
    """Echo."""
    return "echo " + text


class Scripted:
    """Answers at once, or calls the tool first, or streams deltas."""

    default = "scripted:one"

    def __init__(self, *, tool: bool = False, deltas: int = 0, pace: float = 0.0) -> None:
        self.tool, self.deltas, self.pace, self.calls = tool, deltas, pace, 0
        self.began = 0.0
        """When the first delta of the newest stream was given."""

    def find(self, model: str) -> ModelInfo | None:
        return ModelInfo(provider="scripted", name="one", context_window=10**9, max_output=8192)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        if self.tool and isinstance(request.messages[-1], UserMessage):
            self.calls += 1
            call = ToolCallPart(f"c{self.calls}", "echo", to_raw({"text": "hello"}))
            yield Finished(answer(call))
            return
        for number in range(self.deltas):
            await asyncio.sleep(self.pace)
            if number == 0:
                self.began = time.perf_counter()
            yield TextDelta(DELTA)
        yield Finished(answer(Text(DELTA * self.deltas if self.deltas else ANSWER)))


class Remembering(Scripted):
    """Has a window, says how long a request was, and sums up."""

    summaries = 0

    @override
    def find(self, model: str) -> ModelInfo | None:
        return ModelInfo(provider="scripted", name="one", context_window=WINDOW, max_output=8192)

    @override
    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        last = request.messages[-1]
        assert isinstance(last, UserMessage)
        summary = len(last.text) > LONGEST_QUESTION
        self.summaries += summary
        usage = Usage(input=A_MESSAGE * len(request.messages), output=A_MESSAGE)
        yield Finished(answer(Text(SUMMARY if summary else ANSWER), usage))


def answer(content: Text | ToolCallPart, usage: Usage = SOME_USAGE) -> AssistantMessage:
    return AssistantMessage(
        content=(content,),
        provider="scripted",
        model="one",
        stop_reason="tool_use" if isinstance(content, ToolCallPart) else "stop",
        usage=usage,
    )


class Progress:
    """Counts commits of a session: those with only throttled progress, and the others."""

    def __init__(self, session: Session) -> None:
        self.partials, self.others = 0, 0
        self.first_at: float | None = None
        session.observe(self._see)

    def _see(self, settled: Settled) -> None:
        if settled.batch.progress:
            self.partials += 1
            self.first_at = self.first_at or time.perf_counter()
        else:
            self.others += 1


class Counting(SqliteStorage):
    """Counts what is handed over, as JSON: records whole, values and operations of documents."""

    payload, kept, commits = 0, 0, 0
    """``kept``: without the record of a document that was there before, which comes with every change of it."""

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        self.commits += 1
        for records in (batch.conversations, batch.entries, batch.submissions, batch.tasks):
            self._count(sum(len(encode(record)) for record in records))
        for write in batch.documents:
            self._count(len(write.base or b"") + len(write.ops or b""))
            new = write.record.created_seq == batch.seq or write.record.retired_seq is not None
            self._count(len(encode(write.record)), None if new else len(encode([write.record.id, write.version])))
        return super().commit(batch)

    def _count(self, payload: int, kept: int | None = None) -> None:
        self.payload += payload
        self.kept += payload if kept is None else kept


def store(folder: Path, durability: Durability = "default") -> SqliteStorage:
    path = folder / "s.db"
    return SqliteStorage(path) if durability == "default" else SqliteStorage(path, durability=durability)


def open_harness(
    storage: SqliteStorage, models: Scripted, *, interval_ms: int = INTERVAL_MS
) -> AbstractAsyncContextManager[Harness]:
    extensions = [Extension("echo", tools=[echo])] if models.tool else []
    return Harness.open(storage, models=models, extensions=extensions, partial_interval_ms=interval_ms)


async def turn(conversation: Conversation, number: int) -> None:
    submission = await conversation.submit(QUESTION % number)
    settled = await submission.wait()
    assert settled.status == "done", settled


# --- commits and turns ---------------------------------------------------------------------------------------


async def document(folder: Path, n: int = 2000) -> Figures:
    meter = Meter()
    async with Session.open(store(folder)) as session:

        async def add() -> None:
            async with session.commit() as tx:
                (await tx.draft(Counter)).count += 1

        for _ in range(n):
            await meter.time(add())
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms()}


async def entry(folder: Path, n: int = 2000) -> Figures:
    meter = Meter()
    async with Session.open(store(folder)) as session:
        async with session.commit() as tx:
            conversation = tx.create_conversation(owner=None).id

        async def add() -> None:
            async with session.commit(conversation_id=conversation) as tx:
                tx.append(Note(text=BODY * 5))

        for _ in range(n):
            await meter.time(add())
    return {"cpu": meter.median_ms(), "wall": meter.wall_ms()}


async def turns(
    folder: Path, n: int = 200, tool: int = 0, durability: Durability = "default", counted: int = 10
) -> Figures:
    meter = Meter()
    models = Scripted(tool=bool(tool))
    async with open_harness(store(folder, durability), models) as harness:
        root = await harness.root()
        for number in range(n):
            await meter.time(turn(root, number))
    stored = stored_bytes(folder)
    if not counted:
        return {}
    async with open_harness(store(folder, durability), models) as harness:
        root = await harness.root()
        await turn(root, n)
        seen = Progress(harness.session)
        for number in range(counted):
            await turn(root, n + number)
    return turn_figures(meter, commits=seen.others / counted, stored=stored)


async def many(
    folder: Path, conversations: int = 100, n: int = 10, tool: int = 0, durability: Durability = "default"
) -> Figures:
    meter = Meter()
    async with open_harness(store(folder, durability), Scripted(tool=bool(tool))) as harness:
        handles = [await harness.create_conversation() for _ in range(conversations)]

        async def one(conversation: Conversation) -> None:
            for number in range(n):
                await turn(conversation, number)

        await meter.time(asyncio.gather(*(one(handle) for handle in handles)))
    return {"cpu": meter.total_cpu, "turns_per_s": conversations * n / meter.total_wall}


# --- a conversation that is compacted -------------------------------------------------------------------------


async def long(folder: Path, n: int = 50_000) -> Figures:
    models = Remembering()
    policy = Compaction(reserve_tokens=RESERVE, keep_recent_tokens=KEEP, background_tokens=AHEAD)
    figures = Long(folder, n)
    async with Harness.open(store(folder), models=models, compaction=policy) as harness:
        root = await harness.root()
        for number in range(n):
            await figures.turn(turn(root, number))
    return figures.figures(compactions=models.summaries)


# --- a long session ------------------------------------------------------------------------------------------


async def build(folder: Path, entries: int = 100_000) -> Figures:
    """A session with so many entries, left in the folder for ``reopen``."""
    said = encode_messages([UserMessage(content=(Text(BODY),))])
    answered = encode_messages([answer(Text(BODY))])
    async with open_harness(store(folder), Scripted()) as harness:
        root = await harness.root()
        for start in range(0, entries, 500):
            async with root.commit() as tx:
                for number in range(start, min(start + 500, entries)):
                    if number % 2:
                        tx.append_record(ASSISTANT, messages=answered)
                    else:
                        tx.append_record(USER, messages=said)
    return {"stored_mb": stored_bytes(folder) / 2**20}


async def reopen(_: Path, store: str, children: int = 3) -> Figures:
    return reopen_in_children(__file__, Path(store), children)


async def reopened(folder: Path) -> Figures:
    reopening = Reopening()
    opening = open_harness(store(folder), Scripted())
    held: list[Conversation] = []

    async def open_root() -> None:
        harness = await opening.__aenter__()
        held.append(await harness.root())

    await reopening.step("open", open_root())
    root = held[0]
    await reopening.step("newest_50", root.entries(limit=50, order="descending"))
    await reopening.step("first_turn", turn(root, 1))
    await reopening.step("second_turn", turn(root, 2))
    await opening.__aexit__(None, None, None)
    return reopening.figures


# --- streams -------------------------------------------------------------------------------------------------


async def stream(folder: Path, deltas: int = 2000, pace_ms: float = 0, answers: int = 5) -> Figures:
    models = Scripted(deltas=deltas, pace=pace_ms / 1000)
    streams = Streams(deltas)

    async def bare() -> None:
        async for _ in models.stream(ModelRequest(model="scripted:one", messages=())):
            pass

    for name in ("one", "other"):
        (folder / name).mkdir()
    async with (
        open_harness(store(folder / "one"), models) as one,
        open_harness(store(folder / "other"), models, interval_ms=NO_INTERVAL_MS) as other,
    ):
        roots = await one.root(), await other.root()
        seen = Progress(one.session), Progress(other.session)
        for number in range(answers):
            await streams.round(turn(roots[0], number), turn(roots[1], number), bare())
    return streams.figures(partials=seen[0].partials / answers, partials_without=seen[1].partials / answers)


async def partial(folder: Path, n: int = 30, deltas: int = 60, pace_ms: float = 5) -> Figures:
    """From the first delta to the commit that shows it."""
    models = Scripted(deltas=deltas, pace=pace_ms / 1000)
    late: list[float] = []
    async with open_harness(store(folder), models) as harness:
        root = await harness.root()
        seen = Progress(harness.session)
        for number in range(n):
            seen.first_at = None
            await turn(root, number)
            assert seen.first_at is not None, "a partial was committed"
            late.append(1e3 * (seen.first_at - models.began))
    late.sort()
    return {"first_partial": late[n // 2], "first_partial_9_in_10": late[9 * n // 10]}


async def payload(folder: Path, tool: int = 0, deltas: int = 0, pace_ms: float = 0, n: int = 10) -> Figures:
    storage = Counting(folder / "s.db")
    async with open_harness(storage, Scripted(tool=bool(tool), deltas=deltas, pace=pace_ms / 1000)) as harness:
        root = await harness.root()
        await turn(root, 0)
        storage.payload, storage.kept, storage.commits = 0, 0, 0
        for number in range(n):
            await turn(root, number)
        counts = storage.payload / n, storage.kept / n, storage.commits / n
    return payload_figures(payload=counts[0], kept=counts[1], commits=counts[2], text=len(DELTA) * deltas)


# --- watches, idle conversations, imports --------------------------------------------------------------------


async def watch(folder: Path, watchers: int = 1, commits: int = 500, writers: int = 1) -> Figures:
    meter = Meter()
    async with open_harness(store(folder), Scripted()) as harness:
        root = await harness.root()
        ready = asyncio.Semaphore(0)
        last = harness.session.seq + commits

        async def consume() -> None:
            async with root.watch() as frames:
                ready.release()
                async for frame in frames:
                    if frame.value.entries and frame.seq >= last:
                        return

        consumers = [asyncio.ensure_future(consume()) for _ in range(watchers)]
        for _ in range(watchers):
            await ready.acquire()
        said = encode_messages([UserMessage(content=(Text(BODY),))])

        async def write(count: int) -> None:
            for _ in range(count):
                async with root.commit() as tx:
                    tx.append_record(USER, messages=said)

        async def work() -> None:
            await asyncio.gather(*(write(commits // writers) for _ in range(writers)))
            await asyncio.gather(*consumers)

        await meter.time(work())
    return {"cpu": meter.total_cpu, "wall": meter.total_wall}


async def idle(folder: Path, conversations: int = 10_000) -> Figures:
    async with open_harness(store(folder), Scripted()) as harness:
        await turn(await harness.root(), 0)
        before = rss_mb()
        handles: list[Conversation] = []
        for _ in range(0, conversations, 100):
            handles += await asyncio.gather(*(harness.create_conversation() for _ in range(100)))
        created = rss_mb() - before
        (folder / "ids.json").write_text(json.dumps([handle.id for handle in handles]))
    return {"created_mb": created, **child(__file__, "touched", folder=folder)}


async def touched(folder: Path) -> Figures:
    """A turn in each of the conversations that ``idle`` made, and then nothing."""
    ids = json.loads((folder / "ids.json").read_text())
    figures: Figures = {}
    async with open_harness(store(folder), Scripted()) as harness:
        await turn(await harness.root(), 0)
        before = rss_mb()
        for start in range(0, len(ids), 20):
            if start == SOME:
                figures["some_touched_mb"] = rss_mb() - before
            await asyncio.gather(*(turn(harness.handle(id), 1) for id in ids[start : start + 20]))
        return figures | {"touched_mb": rss_mb() - before}


async def importing(_: Path) -> Figures:
    names = "Agent, Conversation, Extension, Harness, SqliteStorage, ToolCall, tool"
    return import_figures(__file__, package="import perdure", agent=f"from perdure import {names}")


CELLS = (document, entry, turns, many, long, build, reopen, reopened, stream, partial, payload, watch, idle, touched)

if __name__ == "__main__":
    main({cell.__name__: cell for cell in CELLS} | {"import": importing})
