"""Tools that are not offered until they are found, and tools for some callers only (rules H83, H175, H327, H328)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.kit import opened, transcript
from perdure.harness.documents import Agent
from perdure.harness.finding import FIND_TOOLS, MOST_FOUND, MOST_NAMED, Index, finder, words_of
from perdure.harness.model import ModelRequest
from perdure.harness.registry import Extension, ExtensionConflict, Registry
from perdure.harness.tool import AnyTool, ToolCall, ToolResult, tool
from perdure.testing.model import ScriptedModel, call, say


def named(name: str, description: str = "", **options: Any) -> AnyTool:
    @tool(name=name, description=description, **options)
    async def nothing() -> str:
        return f"{name} was called"

    return nothing


MAIL = named("send_mail", "Send a letter to a person.", deferred=True)
WEATHER = named("weatherReport", "What the weather is in a place.\nIn the past too.", deferred=True)
TAX = named("tax", "Work out what a person owes to the state.", deferred=True)
HERE = named("here", "Offered from the start.")
DEFERRED = (MAIL, WEATHER, TAX)


def offered_by(requests: Iterable[ModelRequest]) -> list[list[str]]:
    return [[spec.name for spec in request.tools] for request in requests]


# --- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("send mail", ["send_mail"]),
        ("mails", ["send_mail"]),
        ("a report of the weather", ["weatherReport"]),
        ("Weather", ["weatherReport"]),
        ("tax", ["tax"]),
        ("owes", ["tax"]),
        ("person", ["send_mail", "tax"]),
        ("letters to the state", ["tax", "send_mail"]),
        ("weatherReport", ["weatherReport"]),
        ("to a in", []),
        ("bicycle", []),
        ("", []),
    ],
)
def test_what_a_query_finds_h327(query: str, found: list[str]) -> None:
    assert [tool.name for tool in Index(DEFERRED).search(query)] == found


@given(st.text(max_size=30))
def test_a_search_is_bounded_and_always_the_same_h327(query: str) -> None:
    tools = [named(f"tool-{n}", "Mail weather state.") for n in range(30)]
    found = Index(tools).search(query)
    assert len(found) <= MOST_FOUND
    assert Index(tools).search(query) == found


def test_words_of_names() -> None:
    assert words_of("sendMail to_the-Übersee 2nd") == {"send", "mail", "to", "the", "übersee", "2nd"}


async def test_where_nothing_fits_the_names_are_told_h327() -> None:
    tools = tuple(named(f"tool-{n}", deferred=True) for n in range(MOST_NAMED + 2))
    result = await finder(tools).run({"query": "bicycle"}, ToolCall(), None)
    assert isinstance(result, ToolResult)
    assert result.text.startswith("Nothing fits. There are: tool-0, tool-1, ")
    assert result.text.endswith("tool-49 and 2 more. Search for one of them.")
    assert result.add_tools == ()


# --- not offered until found ----------------------------------------------------------------------------------------


async def test_a_deferred_tool_is_offered_once_it_is_found_h83() -> None:
    model = ScriptedModel([call(FIND_TOOLS, query="send mail"), call("send_mail"), say("done")])
    async with opened(model, tools=(HERE, *DEFERRED)) as harness:
        root = await harness.root()
        await (await root.submit("Write to Ada.")).answer()
        assert (await root.agent()).added_tools == ["send_mail"]
        lines = await transcript(root)
        assert lines[2] == "tool-result These tools can be called now:\n- send_mail: Send a letter to a person."
        assert lines[4] == "tool-result send_mail was called"
    before, after = ["here", FIND_TOOLS], ["here", "send_mail", FIND_TOOLS]
    assert offered_by(model.requests) == [before, after, after], "the tools change once"


async def test_there_is_no_finder_once_all_are_found_or_without_any_h327() -> None:
    model = ScriptedModel([call(FIND_TOOLS, query="tax"), say("done")])
    async with opened(model, tools=(HERE, TAX)) as harness:
        await (await (await harness.root()).submit("Work it out.")).answer()
    assert offered_by(model.requests) == [["here", FIND_TOOLS], ["here", "tax"]]
    model = ScriptedModel([say("done")])
    async with opened(model, tools=(HERE,)) as harness:
        await (await (await harness.root()).submit("Hello.")).answer()
    assert offered_by(model.requests) == [["here"]]


async def test_what_is_not_found_cannot_be_called_by_the_model_h83() -> None:
    async with opened(ScriptedModel([call("tax"), say("done")]), tools=(HERE, TAX)) as harness:
        root = await harness.root()
        await (await root.submit("Work it out.")).answer()
        assert "There is no tool 'tax'. There are: here, find_tools." in (await transcript(root))[2]


def test_a_selection_by_name_says_what_can_be_found_h327() -> None:
    registry = Registry()
    registry.install(Extension("all", tools=[HERE, *DEFERRED]))
    agent = Agent(tools=["here", "tax"])
    assert [tool.name for tool in registry.offered(agent)] == ["here", FIND_TOOLS]
    find = registry.find_tool(agent, FIND_TOOLS)
    assert find is not None
    assert registry.find_tool(agent, FIND_TOOLS, by="tool") is None
    agent = Agent(tools=["here", "tax"], added_tools=["tax"])
    assert [tool.name for tool in registry.offered(agent)] == ["here", "tax"]
    assert registry.find_tool(agent, FIND_TOOLS) is find, "calls of it that are under way have it"
    assert registry.find_tool(Agent(tools=["here"]), FIND_TOOLS) is None


def test_the_name_of_the_finder_is_taken_h327() -> None:
    with pytest.raises(ExtensionConflict, match="'perdure' and 'mine' both have a tool named 'find_tools'"):
        Registry().install(Extension("mine", tools=[named(FIND_TOOLS)]))
    assert Registry().has_tool(FIND_TOOLS)


# --- callers --------------------------------------------------------------------------------------------------------

ours = named("ours", callers={"tool"})
theirs = named("theirs", callers={"model"})


@tool
async def through(name: str, call: ToolCall) -> str:
    """Call a tool."""
    result = await call.call(name, {}, key="one")
    return f"{result.code}: {result.text}"


async def said_through(name: str) -> str:
    model = ScriptedModel([call("through", name=name), say("done")])
    async with opened(model, tools=(ours, theirs, through, TAX)) as harness:
        root = await harness.root()
        await (await root.submit("Go.")).answer()
        assert offered_by(model.requests)[0] == ["theirs", "through", FIND_TOOLS], "what is not for it is not offered"
        return (await transcript(root))[-2].removeprefix("tool-result ")


async def test_a_tool_calls_what_is_for_tools_found_or_not_h175_h328() -> None:
    assert await said_through("ours") == "None: ours was called"
    assert await said_through("tax") == "None: tax was called"
    assert (await said_through("theirs")).startswith("tool_unavailable: There is no tool 'theirs'.")


async def test_a_model_cannot_call_what_is_for_tools_only_h175() -> None:
    model = ScriptedModel([call("ours"), say("done")])
    async with opened(model, tools=(ours, theirs)) as harness:
        root = await harness.root()
        await (await root.submit("Go.")).answer()
        assert "There is no tool 'ours'. There are: theirs." in (await transcript(root))[2]


@pytest.mark.parametrize("callers", ["model", (), {"person"}, {"model", "person"}])
def test_callers_are_the_model_and_tools_h175(callers: Any) -> None:
    with pytest.raises(ValueError, match="callers are some of"):
        named("wrong", callers=callers)


def test_what_no_model_may_call_cannot_be_deferred_h83() -> None:
    with pytest.raises(ValueError, match="only what a model may call can be deferred"):
        named("wrong", callers={"tool"}, deferred=True)
