"""Requests to a cluster of several nodes by clients with connections of their own, and updates.

Ids are compared with those of the same requests, run alone before.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.deployments.client import ClientError
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.clusters import await_view, prompt
from tests.deployments.nodes import ClientOfOneConnection, within

NUM = 24  # prompts, and requests at once
NUM_CLIENTS = 4  # during an update
PAUSE_S = 0.6  # of a client between two: the replicas that start need the CPUs, too
UPDATE_S = 240.0
LISTED_S = 30.0  # after its last heartbeat the registry lists a replica for 3 s
Ended = tuple[int, list[int], Any]  # number of the prompt, ids, and the error if there was one


async def answer(
    target: str, number: int, max_tokens: int, model: str = ""
) -> tuple[list[int], Any]:
    """Token ids of a greedy answer, and the error that ended it early, if one did. `model`: its
    name, where that is not the only one."""
    ids: list[int] = []
    try:
        async with ClientOfOneConnection(target, model=model) as client:
            async for piece in client.generate(
                prompt(number), temperature=0.0, max_tokens=max_tokens, ignore_eos=True
            ):
                ids += piece.token_ids
    except ClientError as error:
        return ids, error
    return ids, None


def answers(
    config: ServeConfig, num: int, max_tokens: int, model: str = ""
) -> list[tuple[list[int], Any]]:
    """Of `num` requests at once."""

    async def scenario() -> list[tuple[list[int], Any]]:
        target = f"127.0.0.1:{config.grpc_port}"
        return await asyncio.gather(*(answer(target, n, max_tokens, model) for n in range(num)))

    return asyncio.run(scenario())


def updated_under_load(
    cluster: Cluster,
    before: ServeConfig,
    after: ServeConfig,
    max_tokens: int = 60,
    pause_s: float = PAUSE_S,
) -> list[Ended]:
    """Deploy `after`, with requests until it is up: then no replica of `before` is left. `pause_s`:
    of a client between two requests."""
    first = cluster.view()
    updated = Cluster(after)
    updated.deploy()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(updated.wait_until_up, within(UPDATE_S))

        async def load() -> list[Ended]:
            target = f"127.0.0.1:{before.grpc_port}"
            ended: list[Ended] = []

            async def one_after_another(first: int) -> None:
                number = first
                while not waiting.done():
                    ended.append((number % NUM, *await answer(target, number % NUM, max_tokens)))
                    number += NUM_CLIENTS
                    await asyncio.sleep(pause_s)

            await asyncio.gather(*(one_after_another(n) for n in range(NUM_CLIENTS)))
            return ended

        ended = asyncio.run(load())
        waiting.result()
    old = {each.epoch for each, _ in first.workers}, {each.ingress_id for each in first.ingresses}

    def has_none_of_before(view: ClusterView) -> bool:
        workers = {each.epoch for each, _ in view.workers}
        ingresses = {each.ingress_id for each in view.ingresses}
        return not (workers & old[0] or ingresses & old[1])

    await_view(cluster, has_none_of_before, LISTED_S)
    return ended
