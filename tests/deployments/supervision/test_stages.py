"""Two workers of two pipeline stages, which verify drafts: a stage and a worker are killed.

The oracle is plain decoding: the same requests on the same cluster without drafts and without
faults. Every second request is sampled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from functools import partial
from typing import Any

import pytest

from penstock.deployments.client import AsyncClient
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.clusters import ENGINE, await_view, prompt, running
from tests.deployments.ports import free_port
from tests.deployments.supervision.test_groups import followers, is_whole, lives

NUM, TOKENS = 6, 200


async def answer(client: AsyncClient, number: int, speculate: bool, started: Any) -> list[int]:
    ids: list[int] = []
    stream = client.generate(
        prompt(number), temperature=0.7 * (number % 2), seed=number, max_tokens=TOKENS,
        ignore_eos=True, speculate=speculate,
    )  # fmt: skip
    async for piece in stream:
        ids += piece.token_ids
        if len(ids) >= 3:
            started.set()
    return ids


async def answers(target: str, act: Any, *, speculate: bool) -> list[list[int]]:
    """Of all requests at once; `act` when each of them has begun."""
    async with AsyncClient(target) as client:
        started = [asyncio.Event() for _ in range(NUM)]
        under_way = [
            asyncio.ensure_future(answer(client, n, speculate, started[n])) for n in range(NUM)
        ]
        for event in started:
            await event.wait()
        act()
        async with asyncio.timeout(120):
            return await asyncio.gather(*under_way)


def num_accepted(view: ClusterView) -> int:
    return sum(sum(stats.num_accepted_tokens.values()) for _, stats in view.workers)


def is_whole_without(pid: int, view: ClusterView) -> bool:
    pids = [info.pid for info, _ in view.workers] + [each.pid for each in followers(view)]
    return is_whole(view) and pid not in pids


@pytest.mark.timeout(900)
def test_a_killed_stage_and_a_killed_worker_cost_no_token_of_drafted_answers():
    engine = dataclasses.replace(
        ENGINE, pipeline_parallel_size=2, threads=2, num_blocks=400, speculate="suffix"
    )
    config = ServeConfig(
        engine=engine, http_port=free_port(), grpc_port=free_port(), num_workers=2,
        app_name="penstock-stages", drain_s=5.0, metrics_port=free_port(),
    )  # fmt: skip
    target = f"127.0.0.1:{config.grpc_port}"
    with running(config) as cluster:
        view = await_view(cluster, is_whole, 120)
        seen = followers(view)
        plain = asyncio.run(answers(target, lambda: None, speculate=False))
        assert num_accepted(cluster.view()) == 0
        assert asyncio.run(answers(target, lambda: None, speculate=True)) == plain
        await_view(cluster, lambda view: num_accepted(view) > 0, 60)

        stage = seen[0].pid
        kill = partial(os.kill, stage, signal.SIGKILL)
        assert asyncio.run(answers(target, kill, speculate=True)) == plain
        view = await_view(cluster, partial(is_whole_without, stage), 120)
        seen += followers(view)

        worker = view.workers[0][0].pid
        kill = partial(os.kill, worker, signal.SIGKILL)
        assert asyncio.run(answers(target, kill, speculate=True)) == plain
        seen += followers(await_view(cluster, partial(is_whole_without, worker), 120))
    assert [each for each in seen if lives(each)] == [], "stages outlived the cluster"
