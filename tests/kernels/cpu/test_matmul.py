"""Quantised linears: every format and path against the reference, over ragged sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import quant, rowwise
from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.moe.mlp import gated_mlp, moe_mlp
from penstock.kernels.types import PackedLinear

FP32, BF16 = torch.float32, torch.bfloat16
FORMATS = quant.WEIGHT_FORMATS
SIZES = [(1, 1), (7, 31), (33, 33), (33, 127), (40, 129), (65, 300), (96, 1030)]  # (N, K)


def rows_of(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows [M, K] that do not follow each other in memory, with NaN between them."""
    wide = torch.full((num_rows, num_inputs + 3), float("nan"), dtype=dtype)
    wide[:, :num_inputs] = torch.randn(num_rows, num_inputs)
    return wide[:, :num_inputs]


def quantized_weight(format: quant.WeightFormat, num_outputs: int, num_inputs: int):
    weight = torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    return quant.quantize_weight(weight, format)


def pack_as(cpu_path: str, quantized: quant.QuantizedWeight, bias: Tensor | None) -> PackedLinear:
    packed = pack_linear(quantized, bias)
    assert packed.layout == ("native" if cpu_path == "native" else "plain")
    return packed


def assert_linear(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if actual.dtype == FP32 else 1.6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_linear(cpu_path, format, dtype, num_outputs, num_inputs):
    quantized = quantized_weight(format, num_outputs, num_inputs)
    bias = torch.randn(num_outputs).to(dtype)
    packed = pack_as(cpu_path, quantized, bias)
    assert packed.format == format and packed.num_bytes == quantized.num_bytes
    assert (packed.in_features, packed.out_features) == (num_inputs, num_outputs)
    for num_rows in (1, 3, 17, 64, 257):
        x = rows_of(num_rows, num_inputs, dtype)
        out = torch.full((num_rows, num_outputs + 1), float("nan"), dtype=dtype)
        y = linear(x, packed, out=out[:, :num_outputs])
        assert y.data_ptr() == out.data_ptr()
        assert_linear(y, quant.linear_reference(x, quantized, bias))
        assert out[:, num_outputs].isnan().all()  # nothing is written past a row


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_rows_and_weights(cpu_path, format):
    """Zeros, one large value, all codes at their ends with equal signs, tiny and huge rows."""
    weight = torch.randn(40, 200)
    weight[0], weight[1], weight[2] = 0, 1, -1
    weight[3, :128], weight[4] = 0, 1e-30
    weight[5, 7] = 1e4
    x = torch.randn(8, 200)
    x[0], x[1], x[2] = 0, 1, -1
    x[3, 5], x[4] = 1e4, 1e-20 * x[4]
    x[5] *= 1e30
    x[6, ::2] = 127
    quantized = quant.quantize_weight(weight, format)
    y = linear(x, pack_as(cpu_path, quantized, None))
    truth = quant.linear_reference(x, quantized)
    size = x.double().abs() @ quant.dequantize_weight(quantized).double().abs().T
    assert ((y - truth).abs() <= 1e-5 * size + 1e-12).all()
    assert not y[0].any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_that_is_not_finite_stays_alone(cpu_path, format, bad, dtype):
    packed = pack_as(cpu_path, quantized_weight(format, 33, 129), torch.randn(33).to(dtype))
    x = torch.randn(14, 129).to(dtype)
    clean = linear(x, packed)
    x[5, 7] = bad
    y = linear(x, packed)
    assert not torch.isfinite(y[5]).any()
    others = [row for row in range(14) if row != 5]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_the_batch_or_the_threads(native_path, format, dtype):
    packed = pack_linear(quantized_weight(format, 300, 401), torch.randn(300))
    x = torch.randn(300, 401).to(dtype)
    together = linear(x, packed)
    torch.set_num_threads(2)
    assert torch.equal(linear(x, packed), together)
    for num_rows in (1, 2, 3, 12, 13, 97, 130):
        assert torch.equal(linear(x[:num_rows], packed), together[:num_rows])
        assert torch.equal(linear(x[-num_rows:], packed), together[-num_rows:])


@pytest.mark.parametrize("group", [3, 8, 32, 100, 200, 1000])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int4_of_any_group_with_zeros(cpu_path, group, with_zeros):
    """As AWQ and GPTQ checkpoints have them."""
    num_outputs, num_inputs = 37, 257
    num_groups = -(-num_inputs // group)
    nibbles = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    scales = torch.rand(num_outputs, num_groups) / 50
    zeros = torch.randint(0, 16, (num_outputs, num_groups), dtype=torch.uint8)
    quantized = quant.QuantizedWeight(
        "int4", quant.pack_nibbles(nibbles, 8), scales, num_inputs, group,
        zeros if with_zeros else None,
    )  # fmt: skip
    packed = pack_as(cpu_path, quantized, None)
    x = torch.randn(20, num_inputs)
    for num_rows in (1, 20):
        assert_linear(linear(x[:num_rows], packed), quant.linear_reference(x[:num_rows], quantized))


def fixed_point(x: Tensor, group: int) -> Tensor:
    """Rows of bf16 as the native int4 path holds them: multiples of 2^-14 of the power of two of
    the largest of each 128 inputs of a group."""
    wide, parts = x.double(), []
    for start in range(0, x.shape[1], group):
        for part in wide[:, start : start + group].split(128, dim=1):
            largest = part.abs().amax(1, keepdim=True)
            unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 14)
            parts.append(torch.round(part / unit) * unit)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("group", [24, 100, 300])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int4_of_odd_groups_takes_bf16_rows_as_int16(native_path, group, with_zeros):
    """Values within a factor of 128 of the largest are exact; an outlier costs its own 128."""
    num_outputs, num_inputs = 70, 517
    weight = torch.randn(num_outputs, num_inputs)
    quantized = quant.quantize_weight(weight, "int4", group, symmetric=True)
    assert not quantized.takes_int8
    if with_zeros:
        zeros = torch.randint(0, 16, quantized.scales.shape, dtype=torch.uint8)
        quantized = replace(quantized, zeros=zeros)
    x = torch.randn(20, num_inputs).to(BF16)
    x[1], x[2, 300], x[3], x[4] = 0, 1e4, x[3] * 1e-35, x[4] * 1e30
    x[5, :128], x[6, ::7], x[7] = 0, 3e38, -1
    weight = quant.dequantize_weight(quantized).double()
    for num_rows in (1, 3, 20):
        y = linear(x[:num_rows], pack_linear(quantized)).double()
        held = fixed_point(x[:num_rows], group)
        size = held.abs() @ weight.abs().T  # sums are fp32 from segment to segment
        want = (held @ weight.T).clamp(-3.5e38, 3.5e38)
        close = (y - want).abs() <= 2.0**-8 * want.abs() + 1e-6 * size + 1e-37
        assert (close | ~torch.isfinite(y) & (size > 3e38)).all()
    plain = x[8:].clamp(-3, 3)
    plain[plain.abs() < 0.05] = 0
    assert torch.equal(fixed_point(plain, group), plain.double())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_int8_rows_are_taken_as_they_are(cpu_path, format, dtype):
    quantized = quantized_weight(format, 50, 129)
    packed = pack_as(cpu_path, quantized, torch.randn(50))
    x = rows_of(19, 129, dtype)
    memory = rows_of(19, 129, dtype)
    rows = rowwise.quantize_int8(x, out=quant.Int8Rows.inside(memory, packed.group))
    y = linear(rows, packed)
    assert y.dtype == dtype and torch.equal(y, linear(x, packed))


@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_int8_with_groups_of_activations(cpu_path, group, dtype):
    """Of rows with an outlier: only its group is coarse. Numbers of rows around those of a tile."""
    for num_outputs, num_inputs in ((1, 1), (33, 65), (70, 576), (31, 1000)):
        quantized = replace(quantized_weight("int8", num_outputs, num_inputs), group=group)
        packed = pack_as(cpu_path, quantized, torch.randn(num_outputs))
        assert packed.group == group
        x = rows_of(130, num_inputs, dtype)
        x[3, 0], x[5] = 1e3, 0
        truth = quant.linear_reference(x, quantized, packed.bias)
        together = linear(x, packed)
        assert_linear(together, truth)
        for num_rows in (1, 2, 4, 6, 7, 8, 9, 13, 97) if cpu_path == "native" else ():
            assert torch.equal(linear(x[:num_rows], packed), together[:num_rows])
            assert torch.equal(linear(x[-num_rows:], packed), together[-num_rows:])


@pytest.mark.parametrize("group", [8, 16, 32, 40, 64, 128, 2000])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_int4_has_the_bits_of_the_int8_weight_it_stands_for(cpu_path, group, dtype):
    """Opened in registers for few rows and in memory for many; codes at both ends of int8, and one
    output whose nibbles are all at their end."""
    for num_outputs, num_inputs in ((1, 1), (33, 65), (70, 576), (31, 1001)):
        quantized = quant.quantize_weight(torch.randn(num_outputs, num_inputs), "int4", group)
        assert quantized.steps is not None and quantized.offsets is not None
        quantized.codes[-1], quantized.steps[-1], quantized.offsets[-1] = 0xFF, 17, -128
        codes = quant.int8_codes(quantized)
        same = quant.QuantizedWeight("int8", codes, quantized.scales, num_inputs, quant.INT8_GROUP)
        bias = torch.randn(num_outputs)
        packed, other = pack_as(cpu_path, quantized, bias), pack_as(cpu_path, same, bias)
        x = rows_of(130, num_inputs, dtype)
        x[3, 0], x[5], x[6], x[7] = 1e3, 0, 1, -1
        want = linear(x, other)
        assert_linear(want, quant.linear_reference(x, quantized, bias))
        for num_rows in (1, 2, 4, 6, 7, 8, 9, 13, 25, 49, 97, 130):
            assert torch.equal(linear(x[:num_rows], packed), want[:num_rows]), num_rows
            assert torch.equal(linear(x[-num_rows:], packed), want[-num_rows:]), num_rows


@pytest.mark.parametrize("zeros", ["none", "integers", "real"])
@pytest.mark.parametrize("group", [32, 64, 128, 1000])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_int4_codes_of_files_take_int8_rows(cpu_path, group, zeros, dtype):
    for num_outputs, num_inputs in ((1, 1), (33, 65), (70, 576), (31, 1000)):
        weight = torch.randn(num_outputs, num_inputs)
        quantized = quant.quantize_weight(weight, "int4", group, symmetric=True)
        shape = quantized.scales.shape
        if zeros == "integers":
            quantized = replace(quantized, zeros=torch.randint(0, 17, shape, dtype=torch.uint8))
        elif zeros == "real":
            quantized = replace(quantized, zeros=torch.randn(shape) * 20)
        packed = pack_as(cpu_path, quantized, torch.randn(num_outputs))
        assert packed.takes_int8 and packed.group == (32 if group == 32 < num_inputs else 64)
        x = rows_of(130, num_inputs, dtype)
        x[3, 0], x[5] = 1e3, 0
        together = linear(x, packed)
        size = quant.linear_reference(x.abs(), replace(quantized, scales=quantized.scales.abs()))
        truth = quant.linear_reference(x, quantized, packed.bias)
        assert_linear(together / (1 + size.abs()), truth / (1 + size.abs()))
        for num_rows in (1, 2, 4, 6, 7, 8, 9, 13, 25, 97) if cpu_path == "native" else ():
            assert torch.equal(linear(x[:num_rows], packed), together[:num_rows]), num_rows
            assert torch.equal(linear(x[-num_rows:], packed), together[-num_rows:]), num_rows


@pytest.mark.parametrize("group", [None, 32, 64])
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_transformed_weights_transform_their_rows(cpu_path, format, group, dtype):
    """In the linear as in a pass of its own; a row's bits do not depend on its batch-mates."""
    for num_outputs, num_inputs in ((1, 1), (33, 65), (70, 576), (31, 1000)):
        quantized = quant.quantize_weight(
            torch.randn(num_outputs, num_inputs), format, hadamard=quant.hadamard_transform
        )
        if format == "int8":
            quantized = replace(quantized, group=group)
        packed = pack_as(cpu_path, quantized, torch.randn(num_outputs))
        assert packed.hadamard and packed.row_form == (packed.group, True)
        x = rows_of(97, num_inputs, dtype)
        x[3, 0], x[5] = 1e2, 0
        together = linear(x, packed)
        if dtype != torch.float16:
            assert_linear(together, quant.linear_reference(x, quantized, packed.bias))
        rows = rowwise.quantize_int8(x, group=packed.group, hadamard=True)
        assert torch.equal(linear(rows, packed), together)
        for num_rows in (1, 7, 13) if cpu_path == "native" else ():
            assert torch.equal(linear(x[:num_rows], packed), together[:num_rows])
        with pytest.raises(AssertionError):
            linear(rowwise.quantize_int8(x, group=packed.group), packed)


def test_a_group_that_is_not_finite_leaves_no_number(native_path):
    """One group of one row: that row is NaN, the others keep their bits."""
    packed = pack_linear(quantized_weight("int8", 33, 200))
    x = torch.randn(14, 200)
    clean = linear(x, packed)
    x[5, 130] = float("inf")
    y = linear(x, packed)
    others = [row for row in range(14) if row != 5]
    assert y[5].isnan().all() and torch.equal(y[others], clean[others])


@pytest.mark.parametrize("format", FORMATS)
def test_fp16(cpu_path, format):
    quantized, bias = quantized_weight(format, 40, 129), torch.randn(40).half()
    packed = pack_as(cpu_path, quantized, bias)
    x = torch.randn(5, 129).half()
    truth = quant.linear_reference(x, quantized, bias)
    torch.testing.assert_close(linear(x, packed), truth, rtol=2e-3, atol=2e-3)
    if packed.takes_int8:
        rows = rowwise.quantize_int8(x, group=packed.group)
        out = torch.empty(5, 40, dtype=torch.float16)
        assert linear(rows, packed, out=out) is out
        assert torch.equal(out, linear(x, packed))


def test_int8_rows_want_int8_weights(cpu_path):
    packed = pack_as(cpu_path, quantized_weight("nf4", 8, 16), None)
    with pytest.raises(AssertionError, match="nf4"):
        linear(rowwise.quantize_int8(torch.randn(2, 16)), packed)


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(cpu_path, format):
    packed = pack_as(cpu_path, quantized_weight(format, 8, 16), None)
    assert linear(torch.empty(0, 16), packed).shape == (0, 8)


def test_int8_sums_are_exact(cpu_path):
    """Every code at its end with one sign: the most that K products can come to."""
    depth = 6000
    ones = torch.ones(1, depth)
    quantized = replace(quant.quantize_weight(torch.cat([ones, -ones]), "int8"), group=None)
    assert linear(ones, pack_as(cpu_path, quantized, None)).tolist() == [[depth, -depth]]


def test_the_codes_of_fp8_rows_are_torchs(native_path):
    """The identity shows each code: E4M3 is rounded as torch rounds it, subnormals included."""
    x = torch.cat([torch.linspace(-448, 448, 4000), torch.linspace(-0.05, 0.05, 4000)])
    x = torch.nn.functional.pad(x.view(-1, 8), (0, 1), value=448.0)  # the scale is 1
    packed = pack_linear(quant.quantize_weight(448 * torch.eye(9), "fp8"))
    assert torch.equal(linear(x, packed), 448 * x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("format", FORMATS)
def test_moe(cpu_path, format, dtype):
    """Routed experts: each token through its own, with the bits that it has alone."""
    experts = [
        (
            pack_as(cpu_path, quantized_weight(format, 48, 40), None),
            pack_as(cpu_path, quantized_weight(format, 40, 24), None),
        )
        for _ in range(3)
    ]
    x = torch.randn(33, 40).to(dtype)
    weights, ids = torch.rand(33, 3).topk(2, dim=-1)
    wanted = torch.zeros(33, 40)
    for token in range(33):
        for rank in range(2):
            row = x[token : token + 1]
            inner = torch.empty(1, 48, dtype=dtype)
            y = gated_mlp(row, *experts[int(ids[token, rank])], inner, torch.empty_like(row))
            wanted[token] += weights[token, rank] * y[0].float()
    inner = torch.full((5, 48), float("nan"), dtype=dtype)  # an expert takes 5 rows at once
    y = moe_mlp(x, ids, weights, experts, inner=inner, out=x)
    assert_linear(y, wanted.to(dtype))
