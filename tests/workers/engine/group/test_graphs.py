"""Decode graphs and steps ahead in a group, without GPUs: all ranks run again what they captured.

By gloo, which copies as NCCL does. What is captured, which steps are replayed, and how ids reach
the other ranks that the first one's host does not know, are as on GPUs; capturing itself, with
NCCL's operations in it, only GPUs can show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.workers.engine import build, load
from penstock.workers.engine.group import commands
from penstock.workers.errors import ConfigError
from penstock.workers.execution.cuda_graphs import graph_sizes
from penstock.workers.request import Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_prompt
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_group import engine_of
from tests.workers.execution.test_cuda_graphs import Recorder

PARAMS = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


def run_again() -> None:
    """In another rank: what this replaces is CUDA's."""
    pytest.MonkeyPatch().setattr(commands, "CudaCapture", Recorder)


def requests() -> list[Request]:
    """More than fit at once, of different lengths, sampled too; one rolls, and one has logprobs."""
    sampled = replace(PARAMS, temperature=0.8, seed=7, top_p=0.9)
    rolls: dict[str, Any] = {"context_policy": "sink_window", "sinks": 4, "window": 16, "roll": 8}
    params = [
        PARAMS, sampled, replace(PARAMS, max_tokens=3), replace(sampled, seed=8, max_tokens=25),
        replace(PARAMS, logprobs=2, prompt_logprobs=1), replace(PARAMS, max_tokens=40, **rolls),
    ]  # fmt: skip
    return [
        Request(f"r{i}", tuple(random_prompt(5 + 7 * i % 23, i)), each)
        for i, each in enumerate(params)
    ]


def group_of(monkeypatch, name: str, num_ranks: int, **options: Any):
    """An engine that captures on a CPU, and so do its other ranks."""
    recorder = Recorder()
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    monkeypatch.setattr(build, "CudaCapture", lambda: recorder)
    monkeypatch.setattr(
        build, "graph_sizes", lambda config, model, _: graph_sizes(config, model, True)
    )
    with forked_ranks(f"{__name__}:run_again"):
        return engine_of(str(make_checkpoint(name)), num_ranks, **options), recorder


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [
        ("llama", 2, {"async_scheduling": "on"}),
        ("qwen3", 3, {"async_scheduling": "on", "weights": "int8", "kv": "int8"}),
        ("olmo2", 2, {"async_scheduling": "off", "max_num_batched_tokens": 9}),
        ("llama-tied", 2, {"async_scheduling": "on", "num_blocks": 24, "kv_commit": "deferred"}),
    ],
)
def test_ids_of_one_process_without_graphs(monkeypatch, name, num_ranks, options):
    plain = {key: value for key, value in options.items() if key in ("weights", "kv")}
    one = engine_of(str(make_checkpoint(name)), 1, **plain)
    expected = {key: ids_of(found) for key, found in answers(one, requests()).items()}
    one.close()
    engine, recorder = group_of(monkeypatch, name, num_ranks, **options)
    try:
        found = {key: ids_of(found) for key, found in answers(engine, requests()).items()}
        engine.check()
        stats = engine.stats()
    finally:
        engine.close()
    assert found == expected
    assert 0 < stats.num_graph_steps == recorder.num_replayed < stats.num_steps
    assert (engine.totals.num_steps_ahead > 0) == (options["async_scheduling"] == "on")


def test_a_capture_that_fails_names_the_remedy(monkeypatch):
    class Fails(Recorder):
        def __call__(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("tests.workers.engine.group.test_graphs.Recorder", Fails)
    with pytest.raises(ConfigError, match=r"could not be captured .*: set cuda_graphs off"):
        group_of(monkeypatch, "llama", 2)
