"""A request without a deadline waits for a limited time, and runs for as long as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments import app
from penstock.deployments.batch.target import Reply, Verdict, judge
from penstock.deployments.client import Client, ClientError
from penstock.deployments.config import WAIT_FROM_ZERO_S, WAIT_S, ServeConfig
from penstock.deployments.gate.types import LOWEST_PRIORITY, Refusal
from penstock.deployments.ingress.core.call import Call, CallOptions
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch import local_queue
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.workers.channel.codec import request_from, submit_message
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.request import FinishReason, Request, SamplingParams
from tests.deployments.gate.test_controller import ask, certain, gate_with
from tests.deployments.gate.test_with_workers import Node
from tests.deployments.ingress.dispatch.peers.scripted_gate import ScriptedGate, serving
from tests.deployments.serving import (
    MODEL,
    EngineBackend,
    Serving,
    generated,
    slowed,
    tokenizer,
)
from tests.deployments.serving import model as served_model
from tests.deployments.waiting import until

WAIT = 0.3
ONE_SLOT = EngineConfig(weights="fp32", device="cpu", num_blocks=200, max_num_seqs=1, threads=1)


def call(max_tokens: int = 8, prompt: str = "The sea was") -> Call:
    return Call(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))


def core_over(pool: WorkerPool, node: Node, wait_s: float = WAIT, **options: Any) -> RequestCore:
    return RequestCore(
        ModelRuntime(
            tokenizer(),
            pool,
            model_name=MODEL,
            vocab_size=node.engine.model.config.vocab_size,
            max_model_len=node.engine.max_model_len,
            longest_wait_s=wait_s,
            **options,
        )
    )


@contextlib.asynccontextmanager
async def connected(
    node: Node,
    gate: ScriptedGate | None = None,
    longest_wait_s: float | None = None,
    answer_s: float = 5.0,
) -> AsyncIterator[WorkerPool]:
    async with contextlib.AsyncExitStack() as opened:
        client = None
        if gate is not None:
            address = await opened.enter_async_context(serving(gate))

            async def where() -> Any:
                return address

            client = GateClient("test", where, answer_s=answer_s)
            asking = asyncio.ensure_future(client.run())
            opened.callback(asking.cancel)
            await until(lambda: client.is_connected)
        pool = WorkerPool("test", client, longest_wait_s=longest_wait_s)
        pool.update([node.channel.info])
        await until(lambda: pool.num_connected == 1)
        yield pool
        await pool.close()


@pytest.fixture
def node(model):
    made = Node(model, ONE_SLOT)
    yield made
    made.stop()


async def fails(core: RequestCore, *, within_s: float) -> str:
    """The code with which a request ends."""
    began_s = time.monotonic()
    with pytest.raises(ServiceError) as raised:
        async for _ in generated(core, call()):
            pass
    assert WAIT <= time.monotonic() - began_s < within_s
    assert not core._running
    return raised.value.code


def test_a_gate_that_never_decides(run, node):
    gate = ScriptedGate()

    async def scenario():
        async with connected(node, gate) as pool:
            client = pool._gate
            assert isinstance(client, GateClient)
            core = core_over(pool, node, learner=client)
            assert await fails(core, within_s=5.0) == "deadline_exceeded"
            assert client.num_waiting == 0
            assert len(gate.offered) == 1
            await until(lambda: gate.ended == gate.offered)  # it frees the place in its queue

    run(scenario())
    assert node.engine.stats().num_prompt_tokens == 0


def test_longest_wait_s_holds_while_the_gate_is_silent(run, node, monkeypatch):
    """What has no room at a worker waits at the ingress: also for no longer than that."""
    gate = ScriptedGate()
    gate.queues = False
    monkeypatch.setattr(local_queue, "FURTHER", 0)
    slowed(node.engine, monkeypatch)
    longest_s = 0.5

    async def ends(
        pool: WorkerPool, priority: int, wait_s: float
    ) -> tuple[str, float, float | None]:
        core = core_over(pool, node, wait_s=wait_s, learner=pool._gate)
        asked, began_s = replace(call(), options=CallOptions(priority=priority)), time.monotonic()
        with pytest.raises(ServiceError) as raised:
            async for _ in generated(core, asked):
                pass
        return raised.value.code, time.monotonic() - began_s, raised.value.retry_after_s

    async def scenario():
        async with connected(node, gate, longest_s, answer_s=0.02) as pool:
            core = core_over(pool, node, wait_s=60.0, learner=pool._gate)
            running = generated(core, call(1900))
            await anext(running)
            new, batch = await asyncio.gather(ends(pool, 0, 60.0), ends(pool, 100, 2.0))
            assert new[0] == "overloaded" and (new[2] or 0.0) >= 1.0
            assert longest_s <= new[1] < 30.0  # half of what it may wait by itself
            assert batch[0] == "deadline_exceeded" and batch[1] >= 2.0
            await running.aclose()

    run(scenario())


def test_a_worker_whose_queue_does_not_move(run, node):
    """Its only slot is taken by a stream that is much longer than the longest wait, and goes on."""

    async def scenario():
        async with connected(node) as pool:
            core = core_over(pool, node)
            running = generated(core, call(1000))
            ids = list((await anext(running)).token_ids)
            before = node.engine.stats().num_prompt_tokens
            waiting = asyncio.ensure_future(fails(core_over(pool, node), within_s=5.0))
            async for piece in running:
                ids += piece.token_ids
                last = piece
            assert await waiting == "deadline_exceeded"
            assert (len(ids), last.finish_reason) == (1000, FinishReason.LENGTH)
            assert node.engine.stats().num_prompt_tokens == before
            await until(lambda: not node.engine.has_work())
            assert node.engine.stats().num_live_blocks == 0

    run(scenario())


def test_a_continued_request_may_wait_anew_and_a_preempted_one_is_not_dropped(model):
    # Apart, no block is kept for activations: both are admitted.
    small = replace(ONE_SLOT, max_num_seqs=2, num_blocks=20, block_size=4)
    engine = Engine(replace(small, activation_memory="separate"), model)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    until_s = time.monotonic() + 60.0
    for name in ("old", "young"):
        engine.add(Request(name, tuple(range(3, 40)), params, wait_until_s=until_s))
    deltas = []
    while engine.has_work() and not engine.stats().num_preemptions:
        deltas += engine.step()
    assert engine.has_work(), "none was preempted"
    for sequence in engine._sequences.values():
        sequence.request = replace(sequence.request, wait_until_s=time.monotonic())
    while engine.has_work():
        deltas += engine.step()
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.LENGTH] * 2


def test_the_wait_travels_as_time_left():
    def sent(submitted: Request) -> float | None:
        return request_from(submit_message(submitted, 1, 1), "r").wait_until_s

    assert sent(Request("r", (1,))) is None
    until_s = time.monotonic() + 50.0
    assert abs((sent(Request("r", (1,), wait_until_s=until_s)) or 0.0) - until_s) < 1.0


def test_both_front_ends_say_so(monkeypatch):
    backend = EngineBackend(Engine(ONE_SLOT, served_model()))
    slowed(backend.engine, monkeypatch)
    holder = {"prompt": "The sea was", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        Serving(backend, max_model_len=2048, longest_wait_s=WAIT) as started,
        httpx.Client(base_url=started.base_url, timeout=60) as plain,
        Client(started.grpc_target) as client,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(5):  # where the machine stands still, it waits for too long itself
            held = stack.enter_context(plain.stream("POST", "/v1/completions", json=holder))
            if held.status_code == 200:
                break
        chunks = held.iter_raw()
        next(chunks)
        body = {"prompt": "No one reads", "max_tokens": 4}
        answer = httpx.post(f"{started.base_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert "waited too long" in answer.json()["error"]["message"]
        with pytest.raises(ClientError) as raised:
            client.complete("No one reads", max_tokens=4)
        assert raised.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    backend.stop()


def test_the_default_and_what_the_gate_makes_of_it():
    def wait_of(**settings: Any) -> float | None:
        setup = app.gate_setup(ServeConfig(**settings), None)
        assert setup is not None
        return setup.longest_wait_s

    assert ServeConfig().longest_possible_wait_s == wait_of() == WAIT_S
    assert wait_of(num_workers="0:2") == WAIT_FROM_ZERO_S  # a start takes minutes
    assert wait_of(wait_timeout_s=7.0) == wait_of(wait_timeout_s=7.0, longest_wait_s=9.0) == 7.0
    assert wait_of(longest_wait_s=9.0) == 9.0


def test_a_batch_waits_long_and_returns_when_it_has_waited():
    gate = gate_with(200, longest_wait_s=0.5)
    others = (gate.offer(ask(f"other-{i}", 20), certain(90), 0.0) for i in range(200))
    assert any(isinstance(each, Refusal) for each in others)
    batch = ask("batch", priority=LOWEST_PRIORITY)
    assert gate.offer(batch, certain(90), 0.0) is None
    waited = Reply(504, {"error": {"code": "deadline_exceeded"}}, "id")
    assert {judge(waited, num_failures) for num_failures in range(9)} == {Verdict.AGAIN}
