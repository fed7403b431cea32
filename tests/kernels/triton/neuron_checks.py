"""The MLP over chosen neurons, by Triton, against fp64. Run by test_triton.py, as checks.py."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.triton import neurons as neurons_triton
from tests.kernels.test_neurons import case, expected, in_parts, pooled
from tests.kernels.triton.interpreter import DEVICE, HALF

PLAIN = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def run(x: torch.Tensor, stored, chosen, generator, format: str) -> torch.Tensor:
    neurons = pooled(stored, chosen, generator, format)
    out = torch.full_like(x, float("nan"))
    pool = neurons.pool.to(DEVICE)
    assert neurons_triton.suits(pool, format, x.shape[1])
    return neurons_triton.neuron_mlp(x, pool, format, neurons.places, neurons.counts, None, out)


@pytest.mark.parametrize("size", [64, 200, 20])
@pytest.mark.parametrize("format", [PLAIN[HALF], "fp32", "int8", "int4"])
def test_neuron_mlp(format, size):
    """In any places of the pool; alone with the same bits as among others; in place."""
    generator, x, stored, values, chosen = case(3, size, 50, 1, format)
    chosen[1] = chosen[1][:0]
    x = x.to(DEVICE)
    found = run(x, stored, chosen, generator, format)
    torch.testing.assert_close(
        found.double().cpu(), expected(x.cpu(), values, chosen), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(run(x, stored, chosen, generator, format), found)
    for token in (0, 1, 2):
        one = run(x[token : token + 1], stored, chosen[token : token + 1], generator, format)
        assert torch.equal(one[0], found[token])
    neurons = pooled(stored, chosen, generator, format)
    pool = neurons.pool.to(DEVICE)
    neurons_triton.neuron_mlp(x, pool, format, neurons.places, neurons.counts, None, x)
    assert torch.equal(x, found)


@pytest.mark.parametrize("size", [200, 20])
@pytest.mark.parametrize("format", ["fp32", "int4"])
def test_neurons_in_two_calls(format, size):
    generator, x, stored, values, chosen = case(3, size, 50, 4, format)
    chosen[1], chosen[2] = chosen[1][:0], torch.arange(50)
    x = x.to(DEVICE)

    def launch(x, neurons, out):
        given = neurons.pool.to(DEVICE), format, neurons.places, neurons.counts, neurons.sums
        neurons_triton.neuron_mlp(x, *given, out)

    found = in_parts(x, stored, chosen, generator, format, 32, launch)
    torch.testing.assert_close(
        found.double().cpu(), expected(x.cpu(), values, chosen), rtol=1e-4, atol=1e-4
    )
    whole = run(x, stored, chosen, generator, format)
    assert torch.equal(found[2], whole[2]), "the first part is two whole blocks"
    assert torch.equal(in_parts(x, stored, chosen, generator, format, 0, launch), whole)


def test_half_states():
    generator, x, stored, values, chosen = case(2, 96, 40, 2, PLAIN[HALF])
    x = x.to(DEVICE, HALF)
    found = run(x, stored, chosen, generator, PLAIN[HALF])
    want = expected(x.float().cpu(), values, chosen)
    torch.testing.assert_close(found.double().cpu(), want, rtol=2e-2, atol=2e-2)


def test_rows_whose_scales_lie_askew_do_not_suit():
    pool = torch.empty(3, 3 * (6 + 4), dtype=torch.uint8)
    assert not neurons_triton.suits(pool, "int8", 6) and neurons_triton.suits(pool, "int4", 6)
