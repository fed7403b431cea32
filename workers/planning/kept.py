"""What the weights of a quantised checkpoint or a GGUF file cost in memory where their codes are
kept (weights auto)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.workers.errors import InvariantError
from penstock.workers.families.table import FAMILIES
from penstock.workers.gguf.config import KEPT_FORMATS, WITH_MINIMUMS, dtype_of, is_kept
from penstock.workers.gguf.header import GgufHeader, TensorInfo
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.hardware import WEIGHT_FORMATS, WeightCost
from penstock.workers.quantization import StoredScheme

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


def stored_cost(model: ModelConfig) -> WeightCost:
    """The cost of the linear layers of a quantised checkpoint on average, by its config.json alone.

    The head and layers that `ignore` names are plain, as is what is fused with one of these; of
    mxfp4, all but experts. Orders of inputs (GPTQ's act-order), 4 bytes an input of a matrix, are
    left out.
    """
    scheme = model.stored_scheme
    if scheme is None or scheme.method == "gguf":
        raise InvariantError("the cost of a quantised checkpoint is asked of another one")
    plain = 4 if model.dtype == "fp32" else 2
    weight, row, compute = _cost_of(scheme)
    total = held = rows = 0.0
    for names, num_rows, width, copies in _matrices(model):
        size = num_rows * width * copies
        total += size
        is_plain = scheme.method == "mxfp4" and "experts" not in names[0]
        if is_plain or any(scheme.ignores(name) for name in names):
            held += size * plain
        else:
            held, rows = held + size * weight, rows + num_rows * copies
    return WeightCost((held + rows * row) / max(1.0, total), compute, plain)


def _cost_of(scheme: StoredScheme) -> tuple[float, float, str]:
    """Bytes a weight, bytes a row, and the format that products are computed in."""
    format, group = scheme.formats[0], scheme.groups[0] if scheme.groups else None
    if scheme.step_group is not None:
        return 0.5 + 2 / scheme.step_group, 4, "int8"
    if format in ("int8", "fp8"):
        return WEIGHT_FORMATS[format].bytes, WEIGHT_FORMATS[format].row_bytes, format
    codes = {"int4": 0.5, "nf4": 0.5, "mxfp4": 0.5, "int8g": 1.0, "fp8g": 1.0}[format]
    zero = scheme.has_zeros * (1 if format == "int4" else 4)
    if format == "nf4":
        group = 64
    if group is None:
        return codes, 4 + zero, "bf16"
    return codes + (4 + zero) / group, 0, "bf16"


def _matrices(model: ModelConfig) -> Iterator[tuple[tuple[str, ...], int, int, int]]:
    """Names, rows, width and number of the fused matrices that may be quantised."""
    d, inner, shared = (
        model.hidden_size, model.moe_intermediate_size, model.shared_expert_intermediate_size,
    )  # fmt: skip
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    names = FAMILIES[model.architecture].names
    for index, routed in enumerate(model.moe_layers):
        layer = f"model.layers.{index}"
        attention, moe = f"{layer}.self_attn", f"{layer}.{names.moe}"
        yield tuple(f"{attention}.{p}_proj" for p in "qkv"), q + 2 * kv, d, 1
        yield (f"{attention}.o_proj",), d, q, 1
        parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
        mlps = [(f"{layer}.mlp", parts, model.intermediate_size, 1)]
        if routed:
            mlps = [(f"{moe}.experts.0", names.expert, inner, model.num_experts)]
            mlps += [(f"{moe}.{names.shared_expert}", parts, shared, 1)] if shared else []
        for name, (gate, up, down), size, copies in mlps:
            yield (f"{name}.{gate}", f"{name}.{up}"), 2 * size, d, copies
            yield (f"{name}.{down}",), d, size, copies


def _bytes_of(parts: Sequence[TensorInfo], plain: int) -> float:
    """Of each weight of the matrix that `parts` become."""
    if not all(map(is_kept, parts)):
        return plain
    kept = [KEPT_FORMATS[info.type.name] for info in parts]
    code_bytes = max(_CODE_BYTES[format] for format, _ in kept)
    numbers = 2 if any(info.type.name in WITH_MINIMUMS for info in parts) else 1
    return code_bytes + 4 * numbers / math.gcd(*(group for _, group in kept))
