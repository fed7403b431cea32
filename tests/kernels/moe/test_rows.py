"""Experts written neuron by neuron: bit for bit what packing the whole matrices gives."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.moe.mlp import moe_mlp
from penstock.kernels.moe.rows import empty_expert, expert_bytes, neuron_rows, write_neurons

FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")


def empty(hidden: int, inner: int, dtype: torch.dtype):
    memory = torch.zeros(expert_bytes(hidden, inner, dtype, CPU), dtype=torch.uint8)
    return empty_expert(hidden, inner, dtype, memory)


def matrices(hidden: int, inner: int, dtype: torch.dtype):
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (40, 24), (37, 51), (1, 1), (65, 33)])
def test_bits_of_the_packed_matrices(native_path, dtype, hidden, inner):
    """In parts, in any order, and twice over NaN: as `pack_linear` of the whole, padding too."""
    gate, up, down = matrices(hidden, inner, dtype)
    expert = empty(hidden, inner, dtype)
    rows, order = neuron_rows(gate, up, down), torch.randperm(inner)
    write_neurons(expert, torch.full_like(rows, float("nan")), torch.arange(inner))
    wide = torch.full((inner, 3 * hidden + 5), float("nan"), dtype=dtype)  # rows of any stride
    wide[:, : 3 * hidden] = rows
    for part in order.split(7):
        write_neurons(expert, wide[part][:, : 3 * hidden], part)
    want = pack_linear(torch.cat([gate, up])), pack_linear(down)
    for mine, theirs in zip(expert, want, strict=True):
        assert torch.equal(mine.payload, theirs.payload)
        assert (mine.in_features, mine.out_features) == (theirs.in_features, theirs.out_features)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_products(cpu_path, dtype):
    gate, up, down = matrices(40, 24, dtype)
    expert = empty(40, 24, dtype)
    write_neurons(expert, neuron_rows(gate, up, down), torch.arange(24))
    x, y = torch.randn(5, 40).to(dtype), torch.randn(5, 24).to(dtype)
    torch.testing.assert_close(linear(x, expert[0]), x @ torch.cat([gate, up]).T)
    torch.testing.assert_close(linear(y, expert[1]), y @ down.T)
    out = torch.full((5, 40), float("nan"), dtype=dtype)
    torch.testing.assert_close(linear(y, expert[1], out=out), y @ down.T)


def test_experts_that_are_handed_out(cpu_path):
    """In any order, with the same bits; those without tokens are not requested."""
    experts = [
        (pack_linear(torch.randn(48, 40)), pack_linear(torch.randn(40, 24))) for _ in range(6)
    ]
    weights, ids = torch.rand(9, 6).topk(2, dim=-1)
    ids[ids == 3] = 5
    requested = []

    def visit(used):
        requested.append(used)
        yield from ((expert, experts[expert]) for expert in reversed(used))

    x = torch.randn(9, 40)
    y = moe_mlp(x, ids, weights, visit, num_experts=6, inner=torch.empty(9, 48))
    assert torch.equal(y, moe_mlp(x, ids, weights, experts))
    assert requested == [sorted(set(ids.flatten().tolist()))] and 3 not in requested[0]
