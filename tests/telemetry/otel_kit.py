"""A back end in memory, and what was told to it."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler

from perdure import OpenTelemetry

Point = NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint


class Spans(SpanProcessor):
    def __init__(self) -> None:
        self.open: list[Span] = []
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: object = None) -> None:
        self.open.append(span)

    def on_end(self, span: ReadableSpan) -> None:
        self.open = [other for other in self.open if other.context != span.context]
        self.ended.append(span)


class Told:
    """One back end for any number of harnesses."""

    def __init__(self, *, sampler: Sampler | None = None, **options) -> None:
        self.spans = Spans()
        self.tracers = TracerProvider(sampler=sampler, resource=Resource({}), shutdown_on_exit=False)
        self.tracers.add_span_processor(self.spans)
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader], resource=Resource({}), shutdown_on_exit=False)
        self.telemetry = OpenTelemetry(self.tracers, self.meters, **options)

    @property
    def ended(self) -> list[ReadableSpan]:
        return self.spans.ended

    def named(self, start: str) -> list[ReadableSpan]:
        return [span for span in self.ended if span.name.partition(" ")[0] == start]

    def one(self, start: str) -> ReadableSpan:
        (span,) = self.named(start)
        return span

    def points(self, metric: str) -> list[Point]:
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for found in scope.metrics
            if found.name == metric
            for point in found.data.data_points
        ]

    def counts(self, metric: str) -> dict[tuple[object, ...], object]:
        """Sums, or numbers of values, by the values of the attributes in the order of their names."""
        found: dict[tuple[object, ...], object] = {}
        for point in self.points(metric):
            key = tuple(value for _, value in sorted(attributes_of(point).items()))
            found[key] = point.value if isinstance(point, NumberDataPoint) else point.count
        return found

    def everything(self) -> str:
        """All that was told, as text: whatever is in it can be looked for."""
        spans = [
            (
                s.name,
                dict(s.attributes or {}),
                [(e.name, dict(e.attributes or {})) for e in s.events],
                s.status.description,
            )
            for s in self.ended
        ]
        data = self._reader.get_metrics_data()
        return f"{spans} {data.to_json() if data else ''}"


def attributes_of(told: ReadableSpan | Point) -> Mapping[str, object]:
    return told.attributes or {}


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id
