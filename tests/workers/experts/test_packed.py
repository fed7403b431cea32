"""Quantised experts out of a cache: the bits of the same model without one, whatever moves when.

The oracle is the plain quantised engine, which test_quantized.py and test_quantized_checkpoints.py
hold to transformers. Slots are full of NaN at first.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.deployments.config import config_from
from penstock.deployments.preflight import check_before_start
from penstock.kernels.moe.image import ExpertImage, pack_for
from penstock.kernels.quant import quantize_weight
from penstock.workers.calibrate import calibrate
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import PIECE_BYTES, CorruptedExpert, ExpertFile
from penstock.workers.experts.packed import PackedExperts
from penstock.workers.experts.writer import write_expert_file
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model, open_model
from penstock.workers.quantization import QUANTIZED_FORMATS
from penstock.workers.weights.quantize import plan_quantize, write_quantized
from tests.workers.checkpoints import FAMILIES, make_checkpoint, random_prompt
from tests.workers.experts.moe_cases import (
    BIASED,
    MOE,
    NUM_EXPERTS,
    NUM_LAYERS,
    Garbage,
    flip,
    logits_of,
    poison,
)
from tests.workers.experts.test_expert_file import _fused
from tests.workers.models.test_decoder import folder_of
from tests.workers.weights.test_quantize import greedy
from tests.workers.weights.test_quantized_checkpoints import LAYOUTS, quantized_copy

CPU, FP32 = torch.device("cpu"), torch.float32
CASES = [(name, format) for name in MOE for format in ("int8", "int4")] + [
    ("qwen2_moe", "nf4"),
    ("olmoe", "fp8"),
    *(("gpt_oss", format) for format in ("fp32", "int8", "int4")),  # with biases
]


@functools.cache
def plain(folder: Path, weights: str):
    return load_model(folder, weights=weights, progress=False)


def cached(folder: Path, weights: str, **options):
    experts = ExpertSettings(**{"num_slots": 4, **options})
    model = load_model(folder, weights=weights, progress=False, experts=experts)
    assert model.routed is not None
    poison(model.routed.cache)
    return model


def assert_same(folder: Path, weights: str, seed: int = 0, **options) -> None:
    """Logits of a cache and of the plain engine, bit for bit."""
    model, prompt = cached(folder, weights, **options), random_prompt(9, seed)
    try:
        got = logits_of(model, prompt, 5)
        model.routed.cache.check()
    finally:
        model.routed.close()
    assert model.routed.cache.manifest.is_packed
    assert torch.equal(got, logits_of(plain(folder, weights), prompt, 5))


@pytest.mark.parametrize(("name", "format"), CASES)
@settings(max_examples=5, deadline=None)
@given(
    num_slots=st.sampled_from([1, 2, 3, 7, 15]),
    prefetch=st.sampled_from(["off", "on", "garbage"]),
    is_fair=st.booleans(),
    seed=st.integers(0, 99),
)
def test_exact_is_the_plain_quantised_model(name, format, num_slots, prefetch, is_fair, seed):
    """With any capacity, and whatever is prefetched."""
    folder = folder_of(name)
    options = {"num_slots": num_slots, "prefetch": prefetch != "off", "is_fair": is_fair}
    model, prompt = cached(folder, format, **options), random_prompt(9, seed)
    if prefetch == "garbage":
        model.routed.predictor = Garbage(seed)
    else:
        model.routed.meter.clock = lambda: 0.0  # nothing is withheld
    try:
        got = logits_of(model, prompt, 5)
        model.routed.cache.check()
    finally:
        model.routed.close()
    assert torch.equal(got, logits_of(plain(folder, format), prompt, 5))


@pytest.mark.parametrize(("name", "format"), CASES)
def test_ids_through_the_engine(name, format):
    """Several sequences at once, preempted, with two slots; the slots hold the format."""
    prompts = [random_prompt(n) for n in (3, 8, 21)]
    model = cached(make_checkpoint(name), format, num_slots=2)
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "activation_memory": "separate"}
    got = greedy(model, prompts, **limits)
    model.routed.close()
    assert got == greedy(plain(make_checkpoint(name), format), prompts, **limits)
    assert all(
        packed.format == format for slot in model.routed.cache.table for packed in slot.widest
    )


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_bytes_that_move(weights):
    """An expert is its codes and scales, whole or not at all; every byte of it is counted."""
    model = cached(make_checkpoint("olmoe"), weights, num_slots=3)
    model.routed.predictor = None  # all on demand
    logits_of(model, random_prompt(9), 5)
    cache, facts = model.routed.cache, model.routed.cache.manifest
    model.routed.close()
    packed = plain(make_checkpoint("olmoe"), weights).layers[0].mlp.experts[0]
    size = sum(linear.num_bytes for linear in packed)
    assert size <= facts.packed_bytes <= facts.num_rows * PIECE_BYTES
    assert facts.num_rows * PIECE_BYTES < 3 * 64 * 40 * 4, "fewer than of plain numbers"
    moved = cache.counts.num_misses * facts.num_rows * PIECE_BYTES
    assert cache.copier.counts.demand_bytes == moved and not cache.counts.num_partial
    assert {entry.num_bytes for entry in facts.entries} == {facts.num_rows * PIECE_BYTES}


def test_a_chunk_is_some_pieces():
    """Experts that come a piece at a time, and half of one that was prefetched."""
    model = cached(make_checkpoint("mixtral"), "int8", num_slots=5)
    cache = model.routed.cache
    cache.copier.chunk_bytes = PIECE_BYTES
    assert cache.manifest.num_rows > 10
    prompt = random_prompt(9)
    model.routed.predictor = Garbage(3)
    got = logits_of(model, prompt, 5)
    model.routed.close()
    assert torch.equal(got, logits_of(plain(make_checkpoint("mixtral"), "int8"), prompt, 5))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_built_in(weights):
    """A bf16 checkpoint, computed in bf16."""
    for num_slots in (1, 5, 32):
        assert_same(folder_of("builtin-moe"), weights, num_slots=num_slots)


def test_fused_tensors(tmp_path):
    folder, _ = _fused(tmp_path, torch.bfloat16)
    assert_same(folder, "int4")


# -- checkpoints that are quantised already


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_that_were_quantised_elsewhere(layout, tmp_path):
    """AWQ, GPTQ and the others, with their own codes; and opened as plain numbers."""
    quantized_copy(tmp_path / "model", make_checkpoint("mixtral"), layout)
    assert_same(tmp_path / "model", "auto")
    if layout in ("awq", "nf4"):
        assert_same(tmp_path / "model", "fp32")


@pytest.mark.parametrize(
    ("format", "grid"), [*((each, "zero-points") for each in QUANTIZED_FORMATS), ("int4", "steps")]
)
def test_what_penstock_quantize_writes(format, grid, tmp_path):
    plan = plan_quantize(
        make_checkpoint("qwen3_moe"), format, quantize_o=True, quantize_lm_head=False, grid=grid
    )
    write_quantized(plan, tmp_path / "out", lambda _: None)
    assert_same(tmp_path / "out", "auto")
    assert_same(tmp_path / "out", format)  # it may be said


def _symmetric_in_part(folder: Path) -> None:
    """One of the experts has the zero point of 8 throughout, as if it had none."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, words in tensors.items():
        if "layers.1." in name and "experts.2." in name and name.endswith("weight_zero_point"):
            tensors[name] = torch.full_like(words, -0x77777778)  # all eights
    save_file(tensors, file)


def test_zero_points_of_some(tmp_path):
    quantized_copy(tmp_path / "model", make_checkpoint("mixtral"), "packed-asymmetric")
    _symmetric_in_part(tmp_path / "model")
    assert_same(tmp_path / "model", "auto", num_slots=2)


def test_experts_that_are_not_alike(tmp_path):
    """One was left plain: named, and what to do instead."""
    folder = tmp_path / "model"
    quantized_copy(folder, make_checkpoint("mixtral"), "packed")
    file, plain_file = folder / "model.safetensors", make_checkpoint("mixtral")
    whole, module = load_file(file), "model.layers.1.block_sparse_moe.experts.3.w2"
    kept = {name: tensor for name, tensor in whole.items() if not name.startswith(f"{module}.")}
    kept[f"{module}.weight"] = load_file(plain_file / "model.safetensors")[f"{module}.weight"]
    save_file(kept, file)
    assert load_model(folder, progress=False).weights.format == "int4"
    with pytest.raises(
        LoadError, match=r"layer 1, expert 3 is .*fp32 .* leave expert_cache_gb out"
    ):
        cached(folder, "auto")


# -- what is refused, and what is noticed


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ("nf4", {"mode": "sparse"}),
        ("int4", {"mode": "quantized"}),
        ("int4", {"thresholds": "/nowhere"}),
    ],
)
def test_neurons_of_quantised_experts_are_refused(weights, options, tmp_path):
    who = f"moe_mode {options['mode']}" if "mode" in options else "moe_thresholds"
    with pytest.raises(ConfigError, match=f"{who} .*weights is {weights}.*auto, fp32 or bf16"):
        cached(make_checkpoint("olmoe"), weights, **options)
    quantized_copy(tmp_path / "model", make_checkpoint("mixtral"), "gptq")
    with pytest.raises(ConfigError, match=f"{who} .*checkpoint is quantised.*original checkpoint"):
        cached(tmp_path / "model", "auto", **options)
    fields = {"moe_mode": options["mode"]} if "mode" in options else {"moe_thresholds": "/nowhere"}
    serve = {"model": str(tmp_path / "model"), "expert_cache_gb": 1.0, **fields}
    with pytest.raises(ConfigError, match=who):
        check_before_start(config_from(serve))
    with pytest.raises(ConfigError, match="penstock calibrate"):
        calibrate(str(tmp_path / "model"), None, 64)


def expert_file_of(folder: Path, path: Path, weights: str):
    experts = CheckpointExperts(*open_model(str(folder), weights, "cpu"), weights)
    return experts, write_expert_file(experts, path, FP32)


def test_damage_is_named(tmp_path):
    """One digest over codes and scales; the piece is named."""
    _, manifest = expert_file_of(make_checkpoint("olmoe"), tmp_path / "a", "int4")
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == (1, 3))
    flip(tmp_path / "a", entry.offset + 2 * PIECE_BYTES + 5)
    expert_file = ExpertFile(manifest)
    with pytest.raises(CorruptedExpert, match=r"layer 1, expert 3 .*: 1 of its .* pieces .*: 2$"):
        expert_file.rows(1, 3)
    assert len(expert_file.rows(1, 2)) == manifest.num_rows


def test_an_expert_file_that_was_packed_otherwise(tmp_path, monkeypatch):
    """As by another CPU: its bytes are not what a worker here would multiply."""
    folder = make_checkpoint("olmoe")
    experts, manifest = expert_file_of(folder, tmp_path / "a", "int8")
    rows = PackedExperts(experts, FP32).rows(0, 0)
    assert np.array_equal(ExpertFile(manifest).rows(0, 0), rows)
    first = dataclasses.replace(manifest.entries[0], digest="0" * 32)
    other = dataclasses.replace(manifest, entries=(first, *manifest.entries[1:]))
    with pytest.raises(LoadError, match=r"another CPU or another release: .*int8"):
        cached(folder, "int8", manifest=other)
    with pytest.raises(LoadError, match="made from other files"):
        cached(folder, "int4", manifest=manifest)
    model = cached(folder, "int8", manifest=manifest)
    model.routed.close()
    plain_experts = CheckpointExperts(*open_model(str(folder), "fp32", "cpu"))
    neurons = write_expert_file(plain_experts, tmp_path / "b", FP32)
    with pytest.raises(LoadError, match="another CPU or another release"):
        PackedExperts(experts, FP32).check(neurons)


def has_experts(name: str) -> bool:
    return ModelConfig.from_pretrained(make_checkpoint(name)).num_experts > 0


def test_all_families_are_here():
    assert {name for name in FAMILIES if has_experts(name)} == {*MOE, *BIASED}
    assert NUM_EXPERTS * NUM_LAYERS == 15


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_and_back(device, format):
    """Also in a GPU's layout, which can be made without one."""
    torch.manual_seed(0)
    sizes, there = ((80, 64), (64, 40)), torch.device(device)
    gate_up, down = (pack_for(quantize_weight(torch.randn(size), format), there) for size in sizes)
    expert = gate_up, down
    image = ExpertImage(expert)
    found = image.view(image.bytes_of(expert))
    for mine, theirs in zip(found, expert, strict=True):
        assert (mine.format, mine.layout, mine.num_bytes) == (
            theirs.format, theirs.layout, theirs.num_bytes,
        )  # fmt: skip
        for name in type(mine.payload).__dataclass_fields__:
            one, other = getattr(mine.payload, name), getattr(theirs.payload, name)
            same = (
                torch.equal(*(x.view(torch.uint8) for x in (one, other)))
                if isinstance(one, torch.Tensor)
                else one == other
            )
            assert same, name
    other = tuple(pack_for(torch.randn(size), there) for size in sizes)
    with pytest.raises(ValueError, match=rf"fp32 \[80, 64\] .* instead of {format} \[80, 64\]"):
        image.bytes_of(other)
