"""A worker that cannot get its experts: its requests continue on others, and it gets few new ones.

tests/deployments/experts/test_hung_store.py does the same with a real store; here the engine raises
what a step without experts raises.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.deployments.ingress.dispatch import pool as worker_pool
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.workers.errors import StoreUnavailable
from penstock.workers.request import STORE_UNAVAILABLE, FinishReason
from tests.deployments.ingress.dispatch.test_pool import Node, alone, collect, pool_of, request
from tests.deployments.waiting import until


@pytest.fixture
def store_is_away(nodes, monkeypatch) -> dict[str, bool]:
    """{"is": True} from then on the first node has no store."""
    away, launch = {"is": False}, nodes[0].engine.executor.launch

    def launch_or_fail(*args: Any) -> Any:
        if away["is"]:
            raise StoreUnavailable("the expert store does not answer")
        return launch(*args)

    monkeypatch.setattr(nodes[0].engine.executor, "launch", launch_or_fail)
    return away


async def both(pool: WorkerPool, nodes: list[Node]) -> None:
    pool.update([node.channel.info for node in nodes])
    await until(lambda: pool.num_connected == 2, 60)


def test_its_requests_continue_on_a_worker_that_has_experts(model, nodes, run, store_is_away):
    nodes[0].slow_down()
    submitted = [request(n, 300, seed=n, temperature=0.8) for n in range(4)]

    async def scenario() -> tuple[list[Any], int]:
        async with pool_of(nodes[0]) as pool:
            begun: set[str] = set()
            running = [asyncio.ensure_future(collect(pool, each, begun)) for each in submitted]
            await until(lambda: len(begun) == 4, 60)
            await both(pool, nodes)
            store_is_away["is"] = True
            # New ones find the worker that failed empty, and are not sent there for that.
            await until(lambda: next(iter(pool._links.values())).lacks_experts, 60)
            num_failed = nodes[0].engine.totals.num_finished["error"]
            late = await asyncio.gather(*(collect(pool, request(n)) for n in range(10, 14)))
            assert nodes[0].engine.totals.num_finished["error"] == num_failed
            got = await asyncio.gather(*running)
            return [*got, *late], pool.lost_requests.num_continued

    got, num_continued = run(scenario())
    submitted += [request(n) for n in range(10, 14)]
    assert [ids for ids, _ in got] == [alone(model, each) for each in submitted]
    assert num_continued == 4
    assert nodes[0].thread.alive and not nodes[0].thread.is_stalled
    nodes[0].engine.check()


@pytest.mark.parametrize("comes_back", [True, False])
def test_without_another_worker_they_wait_for_the_store(
    model, nodes, run, store_is_away, monkeypatch, comes_back
):
    monkeypatch.setattr(worker_pool, "STORE_RETRY_S", 0.05)
    submitted = request(3, 60)

    async def scenario() -> tuple[list[int], Any]:
        async with pool_of(nodes[0]) as pool:
            pool._lost_wait_s = 1.0
            store_is_away["is"] = True
            running = asyncio.ensure_future(collect(pool, submitted))
            await asyncio.sleep(0.4)
            assert not running.done()
            store_is_away["is"] = not comes_back
            return await running

    ids, last = run(scenario())
    if comes_back:
        assert ids == alone(model, submitted) and last.finish_reason is FinishReason.LENGTH
    else:
        assert not ids and last.error == STORE_UNAVAILABLE
