"""What a step decodes and what is computed again as a prompt have the same logits, bit for bit.

Ids can agree by margin alone; logits cannot. On the native path of the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers.checkpoints import make_checkpoint, random_prompt

if native.bound.library is None:
    pytest.skip("PyTorch's products have other bits for other sizes", allow_module_level=True)

NUM_NEW = 12
SINKS = {"context_policy": "sink_window", "sinks": 4, "window": 32, "roll": 8}
# Model, weights, and settings of the engine.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp32": ("llama", "fp32", {}),
    "fp32, int8 KV": ("llama", "fp32", {"kv": "int8", "kv_group": "head"}),
    "bf16": ("qwen3", "bf16", {}),
    "bf16, int8 KV by integers": ("llama", "bf16", {"kv": "int8", "kv_group": "head"}),
    "int8, int8 KV": ("llama", "int8", {"kv": "int8", "kv_group": "8"}),
    "int4, fp8 KV": ("llama", "int4", {"kv": "fp8"}),
    "sinks": ("llama", "fp32", SINKS),
    "experts": ("mixtral", "fp32", {}),
    "attention sinks, windows": ("gpt_oss-window", "bf16", {}),
    "sigmoid router": ("glm4_moe", "bf16", {}),
    "sigmoid router, fp32": ("minimax_m2", "fp32", {}),
    "gate of a shared expert": ("qwen2_moe", "fp32", {}),
    "scales": ("granite", "fp32", {}),
    "layers without rope, sinks": ("smollm3", "fp32", SINKS),
    "growing queries": ("ministral3", "fp32", {}),
    "fused, longrope, int4": ("phi3-longrope", "int4", {}),
    "post norms, int8, int8 KV": ("olmo3", "int8", {"kv": "int8", "kv_group": "8"}),
    "sandwich, adjacent pairs, int8": ("glm4", "int8", {}),
    "soft caps, windows": ("gemma2", "fp32", {}),
    "soft caps, fp8 KV": ("gemma2", "bf16", {"kv": "fp8"}),
    "wide norms, bf16": ("gemma3_text", "bf16", {}),
    "linear attention, experts": ("qwen3_next", "fp32", {}),
    "linear attention, bf16": ("qwen3_5_text", "bf16", {}),
    "linear attention, int8, int8 KV": ("qwen3_5_text", "int8", {"kv": "int8", "kv_group": "8"}),
    "linear attention, int4": ("qwen3_5_moe_text", "int4", {}),
}


@functools.cache
def model_of(name: str, weights: str) -> Decoder:
    return load_model(make_checkpoint(name), weights=weights, progress=False)


def engine_of(case: str, **settings: Any) -> Engine:
    name, weights, more = CASES[case]
    fixed = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 4, "weights": weights}
    fixed["cuda_graphs"] = "off"  # `answer` does not see the logits of a graph
    config = {**fixed, **more, **settings}
    engine = Engine(EngineConfig(**config), model_of(name, weights))
    engine.arena.storage.fill_(0xFF)  # NaN in fp32 and bf16
    return engine


def answer(engine: Engine, request: Request) -> tuple[list[int], Tensor]:
    """The new ids of one request, and the logits of each [N, vocab]."""
    rows: list[Tensor] = []
    executor: Any = engine.executor
    compute = executor._logits

    def kept(hidden: Tensor) -> Tensor:
        rows.append(compute(hidden).clone())
        return rows[-1]

    executor._logits = kept
    engine.add(request)
    ids: list[int] = []
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta
            ids += delta.token_ids
    executor._logits = compute
    return ids, torch.cat(rows)[: len(ids)]


@pytest.mark.parametrize("case", CASES)
def test_a_continued_answer_has_the_logits_of_the_undisturbed_one(case):
    """At every cut; prompt and emitted ids are computed in chunks of several lengths."""
    prompt = tuple(random_prompt(58, seed=3))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    ids, logits = answer(engine_of(case), Request("whole", prompt, params))
    assert len(ids) == NUM_NEW and logits.isfinite().all()
    for cut in range(1, NUM_NEW):
        engine = engine_of(case, max_num_batched_tokens=(7, 23, 512)[cut % 3])
        request = Request("rest", prompt, params, emitted_ids=tuple(ids[:cut]))
        rest, rest_logits = answer(engine, request)
        assert rest == ids[cut:]
        assert torch.equal(rest_logits, logits[cut:]), cut


SCHEDULES: dict[str, dict[str, Any]] = {
    "preempted": {"num_blocks": 42, "prefix_cache": False},
    "deferred": {"kv_commit": "deferred", "kv_defer_mode": "always", "ridge_tokens": 3},
    "chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", [case for case in CASES if "sinks" not in case])
def test_logprobs_do_not_depend_on_the_schedule(case, schedule):
    """Preempted and deferred tokens are computed again beside the next one."""
    prompts = [tuple(random_prompt(length, seed=length)) for length in (50, 61, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    alone: dict[str, list[Any]] = {}
    for request in requests:
        alone |= logprobs(engine_of(case), [request])
    engine = engine_of(case, **SCHEDULES[schedule])
    assert logprobs(engine, requests) == alone
    if schedule == "preempted":
        assert engine.stats().num_preemptions > 0, "the pool was not starved"


def logprobs(engine: Engine, requests: list[Request]) -> dict[str, list[Any]]:
    """Ids and logprobs of each answer."""
    found: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta
            found[delta.request_id] += [*delta.token_ids, *(delta.logprobs or ())]
    return found
