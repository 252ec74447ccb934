"""Hooks of tool calls (rules H124 to H132): what they may do, where they apply, what becomes of one that raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

from perdure.harness import hook_runner
from perdure.harness.hook_runner import HookRunner
from perdure.harness.hooks import (
    BeforeCompact,
    Block,
    Decline,
    HookCall,
    HookCompaction,
    Installed,
    OnYield,
    Summary,
    after_tool,
    before_compact,
    before_tool,
)
from perdure.harness.messages import Text, UserMessage
from perdure.harness.registry import Extension, Registry
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
        self.registry = Registry()
        self.runner = HookRunner(session, self.registry)

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

    arguments, block = await bench.runner.before_tool(
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

    _, block = await bench.runner.before_tool([Installed("x", no), Installed("x", no)], bench.call())
    assert block == Block("not today")
    assert asked == ["add"]


async def test_a_before_hook_that_raises_blocks_and_is_reported(bench: Bench) -> None:
    @before_tool
    async def broken(call: HookCall) -> None:
        raise RuntimeError("secret detail")

    _, block = await bench.runner.before_tool([Installed("guards", broken)], bench.call())
    assert block is not None
    assert "secret" not in block.reason
    (report,) = bench.reports
    assert (report.type, report.extension, report.task, report.conversation) == ("hook_failed", "guards", 9, 1)


async def test_arguments_that_are_no_json_block(bench: Bench) -> None:
    @before_tool
    async def odd(call: HookCall) -> Mapping[str, JsonValue]:
        return {"a": {1, 2}}  # pyright: ignore[reportReturnType]

    _, block = await bench.runner.before_tool([Installed("x", odd)], bench.call())
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
    assert (await bench.runner.after_tool(hooks, bench.call(), ToolResult("3"))).text == "3!!"
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
            if (await bench.runner.before_tool([Installed(None, hook)], bench.call(conversation)))[1] is not None:
                found.add(conversation)
        return found

    assert await blocked() == {1, child, grandchild, other}
    assert await blocked(conversation=child) == {child}
    assert await blocked(conversation=child, subtree=True) == {child, grandchild}
    assert await blocked(conversation=1, subtree=True) == {1, child, grandchild}


async def test_scopes_are_told_apart_and_owners_are_read_once_h128(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await bench.child_of(1)
    grandchild = await bench.child_of(child)
    reads: list[int] = []
    look = bench.session.conversation

    async def counted(id: int) -> object:
        reads.append(id)
        return await look(id)

    monkeypatch.setattr(bench.session, "conversation", counted)

    async def decline(compaction: HookCompaction) -> Decline:
        return Decline("no")

    registry = bench.registry
    registry.add_hook(before_compact(decline))
    registry.add_hook(before_compact(conversation=child)(decline))
    for _ in range(3):
        assert len(await bench.runner.applying(BeforeCompact, grandchild)) == 1
    assert reads == []
    registry.add_hook(before_compact(conversation=1, subtree=True)(decline))
    registry.add_hook(before_compact(conversation=child, subtree=True)(decline))
    for _ in range(3):
        assert len(await bench.runner.applying(BeforeCompact, grandchild)) == 3
    assert reads == [grandchild, child, 1]
    assert len(await bench.runner.applying(BeforeCompact, 1)) == 2
    assert await bench.runner.applying(OnYield, 1) == ()


async def test_a_scope_too_deep_to_be_told_is_an_error_not_a_hook_left_out_h128(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await bench.child_of(await bench.child_of(1))
    monkeypatch.setattr(hook_runner, "MAX_DEPTH", 1)

    async def block(call: HookCall) -> Block:
        return Block("no")

    hook = before_tool(conversation=1, subtree=True)(block)
    with pytest.raises(RuntimeError, match="owners above"):
        await bench.runner.before_tool([Installed(None, hook)], bench.call(child))


async def test_the_first_that_says_anything_decides_a_compaction_h220(bench: Bench) -> None:
    asked = HookCompaction(id=9, conversation_id=1, reason="manual", tokens=7, messages=[UserMessage((Text("hi"),))])

    @before_compact
    async def silent(compaction: HookCompaction) -> None:
        assert compaction is asked

    @before_compact
    async def broken(compaction: HookCompaction) -> Summary:
        raise RuntimeError

    @before_compact
    async def odd(compaction: HookCompaction) -> Summary:
        return "text"  # pyright: ignore[reportReturnType]

    @before_compact
    async def surrogate(compaction: HookCompaction) -> Summary:
        return Summary("\ud800")

    @before_compact
    async def sums(compaction: HookCompaction) -> Summary:
        return Summary("hi was said")

    @before_compact
    async def declines(compaction: HookCompaction) -> Decline:
        return Decline("not now")

    bench.registry.install(Extension("x", hooks=[silent, broken, odd, surrogate]))
    assert await bench.runner.before_compact(asked) is None
    assert [report.kind for report in bench.reports] == ["pi.compaction"] * 3
    bench.registry.install(Extension("y", hooks=[sums, declines]))
    assert await bench.runner.before_compact(asked) == Summary("hi was said")
    bench.registry.remove("y")
    bench.registry.install(Extension("z", hooks=[declines, sums]))
    assert await bench.runner.before_compact(asked) == Decline("not now")


def test_a_decorator_says_what_it_makes() -> None:
    assert before_compact.__name__ == "before_compact"
    assert "compaction" in (before_compact.__doc__ or "")


def test_a_subtree_needs_its_conversation() -> None:
    with pytest.raises(ValueError, match="subtree=True needs the conversation"):
        before_tool(subtree=True)(lambda call: None)  # pyright: ignore[reportArgumentType]
