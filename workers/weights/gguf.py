"""The tensors of a GGUF file, under the names and in the row order of a safetensors checkpoint.

Some architectures keep the rows of q and k in the order of adjacent rotary pairs; here, as in
transformers, a pair is a head's row i and row i + half. Rows are whole blocks, so they change
places as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import Tensor

from penstock.workers.errors import ConfigError, InvariantError, LoadError
from penstock.workers.families.family import Family
from penstock.workers.families.table import FAMILIES
from penstock.workers.gguf.config import ADJACENT_PAIRS, MIXTRAL, is_kept, stated_by
from penstock.workers.gguf.header import BlockType, TensorInfo, read_header
from penstock.workers.gguf.metadata import architecture_of
from penstock.workers.weights.checkpoint import StoredTensor
from penstock.workers.weights.gguf_blocks import decode

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Of blocks with routed experts. A stack, whose name ends with _exps, holds a matrix of each.
_ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_STACK = "_exps"
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")
_READ_BY_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """A tensor in blocks. `num_heads`: into which its rows are divided, to be put in order; 0: they
    are in order."""

    type: BlockType
    num_heads: int

    def read(self, *, codes: bool = False) -> Tensor:
        """The tensor on the CPU: floats as stored, other types decoded to fp32; with `codes`, these
        as bytes [rows, bytes of a row]. Raises LoadError."""
        num_rows = self.shape[0]
        raw = self.read_bytes().view(num_rows, -1)
        if self.num_heads:
            pairs = raw.view(self.num_heads, num_rows // self.num_heads // 2, 2, -1)
            raw = pairs.transpose(1, 2).reshape(num_rows, -1)
        return raw if codes else decode(raw, self.type).view(self.shape)

    def part(self, first: int, end: int) -> Self:
        """Its rows [first, end): of whole heads, where they are divided into heads."""
        num_heads, rest = divmod(self.num_heads * (end - first), self.shape[0])
        if rest:
            raise InvariantError(f"{self.name}: rows [{first}, {end}) are no whole heads")
        return replace(super(GgufTensor, self).part(first, end), num_heads=num_heads)


def open_gguf(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file by the names of a checkpoint: of matrices in blocks
    `weight_q8_0` and so on (`stored.py`), and of each expert its own. An embedding in blocks that
    is the head too has both names; otherwise embeddings are always read as floats, as routers are.

    Raises LoadError for a damaged file, and for a tensor that no model here has.
    """
    try:
        header = read_header(file)
        architecture, stated = stated_by(header)
        is_adjacent = architecture_of(header) in ADJACENT_PAIRS
    except ConfigError as error:
        raise LoadError(str(error)) from error
    num_experts = getattr(stated, "num_experts", 0)
    in_block = _IN_BLOCK | _of_family(FAMILIES[architecture])
    if num_experts:
        in_block |= _MIXTRAL if architecture == MIXTRAL else _ROUTED
    heads = {"attn_q": stated.num_attention_heads, "attn_k": stated.num_key_value_heads}
    tensors: dict[str, StoredTensor] = {}
    for info in header.tensors.values():
        if info.name in _READ_BY_CONFIG:
            continue
        match = _NAME.fullmatch(info.name)
        names = _OUTSIDE if match is None or match[1] is None else in_block
        if match is None or match[2] not in names:
            raise LoadError(f"{file}: tensor {info.name!r} is of no supported model")
        part, kind = match[2], match[3]
        module = names[part]
        if match[1] is not None:
            module = f"model.layers.{int(match[1])}.{module}"
        if part in _ROUTERS:
            info = replace(info, shape=(1, *info.shape)) if len(info.shape) == 1 else info
        elif is_kept(info):
            kind = f"weight_{info.type.name.lower()}"
        if part.endswith(_STACK):
            for index, expert in enumerate(_experts_of(file, info, num_experts)):
                name = f"{module.format(index)}.{kind}"
                tensors[name] = _tensor(file, name, expert, 0)
            continue
        if part == "token_embd":
            if stated.tie_word_embeddings and kind != "weight":
                tensors[f"{_HEAD}.{kind}"] = _tensor(file, f"{_HEAD}.{kind}", info, 0)
            kind = "weight"
        name = f"{module}.{kind}"
        tensors[name] = _tensor(file, name, info, heads.get(part, 0) if is_adjacent else 0)
    return tensors


def _of_family(family: Family) -> dict[str, str]:
    """Norms behind attention and MLP, and fused matrices, where the family has them."""
    names = family.names
    found = {"ffn_norm": names.mlp_norm}
    found["post_attention_norm"] = names.attention_out_norm
    found["post_ffw_norm"] = names.mlp_out_norm
    if names.qkv is not None:
        found["attn_qkv"] = f"self_attn.{names.qkv}"
    if names.gate_up is not None:
        found["ffn_up"] = f"mlp.{names.gate_up}"
    return found


def _experts_of(file: Path, info: TensorInfo, num_experts: int) -> Iterator[TensorInfo]:
    """The matrices of a stack, in the order of the experts."""
    if len(info.shape) != 3 or info.shape[0] != num_experts:
        raise LoadError(
            f"{file}: tensor {info.name!r} has shape {list(info.shape)}; matrices of "
            f"{num_experts} experts were expected"
        )
    size = info.num_bytes // num_experts
    for index in range(num_experts):
        begin = info.offset + index * size
        yield replace(info, shape=info.shape[1:], offset=begin, num_bytes=size)


def _tensor(file: Path, name: str, info: TensorInfo, num_heads: int) -> GgufTensor:
    if not info.shape or 0 in info.shape or (num_heads and info.shape[0] % (2 * num_heads)):
        raise LoadError(
            f"{file}: tensor {info.name!r} has shape {list(info.shape)}, which no model has"
        )
    return GgufTensor(
        name,
        file,
        info.type.name,
        info.shape,
        info.offset,
        info.num_bytes,
        info.type,
        num_heads,
    )
