"""int8 and int4 copies of neuron rows against the rows themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.neurons import dequantize_neurons, quantize_neurons
from penstock.workers.experts.expert_file import copy_bytes

# Numbers that share a scale; the longest distance to the nearest code, in parts of the largest of
# them: half a step, and as much as a bf16 scale is off; one step where the largest is at -8.
FORMATS = {"int8": (64, 0.5001 / 127), "int4": (32, 1.01 / 8)}


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.integers(0, 99), st.booleans())
def test_copies(format, num_rows, size, seed, zeros):
    """Near enough for each group's scale; zeros stay zeros; each row is its own."""
    torch.manual_seed(seed)
    group, distance = FORMATS[format]
    rows = torch.randn(num_rows, 3 * size) * 10 ** torch.randn(num_rows, 1)
    rows[0] *= not zeros
    copies = quantize_neurons(rows, format)
    assert copies.shape == (num_rows, copy_bytes(size, format))
    back = dequantize_neurons(copies, size, format)
    for part, got in zip(rows.view(-1, 3, size).unbind(1), back.view(-1, 3, size).unbind(1)):
        for want, have in zip(part.split(group, 1), got.split(group, 1), strict=True):
            largest = want.abs().amax(1, keepdim=True)
            assert ((want - have).abs() <= distance * largest + 1e-30).all()
    assert torch.equal(quantize_neurons(rows[-1:], format), copies[-1:])


def test_int4_uses_all_codes_but_for_one_end():
    """The number farthest from zero is -8 steps away, whichever sign it has."""
    rows = torch.arange(-7.0, 9.0).repeat(2)[None].repeat(1, 3)
    back = dequantize_neurons(quantize_neurons(rows, "int4"), 32, "int4")
    assert torch.equal(back, rows)
