"""An agent in a durable Space, and what outlives its process: for tests that end it in between."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from workspace_walk import Seen, seen

from perdure.harness.documents import ToolResultData
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.harness import Harness
from perdure.harness.messages import decode_messages
from perdure.harness.registry import Extension
from perdure.harness.tool import AnyTool, tool
from perdure.kernel.reports import Report
from perdure.spaces.documents import SpaceImage, SpaceState
from perdure.spaces.durable import durable_space
from perdure.spaces.local import LocalSpaces
from perdure.spaces.settings import RerunPolicy
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import Call, Calls, Say, ScriptedModel, call, say
from perdure.tools.coding import coding_tools


@tool(effects="space")
async def twice(environment: ExecutionEnvironment) -> str:
    """Two commands: no outcome of it can be adopted."""
    await environment.exec("echo one >> log")
    await environment.exec("echo two >> log; while [ ! -e ../gate ]; do sleep 0.02; done")
    return "both"


@tool(effects="world", replay="unsafe")
async def outside(environment: ExecutionEnvironment) -> str:
    """It may do anything."""
    await environment.exec("echo out >> log; while [ ! -e ../gate ]; do sleep 0.02; done")
    return "out"


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class World:
    """What outlives a process: the log, the Spaces, and the gate that commands wait for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = MemoryStorage()
        self.spaces = LocalSpaces(folder / "spaces")
        self.reports: list[Report] = []
        self.harness: Harness

    @property
    def workspace(self) -> Path:
        return Path(self.spaces.directory) / "one" / "workspace"

    @property
    def gate(self) -> Path:
        return self.workspace.parent / "gate"

    @asynccontextmanager
    async def open(
        self,
        *replies: Call | Calls | Say,
        tools: tuple[AnyTool, ...] = (twice, outside),
        rerun: RerunPolicy = "rerun",
        restart_limit: int = 5,
        max_file_bytes: int = 1 << 30,
    ) -> AsyncIterator[Harness]:
        space = await self.spaces.open("one")
        async with Harness.open(
            self.storage,
            models=ScriptedModel({"go": [*replies, say("done")]}),
            extensions=[coding_tools(), Extension("own", tools=list(tools))],
            environment=durable_space(space, rerun=rerun, max_file_bytes=max_file_bytes),
            on_report=self.reports.append,
            drain_ms=2_000,
            restart_limit=restart_limit,
        ) as harness:
            self.harness = harness
            yield harness

    async def crash(self) -> None:
        """As if the process ended now."""
        self.storage = self.storage.snapshot()
        self.harness.session.fail(ConnectionError("killed"))
        await self.harness.close()
        self.reports.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came to that")

    async def kill_daemon(self) -> None:
        space = await self.spaces.open("one")
        async with await space.connect() as client:
            os.kill(client.seen.pid, signal.SIGKILL)

    def lines(self, name: str = "log") -> list[str]:
        path = self.workspace / name
        return path.read_text().splitlines() if path.exists() else []

    async def results(self) -> list[tuple[str | None, str]]:
        root = await self.harness.root()
        entries = [e for e in await root.entries() if e.kind == "pi.tool-result"]
        return [
            (e.data_as(ToolResultData).code, getattr(decode_messages(e.raw_messages)[0], "text", "")) for e in entries
        ]

    async def state(self) -> SpaceState:
        state = await self.harness.session.snapshot(SpaceState, key="one")
        assert state is not None
        return state

    async def recovered(self) -> list[str]:
        return [note["kind"] for note in (await self.state()).recoveries]

    async def check(self) -> None:
        """The log's image is the workspace."""
        found = await self.harness.session.snapshot(SpaceImage, key="one")
        assert found is not None
        held = {
            f"{directory}/{name}".lstrip("/"): entry[1:3] if entry[0] == "f" else entry[0]
            for directory, names in found.dirs.items()
            for name, entry in names.items()
        }
        there: dict[str, object] = {}
        for path in self.workspace.rglob("*"):
            stat = path.lstat()
            kind = "l" if path.is_symlink() else "d" if path.is_dir() else [stat.st_mode & 0o7777, stat.st_size]
            there[str(path.relative_to(self.workspace))] = kind
        assert there == held
        assert (await self.state()).open is None


async def go(harness: Harness) -> str:
    submission = await (await harness.root()).submit("go", request_id="one")
    return (await submission.answer()).text


@tool(effects="space")
async def changing(command: str, environment: ExecutionEnvironment) -> str:
    """Change the workspace, then wait where the process is ended."""
    done = await environment.exec(command)
    assert done.exit_code == 0, done.output
    await environment.exec("touch ../changed; while [ ! -e ../gate ]; do sleep 0.02; done")
    return "changed"


class Nasty(World):
    """One process a call, each ended before the next."""

    requests = 0

    async def call(self, *calls: Call, max_file_bytes: int = 1 << 30) -> list[tuple[str | None, str]]:
        """One process, and these calls in it; what their results are."""
        async with self.open(*calls, max_file_bytes=max_file_bytes) as harness:
            self.requests += 1
            submission = await (await harness.root()).submit("go", request_id=f"call-{self.requests}")
            assert (await submission.answer()).text == "done"
            return (await self.results())[-len(calls) :]

    async def bash(self, script: str) -> str:
        ((code, text),) = await self.call(call("bash", command=script))
        assert code is None
        assert "[Exit code" not in text, text
        return text

    async def cut_off(self, script: str) -> None:
        """A process that ends while its call has changed the workspace and goes on."""
        changed = self.workspace.parent / "changed"
        changed.unlink(missing_ok=True)
        command = call("changing", command=script)
        async with self.open(command, tools=(changing,)) as harness:
            self.requests += 1
            await (await harness.root()).submit("go", request_id=f"call-{self.requests}")
            harness.resume()
            await self.until(changed.exists)
            await self.crash()

    async def undone(self, script: str) -> None:
        """The next process: it undoes that call, and does not run it again."""
        async with self.open(call("changing", command=script), tools=(changing,), rerun="interrupt") as harness:
            submission = await (await harness.root()).submit("go", request_id=f"call-{self.requests}")
            assert (await submission.answer()).text == "done"
            assert [code for code, _ in await self.results()][-1:] == ["interrupted"]

    def seen(self) -> dict[bytes, Seen]:
        return seen(self.workspace)
