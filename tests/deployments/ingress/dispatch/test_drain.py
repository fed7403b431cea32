"""A worker that drains, in one process: its streams end as usual, and new requests go elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch import worker_links
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.supervision.registry import Registry
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers import worker as worker_file
from penstock.workers.channel import server
from penstock.workers.request import FinishReason
from penstock.workers.stats import EngineStats, WorkerInfo
from penstock.workers.worker import Worker
from tests.deployments.ingress.dispatch.test_pool import (
    Node,
    alone,
    collect,
    pool_of,
    request,
)
from tests.deployments.waiting import until


def worker_of(node: Node) -> Worker:
    """The node's engine and channel as a Worker, whose threads run already."""
    made = Worker.__new__(Worker)
    made._channel, made._engine_thread = node.channel, node.thread
    return made


def test_streams_of_a_draining_worker_end_as_usual_and_new_ones_go_to_the_other(model, nodes, run):
    early = [request(n, max_tokens=200) for n in range(8)]
    late = [request(20 + n, max_tokens=20) for n in range(12)]
    leaving, staying = nodes

    async def scenario():
        async with pool_of(*nodes) as pool:
            running = [asyncio.ensure_future(collect(pool, each)) for each in early]
            await until(lambda: sum(each.channel.num_requests for each in nodes) == len(early))
            served = leaving.channel.num_requests
            assert 0 < served < len(early)
            draining = asyncio.ensure_future(asyncio.to_thread(worker_of(leaving).drain, 60.0))
            await until(lambda: leaving.channel.info.is_draining)
            after = [asyncio.ensure_future(collect(pool, each)) for each in late]
            answers = await asyncio.gather(*running), await asyncio.gather(*after)
            num_left = await draining
            leaving.channel.stop()
            answers += (await asyncio.gather(collect(pool, request(50))),)
            return *answers, served, num_left

    first, second, third, served, num_left = run(scenario())
    for asked, (ids, last) in zip([*early, *late, request(50)], [*first, *second, *third]):
        assert last.finish_reason is FinishReason.LENGTH, last
        assert ids == alone(model, asked)
    assert num_left == 0 and 0 < served < len(early)
    assert leaving.thread.stats().num_finished["length"] == served
    assert staying.thread.stats().num_finished["length"] == 21 - served


def test_a_request_under_way_to_a_draining_worker_is_declined_and_goes_elsewhere(
    model, nodes, run, monkeypatch
):
    """The ingress does not know yet: its first choice is the draining worker, once."""
    leaving, staying = nodes
    submits = []
    connections = leaving.channel._connections
    begin = connections._handlers.message

    def take(peer, data):
        message = pb.UpMessage.FromString(data)
        if message.HasField("submit"):
            submits.append(message.submit)
            leaving.channel._begin_drain()  # after the request was sent
        begin(peer, data)

    monkeypatch.setattr(connections, "_handlers", replace(connections._handlers, message=take))

    async def scenario():
        async with pool_of(*nodes) as pool:
            link = pool._links[leaving.channel.info.epoch]
            pool._links[staying.channel.info.epoch]._others_tokens = 10_000
            answer = await collect(pool, request(1))
            return answer, link.is_draining

    (ids, last), is_draining = run(scenario())
    assert len(submits) == 1 and is_draining
    assert last.finish_reason is FinishReason.LENGTH
    assert ids == alone(model, request(1))
    assert staying.thread.stats().num_finished["length"] == 1


def test_without_another_worker_nothing_is_sent_to_one_that_drains(nodes, run):
    leaving, _ = nodes

    async def scenario():
        async with pool_of(leaving) as pool:
            assert pool.ready()
            leaving.channel.drain()
            await until(lambda: not pool.ready())
            deltas = [delta async for delta in pool.generate(AdmissionRequest(request(1)))]
            return deltas, pool.num_connected

    deltas, num_connected = run(scenario())
    assert [delta.error for delta in deltas] == ["no_worker"]
    assert num_connected == 1  # streams that it has would go on


def test_a_request_between_two_workers_waits_for_the_second(model, nodes, run, monkeypatch):
    """A rolling update: the old worker drains before the ingress knows the new one."""
    monkeypatch.setattr(worker_links, "REPLACED_S", 30.0)
    leaving, joining = nodes

    async def scenario():
        async with pool_of(leaving) as pool:
            pool.update([replace(leaving.channel.info, is_draining=True)])
            answer = asyncio.ensure_future(collect(pool, request(1)))
            await asyncio.sleep(0.2)
            assert not answer.done()
            pool.update([joining.channel.info])
            return await answer

    ids, last = run(scenario())
    assert last.finish_reason is FinishReason.LENGTH
    assert ids == alone(model, request(1))


def test_the_list_of_the_registry_is_enough(nodes, run):
    """An ingress learns it from the registry, too; it never connects with a draining worker."""
    leaving, _ = nodes

    async def scenario():
        async with pool_of(leaving) as pool:
            pool.update(replace(node.channel.info, is_draining=True) for node in nodes)
            return pool.ready(), list(pool._links)

    assert run(scenario()) == (False, [leaving.channel.info.epoch])


def test_a_drain_lasts_until_ingresses_know_and_no_longer_than_it_may(nodes, run, monkeypatch):
    monkeypatch.setattr(worker_file, "DRAIN_NOTICE_S", 0.4)
    first, second = nodes
    second.slow_down()
    began_s = time.monotonic()
    assert worker_of(first).drain(30.0) == 0  # nothing runs, and a request may be under way
    assert 0.4 <= time.monotonic() - began_s < 5.0

    async def scenario():
        async with pool_of(second) as pool:
            long = asyncio.ensure_future(collect(pool, request(1, max_tokens=1800)))
            await until(lambda: second.channel.num_requests)
            began_s = time.monotonic()
            num_left = await asyncio.to_thread(worker_of(second).drain, 0.6)
            took_s = time.monotonic() - began_s
            long.cancel()
            return num_left, took_s

    num_left, took_s = run(scenario())
    assert num_left == 1 and 0.6 <= took_s < 5.0


def test_heartbeats_continue_and_say_at_once_that_the_worker_drains(model, run, monkeypatch):
    monkeypatch.setattr(server, "REPORT_S", 600.0)  # the next heartbeat that is due by itself
    registry, seen = Registry(), threading.Event()
    beats: list[bool] = []

    async def announce(info: WorkerInfo, stats: EngineStats) -> None:
        beats.append(info.is_draining)
        registry.worker_beat(info, stats)
        if info.is_draining:
            seen.set()

    node = Node(model, announce=announce)
    try:
        while not registry.view().workers:
            time.sleep(0.01)
        assert beats == [False]
        node.channel.drain()
        assert seen.wait(60)
        ((info, _),) = registry.view().workers
        assert info.is_draining and info.epoch == node.channel.info.epoch
    finally:
        node.stop()


def test_an_ingress_that_connects_late_is_told_too(nodes, run):
    """With the first report, where the registry's list is a moment old."""
    leaving, _ = nodes

    async def scenario():
        info = leaving.channel.info
        leaving.channel.drain()
        await until(lambda: leaving.channel.info.is_draining)
        pool = WorkerPool("late")
        pool.update([info])
        try:
            await until(lambda: pool.num_connected)
            await until(lambda: not pool.ready())
        finally:
            await pool.close()

    run(scenario())


def test_a_worker_with_another_tokenizer_gets_no_request(nodes, run, caplog):
    """In an update of the model: token ids mean something else to it."""
    infos = [
        replace(node.channel.info, model_digest=digest)
        for node, digest in zip(nodes, ("aa-11", "bb-11"))
    ]

    async def scenario():
        pool = WorkerPool("test", tokenizer_digest="aa")
        try:
            for _ in range(3):
                pool.update(infos)
            await until(lambda: pool.num_connected)
            return list(pool._links)
        finally:
            await pool.close()

    assert run(scenario()) == [infos[0].epoch]
    lines = [each.getMessage() for each in caplog.records if "tokenizer" in each.getMessage()]
    assert len(lines) == 1 and "digest bb, not aa" in lines[0]
