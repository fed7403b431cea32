"""The gate between an ingress and real workers, in one process: its own port, streams and engines.

tests/deployments/gate/test_server.py has it as a Ray actor, and kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch.credits import Credits
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.prediction.features import Features
from penstock.protos.penstock.v1 import inference_pb2, inference_pb2_grpc
from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.request import Delta, FinishReason, Request, SamplingParams
from tests.deployments.serving import ScriptedBackend, Serving

# 40 blocks of 16: room for two of the longest answers below, by the rule of reserve_max.
ENGINE = EngineConfig(weights="fp32", device="cpu", num_blocks=40, max_num_seqs=16, threads=1)
SETUP = GateSetup(host="127.0.0.1")


class Node:
    """A worker as actor.Worker makes one, but for the model, which all share."""

    def __init__(self, model: Any, config: EngineConfig = ENGINE):
        self.engine = Engine(config, model)
        self.channel = ChannelServer("127.0.0.1", "test", self.engine.max_model_len)
        self.thread = EngineThread(self.engine, self.channel.deliver, num_threads=1)
        self.channel.start(self.thread)
        self.thread.start()

    def stop(self) -> None:
        self.channel.stop()
        self.thread.stop()


class House:
    """A gate, an ingress's end of it, and workers."""

    def __init__(self, nodes: list[Node], gate: GateServer, pool: WorkerPool, client: GateClient):
        self.nodes, self.gate, self.pool, self.client = nodes, gate, pool, client

    async def settle(self) -> None:
        """Until the gate knows all workers, and has handed out passes to them."""
        async with asyncio.timeout(60):
            while len(self.client._credits._given) < len(self.nodes):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def house(
    *nodes: Node, setup: GateSetup = SETUP, answer_s: float = 5.0
) -> AsyncIterator[House]:
    gate = GateServer(setup)
    gate.setup = setup  # type: ignore[attr-defined]

    async def where() -> Any:
        return await gate.where(gate.setup)  # type: ignore[attr-defined]

    client = GateClient("test", where, answer_s=answer_s)
    asking = asyncio.ensure_future(client.run())
    pool = WorkerPool("test", client)
    made = House(list(nodes), gate, pool, client)
    try:
        async with asyncio.timeout(60):
            pool.update(node.channel.info for node in nodes)
            while pool.num_connected < len(nodes) or not client.is_connected:
                await asyncio.sleep(0.01)
        await made.settle()
        yield made
    finally:
        await pool.close()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gate.close()


@pytest.fixture
def node(model: Any) -> Iterator[Node]:
    made = Node(model)
    yield made
    made.stop()


class NoCredits(Credits):
    def take(self, *_: Any) -> None:
        """None is taken."""


def request(
    number: int, *, max_tokens: int = 24, tenant: str = "", length: int = 8, **rest: Any
) -> AdmissionRequest:
    prompt = tuple(random.Random(number).choices(range(3, 2000), k=length))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    features = Features("test", tenant=tenant, prompt_tokens=length, max_tokens=max_tokens)
    inner = {key: rest.pop(key) for key in list(rest) if key in Request.__slots__}
    made = Request(f"req-{number}", prompt, params, **inner)
    return AdmissionRequest(made, features=features, **rest)


async def collect(pool: WorkerPool, submitted: AdmissionRequest) -> tuple[list[int], Delta]:
    ids: list[int] = []
    async for delta in pool.generate(submitted):
        ids += delta.token_ids
        last = delta
    return ids, last


def alone(model: Any, submitted: AdmissionRequest) -> list[int]:
    engine = Engine(ENGINE, model)
    engine.add(submitted.request)
    ids: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            ids += delta.token_ids
    return ids


def test_more_than_fit_wait_at_the_gate_and_none_is_preempted(model, node, run):
    """12 answers of 200 tokens, of which three fit: with all at once the engine would preempt."""
    submitted = [request(n, max_tokens=200) for n in range(12)]

    async def scenario():
        async with house(node, setup=GateSetup(host="127.0.0.1", admission="reserve_max")) as made:
            running = [asyncio.ensure_future(collect(made.pool, each)) for each in submitted]
            most, waited = 0, 0
            while not all(each.done() for each in running):
                most = max(most, node.thread.stats().num_running)
                waited = max(waited, made.gate.service.num_waiting)
                await asyncio.sleep(0.005)
            return [each.result() for each in running], most, waited, made.client

    answers, most, waited, client = run(scenario())
    assert all(last.finish_reason is FinishReason.LENGTH for _, last in answers)
    for each, (ids, _) in zip(submitted[-2:], answers[-2:]):  # who waited longest
        assert ids == alone(model, each)
    assert most <= 3
    assert waited >= 8
    assert node.thread.stats().num_preemptions == 0
    assert client.num_fallback == 0


def test_with_room_no_request_waits_for_the_gate(node, run):
    async def scenario():
        async with house(node) as made:
            for n in range(5):
                await collect(made.pool, request(n, max_tokens=4))
            async with asyncio.timeout(60):
                while made.gate.service.counts.completed < 5:
                    await asyncio.sleep(0.01)
            return made.client, made.gate.service

    client, service = run(scenario())
    assert (client.num_on_credit, client.num_asked) == (5, 0)
    assert service.counts.admitted == 5
    assert not service.gate.ledgers or all(not len(each) for each in service.gate.ledgers.values())


def test_who_leaves_while_waiting_leaves_nothing_behind(node, run):
    async def scenario():
        async with house(node) as made:
            long = asyncio.ensure_future(collect(made.pool, request(0, max_tokens=500)))
            await asyncio.sleep(0.2)
            late = [
                asyncio.ensure_future(collect(made.pool, request(n, max_tokens=500)))
                for n in range(1, 5)
            ]
            async with asyncio.timeout(60):
                while made.gate.service.num_waiting < 3:
                    await asyncio.sleep(0.01)
            for each in [*late, long]:
                each.cancel()
            await asyncio.gather(*late, long, return_exceptions=True)
            async with asyncio.timeout(60):
                while made.gate.service.num_waiting or node.thread.stats().num_live_blocks:
                    await asyncio.sleep(0.01)
                while any(len(each) for each in made.gate.service.gate.ledgers.values()):
                    await asyncio.sleep(0.01)
            return await collect(made.pool, request(9))

    ids, last = run(scenario())
    assert len(ids) == 24


def test_an_expired_deadline_is_never_prefilled(node, run):
    async def scenario():
        setup = GateSetup(host="127.0.0.1", admission="reserve_max")  # no room for both
        async with house(node, setup=setup) as made:
            long = asyncio.ensure_future(collect(made.pool, request(0, max_tokens=600)))
            async with asyncio.timeout(60):
                while node.thread.stats().num_generated_tokens < 3:
                    await asyncio.sleep(0.01)
            computed = node.thread.stats().num_prompt_tokens
            late = request(1, max_tokens=600, length=33, deadline_s=time.monotonic() + 0.3)
            with pytest.raises(ServiceError) as failure:
                await collect(made.pool, late)
            spent = node.thread.stats().num_prompt_tokens - computed
            assert not long.done()
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            return failure.value, spent, made.gate.service.counts

    failure, spent, counts = run(scenario())
    assert failure.code in (
        "deadline_exceeded",
        "overloaded",
    )  # or refused at once because it would be
    assert spent == 0
    assert counts.expired + sum(counts.refused.values()) == 1


def test_a_full_queue_refuses_with_a_time_to_come_again(node, run):
    async def scenario():
        setup = GateSetup(host="127.0.0.1", admission="reserve_max", max_queued=1)
        async with house(node, setup=setup) as made:
            first = [
                asyncio.ensure_future(collect(made.pool, request(n, max_tokens=600)))
                for n in range(2)
            ]
            async with asyncio.timeout(60):
                while made.gate.service.num_waiting < 1:
                    await asyncio.sleep(0.01)
            with pytest.raises(ServiceError) as failure:
                await collect(made.pool, request(2, max_tokens=600))
            for each in first:
                each.cancel()
            await asyncio.gather(*first, return_exceptions=True)
            return failure.value

    failure = run(scenario())
    assert failure.code == "overloaded"
    assert 0.8 <= failure.retry_after_s <= 72


def test_a_worker_without_room_sends_a_request_back_to_the_head(model, node, run, monkeypatch):
    """The gate's ledger is wrong on purpose: it assumes twenty times the worker's room."""

    forecast = Ledger.forecast
    monkeypatch.setattr(
        Ledger,
        "forecast",
        lambda *args, **named: replace(forecast(*args, **named), capacity=1 << 30, limit=1 << 30),
    )

    async def scenario():
        async with house(node) as made:
            big = [request(n, max_tokens=40, length=300) for n in range(6)]
            client = made.client
            client._credits = NoCredits()  # every request asks the gate
            answers = await asyncio.gather(*(collect(made.pool, each) for each in big))
            return big, answers, made.gate.service.counts

    big, answers, counts = run(scenario())
    for each, (ids, last) in zip(big, answers):
        assert last.finish_reason is FinishReason.LENGTH, last
        assert ids == alone(model, each)
    assert counts.declined >= 1


@pytest.mark.parametrize("where", ["tick", "judge_next", "receive"])
def test_a_fault_in_the_ledger_rebuilds_it_and_loses_no_request(model, node, run, caplog, where):
    async def scenario():
        async with house(node) as made:
            made.client._credits = NoCredits()  # every request asks the gate
            first = asyncio.ensure_future(collect(made.pool, request(0, max_tokens=8)))
            await first
            broken, predictor = made.gate.service, made.gate.service.learner.predictor

            def fault(*_):
                raise KeyError("a fault that a test made")

            setattr(broken, where, fault)
            submitted = [request(n, max_tokens=8) for n in range(1, 5)]
            answers = await asyncio.gather(*(collect(made.pool, each) for each in submitted))
            async with asyncio.timeout(60):
                while made.gate.service is broken:
                    await asyncio.sleep(0.01)
                while not made.client.is_connected or not made.gate.service.workers:
                    await asyncio.sleep(0.01)
            new = made.gate.service
            assert new is not broken and new.learner.predictor is predictor
            made.client._credits = NoCredits()
            later = request(9, max_tokens=8)
            answer = await collect(made.pool, later)
            async with asyncio.timeout(60):
                while new.counts.admitted == 0:
                    await asyncio.sleep(0.01)
            assert new.counts.admitted >= 1
            return [*zip(submitted, answers), (later, answer)]

    for submitted, (ids, last) in run(scenario()):
        assert last.finish_reason is FinishReason.LENGTH, last
        assert ids == alone(model, submitted)
    assert "gate state is inconsistent" in caplog.text and "a fault that a test made" in caplog.text


def test_a_gate_that_stands_still_is_gone_past(node, run):
    async def scenario():
        async with house(node, answer_s=0.02) as made:
            client, service = made.client, made.gate.service
            client._credits = NoCredits()  # every request asks the gate
            service.judge_next = service.tick = lambda now: False  # nothing is decided any more
            service.report_queued = lambda names, ingress: None
            service.receive = lambda ingress, message, now: []
            took_s = []
            for n in range(5):
                began_s = time.monotonic()
                stream = made.pool.generate(request(n, max_tokens=2))
                await anext(stream)
                took_s.append(time.monotonic() - began_s)
                await stream.aclose()
            return took_s, client

    took_s, client = run(scenario())
    assert client.num_fallback == 5
    assert client.breaker.num_opened == 1
    assert client.num_asked == 3  # then the breaker is open, and no offer is sent


def test_the_noisy_tenant_gets_no_more_than_the_quiet_ones(node, run):
    """All ask for more than there is; one of them asks nine times as much."""
    quiet = [f"quiet-{i}" for i in range(9)]
    served = dict.fromkeys(["noisy", *quiet], 0)

    async def one(pool: WorkerPool, number: int, tenant: str) -> None:
        async for delta in pool.generate(request(number, max_tokens=60, tenant=tenant)):
            served[tenant] += len(delta.token_ids)

    async def scenario():
        setup = GateSetup(host="127.0.0.1", admission="reserve_max")
        async with house(node, setup=setup) as made:
            loads = [("noisy", 54)] + [(each, 6) for each in quiet]
            order = [tenant for tenant, count in loads for _ in range(count)]
            random.Random(0).shuffle(order)
            tasks = [
                asyncio.ensure_future(one(made.pool, number, tenant))
                for number, tenant in enumerate(order)
            ]
            async with asyncio.timeout(60):
                while sum(served.values()) < 60 * 50:  # each share is 6, and quiet ones have 6
                    await asyncio.sleep(0.005)
            seen = dict(served)
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return seen

    tokens = list(run(scenario()).values())
    jain = sum(tokens) ** 2 / (len(tokens) * sum(each**2 for each in tokens))
    assert jain >= 0.95, tokens


def test_a_new_gate_learns_what_runs_before_it_admits_a_request(node, run):
    async def scenario():
        async with house(node) as made:
            long = asyncio.ensure_future(collect(made.pool, request(0, max_tokens=600)))
            async with asyncio.timeout(60):
                while node.thread.stats().num_generated_tokens < 3:
                    await asyncio.sleep(0.01)
            old = made.gate.service
            old.learner.predictor.observe(request(1).features, 7, "stop")
            made.gate._rebuild(old.setup)  # as after a restart
            new = made.gate.service
            async with asyncio.timeout(60):
                while not new.gate.ledgers or not made.client.is_connected:
                    await asyncio.sleep(0.01)
            held = [len(each) for each in new.gate.ledgers.values()]
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            return new is not old, held, new.learner.predictor is old.learner.predictor

    assert run(scenario()) == (True, [1], True)


def test_a_refusal_has_a_retry_after(run):
    refusal = ServiceError("over_share", "there are others", retry_after_s=7.2)
    with Serving(ScriptedBackend(refusal)) as made:
        body = {"prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{made.base_url}/v1/completions", json=body)
        with grpc.insecure_channel(made.grpc_target) as connection:
            stub = inference_pb2_grpc.InferenceServiceStub(connection)
            ask = inference_pb2.GenerateRequest(text="x")
            with pytest.raises(grpc.RpcError) as failure:
                list(stub.Generate(ask))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "8"
    assert answer.json()["error"]["message"] == "there are others"
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(failure.value.trailing_metadata())
    assert trailing["grpc-retry-pushback-ms"] == "7200"
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 7200
