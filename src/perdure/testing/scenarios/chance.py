"""Programs drawn from a seed: trees of tasks, and conversations that many people talk into at once.

What they come to depends on chance, and in part on timing, so most are held against the invariants alone, and against
what can be said of any such program.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Literal, cast, get_args

import msgspec

from perdure.harness.context import NO_RESULT, ModelContext
from perdure.harness.conversation import Conversation
from perdure.harness.documents import ASSISTANT, COMPACTION, TOOL_RESULT, USER, CompactionData
from perdure.harness.hooks import (
    Block,
    Hook,
    HookAnswer,
    HookCall,
    HookRequest,
    HookResponse,
    HookRound,
    RequestChange,
    Stop,
    after_response,
    after_tool,
    after_tools,
    before_request,
    before_tool,
    gate_request,
    on_yield,
)
from perdure.harness.inbox import InputMode
from perdure.harness.messages import (
    AssistantMessage,
    SystemMessage,
    ToolResultMessage,
    Usage,
    decode_messages,
    encode_messages,
)
from perdure.harness.model import ModelRequest
from perdure.harness.settings import AfterFailure
from perdure.harness.tokens import tokens_of
from perdure.harness.tool import ToolResult
from perdure.kernel.records import ROOT_CONVERSATION, Aborted, Completed, EntryRecord, TaskRecord
from perdure.tasks import Next, Run, Task, TaskEnded
from perdure.testing.model import Call, Fail, Reply, Script, call, calls, fail, say
from perdure.testing.normal import Records, Rules
from perdure.testing.scenarios.hosting import Remark, asks_for_summary, launch, measure, open_harness, user_texts
from perdure.testing.scenarios.kernel import once
from perdure.testing.scenarios.tasks import Said, open_tasks, text_of
from perdure.testing.simulation import Host, Scenario

Act = Literal["end", "sleep", "think", "ask", "fail", "raise"]
Wait = Literal["all_settled", "fail_fast", "none"]

HOUR = 3_600_000
MAX_NODES = 14
MOST_NUDGES = 20
CROWD = 500
"""Tokens of the window of a model that soon has no room."""
CLIENTS = 3
"""People who talk into one conversation."""


# --- trees of tasks --------------------------------------------------------------------------------------------


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """What one task of a tree does, and what it owns."""

    path: str
    act: Act = "end"
    wait: Wait = "all_settled"
    apart: bool = False
    """Its children are in a conversation that it owns."""
    children: tuple[Node, ...] = ()


def draw_tree(chance: random.Random, *, calm: bool) -> Node:
    """``calm``: nothing whose end depends on who is first."""
    left = MAX_NODES
    acts: list[Act] = ["end", "end", "sleep", "think", "ask", "fail", "raise"]

    def draw(path: str, depth: int) -> Node:
        nonlocal left
        left -= 1
        count = chance.randint(1, 3) if depth < 3 and (depth == 0 or chance.random() < 0.5) else 0
        children = tuple(draw(f"{path}{number}", depth + 1) for number in range(count) if left > 0)
        apart = bool(children) and chance.random() < 0.3
        waits: list[Wait] = ["all_settled", "all_settled", "none"]
        if not calm and not apart:
            waits.append("fail_fast")
        wait = chance.choice(waits)
        # A parent that ends otherwise than completed aborts what it still owns, and how far that has come is timing.
        quiet: list[Act] = ["end", "sleep", "think"]
        act = chance.choice(acts if not children or not calm else quiet)
        if children and act == "ask":
            act = "end"
        return Node(path=path, act=act, wait=wait, apart=apart, children=children)

    return draw("n", 0)


def node_task(host: Host) -> type[Task[Node, str]]:
    class Walk(Task[Node, str], kind="app.walk"):
        async def start(self, run: Run[Node, str, None]) -> Next[str]:
            node = run.input
            if node.act == "think":
                await host.clock.sleep(0.3)
            async with run.commit() as tx:
                place = tx.create_conversation(owner=run.id).id if node.apart else None
                ids = [
                    tx.create_task(Walk, child, owner=None if node.apart else run.id, conversation=place).id
                    for child in node.children
                ]
                if ids and node.wait != "none":
                    return tx.wait(ids, self.act, None, policy=node.wait)
                return tx.go(self.act, None)

        async def act(self, run: Run[Node, str, None]) -> Next[str]:
            node = run.input
            host.effect(f"did {node.path}", key=run.idempotency_key)
            if node.act == "raise":
                raise ValueError("on purpose")
            async with run.commit() as tx:
                if node.act == "fail":
                    return tx.fail("own_word", "on purpose")
                if node.act == "sleep":
                    return tx.sleep(tx.at + HOUR, self.end, None)
                if node.act == "ask":
                    return tx.wait_signal("answer", self.end, None, deadline=tx.at + HOUR)
                return tx.go(self.end, None)

        async def end(self, run: Run[Node, str, None]) -> Next[str]:
            async with run.commit() as tx:
                tx.append(Said(text=f"did {run.input.path}"), conversation=ROOT_CONVERSATION)
                return tx.complete(run.input.path)

        async def on_abort(self, run: Run[Node, str, object], /) -> Next[str]:
            host.effect(f"undid {run.input.path}", key=f"undo {run.idempotency_key}")
            async with run.commit() as tx:
                tx.append(Said(text=f"undid {run.input.path}"), conversation=ROOT_CONVERSATION)
                return tx.abort("undone")

    return Walk


async def plant(host: Host, tree: Node, walk: type[Task[Node, str]], session: Any) -> int:
    async with session.commit(conversation_id=ROOT_CONVERSATION) as tx:
        if await once(tx, "plant"):
            return tx.create_task(walk, tree).id
    (found,) = [record for record in await session.tasks(kind=walk.kind) if record.input["path"] == "n"]
    return found.id


async def calm_tree(host: Host) -> None:
    """A tree of tasks that is left alone: whatever is killed, it comes to the same end."""
    walk = node_task(host)
    tree = draw_tree(random.Random(f"calm tree {host.seed}"), calm=True)  # noqa: S311
    async with open_tasks(host, walk) as (session, runtime):
        await runtime.wait(await plant(host, tree, walk, session))


async def wild_tree(host: Host) -> None:
    """A tree of tasks of which some fail, some are waited for fail_fast, and some are aborted or asked meanwhile."""
    walk = node_task(host)
    chance = random.Random(f"wild tree {host.seed}")  # noqa: S311
    tree = draw_tree(chance, calm=False)
    deeds = [(chance.random() * 2, chance.choice(["abort", "signal"]), chance.random()) for _ in range(4)]
    aborts_all = chance.random() < 0.2
    async with open_tasks(host, walk) as (session, runtime):
        id = await plant(host, tree, walk, session)
        for delay, deed, lot in deeds:
            await host.clock.sleep(delay)
            live = sorted(session.live.settled)
            if live:
                target = live[int(lot * len(live))]
                if deed == "abort":
                    await runtime.abort_task(target)
                else:
                    try:
                        await runtime.send_signal(target, "answer", "so be it")
                    except TaskEnded:
                        continue
        if aborts_all:
            await runtime.abort_conversation(ROOT_CONVERSATION)
        await runtime.wait(id)
        await runtime.idle()


def said_what_it_did(records: Records) -> Iterator[str]:
    """What a task wrote with its outcome is there exactly if that was its outcome."""
    said = Counter(Said.read(entry).text for entry in records.of(Said.kind))
    for task in records.tasks:
        path = _path(task)
        outcome = task.outcome
        done, undone = said[f"did {path}"], said[f"undid {path}"]
        if done != isinstance(outcome, Completed) or undone != (isinstance(outcome, Aborted)):
            yield f"{path} ended {outcome and text_of(outcome)}, and its entries say did {done} undid {undone}"


def _path(task: TaskRecord) -> str:
    return str(cast("dict[str, Any]", task.input)["path"])


# --- conversations ---------------------------------------------------------------------------------------------


def chatter(request: ModelRequest, mark: str | None = None) -> Reply:
    """Says what it was told since it last spoke; by what that is, it calls tools first, or fails. ``mark`` tells its
    calls from those of other requests; None: by how many messages it was sent."""
    mark = mark or str(len(request.messages))
    said = user_texts(request)
    told = said[-1]
    results = sum(isinstance(message, ToolResultMessage) for message in request.messages)
    answered = sum(isinstance(m, AssistantMessage) and not m.tool_calls for m in request.messages)
    asked = sum(isinstance(m, AssistantMessage) and bool(m.tool_calls) for m in request.messages)
    wish = told.rpartition(" ")[2]
    if wish == "measure" and asked <= answered:
        return calls(
            call("measure", place=f"{mark} after {told}", seconds=1),
            call("measure", place=f"{mark} besides {told}"),
        )
    if wish == "launch" and asked <= answered:
        return call("launch", rocket=f"{mark} after {told}")
    if wish == "retry":
        return fail("overloaded", times=1, partial="let me", then=say(" / ".join(said)))
    if wish == "fail":
        return fail("malformed", "on purpose")
    return say(" / ".join(said) + f" ({results} results)")


async def talk(
    host: Host,
    hooks: Sequence[Hook] = (),
    *,
    script: Script = chatter,
    window: int = 1_000_000,
    further: Sequence[str] = (),
) -> None:
    """Several people talk into a conversation at once, each in their own time: inputs of every mode, writes, resets,
    withdrawals; and now and then somebody aborts it all."""
    chance = random.Random(f"talk {host.seed}")  # noqa: S311
    wishes = ["", "", "measure", "launch", "retry", "fail"]

    async def client(name: str, root: Conversation, deeds: list[tuple[float, str, str]]) -> None:
        for number, (delay, deed, wish) in enumerate(deeds):
            await host.clock.sleep(delay)
            label = f"{name}{number}"
            if deed == "write":
                await root.write(Remark(text=label), request_id=label)
            elif deed == "reset":
                await root.reset(f"reset {label}", request_id=label)
            elif deed == "abort":
                if label not in host.notes:
                    host.notes[label] = True
                    await root.abort()
            elif deed == "compact":
                await root.compact(f"for {label}")
            elif deed == "withdraw":
                submission = await root.submit(f"withdraw {label} ", request_id=label)
                await submission.abort()
            else:
                mode = cast("InputMode", deed)
                submission = await root.submit(f"{mode} {label} {wish}", mode=mode, request_id=label)
                if chance_of(label) < 0.5:
                    # A run that failed leaves its queue as it is, so this may wait until the next input.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(5):
                            await submission.wait()

    def chance_of(label: str) -> float:
        return random.Random(f"{host.seed} {label}").random()  # noqa: S311

    deeds = ["follow_up", "follow_up", "steer", "steer", "write", "reset", "withdraw", "abort", *further]
    plans = [
        [(chance.random() * 3, chance.choice(deeds), chance.choice(wishes)) for _ in range(3)] for _ in range(CLIENTS)
    ]
    after_failure = chance.choice(get_args(AfterFailure))
    tools = [measure(host), launch(host)]
    async with open_harness(host, script, tools=tools, hooks=hooks, after_failure=after_failure, window=window) as (
        harness,
        root,
    ):
        async with asyncio.TaskGroup() as group:
            for name, plan in zip("abc", plans, strict=True):
                group.create_task(client(name, root, plan))
        await harness.idle()
        # What a failed run left in the queue goes on with the next input, until that fails too.
        for number in range(MOST_NUDGES):
            if number and not (await harness.inspect()).queued:
                break
            await root.submit(f"follow_up last {number} ", request_id=f"last {number}")
            await harness.idle()
        for task in list(harness.session.live.settled):
            await harness.wait_task(task)


async def meddled_talk(host: Host) -> None:
    """The same, with hooks of every kind that take their time, stop requests, block calls and continue runs; what they
    decide depends on what they are asked, so that it is the same in every life."""

    def lot(*asked: object) -> float:
        return random.Random(f"{host.seed} {asked}").random()  # noqa: S311

    @before_request
    async def remind(asked: HookRequest) -> RequestChange | None:
        await host.clock.sleep(0.02)
        return RequestChange(add=[SystemMessage("Mind the time.")]) if lot("add", asked.turn) < 0.5 else None

    @gate_request
    async def gate(asked: HookRequest) -> Stop | None:
        await host.clock.sleep(0.02)
        return Stop("by chance") if lot("stop", user_texts(asked.request), asked.turn) < 0.1 else None

    @after_response
    async def read(_asked: HookResponse) -> None:
        await host.clock.sleep(0.02)

    @on_yield
    async def more(asked: HookAnswer) -> str | None:
        await host.clock.sleep(0.2)
        if asked.continued == 2 or lot("more", asked.message.text) < 0.5:
            return None
        return f"and then {asked.id} {asked.continued} {'measure' if lot('tool', asked.message.text) < 0.5 else ''}"

    @after_tools
    async def note(round: HookRound) -> None:
        await host.clock.sleep(0.2)
        for ended in round.calls:
            assert ended.call.id == ended.result.call_id

    @before_tool
    async def check(asked: HookCall) -> Block | None:
        await host.clock.sleep(0.02)
        return Block("by chance") if lot("block", asked.arguments) < 0.2 else None

    @after_tool
    async def look(_asked: HookCall, _result: ToolResult) -> None:
        await host.clock.sleep(0.02)

    every: list[Hook] = [remind, gate, read, more, note, check, look]
    await talk(host, [hook for hook in every if lot("installed", hook.point) < 0.7])


async def crowded_talk(host: Host) -> None:
    """The same with a model that soon has no room: contexts are compacted beside runs, before requests, after overflows
    and by whoever asks; summaries fail, do not help, or are too long to be asked for."""

    least = random.Random(f"crowd {host.seed}").randint(CROWD // 2, CROWD)  # noqa: S311

    def summary(request: ModelRequest) -> Reply:
        (asked,) = user_texts(request)
        lot = random.Random(f"{host.seed} {len(asked)}").random()  # noqa: S311
        told = say("So much for that.", usage=Usage(input=tokens_of(request.messages), output=10))
        if lot < 0.1:
            return fail("refused", "on purpose")
        if lot < 0.2:
            return fail("overloaded", times=1, then=told)
        if lot < 0.3:
            return fail("overflow", "on purpose") if len(asked) > CROWD else told
        return say(asked, chunk=0) if lot < 0.4 else told

    def script(request: ModelRequest) -> Reply:
        if asks_for_summary(request):
            return summary(request)
        takes = tokens_of(request.messages)
        if takes > least:
            return fail("overflow", "on purpose")
        # A context that was compacted may be as long as one before.
        reply = chatter(request, sha256(encode_messages(request.messages)).hexdigest()[:12])
        if isinstance(reply, Call):
            reply = calls(reply)
        if isinstance(reply, Fail):
            return reply
        return replace(reply, usage=Usage(input=takes, output=10))

    await talk(host, script=script, window=CROWD, further=["compact", "compact"])


REASONS = frozenset({"aborted", "gate", "reset", "model_error", "run_failed", "stale"})


def answers_fit(records: Records) -> Iterator[str]:
    """Of each input: it became one entry, in the order of its mode, and its answer comes after it and tells of it."""
    entries = {entry.id: entry for entry in records.entries}
    order: dict[str, int] = {}
    inputs = [s for s in records.submissions if s.type == "input"]
    for submission in inputs:
        label = f"input {submission.id} ({submission.request_id})"
        if submission.status == "unanswered" and submission.reason not in REASONS:
            yield f"{label} ended {submission.reason}"
        if submission.entry is None:
            continue
        entry = entries[submission.entry]
        text = decode_messages(entry.raw_messages)[0].text
        mode = text.partition(" ")[0]
        if entry.kind != USER:
            yield f"{label} became a {entry.kind}"
        if order.get(mode, 0) > entry.id:
            yield f"{label} was placed before an earlier one of its mode"
        order[mode] = entry.id
        if submission.status == "done":
            answer = entries[cast("int", submission.answer)]
            said = decode_messages(answer.raw_messages)[-1]
            if answer.kind != ASSISTANT or answer.id <= entry.id or text not in getattr(said, "text", ""):
                yield f"{label} is answered by entry {answer.id}, which does not tell of it"
    # Those of a task are the words of a hook.
    said = [entry for entry in records.of(USER) if entry.by_task is None]
    if len(said) != sum(s.entry is not None for s in inputs):
        yield "there are user entries that nobody submitted, or some that are missing"


def results_fit(records: Records) -> Iterator[str]:
    """A result that is no error is of the call's own arguments."""
    tasks = {task.id: task for task in records.tasks}
    for entry in records.of(TOOL_RESULT):
        (message,) = decode_messages(entry.raw_messages)
        input = cast("dict[str, Any]", tasks[entry.by_task or 0].input)
        named = next(iter(input["arguments"].values()))
        if isinstance(message, ToolResultMessage) and not message.is_error and not message.text.startswith(named):
            yield f"the result of call {entry.by_task} is of another one"


def compactions_fit(records: Records) -> Iterator[str]:
    """Each was placed once, by a task that completed; none reaches back before another, none separates a result from
    its call."""
    tasks = {task.id: task for task in records.tasks}
    wrote: Counter[int] = Counter()
    for conversation in records.conversations:
        own = [entry for entry in records.entries if entry.conversation_id == conversation.id]
        begins = 0
        marker: EntryRecord | None = None
        for entry in own:
            if entry.head is None:
                continue
            if entry.head < begins:
                yield f"entry {entry.id} reaches back before entry {begins}, where the context began"
            begins, marker = entry.head, entry
            if entry.kind == COMPACTION:
                wrote[entry.data_as(CompactionData).task] += 1
        context = ModelContext(marker)
        for entry in own:
            if entry.id >= begins:
                context.feed(entry)
        shown = [m for m in context.messages() if isinstance(m, ToolResultMessage) and m.text != NO_RESULT]
        stored = [entry for entry in own if entry.id >= begins and entry.kind == TOOL_RESULT]
        if len(shown) != len(stored):
            yield f"of {len(stored)} results since entry {begins} the model sees {len(shown)}"
    for id, times in wrote.items():
        if times > 1:
            yield f"compaction {id} was placed {times} times"
        # One that waited for a boundary was placed after its task had ended.
        outcome = tasks[id].outcome
        if not isinstance(outcome, Completed):
            yield f"compaction {id} was placed, and ended {text_of(outcome) if outcome else 'not at all'}"


def crowded(records: Records) -> Iterator[str]:
    yield from results_fit(records)
    yield from compactions_fit(records)


def talked(records: Records) -> Iterator[str]:
    yield from answers_fit(records)
    yield from results_fit(records)


CHANCE = (
    Scenario(
        name="calm-tree",
        program=calm_tree,
        rules=Rules(unordered=frozenset({Said.kind})),
        any_effects=True,
        reports=frozenset({"task_faulted"}),
        always=said_what_it_did,
    ),
    Scenario(
        name="wild-tree",
        program=wild_tree,
        any_effects=True,
        steady=False,
        reports=frozenset({"task_faulted"}),
        always=said_what_it_did,
    ),
    Scenario(
        name="talk",
        program=talk,
        rules=Rules(unsafe=frozenset({"launch"})),
        any_effects=True,
        steady=False,
        always=talked,
    ),
    Scenario(
        name="meddled-talk",
        program=meddled_talk,
        rules=Rules(unsafe=frozenset({"launch"})),
        any_effects=True,
        steady=False,
        always=talked,
    ),
    Scenario(
        name="crowded-talk",
        program=crowded_talk,
        rules=Rules(unsafe=frozenset({"launch"})),
        any_effects=True,
        steady=False,
        reports=frozenset({"compaction_failed"}),
        always=crowded,
    ),
)
