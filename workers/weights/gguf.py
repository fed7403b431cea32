"""The tensors of a GGUF file, under the names and in the row order of a safetensors checkpoint.

Some architectures keep the rows of q and k in the order of adjacent rotary pairs; here, as in
transformers, a pair is a head's row i and row i + half. Rows are whole blocks, so they change
places as bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.gguf.config import (
    ADJACENT_PAIRS,
    KEPT_FORMATS,
    architecture_of,
    stated_by,
)
from penstock.workers.gguf.header import BlockType, TensorInfo, read_header
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
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")
_READ_BY_CONFIG = "rope_freqs.weight"
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


def open_gguf(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file by the names of a checkpoint: of matrices in blocks
    `weight_q8_0` and so on (`stored.py`). An embedding in blocks that is the head too has both
    names; otherwise embeddings are always read as floats.

    Raises LoadError for a damaged file, and for a tensor that no model here has.
    """
    try:
        header = read_header(file)
        _, stated = stated_by(header)
        is_adjacent = architecture_of(header) in ADJACENT_PAIRS
    except ConfigError as error:
        raise LoadError(str(error)) from error
    heads = {"attn_q": stated.num_attention_heads, "attn_k": stated.num_key_value_heads}
    tensors: dict[str, StoredTensor] = {}
    for info in header.tensors.values():
        if info.name == _READ_BY_CONFIG:
            continue
        match = _NAME.fullmatch(info.name)
        names = _OUTSIDE if match is None or match[1] is None else _IN_BLOCK
        if match is None or match[2] not in names:
            raise LoadError(f"{file}: tensor {info.name!r} is of no supported model")
        module = names[match[2]]
        if match[1] is not None:
            module = f"model.layers.{int(match[1])}.{module}"
        kind = match[3]
        if info.type.name in KEPT_FORMATS and len(info.shape) == 2:
            kind = f"weight_{info.type.name.lower()}"
        if match[2] == "token_embd":
            if stated.tie_word_embeddings and kind != "weight":
                tensors[f"{_HEAD}.{kind}"] = _tensor(file, f"{_HEAD}.{kind}", info, 0)
            kind = "weight"
        name = f"{module}.{kind}"
        tensors[name] = _tensor(file, name, info, heads.get(match[2], 0) if is_adjacent else 0)
    return tensors


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
