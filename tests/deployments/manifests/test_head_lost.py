"""The head of a Ray cluster whose control plane is in Redis dies, and a new one takes over.

Workers and ingresses serve all the while. Ids are those of the same requests, run alone before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deployments.client import AsyncClient
from penstock.deployments.supervision.processes import descendants
from tests.deployments.clusters import generate
from tests.deployments.manifests.local_nodes import APART, LocalNodes, fetch, local_nodes
from tests.deployments.ports import free_port
from tests.deployments.state.servers import RedisServer
from tests.deployments.waiting import eventually

PASSWORD = "of-the-head"
START_S = 240
NUM, NUM_TOKENS = 8, 300
PAUSE_S = 2.0  # between answers: the processes that start need the CPUs, too
DEPLOY = """
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import config_from
cluster = Cluster(config_from({settings}))
cluster.start_ray()
cluster.deploy()
cluster.wait_until_up(lambda _: None)
"""
# For a process of its own: a driver in the test would end with the head.
CONNECTED = """
import ray
ray.init({address!r}, namespace="penstock", log_to_driver=False)
{code}
"""
PIDS = """
from penstock.deployments.supervision.registry import RegistryClient
print("pids:", *sorted(info.pid for info, _ in RegistryClient("penstock").call_now("view").workers))
"""
NUM_NODES = """
print("nodes:", sum(each["Alive"] for each in ray.nodes()))
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


def begin_head(nodes: LocalNodes, redis: RedisServer, folder: str) -> None:
    """The command of docs/operations/cluster.md, with flags that keep the node apart.

    `folder`: Ray's. A new head has one of its own, as a new machine has: Ray does not start a head
    where its folder has the same address, and a raylet of the machine, here the other node's, too.
    """
    nodes.begin(
        f"ray start --head --port={nodes.ports.gcs} --num-cpus=0 --include-dashboard=false "
        f'--redis-password "$(cat ~/redis-password)" --temp-dir={nodes.home / folder} '
        + shlex.join(APART),
        {
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}",
            "RAY_external_storage_namespace": "penstock",
        },
    )


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def seen_by_ray(nodes: LocalNodes, code: str, name: str) -> list[int]:
    """The numbers that `code` prints behind `name`; none while the head does not answer."""
    program = nodes.home / "seen.py"
    program.write_text(CONNECTED.format(address=f"127.0.0.1:{nodes.ports.gcs}", code=code))
    with contextlib.suppress(AssertionError):
        for line in nodes.run(f"timeout 60 {sys.executable} {program}").splitlines():
            if line.startswith(f"{name}: "):
                return [int(each) for each in line.split()[1:]]
    return []


def has_gate(port: int) -> bool:
    """Whether the ingress is connected with the gate."""
    with contextlib.suppress(httpx.HTTPError):
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
        return "\npenstock_gate_connected 1.0\n" in page
    return False


@pytest.mark.timeout(900)
def test_without_a_head_all_serve_on_and_a_new_head_takes_over(nodes, redis):
    http, grpc, metrics = nodes.ports.http, nodes.ports.grpc, free_port()
    url, target = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
    begin_head(nodes, redis, "r")
    nodes.begin(
        f"for i in $(seq 60); do ray start --address=127.0.0.1:{nodes.ports.gcs} --num-cpus=2 "
        f"--resources='{{\"penstock_ingress\": 1}}' {shlex.join(APART)} && break; sleep 1; done",
        {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"},
    )
    settings = {
        **{"ray_address": f"127.0.0.1:{nodes.ports.gcs}", "http_port": http, "grpc_port": grpc},
        **{"metrics_port": metrics, "num_workers": 2, "cpus_per_worker": 0.5, "weights": "fp32"},
        **{"max_num_seqs": 16, "num_blocks": 600, "threads": 1},
    }
    script = nodes.home / "deploy.py"
    script.write_text(DEPLOY.format(settings=settings))
    eventually(lambda: seen_by_ray(nodes, NUM_NODES, "nodes") == [2], START_S, "two nodes")
    nodes.run(f"{sys.executable} {script}")
    eventually(lambda: fetch(f"{url}/ready") == 200, START_S, "a worker")
    eventually(lambda: has_gate(metrics), START_S, "the gate")
    workers = seen_by_ray(nodes, PIDS, "pids")
    assert len(workers) == 2
    head, _ = nodes.processes

    async def answers(*, kills: Sequence[int] = ()) -> list[Any]:
        async with AsyncClient(target) as client:
            streams = [
                asyncio.ensure_future(generate(client, number, NUM_TOKENS)) for number in range(NUM)
            ]
            await asyncio.sleep(0.5 if kills else 0.0)
            kill(kills)
            return await asyncio.gather(*streams)

    alone = asyncio.run(answers())
    assert all(error is None for _, error in alone)
    assert asyncio.run(answers(kills=[head.pid, *descendants(head.pid)])) == alone
    head.wait()
    # No head, so neither gate nor registry: the ingress keeps what it knows.
    assert asyncio.run(answers()) == alone
    assert fetch(f"{url}/ready") == 200 and not has_gate(metrics)

    begin_head(nodes, redis, "r2")
    began_s = time.monotonic()
    while not has_gate(metrics):
        assert time.monotonic() < began_s + START_S, "the gate is not there again"
        assert asyncio.run(answers()) == alone
        assert fetch(f"{url}/ready") == 200
        time.sleep(PAUSE_S)
    print(f"the gate answered {time.monotonic() - began_s:.1f} s after the start of the new head")
    # Registry and controller are there again, and no worker was restarted.
    eventually(lambda: seen_by_ray(nodes, PIDS, "pids") == workers, START_S, "the registry")
    # What is lost is replaced again.
    assert asyncio.run(answers(kills=workers[:1])) == alone
    eventually(
        lambda: len(set(seen_by_ray(nodes, PIDS, "pids")) - set(workers)) == 1,
        START_S,
        "a worker in place of the killed one",
    )
    assert asyncio.run(answers()) == alone
    nodes.processes.remove(head)
