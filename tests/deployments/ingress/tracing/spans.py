"""Spans of tests: a tracer that keeps them in memory, and how they are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from penstock.deployments.ingress.tracing.tracer import SpanTracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
PHASES = ["gate wait", "worker queue", "prefill", "decode"]


@dataclass
class Kept:
    """A tracer whose spans a test can read. `ratio`: of the traces that begin here."""

    ratio: float = 1.0
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider(ParentBasedTraceIdRatio(self.ratio), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = SpanTracer(provider)

    def take(self) -> list[ReadableSpan]:
        """All spans so far, the earliest first; they are then forgotten."""
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return sorted(spans, key=lambda span: (span.start_time, -(span.end_time or 0)))


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def about(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def below(spans: Sequence[ReadableSpan], parent: ReadableSpan) -> list[ReadableSpan]:
    return [span for span in spans if parent_of(span) == id_of(parent)]


def one(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def check_order(parent: ReadableSpan, children: Sequence[ReadableSpan]) -> None:
    """Each child ends before the next one begins, and all are within the parent."""
    times = [parent.start_time]
    for child in children:
        times += [child.start_time, child.end_time]
    times.append(parent.end_time)
    assert times == sorted(times, key=lambda each: each or 0), times
