"""A GGUF file as a checkpoint in fp32 whose weights lie on no 4-bit grid of neighbours any more.

The weights of a Q4_1 file are 4-bit codes in groups of 32 neighbouring inputs, and rounding them in
the same groups would cost nothing, which says nothing of other models. Channels are put into
another order here, the same one wherever they are made and read: the residual stream's, each MLP's
neurons, and each value head's. The function is the same; a group of 32 then mixes 32 old ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gguf_model import transformers_model
from penstock.workers.text.tokenizer import Tokenizer

READS_STREAM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")
WRITES_STREAM = ("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm")


@torch.inference_mode()
def write_off_grid(file: Path, folder: Path, seed: int = 0) -> None:
    """Write the llama model of the GGUF `file`, its channels in another order, into `folder`."""
    model = transformers_model(file)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(model.config.hidden_size, generator=generator)
    for name, weight in model.named_parameters():
        kind = name.split(".")[-2]
        if kind in READS_STREAM:
            weight.copy_(weight[:, order])
        elif kind in WRITES_STREAM:
            weight.copy_(weight[order])
    for layer in model.model.layers:
        _reorder_inside(layer, model.config, generator)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Where transformers 4 looks for it, with which OpenVINO's exporter reads the model.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "tokenizer.json").write_text(Tokenizer.load(file).to_json(), encoding="utf-8")


def _reorder_inside(layer: Any, config: Any, generator: torch.Generator) -> None:
    mlp, attention = layer.mlp, layer.self_attn
    neurons = torch.randperm(config.intermediate_size, generator=generator)
    mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[neurons])
    mlp.up_proj.weight.copy_(mlp.up_proj.weight[neurons])
    mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, neurons])
    size = config.hidden_size // config.num_attention_heads
    repeats = config.num_attention_heads // config.num_key_value_heads
    rows, columns = [], []
    for head in range(config.num_key_value_heads):
        inside = torch.randperm(size, generator=generator)
        rows.append(head * size + inside)
        columns += [(head * repeats + i) * size + inside for i in range(repeats)]
    attention.v_proj.weight.copy_(attention.v_proj.weight[torch.cat(rows)])
    attention.o_proj.weight.copy_(attention.o_proj.weight[:, torch.cat(columns)])
