"""The Tracer of the request core over OpenTelemetry's SDK: records of a request become spans.

A request's own span is begun when it comes, since its id goes out with the answer; all others are
made when what they tell of is over. To end a span puts it into the queue of a thread, without
waiting (exporter.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.core.tracing import Attributes, RequestTrace, SpanRecord

log = logging.getLogger("penstock.traces")

FLUSH_S = 3.0  # longest that the end of an ingress waits for its last spans
SCOPE = "penstock.ingress"


class SpanTracer:
    """A Tracer; `provider` makes its spans and takes them when they have ended."""

    def __init__(self, provider: TracerProvider, *, give_up: Callable[[], None] | None = None):
        """`give_up`: ends what is being sent, if that takes too long at the end."""
        self._provider, self._give_up = provider, give_up
        self._tracer = provider.get_tracer(SCOPE)
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, name: str, attributes: Attributes, traceparent: str | None, tracestate: str | None
    ) -> RequestTrace:
        start_ns, carrier = time.time_ns(), {}
        if traceparent is not None:
            carrier["traceparent"] = traceparent
            if tracestate is not None:
                carrier["tracestate"] = tracestate
        parent = self._propagator.extract(carrier, Context())
        span = self._tracer.start_span(
            name, parent, SpanKind.SERVER, attributes, start_time=start_ns
        )
        return SpanTrace(self._tracer, span, start_ns - time.monotonic_ns())

    def close(self) -> None:
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            log.warning("the last spans were not taken in %g s: they are lost", FLUSH_S)
            if self._give_up is not None:
                self._give_up()


class SpanTrace:
    """A RequestTrace. `offset_ns`: what makes Unix time of monotonic time, the same for all of its
    spans, so that a step of the clock does not put them in another order."""

    def __init__(self, tracer: SdkTracer, span: Span, offset_ns: int):
        self._tracer, self._span, self._offset_ns = tracer, span, offset_ns
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.response = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"
        self.is_sampled = context.trace_flags.sampled
        self._below = set_span_in_context(span, Context())

    def add(self, span: SpanRecord) -> None:
        self._add(span, self._below)

    def annotate(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, code: str) -> None:
        """The span is an error where the server is at fault, as the conventions have it."""
        if not self._span.is_recording():  # not sampled; or it has ended, and its answer goes on
            return
        self._span.set_attribute("error.type", code)
        if CATALOGUE[code].http_status >= 500:
            self._span.set_status(Status(StatusCode.ERROR, code))

    def end(self) -> None:
        self._span.end(self._offset_ns + time.monotonic_ns())

    def _add(self, record: SpanRecord, parent: Context) -> None:
        span = self._tracer.start_span(
            record.name,
            parent,
            SpanKind.INTERNAL,
            record.attributes,
            start_time=self._unix_ns(record.start_s),
        )
        for event in record.events:
            span.add_event(event.name, event.attributes, self._unix_ns(event.at_s))
        if record.error is not None:
            span.set_attribute("error.type", record.error)
            span.set_status(Status(StatusCode.ERROR, record.error))
        if record.children:
            below = set_span_in_context(span, Context())
            for child in record.children:
                self._add(child, below)
        span.end(self._unix_ns(record.end_s))

    def _unix_ns(self, monotonic_s: float) -> int:
        return self._offset_ns + round(monotonic_s * 1e9)
