"""Extensions and their registry (rules H119 to H121)."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

import pytest

from perdure.harness.documents import Agent
from perdure.harness.hooks import AfterTool, BeforeTool, Block, HookCall, after_tool, before_tool
from perdure.harness.registry import ConversationInfo, Extension, ExtensionConflict, PromptSection, Registry
from perdure.harness.tool import AnyTool, ToolResult, tool
from perdure.tasks.definition import Next, Task
from perdure.tasks.registry import TaskRegistry
from perdure.tasks.run import Run


def make(name: str) -> AnyTool:
    @tool(name=name)
    async def made() -> None:
        """Made."""

    return made


class Job(Task[int, None], kind="app.job"):
    async def start(self, run: Run[int, None, None]) -> Next[None]:
        async with run.commit() as tx:
            return tx.complete(None)


A = Extension("a", tools=[make("one"), make("two")], sections=[PromptSection("rules", "Be brief.")])
B = Extension("b", tools=[make("three")])


def names(tools: list[AnyTool]) -> list[str]:
    return [t.name for t in tools]


def test_a_conversation_has_all_that_is_installed_unless_it_selects() -> None:
    registry = Registry()
    registry.install(A, B)
    assert names(registry.offered(Agent())) == ["one", "two", "three"]
    assert names(registry.offered(Agent(extensions=["b"]))) == ["three"]
    assert names(registry.offered(Agent(tools=["two", "three"]))) == ["two", "three"]
    assert names(registry.offered(Agent(extensions=["a"], tools=["three", "one"]))) == ["one"]
    assert names(registry.offered(Agent(extensions=[]))) == []
    assert registry.find_tool(Agent(), "three") is B.tools[0]
    assert registry.find_tool(Agent(extensions=["a"]), "three") is None


def test_a_missing_name_is_skipped_until_it_is_installed() -> None:
    registry = Registry()
    registry.install(A)
    agent = Agent(extensions=["a", "later"], tools=["one", "new"])
    assert names(registry.offered(agent)) == ["one"]
    registry.install(Extension("later", tools=[make("new")]))
    assert names(registry.offered(agent)) == ["one", "new"]


def test_extensions_are_replaced_and_removed_while_running() -> None:
    registry = Registry()
    changes: list[int] = []
    registry.on_change(lambda: changes.append(len(registry.extensions)))
    registry.install(A, B)
    registry.replace(Extension("a", tools=[make("four")]))
    assert names(registry.offered(Agent())) == ["four", "three"]
    registry.remove("b")
    registry.remove("never was")
    assert names(registry.offered(Agent())) == ["four"]
    assert changes == [2, 2, 1]


def test_a_clash_of_names_names_both_and_changes_nothing() -> None:
    registry = Registry()
    registry.install(A)
    with pytest.raises(ExtensionConflict, match="extensions 'a' and 'c' both have a tool named 'two'"):
        registry.install(B, Extension("c", tools=[make("two")]))
    with pytest.raises(ExtensionConflict, match="both have a section named 'rules'"):
        registry.install(Extension("c", sections=[PromptSection("rules", "")]))
    with pytest.raises(ExtensionConflict, match="an extension named 'a' is installed"):
        registry.install(Extension("a"))
    assert [extension.name for extension in registry.extensions] == ["a"]


def test_an_extension_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="has two tools named 'x'"):
        Extension("c", tools=[make("x"), make("x")])
    with pytest.raises(ValueError, match="needs a name"):
        Extension("")
    with pytest.raises(TypeError, match="is no tool"):
        Extension("c", tools=[make])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="unexpected keyword"):
        Extension("c", tool=[])  # pyright: ignore[reportCallIssue]


def test_what_is_no_extension_is_refused_with_the_way_to_make_one() -> None:
    registry = Registry()
    for put in (registry.install, registry.replace):
        with pytest.raises(
            TypeError, match=r"a ToolDefinition is no extension; put tools into one: Extension\('name', tools="
        ):
            put(cast(Extension, make("one")))


def test_tasks_come_and_go_with_their_extension() -> None:
    tasks = TaskRegistry()
    registry = Registry(tasks)
    registry.install(Extension("jobs", tasks=[Job]))
    assert tasks.find("app.job") is not None
    with pytest.raises(ExtensionConflict, match=r"both have a task named 'app\.job'"):
        registry.install(Extension("other", tasks=[Job()]))
    registry.replace(Extension("jobs"))
    assert tasks.find("app.job") is None


def test_sections_are_texts_or_made_for_the_conversation() -> None:
    registry = Registry()
    registry.install(A, Extension("where", sections=[PromptSection("where", lambda info: f"In {info.agent.cwd}.")]))
    agent = Agent(cwd="/srv")
    info = ConversationInfo(id=1, agent=agent, tools=registry.offered(agent))
    assert [(s.name, s.render(info)) for s in registry.sections(agent)] == [
        ("rules", "Be brief."),
        ("where", "In /srv."),
    ]
    assert registry.sections(Agent(extensions=[])) == []


def test_hooks_and_wrappers_follow_the_selection_and_the_hosts_own_do_not() -> None:
    @before_tool
    async def guard(call: HookCall) -> Block | None:
        return None

    @after_tool
    async def look(call: HookCall, result: ToolResult) -> ToolResult | None:
        return None

    @after_tool
    async def own(call: HookCall, result: ToolResult) -> ToolResult | None:
        return None

    async def around(call: object, run: object) -> object:
        return None

    registry = Registry()
    registry.install(Extension("watch", hooks=[look], wrappers=[around]))
    remove_guard, remove_own = registry.add_hook(guard), registry.add_hook(own)
    assert registry.has_hooks(BeforeTool)
    assert [(i.extension, i.hook) for i in registry.hooks(Agent(), AfterTool)] == [(None, own), ("watch", look)]
    assert [i.hook for i in registry.hooks(Agent(extensions=[]), AfterTool)] == [own]
    assert [i.hook for i in registry.hooks(Agent(extensions=[]), BeforeTool)] == [guard]
    assert list(registry.wrappers(Agent())) == [around]
    assert list(registry.wrappers(Agent(extensions=[]))) == []
    remove_guard()
    remove_own()
    assert [i.hook for i in registry.hooks(Agent(), AfterTool)] == [look]
    assert not registry.has_hooks(BeforeTool)
    registry.remove("watch")
    assert not registry.has_hooks(AfterTool)


def test_what_an_extension_has_is_its_own_h119_h128() -> None:
    """Also where its parts come from a list that changes, or from something that can be gone through once."""

    @before_tool
    async def guard(call: HookCall) -> Block | None: ...

    hooks, registry = [guard], Registry()
    registry.install(
        Extension("once", tools=(make(name) for name in "ab"), hooks=filter(None, hooks)),  # type: ignore[arg-type]
        Extension("late", hooks=hooks),
    )
    assert names(registry.offered(Agent())) == ["a", "b"]
    hooks.clear()
    registry.install(A)
    assert [installed.extension for installed in registry.hooks(Agent(), BeforeTool)] == ["once", "late"]


def test_what_is_no_wrapper_is_refused() -> None:
    with pytest.raises(TypeError, match="5 is no wrapper"):
        Extension("watch", wrappers=[5])  # pyright: ignore[reportArgumentType]


def test_what_is_no_hook_is_refused() -> None:
    async def plain(call: HookCall) -> None:
        """Not decorated."""

    with pytest.raises(TypeError, match="decorate the function"):
        Extension("watch", hooks=[plain])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="decorate the function"):
        Registry().add_hook(plain)  # pyright: ignore[reportArgumentType]

    class Stricter(BeforeTool):
        """A kind of its own, which nobody asks."""

    with pytest.raises(TypeError, match="decorate the function"):
        Registry().add_hook(Stricter(plain))


FIRST = """
import asyncio, sys
from perdure import Extension, Harness, MemoryStorage, tool
from perdure.kernel.line import Line
from perdure.testing.model import ScriptedModel, call, say

seen = []

def watched(change, held):
    def changed(line, *owner):
        seen.append((held, set(sys.modules)))
        return change(line, *owner)
    return changed

Line._hold, Line.release = watched(Line._hold, True), watched(Line.release, False)

@tool
async def look(deep: bool) -> str:
    "Look."
    return "seen"

async def main():
    model = ScriptedModel({"Go.": [call("look", deep=True), say("Done.")]})
    async with Harness.open(MemoryStorage(), models=model, extensions=[Extension("e", tools=[look])]) as harness:
        submission = await (await harness.root()).submit("Go.")
        print((await submission.answer()).text)

asyncio.run(main())
assert "pydantic" in sys.modules
for (held, before), (_, after) in zip(seen, seen[1:]):
    assert not held or before == after, sorted(after - before)
"""


def test_nothing_is_imported_for_a_tool_while_others_wait_for_their_transaction_k58() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Done.\n", "")
