"""A round of tools, killed at both edges of every commit, with stores that fail and other orders of tasks
(rules H86 to H92, H94): safe calls take effect once, unsafe ones are never attempted twice."""

from __future__ import annotations

from perdure.harness.harness import Harness
from perdure.harness.registry import Extension
from perdure.harness.tool import AnyTool, ToolCall, tool
from perdure.testing.model import ScriptedModel, call, calls, say
from perdure.testing.normal import Rules
from perdure.testing.simulation import Host, Scenario, explore


def tools(host: Host) -> list[AnyTool]:
    @tool(replay="safe")
    async def pay(amount: int, call: ToolCall) -> str:
        """Pay, in two steps, with output in between."""
        call.output("paying\n")
        await host.clock.sleep(0.15)
        call.output("almost\n")
        await host.clock.sleep(0.15)
        chosen = await call.memo("chosen", amount)
        host.effect(f"pay {chosen}", key=call.idempotency_key)
        return f"paid {chosen}"

    @tool
    async def launch(call: ToolCall) -> str:
        """Launch, once."""
        host.effect("launch")
        await host.clock.sleep(0.05)
        return "launched"

    @tool(replay="safe", sequential=True)
    async def stamp(number: int, call: ToolCall) -> str:
        """Stamp, one after the other."""
        host.effect(f"stamp {number}", key=call.idempotency_key)
        return f"stamped {number}"

    return [pay, launch, stamp]


async def program(host: Host) -> None:
    model = ScriptedModel(
        [
            calls(call("pay", amount=1), call("launch"), call("pay", amount=2)),
            calls(call("stamp", number=1), call("stamp", number=2)),
            say("All done."),
        ]
    )
    async with Harness.open(
        host.storage,
        models=model,
        extensions=[Extension("tools", tools=tools(host))],
        clock=host.clock,
        entropy=host.entropy,
        on_report=host.report,
    ) as harness:
        root = await harness.root()
        async with root.events() as events, root.view() as view:
            await anext(events)
            submission = await root.submit("Go", request_id="go")
            assert (await submission.answer()).text == "All done."
            assert not view.value.busy
            assert view.value.live.tools == {}


SCENARIO = Scenario(
    name="tool_rounds",
    program=program,
    safe=frozenset({"pay 1", "pay 2", "stamp 1", "stamp 2"}),
    unsafe=frozenset({"launch"}),
    rules=Rules(unsafe=frozenset({"launch"})),
)


def test_a_round_of_tools_survives_every_kill() -> None:
    found = explore(SCENARIO, twice=10, schedules=10, steps=10)
    assert not found.failures, found.failures[0]
    assert found.reruns > 0, "some safe call was run again"
    assert found.interrupted > 0, "some unsafe call was interrupted"
