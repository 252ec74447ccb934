"""What calls of tools promise: rounds, replay, interruption, errors, hooks (sections 3.4 and 3.5 of the rules)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perdure.harness.documents import TOOL_RESULT
from perdure.harness.handle import ToolCall
from perdure.harness.hooks import Block, HookCall, after_tool, before_tool
from perdure.harness.messages import decode_messages
from perdure.harness.tool import ToolResult, tool
from perdure.kernel.errors import SessionFailed
from perdure.kernel.json import JsonValue
from perdure.testing.model import call, calls, say
from perdure.testing.normal import Records
from perdure.testing.scenarios.hosting import (
    effects,
    launch,
    measure,
    open_harness,
    scenario,
)
from perdure.testing.simulation import Host


async def parallel_tools(host: Host) -> None:
    """A round of four calls at once, that end in another order than they began."""
    round = calls(
        call("measure", place="north", seconds=3),
        call("measure", place="south"),
        call("measure", place="west", seconds=1),
        call("measure", place="east", seconds=2),
        text="Let me see.",
    )
    async with open_harness(host, [round, say("All is measured.")], tools=[measure(host)]) as (_, root):
        submission = await root.submit("Measure everything.", request_id="all")
        assert (await submission.answer()).text == "All is measured."


async def sequential_tools(host: Host) -> None:
    """The calls of a round one after the other, each begun when the one before has ended."""
    places = ("first", "second", "third")
    round = calls(*(call("measure", place=place, seconds=1) for place in places))
    async with open_harness(host, [round, say("done")], tools=[measure(host, sequential=True)]) as (_, root):
        submission = await root.submit("Measure in order.", request_id="order")
        await submission.wait()


def results_in_order(records: Records) -> Iterator[str]:
    """Results of sequential calls were written in the order of the calls, at any moment."""
    texts = [
        getattr(message, "text", "")
        for entry in records.of(TOOL_RESULT)
        for message in decode_messages(entry.raw_messages)
    ]
    expected = [f"{place} is 7" for place in ("first", "second", "third")]
    if texts != expected[: len(texts)]:
        yield f"the results were written as {texts}"


async def unsafe_tool(host: Host) -> None:
    """Two rounds with a tool that must not run twice: at worst its call is interrupted."""
    replies = [
        call("launch", rocket="one"),
        calls(call("launch", rocket="two"), call("measure", place="sky")),
        say("done"),
    ]
    async with open_harness(host, replies, tools=[launch(host), measure(host)]) as (_, root):
        submission = await root.submit("Launch.", request_id="launch")
        assert (await submission.answer()).text == "done"


async def failing_tools(host: Host) -> None:
    """Calls that go wrong in every way a call can: each has its result, and the model hears of it."""

    @tool(replay="safe")
    async def raises() -> str:
        """Raise."""
        raise ValueError("on purpose")

    @tool(replay="safe", timeout_ms=500)
    async def hangs() -> str:
        """Hang."""
        await host.clock.sleep(3_600)
        return "too late"

    round = calls(call("raises"), call("hangs"), call("nowhere"), call("measure", wrong="argument"))
    async with open_harness(host, [round, say("never mind")], tools=[raises, hangs, measure(host)]) as (_, root):
        await (await root.submit("Try.", request_id="try")).answer()


FAILURES = ["tool_error", "timeout", "tool_unavailable", "invalid_arguments"]


def every_failure(records: Records) -> Iterator[str]:
    codes = [data["code"] for entry in records.of(TOOL_RESULT) if isinstance(data := entry.data, dict)]
    if sorted(map(str, codes)) != sorted(FAILURES):
        yield f"the calls ended {codes}, not {FAILURES}"


async def hooks(host: Host) -> None:
    """Hooks that rewrite arguments, block a call and replace a result; a rerun keeps what was decided."""

    @before_tool
    async def before(asked: HookCall) -> Mapping[str, JsonValue] | Block | None:
        if asked.arguments["place"] == "secret":
            return Block("not there")
        return {**asked.arguments, "place": f"{asked.arguments['place']}ern"}

    @after_tool
    async def after(_asked: HookCall, result: ToolResult) -> ToolResult | None:
        return ToolResult(f"{result.text}, roughly", usage=result.usage)

    round = calls(call("measure", place="north", seconds=1), call("measure", place="secret"))
    replies = [round, say("done")]
    async with open_harness(host, replies, tools=[measure(host)], hooks=[before, after]) as (_, root):
        await (await root.submit("Measure.", request_id="measure")).answer()


async def sync_tool(host: Host) -> None:
    """A tool that is a plain function."""

    @tool(replay="safe")
    def weigh(thing: str, call: ToolCall) -> dict[str, int]:
        """Weigh a thing."""
        host.effect(f"weigh {thing}", key=call.idempotency_key)
        return {"grams": len(thing)}

    replies = [calls(call("weigh", thing="a feather"), call("weigh", thing="lead")), say("done")]
    async with open_harness(host, replies, tools=[weigh]) as (_, root):
        await (await root.submit("Weigh.", request_id="weigh")).answer()


async def memo_tool(host: Host) -> None:
    """A call that stores a value drawn by chance before it uses it: a rerun uses the same."""

    @tool(replay="safe")
    async def draw(call: ToolCall) -> str:
        """Draw a lot."""
        lot = await call.memo("lot", host.entropy.token())
        await host.clock.sleep(1)
        host.effect("drawn", key=str(lot))
        return "drawn"

    async with open_harness(host, [call("draw"), say("done")], tools=[draw]) as (_, root):
        await (await root.submit("Draw.", request_id="draw")).answer()


async def close_in_a_call(host: Host) -> None:
    """The harness is closed while a call runs, and opened again: the call goes on, and so does the run."""
    replies = [call("measure", place="here", seconds=5), say("done")]
    for _ in range(2):
        async with open_harness(host, replies, tools=[measure(host)]) as (harness, root):
            await root.submit("Measure.", request_id="measure")
            await host.clock.sleep(2)
        if harness.session.failed is not None:
            raise SessionFailed(harness.session.failed)
    async with open_harness(host, replies, tools=[measure(host)]) as (_, root):
        submission = await root.submit("Measure.", request_id="measure")
        assert (await submission.answer()).text == "done"


TOOLS = (
    scenario(parallel_tools, safe=effects(*(f"measure {place}" for place in ("north", "south", "west", "east")))),
    scenario(
        sequential_tools,
        safe=effects(*(f"measure {place}" for place in ("first", "second", "third"))),
        always=results_in_order,
    ),
    scenario(
        unsafe_tool,
        safe=effects("measure sky"),
        unsafe=effects("launch one", "launch two"),
        tools=effects("launch"),
    ),
    scenario(failing_tools, reports=effects("tool_raised"), ends=every_failure),
    scenario(hooks, safe=effects("measure northern")),
    scenario(sync_tool, safe=effects("weigh a feather", "weigh lead")),
    scenario(memo_tool, safe=effects("drawn")),
    scenario(close_in_a_call, safe=effects("measure here")),
)
