"""The queue of an ingress whose gate does not answer: its bounds, its fairness, and its end."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch import local_queue
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.in_flight import InFlightRequest
from penstock.deployments.ingress.dispatch.local_queue import (
    FURTHER,
    MAX_QUEUED,
    RELEASE_S,
    RELEASED,
    LocalQueue,
)
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.prediction.features import Features
from penstock.workers.request import FinishReason, Request, SamplingParams
from tests.deployments.ingress.dispatch.peers.scripted_gate import ScriptedGate, serving
from tests.deployments.ingress.dispatch.test_pool import CONFIG, Node
from tests.deployments.waiting import until

PRINCIPALS = ("flood", "a", "b", "c", "d", "e")


def admission(
    name: str, tenant: str, *, num_prompt: int = 3, priority: int = 0, weight: float = 1.0
):
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    request = Request(name, tuple(range(5, 5 + num_prompt)), params, priority=priority)
    features = Features("m", tenant=tenant, prompt_tokens=num_prompt, max_tokens=2)
    return AdmissionRequest(request, features=features, weight=weight)


def call(name: str, tenant: str = "", **options) -> InFlightRequest:
    return InFlightRequest(admission(name, tenant, **options), num_expected=5)


class Driven:
    """A queue whose workers have room for as many as `room` says."""

    def __init__(self) -> None:
        self.room, self.gate_answers = 0, False
        self.placed: list[str] = []
        self.queue = LocalQueue(self._place, lambda: self.gate_answers)

    def _place(self, placed: InFlightRequest) -> bool:
        if self.room:
            self.room -= 1
            self.placed.append(placed.request.request_id)
            return True
        return False

    async def wait(self, waiting: InFlightRequest) -> bool:
        seat = self.queue.take_seat(waiting)
        try:
            return await self.queue.turn(seat)
        finally:
            self.queue.leave(seat)


async def begun(tasks):
    made = [asyncio.ensure_future(each) for each in tasks]
    for _ in range(3):
        await asyncio.sleep(0)
    return made


def test_tenants_go_in_turn_and_each_ones_requests_by_priority_and_arrival(run):
    async def scenario():
        driven = Driven()
        tasks = await begun(
            [driven.wait(call(f"f{n}", "flood")) for n in range(4)]
            + [driven.wait(call("a0", "a", priority=5)), driven.wait(call("a1", "a"))]
        )
        driven.room = 10
        driven.queue.place_next()
        assert await asyncio.gather(*tasks) == [True] * 6
        assert len(driven.queue) == driven.queue.num_bytes == 0
        return driven.placed

    assert run(scenario()) == ["f0", "a1", "f1", "a0", "f2", "f3"]


def test_turns_follow_the_weights(run):
    async def scenario():
        driven = Driven()
        tasks = await begun(
            [driven.wait(call(f"a{n}", "a", weight=3.0)) for n in range(9)]
            + [driven.wait(call(f"b{n}", "b")) for n in range(9)]
        )
        driven.room = 12
        driven.queue.place_next()
        first = "".join(name[0] for name in driven.placed)
        driven.room = 10
        driven.queue.place_next()
        await asyncio.gather(*tasks)
        return first

    first = run(scenario())
    assert first.count("a") == 9 and first[:8].count("a") == 6


def test_a_tenant_that_leaves_and_comes_back_does_not_go_first_each_time(run):
    async def scenario():
        driven = Driven()
        backlog = await begun([driven.wait(call(f"b{n}", "b")) for n in range(4)])
        for n in range(4):
            coming = await begun([driven.wait(call(f"a{n}", "a"))])
            driven.room = 1
            driven.queue.place_next()
            driven.room = 1
            driven.queue.place_next()
            await asyncio.gather(*coming)
        await asyncio.gather(*backlog)
        return driven.placed

    assert run(scenario()) == ["b0", "a0", "b1", "a1", "b2", "a2", "b3", "a3"]


def test_what_finds_room_does_not_wait(run):
    async def scenario():
        driven = Driven()
        driven.room = 1
        assert await driven.wait(call("r")) is True

    run(scenario())


def test_a_full_queue_refuses_with_the_time_until_there_is_room(run):
    async def scenario():
        driven = Driven()
        tasks = await begun(driven.wait(call(f"r{n}", "a")) for n in range(MAX_QUEUED))
        with pytest.raises(ServiceError) as refused:
            await driven.wait(call("one more", "a"))
        assert refused.value.code == "overloaded"
        assert 1.0 <= (refused.value.retry_after_s or 0.0) <= 60.0
        other = (await begun([driven.wait(call("other", "b"))]))[0]  # it has none in the queue yet
        assert len(driven.queue) == MAX_QUEUED
        with pytest.raises(ServiceError) as displaced:
            await tasks[-1]
        assert displaced.value.code == "over_share"
        for task in (*tasks, other):
            task.cancel()
        await asyncio.gather(*tasks, other, return_exceptions=True)
        assert len(driven.queue) == driven.queue.num_bytes == 0

    run(scenario())


def test_bytes_are_bounded_too(run, monkeypatch):
    monkeypatch.setattr(local_queue, "MAX_QUEUED_BYTES", 10_000)

    async def scenario():
        driven = Driven()
        tasks = await begun(driven.wait(call(f"r{n}", "a", num_prompt=100)) for n in range(5))
        assert len(driven.queue) == 2 and driven.queue.num_bytes == 7200
        assert [task.done() for task in tasks] == [False, False, True, True, True]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_when_the_gate_answers_again_all_go_there_and_keep_their_seats(run):
    async def scenario():
        driven = Driven()
        seats = [driven.queue.take_seat(call(f"r{n}")) for n in range(3)]
        tasks = await begun(driven.queue.turn(seat) for seat in seats)
        driven.gate_answers = True
        assert await asyncio.gather(*tasks) == [False] * 3
        assert len(driven.queue) == 3
        driven.gate_answers = (
            False  # it was too slow again: they wait in the order of their arrival
        )
        tasks = await begun(driven.queue.turn(seat) for seat in reversed(seats))
        driven.room = 3
        driven.queue.place_next()
        await asyncio.gather(*tasks)
        return driven.placed

    assert run(scenario()) == ["r0", "r1", "r2"]


def test_a_few_at_a_time_go_to_a_gate_that_answers_again(run):
    async def scenario():
        driven = Driven()
        tasks = await begun(
            [driven.wait(call(f"f{n}", "flood")) for n in range(100)]
            + [driven.wait(call(f"a{n}", "a")) for n in range(2)]
        )
        driven.gate_answers = True
        num_before = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(RELEASE_S / 10)
            num_done = sum(task.done() for task in tasks)
            assert num_done - num_before <= RELEASED
            if num_before == 0 < num_done:
                assert tasks[100].done() and tasks[101].done()  # the tenants in turn
            num_before = num_done
        assert await asyncio.gather(*tasks) == [False] * 102

    run(scenario())


def test_three_thousand_requests_while_the_gate_is_silent(run, model):
    """A worker that stands still, too: nothing leaves the queue before the gate is back."""
    node, gate = Node(model), ScriptedGate()
    gate.is_silent = False

    async def ask(pool, name, tenant):
        async for delta in pool.generate(admission(name, tenant)):
            last = delta
        return last.finish_reason

    async def scenario():
        async with serving(gate) as address:

            async def where():
                return address

            client = GateClient("test", where, answer_s=0.02)
            asking = asyncio.ensure_future(client.run())
            await until(lambda: client.is_connected, 30)
            pool = WorkerPool("test", client)
            pool.update([node.channel.info])
            share = CONFIG.max_num_seqs + FURTHER
            await until(lambda: any(x.max_num_seqs > 1 for x in pool._links.values()), 30)
            gate.is_silent = True
            names = [f"flood-{n}" for n in range(2000)]
            names += [f"{tenant}-{n}" for n in range(200) for tenant in PRINCIPALS[1:]]
            tasks = {name: asyncio.ensure_future(ask(pool, name, name[0])) for name in names}
            await until(lambda: sum(not t.done() for t in tasks.values()) == MAX_QUEUED + share, 60)
            (link,) = pool._links.values()
            local = pool._local
            assert link.num_calls == share
            assert len(local) == MAX_QUEUED
            assert 0 < local.num_bytes < MAX_QUEUED * 200
            counts = Counter(seat.tenant for seat in local._seats)
            assert set(counts) == {name[0] for name in PRINCIPALS}
            assert max(counts.values()) - min(counts.values()) <= 2
            refused = [t.exception() for t in tasks.values() if t.done()]
            for each in refused:
                assert isinstance(each, ServiceError)
                assert each.code in ("overloaded", "over_share")
                assert 1.0 <= (each.retry_after_s or 0.0) <= 60.0
            left = {name: task for name, task in tasks.items() if not task.done()}
            seated = {seat.call.request.request_id for seat in local._seats}

            gate.is_silent = False
            node.thread.start()
            done = asyncio.gather(*left.values())
            while not done.done():
                names, gate.offered = gate.offered, []
                await gate.admit(names, node.channel.info.epoch)
                await asyncio.sleep(0.02)
            assert set(await done) == {FinishReason.LENGTH}
            assert seated <= left.keys()
            assert len(local) == local.num_bytes == link.num_calls == client.num_waiting == 0
            asking.cancel()
            await pool.close()

    try:
        run(scenario())
    finally:
        node.stop()
