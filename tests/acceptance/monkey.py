"""The agent that the monkey kills: ``python monkey.py FOLDER SEED``. It tells of everything it does, a line each.

Several conversations at once, each with jobs of several kinds, steers, writes and tasks; what is submitted is a pure
function of the seed, and so is what the model answers. Begun again, it begins at the beginning: the request ids and
documents know what was done.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from acceptance_kit import Note, note, opened, tell

from perdure import (
    Conversation,
    Document,
    Entry,
    Harness,
    ModelRequest,
    Next,
    RetryPolicy,
    Run,
    Task,
    ToolCall,
    UserMessage,
    field,
    tool,
)
from perdure.harness.messages import AssistantMessage
from perdure.testing.model import Reply, ScriptedModel, call, calls, fail, say

CONVERSATIONS = ("a", "b", "c")
JOBS = 6
KINDS = 5


def plan(seed: str) -> dict[str, list[int]]:
    """Which kinds of job each conversation is given."""
    chance = random.Random(f"plan {seed}")
    return {name: [chance.randrange(KINDS) for _ in range(JOBS)] for name in CONVERSATIONS}


def answer(job: str) -> str:
    return f"{job} is done, as far as anybody can tell, and this is a long way to say so."


def replies(job: str) -> list[Reply]:
    """What the model answers to ``job name.number.kind``, one after the other."""
    key = job.removeprefix("job ")
    last = say(answer(job), chunk=8)
    match int(key[-1]):
        case 0:
            return [last]
        case 1:
            return [call("charge", key=f"{key}/0"), last]
        case 2:
            return [calls(call("look", key=f"{key}/0"), call("charge", key=f"{key}/1")), last]
        case 3:
            return [call("look", key=f"{key}/0"), call("charge", key=f"{key}/1"), call("look", key=f"{key}/2"), last]
        case _:
            work = call("look", key=f"{key}/0")
            return [fail("overloaded", times=1, then=work, partial="This begins and does not"), last]


def calls_of(job: str) -> list[tuple[str, str]]:
    """The calls among ``replies(job)``: tool and key."""
    key = job.removeprefix("job ")
    tools = {0: "", 1: "c", 2: "lc", 3: "lcl", 4: "l"}[int(key[-1])]
    return [({"c": "charge", "l": "look"}[letter], f"{key}/{n}") for n, letter in enumerate(tools)]


def script(request: ModelRequest) -> Reply:
    """A job's replies in turn; words, to whatever comes after them."""
    job, given, done = "", 0, True
    for message in request.messages:
        if isinstance(message, UserMessage) and message.text.startswith("job"):
            job, given, done = message.text, 0, False
        elif isinstance(message, AssistantMessage):
            done = done or not message.tool_calls
            given += 1
    if done:
        return say("so be it")
    return replies(job)[given]


class Happened(Entry, kind="app.happened"):
    key: str
    what: str


class Tally(Document, kind="app.tally", scope="conversation", history="rewindable", fork="as_of"):
    n: int = 0
    begun: list[str] = field(default_factory=list)


class Ship(Task[str, str], kind="app.ship"):
    """An effect between commits, a sleep, and an entry and a document with each move."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def start(self, run: Run[str, str, None]) -> Next[str]:
        note(self.folder / "shipped", f"{run.input} {run.idempotency_key}")
        for n in range(6):
            tell(shipped=run.input, step=n)
            await asyncio.sleep(0)
        async with run.commit() as tx:
            tx.append(Happened(key=run.input, what="shipped"))
            (await tx.draft(Tally)).n += 1
            return tx.sleep(tx.at + 1, self.arrive, run.idempotency_key)

    async def arrive(self, run: Run[str, str, str]) -> Next[str]:
        assert run.checkpoint == run.idempotency_key
        async with run.commit() as tx:
            tx.append(Happened(key=run.input, what="arrived"))
            (await tx.draft(Tally)).n += 1
            return tx.complete(run.input)


async def ship_once(conversation: Conversation, key: str) -> None:
    """Begin a task unless it was begun: what was is in the document that the same commit changes."""
    async with conversation.commit() as tx:
        tally = await tx.draft(Tally)
        if key not in tally.begun:
            tally.begun.append(key)
            tally.n += 1
            tx.append(Happened(key=key, what="begun"))
            tx.create_task(Ship, key)


async def converse(conversation: Conversation, name: str, kinds: list[int]) -> None:
    for number, kind in enumerate(kinds):
        job = f"job {name}.{number}.{kind}"
        submission = await conversation.submit(job, request_id=job)
        tell(admitted=submission.id, request_id=job)
        steer = await conversation.submit(f"steer {job}", mode="steer", request_id=f"steer {job}")
        tell(admitted=steer.id, request_id=f"steer {job}")
        await ship_once(conversation, f"{name}.{number}")
        written = await conversation.write(Note(text=f"note {job}"), request_id=f"note {job}")
        tell(admitted=written.id, request_id=f"note {job}")
        if number % 2:
            # The next job is queued behind this one.
            continue
        found = await submission.answer()
        tell(answered=submission.id, entry=found.entry.id, text=found.text)
    await conversation.idle()


async def take_a_while(call: ToolCall) -> None:
    """Where most kills are to hit: what the call is for is done, and nobody has heard of it yet."""
    for n in range(12):
        call.output(f"step {n}\n")
        tell(call=call.id, step=n)
        await asyncio.sleep(0)


async def main(folder: Path, seed: str) -> None:
    @tool(name="charge")
    async def charge(key: str, call: ToolCall) -> str:
        """Must not be done twice."""
        note(folder / "charged", f"{key} {call.idempotency_key}")
        await take_a_while(call)
        return f"charged {key}"

    @tool(name="look", replay="safe")
    async def look(key: str, call: ToolCall) -> str:
        """May be done again."""
        note(folder / "looked", f"{key} {call.idempotency_key}")
        await take_a_while(call)
        return f"looked at {key}"

    async def pace(request: ModelRequest, event: int) -> None:
        tell(event=event)
        await asyncio.sleep(0)

    async def find(harness: Harness, name: str) -> Conversation:
        for info in await harness.conversations():
            if info.name == name:
                return harness.handle(info.id)
        return await harness.create_conversation(name=name)

    async with opened(
        folder / "agent.db",
        ScriptedModel(script, pace=pace),
        tools=(charge, look),
        tasks=(Ship(folder),),
        retry=RetryPolicy(first_ms=1, jitter=0.0),
        partial_interval_ms=1,
        # It is killed far more often than anything that is to be trusted again would be.
        restart_limit=1_000,
    ) as harness:
        tell(opened=harness.session.seq)
        harness.session.observe(lambda settled: tell(commit=settled.seq))
        conversations = [await find(harness, name) for name in CONVERSATIONS]
        jobs = plan(seed)
        async with asyncio.TaskGroup() as group:
            for name, conversation in zip(CONVERSATIONS, conversations, strict=True):
                group.create_task(converse(conversation, name, jobs[name]))
        await harness.idle()
    tell(finished=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
