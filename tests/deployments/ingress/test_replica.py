"""How an ingress stops: not ready first, then no new connections, then its running requests end.

And the number by which ingresses scale: HTTP connections and gRPC calls.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.deployments.batch.lease import hold
from penstock.deployments.client import AsyncClient, ClientError
from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress import listeners
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.journal import journals
from penstock.deployments.ingress.listeners import Listeners, open_listeners
from penstock.deployments.ingress.models import IngressModel
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.ingress.dispatch.test_pool import CONFIG, Node
from tests.deployments.ports import free_port
from tests.deployments.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def node(model: Any) -> Iterator[Node]:
    made = Node(model)
    made.thread.start()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _is_idle(node: Node, run: Run) -> None:
    """The worker of all tests, also after one that has failed."""
    run(node.is_idle())


class Ingress:
    """The listeners of an ingress over a pool with one worker, and plain clients of them."""

    def __init__(self, config: ServeConfig, listeners: Listeners, http: httpx.AsyncClient):
        self.listeners, self.http = listeners, http
        self.url = f"http://127.0.0.1:{config.http_port}"
        self.target = f"127.0.0.1:{config.grpc_port}"

    async def complete(self, max_tokens: int) -> httpx.Response:
        body = {"model": "builtin", "prompt": "It was", "max_tokens": max_tokens, "temperature": 0}
        return await self.http.post(f"{self.url}/v1/completions", json=body | {"ignore_eos": True})

    async def new_connection(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as fresh:
            return await fresh.get(self.url + path)

    async def health(self) -> int:
        async with grpc.aio.insecure_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def opened(node: Node, **settings: Any) -> tuple[Ingress, WorkerPool]:
    config = ServeConfig(
        **{"engine": CONFIG, "metrics_port": 0, "drain_s": 30.0, **settings},
        http_port=free_port(),
        grpc_port=free_port(),
    )
    pool = WorkerPool("test")
    models = [IngressModel(config, pool)]
    opened_listeners = await open_listeners(config, models, ClusterView, "ingress")
    pool.update([node.channel.info])
    async with asyncio.timeout(60):
        while not (pool.ready() and opened_listeners.http.started):
            await asyncio.sleep(0.01)
    return Ingress(config, opened_listeners, httpx.AsyncClient(timeout=60)), pool


NOTICE_S = 3.0


class Notice:
    """In place of asyncio in the listeners: the notice lasts until a test ends it."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, for_s: float) -> None:
        await (self.is_over.wait() if for_s == NOTICE_S else asyncio.sleep(for_s))


def test_an_ingress_that_stops_is_not_ready_and_still_serves_then_closes_and_finishes(
    node, run, monkeypatch
):
    step, pause_s, notice = node.engine.step, 0.0, Notice()

    def slow_step():  # so that the long request outlasts the notice
        time.sleep(pause_s)
        return step()

    monkeypatch.setattr(node.engine, "step", slow_step)

    async def scenario():
        nonlocal pause_s
        ingress, pool = await opened(node)
        assert (await ingress.new_connection("/ready")).status_code == 200
        assert await ingress.health() == SERVING
        alone = (await ingress.complete(600)).json()["choices"][0]["text"]
        pause_s = 0.03
        long = asyncio.ensure_future(ingress.complete(600))
        await until(lambda: node.thread.stats().num_running)
        monkeypatch.setattr(listeners, "asyncio", notice)
        closing = asyncio.ensure_future(ingress.listeners.close(NOTICE_S, 60.0))
        await until(lambda: ingress.listeners.core.is_stopping)
        # A load balancer sees it, and what it still sends is served, on new connections as well.
        refusal = await ingress.new_connection("/ready")
        assert refusal.status_code == 503 and "about to stop" in refusal.text
        assert await ingress.health() == NOT_SERVING
        assert (await ingress.new_connection("/live")).status_code == 200
        assert (await ingress.complete(4)).status_code == 200
        notice.is_over.set()
        async with asyncio.timeout(60):
            while True:
                try:
                    await ingress.new_connection("/live")
                except httpx.TransportError:
                    break
                await asyncio.sleep(0.02)
        assert not long.done()
        pause_s = 0.0
        answer = await long
        await asyncio.wait_for(closing, 60)
        await pool.close()
        await ingress.http.aclose()
        return alone, answer

    alone, answer = run(scenario())
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == alone
    assert answer.headers["connection"] == "close"


def test_without_a_notice_new_connections_are_refused_at_once(node, run):
    async def scenario():
        ingress, pool = await opened(node)
        async with asyncio.timeout(20):  # nothing runs: it does not last for drain_s
            await ingress.listeners.close(0.0, 30.0)
        with pytest.raises(httpx.TransportError):
            await ingress.new_connection("/live")
        await pool.close()
        await ingress.http.aclose()

    run(scenario())


def test_a_response_in_the_background_is_waited_for(node, run, monkeypatch):
    step = node.engine.step

    def slow_step():
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(node.engine, "step", slow_step)

    async def scenario():
        ingress, pool = await opened(node)
        before = dict(node.thread.stats().num_finished)
        body = {"model": "builtin", "input": "Hello", "background": True, "max_output_tokens": 100}
        made = await ingress.http.post(
            f"{ingress.url}/v1/responses", json=body | {"ignore_eos": True}
        )
        assert made.status_code == 200, made.text
        await until(lambda: node.thread.stats().num_running)
        await ingress.listeners.close(0.0, 60.0)
        assert ingress.listeners.core.num_running == 0
        after = node.thread.stats().num_finished
        assert {k: after[k] - before[k] for k in after if after[k] != before[k]} == {"length": 1}
        await pool.close()
        await ingress.http.aclose()

    run(scenario())


def test_a_response_in_the_background_may_last_no_longer_than_the_drain(node, run):
    async def scenario():
        ingress, pool = await opened(node)
        body = {"model": "builtin", "input": "Hello", "background": True, "ignore_eos": True}
        await ingress.http.post(f"{ingress.url}/v1/responses", json=body)
        await until(lambda: ingress.listeners.core.num_running)
        began_s = time.monotonic()
        await ingress.listeners.close(0.0, 0.0)
        assert time.monotonic() - began_s < 10.0
        await pool.close()
        await ingress.http.aclose()
        await node.is_idle()

    run(scenario())


def test_batches_are_handed_over_before_an_ingress_ends(node, run, tmp_path):
    async def scenario():
        ingress, pool = await opened(node, data_dir=str(tmp_path))
        lease = tmp_path / "executor.lease"
        await until(lease.exists)
        await ingress.listeners.close(0.0, 30.0)
        async with asyncio.timeout(15):  # without waiting for an owner that is silent: 20 s
            async with hold(lease, tmp_path / "executor.lock", waits=False):
                pass
        await pool.close()
        await ingress.http.aclose()

    run(scenario())


@pytest.mark.parametrize("has_store", [True, False])
def test_a_stream_that_ends_with_its_ingress_says_whether_it_can_be_continued(
    node, run, monkeypatch, tmp_path, has_store
):
    step = node.engine.step

    def slow_step():  # so that no stream has ended before
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(node.engine, "step", slow_step)
    monkeypatch.setattr(journals, "BEGIN_BUDGET_S", 20.0)  # of a disk that others use
    tmp_path.chmod(0o700)
    state_url = f"sqlite://{tmp_path}" if has_store else None
    body = {"prompt": "It was", "max_tokens": 450, "ignore_eos": True, "stream": True}

    async def scenario():
        ingress, pool = await opened(node, state_url=state_url)
        async with (
            AsyncClient(ingress.target, resume_s=0.0) as client,
            ingress.http.stream("POST", f"{ingress.url}/v1/completions", json=body) as stream,
        ):
            lines = stream.aiter_lines()
            first = await anext(lines)
            pieces = client.generate("It was", max_tokens=450, ignore_eos=True)
            await anext(pieces)
            whole = asyncio.ensure_future(ingress.complete(450))
            await until(lambda: node.channel.num_requests == 3)
            ingress.listeners.core.is_stopping = True  # as Listeners.close does
            await pool.close()
            errors = [json.loads(line[6:]) async for line in lines if '"error"' in line]
            with pytest.raises(ClientError) as raised:
                async for _ in pieces:
                    pass
            unary = (await whole).json()
        await ingress.listeners.close(0.0, 0.0)
        await ingress.http.aclose()
        return first, stream.headers, errors, raised.value, unary

    first, headers, [event], error, unary = run(scenario())
    assert headers["x-penstock-resumable"] == ("1" if has_store else "0")
    message = event["error"]["message"]
    assert event["error"]["code"] == unary["error"]["code"] == error.code == "worker_lost"
    if has_store:
        assert first.startswith("id: ")
        assert f"/v1/penstock/streams/{headers['x-request-id']} with" in message
        assert "Last-Event-ID" in message and "ResumeGenerate" in str(error)
        assert "cannot be continued" in unary["error"]["message"]
    else:
        for said in (message, str(error), unary["error"]["message"]):
            assert "no state store is configured (the setting state_url)" in said


def test_connections_are_those_of_http_and_the_calls_of_grpc(node, run, monkeypatch):
    step = node.engine.step

    def slow_step():  # so that no stream ends before the client closes it
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(node.engine, "step", slow_step)

    async def scenario():
        ingress, pool = await opened(node)
        own = ingress.listeners
        assert own.num_connections == 0
        async with AsyncClient(ingress.target) as client:

            async def stream() -> None:
                async for _ in client.generate([5, 9, 11], max_tokens=400, ignore_eos=True):
                    pass

            streams = [asyncio.ensure_future(stream()) for _ in range(5)]
            await until(lambda: own.num_connections == 5)  # over one connection
            await ingress.complete(1)  # leaves an idle connection
            num = own.num_connections
            for each in streams[:2]:
                each.cancel()
            await until(lambda: own.num_connections == 4)
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await until(lambda: own.num_connections == 1)
            with pytest.raises(ClientError):  # a refused call is no longer counted either
                await client.complete([1], max_tokens=-1)
            await until(lambda: own.num_connections == 1)
        await ingress.http.aclose()
        await until(lambda: own.num_connections == 0)
        await own.close(0.0, 30.0)
        await pool.close()
        return num

    assert run(scenario()) == 6
