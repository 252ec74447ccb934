"""The process that gets killed: ``python -m perdure.cli.demo.agent FOLDER``.

It runs like any host would: open the store, submit each job with its request id, wait for the answer. At the points
where the parent may want to kill it, it says so on standard output and stands still until the parent says ``go``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from typing_extensions import override

from perdure.cli.demo.project import JOBS, ORDERS, SUPPLIER, script
from perdure.cli.demo.space import SPACE, spaces_of
from perdure.harness.calls import EXECUTE
from perdure.harness.documents import ASSISTANT, TOOL_RESULT, ToolInput, ToolResultData
from perdure.harness.environment import ExecResult, ExecutionEnvironment, OpenCall
from perdure.harness.harness import Harness
from perdure.harness.messages import AssistantMessage, ToolResultMessage, decode_messages
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension
from perdure.harness.settings import RetryPolicy
from perdure.harness.tool import tool
from perdure.kernel.records import EntryRecord, Running, Sleeping, TaskRecord
from perdure.kernel.session import Settled
from perdure.kernel.storage import Batch
from perdure.spaces.durable import CallEnvironment, DurableSpace
from perdure.spaces.settings import SpaceSettings
from perdure.storage.sqlite import SqliteStorage
from perdure.testing.model import Call, Calls, ScriptedModel
from perdure.tools.coding import coding_tools

STREAMED = 6
"""The event of each answer in words at which it may be killed in streaming."""


def tell(**event: object) -> None:
    """One line for the parent."""
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def stand(point: str, **more: object) -> None:
    """Stand still at a point where the parent may kill this process."""
    tell(point=point, **more)
    if not sys.stdin.readline():
        sys.exit("the parent is gone")


class DemoStorage(SqliteStorage):
    """The real storage, which also stands still just before an admission is handed to the disk."""

    @override
    def commit(self, batch: Batch) -> asyncio.Future[None]:
        if any(submission.entry is not None and submission.status == "placed" for submission in batch.submissions):
            stand("admission", job=batch.submissions[0].request_id)
        return super().commit(batch)


class DemoSpace(DurableSpace):
    """The real durable Space, whose calls also stand still inside the tools."""

    @override
    def for_call(self, call: OpenCall) -> ExecutionEnvironment:
        return DemoCall(self._scope, self._outputs, call)


class DemoCall(CallEnvironment):
    @override
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, expect: str | None = None) -> None:
        await super().write_file(path, data, mode=mode, expect=expect)
        stand("in_safe_tool", path=path)

    @override
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        silent = True

        def said(data: bytes) -> None:
            nonlocal silent
            if silent:
                silent = False
                stand("command_runs")
            if on_output is not None:
                on_output(data)

        result = await super().exec(command, cwd=cwd, env=env, timeout_ms=timeout_ms, on_output=said)
        stand("in_command")
        return result


def supplier_tools(folder: Path) -> Extension:
    book = folder / SUPPLIER / ORDERS

    @tool(replay="unsafe", sequential=True)
    async def order(item: str, count: int) -> str:
        """Order from the supplier. Ordering twice delivers twice."""
        with book.open("a") as file:
            file.write(msgspec.json.encode({"item": item, "count": count}).decode() + "\n")
        stand("in_order", tool=item)
        return f"ordered {count} x {item}"

    @tool(replay="safe")
    async def orders() -> str:
        """The supplier's book: what was ordered so far."""
        return book.read_text() if book.exists() else ""

    return Extension("supplier", tools=[order, orders])


class Watcher:
    """Tells the parent what each commit did, and stands still after those that matter."""

    def __init__(self) -> None:
        self.phases: dict[int, str] = {}

    def __call__(self, settled: Settled) -> None:
        for entry in settled.batch.entries:
            self._entry(entry)
        for task in settled.batch.tasks:
            self._task(task, settled.at)

    def _entry(self, entry: EntryRecord) -> None:
        if entry.kind == TOOL_RESULT:
            data = entry.data_as(ToolResultData)
            result = decode_messages(entry.raw_messages)[0]
            assert isinstance(result, ToolResultMessage), "a tool result entry holds one"
            tell(result=data.name, code=data.code, text=result.text)
            stand("after_tool", tool=data.name)
        elif entry.kind == ASSISTANT:
            message = decode_messages(entry.raw_messages)[0]
            assert isinstance(message, AssistantMessage), "an assistant entry holds one"
            tell(answer=message.text, stop=message.stop_reason, calls=[part.name for part in message.tool_calls])

    def _task(self, task: TaskRecord, at: int) -> None:
        state = task.state
        if isinstance(state, Sleeping):
            stand("in_sleep", kind=task.kind)
        elif isinstance(state, Running) and task.kind == "pi.tool":
            # A call has its intent from its first commit on, or from a later one; one of an earlier process has both.
            before = self.phases.get(task.id, "start" if task.started_at == at else EXECUTE)
            self.phases[task.id] = state.phase
            if (before, state.phase) == ("start", EXECUTE):
                stand("before_tool", tool=msgspec.json.decode(task.raw_input, type=ToolInput).name)


async def pace(request: ModelRequest, number: int) -> None:
    if number == STREAMED and not isinstance(script(request), (Call, Calls)):
        await asyncio.sleep(0.12)  # past one partial interval, so that a part of the answer is committed
        stand("streaming", attempt=request.attempt)


async def work(folder: Path) -> None:
    storage = DemoStorage(folder / "agent.db")
    watcher = Watcher()
    async with Harness.open(
        storage,
        models=ScriptedModel(script, pace=pace),
        extensions=[coding_tools(), supplier_tools(folder)],
        environment=DemoSpace(await spaces_of(folder).open(SPACE), SpaceSettings()),
        retry=RetryPolicy(first_ms=200, jitter=0.0),
        on_report=lambda report: tell(report=report.type, message=report.message),
    ) as harness:
        found = [{"kind": task.kind, "status": task.status} for task in (await harness.inspect()).tasks]
        tell(found=found, commits=harness.session.seq)
        if harness.session.seq:
            stand("recovery")
        harness.session.observe(watcher)
        root = await harness.root()
        for request_id, text in JOBS:
            submission = await root.submit(text, request_id=request_id)
            answer = await submission.answer()
            tell(job=request_id, answered=answer.text)
    tell(finished=True)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
