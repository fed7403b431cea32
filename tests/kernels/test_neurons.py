"""The MLP over chosen neurons: against fp64, in any place of the pool, alone and among others."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu import native
from penstock.kernels.neurons import (
    PooledNeurons,
    dequantize_neurons,
    neuron_mlp,
    quantize_neurons,
)

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def expected(x, rows, chosen):
    """[n, d] in fp64 of fp32 `rows` [inner, 3 * d]; `chosen`: by token, its neurons."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, picked in enumerate(chosen):
        gate, up, down = rows[picked].double().split(x.shape[1], 1)
        state = x[t].double()
        out[t] = (torch.nn.functional.silu(gate @ state) * (up @ state)) @ down
    return out


def pooled(stored, chosen, generator, format):
    """The rows in random places of a pool whose other rows are NaN."""
    num_rows = len(stored) + 5
    pool = torch.full((num_rows, stored.shape[1]), 255, dtype=torch.uint8)
    where = torch.randperm(num_rows, generator=generator)[: len(stored)]
    pool[where] = stored
    places = torch.cat([where[picked] for picked in chosen]).to(torch.int32)
    return PooledNeurons(pool, format, places, [len(picked) for picked in chosen])


def case(num_tokens, size, inner, seed, format):
    """Token states, stored rows and their fp32 values, and the neurons of each token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, size, generator=generator) * 2
    values = torch.randn(inner, 3 * size, generator=generator) / size**0.5
    if format in FORMATS:
        stored = values.to(FORMATS[format]).view(torch.uint8)
        values = values.to(FORMATS[format]).float()
    else:
        stored = quantize_neurons(values, format)
        values = dequantize_neurons(stored, size, format)
    chosen = [
        (torch.rand(inner, generator=generator) < torch.rand(1, generator=generator)).nonzero()[
            :, 0
        ]
        for _ in range(num_tokens)
    ]
    return generator, x, stored, values, chosen


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 150),
    st.integers(1, 70),
    st.integers(0, 99),
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_fp64_wherever_the_rows_lie(num_tokens, size, inner, seed, format, compute):
    generator, x, stored, values, chosen = case(num_tokens, size, inner, seed, format)
    x = x.to(compute)
    wanted = expected(x.float(), values, chosen)
    neurons = pooled(stored, chosen, generator, format)
    found = neuron_mlp(x, neurons, torch.full_like(x, float("nan")))
    bound = 1e-5 if compute == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
    again = neuron_mlp(x, pooled(stored, chosen, generator, format), x)  # in place, elsewhere
    assert again is x and torch.equal(again, found)


@pytest.mark.skipif(native.loaded() is None, reason="the native library is not built")
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4"])
def test_a_token_has_its_bits_alone_among_others_and_with_any_threads(format):
    generator, x, stored, _, chosen = case(6, 1000, 300, 3, format)
    found = neuron_mlp(x, pooled(stored, chosen, generator, format), torch.empty_like(x))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for t, picked in enumerate(chosen):
                one = pooled(stored, [picked], generator, format)
                alone = neuron_mlp(x[t : t + 1], one, torch.empty(1, 1000))
                assert torch.equal(alone[0], found[t])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_plain_pytorch_computes_the_same(format):
    """fp16 numbers have no native path."""
    generator, x, stored, values, chosen = case(3, 96, 40, 5, format)
    neurons = pooled(stored, chosen, generator, format)
    with native.instead(None):
        found = neuron_mlp(x, neurons, torch.empty_like(x))
    torch.testing.assert_close(found.double(), expected(x, values, chosen), rtol=1e-5, atol=1e-5)


def test_a_token_without_neurons_gets_zeros():
    x = torch.full((2, 8), np.nan)
    pool, nothing = torch.empty(3, 96, dtype=torch.uint8), torch.empty(0, dtype=torch.int32)
    neurons = PooledNeurons(pool, "fp32", nothing, [0, 0])
    assert torch.equal(neuron_mlp(x, neurons, torch.empty_like(x)), torch.zeros(2, 8))
