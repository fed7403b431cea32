"""Clients that stop reading: their neighbours are served whole, and nothing of theirs stays behind.

Nothing is timed: the neighbours' answers are compared with those of a server that is otherwise
empty, and blocks are counted. benchmarks/cluster/slow_readers.py measures what it costs in time.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest

from penstock.deployments.client import Client
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from tests.deployments import waiting
from tests.deployments.serving import EngineBackend, Serving, slowed

PROMPT = "It was a bright morning, and"
NUM_SLOW = 3  # of each kind
LONG = 450
LOUD = 20  # alternatives that are sent with each token: much to write for little to compute
eventually = partial(waiting.eventually, within_s=60.0)


@pytest.fixture
def serving() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend) as started:
        yield started
    backend.stop()


def over_http(serving: Serving) -> socket.socket:
    """A stream of which nothing is read, and of which the kernel takes next to nothing in."""
    body = {"prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    content = json.dumps({**body, "logprobs": LOUD}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", serving.http_port))
    sock.sendall(head.encode() + content)
    return sock


def over_grpc(channel: grpc.Channel) -> grpc.Call:
    """A stream of which one message is read; HTTP/2's window holds back most of the rest."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    sampling = pb.SamplingParams(max_tokens=LONG, ignore_eos=True, logprobs=LOUD)
    call = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling))
    next(call)
    return call


def test_neighbours_of_slow_readers_are_served_and_nothing_stays_behind(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "ignore_eos": True}
    backend = serving.backend
    with Client(serving.grpc_target) as client, ExitStack() as slow:
        alone = [client.complete(PROMPT, seed=seed, **fields).token_ids for seed in range(3)]
        channel = slow.enter_context(grpc.insecure_channel(serving.grpc_target))
        with monkeypatch.context() as patch:
            slowed(backend.engine, patch)  # the first still runs when the last one has begun
            calls = [over_grpc(channel) for _ in range(NUM_SLOW)]
            for _ in range(NUM_SLOW):
                slow.enter_context(over_http(serving))
            eventually(lambda: backend.engine.stats().num_running == 2 * NUM_SLOW)
        beside = [client.complete(PROMPT, seed=seed, **fields).token_ids for seed in range(3)]
        assert beside == alone
        # The engine waits for no reader: an answer without one is computed to its end and dropped.
        eventually(lambda: backend.num_live_blocks == 0)
        assert client.complete(PROMPT, seed=0, **fields).token_ids == alone[0]
        for call in calls:
            call.cancel()
    # Their generations have ended, too: the core keeps no client that has left.
    eventually(lambda: not serving.core._running)
    backend.engine.check()


def test_a_slow_reader_misses_nothing(serving: Serving) -> None:
    """A client that reads late gets all of its answer, in order, in however few messages."""
    with grpc.insecure_channel(serving.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        sampling = pb.SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True, logprobs=5)
        request = pb.GenerateRequest(text=PROMPT, sampling=sampling)
        prompt = [token_id for answer in stub.Generate(request) for token_id in answer.token_ids]
        late = stub.Generate(request)
        answers = [next(late)]
        eventually(lambda: serving.backend.engine.stats().num_running == 0)
        answers += late
    assert [token_id for answer in answers for token_id in answer.token_ids] == prompt
    assert sum(len(answer.logprobs) for answer in answers) == answers[-1].usage.completion_tokens
