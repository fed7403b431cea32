"""No worker at all: requests wait at the gate for one, or get a Retry-After."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup, Refusal, Ticket, WorkerSpec
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.protos.penstock.v1 import inference_pb2, inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.gate.test_controller import ask, certain, distribution, gate_with
from tests.deployments.gate.test_drain import report
from tests.deployments.gate.test_with_workers import Node, alone, collect, request
from tests.deployments.serving import Serving
from tests.deployments.waiting import eventually

SETUP = GateSetup(host="127.0.0.1", may_wake=True)


def ready(gate: Any, name: str, now: float, capacity: int = 200) -> None:
    gate.add_worker(WorkerSpec(name, 1, capacity, 1, 64))
    gate.report(name, report(1, is_draining=False), now)


def test_the_predicted_wait_is_the_start_and_then_the_work_ahead():
    gate = gate_with(may_wake=True, start_s=20.0)
    first = gate.would_wait(ask("a"), certain(40), 0.0)
    assert first == 20.0
    assert gate.offer(ask("a"), certain(40), 0.0) is None
    second = gate.would_wait(ask("b"), certain(40), 5.0)
    assert second > 15.0  # five seconds of the start are over; a's work is ahead
    assert gate.tick(5.0) == []
    (wait,) = gate.explain(5.0)
    assert (wait.reason, wait.expected_s) == ("no_worker", 15.0)
    ready(gate, "w", 12.0)
    (ticket,) = gate.tick(12.0)
    assert isinstance(ticket, Ticket) and ticket.quoted_wait_s == 20.0
    gate.remove_worker("w")
    assert gate.would_wait(ask("c"), certain(40), 50.0) == 12.0  # as the last start took
    assert gate._admission.wait_factor == 1.0  # a start says nothing about the pace of the queue


def test_work_ahead_counts_by_the_memory_of_the_last_worker():
    waits = {}
    for capacity in (100, 1000):
        gate = gate_with(may_wake=True, start_s=20.0)
        ready(gate, "w", 0.0, capacity)
        gate.remove_worker("w")
        for n in range(5):
            assert gate.offer(ask(f"r{n}"), certain(60), 1.0) is None
        waits[capacity] = gate.would_wait(ask("last"), certain(60), 1.0) - 20.0
    assert waits[100] == pytest.approx(10 * waits[1000])


def test_a_request_that_cannot_wait_for_the_start_is_refused_with_retry_after():
    gate = gate_with(may_wake=True, start_s=90.0, longest_wait_s=5.0)
    refusal = gate.offer(ask("a"), certain(40), 0.0)
    assert isinstance(refusal, Refusal) and refusal.reason == "no_worker"
    assert refusal.retry_after_s is not None and 90.0 <= refusal.retry_after_s <= 1.2 * 90.0
    assert "no worker runs" in refusal.message and "limit 5.0 s" in refusal.message
    late = gate.offer(ask("b", deadline=70.0), certain(40), 60.0)
    assert isinstance(late, Refusal) and late.retry_after_s is not None
    assert 30.0 <= late.retry_after_s <= 36.0  # the start that `a` has caused is two thirds over
    gate.settings = replace(gate.settings, longest_wait_s=40.0)
    assert gate.offer(ask("c"), certain(40), 61.0) is None


def test_a_request_that_no_worker_can_hold_is_refused_once_there_is_one():
    gate = gate_with(may_wake=True)
    assert gate.offer(ask("huge", 500), distribution(40), 0.0) is None
    ready(gate, "w", 1.0)
    (refusal,) = gate.tick(1.0)
    assert refusal.reason == "never_fits"


def test_without_waking_nothing_is_predicted_of_a_start():
    gate = gate_with(longest_wait_s=5.0)
    assert gate.offer(ask("a"), certain(40), 0.0) is None
    (wait,) = gate.explain(1.0)
    assert wait.expected_s is None


class Sleeping:
    """A gate and an ingress's ends of it, without any worker so far."""

    def __init__(self, gate: GateServer, client: GateClient, pool: WorkerPool):
        self.gate, self.client, self.pool = gate, client, pool

    def is_known_to_drain(self) -> bool:
        return all(each.is_draining for each in self.gate.service.gate.ledgers.values())

    async def wait_for(self, num_waiting: int) -> None:
        async with asyncio.timeout(60):
            while self.gate.service.num_waiting != num_waiting:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def sleeping(setup: GateSetup = SETUP) -> AsyncIterator[Sleeping]:
    gate = GateServer(setup)
    client = GateClient("test", lambda: gate.where(setup), answer_s=5.0)
    asking = asyncio.ensure_future(client.run())
    pool = WorkerPool("test", client, may_wake=True)
    try:
        async with asyncio.timeout(60):
            while not client.is_connected:
                await asyncio.sleep(0.01)
        yield Sleeping(gate, client, pool)
    finally:
        await pool.close()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gate.close()


def test_requests_wait_for_a_worker_run_when_it_is_there_and_wait_again(model, run):
    """1 -> 0 -> 1: the worker drains and leaves, and requests wait for the next one."""
    submitted = [request(n, max_tokens=20) for n in range(6)]
    nodes: list[Node] = []

    async def scenario():
        async with sleeping() as made:
            assert made.pool.ready()
            answers = []
            for round in (submitted[:3], submitted[3:]):
                held = [asyncio.ensure_future(collect(made.pool, each)) for each in round]
                await made.wait_for(3)
                nodes.append(await asyncio.to_thread(Node, model))
                made.pool.update([nodes[-1].channel.info])
                answers += await asyncio.gather(*held)
                nodes[-1].channel.drain()
                async with asyncio.timeout(60):
                    while made.pool._workers.has_any() or not made.is_known_to_drain():
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(nodes[-1].stop)
                made.pool.update([])
                assert made.pool.ready()
            return answers, made.client.num_fallback, made.gate.service.gate._starts

    try:
        answers, num_fallback, starts = run(scenario())
    finally:
        for node in nodes:
            node.stop()
    for each, (ids, last) in zip(submitted, answers):
        assert last.finish_reason is FinishReason.LENGTH, last
        assert ids == alone(model, each)
    assert num_fallback == 0
    assert len(starts._taken) == 2 and starts.predicted_s < 30.0


def test_a_gate_that_begins_anew_meanwhile_loses_no_request_that_waits(model, run):
    submitted = request(1, max_tokens=12)
    nodes: list[Node] = []

    async def scenario():
        async with sleeping() as made:
            held = asyncio.ensure_future(collect(made.pool, submitted))
            await made.wait_for(1)
            made.gate._rebuild(SETUP)  # all links are closed
            await made.wait_for(0)
            await made.wait_for(1)
            nodes.append(await asyncio.to_thread(Node, model))
            made.pool.update([nodes[0].channel.info])
            return await held

    try:
        ids, last = run(scenario())
    finally:
        for node in nodes:
            node.stop()
    assert last.finish_reason is FinishReason.LENGTH
    assert ids == alone(model, submitted)


def test_without_its_gate_no_request_waits_for_a_worker(run, monkeypatch):
    monkeypatch.setattr("penstock.deployments.ingress.dispatch.pool.GATE_AWAY_S", 0.5)

    async def nowhere() -> Any:
        raise TimeoutError

    async def scenario():
        client = GateClient("test", nowhere)
        pool = WorkerPool("test", client, may_wake=True)
        began_s = time.monotonic()
        ids, last = await collect(pool, request(1))
        return pool.ready(), last.error, time.monotonic() - began_s

    is_ready, error, took_s = run(scenario())
    assert not is_ready and error == "no_worker"
    assert 0.5 <= took_s < 5.0


def test_refused_ones_are_demand_and_are_counted(run):
    async def scenario():
        async with sleeping(replace(SETUP, longest_wait_s=1.0)) as made:
            failures = []
            for n in range(3):
                with pytest.raises(ServiceError) as failure:
                    await collect(made.pool, request(n))
                failures.append(failure.value)
            return failures, dict(made.gate.service.counts.refused), made.gate.service.num_waiting

    failures, refused, num_waiting = run(scenario())
    assert {each.code for each in failures} == {"no_worker"}
    assert all(20.0 < each.retry_after_s <= 36.0 for each in failures)
    assert refused == {"no_worker": 3} and num_waiting == 0


@contextlib.contextmanager
def front_ends(setup: GateSetup) -> Iterator[tuple[Serving, Sleeping]]:
    """HTTP and gRPC over a pool without workers."""
    made: list[Sleeping] = []
    closing, closed = threading.Event(), threading.Event()

    class Backend:
        """The pool, made on the loop of the servers."""

        def ready(self) -> bool:
            return bool(made) and made[0].pool.ready()

        def generate(self, admission: Any) -> Any:
            return made[0].pool.generate(admission)

    async def live() -> None:
        async with sleeping(setup) as opened:
            made.append(opened)
            while not closing.is_set():
                await asyncio.sleep(0.02)
        closed.set()

    with Serving(Backend()) as servers:
        servers.call(lambda: asyncio.ensure_future(live()))
        eventually(lambda: bool(made))
        servers.core.named(None).learner = made[0].client
        try:
            yield servers, made[0]
        finally:
            closing.set()
            assert closed.wait(60)


def test_http_and_grpc_wait_for_the_worker_and_both_are_answered(model):
    node = None
    with front_ends(SETUP) as (servers, made):
        assert httpx.get(f"{servers.base_url}/ready").status_code == 200
        answers: dict[str, Any] = {}
        body = {"prompt": "It was", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        def over_http() -> None:
            url = f"{servers.base_url}/v1/completions"
            answers["http"] = httpx.post(url, json=body, timeout=60)

        def over_grpc() -> None:
            with grpc.insecure_channel(servers.grpc_target) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                sampling = inference_pb2.SamplingParams(
                    temperature=0.0, max_tokens=8, ignore_eos=True
                )
                submitted = inference_pb2.GenerateRequest(text="It was", sampling=sampling)
                answers["grpc"] = list(stub.Generate(submitted, timeout=60))

        asking = [threading.Thread(target=each) for each in (over_http, over_grpc)]
        for thread in asking:
            thread.start()
        eventually(lambda: made.gate.service.num_waiting == 2, 180)
        assert not answers
        try:
            node = Node(model)
            servers.call(lambda: made.pool.update([node.channel.info]))
            for thread in asking:
                thread.join(60)
        finally:
            if node is not None:
                node.stop()
    text = answers["http"].json()["choices"][0]["text"]
    assert answers["http"].status_code == 200 and text
    assert "".join(each.text for each in answers["grpc"]) == text


def test_both_front_ends_say_when_to_come_again():
    with front_ends(replace(SETUP, longest_wait_s=1.0)) as (servers, _):
        answer = httpx.post(f"{servers.base_url}/v1/completions", json={"prompt": "It was"})
        with grpc.insecure_channel(servers.grpc_target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as failure:
                list(stub.Generate(inference_pb2.GenerateRequest(text="It was")))
    assert answer.status_code == 503
    assert 20 <= int(answer.headers["retry-after"]) <= 36
    error = answer.json()["error"]
    assert error["code"] == "no_worker" and "is being started" in error["message"]
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    trailing = dict(failure.value.trailing_metadata())
    assert 20_000 <= int(trailing["grpc-retry-pushback-ms"]) <= 36_000
