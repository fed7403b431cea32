"""The largest request for the scores of a prompt harms no other stream of its connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.workers.models.loader import load_model
from penstock.workers.request import MAX_PROMPT_SCORES, Delta, FinishReason, Request, SamplingParams
from tests.deployments.ingress.dispatch.test_pool import Node, alone, collect, pool_of
from tests.workers.checkpoints import _DENSE, random_model, random_prompt

NUM_TOP = 20
NUM_PROMPT = MAX_PROMPT_SCORES // (1 + NUM_TOP)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory):
    """One that reads so long a prompt."""
    folder = Path(tmp_path_factory.mktemp("long"))
    random_model("llama", {**_DENSE, "max_position_embeddings": 8192}).save_pretrained(folder)
    return load_model(folder, weights="fp32", device="cpu", progress=False)


def request(name: str, num_prompt: int, max_tokens: int, **params: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, **params)
    return Request(name, tuple(random_prompt(num_prompt, max_tokens)), sampling)


def test_streams_beside_the_largest_one_get_all(long_model, run):
    node = Node(long_model)
    node.thread.start()
    largest = [request(f"big-{n}", NUM_PROMPT, 3, prompt_logprobs=NUM_TOP) for n in range(2)]
    beside = [request(f"small-{n}", 5, 100 + n) for n in range(3)]

    async def scenario():
        async with pool_of(node) as pool:
            running = [asyncio.ensure_future(collect(pool, each)) for each in beside]
            deltas: list[list[Delta]] = []
            for each in largest:
                got = [delta async for delta in pool.generate(AdmissionRequest(each))]
                deltas.append(got)
            return deltas, [await each for each in running]

    try:
        deltas, small = run(scenario())
    finally:
        node.stop()
    for got in deltas:
        scores = [score for delta in got for score in delta.prompt_logprobs]
        assert len(scores) == NUM_PROMPT - 1
        assert all(len(score.top) == NUM_TOP for score in scores)
        assert got[-1].finish_reason is FinishReason.LENGTH
    assert [ids for ids, _ in small] == [alone(long_model, each) for each in beside]


def test_a_worker_refuses_more_itself(long_model, run):
    node = Node(long_model)
    node.thread.start()
    too_large = request("big", NUM_PROMPT + 1, 3, prompt_logprobs=NUM_TOP)

    async def scenario():
        async with pool_of(node) as pool:
            return [delta async for delta in pool.generate(AdmissionRequest(too_large))]

    try:
        (refusal,) = run(scenario())
    finally:
        node.stop()
    assert refusal.finish_reason is FinishReason.ERROR
    assert (refusal.error, refusal.error_param) == ("invalid_value", "prompt_logprobs")
