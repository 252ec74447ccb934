"""Hooks of tool calls (rules H124 to H132): what they may do, where they apply, what becomes of one that raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

from perdure.harness.hooks import Block, HookCall, HookRunner, Installed, after_tool, before_tool
from perdure.harness.tool import ToolResult, tool
from perdure.kernel.json import JsonValue
from perdure.kernel.records import NULL
from perdure.kernel.reports import Report
from perdure.kernel.session import Session
from perdure.storage.memory import MemoryStorage


@tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Bench:
    def __init__(self, session: Session, reports: list[Report]) -> None:
        self.session = session
        self.reports = reports
        self.runner = HookRunner(session)

    def call(self, conversation: int = 1) -> HookCall:
        return HookCall(id=9, conversation_id=conversation, tool=add, arguments={"a": 1, "b": 2})

    async def child_of(self, conversation: int) -> int:
        """A conversation owned by a task of another."""
        async with self.session.commit(conversation_id=conversation) as tx:
            task = tx.new_task(kind="app.parent", version=1, phase="start", input=NULL)
            return tx.create_conversation(owner=task.id).id


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    reports: list[Report] = []
    async with Session.open(MemoryStorage(), on_report=reports.append) as session:
        async with session.commit() as tx:
            tx.create_conversation(owner=None, root=True)
        yield Bench(session, reports)


async def test_each_hook_sees_what_the_ones_before_made_of_the_arguments(bench: Bench) -> None:
    seen: list[dict[str, JsonValue]] = []

    @before_tool
    async def double(call: HookCall) -> Mapping[str, JsonValue]:
        seen.append(call.arguments)
        return {**call.arguments, "a": 10}

    @before_tool
    async def look(call: HookCall) -> None:
        seen.append(call.arguments)
        call.arguments["a"] = "changed in place"

    arguments, block = await bench.runner.before(
        [Installed("x", double), Installed("x", look), Installed("x", look)], bench.call()
    )
    assert (arguments, block) == ({"a": 10, "b": 2}, None)
    assert seen[0]["a"] == 1
    assert arguments == {"a": 10, "b": 2}


async def test_the_first_block_ends_the_asking(bench: Bench) -> None:
    asked: list[str] = []

    @before_tool
    async def no(call: HookCall) -> Block:
        asked.append(call.name)
        return Block("not today")

    _, block = await bench.runner.before([Installed("x", no), Installed("x", no)], bench.call())
    assert block == Block("not today")
    assert asked == ["add"]


async def test_a_before_hook_that_raises_blocks_and_is_reported(bench: Bench) -> None:
    @before_tool
    async def broken(call: HookCall) -> None:
        raise RuntimeError("secret detail")

    _, block = await bench.runner.before([Installed("guards", broken)], bench.call())
    assert block is not None
    assert "secret" not in block.reason
    (report,) = bench.reports
    assert (report.type, report.extension, report.task, report.conversation) == ("hook_failed", "guards", 9, 1)


async def test_arguments_that_are_no_json_block(bench: Bench) -> None:
    @before_tool
    async def odd(call: HookCall) -> Mapping[str, JsonValue]:
        return {"a": {1, 2}}  # pyright: ignore[reportReturnType]

    _, block = await bench.runner.before([Installed("x", odd)], bench.call())
    assert block is not None


async def test_after_hooks_may_replace_the_result_and_one_that_raises_is_skipped(bench: Bench) -> None:
    @after_tool
    async def broken(call: HookCall, result: ToolResult) -> ToolResult:
        raise RuntimeError

    @after_tool
    async def wrong(call: HookCall, result: ToolResult) -> ToolResult:
        return "text"  # pyright: ignore[reportReturnType]

    @after_tool
    async def sign(call: HookCall, result: ToolResult) -> ToolResult:
        return ToolResult(result.text + "!")

    hooks = [Installed("x", hook) for hook in (broken, sign, wrong, sign)]
    assert (await bench.runner.after(hooks, bench.call(), ToolResult("3"))).text == "3!!"
    assert [report.type for report in bench.reports] == ["hook_failed", "hook_failed"]


async def test_a_hook_applies_where_its_scope_says(bench: Bench) -> None:
    child = await bench.child_of(1)
    grandchild = await bench.child_of(child)
    async with bench.session.commit() as tx:
        other = tx.create_conversation(owner=None).id

    async def refuse(call: HookCall) -> Block:
        return Block("no")

    async def blocked(**scope: object) -> set[int]:
        hook = before_tool(**scope)(refuse)  # pyright: ignore[reportCallIssue,reportArgumentType]
        found = set[int]()
        for conversation in (1, child, grandchild, other):
            if (await bench.runner.before([Installed(None, hook)], bench.call(conversation)))[1] is not None:
                found.add(conversation)
        return found

    assert await blocked() == {1, child, grandchild, other}
    assert await blocked(conversation=child) == {child}
    assert await blocked(conversation=child, subtree=True) == {child, grandchild}
    assert await blocked(conversation=1, subtree=True) == {1, child, grandchild}


def test_a_subtree_needs_its_conversation() -> None:
    with pytest.raises(ValueError, match="subtree=True needs the conversation"):
        before_tool(subtree=True)(lambda call: None)  # pyright: ignore[reportArgumentType]
