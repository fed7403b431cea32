"""Models with linear attention in groups: token ids and logprobs of one process under every
schedule, with the states of prefixes, by ranks and by stages; and their memory.

Real processes. The oracle is the engine of one process, whose ids equal transformers'.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.delta_types import StateRows
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.engine import load
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.models.shards.shard import Shard
from penstock.workers.models.stages.parts import parts_of
from penstock.workers.planning.group import Group
from penstock.workers.planning.hardware import device_named
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import SHAPES
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.quantize import plan_quantize, write_quantized
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import HYBRIDS, make_checkpoint, random_model, random_prompt
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_group import PROMPTS, engine_of

NUM_NEW = 10
TP2, TP3 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 3}
PP2 = {"pipeline_parallel_size": 2}


def asked(name: str, prompt: tuple[int, ...], number: int) -> Request:
    params = SamplingParams(
        temperature=0.9 * (number % 2), seed=number, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2
    )
    return Request(name, prompt, params)


def run(engine: Engine) -> dict[str, Any]:
    """Ids, logprobs and tokens found in the prefix cache: of prompts together, and of their next
    turns, some of which begin with states that the first ones left."""
    first = answers(engine, [asked(*one, i) for i, one in enumerate(PROMPTS.items())])
    turns = [
        asked(f"{name} again", (*prompt, *ids_of(first[name]), *random_prompt(5, seed=i)), i)
        for i, (name, prompt) in enumerate(PROMPTS.items())
    ]
    found = {**first, **answers(engine, turns)}
    engine.check()
    return {
        name: (
            ids_of(deltas),
            [each for delta in deltas for each in delta.logprobs],
            max(delta.num_cached_tokens for delta in deltas),
        )
        for name, deltas in found.items()
    }


def both(model: str, cut: dict[str, int], **options: Any) -> tuple[Any, Any, Any]:
    """Of a group, and of one process; and the group's counters at the end."""
    found, stats = [], None
    num_ranks = cut.get("tensor_parallel_size", 1) * cut.get("pipeline_parallel_size", 1)
    for own in ({"threads": num_ranks, **cut}, {}):
        with forked_ranks():
            engine = engine_of(model, 1, **{**own, **options})
        try:
            found.append(run(engine))
            stats = stats or engine.stats()
        finally:
            engine.close()
    return found[0], found[1], stats


@pytest.mark.parametrize(
    ("name", "cut", "options"),
    [
        ("qwen3_next", TP2, {"weights": "bf16"}),
        ("qwen3_next", TP3, {}),  # more ranks than key heads, and than KV heads
        ("qwen3_next", {"tensor_parallel_size": 4}, {"weights": "int8", "kv": "int8"}),
        ("qwen3_5_text", TP2, {"weights": "int8", "kv": "int8", "kv_group": "8"}),
        ("qwen3_5_text", TP3, {"max_num_batched_tokens": 8}),  # prompts in chunks
        ("qwen3_5_text", TP2, {"num_state_slots": 12, "async_scheduling": "on"}),
        ("qwen3_5_moe_text", TP2, {"weights": "int4", "merge_steps": False}),
        ("qwen3_next-dense", TP3, {"weights": "int8"}),  # one key head for all, biases, a tied head
        ("qwen3_5_text", PP2, {}),  # the second stage has no K and V
        ("qwen3_5_moe_text", PP2, {"weights": "int8", "max_num_batched_tokens": 8}),
        ("qwen3_next-dense", {"pipeline_parallel_size": 3}, {}),  # the third one has no states
    ],
)  # fmt: skip
def test_answers_of_one_process(name, cut, options):
    group, one, _ = both(str(make_checkpoint(name)), cut, **options)
    assert group == one
    assert len({tuple(ids) for ids, _, _ in one.values()}) == 2 * len(PROMPTS)
    assert any(cached for _, _, cached in one.values()), "no state of a prefix was used"


@pytest.mark.parametrize("name", HYBRIDS)
def test_stages_of_several_ranks(name):
    group, one, _ = both(str(make_checkpoint(name)), TP2 | PP2, kv="int8")
    assert group == one


@pytest.mark.parametrize(
    ("cut", "commit"), [(TP3, "eager"), (TP2, "deferred"), (PP2, "eager"), (PP2, "deferred")]
)
def test_with_few_blocks(cut, commit):
    """Requests are preempted, or compute their newest tokens again in each step."""
    options = {"num_blocks": 27, "kv_commit": commit, "ridge_tokens": 64}
    group, one, stats = both(str(make_checkpoint("qwen3_5_text")), cut, **options)
    assert group == one
    assert stats.num_preemptions if commit == "eager" else stats.num_deferred_tokens


@pytest.mark.parametrize("cut", [TP3, TP2 | PP2])
def test_by_collective_operations(cut, monkeypatch):
    """What GPUs use, by gloo, which copies as NCCL does."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    group, one, _ = both(str(make_checkpoint("qwen3_next")), cut)
    assert group == one


def test_a_cache_of_experts(tmp_path):
    model, cache = str(make_checkpoint("qwen3_next")), {"expert_store_dir": str(tmp_path)}
    group, one, _ = both(model, TP2, expert_cache_gb=0.0002, **cache)
    assert group == one


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_quantised_checkpoint(name, tmp_path):
    """Its rows are cut as they are stored."""
    plan = plan_quantize(make_checkpoint(name), "int4", quantize_o=True, quantize_lm_head=False)
    write_quantized(plan, tmp_path / "out", lambda _: None)
    group, one, _ = both(str(tmp_path / "out"), TP3, weights="auto")
    assert group == one


def test_decode_steps_are_replayed():
    """The dense layers of a group are recorded, with two gathers each for both kinds."""
    engine = engine_of(str(make_checkpoint("qwen3_5_text")), 2)
    try:
        run(engine)
        replay = engine.executor.replay
        assert replay is not None and replay._recorded
    finally:
        engine.close()


# Widths that two ranks share evenly, and states without padding.
EVEN = {
    "vocab_size": 224, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 5,
    "layer_types": [*["linear_attention", "full_attention"] * 2, "linear_attention"],
}  # fmt: skip


def test_memory_and_calls_of_ranks_are_as_planned(tmp_path):
    random_model("qwen3_5_text", EVEN).save_pretrained(tmp_path)
    config, group = ModelConfig.from_pretrained(tmp_path), Group(2)
    engine = engine_of(str(tmp_path), 2, weights="fp32", num_state_slots=20)
    try:
        plan = Roofline(config, device_named("cpu"), "fp32", "fp32", block_size=4, group=group)
        run(engine)
        stats = engine.stats()
        for rank in stats.ranks:
            # b and a, which the plan leaves whole, are the difference.
            assert rank.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.03)
            assert rank.kv_bytes == stats.num_blocks * plan.block_bytes
            assert rank.state_bytes == 20 * plan.state_bytes
        assert stats.states is not None and stats.states.slot_bytes == 2 * plan.state_bytes
        calls = stats.ranks[1].num_gathers
        answers(engine, [Request("a", (5, 6, 7), SamplingParams(max_tokens=1))])
        assert engine.stats().ranks[1].num_gathers - calls == group.calls(config)
    finally:
        engine.close()


def test_memory_of_stages(tmp_path):
    """Blocks and slots have the same numbers on all stages, and each the layers of its own."""
    random_model("qwen3_5_text", EVEN).save_pretrained(tmp_path)
    one = engine_of(str(tmp_path), 1, num_state_slots=20)
    group = engine_of(str(tmp_path), 1, threads=2, num_state_slots=20, **PP2)
    try:
        first, second = group.model.ranks()  # linear, full, linear; full, linear
        whole = one.stats()
        assert whole.states is not None
        state_bytes = 20 * whole.states.slot_bytes // 3
        assert (first.state_bytes, second.state_bytes) == (2 * state_bytes, state_bytes)
        assert first.kv_bytes == second.kv_bytes == whole.num_blocks * whole.num_block_bytes // 2
        assert first.weight_bytes + second.weight_bytes == one.model.weights.num_bytes
        config = ModelConfig.from_pretrained(tmp_path)
        group_plan = Group(stages=2)
        plan = Roofline(config, device_named("cpu"), "fp32", "fp32", group=group_plan)
        assert first.state_bytes == 20 * plan.state_bytes
        assert group_plan.layers_of_a_kind(config) == (1, 2)
    finally:
        one.close()
        group.close()


@pytest.mark.parametrize(
    ("kinds", "cut"),
    [
        ("lfl", TP3),  # ranks with one, one and two value heads
        ("lfff", PP2),  # the second stage has more K and V
        ("flflll", PP2),  # or more states
    ],
)
def test_slots_and_blocks_fit_on_the_rank_that_has_most(kinds, cut, tmp_path):
    """The first rank, which may have less, chooses their numbers."""
    names = {"l": "linear_attention", "f": "full_attention"}
    values = {
        "num_hidden_layers": len(kinds), "layer_types": [names[each] for each in kinds],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }  # fmt: skip
    random_model("qwen3_5_text", {**EVEN, **values}).save_pretrained(tmp_path)
    budget = 0.001 * 2**30
    sizes: dict[str, Any] = {"num_blocks": None, "kv_cache_gb": 0.001, "max_num_seqs": 8}
    engine = engine_of(str(tmp_path), 1, **sizes, **cut)
    try:
        ranks = engine.stats().ranks
        most = max(each.state_bytes + each.kv_bytes for each in ranks)
        assert 0.9 * budget < most + engine.arena.reserve_bytes <= budget
    finally:
        engine.close()


def test_what_cannot_be_divided_is_refused():
    dense, text = (str(make_checkpoint(name)) for name in ("qwen3_next-dense", "qwen3_5_text"))
    with pytest.raises(ConfigError, match=r"more than the 3 value heads .* set it to 3 at most"):
        engine_of(dense, 4)
    with pytest.raises(ConfigError, match=r"5 is more than the 4 attention heads .* set it to"):
        engine_of(text, 5)
    with pytest.raises(ConfigError, match=r"3 leaves the first stage without .* set it to 2"):
        engine_of(text, 1, pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match=r"16 leaves the first stage without .* set it to 15"):
        Group(stages=16).check(SHAPES["Qwen3-Next-80B-A3B"])
    Group(16, stages=15).check(SHAPES["Qwen3-Next-80B-A3B"])
    with pytest.raises(ConfigError, match="host_kv_gb cannot be combined with a model that has"):
        engine_of(text, 2, host_kv_gb=0.1)


def test_the_largest_published_one_divides_among_16():
    config = SHAPES["Qwen3-Next-80B-A3B"]
    shards = [Shard(config, rank, 16) for rank in range(16)]
    assert [each.key_heads.size for each in shards] == [1] * 16
    assert [each.value_heads.size for each in shards] == [2] * 16
    assert [each.kv_heads.first for each in shards] == [0] * 8 + [1] * 8


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_value_heads_go_with_their_key_heads(key_heads, each, num_ranks):
    base = ModelConfig.from_pretrained(make_checkpoint("qwen3_5_text"))
    shape = LinearAttentionConfig(key_heads, key_heads * each, 12, 20, 4)
    config = dataclasses.replace(base, num_heads=8, num_kv_heads=1, linear_attention=shape)
    group = Group(num_ranks)
    if num_ranks > shape.num_value_heads:
        with pytest.raises(ConfigError):
            Shard(config, 0, num_ranks)
        with pytest.raises(ConfigError):
            group.check(config)
        return
    shards = [Shard(config, rank, num_ranks) for rank in range(num_ranks)]
    spans = [shard.value_heads for shard in shards]
    assert spans[0].first == 0 and spans[-1].end == shape.num_value_heads
    assert all(a.end == b.first for a, b in itertools.pairwise(spans))
    for shard in shards:
        keys, values, own = shard.key_heads, shard.value_heads, shard.own_config.linear_attention
        of_values = {head // each for head in range(values.first, values.end)}
        assert of_values == {*range(keys.first, keys.end)} and own is not None
        assert (own.num_key_heads, own.num_value_heads) == (keys.size, values.size)
    most = max(shards, key=lambda shard: shard.value_heads.size)
    assert group.linear_heads(shape) == (most.key_heads.size, most.value_heads.size)


# -- a step's states, between processes and in parts


@st.composite
def steps(draw) -> AttentionInputs:
    """Decode rows and chunks; every write has a slot of its own."""
    num_decode = draw(st.integers(0, 70))
    lengths = draw(st.lists(st.integers(1, 90), max_size=4))
    if not num_decode + sum(lengths):
        lengths = [1]
    all_lengths = [1] * num_decode + lengths
    after = [sorted(draw(st.sets(st.integers(1, length), max_size=3))) for length in all_lengths]
    int32, num = torch.int32, len(lengths)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=int32)
    writes = list(itertools.chain(*after))
    states = StateRows(
        torch.tensor([0, *itertools.accumulate(all_lengths)], dtype=int32),
        torch.arange(len(all_lengths), dtype=int32) - 1,
        torch.tensor([0, *itertools.accumulate(map(len, after))], dtype=int32),
        torch.tensor(writes, dtype=int32),
        torch.arange(len(writes), dtype=int32) + 1000,
    )
    return AttentionInputs(
        torch.arange(sum(all_lengths)),
        num_decode,
        DecodeBatch(
            torch.zeros(num_decode, 3, dtype=int32), torch.ones(num_decode, dtype=int32), 1
        ),
        PrefillBatch(
            torch.zeros(num, 3, dtype=int32), starts, starts.diff(), max(lengths, default=0)
        ),
        states=states,
    )  # fmt: skip


def sequences_of(states: StateRows, first: int) -> list[tuple[int, int, int, list[Any]]]:
    """Of each sequence: its rows, the slot that it begins with, and its writes."""
    starts, begins = states.starts.tolist(), states.write_starts.tolist()
    writes = list(zip(states.write_after.tolist(), states.write_slots.tolist(), strict=True))
    assert starts[0] == begins[0] == 0 and begins[-1] == len(writes)
    return [
        (first + starts[i], first + starts[i + 1], source, writes[begins[i] : begins[i + 1]])
        for i, source in enumerate(states.sources.tolist())
    ]


@given(inputs=steps(), stages=st.integers(2, 5))
def test_parts_have_whole_sequences_with_their_states(inputs, stages):
    assert inputs.states is not None
    parts, found = parts_of(inputs, stages), []
    for part in parts:
        assert part.inputs.states is not None
        found += sequences_of(part.inputs.states, part.first)
        assert found[-1][1] == part.end
    assert found == sequences_of(inputs.states, 0)
