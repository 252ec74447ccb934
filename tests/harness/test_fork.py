"""Forks of conversations: history, settings, independence (rules K115 to K119, H8 to H12, H35)."""

from __future__ import annotations

import asyncio

import pytest
from kit import Hold, live, opened, queue, transcript

from perdure.harness.documents import Agent, Meta
from perdure.kernel.errors import NotFound
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, say


def talk(**more) -> ScriptedModel:
    return ScriptedModel(lambda request: say(f"answer to {request.messages[-1].text}"), **more)


async def test_a_fork_has_the_history_through_its_entry_and_both_go_on() -> None:
    model = talk()
    async with opened(model) as harness:
        root = await harness.root()
        first = await (await root.submit("one")).answer()
        await (await root.submit("two")).wait()
        fork = await root.fork(first.entry.id)
        assert await transcript(fork) == ["user one", "assistant answer to one"]
        await (await fork.submit("three")).wait()
        assert [m.text for m in model.requests[-1].messages] == ["one", "answer to one", "three"]
        await (await root.submit("four")).wait()
        assert [m.text for m in model.requests[-1].messages][-3:] == ["two", "answer to two", "four"]
        assert await transcript(fork) == [
            "user one",
            "assistant answer to one",
            "user three",
            "assistant answer to three",
        ]


async def test_a_fork_has_the_settings_of_its_entry_h8() -> None:
    async with opened(talk(), instructions="x") as harness:
        root = await harness.root(agent=Agent(instructions="first", tools=["a"]))
        answer = await (await root.submit("one")).answer()
        await root.set_agent(instructions="second", tools=None)
        later = await (await root.submit("two")).answer()
        early, late = await root.fork(answer.entry.id), await root.fork(later.entry.id)
        assert ((await early.agent()).instructions, (await early.agent()).tools) == ("first", ["a"])
        assert ((await late.agent()).instructions, (await late.agent()).tools) == ("second", None)
        await early.set_agent(instructions="its own")
        assert (await root.agent()).instructions == "second"
        assert (await root.agent(at=answer.entry.id)).instructions == "first"


async def test_a_fork_shows_no_section_again_that_its_history_shows_h65() -> None:
    model = talk()
    async with opened(model, instructions="Be brief.") as harness:
        root = await harness.root()
        answer = await (await root.submit("one")).answer()
        fork = await root.fork(answer.entry.id)
        await (await fork.submit("two")).wait()
        assert [line for line in await transcript(fork) if line.startswith("system")] == ["system # host\n\nBe brief."]
        assert model.requests[-1].messages[0].text == "# host\n\nBe brief."


async def test_a_fork_inherits_no_run_queue_usage_or_name_h9_h10_h11() -> None:
    hold = Hold()
    async with opened(talk(pace=hold)) as harness:
        root = await harness.root()
        await root.set_name("trunk", labels={"a": "b"})
        first = await root.submit("one")
        await root.submit("queued")
        entry = (await first.record()).entry or 0
        fork = await root.fork(entry)
        assert await root.busy()
        assert not await fork.busy()
        assert await queue(fork) == []
        assert (await fork.usage()).requests == 0
        assert (await fork.info()).name is None
        assert (await live(fork)).run is None
        hold.release()
        await harness.idle()
        assert await transcript(fork) == ["user one"]
        # The input it inherited was another's; its own next one sees it.
        assert (await (await fork.submit("go on")).answer()).text == "answer to go on"
        assert await harness.session.snapshot(Meta, conversation=fork.id) is None


async def test_a_fork_of_a_fork_and_a_fork_within_a_round_of_tools_h59() -> None:
    from perdure.harness.tool import tool
    from perdure.testing.model import call

    entered = asyncio.Event()
    leave = asyncio.Event()

    @tool
    async def work() -> str:
        """Work."""
        entered.set()
        await leave.wait()
        return "done"

    def script(request):
        last = request.messages[-1]
        return call("work") if last.text == "work" else say(f"answer to {last.text}")

    model = ScriptedModel(script)
    async with opened(model, tools=(work,)) as harness:
        root = await harness.root()
        submission = await root.submit("work")
        await entered.wait()
        calling = (await root.entries(order="descending", limit=1))[0]
        fork = await root.fork(calling.id)
        assert (await (await fork.submit("and?")).answer()).text == "answer to and?"
        sent = model.requests[-1].messages
        assert getattr(sent[2], "code", None) == "interrupted", "the call has no result here"
        twice = await fork.fork((await fork.entries(order="descending", limit=1))[0].id)
        assert (await (await twice.submit("so?")).answer()).text == "answer to so?"
        leave.set()
        assert (await submission.answer()).text == "answer to done"


async def test_forks_survive_a_reopen() -> None:
    storage = MemoryStorage()
    async with opened(talk(), storage=storage) as harness:
        root = await harness.root()
        answer = await (await root.submit("one")).answer()
        fork = await root.fork(answer.entry.id)
        await (await root.submit("elsewhere")).wait()
        id = fork.id
    model = talk()
    async with opened(model, storage=storage) as harness:
        fork = await harness.conversation(id)
        await (await fork.submit("two")).wait()
        assert [m.text for m in model.requests[-1].messages] == ["one", "answer to one", "two"]
        assert (await fork.info()).record.parent is not None


async def test_only_an_entry_of_its_history_can_be_forked_at() -> None:
    async with opened(talk()) as harness:
        root, other = await harness.root(), await harness.create_conversation()
        answer = await (await root.submit("one")).answer()
        for id in (answer.entry.id, 999_999):
            with pytest.raises(NotFound):
                await other.fork(id)
