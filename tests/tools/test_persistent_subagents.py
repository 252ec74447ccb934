"""Subagents that stay: an anchor owns the conversation, messages come back as inputs (rules H163 to H165, H352 to
H356)."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from harness.kit import Hold, kinds, opened, rest
from perdure.harness.conversation import Conversation
from perdure.harness.documents import TOOL_RESULT, USER
from perdure.harness.harness import Harness
from perdure.harness.hooks import HookCall, before_tool
from perdure.harness.messages import ToolResultMessage, UserMessage, decode_messages
from perdure.harness.model import ModelError, ModelRequest
from perdure.harness.registry import Extension
from perdure.harness.tool import tool
from perdure.kernel.errors import NotFound
from perdure.storage.memory import MemoryStorage
from perdure.tasks import Next, Run, Task
from perdure.testing.model import ScriptedModel, call, calls, say
from perdure.tools.subagents import Subagent, persistent_subagents, subagent

ANSWERS = "[The subagent 'w' answers:]\n"
NO_ANSWER = "[The subagent 'w' gave no answer (model_error: malformed: no).]"
SCRIPT = {
    "Begin.": [call("start_agent", name="w", prompt="Work."), say("begun")],
    "Work.": say("worked"),
    f"{ANSWERS}worked": say("noted"),
    "Tell.": [call("message_agent", name="w", prompt="Again."), say("told")],
    "Again.": say("worked again"),
    f"{ANSWERS}worked again": say("noted again"),
    "Stop.": [call("stop_agent", name="w"), say("stopped")],
    "List.": [call("list_agents"), say("listed")],
}
TOOLS = tuple(persistent_subagents(report="follow_up"))


async def ask(root: Conversation, words: str) -> str:
    return (await (await root.submit(words)).answer()).text


async def results(conversation: Conversation) -> list[str]:
    entries = [entry for entry in await conversation.entries() if entry.kind == TOOL_RESULT]
    messages = [message for entry in entries for message in decode_messages(entry.raw_messages)]
    return [message.text for message in messages if isinstance(message, ToolResultMessage)]


async def inputs(conversation: Conversation) -> list[str]:
    entries = [entry for entry in await conversation.entries() if entry.kind == USER]
    messages = [message for entry in entries for message in decode_messages(entry.raw_messages)]
    return [message.text for message in messages if isinstance(message, UserMessage)]


async def test_it_is_begun_told_listed_and_stopped_by_the_parents_model_h163_h164() -> None:
    async with opened(ScriptedModel(SCRIPT), tools=TOOLS) as harness:
        root = await harness.root()
        assert await ask(root, "Begin.") == "begun"
        await harness.idle(background=True)
        (there,) = root.subagents()
        assert (there.name, there.parent, there.busy) == ("w", root.id, False)
        below = harness.handle(there.conversation)
        assert (await below.info()).name == "w"
        await ask(root, "Tell.")
        await harness.idle(background=True)
        await ask(root, "List.")
        await ask(root, "Stop.")
        await ask(root, "List.")
        assert await results(root) == [
            "'w' is at work. What it answers will be told.",
            "Sent.",
            "w: waits",
            "Stopped.",
            "None.",
        ]
        assert await inputs(root) == [
            *("Begin.", f"{ANSWERS}worked", "Tell.", f"{ANSWERS}worked again", "List.", "Stop.", "List."),
        ]
        assert await inputs(below) == ["Work.", "Again."]
        assert not harness.session.live.settled


async def test_a_parent_is_told_of_what_has_no_answer_and_the_next_message_is_asked_all_the_same_h354() -> None:
    failed = asyncio.Event()

    async def pace(request: ModelRequest, event: int) -> None:
        if request.messages[-1].text == "Work." and not failed.is_set():  # pyright: ignore[reportAttributeAccessIssue]
            await hold(request, event)
            failed.set()
            raise ModelError("malformed", "no")

    hold = Hold(0)
    script = {**SCRIPT, NO_ANSWER: say("a pity")}
    async with opened(ScriptedModel(script, pace=pace), tools=TOOLS) as harness:
        root = await harness.root()
        await ask(root, "Begin.")
        await hold.reached.wait()
        await ask(root, "Tell.")  # it waits behind what fails
        hold.release()
        await harness.idle(background=True)
        told = [text for text in await inputs(root) if text.startswith("[")]
        assert sorted(told) == [
            f"{ANSWERS}worked again",
            "[The subagent 'w' gave no answer (model_error: malformed: no).]",
        ]


async def test_a_name_is_given_once_and_must_be_known_h353() -> None:
    script = {
        "Twice.": [
            calls(call("start_agent", name="w", prompt="Work.")),
            calls(
                call("start_agent", name="w", prompt="Again."),
                call("stop_agent", name="x"),
                call("message_agent", name="y", prompt="?"),
            ),
            say("done"),
        ],
        **SCRIPT,
    }
    async with opened(ScriptedModel(script), tools=TOOLS) as harness:
        root = await harness.root()
        await ask(root, "Twice.")
        await harness.idle(background=True)
        assert sorted((await results(root))[1:]) == [
            "There is a subagent named 'w' already: send it a message.",
            "There is no subagent named 'x'. There are: 'w'.",
            "There is no subagent named 'y'. There are: 'w'.",
        ]
        assert len(root.subagents()) == 1


async def test_only_a_conversation_without_an_owner_begins_them_h355() -> None:
    script = {**SCRIPT, "Ask.": [call("subagent", prompt="Begin."), say("done")]}
    async with opened(ScriptedModel(script), tools=(*TOOLS, subagent())) as harness:
        await ask(await harness.root(), "Ask.")
        (child,) = [info for info in await harness.conversations() if info.record.owner is not None]
        told = await results(harness.handle(child.id))
        assert told == ["This conversation belongs to a task itself, and begins no agents that stay."]
        assert harness.subagents() == []


async def test_a_fork_of_the_parent_has_none_h165() -> None:
    async with opened(ScriptedModel(SCRIPT), tools=TOOLS) as harness:
        root = await harness.root()
        await ask(root, "Begin.")
        await harness.idle(background=True)
        fork = await root.fork((await root.entries())[-1].id)
        assert fork.subagents() == []
        assert len(root.subagents()) == 1
        (there,) = root.subagents()
        with pytest.raises(NotFound, match=f"conversation {fork.id} has begun no persistent subagent"):
            await fork.stop_subagent(there.id)
        await root.stop_subagent(there.id)
        await root.stop_subagent(there.id)
        assert root.subagents() == []


async def held(storage: MemoryStorage) -> tuple[MemoryStorage, Hold]:
    """A store whose subagent was at work when its process ended."""
    hold = Hold(0)

    async def pace(request: ModelRequest, event: int) -> None:
        if getattr(request.messages[-1], "text", "") == "Work.":
            await hold(request, event)

    async with opened(ScriptedModel(SCRIPT, pace=pace), storage=storage, tools=TOOLS) as harness:
        await ask(await harness.root(), "Begin.")
        await hold.reached.wait()
        await rest()
        return storage.snapshot(), hold


async def test_after_a_restart_it_goes_on_and_so_does_a_quiet_one_h163_h356() -> None:
    storage, _ = await held(MemoryStorage())
    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=TOOLS) as harness:
        root = await harness.root()
        assert [there.busy for there in root.subagents()] == [True]
        await harness.idle(background=True)
        assert (await inputs(root))[-1] == f"{ANSWERS}worked"
        storage = storage.snapshot()
    async with opened(ScriptedModel(SCRIPT), storage=storage, tools=TOOLS) as harness:
        root = await harness.root()
        assert [there.busy for there in root.subagents()] == [False]
        await ask(root, "Tell.")
        await harness.idle(background=True)
        assert (await inputs(root))[-1] == f"{ANSWERS}worked again"
        await ask(root, "Stop.")


async def test_a_stop_ends_what_goes_on_and_what_is_queued_and_tells_nobody_h165_h356() -> None:
    storage, hold = await held(MemoryStorage())
    hold = Hold(0)

    async def pace(request: ModelRequest, event: int) -> None:
        if getattr(request.messages[-1], "text", "") == "Work.":
            await hold(request, event)

    async with opened(ScriptedModel(SCRIPT, pace=pace), storage=storage, tools=TOOLS) as harness:
        root = await harness.root()
        await ask(root, "Tell.")
        (there,) = root.subagents()
        await root.stop_subagent(there.id)
        below = await harness.session.submissions(conversation_id=there.conversation)
        assert {(record.status, record.reason) for record in below} == {("unanswered", "aborted")}
        await harness.idle(background=True)
        assert not harness.session.live.settled
        assert await inputs(root) == ["Begin.", "Tell."]


async def test_what_is_said_to_one_that_is_being_stopped_ends_with_it_h357() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    @tool(replay="safe")
    async def dig() -> str:
        """Dig, and take time to stop."""
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            await leave.wait()
        return ""

    script = {**SCRIPT, "Work.": [call("dig"), say("dug")]}
    async with opened(ScriptedModel(script), tools=(*TOOLS, dig)) as harness:
        root = await harness.root()
        await ask(root, "Begin.")
        await entered.wait()
        (there,) = root.subagents()
        stopping = asyncio.ensure_future(root.stop_subagent(there.id))
        await rest()
        late = await harness.handle(there.conversation).submit("Again.")
        assert await late.status() == "queued"
        leave.set()
        await stopping
        assert (await late.wait()).reason == "aborted"
        await harness.idle(background=True)
        assert not harness.session.live.settled


class Slow(Task[None, None], kind="app.slow", version=1):
    """Takes its time to stop."""

    entered: asyncio.Event
    leave: asyncio.Event

    async def start(self, run: Run[None, None, None]) -> Next[None]:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.leave.wait()
        raise AssertionError("it was aborted")


async def test_a_message_that_waits_is_not_begun_while_its_subagent_is_being_stopped_h356() -> None:
    """Its run has ended, and other work below it has not."""
    Slow.entered, Slow.leave = asyncio.Event(), asyncio.Event()
    hold = Hold(0)

    async def pace(request: ModelRequest, event: int) -> None:
        if getattr(request.messages[-1], "text", "") == "Work.":
            await hold(request, event)

    extensions = [Extension("slow", tasks=[Slow])]
    async with opened(ScriptedModel(SCRIPT, pace=pace), tools=TOOLS, extensions=extensions) as harness:
        root = await harness.root()
        await ask(root, "Begin.")
        await hold.reached.wait()
        await ask(root, "Tell.")
        (there,) = root.subagents()
        async with harness.session.commit(conversation_id=there.conversation) as tx:
            tx.create_task(Slow, None, owner=None)
        await Slow.entered.wait()
        stopping = asyncio.ensure_future(root.stop_subagent(there.id))
        await rest()
        Slow.leave.set()
        await stopping
        await harness.idle(background=True)
        assert await inputs(harness.handle(there.conversation)) == ["Work."]
        assert await inputs(root) == ["Begin.", "Tell."]


@pytest.mark.parametrize("background", [False, True])
async def test_an_abort_of_the_parent_stops_at_it_unless_it_is_told_to_cross_h165(background: bool) -> None:
    storage, _ = await held(MemoryStorage())
    hold = Hold(0)

    async def pace(request: ModelRequest, event: int) -> None:
        if getattr(request.messages[-1], "text", "") == "Work.":
            await hold(request, event)

    async with opened(ScriptedModel(SCRIPT, pace=pace), storage=storage, tools=TOOLS) as harness:
        root = await harness.root()
        harness.resume()
        await hold.reached.wait()
        await root.abort(background=background)
        assert len(root.subagents()) == (0 if background else 1)
        assert bool(harness.session.live.settled) != background
        hold.release()
        await harness.idle(background=True)
        assert await inputs(root) == (["Begin."] if background else ["Begin.", f"{ANSWERS}worked"])


async def test_a_report_may_join_a_run_that_goes_on_h352() -> None:
    script = {**SCRIPT, "Wait.": [call("wait_a_little"), say("waited")]}
    reported = asyncio.Event()

    @tool(replay="safe")
    async def wait_a_little() -> str:
        """Until the answer is queued."""
        await reported.wait()
        return "so long"

    steering = tuple(persistent_subagents({"a": Subagent("works")}))
    script["Begin."] = [call("start_agent", agent="a", name="w", prompt="Work."), call("wait_a_little"), say("begun")]
    async with opened(ScriptedModel(script), tools=(*steering, wait_a_little)) as harness:
        root = await harness.root()
        submission = await root.submit("Begin.")
        for _ in range(2000):
            await asyncio.sleep(0)
            if await _queued(harness, root):
                break
        reported.set()
        await submission.answer()
        order = await kinds(root)
        assert order.index("pi.user", 1) < len(order) - 1
        assert await inputs(root) == ["Begin.", f"{ANSWERS}worked"]
        for there in root.subagents():
            await root.stop_subagent(there.id)


async def _queued(harness: Harness, root: Conversation) -> bool:
    return bool(await harness.session.submissions(conversation_id=root.id, status="queued"))


def test_a_report_is_put_as_steer_or_follow_up() -> None:
    with pytest.raises(ValueError, match="report is"):
        persistent_subagents(report="reject")


START, MESSAGE, STOP = "start_agent", "message_agent", "stop_agent"
STARTED, SENT, STOPPED = "'w' is at work. What it answers will be told.", "Sent.", "Stopped."
THERE, NONE = (
    "There is a subagent named 'w' already: send it a message.",
    "There is no subagent named 'w'. There are: none.",
)


def outcomes(order: tuple[str, ...], there: bool) -> list[str]:
    """What a round comes to where each call is over before the next begins."""
    told: list[str] = []
    for name in order:
        if name == START:
            told.append(THERE if there else STARTED)
        else:
            told.append(NONE if not there else SENT if name == MESSAGE else STOPPED)
        there = name == START or (name == MESSAGE and there)
    return told


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("order", [*permutations((START, MESSAGE, STOP)), (START, MESSAGE), (STOP, START)])
async def test_the_calls_of_one_round_follow_one_another_h358(order: tuple[str, ...], there: bool) -> None:
    """However long each takes to begin: a model that begins an agent and tells it something means it in that order."""
    slow = {name: 5 * (len(order) - place) for place, name in enumerate(order)}

    @before_tool
    async def late(asked: HookCall) -> None:
        for _ in range(slow.get(asked.name, 0)):
            await asyncio.sleep(0)

    round = calls(*(call(name, name="w") if name == STOP else call(name, name="w", prompt="Work.") for name in order))
    script = {**SCRIPT, "Round.": [round, say("so")]}
    extension = Extension("agents", tools=list(TOOLS), hooks=[late])
    async with opened(ScriptedModel(script), extensions=[extension]) as harness:
        root = await harness.root()
        before = []
        if there:
            await ask(root, "Begin.")
            await harness.idle(background=True)
            before = [STARTED]
        assert await ask(root, "Round.") == "so"
        assert await results(root) == [*before, *outcomes(order, there)]
        for other in root.subagents():
            await root.stop_subagent(other.id)
        await harness.idle(background=True)
        assert not harness.session.live.settled
