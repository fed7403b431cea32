"""Each sampling parameter reaches the engine's Request with its value, from each front end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from typing import Any

import grpc
import httpx
import pytest
from pydantic import BaseModel

from penstock.deployments.client.client import Client
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.http.anthropic.requests import MessagesRequest
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
)
from penstock.deployments.ingress.http.responses.requests import ResponsesRequest
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.inference import open_inference_pb2_grpc
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.channel.codec import request_from, submit_message
from penstock.workers.parameters import Api
from penstock.workers.request import (
    PARAMETERS,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
)
from penstock.workers.structured_spec import StructuredKind
from tests.deployments.serving import ScriptedBackend, Serving

MESSAGES = [{"role": "user", "content": "Hello"}]
# What is sent, by the common name of the parameter. Each value differs from the default.
SENT: dict[str, Any] = {
    "temperature": 0.75,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": -(2**40),
    "max_tokens": 9,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop": ["ab", "cd"],
    "stop_token_ids": [5, 6],
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"7": -3.5},
    "allowed_token_ids": [8, 9],
    "bad_words": ["wall"],
    "logprobs": 4,
    "prompt_logprobs": 2,
    "regex": "a+",
    "context_policy": "sink_window",
    "sinks": 4,
    "window": 64,
    "roll": 16,
    "moe_mode": "exact",
    "speculate": False,
}
FIELD = {"bad_words": "bad_words_ids", "regex": "structured"}  # where the Request's name differs
FRONTS = {
    "chat": Api.CHAT,
    "completions": Api.COMPLETIONS,
    "responses": Api.RESPONSES,
    "messages": Api.MESSAGES,
    "grpc generate": Api.GRPC,
    "grpc chat": Api.GRPC,
    "open inference": Api.OPEN_INFERENCE,
    "python client": Api.GRPC,
}
OFFERED = {
    front: tuple(name for name in SENT if api in PARAMETERS[FIELD.get(name, name)].apis)
    for front, api in FRONTS.items()
}


class OneToken(ScriptedBackend):
    """Records each request and answers it with one token and its logprob."""

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        self.requests.append(admission.request)
        scores = [TokenLogprob(5, -1.0, 1)]
        yield Delta(admission.request_id, [5], FinishReason.LENGTH, logprobs=scores)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with Serving(OneToken()) as server:
        yield server


def schema_of(name: str, value: Any, front: str) -> dict[str, Any]:
    """The fields of an HTTP body that say `name: value`, as that API calls them."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    if name == "regex" and front == "responses":
        return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
    if name == "regex" and front == "messages":
        return {"output_format": {"type": "json_schema", "schema": schema}}
    if name == "regex":
        return {"structured_outputs": {"regex": value}}
    if name == "logprobs" and front == "chat":
        return {"logprobs": True, "top_logprobs": value}
    renamed = {
        ("responses", "max_tokens"): "max_output_tokens",
        ("messages", "stop"): "stop_sequences",
    }
    return {renamed.get((front, name), name): value}


def send_http(server: Serving, front: str, names: tuple[str, ...]) -> None:
    fronts: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
        "completions": ("/v1/completions", {"prompt": "Hello"}),
        "responses": ("/v1/responses", {"input": "Hello"}),
        "messages": ("/v1/messages", {"messages": MESSAGES, "model": "builtin"}),
    }
    path, body = fronts[front]
    sent = dict(body)
    for name in names:
        sent |= schema_of(name, SENT[name], front)
    answer = httpx.post(f"{server.base_url}{path}", json=sent, timeout=30)
    assert answer.status_code == 200, answer.text


def send_grpc(server: Serving, front: str, names: tuple[str, ...]) -> None:
    sampling = pb.SamplingParams(
        **{name: SENT[name] for name in names if name != "logit_bias"},
        logit_bias={int(key): bias for key, bias in SENT["logit_bias"].items()},
    )
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        if front == "grpc chat":
            messages = [pb.Message(role="user", content="Hello")]
            list(stub.Chat(pb.ChatRequest(messages=messages, sampling=sampling)))
        else:
            list(stub.Generate(pb.GenerateRequest(text="Hello", sampling=sampling)))


def send_open_inference(server: Serving, names: tuple[str, ...]) -> None:
    request = oip.ModelInferRequest(model_name="builtin")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"Hello")
    for name in names:
        value = SENT[name][0] if name == "stop" else SENT[name]
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[name], kinds[type(value)], value)
    with grpc.insecure_channel(server.grpc_target) as channel:
        open_inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)


def send_python(server: Serving, names: tuple[str, ...]) -> None:
    options = {name: SENT[name] for name in names}
    options["logit_bias"] = {int(key): bias for key, bias in SENT["logit_bias"].items()}
    with Client(server.grpc_target) as client:
        client.complete("Hello", **options)


def sent_by(server: Serving, front: str, names: tuple[str, ...]) -> Request:
    backend: Any = server.backend
    backend.requests.clear()
    if front.startswith("grpc"):
        send_grpc(server, front, names)
    elif front == "open inference":
        send_open_inference(server, names)
    elif front == "python client":
        send_python(server, names)
    else:
        send_http(server, front, names)
    (request,) = backend.requests
    assert isinstance(request, Request)
    return request


def check_arrived(params: SamplingParams, name: str, front: str) -> None:
    arrived = getattr(params, FIELD.get(name, name))
    if name == "bad_words":
        assert arrived and all(arrived)
    elif name == "regex" and front in ("responses", "messages"):
        assert arrived.kind is StructuredKind.JSON_SCHEMA
    elif name == "regex":
        assert (arrived.kind, arrived.text) == (StructuredKind.REGEX, "a+")
    elif name == "logit_bias":
        assert arrived == ((7, -3.5),)
    elif front == "open inference" and name == "stop":
        assert arrived == ("ab",)
    else:
        expected = SENT[name]
        assert arrived == (tuple(expected) if isinstance(expected, list) else expected)


@pytest.mark.parametrize("front", OFFERED)
def test_parameters_reach_the_engine(server: Serving, front: str) -> None:
    request = sent_by(server, front, OFFERED[front])
    assert request.params != SamplingParams()
    for name in OFFERED[front]:
        check_arrived(request.params, name, front)
    # And through the channel to the worker, except for stop strings, which stay at the ingress.
    received = request_from(submit_message(request, 1, 0), request.request_id).params
    for name in OFFERED[front]:
        if name != "stop":
            check_arrived(received, name, front)
    assert received.stop == ()


def test_the_apis_that_offer_each_parameter() -> None:
    basic = {"temperature", "top_k", "top_p", "max_tokens", "stop", "regex"}
    penalties = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    numbers = basic - {"stop", "regex"} | {"min_p", "seed", "min_tokens", "ignore_eos"} | penalties
    assert set(OFFERED["responses"]) == numbers | {"stop", "regex"}
    assert set(OFFERED["messages"]) == basic
    assert set(OFFERED["open inference"]) == numbers | {"stop"}
    for front in ("chat", "completions", "grpc generate", "grpc chat", "python client"):
        assert OFFERED[front] == tuple(SENT)


BODIES: dict[str, tuple[str, type[BaseModel]]] = {
    "chat": ("ChatCompletionRequest", ChatCompletionRequest),
    "completions": ("CompletionRequest", CompletionRequest),
    "responses": ("ResponsesRequest", ResponsesRequest),
    "messages": ("MessagesRequest", MessagesRequest),
}
SPECIAL = ("regex", "bad_words", "logprobs")  # fields with a form and a text of their own


@pytest.mark.parametrize("front", BODIES)
def test_bodies_offer_what_the_metadata_says_and_in_its_words(server: Serving, front: str) -> None:
    schema_name, body = BODIES[front]
    document = httpx.get(f"{server.base_url}/openapi.json").json()
    properties = document["components"]["schemas"][schema_name]["properties"]
    for name in SENT.keys() - set(SPECIAL):
        field = next(iter(schema_of(name, SENT[name], front)))
        if name in OFFERED[front]:
            assert properties[field]["description"] == PARAMETERS[name].description
        else:
            assert field not in body.model_fields


def test_bounds_are_stated_and_enforced_as_the_metadata_has_them(server: Serving) -> None:
    document = httpx.get(f"{server.base_url}/openapi.json").json()
    chat = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for name in ("sinks", "window", "roll", "temperature", "min_p"):
        bounds = PARAMETERS[name].bounds
        assert bounds is not None
        number = chat[name]["anyOf"][0]
        assert (number["minimum"], number["maximum"]) == (bounds.low, bounds.high)
        for beyond in (bounds.low - 1, bounds.high + 1):
            sent = {"messages": MESSAGES, "context_policy": "sink_window", name: beyond}
            refused = httpx.post(f"{server.base_url}/v1/chat/completions", json=sent)
            assert refused.json()["error"]["message"] == f"{name} must lie in {bounds}"


def test_every_parameter_is_sent_and_differs_from_its_default() -> None:
    defaults = SamplingParams()
    sent = {FIELD.get(name, name) for name in SENT}
    assert sent == {each.name for each in fields(SamplingParams)}
    for name, value in SENT.items():
        assert getattr(defaults, FIELD.get(name, name)) != value
