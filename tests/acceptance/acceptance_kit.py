"""What the acceptance tests share: programs in processes of their own, and a reader of the file that is nobody's word.

``python acceptance_kit.py PROGRAM FOLDER OPTIONS`` runs one of PROGRAMS. At the points it is told to, a program says so
on standard output and stands still, its whole process, until it is told to go on or is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from perdure import (
    Compaction,
    Conversation,
    Document,
    Entry,
    Extension,
    Harness,
    LocalEnvironment,
    Next,
    PerdureError,
    Report,
    Run,
    Session,
    SqliteStorage,
    StorageError,
    Task,
    ToolCall,
    coding_tools,
    field,
    tool,
)
from perdure.harness.messages import SystemMessage, Usage
from perdure.harness.model import ModelRequest
from perdure.harness.summary import TASK as SUMMARY_TASK
from perdure.kernel.json import JsonValue
from perdure.kernel.storage import Batch
from perdure.testing.model import ScriptedModel, call, say

BOUND_S = 60
"""How long anything may take before a test gives it up. No test waits for it to pass."""

STORE = "agent.db"


# --- seen from outside -----------------------------------------------------------------------------------------


class Child:
    """A program of this file in a process of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    @classmethod
    @asynccontextmanager
    async def run(cls, program: str, folder: Path, **options: object) -> AsyncIterator[Child]:
        """Started here, and surely gone when the block ends."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, program, str(folder), json.dumps(options), stdin=PIPE, stdout=PIPE
        )
        child = cls(process)
        try:
            yield child
        finally:
            await child.kill()

    async def next(self) -> dict[str, Any] | None:
        """What it says next; None: it has ended."""
        assert self.process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            line = await self.process.stdout.readline()
        if not line:
            return None
        self.said.append(json.loads(line))
        return self.said[-1]

    async def at(self, point: str) -> dict[str, Any]:
        """Until it stands at this point."""
        while (said := await self.next()) is not None:
            if said.get("point") == point:
                return said
        raise AssertionError(f"it ended before it reached {point!r}; it said {self.said}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(BOUND_S):
            await self.process.communicate()

    async def end(self) -> dict[str, Any]:
        """Let it finish; the last thing it said."""
        while await self.next() is not None:
            pass
        async with asyncio.timeout(BOUND_S):
            code = await self.process.wait()
        assert code == 0, f"it ended with {code}; it said {self.said}"
        return self.said[-1]


async def run(program: str, folder: Path, **options: object) -> dict[str, Any]:
    """The last thing a program says that nobody disturbs."""
    async with Child.run(program, folder, **options) as child:
        return await child.end()


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The file through Python's own sqlite3, in one read transaction."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as store:
        store.execute("BEGIN")
        yield store


def records(path: Path, table: str) -> list[dict[str, Any]]:
    """Every record of a table, by id, as it stands in the file."""
    with reading(path) as store:
        return [json.loads(body) for (body,) in store.execute(f"SELECT body FROM {table} ORDER BY id")]


def kinds(path: Path) -> list[str]:
    return [entry["kind"] for entry in records(path, "entries")]


def lines(path: Path) -> list[str]:
    """What was appended to a file, line by line; nothing if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


def note(path: Path, text: str) -> None:
    """Append a line with one write: an effect that can be counted."""
    with path.open("a") as file:
        file.write(f"{text}\n")


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- seen from inside ------------------------------------------------------------------------------------------


class Note(Entry, kind="app.note"):
    """An entry the model reads."""

    text: str

    def messages(self) -> list[JsonValue]:
        return [{"role": "user", "content": [{"type": "text", "text": self.text}]}]


class Audit(Entry, kind="app.audit"):
    """An entry for people."""

    n: int = 0
    words: str = ""


class Counter(Document, kind="app.counter", scope="session"):
    n: int = 0


class Job(Document, kind="app.job", scope="conversation", history="rewindable", fork="as_of"):
    n: int = 0
    notes: list[str] = field(default_factory=list)


class Step(Task[int, int], kind="app.step"):
    """Ends with what it was given."""

    async def start(self, run: Run[int, int, None]) -> Next[int]:
        async with run.commit() as tx:
            return tx.complete(run.input)


class Hold:
    """A pace that holds the model's streams before chosen events (from 0) until released."""

    def __init__(self, *events: int) -> None:
        self.events = events or (0,)
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    async def __call__(self, request: object, event: int) -> None:
        if event in self.events and not self._open.is_set():
            self.reached.set()
            await self._open.wait()

    def release(self) -> None:
        self._open.set()


def opened(
    path: Path,
    model: ScriptedModel | None = None,
    *,
    tools: tuple[Any, ...] = (),
    tasks: tuple[Any, ...] = (),
    reports: list[Report] | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[Harness]:
    """A harness on the file at ``path``."""
    extension = Extension("app", tools=tools, tasks=tasks)
    hear = (lambda report: None) if reports is None else reports.append
    return Harness.open(SqliteStorage(path), models=model, extensions=[extension], on_report=hear, **options)


async def transcript(conversation: Conversation) -> list[str]:
    """Every entry as its kind and the words of its messages."""
    found: list[str] = []
    for entry in await conversation.entries(limit=1000):
        said = [
            part.get("text") or f"<{part['type']}>"
            for message in entry.messages
            for part in message.get("content", ())  # pyright: ignore
        ]
        found.append(" ".join([entry.kind.removeprefix("pi."), *said]))
    return found


# --- the programs ----------------------------------------------------------------------------------------------


def tell(**said: object) -> None:
    """One line for whoever started this process."""
    os.write(1, json.dumps(said).encode() + b"\n")


def stand(point: str, **more: object) -> None:
    """Stand still, the whole process, until told to go on."""
    tell(point=point, **more)
    if not os.read(0, 3):
        sys.exit("nobody is there any more")


LONG = "It is a long answer, in many pieces, so that a process can end in the middle of it."
SCRIPT = {
    "long": say(LONG, chunk=8),
    "work": [call("work"), say("worked")],
    "thrice": [call("step", name="a"), call("step", name="b"), call("step", name="c"), say("all three")],
    "hi": say("hello"),
}


async def agent(
    folder: Path,
    *,
    text: str | None = None,
    request_id: str | None = None,
    submission: int | None = None,
    points: tuple[str, ...] = (),
    replay: Any = "unsafe",
    step: str = "",
    restart_limit: int = 5,
) -> None:
    """Submit, or find what was submitted, and tell its answer and what the conversation then shows."""

    def point(name: str, **more: object) -> None:
        if name in points:
            stand(name, **more)

    @tool(name="work", replay=replay)
    async def work() -> str:
        """Work."""
        note(folder / "effects", "work")
        point("tool")
        return "the work's result"

    @tool(name="step")
    async def step_tool(name: str) -> str:
        """A step."""
        note(folder / "effects", name)
        if name == step:
            point("step")
        return f"did {name}"

    async def pace(request: object, event: int) -> None:
        if event == 3 and "streaming" in points:
            async with root.watch() as watch:
                async for frame in watch:
                    message = frame.value.live.message
                    if message is not None and message["content"]:
                        point("streaming", shown=message["content"][0]["text"])
                        break

    class Standing(SqliteStorage):
        def commit(self, batch: Batch) -> asyncio.Future[None]:
            admits = any(submission.status == "placed" for submission in batch.submissions)
            if admits:
                point("unadmitted")
            handed = super().commit(batch)
            if admits:
                point("unacknowledged")
            return handed

    async with Harness.open(
        Standing(folder / STORE),
        models=ScriptedModel(SCRIPT, pace=pace),
        extensions=[Extension("app", tools=(work, step_tool))],
        restart_limit=restart_limit,
        on_report=lambda report: None,
    ) as harness:
        root = await harness.root()
        point("opened")
        try:
            if text is not None:
                made = await root.submit(text, request_id=request_id)
            else:
                assert submission is not None
                made = await harness.submission(submission)
        except PerdureError as error:
            tell(refused=type(error).__name__, words=str(error))
            return
        tell(submission=made.id)
        point("admitted", submission=made.id)
        answer = await made.answer()
        same = None if text is None else (await harness.submission(made.id)) == made
        await harness.idle()
        tell(submission=made.id, answer=answer.text, same=same, transcript=await transcript(root))


async def increments(folder: Path, *, times: int) -> None:
    """Add one to a counter, each time in a session of its own; whoever finds the store taken asks again when told."""
    done = 0
    while done < times:
        stand("ready")
        try:
            async with Session.open(SqliteStorage(folder / STORE)) as session:
                async with session.commit() as tx:
                    (await tx.draft(Counter)).n += 1
                tell(added=True)
        except Exception as error:
            tell(refused=type(error).__name__, words=str(error))
        else:
            done += 1
    tell(done=done)


async def holder(folder: Path, *, epoch: int | None = None) -> None:
    """Own the store, and stand still. Told to go on it commits once, and tells how that went."""
    async with Session.open(SqliteStorage(folder / STORE), epoch=epoch) as session:
        stand("owned", epoch=session.info.epoch, writer=session.info.writer)
        try:
            async with session.commit() as tx:
                (await tx.draft(Counter)).n += 1
            tell(committed=True)
        except Exception as error:
            tell(refused=type(error).__name__, words=str(error))


async def locker(folder: Path, waits: bool = False) -> None:
    """Hold SQLite's write lock from outside the package, as a shell or a backup would, until told to go on."""
    if waits:
        stand("ready")
    with closing(sqlite3.connect(folder / STORE, isolation_level=None)) as store:
        store.execute("BEGIN IMMEDIATE")
        stand("locked")
        store.execute("ROLLBACK")
    tell(unlocked=True)


async def look(session: Session, order: str, least: int) -> int:
    """Read the parts of commits one after the other: whatever shows of one commit, the later reads show all of it."""
    for part in order:
        if part == "e":
            found = await session.entries(1, order="descending", limit=1)
            seen = Audit.read(found[0]).n
        elif part == "d":
            job = await session.snapshot(Job, conversation=1)
            seen = -1 if job is None else job.n
        else:
            seen, after = -1, 0
            while page := await session.tasks(kind="app.step", after=after, limit=1000):
                seen, after = max(record.input for record in page), page[-1].id  # pyright: ignore
        assert seen >= least, f"commit {least} showed before, and {part!r} shows {seen} of {order!r}"
        least = seen
    return least


ORDERS = ("edt", "etd", "det", "dte", "ted", "tde")


async def reader(folder: Path, *, commits: int, keep: bool) -> None:
    """Read a store that somebody else writes: the file itself, and through the package, opened anew or kept open."""
    looks, seen = 0, set[int]()
    storage = SqliteStorage(folder / STORE)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(Session.open(storage, read_only=True))
        tell(point="reading")
        while len(seen) < commits:
            looks += 1
            if not keep:
                await stack.aclose()
                session = await stack.enter_async_context(Session.open(storage, read_only=True))
            with reading(folder / STORE) as store:
                counts = [store.execute(f"SELECT count(*) FROM {part}").fetchone()[0] for part in PARTS]
            assert len(set(counts)) == 1, f"entries, tasks and states of the document: {counts}"
            seen.add(await look(session, ORDERS[looks % 6], counts[0] - 1))
    tell(looks=looks)


PARTS = (
    "entries",
    "tasks",
    "(SELECT seq FROM bases b JOIN documents d ON d.id = b.document_id WHERE d.kind = 'app.job'"
    " UNION SELECT seq FROM deltas e JOIN documents d ON d.id = e.document_id WHERE d.kind = 'app.job')",
)


class Parcel(Task[str, str], kind="app.parcel", version=2):
    """Stands still in its second phase."""

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.go(self.deliver, f"label of {run.input}")

    async def deliver(self, run: Run[str, str, str]) -> Next[str]:
        stand("delivering", task=run.id)
        raise AssertionError("it is killed here")


async def shipper(folder: Path) -> None:
    """Begin a task that never ends by itself."""
    async with opened(folder / STORE, tasks=(Parcel,)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            task = tx.create_task(Parcel, "bolts")
        await harness.tasks.wait(task.id)


class Stander(Task[int, None], kind="app.stander"):
    """Owns another one, so many deep, and stands until it is aborted; tells of its abort in a file."""

    def __init__(self, folder: Path, point: str = "") -> None:
        self.folder = folder
        self.point = point
        self.began = asyncio.Event()

    async def start(self, run: Run[int, None, None]) -> Next[None]:
        if run.input == 0:
            self.began.set()
            await asyncio.Event().wait()
        async with run.commit() as tx:
            child = tx.create_task(Stander, run.input - 1)
            return tx.wait([child.id], self.on, None)

    async def on(self, run: Run[int, None, None]) -> Next[None]:
        raise AssertionError("nobody goes on once the abort is there")

    async def on_abort(self, run: Run[int, None, object]) -> Next[None]:
        note(self.folder / "aborts", str(run.input))
        if self.point == f"handler {run.input}":
            stand(self.point)
        async with run.commit() as tx:
            return tx.abort(f"level {run.input}")


async def aborter(folder: Path, *, point: str) -> None:
    """Begin tasks in tasks and abort them, and stand at a point of that."""
    stander = Stander(folder, point)
    async with opened(folder / STORE, tasks=(stander,)) as harness:
        root = await harness.root()
        harness.resume()
        async with root.commit() as tx:
            tx.create_task(Stander, 2)
        await stander.began.wait()
        marks: list[int] = []

        def observe(settled: Any) -> None:
            marks.extend(task.id for task in settled.batch.tasks if task.abort_requested and task.live)
            if point == f"marks {len(set(marks))}":
                stand(point)

        harness.session.observe(observe)
        await root.abort()
        tell(aborted=True)


async def coder(folder: Path, *, commands: list[str], request_id: str) -> None:
    """An agent that runs commands in the folder, one a turn."""
    replies = [*(call("bash", command=command) for command in commands), say("done")]
    async with Harness.open(
        SqliteStorage(folder / STORE),
        models=ScriptedModel({request_id: replies}),
        extensions=[coding_tools()],
        environment=LocalEnvironment(folder),
        on_report=lambda report: None,
    ) as harness:
        root = await harness.root()
        submission = await root.submit(request_id, request_id=request_id)
        answer = await submission.answer()
        tell(answer=answer.text, transcript=await transcript(root))


async def charger(folder: Path, *, points: tuple[str, ...] = ()) -> None:
    """An agent whose safe tool charges a card at a provider that takes idempotency keys."""

    @tool(name="charge", replay="safe")
    async def charge(cents: int, call: ToolCall) -> str:
        """Charge a card."""
        note(folder / "asked", call.idempotency_key)
        if call.idempotency_key not in [line.split()[0] for line in lines(folder / "charges")]:
            note(folder / "charges", f"{call.idempotency_key} {cents}")
        if "charged" in points:
            stand("charged")
        return f"charged {cents}"

    script = {"pay twice": [call("charge", cents=700), call("charge", cents=700), say("paid")]}
    async with opened(folder / STORE, ScriptedModel(script), tools=(charge,)) as harness:
        submission = await (await harness.root()).submit("pay twice", request_id="pay")
        tell(answer=(await submission.answer()).text)


SUMMARY = "Much was said about words."
WINDOW = 4_000  # tokens; by default a run waits for a compaction above 3,000
WORDY = "word " * 300  # some 375 tokens


def summarises(request: ModelRequest) -> bool:
    """Whether a request asks for a summary."""
    return isinstance(request.messages[0], SystemMessage) and request.messages[0].text == SUMMARY_TASK


async def talker(folder: Path, *, inputs: int, points: tuple[str, ...] = ()) -> None:
    """An agent that is told much, and stands in a request for a summary."""

    async def pace(request: ModelRequest, event: int) -> None:
        if summarises(request):
            note(folder / "summaries", str(len(request.messages)))
            if "summary" in points:
                stand("summary")

    model = ScriptedModel(
        lambda request: say(SUMMARY if summarises(request) else "ok", usage=Usage()), pace=pace, context_window=WINDOW
    )
    async with opened(folder / STORE, model, compaction=Compaction(background_tokens=0)) as harness:
        root = await harness.root()
        for n in range(inputs):
            answer = await (await root.submit(f"{n} {WORDY}", request_id=str(n))).answer()
            assert answer.text == "ok"
        await harness.idle()
        tell(transcript=[line[:12] for line in await transcript(root)], requests=(await root.usage()).requests)


async def boss(folder: Path, *, points: tuple[str, ...] = ()) -> None:
    """An agent whose tool has another conversation, which it owns, do the work."""

    @tool(name="delegate", replay="safe")
    async def delegate(call: ToolCall) -> str:
        """Ask another agent."""
        known = await harness.conversations(owner=call.id)
        child = harness.handle(known[0].id) if known else await harness.create_conversation(owner=call.id)
        asked = await child.submit("long", request_id="asked")
        if "asked" in points:
            stand("asked")
        return (await asked.answer()).text

    script = {**SCRIPT, "go": [call("delegate"), say("it said so")]}
    async with opened(folder / STORE, ScriptedModel(script), tools=(delegate,)) as harness:
        submission = await (await harness.root()).submit("go", request_id="go")
        tell(answer=(await submission.answer()).text)


PROGRAMS = {
    program.__name__: program
    for program in (agent, increments, holder, locker, reader, shipper, aborter, coder, charger, talker, boss)
}


async def main(program: str, folder: str, options: str) -> None:
    try:
        await PROGRAMS[program](Path(folder), **json.loads(options))
    except StorageError as error:
        # Raised by opening: whoever started this wants to know.
        tell(refused=type(error).__name__, words=str(error))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
