"""Checks and timings of routed experts for `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.cases import DEVICE, HALF, Checks, Triples, Work
from benchmarks.gpu.linear import UNITS, WITH_PLAIN, GpuFormat, random_packed
from penstock.kernels.triton import matmul as matmul_triton
from penstock.kernels.triton import moe as moe_triton
from penstock.kernels.triton.matmul import GpuWeight
from penstock.kernels.types import PackedLinear


def packed(weight: GpuWeight) -> PackedLinear:
    kind = weight.format
    format = "int4" if kind == "int4_steps" else "bf16" if kind == "plain" else kind
    return PackedLinear(
        weight, None, weight.in_features, weight.out_features, weight.num_bytes, format, "triton",
        weight.row_group, weight.takes_int8, weight.hadamard,
    )  # fmt: skip


def check_grouped(format: GpuFormat, dtype: torch.dtype) -> Triples:
    """Each expert's rows against the same rows through its linear alone."""
    num_experts, num_outputs, num_inputs = 5, 70, 136
    for num_tokens in (1, 40):
        weights = [
            random_packed(format, num_outputs, num_inputs, dtype) for _ in range(num_experts)
        ]
        table = moe_triton.group_weights([packed(weight) for weight in weights])
        x = torch.randn(num_tokens, num_inputs).to(DEVICE, dtype)
        ids = torch.rand(num_tokens, num_experts, device=DEVICE).topk(2).indices
        ids[ids == 1] = 0
        routes = moe_triton.group_routes(ids, num_experts)
        out = torch.empty(2 * num_tokens, num_outputs, dtype=dtype, device=DEVICE)
        values, scales = matmul_triton.activations(x, weights[0])
        moe_triton.grouped_linear(values, scales, table, routes.starts, out, 0, routes.tokens)
        sizes = routes.starts.diff().tolist()
        rows = x[routes.tokens.long()].split(sizes)
        want = torch.cat([matmul_triton.linear(*pair) for pair in zip(rows, weights)])
        yield f"{format} {num_tokens} tokens", out, want


def check_columns(format: GpuFormat, dtype: torch.dtype) -> Triples:
    """The steps of a rank that has all columns of the experts, against all experts in one call."""
    num_experts, hidden, inner = 5, 144, 80
    experts = [
        (
            packed(random_packed(format, 2 * inner, hidden, dtype)),
            packed(random_packed(format, hidden, inner, dtype)),
        )
        for _ in range(num_experts)
    ]
    table = moe_triton.expert_table(experts)
    for num_tokens in (1, 40):
        x = torch.randn(num_tokens, hidden).to(DEVICE, dtype)
        ids = torch.rand(num_tokens, num_experts, device=DEVICE).topk(2).indices
        gains = torch.rand(num_tokens, 2, device=DEVICE)

        def rows(columns: int, num: int = 2 * num_tokens, like: torch.Tensor = x) -> torch.Tensor:
            return like.new_full((num, columns), float("nan"))

        want = moe_triton.moe_mlp(
            x, ids, gains, table, rows(hidden), rows(2 * inner), torch.empty_like(x)
        )
        run = moe_triton.columns_of(x, ids, table)
        products, outputs = rows(inner), rows(hidden)
        run.inner(rows(2 * inner, num_tokens), products, None)
        run.outputs(products, outputs)
        out = run.combined(outputs, gains, torch.empty_like(x))
        yield f"{format} {num_tokens} tokens", out, want


CHECKS: Checks = {
    **{f"grouped linear {format}": partial(check_grouped, format) for format in WITH_PLAIN},
    **{f"columns of experts {format}": partial(check_columns, format) for format in WITH_PLAIN},
}


def works(tiny: bool) -> Iterator[Work]:
    """Expert layers of Mixtral-8x7B and Qwen3-30B-A3B, routes drawn evenly."""
    shrink, batches = (64, (1, 3)) if tiny else (1, (1, 16, 64, 256, 4096))
    models = {
        "Mixtral": (8, 2, 4096, 14336),
        "Qwen3-30B": (128 // (8 if tiny else 1), 8, 2048, 768),
    }
    for model, (num_experts, top_k, hidden, inner) in models.items():
        hidden, inner = hidden // shrink, inner // shrink
        for format in WITH_PLAIN:
            experts = [
                (
                    packed(random_packed(format, 2 * inner, hidden, HALF)),
                    packed(random_packed(format, hidden, inner, HALF)),
                )
                for _ in range(num_experts)
            ]
            table = moe_triton.expert_table(experts)
            for num_tokens in batches:
                name = f"{model} {num_tokens} tokens"
                yield _moe_work(name, format, table, num_tokens, top_k, experts)


def _moe_work(
    name: str, format: str, table: tuple[moe_triton.GroupedWeight, moe_triton.GroupedWeight],
    num_tokens: int, top_k: int, experts: list[tuple[PackedLinear, PackedLinear]],
) -> Work:  # fmt: skip
    gate_up, down = experts[0]
    hidden, wide = gate_up.in_features, gate_up.out_features
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(HALF)
    ids = torch.rand(num_tokens, len(experts), device=DEVICE).topk(top_k).indices
    gains = torch.rand(num_tokens, top_k, device=DEVICE)
    grouped = torch.empty(num_tokens * top_k, hidden, device=DEVICE, dtype=HALF)
    inner = torch.empty(num_tokens * top_k, wide, device=DEVICE, dtype=HALF)
    out = torch.empty_like(x)
    return Work(
        f"experts {format}",
        name,
        lambda: moe_triton.moe_mlp(x, ids, gains, table, grouped, inner, out),
        len(ids.unique()) * (gate_up.num_bytes + down.num_bytes) + 4 * x.numel(),
        3 * num_tokens * top_k * hidden * wide,
        UNITS.get(format, "bf16"),
    )
