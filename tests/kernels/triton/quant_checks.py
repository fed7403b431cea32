"""Quantised linears, routed experts, quantised rows and sampling in Triton against their
references. Run by test_triton.py, as triton_checks.py is.

A wider sweep is `python -m benchmarks.gpu.check --only linear --only moe --only sampling`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from penstock.kernels import matmul, quant
from penstock.kernels.moe import mlp as moe
from penstock.kernels.quant import Int8Rows, QuantizedWeight, WeightFormat
from penstock.kernels.reference.sampling import sample_reference
from penstock.kernels.triton import matmul as matmul_triton
from penstock.kernels.triton import moe as moe_triton
from penstock.kernels.triton import rowwise as rowwise_triton
from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton
from penstock.kernels.triton import sampling as sampling_triton
from penstock.kernels.triton.matmul_tiles import Tiles
from penstock.kernels.types import PackedLinear, SamplingRows
from penstock.workers.weights.joined import selected
from tests.kernels.cpu.test_grouped_codes import Kind, grouped_weight
from tests.kernels.kernel_cases import assert_close
from tests.kernels.moe.column_cases import assert_same_bits
from tests.kernels.triton.interpreter import DEVICE, HALF

FP32 = torch.float32


def poisoned(values: torch.Tensor, spare: int = 5) -> torch.Tensor:
    """The same values as a view of a wider tensor, NaN beyond."""
    wide = torch.full((values.shape[0], values.shape[1] + spare), math.nan).to(values)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def traps(dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes: zeros, NaN, an infinity, ties of rounding, tiny and large."""
    x = torch.randn(8, 77) * torch.logspace(-6, 3, 8)[:, None]
    x[1] = 0
    x[2, 5] = math.nan
    x[3, 76] = -math.inf
    x[4] = torch.arange(77) - 38.5  # the scale is 38.5 / 127; with codes of .5 in between
    x[4, 0] = 127 / 2
    return x.to(DEVICE, dtype)


def assert_same_rows(codes, scales, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(codes.cpu().view(torch.uint8), want[0].cpu().view(torch.uint8))
    torch.testing.assert_close(scales.cpu(), want[1].cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, HALF])
def test_quantised_rows_have_the_bits_of_the_reference(dtype):
    x = traps(dtype)
    for kind, reference in (
        (torch.int8, quant.quantize_rows_int8), (torch.uint8, quant.quantize_rows_fp8),
    ):  # fmt: skip
        codes = torch.empty(8, 77, dtype=kind, device=DEVICE)
        want = reference(x.cpu())
        scales = torch.empty(want[1].shape, device=DEVICE)
        rowwise_quant_triton.quantize_rows(poisoned(x), codes, scales)
        assert_same_rows(codes, scales, want)


@pytest.mark.parametrize("dtype", [FP32, HALF])
@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize("hadamard", [False, True])
def test_rows_with_scales_of_groups(dtype, group, hadamard):
    for x in (traps(dtype), traps(dtype)[:, :60], torch.randn(2, 200).to(DEVICE, dtype)):
        out = Int8Rows.inside(poisoned(x), group, hadamard=hadamard)
        rows = rowwise_quant_triton.quantize_int8(x.clone(), out)
        want = quant.quantize_rows_int8(x.cpu(), group, hadamard=hadamard)
        assert_same_rows(rows.codes, rows.scales, want)


@pytest.mark.parametrize("dtype", [FP32, HALF])
@pytest.mark.parametrize(("group", "hadamard"), [(None, False), (32, False), (64, True)])
def test_fused_rows_are_those_of_two_steps(dtype, group, hadamard):
    """Over their own input, too: the codes lie where x, or the gate, was."""
    x, residual = traps(dtype), torch.randn(8, 77).to(DEVICE, dtype)
    weight = torch.randn(77).to(DEVICE, dtype)
    y, total = rowwise_triton.rms_norm(x, weight, 1e-5, residual, torch.empty_like(x))
    inside = Int8Rows.inside(x, group, hadamard=hadamard)
    rows = rowwise_quant_triton.rms_norm_int8(x, weight, 1e-5, residual, inside, residual)
    want = quant.quantize_rows_int8(y.cpu(), group, hadamard=hadamard)
    assert_same_rows(rows.codes, rows.scales, want)
    torch.testing.assert_close(residual, total, rtol=0, atol=0, equal_nan=True)
    gate_up = torch.cat((traps(dtype), torch.randn(8, 77).to(DEVICE, dtype)), dim=1)
    y = rowwise_triton.act_mul(gate_up, torch.empty(8, 77, dtype=dtype, device=DEVICE))
    rows = Int8Rows.inside(gate_up[:, :77], group, hadamard=hadamard)
    rowwise_quant_triton.act_mul_int8(gate_up, rows)
    want = quant.quantize_rows_int8(y.cpu(), group, hadamard=hadamard)
    assert_same_rows(rows.codes, rows.scales, want)


GROUPED: dict[str, tuple[Kind, int, bool]] = {
    "int4 real zeros": ("int4", 32, True),
    "int8g": ("int8g", 32, False),
    "int8g 16": ("int8g", 16, False),
    "int8g zeros": ("int8g", 64, True),
    "fp8g": ("fp8g", 128, False),
    "mxfp4": ("mxfp4", 32, False),
}


def make_grouped(format: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """Random codes of a key of GROUPED."""
    kind, group, with_zeros = GROUPED[format]
    found = grouped_weight(kind, num_outputs, num_inputs, group, with_zeros)
    zeros = None if found.zeros is None else found.zeros.to(DEVICE)
    codes, scales = found.codes.to(DEVICE), found.scales.to(DEVICE)
    return QuantizedWeight(kind, codes, scales, num_inputs, group, zeros)


def make_weight(
    format: str,  # a format of weights, and a variant: a group, "rows", "scales" or "zeros"
    num_outputs: int,
    num_inputs: int,
) -> QuantizedWeight:
    """With a group, or a row, of zeros and one extreme value."""
    weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    weight[0, : min(128, num_inputs)] = 0
    weight[1, 0] = 100.0
    kind, _, more = format.partition(" ")
    is_symmetric = more in ("scales", "zeros")
    size = 128 if is_symmetric else int(more) if more.isdigit() else quant.INT4_STEP_GROUP
    made = quant.quantize_weight(
        weight, cast(WeightFormat, kind), size, symmetric=is_symmetric,
        hadamard=quant.hadamard_transform if more == "hadamard" else None,
    )  # fmt: skip
    if format == "int8 rows" or format == "int8 32":
        made = replace(made, group=None if format == "int8 rows" else 32)
    codes, scales, zeros, group = made.codes, made.scales, made.zeros, made.group
    if format == "int4 zeros":  # as AWQ has them; groups of 32
        group, groups = 32, -(-num_inputs // 32)
        zeros = torch.randint(0, 16, (num_outputs, groups), dtype=torch.uint8).to(DEVICE)
        scales = torch.rand(num_outputs, groups)
    steps, offsets = made.steps, made.offsets
    return QuantizedWeight(
        made.format, codes.to(DEVICE), scales.to(DEVICE), num_inputs, group, zeros,
        None if steps is None else steps.to(DEVICE),
        None if offsets is None else offsets.to(DEVICE), hadamard=made.hadamard,
    )  # fmt: skip


# format, dtype, rows, outputs, inputs, pieces with a program each
LINEARS = [
    ("int8", HALF, 17, 70, 200, 1),
    ("int8", FP32, 1, 33, 300, 2),
    ("int8", FP32, 70, 20, 64, 1),
    ("int8 32", HALF, 3, 33, 100, 1),
    ("int8 rows", HALF, 17, 70, 200, 1),
    ("int8 rows", FP32, 1, 33, 300, 2),
    ("int8 hadamard", HALF, 17, 70, 200, 1),
    ("int4 hadamard", FP32, 3, 33, 300, 1),
    ("int4", FP32, 3, 70, 129, 1),
    ("int4", HALF, 257, 20, 384, 1),
    ("int4", FP32, 1, 33, 300, 2),
    ("int4 32", HALF, 17, 33, 100, 1),
    ("int4 64", HALF, 1, 70, 40, 1),
    ("int4 128", FP32, 3, 20, 400, 3),
    ("int4 scales", FP32, 3, 70, 129, 1),
    ("int4 scales", HALF, 257, 20, 384, 1),
    ("int4 zeros", HALF, 3, 33, 100, 1),
    ("int4 zeros", FP32, 1, 5, 30, 1),
    ("nf4", HALF, 64, 20, 200, 1),
    ("nf4", FP32, 1, 65, 400, 3),
    ("fp8", HALF, 3, 70, 200, 1),
    ("fp8", FP32, 2, 5, 300, 2),
    ("int4 real zeros", HALF, 3, 33, 100, 1),
    ("int4 real zeros", FP32, 17, 5, 300, 2),
    ("int8g", HALF, 257, 20, 384, 1),
    ("int8g", FP32, 1, 33, 300, 2),
    ("int8g 16", HALF, 3, 33, 100, 1),
    ("int8g zeros", HALF, 64, 20, 200, 1),
    ("int8g zeros", FP32, 1, 70, 400, 3),
    ("fp8g", HALF, 3, 33, 200, 1),
    ("fp8g", FP32, 17, 5, 300, 2),
    ("fp8g", HALF, 70, 20, 100, 1),
    ("mxfp4", HALF, 3, 33, 96, 1),
    ("mxfp4", FP32, 1, 70, 400, 3),
]


@pytest.mark.parametrize(("format", "dtype", "rows", "outputs", "inputs", "pieces"), LINEARS)
def test_linear(format, dtype, rows, outputs, inputs, pieces):
    make = make_grouped if format in GROUPED else make_weight
    quantized = make(format, outputs, inputs)
    x = poisoned(torch.randn(rows, inputs).to(DEVICE, dtype))
    bias = torch.randn(outputs).to(DEVICE, dtype)
    packed = matmul_triton.pack(quantized, bias)
    auto = matmul_triton.tiles_for(packed, rows, x)
    tiles = Tiles(auto.rows, auto.outputs, auto.inputs, pieces, True, 4, 3)
    want = quant.linear_reference(x, quantized, bias, weight_only=not packed.takes_int8)
    for fp8_units in (False, True) if format == "fp8" else (None,):
        wide = torch.full((rows, outputs + 3), math.nan).to(DEVICE, dtype)
        out = wide[:, 1 : outputs + 1]
        if DEVICE == "cpu" or not fp8_units or torch.cuda.get_device_capability() >= (8, 9):
            assert matmul_triton.linear(x, packed, out, tiles=tiles, fp8_units=fp8_units) is out
            size = want.abs().amax(1, keepdim=True).clamp(min=1)  # one weight is 100
            assert_close(out / size, want / size)
            assert wide[:, [0, -1]].isnan().all()


@pytest.mark.parametrize(("dtype", "rows"), [(FP32, 3), (HALF, 1), (HALF, 70)])
def test_plain_linear(dtype, rows):
    """As a GPU's loader packs it, and in its two ways to add up the pieces of a sum."""
    weight, bias = torch.randn(70, 520) * 520**-0.5, torch.randn(70)
    weight, bias = weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)
    x = poisoned(torch.randn(rows, 520).to(DEVICE, dtype))
    packed = matmul_triton.pack_linear(weight, bias)
    assert (packed.layout, packed.num_bytes) == ("triton", weight.numel() * weight.element_size())
    want = (x.double() @ weight.double().T + bias.double()).to(dtype)
    assert_close(matmul.linear(x, packed), want)
    tiles = replace(matmul_triton.tiles_for(packed.payload, rows, x), apart=True)
    assert tiles.pieces > 1
    assert_close(matmul_triton.linear(x, packed.payload, tiles=tiles), want)


@pytest.mark.parametrize("format", ["int8", "int4", "int8 hadamard", "int4 hadamard"])
def test_rows_that_are_quantised_already(format):
    quantized, x = make_weight(format, 20, 96), torch.randn(3, 96).to(DEVICE, HALF)
    packed = matmul_triton.pack(quantized)
    turned, group = quantized.hadamard, quantized.row_group
    codes, scales = quant.quantize_rows_int8(x.cpu(), group, hadamard=turned)
    rows = Int8Rows(codes.to(DEVICE), scales.to(DEVICE), group, x.dtype, turned)
    outer = matmul_triton.pack_linear(quantized, None)
    assert outer.takes_int8 and outer.group == quantized.row_group
    assert torch.equal(matmul.linear(rows, outer), matmul_triton.linear(x, packed))
    with pytest.raises(ValueError, match="nf4 weights"):
        matmul_triton.linear(rows, matmul_triton.pack(make_weight("nf4", 20, 96)))
    assert matmul_triton.linear(x[:0], packed).shape == (0, 20)


@pytest.mark.parametrize("format", ["int8g zeros", "int4 real zeros"])
def test_inputs_in_another_order(format):
    """GPTQ's act-order, which the experts of a launch do not have."""
    order = torch.randperm(128).to(DEVICE, torch.int32)
    quantized = replace(make_grouped(format, 40, 128), order=order)
    x = torch.randn(3, 128).to(DEVICE, FP32)
    packed = matmul_triton.pack_linear(quantized, None)
    assert_close(matmul.linear(x, packed), x @ quant.dequantize_weight(quantized).T)
    expert = (packed, packed)
    assert moe.pack_experts([expert, expert]) == [expert, expert]


def test_groups_that_no_slab_fits():
    made = make_weight("int4 scales", 4, 96)
    odd = QuantizedWeight("int4", made.codes, made.scales.repeat(1, 2), 96, 48)
    with pytest.raises(ValueError, match="multiples of 32"):
        matmul_triton.pack(odd)


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_routes(monkeypatch, num_tokens):
    """Compared with each other, and sorted: the same places; an expert may have no token."""
    ids = torch.stack([torch.randperm(9)[:3] for _ in range(num_tokens)] or [torch.zeros(3)])
    ids = ids[:num_tokens].long().to(DEVICE)
    ids[ids == 4] = 8
    ordered, order = ids.reshape(-1).sort(stable=True)
    for limit in (10**6, -1):
        monkeypatch.setattr(moe_triton, "MAX_COMPARED", limit)
        routes = moe_triton.group_routes(ids, 9)
        assert torch.equal(routes.tokens.long(), order // 3)
        assert torch.equal(ordered[routes.places.reshape(-1)], ids.reshape(-1))
        assert routes.starts.tolist() == [int((ordered < e).sum()) for e in range(10)]


def packed_expert(format: str, weight: torch.Tensor) -> tuple[PackedLinear, QuantizedWeight | None]:
    """`format`: "plain", a format that `quantize_weight` rounds to, or a key of GROUPED, of random
    weights."""
    num_outputs, num_inputs = weight.shape
    if format == "plain":
        return PackedLinear(weight, None, num_inputs, num_outputs, 0, "fp32", "plain"), None
    if format in GROUPED:
        quantized = make_grouped(format, num_outputs, num_inputs)
    else:
        quantized = quant.quantize_weight(weight, cast(WeightFormat, format))
    payload, kind = matmul_triton.pack(quantized), quantized.format
    return PackedLinear(payload, None, num_inputs, num_outputs, 0, kind, "triton"), quantized


def one_linear(x: torch.Tensor, weight: torch.Tensor, quantized: QuantizedWeight | None):
    if quantized is not None:
        weight_only = quantized.format == "int4" and quantized.steps is None
        return quant.linear_reference(x, quantized, weight_only=weight_only)
    return (x.double() @ weight.double().T).to(x.dtype)


@pytest.mark.parametrize(
    ("format", "dtype", "num_inner"),
    [
        ("plain", FP32, 3),
        ("int8", HALF, 14),
        ("int4", FP32, 5),
        ("nf4", HALF, 14),
        ("fp8", FP32, 14),
        ("int8g", FP32, 14),
        ("fp8g", HALF, 14),
        ("mxfp4", FP32, 14),
        (("int4 real zeros", "int8g 16"), FP32, 5),  # as files of GGUF's Q4_K_M
    ],
)
def test_routed_experts(monkeypatch, format, dtype, num_inner):
    """Against a loop over the routes; over NaN, in place, and in parts of `num_inner` routes."""
    if format != "plain":  # which takes memory of its own for all 14
        monkeypatch.setattr(moe_triton, "MIN_LAUNCHED", 1)
    num_tokens, dim, inner, num_experts = 7, 72, 40, 5
    shapes = ((2 * inner, dim), (dim, inner))
    weights = [
        [(torch.randn(s) * s[1] ** -0.5).to(DEVICE, dtype) for s in shapes]
        for _ in range(num_experts)
    ]
    formats = (format, format) if isinstance(format, str) else format
    experts = [[packed_expert(*each) for each in zip(formats, pair)] for pair in weights]
    plain = moe.GroupedExperts((gate_up[0], down[0]) for gate_up, down in experts)
    if format == "plain":  # on a CPU these would stay as they are
        plain.table = moe_triton.expert_table(plain)
    packed = plain if format == "plain" else moe.pack_experts(plain)
    x, gains = torch.randn(num_tokens, dim).to(DEVICE, dtype), torch.rand(num_tokens, 2).to(DEVICE)
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)]).to(DEVICE)
    ids[ids == 1] = 0
    want = torch.zeros(num_tokens, dim, device=DEVICE)
    for token, expert in ((t, e) for t in range(num_tokens) for e in range(2)):
        (gate_up, down), of = weights[int(ids[token, expert])], experts[int(ids[token, expert])]
        both = one_linear(x[token : token + 1], gate_up, of[0][1])
        product = rowwise_triton.act_mul(both, torch.empty_like(both[:, :inner].contiguous()))
        want[token] += gains[token, expert] * one_linear(product, down, of[1][1])[0].float()
    grouped = torch.full((2 * num_tokens, dim), math.nan).to(DEVICE, dtype)
    memory = torch.full((num_inner, 2 * inner), math.nan).to(DEVICE, dtype)
    y = moe.moe_mlp(x, ids, gains, packed, grouped=grouped, inner=memory, out=x)
    assert y is x
    assert_close(y, want.to(dtype))


@pytest.mark.parametrize(
    ("format", "dtype"),
    [("plain", FP32), ("int8", HALF), ("int4", FP32), ("fp8g", HALF), ("mxfp4", FP32)],
)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_columns_of_routed_experts(format, dtype, num_tokens):
    """A rank's part of all experts: the bits of one that has all columns."""
    hidden, inner, num_experts = 80, 64, 5

    def made(rows: int, columns: int) -> torch.Tensor | QuantizedWeight:
        drawn = (torch.randn(rows, columns) * columns**-0.5).to(DEVICE, dtype)
        found = drawn if format == "plain" else packed_expert(format, drawn)[1]
        assert found is not None
        return found

    whole = [(made(2 * inner, hidden), made(hidden, inner)) for _ in range(num_experts)]

    def packed(weight: torch.Tensor | QuantizedWeight, rows: Any) -> PackedLinear:
        weight = selected(weight, rows)
        if isinstance(weight, torch.Tensor):
            return PackedLinear(weight, None, weight.shape[1], len(weight), 0, "fp32", "plain")
        shape, payload = (weight.in_features, weight.out_features), matmul_triton.pack(weight)
        return PackedLinear(payload, None, *shape, 0, weight.format, "triton")

    def cut(columns: slice, outputs: slice) -> moe.GroupedExperts:
        rows = torch.arange(inner)[columns]
        both = torch.cat((rows, rows + inner))
        found = moe.GroupedExperts((packed(up, both), packed(down, outputs)) for up, down in whole)
        found.table = moe_triton.expert_table(found)
        return found

    x, gains = torch.randn(num_tokens, hidden).to(DEVICE, dtype), torch.rand(num_tokens, 2)
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)]).to(DEVICE)
    ids[ids == 1] = 0
    assert_same_bits(cut, x, ids, gains.to(DEVICE), inner, (0.0, 0.25, 1.0))


# inverse temperature, top_k, top_p, min_p: one row each
SAMPLERS = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.4, 5, 1.0, 0.0), (1.0, 300, 1.0, 0.0),
    (1.0, 10**9, 1.0, 0.0), (0.8, 0, 0.8, 0.0), (0.1, 0, 0.97, 0.0), (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 1.0, 0.1), (1.1, 40, 0.9, 0.02), (1e35, 0, 0.9, 0.0),
]  # fmt: skip


def sampling_rows(parameters: list[tuple[float, int, float, float]]) -> SamplingRows:
    inverse_temperature, top_k, top_p, min_p = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*parameters)
    )
    uniform = torch.rand(len(parameters), dtype=torch.float64)
    return SamplingRows(inverse_temperature, top_k, top_p, min_p, uniform)


@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (4099, 0.1), (503, 8.0)])
def test_sampling_gives_the_ids_of_the_reference(vocab, spread):
    """Each row its own filters, out of a wider tensor whose rest is NaN."""
    logits, rows = torch.randn(len(SAMPLERS), vocab) * spread, sampling_rows(SAMPLERS)
    ids = sampling_triton.sample(
        poisoned(logits).to(DEVICE), rows, tile=256 if vocab < 999 else 2048
    )
    assert torch.equal(ids.cpu(), sample_reference(logits, rows))


def test_sampling_of_strange_rows():
    logits = torch.randn(8, 100)
    logits[0, 5], logits[1, 99] = math.nan, math.inf
    logits[2], logits[3, :97] = -math.inf, -math.inf
    logits[4, :50] = -1e30
    logits[5], logits[5, ::2] = 0.0, -0.0  # equal, and all stay
    logits[6] = -torch.logspace(-3, 30, 100)
    logits[7] = logits[7].round()  # many equal
    for parameters in ((1.0, 7, 0.9, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 0, 0.99, 1e-3)):
        rows = sampling_rows([parameters] * 8)
        ids = sampling_triton.sample(logits.to(DEVICE), rows, tile=64).cpu()
        assert torch.equal(ids, sample_reference(logits, rows))
        assert ids[:3].tolist() == [-1, -1, -1]
