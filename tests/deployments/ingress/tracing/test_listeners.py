"""An ingress of production with traces: real workers, a real receiver, openai's client and gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.listeners import open_listeners
from penstock.deployments.ingress.models import IngressModel
from penstock.deployments.ingress.tracing import tracer
from penstock.deployments.supervision.view import ClusterView
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from tests.deployments.ingress.test_continuation import CONFIG, Node
from tests.deployments.ingress.tracing.receiver import Receiver, attributes_of, receiving
from tests.deployments.ingress.tracing.spans import PARENT, PHASES, SAMPLED, TRACE
from tests.deployments.ports import free_port
from tests.deployments.serving import MODEL
from tests.deployments.waiting import until

OTHER_TRACE = "0af7651916cd43dd8448eb211c80319c"
OVER_GRPC = f"00-{OTHER_TRACE}-{PARENT}-01"
ENDS_AFTER = 9  # tokens, in the first worker
LENGTH = 30


@dataclass
class Outcome:
    """What clients and receiver got."""

    stream_header: str
    stream_text: str
    plain_text: str
    grpc_header: str
    workers: list[str]
    receiver: Receiver
    lines: list[str]

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in self.receiver.spans() if span.trace_id.hex() == trace]


async def clients(config: ServeConfig) -> tuple[str, str, str, str]:
    """A stream whose worker ends, the same without a stream, and a call over gRPC."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What do you see?"}],
        "max_tokens": LENGTH,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    base_url = f"http://127.0.0.1:{config.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(
            stream=True, extra_headers={"traceparent": SAMPLED, "tracestate": "vendor=7"}, **asked
        )
        header, texts = raw.headers["traceresponse"], []
        async for chunk in raw.parse():
            texts.append(chunk.choices[0].delta.content or "")
        plain = await client.chat.completions.create(**asked)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        request = pb.GenerateRequest(text="The sea was", sampling=sampling)
        call = stub.Generate(request, metadata=(("traceparent", OVER_GRPC),))
        async for _ in call:
            pass
        metadata = dict(await call.initial_metadata())
    return header, "".join(texts), plain.choices[0].message.content or "", metadata["traceresponse"]


async def served(config: ServeConfig, nodes: list[Node]) -> tuple[str, str, str, str]:
    pool = WorkerPool("test", lost_wait_s=60.0)
    listeners = await open_listeners(config, [IngressModel(config, pool)], ClusterView, "ingress-1")
    for number in (1, 2):  # idle workers are chosen in this order
        pool.update([node.channel.info for node in nodes[:number]])
        await until(lambda number=number: pool.num_connected == number)  # type: ignore[misc]
    await until(lambda: listeners.http.started)
    try:
        return await asyncio.wait_for(clients(config), 120)
    finally:
        await listeners.close(0.0, 5.0)  # sends the spans
        await pool.close()


@pytest.fixture(scope="module")
def outcome(model) -> Iterator[Outcome]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("penstock")
    nodes = [Node(model, ENDS_AFTER), Node(model)]
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_SERVICE_NAME", "front-door")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-secret=s3cret")
        patch.setattr(tracer, "FLUSH_S", 60.0)  # of a machine that stands still at its end
        level = logger.level
        logger.setLevel(logging.INFO)  # forgets what loggers below know of the level before
        logger.addHandler(handler)
        config = ServeConfig(
            engine=CONFIG,
            metrics_port=0,
            http_port=free_port(),
            grpc_port=free_port(),
            otlp_traces_endpoint=receiver.url,
        )
        try:
            got = asyncio.run(served(config, nodes))
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            for node in nodes:
                node.stop()
        workers = [node.channel.info.address for node in nodes]
        yield Outcome(*got, workers, receiver, lines)


def below(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_span_id == parent.span_id]


def test_the_trace_of_the_caller_goes_on_over_http(outcome):
    root, *_ = spans = outcome.of_trace(TRACE)
    assert (root.name, root.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
    assert (root.parent_span_id.hex(), root.trace_state) == (PARENT, "vendor=7")
    assert outcome.stream_header == f"00-{TRACE}-{root.span_id.hex()}-01"
    (answer,) = below(spans, root)
    assert answer.name == f"chat {MODEL}"
    assert sorted(span.name for span in below(spans, answer)) == sorted([*PHASES, "gate wait"])
    said = attributes_of(answer)
    assert said["gen_ai.usage.output_tokens"] == LENGTH
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes_of(root)["http.response.status_code"] == 200


def test_the_stream_went_on_elsewhere_and_its_trace_says_so(outcome):
    assert outcome.stream_text == outcome.plain_text != ""
    first, second = outcome.workers
    (answer,) = (span for span in outcome.of_trace(TRACE) if span.name == f"chat {MODEL}")
    events = [(each.name, attributes_of(each)["penstock.worker"]) for each in answer.events]
    assert events == [
        ("penstock.sent", first),
        ("penstock.worker_lost", first),
        ("penstock.sent", second),
        ("penstock.continued", second),
    ]
    times = [each.time_unix_nano for each in answer.events]
    assert times == sorted(times)
    assert answer.start_time_unix_nano <= times[0] <= times[-1] <= answer.end_time_unix_nano
    assert answer.status.code == Status.STATUS_CODE_UNSET


def test_the_trace_of_the_caller_goes_on_over_grpc(outcome):
    root, *_ = spans = outcome.of_trace(OTHER_TRACE)
    assert (root.name, root.parent_span_id.hex()) == (
        "penstock.v1.InferenceService/Generate",
        PARENT,
    )
    assert outcome.grpc_header == f"00-{OTHER_TRACE}-{root.span_id.hex()}-01"
    (answer,) = below(spans, root)
    phases = below(spans, answer)
    assert [span.name for span in phases] == PHASES
    edges = [edge for span in phases for edge in _edges(span)]
    assert [*edges] == sorted(edges)
    for outer, inner in ((root, answer), (answer, phases[0]), (answer, phases[-1])):
        assert outer.start_time_unix_nano <= inner.start_time_unix_nano
        assert inner.end_time_unix_nano <= outer.end_time_unix_nano


def _edges(span: Span) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


def test_a_request_without_a_trace_begins_one(outcome):
    roots = [span for span in outcome.receiver.spans() if span.kind == Span.SPAN_KIND_SERVER]
    traces = [span.trace_id.hex() for span in roots]
    assert len(traces) == 3 and {TRACE, OTHER_TRACE} < set(traces)
    (own,) = (root for root in roots if root.trace_id.hex() not in (TRACE, OTHER_TRACE))
    assert own.parent_span_id == b""


def test_the_log_has_the_ids_of_the_traces_and_no_warning(outcome):
    finished = [line for line in outcome.lines if '"trace_id"' in line]
    assert len(finished) == 3
    assert f'"trace_id": "{TRACE}"' in finished[0]
    assert f'"trace_id": "{OTHER_TRACE}"' in finished[2]
    assert not any("does not take" in line or "were not taken" in line for line in outcome.lines)


def test_the_receiver_is_told_who_sends(outcome):
    found = outcome.receiver.resource()
    assert (found["service.name"], found["service.instance.id"]) == ("front-door", "ingress-1")
    assert outcome.receiver.headers[0]["x-secret"] == "s3cret"
    assert set(outcome.receiver.paths) == {"/v1/traces"}
