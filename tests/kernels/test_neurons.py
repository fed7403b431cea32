"""The MLP over chosen neurons: against fp64, in any place of the pool, alone and among others; and
int8 and int4 copies of neuron rows against the rows themselves."""

from contextlib import nullcontext
from dataclasses import replace

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
from penstock.kernels.types import PartialSums
from penstock.workers.experts.expert_file import copy_bytes

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


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4"])
def test_a_token_has_its_bits_alone_among_others_and_with_any_threads(native_path, format):
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


def in_parts(x, stored, chosen, generator, format, cut, run=neuron_mlp):
    """Each token's neurons below `cut` in a first call, then the others; `out` is NaN before."""
    so_far, out = torch.full_like(x, float("nan"), dtype=torch.float32), torch.full_like(x, np.nan)
    for i, is_part in enumerate((lambda n: n < cut, lambda n: n >= cut)):
        part = [picked[is_part(picked)] for picked in chosen]
        neurons = pooled(stored, part, generator, format)
        run(x, replace(neurons, sums=PartialSums(so_far, i == 0, i == 1)), out)
        assert i or torch.isnan(out).all()
    return out


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_native", [True, False])
def test_neurons_in_two_calls(format, compute, is_native, native_path):
    """The sum of both, rounded once; the bits of one call where the first has whole blocks."""
    generator, x, stored, values, chosen = case(4, 200, 90, 7, format)
    chosen[1], chosen[2] = chosen[1][:0], torch.arange(90)
    x = x.to(compute)
    with nullcontext() if is_native else native.instead(None):
        found = in_parts(x, stored, chosen, generator, format, 32)
        whole = neuron_mlp(x, pooled(stored, chosen, generator, format), torch.empty_like(x))
        nothing = in_parts(x, stored, chosen, generator, format, 0)
    wanted = expected(x.float(), values, chosen)
    bound = 1e-5 if compute == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
    assert torch.equal(nothing, whole), "an empty first part changes nothing"
    if is_native:
        assert torch.equal(found[2], whole[2])


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


# Numbers that share a scale; the longest distance to the nearest code, in parts of the largest of
# them: half a step, and as much as a bf16 scale is off; one step where the largest is at -8.
COPIES = {"int8": (64, 0.5001 / 127), "int4": (32, 1.01 / 8)}


@pytest.mark.parametrize("format", COPIES)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.integers(0, 99), st.booleans())
def test_copies(format, num_rows, size, seed, zeros):
    """Near enough for each group's scale; zeros stay zeros; each row is its own."""
    torch.manual_seed(seed)
    group, distance = COPIES[format]
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
