"""Requests by every front end and their spans: which there are, below which, and what they say."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from penstock.deployments.security.records import record_from
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.inference import open_inference_pb2_grpc
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.ingress.tracing.spans import (
    NOT_SAMPLED,
    SAMPLED,
    TRACE,
    Kept,
    about,
    below,
    check_order,
    id_of,
    one,
    parent_of,
    trace_of,
)
from tests.deployments.serving import MODEL, ScriptedBackend, Serving, engine_serving, tokenizer
from tests.deployments.waiting import eventually

SECRET = "the lighthouse keeper"
MESSAGES = [{"role": "user", "content": SECRET}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 6}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": SECRET},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": SECRET},
}
OPERATIONS = dict.fromkeys(BODIES, "chat") | {"/v1/completions": "text_completion"}


class Traced:
    """Servers whose spans are kept."""

    def __init__(self, servers: Serving, kept: Kept):
        self.kept = kept
        self.http = httpx.Client(base_url=servers.base_url, timeout=30)
        self.channel = grpc.insecure_channel(servers.grpc_target)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.oip = open_inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        limit = {"max_output_tokens": 6} if path == "/v1/responses" else {"max_tokens": 6}
        whole = {"model": MODEL, "temperature": 0, **limit, **BODIES.get(path, {}), **body}
        return self.http.post(path, json=whole, headers=headers)

    def spans(self, root: str) -> list[ReadableSpan]:
        """Of the one request with that root span, which may end after its client has the answer."""
        found: list[ReadableSpan] = []

        def is_there() -> bool:
            found.extend(self.kept.take())
            return any(span.name == root for span in found)

        eventually(is_there)
        return found

    def close(self) -> None:
        self.http.close()
        self.channel.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Traced]:
    """Over the real engine."""
    kept = Kept()
    with engine_serving(tracer=kept.tracer) as servers:
        made = Traced(servers, kept)
        yield made
        made.close()


@pytest.fixture
def scripted(request) -> Iterator[Traced]:
    kept = Kept()
    with Serving(ScriptedBackend(*request.param), tracer=kept.tracer) as servers:
        made = Traced(servers, kept)
        yield made
        made.close()


def texts_of(spans: list[ReadableSpan]) -> str:
    """All that they say, as one text."""
    said: list[Any] = []
    for span in spans:
        said += [span.name, about(span), span.status.description]
        said += [(event.name, dict(event.attributes or {})) for event in span.events]
    return repr(said)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_each_http_api(served, path, streams):
    reply = served.post(
        path, {"traceparent": SAMPLED, "x-client-request-id": "mine"}, stream=streams
    )
    assert reply.status_code == 200
    spans = served.spans(f"POST {path}")
    root = one(spans, f"POST {path}")
    assert (root.kind, trace_of(root)) == (SpanKind.SERVER, TRACE)
    assert reply.headers["traceresponse"] == f"00-{TRACE}-{id_of(root)}-01"
    assert about(root) == {
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": 200,
        "url.path": path,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "penstock.request.id": reply.headers["x-request-id"],
        "penstock.client_request.id": "mine",
    }
    (answer,) = below(spans, root)
    (decode,) = below(spans, answer)
    operation = OPERATIONS[path]
    assert (answer.name, decode.name) == (f"{operation} {MODEL}", "decode")
    check_order(root, [answer])
    said = about(answer)
    assert said.pop("gen_ai.server.time_to_first_token") > 0  # type: ignore[operator]
    num_prompt = len(tokenizer().encode(SECRET))
    if operation == "chat":
        num_prompt = len(
            tokenizer().encode(tokenizer().render_chat(MESSAGES), add_special_tokens=False)
        )
    said.pop("gen_ai.usage.cache_read.input_tokens", None)
    assert said == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
        "penstock.finish": "length",
        "penstock.request.id": reply.headers["x-request-id"],
    }
    assert SECRET not in texts_of(spans)
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}


def test_each_text_of_an_embedding_has_its_spans(served):
    """No token is decoded, and the request has no sampling parameters."""
    body = {"model": MODEL, "input": [SECRET, SECRET]}
    reply = served.http.post("/v1/embeddings", json=body, headers={"traceparent": SAMPLED})
    assert reply.status_code == 200
    spans = served.spans("POST /v1/embeddings")
    found = below(spans, one(spans, "POST /v1/embeddings"))
    assert [each.name for each in found] == [f"embeddings {MODEL}"] * 2
    for each in found:
        said = about(each)
        assert said["gen_ai.operation.name"] == "embeddings"
        assert said["gen_ai.usage.input_tokens"] == len(tokenizer().encode(SECRET))
        assert said["gen_ai.usage.output_tokens"] == 0
        assert "gen_ai.request.temperature" not in said
        assert "decode" not in [below_it.name for below_it in below(spans, each)]
    assert SECRET not in texts_of(spans)


def grpc_calls() -> dict[str, tuple[str, Any]]:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=6)
    message = pb.Message(role="user", content=SECRET)
    text = oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(SECRET.encode())
    return {
        "Generate": (
            "penstock.v1.InferenceService/Generate",
            pb.GenerateRequest(text=SECRET, sampling=sampling),
        ),
        "Chat": (
            "penstock.v1.InferenceService/Chat",
            pb.ChatRequest(messages=[message], sampling=sampling),
        ),
        "ModelInfer": (
            "inference.GRPCInferenceService/ModelInfer",
            oip.ModelInferRequest(
                model_name=MODEL,
                inputs=[text],
                parameters={
                    "max_tokens": oip.InferParameter(int64_param=6),
                    "temperature": oip.InferParameter(double_param=0.0),
                },
            ),
        ),
    }


@pytest.mark.parametrize("method", grpc_calls())
def test_each_grpc_method(served, method):
    name, message = grpc_calls()[method]
    stub = served.oip if method == "ModelInfer" else served.stub
    metadata = (("traceparent", SAMPLED), ("tracestate", "vendor=1"))
    if method == "ModelInfer":
        _, call = stub.ModelInfer.with_call(message, metadata=metadata)
    else:
        call = getattr(stub, method)(message, metadata=metadata)
        list(call)
    sent = dict(call.initial_metadata())
    spans = served.spans(name)
    root = one(spans, name)
    assert (root.kind, trace_of(root)) == (SpanKind.SERVER, TRACE)
    assert sent["traceresponse"] == f"00-{TRACE}-{id_of(root)}-01"
    assert root.context is not None and root.context.trace_state.to_header() == "vendor=1"
    assert about(root) == {
        "rpc.system.name": "grpc",
        "rpc.method": name,
        "rpc.response.status_code": "OK",
        "penstock.request.id": sent["x-request-id"],
    }
    (answer,) = below(spans, root)
    assert about(answer)["gen_ai.usage.output_tokens"] == 6
    assert SECRET not in texts_of(spans)


def test_several_answers_are_apart(served):
    reply = served.post("/v1/completions", n=2, temperature=0.5, prompt=[SECRET, "The sea"])
    assert reply.status_code == 200
    spans = served.spans("POST /v1/completions")
    root = one(spans, "POST /v1/completions")
    answers = below(spans, root)
    call_id = reply.headers["x-request-id"]
    names = {about(each)["penstock.request.id"] for each in answers}
    assert names == {f"{call_id}-0", f"{call_id}-0.1", f"{call_id}-1", f"{call_id}-1.1"}
    assert [len(below(spans, each)) for each in answers] == [1] * 4


def test_a_response_in_the_background_ends_after_its_request(served):
    reply = served.post("/v1/responses", background=True, max_output_tokens=200)
    assert reply.json()["status"] == "queued"
    spans = served.spans("POST /v1/responses")
    spans += served.spans(f"chat {MODEL}")
    root, answer = one(spans, "POST /v1/responses"), one(spans, f"chat {MODEL}")
    assert parent_of(answer) == id_of(root) and trace_of(answer) == trace_of(root)
    assert about(answer)["gen_ai.usage.output_tokens"] == 200
    assert (answer.end_time or 0) > (root.end_time or 0) > 0


def test_what_is_not_sampled_has_an_id_and_no_spans(served, caplog):
    caplog.set_level(logging.INFO, "penstock.requests")
    reply = served.post("/v1/completions", {"traceparent": NOT_SAMPLED})
    assert reply.headers["traceresponse"].startswith(f"00-{TRACE}-")
    assert reply.headers["traceresponse"].endswith("-00")
    line = json.loads(caplog.records[-1].getMessage())
    assert (line["id"], line["trace_id"]) == (reply.headers["x-request-id"], TRACE)
    assert served.kept.take() == []


def test_the_log_names_the_trace_of_what_was_refused_too(served, caplog):
    caplog.set_level(logging.INFO, "penstock.requests")
    reply = served.post("/v1/completions", model="other")
    (root,) = served.spans("POST /v1/completions")
    line = json.loads(caplog.records[-1].getMessage())
    assert (line["finish"], line["trace_id"]) == ("model_not_found", trace_of(root))
    assert about(root)["http.response.status_code"] == reply.status_code == 404
    assert about(root)["error.type"] == "model_not_found"
    assert root.status.status_code is StatusCode.UNSET  # the caller's fault


def test_what_does_not_generate_has_no_trace(served):
    for path in ("/v1/models", "/health", "/v1/penstock/status"):
        assert (
            "traceresponse" not in served.http.get(path, headers={"traceparent": SAMPLED}).headers
        )
    reply = served.http.post("/tokenize", json={"model": MODEL, "prompt": "a"})
    assert reply.status_code == 200 and "traceresponse" not in reply.headers
    served.stub.ListModels(pb.ListModelsRequest())
    assert served.kept.take() == []


def test_what_is_continued_without_a_journal_is_an_error(served):
    reply = served.http.get("/v1/penstock/streams/abc", headers={"traceparent": SAMPLED})
    route = "GET /v1/penstock/streams/{request_id}"
    (root,) = served.spans(route)
    assert about(root)["http.response.status_code"] == reply.status_code == 501
    assert root.status.status_code is StatusCode.ERROR
    with pytest.raises(grpc.RpcError):
        list(served.stub.ResumeChat(pb.ResumeRequest(request_id="abc")))
    (root,) = served.spans("penstock.v1.InferenceService/ResumeChat")
    assert about(root)["rpc.response.status_code"] == "UNIMPLEMENTED"
    assert root.status.status_code is StatusCode.ERROR


LATE_FAILURE = ([5], "numerical_error")


@pytest.mark.parametrize("scripted", [LATE_FAILURE], indirect=True)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_of_the_server_is_an_error(scripted, path, streams):
    """Also in mid-stream, after the status 200."""
    reply = scripted.post(path, stream=streams)
    spans = scripted.spans(f"POST {path}")
    root = one(spans, f"POST {path}")
    (answer,) = below(spans, root)
    assert about(root)["http.response.status_code"] == reply.status_code
    for span in (root, answer):
        assert about(span)["error.type"] == "numerical_error"
        assert (span.status.status_code, span.status.description) == (
            StatusCode.ERROR,
            "numerical_error",
        )
    assert about(answer)["penstock.finish"] == "numerical_error"
    assert "gen_ai.response.finish_reasons" not in about(answer)


@pytest.mark.parametrize("scripted", [LATE_FAILURE], indirect=True)
def test_a_failure_over_grpc_is_an_error(scripted):
    with pytest.raises(grpc.RpcError) as raised:
        list(scripted.stub.Generate(pb.GenerateRequest(text="a")))
    assert raised.value.code() is grpc.StatusCode.DATA_LOSS
    root = one(
        scripted.spans("penstock.v1.InferenceService/Generate"),
        "penstock.v1.InferenceService/Generate",
    )
    assert about(root)["rpc.response.status_code"] == "DATA_LOSS"
    assert (root.status.status_code, about(root)["error.type"]) == (
        StatusCode.ERROR,
        "numerical_error",
    )


@pytest.mark.parametrize("scripted", [([5], 60.0)], indirect=True)
def test_a_client_that_leaves_is_no_error(scripted):
    body = {"model": MODEL, "prompt": "a", "stream": True}
    with scripted.http.stream("POST", "/v1/completions", json=body) as reply:
        assert next(reply.iter_lines()).startswith("data: ")
    spans = scripted.spans("POST /v1/completions")
    call = scripted.stub.Generate(pb.GenerateRequest(text="a"))
    next(call)
    call.cancel()
    name = "penstock.v1.InferenceService/Generate"
    over_grpc = scripted.spans(name)
    assert about(one(over_grpc, name))["rpc.response.status_code"] == "CANCELLED"
    for each in (spans, over_grpc):
        answer = one(each, f"text_completion {MODEL}")
        assert about(answer)["penstock.finish"] == "disconnect"
        assert about(answer)["gen_ai.usage.output_tokens"] == 1
        assert {span.status.status_code for span in each} == {StatusCode.UNSET}


def test_a_name_that_the_client_chose_is_cut():
    """Where the model may have any name."""
    kept = Kept()
    with Serving(
        ScriptedBackend([5], FinishReason.STOP), tracer=kept.tracer, other_names=("*",)
    ) as servers:
        made = Traced(servers, kept)
        made.post("/v1/completions", model="m" * 5000)
        answer = one(made.spans("POST /v1/completions"), f"text_completion {MODEL}")
        made.close()
    assert about(answer)["gen_ai.request.model"] == "m" * 200
    assert about(answer)["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_tenant_is_named_and_what_has_no_valid_key_has_no_span():
    kept = Kept()
    key = replace(record_from("a-long-and-secret-key"), tenant="blue")
    with Serving(
        ScriptedBackend([5], FinishReason.STOP), tracer=kept.tracer, api_keys=[key]
    ) as servers:
        made = Traced(servers, kept)
        wrong = made.post("/v1/completions", {"traceparent": SAMPLED, "authorization": "Bearer x"})
        assert wrong.status_code == 401 and "traceresponse" not in wrong.headers
        name = "penstock.v1.InferenceService/Generate"
        with pytest.raises(grpc.RpcError):
            list(made.stub.Generate(pb.GenerateRequest(text="a")))
        assert kept.take() == []
        bearer = "Bearer a-long-and-secret-key"
        made.post("/v1/completions", {"authorization": bearer})
        roots = [one(made.spans("POST /v1/completions"), "POST /v1/completions")]
        list(made.stub.Generate(pb.GenerateRequest(text="a"), metadata=[("authorization", bearer)]))
        roots.append(one(made.spans(name), name))
        made.close()
    assert [about(root)["penstock.tenant"] for root in roots] == ["blue", "blue"]
    assert "secret" not in texts_of(roots)


def test_without_a_tracer_no_answer_names_a_trace():
    with Serving(ScriptedBackend([5], FinishReason.STOP)) as servers:
        made = Traced(servers, Kept())
        reply = made.post("/v1/completions", {"traceparent": SAMPLED})
        assert reply.status_code == 200 and "traceresponse" not in reply.headers
        call = made.stub.Generate(pb.GenerateRequest(text="a"), metadata=[("traceparent", SAMPLED)])
        list(call)
        assert "traceresponse" not in dict(call.initial_metadata())
        made.close()
