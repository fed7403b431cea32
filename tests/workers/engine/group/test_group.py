"""A group of processes against one process: the same token ids under every schedule, and its ends.

Real processes. The oracle is the engine of one process, whose ids equal transformers'.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.config import EngineConfig
from penstock.workers.engine import load
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.group.process import EXIT_STATUS
from penstock.workers.engine.load import load_engine
from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.shard import Shard, cut
from penstock.workers.request import FinishReason, Request, SamplingParams
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, choice
from penstock.workers.weights.hub import resolve_model
from tests.workers.answers import answers, ids_of
from tests.workers.builtin_grammars import open_compiler
from tests.workers.checkpoints import FAMILIES, make_checkpoint, random_prompt
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.speculation.proposers import Mixed, Widest
from tests.workers.structured.test_grammar import run as run_structured

PROMPTS = {str(n): tuple(random_prompt(n)) for n in (3, 40, 17, 65, 8)}
NUM_NEW = 10


def engine_of(model: str, num_ranks: int, **options: Any) -> Engine:
    values = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    return load_engine(
        EngineConfig(
            **{
                "model": model, "device": "cpu", "threads": num_ranks,
                "tensor_parallel_size": num_ranks, **values, **options,
            }
        )
    )  # fmt: skip


def run(engine: Engine, **params: Any) -> dict[str, list[int]]:
    """Ids of all prompts together; every second one is sampled."""
    requests = []
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        values = {"temperature": 0.9 * (number % 2), "seed": number, "max_tokens": NUM_NEW}
        requests.append(
            Request(name, prompt, SamplingParams(**{**values, "ignore_eos": True, **params}))
        )
    found = answers(engine, requests)
    engine.check()
    return {name: ids_of(deltas) for name, deltas in found.items()}


def both(model: str, num_ranks: int = 2, params: dict[str, Any] | None = None, **options: Any):
    """Of a group, and of one process."""
    found = []
    for size in (num_ranks, 1):
        with forked_ranks():
            engine = engine_of(model, size, **options)
        try:
            found.append(run(engine, **(params or {})))
        finally:
            engine.close()
    return found


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama", "fp32"), ("qwen2", "bf16"), ("qwen3", "fp32"), ("mistral-window", "fp32"),
        ("llama-bias", "fp32"), ("llama-tied", "bf16"), ("llama", "int8"), ("qwen3", "int4"),
        ("llama", "nf4"), ("llama", "fp8"), ("olmoe", "fp32"), ("olmoe-clip", "bf16"),
        ("mixtral", "fp32"), ("qwen2_moe", "int8"), ("qwen2_moe-normed", "fp32"),
        ("qwen3_moe", "int4"), ("qwen3_moe-128", "fp32"),
        ("granite", "int8"), ("smollm3", "fp32"),
        ("seed_oss-out-bias", "int4"), ("ministral3", "fp32"), ("phi3", "fp32"), ("phi3", "int4"),
        ("glm4", "int8"), ("gemma2", "fp32"), ("gemma3_text", "bf16"), ("olmo2", "fp32"),
        ("olmo3", "int8"),
    ],
)  # fmt: skip
def test_ids_of_one_process(name, weights):
    group, one = both(str(make_checkpoint(name)), weights=weights)
    assert group == one
    assert len({tuple(ids) for ids in group.values()}) == len(PROMPTS)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8},  # prompts in chunks
        {"num_blocks": 26, "kv_commit": "eager"},  # preempted
        {"num_blocks": 26, "kv_commit": "deferred", "ridge_tokens": 64},
        {"kv": "int8", "kv_group": "head"},
        {"merge_steps": False},
        {"prefix_cache": False, "block_size": 16},
        {"async_scheduling": "on"},
        {"quantize_lm_head": True, "weights": "int8"},
    ],
)
def test_under_every_schedule(options):
    group, one = both(str(make_checkpoint("llama")), **options)
    assert group == one


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [
        ("llama", 2, {}), ("llama-4-kv", 3, {"num_blocks": 26}), ("olmoe-4-kv", 3, {}),
        ("qwen2_moe", 2, {"weights": "int8"}), ("llama", 2, {"weights": "bf16", "kv": "int8"}),
        ("llama", 2, {"async_scheduling": "on", "max_num_batched_tokens": 8}),
    ],
)  # fmt: skip
def test_by_collective_operations(name, num_ranks, options, monkeypatch):
    """What GPUs use, by gloo, which copies as NCCL does."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    group, one = both(str(make_checkpoint(name)), num_ranks, {"logprobs": 2}, **options)
    assert group == one


def test_under_grammars():
    """The first rank masks the logits that all ranks have computed."""
    wanted = [
        SamplingParams(seed=3, max_tokens=30, structured=spec)
        for spec in (choice(["the river", "the dam"], param="p"), regex("[a-c]{3,9}-(yes|no)"))
    ]
    found = []
    with open_compiler() as compiler:
        for num_ranks in (2, 1):
            engine = engine_of("builtin", num_ranks)
            try:
                found.append(run_structured(engine, compiler, wanted))
            finally:
                engine.close()
    assert found[0] == found[1]
    assert all(reason is FinishReason.STOP for _, reason, _ in found[0])


def regex(text: str) -> StructuredSpec:
    return StructuredSpec(StructuredKind.REGEX, text)


def test_rolled_windows_and_logprobs():
    rolling = {"context_policy": "sink_window", "sinks": 4, "window": 24, "roll": 8}
    params = {"max_tokens": 60, "logprobs": 2, **rolling}
    group, one = both(str(make_checkpoint("llama")), params=params)
    assert group == one


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    group, one = both(str(make_checkpoint(name)), weights="bf16", num_blocks=40)
    assert group == one


@pytest.mark.parametrize("options", [{"num_blocks": 26}, {"max_num_batched_tokens": 8}])
def test_experts_under_schedules(options):
    group, one = both(str(make_checkpoint("olmoe")), **options)
    assert group == one


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [
        ("qwen2_moe-normed", 2, {"weights": "int8"}), ("mixtral", 2, {"num_blocks": 26}),
        ("gpt_oss", 2, {}), ("olmoe-4-kv", 3, {"max_num_batched_tokens": 8, "weights": "bf16"}),
    ],
)  # fmt: skip
def test_whole_experts(name, num_ranks, options):
    """Expert parallelism: a range of the experts on each rank, which may have no token."""
    model = str(make_checkpoint(name))
    group, one = both(model, num_ranks, enable_expert_parallel=True, **options)
    assert group == one


def test_experts_too_narrow_for_the_ranks_stay_whole():
    config = ModelConfig.from_pretrained(make_checkpoint("olmoe-4-kv"))
    narrow = dataclasses.replace(config, moe_intermediate_size=40)  # three blocks of columns
    assert Shard(narrow, 0, 3).cuts_experts and not Shard(narrow, 0, 4).cuts_experts
    assert not Shard(narrow, 0, 3, whole_experts=True).cuts_experts


@pytest.mark.parametrize("name", ["llama-4-kv", "olmoe-4-kv"])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_more_ranks(name, num_ranks):
    """Three divide neither the heads, nor the columns, nor the experts evenly."""
    group, one = both(str(make_checkpoint(name)), num_ranks)
    assert group == one


@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [
        ("llama", 3, {}), ("llama", 4, {"kv": "int8", "kv_group": "head"}), ("olmo2", 4, {}),
        ("qwen3_moe", 3, {"weights": "int8"}), ("llama-bias", 4, {"max_num_batched_tokens": 8}),
        ("gpt_oss", 4, {}),
    ],
)  # fmt: skip
def test_more_ranks_than_kv_heads(name, num_ranks, options):
    """Ranks with the same KV head have their own copy of its K and V, and share its queries."""
    config = ModelConfig.from_pretrained(make_checkpoint(name))
    assert config.num_kv_heads < num_ranks <= config.num_heads
    group, one = both(str(make_checkpoint(name)), num_ranks, {"logprobs": 2}, **options)
    assert group == one


def test_drafts_are_verified_by_all_ranks():
    """Rank 0 decides; the others compute the rows that it names."""
    model = str(make_checkpoint("llama"))
    one, group = (
        engine_of(model, ranks, speculate=how) for ranks, how in ((1, "off"), (2, "lookup"))
    )
    try:
        expected = run(one)
        proposer = Mixed(expected, one.model.config.vocab_size)
        assert group.scheduler.drafting is not None
        group.scheduler.drafting.proposer, group.scheduler.drafting.widths = proposer, Widest()
        assert run(group) == expected and proposer.num_accepted > 0
    finally:
        one.close()
        group.close()


@pytest.mark.parametrize("name", ["builtin"])
def test_heads_that_do_not_divide_evenly(name):
    config = ModelConfig.from_pretrained(resolve_model(name))
    group, one = both(name, min(3, config.num_kv_heads))
    assert group == one


@pytest.mark.parametrize("where", ["layer", "logits"])
def test_an_error_in_the_middle_of_a_pass_ends_the_group(where):
    """The other ranks wait for the rest of that pass, and would take the next one for it."""
    process = subprocess.run(
        [sys.executable, "-c", BROKEN, str(make_checkpoint("llama")), where],
        cwd=Path(__file__).parents[4], stderr=subprocess.PIPE, timeout=200, check=False, text=True,
    )  # fmt: skip
    assert process.returncode == EXIT_STATUS
    assert "has failed half-way" in process.stderr


BROKEN = """
import logging, sys
from tests.workers.engine.group.test_group import engine_of, run
logging.basicConfig()
engine = engine_of(sys.argv[1], 2)
run(engine)
def fail(*_):
    raise ValueError("on the first rank alone")
if sys.argv[2] == "layer":
    engine.model.layers[1].mlp.run = fail
else:
    engine.model.exchange.gather_logits = fail
run(engine)
"""


def test_a_rank_has_its_part_of_the_weights():
    whole = engine_of(str(make_checkpoint("llama")), 1, weights="fp32")
    group = engine_of(str(make_checkpoint("llama")), 2, weights="fp32")
    try:
        of_one, of_rank = (each.model.layers[0].attention.qkv.num_bytes for each in (whole, group))
        assert of_rank <= 0.6 * of_one
        layouts = [each.executor.memory.arena.layout for each in (whole, group)]
        assert layouts[0].num_kv_heads == 2 * layouts[1].num_kv_heads
    finally:
        whole.close()
        group.close()


KILLED = """
import os, signal, sys, time, psutil
from penstock.workers.engine.group import peer
from tests.workers.engine.group.test_group import engine_of, run
peer.SILENCE_S = 5  # a machine that stands still for seconds silences all ranks
engine = engine_of(sys.argv[1], 2)
run(engine)
(child,) = psutil.Process().children()
print(child.pid, flush=True)
if sys.argv[2] in ("leader", "stopped, idle"):
    time.sleep(6)  # longer than that
if sys.argv[2] == "follower":
    child.kill()
    time.sleep(100)
if "killed" in sys.argv[2]:
    child.kill()
if "stopped" in sys.argv[2]:
    child.suspend()
if "idle" in sys.argv[2]:
    time.sleep(100)
while "busy" in sys.argv[2]:
    run(engine)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("who", "status"),
    [
        ("follower", EXIT_STATUS),
        ("leader", -signal.SIGKILL),
        ("leader of a stopped one", -signal.SIGKILL),
        ("stopped, idle", EXIT_STATUS),
        ("stopped, busy", EXIT_STATUS),
        ("killed, busy", EXIT_STATUS),
    ],
)
def test_a_rank_that_ends_takes_the_others_with_it(who, status):
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(make_checkpoint("llama")), who],
        cwd=Path(__file__).parents[4],
        stdout=subprocess.PIPE,
        timeout=200,
        check=False,
        text=True,
    )
    assert process.returncode == status
    deadline_s = time.monotonic() + 60
    while psutil.pid_exists(int(process.stdout)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(process.stdout)), "an orphan"


def test_a_closed_engine_leaves_no_process():
    before = set(psutil.Process(os.getpid()).children())  # of earlier tests
    engine = engine_of(str(make_checkpoint("llama")), 2)
    (child,) = set(psutil.Process(os.getpid()).children()) - before
    engine.close()
    assert not child.is_running()


def test_more_ranks_than_heads():
    with pytest.raises(ConfigError, match="attention heads of this model, and each rank needs one"):
        engine_of(str(make_checkpoint("llama")), 9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        (
            {"pipeline_parallel_size": 2, "device": "cuda", "cuda_graphs": "on"},
            "cannot be combined with cuda_graphs on",
        ),
        (
            {"pipeline_parallel_size": 2, "device": "cuda", "async_scheduling": "on"},
            "leave it at auto",
        ),
    ],
)
def test_settings_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"tensor_parallel_size": 2, **values})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 300), st.integers(1, 8))
def test_shares_cover_everything_once(kv_heads, group, width, num_ranks):
    if num_ranks > kv_heads * group:
        return
    base = ModelConfig.from_pretrained(resolve_model("builtin"))
    config = dataclasses.replace(
        base, num_kv_heads=kv_heads, num_heads=kv_heads * group, intermediate_size=width,
        hidden_size=width, vocab_size=width,
    )  # fmt: skip
    shards = [Shard(config, rank, num_ranks) for rank in range(num_ranks)]
    for name in ("heads", "inner", "hidden", "vocab", "attended"):
        spans = [getattr(each, name) for each in shards]
        assert spans[0].first == 0 and spans[-1].end == spans[0].whole
        assert all(a.end == b.first for a, b in itertools.pairwise(spans))
    for each in shards:
        heads, own = each.heads, each.kv_heads
        assert heads.size > 0 and {head // group for head in range(heads.first, heads.end)} == {
            *range(own.first, own.end)
        }
        assert num_ranks > kv_heads or heads.size == own.size * group
    weight = torch.randn(width, 3)
    parts = [part for each in shards if isinstance(part := cut(weight, each.inner), torch.Tensor)]
    assert torch.equal(torch.cat(parts), weight)
