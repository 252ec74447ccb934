"""What a harness tells OpenTelemetry of its work (rules H280 to H289)."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import HistogramDataPoint
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from harness.compaction_kit import fill, model
from harness.kit import Commits, Hold, opened
from perdure import (
    Extension,
    Harness,
    MemoryStorage,
    Next,
    OpenTelemetry,
    PollPolicy,
    Report,
    Run,
    Task,
    ToolCall,
    Unanswered,
    tool,
)
from perdure.harness.compaction_policy import Compaction
from perdure.harness.messages import Usage
from perdure.testing.loop import SimulatedEntropy
from perdure.testing.model import ScriptedModel, call, calls, defer, fail, say
from telemetry.otel_kit import Told, attributes_of, parent_id

MODEL = "test:scripted"


@tool(replay="safe")
async def population(city: str) -> int:
    """How many people live in a city."""
    with trace.get_tracer("app").start_as_current_span("the tool's own"):
        return len(city)


@tool
async def broken() -> str:
    """Raise."""
    raise LookupError("nothing there")


async def ask(harness: Harness, text: str = "hi") -> str:
    root = await harness.root()
    return (await (await root.submit(text)).answer()).text


async def test_a_run_its_requests_and_its_calls_are_spans_of_one_trace_h282() -> None:
    told = Told(agent_name="geo")
    usage = Usage(input=5, output=7, cache_read=3, cache_write=2, reasoning=1)
    model = ScriptedModel([call("population", city="Lyon"), say("4", usage=usage)])
    async with opened(model, tools=(population,), telemetry=told.telemetry) as harness:
        commits = Commits(harness)
        assert await ask(harness) == "4"
        log_id = harness.session.info.log_id
        submission = next(s for c in commits.all for s in c.batch.submissions)
        end = next(c.seq for c in commits.all for s in c.batch.submissions if s.status == "done")
    run, executed, (first, last) = told.one("invoke_agent"), told.one("execute_tool"), told.named("chat")
    assert len({span.context.trace_id for span in told.ended if span.context}) == 1
    assert run.name == "invoke_agent geo"
    assert run.kind is SpanKind.INTERNAL
    assert run.status.status_code is StatusCode.UNSET
    assert attributes_of(run) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "geo",
        "gen_ai.conversation.id": f"{log_id}/1",
        "perdure.log.id": log_id,
        "perdure.conversation.id": 1,
        "perdure.task.id": attributes_of(first)["perdure.task.id"],
        "perdure.commit.seq": attributes_of(run)["perdure.commit.seq"],
        "perdure.resumed": False,
        "perdure.run.reason": "answered",
        "perdure.submission.ids": (submission.id,),
        "perdure.ended.seq": end,
    }
    assert {parent_id(span) for span in (first, last, executed)} == {run.context and run.context.span_id}
    assert last.name == f"chat {MODEL.partition(':')[2]}"
    assert last.kind is SpanKind.CLIENT
    chat = attributes_of(last)
    assert chat["gen_ai.operation.name"] == "chat"
    assert f"{chat['gen_ai.provider.name']}:{chat['gen_ai.request.model']}" == MODEL
    assert chat["gen_ai.usage.input_tokens"] == 10
    assert chat["gen_ai.usage.output_tokens"] == 7
    assert chat["gen_ai.usage.cache_read.input_tokens"] == 3
    assert chat["gen_ai.usage.cache_creation.input_tokens"] == 2
    assert chat["gen_ai.usage.reasoning.output_tokens"] == 1
    assert chat["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes_of(first)["gen_ai.response.finish_reasons"] == ("tool_call",)
    assert isinstance(chat["gen_ai.response.time_to_first_chunk"], float)
    assert chat["perdure.attempt"] == 1
    assert executed.name == "execute_tool population"
    assert attributes_of(executed)["gen_ai.tool.name"] == "population"
    assert attributes_of(executed)["perdure.call.code"] == "ok"
    assert told.spans.open == []


async def test_a_response_made_in_the_background_is_a_span_when_it_is_begun_and_when_it_is_there_h282_h405() -> None:
    told = Told()
    model = ScriptedModel(defer(say("4", usage=Usage(input=5, output=7)), polls=1))
    async with opened(model, telemetry=told.telemetry, polling=PollPolicy(first_ms=1)) as harness:
        assert await ask(harness) == "4"
    begun, there = map(attributes_of, told.named("chat"))
    assert begun["gen_ai.response.finish_reasons"] == ("deferred",)
    assert "gen_ai.usage.output_tokens" not in begun, "tokens are told once"
    assert (there["gen_ai.response.finish_reasons"], there["gen_ai.usage.output_tokens"]) == (("stop",), 7)
    assert told.spans.open == []


async def test_what_a_tool_does_is_part_of_its_span_h282() -> None:
    told = Told()
    seen: list[trace.SpanContext] = []

    @tool
    async def look() -> str:
        """Look."""
        seen.append(trace.get_current_span().get_span_context())
        await asyncio.gather(asyncio.to_thread(lambda: seen.append(trace.get_current_span().get_span_context())))
        return "seen"

    async with opened(ScriptedModel([call("look"), say("ok")]), tools=(look,), telemetry=told.telemetry) as harness:
        await ask(harness)
    assert seen == [told.one("execute_tool").context] * 2


async def test_a_call_that_fails_says_how_and_never_what_h282_h285() -> None:
    told = Told()
    reports: list[Report] = []
    round = calls(call("broken"), call("population", wrong=1), call("made_up_by_the_model"))
    model = ScriptedModel([round, say("never mind")])
    async with opened(model, tools=(broken, population), telemetry=told.telemetry, reports=reports) as harness:
        await ask(harness)
    found = {span.name: attributes_of(span) for span in told.named("execute_tool")}
    assert found["execute_tool broken"]["error.type"] == "LookupError"
    assert found["execute_tool broken"]["perdure.call.code"] == "tool_error"
    assert found["execute_tool population"]["error.type"] == "invalid_arguments"
    assert found["execute_tool"]["error.type"] == "tool_unavailable"
    assert all(span.status.status_code is StatusCode.ERROR for span in told.named("execute_tool"))
    assert all(span.status.description is None and not span.events for span in told.ended)
    assert told.counts("perdure.tool_calls") == {
        ("broken", "tool_error"): 1,
        ("population", "invalid_arguments"): 1,
        ("_OTHER", "tool_unavailable"): 1,
    }
    assert "made_up" not in told.everything()


async def test_each_attempt_is_a_span_and_what_a_run_ended_with_is_its_error_h282() -> None:
    told = Told()
    model = ScriptedModel(fail("overloaded", "the words of the provider", times=1, then=fail("refused", "no")))
    async with opened(model, telemetry=told.telemetry) as harness:
        harness.session.clock.sleep = lambda _: asyncio.sleep(0)  # pyright: ignore[reportAttributeAccessIssue]
        root = await harness.root()
        submission = await root.submit("hi")
        with pytest.raises(Unanswered):
            await submission.answer()
    first, last = told.named("chat")
    assert (attributes_of(first)["error.type"], attributes_of(first)["perdure.attempt"]) == ("overloaded", 1)
    assert (attributes_of(last)["error.type"], attributes_of(last)["perdure.attempt"]) == ("refused", 2)
    assert attributes_of(told.one("invoke_agent"))["error.type"] == "model_error"
    assert told.counts("perdure.runs") == {("model_error",): 1}
    assert told.counts("perdure.retries") == {("overloaded",): 1}


async def test_a_run_without_a_model_is_told_too_h282() -> None:
    told = Told()
    async with opened(None, telemetry=told.telemetry) as harness:
        with pytest.raises(Unanswered):
            await ask(harness)
    assert told.counts("perdure.runs") == {("no_model",): 1}
    assert told.named("chat") == []


async def test_an_abort_ends_what_is_under_way_h289() -> None:
    told = Told()
    hold = Hold(1)
    async with opened(ScriptedModel([say("a long answer")], pace=hold), telemetry=told.telemetry) as harness:
        root = await harness.root()
        submission = await root.submit("hi")
        harness.resume()
        await hold.reached.wait()
        await root.abort()
        with pytest.raises(Unanswered):
            await submission.answer()
        assert told.spans.open == []
    assert attributes_of(told.one("chat"))["error.type"] == "CancelledError"
    run = told.one("invoke_agent")
    assert attributes_of(run)["perdure.run.reason"] == "aborted"
    assert "error.type" not in attributes_of(run)


async def test_a_compaction_is_a_span_with_its_own_request_h282() -> None:
    told = Told()
    async with opened(model(), compaction=Compaction(background_tokens=0), telemetry=told.telemetry) as harness:
        root = await harness.root()
        await fill(root, 9)
        assert (await (await root.submit("and now?")).answer()).text == "ok"
    compaction, run = told.one("compaction"), told.named("invoke_agent")[-1]
    assert compaction.context
    assert run.context
    assert parent_id(compaction) == run.context.span_id, "the run waited for it"
    attributes = attributes_of(compaction)
    assert attributes["perdure.compaction.reason"] == "threshold"
    assert attributes["perdure.compaction.outcome"] == "completed"
    within = [span for span in told.named("chat") if parent_id(span) == compaction.context.span_id]
    assert len(within) == 1
    assert attributes_of(within[0])["perdure.task.id"] == attributes["perdure.task.id"]
    assert told.counts("perdure.compactions") == {("completed", "threshold"): 1}


async def test_a_compaction_that_fails_says_its_code_h282() -> None:
    told, reports = Told(), list[Report]()
    failing = model(summary=lambda _: fail("refused", "words of the provider"))
    policy = Compaction(background_tokens=0)
    async with opened(failing, compaction=policy, telemetry=told.telemetry, reports=reports) as harness:
        root = await harness.root()
        await fill(root, 9)
        await (await root.submit("and now?")).wait()
    failed = told.one("compaction")
    assert attributes_of(failed)["perdure.compaction.outcome"] == "failed"
    assert attributes_of(failed)["error.type"] == "refused"
    assert told.counts("perdure.compactions") == {("failed", "threshold"): 1}
    assert [report.message for report in reports] == ["a threshold compaction failed: refused"]


# --- restarts -----------------------------------------------------------------------------------------------------


async def test_a_run_goes_on_in_another_process_in_the_trace_of_before_h283_h289() -> None:
    storage, before, after = MemoryStorage(), Told(), Told()
    hold = Hold(1)
    async with opened(ScriptedModel([say("done")], pace=hold), storage=storage, telemetry=before.telemetry) as harness:
        root = await harness.root()
        await root.submit("hi")
        harness.resume()
        await hold.reached.wait()
    left = before.one("invoke_agent")
    assert attributes_of(left)["perdure.left"] is True
    assert left.status.status_code is StatusCode.UNSET
    assert before.spans.open == []
    assert before.points("perdure.runs") == []
    async with opened(ScriptedModel([say("done")]), storage=storage, telemetry=after.telemetry) as harness:
        assert after.ended == after.spans.open == []  # opening runs nothing, and tells of none
        await harness.idle()
    goes_on = after.one("invoke_agent")
    assert attributes_of(goes_on)["perdure.resumed"] is True
    assert attributes_of(goes_on)["perdure.task.id"] == attributes_of(left)["perdure.task.id"]
    assert goes_on.context
    assert left.context
    assert goes_on.context.trace_id == left.context.trace_id
    assert goes_on.context.span_id != left.context.span_id
    assert parent_id(goes_on) == parent_id(left)
    assert after.counts("perdure.runs") == {("answered",): 1}


async def test_two_runs_have_two_traces_and_the_callers_span_is_linked_h283() -> None:
    told = Told()
    async with opened(ScriptedModel(lambda _: say("ok")), telemetry=told.telemetry) as harness:
        root = await harness.root()
        with told.tracers.get_tracer("app").start_as_current_span("the request of a user") as caller:
            await (await root.submit("one")).answer()
        await (await root.submit("two")).answer()
    one, two = told.named("invoke_agent")
    assert one.context
    assert two.context
    assert len({one.context.trace_id, two.context.trace_id, caller.get_span_context().trace_id}) == 3
    assert [link.context for link in one.links] == [caller.get_span_context()]
    assert list(two.links) == []


async def test_a_run_below_a_call_is_in_that_calls_trace_h283() -> None:
    told = Told()
    there: list[Harness] = []

    @tool
    async def delegate(call: ToolCall) -> str:
        """Ask another."""
        child = await there[0].create_conversation(owner=call.id)
        return (await (await child.submit("below", request_id="child")).answer()).text

    model = ScriptedModel({"above": [call("delegate"), say("done")], "below": say("answer")})
    async with opened(model, tools=(delegate,), telemetry=told.telemetry) as harness:
        there.append(harness)
        assert await ask(harness, "above") == "done"
    below, above = told.named("invoke_agent")
    executed = told.one("execute_tool")
    assert executed.context
    assert above.context
    assert parent_id(below) == executed.context.span_id
    assert parent_id(executed) == above.context.span_id
    assert len({span.context.trace_id for span in told.ended if span.context}) == 1
    assert attributes_of(below)["perdure.conversation.id"] != attributes_of(above)["perdure.conversation.id"]


async def test_the_ratio_decides_which_traces_are_sampled_whatever_the_sampler_h283() -> None:
    runs: list[int] = []
    for sampler in (ParentBased(ALWAYS_OFF), TraceIdRatioBased(0.5)):
        told = Told(sampler=sampler, sample_ratio=0.5)
        model, entropy = ScriptedModel(lambda _: say("ok")), SimulatedEntropy(7)
        async with opened(model, telemetry=told.telemetry, entropy=entropy) as harness:
            root = await harness.root()
            for number in range(40):
                await (await root.submit(str(number))).answer()
        runs.append(len(told.named("invoke_agent")))
        assert len(told.named("chat")) == runs[-1], "a trace is sampled whole"
    assert 5 < runs[0] == runs[1] < 35, "the same log and tasks"
    with pytest.raises(ValueError, match="sample_ratio"):
        OpenTelemetry(sample_ratio=2)


# --- metrics ------------------------------------------------------------------------------------------------------


async def test_metrics_count_and_name_nobody_h284() -> None:
    told = Told()
    model = ScriptedModel([call("population", city="Lyon"), say("4")])
    async with opened(model, tools=(population,), telemetry=told.telemetry) as harness:
        commits = Commits(harness)
        await ask(harness)
        assert told.counts("perdure.tasks.live") == {(): 0}
        seen = len(commits.all)
    provider, _, name = MODEL.partition(":")
    assert told.counts("gen_ai.client.token.usage") == {
        ("chat", provider, name, name, "input"): 2,
        ("chat", provider, name, name, "output"): 2,
    }
    assert told.counts("gen_ai.client.operation.duration") == {("chat", provider, name, name): 2, ("execute_tool",): 1}
    assert told.counts("gen_ai.client.operation.time_to_first_chunk") == {("chat", provider, name, name): 2}
    assert told.counts("perdure.tool_calls") == {("population", "ok"): 1}
    assert told.counts("perdure.runs") == {("answered",): 1}
    assert sum(told.counts("perdure.commits").values()) >= seen  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert told.counts("perdure.commit.duration") == told.counts("perdure.commits")
    usage = told.points("gen_ai.client.token.usage")
    bounds = {tuple(point.explicit_bounds) for point in usage if isinstance(point, HistogramDataPoint)}
    assert bounds == {tuple(4.0**power for power in range(14))}
    for metric in ("gen_ai.client.operation.duration", "perdure.commits", "perdure.runs", "perdure.tool_calls"):
        for point in told.points(metric):
            assert not any(
                isinstance(value, int) and not isinstance(value, bool) for value in attributes_of(point).values()
            )


async def test_live_and_blocked_tasks_are_counted_while_they_are_h284() -> None:
    told, storage, hold = Told(), MemoryStorage(), Hold(0)
    async with opened(ScriptedModel([say("ok")], pace=hold), storage=storage, telemetry=told.telemetry) as harness:
        root = await harness.root()
        await root.submit("hi")
        harness.resume()
        await hold.reached.wait()
        assert told.counts("perdure.tasks.live") == {(): 1}
    assert told.counts("perdure.tasks.live") == {(): 0}, "a harness that closes takes its own back"


class Errand(Task[None, None], kind="app.errand", version=1):
    async def start(self, run: Run[None, None, None]) -> Next[None]:
        async with run.commit() as tx:
            return tx.complete(None)


async def test_work_that_is_blocked_is_counted_though_nothing_is_committed_h284() -> None:
    told, storage = Told(), MemoryStorage()
    async with opened(None, storage=storage, extensions=[Extension("app", tasks=[Errand])]) as harness:
        async with (await harness.root()).commit() as tx:
            tx.create_task(Errand, None)
        storage = storage.snapshot()
    async with Harness.open(storage.snapshot(), read_only=True, telemetry=told.telemetry):
        assert told.counts("perdure.tasks.live") == {}
    async with opened(None, storage=storage, telemetry=told.telemetry) as harness:
        assert told.counts("perdure.tasks.live") == {(): 1}, "it was there as the store was opened"
        seq = harness.session.seq
        harness.resume()
        assert harness.session.seq == seq
        assert told.counts("perdure.tasks.blocked") == {(): 1}
        harness.registry.install(Extension("app", tasks=[Errand]))
        await harness.idle()
        assert told.counts("perdure.tasks.blocked") == {(): 0}


# --- what must not happen -----------------------------------------------------------------------------------------


class _Bad:
    """A back end that fails at everything."""

    def __init__(self, *well: str) -> None:
        self.well = well

    def begin(self, what: object, under: object) -> _Bad:
        if "begin" in self.well:
            return self
        raise OSError("no")

    def tell(self, fact: object) -> None:
        raise OSError("no")

    def current(self) -> object:
        if "current" in self.well:
            return self
        raise OSError("no")

    def __enter__(self) -> None:
        if "enter" not in self.well:
            raise OSError("no")

    def __exit__(self, *_: object) -> None:
        raise OSError("no")

    def first(self) -> None:
        raise OSError("no")

    def done(self) -> None:
        raise OSError("no")

    def end(self, how: object) -> None:
        raise OSError("no")


@pytest.mark.parametrize("well", [(), ("begin",), ("begin", "current"), ("begin", "current", "enter")])
async def test_a_back_end_that_fails_harms_nothing_and_is_reported_once_h287(well: tuple[str, ...]) -> None:
    reports: list[Report] = []
    model = ScriptedModel([call("population", city="Lyon"), say("4")])
    bad = _Bad(*well)
    async with opened(model, tools=(population,), telemetry=bad, reports=reports) as harness:
        assert await ask(harness) == "4"
    assert [report.type for report in reports] == ["telemetry_failed"]
    assert harness.closed is not None
    assert harness.closed.failed is None


async def test_a_turn_has_as_many_commits_with_telemetry_h281() -> None:
    found: list[list[bool]] = []
    for telemetry in (None, Told().telemetry):
        model = ScriptedModel([call("population", city="Lyon"), say("4")])
        async with opened(model, tools=(population,), telemetry=telemetry) as harness:
            await harness.root()
            commits = Commits(harness)
            await ask(harness)
            found.append([settled.batch.progress for settled in commits.all])
    assert found[0].count(False) == found[1].count(False) == 4


def test_a_harness_loads_nothing_of_opentelemetry_h281() -> None:
    code = "import sys, perdure; perdure.Harness; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_without_the_extra_the_package_can_be_looked_through_all_the_same() -> None:
    looked = "pydoc.render_doc(perdure)\nfrom perdure import *"
    code = f"import sys, pydoc; sys.modules['opentelemetry'] = None\nimport perdure\n{looked}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_the_extra_it_says_what_to_install_h280() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None\nimport perdure\nperdure.OpenTelemetry()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: opentelemetry-api is not installed; pip install 'perdure[otel]'" in done.stderr
