"""One direction of a connection fails: the ingress notices within 5 s, and the request goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.request import FinishReason
from tests.deployments.ingress.dispatch.peers.relay import Relay
from tests.deployments.ingress.dispatch.test_pool import Node, alone, collect, request
from tests.deployments.waiting import run_time, until

NOTICED_S = 5.0  # in which this process runs: a machine that stands still is none of its doing
SLACK_S = 2.5  # a busy machine, and the tokens after that
LONG = 400


def slowed(step: Callable[[], Any]) -> Callable[[], Any]:
    def slow_step() -> Any:
        time.sleep(0.03)
        return step()

    return slow_step


@contextlib.asynccontextmanager
async def behind_relay(first: Node, second: Node) -> AsyncIterator[tuple[WorkerPool, Relay]]:
    """A pool whose connection with `first` goes through a relay; `second` is known, too, after a
    request has begun: until then all go to `first`."""
    relay, pool = Relay(first.channel.info), WorkerPool("test")
    await relay.start()
    pool.update([relay.info])
    await until(lambda: pool.num_connected == 1, 60)
    try:
        yield pool, relay
    finally:
        await pool.close()
        await relay.close()


async def both(pool: WorkerPool, relay: Relay, second: Node) -> None:
    pool.update([relay.info, second.channel.info])
    await until(lambda: pool.num_connected == 2, 60)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_request_goes_on_elsewhere_when_one_way_is_lost(
    model, nodes, run, monkeypatch, direction
):
    first, second = nodes
    monkeypatch.setattr(first.engine, "step", slowed(first.engine.step))
    submitted = request(5, LONG, seed=3, temperature=0.8)

    async def scenario() -> tuple[list[int], float, WorkerPool]:
        async with behind_relay(first, second) as (pool, relay):
            begun: set[str] = set()
            running = asyncio.ensure_future(collect(pool, submitted, begun))
            await until(lambda: begun, 60)
            await both(pool, relay, second)
            relay.loses = direction
            async with run_time() as clock:
                await until(lambda: second.engine.stats().num_steps, 60)
                seconds = clock.passed_s
            ids, last = await running
            assert last.finish_reason is FinishReason.LENGTH
            return ids, seconds, pool

    ids, seconds, pool = run(scenario())
    assert ids == alone(model, submitted)
    assert pool.lost_requests.num_continued == 1
    assert NOTICED_S - 1.5 < seconds < NOTICED_S + SLACK_S


def test_a_request_that_never_reaches_its_worker_goes_to_another(model, nodes, run):
    """It is sent into the void: the connection takes it, and only reports come back."""
    first, second = nodes
    submitted = request(6)

    async def scenario() -> tuple[list[int], float]:
        async with behind_relay(first, second) as (pool, relay):
            relay.loses = "up"
            (link,) = pool._links.values()
            async with run_time() as clock:
                running = asyncio.ensure_future(collect(pool, submitted))
                await until(lambda: link.num_calls == 1)
                await both(pool, relay, second)
                ids, _ = await running
                return ids, clock.passed_s

    ids, seconds = run(scenario())
    assert ids == alone(model, submitted) and seconds < NOTICED_S + SLACK_S
    assert not first.engine.stats().num_steps


def test_a_lost_message_ends_the_connection_though_later_ones_arrive(model, nodes, run):
    """The worker sees the gap at the next heartbeat."""
    first, second = nodes
    submitted = request(7)
    lost: list[bytes] = []

    def passes(message: bytes) -> bool:
        if lost or not pb.UpMessage.FromString(message).HasField("submit"):
            return True
        lost.append(message)
        return False

    async def scenario() -> tuple[list[int], float]:
        async with behind_relay(first, second) as (pool, relay):
            relay.filters_up = passes
            async with run_time() as clock:
                running = asyncio.ensure_future(collect(pool, submitted))
                await until(lambda: lost, 60)
                await both(pool, relay, second)
                ids, _ = await running
                return ids, clock.passed_s

    ids, seconds = run(scenario())
    assert ids == alone(model, submitted) and seconds < NOTICED_S / 2


def test_an_idle_connection_that_is_heard_stays(nodes, run):
    """No acknowledgement is missed on a healthy one, idle or busy."""

    async def scenario() -> int:
        async with behind_relay(*nodes) as (pool, relay):
            await asyncio.sleep(NOTICED_S + 1.5)
            await asyncio.gather(*(collect(pool, request(n, 100)) for n in range(4)))
            return relay.num_connections

    assert run(scenario()) == 1
