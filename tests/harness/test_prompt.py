"""Prompt sections as deltas (rules H64 to H66)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import Note, opened, transcript

from perdure.harness.documents import SYSTEM, Agent, SystemData
from perdure.harness.messages import SystemMessage
from perdure.harness.prompt import Shown, difference, render
from perdure.harness.registry import Extension, PromptSection
from perdure.kernel.records import EntryRecord
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import ScriptedModel, say


def shown_by(*datas: SystemData) -> Shown:
    shown = Shown()
    for id, data in enumerate(datas, 1):
        raw = msgspec.Raw(msgspec.json.encode(data))
        shown.feed(EntryRecord(id=id, seq=id, created_at=0, conversation_id=1, kind=SYSTEM, raw_data=raw))
    return shown


sections = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["", "one", "two", "three"]))


@given(st.lists(sections, max_size=6))
def test_after_a_delta_the_transcript_shows_what_the_prompt_says_h65(states: list[dict[str, str]]) -> None:
    datas: list[SystemData] = []
    for state in states:
        data = difference(shown_by(*datas), state)
        if data is not None:
            assert data.baseline == (not datas), "one baseline, once"
            assert render(data)
            datas.append(data)
        shown = shown_by(*datas)
        assert shown.sections == {name: text for name, text in state.items() if text}
        assert difference(shown, state) is None, "what is shown is not shown again"


def test_a_delta_holds_the_changed_sections_only_h65() -> None:
    shown = shown_by(SystemData(sections={"a": "one", "b": "two", "c": "three"}, baseline=True))
    data = difference(shown, {"a": "one", "b": "new", "d": "more"})
    assert data == SystemData(sections={"b": "new", "d": "more", "c": None})
    assert data is not None
    assert render(data) == (
        'From here on the section "b" reads:\n\nnew\n\n'
        'From here on the section "d" reads:\n\nmore\n\n'
        'The section "c" no longer applies.'
    )


def test_without_any_section_nothing_is_shown() -> None:
    assert difference(Shown(), {}) is None
    assert difference(Shown(), {"a": ""}) is None


def systems(model: ScriptedModel) -> list[str]:
    return [m.text for m in model.requests[-1].messages if isinstance(m, SystemMessage)]


async def test_the_baseline_comes_once_and_first_then_nothing_while_nothing_changes_h65() -> None:
    model = ScriptedModel(say("x"))
    async with opened(model, instructions="Be brief.") as harness:
        root = await harness.root(agent=Agent(instructions="You are Ann.", cwd="/work"))
        for _ in range(3):
            await (await root.submit("hi")).wait()
        assert systems(model) == [
            "# host\n\nBe brief.\n\n# instructions\n\nYou are Ann.\n\n# working directory\n\n/work"
        ]
        assert isinstance(model.requests[-1].messages[0], SystemMessage)
        assert len([line for line in await transcript(root) if line.startswith("system")]) == 1


async def test_a_change_is_one_entry_and_nothing_before_it_changes_h65() -> None:
    model = ScriptedModel(say("x"))
    async with opened(model, instructions="Be brief.") as harness:
        root = await harness.root(agent=Agent(instructions="You are Ann."))
        await (await root.submit("hi")).wait()
        first = list(model.requests[-1].messages)
        await root.set_agent(instructions="You are Bob.", cwd="/tmp")
        await (await root.submit("more")).wait()
        second = list(model.requests[-1].messages)
        assert second[: len(first)] == first, "prompt caches keep hitting"
        assert systems(model)[1:] == [
            'From here on the section "instructions" reads:\n\nYou are Bob.\n\n'
            'From here on the section "working directory" reads:\n\n/tmp'
        ]
        await root.set_agent(cwd=None)
        await (await root.submit("more")).wait()
        assert systems(model)[-1] == 'The section "working directory" no longer applies.'


async def test_after_a_head_one_complete_baseline_once_h66() -> None:
    model = ScriptedModel(say("x"))
    async with opened(model, instructions="Be brief.") as harness:
        root = await harness.root(agent=Agent(instructions="You are Ann."))
        await (await root.submit("hi")).wait()
        await root.set_agent(instructions="You are Bob.")
        await (await root.submit("more")).wait()
        await root.reset("go on")
        for _ in range(2):
            await (await root.submit("after")).wait()
            assert systems(model) == ["# host\n\nBe brief.\n\n# instructions\n\nYou are Bob."]
            assert isinstance(model.requests[-1].messages[0], SystemMessage)


async def test_what_is_shown_is_known_again_after_a_reopen_h65() -> None:
    storage = MemoryStorage()
    async with opened(ScriptedModel(say("x")), storage=storage, instructions="Be brief.") as harness:
        await (await (await harness.root()).submit("hi")).wait()
    model = ScriptedModel(say("x"))
    async with opened(model, storage=storage, instructions="Be brief.") as harness:
        root = await harness.root()
        await (await root.submit("more")).wait()
        assert systems(model) == ["# host\n\nBe brief."]
        await root.write(Note(text="x"))
        assert len([line for line in await transcript(root) if line.startswith("system")]) == 1


async def test_sections_come_from_selected_extensions_and_know_the_conversation_h64() -> None:
    model = ScriptedModel(say("x"))
    extensions = [
        Extension("one", sections=[PromptSection("weather", lambda info: f"Rain in {info.id}.")]),
        Extension("two", sections=[PromptSection("news", "None.")]),
    ]
    async with opened(model, extensions=extensions) as harness:
        root = await harness.root(agent=Agent(extensions=["one"]))
        await (await root.submit("hi")).wait()
        assert systems(model) == ["# weather\n\nRain in 1."]


@pytest.mark.parametrize("error", [RuntimeError("no weather today"), SystemExit(3)])
async def test_a_section_that_raises_is_reported_and_stays_as_it_was_shown_k133(error: BaseException) -> None:
    model = ScriptedModel(say("x"))
    broken = False
    reports = []

    def render(_info) -> str:
        if broken:
            raise error
        return "Rain."

    extensions = [Extension("one", sections=[PromptSection("weather", render)])]
    async with opened(model, extensions=extensions, reports=reports) as harness:
        root = await harness.root()
        await (await root.submit("hi")).wait()
        broken = True
        await (await root.submit("more")).wait()
        assert systems(model) == ["# weather\n\nRain."]
        assert [report.type for report in reports] == ["section_failed"]


async def test_sections_of_one_name_are_both_told() -> None:
    model = ScriptedModel(say("x"))
    extensions = [Extension("one", sections=[PromptSection("instructions", "From the extension.")])]
    async with opened(model, extensions=extensions) as harness:
        root = await harness.root(agent=Agent(instructions="From the agent."))
        await (await root.submit("hi")).wait()
        assert systems(model) == ["# instructions\n\nFrom the extension.\n\nFrom the agent."]
