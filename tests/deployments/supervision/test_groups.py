"""Workers that are groups of two processes: one rank is killed, one is stopped, nothing is lost.

The oracle is the same request on the same cluster before. A group is one worker to its cluster, and
comes back whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from functools import partial

import psutil
import pytest

from penstock.deployments.client import AsyncClient
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.clusters import ENGINE, await_view, generate, running
from tests.deployments.ports import free_port

NUM, TOKENS = 6, 200


def followers(view: ClusterView) -> list[psutil.Process]:
    """The other ranks of all workers; none of a worker that has ended, which is listed for some
    seconds."""
    found = []
    for info, _ in view.workers:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [
                child
                for child in psutil.Process(info.pid).children()
                if "penstock.workers.engine.group.follower" in child.cmdline()
            ]
    return found


def first_ranks(view: ClusterView) -> list[psutil.Process]:
    return [psutil.Process(info.pid) for info, _ in view.workers]


def is_whole(view: ClusterView) -> bool:
    reach = [ingress.num_workers for ingress in view.ingresses]
    return len(view.workers) == 2 and reach == [2] and len(followers(view)) == 2


def is_whole_without(victim: psutil.Process, view: ClusterView) -> bool:
    return is_whole(view) and victim not in (*followers(view), *first_ranks(view))


def lives(process: psutil.Process) -> bool:
    """Orphans come to this process, which need not ask how they ended."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.timeout(900)  # 280 for three kills, on a busy machine
def test_a_rank_that_dies_or_hangs_costs_no_token():
    engine = dataclasses.replace(ENGINE, tensor_parallel_size=2, threads=2, num_blocks=400)
    config = ServeConfig(
        engine=engine, http_port=free_port(), grpc_port=free_port(), num_workers=2,
        app_name="penstock-groups", drain_s=5.0, metrics_port=free_port(),
    )  # fmt: skip

    async def answers(act):
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            started = [asyncio.Event() for _ in range(NUM)]
            running = [
                asyncio.ensure_future(generate(client, n, TOKENS, started[n])) for n in range(NUM)
            ]
            for event in started:
                await event.wait()
            act()
            async with asyncio.timeout(120):
                return await asyncio.gather(*running)

    with running(config) as cluster:
        alone = asyncio.run(answers(lambda: None))
        assert all(error is None and len(ids) == TOKENS for ids, error in alone)
        seen = []
        for number, of in (
            (signal.SIGKILL, followers),
            (signal.SIGKILL, first_ranks),
            (signal.SIGSTOP, followers),
            (signal.SIGSTOP, first_ranks),
        ):
            view = await_view(cluster, is_whole, 120)
            seen += followers(view)
            victim = of(view)[0]
            assert asyncio.run(answers(partial(os.kill, victim.pid, number))) == alone
            await_view(cluster, partial(is_whole_without, victim), 120)
        seen += followers(cluster.view())
    assert [each for each in seen if lives(each)] == [], "ranks outlived the cluster"
