"""A real cluster whose workers go to zero and come back for the requests that wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.workers.config import EngineConfig
from tests.deployments.clusters import await_view, generate, running
from tests.deployments.ports import free_port

ENGINE = EngineConfig(weights="fp32", device="cpu", num_blocks=300, max_num_seqs=16, threads=1)


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    return ServeConfig(
        engine=ENGINE,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers="0:1",
        app_name="penstock-zero",
        drain_s=30.0,
        gate_answer_ms=20_000.0,  # a machine that stands still takes no request past the gate
        scale_down_after_s=1.0,
        scale_to_zero_after_s=3.0,
    )


@pytest.fixture(scope="module")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with running(config) as cluster:
        yield cluster


@pytest.mark.timeout(900)  # processes start three times
def test_requests_wait_for_a_worker_and_after_it_was_given_back_for_the_next(cluster, config):
    url = f"http://127.0.0.1:{config.http_port}"

    async def round() -> list[Any]:
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            asked = [asyncio.ensure_future(generate(client, n, 40)) for n in range(6)]
            async with httpx.AsyncClient(base_url=url, timeout=120) as http:
                body = {"prompt": "It was", "max_tokens": 8, "temperature": 0}
                answer = await http.post("/v1/completions", json=body)
            return [*await asyncio.gather(*asked), (answer.status_code, answer.text[:0])]

    def queue() -> dict[str, Any]:
        return dict(httpx.get(f"{url}/v1/penstock/queue", timeout=30).json())

    deadline_s = time.monotonic() + 120
    while httpx.get(f"{url}/ready", timeout=30).status_code != 200:  # the gate is connected
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    answers, num_fallback = [], queue()["num_fallback"]
    for _ in range(2):
        # Idle for three times as long as the worker took to start, which is long on a busy machine.
        await_view(cluster, lambda view: not view.workers, 240)
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
        answers.append(asyncio.run(round()))
        await_view(cluster, lambda view: len(view.workers) == 1, 60)
    for each in answers:
        *streams, (status, _) = each
        assert status == 200
        assert [(len(ids), error) for ids, error in streams] == [(40, None)] * 6
    assert answers[0] == answers[1]
    assert queue()["num_fallback"] == num_fallback  # not 0, where an attempt before had some
