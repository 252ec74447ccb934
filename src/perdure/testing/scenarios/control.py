"""What tools promise that look outside after a crash, or that say how the run goes on (rules H93 and H104 to H108)."""

from __future__ import annotations

from perdure.harness.handle import ToolCall
from perdure.harness.reconcile import Done, NeverHappened, Unknown
from perdure.harness.tool import AnyTool, tool
from perdure.testing.model import call, calls, say
from perdure.testing.scenarios.hosting import effects, measure, open_harness, scenario
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


CONTROL = (
    scenario(reconciled, safe=effects("charge 90", "charge 20", "charge 5", "measure sky")),
    scenario(nobody_knows, unsafe=effects("launch one"), tools=effects("launch")),
)
