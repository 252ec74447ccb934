"""What hooks and a registry that changes promise: gates, changed requests, runs that are continued, rounds that are
told, an extension that is replaced under way (section 3.5 of the rules)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from perdure.harness.documents import ASSISTANT, USER
from perdure.harness.handle import ToolCall
from perdure.harness.harness import Harness
from perdure.harness.hooks import (
    HookAnswer,
    HookRequest,
    HookResponse,
    HookRound,
    RequestChange,
    Stop,
    after_response,
    after_tools,
    before_request,
    gate_request,
    on_yield,
)
from perdure.harness.messages import AssistantMessage, Text, UserMessage, decode_messages
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension, PromptSection
from perdure.harness.tool import AnyTool, tool
from perdure.testing.model import Reply, call, calls, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import STORY, effects, ends, measure, open_harness, scenario, user_texts
from perdure.testing.simulation import Host

CHECK = "Check it."


async def gated(host: Host) -> None:
    """A gate stops a run after its first round: its input ends so in every life, what came before stays, and the next
    input has a run of its own."""

    @gate_request
    async def gate(asked: HookRequest) -> Stop | None:
        await host.clock.sleep(0.1)
        return Stop("enough is measured") if asked.turn and user_texts(asked.request)[-1] == "Measure." else None

    replies = {"Measure.": [call("measure", place="north"), say("never said")], "Go on.": say(STORY)}
    async with open_harness(host, replies, tools=[measure(host)], hooks=[gate]) as (_, root):
        await ends(await root.submit("Measure.", request_id="measure"), "gate")
        assert (await (await root.submit("Go on.", request_id="on")).answer()).text == STORY


async def changed_requests(host: Host) -> None:
    """What hooks make of a request and of its answer: the answer is stored as they left it, the request as it was."""

    @before_request
    async def add(_asked: HookRequest) -> RequestChange:
        await host.clock.sleep(0.1)
        return RequestChange(add=[UserMessage((Text("Be exact."),))], max_output=100)

    @after_response
    async def shout(asked: HookResponse) -> AssistantMessage:
        await host.clock.sleep(0.1)
        return replace(asked.message, content=(Text(asked.message.text.upper()),))

    def repeat(request: ModelRequest) -> Reply:
        return say(f"{user_texts(request)[-1]} {request.max_output}")

    async with open_harness(host, repeat, hooks=[add, shout]) as (_, root):
        assert (await (await root.submit("Hello.", request_id="hello")).answer()).text == "BE EXACT. 100"


def nothing_added(records: Records) -> Iterator[str]:
    """No entry holds what was added to a request."""
    said = [
        message.text
        for entry in records.of(USER)
        for message in decode_messages(entry.raw_messages)
        if isinstance(message, UserMessage)
    ]
    if "Be exact." in said:
        yield f"the transcript has {said}"


async def continued(host: Host) -> None:
    """A hook continues a run once: one input, two answers, and the second is the input's."""

    @on_yield
    async def check(asked: HookAnswer) -> str | None:
        await host.clock.sleep(0.1)
        return None if asked.continued else CHECK

    replies = {"Plan.": say("A plan."), CHECK: [call("measure", place="north"), say("It is checked.")]}
    async with open_harness(host, replies, tools=[measure(host)], hooks=[check]) as (_, root):
        submission = await root.submit("Plan.", request_id="plan")
        assert (await submission.answer()).text == "It is checked."


async def continued_or_steered(host: Host) -> None:
    """An input comes while a hook says how to go on. Whichever the boundary takes, both inputs are answered."""

    @on_yield
    async def check(asked: HookAnswer) -> str | None:
        await host.clock.sleep(0.5)
        return CHECK if asked.message.text == "A plan." else None

    replies = {"Plan.": say("A plan."), CHECK: say("It is checked."), "More.": say("That is more.")}
    async with open_harness(host, replies, hooks=[check]) as (_, root):
        first = await root.submit("Plan.", request_id="plan")
        await host.clock.sleep(0.4)
        second = await root.submit("More.", mode="steer", request_id="more")
        await first.answer()
        assert (await second.answer()).text == "That is more."


def words_behind_an_answer(records: Records) -> Iterator[str]:
    """What a hook says stands right behind the answer that it was asked about, never behind an input."""
    before = ""
    for entry in records.entries:
        if entry.kind == USER and entry.by_task is not None and before != ASSISTANT:
            yield f"entry {entry.id} is a hook's words, and stands behind an input"
        before = entry.kind


async def told_rounds(host: Host) -> None:
    """Each round is told before the boundary behind it, and again if a crash came between."""

    @after_tools
    async def note(round: HookRound) -> None:
        assert len(round.calls) == 2
        await host.clock.sleep(0.1)
        for ended in round.calls:
            host.effect(f"told {ended.result.text}", key=f"told {ended.id}")

    replies = [
        calls(call("measure", place="north", seconds=1), call("measure", place="south")),
        calls(call("measure", place="west"), call("measure", place="east", seconds=1)),
        say("done"),
    ]
    async with open_harness(host, replies, tools=[measure(host)], hooks=[note]) as (_, root):
        assert (await (await root.submit("Measure.", request_id="measure")).answer()).text == "done"


# --- an extension that is replaced --------------------------------------------------------------------------------


def surveying(host: Host) -> Extension:
    """The extension as the host has it by now: the newer one has another section, and a tool with another schema."""

    async def work(place: str, call: ToolCall) -> str:
        await host.clock.sleep(1)
        host.effect(f"survey {place}", key=call.idempotency_key)
        return f"{place} is surveyed"

    @tool(name="survey", replay="safe")
    async def older(place: str, call: ToolCall) -> str:
        """Survey a place."""
        return await work(place, call)

    @tool(name="survey", replay="safe")
    async def newer(place: str, call: ToolCall, depth: int = 0) -> str:
        """Survey a place, down to a depth."""
        return await work(place, call)

    is_newer = bool(host.notes.get("newer"))
    section = PromptSection("surveys", "Survey down to a depth." if is_newer else "Survey the surface.")
    return Extension("surveying", tools=[newer if is_newer else older], sections=[section])


async def replaced_in_a_round(host: Host) -> None:
    """An extension is replaced while calls of its tools run: they end as they began, and the next request tells of the
    newer one; a host that comes back has the newer one from the start."""
    harnesses: list[Harness] = []

    def upgrading() -> AnyTool:
        @tool(name="upgrade", replay="safe")
        async def upgrade() -> str:
            """Put the newer extension in."""
            host.notes["newer"] = True
            harnesses[0].registry.replace(surveying(host))
            return "upgraded"

        return upgrade

    replies = [
        calls(call("survey", place="north"), call("upgrade")),
        call("survey", place="south", depth=3),
        say("done"),
    ]
    async with open_harness(host, replies, tools=[upgrading()]) as (harness, root):
        harnesses.append(harness)
        harness.registry.install(surveying(host))
        assert (await (await root.submit("Survey.", request_id="survey")).answer()).text == "done"


PLACES = ("north", "south", "west", "east")

HOOKS = (
    scenario(gated, safe=effects("measure north")),
    scenario(changed_requests, always=nothing_added),
    scenario(continued, safe=effects("measure north")),
    scenario(continued_or_steered, always=words_behind_an_answer, steady=False),
    scenario(
        told_rounds,
        safe=effects(*(f"measure {place}" for place in PLACES), *(f"told {place} is 7" for place in PLACES)),
    ),
    scenario(replaced_in_a_round, safe=effects("survey north", "survey south")),
)
