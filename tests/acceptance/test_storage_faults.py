"""Faults of storage that users of such systems met, each by its name.

Rules K34 to K40 (strict JSON), K64, K104 to K106 (deltas), K128 to K130 and K186 (failures), K162, K187 (files that
are no stores), K180 (old formats), K185 (open costs what is live).
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import gzip
import hashlib
import os
import subprocess
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from acceptance_kit import LONG, SCRIPT, STORE, Audit, Child, Note, lines, opened, records, run, transcript

from perdure import (
    Document,
    Entry,
    Harness,
    Next,
    NotJson,
    Run,
    Session,
    SessionFailed,
    SqliteStorage,
    StorageCorrupt,
    StorageError,
    StorageFormatError,
    Task,
    ToolCall,
    ToolResult,
    field,
    tool,
)
from perdure.kernel.errors import DocumentFieldError
from perdure.kernel.json import JsonValue
from perdure.storage import sqlite_schema
from perdure.testing.model import ScriptedModel, say


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / STORE


async def turns(count: int = 50) -> None:
    """The event loop goes round, which it could not if something blocked it."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- "database is locked", at open and later --------------------------------------------------------------------


async def test_a_store_that_somebody_locked_is_waited_for_at_open_and_the_loop_goes_on(
    tmp_path: Path, store: Path
) -> None:
    await run("agent", tmp_path, text="hi", request_id="r")
    async with Child.run("locker", tmp_path) as locker:
        await locker.at("locked")
        opening = asyncio.ensure_future(_said(store))
        async with Session.open(SqliteStorage(store), read_only=True) as reader:
            assert len(await reader.entries(1)) == 2, "reading waits for nobody"
        await turns()
        assert not opening.done()
        locker.go()
        assert await opening == ["user hi", "assistant hello"]


async def _said(store: Path) -> list[str]:
    async with opened(store, ScriptedModel(SCRIPT)) as harness:
        return await transcript(await harness.root())


async def test_a_store_that_somebody_locked_is_waited_for_by_commits_and_the_session_goes_on(
    tmp_path: Path, store: Path
) -> None:
    async with opened(store, ScriptedModel(SCRIPT)) as harness:
        root = await harness.root()
        async with Child.run("locker", tmp_path) as locker:
            await locker.at("locked")
            submitting = asyncio.ensure_future(root.submit("hi", request_id="r"))
            await turns()
            assert not submitting.done()
            assert await root.entries() == [], "reads go on, and show nothing of what is not stored"
            assert not await root.busy()
            locker.go()
            submission = await submitting
        assert (await submission.answer()).text == "hello"
        assert harness.session.failed is None


async def test_a_lock_that_is_held_too_long_is_a_clear_error_and_the_next_open_has_everything(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_schema, "BUSY_MS", 50)
    async with Child.run("locker", tmp_path, waits=True) as locker:
        async with opened(store, ScriptedModel(SCRIPT)) as harness:
            root = await harness.root()
            await (await root.submit("hi", request_id="1")).answer()
            await locker.at("ready")
            locker.go()
            await locker.at("locked")
            with pytest.raises(StorageError, match="another process has held a lock on it") as raised:
                await root.submit("long", request_id="2")
            with pytest.raises(SessionFailed) as failed:
                await root.submit("hi", request_id="3")
            assert failed.value.cause is raised.value, "the first cause"
        with pytest.raises(StorageError, match="another process has held a lock on it"):
            async with opened(store):
                raise AssertionError("it is locked")
        locker.go()
        await locker.end()
    async with opened(store, ScriptedModel(SCRIPT)) as harness:
        root = await harness.root()
        assert await transcript(root) == ["user hi", "assistant hello"]
        assert (await (await root.submit("long", request_id="2")).answer()).text == LONG


async def test_many_readers_hold_up_no_writer_and_no_writer_any_reader(store: Path) -> None:
    async with opened(store, ScriptedModel(SCRIPT)) as harness:
        root = await harness.root()

        async def read() -> int:
            async with Session.open(SqliteStorage(store), read_only=True) as session:
                return len(await session.entries(1))

        reading = [asyncio.ensure_future(read()) for _ in range(12)]
        answers = [(await (await root.submit("hi")).answer()).text for _ in range(5)]
        assert answers == ["hello"] * 5
        assert max(await asyncio.gather(*reading)) <= 10


# --- disk full hidden behind a failed rollback; a file truncated to zero opened as a new, empty session ------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


async def test_a_full_disk_is_the_error_that_is_told_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    path, ballast = small_disk / STORE, small_disk / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    written = 0
    async with opened(path, ScriptedModel(SCRIPT)) as harness:
        root = await harness.root()
        answered = await (await root.submit("hi", request_id="hi")).answer()
        with pytest.raises(StorageError, match="the disk is full") as raised:
            for _ in range(1_000):
                await root.write(Audit(n=written, words="x" * 20_000))
                written += 1
        assert written > 10
        with pytest.raises(SessionFailed, match="the disk is full") as failed:
            await root.write(Audit(n=0))
        assert failed.value.cause is raised.value
    async with opened(path, read_only=True) as harness:
        found = [
            Audit.read(entry).n
            for entry in await (await harness.conversation(1)).entries(limit=1000, first=3)
            if entry.kind == "app.audit"
        ]
        assert found == list(range(written)), "all that was acknowledged can be read while the disk is full"
    ballast.unlink()
    async with opened(path, ScriptedModel(SCRIPT)) as harness:
        root = await harness.root()
        assert await harness.session.storage.check() == []
        assert (await (await root.submit("hi", request_id="hi")).answer()).entry == answered.entry
        assert (await (await root.submit("long")).answer()).text == LONG


async def test_work_that_met_a_full_disk_goes_on_where_it_stood(small_disk: Path) -> None:
    """An unsafe tool's result does not fit any more: the run fails with the session, and the tool is not run again."""
    path, ballast = small_disk / STORE, small_disk / "ballast"

    @tool(name="work")
    async def work() -> str:
        """Work."""
        ran.append(1)
        ballast.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
        return "x" * 50_000

    ran: list[int] = []
    async with opened(path, ScriptedModel(SCRIPT), tools=(work,)) as harness:
        submission = await (await harness.root()).submit("work")
        with pytest.raises(SessionFailed, match="the disk is full"):
            await submission.answer()
    ballast.unlink()
    async with opened(path, ScriptedModel(SCRIPT), tools=(work,)) as harness:
        assert (await (await harness.submission(submission.id)).answer()).text == "worked"
    assert ran == [1]


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 20_000])
async def test_a_file_that_was_truncated_is_refused_and_left_as_it_is(size: int, tmp_path: Path, store: Path) -> None:
    await run("agent", tmp_path, text="hi", request_id="r")
    os.truncate(store, size)
    (tmp_path / f"{STORE}.lock").unlink()
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    for read_only in (False, True):
        with pytest.raises((StorageCorrupt, StorageFormatError), match=STORE):
            async with opened(store, ScriptedModel(SCRIPT), read_only=read_only):
                raise AssertionError("a new, empty session in place of the old one")
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


# --- every step stores the full state -----------------------------------------------------------------------------


class Log(Document, kind="app.log", scope="conversation", history="latest"):
    lines: list[str] = field(default_factory=list)
    text: str = ""


class Book(Document, kind="app.book", scope="conversation", history="rewindable"):
    lines: list[str] = field(default_factory=list)
    text: str = ""


class Volume:
    """How many bytes of one kind of document are handed to storage."""

    def __init__(self, harness: Harness, kind: str) -> None:
        self.bytes = 0
        self.commits = 0

        def observe(settled: Any) -> None:
            for write in settled.batch.documents:
                if write.record.kind == kind:
                    self.bytes += len(write.base or b"") + len(write.ops or b"")
                    self.commits += 1

        harness.session.observe(observe)


@pytest.mark.parametrize("kind", [Log, Book])
async def test_a_document_that_grows_costs_what_is_added_and_not_what_it_is(
    kind: type[Log] | type[Book], store: Path
) -> None:
    """K100 to K106: four times the steps cost about four times as much, not sixteen times."""
    async with opened(store) as harness:
        root = await harness.root()
        volume = Volume(harness, kind.definition.kind)
        sizes: dict[int, int] = {}
        for step in range(1, 801):
            async with root.commit() as tx:
                log = await tx.draft(kind)
                log.lines.append(f"step {step}")
                log.text += f"and step {step}, "
            if step in (200, 800):
                sizes[step] = volume.bytes
        assert sizes[800] < 8 * sizes[200]
        stored = (await harness.session.storage.size()).documents
        assert stored < 400_000
        found = await harness.session.snapshot(kind, conversation=root.id)
        assert found is not None
        assert len(found.lines) == 800


async def test_a_long_stream_costs_what_streams(store: Path) -> None:
    """H68: a partial answer is shown by what was added to it."""
    shown = asyncio.Event()

    async def pace(request: object, event: int) -> None:
        # Every tenth piece waits until something of what came before was committed.
        if event and event % 10 == 0:
            shown.clear()
            await shown.wait()

    volumes: list[tuple[int, int]] = []
    async with opened(store, ScriptedModel(lambda request: reply, pace=pace), partial_interval_ms=0) as harness:
        harness.session.observe(lambda settled: shown.set() if settled.batch.progress else None)
        root = await harness.root()
        for size in (10_000, 40_000):
            reply = say("x" * size, chunk=50)
            volume = Volume(harness, "pi.live")
            await (await root.submit("go")).answer()
            volumes.append((volume.commits, volume.bytes))
    (some, small), (more, large) = volumes
    assert more > some >= 20, "it was shown in many pieces"
    assert small < 4 * 10_000 + 200 * some
    assert large < 4 * 40_000 + 200 * more


async def test_what_a_tool_gives_is_bounded_and_what_was_left_out_is_counted(store: Path) -> None:
    """H82, H96: a result of megabytes, and output of megabytes, keep their last 50 KiB of whole lines."""

    @tool(name="work")
    async def work(call: ToolCall) -> str:
        """Work."""
        for n in range(20):
            call.output(f"line {n:6} {'y' * 99_986}\n")
        return "".join(f"{n:9}\n" for n in range(500_000))

    async with opened(store, ScriptedModel(SCRIPT), tools=(work,)) as harness:
        root = await harness.root()
        volume = Volume(harness, "pi.live")
        await (await root.submit("work")).answer()
        (result,) = [e for e in records(store, "entries") if e["kind"] == "pi.tool-result"]
        text = result["messages"][0]["content"][0]["text"]
        note, _, shown = text.partition("\n")
        assert note == "[4980000 bytes in 498000 whole lines before this are left out.]"
        assert shown == "".join(f"{n:9}\n" for n in range(498_000, 500_000))
        assert (result["data"]["dropped_lines"], result["data"]["dropped_bytes"]) == (498_000, 4_980_000)
        assert volume.bytes < 1_000_000
        assert (await harness.session.storage.size()).total < 1_000_000


# --- every entry kept in memory; open and resume read everything ---------------------------------------------------


async def fill(store: Path, entries: int) -> None:
    async with opened(store) as harness:
        root = await harness.root()
        for first in range(0, entries, 500):
            async with root.commit() as tx:
                for n in range(first, min(first + 500, entries)):
                    tx.append(Note(text=f"{n} " + "x" * 300))


@asynccontextmanager
async def memory() -> AsyncIterator[Callable[[], tuple[int, int]]]:
    """Bytes now, and at most since the block began."""
    tracemalloc.start()
    try:
        began, _ = tracemalloc.get_traced_memory()

        def taken() -> tuple[int, int]:
            now, peak = tracemalloc.get_traced_memory()
            return now - began, peak - began

        yield taken
    finally:
        tracemalloc.stop()


async def test_opening_a_long_session_costs_no_more_than_an_empty_one(tmp_path: Path) -> None:
    """K185: open, root, resume, inspect, a look at the last page."""
    peaks: list[int] = []
    for name, entries in (("warm", 0), ("short", 0), ("long", 20_000)):
        store = tmp_path / name
        await fill(store, entries)
        async with memory() as taken:
            async with opened(store, ScriptedModel(SCRIPT)) as harness:
                root = await harness.root()
                harness.resume()
                assert (await harness.inspect()).tasks == []
                assert len(await root.entries(order="descending", limit=10)) == min(entries, 10)
                async with root.view(window=10) as view:
                    assert view.value.more is (entries > 10)
            peaks.append(taken()[1])
    _, short, long = peaks
    assert long < short + 300_000, f"{long} bytes, and {short} for an empty one; the entries take more than 7,000,000"


async def test_entries_do_not_stay_in_memory(store: Path) -> None:
    """What is written and read in weeks does not pile up."""
    async with opened(store) as harness:
        root = await harness.root()

        async def write(commits: int) -> None:
            for _ in range(commits):
                async with root.commit() as tx:
                    for n in range(50):
                        tx.append(Audit(n=n, words="x" * 2_000))
            await root.entries(limit=1000)
            await root.entries(limit=1)

        await write(2)
        async with memory() as taken:
            await write(100)
            now, _ = taken()
    assert now < 2_000_000, f"{now} bytes are kept of 10,000,000 that were written"


# --- a value of an unknown type comes back as another type -----------------------------------------------------------


class Colour(enum.IntEnum):
    red = 1


class Text(str):
    pass


loop: list[Any] = []
loop.append(loop)

NO_JSON: dict[str, tuple[object, str]] = {
    "NaN": (float("nan"), ""),
    "infinity": ([1.0, float("-inf")], "[1]"),
    "set": ({"a": {"b"}}, ".a"),
    "bytes": ([b"x"], "[0]"),
    "tuple": ({"a": [0, (1, 2)]}, ".a[1]"),
    "integer key": ({"a": {1: "b"}}, ".a"),
    "lone surrogate": ({"a": ["x\ud800"]}, ".a[0]"),
    "lone surrogate in a key": ({"\udfff": 1}, ""),
    "too large": ([2**63], "[0]"),
    "cycle": (loop, "[0]"),
    "enum": ([Colour.red], "[0]"),
    "text of another type": ([Text("x")], "[0]"),
    "date": ({"when": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)}, ".when"),
    "decimal": ({"much": decimal.Decimal("1.5")}, ".much"),
    "object": ({"a": object()}, ".a"),
}


class Holder(Document, kind="app.holder", scope="conversation"):
    value: JsonValue = None
    values: list[JsonValue] = field(default_factory=list)
    named: dict[str, JsonValue] = field(default_factory=dict)


class Anything(Entry, kind="app.anything"):
    value: Any


class Take(Task[Any, Any], kind="app.take"):
    async def start(self, run: Run[Any, Any, None]) -> Next[Any]:
        async with run.commit() as tx:
            return tx.wait_signal("go", self.end, None)

    async def end(self, run: Run[Any, Any, None]) -> Next[Any]:
        async with run.commit() as tx:
            return tx.complete([run.input, run.signal])


@pytest.mark.parametrize("what", NO_JSON)
async def test_a_value_that_is_no_json_is_refused_with_its_path_before_anything_is_stored(
    what: str, store: Path
) -> None:
    """K34 to K39: wherever it is to be stored."""
    value, path = NO_JSON[what]
    async with opened(store, tasks=(Take,)) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            await tx.draft(Holder)
            task = tx.create_task(Take, None)
        before = digest(store), harness.session.seq

        async def put(into: str) -> None:
            if into == "signal":
                await harness.send_signal(task.id, "go", value)  # pyright: ignore
            elif into == "write":
                await root.write(Anything(value=value))
            else:
                async with root.commit() as tx:
                    holder = await tx.draft(Holder)
                    if into == "field":
                        holder.value = value  # pyright: ignore
                    elif into == "list":
                        holder.values.append(value)  # pyright: ignore
                    elif into == "dict":
                        holder.named["key"] = value  # pyright: ignore
                    elif into == "entry":
                        tx.append(Anything(value=value))
                    else:
                        tx.create_task(Take, value)

        for into in ("field", "list", "dict", "entry", "write", "task", "signal"):
            with pytest.raises(NotJson) as raised:
                await put(into)
            assert path in raised.value.path, f"{into}: {raised.value}"
        assert (digest(store), harness.session.seq) == before


def digest(store: Path) -> str:
    wal = Path(f"{store}-wal")
    return hashlib.sha256(store.read_bytes() + (wal.read_bytes() if wal.exists() else b"")).hexdigest()


SAME: list[JsonValue] = [
    1, 1.0, True, False, None, 0, -0.0, 0.0, "1", "", [], {}, 2**63 - 1, -(2**63), 1e300, 5e-324, 0.1,
    "\x00\u2028\U0001f600", {"": {"b": [1, 1.0, True]}}, [[[]]], {"a": None},
]  # fmt: skip


async def test_a_value_comes_back_as_the_type_it_was_written_as(store: Path) -> None:
    """K40: through documents, deltas, entries, tasks, signals and results, in another session."""
    async with opened(store, tasks=(Take,)) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            await tx.draft(Holder)
        for value in SAME:
            async with root.commit() as tx:
                (await tx.draft(Holder)).values.append(value)
        async with root.commit() as tx:
            tx.append(Anything(value=SAME))
            task = tx.create_task(Take, SAME)
        await harness.send_signal(task.id, "go", SAME)
        await harness.tasks.wait(task.id)
    async with opened(store, tasks=(Take,)) as harness:
        holder = await harness.session.snapshot(Holder, conversation=1)
        (entry,) = await harness.session.entries(1)
        outcome = await harness.tasks.wait(task.id)
        assert holder is not None
        found = [holder.to_json()["values"], entry.data["value"], *outcome.result]  # pyright: ignore
        for values in found:
            assert repr(values) == repr(SAME)


@dataclass(frozen=True)
class Price:
    amount: float
    pieces: int = 1
    more: list[float] = dataclasses.field(default_factory=list)


class Cost(msgspec.Struct, frozen=True):
    amount: float
    pieces: int = 1
    more: list[float] = msgspec.field(default_factory=list[float])


class Priced(Document, kind="app.priced", scope="conversation"):
    price: Cost | None = None


class Buy(Task[Price, None], kind="app.buy"):
    async def start(self, run: Run[Price, None, None]) -> Next[None]:
        raise AssertionError("nothing of it is stored")


@pytest.mark.parametrize(
    "price",
    [
        Price(amount=1),
        Price(amount=True),
        Price(amount=float("nan")),
        Price(amount=1.0, pieces=Colour.red),
        Price(amount=1.0, pieces=True),
        Price(amount=1.0, pieces=2**64),
        Price(amount=1.0, more=[1.5, 1]),
        Price(amount=1.0, more=(1.5,)),  # pyright: ignore
    ],
    ids=repr,
)
async def test_a_typed_value_that_would_come_back_as_another_type_is_refused(price: Price, store: Path) -> None:
    """K39, K40: 1, 1.0 and True are three values, also where a type is declared."""
    async with opened(store, tasks=(Buy,)) as harness:
        root = await harness.root()
        with pytest.raises(NotJson, match=r"app\.buy input"):
            async with root.commit() as tx:
                tx.create_task(Buy, price)
        with pytest.raises((NotJson, DocumentFieldError), match=r"app\.priced\.price"):
            async with root.commit() as tx:
                (await tx.draft(Priced)).price = Cost(**dataclasses.asdict(price))
        assert await harness.session.snapshot(Priced, conversation=1) is None
        assert (await harness.inspect()).tasks == []


async def test_a_tool_cannot_smuggle_in_what_is_no_json(store: Path) -> None:
    """H81: what has no JSON is an error result; the run goes on."""

    @tool(name="work")
    async def work() -> object:
        """Work."""
        return {"a": object()}

    @tool(name="step")
    async def step(name: str) -> ToolResult:
        """A step."""
        return ToolResult("x", details={"a": float("nan")})

    async with opened(store, ScriptedModel(SCRIPT), tools=(work, step)) as harness:
        root = await harness.root()
        assert (await (await root.submit("work")).answer()).text == "worked"
        assert (await (await root.submit("thrice")).answer()).text == "all three"
    results = [e["data"] for e in records(store, "entries") if e["kind"] == "pi.tool-result"]
    assert [(r["is_error"], r["code"]) for r in results] == [(True, "tool_error")] * 4


# --- an upgrade hides old sessions; a crash-time file is not offered -------------------------------------------------


GOLDEN = Path(__file__).parents[1] / "storage" / "golden"


def unpack(golden: Path, store: Path) -> None:
    store.write_bytes(gzip.decompress(golden.read_bytes()))
    store.chmod(0o600)


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.gz")), ids=lambda path: path.stem)
async def test_a_store_of_an_older_format_shows_all_its_conversations(golden: Path, store: Path) -> None:
    """K180, K181: listed from the data; its live work waits for code that fits."""
    unpack(golden, store)
    for _ in range(2):
        async with opened(store, ScriptedModel(SCRIPT)) as harness:
            assert [info.id for info in await harness.conversations()] == [1, 7]
            assert [entry.id for entry in await (await harness.conversation(7)).entries()] == [2, 6, 8]
            assert (await harness.submission(3)).id == 3
            inspection = await harness.inspect()
            assert [(task.kind, task.blocked) for task in inspection.tasks] == [("turn", "missing_task")]
            assert [record.id for record in inspection.queued] == [9]


async def test_what_a_killed_process_left_is_found_and_read_without_changing_it(tmp_path: Path, store: Path) -> None:
    """K130, K159: the store and its log as they were at the kill, also by somebody who only looks."""
    async with Child.run("agent", tmp_path, text="work", request_id="r", points=["tool"]) as child:
        await child.at("tool")
        submission = child.said[-2]["submission"]
    before = {name: (tmp_path / name).read_bytes() for name in sorted(os.listdir(tmp_path))}
    assert before[f"{STORE}-wal"], "the newest commits are in the log only"
    async with opened(store, read_only=True) as harness:
        assert [info.id for info in await harness.conversations()] == [1]
        root = await harness.conversation(1)
        assert await transcript(root) == ["user work", "assistant <tool_call>"]
        assert await root.busy()
        assert await (await harness.submission(submission)).status() == "placed"
        assert {task.kind: task.status for task in (await harness.inspect()).tasks} == {
            "pi.generation": "waiting",
            "pi.tool": "running",
        }
    after = {name: (tmp_path / name).read_bytes() for name in sorted(os.listdir(tmp_path))}
    for name in (STORE, f"{STORE}-wal", f"{STORE}.lock"):
        assert after[name] == before[name]
    assert after.keys() == before.keys()


async def test_a_failed_recovery_changes_nothing_of_what_it_recovers_from(tmp_path: Path, store: Path) -> None:
    """T44: whatever ends it, however often; the next open that can, does."""
    async with Child.run("agent", tmp_path, text="work", request_id="r", replay="safe", points=["tool"]) as child:
        await child.at("tool")
    tables = ("entries", "tasks", "submissions", "documents")
    before = [records(store, table) for table in tables]

    class Failing(SqliteStorage):
        def commit(self, batch: Any) -> asyncio.Future[None]:
            refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            refused.set_exception(StorageError("the disk is gone"))
            return refused

    for _ in range(3):
        with pytest.raises(StorageError, match="the disk is gone"):
            async with Harness.open(Failing(store), models=ScriptedModel(SCRIPT), on_report=lambda report: None):
                raise AssertionError("it could not recover")
        assert [records(store, table) for table in tables] == before
    again = await run("agent", tmp_path, text="work", request_id="r", replay="safe")
    assert again["answer"] == "worked"
    assert len(lines(tmp_path / "effects")) == 2
