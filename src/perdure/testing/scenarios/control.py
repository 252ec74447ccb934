"""What tools promise that look outside after a crash, or that say how the run goes on (rules H93 and H104 to H108)."""

from __future__ import annotations

from perdure.harness.control import Handoff
from perdure.harness.handle import ToolCall
from perdure.harness.messages import ToolResultMessage
from perdure.harness.model import ModelRequest
from perdure.harness.reconcile import Done, NeverHappened, Unknown
from perdure.harness.tool import AnyTool, ToolResult, tool
from perdure.testing.model import Reply, call, calls, say
from perdure.testing.scenarios.hosting import effects, measure, open_harness, scenario, user_texts
from perdure.testing.simulation import Host

# --- the outside knows --------------------------------------------------------------------------------------------


def charge(host: Host) -> AnyTool:
    """An unsafe tool: the outside does it again whenever it is asked, and says what it has done."""

    @tool(name="charge")
    async def charge(amount: int, call: ToolCall) -> str:
        """Charge an amount."""
        call.output("connecting\n")
        await host.clock.sleep(0.3)
        host.effect(f"charge {amount}")
        host.notes[call.idempotency_key] = amount
        await host.clock.sleep(0.3)
        return f"{amount} is charged"

    @charge.reconcile
    async def look(amount: int, call: ToolCall) -> Done | NeverHappened:
        await host.clock.sleep(0.2)
        return Done(f"{amount} is charged") if call.idempotency_key in host.notes else NeverHappened()

    return charge


async def reconciled(host: Host) -> None:
    """Calls that must not run twice, of a tool that finds out what became of them: each takes effect once, and has its
    result wherever it was cut off."""
    replies = [
        call("charge", amount=90),
        calls(call("charge", amount=20), call("measure", place="sky"), call("charge", amount=5)),
        say("All is paid."),
    ]
    async with open_harness(host, replies, tools=[charge(host), measure(host)]) as (_, root):
        submission = await root.submit("Pay.", request_id="pay")
        assert (await submission.answer()).text == "All is paid."


async def reconciled_below(host: Host) -> None:
    """A safe tool that makes two such calls: it runs again, finds both, and each has taken effect once."""

    @tool(replay="safe")
    async def settle(call: ToolCall) -> str:
        """Settle what is due."""
        first = await call.call("charge", {"amount": 90}, key="first")
        second = await call.call("charge", {"amount": 20}, key="second")
        return f"{first.text}, {second.text}"

    async with open_harness(host, [call("settle"), say("done")], tools=[settle, charge(host)]) as (_, root):
        await (await root.submit("Settle.", request_id="settle")).answer()


async def nobody_knows(host: Host) -> None:
    """A tool that looks outside and cannot tell: its call was begun once at most, and is interrupted."""

    @tool(name="launch")
    async def launch(rocket: str) -> str:
        """Launch a rocket."""
        host.effect(f"launch {rocket}")
        await host.clock.sleep(0.5)
        return f"{rocket} is away"

    @launch.reconcile
    async def look(rocket: str) -> Unknown:
        await host.clock.sleep(0.2)
        return Unknown(f"There are clouds above {rocket}.")

    async with open_harness(host, [call("launch", rocket="one"), say("done")], tools=[launch]) as (_, root):
        await (await root.submit("Launch.", request_id="launch")).answer()


# --- the run goes on, or does not ---------------------------------------------------------------------------------


def conclude(host: Host) -> AnyTool:
    """A tool whose result ends the run."""

    @tool(name="conclude", replay="safe")
    async def conclude(what: str, call: ToolCall) -> ToolResult:
        """Conclude."""
        call.output("writing it down\n")
        await host.clock.sleep(0.3)
        host.effect(f"conclude {what}", key=call.idempotency_key)
        return ToolResult(f"{what} is concluded", control="terminate")

    return conclude


async def terminated(host: Host) -> None:
    """A round whose results all ask for the end: its calls are the answer, and what was queued has the next run."""
    replies = {
        "Conclude.": [
            call("measure", place="north"),
            calls(call("conclude", what="one"), call("conclude", what="two")),
        ],
        "More.": say("That is more."),
    }
    async with open_harness(host, replies, tools=[conclude(host), measure(host)]) as (_, root):
        first = await root.submit("Conclude.", request_id="conclude")
        second = await root.submit("More.", request_id="more")
        assert len((await first.answer()).message.tool_calls) == 2
        assert (await second.answer()).text == "That is more."


async def not_all_terminate(host: Host) -> None:
    """A round of which one result does not ask for the end: the model is asked again."""
    round = calls(call("conclude", what="one"), call("measure", place="north", seconds=1))
    async with open_harness(host, [round, say("done")], tools=[conclude(host), measure(host)]) as (_, root):
        submission = await root.submit("Conclude.", request_id="conclude")
        assert (await submission.answer()).text == "done"


async def handed_over(host: Host) -> None:
    """A result hands over: the run ends with a reset, and what was queued begins behind it."""

    @tool(replay="safe")
    async def hand_over(words: str) -> ToolResult:
        """Begin anew."""
        await host.clock.sleep(0.3)
        return ToolResult("handed over", control=Handoff(words))

    def reply(request: ModelRequest) -> Reply:
        texts = user_texts(request)
        if texts == ["Plan."]:
            return calls(call("hand_over", words="The plan is made."), call("conclude", what="plan"))
        return say(f"after {texts}")

    async with open_harness(host, reply, tools=[hand_over, conclude(host)]) as (_, root):
        first = await root.submit("Plan.", request_id="plan")
        second = await root.submit("Go on.", mode="steer", request_id="on")
        assert len((await first.answer()).message.tool_calls) == 2
        assert (await second.answer()).text == "after ['The plan is made.', 'Go on.']"


async def tools_added(host: Host) -> None:
    """A result adds a tool, which is offered from the next request on and was not before."""

    @tool(replay="safe")
    async def unlock(call: ToolCall) -> ToolResult:
        """Unlock the instruments."""
        await host.clock.sleep(0.3)
        host.effect("unlock", key=call.idempotency_key)
        return ToolResult("unlocked", add_tools=["measure", "nothing-of-that-name"])

    def reply(request: ModelRequest) -> Reply:
        offered = [tool.name for tool in request.tools]
        if "measure" not in offered:
            return call("unlock")
        measured = any(isinstance(m, ToolResultMessage) and m.name == "measure" for m in request.messages)
        return say(f"with {offered}") if measured else call("measure", place="north")

    async with open_harness(host, reply, tools=[measure(host), unlock]) as (_, root):
        if (await root.agent()).tools is None:
            await root.set_agent(tools=["unlock"])
        submission = await root.submit("Measure.", request_id="measure")
        assert (await submission.answer()).text == "with ['measure', 'unlock']"


async def deferred_found(host: Host) -> None:
    """A tool that is not offered until the model finds it; a second search in the same round finds it too."""

    @tool(replay="safe", deferred=True)
    async def weigh(thing: str, call: ToolCall) -> str:
        """Weigh a thing on the scales."""
        await host.clock.sleep(0.3)
        host.effect(f"weigh {thing}", key=call.idempotency_key)
        return f"{thing} weighs 7"

    def reply(request: ModelRequest) -> Reply:
        offered = [tool.name for tool in request.tools]
        if offered == ["measure", "find_tools"]:
            round = [call("find_tools", query="scales"), call("find_tools", query="weigh")]
            return calls(*round, call("measure", place="north", seconds=1))
        weighed = any(isinstance(m, ToolResultMessage) and m.name == "weigh" for m in request.messages)
        return say(f"with {offered}") if weighed else call("weigh", thing="lead")

    async with open_harness(host, reply, tools=[measure(host), weigh]) as (_, root):
        submission = await root.submit("Weigh.", request_id="weigh")
        assert (await submission.answer()).text == "with ['measure', 'weigh']"


CONTROL = (
    scenario(reconciled, safe=effects("charge 90", "charge 20", "charge 5", "measure sky")),
    scenario(reconciled_below, safe=effects("charge 90", "charge 20")),
    scenario(nobody_knows, unsafe=effects("launch one"), tools=effects("launch")),
    scenario(terminated, safe=effects("conclude one", "conclude two", "measure north")),
    scenario(not_all_terminate, safe=effects("conclude one", "measure north")),
    scenario(handed_over, safe=effects("conclude plan")),
    scenario(tools_added, safe=effects("unlock", "measure north")),
    scenario(deferred_found, safe=effects("weigh lead", "measure north")),
)
