"""Real clusters on this machine, and requests to them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock.deployments.client import AsyncClient, ClientError
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.config import EngineConfig
from tests.deployments.waiting import pause_s

# fp32, so that ids do not depend on what else is in the batch
ENGINE = EngineConfig(weights="fp32", device="cpu", num_blocks=600, max_num_seqs=16, threads=1)


@contextlib.contextmanager
def running(config: ServeConfig) -> Iterator[Cluster]:
    """A cluster with a Ray of its own, once all its replicas serve; stopped at the end."""
    cluster = Cluster(config)
    try:
        cluster.start_ray()
        cluster.deploy()
        cluster.wait_until_up(lambda _: None)
        yield cluster
    finally:
        cluster.stop()


def await_view(
    cluster: Cluster, good: Callable[[ClusterView], bool], within_s: float
) -> ClusterView:
    """The registry's view, once it is good. Fails after `within_s`."""
    began_s = time.monotonic()
    while not good(view := cluster.view()):
        waited_s = time.monotonic() - began_s
        assert waited_s < within_s, view
        time.sleep(0.04 + pause_s(waited_s))
    return view


def pids_of(view: ClusterView) -> list[int]:
    """Of all workers, all ingresses and the registry."""
    workers = [info.pid for info, _ in view.workers]
    return [*workers, *(ingress.pid for ingress in view.ingresses), view.pid]


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(3, 2000), k=number % 9 + 3)


async def generate(client: AsyncClient, number: int, max_tokens: int, started: Any = None) -> Any:
    """Token ids of a greedy answer, and the error that ended it early, if one did."""
    ids: list[int] = []
    stream = client.generate(
        prompt(number), temperature=0.0, max_tokens=max_tokens, ignore_eos=True
    )
    try:
        async for piece in stream:
            ids += piece.token_ids
            if started is not None and len(ids) >= 3:
                started.set()
    except ClientError as error:
        return ids, error
    return ids, None
