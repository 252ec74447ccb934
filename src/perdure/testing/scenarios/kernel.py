"""What the kernel promises by itself: atomic commits, forks, documents, watches (chapter 1 of the rules)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import cast

from msgspec import structs

from perdure.kernel.document import Document, field
from perdure.kernel.entries import Entry
from perdure.kernel.json import JsonValue
from perdure.kernel.records import NULL, ROOT_CONVERSATION, Completed, Terminal
from perdure.kernel.session import Session
from perdure.kernel.transaction import Transaction
from perdure.testing.normal import Records, Rules
from perdure.testing.simulation import Host, Scenario

STEPS = 4


class Step(Entry, kind="app.step"):
    """One step that was done."""

    number: int


class Progress(Document, kind="app.progress", scope="conversation", history="rewindable", fork="as_of"):
    """How far a conversation has come."""

    steps: int = 0
    text: str = ""


class Shared(Document, kind="app.shared", scope="session"):
    """What writers have in common."""

    writes: int = 0


@asynccontextmanager
async def open_session(host: Host) -> AsyncGenerator[Session]:
    """A session on the host, with its root conversation; the world hears of each commit it is shown."""
    async with Session.open(host.storage, clock=host.clock, entropy=host.entropy, on_report=host.report) as session:
        session.observe(lambda settled: host.heard(settled.seq))
        if await session.conversation(ROOT_CONVERSATION) is None:
            async with session.commit() as tx:
                tx.create_conversation(owner=None, root=True)
        yield session


async def once(tx: Transaction, request_id: str, conversation: int = ROOT_CONVERSATION) -> bool:
    """Whether this is the first time a request comes; from then on it is known."""
    if await tx.request(conversation, request_id) is not None:
        return False
    tx.new_submission(type="write", status="done", digest="", request_id=request_id, conversation=conversation)
    return True


async def atomic(host: Host) -> None:
    """Commits that each write an entry, a document and a task, and end the task before."""
    async with open_session(host) as session:
        for number in range(1, STEPS + 1):
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                if not await once(tx, f"step-{number}"):
                    continue
                for task in list(tx.live_tasks()):
                    tx.put_task(structs.replace(task, state=Terminal(Completed()), ended_at=tx.at))
                progress = await tx.draft(Progress)
                progress.steps = number
                progress.text += f"step {number}, "
                tx.append(Step(number=number))
                if number < STEPS:
                    tx.new_task(kind="app.work", version=1, phase="start", input=NULL)
            host.heard(tx.seq)


def all_or_nothing(records: Records) -> Iterator[str]:
    """Entries, document, tasks and submissions must tell of the same number of commits."""
    root = ROOT_CONVERSATION
    progress = cast("dict[str, JsonValue]", records.document("app.progress", root) or {"steps": 0, "text": ""})
    steps = len(records.of("app.step"))
    if progress["steps"] != steps or str(progress["text"]).count("step") != steps:
        yield f"{steps} entries, but the document says {progress}"
    if len(records.submissions) != steps:
        yield f"{steps} entries, but {len(records.submissions)} submissions"
    if len(records.tasks) != min(steps, STEPS - 1):
        yield f"{steps} entries, but {len(records.tasks)} tasks"
    live = sum(task.live for task in records.tasks)
    if live != (0 < steps < STEPS):
        yield f"{live} live tasks after {steps} steps"


async def writers(host: Host) -> None:
    """Several writers at once, whose commits are staged while earlier ones are on their way."""

    async def write(session: Session, writer: int) -> None:
        for number in range(2):
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                if await once(tx, f"writer-{writer}-{number}"):
                    shared = await tx.draft(Shared)
                    shared.writes += 1
                    tx.append(Step(number=10 * writer + number))

    async with open_session(host) as session, asyncio.TaskGroup() as group:
        for writer in range(3):
            group.create_task(write(session, writer))


def writes_counted(records: Records) -> Iterator[str]:
    """A writer that did not see what was staged before it would count less than there are."""
    shared = cast("dict[str, JsonValue]", records.document("app.shared") or {"writes": 0})
    if shared["writes"] != len(records.of("app.step")):
        yield f"{len(records.of('app.step'))} entries, but the document counts {shared['writes']}"


async def fork(host: Host) -> None:
    """A conversation and its fork, which go on independently with documents of their own."""
    async with open_session(host) as session:
        for number in (1, 2, 3):
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                if await once(tx, f"root-{number}"):
                    (await tx.draft(Progress)).steps = number
                    tx.append(Step(number=number))
        entries = await session.entries(ROOT_CONVERSATION)
        forks = [c for c in await session.conversations() if c.parent is not None]
        if not forks:
            async with session.commit() as tx:
                forks = [await tx.fork(ROOT_CONVERSATION, entries[1].id)]
        (forked,) = forks
        for conversation in (forked.id, ROOT_CONVERSATION):
            async with session.commit(conversation_id=conversation) as tx:
                if await once(tx, "after the fork", conversation):
                    (await tx.draft(Progress)).steps += 10
                    tx.append(Step(number=10 + conversation))
        seen = [Step.read(entry).number for entry in await session.entries(forked.id)]
        assert seen == [1, 2, 10 + forked.id], f"the fork shows {seen}"
        now = await session.snapshot(Progress, conversation=forked.id)
        then = await session.snapshot(Progress, conversation=forked.id, at=entries[0].id)
        assert (now and now.steps, then and then.steps) == (12, 1), "a fork's document is as of its entry"


async def watch(host: Host) -> None:
    """A watcher hears of each change in order, and of nothing that a crash takes back."""
    async with open_session(host) as session:
        async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
            await tx.draft(Progress)
        async with session.watch(Progress, conversation=ROOT_CONVERSATION) as frames:

            async def look() -> None:
                last = -1
                async for frame in frames:
                    host.heard(frame.seq)
                    assert frame.value.steps >= last, "frames come in order"
                    last = frame.value.steps
                    if last == STEPS:
                        return

            watching = asyncio.create_task(look())
            for number in range(1, STEPS + 1):
                async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                    if await once(tx, f"step-{number}"):
                        (await tx.draft(Progress)).steps = number
            await watching


class Log(Document, kind="app.log", scope="conversation", history="rewindable", fork="current"):
    """A document that changes in every way one can."""

    lines: list[str] = field(default_factory=list[str])
    marks: dict[str, int] = field(default_factory=dict[str, int])
    text: str = ""


async def documents(host: Host) -> None:
    """A document that grows, shrinks, is retired and made anew, over many deltas and the bases between them."""
    async with open_session(host) as session:
        for number in range(1, 13):
            async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
                if not await once(tx, f"change-{number}"):
                    continue
                tx.append(Step(number=number))
                if number == 8:
                    await tx.retire(Log)
                    continue
                log = await tx.draft(Log)
                log.lines.append(f"line {number} " + "x" * 100 * number)
                log.marks[str(number)] = number
                log.text += f"{number}, "
                if number % 3 == 0:
                    del log.lines[0]
                    if str(number - 1) in log.marks:
                        del log.marks[str(number - 1)]
                    log.text = log.text[3:]
        now = await session.snapshot(Log, conversation=ROOT_CONVERSATION)
        assert now is not None
        assert (len(now.lines), now.text) == (2, " 11, 12, "), "what was retired is not there"
        entries = await session.entries(ROOT_CONVERSATION)
        then = await session.snapshot(Log, conversation=ROOT_CONVERSATION, at=entries[6].id)
        assert then is not None
        assert (len(then.lines), len(then.marks)) == (5, 5), "history is never rewritten"


KERNEL = (
    Scenario(name="atomic", program=atomic, always=all_or_nothing),
    Scenario(
        name="writers",
        program=writers,
        always=writes_counted,
        rules=Rules(unordered=frozenset({"app.step"})),
    ),
    Scenario(name="fork", program=fork),
    Scenario(name="documents", program=documents),
    Scenario(name="watch", program=watch),
)
