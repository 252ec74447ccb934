"""Turns and runs: commits, classification, retries, usage, pinned requests (rules H63 to H76)."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from doubles import ManualClock
from kit import Commits, Hold, kinds, live, opened, rest, transcript, until

from perdure.harness.documents import Agent, AssistantData, Live
from perdure.harness.messages import AssistantMessage, ToolCallPart, ToolResultMessage, Usage, decode_messages
from perdure.harness.model import Finished, ModelError, TextDelta
from perdure.harness.registry import Extension
from perdure.harness.settings import RetryPolicy
from perdure.harness.submission import Unanswered
from perdure.harness.tool import tool
from perdure.kernel.records import Faulted, Sleeping
from perdure.testing.model import ScriptedModel, call, calls, fail, say, turns

NO_JITTER = RetryPolicy(jitter=0.0)


@tool(replay="safe")
async def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


# --- commits --------------------------------------------------------------------------------------------------------


async def test_a_plain_turn_is_two_commits_h70() -> None:
    async with opened(ScriptedModel(say("hello"))) as harness:
        root = await harness.root()
        for _ in range(3):
            commits = Commits(harness)
            await (await root.submit("hi")).wait()
            assert len(commits.durable) == 2
            last = commits.durable[-1].batch
            assert [e.kind for e in last.entries] == ["pi.assistant"]
            assert [s.status for s in last.submissions] == ["done"]
            assert [t.status for t in last.tasks] == ["terminal"]


async def test_a_turn_with_a_tool_is_at_most_seven_commits_h70() -> None:
    model = ScriptedModel({"hi": [call("look", at="x"), say("done")]})
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        for _ in range(3):
            commits = Commits(harness)
            await (await root.submit("hi")).wait()
            assert len(commits.durable) <= 7


async def test_calls_and_their_tasks_come_in_one_commit_with_the_answer_h70() -> None:
    model = ScriptedModel({"hi": [calls(call("look", at="x"), call("look", at="y")), say("done")]})
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        commits = Commits(harness)
        await (await root.submit("hi")).wait()
        settled = next(c for c in commits.all if c.batch.entries and c.batch.entries[-1].kind == "pi.assistant")
        tasks = [t for t in settled.batch.tasks if t.kind == "pi.tool"]
        generation = next(t for t in settled.batch.tasks if t.kind == "pi.generation")
        assert [t.owner for t in tasks] == [generation.id] * 2
        assert [t.status for t in tasks] == ["running", "running"]
        assert settled.batch.entries[-1].data_as(AssistantData).calls == tuple(t.id for t in tasks)
        assert generation.status == "waiting"


async def test_a_run_is_all_turns_to_the_final_answer_h14() -> None:
    model = ScriptedModel({"hi": [call("look", at="x"), call("look", at="y"), say("done")]})
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        assert (await submission.answer()).text == "done"
        assert [e.kind for e in await submission.run()] == await kinds(root)
        assert await transcript(root) == [
            "user hi",
            "assistant",
            "tool-result seen x",
            "assistant",
            "tool-result seen y",
            "assistant done",
        ]
        assert len(model.requests) == 3


async def test_sequential_tools_run_one_after_the_other_h81() -> None:
    order: list[str] = []

    @tool(sequential=True, replay="safe")
    async def step(n: str) -> str:
        """Step."""
        order.append(f"begin {n}")
        await rest()
        order.append(f"end {n}")
        return n

    model = ScriptedModel({"hi": [calls(call("step", n="a"), call("step", n="b")), say("done")]})
    async with opened(model, tools=(step,)) as harness:
        await (await (await harness.root()).submit("hi")).wait()
    assert order == ["begin a", "end a", "begin b", "end b"]


async def test_two_calls_with_one_label_are_two_calls_h59() -> None:
    double = replace(call("look", at="x"), id="same"), replace(call("look", at="y"), id="same")
    model = ScriptedModel({"hi": [calls(*double), say("done")]})
    async with opened(model, tools=(look,)) as harness:
        await (await (await harness.root()).submit("hi")).wait()
        results = [m for m in model.requests[-1].messages if isinstance(m, ToolResultMessage)]
        assert [m.text for m in results] == ["seen x", "seen y"]


# --- failures -------------------------------------------------------------------------------------------------------


async def test_a_passing_failure_is_retried_after_two_four_eight_seconds_h72_h73() -> None:
    clock = ManualClock()
    model = ScriptedModel(fail("overloaded", times=3, then=say("at last")))
    async with opened(model, clock=clock, retry=NO_JITTER) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        for attempt, wait in enumerate((2.0, 4.0, 8.0), 1):
            await rest()
            assert len(model.requests) == attempt
            retry = (await live(root)).retry
            assert retry is not None
            assert retry == {
                "attempt": attempt + 1,
                "until": clock.wall() + round(wait * 1000),
                "code": "overloaded",
                "message": "it failed on cue",
            }
            (task,) = harness.session.live.settled.values()
            assert isinstance(task.state, Sleeping)
            await clock.advance(wait - 0.01)
            assert len(model.requests) == attempt
            await clock.advance(0.01)
        assert (await submission.answer()).text == "at last"
        assert (await live(root)).retry is None
        assert [request.attempt for request in model.requests] == [1, 2, 3, 4]
        assert await transcript(root) == ["user hi", "assistant at last"]


async def test_a_failure_that_does_not_pass_ends_the_run_h72() -> None:
    clock = ManualClock()
    model = ScriptedModel(fail("rate_limit"))
    async with opened(model, clock=clock, retry=NO_JITTER) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        for wait in (2.0, 4.0, 8.0):
            await rest()
            await clock.advance(wait)
        with pytest.raises(Unanswered) as ended:
            await submission.answer()
        assert (ended.value.reason, ended.value.detail) == ("model_error", "rate_limit: it failed on cue")
        assert len(model.requests) == 4
        assert not await root.busy()


async def test_the_providers_retry_after_is_respected_h73() -> None:
    clock = ManualClock()
    model = ScriptedModel(fail("rate_limit", times=1, then=say("ok"), retry_after_ms=30_000))
    async with opened(model, clock=clock, retry=NO_JITTER) as harness:
        submission = await (await harness.root()).submit("hi")
        await rest()
        await clock.advance(29.9)
        assert len(model.requests) == 1
        await clock.advance(0.1)
        assert (await submission.answer()).text == "ok"


async def test_a_provider_that_asks_for_too_long_a_wait_is_told_with_its_wait_h73() -> None:
    model = ScriptedModel(fail("rate_limit", retry_after_ms=86_400_000))
    async with opened(model, clock=ManualClock(), retry=NO_JITTER) as harness:
        record = await (await (await harness.root()).submit("hi")).wait()
        assert record.reason == "model_error"
        assert record.detail == "rate_limit: it failed on cue (it asks to be left alone for 86,400 seconds)"
        assert len(model.requests) == 1


async def test_each_request_of_a_run_has_retries_of_its_own_h72() -> None:
    clock = ManualClock()
    flaky = fail("connection", times=3, then=call("look", at="x"))
    model = ScriptedModel(turns(flaky, fail("connection", times=3, then=say("done"))))
    async with opened(model, clock=clock, retry=NO_JITTER, tools=(look,)) as harness:
        submission = await (await harness.root()).submit("hi")
        for _ in range(2):
            for wait in (2.0, 4.0, 8.0):
                await rest()
                await clock.advance(wait)
        assert (await submission.answer()).text == "done"


@pytest.mark.parametrize("code", ["malformed", "authentication", "refused", "other", "overflow"])
async def test_a_request_refused_for_good_is_never_sent_again_h74(code) -> None:
    clock = ManualClock()
    model = ScriptedModel(fail(code))
    async with opened(model, clock=clock) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        assert (await submission.wait()).reason == "model_error"
        await clock.advance(10_000)
        assert len(model.requests) == 1
        last = (await root.entries(order="descending", limit=1))[0]
        (message,) = decode_messages(last.raw_messages)
        assert isinstance(message, AssistantMessage)
        assert (message.stop_reason, message.error) == ("error", f"{code}: it failed on cue")


async def test_what_a_failed_attempt_had_said_is_kept_and_left_out_of_the_context_h60() -> None:
    clock = ManualClock()
    model = ScriptedModel(fail("overloaded", times=1, then=say("whole"), partial="half a sen"))
    async with opened(model, clock=clock, retry=NO_JITTER) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await rest()
        await clock.advance(2)
        await submission.wait()
        assert await transcript(root) == ["user hi", "assistant half a sen", "assistant whole"]
        assert [m.text for m in model.requests[-1].messages] == ["hi"]


class Odd(ScriptedModel):
    """Streams what its test wants."""

    events: object = None

    async def stream(self, request):
        for event in self.events(request):  # pyright: ignore
            yield event


@pytest.mark.parametrize(
    ("events", "detail"),
    [
        (lambda r: [TextDelta("x")], "other: the stream ended without a message"),
        (lambda r: 1 / 0, "other: the model's adapter raised ZeroDivisionError: division by zero"),
        (lambda r: sys.exit(3), "other: the model's adapter raised SystemExit: 3"),
        (
            lambda r: [
                Finished(AssistantMessage(content=(), provider="p", model="m", stop_reason="error", error="no"))
            ],
            "other: no",
        ),
    ],
)
async def test_an_adapter_that_misbehaves_ends_the_run_only_k133(events, detail) -> None:
    model = Odd()
    model.events = events
    reports = []
    async with opened(model, reports=reports) as harness:
        root = await harness.root()
        record = await (await root.submit("hi")).wait()
        assert (record.reason, record.detail) == ("model_error", detail)
        assert harness.session.failed is None
        assert [r.type for r in reports] == (["model_adapter_failed"] if "raised" in detail else [])


async def test_arguments_that_are_no_json_are_stored_as_text_and_refused_by_the_tool() -> None:
    import msgspec

    part = ToolCallPart("c1", "look", msgspec.Raw(b'{"at": "x'))

    def events(request):
        done = isinstance(request.messages[-1], ToolResultMessage)
        content = () if done else (part,)
        stop = "stop" if done else "tool_use"
        return [Finished(AssistantMessage(content=content, provider="p", model="m", stop_reason=stop))]

    model = Odd()
    model.events = events
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()
        assert (await (await root.submit("hi")).wait()).status == "done"
        entry = (await root.entries())[1]
        (message,) = decode_messages(entry.raw_messages)
        assert isinstance(message, AssistantMessage)
        assert msgspec.json.decode(message.tool_calls[0].arguments) == '{"at": "x'


async def test_lone_surrogates_of_a_model_do_not_fault_the_run() -> None:
    from perdure.harness.messages import Text

    model = Odd()
    model.events = lambda request: [
        Finished(AssistantMessage(content=(Text("a\ud800b"),), provider="p", model="m", stop_reason="stop"))
    ]
    async with opened(model) as harness:
        assert (await (await (await harness.root()).submit("hi")).answer()).text == "a?b"


# --- no model -------------------------------------------------------------------------------------------------------


async def test_without_models_a_harness_opens_and_a_run_ends_no_model_h19() -> None:
    async with opened(None) as harness:
        root = await harness.root()
        record = await (await root.submit("hi")).wait()
        assert (record.status, record.reason) == ("unanswered", "no_model")
        assert not await root.busy()
        assert await transcript(root) == ["user hi"]


async def test_a_model_that_cannot_be_reached_is_none_h19() -> None:
    async with opened(ScriptedModel(say("x"))) as harness:
        root = await harness.root(agent=Agent(model="far:away"))
        record = await (await root.submit("hi")).wait()
        assert record.reason == "no_model"
        assert "far:away" in (record.detail or "")
        await root.set_agent(model=None)
        assert (await (await root.submit("hi")).answer()).text == "x"


async def test_a_stored_choice_of_model_wins_over_the_default_h171() -> None:
    class Two(ScriptedModel):
        def find(self, model):
            found = super().find("test:scripted")
            return found if model in ("test:scripted", "test:other") else None

    model = Two(say("x"))
    async with opened(model) as harness:
        root = await harness.root(agent=Agent(model="test:other"))
        await (await root.submit("hi")).wait()
        other = await harness.create_conversation()
        await (await other.submit("hi")).wait()
        assert [request.model for request in model.requests] == ["test:other", "test:scripted"]
        assert set((await root.usage()).models) == {"test:other"}


# --- what is pinned -------------------------------------------------------------------------------------------------


async def test_a_request_sees_what_was_there_when_it_was_pinned_h67() -> None:
    hold = Hold()
    model = ScriptedModel(say("x"), pace=hold)
    async with opened(model) as harness:
        root = await harness.root(agent=Agent(thinking="low"))
        submission = await root.submit("hi")
        await hold.reached.wait()
        await root.set_agent(thinking="high")
        hold.release()
        await submission.wait()
        await (await root.submit("more")).wait()
        assert [request.thinking for request in model.requests] == ["low", "high"]


async def test_every_conversation_has_a_provider_key_of_its_own_h12() -> None:
    model = ScriptedModel(say("x"))
    async with opened(model) as harness:
        root = await harness.root()
        answer = await (await root.submit("hi")).answer()
        fork = await root.fork(answer.entry.id)
        await (await root.submit("hi")).wait()
        await (await fork.submit("hi")).wait()
        first, second, third = (request.session_key for request in model.requests)
        assert first == second
        assert first != third
        assert len(first) == len(third) == 32


async def test_tools_are_offered_as_the_conversation_selects_h121() -> None:
    model = ScriptedModel(say("x"))

    @tool
    async def other() -> str:
        """Other."""
        return ""

    async with opened(model, tools=(look, other)) as harness:
        root = await harness.root(agent=Agent(tools=["other", "missing"]))
        await (await root.submit("hi")).wait()
        assert [spec.name for spec in model.requests[-1].tools] == ["other"]
        await root.set_agent(tools=None)
        await (await root.submit("hi")).wait()
        assert [spec.name for spec in model.requests[-1].tools] == ["look", "other"]
        harness.registry.install(Extension("late", tools=[replace(look, name="missing")]))
        await (await root.submit("hi")).wait()
        assert [spec.name for spec in model.requests[-1].tools] == ["look", "other", "missing"]


# --- usage ----------------------------------------------------------------------------------------------------------


async def test_every_attempt_counts_in_the_commit_of_its_outcome_h76() -> None:
    clock = ManualClock()
    model = ScriptedModel(
        fail("overloaded", times=1, then=say("ok", usage=Usage(input=7, output=3, reasoning=1)), usage=Usage(input=5))
    )
    async with opened(model, clock=clock, retry=NO_JITTER) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await until(lambda: len(model.requests) == 1)
        await rest()
        assert (await root.usage()).models["test:scripted"]["input"] == 5
        await clock.advance(2)
        await submission.wait()
        totals = (await root.usage()).models["test:scripted"]
        assert (totals["requests"], totals["input"], totals["output"], totals["reasoning"]) == (2, 12, 3, 1)


async def test_usage_is_summed_over_the_session_h157() -> None:
    model = ScriptedModel({"hi": say("x", usage=Usage(input=1, output=2)), "look": [call("look"), say("y")]})
    async with opened(model, tools=(look,)) as harness:
        one, two = await harness.root(), await harness.create_conversation()
        await (await one.submit("hi")).wait()
        await (await two.submit("hi")).wait()
        await (await two.submit("look")).wait()
        total = await harness.usage()
        assert total.requests == 4
        assert total.tokens.input == 1 + 1 + 10 + 10
        assert total.tools["look"]["calls"] == 1
        assert (await one.usage()).requests == 1
        assert (await one.usage()).tools == {}


# --- outcomes that are not its own ----------------------------------------------------------------------------------


async def test_a_generation_that_faults_ends_its_inputs_faulted_h41(monkeypatch) -> None:
    hold = Hold()
    model = ScriptedModel(say("x"), pace=hold)
    reports = []
    async with opened(model, reports=reports) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        await hold.reached.wait()
        queued = await root.submit("more")

        def broken(*_) -> None:
            raise RuntimeError("a bug")

        # Something no phase expects.
        monkeypatch.setattr("perdure.harness.generation.end_run", broken)
        hold.release()
        record = await submission.wait()
        assert (record.status, record.reason) == ("unanswered", "faulted")
        assert (await live(root)).run is None
        assert await queued.status() == "queued"
        task = await harness.session.task((record.id or 0) + 1)
        assert task is not None
        assert isinstance(task.outcome, Faulted)


async def test_a_catalogue_that_raises_is_no_model_and_faults_nothing_k133() -> None:
    class Broken(ScriptedModel):
        def find(self, model):
            raise RuntimeError("broken catalogue")

    reports = []
    async with opened(Broken(say("x")), reports=reports) as harness:
        record = await (await (await harness.root()).submit("hi")).wait()
        assert record.reason == "no_model"
        assert {report.type for report in reports} == {"model_adapter_failed"}


async def test_a_tool_whose_schema_cannot_be_made_is_left_out_k133() -> None:
    @tool
    async def odd(x: Unheard) -> str:  # noqa: F821  # pyright: ignore
        """Odd."""
        return ""

    reports = []
    model = ScriptedModel(say("x"))
    async with opened(model, tools=(look, odd), reports=reports) as harness:
        assert (await (await (await harness.root()).submit("hi")).answer()).text == "x"
        assert [spec.name for spec in model.requests[0].tools] == ["look"]
        assert {report.type for report in reports} == {"tool_unusable"}


async def test_an_answer_cut_at_the_output_limit_is_an_answer_h70() -> None:
    async with opened(ScriptedModel(say("half a", stop="length"))) as harness:
        answer = await (await (await harness.root()).submit("hi")).answer()
        assert (answer.text, answer.message.stop_reason) == ("half a", "length")


async def test_live_shows_the_run_and_its_turns_h13() -> None:
    hold = Hold()
    model = ScriptedModel({"hi": [call("look", at="x"), say("done")]}, pace=hold)
    seen: list[Live] = []
    async with opened(model, tools=(look,)) as harness:
        root = await harness.root()

        def watch(settled) -> None:
            seen.extend(Live.from_json(c.after) for c in settled.documents if c.record.kind == "pi.live")

        harness.session.observe(watch)
        submission = await root.submit("hi")
        hold.release()
        await submission.wait()
    turns_seen = [state.run["turn"] for state in seen if state.run]
    assert turns_seen == sorted(turns_seen)
    assert max(turns_seen) == 1
    assert any(state.tools for state in seen)
    assert seen[-1].run is None
    assert seen[-1].tools == {}


def test_model_errors_say_whether_they_pass_h74() -> None:
    assert ModelError("rate_limit", "x").retryable
    assert not ModelError("malformed", "x").retryable
