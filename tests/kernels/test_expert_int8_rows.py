"""int8 copies of neuron rows against the rows themselves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.expert_rows import dequantize_neurons, quantize_neurons

GROUP = 64


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.integers(0, 99), st.booleans())
def test_int8_copies(num_rows, size, seed, zeros):
    """Within half a step of each group's scale; zeros stay zeros; each row is its own."""
    torch.manual_seed(seed)
    rows = torch.randn(num_rows, 3 * size) * 10 ** torch.randn(num_rows, 1)
    rows[0] *= not zeros
    copies = quantize_neurons(rows, GROUP)
    assert copies.shape == (num_rows, 3 * (size + 4 * -(-size // GROUP)))
    back = dequantize_neurons(copies, size, GROUP)
    for part, got in zip(rows.view(-1, 3, size).unbind(1), back.view(-1, 3, size).unbind(1)):
        for want, have in zip(part.split(GROUP, 1), got.split(GROUP, 1), strict=True):
            step = want.abs().amax(1, keepdim=True) / 127
            assert ((want - have).abs() <= 0.5001 * step + 1e-30).all()
    assert torch.equal(quantize_neurons(rows[-1:], GROUP), copies[-1:])
