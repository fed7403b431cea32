"""Mixture-of-experts GGUF files: ids of transformers, and the same bits out of a cache."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock.deployments.cli.main import main
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.packed import PackedExperts
from penstock.workers.gguf.config import stated_by
from penstock.workers.gguf.header import read_header
from penstock.workers.model_config import ModelConfig, read_limits
from penstock.workers.models.loader import load_model, open_model
from penstock.workers.models.moe import MoeMlp
from tests.workers.checkpoints import (
    make_checkpoint,
    random_model,
    random_prompt,
    reference_greedy,
    reference_logits,
)
from tests.workers.experts.moe_cases import logits_of, poison
from tests.workers.gguf_files import decoded_copy, write_gguf
from tests.workers.models.test_decoder import NUM_NEW, TOLERANCE, PagedDecoder, Tokens

pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")

NAMES = (
    *("qwen3_moe", "qwen3_moe-sparse-step", "qwen2_moe", "qwen2_moe-normed"),
    *("mixtral", "mixtral-window"),
)
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "mixed")
_BLOCK = {
    "vocab_size": 199,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def mixed(name: str) -> str:
    """As Q4_K_M files are: some in more bits, of some layers."""
    if ".ffn_down_exps." in name and not name.startswith("blk.1."):
        return "Q6_K"
    return "Q6_K" if ".attn_v." in name else "Q4_K"


@functools.cache
def blocks(model_type: str = "qwen3_moe") -> Path:
    """A checkpoint whose widths are whole blocks of every type."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-gguf-moe-"))
    shared = {"shared_expert_intermediate_size": 256} if model_type == "qwen2_moe" else {}
    random_model(model_type, {**_BLOCK, **shared}).save_pretrained(folder)
    return folder


@functools.cache
def file_of(type: str, model_type: str = "qwen3_moe") -> Path:
    folder = blocks(model_type)
    return write_gguf(folder, folder / f"{type}.gguf", mixed if type == "mixed" else type)


def logits_and_ids(decoder, length: int = 20) -> tuple[torch.Tensor, list[int]]:
    prompt = random_prompt(length)
    (logits,) = PagedDecoder(decoder).step((Tokens(prompt), length))
    return logits, PagedDecoder(decoder).greedy(prompt, NUM_NEW)


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_logits_are_those_of_transformers(name, tmp_path):
    folder = make_checkpoint(name)
    decoder = load_model(write_gguf(folder, tmp_path / "x.gguf"), progress=False)
    assert decoder.dtype == torch.float32 and decoder.weights.format == "fp32"
    for length in (1, 37):
        prompt = random_prompt(length)
        logits, ids = logits_and_ids(decoder, length)
        torch.testing.assert_close(logits, reference_logits(folder, prompt), **TOLERANCE)
        assert ids == reference_greedy(folder, prompt, NUM_NEW)


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_that_of_the_checkpoint(name, tmp_path):
    """Also of a file without the keys that older ones lack."""
    folder = make_checkpoint(name)
    expected = ModelConfig.from_pretrained(folder)
    same = ("model_type vocab_size hidden_size num_layers num_heads num_kv_heads head_dim dtype "
            "intermediate_size tie_word_embeddings max_position_embeddings sliding_window "
            "qkv_bias o_bias mlp_bias qk_norm eos_token_ids moe_layers num_experts "
            "num_experts_per_token moe_intermediate_size norm_topk_prob "
            "shared_expert_intermediate_size")  # fmt: skip
    older = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    for metadata in ({}, older):
        file = write_gguf(folder, tmp_path / "x.gguf", metadata=metadata)
        found = ModelConfig.from_pretrained(file)
        for field in same.split():
            assert getattr(found, field) == getattr(expected, field), field
        assert read_limits(file) == read_limits(folder)


@pytest.mark.parametrize(("name", "is_normed"), [("qwen3_moe", True), ("qwen2_moe", False)])
def test_weights_that_the_file_does_not_say_to_norm(name, is_normed, tmp_path):
    """As llama.cpp has it for the architecture, whatever transformers' default is."""
    metadata = {"expert_weights_norm": None}
    file = write_gguf(make_checkpoint(name), tmp_path / "x.gguf", metadata=metadata)
    assert ModelConfig.from_pretrained(file).norm_topk_prob == is_normed


@pytest.mark.parametrize("type", TYPES)
def test_decoded_is_the_checkpoint_of_its_decoded_weights(type, tmp_path):
    copy = decoded_copy(blocks(), file_of(type), tmp_path / "decoded")
    logits, ids = logits_and_ids(load_model(file_of(type), weights="fp32", progress=False))
    expected, _ = logits_and_ids(load_model(copy, progress=False))
    assert torch.equal(logits, expected)
    assert ids == reference_greedy(copy, random_prompt(20), NUM_NEW)


@pytest.mark.parametrize("type", [each for each in TYPES if each not in ("F16", "BF16")])
def test_kept_codes_are_the_decoded_weights(type):
    """To the rounding of fp32 sums; the experts too are multiplied in the file's own bits."""
    kept = load_model(file_of(type), dtype="fp32", progress=False)
    decoded = load_model(file_of(type), weights="fp32", progress=False)
    formats = {"mixed": {"int4", "int8g"}, "Q4_0": {"int4"}, "Q4_1": {"int4"}, "Q4_K": {"int4"}}
    found = set()
    for layer in kept.layers:
        assert isinstance(layer.mlp, MoeMlp) and layer.mlp.router.format == "fp32"
        assert isinstance(layer.mlp.experts, Sequence)
        found |= {packed.format for expert in layer.mlp.experts for packed in expert}
    assert found == formats.get(type, {"int8g"})
    (logits, ids), (expected, expected_ids) = logits_and_ids(kept), logits_and_ids(decoded)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert ids == expected_ids


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_other_architectures_in_blocks(model_type, tmp_path):
    file = file_of("mixed", model_type)
    copy = decoded_copy(blocks(model_type), file, tmp_path / "decoded")
    _, ids = logits_and_ids(load_model(file, dtype="fp32", progress=False))
    assert ids == reference_greedy(copy, random_prompt(20), NUM_NEW)


@pytest.mark.parametrize(
    ("type", "weights"),
    [*((type, "auto") for type in ("F32", *TYPES)), ("Q8_0", "fp32"), ("mixed", "int8")],
)
def test_out_of_a_cache(type, weights):
    """The bits of the model without one, two slots for twelve experts; layers whose experts are in
    different types share the slots."""
    settings = ExpertSettings(num_slots=2)
    cached = load_model(file_of(type), weights=weights, progress=False, experts=settings)
    assert cached.routed is not None
    poison(cached.routed.cache)
    prompt = random_prompt(9)
    try:
        found = logits_of(cached, prompt, 5)
        cached.routed.cache.check()
    finally:
        cached.routed.close()
    plain = load_model(file_of(type), weights=weights, progress=False)
    assert torch.equal(found, logits_of(plain, prompt, 5))
    kinds = 2 if type == "mixed" and weights == "auto" else 1
    assert {len(slot.experts) for slot in cached.routed.cache.table} == {kinds}
    is_plain = type in ("F32", "F16", "BF16")
    assert cached.routed.cache.manifest.is_packed == (not is_plain)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_gating_func": 2}, r"expert_gating_func 2 is not supported"),
        ({"expert_group_count": 4}, r"expert_group_count 4 is not supported"),
        ({"expert_weights_scale": 2.5}, r"expert_weights_scale 2\.5 is not supported"),
        ({"expert_shared_count": 1}, r"expert_shared_count 1 is not supported"),
        ({"expert_count": None}, r"expert_count is None; a positive number"),
        ({"expert_used_count": None}, r"expert_used_count is None; a positive number"),
        ({"expert_used_count": 6}, r"must lie in \[1, num_experts = 5\]"),
        ({"expert_weights_norm": "yes"}, r"expert_weights_norm is 'yes'; true or false"),
    ],
)
def test_metadata_of_another_router_is_named(metadata, message, tmp_path):
    file = write_gguf(make_checkpoint("qwen3_moe"), tmp_path / "x.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_pretrained(file)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("qwen3_moe", "1.ffn_gate_exps", "1.ffn_gate_excs", r"1\.ffn_gate_excs\.weight' is of no"),
        (
            "qwen3_moe",
            "0.ffn_gate_exps",
            "0.ffn_gate_excs",
            r"ffn_gate_exps\.weight' is missing",
        ),
        ("mixtral", "1.ffn_gate_inp", "1.ffn_gate_in_", r"1\.ffn_gate_inp\.weight', a router"),
        ("qwen3_moe-sparse-step", "0.ffn_up.", "1.ffn_up.", r"1\.ffn_up\.weight' beside routed"),
        ("qwen2_moe", "qwen2moe", "qwen3moe", r"0\.ffn_gate_shexp\.weight' beside routed"),
        ("qwen2_moe", "qwen2moe", "qwen2---", r"architecture 'qwen2---' is not supported"),
    ],
)
def test_tensors_that_the_model_would_not_use(name, old, new, message, tmp_path):
    file = write_gguf(make_checkpoint(name), tmp_path / "x.gguf")
    file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))
    with pytest.raises(LoadError if "is of no" in message else ConfigError, match=message):
        load_model(file, progress=False)


def test_stacks_of_another_number_of_experts(tmp_path):
    metadata = {"expert_count": 4}  # of five
    file = write_gguf(make_checkpoint("qwen3_moe"), tmp_path / "x.gguf", metadata=metadata)
    with pytest.raises(LoadError, match=r"_exps\.weight' has shape \[5, .*matrices of 4 experts"):
        load_model(file, progress=False)


def test_files_with_a_tensor_for_each_expert(tmp_path):
    header = read_header(write_gguf(make_checkpoint("mixtral"), tmp_path / "x.gguf"))
    tensors = dict(header.tensors)
    tensors["blk.0.ffn_gate.0.weight"] = tensors.pop("blk.0.ffn_gate_exps.weight")
    with pytest.raises(ConfigError, match="a tensor for each single expert"):
        stated_by(dataclasses.replace(header, tensors=tensors))


def test_experts_of_a_dense_architecture(tmp_path):
    header = read_header(write_gguf(make_checkpoint("qwen3_moe"), tmp_path / "x.gguf"))
    metadata = {
        key.replace("qwen3moe", "qwen3"): "qwen3" if value == "qwen3moe" else value
        for key, value in header.metadata.items()
    }
    with pytest.raises(ConfigError, match="experts, which a model of architecture 'qwen3' has not"):
        stated_by(dataclasses.replace(header, metadata=metadata))


def test_neurons_of_a_plain_file(tmp_path, capsys):
    """Its thresholds lie beside it, where sparse mode finds them."""
    file = write_gguf(make_checkpoint("qwen3_moe"), tmp_path / "x.gguf")
    assert main(["calibrate", str(file), "--tokens", "64", "--no-progress"]) == 0
    assert f"{tmp_path / 'neuron_thresholds.json'}: thresholds of 15" in capsys.readouterr().out
    prompt = random_prompt(9)
    for mode in ("sparse", "quantized"):
        settings = ExpertSettings(num_slots=4, mode=mode, keep=0.5)
        cached = load_model(file, progress=False, experts=settings)
        assert cached.routed is not None
        cached.routed.close()
        assert (cached.routed.selector is not None) == (mode == "sparse")
        assert cached.routed.cache.manifest.copies == ("int8" if mode == "quantized" else "")
        exact = logits_of(load_model(file, progress=False), prompt, 3)
        assert torch.equal(logits_of(cached, prompt, 3), exact), "rows of no mode are exact"
        cached.routed.close()
    with pytest.raises(ConfigError, match="needs the single neurons of experts"):
        load_model(
            file_of("Q8_0"), progress=False, experts=ExpertSettings(num_slots=4, mode="sparse")
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_of_layers_in_different_types(device):
    """As a GPU reads them too, which takes none: all as long as the widest, zeros at the end."""
    experts = CheckpointExperts(*open_model(str(file_of("mixed")), "auto", "cpu"), "auto", device)
    packed = PackedExperts(experts, torch.bfloat16)
    assert packed.kinds == {0: 0, 1: 1, 2: 0}
    wide, narrow = packed.images
    assert narrow.num_bytes < wide.num_bytes == packed.num_bytes
    rows = [torch.from_numpy(packed.rows(layer, 3)).flatten() for layer in experts.layers]
    assert len({len(each) for each in rows}) == 1
    assert not rows[1][narrow.num_bytes :].any()
    for layer, image in ((0, wide), (1, narrow)):
        assert torch.equal(
            image.bytes_of(image.view(rows[layer])), image.bytes_of(packed.packed(layer, 3))
        )
