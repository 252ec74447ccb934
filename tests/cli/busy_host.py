"""A process with a store in which something of everything goes on: ``python busy_host.py STORE``.

It says ``ready`` on standard output, and closes the store on a line of input.
"""

from __future__ import annotations

import asyncio
import sys

from perdure import Extension, Harness, Next, Run, SqliteStorage, Task, tool
from perdure.testing.model import ScriptedModel, call, say

DEADLINE = 4_102_444_800_000
WAKE = 4_102_444_800_001

running = asyncio.Event()
stopping = asyncio.Event()


@tool
async def dig(depth: int) -> str:
    """Never ends."""
    running.set()
    await asyncio.Event().wait()
    return str(depth)


class Nap(Task[None, None], kind="app.nap"):
    async def start(self, run: Run[None, None, None]) -> Next[None]:
        async with run.commit() as tx:
            return tx.sleep(WAKE, self.end, None)

    async def end(self, run: Run[None, None, None]) -> Next[None]:
        async with run.commit() as tx:
            return tx.complete(None)


class Ask(Nap, kind="app.ask"):
    async def start(self, run: Run[None, None, None]) -> Next[None]:
        async with run.commit() as tx:
            return tx.wait_signal("answer", self.end, None, deadline=DEADLINE)


class Parent(Nap, kind="app.parent"):
    async def start(self, run: Run[None, None, None]) -> Next[None]:
        async with run.commit() as tx:
            return tx.wait([tx.create_task(Nap, None).id, tx.create_task(Nap, None).id], self.end, None)


class Early(Nap, kind="app.early"):
    """Completes before what it owns."""

    async def start(self, run: Run[None, None, None]) -> Next[None]:
        async with run.commit() as tx:
            tx.create_task(Nap, None)
            return tx.complete(None)


class Stubborn(Nap, kind="app.stubborn"):
    async def on_abort(self, run: Run[None, None, object]) -> Next[None]:
        stopping.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


async def main(path: str) -> None:
    model = ScriptedModel({"Dig.": [call("dig", depth=3), say("Dug.")]})
    extension = Extension("app", tools=[dig], tasks=[Nap, Ask, Parent, Early, Stubborn])
    async with Harness.open(SqliteStorage(path), models=model, extensions=[extension], drain_ms=5_000) as harness:
        root = await harness.root()
        await root.set_name("the \x1b[31mroot\n")
        await root.submit("Dig.", request_id="dig-1")
        await running.wait()
        await root.submit("And then?", request_id="then-1")
        other = await harness.create_conversation()
        async with other.commit() as tx:
            for kind in (Ask, Parent, Early):
                tx.create_task(kind, None)
            stubborn = tx.create_task(Stubborn, None)
        entry = (await root.entries())[0]
        await root.fork(entry.id)
        aborting = asyncio.create_task(harness.abort_task(stubborn.id))
        await stopping.wait()
        while len([task for task in (await harness.inspect()).tasks if task.status == "sleeping"]) < 3:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        aborting.cancel()
    assert harness.closed is not None
    print("closed", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
