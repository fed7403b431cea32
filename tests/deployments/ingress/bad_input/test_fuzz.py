"""Near misses of valid requests, over both front ends: every answer is one of those declared.

Never a status of 500 but "overloaded", never INTERNAL or UNKNOWN, and the servers serve on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.inference import open_inference_pb2_grpc
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import PARAMETERS
from tests.deployments.serving import EngineBackend, Serving
from tests.fuzzing import messages, near

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}
USER = {"role": "user", "content": "hi"}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "max_tokens": 3, "seed": 1}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
        "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "logit_bias": {"5": 1.0},
        "stream_options": {"include_usage": True},
        "stream": True,
        **SAMPLING,
    },
    "/v1/completions": {
        "prompt": ["hi", "there"],
        "n": 2,
        "echo": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "bad_words": ["no"],
        **SAMPLING,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "instructions": "s",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "metadata": {"a": "b"},
        "max_output_tokens": 3,
        "store": False,
    },
    "/v1/messages": {
        "model": "builtin",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"model": "builtin", "messages": [USER], "system": "s"},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "/v1/embeddings": {"input": ["hi", "there"], "dimensions": 2, "encoding_format": "base64"},
    "/v1/score": {"text_1": "hi", "text_2": ["hi", "there"], "truncate_prompt_tokens": 1},
    "/v1/rerank": {"query": "hi", "documents": ["hi", "there"], "top_n": 1},
    "/tokenize": {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
NAMES = (
    *PARAMETERS,
    "n",
    "user",
    "model",
    "echo",
    "guided_regex",
    "guided_json",
    "priority",
)
FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = Path(tmp_path_factory.mktemp("data"))
    backend = EngineBackend()
    with Serving(backend, data_dir=folder, max_model_len=320) as serving:
        yield serving
    backend.stop()


@pytest.fixture(scope="module")
def http(servers: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=servers.base_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def channel(servers: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(servers.grpc_target) as opened:
        yield opened


def check_http(client: httpx.Client, path: str, content: bytes) -> None:
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500 or answer.status_code == 503, (answer.text, content)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"] and "Traceback" not in answer.text
        code = error.get("code")
        assert code is None or code in CATALOGUE, answer.text


@pytest.mark.parametrize("path", GOOD)
def test_the_bodies_that_are_changed_are_good_themselves(http, path):
    """Else no change of one would reach what comes after its refusal."""
    status = http.post(path, json=GOOD[path]).status_code
    assert status == (404 if path == "/v1/batches" else 200), http.post(path, json=GOOD[path]).text


@pytest.mark.parametrize("path", GOOD)
@FUZZ
@given(data=st.data())
def test_any_body_is_served_or_refused(http, path, data):
    body = data.draw(near(GOOD[path], NAMES))
    check_http(http, path, json.dumps(body).encode())


@FUZZ
@given(path=st.sampled_from(sorted(GOOD)), content=st.binary(max_size=200))
def test_any_bytes_are_refused(http, path, content):
    check_http(http, path, content)


@FUZZ
@given(path=st.sampled_from(sorted(GOOD)), data=st.data())
def test_any_cut_or_damaged_body_is_refused_or_served(http, path, data):
    content = bytearray(json.dumps(GOOD[path]).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    check_http(http, path, bytes(content))


def check_grpc(call: Any, request: Any) -> None:
    try:
        answer = call(request, timeout=60)
        if hasattr(answer, "__iter__"):
            list(answer)
    except grpc.RpcError as error:
        declared = {CATALOGUE[name].grpc_status for name in CATALOGUE if name != "internal_error"}
        assert error.code().name in declared, (error, request)


@FUZZ
@given(request=messages(pb.GenerateRequest))
def test_any_generate_request_is_served_or_refused(channel, request):
    check_grpc(inference_pb2_grpc.InferenceServiceStub(channel).Generate, request)


@FUZZ
@given(request=messages(pb.ChatRequest))
def test_any_chat_request_is_served_or_refused(channel, request):
    check_grpc(inference_pb2_grpc.InferenceServiceStub(channel).Chat, request)


@FUZZ
@given(data=st.data())
def test_any_other_request_is_served_or_refused(channel, data):
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    open_stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    call, kind = data.draw(
        st.sampled_from(
            [
                (stub.Tokenize, pb.TokenizeRequest),
                (stub.Detokenize, pb.DetokenizeRequest),
                (stub.Cancel, pb.CancelRequest),
                (stub.ResumeChat, pb.ResumeRequest),
                (open_stub.ModelInfer, oip.ModelInferRequest),
                (open_stub.ModelMetadata, oip.ModelMetadataRequest),
            ]
        )
    )
    check_grpc(call, data.draw(messages(kind)))


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_message_is_refused_or_served(channel, content):
    call = channel.unary_stream(
        "/penstock.v1.InferenceService/Generate",
        request_serializer=lambda each: each,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    check_grpc(call, content)


def test_the_servers_serve_on(http, channel):
    """After all of the above, whatever order they ran in."""
    assert http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}).status_code == 200
    request = pb.GenerateRequest(text="hi")
    assert list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60))
