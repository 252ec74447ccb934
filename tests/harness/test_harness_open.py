"""Opening, closing, conversations and their set-up (rules H1, H17 to H19, H154, K81 to K87)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit import Audit, Commits, Hold, opened, rest

from perdure.harness.documents import Agent, Meta
from perdure.harness.harness import Harness
from perdure.harness.model import NoAdapter
from perdure.harness.registry import Extension
from perdure.harness.tool import tool
from perdure.kernel.errors import DocumentFieldError, NotFound, SessionClosed, StorageBusy, StorageError
from perdure.kernel.session import CloseReport
from perdure.storage.memory import MemoryStorage
from perdure.tasks.errors import WorkBlocked
from perdure.testing.model import ScriptedModel, call, say


async def test_root_is_created_in_one_commit_and_found_again_h17() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(say("x")), storage=storage) as harness:
        commits = Commits(harness)
        several = await asyncio.gather(*(harness.root(agent=Agent(instructions="I am root.")) for _ in range(3)))
        assert {root.id for root in several} == {1}
        (created,) = commits.all
        assert [c.id for c in created.batch.conversations] == [1]
        assert {d.record.kind for d in created.documents} == {"pi.agent", "pi.provider"}
        assert (await several[0].agent()).instructions == "I am root."
    async with opened(ScriptedModel(say("x")), storage=storage) as harness:
        commits = Commits(harness)
        root = await harness.root(agent=Agent(instructions="too late"))
        assert (await root.agent()).instructions == "I am root."
        assert not commits.all


async def test_a_conversation_comes_with_the_set_up_of_extensions_and_host_h18() -> None:
    order: list[str] = []

    def step(name):
        async def setup(tx, record) -> None:
            order.append(name)
            tx.append(Audit(n=len(order)), conversation=record.id)

        return setup

    extensions = [Extension("one", setup=step("one")), Extension("two", setup=step("two"))]
    async with opened(None, extensions=extensions, setup=step("host")) as harness:
        commits = Commits(harness)
        conversation = await harness.create_conversation(
            agent=Agent(extensions=["two"]), name="second", labels={"kind": "test"}
        )
        assert order == ["two", "host"]
        (created,) = commits.all
        assert len(created.batch.entries) == 2
        info = await conversation.info()
        assert (info.name, info.labels) == ("second", {"kind": "test"})


@pytest.mark.parametrize("whose", ["first", "second", "host"])
async def test_a_set_up_that_raises_creates_nothing_h18(whose: str) -> None:
    def step(name):
        async def setup(tx, record) -> None:
            tx.append(Audit(n=1), conversation=record.id)
            if name == whose:
                raise RuntimeError("no")

        return setup

    extensions = [Extension(name, setup=step(name)) for name in ("first", "second")]
    async with opened(None, extensions=extensions, setup=step("host")) as harness:
        commits = Commits(harness)
        for create in (harness.create_conversation, harness.root):
            with pytest.raises(RuntimeError, match="no"):
                await create()
        assert commits.all == []
        assert await harness.conversations() == []
        whose = "nobody"
        assert (await harness.root()).id == 1


async def test_conversations_are_listed_page_by_page_with_their_names_h154() -> None:
    async with opened(None) as harness:
        await harness.root()
        for n in range(4):
            await harness.create_conversation(name=f"c{n}")
        first = await harness.conversations(limit=2)
        rest_of = await harness.conversations(after=first[-1].id, owner=None)
        assert [info.name for info in (*first, *rest_of)] == [None, "c0", "c1", "c2", "c3"]
        conversation = await harness.conversation(first[1].id)
        await conversation.set_name("renamed")
        assert (await conversation.info()).name == "renamed"
        await conversation.set_name(labels={"a": "b"})
        assert (await conversation.info()).labels == {"a": "b"}
        assert (await conversation.info()).name == "renamed"
        with pytest.raises(NotFound):
            await harness.conversation(999)
        with pytest.raises(NotFound):
            await harness.handle(999).set_name("x")


async def test_agent_settings_are_checked_and_unknown_options_are_errors() -> None:
    async with opened(None) as harness:
        root = await harness.root()
        with pytest.raises(DocumentFieldError):
            await root.set_agent(thinking="a lot")  # pyright: ignore
        with pytest.raises(TypeError):
            await root.set_agent(modell="x")  # pyright: ignore
        with pytest.raises(TypeError):
            Harness.open(MemoryStorage(), modles=None)  # pyright: ignore
        with pytest.raises(ValueError, match="follow_up"):
            Harness.open(MemoryStorage(), follow_up="some")  # pyright: ignore
        await root.set_agent(extensions=("a",), tools=["b"], cwd="/x", thinking="high", model="m:n")
        agent = await root.agent()
        assert (agent.extensions, agent.tools, agent.cwd, agent.thinking, agent.model) == (
            ["a"],
            ["b"],
            "/x",
            "high",
            "m:n",
        )


async def test_the_close_report_is_there_after_the_block_k85() -> None:
    opening = Harness.open(MemoryStorage())
    async with opening as harness:
        assert harness.closed is None
    assert isinstance(harness.closed, CloseReport)
    with pytest.raises(RuntimeError, match="entered once"):
        await opening.__aenter__()
    with pytest.raises(SessionClosed):
        await harness.root()


async def test_a_store_has_one_harness_at_a_time_and_a_failed_open_leaves_it_free() -> None:
    storage = MemoryStorage()
    async with opened(None, storage=storage):
        with pytest.raises(StorageBusy):
            await Harness.open(storage).__aenter__()
    broken = [Extension("a"), Extension("a")]
    with pytest.raises(ValueError, match="installed"):
        await Harness.open(storage, extensions=broken).__aenter__()
    async with opened(None, storage=storage) as harness:
        await harness.root()


async def test_read_only_looks_and_changes_nothing_k143() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(say("x"), pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        crash = storage.snapshot()
    async with opened(ScriptedModel(say("x")), storage=crash, read_only=True) as harness:
        root = await harness.root()
        assert await (await harness.submission(submission.id)).status() == "placed"
        assert len((await harness.inspect()).tasks) == 1
        with pytest.raises(StorageError, match="reading only"):
            await root.submit("more")
        with pytest.raises(StorageError, match="reading only"):
            await root.write(Audit(n=1))


async def test_idle_returns_when_all_work_has_ended_t85() -> None:
    hold = Hold()
    async with opened(ScriptedModel(say("x"), pace=hold)) as harness:
        root, other = await harness.root(), await harness.create_conversation()
        await root.submit("hi")
        await other.submit("hi")
        idle = asyncio.ensure_future(harness.idle())
        own = asyncio.ensure_future(other.idle())
        await rest()
        assert not idle.done()
        assert not own.done()
        assert harness.wake().active
        hold.release()
        await idle
        await own
        assert not harness.wake().active


async def test_inspect_tells_what_lives_and_why_it_is_blocked_t46() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(say("x"), pace=Hold()), storage=storage) as harness:
        submission = await (await harness.root()).submit("hi")
        crash = storage.snapshot()
    async with opened(ScriptedModel(say("x")), storage=crash) as harness:
        harness.tasks.registry.remove("pi.generation")
        inspection = await harness.inspect()
        assert [(t.kind, t.blocked) for t in inspection.tasks] == [("pi.generation", "missing_task")]
        assert [s.id for s in inspection.placed] == [submission.id]
        with pytest.raises(WorkBlocked):
            await harness.idle()


async def test_a_model_is_found_by_name_through_installed_adapters_h171(monkeypatch) -> None:
    class Adapter:
        name = "test"

        def load(self):
            return lambda default: ScriptedModel(say("x"), name=default.partition(":")[2])

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Adapter()])
    async with Harness.open(MemoryStorage(), models="test:m1") as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        assert set((await root.usage()).models) == {"test:m1"}
    for bad, why in (("other:m", "there are: test"), ("m1", "provider:name"), ("test:", "provider:name")):
        with pytest.raises(NoAdapter, match=why):
            Harness.open(MemoryStorage(), models=bad)


async def test_extensions_can_change_while_it_runs_h120() -> None:
    @tool(replay="safe")
    async def late() -> str:
        """Late."""
        return "late"

    model = ScriptedModel({"hi": [call("late"), say("done")]})
    async with opened(model) as harness:
        root = await harness.root()
        harness.registry.install(Extension("late", tools=[late]))
        await (await root.submit("hi")).wait()
        assert [m.text for m in model.requests[-1].messages][-1] == "late"
        assert await harness.session.snapshot(Meta, conversation=1) is None


async def test_code_that_does_not_stop_is_named_in_the_close_report_k85_k86() -> None:
    ended = asyncio.Event()
    entered = asyncio.Event()

    @tool
    async def stubborn() -> str:
        """Stubborn."""
        entered.set()
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue
        return ""

    reports = []
    model = ScriptedModel({"hi": [call("stubborn"), say("done")]})
    async with opened(model, tools=(stubborn,), drain_ms=20, reports=reports) as harness:
        await (await harness.root()).submit("hi")
        await entered.wait()
    assert harness.closed is not None
    assert len(harness.closed.stragglers) == 1
    assert "pi.tool" in harness.closed.stragglers[0]
    assert "not_stopped" in [report.type for report in reports]
    ended.set()
    await rest()


async def test_a_text_is_no_list_of_names_k38() -> None:
    async with opened() as harness:
        root = await harness.root()
        with pytest.raises(TypeError):
            await root.set_agent(tools="add")
        with pytest.raises(TypeError):
            await root.set_agent(extensions="coding")
        assert (await root.agent()).tools is None


async def test_an_opening_that_is_not_entered_says_how_to() -> None:
    opening: Any = Harness.open(MemoryStorage())
    with pytest.raises(AttributeError, match=r"no 'root' before the harness is open: async with Harness\.open"):
        await opening.root()
    with pytest.raises(TypeError, match=r"entered, not awaited: async with Harness\.open"):
        await opening


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            {"models": ScriptedModel},
            r"models: the class ScriptedModel is no such object; ScriptedModel\(...\) makes one",
        ),
        ({"models": 5}, "'provider:name', or an object with default, find and stream: int has no default"),
        ({"extensions": Extension("alone")}, r"a list, also one alone: extensions=\[\.\.\.\], not Extension"),
        ({"extensions": 5}, "a list"),
        ({"environment": "work"}, r"a path is no environment: LocalEnvironment\('work'\)"),
        ({"environment": 5}, "an environment is a LocalEnvironment.*int has no for_call"),
        ({"approvals": ["bash"]}, r"Approvals\(tools=\(\.\.\.\)\), not as list"),
        ({"telemetry": 5}, r"OpenTelemetry\(\.\.\.\): int has no begin"),
        ({"compaction": False}, "a Compaction is wanted, not False; one with enabled=False compacts nothing"),
        ({"retry": 0}, "a RetryPolicy is wanted, not 0; one with retries=0 never retries"),
        ({"limits": {"turns": 1}}, r"Limits\(\.\.\.\)"),
    ],
)
async def test_a_part_of_another_kind_is_refused_before_anything_runs(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        async with Harness.open(MemoryStorage(), **parts):
            pass
