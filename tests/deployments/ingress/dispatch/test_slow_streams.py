"""A stream that is not read holds bounded memory, ends with its own error, and harms no other."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.in_flight import MAX_UNREAD_BYTES, TOO_SLOW
from penstock.workers.channel.codec import delta_from, delta_message
from penstock.workers.channel.delta_size import num_bytes
from penstock.workers.request import Delta, FinishReason, TokenLogprob
from tests.deployments.ingress.dispatch.test_pool import alone, collect, pool_of, request
from tests.deployments.waiting import until

LOUD = {"logprobs": 20}


@pytest.mark.parametrize("num_top", [None, 0, 5, 20])
def test_the_size_of_a_delta_is_what_it_takes_in_memory(num_top):
    def made() -> Delta:
        ids = [1000 + n for n in range(400)]
        if num_top is None:
            return Delta("", ids)
        top = tuple((2000 + n, -1.5 - n) for n in range(num_top))
        return Delta("", ids, logprobs=[TokenLogprob(i, -0.5 - i, 1000 + i, top) for i in ids])

    message = delta_message(made(), 1)
    gc.collect()  # Python's free lists, too: an object from there takes no new memory
    tracemalloc.start()
    delta = delta_from(message, "")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes(delta) == pytest.approx(taken, rel=0.25)


def test_a_stream_that_is_not_read_is_bounded_and_its_neighbours_get_all(model, nodes, run):
    node = nodes[0]
    slow = request(1, 1500, **LOUD)
    beside = [request(n, 120, seed=n, temperature=0.8, **LOUD) for n in range(2, 6)]

    async def scenario() -> tuple[list[int], Delta, int, list[Any]]:
        async with pool_of(node) as pool:
            (link,) = pool._links.values()
            deltas = pool.generate(AdmissionRequest(slow))
            first = await anext(deltas)
            (call,) = link._calls.values()
            most, running = 0, [asyncio.ensure_future(collect(pool, each)) for each in beside]
            async with asyncio.timeout(120):
                while link._calls or not all(each.done() for each in running):
                    most = max(most, call.num_unread_bytes)
                    await asyncio.sleep(0)
            await node.is_idle()  # though nothing is read still
            assert node.thread.stats().num_finished["abort"] == 1
            ids, num_logprobs = list(first.token_ids), len(first.logprobs)
            async for delta in deltas:
                ids += delta.token_ids
                num_logprobs += len(delta.logprobs)
                last = delta
            assert num_logprobs == len(ids)
            return ids, last, most, [each.result() for each in running]

    ids, last, most, got = run(scenario())
    assert last.error == TOO_SLOW and last.finish_reason is FinishReason.ERROR
    assert ids == alone(model, slow)[: len(ids)] and 300 < len(ids) < 500
    assert MAX_UNREAD_BYTES / 2 < most <= MAX_UNREAD_BYTES
    assert [ids for ids, _ in got] == [alone(model, each) for each in beside]


def test_a_stream_that_is_read_late_but_in_time_misses_nothing(model, nodes, run):
    submitted = request(1, 300, **LOUD)

    async def scenario() -> list[int]:
        async with pool_of(nodes[0]) as pool:
            deltas = pool.generate(AdmissionRequest(submitted))
            ids = list((await anext(deltas)).token_ids)
            await until(lambda: nodes[0].thread.stats().num_finished["length"], 60)
            return ids + [token_id async for delta in deltas for token_id in delta.token_ids]

    assert run(scenario()) == alone(model, submitted)
