"""Calls that reach a gRPC server at the moment in which it stops, as in a rolling update.

gRPC hands calls to the event loop one at a time, and answers CANCELLED to those that still wait for
it when the server stops. Here they wait since the loop is kept busy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.grpc import server as grpc_server
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.serving import ScriptedBackend, Serving, core_over

NUM = 4
BUSY_S = 0.8
T = TypeVar("T")


def answers_at_stop(call: Callable[[str], Callable[[], T]], *, is_replaced: bool) -> list[T]:
    """What NUM threads get whose calls arrive while the server's loop is busy, before it stops.

    `call`: connects with a target, and returns what to call there. `is_replaced`: another server
    listens on the same port by then.
    """

    async def scenario() -> list[T]:
        core = core_over(ScriptedBackend([1], [2], [3], FinishReason.LENGTH))
        servers = [await grpc_server.start_server(core, "127.0.0.1:0")]
        target, busy = f"127.0.0.1:{servers[0].port}", threading.Event()

        def one(call_now: Callable[[], T]) -> T:
            busy.wait()
            return call_now()

        try:
            with ThreadPoolExecutor(NUM) as pool:
                calls = [await asyncio.to_thread(call, target) for _ in range(NUM)]
                if is_replaced:
                    servers.append(await grpc_server.start_server(core, target))
                answers = [asyncio.wrap_future(pool.submit(one, each)) for each in calls]
                busy.set()
                time.sleep(BUSY_S)
                await servers[0].stop(5.0)
                return await asyncio.gather(*answers)
        finally:
            for each in servers:
                await each.stop(1.0)

    return asyncio.run(scenario())


def test_a_server_that_stops_answers_what_has_arrived():
    """Also where a client repeats nothing."""
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))

    def connect(target: str) -> Callable[[], list[int]]:
        channel = grpc.insecure_channel(target, options=[("grpc.enable_retries", 0)])
        grpc.channel_ready_future(channel).result(10)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return lambda: [token for each in stub.Generate(asked) for token in each.token_ids]

    assert answers_at_stop(connect, is_replaced=False) == [[1, 2, 3]] * NUM


def test_the_client_sends_again_what_no_server_has_begun(monkeypatch):
    """What the server still loses: calls that arrive after its last look."""
    monkeypatch.setattr(grpc_server, "ARRIVED_S", 0.0)

    def connect(target: str) -> Callable[[], tuple[int, ...]]:
        client = Client(target)
        client.models()
        return lambda: client.complete([1, 2, 3]).token_ids

    assert answers_at_stop(connect, is_replaced=True) == [(1, 2, 3)] * NUM


@pytest.mark.parametrize("has_journals", [False, True])
def test_what_a_server_has_refused_is_not_sent_again(tmp_path, has_journals):
    state_url = f"sqlite:///{tmp_path}" if has_journals else None
    backend = ScriptedBackend(ServiceError("no_worker"))
    with Serving(backend, state_url=state_url) as serving, Client(serving.grpc_target) as client:
        for call in (lambda: client.complete([1, 2, 3]), lambda: client.embed([[1, 2, 3]])):
            with pytest.raises(ClientError) as error:
                call()
            assert error.value.status is grpc.StatusCode.UNAVAILABLE
            assert error.value.code == "no_worker"
    assert len(backend.requests) == 2
