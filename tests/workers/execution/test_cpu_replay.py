"""Decode steps that are replayed: the ids of the same engine without it, and when there is none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from penstock.kernels.cpu import native
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers.checkpoints import make_checkpoint, random_prompt

pytestmark = pytest.mark.cpu_only
LENGTHS = (1, 17, 33, 5, 64)
NUM_NEW = 20
SINKS = {"context_policy": "sink_window", "sinks": 4, "window": 16, "roll": 8}

if native.bound.library is None:
    pytest.skip("nothing is replayed without the native library", allow_module_level=True)


def engine_of(name, weights="fp32", **settings):
    model = load_model(make_checkpoint(name), weights=weights, progress=False)
    config = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 4, "weights": weights}
    engine = Engine(EngineConfig(**{**config, **settings}), model)
    engine.arena.storage.fill_(0xFF)  # NaN in fp32 and bf16
    return engine


def answers(engine, num_new=NUM_NEW):
    """Ids and logprobs of answers whose lengths differ, so that the batch shrinks and grows."""
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(
            temperature=0.0, max_tokens=num_new - 3 * i, ignore_eos=True, logprobs=1
        )
        engine.add(Request(f"r{i}", tuple(random_prompt(length, i)), params))
    ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[Any]] = {}
    while engine.has_work():
        for delta in engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
            logprobs.setdefault(delta.request_id, []).extend(
                each.logprob for each in delta.logprobs or ()
            )
        engine.check()
    return ids, logprobs


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "fp32", {}),
    "llama bf16": ("llama", "bf16", {}),
    "llama starved": ("llama", "fp32", {"num_blocks": 24, "prefix_cache": False}),
    "llama sinks": ("llama", "fp32", SINKS),
    "llama deferred": (
        "llama",
        "fp32",
        {"kv_commit": "deferred", "kv_defer_mode": "always", "ridge_tokens": 3},
    ),
    "qwen3 int8": ("qwen3", "int8", {"kv": "int8", "kv_group": "head"}),
    "llama int4 sinks": ("llama", "int4", {**SINKS, "kv": "fp8"}),
    "llama nf4": ("llama", "nf4", {}),
    "llama fp8": ("llama", "fp8", {}),
    "llama bias": ("llama-bias", "int8", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_give_the_same_bits(case):
    name, weights, settings = CASES[case]
    engine, plain = (engine_of(name, weights, **settings) for _ in range(2))
    plain.executor.replay = None
    assert answers(engine) == answers(plain)
    assert len(engine.executor.replay._recorded) > 0
    num_programs = len(engine.executor.replay._recorded)
    assert answers(engine) == answers(plain), "with what was recorded before"
    if settings.get("context_policy") != "sink_window":
        assert num_programs <= 4, "one for each number of rows"


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe"])
def test_experts_are_not_replayed(name):
    """PyTorch routes between the operators; a replay would send all tokens where the first went."""
    engine, plain = engine_of(name), engine_of(name)
    plain.executor.replay = None
    assert answers(engine) == answers(plain)
    assert len(engine.executor.replay._recorded) == 0


def test_plain_pytorch_is_not_replayed(monkeypatch):
    want = answers(engine_of("llama"))[0]
    monkeypatch.setattr(native.bound, "library", None)
    engine = engine_of("llama")
    assert answers(engine)[0] == want
    assert len(engine.executor.replay._recorded) == 0


def test_another_number_of_threads_is_recorded_anew():
    engine, plain = engine_of("llama"), engine_of("llama")
    plain.executor.replay = None
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 1):
            torch.set_num_threads(number)
            assert answers(engine) == answers(plain)
    finally:
        torch.set_num_threads(threads)


def test_a_step_that_broke_while_it_was_recorded_is_not_kept(monkeypatch):
    engine, plain = engine_of("llama"), engine_of("llama")
    plain.executor.replay = None
    run_layers, num_calls = engine.model.run_layers, 0

    def breaks(inputs, kv_layers, workspace):
        nonlocal num_calls
        num_calls += inputs.num_decode == len(inputs.slots)
        if num_calls == 1 and inputs.num_decode:
            num_calls += 1
            raise RuntimeError("a kernel failed")
        return run_layers(inputs, kv_layers, workspace)

    monkeypatch.setattr(engine.executor.replay, "_run", breaks)
    want = answers(plain)
    assert answers(engine) == want, "the engine tries each of the step's sequences alone"
    assert num_calls > 1 and answers(engine)[0] == want[0]


def test_no_answer_waits_for_pytorchs_compiler():
    """Whatever a worker's first answers do, they do not import it, which takes seconds."""
    program = """
import sys, torch
torch.set_num_threads(1)
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
model = load_model("builtin", weights="int8", progress=False)
engine = Engine(EngineConfig(num_blocks=60, threads=1), model)
for i, temperature in enumerate((0.0, 1.0)):
    params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True, logprobs=2)
    engine.add(Request(str(i), (1, 2, 3), params))
while engine.has_work():
    engine.step()
print(len(engine.executor.replay._recorded), "torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250
    )
    num_recorded, is_imported = done.stdout.split()
    assert int(num_recorded) > 0, "no step was recorded"
    assert is_imported == "False"
