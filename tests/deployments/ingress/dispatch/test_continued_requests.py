"""A worker whose queue is full refuses new requests, and none that continues after a loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from penstock.workers.request import FinishReason
from tests.deployments.ingress.dispatch.test_pool import CONFIG, alone, collect, pool_of, request
from tests.deployments.waiting import until


def test_a_full_queue_refuses_new_requests_and_takes_continued_ones(model, nodes, run, monkeypatch):
    dying, full = nodes
    for node in nodes:
        node.slow_down()
    submitted = [request(n, 300, seed=n, temperature=0.8) for n in range(3)]

    async def scenario() -> tuple[list[Any], Any, int]:
        async with pool_of(full) as others, pool_of(dying) as pool:
            waiting = [
                asyncio.ensure_future(collect(others, request(n, 150)))
                for n in range(20, 21 + CONFIG.max_num_seqs)
            ]
            await until(lambda: full.thread.stats().num_waiting == 1, 60)
            monkeypatch.setattr(full.engine, "config", replace(CONFIG, max_waiting=1))
            _, refused = await collect(others, request(50))
            begun: set[str] = set()
            running = [asyncio.ensure_future(collect(pool, each, begun)) for each in submitted]
            await until(lambda: len(begun) == len(submitted), 60)
            pool.update([node.channel.info for node in nodes])
            await until(lambda: pool.num_connected == 2, 60)
            dying.channel.break_off()
            got = await asyncio.gather(*running)
            await asyncio.gather(*waiting)
            return got, refused, pool.lost_requests.num_continued

    got, refused, num_continued = run(scenario())
    assert refused.error == "overloaded"
    assert num_continued == len(submitted)
    assert all(last.finish_reason is FinishReason.LENGTH for _, last in got)
    assert [ids for ids, _ in got] == [alone(model, each) for each in submitted]
