"""What results of tools ask of their run and their conversation (rules H104 to H108, H324 to H326)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.kit import Commits, Hold, kinds, live, opened, transcript
from perdure.harness.control import MOST_ADDED, Handoff
from perdure.harness.documents import LiveRun, ToolResultData
from perdure.harness.hooks import HookAnswer, HookCall, HookRound, after_tool, after_tools, on_yield
from perdure.harness.messages import AssistantMessage, UserMessage
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension
from perdure.harness.results import MOST_ADDED_TOOLS
from perdure.harness.rounds import RoundEnd, end_asked_for
from perdure.harness.tool import AnyTool, ReplayPolicy, ToolError, ToolResult, tool
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, call, calls, say


@tool
async def finish(what: str) -> ToolResult:
    """Finish."""
    return ToolResult(f"{what} is finished", control="terminate")


@tool
async def hand_over(words: str) -> ToolResult:
    """Hand over."""
    return ToolResult("handed over", control=Handoff(words))


@tool
async def look(where: str) -> str:
    """Look."""
    if where == "nowhere":
        raise ToolError("nothing is there")
    return f"{where} is seen"


TOOLS: tuple[AnyTool, ...] = (finish, hand_over, look)


# --- what a round comes to ----------------------------------------------------------------------------------------

controls = st.dictionaries(st.integers(1, 6), st.none() | st.sampled_from(["", "a", "b"]), max_size=6)


@given(controls, st.sets(st.integers(1, 6), min_size=1))
def test_one_handoff_or_all_that_terminate_end_a_run_h104_h105_h324(
    asked: dict[int, str | None], round: set[int]
) -> None:
    run: LiveRun = {"task": 9, "inputs": [1], "started_at": 0, "turn": 1}
    run["control"] = [{"task": task, "handoff": handoff} for task, handoff in asked.items()]
    end = end_asked_for(run, round)
    words = [asked[task] for task in sorted(round & asked.keys()) if asked[task] is not None]
    if words:
        assert end == RoundEnd("\n\n".join(word for word in words if word))
    else:
        assert end == (RoundEnd(None) if round <= asked.keys() else None)


def test_a_round_that_asks_for_nothing_goes_on_h104() -> None:
    assert end_asked_for({"task": 9, "inputs": [1], "started_at": 0, "turn": 1}, {1, 2}) is None


# --- terminate ----------------------------------------------------------------------------------------------------


async def test_the_run_ends_with_the_calling_entry_as_answer_h104_h106() -> None:
    model = ScriptedModel([call("finish", what="it"), say("never said")])
    requests = model.requests
    async with opened(model, tools=TOOLS) as harness:
        root = await harness.root()
        commits = Commits(harness)
        submission = await root.submit("Finish.")
        answer = await submission.answer()
        assert [c.name for c in answer.message.tool_calls] == ["finish"]
        assert len(commits.durable) == 4, "as many as a turn with a tool that the model answers to"
        assert await kinds(root) == ["pi.user", "pi.assistant", "pi.tool-result"]
        assert [entry.kind for entry in await submission.run()] == await kinds(root)
        assert (await live(root)).run is None
        result = (await root.entries())[-1].data_as(ToolResultData)
        assert result.control == "terminate"
        assert len(requests) == 1
        assert (await (await root.submit("Again.")).answer()).text == "never said", "the conversation goes on"


@pytest.mark.parametrize(
    ("replay", "transcript_end", "ends"),
    [
        ("safe", "tool-result it is finished", "the calling entry"),
        ("unsafe", "assistant what became of it?", "what became of it?"),
    ],
)
async def test_a_tool_that_would_end_the_run_is_recovered_by_its_replay_policy_h108(
    replay: ReplayPolicy, transcript_end: str, ends: str
) -> None:
    """What a result would have asked for is not known of a call that was cut off."""
    entered, storage = asyncio.Event(), MemoryStorage()

    @tool(name="finish", replay=replay)
    async def cut_off(what: str) -> ToolResult:
        """Finish."""
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError("it never comes to that")

    @tool(name="finish", replay=replay)
    async def again(what: str) -> ToolResult:
        """Finish."""
        return ToolResult(f"{what} is finished", control="terminate")

    replies = [call("finish", what="it"), say("what became of it?")]
    async with opened(ScriptedModel(replies), storage=storage, tools=(cut_off,)) as harness:
        submission = await (await harness.root()).submit("Finish.")
        await entered.wait()
        storage = storage.snapshot()
    async with opened(ScriptedModel(replies), storage=storage, tools=(again,)) as harness:
        answer = await (await harness.submission(submission.id)).answer()
        assert (answer.text or "the calling entry") == ends
        assert (await transcript(await harness.root()))[-1] == transcript_end


@pytest.mark.parametrize("other", [call("look", where="here"), call("look", where="nowhere"), call("nothing")])
async def test_every_result_must_ask_for_it_h104(other: Any) -> None:
    model = ScriptedModel([calls(call("finish", what="it"), other), say("done")])
    async with opened(model, tools=TOOLS) as harness:
        root = await harness.root()
        assert (await (await root.submit("Finish.")).answer()).text == "done"
        assert (await live(root)).run is None


async def test_what_an_earlier_round_asked_for_is_over_with_it_h104() -> None:
    replies = [
        calls(call("finish", what="one"), call("look", where="here")),
        calls(call("look", where="there"), call("finish", what="two")),
        say("done"),
    ]
    async with opened(ScriptedModel(replies), tools=TOOLS) as harness:
        root = await harness.root()
        assert (await (await root.submit("Finish.")).answer()).text == "done"


@pytest.mark.parametrize("mode", ["follow_up", "steer"])
async def test_the_final_boundary_places_what_waits_h106(mode: Any) -> None:
    hold = Hold(0)
    model = ScriptedModel({"Finish.": call("finish", what="it"), "More.": say("That is more.")}, pace=hold)
    async with opened(model, tools=TOOLS) as harness:
        root = await harness.root()
        first = await root.submit("Finish.")
        await hold.reached.wait()
        second = await root.submit("More.", mode=mode)
        hold.release()
        assert (await second.answer()).text == "That is more."
        assert (await first.answer()).entry.id < (await second.answer()).entry.id
        assert (await first.wait()).answer != (await second.wait()).answer, "the steer has a run of its own"


async def test_hooks_of_the_round_are_told_and_none_is_asked_to_go_on_h325() -> None:
    told: list[str] = []

    @after_tools
    async def note(round: HookRound) -> None:
        told.extend(ended.result.text for ended in round.calls)

    @on_yield
    async def never(_asked: HookAnswer) -> str:
        raise AssertionError("there is no answer of the model to go on from")

    model = ScriptedModel([call("finish", what="it"), say("never said")])
    extension = Extension("hooks", hooks=[note, never])
    async with opened(model, tools=TOOLS, extensions=[extension]) as harness:
        await (await (await harness.root()).submit("Finish.")).answer()
    assert told == ["it is finished"]


async def test_a_hook_that_replaces_a_result_decides_what_it_asks_for_h325() -> None:
    @after_tool
    async def plain(_asked: HookCall, result: ToolResult) -> ToolResult:
        return ToolResult(result.text)

    model = ScriptedModel([call("finish", what="it"), say("done")])
    async with opened(model, tools=TOOLS, extensions=[Extension("hooks", hooks=[plain])]) as harness:
        assert (await (await (await harness.root()).submit("Finish.")).answer()).text == "done"


# --- handoff ------------------------------------------------------------------------------------------------------


async def test_a_handoff_ends_the_run_with_a_reset_h105_h106() -> None:
    model = ScriptedModel({"Plan.": call("hand_over", words="The plan is made."), "Go on.": say("done")})
    requests = model.requests
    async with opened(model, tools=TOOLS) as harness:
        root = await harness.root()
        submission = await root.submit("Plan.")
        answer = await submission.answer()
        assert [c.name for c in answer.message.tool_calls] == ["hand_over"]
        lines = await transcript(root)
        assert lines[-1] == "reset The plan is made."
        assert (await root.entries())[-1].head == (await root.entries())[-1].id
        await (await root.submit("Go on.")).answer()
    messages = [m for m in requests[-1].messages if isinstance(m, (UserMessage, AssistantMessage))]
    assert [m.text for m in messages] == ["The plan is made.", "Go on."]


async def test_one_is_enough_and_of_several_all_are_handed_over_h105_h324() -> None:
    round = calls(
        call("hand_over", words="First."),
        call("look", where="here"),
        call("hand_over", words="Second."),
        call("finish", what="it"),
    )
    async with opened(ScriptedModel([round, say("never said")]), tools=TOOLS) as harness:
        root = await harness.root()
        await (await root.submit("Plan.")).answer()
        assert (await transcript(root))[-1] == "reset First.\n\nSecond."


async def test_a_handoff_without_words_begins_with_nothing_h105() -> None:
    model = ScriptedModel({"Plan.": call("hand_over", words=""), "Go on.": say("done")})
    requests = model.requests
    async with opened(model, tools=TOOLS) as harness:
        root = await harness.root()
        await (await root.submit("Plan.")).answer()
        await (await root.submit("Go on.")).answer()
    assert [m.text for m in requests[-1].messages if isinstance(m, UserMessage)] == ["Go on."]


async def test_what_waited_stands_behind_the_reset_h106() -> None:
    hold = Hold(0)
    model = ScriptedModel({"Plan.": call("hand_over", words="The plan."), "More.": say("That is more.")}, pace=hold)
    async with opened(model, tools=TOOLS) as harness:
        root = await harness.root()
        await root.submit("Plan.")
        await hold.reached.wait()
        second = await root.submit("More.")
        hold.release()
        await second.answer()
        assert (await transcript(root))[-3:] == ["reset The plan.", "user More.", "assistant That is more."]


# --- add_tools ----------------------------------------------------------------------------------------------------


def offered_by(requests: Iterable[ModelRequest]) -> list[list[str]]:
    return [[spec.name for spec in request.tools] for request in requests]


def adding(*names: str) -> AnyTool:
    @tool(name="unlock")
    async def unlock() -> ToolResult:
        """Unlock."""
        return ToolResult("unlocked", add_tools=names)

    return unlock


async def test_added_tools_are_offered_from_the_next_request_h107() -> None:
    model = ScriptedModel([call("unlock"), call("look", where="here"), say("done")])
    requests = model.requests
    storage = MemoryStorage()
    tools = (look, finish, adding("look", "later", "look"))
    async with opened(model, storage=storage, tools=tools) as harness:
        root = await harness.root()
        await root.set_agent(tools=["unlock"])
        commits = Commits(harness)
        await (await root.submit("Look.")).answer()
        assert offered_by(requests) == [["unlock"], ["look", "unlock"], ["look", "unlock"]]
        assert (await root.agent()).added_tools == ["look", "later"]
        assert len(commits.durable) == 6, "two rounds, and nothing for the tools"
        fork = await root.fork((await root.entries())[-1].id)
        assert (await fork.agent()).added_tools == ["look", "later"]

    @tool
    async def later() -> str:
        """Later."""
        return "late"

    model = ScriptedModel([call("later"), say("done")])
    requests = model.requests
    async with opened(model, storage=storage, tools=(*tools, later)) as harness:
        root = await harness.root()
        await (await root.submit("More.")).answer()
        assert offered_by(requests)[0] == ["look", "unlock", "later"], "a name counts once it is installed"
        await root.set_agent(tools=["unlock"])
        assert (await root.agent()).added_tools == [], "whoever selects anew says all that there is"


async def test_only_tools_of_selected_extensions_are_added_h326() -> None:
    model = ScriptedModel([call("unlock"), say("done")])
    requests = model.requests
    extensions = [Extension("chosen", tools=[adding("look")]), Extension("other", tools=[look])]
    async with opened(model, extensions=extensions) as harness:
        root = await harness.root()
        await root.set_agent(extensions=["chosen"])
        await (await root.submit("Look.")).answer()
    assert offered_by(requests) == [["unlock"], ["unlock"]]


async def test_the_newest_added_tools_stay_h326() -> None:
    turns = MOST_ADDED_TOOLS // MOST_ADDED + 1
    added = [[f"tool-{turn}-{n}" for n in range(MOST_ADDED)] for turn in range(turns)]

    @tool
    async def add(turn: int) -> ToolResult:
        """Add."""
        return ToolResult("added", add_tools=added[turn])

    model = ScriptedModel([*(call("add", turn=turn) for turn in range(turns)), say("done")])
    async with opened(model, tools=(add,)) as harness:
        root = await harness.root()
        await (await root.submit("Add.")).answer()
        assert (await root.agent()).added_tools == [name for names in added[1:] for name in names]


@pytest.mark.parametrize(
    "wrong",
    [
        {"control": "stop"},
        {"control": "handoff"},
        {"add_tools": "look"},
        {"add_tools": ["no name"]},
        {"add_tools": [1]},
        {"add_tools": ["a"] * (MOST_ADDED + 1)},
    ],
)
def test_what_cannot_be_asked_for_is_refused_h104_h107(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"control|add_tools"):
        ToolResult("x", **wrong)


def test_a_handoff_is_a_text_h105() -> None:
    with pytest.raises(TypeError, match="a handoff is a text"):
        Handoff(None)  # pyright: ignore[reportArgumentType]


async def test_a_handoff_that_is_too_long_is_an_error_of_the_tool_h105() -> None:
    @tool
    async def much() -> ToolResult:
        """Hand over much."""
        return ToolResult("x", control=Handoff("x" * 300_000))

    async with opened(ScriptedModel([call("much"), say("done")]), tools=(much,)) as harness:
        root = await harness.root()
        assert (await (await root.submit("Go.")).answer()).text == "done"
        assert "the handoff of the result takes 300000 bytes" in (await transcript(root))[2]
