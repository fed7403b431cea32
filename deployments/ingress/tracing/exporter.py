"""What takes ended spans: a bounded queue, a thread, and the OTLP exporter over HTTP.

The SDK reads its own environment variables: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES for the
resource, OTEL_BSP_* for queue and batches, OTEL_EXPORTER_OTLP_* for headers, timeout, compression
and certificates.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

log = logging.getLogger("penstock.traces")
_exporter_log = logging.getLogger(trace_exporter.__name__)

SERVICE_NAME = "penstock"  # unless OTEL_SERVICE_NAME says otherwise
REMIND_S = 600.0  # from one warning about a receiver that is away to the next
GRPC_PORT = 4317  # where receivers usually take OTLP over gRPC
MAX_REASON_CHARS = 400
_GIVEN_UP = ("max retries or shutdown.", "aborting retry.")  # the ends of its lines


def is_disabled() -> bool:
    """Whether the environment switches OpenTelemetry off for all programs."""
    return os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"


def resource_of(instance: str) -> Resource:
    """Who sends the spans; what the environment says of it goes first."""
    own = {
        "service.name": SERVICE_NAME,
        "service.version": importlib.metadata.version("penstock"),
        "service.instance.id": instance,
    }
    given = OTELResourceDetector().detect()
    return Resource.create({**own, **given.attributes})


def provider_for(
    url: str, sample_ratio: float, instance: str
) -> tuple[TracerProvider, SpanExporter]:
    """Makes spans and sends them to `url`; and the exporter, to end what takes too long.

    `sample_ratio`: of the traces that begin here, 0 to 1; of others the caller decides. Raises
    ValueError where a variable of the environment is not valid.
    """
    exporter = WatchedExporter(OTLPSpanExporter(url), url)
    provider = TracerProvider(
        ParentBasedTraceIdRatio(sample_ratio), resource_of(instance), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


class WatchedExporter(SpanExporter):
    """Passes spans on, and says once that the receiver does not take them, and once that it does
    again. Called by one thread, which may wait as long as it likes."""

    def __init__(
        self, exporter: SpanExporter, url: str, clock: Callable[[], float] = time.monotonic
    ):
        self._exporter, self._clock = exporter, clock
        parts = urlsplit(url)
        self._receiver = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._hint = ""
        if parts.port == GRPC_PORT:
            self._hint = "; this is OTLP over HTTP, whose port usually is 4318, not 4317"
        self._num_lost, self._is_over = 0, False
        self._warned_s: float | None = None
        _exporter_log.addFilter(_last_words)  # for good: a thread may end after `shutdown`

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_over:  # given up: what is left is lost, and that was said
            return SpanExportResult.FAILURE
        _last_words.text = ""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # of a library below: it may be of any kind
            _last_words.text = type(error).__name__
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._taken()
        elif not self._is_over:
            self._lost(len(spans))
        return result

    def shutdown(self) -> None:
        """May be called more than once, and while spans are sent by another thread."""
        if self._is_over:
            return
        self._is_over = True
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _lost(self, num: int) -> None:
        self._num_lost += num
        now_s = self._clock()
        if self._warned_s is not None and now_s < self._warned_s + REMIND_S:
            return
        self._warned_s = now_s
        log.warning(
            "%s does not take the spans of traces, and %d are lost so far; requests go on (%s)%s",
            self._receiver,
            self._num_lost,
            _last_words.text[:MAX_REASON_CHARS] or "no reason is known",
            self._hint,
        )

    def _taken(self) -> None:
        if self._warned_s is not None:
            log.warning("%s takes spans again; %d were lost", self._receiver, self._num_lost)
        self._warned_s, self._num_lost = None, 0


class _LastWords(logging.Filter):
    """Takes what the exporter would log at each try. `text` is the last line that has a reason, if
    one does: after several tries the exporter only says that it has given up."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if not self.text or not line.endswith(_GIVEN_UP):
            self.text = line
        return False


_last_words = _LastWords()  # the exporter's log is one for the process, too
