"""The number of workers follows the load, on a real Ray cluster, and no request fails by it.

Ids are those of the same requests, run alone on the same cluster before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.deployments import app
from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.workers.config import EngineConfig
from tests.deployments.clusters import await_view, running
from tests.deployments.ports import free_port

# fp32, so that ids do not depend on what else is in the batch; few slots, so that requests wait
ENGINE = EngineConfig(weights="fp32", device="cpu", num_blocks=600, max_num_seqs=4, threads=1)
NUM_CYCLES = 3
NUM_REQUESTS = 36  # at once: far more than one worker has slots for
NUM_PROMPTS = 12
MAX_TOKENS = 80
CYCLE_S = 300.0  # two processes load torch, beside whatever else the machine does
# While workers start, few requests come, and leave the CPUs to them for most of the time.
GROUP = 4
PAUSE_S = 0.5  # between groups: they come in every interval of which the policy takes the load


@contextlib.contextmanager
def deployed(num_workers: str) -> Iterator[tuple[Cluster, ServeConfig]]:
    """A cluster on this machine, whose policy removes workers within seconds."""
    config = ServeConfig(
        engine=ENGINE,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers=num_workers,
        cpus_per_worker=0.5,
        app_name="penstock-scaling",
        drain_s=30.0,
        target_wait_s=1.0,
        scale_down_after_s=2.0,
    )
    scale_of: Any = app.worker_scale

    def with_short_windows(*args: Any) -> dict[str, Any]:
        options = scale_of(*args)
        options["autoscaling_config"]["policy"]["policy_kwargs"] |= {
            # So little of a worker is planned with that any load wants three: also the few requests
            # that come while they start, which cancel no order and leave the CPUs to them.
            "usable": 0.002,
            "down_window_starts": 0.0,
            "max_down_window_s": 2.0,  # does not learn that this load keeps coming back
            "quantile": 0.5,
            "forecast": {"level_s": 2.0, "slope_s": 4.0, "damping_s": 4.0},
        }
        return options

    with pytest.MonkeyPatch.context() as patch:  # the driver binds the options and sends them
        patch.setattr(app, "worker_scale", with_short_windows)
        with running(config) as cluster:
            yield cluster, config


def prompt(number: int) -> list[int]:
    return [5 + number, 9, 11 + number % 3]


async def answer(client: AsyncClient, number: int) -> list[int]:
    """Token ids of a greedy answer. Raises ClientError."""
    return [
        token
        async for piece in client.generate(
            prompt(number), temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True
        )
        for token in piece.token_ids
    ]


async def answers_alone(config: ServeConfig) -> list[list[int]]:
    async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
        return [await answer(client, number) for number in range(NUM_PROMPTS)]


async def load_until_three(
    cluster: Cluster, config: ServeConfig, alone: list[list[int]]
) -> tuple[int, int]:
    """The most workers that served, and the requests answered: NUM_REQUESTS at once, then a few
    until there are three workers, then NUM_REQUESTS at once for these."""
    deadline_s, most, num = time.monotonic() + CYCLE_S, 1, 0

    async def ask(client: AsyncClient, number: int) -> None:
        nonlocal num
        assert await answer(client, number % NUM_PROMPTS) == alone[number % NUM_PROMPTS]
        num += 1

    async def ask_at_once(client: AsyncClient, count: int) -> None:
        await asyncio.gather(*(ask(client, num + each) for each in range(count)))

    async def load(client: AsyncClient) -> None:
        await ask_at_once(client, NUM_REQUESTS)
        while most < 3 and time.monotonic() < deadline_s:
            await ask_at_once(client, GROUP)
            await asyncio.sleep(PAUSE_S)
        await ask_at_once(client, NUM_REQUESTS)

    async def watch() -> None:
        nonlocal most
        while most < 3 and time.monotonic() < deadline_s:
            view = await asyncio.to_thread(cluster.view)
            most = max(most, sum(not info.is_draining for info, _ in view.workers))
            await asyncio.sleep(0.2)

    async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
        await asyncio.gather(watch(), load(client))
    return most, num


@pytest.mark.timeout(1800)  # processes start three times over
def test_one_worker_becomes_three_and_one_again_three_times():
    with deployed("1:3") as (cluster, config):
        alone = asyncio.run(answers_alone(config))
        for _ in range(NUM_CYCLES):
            await_view(cluster, lambda view: len(view.workers) == 1, 120)
            most, num = asyncio.run(load_until_three(cluster, config, alone))
            assert most == 3, cluster.view().scale_changes
            assert num >= 2 * NUM_REQUESTS
        view = await_view(cluster, lambda view: len(view.workers) == 1, 120)
    numbers = [each.number for each in view.scale_changes if each.deployment == "Worker"]
    assert max(numbers) == 3 and numbers[-1] == 1
    assert all(each.reason for each in view.scale_changes)
    assert view.num_failures == 0
