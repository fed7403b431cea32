"""Pipeline stages against one process: the same token ids under every schedule, and their memory.

Real processes. The oracle is the engine of one process, whose ids equal transformers'.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.config import EngineConfig
from penstock.workers.engine import load
from penstock.workers.engine.group.process import EXIT_STATUS
from penstock.workers.errors import ConfigError
from penstock.workers.execution.cpu_replay import DecodeReplay
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import AttentionInputs, RollingInputs
from penstock.workers.models.stages.decoder import StageDecoder
from penstock.workers.models.stages.parts import LEAST_ROWS, PARTS_A_STAGE, parts_of
from penstock.workers.models.stages.stage import Stage
from penstock.workers.planning import group as planned
from penstock.workers.planning.group import Group
from penstock.workers.planning.hardware import device_named
from penstock.workers.planning.roofline import Roofline
from penstock.workers.request import FinishReason, SamplingParams
from penstock.workers.structured_spec import choice
from tests.workers.builtin_grammars import open_compiler
from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_group import PROMPTS, engine_of, run
from tests.workers.speculation.proposers import Mixed, Widest
from tests.workers.structured.test_grammar import run as run_structured


def both(name: str, stages: int, ranks: int = 1, params: Any = None, **options: Any):
    """Ids of `stages` stages of `ranks` ranks, and of one process."""
    model, found = str(make_checkpoint(name)), []
    for shape in ({"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}, {}):
        with forked_ranks():
            engine = engine_of(model, 1, **{"threads": ranks * stages, **shape, **options})
        try:
            found.append(run(engine, **(params or {})))
        finally:
            engine.close()
    return found


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama-tied", "bf16"), ("qwen3", "int8"), ("olmoe", "bf16"), ("smollm3", "int4"),
        ("gemma2", "bf16"), ("gemma3_text", "fp32"), ("olmo2", "int8"), ("glm4_moe", "fp32"),
        ("gpt_oss-window", "fp32"),
    ],
)  # fmt: skip
def test_ids_of_one_process(name, weights):
    """Norms before, after and around; several rotary embeddings; layers of several kinds."""
    group, one = both(name, 2, weights=weights)
    assert group == one
    assert len({tuple(ids) for ids in group.values()}) == len(PROMPTS)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8},  # prompts in chunks
        {"num_blocks": 26, "kv_commit": "eager"},  # preempted
        {"num_blocks": 26, "kv_commit": "deferred", "ridge_tokens": 64},
        {"kv": "int8", "kv_group": "head", "prefix_cache": False, "block_size": 16},
        {"async_scheduling": "on", "merge_steps": False},
    ],
)
def test_under_every_schedule(options):
    group, one = both("llama", 2, params={"logprobs": 2}, **options)
    assert group == one


def test_rolled_windows():
    rolling = {"context_policy": "sink_window", "sinks": 4, "window": 24, "roll": 8}
    group, one = both("llama", 2, params={"max_tokens": 60, **rolling})
    assert group == one


@pytest.mark.parametrize(("name", "stages", "ranks"), [("llama", 2, 4), ("olmoe", 2, 2)])
def test_stages_of_several_ranks(name, stages, ranks):
    group, one = both(name, stages, ranks)
    assert group == one


def test_stages_of_several_ranks_by_collective_operations(monkeypatch):
    """What GPUs use, by gloo: each stage has a group of its own."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    group, one = both("llama", 2, 2, {"logprobs": 2})
    assert group == one


def test_an_odd_number_of_layers():
    """Three layers over two stages, and over three."""
    for stages in (2, 3):
        group, one = both("gpt_oss-window", stages)
        assert group == one


def test_under_grammars():
    """The process that samples is one of the first stage's."""
    wanted = [
        SamplingParams(seed=3, max_tokens=30, structured=choice(words, param="p"))
        for words in (["the river", "the dam"], ["a lamp", "a ship"])
    ]
    found = []
    with open_compiler() as compiler:
        for stages in (2, 1):
            engine = engine_of("builtin", 1, threads=stages, pipeline_parallel_size=stages)
            try:
                found.append(run_structured(engine, compiler, wanted))
            finally:
                engine.close()
    assert found[0] == found[1]
    assert all(reason is FinishReason.STOP for _, reason, _ in found[0])


def test_drafts_are_verified_by_all_stages():
    model = str(make_checkpoint("llama"))
    shape = {"threads": 2, "pipeline_parallel_size": 2, "speculate": "lookup"}
    one, group = engine_of(model, 1), engine_of(model, 1, **shape)
    try:
        expected = run(one)
        proposer = Mixed(expected, one.model.config.vocab_size)
        assert group.scheduler.drafting is not None
        group.scheduler.drafting.proposer, group.scheduler.drafting.widths = proposer, Widest()
        assert run(group) == expected and proposer.num_accepted > 0
    finally:
        one.close()
        group.close()


def test_each_stage_has_its_layers_alone():
    """Weights and K and V of both stages together are those of one process."""
    model = str(make_checkpoint("gpt_oss-window"))  # three layers: two and one
    one = engine_of(model, 1)
    group = engine_of(model, 1, threads=2, pipeline_parallel_size=2)
    try:
        run(group)
        first, second = group.model.ranks()
        layout = one.arena.layout
        kv_layer = one.arena.num_blocks * layout.block_bytes // 3
        assert (first.kv_bytes, second.kv_bytes) == (2 * kv_layer, kv_layer)
        assert first.weight_bytes + second.weight_bytes == one.model.weights.num_bytes
        embedding = one.model.embedding.numel() * one.model.embedding.element_size()
        head = 0 if one.model.config.tie_word_embeddings else embedding
        config = ModelConfig.from_pretrained(model)
        plan = Roofline(
            config, device_named("cpu"), "fp32", "fp32", block_size=4, group=Group(stages=2)
        )
        assert first.kv_bytes == one.arena.num_blocks * plan.block_bytes
        layers = one.model.weights.num_bytes - embedding - head
        assert second.weight_bytes == pytest.approx(layers / 3, rel=0.02)
        assert first.num_gathers > 0 and first.wait_s > 0
        num_rows, left = divmod(first.received_bytes, 4 * config.hidden_size)
        assert num_rows >= first.num_gathers and not left
    finally:
        one.close()
        group.close()


@pytest.mark.parametrize("name", ["llama", "olmoe"])
def test_the_first_stage_is_as_large_as_planned(name):
    model = str(make_checkpoint(name))
    group = engine_of(model, 1, threads=2, pipeline_parallel_size=2, weights="fp32")
    try:
        config = ModelConfig.from_pretrained(model)
        plan = Roofline(config, device_named("cpu"), "fp32", "fp32", group=Group(stages=2))
        assert group.model.ranks()[0].weight_bytes == pytest.approx(plan.weight_bytes, rel=0.005)
    finally:
        group.close()


def test_a_stage_that_ends_ends_the_worker():
    """Ray Serve replaces it, and the whole group with it."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(make_checkpoint("llama"))],
        cwd=Path(__file__).parents[4], stderr=subprocess.PIPE, timeout=200, check=False, text=True,
        env=os.environ,
    )  # fmt: skip
    assert process.returncode == EXIT_STATUS, process.stderr
    assert "a rank of this worker's group has ended" in process.stderr


KILLED = """
import logging, sys, time
import psutil
from tests.workers.engine.group.test_group import engine_of, run
logging.basicConfig()
engine = engine_of(sys.argv[1], 1, threads=2, pipeline_parallel_size=2)
run(engine)
(other,) = [each for each in psutil.Process().children() if "follower" in " ".join(each.cmdline())]
other.kill()
time.sleep(200)
"""


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size 9 is more than the \d layers"):
        engine_of(str(make_checkpoint("llama")), 1, pipeline_parallel_size=9)
    with pytest.raises(ConfigError, match="the 2 ranks of tensor_parallel_size 1 and pipeline"):
        EngineConfig(pipeline_parallel_size=2, nodes_per_worker=3)


@given(num_layers=st.integers(1, 90), num_stages=st.integers(1, 90))
def test_stages_share_the_layers_equally(num_layers, num_stages):
    if num_stages > num_layers:
        with pytest.raises(ConfigError):
            Stage(0, num_stages, num_layers)
        return
    stages = [Stage(number, num_stages, num_layers) for number in range(num_stages)]
    assert [layer for each in stages for layer in each.layers] == list(range(num_layers))
    sizes = [len(each.layers) for each in stages]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_a_stages_configuration_has_its_layers():
    config = ModelConfig.from_pretrained(make_checkpoint("smollm3"))
    parts = [Stage(number, 2, config.num_layers).config_of(config) for number in range(2)]
    assert [rope for each in parts for rope in each.layer_ropes] == list(config.layer_ropes)
    assert sum(each.num_layers for each in parts) == config.num_layers


def test_the_plan_cuts_steps_as_the_stages_do():
    assert LEAST_ROWS["cuda"] == planned.LEAST_ROWS and planned.PARTS_A_STAGE == PARTS_A_STAGE


# -- parts of a step


@st.composite
def steps(draw) -> AttentionInputs:
    """Decode rows and chunks with random tables; every array tells its rows apart."""
    num_decode = draw(st.integers(0, 70))
    lengths = draw(st.lists(st.integers(1, 90), max_size=4))
    if not num_decode + sum(lengths):
        lengths = [1]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, 1000, shape, dtype=dtype, generator=generator)

    num_rows, sequences = num_decode + sum(lengths), num_decode + len(lengths)
    starts = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int32).cumsum(0)])
    context = torch.tensor(lengths, dtype=torch.int32) + numbers(len(lengths))
    rolling = RollingInputs(
        numbers(num_rows, dtype=torch.int64), numbers(num_rows), numbers(num_rows),
        numbers(sequences), numbers(sequences), 5,
    )  # fmt: skip
    return AttentionInputs(
        numbers(num_rows, dtype=torch.int64),
        num_decode,
        DecodeBatch(numbers(num_decode, 3), numbers(num_decode), 1000),
        PrefillBatch(
            numbers(len(lengths), 3), starts.int(), context.int(), max(lengths, default=0)
        ),
        rolling if draw(st.booleans()) else None,
    )


def rows_of(inputs: AttentionInputs) -> list[tuple[Any, ...]]:
    """Of each row: its slot, its sequence's table, the keys that it sees, and its window."""
    found, decode, prefill = [], inputs.decode, inputs.prefill
    for row, slot in enumerate(inputs.slots.tolist()):
        if row < inputs.num_decode:
            sequence, table = row, decode.block_tables[row]
            length = int(decode.context_lens[row])
        else:
            starts = prefill.query_starts.tolist()
            at = row - inputs.num_decode
            chunk = max(i for i, start in enumerate(starts[:-1]) if start <= at)
            sequence, table = inputs.num_decode + chunk, prefill.block_tables[chunk]
            length = int(prefill.context_lens[chunk]) - (starts[chunk + 1] - 1 - at)
            assert starts[chunk + 1] - starts[chunk] <= prefill.max_query_len
        rolled: tuple[int, ...] = ()
        if (rolling := inputs.rolling) is not None:
            by_row = (rolling.sink_positions, rolling.sink_ends, rolling.window_starts)
            rolled = tuple(int(each[row]) for each in by_row)
            rolled += int(rolling.sink_blocks[sequence]), int(rolling.bases[sequence])
        found.append((slot, tuple(table.tolist()), length, rolled))
    return found


@given(inputs=steps(), stages=st.integers(2, 5), keeps_chunks=st.booleans())
def test_parts_have_the_rows_of_the_step_in_their_order(inputs, stages, keeps_chunks):
    parts = parts_of(dataclasses.replace(inputs, uses_scratch=keeps_chunks), stages)
    assert [row for part in parts for row in rows_of(part.inputs)] == rows_of(inputs)
    bounds = [(part.first, part.end) for part in parts]
    assert bounds[0][0] == 0 and bounds[-1][1] == len(inputs.slots)
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    if keeps_chunks:
        starts = {inputs.num_decode + each for each in inputs.prefill.query_starts.tolist()}
        assert all(end <= inputs.num_decode or end in starts for _, end in bounds)
    elif len(parts) > 1:
        assert min(end - first for first, end in bounds) >= LEAST_ROWS["cpu"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_decode_steps_of_a_stage_are_replayed(ranks):
    """What lies between receiving rows and handing them on; the others do the same."""
    engine = engine_of(
        str(make_checkpoint("llama")), ranks, threads=2 * ranks, pipeline_parallel_size=2
    )
    try:
        first = run(engine)
        assert isinstance(engine.model, StageDecoder)
        assert isinstance(engine.model.replay, DecodeReplay)
        num_programs = len(engine.model.replay._recorded)
        assert num_programs > 0 and engine.executor.replay is None
        assert run(engine) == first and len(engine.model.replay._recorded) == num_programs
    finally:
        engine.close()
