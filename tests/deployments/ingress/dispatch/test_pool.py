"""Both ends of the token path in one process, on real engines: sharing, cancelling, and losing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest, admission_request
from penstock.deployments.ingress.core.call import Call
from penstock.deployments.ingress.dispatch import worker_link, worker_links
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel import framing, server, unproven
from penstock.workers.channel.codec import delta_from, delta_message, request_from, submit_message
from penstock.workers.channel.delta_size import num_bytes
from penstock.workers.channel.framing import connected
from penstock.workers.channel.peer import Outbox, joined
from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.request import (
    Delta,
    FinishReason,
    FirstTokenTimes,
    Request,
    SamplingParams,
    TokenLogprob,
)
from penstock.workers.stats import MemoryEvent, WorkerInfo
from tests.deployments.ingress.dispatch.peers.raw_ingress import (
    challenged,
    framed,
    greeted,
    heard,
    hello,
)
from tests.deployments.serving import slowed
from tests.deployments.waiting import until

CONFIG = EngineConfig(weights="fp32", device="cpu", num_blocks=400, max_num_seqs=16, threads=1)


class Node:
    """A worker as actor.Worker makes one, but for the model, which all share."""

    def __init__(self, model: Any, **options: Any):
        self.engine = Engine(CONFIG, model)
        self.channel = ChannelServer("127.0.0.1", "test", self.engine.max_model_len, **options)
        self.thread = EngineThread(
            self.engine, self.channel.deliver, num_threads=1, on_failure=self.channel.break_off
        )
        self.channel.start(self.thread)

    def stop(self) -> None:
        self.channel.stop()
        self.thread.stop()

    def slow_down(self, pause_s: float = 0.01) -> None:
        """As `slowed`, for as long as the engine is there."""
        slowed(self.engine, pytest.MonkeyPatch(), pause_s)

    async def is_idle(self) -> None:
        """Returns once no block is held; fails after a while."""
        async with asyncio.timeout(60):
            while (stats := self.thread.stats()).num_live_blocks or stats.num_running:
                await asyncio.sleep(0.01)
        self.engine.check()


@contextlib.asynccontextmanager
async def pool_of(*nodes: Node) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool("test")
    pool.update([node.channel.info for node in nodes])
    await until(lambda: pool.num_connected == len(nodes), 60)
    try:
        yield pool
    finally:
        await pool.close()


def request(number: int, max_tokens: int = 24, **params: Any) -> Request:
    prompt = tuple(random.Random(number).choices(range(3, 2000), k=number % 7 + 2))
    sampling = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    )
    return Request(f"req-{number}", prompt, sampling)


async def collect(
    pool: WorkerPool, submitted: Request, begun: set[str] | None = None
) -> tuple[list[int], Delta]:
    """The ids and the last delta; the request's id joins `begun` with its first token."""
    ids: list[int] = []
    async for delta in pool.generate(AdmissionRequest(submitted)):
        assert delta.request_id == submitted.request_id
        ids += delta.token_ids
        if begun is not None and ids:
            begun.add(submitted.request_id)
        last = delta
    return ids, last


def alone(model: Any, submitted: Request) -> list[int]:
    """The ids of a request that an engine runs alone."""
    engine = Engine(CONFIG, model)
    engine.add(submitted)
    ids: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            ids += delta.token_ids
    return ids


def test_what_a_request_contains_reaches_its_worker(model, nodes, run, monkeypatch):
    """Its emitted ids, and whether it may be declined."""
    made = replace(request(4, max_tokens=9), emitted_ids=(8, 9), may_decline=True)
    call = Call(made.prompt_ids, made.params)
    admission = admission_request(made, call, "m", ContextSettings.of(CONFIG, 512))
    assert admission.request is made
    (node, _), received = nodes, []
    submit = node.thread.submit
    monkeypatch.setattr(node.thread, "submit", lambda each: (received.append(each), submit(each)))

    async def scenario():
        async with pool_of(node) as pool:
            return [delta async for delta in pool.generate(admission)]

    ids = [token_id for delta in run(scenario()) for token_id in delta.token_ids]
    (got,) = received
    assert (got.emitted_ids, got.may_decline) == ((8, 9), True)
    assert ids == alone(model, made) and len(ids) == 7


def test_requests_and_deltas_survive_the_wire():
    submitted = Request(
        "r",
        (1, 70_000, 3),
        SamplingParams(0.7, 5, 0.9, 0.01, -(2**63), None, 2, True, ("halt",), (9, 8)),
        emitted_ids=(4, 5),
    )
    back = request_from(
        pb.Submit.FromString(submit_message(submitted, 7, 9).SerializeToString()), "r"
    )
    assert back.params.stop == ()  # stays at the ingress
    assert back.prompt_ids == submitted.prompt_ids
    assert back.emitted_ids == submitted.emitted_ids
    for name in SamplingParams.__slots__:
        if name != "stop":
            assert getattr(back.params, name) == getattr(submitted.params, name), name
    for delta in (
        Delta("r", [1, 2, 2**31]),
        Delta("r", [1], times=FirstTokenTimes(queue_s=0.5, prefill_s=0.0)),
        Delta("r", [0], FinishReason.STOP, stop_token_id=0, num_cached_tokens=16),
        Delta("r", [], FinishReason.ERROR, error="overloaded"),
    ):
        wire = pb.Delta.FromString(delta_message(delta, 3).SerializeToString())
        assert delta_from(wire, "r") == delta


def test_many_requests_on_two_workers_give_the_ids_of_each_alone(model, nodes, run):
    submitted = [request(n, seed=n, temperature=n % 2 * 0.8) for n in range(16)]

    async def scenario():
        async with pool_of(*nodes) as pool:
            return await asyncio.gather(*(collect(pool, each) for each in submitted))

    answers = run(scenario())
    for each, (ids, last) in zip(submitted, answers):
        assert ids == alone(model, each), each.request_id
        assert last.finish_reason is FinishReason.LENGTH
    served = [node.thread.stats().num_finished["length"] for node in nodes]
    assert sum(served) == 16
    assert min(served) >= 4


def test_what_shapes_and_scores_an_answer_goes_all_the_way(model, nodes, run):
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 1.0}
    forms = {"logit_bias": ((300, 4.0),), "bad_words_ids": ((300, 301), (7,))}
    submitted = request(6, seed=3, temperature=1.0, **penalties, **forms)
    scored = request(6, seed=3, temperature=1.0, logprobs=2, prompt_logprobs=1)
    only = request(6, temperature=1.0, seed=3, allowed_token_ids=(300, 301, 302))

    async def scenario():
        async with pool_of(*nodes) as pool:
            deltas = [delta async for delta in pool.generate(AdmissionRequest(scored))]
            return deltas, [(await collect(pool, each))[0] for each in (submitted, only)]

    deltas, ids = run(scenario())
    assert ids == [alone(model, submitted), alone(model, only)]
    engine = Engine(CONFIG, model)
    engine.add(scored)
    expected = [delta for _ in range(24) for delta in engine.step()]
    for part in ("token_ids", "logprobs", "prompt_logprobs"):
        received, made = (
            [e for d in each for e in getattr(d, part)] for each in (deltas, expected)
        )
        assert received == made, part
    assert len(deltas[0].prompt_logprobs) == len(scored.prompt_ids) - 1


def test_the_worker_with_less_to_do_is_chosen(nodes, run):
    for node in nodes:
        node.slow_down()

    async def scenario():
        async with pool_of(*nodes) as pool:
            long = asyncio.ensure_future(collect(pool, request(0, max_tokens=1500)))
            await until(lambda: sum(node.channel.num_requests for node in nodes) == 1)
            for n in range(1, 7):  # one after the other: each finds the other worker idle
                await collect(pool, request(n, max_tokens=2))
            long.cancel()

    run(scenario())
    assert sorted(node.thread.stats().num_finished["length"] for node in nodes) == [0, 6]


def test_a_closed_iterator_frees_its_blocks(nodes, run):
    async def leave_after(pool, n, num_deltas):
        stream = pool.generate(AdmissionRequest(request(n, max_tokens=1500)))
        for _ in range(num_deltas):
            await anext(stream)
        await stream.aclose()

    async def scenario():
        async with pool_of(*nodes) as pool:
            await asyncio.gather(*(leave_after(pool, n, n % 4 + 1) for n in range(12)))
            ids, last = await collect(pool, request(99))
            for node in nodes:
                await node.is_idle()
        return ids, last

    ids, last = run(scenario())
    assert len(ids) == 24
    assert last.finish_reason is FinishReason.LENGTH


def test_when_an_ingress_vanishes_its_requests_are_cancelled(nodes, run):
    async def scenario():
        async with pool_of(*nodes) as pool:
            calls = [
                asyncio.ensure_future(collect(pool, request(n, max_tokens=1500))) for n in range(6)
            ]
            await until(lambda: sum(node.thread.stats().num_running for node in nodes) == 6, 60)
        answers = await asyncio.gather(*calls)
        for node in nodes:
            await node.is_idle()
        return answers

    for _, last in run(scenario()):
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "worker_lost")


def test_what_a_lost_worker_began_is_continued_elsewhere(model, nodes, run):
    nodes[0].slow_down()

    async def scenario():
        async with pool_of(*nodes) as pool:
            begun: set[str] = set()
            asked = [request(n, max_tokens=300) for n in range(4)]
            calls = [asyncio.ensure_future(collect(pool, each, begun)) for each in asked]
            await until(lambda: len(begun) == 4, 60)
            nodes[0].channel.stop()
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*calls)
            return answers, pool.lost_requests.num_continued

    answers, num_continued = run(scenario())
    assert num_continued == 2
    for n, (ids, last) in enumerate(answers):
        assert ids == alone(model, request(n, max_tokens=300))
        assert last.finish_reason is FinishReason.LENGTH


def test_what_a_lost_worker_had_not_begun_is_done_elsewhere(model, run):
    dead, live = Node(model), Node(model)  # the first one's engine never starts
    live.thread.start()
    submitted = [request(n) for n in range(6)]

    async def scenario():
        async with pool_of(dead, live) as pool:
            calls = [asyncio.ensure_future(collect(pool, each)) for each in submitted]
            await asyncio.sleep(0.2)
            dead.channel.stop()
            async with asyncio.timeout(60):
                return await asyncio.gather(*calls)

    answers = run(scenario())
    live.stop()
    for each, (ids, last) in zip(submitted, answers):
        assert last.finish_reason is FinishReason.LENGTH, last
        assert ids == alone(model, each)


def test_a_failed_engine_is_a_lost_worker_at_once(model, run, monkeypatch):
    failing, live = Node(model), Node(model)
    hold, held, fail = threading.Event(), threading.Event(), threading.Event()
    step = failing.engine.step

    def step_or_fail():
        if hold.is_set():
            held.set()
            fail.wait(30)
            raise RuntimeError("out of step")
        return step()

    monkeypatch.setattr(failing.engine, "step", step_or_fail)
    for node in (failing, live):
        node.thread.start()
    begun, waiting = request(1, max_tokens=400), request(2)

    async def scenario():
        async with pool_of(failing) as pool:
            stream = pool.generate(AdmissionRequest(begun))
            seen = [await anext(stream)]
            hold.set()
            await asyncio.to_thread(held.wait, 30)
            elsewhere = asyncio.ensure_future(collect(pool, waiting))
            async with asyncio.timeout(30):
                while failing.channel.num_requests < 2:
                    await asyncio.sleep(0.005)
                pool.update([failing.channel.info, live.channel.info])
                while pool.num_connected < 2:
                    await asyncio.sleep(0.005)
                assert not elsewhere.done()
                fail.set()  # nothing but the failure itself tells the pool
                seen += [delta async for delta in stream]
                return seen, await elsewhere

    seen, (ids, last) = run(scenario())
    began = [token_id for delta in seen for token_id in delta.token_ids]
    assert began == alone(model, begun)
    assert seen[-1].finish_reason is FinishReason.LENGTH
    assert (ids, last.finish_reason) == (alone(model, waiting), FinishReason.LENGTH)
    assert not failing.thread.alive  # which is what the health check asks
    for node in (failing, live):
        node.stop()
    assert not failing.channel.alive


def test_without_a_worker_the_answer_is_an_error(run):
    async def scenario():
        pool = WorkerPool("test")
        assert not pool.ready()
        return await collect(pool, request(1))

    ids, last = run(scenario())
    assert (ids, last.finish_reason, last.error) == ([], FinishReason.ERROR, "no_worker")


def test_a_worker_that_replaces_a_lost_one_is_waited_for(model, nodes, run, monkeypatch):
    """It is listed a moment after the other one is gone, as where an update's last worker dies."""
    monkeypatch.setattr(worker_links, "REPLACED_S", 30.0)

    async def scenario():
        async with pool_of(nodes[0]) as pool:
            nodes[0].channel.stop()
            await until(lambda: pool.num_connected == 0, 60)
            call = asyncio.ensure_future(collect(pool, request(1)))
            await asyncio.sleep(0.3)
            assert not call.done()
            pool.update([nodes[1].channel.info])
            return await call

    ids, last = run(scenario())
    assert (ids, last.finish_reason) == (alone(model, request(1)), FinishReason.LENGTH)


def test_a_worker_is_lost_once_its_connection_has_ended_though_it_is_listed(nodes, run):
    async def scenario():
        async with pool_of(*nodes) as pool:
            epochs = [node.channel.info.epoch for node in nodes]
            before = [pool.has_lost(epoch) for epoch in (*epochs, 12345)]
            nodes[0].channel.stop()
            await until(lambda: pool.num_connected == 1, 60)
            pool.update([node.channel.info for node in nodes])  # its reports are not missed yet
            return before, [pool.has_lost(epoch) for epoch in epochs]

    assert run(scenario()) == ([False] * 3, [True, False])


def test_a_worker_that_is_being_connected_to_is_waited_for(model, nodes, run):
    """The registry lists it, and no other takes requests."""

    async def scenario():
        pool = WorkerPool("test")
        try:
            pool.update([nodes[0].channel.info])
            assert pool.num_connected == 0
            return await collect(pool, request(1))
        finally:
            await pool.close()

    ids, last = run(scenario())
    assert (ids, last.finish_reason) == (alone(model, request(1)), FinishReason.LENGTH)


def test_a_refused_request_comes_back_with_its_code(nodes, run):
    async def scenario():
        async with pool_of(*nodes) as pool:
            return await collect(pool, Request("long", (5,) * 5000))

    _, last = run(scenario())
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "context_length_exceeded")


def test_a_silent_worker_is_dead_and_what_it_sends_later_is_dropped(model, nodes, run, monkeypatch):
    monkeypatch.setattr(worker_link, "TICK_S", 0.15)  # so silence of 1.5 s is death
    step, thawed = nodes[0].engine.step, threading.Event()
    thawed.set()

    def step_unless_frozen():
        thawed.wait(60)
        return step()

    monkeypatch.setattr(nodes[0].engine, "step", step_unless_frozen)

    async def scenario():
        async with pool_of(nodes[0]) as pool:
            stream = pool.generate(AdmissionRequest(request(3, max_tokens=400)))
            first = await anext(stream)
            # As if stopped: connections stay open, and nothing comes.
            thawed.clear()
            nodes[0].channel._loop.call_soon_threadsafe(thawed.wait, 60)
            await until(lambda: not pool.ready(), 50)
            thawed.set()
            # It thaws, is connected again, and continues: nothing of the old connection counts.
            seen = [first] + [delta async for delta in stream]
            return seen, await collect(pool, request(4))

    seen, (ids, last) = run(scenario())
    assert [delta.finish_reason for delta in seen[:-1]] == [None] * (len(seen) - 1)
    begun = [token_id for delta in seen for token_id in delta.token_ids]
    assert begun == alone(model, request(3, max_tokens=400))
    assert ids == alone(model, request(4))
    assert last.finish_reason is FinishReason.LENGTH


def reflected(nonce: bytes) -> pb.Hello:
    """The worker's own words, sent back to it."""
    return pb.Hello(nonce=nonce, proof=nonce)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (lambda info, nonce: hello(info, nonce, token="wrong"), "token"),
        (lambda info, nonce: hello(info, bytes(32)), "token"),  # the answer to another challenge
        (lambda info, nonce: framed(epoch=info.epoch, hello=pb.Hello()), "token"),
        (lambda info, nonce: framed(epoch=info.epoch, hello=reflected(nonce)), "token"),
        (lambda info, nonce: hello(replace(info, epoch=info.epoch ^ 1), nonce), "new epoch"),
        (lambda info, nonce: framed(epoch=info.epoch, submit=pb.Submit(prompt_ids=[5])), "Hello"),
        (lambda info, nonce: b"GET / HTTP/1.1\r\n\r\n", None),  # as a length: half a gigabyte
        (lambda info, nonce: struct.pack("<II", 5000, 0), None),  # more than a stranger may say
        (lambda info, nonce: struct.pack("<II", 4, 0) + b"\xff\xff\xff\xff", None),
        (lambda info, nonce: b"", "prove itself"),  # says nothing at all
    ],
)
def test_strangers_and_other_epochs_are_refused(nodes, run, monkeypatch, first, reason):
    says_nothing = reason == "prove itself"
    monkeypatch.setattr(unproven, "HELLO_S", 0.5 if says_nothing else 60.0)
    info = nodes[0].channel.info

    async def scenario():
        connection = await connected(info.address)
        with connection:
            nonce = await challenged(connection)
            await asyncio.get_running_loop().sock_sendall(connection, first(info, nonce))
            async with asyncio.timeout(50):
                said = await heard(connection)
                if reason is None:
                    assert said is None
                else:
                    assert reason in said.rejection.reason
                    assert await heard(connection) is None
        monkeypatch.setattr(unproven, "HELLO_S", 60.0)
        async with pool_of(nodes[0]) as pool:  # and no other connection suffers
            return await collect(pool, request(1))

    _, last = run(scenario())
    assert last.finish_reason is FinishReason.LENGTH
    assert nodes[0].thread.stats().num_finished["length"] == 1


def test_connections_that_break_at_once_harm_no_request(nodes, run):
    info = nodes[0].channel.info

    async def scenario():
        for _ in range(50):
            connection = await connected(info.address)
            # Closed so, it is reset, perhaps before it was accepted.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        async with pool_of(nodes[0]) as pool:
            return await collect(pool, request(1))

    _, last = run(scenario())
    assert last.finish_reason is FinishReason.LENGTH


def test_a_frozen_ingress_is_cut_off(nodes, run, monkeypatch):
    monkeypatch.setattr(server, "SILENCE_TICKS", 8)  # of a tenth of a second
    info = nodes[0].channel.info

    async def scenario():
        connection = await greeted(info)
        with connection:  # open, and acknowledged by the system: only it itself says nothing
            submit = submit_message(request(1, max_tokens=1900), 1, 100)
            submit = framed(2, epoch=info.epoch, submit=submit)
            await asyncio.get_running_loop().sock_sendall(connection, submit)
            async with asyncio.timeout(60):
                while (await heard(connection)) is not None:
                    pass
        await nodes[0].is_idle()

    run(scenario())
    assert nodes[0].thread.stats().num_finished["abort"] == 1


@contextlib.asynccontextmanager
async def narrow(info: WorkerInfo) -> AsyncIterator[socket.socket]:
    """An ingress that has said hello, and has so little room that the first messages fill it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.setblocking(False)
        host, port = info.address.split(":")
        await loop.sock_connect(connection, (host, int(port)))
        await loop.sock_sendall(connection, hello(info, await challenged(connection)))
        yield connection


def prepare_with_little_room(connection: socket.socket) -> None:
    """In place of framing._prepare: few messages wait in the system, the others with the worker."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def test_a_reader_that_never_reads_is_cut_off(model, run, monkeypatch):
    monkeypatch.setattr(framing, "_prepare", prepare_with_little_room)
    pending, push = [0], Outbox.push

    def counted_push(outbox: Outbox, deltas: list[tuple[int, Delta]]) -> None:
        push(outbox, deltas)
        pending.append(outbox.num_pending_bytes)

    monkeypatch.setattr(Outbox, "push", counted_push)
    node = Node(model, max_pending_bytes=100_000)
    node.thread.start()
    info = node.channel.info

    async def scenario():
        loop = asyncio.get_running_loop()
        async with narrow(info) as connection:
            for n in range(8):
                submit = submit_message(request(n, max_tokens=1900, logprobs=20), n + 1, 100)
                await loop.sock_sendall(connection, framed(n + 2, epoch=info.epoch, submit=submit))
            async with asyncio.timeout(60):
                while not node.thread.stats().num_finished["abort"]:
                    await asyncio.sleep(0.01)
            await node.is_idle()
            return node.thread.stats()

    stats = run(scenario())
    node.stop()
    token = Delta("", [5], logprobs=[TokenLogprob(5, -1.0, 1, ((5, -1.0),) * 20)])
    most = max(pending)
    assert 0 < most <= 100_000 + 8 * num_bytes(token), "more than the limit and one step"
    assert stats.num_finished["abort"] == 8
    assert stats.num_finished["length"] == 0


def test_what_a_slow_reader_gets_late_is_whole(model, run, monkeypatch):
    monkeypatch.setattr(framing, "_prepare", prepare_with_little_room)
    monkeypatch.setattr(server, "SILENCE_TICKS", 10_000)  # this reader sends no heartbeats
    node = Node(model)
    node.thread.start()
    info, submitted = node.channel.info, request(2, max_tokens=600, logprobs=20)

    async def scenario():
        loop, received = asyncio.get_running_loop(), []
        async with narrow(info) as connection:
            submit = framed(2, epoch=info.epoch, submit=submit_message(submitted, 1, 600))
            await loop.sock_sendall(connection, submit)
            async with asyncio.timeout(120):
                while not node.thread.stats().num_finished["length"]:
                    await asyncio.sleep(0.01)  # it all lies with the worker by now
                while not received or received[-1].finish_reason is None:
                    message = await heard(connection)
                    received += [delta_from(each, "") for each in message.step.deltas]
        return received

    received = run(scenario())
    node.stop()
    assert [i for delta in received for i in delta.token_ids] == alone(model, submitted)
    assert len(received) < 600  # steps that found no room went in one message
    assert sum(len(delta.logprobs) for delta in received) == 600


def scored(
    ids: list[int],
    finish_reason: FinishReason | None = None,
    *,
    stop_token_id: int | None = None,
    prompt: tuple[int, ...] = (),
) -> Delta:
    logprobs = [TokenLogprob(i, -1.0, i) for i in ids]
    prompt_logprobs = [TokenLogprob(i, -2.0, i) for i in prompt]
    return Delta(
        "a",
        ids,
        finish_reason,
        stop_token_id,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def test_joined_deltas_are_as_if_both_had_come_in_one_step():
    first = scored([1], prompt=(8, 9))
    first.times, first.engine, first.num_cached_tokens = FirstTokenTimes(0.5, 0.25), "w", 1
    first.computes = "t-1 fp32"
    last = scored([2], FinishReason.STOP, stop_token_id=2)
    said = {"num_cached_tokens": 1, "num_evicted_tokens": 128, "moe_mode": "sparse"}
    said |= {"num_neurons": 7, "num_skipped_neurons": 3, "embedding": b"1234"}
    said |= {"num_draft_tokens": 9, "num_accepted_tokens": 5}
    said |= {"error": "e", "error_message": "why", "error_param": "prompt"}
    for name, value in said.items():
        setattr(last, name, value)
    whole = scored([1, 2], FinishReason.STOP, stop_token_id=2, prompt=(8, 9))
    whole.times, whole.engine, whole.computes = first.times, "w", first.computes
    first.events, last.events = [MemoryEvent("preempted", 1, 9)], [MemoryEvent("decided", 2, 1)]
    whole.events = [*first.events, *last.events]
    for name, value in said.items():
        setattr(whole, name, value)
    # Nothing that a delta of a worker can say is left out of this test.
    names = {each.name for each in dataclasses.fields(Delta)} - {"is_replayed"}
    assert all(getattr(whole, name) for name in names)
    assert joined(first, last) == whole
    later = joined(dataclasses.replace(whole, token_ids=[1]), Delta("a", [3]))
    assert (later.num_cached_tokens, later.num_evicted_tokens) == (1, 128)


def test_a_worker_tells_who_is_here_at_once_and_that_they_go_on_once_a_second(
    nodes, run, monkeypatch
):
    node = nodes[0]
    step = node.engine.step
    monkeypatch.setattr(node.engine, "step", lambda: (time.sleep(0.02), step())[1])

    async def scenario() -> tuple[int, float]:
        received: list[set[str]] = []
        async with pool_of(node) as pool:
            monkeypatch.setattr(
                pool, "reported", lambda _, report: received.append(set(report.request_ids))
            )

            async def told(names: set[str]) -> None:
                await until(lambda: received and received[-1] == names, 60)

            long = asyncio.ensure_future(collect(pool, request(1, 1800)))
            await told({"req-1"})
            del received[:]
            began_s = time.monotonic()
            await asyncio.sleep(3.0)
            num_quiet, quiet_s = len(received), time.monotonic() - began_s
            assert not long.done()
            other = asyncio.ensure_future(collect(pool, request(2, 1800)))
            await told({"req-1", "req-2"})
            other.cancel()
            await told({"req-1"})
            long.cancel()
            await told(set())
            await asyncio.gather(long, other, return_exceptions=True)
        return num_quiet, quiet_s

    num_quiet, quiet_s = run(scenario())
    assert num_quiet <= quiet_s + 1  # one a second, and not one for each look
