"""What the weights of a GGUF file cost in memory where their codes are kept (weights auto)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.workers.gguf.config import KEPT_FORMATS, WITH_MINIMUMS, dtype_of, is_kept
from penstock.workers.gguf.header import GgufHeader, TensorInfo
from penstock.workers.planning.hardware import WeightCost

_CODE_BYTES = {"int4": 0.5, "int8g": 1.0}
# Matrices over the same input, which become one (weights/joined.py).
_JOINED = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_qkv"),
    **dict.fromkeys(("ffn_gate", "ffn_up"), "ffn_gate_up"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps"),
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), "ffn_gate_up_shexp"),
}
_ROUTER = "ffn_gate_inp"


def kept_cost(header: GgufHeader) -> tuple[WeightCost, bool]:
    """The cost of the file's linear layers, on average, and whether the head is among them.

    The head is if it is stored in blocks; otherwise it is as plain as the embedding. Scales and
    zero points are fp32, as in `kernels/quant.py`.
    """
    plain = 4 if dtype_of(header) == "float32" else 2
    head = header.tensors.get("output.weight", header.tensors.get("token_embd.weight"))
    keeps_head = head is not None and is_kept(head)
    linears: dict[str, list[TensorInfo]] = {}
    for name, info in header.tensors.items():
        block, _, part = name.removesuffix(".weight").rpartition(".")
        if block.startswith("blk.") and len(info.shape) > 1 and not part.startswith(_ROUTER):
            linears.setdefault(f"{block}.{_JOINED.get(part, part)}", []).append(info)
    if keeps_head and head is not None:
        linears["output"] = [head]
    sizes = {name: sum(math.prod(i.shape) for i in parts) for name, parts in linears.items()}
    num_bytes = sum(sizes[name] * _bytes_of(parts, plain) for name, parts in linears.items())
    compute = "fp32" if plain == 4 else "bf16"
    return WeightCost(num_bytes / max(1, sum(sizes.values())), compute, plain), keeps_head


def _bytes_of(parts: Sequence[TensorInfo], plain: int) -> float:
    """Of each weight of the matrix that `parts` become."""
    if not all(map(is_kept, parts)):
        return plain
    kept = [KEPT_FORMATS[info.type.name] for info in parts]
    code_bytes = max(_CODE_BYTES[format] for format, _ in kept)
    numbers = 2 if any(info.type.name in WITH_MINIMUMS for info in parts) else 1
    return code_bytes + 4 * numbers / math.gcd(*(group for _, group in kept))
