"""What rides in whose commit in a turn with tools (rules H185 and H186), and what does not."""

from __future__ import annotations

import pytest
from kit import Commits, Hold, Note, opened, rest, transcript, until
from typing_extensions import override

from perdure.harness import generation, prepare
from perdure.harness.contexts import Contexts
from perdure.harness.environment import ExecutionEnvironment
from perdure.harness.hooks import HookCall, before_tool
from perdure.harness.model import ModelInfo
from perdure.harness.registry import Extension
from perdure.harness.tool import tool
from perdure.kernel.session import Settled
from perdure.storage.memory import MemoryStorage
from perdure.testing.model import Call, ScriptedModel, call, calls, say


@tool(replay="unsafe")
async def look(at: int = 0) -> str:
    """Look."""
    return f"seen {at}"


@before_tool
async def nothing(_: HookCall) -> None:
    """Lets every call be as it is."""


def phases(settled: Settled, kind: str = "pi.tool") -> list[str]:
    """Where a commit puts tasks of a kind; its status for one that stands nowhere."""
    states = [task.state for task in settled.batch.tasks if task.kind == kind]
    return [getattr(state, "phase", type(state).__name__) for state in states]


async def test_a_turn_with_a_tool_is_four_commits_h185_h186() -> None:
    async with opened(ScriptedModel({"hi": [call("look", at=1), say("done")]}), tools=(look,)) as harness:
        root = await harness.root()
        for _ in range(3):
            commits = Commits(harness)
            await (await root.submit("hi")).wait()
            _admitted, answered, result, _final = commits.durable
            assert phases(answered) == ["execute"]
            assert phases(result) == ["Terminal"]
            assert phases(result, "pi.generation") == ["request"]
            assert [task.nonce != "" for task in answered.batch.tasks if task.kind == "pi.tool"] == [True]


async def test_every_call_of_a_round_has_its_intent_with_the_answer_h185() -> None:
    model = ScriptedModel({"hi": [calls(call("look", at=1), call("look", at=2)), say("done")]})
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).wait()
        assert phases(commits.durable[1]) == ["execute", "execute"]
        # The boundary rides with the last result only.
        assert [phases(c, "pi.generation") for c in commits.durable[2:]] == [[], ["request"], ["Terminal"]]


async def test_nothing_runs_before_the_answer_with_its_intent_has_settled_h90() -> None:
    ran: list[int] = []

    @tool
    async def act(n: int) -> str:
        """Act."""
        ran.append(harness.session.seq)
        return str(n)

    async with opened(ScriptedModel({"hi": [call("act", n=1), say("done")]}), tools=(act,)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).wait()
        assert ran == [commits.durable[1].seq]


async def test_a_hook_is_asked_before_the_intent_h185() -> None:
    extension = Extension("hooks", hooks=[nothing])
    model = ScriptedModel({"hi": [call("look", at=1), say("done")]})
    async with opened(model, tools=(look,), extensions=[extension]) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).wait()
        assert [phases(c) for c in commits.durable] == [[], ["start"], ["execute"], ["Terminal"], []]


async def test_a_hook_of_another_conversation_is_not_waited_for_h185() -> None:
    async def never(_: HookCall) -> None:
        raise AssertionError

    hooks = [before_tool(conversation=99)(never), before_tool(conversation=99, subtree=True)(never)]
    model = ScriptedModel({"hi": [call("look", at=1), say("done")]})
    async with opened(model, tools=(look,), extensions=[Extension("hooks", hooks=hooks)]) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).wait()
        assert [phases(c) for c in commits.durable] == [[], ["execute"], ["Terminal"], []]


async def test_an_intent_function_is_asked_before_the_intent_h185() -> None:
    @tool
    async def act(n: int) -> str:
        """Act."""
        return str(n)

    @act.intent
    async def _prepare(n: int) -> int:
        return n + 1

    async with opened(ScriptedModel({"hi": [call("act", n=1), say("done")]}), tools=(act,)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).wait()
        assert [phases(c) for c in commits.durable][1:3] == [["start"], ["execute"]]


@pytest.mark.parametrize("wrong", [call("look", at="no number"), call("nobody"), call("look", elsewhere=1)])
async def test_a_call_that_is_wrong_is_told_by_its_own_task_h185(wrong: Call) -> None:
    async with opened(ScriptedModel({"hi": [wrong, say("done")]}), tools=(look,)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert phases(commits.durable[1]) == ["start"]


async def test_a_host_that_fails_to_name_an_environment_is_the_calls_business_h185() -> None:
    def fails(_: int) -> None:
        raise RuntimeError("no environment today")

    @tool
    async def act(n: int, env: ExecutionEnvironment | None) -> str:
        """Act."""
        return str(n)

    model = ScriptedModel({"hi": [call("act", n=1), say("done")]})
    reports = []
    async with opened(model, tools=(act,), environment=fails, reports=reports) as harness:
        # The run goes on: the call's own task is faulted, not the generation.
        assert (await (await (await harness.root()).submit("hi")).answer()).text == "done"
    assert [report.kind for report in reports] == ["pi.tool"]


async def test_the_commit_of_the_last_result_places_what_waits_h186() -> None:
    @tool
    async def act() -> str:
        """Act."""
        await root.submit("faster", mode="steer")
        await root.write(Note(text="noted"))
        return "acted"

    model = ScriptedModel({"hi": [call("act"), say("done")], "faster": say("at once")})
    async with opened(model, tools=(act,)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        assert (await (await root.submit("hi")).answer()).text == "at once"
        placed = next(c for c in commits.durable if phases(c) == ["Terminal"])
        assert [e.kind for e in placed.batch.entries] == ["pi.tool-result", "app.note", "pi.user"]
        assert await transcript(root) == [
            "user hi",
            "assistant",
            "tool-result acted",
            "app.note noted",
            "user faster",
            "assistant at once",
        ]


async def test_a_reset_is_left_to_a_boundary_of_its_own_h186() -> None:
    @tool
    async def act() -> str:
        """Act."""
        await root.reset("anew")
        return "acted"

    async with opened(ScriptedModel({"hi": [call("act"), say("done")]}), tools=(act,)) as harness:
        root = await harness.root()
        record = await (await root.submit("hi")).wait()
        assert (record.status, record.reason) == ("unanswered", "reset")


class Flickering(ScriptedModel):
    """A catalogue that has no model at one of the next looks."""

    looks: int | None = None

    @override
    def find(self, model: str) -> ModelInfo | None:
        if self.looks is not None:
            self.looks -= 1
            if self.looks == 0:
                return None
        return super().find(model)


@pytest.mark.parametrize("at", range(1, 5))
async def test_a_model_that_is_gone_at_any_look_costs_no_result_h186(at: int) -> None:
    model = Flickering({"hi": [call("act"), say("done")]})

    @tool
    async def act() -> str:
        """Act."""
        model.looks = at
        return "acted"

    async with opened(model, tools=(act,)) as harness:
        root = await harness.root()
        record = await (await root.submit("hi")).wait()
        assert record.status == "done" or record.reason == "no_model"
        assert "tool-result acted" in await transcript(root)


async def test_a_context_let_go_of_at_the_boundary_is_read_anew_h186(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel({"hi": [call("act"), say("done")], "faster": say("at once")})

    @tool
    async def act() -> str:
        """Act."""
        await root.submit("faster", mode="steer")
        looks = iter((True, False))
        shown = Contexts.shown
        monkeypatch.setattr(Contexts, "shown", lambda self, tx, id: shown(self, tx, id) if next(looks, True) else None)
        return "acted"

    async with opened(model, tools=(act,)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        assert (await (await root.submit("hi")).answer()).text == "at once"
        result = next(c for c in commits.durable if phases(c) == ["Terminal"])
        assert phases(result, "pi.generation") == ["start"]
        assert [e.kind for e in result.batch.entries] == ["pi.tool-result", "pi.user"]


async def test_what_fails_at_the_boundary_is_the_runs_and_not_the_calls_h186(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise LookupError("nothing can be prepared today")

    @tool
    async def act() -> str:
        """Act."""
        monkeypatch.setattr(prepare, "prepare", failing)
        monkeypatch.setattr(generation, "prepare", failing)
        return "acted"

    reports = []
    async with opened(ScriptedModel({"hi": [call("act"), say("done")]}), tools=(act,), reports=reports) as harness:
        root = await harness.root()
        record = await (await root.submit("hi")).wait()
        assert record.reason == "faulted"
        assert "tool-result acted" in await transcript(root)
    assert [report.kind for report in reports] == ["pi.generation"]


async def test_what_fails_at_the_final_boundary_is_the_next_runs_h46(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise LookupError("nothing can be prepared today")

    reports = []
    hold = Hold()
    async with opened(ScriptedModel({"hi": say("done")}, pace=hold), reports=reports) as harness:
        root = await harness.root()
        first, second = await root.submit("hi"), await root.submit("hi")
        harness.resume()
        await hold.reached.wait()
        monkeypatch.setattr(prepare, "prepare", failing)
        monkeypatch.setattr(generation, "prepare", failing)
        hold.release()
        assert (await first.answer()).text == "done"
        assert (await second.wait()).reason == "faulted"


async def test_an_answer_that_cannot_be_committed_is_paid_for_h76(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object) -> None:
        raise LookupError("no run ends today")

    reports = []
    async with opened(ScriptedModel({"hi": say("done")}), reports=reports) as harness:
        root = await harness.root()
        monkeypatch.setattr(generation, "end_run", failing)
        assert (await (await root.submit("hi")).wait()).reason == "faulted"
        usage = await root.usage()
        assert (usage.requests, usage.tokens.output > 0) == (1, True)


async def test_a_foreseen_call_that_cannot_begin_has_not_begun_h185() -> None:
    class Environment:
        scope = None

        def for_call(self, _: object) -> None:
            raise OSError("no environment today")

    @tool
    async def act(env: ExecutionEnvironment) -> str:
        """Act."""
        return "acted"

    model = ScriptedModel({"hi": [call("act"), say("done")]})
    reports = []
    async with opened(model, tools=(act,), environment=lambda _: Environment(), reports=reports) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi")).answer()).text == "done"
        assert "tool-result The call failed before the tool began." in await transcript(root)
    assert [report.kind for report in reports] == ["pi.tool"]


@pytest.mark.parametrize("after", range(1, 6))
async def test_killed_after_any_commit_the_turn_ends_the_same_h77(after: int) -> None:
    """The unsafe call of a killed process is interrupted if its intent had settled, and never run a second time."""
    ran: list[int] = []

    @tool
    async def act(n: int) -> str:
        """Act."""
        ran.append(n)
        await rest()
        return str(n)

    def script() -> ScriptedModel:
        return ScriptedModel({"hi": [calls(call("act", n=1), call("act", n=2)), say("done")]})

    storage = MemoryStorage()
    async with opened(script(), storage=storage, tools=(act,), reports=[]) as harness:
        root = await harness.root()
        first = harness.session.seq
        await root.submit("hi", request_id="one")
        harness.resume()
        await until(lambda: harness.session.seq >= first + after)
        copy = storage.snapshot()
        begun = list(ran)
        harness.session.fail(ConnectionError("killed"))
    async with opened(script(), storage=copy, tools=(act,), reports=[]) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi", request_id="one")).answer()).text == "done"
        results = [line for line in await transcript(root) if line.startswith("tool-result")]
        assert len(results) == 2
    assert sorted(ran) in ([], [1], [2], [1, 2])
    assert set(begun) <= set(ran)
