"""Embed over gRPC: the vectors of the HTTP API to the bit, in the stub and in the Python client."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from penstock.deployments.client import AsyncClient, Client, ClientError
from penstock.deployments.ingress.grpc import embeddings
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.serving import MODEL, ScriptedGrpc, tokenizer
from tests.deployments.waiting import eventually

TEXTS = ["The ship lay at anchor.", "He asked for bread.", "so"]


@pytest.fixture(scope="module")
def stub(channel):
    return inference_pb2_grpc.InferenceServiceStub(channel)


def over_http(serving, **body: Any) -> list[list[float]]:
    answer = httpx.post(f"{serving.base_url}/v1/embeddings", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def same_bits(one: Any, other: Any) -> bool:
    return np.array(one, dtype=np.float32).tobytes() == np.array(other, dtype=np.float32).tobytes()


def text(value: str) -> pb.EmbedInput:
    return pb.EmbedInput(text=value)


def test_embed(serving, stub):
    ids = tokenizer().encode(TEXTS[1])
    inputs = [text(TEXTS[0]), pb.EmbedInput(token_ids=pb.TokenIds(ids=ids)), text(TEXTS[2])]
    request = pb.EmbedRequest(model=MODEL, inputs=inputs, client_request_id="mine-1")
    answer = stub.Embed(request)
    # Each alone: what is computed beside a text may change the last bits of its vector.
    for each, value in zip(answer.embeddings, TEXTS, strict=True):
        (want,) = over_http(serving, input=value)
        np.testing.assert_allclose(each.values, want, rtol=1e-4, atol=1e-6)
    assert answer.usage.prompt_tokens == sum(len(tokenizer().encode(each)) for each in TEXTS)
    assert answer.usage.completion_tokens == 0
    assert answer.request_id and answer.client_request_id == "mine-1"


def test_the_python_client(serving):
    (want,) = over_http(serving, input=TEXTS[0])
    (short,) = over_http(serving, input=TEXTS[0], dimensions=5)
    (raw,) = over_http(serving, input=TEXTS[0], normalize=False)
    with Client(serving.grpc_target) as client:
        assert same_bits(client.embed([TEXTS[0]]), [want])
        assert same_bits(client.embed([tokenizer().encode(TEXTS[0])]), [want])
        assert same_bits(client.embed([TEXTS[0]], dimensions=5), [short])
        assert same_bits(client.embed([TEXTS[0]], normalize=False), [raw])
        with pytest.raises(ClientError) as refused:
            client.embed(["so", ""])
        assert (refused.value.code, refused.value.param) == ("invalid_value", "inputs[1]")

    async def embed() -> list[list[float]]:
        async with AsyncClient(serving.grpc_target) as client:
            return await client.embed([TEXTS[0]])

    assert same_bits(asyncio.run(embed()), [want])


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (pb.EmbedRequest(), "invalid_value", "inputs"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()] * 2049), "invalid_value", "inputs"),
        (pb.EmbedRequest(inputs=[text("so"), pb.EmbedInput()]), "missing_parameter", "inputs[1]"),
        (pb.EmbedRequest(inputs=[text("so")], dimensions=0), "invalid_value", "dimensions"),
        (pb.EmbedRequest(inputs=[text("so")], priority=101), "invalid_value", "priority"),
        (pb.EmbedRequest(inputs=[text("so")], model="other"), "model_not_found", "model"),
        (
            pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[10**9]))]),
            "invalid_value",
            "inputs[0]",
        ),
    ],
)
def test_bad_input_names_its_field(stub, request_, code, param):
    with pytest.raises(grpc.RpcError) as refused:
        stub.Embed(request_)
    trailing = dict(refused.value.trailing_metadata())
    assert (trailing["error-code"], trailing["error-param"]) == (code, param)


def test_vectors_that_fill_more_than_a_message_are_refused_with_a_remedy(stub, monkeypatch):
    monkeypatch.setattr(embeddings, "MAX_ANSWER_BYTES", 600)
    with pytest.raises(grpc.RpcError, match="send fewer inputs in one call"):
        stub.Embed(pb.EmbedRequest(inputs=[text(each) for each in TEXTS]))


def test_a_call_that_ends_early_drops_all_its_texts():
    """The client cancels it, or its only text is cancelled by the id."""
    stub_type = inference_pb2_grpc.InferenceServiceStub
    with ScriptedGrpc(stub_type, 60.0, FinishReason.STOP) as server:
        backend = server.backend
        call = server.stub.Embed.future(pb.EmbedRequest(inputs=[text(each) for each in TEXTS]))
        eventually(lambda: len(backend.requests) == len(TEXTS))
        call.cancel()
        eventually(lambda: backend.num_closed == len(TEXTS))

        call = server.stub.Embed.future(pb.EmbedRequest(inputs=[text(TEXTS[0])]))
        eventually(lambda: len(backend.requests) == len(TEXTS) + 1)
        name = backend.requests[-1].request_id
        assert server.stub.Cancel(pb.CancelRequest(request_id=name)).cancelled
        with pytest.raises(grpc.RpcError) as ended:
            call.result()
        assert dict(ended.value.trailing_metadata())["error-code"] == "cancelled"


def test_a_text_that_fails_ends_the_call_and_the_other_texts():
    stub_type = inference_pb2_grpc.InferenceServiceStub
    with ScriptedGrpc(stub_type, "no_worker") as server:
        with pytest.raises(grpc.RpcError) as ended:
            server.stub.Embed(pb.EmbedRequest(inputs=[text(each) for each in TEXTS]))
        assert dict(ended.value.trailing_metadata())["error-code"] == "no_worker"
        eventually(lambda: server.backend.num_closed == len(server.backend.requests))
