"""What happens in a Space is told, logged and reported without names of files, commands or output (rule H285)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from perdure import ExecutionEnvironment, Extension, Harness, MemoryStorage, Report, coding_tools, tool
from perdure.spaces import LocalSpaces, durable_space
from perdure.testing.model import ScriptedModel, call, say
from telemetry.otel_kit import Told
from telemetry.secret_log import caught

MARK = "sEcReT"
LOOP = "while [ ! -e ../{} ]; do sleep 0.02; done"


@tool(effects="space")
async def twice(environment: ExecutionEnvironment) -> str:
    """Two commands: what they did is undone after a crash."""
    await environment.exec(f"echo {MARK} > {MARK}-first")
    await environment.exec(f"echo {MARK} > {MARK}-second; {LOOP.format('second-gate')}")
    return MARK


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = MemoryStorage()
        self.spaces = LocalSpaces(folder / "spaces")
        self.told = Told()
        self.reports: list[Report] = []

    @property
    def workspace(self) -> Path:
        return self.folder / "spaces" / "one" / "workspace"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Harness]:
        space = await self.spaces.open("one")
        command = f"echo {MARK} > {MARK}-file; echo {MARK}; {LOOP.format('gate')}"
        model = ScriptedModel(
            {
                "go": [
                    call("bash", command=command),
                    call("twice"),
                    call("bash", command=f"mkfifo {MARK}-pipe"),
                    say("done"),
                ]
            }
        )
        async with Harness.open(
            self.storage,
            models=model,
            extensions=[coding_tools(), Extension("own", tools=[twice])],
            environment=durable_space(space),
            on_report=self.reports.append,
            telemetry=self.told.telemetry,
            drain_ms=2_000,
        ) as harness:
            yield harness

    async def crash_when(self, condition: Callable[[], bool]) -> None:
        """A process that goes on with the work, and ends as soon as the workspace shows something."""
        async with self.open() as harness:
            await (await harness.root()).submit("go", request_id="one")
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.01)
            self.storage = self.storage.snapshot()
            harness.session.fail(ConnectionError("the test's crash"))


async def test_calls_that_a_space_recovers_are_told_without_content_h285(tmp_path: Path) -> None:
    world = World(tmp_path)
    gate = world.workspace.parent / "gate"
    try:
        with caught() as log:
            await world.crash_when(lambda: (world.workspace / f"{MARK}-file").exists())
            gate.touch()
            await world.crash_when(lambda: (world.workspace / f"{MARK}-second").exists())
            (world.workspace / f"{MARK}-of-another").write_text(MARK)
            (world.workspace.parent / "second-gate").touch()
            async with world.open() as harness:
                submission = await (await harness.root()).submit("go", request_id="one")
                assert (await submission.answer()).text == "done"
    finally:
        await world.spaces.delete("one")
    kinds = {report.type for report in world.reports}
    assert kinds >= {"call_rerun", "call_restored", "space_recovery"}, kinds
    assert kinds & {"call_reattached", "call_adopted"}, kinds
    said = [f"{report.type} {report.message}" for report in world.reports]
    told = [world.told.everything(), *log.lines, *said]
    assert any(MARK in str(report.error) for report in world.reports), "the error itself is there"
    assert [text for text in told if MARK in text] == []
