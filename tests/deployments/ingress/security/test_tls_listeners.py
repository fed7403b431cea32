"""TLS of an ingress: its drain and metrics, and connections that send nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from penstock.deployments.client import AsyncClient
from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.http.listener.protocol import bounded_protocol
from penstock.deployments.ingress.http.listener.tls import TlsServer
from penstock.deployments.ingress.listeners import open_listeners
from penstock.deployments.ingress.metrics.families import of_certificates
from penstock.deployments.ingress.models import IngressModel
from penstock.deployments.security.authority import make_all
from penstock.deployments.security.cluster_links import ClusterCertificate
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.ingress.dispatch.test_pool import CONFIG, Node
from tests.deployments.ports import free_port
from tests.deployments.tls import LOOPS, certificates_of, tls_of
from tests.deployments.waiting import undisturbed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_all(tmp_path / "certs", "test", days=30)
    return tmp_path / "certs"


def test_metrics_show_a_failed_reload_and_the_time_that_is_left(folder: Path):
    certificates = certificates_of(folder)

    def figures() -> dict[str, float]:
        families = of_certificates({"clients": certificates})
        return {each.name: each.samples[0].value for each in families}

    seen = figures()
    assert seen["penstock_cert_reload_failed"] == 0
    assert 29.9 < seen["penstock_cert_expires_seconds"] / 86_400 < 30
    (folder / "server.crt").write_text("none")
    certificates.reload()
    certificates.reload()
    seen = figures()
    assert seen["penstock_cert_reload_failed"] == 1
    assert 29.9 < seen["penstock_cert_expires_seconds"] / 86_400 < 30  # of the one in use


def test_an_ingress_with_tls_serves_and_drains(folder: Path, model: Any, run: Any):
    """The listeners of production, over a worker: what runs ends whole, what has not begun ends."""
    node = Node(model)
    node.thread.start()
    config = ServeConfig(
        engine=CONFIG,
        metrics_port=free_port(),
        http_port=free_port(),
        grpc_port=free_port(),
        tls_cert_file=str(folder / "server.crt"),
        tls_key_file=str(folder / "server.key"),
    )

    async def scenario() -> None:
        pool = WorkerPool("test")
        own = ClusterCertificate(str(folder), "ingress").certificates
        listeners = await open_listeners(
            config, [IngressModel(config, pool)], ClusterView, "ingress", own
        )
        pool.update([node.channel.info])
        async with asyncio.timeout(60):
            while not (pool.ready() and listeners.http.started):
                await asyncio.sleep(0.01)
        tls, body = tls_of(folder), {"model": "builtin", "prompt": "It was", "ignore_eos": True}
        async with httpx.AsyncClient(
            verify=tls.context(), base_url=config.http_url, timeout=60
        ) as client:
            assert (await client.get("/ready")).status_code == 200
            assert listeners.num_connections == 1
            page = await client.get(f"http://127.0.0.1:{config.metrics_port}/metrics")
            for use in ("clients", "cluster"):
                assert f'penstock_cert_reload_failed{{use="{use}"}} 0.0' in page.text
            assert "penstock_http_connections 1.0" in page.text
            target = config.address(config.grpc_port)
            async with AsyncClient(target, credentials=tls.credentials()) as over_grpc:
                assert (await over_grpc.models())[0].name == "builtin"
            silent = await asyncio.open_connection("127.0.0.1", config.http_port)
            answer = asyncio.ensure_future(
                client.post("/v1/completions", json={**body, "max_tokens": 400}, timeout=60)
            )
            while not node.thread.stats().num_running:
                await asyncio.sleep(0.005)
            await asyncio.wait_for(listeners.close(0.0, 60.0), 60)
            usage = (await answer).json()["usage"]
            assert usage["completion_tokens"] == 400
            assert await silent[0].read(1) == b""
            silent[1].close()
            with pytest.raises(httpx.ConnectError):
                await client.get("/live")
        assert listeners.metrics is not None
        await asyncio.to_thread(listeners.metrics.close)
        await pool.close()

    try:
        run(scenario())
    finally:
        node.stop()


async def _scheme(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the scheme of the request."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@contextlib.asynccontextmanager
async def listener_of(
    folder: Path, handshake_s: float
) -> AsyncIterator[tuple[int, Connections, Callable[[], Awaitable[None]]]]:
    """The listener alone, for 8 connections: its port, its connections, and what stops it."""
    connections = Connections(8, 8)
    config = uvicorn.Config(
        _scheme,
        http=bounded_protocol(connections, Counter()),
        ws="none",
        lifespan="off",
        log_config=None,
    )
    context = certificates_of(folder).server_context
    server = TlsServer(config, context, connections, handshake_s=handshake_s)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))

    async def stop() -> None:
        server.should_exit = True
        await asyncio.wait_for(serving, 30)

    try:
        yield listener.getsockname()[1], connections, stop
    finally:
        await stop()


async def _number(connections: Connections, num: int) -> None:
    async with asyncio.timeout(30):
        while connections.num != num:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_silent_connections_end_and_are_counted_before_their_handshake(folder: Path, new_loop: Any):
    context = tls_of(folder).context()  # that takes a moment of the second

    async def scenario() -> None:
        async with listener_of(folder, 1.0) as (port, connections, _):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            await _number(connections, 8)
            async with httpx.AsyncClient(verify=context, timeout=60) as client:
                answer = await client.get(f"https://localhost:{port}/")
                assert answer.text == "https"
            assert connections.num_evicted == 1 and connections.num_refused == 0
            for reader, writer in silent:  # the first had to go for the client, the others in time
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(1), 30) == b""
                writer.close()
            await _number(connections, 0)

    def attempt() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(scenario())

    undisturbed(attempt, 0.3)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_handshake_does_not_hold_up_the_end(folder: Path, new_loop: Any):
    async def scenario() -> None:
        async with listener_of(folder, 600.0) as (port, connections, stop):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await _number(connections, 1)
            await stop()
            assert connections.num == 0
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(1), 30) == b""
            writer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
