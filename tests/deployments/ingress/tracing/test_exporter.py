"""A receiver that is away, slow or refuses: one warning, no waiting, and an end in time."""

from __future__ import annotations

import logging
import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from penstock.deployments.ingress.core.tracing import SpanRecord
from penstock.deployments.ingress.tracing import tracer as tracer_module
from penstock.deployments.ingress.tracing.exporter import (
    REMIND_S,
    WatchedExporter,
    provider_for,
    resource_of,
)
from penstock.deployments.ingress.tracing.tracer import SpanTracer
from tests.deployments.ingress.tracing.receiver import Receiver, receiving
from tests.deployments.ports import free_port
from tests.deployments.waiting import eventually


@pytest.fixture
def receiver():
    with receiving() as made:
        yield made


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Batches are sent at once; the end waits for the last one on a slow machine, too."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    monkeypatch.setattr(tracer_module, "FLUSH_S", 60.0)


def tracer_for(url: str) -> SpanTracer:
    provider, exporter = provider_for(f"{url}/v1/traces", 1.0, "here")
    return SpanTracer(provider, give_up=exporter.shutdown)


def request_of(tracer: SpanTracer, name: str = "r") -> None:
    trace = tracer.begin(name, {}, None, None)
    trace.add(SpanRecord("answer", 1.0, 2.0))
    trace.end()


def lines(caplog) -> list[str]:
    """Of any logger: the SDK's own are not heard either."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_spans_arrive_and_the_rest_at_the_end(receiver, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    tracer = tracer_for(receiver.url)
    for number in range(5):
        request_of(tracer, f"r{number}")
    assert receiver.requests == []
    tracer.close()
    names = [span.name for span in receiver.spans() if span.name != "answer"]
    assert names == [f"r{number}" for number in range(5)]
    assert receiver.paths == ["/v1/traces"] and lines(caplog) == []


def test_the_environment_says_who_sends_and_with_which_headers(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    tracer = tracer_for(receiver.url)
    request_of(tracer)
    tracer.close()
    found = receiver.resource()
    assert (found["service.name"], found["service.instance.id"]) == ("chat", "here")
    assert found["deployment.environment.name"] == "test"
    assert receiver.headers[0]["authorization"] == "Bearer secret"


def test_without_the_environment_the_service_is_penstock(monkeypatch):
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    found = resource_of("here").attributes
    assert (found["service.name"], found["service.instance.id"]) == ("penstock", "here")
    assert found["telemetry.sdk.name"] == "opentelemetry"


@pytest.mark.parametrize("how", ["nobody listens", "it refuses", "it is overloaded"])
def test_a_receiver_that_does_not_take_spans_costs_one_warning(receiver, caplog, monkeypatch, how):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # of all attempts
    if how != "nobody listens":
        receiver.status = 401 if how == "it refuses" else 503
    port = free_port() if how == "nobody listens" else int(receiver.url.rpartition(":")[2])
    tracer = tracer_for(f"http://127.0.0.1:{port}")
    for number in range(4):
        request_of(tracer)
        if how == "nobody listens":
            eventually(lambda: lines(caplog))
        else:
            asked_more_than(receiver, number)
    tracer.close()
    (line,) = lines(caplog)
    assert f"http://127.0.0.1:{port}/v1/traces does not take the spans" in line
    reasons = {"nobody listens": "refused", "it refuses": "401", "it is overloaded": "Unavailable"}
    assert reasons[how] in line


def asked_more_than(receiver: Receiver, number: int) -> None:
    eventually(lambda: receiver.num_asked > number)


class Script:
    """An exporter of which a test says what each call does."""

    def __init__(self, *results: SpanExportResult | Exception):
        self._results = list(results)

    def export(self, spans: object) -> SpanExportResult:
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self) -> None:
        """Nothing is open."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def test_a_warning_is_repeated_seldom_and_says_when_it_is_over(caplog):
    ok, failed = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    now_s = 100.0
    script = Script(ok, failed, KeyError("x"), failed, failed, ok, ok, failed)
    watched = WatchedExporter(script, "https://far:4317/v1/traces", lambda: now_s)  # type: ignore[arg-type]
    for seconds in (0, 0, 1, REMIND_S - 2, 1, 0, 0, 0):
        now_s += seconds
        watched.export([object()] * 3)  # type: ignore[list-item]
    watched.shutdown()
    found = lines(caplog)
    assert [line.partition("(")[0].strip() for line in found] == [
        "https://far:4317/v1/traces does not take the spans of traces, and 3 are lost so far; "
        "requests go on",
        "https://far:4317/v1/traces does not take the spans of traces, and 12 are lost so far; "
        "requests go on",
        "https://far:4317/v1/traces takes spans again; 12 were lost",
        "https://far:4317/v1/traces does not take the spans of traces, and 3 are lost so far; "
        "requests go on",
    ]
    assert all(line.endswith("usually is 4318, not 4317") for line in (*found[:2], found[3]))


def test_a_receiver_that_hangs_holds_up_neither_requests_nor_the_end(
    receiver: Receiver, monkeypatch, caplog
):
    """More requests than the queue has room for: it drops what does not fit."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setattr(tracer_module, "FLUSH_S", 0.2)
    receiver.may_answer.clear()
    tracer = tracer_for(receiver.url)
    request_of(tracer)
    eventually(lambda: receiver.num_asked)
    for _ in range(1000):  # with the receiver asked, and silent, throughout
        request_of(tracer)
    assert receiver.num_asked == 1 and receiver.requests == []
    ending = threading.Thread(target=tracer.close, daemon=True)
    ending.start()
    ending.join(30)  # below the timeout of the exporter
    assert not ending.is_alive() and receiver.requests == []
    found = lines(caplog)
    others = [line for line in found if "Queue full" not in line]
    assert others == ["the last spans were not taken in 0.2 s: they are lost"]
    assert len(found) - len(others) <= 3
