"""What nested calls promise: made once by key, found again, aborted with their caller (rules H109, H340 to H346)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

from perdure.harness.documents import TOOL_RESULT, ToolResultData
from perdure.harness.handle import CallConflict, ToolCall
from perdure.harness.messages import decode_messages
from perdure.harness.tool import AnyTool, tool
from perdure.kernel.records import Aborted
from perdure.testing.model import call, calls, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import effects, ends, launch, measure, open_harness, scenario
from perdure.testing.simulation import Host

PLACES = ("north", "south", "west")


def survey(host: Host, *, at_once: bool, turned: bool = False) -> AnyTool:
    """A tool that measures places by calls of its own. ``turned``: in each life it begins with another one."""

    async def place(call: ToolCall, region: str, name: str, seconds: int) -> str:
        where = f"{name} of {region}"
        return (await call.call("measure", {"place": where, "seconds": seconds}, key=name)).text

    @tool(name="survey", replay="safe")
    async def survey(region: str, call: ToolCall) -> str:
        """Measure all places of a region."""
        call.output("surveying\n")
        if at_once:
            found = await asyncio.gather(*(place(call, region, name, 3 - at) for at, name in enumerate(PLACES)))
        else:
            first = host.life % len(PLACES) if turned else 0
            order = [*PLACES[first:], *PLACES[:first]]
            found = [await place(call, region, name, PLACES.index(name)) for name in order]
        await host.clock.sleep(0.2)
        return "; ".join(sorted(found))

    return survey


async def nested_in_order(host: Host) -> None:
    """A safe caller, one nested call after the other, an error among them."""

    @tool(name="inspect", replay="safe")
    async def inspect(call: ToolCall) -> str:
        """Survey, and look for a tool that is not there."""
        whole = await call.call("survey", {"region": "it"}, key="survey")
        missing = await call.call("nowhere", key="missing")
        again = await call.call("survey", {"region": "it"}, key="survey")
        with suppress(CallConflict):
            await call.call("survey", {"region": "that"}, key="survey")
            return "another call has that key"
        return f"{whole.text} {missing.code} {whole == again}"

    tools = [inspect, survey(host, at_once=False), measure(host)]
    async with open_harness(host, [call("inspect"), say("done")], tools=tools) as (_, root):
        await (await root.submit("Inspect.", request_id="inspect")).answer()


INSPECTED = "north of it is 7; south of it is 7; west of it is 7 tool_unavailable True"


def inspected(records: Records) -> Iterator[str]:
    """The caller had the same results whether it waited for them or found them."""
    texts = [
        getattr(message, "text", "")
        for entry in records.of(TOOL_RESULT)
        for message in decode_messages(entry.raw_messages)
    ]
    if texts != [INSPECTED]:
        yield f"the model was told {texts}"


async def nested_in_another_order(host: Host) -> None:
    """A caller that is run again makes its calls in another order: each is found by its key."""
    tools = [survey(host, at_once=False, turned=True), measure(host)]
    async with open_harness(host, [call("survey", region="it"), say("done")], tools=tools) as (_, root):
        await (await root.submit("Survey.", request_id="survey")).answer()


async def nested_at_once(host: Host) -> None:
    """Two callers in a round, each with three calls at once that end in another order than they began."""
    tools = [survey(host, at_once=True), measure(host)]
    async with open_harness(
        host, [calls(call("survey", region="here"), call("survey", region="there")), say("done")], tools=tools
    ) as (_, root):
        await (await root.submit("Survey twice.", request_id="survey")).answer()


def measured_twice(records: Records) -> Iterator[str]:
    """Every call was made once, and only its caller has its result."""
    made = [data for data in (e.data_as(ToolResultData) for e in records.of(TOOL_RESULT)) if data.caller is not None]
    if len(made) != 2 * len(PLACES) or len({(data.caller, data.call_id) for data in made}) != len(made):
        yield f"two surveys measured {len(made)} times"


async def nested_below_an_unsafe_call(host: Host) -> None:
    """An unsafe caller, at worst interrupted: then nothing that it called goes on, and what had ended is kept."""
    surveying: list[int] = []
    astray = cast("list[str]", host.notes.setdefault("astray", []))

    @tool(name="survey")
    async def survey(call: ToolCall) -> str:
        """Look at all places."""
        surveying.append(call.id)
        seen = await asyncio.gather(*(call.call("look", {"place": place}, key=place) for place in PLACES))
        return "; ".join(result.text for result in seen)

    @tool(name="look", replay="safe")
    async def look(place: str) -> str:
        """Look at a place."""
        if not surveying:
            astray.append(place)
        await host.clock.sleep(1 + PLACES.index(place))
        return f"{place} is there"

    async with open_harness(host, [call("survey"), say("done")], tools=[survey, look]) as (_, root):
        await (await root.submit("Survey.", request_id="survey")).answer()
        assert astray == [], "it began in a process in which nobody called it"


async def nested_unsafe(host: Host) -> None:
    """A safe caller of unsafe tools: it is run again, they are not."""

    @tool(name="mission", replay="safe")
    async def mission(call: ToolCall) -> str:
        """Launch two rockets."""
        first = call.call("launch", {"rocket": "one"}, key="one")
        second = call.call("launch", {"rocket": "two"}, key="two")
        await asyncio.gather(first, second)
        await host.clock.sleep(0.5)
        return "launched"

    async with open_harness(host, [call("mission"), say("done")], tools=[mission, launch(host)]) as (_, root):
        await (await root.submit("Launch.", request_id="launch")).answer()


async def nested_aborted(host: Host) -> None:
    """The conversation is aborted while a caller waits: from the bottom up, and each call has its result."""
    tools = [survey(host, at_once=True), measure(host)]
    async with open_harness(host, [call("survey", region="it"), say("never")], tools=tools) as (_, root):
        submission = await root.submit("Survey.", request_id="survey")
        await host.clock.sleep(2)
        await root.abort()
        await ends(submission, "aborted")


async def nested_left_behind(host: Host) -> None:
    """A caller that returns before what it called has ended: that is aborted, and the run goes on only then."""

    @tool(name="hurry", replay="safe")
    async def hurry(call: ToolCall) -> str:
        """Call, and wait for a moment."""
        slow = asyncio.ensure_future(call.call("measure", {"place": "far", "seconds": 60}, key="far"))
        near = await call.call("measure", {"place": "near"}, key="near")
        slow.cancel()
        return near.text

    async with open_harness(host, [call("hurry"), say("done")], tools=[hurry, measure(host)]) as (_, root):
        await (await root.submit("Hurry.", request_id="hurry")).answer()


def nothing_outlives_its_caller(records: Records) -> Iterator[str]:
    """Of nested calls none is live under a caller that has ended, and an aborted one says so."""
    tasks = {task.id: task for task in records.tasks}
    for task in records.tasks:
        if task.kind == "pi.tool" and isinstance(task.input, dict) and task.input.get("caller") is not None:
            caller = tasks[task.owner or 0]
            if task.live and not caller.live:
                yield f"nested call {task.id} outlives its caller"
            if isinstance(task.outcome, Aborted) and not task.abort_requested:
                yield f"nested call {task.id} ended aborted by itself"


NESTED = (
    scenario(nested_in_order, safe=effects(*(f"measure {place} of it" for place in PLACES)), ends=inspected),
    scenario(
        nested_in_another_order,
        safe=effects(*(f"measure {place} of it" for place in PLACES)),
        always=nothing_outlives_its_caller,
        steady=False,
    ),
    scenario(nested_at_once, any_effects=True, ends=measured_twice, always=nothing_outlives_its_caller),
    scenario(
        nested_below_an_unsafe_call,
        tools=effects("survey"),
        always=nothing_outlives_its_caller,
        steady=False,
    ),
    scenario(nested_unsafe, unsafe=effects("launch one", "launch two"), tools=effects("launch")),
    scenario(nested_aborted, any_effects=True, always=nothing_outlives_its_caller, steady=False),
    scenario(nested_left_behind, any_effects=True, always=nothing_outlives_its_caller, steady=False),
)
