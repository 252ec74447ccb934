"""A process that pays once it is allowed to: ``python till_host.py STORE``.

It says ``asked`` as soon as a call waits, and the answer's words at the end. What was paid stands in STORE.paid.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from perdure import Extension, Harness, SqliteStorage, tool
from perdure.events import ApprovalRequested, Snapshot
from perdure.testing.model import ScriptedModel, call, say

STORE = sys.argv[1]


@tool(requires_approval=True)
def pay(to: str, amount: int = 1) -> str:
    """Pay somebody."""
    with Path(f"{STORE}.paid").open("a") as paid:
        paid.write(f"{to} {amount}\n")
    return f"paid {to} {amount}"


async def tell(harness: Harness) -> None:
    async with (await harness.root()).events() as events:
        async for event in events:
            if isinstance(event, ApprovalRequested) or (isinstance(event, Snapshot) and await harness.approvals()):
                print("asked", flush=True)


async def main() -> None:
    model = ScriptedModel([call("pay", to="ada", amount=5), say("done")])
    async with Harness.open(SqliteStorage(STORE), models=model, extensions=[Extension("till", tools=[pay])]) as harness:
        telling = asyncio.create_task(tell(harness))
        submission = await (await harness.root()).submit("Pay.", request_id="pay")
        print((await submission.answer()).text, flush=True)
        telling.cancel()


if __name__ == "__main__":
    asyncio.run(main())
