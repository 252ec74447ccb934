"""An extension that is replaced, removed or put back while a run is on its way (rules H120, H121 and H229)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from kit import Commits, opened, transcript, until
from typing_extensions import override

from perdure.harness.documents import SYSTEM, SystemData
from perdure.harness.harness import Harness
from perdure.harness.hooks import (
    HookCall,
    HookRequest,
    after_tool,
    before_request,
    before_tool,
)
from perdure.harness.model import ModelEvent, ModelRequest
from perdure.harness.registry import Extension, PromptSection
from perdure.harness.tool import AnyTool, ToolCall, ToolResult, tool
from perdure.kernel.records import Completed
from perdure.kernel.session import Settled
from perdure.tasks import Next, Run, Task
from perdure.testing.model import ScriptedModel, call, calls, say


def looking(*, wide: bool = False) -> AnyTool:
    """A tool in two versions."""

    @tool(name="look")
    async def narrow(at: int) -> str:
        """Look."""
        return f"seen {at}"

    @tool(name="look")
    async def broad(at: int, far: bool = False) -> str:
        """Look, near or far."""
        return f"seen {at} {'far' if far else 'near'}"

    return broad if wide else narrow


class Ear(ScriptedModel):
    """Keeps what it is asked."""

    def __init__(self, *replies) -> None:
        super().__init__(list(replies))
        self.asked: list[ModelRequest] = []

    @override
    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        self.asked.append(request)
        return super().stream(request)


def at_commit(harness: Harness, number: int, change: Callable[[], None]) -> None:
    """Change something once so many durable commits have settled, before anything that they allow begins."""
    seen: list[Settled] = []

    def observe(settled: Settled) -> None:
        if not settled.batch.progress:
            seen.append(settled)
            if len(seen) == number:
                change()

    harness.session.observe(observe)


def parameters(request: ModelRequest) -> list[str]:
    return [name for spec in request.tools for name in msgspec.json.decode(spec.parameters)["properties"]]


async def test_a_tool_whose_schema_changes_between_pin_and_send_is_offered_as_it_is_now_h229() -> None:
    model = Ear(say("done"))
    async with opened(model, extensions=[Extension("eyes", tools=[looking()])]) as harness:
        root = await harness.root()
        commits = Commits(harness)
        at_commit(harness, 1, lambda: harness.registry.replace(Extension("eyes", tools=[looking(wide=True)])))
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert [parameters(request) for request in model.asked] == [["at", "far"]]
        # Pinned, found to be out of date, pinned anew, answered.
        assert len(commits.durable) == 4


async def test_a_tool_that_goes_between_pin_and_send_is_not_offered_h229() -> None:
    model = Ear(say("done"))
    async with opened(model, extensions=[Extension("eyes", tools=[looking()])]) as harness:
        root = await harness.root()
        at_commit(harness, 1, lambda: harness.registry.remove("eyes"))
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert [parameters(request) for request in model.asked] == [[]]


async def test_a_call_whose_intent_is_stored_keeps_its_tool_h229() -> None:
    async with opened(
        Ear(call("look", at=1), say("done")), extensions=[Extension("eyes", tools=[looking()])]
    ) as harness:
        root = await harness.root()
        at_commit(harness, 2, lambda: harness.registry.remove("eyes"))
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert (await transcript(root))[2] == "tool-result seen 1"


async def test_a_tool_that_goes_between_the_answer_and_the_intent_is_unavailable_h229() -> None:
    @before_tool
    async def look_on(asked: HookCall) -> None:
        """Lets every call be as it is; for it the intent is a commit of its own."""

    guard = Extension("guard", hooks=[look_on])
    model = Ear(call("look", at=1), say("done"))
    async with opened(model, extensions=[Extension("eyes", tools=[looking()]), guard]) as harness:
        root = await harness.root()
        at_commit(harness, 2, lambda: harness.registry.remove("eyes"))
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert (await transcript(root))[2].startswith("tool-result There is no tool 'look'")
        assert [parameters(request) for request in model.asked] == [["at"], []]


async def test_a_tool_that_changes_between_the_answer_and_the_intent_takes_the_arguments_if_it_can_h229() -> None:
    @before_tool
    async def look_on(asked: HookCall) -> None:
        """As above."""

    guard = Extension("guard", hooks=[look_on])
    model = Ear(call("look", at=1), say("done"))
    async with opened(model, extensions=[Extension("eyes", tools=[looking()]), guard]) as harness:
        root = await harness.root()
        at_commit(harness, 2, lambda: harness.registry.replace(Extension("eyes", tools=[looking(wide=True)])))
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert (await transcript(root))[2] == "tool-result seen 1 near"


async def test_a_hook_that_goes_while_a_call_waits_is_not_asked_and_one_that_comes_is_h229() -> None:
    asked: list[str] = []

    def noting(name: str):
        @before_tool
        async def note(call: HookCall) -> None:
            asked.append(f"{name} {call.arguments['n']}")

        return note

    @tool(sequential=True)
    async def step(n: int) -> str:
        """Step."""
        if n == 1:
            remove()
            harness.registry.install(Extension("newer", hooks=[noting("newer")]))
        return f"step {n}"

    model = ScriptedModel([calls(call("step", n=1), call("step", n=2)), say("done")])
    async with opened(model, tools=(step,)) as harness:
        remove = harness.registry.add_hook(noting("older"))
        await (await (await harness.root()).submit("hi")).wait()
    assert asked == ["older 1", "newer 2"]


async def test_a_call_that_runs_keeps_its_hooks_and_wrappers_h229() -> None:
    reached, hold = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        reached.set()
        await hold.wait()
        return "waited"

    @after_tool
    async def sign(call: HookCall, result: ToolResult) -> ToolResult:
        return ToolResult(f"{result.text}, signed")

    async def around(call: ToolCall, run: Callable[[], Awaitable[object]]) -> object:
        return f"{await run()}, wrapped"

    whole = Extension("whole", tools=[wait], hooks=[sign], wrappers=[around])
    async with opened(ScriptedModel([call("wait"), call("wait"), say("done")]), extensions=[whole]) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await reached.wait()
        harness.registry.replace(Extension("whole", tools=[wait]))
        hold.set()
        await submission.wait()
        assert (await transcript(root))[2::2] == [
            "tool-result waited, wrapped, signed",
            "tool-result waited",
        ]


async def test_a_section_that_changes_under_way_is_told_with_the_next_request_h229_h65() -> None:
    def of(text: str) -> Extension:
        return Extension("place", sections=[PromptSection("place", text), PromptSection("manner", "Be brief.")])

    @tool
    async def move() -> str:
        """Move."""
        harness.registry.replace(of("You are in Lyon."))
        return "moved"

    async with opened(
        ScriptedModel([call("move"), say("done")]), tools=(move,), extensions=[of("At home.")]
    ) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        shown = [entry.data_as(SystemData) for entry in await root.entries() if entry.kind == SYSTEM]
        assert [data.sections for data in shown][1:] == [{"place": "You are in Lyon."}]
        assert shown[0].sections["place"] == "At home."


async def test_a_hook_that_comes_under_way_counts_from_the_next_request_h229() -> None:
    turns: list[int] = []

    @before_request
    async def note(asked: HookRequest) -> None:
        turns.append(asked.turn)

    @tool
    async def arm() -> str:
        """Arm."""
        harness.registry.install(Extension("armed", hooks=[note]))
        return "armed"

    async with opened(ScriptedModel([call("arm"), say("done")]), tools=(arm,)) as harness:
        await (await (await harness.root()).submit("hi")).wait()
    assert turns == [1]


class Job(Task[None, str], kind="app.reloaded", version=1):
    """Waits for a signal, twice."""

    async def start(self, run: Run[None, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("first", self.again, None)

    async def again(self, run: Run[None, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.wait_signal("second", self.end, None)

    async def end(self, run: Run[None, str, None]) -> Next[str]:
        async with run.commit() as tx:
            return tx.complete("done")


async def test_a_kind_of_task_that_goes_blocks_its_tasks_until_it_is_back_h229() -> None:
    jobs = Extension("jobs", tasks=[Job])
    async with opened(None, extensions=[jobs]) as harness:
        root = await harness.root()
        async with root.commit() as tx:
            task = tx.create_task(Job, None)
        harness.resume()

        def phase() -> str:
            return getattr(harness.session.live.settled[task.id].state, "phase", "")

        await until(lambda: phase() == "again")
        harness.registry.remove("jobs")
        await harness.send_signal(task.id, "first")
        (blocked,) = (await harness.inspect()).tasks
        assert (blocked.kind, blocked.blocked, blocked.phase) == ("app.reloaded", "missing_task", "again")
        harness.registry.install(jobs)
        await until(lambda: phase() == "end")
        harness.registry.replace(Extension("jobs", tasks=[Job]))
        await harness.send_signal(task.id, "second")
        await root.idle()
        ended = await harness.session.task(task.id)
        assert ended is not None
        assert isinstance(ended.outcome, Completed)
