"""OpenTelemetry: a harness's work as spans and metrics (rules H280 to H289). Needs the extra ``otel``.

    async with Harness.open(storage, models=models, telemetry=OpenTelemetry()) as harness: ...

Names follow version 1.41.0 of the semantic conventions for generative AI, the last one before they got a repository of
their own; what is perdure's alone begins with ``perdure.``. Only the API is needed: where spans and metrics go is a
matter of the application, which sets up the SDK.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import blake2b
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

from perdure import __version__
from perdure.harness.messages import Usage
from perdure.harness.telemetry import (
    AttemptBegan,
    AttemptEnded,
    Began,
    CallBegan,
    CallEnded,
    CommitStored,
    CompactionBegan,
    CompactionEnded,
    Ended,
    Fact,
    Left,
    Operation,
    Place,
    Retried,
    RunBegan,
    RunEnded,
)

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, trace
    from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
except (
    ImportError
):  # then OpenTelemetry() says so; the package can be looked through, as by help(perdure), all the same
    if TYPE_CHECKING:
        raise

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"


SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Bounds of buckets, as the conventions have them for what a model takes."""
TOKENS = tuple(4**power for power in range(14))
FLUSH_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""A commit takes from a tenth of a millisecond to what a bad disk takes."""

PROVIDERS = {"openai-chat": "openai"}
"""Of the names of this package, those that the conventions spell otherwise."""
FINISH_REASONS = {"tool_use": "tool_call"}
"""Likewise."""
WELL = frozenset({"answered", "aborted", "reset"})
"""Endings of runs that are no errors."""

Attributes = dict[str, str | int | bool | float | tuple[str, ...] | tuple[int, ...]]


class OpenTelemetry:
    """For ``Harness.open(..., telemetry=...)``: one for any number of harnesses.

    tracer_provider, meter_provider: the global ones if left out.
    agent_name: what spans of runs are called after, and ``gen_ai.agent.name``.
    sample_ratio: of runs whose traces are marked as sampled. A run's trace continues one that nobody began, so that
        it stays the same over restarts; samplers that follow the parent follow this.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        *,
        agent_name: str | None = None,
        sample_ratio: float = 1.0,
    ) -> None:
        if "trace" not in globals():
            raise ImportError("opentelemetry-api is not installed; pip install 'perdure[otel]'")
        if not 0 <= sample_ratio <= 1:
            raise ValueError(f"sample_ratio is between 0 and 1, not {sample_ratio}")
        self._tracer = trace.get_tracer("perdure", __version__, tracer_provider, SCHEMA)
        self._instruments = _Instruments(metrics.get_meter("perdure", __version__, meter_provider, SCHEMA))
        self._agent_name = agent_name
        self._sampled_below = round(sample_ratio * 2**64)

    def begin(self, what: Began, under: Operation | None) -> _Operation:
        """The harness tells that an operation begins, below another or not."""
        assert under is None or isinstance(under, _Operation), "it was begun here"
        return _Operation(self, what, under)

    def tell(self, fact: Fact) -> None:
        """The harness tells what is over at once: it is counted."""
        self._instruments.tell(fact)

    # --- spans -------------------------------------------------------------------------------------------------

    def start_span(self, what: Began, under: _Operation | None) -> Span:
        """The span of an operation that begins now."""
        place = what.place
        attributes = _place_attributes(place)
        parent = self._derived(place) if under is None else under.span
        links: list[Link] = []
        kind = SpanKind.INTERNAL
        match what:
            case RunBegan():
                name = "invoke_agent"
                attributes["gen_ai.operation.name"] = name
                attributes["perdure.resumed"] = what.resumed
                if self._agent_name is not None:
                    attributes["gen_ai.agent.name"] = self._agent_name
                    name = f"{name} {self._agent_name}"
                caller = trace.get_current_span().get_span_context()
                if under is None and caller.is_valid:
                    links.append(Link(caller))
            case AttemptBegan():
                kind = SpanKind.CLIENT
                provider, model = _model(what)
                name = f"chat {model}"
                attributes |= _attempt_attributes(provider, model)
                attributes["gen_ai.request.stream"] = True
                attributes["perdure.attempt"] = what.attempt
                if what.max_output is not None:
                    attributes["gen_ai.request.max_tokens"] = what.max_output
            case CallBegan():
                name = "execute_tool" if what.tool is None else f"execute_tool {what.tool}"
                attributes["gen_ai.operation.name"] = "execute_tool"
                attributes["gen_ai.tool.type"] = "function"
                attributes["gen_ai.tool.call.id"] = str(place.task)
                if what.tool is not None:
                    attributes["gen_ai.tool.name"] = what.tool
                if what.recovery is not None:
                    attributes["perdure.recovery"] = what.recovery
            case CompactionBegan():
                name = "compaction"
                attributes["perdure.compaction.reason"] = what.reason
                attributes["perdure.resumed"] = what.resumed
        return self._tracer.start_span(
            name, trace.set_span_in_context(parent), kind=kind, attributes=attributes, links=links
        )

    def _derived(self, place: Place) -> Span:
        """What the outermost span of a trace hangs on: the same in every process that works on it (rule H283)."""
        digest = blake2b(f"{place.log_id}/{place.task}".encode(), digest_size=24).digest()
        trace_id = int.from_bytes(digest[:16], "big") or 1
        sampled = trace_id & (2**64 - 1) < self._sampled_below
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        span_id = int.from_bytes(digest[16:], "big") or 1
        return NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))

    def ended(self, what: Began, how: Ended, *, seconds: float, first: float | None) -> None:
        """Count an operation that ended."""
        self._instruments.ended(what, how, seconds=seconds, first=first)


class _Operation:
    """A span, and the times that metrics need."""

    def __init__(self, telemetry: OpenTelemetry, what: Began, under: _Operation | None) -> None:
        self.span = telemetry.start_span(what, under)
        self._telemetry = telemetry
        self._what = what
        self._began = perf_counter()
        self._first: float | None = None
        self._done: tuple[int, float] | None = None

    def current(self) -> AbstractContextManager[object]:
        return _Current(self.span)

    def first(self) -> None:
        self._first = perf_counter() - self._began

    def done(self) -> None:
        self._done = (time_ns(), perf_counter())

    def end(self, how: Ended) -> None:
        at, clock = self._done or (time_ns(), perf_counter())
        self._telemetry.ended(self._what, how, seconds=clock - self._began, first=self._first)
        span = self.span
        if span.is_recording():
            attributes, error = _end_attributes(how)
            if self._first is not None:
                attributes["gen_ai.response.time_to_first_chunk"] = self._first
            if error is not None:
                attributes["error.type"] = error
                span.set_status(Status(StatusCode.ERROR))
            span.set_attributes(attributes)
        span.end(at)


class _Current(AbstractContextManager[None]):
    def __init__(self, span: Span) -> None:
        self._context = trace.set_span_in_context(span)

    def __enter__(self) -> None:
        self._token = otel_context.attach(self._context)

    def __exit__(self, *_: object) -> None:
        otel_context.detach(self._token)


class _Instruments:
    """The metrics. No attribute of one is an id (rule H284)."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=TOKENS,
        )
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            "s",
            "GenAI operation duration.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._first = meter.create_histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            "s",
            "Time from the request to the first event of the answer.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._commit_duration = meter.create_histogram(
            "perdure.commit.duration",
            "s",
            "From when storage had a commit to when it had stored it.",
            explicit_bucket_boundaries_advisory=FLUSH_SECONDS,
        )
        self._commits = meter.create_counter("perdure.commits", "{commit}", "Commits that storage stored.")
        self._runs = meter.create_counter("perdure.runs", "{run}", "Runs that ended.")
        self._calls = meter.create_counter("perdure.tool_calls", "{call}", "Tool calls that ended.")
        self._retries = meter.create_counter("perdure.retries", "{retry}", "Requests that are sent again.")
        self._compactions = meter.create_counter("perdure.compactions", "{compaction}", "Compactions that ended.")
        self._live = meter.create_up_down_counter("perdure.tasks.live", "{task}", "Tasks that have not ended.")
        self._blocked = meter.create_up_down_counter("perdure.tasks.blocked", "{task}", "Tasks that cannot go on.")

    def tell(self, fact: Fact) -> None:
        if isinstance(fact, CommitStored):
            flushed = {"perdure.commit.flushed": fact.flushed}
            self._commits.add(1, flushed)
            self._commit_duration.record(fact.seconds, flushed)
        elif isinstance(fact, Retried):
            self._retries.add(1, {"error.type": fact.code})
        else:
            if fact.live:
                self._live.add(fact.live)
            if fact.blocked:
                self._blocked.add(fact.blocked)

    def ended(self, what: Began, how: Ended, *, seconds: float, first: float | None) -> None:
        match how:
            case RunEnded():
                self._runs.add(1, {"perdure.run.reason": how.reason})
            case CallEnded():
                assert isinstance(what, CallBegan), "it began as what it ended as"
                self._call_ended(what, how, seconds)
            case CompactionEnded():
                assert isinstance(what, CompactionBegan), "it began as what it ended as"
                told = {"perdure.compaction.reason": what.reason, "perdure.compaction.outcome": how.outcome}
                self._compactions.add(1, told)
            case AttemptEnded():
                assert isinstance(what, AttemptBegan), "it began as what it ended as"
                self._attempt_ended(what, how, seconds, first)
            case Left():
                pass

    def _call_ended(self, what: CallBegan, how: CallEnded, seconds: float) -> None:
        tool = "_OTHER" if what.tool is None else what.tool
        self._calls.add(1, {"gen_ai.tool.name": tool, "perdure.call.code": how.code})
        attributes: dict[str, str] = {"gen_ai.operation.name": "execute_tool"}
        if how.code != "ok":
            attributes["error.type"] = how.code
        self._duration.record(seconds, attributes)

    def _attempt_ended(self, what: AttemptBegan, how: AttemptEnded, seconds: float, first: float | None) -> None:
        attributes = _attempt_attributes(*_model(what))
        if how.model is not None:
            attributes["gen_ai.response.model"] = how.model
        if how.usage is not None:
            self._tokens.record(_all_input(how.usage), {**attributes, "gen_ai.token.type": "input"})
            self._tokens.record(how.usage.output, {**attributes, "gen_ai.token.type": "output"})
        if first is not None:
            self._first.record(first, attributes)
        if how.error is not None:
            attributes["error.type"] = how.error
        self._duration.record(seconds, attributes)


# --- attributes ---------------------------------------------------------------------------------------------------


def _place_attributes(place: Place) -> Attributes:
    return {
        "gen_ai.conversation.id": f"{place.log_id}/{place.conversation_id}",
        "perdure.log.id": place.log_id,
        "perdure.conversation.id": place.conversation_id,
        "perdure.task.id": place.task,
        "perdure.commit.seq": place.seq,
    }


def _model(what: AttemptBegan) -> tuple[str, str]:
    provider, _, model = what.model.partition(":")
    return PROVIDERS.get(provider, provider), model


def _attempt_attributes(provider: str, model: str) -> Attributes:
    return {"gen_ai.operation.name": "chat", "gen_ai.provider.name": provider, "gen_ai.request.model": model}


def _all_input(usage: Usage) -> int:
    """The conventions count what came from a cache and went into one as input; Usage does not."""
    return usage.input + usage.cache_read + usage.cache_write


def _end_attributes(how: Ended) -> tuple[Attributes, str | None]:
    """What is known at the end, and the type of the error if it ended in one."""
    match how:
        case RunEnded():
            ended: Attributes = {"perdure.run.reason": how.reason, "perdure.submission.ids": how.submissions}
            ended["perdure.ended.seq"] = how.seq
            return ended, None if how.reason in WELL else how.reason
        case CallEnded():
            error = None if how.code == "ok" else how.raised or how.code
            return {"perdure.call.code": how.code, "perdure.ended.seq": how.seq}, error
        case CompactionEnded():
            error = None if how.outcome in ("completed", "aborted") else how.code or how.outcome
            return {"perdure.compaction.outcome": how.outcome, "perdure.ended.seq": how.seq}, error
        case AttemptEnded():
            return _answer_attributes(how), how.error
        case Left():
            return {"perdure.left": True}, None


def _answer_attributes(how: AttemptEnded) -> Attributes:
    attributes: Attributes = {}
    if how.model is not None:
        attributes["gen_ai.response.model"] = how.model
    if how.stop_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (FINISH_REASONS.get(how.stop_reason, how.stop_reason),)
    if how.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = _all_input(how.usage)
        attributes["gen_ai.usage.output_tokens"] = how.usage.output
        attributes["gen_ai.usage.cache_read.input_tokens"] = how.usage.cache_read
        attributes["gen_ai.usage.cache_creation.input_tokens"] = how.usage.cache_write
        attributes["gen_ai.usage.reasoning.output_tokens"] = how.usage.reasoning
    return attributes
