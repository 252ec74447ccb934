"""A store, a session and a task runtime around ``pi.tool``: calls are created as generation creates them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from harness.doubles import ManualClock
from perdure.harness.calls import ToolTask
from perdure.harness.documents import TOOL_RESULT, Agent, Live, LiveTool, ToolInput, ToolResultData, UsageTotals
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.messages import ToolResultMessage, decode_messages
from perdure.harness.progress import ProgressWriter
from perdure.harness.registry import Extension, Registry
from perdure.harness.tool import AnyTool
from perdure.kernel.records import EntryRecord, to_raw
from perdure.kernel.reports import Report
from perdure.kernel.session import Session, Settled
from perdure.storage.memory import MemoryStorage
from perdure.tasks import TaskRegistry, TaskRuntime

ROOT = 1


async def until(condition: Callable[[], bool]) -> None:
    """Let everything go on until something is so."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("what the test waits for never came")


class Result:
    """A result entry, read."""

    def __init__(self, entry: EntryRecord) -> None:
        self.entry = entry
        (message,) = decode_messages(entry.raw_messages)
        assert isinstance(message, ToolResultMessage)
        self.message = message
        self.data = entry.data_as(ToolResultData)
        assert (self.data.code, self.data.is_error) == (message.code, message.is_error)

    @property
    def text(self) -> str:
        return self.message.text

    @property
    def code(self) -> str | None:
        return self.message.code

    @property
    def details(self) -> object:
        return msgspec.json.decode(self.data.details)


class ToolWorld:
    """What outlives a session, and the session that is open now."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.clock = ManualClock()
        self.reports: list[Report] = []
        self.environment: ExecutionEnvironment | None = None
        self.commits: list[Settled] = []
        self.session: Session
        self.runtime: TaskRuntime
        self.registry: Registry

    async def open(self, *tools: AnyTool, extensions: tuple[Extension, ...] = (), resume: bool = True) -> None:
        self.session = await Session.start(self.storage, clock=self.clock, on_report=self.reports.append, drain_ms=50)
        self.session.observe(self.commits.append)
        tasks = TaskRegistry()
        self.registry = Registry(tasks)
        self.registry.install(Extension("tools", tools=tools), *extensions)
        tasks.install(
            ToolTask(
                self.session,
                registry=self.registry,
                progress=ProgressWriter(self.session),
                environment_for=lambda _: self.environment,
                wait=lambda id: self.runtime.wait(id, through_blocked=True),
            )
        )
        self.runtime = TaskRuntime(self.session, tasks, drain_ms=50)
        await self.runtime.recover()
        if await self.session.conversation(ROOT) is None:
            async with self.session.commit() as tx:
                tx.create_conversation(owner=None, root=True)
                await tx.draft(Agent, conversation=ROOT)
                await tx.draft(Live, conversation=ROOT)
                await tx.draft(UsageTotals, conversation=ROOT)
        self.commits.clear()
        if resume:
            self.runtime.resume()

    async def close(self) -> None:
        if self.session.close_report is None:
            await self.session.close()

    async def crash(self) -> None:
        """As if the process ended now: only what has settled is there for the next open."""
        self.storage = self.storage.snapshot()
        self.session.fail(ConnectionError("the test's crash"))
        await self.session.close()
        self.reports.clear()

    async def call(
        self, name: str, arguments: object = None, *, raw: bytes | None = None, after: int | None = None
    ) -> int:
        """Create a call, as a commit of its own; the id of its task."""
        async with self.session.commit(conversation_id=ROOT) as tx:
            input = ToolInput(
                call_id=f"call-{name}",
                name=name,
                arguments=to_raw(arguments or {}) if raw is None else msgspec.Raw(raw),
                after=after,
            )
            task = tx.create_task(ToolTask, input)
        return task.id

    async def result(self, task: int) -> Result:
        await self.runtime.wait(task)
        found = [result for result in await self.results() if result.data.task == task]
        assert len(found) == 1, "a call has one result"
        assert found[0].entry.by_task == task
        assert str(task) not in (await self.live())
        return found[0]

    async def run(self, name: str, arguments: object = None, *, raw: bytes | None = None) -> Result:
        return await self.result(await self.call(name, arguments, raw=raw))

    async def results(self) -> list[Result]:
        """Those that a model reads."""
        found = [entry for entry in await self.session.entries(ROOT) if entry.kind == TOOL_RESULT]
        return [Result(entry) for entry in found if entry.messages]

    async def live(self) -> dict[str, LiveTool]:
        live = await self.session.snapshot(Live, conversation=ROOT)
        assert live is not None
        return live.tools

    async def usage(self) -> dict[str, object]:
        totals = await self.session.snapshot(UsageTotals, conversation=ROOT)
        assert totals is not None
        return cast("dict[str, object]", totals.tools)
