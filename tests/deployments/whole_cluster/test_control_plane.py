"""Serve's controller and the registry, killed and stopped under load: streams keep their ids.

Neither is on the path of a token. Ids are those of the same requests, run alone before. And what a
program of a user may ask of this cluster's Ray does not end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import ray
from ray.exceptions import RuntimeEnvSetupError

from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.processes import descendants
from tests.deployments.clusters import await_view, generate
from tests.deployments.waiting import eventually

NUM = 8  # streams at once
NUM_TOKENS = 150
AWAY_S = 8.0  # longer than a heartbeat is valid, and several checks of health


@pytest.fixture(scope="module")
def alone(cluster: Cluster, config: ServeConfig) -> list[list[int]]:
    async def scenario() -> list[list[int]]:
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            return [(await generate(client, number, NUM_TOKENS))[0] for number in range(NUM)]

    return asyncio.run(scenario())


def pid_of(title: bytes) -> int | None:
    """The process of this cluster with that title; Ray gives each actor's process one."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if title in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("title", [b"ray::ServeController", b"ray::Registry"])
def test_streams_do_not_notice(cluster, config, alone, title, number):
    before = await_view(cluster, lambda view: len(view.workers) == 2, 120)
    # An attempt before this one may have killed it.
    eventually(lambda: pid_of(title) is not None, 120, f"a process {title!r}")
    pid = pid_of(title)
    assert pid is not None, title

    async def load(client: AsyncClient, first: int, until_s: float) -> int:
        num = 0
        while time.monotonic() < until_s:
            ids, error = await generate(client, first, NUM_TOKENS)
            assert (ids, error) == (alone[first], None)
            num += 1
        return num

    async def scenario() -> list[int]:
        until_s = time.monotonic() + 1.0 + AWAY_S
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            streams = [asyncio.ensure_future(load(client, n, until_s)) for n in range(NUM)]
            await asyncio.sleep(1.0)
            os.kill(pid, number)
            return await asyncio.gather(*streams)

    try:
        counts = asyncio.run(scenario())
    finally:
        if number is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert min(counts) >= 1

    def is_back(view) -> bool:
        return [each.num_workers for each in view.ingresses] == [2] and len(view.workers) == 2

    after = await_view(cluster, is_back, 120)
    epochs = [sorted(info.epoch for info, _ in view.workers) for view in (before, after)]
    assert epochs[0] == epochs[1]  # no worker was restarted for it
    if number is signal.SIGKILL:
        eventually(lambda: pid_of(title) not in (None, pid), 120, "another process")


def test_programs_get_variables_and_are_refused_other_environments(cluster):
    """Without an answer the raylet would end within 30 s, and all processes with it."""
    before = await_view(cluster, lambda view: len(view.workers) == 2, 120)

    @ray.remote(num_cpus=0)
    def variable() -> str | None:
        return os.environ.get("PENSTOCK_TEST")

    with_variable = variable.options(runtime_env={"env_vars": {"PENSTOCK_TEST": "a b"}})
    assert ray.get(with_variable.remote(), timeout=120) == "a b"
    wanting = variable.options(runtime_env={"conda": "an-environment"})
    with pytest.raises(RuntimeEnvSetupError, match="penstock serve --ray-address auto"):
        ray.get(wanting.remote(), timeout=120)
    after = cluster.view()
    assert {info.pid for info, _ in after.workers} == {info.pid for info, _ in before.workers}
