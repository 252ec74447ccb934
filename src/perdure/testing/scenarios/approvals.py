"""What approvals promise: a question outlives every crash, a decision is used once, nothing runs without one
(rules H110 to H114, H300 to H308)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import cast

import msgspec

from perdure.harness.approval import APPROVAL, ApprovalRefused, Approvals, Decision
from perdure.harness.approval_rules import ApprovalRule, ApprovalRules, ArgumentBelow, ArgumentIs
from perdure.harness.approvals import Approval
from perdure.harness.documents import TOOL_RESULT, ToolInput, ToolResultData
from perdure.harness.handle import ToolCall
from perdure.harness.harness import Harness
from perdure.harness.messages import decode_messages
from perdure.harness.scopes import TOOL_TASK, stored_intent
from perdure.harness.submission import Submission
from perdure.harness.tool import AnyTool, ReplayPolicy, tool
from perdure.kernel.errors import NotFound
from perdure.kernel.json import JsonValue
from perdure.kernel.records import EntryRecord, Terminal
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import Reply, call, calls, say
from perdure.testing.normal import Records, Rules
from perdure.testing.scenarios.hosting import effects, launch, measure, open_harness, over_within, scenario
from perdure.testing.simulation import Host, Scenario

ASKS = Approvals(tools=("launch", "m*"))

Decide = Callable[[Approval], Awaitable[object]]


async def answered(host: Host, harness: Harness, submission: Submission, decide: Decide | None) -> None:
    """Somebody looks every second at what is asked, until the input has its answer."""
    harness.resume()
    while await submission.status() not in ("done", "unanswered"):
        await host.clock.sleep(1)
        for approval in await harness.approvals():
            if decide is not None:
                await decide(approval)
    assert (await submission.answer()).text == "done"


async def allow(approval: Approval) -> None:
    assert await approval.allow(by="ada") is True


async def deny(approval: Approval) -> None:
    """One is denied, and the model goes on with that; a decision that comes second changes nothing."""
    if approval.tool == "measure":
        await allow(approval)
        return
    assert await approval.deny("not today") is True
    with suppress(ApprovalRefused):  # where the call has ended already
        assert await approval.allow() is False


async def edit(approval: Approval) -> None:
    """One is allowed with other arguments: those run, under the key of the call, and the result says so."""
    if approval.tool == "measure":
        await approval.allow(arguments={"place": "sea"})
    else:
        await approval.allow(arguments={"rocket": "two"})


def both() -> list[Reply]:
    return [calls(call("launch", rocket="one"), call("measure", place="sky", seconds=1)), say("done")]


def decided(decide: Decide | None, policy: Approvals = ASKS) -> Callable[[Host], Awaitable[None]]:
    """Two calls of a round are asked about, and somebody decides, or nobody."""

    async def program(host: Host) -> None:
        tools = [launch(host), measure(host)]
        async with open_harness(host, both(), tools=tools, approvals=policy) as (harness, root):
            await answered(host, harness, await root.submit("Go.", request_id="go"), decide)

    return program


async def approval_pending(host: Host) -> None:
    """Nobody decides for an hour; what else is said meanwhile waits, and is answered after."""
    tools = [launch(host), measure(host)]
    replies = {"Go.": both(), "And then?": say("then")}
    async with open_harness(host, replies, tools=tools, approvals=ASKS) as (harness, root):
        submission = await root.submit("Go.", request_id="go")
        later = await root.submit("And then?", request_id="then")

        async def late(approval: Approval) -> None:
            if host.clock.wall() - approval.asked_at > 3_600_000:
                await allow(approval)
            else:
                assert await later.status() == "queued", "the run is busy until then"
                await host.clock.sleep(600)

        await answered(host, harness, submission, late)
        assert (await later.answer()).text == "then"


def says_so(records: Records) -> Iterator[str]:
    """The model is told with what each call ran."""
    for text in result_texts(records):
        if '"sea"' not in text and '"two"' not in text:
            yield f"a result says nothing of the edit: {text}"


async def approval_too_late(host: Host) -> None:
    """One is allowed in time, and its host comes back too late to use that; about the other one somebody decides too
    late. Neither runs."""
    asks = Approvals(tools=("*",), expire_after_ms=5_000)
    tools = [launch(host), measure(host)]
    async with open_harness(host, both(), tools=tools, approvals=asks) as (harness, root):
        pending = await harness.approvals()  # nothing runs yet
        for approval in pending:
            if approval.tool == "launch":
                await allow(approval)
        if pending:
            await host.clock.sleep(10)
        for approval in pending:
            try:
                taken = await approval.allow()
            except ApprovalRefused as error:
                taken = error.reason != "expired"
            assert not taken, f"a decision about {approval.tool} was taken too late, or refused for another reason"
        submission = await root.submit("Go.", request_id="go")
        harness.resume()
        while await submission.status() != "done":
            await host.clock.sleep(1)
            if await harness.approvals():
                host.die()


async def approval_unconsumed(host: Host) -> None:
    """Whoever decides ends before anything runs: the decision is used by the next process, which asks nobody again."""
    tools = [launch(host), measure(host)]
    async with open_harness(host, both(), tools=tools, approvals=ASKS) as (harness, root):
        pending = await harness.approvals()
        for approval in pending:  # nothing runs yet
            await allow(approval)
        if pending:
            host.die()
        submission = await root.submit("Go.", request_id="go")
        while await submission.status() != "done":
            await host.clock.sleep(1)
            if await harness.approvals():
                host.die()


async def approval_rules(host: Host) -> None:
    """Rules decide in place of a person: one allows, one denies; a call that none fits is asked about."""
    round = calls(
        call("measure", place="lab/one"),
        call("measure", place="lab/../vault"),
        call("measure", place="garden", seconds=1),
        call("launch", rocket="one"),
    )
    tools = [launch(host), measure(host)]
    async with open_harness(host, [round, say("done")], tools=tools, approvals=ASKS) as (harness, root):
        known = {rule.note for rule in await harness.approval_rules()}
        for rule in (
            ApprovalRule(tool="measure", arguments={"place": ArgumentBelow("lab")}, note="lab", by="ada"),
            ApprovalRule(tool="measure", arguments={"place": ArgumentBelow("vault")}, effect="deny", note="no vault"),
            ApprovalRule(tool="launch", arguments={"rocket": ArgumentIs("one")}, only=True, note="one"),
        ):
            if rule.note not in known:
                await harness.add_approval_rule(rule)

        async def garden(approval: Approval) -> None:
            assert approval.arguments == {"place": "garden", "seconds": 1}
            await allow(approval)

        await answered(host, harness, await root.submit("Go.", request_id="go"), garden)


async def approval_rule_revoked(host: Host) -> None:
    """The rule that allows a call is revoked while that is prepared: a person is asked, who denies it."""

    @tool(name="launch")
    async def launch(rocket: str) -> str:
        """Launch a rocket."""
        host.effect(f"launch {rocket}")
        return f"{rocket} is away"

    @launch.intent
    async def fuel(rocket: str) -> JsonValue:
        await host.clock.sleep(0.3)
        for rule in await harness.approval_rules():
            await harness.remove_approval_rule(rule.id)
        await host.clock.sleep(0.3)
        return rocket

    replies = [call("launch", rocket="one"), say("done")]
    async with open_harness(host, replies, tools=[launch], approvals=ASKS) as (harness, root):
        if await harness.session.snapshot(ApprovalRules) is None:
            await harness.add_approval_rule(ApprovalRule(tool="launch"))

        async def refuse(approval: Approval) -> None:
            await approval.deny()

        await answered(host, harness, await root.submit("Go.", request_id="go"), refuse)


async def approval_forged(host: Host) -> None:
    """Something is sent in the name of a decision: about other arguments, or another question."""
    tools = [launch(host), measure(host)]
    async with open_harness(host, both(), tools=tools, approvals=ASKS) as (harness, root):

        async def forge(approval: Approval) -> None:
            other = {"digest": "of something else"} if approval.tool == "launch" else {"expires_at": 10**15}
            told = Decision(allow=True, digest=approval.digest, expires_at=approval.expires_at, at=approval.asked_at)
            await harness.send_signal(approval.task, APPROVAL, {**msgspec.to_builtins(told), **other})

        await answered(host, harness, await root.submit("Go.", request_id="go"), forge)


async def approval_by_mail(host: Host) -> None:
    """Other processes decide through the mailbox, each once: the first stands, one about other arguments is refused."""
    store = host.storage.inner
    assert isinstance(store, MemoryStorage), "what another process does to the store is simulated for this one only"

    def post(request: str, body: dict[str, JsonValue]) -> None:
        if request not in host.notes:
            host.notes[request] = store.post("approval", body, now=host.clock.wall())

    async def by_mail(approval: Approval) -> None:
        task, digest = approval.task, approval.digest
        post(f"wrong {task}", {"task": task, "allow": True, "digest": "of something else"})
        post(f"right {task}", {"task": task, "allow": approval.tool == "measure", "digest": digest, "reason": "no"})
        post(f"late {task}", {"task": task, "allow": True, "digest": digest})

    tools = [launch(host), measure(host)]
    async with open_harness(host, both(), tools=tools, approvals=ASKS) as (harness, root):
        await answered(host, harness, await root.submit("Go.", request_id="go"), by_mail)
        for request, mail in host.notes.items():
            reply = store.reply(cast("int", mail))
            assert reply is not None, f"nobody answered the mail {request!r}"
            assert reply.ok == (not request.startswith("wrong")) or request.startswith("late"), request


async def decided_by_chance(host: Host) -> None:
    """Several people decide at once and without a plan, rules come and go, and the run may be aborted: what was not
    allowed never happened, and what was allowed ran with the arguments that were."""
    chance = random.Random(f"{host.seed} {host.life}")  # noqa: S311  # reproducible is what it is for
    drawn = random.Random(host.seed)  # noqa: S311
    done = cast("list[str]", host.notes.setdefault("done", []))

    def act(name: str, *, replay: ReplayPolicy, asks: bool) -> AnyTool:
        @tool(name=name, replay=replay, requires_approval=asks)
        async def act(place: str, call: ToolCall) -> str:
            """Do something at a place."""
            await host.clock.sleep(chance.random())
            if host.effect(f"{name} {place}", key=call.idempotency_key if replay == "safe" else None):
                done.append(f"{call.id} {place}")
            return f"{place} is done"

        return act

    tools = [
        act("dig", replay="unsafe", asks=True),
        act("look", replay="safe", asks=True),
        act("walk", replay="safe", asks=False),
    ]
    rounds: list[Reply] = [
        calls(*(call(drawn.choice(["dig", "look", "walk"]), place=f"{n}.{m}") for m in range(drawn.randint(1, 4))))
        for n in range(drawn.randint(1, 3))
    ]

    async def decide(approval: Approval, harness: Harness) -> None:
        place = str(approval.arguments["place"])
        match chance.choice(["allow", "deny", "edit", "wait", "rule", "revoke", "wrong"]):
            case "allow":
                await approval.allow()
            case "deny":
                await approval.deny("by chance")
            case "edit":
                await approval.allow(arguments={"place": f"{place}*"})
            case "rule":
                effect = chance.choice(["allow", "deny"])
                assert effect in ("allow", "deny")
                await harness.add_approval_rule(ApprovalRule(tool=approval.tool, effect=effect))
            case "revoke":
                for rule in await harness.approval_rules():
                    await harness.remove_approval_rule(rule.id)
            case "wrong":
                await harness.decide(approval.task, allow=True, digest="of something else")
            case _:
                await host.clock.sleep(chance.random() * 5)

    async def person(harness: Harness, submission: Submission) -> None:
        while await submission.status() not in ("done", "unanswered"):
            await host.clock.sleep(chance.random() * 3)
            for approval in await harness.approvals():
                with suppress(ApprovalRefused, NotFound):  # somebody was faster
                    await decide(approval, harness)

    policy = Approvals(expire_after_ms=10_000)
    async with open_harness(host, [*rounds, say("done")], tools=tools, approvals=policy) as (harness, root):
        submission = await root.submit("Go.", request_id="go")
        harness.resume()
        people = [asyncio.create_task(person(harness, submission)) for _ in range(2)]
        if chance.random() < 0.2:
            await host.clock.sleep(chance.random() * 20)
            await root.abort()
        await asyncio.gather(*people)
        for entry in await root.entries(limit=100):
            if entry.kind == TOOL_RESULT:
                check_result(entry, done)


def check_result(entry: EntryRecord, done: Sequence[str]) -> None:
    data = entry.data_as(ToolResultData)
    took_place = [what for what in done if what.startswith(f"{data.task} ")]
    (message,) = decode_messages(entry.raw_messages)
    match data.code:
        case None:
            assert len(took_place) == 1, f"{message} and {took_place}"
            assert getattr(message, "text", "").endswith(f"{took_place[0].partition(' ')[2]} is done"), took_place
        case "denied" | "expired":
            assert took_place == [], f"{message} and {took_place}"
        case other:
            assert other in ("interrupted", "aborted"), other


def expired_in_time(records: Records) -> Iterator[str]:
    yield from ended_with("expired", "expired")(records)
    yield from over_within(records, TOOL_TASK, 600_000)


# --- what is expected of the records ----------------------------------------------------------------------------


def result_texts(records: Records) -> Iterator[str]:
    for entry in records.of(TOOL_RESULT):
        if entry.data_as(ToolResultData).code is None:
            yield "".join(getattr(message, "text", "") for message in decode_messages(entry.raw_messages))


def ended_with(*codes: str | None) -> Callable[[Records], Iterator[str]]:
    """How the calls ended, in any order; an unsafe one may be interrupted instead."""

    def check(records: Records) -> Iterator[str]:
        found = [entry.data_as(ToolResultData).code for entry in records.of(TOOL_RESULT)]
        left = list(codes)
        for code in found:
            if code == "interrupted" and None in left:
                left.remove(None)
            elif code in left:
                left.remove(code)
            else:
                yield f"the calls ended {found}, not {list(codes)}"
                return

    return check


def asked_where_needed(records: Records) -> Iterator[str]:
    return asked_first(records, free=frozenset({"walk"}))


def asked_first(records: Records, *, free: frozenset[str] = frozenset()) -> Iterator[str]:
    """At any moment: no call has its intent without what allowed it, and none that was denied has one. ``free``: tools
    that need no approval."""
    for task in records.tasks:
        if task.kind == TOOL_TASK and msgspec.json.decode(task.raw_input, type=ToolInput).name in free:
            continue
        intent = None if isinstance(task.state, Terminal) else stored_intent(task)
        if intent is None:
            continue
        if intent.approval is None:
            yield f"call {task.id} has its intent, and nobody allowed it"
            continue
        signal: JsonValue = task.signals.get("approval")
        if intent.approval.rule is None and not (isinstance(signal, dict) and signal["allow"]):
            yield f"call {task.id} has its intent, and its decision is {signal}"


def as_decided(records: Records) -> Iterator[str]:
    """Where somebody decided about a call, its result is that of the decision; where nobody did, a rule or nothing."""
    tasks = {task.id: task for task in records.tasks}
    for entry in records.of(TOOL_RESULT):
        data = entry.data_as(ToolResultData)
        signal = tasks[data.task].signals.get("approval")
        allowed = signal["allow"] if isinstance(signal, dict) else None
        if data.code in (None, "interrupted") and allowed is False:
            yield f"call {data.task} ran, and was denied"
        if data.code == "denied" and allowed is True:
            yield f"call {data.task} was allowed, and has the result of a denial"


LAUNCH = frozenset({"launch"})


def both_run(program: Callable[[Host], Awaitable[None]], *, name: str | None = None) -> Scenario:
    """In the end both calls have run, as they are."""
    return scenario(
        program,
        name=name,
        safe=effects("measure sky"),
        unsafe=effects("launch one"),
        tools=LAUNCH,
        always=asked_first,
        ends=ended_with(None, None),
    )


APPROVALS = (
    scenario(approval_by_mail, safe=effects("measure sky"), always=asked_first, ends=ended_with("denied", None)),
    Scenario(
        name="decided-by-chance",
        program=decided_by_chance,
        rules=Rules(unsafe=frozenset({"dig"})),
        any_effects=True,
        steady=False,
        always=asked_where_needed,
        ends=as_decided,
    ),
    both_run(decided(allow), name="approval-allowed"),
    both_run(approval_pending),
    scenario(
        decided(edit),
        name="approval-edited",
        safe=effects("measure sea"),
        unsafe=effects("launch two"),
        tools=LAUNCH,
        always=asked_first,
        ends=says_so,
    ),
    scenario(
        decided(deny),
        name="approval-denied",
        safe=effects("measure sky"),
        always=asked_first,
        ends=ended_with("denied", None),
    ),
    scenario(
        decided(None, Approvals(tools=("*",), expire_after_ms=5_000)),
        name="approval-expired",
        always=asked_first,
        ends=expired_in_time,
    ),
    scenario(approval_too_late, always=asked_first, ends=ended_with("expired", "expired"), steady=False),
    scenario(approval_forged, always=asked_first, ends=ended_with("denied", "denied")),
    scenario(approval_rule_revoked, always=asked_first, ends=ended_with("denied")),
    both_run(approval_unconsumed),
    scenario(
        approval_rules,
        safe=effects("measure lab/one", "measure garden"),
        unsafe=effects("launch one"),
        tools=LAUNCH,
        always=asked_first,
        ends=ended_with(None, None, None, "denied"),
    ),
)
