"""Families whose files differ: models of several parts, LongRoPE beyond its limit, old configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from penstock.workers.errors import ConfigError
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig, read_limits
from penstock.workers.models.loader import load_model
from penstock.workers.weights.quantize import plan_quantize, write_quantized
from tests.workers.checkpoints import (
    ALL,
    make_checkpoint,
    random_model,
    random_prompt,
    randomised,
    reference_greedy,
)
from tests.workers.models.test_decoder import PagedDecoder, Tokens

NUM_NEW = 24
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
_VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
# Wrapper's model type -> that of its text, its vision's, and the family that loads.
WRAPPED = {
    "mistral3": ("mistral", "pixtral", "MistralForCausalLM"),
    "mistral3-ministral3": ("ministral3", "pixtral", "Ministral3ForCausalLM"),
    "gemma3": ("gemma3_text", "siglip_vision_model", "Gemma3ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_vision", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_vision", "Qwen3_5MoeForCausalLM"),
}


def wrapped(name: str, folder: Path) -> Any:
    """A model of text and images, saved in `folder`: transformers' own."""
    text_type, vision_type, _ = WRAPPED[name]
    text = {**ALL[text_type][1], "model_type": ALL[text_type][0]}
    vision = {**_VISION, "model_type": vision_type}
    config = AutoConfig.for_model(
        name.partition("-")[0], text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    model = randomised(AutoModelForImageTextToText.from_config(config))
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def continued(model: Any, prompt: list[int]) -> list[int]:
    """Greedy ids of transformers' model, the whole sequence computed anew for each."""
    ids = list(prompt)
    for _ in range(NUM_NEW):
        given = torch.tensor([ids])
        ids.append(int(model(input_ids=given, use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_of_a_model_of_several_parts(name: str, tmp_path: Path, caplog):
    """By the names of newer files and of older ones; nothing of the images' part is read."""
    newer, older = tmp_path / "newer", tmp_path / "older"
    expected = continued(wrapped(name, newer), random_prompt(21))
    assert len(set(expected)) > 5, "a test on constant ids would show little"
    stored = load_file(newer / "model.safetensors")
    assert any("vision" in each or "visual" in each for each in stored)
    older.mkdir()
    (older / "config.json").write_bytes((newer / "config.json").read_bytes())
    prefixes = [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ]
    for a, b in prefixes if "model.language_model.embed_tokens.weight" in stored else []:
        stored = {
            f"{b}{key.removeprefix(a)}" if key.startswith(a) else key: each
            for key, each in stored.items()
        }
    save_file(stored, older / "model.safetensors", {"format": "pt"})
    for folder in (newer, older):
        decoder = load_model(folder, weights="fp32", progress=False)
        assert decoder.config.architecture == WRAPPED[name][2]
        assert PagedDecoder(decoder).greedy(random_prompt(21), NUM_NEW) == expected
        limits = decoder.config.vocab_size, decoder.config.max_position_embeddings
        assert read_limits(folder) == limits
    assert "unknown tensors" not in caplog.text
    plan = plan_quantize(newer, "int8", quantize_o=True, quantize_lm_head=False)
    write_quantized(plan, tmp_path / "int8", lambda _: None)
    quantised = load_model(tmp_path / "int8", progress=False)
    assert quantised.config.architecture == WRAPPED[name][2]
    assert quantised.weights.format == "int8"
    prompt = random_prompt(21)
    plain, rounded = (
        PagedDecoder(each).step((Tokens(prompt), len(prompt)))[0] for each in (decoder, quantised)
    )
    most = 0.08 if "moe" in name else 0.02  # rounded, a row may go to other experts
    assert (plain - rounded).square().mean() < most * plain.var()


def test_a_text_that_is_no_family_of_the_wrapper(tmp_path: Path):
    name = "Mistral3ForConditionalGeneration"
    stated: dict[str, Any] = {"architectures": [name], "model_type": "mistral3"}
    stated["text_config"] = {"model_type": "qwen9"}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="model_type 'qwen9' is not supported; supported are mi"):
        ModelConfig.from_pretrained(tmp_path)


def test_the_nearest_architecture_is_named(tmp_path: Path):
    stated = {"architectures": ["Glm5ForCausalLM"], "model_type": "glm5"}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="the nearest of them is Glm4ForCausalLM"):
        read_limits(tmp_path)


def longrope(folder: Path) -> Path:
    """Made for 16 tokens, stretched to 512."""
    model_type, settings = ALL["phi3-longrope"]
    rope = {**settings["rope_parameters"], "original_max_position_embeddings": 16}
    more = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    random_model(model_type, {**settings, **more}).save_pretrained(folder)
    return folder


def test_longrope_beyond_its_limit_and_within(tmp_path: Path):
    """transformers changes over with the length of a sequence; here what is served decides."""
    folder = longrope(tmp_path)
    long = load_model(folder, weights="fp32", progress=False)
    prompt = random_prompt(17)
    expected = reference_greedy(folder, prompt, NUM_NEW)
    assert PagedDecoder(long).greedy(prompt, NUM_NEW) == expected
    short = load_model(folder, weights="fp32", progress=False, max_model_len=16)
    assert PagedDecoder(short).greedy(prompt, NUM_NEW) != expected
    few = prompt[:5]
    expected = reference_greedy(folder, few, 11)
    assert PagedDecoder(short).greedy(few, 11) == expected
    assert PagedDecoder(long).greedy(few, 11) != expected


def test_an_older_config_of_gemma(tmp_path: Path):
    """Flat keys of rotary embedding, and a pattern in place of the layers' types."""
    folder = make_checkpoint("gemma3_text")
    stated = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "query_pre_attn_scalar"):
        del stated[key]
    stated |= {"rope_theta": 1e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2}
    stated["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    config = ModelConfig.from_pretrained(tmp_path)
    ropes = {(rope.theta, rope.factor) for rope in config.ropes}
    assert ropes == {(1e5, 8.0), (2e4, 1.0)} and config.attention_scale == 256**-0.5
    assert [config.ropes[config.rope_of(layer) or 0].theta for layer in range(3)] == [2e4, 1e5, 2e4]
    assert config.sliding_window == (13, None, 13)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("granite", {"residual_multiplier": 0.0}, "residual_scale must be a positive number"),
        ("granite", {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                            "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_be(name: str, changes: dict, why: str, tmp_path: Path):
    stated = json.loads((make_checkpoint(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, **changes}))
    with pytest.raises(ConfigError, match=why):
        ModelConfig.from_pretrained(tmp_path)


def test_every_family_has_its_own_type():
    types = [family.model_type for family in FAMILIES.values()]
    assert len(set(types)) == len(types)
