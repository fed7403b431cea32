"""The expert MLP: against a loop over tokens, and a token's result whatever travels with it."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.matmul import pack_linear
from penstock.kernels.moe.mlp import moe_mlp
from penstock.kernels.reference.moe import moe_reference
from tests.kernels.kernel_cases import assert_close

FP32, BF16 = torch.float32, torch.bfloat16


def make_experts(num_experts: int, dim: int, inner: int, dtype: torch.dtype) -> list:
    scale = dim**-0.5
    return [
        (
            (scale * torch.randn(2 * inner, dim)).to(dtype),
            (inner**-0.5 * torch.randn(dim, inner)).to(dtype),
        )
        for _ in range(num_experts)
    ]


def pack(experts: list) -> list:
    return [(pack_linear(gate_up), pack_linear(down)) for gate_up, down in experts]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_moe_mlp(cpu_path, dtype, num_tokens, top_k):
    experts = make_experts(6, 40, 24, dtype)
    x = torch.randn(num_tokens, 40).to(dtype)
    weights, ids = torch.rand(num_tokens, 6).topk(top_k, dim=-1)
    ids[ids == 3] = 5  # one expert without tokens, another that a token may name twice
    assert_close(moe_mlp(x, ids, weights, pack(experts)), moe_reference(x, ids, weights, experts))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("num_inner", [1, 5, 33])
def test_in_given_memory(cpu_path, dtype, num_inner):
    """Over NaN, in place, and with an expert that must take its tokens in several parts."""
    experts = make_experts(3, 40, 24, dtype)
    x = torch.randn(33, 40).to(dtype)
    weights, ids = torch.rand(33, 3).topk(2, dim=-1)
    want = moe_reference(x, ids, weights, experts)
    grouped = torch.full((66, 40), float("nan"), dtype=dtype)
    inner = torch.full((num_inner, 48), float("nan"), dtype=dtype)
    y = moe_mlp(x, ids, weights, pack(experts), grouped=grouped, inner=inner, out=x)
    assert y is x
    assert_close(y, want)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_tokens_do_not_depend_on_their_batch(native_path, dtype):
    experts = pack(make_experts(8, 64, 96, dtype))
    x = torch.randn(50, 64).to(dtype)
    weights, ids = torch.rand(50, 8).softmax(-1).topk(2, dim=-1)
    together = moe_mlp(x, ids, weights, experts)
    torch.set_num_threads(2)
    for num_tokens in (1, 3, 32):
        part = moe_mlp(x[:num_tokens], ids[:num_tokens], weights[:num_tokens], experts)
        assert torch.equal(part, together[:num_tokens])


def test_no_tokens(cpu_path):
    experts = pack(make_experts(4, 16, 8, FP32))
    y = moe_mlp(
        torch.empty(0, 16), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), experts
    )
    assert y.shape == (0, 16)
