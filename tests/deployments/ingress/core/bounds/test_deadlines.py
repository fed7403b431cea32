"""Deadlines from the client to the worker's queue: late requests fail and are not computed.

The worker has one slot, which another request holds; its counter of prompt tokens is the proof.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import httpx
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.protos.inference import open_inference_pb2 as oip
from penstock.protos.inference import open_inference_pb2_grpc
from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.request import Delta, Request, SamplingParams
from tests.deployments import waiting
from tests.deployments.serving import MODEL, EngineBackend, Serving, model, slowed, tokenizer

ONE_SLOT = EngineConfig(num_blocks=256, max_num_seqs=1, threads=1)
PROMPT = "It was a bright morning, and"
LATE = "No one ever reads these words of"
WAIT_S = 0.3
eventually = partial(waiting.eventually, within_s=60.0)


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    backend = EngineBackend(Engine(ONE_SLOT, model()))
    with pytest.MonkeyPatch.context() as patch, Serving(backend, max_model_len=2048) as started:
        slowed(backend.engine, patch)  # the holder of the slot still runs in the end
        yield started
    backend.stop()


def over_grpc(serving: Serving) -> None:
    with (
        Client(serving.grpc_target, timeout_s=WAIT_S) as client,
        pytest.raises(ClientError) as raised,
    ):
        client.complete(LATE, max_tokens=4)
    assert raised.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


def over_http(serving: Serving) -> None:
    answer = httpx.post(
        f"{serving.base_url}/v1/completions",
        json={"prompt": LATE, "max_tokens": 4},
        headers={"x-request-timeout-ms": str(round(1000 * WAIT_S))},
        timeout=60,
    )
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def over_oip(serving: Serving) -> None:
    contents = oip.InferTensorContents(bytes_contents=[LATE.encode()])
    tensor = oip.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=contents
    )
    with grpc.insecure_channel(serving.grpc_target) as channel:
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.ModelInfer(
                oip.ModelInferRequest(model_name=MODEL, inputs=[tensor]), timeout=WAIT_S
            )
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("ask", [over_grpc, over_http, over_oip])
def test_who_waits_too_long_is_never_computed(
    serving: Serving, ask: Callable[[Serving], None]
) -> None:
    backend, has_slot, leave = serving.backend, threading.Event(), threading.Event()

    def hold() -> None:
        with Client(serving.grpc_target) as client:
            pieces = client.generate(PROMPT, max_tokens=2000, ignore_eos=True)
            for _ in pieces:
                has_slot.set()
                if leave.is_set():
                    break
            pieces.close()

    before = backend.engine.stats()
    with ThreadPoolExecutor(1) as others:
        holding = others.submit(hold)
        assert has_slot.wait(60)
        ask(serving)
        eventually(lambda: backend.engine.stats().num_waiting == 0)
        assert not holding.done(), "the slot was free"
        leave.set()
        holding.result(60)
    eventually(lambda: not backend.engine.has_work())
    after = backend.engine.stats()
    num_read = after.num_prompt_tokens - before.num_prompt_tokens
    assert num_read == len(tokenizer().encode(PROMPT)) - 1  # the last one is sampled from


def test_the_worker_keeps_deadlines_by_itself() -> None:
    """No ingress watches the clock here: what the worker receives must be enough."""
    engine = Engine(ONE_SLOT, model())
    channel = ChannelServer("127.0.0.1", MODEL, engine.max_model_len)
    thread = EngineThread(engine, channel.deliver, num_threads=1)
    channel.start(thread)
    thread.start()
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)

    async def last_of(deltas: Any) -> Delta:
        return [delta async for delta in deltas][-1]

    async def scenario() -> tuple[Delta, int]:
        pool = WorkerPool("test")
        pool.update([channel.info])
        async with asyncio.timeout(60):
            while not pool.ready():
                await asyncio.sleep(0.005)
            holder = pool.generate(AdmissionRequest(Request("holder", (5, 6, 7), params)))
            await anext(holder)
            late = Request("late", (8, 9), params, deadline_s=time.monotonic() + WAIT_S)
            last = await last_of(pool.generate(AdmissionRequest(late)))
            await holder.aclose()
            while engine.has_work():
                await asyncio.sleep(0.005)
        await pool.close()
        return last, engine.stats().num_prompt_tokens

    try:
        last, num_read = asyncio.run(scenario())
    finally:
        channel.stop()
        thread.stop()
    assert last.error == "deadline_exceeded"
    assert engine.stats().num_finished["error"] == 1
    assert num_read == 2  # of the holder's three; the last one is sampled from
