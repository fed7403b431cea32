"""A GGUF file of architecture llama as a model of transformers, read by the package `gguf` alone.

An oracle that shares nothing with Penstock's own reader. transformers could read the file itself,
but wants another package (accelerate) for that. Needs `pip install gguf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def checkpoint_name(tensor: str) -> str:
    """What transformers calls the tensor of a GGUF file. Raises KeyError for an unknown one."""
    name, _, kind = tensor.rpartition(".")
    if name in _OUTSIDE:
        return f"{_OUTSIDE[name]}.{kind}"
    _, block, part = name.split(".")
    return f"model.layers.{block}.{_IN_BLOCK[part]}.{kind}"


def paired_rows(values: Any, heads: int) -> Any:
    """Rows of q or k [N, K] as a GGUF file has them, those of a rotary pair beside each other, from
    those of transformers."""
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def transformers_model(file: Path) -> Any:
    """LlamaForCausalLM in fp32 with the file's weights, decoded. Raises KeyError for a file of
    another architecture."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(file)

    def of(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads = {"attn_q": of("attention.head_count"), "attn_k": of("attention.head_count_kv")}
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:  # rows of a rotary pair beside each other
            pairs = values.reshape(heads[part], -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        state[checkpoint_name(tensor.name)] = torch.from_numpy(np.array(values, dtype=np.float32))
    config = LlamaConfig(
        vocab_size=len(state["model.embed_tokens.weight"]),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
        rope_theta=of("rope.freq_base"),
        max_position_embeddings=of("context_length"),
        tie_word_embeddings="lm_head.weight" not in state,
    )
    model = LlamaForCausalLM(config)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    return model.float().eval()
