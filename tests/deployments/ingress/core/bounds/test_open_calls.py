"""How many calls an ingress has at a time, over both front ends, and what it says beyond that."""

from __future__ import annotations

import threading

import grpc
import httpx
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.ingress.core.bounds.limits import OpenCalls
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.workers.request import FinishReason
from tests.deployments.serving import ScriptedBackend, Serving, scripted
from tests.deployments.waiting import eventually

BODY = {"prompt": "The sea was", "max_tokens": 4}
PATH = "/v1/completions"


def test_calls_and_bytes_are_given_back_once():
    now = 0.0
    calls = OpenCalls(2, 100, clock=lambda: now)
    with calls.enter(60) as first, calls.enter() as second:
        with pytest.raises(ServiceError) as refused:
            calls.enter()
        assert refused.value.code == "overloaded" and "2 open requests" in refused.value.message
        with pytest.raises(ServiceError):
            second.add(41)
        second.add(40)
        assert (calls.num, calls.num_bytes) == (2, 100)
        first.leave()
        assert (calls.num, calls.num_bytes) == (1, 40)
        with pytest.raises(ServiceError):
            calls.enter(61)
    assert (calls.num, calls.num_bytes, calls.num_refused) == (0, 0, 3)


def test_a_refused_client_returns_after_about_the_time_that_calls_take():
    now = 0.0
    calls = OpenCalls(1, 100, clock=lambda: now)
    for _ in range(200):
        with calls.enter():
            now += 20.0
    with calls.enter(), pytest.raises(ServiceError) as refused:
        calls.enter()
    assert 19.0 <= (refused.value.retry_after_s or 0.0) <= 31.0


def test_both_front_ends_share_the_bound_and_health_has_none():
    release = threading.Event()

    class Held(ScriptedBackend):
        async def generate(self, admission):
            self.requests.append(admission.request)
            import asyncio

            while not release.is_set():
                await asyncio.sleep(0.01)
            self.script = (FinishReason.STOP,)
            async for delta in super().generate(admission):
                yield delta

    def post(started: Serving) -> None:
        httpx.post(f"{started.base_url}{PATH}", json=BODY, timeout=120)

    backend = Held()
    with (
        Serving(backend, open_calls=OpenCalls(3)) as started,
        httpx.Client(base_url=started.base_url, timeout=30) as plain,
        Client(started.grpc_target) as client,
    ):
        threads = [threading.Thread(target=lambda: post(started)) for _ in range(2)]
        threads.append(threading.Thread(target=lambda: client.complete("x", max_tokens=4)))
        for thread in threads:
            thread.start()
        eventually(lambda: len(backend.requests) == 3)
        refused = plain.post(PATH, json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert 1 <= int(refused.headers["retry-after"]) <= 90
        with Client(started.grpc_target) as another, pytest.raises(ClientError) as raised:
            another.complete("x", max_tokens=4)
        assert raised.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "open requests" in str(raised.value)
        for path in ("/health", "/ready", "/live", "/v1/models"):
            assert plain.get(path).status_code == 200
        assert len(backend.requests) == 3
        release.set()
        for thread in threads:
            thread.join(60)
        assert plain.post(PATH, json=BODY).status_code == 200
        eventually(lambda: started.core.open_calls.num == 0)
        assert started.core.open_calls.num_bytes == 0


def test_bodies_share_their_bytes():
    with scripted(FinishReason.STOP, open_calls=OpenCalls(max_bytes=2000)) as (servers, plain):
        body = {**BODY, "prompt": "x" * 3000}
        refused = plain.post(PATH, json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        assert plain.post(PATH, json=BODY).status_code == 200
        open_calls = servers.core.open_calls
        eventually(lambda: open_calls.num_bytes == open_calls.num == 0)
