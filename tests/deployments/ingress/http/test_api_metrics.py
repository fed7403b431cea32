"""/metrics, /ping and /load on the port of the API: by option, and with the role metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from penstock.deployments.config import config_from
from penstock.deployments.ingress.core.request_metrics import RequestMetrics
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.listeners import open_listeners
from penstock.deployments.ingress.metrics.collector import PenstockCollector
from penstock.deployments.ingress.metrics.server import MetricsPage
from penstock.deployments.ingress.models import IngressModel
from penstock.deployments.security.roles import Role
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.request import FinishReason
from tests.deployments.ports import free_port
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import HeldBackend, Serving, scripted

PATHS = ("/metrics", "/ping", "/load")
COMPLETION = {"prompt": "Hello", "max_tokens": 4}


def test_without_the_option_they_do_not_exist() -> None:
    with scripted([5], FinishReason.STOP) as (_, plain):
        assert [plain.get(path).status_code for path in PATHS] == [404] * 3
        message = plain.get("/metrics").json()["error"]["message"]
        assert "metrics_port" in message and "api_metrics" in message


def test_keys_need_the_role_metrics_and_probes_need_none() -> None:
    watcher, watching = key_of(roles=[Role.METRICS])
    client, asking = key_of(roles=[Role.INFER])
    with scripted(api_keys=[watching, asking], metrics=lambda: b"a 1\n") as (_, plain):
        for path in ("/metrics", "/load"):
            assert plain.get(path).status_code == 401
            assert plain.get(path, headers=bearer(client)).status_code == 403
            assert plain.get(path, headers=bearer(watcher)).status_code == 200
        assert plain.get("/ping").status_code == 200
        page = plain.get("/metrics", headers=bearer(watcher))
        assert (page.text, page.headers["content-type"]) == ("a 1\n", CONTENT_TYPE_PLAIN_0_0_4)


def test_a_ping_says_what_ready_says() -> None:
    with scripted(metrics=lambda: b"") as (servers, plain):
        assert plain.get("/ping").json() == plain.get("/ready").json() == {"status": "ok"}
        servers.backend.is_ready = False
        assert plain.get("/ping").status_code == plain.get("/ready").status_code == 503
        servers.backend.is_ready = True
        servers.core.is_stopping = True
        assert plain.get("/ping").status_code == 503


def test_the_load_is_what_is_open() -> None:
    backend = HeldBackend([5], FinishReason.STOP)

    async def scenario(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            loads = [(await client.get("/load")).json()["server_load"]]
            answers = [
                asyncio.ensure_future(client.post("/v1/completions", json=COMPLETION))
                for _ in range(3)
            ]
            while (load := (await client.get("/load")).json()["server_load"]) < 3:
                await asyncio.sleep(0.01)
            loads.append(load)
            backend.may_answer.set()
            for answer in answers:
                assert (await answer).status_code == 200
            loads.append((await client.get("/load")).json()["server_load"])
            return loads

    with Serving(backend, metrics=lambda: b"") as servers:
        assert asyncio.run(scenario(servers.base_url)) == [0, 3, 0]


def test_the_page_is_the_one_of_the_metrics_port() -> None:
    page = MetricsPage(PenstockCollector(RequestMetrics("m", 9), tuple))
    with scripted(metrics=page.text) as (_, plain):
        names = {each.name for each in text_string_to_metric_families(plain.get("/metrics").text)}
    assert "vllm:time_to_first_token_seconds" in names


def test_an_ingress_serves_them_without_a_metrics_port(tmp_path: Path, run: Any) -> None:
    """The listeners of production, with both options of this port."""
    page_of_others = "https://app.example.com"
    config = config_from(
        {
            "http_port": free_port(),
            "grpc_port": free_port(),
            "metrics_port": 0,
            "api_metrics": True,
            "allowed_origins": page_of_others,
        }
    )

    async def scenario() -> None:
        pool = WorkerPool("test")
        listeners = await open_listeners(
            config, [IngressModel(config, pool)], ClusterView, "ingress"
        )
        while not listeners.http.started:
            await asyncio.sleep(0.01)
        headers = {"origin": page_of_others}
        async with httpx.AsyncClient(base_url=config.http_url, headers=headers) as client:
            page = await client.get("/metrics")
            assert page.headers["access-control-allow-origin"] == page_of_others
            assert "penstock_http_connections 1.0" in page.text
            assert (await client.get("/ping")).status_code == 503  # there is no worker
            other = await client.get("/load", headers={"origin": "https://evil.example"})
            assert other.status_code == 421
        await listeners.close(0.0, 5.0)
        await pool.close()

    run(scenario())
