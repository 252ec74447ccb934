"""What compaction promises: one summary for one need, whatever is cut off when (chapter 3 of the rules)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from perdure.harness.compaction_policy import Compaction
from perdure.harness.conversation import Conversation
from perdure.harness.documents import COMPACTION as ENTRY
from perdure.harness.documents import RESET
from perdure.harness.harness import Harness
from perdure.harness.hooks import Decline, HookCompaction, Summary, before_compact
from perdure.harness.messages import ToolResultMessage, Usage
from perdure.harness.model import ModelRequest
from perdure.harness.summary import PREAMBLE
from perdure.kernel.records import Completed, TaskRecord
from perdure.testing.model import Reply, call, fail, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import (
    Fact,
    asks_for_summary,
    effects,
    ends,
    measure,
    open_harness,
    scenario,
    user_texts,
)
from perdure.testing.simulation import Host

UNTOLD = Usage()
"""So that the context is estimated: it grows by what it holds, not by what a script says."""
WINDOW = 2_000
"""Tokens: a run waits above 1,500, a background compaction begins above 1,000, 500 stay."""
WAITING = Compaction(background_tokens=0)
WORDS = "fact " * 400
"""About 500 tokens."""
KIND = "pi.compaction"


def scripted(reply: Callable[[ModelRequest], Reply], summary: Reply | None = None) -> Callable[[ModelRequest], Reply]:
    """Requests for summaries get ``summary``, others what ``reply`` says."""

    def script(request: ModelRequest) -> Reply:
        if asks_for_summary(request):
            return summary or say("Facts were told.", usage=UNTOLD)
        return reply(request)

    return script


def summarised(request: ModelRequest) -> bool:
    return any(text.startswith(PREAMBLE) for text in user_texts(request))


def tells(request: ModelRequest) -> Reply:
    """Says whether it was shown a summary."""
    return say("shortened" if summarised(request) else "whole", usage=UNTOLD)


def measures(request: ModelRequest) -> Reply:
    """Asked to go, it calls a tool that takes a while; then it tells."""
    if user_texts(request)[-1] != "go" or any(isinstance(message, ToolResultMessage) for message in request.messages):
        return tells(request)
    return call("measure", place="here", seconds=3)


async def facts(root: Conversation, count: int) -> None:
    for number in range(count):
        await (await root.write(Fact(text=f"{number} {WORDS}"), request_id=f"fact-{number}")).wait()


async def answered(root: Conversation, text: str) -> str:
    return (await (await root.submit(text, request_id=text)).answer()).text


async def begun(harness: Harness, root: Conversation) -> list[TaskRecord]:
    return await harness.session.tasks(conversation_id=root.id, kind=KIND)


async def compacted(harness: Harness, root: Conversation) -> None:
    """Compact once, whatever was cut off, and wait for it."""
    if not await begun(harness, root):
        await root.compact("Keep the numbers.")
    for task in await begun(harness, root):
        await harness.wait_task(task.id)


# --- programs --------------------------------------------------------------------------------------------------


async def compaction_waited_for(host: Host) -> None:
    """A request that would leave no room waits for a summary."""
    async with open_harness(host, scripted(tells), compaction=WAITING, window=WINDOW) as (_, root):
        await facts(root, 4)
        assert await answered(root, "go") == "shortened"
        assert await answered(root, "on") == "shortened"


async def compaction_beside(host: Host) -> None:
    """A summary is made while the run goes on, and placed at a boundary or after the run."""
    script = scripted(measures)
    async with open_harness(host, script, tools=[measure(host)], window=WINDOW) as (harness, root):
        await facts(root, 3)
        await answered(root, "go")
        for task in await begun(harness, root):
            await harness.wait_task(task.id)
        assert await answered(root, "on") == "shortened"


async def compaction_overflow(host: Host) -> None:
    """A provider finds the request too long: a summary is made, and it is sent once more."""

    def short(request: ModelRequest) -> Reply:
        return say("shortened", usage=UNTOLD) if summarised(request) else fail("overflow", "too long")

    policy = Compaction(keep_recent_tokens=600)
    async with open_harness(host, scripted(short), compaction=policy) as (_, root):
        await facts(root, 3)
        assert await answered(root, "go") == "shortened"


async def compaction_by_hand(host: Host) -> None:
    """Somebody asks for it while the conversation is idle."""
    async with open_harness(host, scripted(tells), compaction=WAITING, window=WINDOW) as (harness, root):
        await facts(root, 2)
        await compacted(harness, root)
        assert await answered(root, "go") == "shortened"


async def compaction_by_hand_busy(host: Host) -> None:
    """Somebody asks for it in the middle of a run."""
    script = scripted(measures)
    async with open_harness(host, script, tools=[measure(host)], compaction=WAITING, window=WINDOW) as (harness, root):
        await facts(root, 2)
        go = await root.submit("go", request_id="go")
        await compacted(harness, root)
        await go.answer()
        assert await answered(root, "on") == "shortened"


async def compaction_stale(host: Host) -> None:
    """A reset is placed before the summary that was asked for: nothing comes of that."""
    script = scripted(measures)
    async with open_harness(host, script, tools=[measure(host)], compaction=WAITING, window=WINDOW) as (harness, root):
        await facts(root, 2)
        go = await root.submit("go", request_id="go")
        reset = await root.reset("anew", request_id="reset")
        await compacted(harness, root)
        await reset.wait()
        await go.wait()
        assert await answered(root, "on") == "whole"


async def compaction_retried(host: Host) -> None:
    """The model is busy when it is asked for a summary, twice."""
    busy = fail("overloaded", "busy", times=2, then=say("Facts were told.", usage=UNTOLD))
    script = scripted(tells, busy)
    async with open_harness(host, script, compaction=WAITING, window=WINDOW) as (_, root):
        await facts(root, 4)
        assert await answered(root, "go") == "shortened"


async def compaction_failing(host: Host) -> None:
    """No summary is to be had: each run tries once, and goes on without."""
    script = scripted(tells, fail("refused", "no"))
    async with open_harness(host, script, compaction=WAITING, window=WINDOW) as (_, root):
        await facts(root, 4)
        assert await answered(root, "go") == "whole"
        assert await answered(root, "on") == "whole"


async def compaction_ineffective(host: Host) -> None:
    """A summary that is longer than what it stands for ends the run."""
    script = scripted(tells, say(WORDS * 8, chunk=0, usage=UNTOLD))
    async with open_harness(host, script, compaction=WAITING, window=WINDOW) as (_, root):
        await facts(root, 4)
        await ends(await root.submit("go", request_id="go"), "model_error")


async def compaction_declined(host: Host) -> None:
    """A hook declines."""

    @before_compact
    async def no(compaction: HookCompaction) -> Decline:
        return Decline("not now")

    async with open_harness(host, scripted(tells), hooks=[no], compaction=WAITING, window=WINDOW) as (_, root):
        await facts(root, 4)
        assert await answered(root, "go") == "whole"


async def compaction_supplied(host: Host) -> None:
    """A hook writes the summary."""

    @before_compact
    async def mine(compaction: HookCompaction) -> Summary:
        return Summary(f"{len(compaction.messages)} facts were told.")

    async with open_harness(host, scripted(tells), hooks=[mine], compaction=WAITING, window=WINDOW) as (_, root):
        await facts(root, 4)
        assert await answered(root, "go") == "shortened"


# --- what is expected ------------------------------------------------------------------------------------------


def once(records: Records) -> Iterator[str]:
    """One task, one entry, and that task wrote it."""
    tasks = [task for task in records.tasks if task.kind == KIND]
    if [type(task.outcome) for task in tasks] != [Completed]:
        yield f"compactions ended {[task.outcome for task in tasks]}, and one was to complete"
    if len(records.of(ENTRY)) != 1:
        yield f"{len(records.of(ENTRY))} compactions were placed"


def never(records: Records) -> Iterator[str]:
    resets = [entry.id for entry in records.of(RESET)]
    for entry in records.of(ENTRY):
        if any(entry.id > reset for reset in resets):
            yield f"compaction {entry.id} was placed behind a reset that its cut lies before"


HERE = effects("measure here")

COMPACTION = (
    scenario(compaction_waited_for, ends=once),
    scenario(compaction_beside, safe=HERE, ends=once, steady=False),
    scenario(compaction_overflow, ends=once),
    scenario(compaction_by_hand, ends=once),
    scenario(compaction_by_hand_busy, safe=HERE, ends=once, steady=False),
    scenario(compaction_stale, safe=HERE, ends=never, steady=False),
    scenario(compaction_retried, ends=once),
    scenario(compaction_failing, reports=effects("compaction_failed")),
    scenario(compaction_ineffective, reports=effects("compaction_failed")),
    scenario(compaction_declined),
    scenario(compaction_supplied, ends=once),
)
