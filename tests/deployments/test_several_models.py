"""A whole cluster with two models: the loss of one model's worker is nothing to the other.

Each oracle is the same request run alone on the same cluster, before anything was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
import ray

from benchmarks.cluster.startup import role_of
from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.supervision.actors import NAMESPACE
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.clusters import await_view, generate, running
from tests.deployments.ports import free_port

DENSE, MOE = "builtin", "builtin-moe"


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    return config_from(
        {
            "models": [{"model": DENSE}, {"model": MOE, "served_model_name": [MOE, "*"]}],
            **{"weights": "fp32", "device": "cpu", "num_blocks": 400, "threads": 1},
            **{"http_port": free_port(), "grpc_port": free_port(), "metrics_port": free_port()},
            **{"app_name": "penstock-two", "drain_s": 5.0, "lost_wait_s": 120.0},
        }
    )


@pytest.fixture(scope="module")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with running(config) as cluster:
        yield cluster


def is_whole(view: ClusterView) -> bool:
    """One worker of each model, and the ingress has both; one that was killed is listed on."""
    reached = [ingress.workers_of for ingress in view.ingresses]
    return len(view.workers) == 2 and reached == [((DENSE, 1), (MOE, 1))]


def page_of(config: ServeConfig) -> str:
    return httpx.get(f"http://127.0.0.1:{config.metrics_port}/metrics").text


def pid_of(view: ClusterView, model: str) -> int:
    (pid,) = (info.pid for info, _ in view.workers if info.model == model)
    return pid


def test_each_model_has_its_worker_and_its_gate(cluster, config):
    view = await_view(cluster, is_whole, 60)
    assert {info.model for info, _ in view.workers} == {DENSE, MOE}
    gates = {
        ray.get(ray.get_actor(f"penstock-two:{each}-gate", namespace=NAMESPACE).pid.remote())
        for each in (DENSE, MOE)
    }
    assert len(gates) == 2
    connected = {f'penstock_gate_connected{{model_name="{each}"}} 1.0' for each in (DENSE, MOE)}
    began_s = time.monotonic()
    while not connected <= {*page_of(config).splitlines()}:
        assert time.monotonic() - began_s < 60, page_of(config)
        time.sleep(0.1)


def num_continued(config) -> list[float]:
    """Requests of DENSE and of MOE that continued on another worker, so far."""
    page = httpx.get(f"http://127.0.0.1:{config.metrics_port}/metrics").text
    found = dict(
        re.findall(r'^penstock_requests_continued_total{model_name="(.+)"} (.+)$', page, re.M)
    )
    return [float(found.get(name, 0)) for name in (DENSE, MOE)]


@contextlib.contextmanager
def no_new_worker(forks: psutil.Process) -> Iterator[None]:
    """Meanwhile no worker starts: `forks`, of which they are forked, stands still."""
    assert role_of(" ".join(forks.cmdline())) == "fork server"
    forks.suspend()
    try:
        yield
    finally:
        forks.resume()


def test_a_killed_worker_of_one_model_delays_its_own_requests_alone(cluster, config, run):
    before = await_view(cluster, is_whole, 60)
    continued = num_continued(config)
    url = f"http://127.0.0.1:{config.http_port}"

    async def scenario():
        target = f"127.0.0.1:{config.grpc_port}"
        async with AsyncClient(target) as dense, AsyncClient(target, model=MOE) as moe:
            alone = [(await generate(client, 3, 200))[0] for client in (dense, moe)]
            started = [asyncio.Event(), asyncio.Event()]
            answers = [
                asyncio.ensure_future(generate(client, 3, 200, event))
                for client, event in zip((dense, moe), started, strict=True)
            ]
            for event in started:
                await event.wait()
            lost = psutil.Process(pid_of(before, MOE))
            forks = psutil.Process(lost.ppid())
            async with asyncio.timeout(120):
                with no_new_worker(forks):
                    lost.kill()
                    # Where others use the machine, the kernel takes a while to end a process.
                    while httpx.get(f"{url}/ready").json().get("models_without_worker") != MOE:
                        await asyncio.sleep(0.02)
                    # Its own model's requests wait for the worker that replaces the lost one; the
                    # other model's are answered meanwhile.
                    assert await answers[0] == (alone[0], None)
                    assert await generate(dense, 3, 200) == (alone[0], None)
                    assert not answers[1].done()
                assert await answers[1] == (alone[1], None)
            return alone

    alone = run(scenario())
    assert alone[0] != alone[1]
    after = await_view(cluster, is_whole, 60)
    assert pid_of(after, DENSE) == pid_of(before, DENSE)
    assert pid_of(after, MOE) != pid_of(before, MOE)
    assert httpx.get(f"{url}/ready").json() == {"status": "ok"}
    added = [now - then for then, now in zip(continued, num_continued(config), strict=True)]
    assert added == [0, 1]
