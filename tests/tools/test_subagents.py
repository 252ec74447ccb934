"""``subagent``: another agent's conversation, owned by the call that asks it (rules H117, H160 to H162, H166, H347 to
H350)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from harness.kit import Hold, Note, kinds, live, opened, rest, until
from harness.test_tool_scopes import Environment
from perdure.harness.conversation import Conversation
from perdure.harness.documents import TOOL_RESULT
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.handle import CallRefused
from perdure.harness.harness import Harness
from perdure.harness.inbox import admit, write_content
from perdure.harness.limits import Limits
from perdure.harness.messages import SystemMessage, ToolResultMessage, decode_messages
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension
from perdure.harness.submission import Unanswered
from perdure.harness.tool import ToolCall, ToolResult, tool
from perdure.storage.memory import MemoryStorage
from perdure.tasks import NotStopped, WorkBlocked
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools.subagents import Subagent, subagent

SCRIPT = {"Ask.": [call("subagent", prompt="Go."), say("done")], "Go.": [call("look"), say("I looked.")]}


@tool(replay="safe")
async def look() -> str:
    """Look."""
    return "seen"


async def result(conversation: Conversation) -> ToolResultMessage:
    (entry,) = [e for e in await conversation.entries() if e.kind == TOOL_RESULT and e.messages]
    (message,) = decode_messages(entry.raw_messages)
    assert isinstance(message, ToolResultMessage)
    return message


async def child(harness: Harness) -> Conversation:
    (found,) = [info for info in await harness.conversations() if info.record.owner is not None]
    return harness.handle(found.id)


async def test_the_answer_is_the_result_and_the_conversation_is_the_calls_h117_h160_h348() -> None:
    async with opened(ScriptedModel(SCRIPT), tools=(subagent(), look)) as harness:
        root = await harness.root()
        await (await root.submit("Ask.")).answer()
        told = await result(root)
        assert (told.text, told.is_error) == ("I looked.", False)
        below = await child(harness)
        assert await kinds(below) == ["pi.user", "pi.assistant", "pi.tool-result", "pi.assistant"]
        info = await below.info()
        entry = next(e for e in await root.entries() if e.kind == TOOL_RESULT)
        assert info.record.owner == entry.by_task
        assert info.labels == {"subagent": "subagent"}
        data = entry.data
        assert isinstance(data, dict)
        assert data["details"] == {"conversation": below.id}
        (submission,) = await harness.session.submissions(conversation_id=below.id)
        assert submission.request_id == f"pi.subagent:{entry.by_task}"


async def test_what_a_child_spends_is_counted_once_h166() -> None:
    async with opened(ScriptedModel(SCRIPT), tools=(subagent(), look)) as harness:
        root = await harness.root()
        await (await root.submit("Ask.")).answer()
        own, below, deep, all = (
            await root.usage(),
            await (await child(harness)).usage(),
            await root.usage(deep=True),
            await harness.usage(),
        )
        assert (own.turns, below.turns, deep.turns, all.turns) == (2, 2, 4, 4)
        assert deep == all
        assert deep.tools["look"]["calls"] == 1


async def test_it_has_the_settings_that_are_configured_else_those_of_its_caller_h347() -> None:
    asked: list[ModelRequest] = []

    async def pace(request: ModelRequest, event: int) -> None:
        if not event:
            asked.append(request)

    script = {
        "Ask.": [
            call("delegate", agent="reader", prompt="Read."),
            call("delegate", agent="any", prompt="Do."),
            say(""),
        ],
        "Read.": say("read"),
        "Do.": say("did"),
    }
    agents = {
        "reader": Subagent("reads only", instructions="Only read.", tools=["look"], limits=Limits(turns=7)),
        "any": Subagent("does anything", thinking="low"),
    }
    delegate = subagent(agents, name="delegate")
    assert "- reader: reads only" in delegate.description
    assert b'"enum":["reader","any"]' in bytes(delegate.spec.parameters)
    async with opened(ScriptedModel(script, pace=pace), tools=(delegate, look)) as harness:
        root = await harness.root()
        await root.set_agent(thinking="high", cwd="src")
        await (await root.submit("Ask.")).answer()
        reader, other = [harness.handle(c.id) for c in await harness.conversations() if c.record.owner is not None]
        agent = await reader.agent()
        assert (agent.thinking, agent.cwd, agent.tools, agent.limits) == ("high", "src", ["look"], {"turns": 7})
        assert (await other.agent()).thinking == "low"
        request = next(r for r in asked if r.messages[-1].text == "Read.")  # pyright: ignore[reportAttributeAccessIssue]
        assert [tool.name for tool in request.tools] == ["look"]
        first = request.messages[0]
        assert isinstance(first, SystemMessage)
        assert "Only read." in first.text


async def test_without_tools_of_its_own_it_has_those_that_were_added_to_its_callers_h107_h347() -> None:
    asked: list[ModelRequest] = []

    async def pace(request: ModelRequest, event: int) -> None:
        if not event:
            asked.append(request)

    @tool(replay="safe")
    async def grow() -> ToolResult:
        """Grow."""
        return ToolResult("grown", add_tools=["look"])

    script = {
        "Ask.": [
            call("grow"),
            call("delegate", agent="any", prompt="Do."),
            call("delegate", agent="less", prompt="Less."),
            say("done"),
        ],
        "Do.": say("did"),
        "Less.": say("less"),
    }
    agents = {"any": Subagent("does anything"), "less": Subagent("does less", tools=["grow"])}
    delegate = subagent(agents, name="delegate")
    async with opened(ScriptedModel(script, pace=pace), tools=(delegate, grow, look)) as harness:
        root = await harness.root()
        await root.set_agent(tools=["delegate", "grow"])
        await (await root.submit("Ask.")).answer()
        offered = {cast("Any", r.messages[-1]).text: {each.name for each in r.tools} for r in asked}
        assert offered["Do."] == {"delegate", "grow", "look"}
        assert offered["Less."] == {"grow"}


@pytest.mark.parametrize("bad", [{}, {"": Subagent()}])
def test_what_is_no_set_of_agents_is_refused(bad: dict[str, Subagent]) -> None:
    of_another_kind: Any = "reader"
    with pytest.raises(TypeError, match=r"given by name, as \{'reader': .*not as str"):
        subagent(of_another_kind)
    with pytest.raises(ValueError, match="at least one"):
        subagent(bad)
    with pytest.raises(ValueError, match="max_depth"):
        subagent(max_depth=0)


async def test_without_an_answer_the_result_says_why_h348() -> None:
    asked = subagent({"short": Subagent("is short", limits=Limits(turns=1))})
    script = {**SCRIPT, "Ask.": [call("subagent", agent="short", prompt="Go."), say("done")]}
    async with opened(ScriptedModel(script), tools=(asked, look)) as harness:
        root = await harness.root()
        assert (await (await root.submit("Ask.")).answer()).text == "done"
        told = await result(root)
        assert told.is_error
        assert told.text.startswith("The agent gave no answer (limit: ")


async def test_the_sessions_limit_counts_children_and_a_conversations_own_does_not_h350() -> None:
    async with opened(ScriptedModel(SCRIPT), tools=(subagent(), look), limits=Limits(turns=3)) as harness:
        submission = await (await harness.root()).submit("Ask.")
        with pytest.raises(Unanswered) as ended:
            await submission.answer()
        assert ended.value.reason == "limit"
    async with opened(ScriptedModel(SCRIPT), tools=(subagent(), look), conversation_limits=Limits(turns=2)) as harness:
        submission = await (await harness.root()).submit("Ask.")
        assert (await submission.answer()).text == "done"


async def test_agents_below_one_another_are_bounded_h349() -> None:
    def reply(request: ModelRequest):
        told = [message for message in request.messages if isinstance(message, ToolResultMessage)]
        return say(f"<{told[-1].text}>") if told else call("subagent", prompt="Deeper.")

    async with opened(ScriptedModel(reply), tools=(subagent(max_depth=2),)) as harness:
        answer = await (await (await harness.root()).submit("Deeper.")).answer()
        assert answer.text == "<<<There are 2 agents above this one already. Do it yourself.>>>"
        assert len(await harness.conversations()) == 3


async def test_what_it_does_is_shown_meanwhile_h348() -> None:
    hang = asyncio.Event()

    @tool(name="look", replay="safe")
    async def slow() -> str:
        """Look for long."""
        await hang.wait()
        return "seen"

    async with opened(ScriptedModel(SCRIPT), tools=(subagent(), slow), partial_interval_ms=0) as harness:
        root = await harness.root()
        submission = await root.submit("Ask.")
        shown: list[str] = []
        for _ in range(1000):
            await asyncio.sleep(0)
            shown = [tool["output"] for tool in (await live(root)).tools.values()]
            if shown == ["turn 1\n  look\n"]:
                break
        else:
            raise AssertionError(shown)
        hang.set()
        await submission.answer()
        assert (await result(root)).text == "I looked."


# --- aborts and kills --------------------------------------------------------------------------------------------


async def test_an_abort_is_done_only_when_the_child_agent_has_stopped_h162() -> None:
    """A fault that users report: the abort reports done while the child agent goes on."""
    running: list[str] = []

    @tool(name="look", replay="safe")
    async def slow() -> str:
        """Look for ever."""
        running.append("look")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            running.remove("look")
        return ""

    async with opened(ScriptedModel(SCRIPT), tools=(subagent(), slow)) as harness:
        root = await harness.root()
        submission = await root.submit("Ask.")
        await until(lambda: bool(running))
        below = await child(harness)
        await root.abort()
        assert not running
        assert not harness.session.live.settled, "nothing is live any more"
        assert (await submission.status(), (await live(below)).run) == ("unanswered", None)
        codes = [e.data["code"] for e in await below.entries() if e.kind == TOOL_RESULT and isinstance(e.data, dict)]
        assert codes == ["aborted"]
        (asked,) = await harness.session.submissions(conversation_id=below.id)
        assert (asked.status, asked.reason) == ("unanswered", "aborted")


@pytest.mark.parametrize("reopened", [False, True])
async def test_what_waits_in_a_childs_conversation_ends_with_the_call_h357(reopened: bool) -> None:
    """Nobody could begin it any more: whoever waits for it would wait for ever."""
    entered, storage = asyncio.Event(), MemoryStorage()

    @tool(name="look", replay="safe")
    async def slow() -> str:
        """Look for ever."""
        entered.set()
        await asyncio.Event().wait()
        return ""

    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=(subagent(), slow)) as harness:
        root = await harness.root()
        await root.submit("Ask.")
        await entered.wait()
        below = await child(harness)
        said = await below.submit("And more.")
        async with harness.session.commit() as tx:  # as a compaction queues its summary
            noted = (await admit(tx, below.id, write_content(Note(text="by the way"), head=None, edits=()))).submission
        if not reopened:
            await ended_with_the_call(harness, said.id, noted.id)
            return
        storage = storage.snapshot()
    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=(subagent(), slow)) as harness:
        await ended_with_the_call(harness, said.id, noted.id)


async def test_what_a_store_has_queued_below_an_ended_call_is_not_kept_in_mind_h357() -> None:
    """As an earlier release could leave it: no end of that call comes that would let go of it."""
    storage = MemoryStorage()
    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=(subagent(), look)) as harness:
        await (await (await harness.root()).submit("Ask.")).wait()
        below = await child(harness)
        async with harness.session.commit() as tx:
            tx.new_submission(type="write", status="queued", digest="d", request_id=None, conversation=below.id)
    async with opened(ScriptedModel(SCRIPT), storage=storage.snapshot(), tools=(subagent(), look)) as harness:
        assert len(await harness.session.submissions(status="queued")) == 1
        assert not harness._leftovers._waiting


async def ended_with_the_call(harness: Harness, said_id: int, noted_id: int) -> None:
    said, noted = await harness.submission(said_id), await harness.submission(noted_id)
    await (await harness.root()).abort()
    ended = await said.wait()
    assert (ended.reason, ended.detail) == ("aborted", "what the conversation belongs to has ended")
    assert await noted.status() == "done"
    assert "app.note" in await kinds(said.conversation)
    inspection = await harness.inspect()
    assert (inspection.tasks, inspection.queued, inspection.placed) == ([], [], [])
    await said.conversation.delete()


async def test_a_child_that_does_not_stop_is_named_by_the_abort_h162() -> None:
    stubborn = asyncio.Event()
    entered = asyncio.Event()

    @tool(name="look", replay="safe")
    async def deaf() -> str:
        """Look, and do not listen."""
        entered.set()
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue
        return "seen"

    reports = []
    async with opened(ScriptedModel(SCRIPT), tools=(subagent(), deaf), drain_ms=20, reports=reports) as harness:
        root = await harness.root()
        await root.submit("Ask.")
        await entered.wait()
        with pytest.raises(NotStopped, match=r"pi\.tool"):
            await root.abort()
        assert await root.busy(), "it is not said to be over"
        stubborn.set()
        await root.idle()


async def test_killed_while_the_child_answers_it_is_asked_once_h160_h161() -> None:
    hold, storage = Hold(1), MemoryStorage()

    async def pace(request: ModelRequest, event: int) -> None:
        if getattr(request.messages[-1], "text", "") == "Go.":
            await hold(request, event)

    script = {**SCRIPT, "Go.": say("I looked, and looked.")}
    async with opened(ScriptedModel(script, pace=pace), storage=storage, tools=(subagent(),)) as harness:
        submission = await (await harness.root()).submit("Ask.")
        await hold.reached.wait()
        await rest()
        crash = storage.snapshot()
    async with opened(ScriptedModel(script), storage=crash, tools=(subagent(),)) as harness:
        again = await harness.submission(submission.id)
        assert (await again.answer()).text == "done"
        assert (await result(await harness.root())).text == "I looked, and looked."
        assert (await kinds(await child(harness))).count("pi.user") == 1


async def test_a_tool_that_is_gone_after_a_restart_leaves_no_orphan_h342() -> None:
    storage, entered = MemoryStorage(), asyncio.Event()

    @tool(name="look", replay="safe")
    async def slow() -> str:
        """Look for ever."""
        entered.set()
        await asyncio.Event().wait()
        return ""

    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=(subagent(), slow)) as harness:
        submission = await (await harness.root()).submit("Ask.")
        await entered.wait()
        crash = storage.snapshot()
    async with opened(ScriptedModel(SCRIPT), storage=crash, tools=(slow,)) as harness:
        assert (await (await harness.submission(submission.id)).answer()).text == "done"
        assert (await result(await harness.root())).code == "interrupted"
        assert not harness.session.live.settled
        assert not await (await child(harness)).busy()


async def test_work_that_is_blocked_below_is_seen_by_who_waits_above_h162() -> None:
    hold = Hold(0)

    async def pace(request: ModelRequest, event: int) -> None:
        if getattr(request.messages[-1], "text", "") == "Go.":
            await hold(request, event)

    script = {**SCRIPT, "Go.": say("late")}
    storage = MemoryStorage()
    async with opened(ScriptedModel(script, pace=pace), storage=storage, tools=(subagent(),)) as harness:
        await (await harness.root()).submit("Ask.", request_id="ask")
        await hold.reached.wait()
        await rest()
        crash = storage.snapshot()
    async with opened(ScriptedModel(script), storage=crash, tools=(subagent(),), restart_limit=1) as harness:
        root = await harness.root()
        submission = await root.submit("Ask.", request_id="ask")
        with pytest.raises(WorkBlocked):
            await root.idle()
        blocked = {task.kind: task.id for task in (await harness.inspect()).tasks if task.blocked}
        assert "pi.generation" in blocked
        for id in sorted(blocked.values()):
            await harness.retry_task(id)
        assert (await submission.answer()).text == "done"
        assert (await kinds(await child(harness))).count("pi.user") == 1


async def test_waiting_through_many_crashes_parks_nobody_h351() -> None:
    """The child's own steps are progress; its caller makes none meanwhile."""
    script = {
        "Ask.": [call("subagent", prompt="Go."), say("done")],
        "Go.": [*(call("look", step=step) for step in range(8)), say("eight steps")],
    }
    storage, steps = MemoryStorage(), list[int]()
    entered = asyncio.Event()

    @tool(name="look", replay="safe")
    async def once_in_a_life(step: int, call: ToolCall) -> str:
        """Look, once in the life of a process."""
        if call.attempt == 1:
            steps.append(step)
            entered.set()
            await asyncio.Event().wait()
        return "seen"

    tools = subagent(), once_in_a_life
    for _ in range(8):
        entered.clear()
        async with opened(ScriptedModel(script), storage=storage, tools=tools, restart_limit=3) as harness:
            await (await harness.root()).submit("Ask.", request_id="ask")
            await entered.wait()
            storage = storage.snapshot()
    async with opened(ScriptedModel(script), storage=storage, tools=tools, restart_limit=3) as harness:
        submission = await (await harness.root()).submit("Ask.", request_id="ask")
        assert (await submission.answer()).text == "done"
        assert steps == list(range(8))


PROGRAM = """
import asyncio, os, signal, sys
from perdure import Extension, Harness, SqliteStorage
from perdure.testing.model import ScriptedModel, call, say
from perdure.tools.subagents import subagent

SCRIPT = {"Ask.": [call("subagent", prompt="Go."), say("done")], "Go.": say("one two three four five six")}

async def pace(request, event):
    if request.messages[-1].text == "Go." and event == 1 and sys.argv[1] == "kill":
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with Harness.open(SqliteStorage("agents.db"), models=ScriptedModel(SCRIPT, pace=pace),
                            extensions=[Extension("agents", tools=[subagent()])]) as harness:
        root = await harness.root()
        print((await (await root.submit("Ask.", request_id="ask")).answer()).text)
        print(len(await harness.conversations()), (await root.usage(deep=True)).turns)

asyncio.run(main())
"""


def test_a_process_that_is_killed_in_a_childs_answer_h160_h162(tmp_path: Path) -> None:
    program = tmp_path / "agents.py"
    program.write_text(PROGRAM, encoding="utf-8")
    for _ in range(3):
        killed = subprocess.run([sys.executable, program, "kill"], cwd=tmp_path, env=os.environ, check=False)
        assert killed.returncode == -signal.SIGKILL
    done = subprocess.run(
        [sys.executable, program, "go"], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "done\n2 3\n"


async def test_a_call_outside_of_a_harness_has_none() -> None:
    with pytest.raises(CallRefused, match="runs in no harness"):
        _ = ToolCall(name="alone").harness


async def test_a_tool_of_ones_own_has_the_harness() -> None:
    @tool(replay="safe")
    async def count(call: ToolCall) -> int:
        """Count conversations."""
        return len(await call.harness.conversations())

    script = {"Count.": [call("count"), say("counted")]}
    async with opened(ScriptedModel(script), extensions=[Extension("x", tools=[count])]) as harness:
        root = await harness.root()
        await (await root.submit("Count.")).answer()
        assert (await result(root)).text == "1"


async def test_no_child_waits_for_an_environment_that_a_call_above_holds_h345() -> None:
    @tool
    async def inside(environment: ExecutionEnvironment) -> str:
        """Work there."""
        return "worked"

    @tool
    async def holder(environment: ExecutionEnvironment, call: ToolCall) -> str:
        """Work there, and have somebody else work there meanwhile."""
        return (await call.call("subagent", {"prompt": "Go."}, key="go")).text

    def reply(request: ModelRequest):
        told = [message for message in request.messages if isinstance(message, ToolResultMessage)]
        if told:
            return say(told[-1].text)
        return call("inside" if getattr(request.messages[-1], "text", "") == "Go." else "holder")

    environment = cast("ExecutionEnvironment", Environment())
    async with opened(ScriptedModel(reply), tools=(subagent(), inside, holder), environment=environment) as harness:
        answer = await (await (await harness.root()).submit("Ask.")).answer()
        assert answer.text == "A call above this one is at work in the same environment and holds it."
