"""Idempotency keys of the endpoints besides chat: responses, messages, batches, and gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.client import Answer, AsyncClient, Client, ClientError
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.ingress.journal.test_resume import (
    ANTHROPIC,
    MESSAGES,
    RESPONSES,
    events_of,
)
from tests.deployments.serving import MODEL, EngineBackend, ScriptedBackend, Serving
from tests.deployments.waiting import eventually

POSTS: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "Of the sea.", "max_output_tokens": 8, "temperature": 1.0},
    ANTHROPIC: {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 1.0},
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    backend = EngineBackend()
    data_dir = tmp_path_factory.mktemp("data")
    with Serving(backend, state_url=f"sqlite://{folder}", data_dir=data_dir) as servers:
        yield servers
    backend.stop()


@pytest.fixture(scope="module")
def http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.base_url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", POSTS)
def test_the_same_key_gives_the_same_answer(http: httpx.Client, path: str) -> None:
    body, headers = POSTS[path], {"Idempotency-Key": "order-1"}
    first, again = (http.post(path, json=body, headers=headers) for _ in range(2))
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert first.headers.get("idempotent-replayed") is None
    assert again.headers["idempotent-replayed"] == "true"
    turned = http.post(path, json=dict(reversed(body.items())), headers=headers)
    assert turned.json() == first.json()
    other = http.post(path, json={**body, "temperature": 0.5}, headers=headers)
    assert other.status_code == 422
    streamed = {**body, "stream": True}
    both = []
    for _ in range(2):
        with http.stream("POST", path, json=streamed, headers={"Idempotency-Key": "s"}) as answer:
            both.append(events_of(answer.iter_lines()))
    assert both[0] == both[1]


def test_a_key_begins_one_response_in_the_background(http: httpx.Client) -> None:
    body, headers = {**POSTS[RESPONSES], "background": True}, {"Idempotency-Key": "b"}
    first, again = (http.post(RESPONSES, json=body, headers=headers) for _ in range(2))
    assert first.status_code == again.status_code == 200
    assert first.json()["id"] == again.json()["id"]
    path = f"{RESPONSES}/{first.json()['id']}"
    # Which of the two ends is a matter of the seed, which the server has drawn.
    ends = ("incomplete", "completed")
    eventually(lambda: http.get(path).json()["status"] in ends, 60)
    last = http.post(RESPONSES, json=body, headers=headers)
    assert last.json() == http.get(path).json()
    assert last.headers["idempotent-replayed"] == "true"


def test_a_key_of_a_request_that_was_refused_may_be_used_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    backend = ScriptedBackend("no_worker")
    with (
        Serving(backend, state_url=f"sqlite://{tmp_path}") as servers,
        httpx.Client(base_url=servers.base_url, timeout=30) as http,
    ):
        for path, body in POSTS.items():
            headers = {"Idempotency-Key": "again"}
            backend.script = ("no_worker",)
            bad = {**body, "temperature": -1}
            assert http.post(path, json=bad, headers=headers).status_code == 400
            assert http.post(path, json=body, headers=headers).status_code in (503, 529)
            backend.script = ([5], FinishReason.LENGTH)
            answer = http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert "idempotent-replayed" not in answer.headers


def test_a_key_creates_one_batch(http: httpx.Client) -> None:
    line = {"custom_id": "1", "method": "POST", "url": RESPONSES, "body": POSTS[RESPONSES]}
    files: Any = {"file": ("in.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    file_id = http.post("/v1/files", files=files).json()["id"]
    body = {"input_file_id": file_id, "endpoint": RESPONSES, "completion_window": "24h"}
    headers = {"Idempotency-Key": "batch"}
    bad = http.post("/v1/batches", json={**body, "input_file_id": "file-0"}, headers=headers)
    assert bad.status_code == 404
    first, again = (http.post("/v1/batches", json=body, headers=headers) for _ in range(2))
    assert first.status_code == again.status_code == 200, first.text
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"
    other = http.post("/v1/batches", json={**body, "metadata": {"a": "b"}}, headers=headers)
    assert other.status_code == 422
    assert len(http.get("/v1/batches").json()["data"]) == 1
    assert http.post("/v1/batches", json=body).json()["id"] != first.json()["id"]


def test_a_key_gives_the_same_tokens_over_grpc(serving: Serving) -> None:
    sampling = pb.SamplingParams(temperature=1.0, max_tokens=8)
    metadata = (("idempotency-key", "g"),)
    with grpc.insecure_channel(serving.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(text="It was", sampling=sampling, n=2)
        answers, replayed = [], []
        for _ in range(2):
            call = stub.Generate(request, metadata=metadata)
            tokens: dict[int, list[int]] = {}
            for message in call:
                tokens.setdefault(message.choice, []).extend(message.token_ids)
            answers.append(tokens)
            replayed.append(dict(call.trailing_metadata()).get("idempotent-replayed"))
        assert answers[0] == answers[1] and set(answers[0]) == {0, 1}
        assert replayed == [None, "true"]
        changed = pb.GenerateRequest(text="It is", sampling=sampling, n=2)
        for bad, key, code in (
            (changed, "g", grpc.StatusCode.INVALID_ARGUMENT),
            (request, "x" * 256, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Generate(bad, metadata=(("idempotency-key", key),)))
            assert error.value.code() is code
        chat = pb.ChatRequest(
            messages=[pb.Message(role="user", content="Hello")], sampling=sampling
        )
        assert list(stub.Chat(chat, metadata=metadata))  # a key belongs to its method


def test_the_clients_send_a_key(serving: Serving) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    sampling: Any = {"temperature": 1.0, "max_tokens": 8, "idempotency_key": "of a client"}
    with Client(serving.grpc_target) as client:
        first = client.complete("It was", **sampling)
        assert client.complete("It was", **sampling) == first
        with pytest.raises(ClientError, match="idempotency_key_reused"):
            client.complete("It is", **sampling)
        reply = client.reply(messages, **sampling)

    async def again() -> tuple[Answer, Answer]:
        async with AsyncClient(serving.grpc_target) as client:
            return (
                await client.complete("It was", **sampling),
                await client.reply(messages, **sampling),
            )

    assert asyncio.run(again()) == (first, reply)
