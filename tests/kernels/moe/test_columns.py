"""Some columns of every expert: each output has the bits that one process computes."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.matmul import pack_linear
from penstock.kernels.quant import QuantizedWeight, quantize_weight
from penstock.workers.weights.joined import selected
from tests.kernels.moe.column_cases import assert_same_bits


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize(
    ("format", "dtype", "group"),
    [
        (None, torch.float32, None), (None, torch.bfloat16, None), ("int8", torch.bfloat16, None),
        ("int4", torch.bfloat16, 16), ("int4", torch.float32, 32), ("fp8", torch.float32, None),
        ("nf4", torch.bfloat16, 16),
    ],
)  # fmt: skip
def test_parts_of_experts(native_path, format, dtype, group, num_tokens):
    inner, hidden, num_experts = 48, 80, 5

    def weight(rows: int, columns: int) -> torch.Tensor | QuantizedWeight:
        drawn = (torch.randn(rows, columns) * columns**-0.5).to(dtype)
        return drawn if format is None else quantize_weight(drawn, format, group)

    whole = [(weight(2 * inner, hidden), weight(hidden, inner)) for _ in range(num_experts)]

    def cut(columns: slice, outputs: slice):
        rows = torch.arange(inner)[columns]
        both = torch.cat((rows, rows + inner))
        return [
            (pack_linear(selected(gate_up, both)), pack_linear(selected(down, outputs)))
            for gate_up, down in whole
        ]

    x = torch.randn(num_tokens, hidden).to(dtype)
    gains, ids = torch.rand(num_tokens, num_experts).topk(2, dim=-1)
    ids[ids == 3] = 4  # one expert without tokens, another that a token may name twice
    assert_same_bits(cut, x, ids, gains, inner, (0.0, 1 / 3, 1.0))
