"""The head of a Ray cluster whose control plane is in Redis dies: workers and ingresses serve on.

Ids are those of the same requests, run alone before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.deployments.client import AsyncClient
from penstock.deployments.supervision.processes import descendants
from tests.deployments.clusters import generate
from tests.deployments.manifests.local_nodes import APART, LocalNodes, fetch, local_nodes
from tests.deployments.state.servers import RedisServer
from tests.deployments.waiting import eventually

PASSWORD = "of-the-head"
START_S = 240
NUM, NUM_TOKENS = 8, 300
DEPLOY = """
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import config_from
cluster = Cluster(config_from({settings}))
cluster.start_ray()
cluster.deploy()
cluster.wait_until_up(lambda _: None)
"""


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), "--requirepass", PASSWORD).start()
        yield server
        server.kill()


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    folder = tempfile.TemporaryDirectory(prefix="ph-", ignore_cleanup_errors=True)
    with folder as home, local_nodes(Path(home)) as nodes:
        (nodes.home / "redis-password").write_text(PASSWORD + "\n")
        yield nodes


def begin_head(nodes: LocalNodes, redis: RedisServer) -> None:
    """The command of docs/operations/cluster.md, with flags that keep the node apart."""
    nodes.begin(
        f"ray start --head --port={nodes.ports.gcs} --num-cpus=0 --include-dashboard=false "
        f'--redis-password "$(cat ~/redis-password)" --temp-dir={nodes.home / "r"} '
        + shlex.join(APART),
        {
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}",
            "RAY_external_storage_namespace": "penstock",
        },
    )


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(900)
def test_workers_and_ingresses_serve_without_a_head(nodes, redis):
    http, grpc = nodes.ports.http, nodes.ports.grpc
    url, target = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
    begin_head(nodes, redis)
    nodes.begin(
        f"for i in $(seq 60); do ray start --address=127.0.0.1:{nodes.ports.gcs} --num-cpus=2 "
        f"--resources='{{\"penstock_ingress\": 1}}' {shlex.join(APART)} && break; sleep 1; done",
        {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"},
    )
    settings = {
        **{"ray_address": f"127.0.0.1:{nodes.ports.gcs}", "http_port": http, "grpc_port": grpc},
        **{"metrics_port": 0, "num_workers": 2, "cpus_per_worker": 0.5, "weights": "fp32"},
        **{"max_num_seqs": 16, "num_blocks": 600},
    }
    script = nodes.home / "deploy.py"
    script.write_text(DEPLOY.format(settings=settings))
    eventually(lambda: _has_two_nodes(nodes), START_S, "two nodes")
    nodes.run(f"{sys.executable} {script}")
    eventually(lambda: fetch(f"{url}/ready") == 200, START_S, "a worker")
    head, _ = nodes.processes

    async def answers(*, kills: bool = False) -> list[Any]:
        async with AsyncClient(target) as client:
            streams = [
                asyncio.ensure_future(generate(client, number, NUM_TOKENS)) for number in range(NUM)
            ]
            if kills:
                await asyncio.sleep(0.5)
                kill([head.pid, *descendants(head.pid)])
            return await asyncio.gather(*streams)

    alone = asyncio.run(answers())
    assert all(error is None for _, error in alone)
    assert asyncio.run(answers(kills=True)) == alone
    head.wait()
    # No head, so neither gate nor registry: the ingress keeps what it knows.
    assert asyncio.run(answers()) == alone
    assert fetch(f"{url}/ready") == 200

    nodes.processes.remove(head)


def _has_two_nodes(nodes: LocalNodes) -> bool:
    """By a process of its own: a driver here would end with the head."""
    count = (
        f"import ray; ray.init('127.0.0.1:{nodes.ports.gcs}', log_to_driver=False); "
        "print('nodes:', sum(each['Alive'] for each in ray.nodes()))"
    )
    try:
        return "nodes: 2\n" in nodes.run(f'{sys.executable} -c "{count}"')
    except AssertionError:
        return False
