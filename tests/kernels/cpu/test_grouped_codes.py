"""Codes with scales, and real zero points, of groups: what the block types of GGUF files, FP8 in
blocks and MXFP4 become."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from penstock.kernels import quant
from penstock.kernels.matmul import linear, pack_linear
from tests.kernels.cpu.test_matmul import BF16, FP32, assert_linear, fixed_point, rows_of

# format, group, whether groups have zero points: Q8_0 and Q5_0, Q6_K, Q5_1 and Q5_K, Q4_1 and Q4_K;
# and groups that are no whole words.
Kind = Literal["int8g", "int4", "fp8g", "mxfp4"]
KINDS: list[tuple[Kind, int, bool]] = [
    ("int8g", 32, False),
    ("int8g", 16, False),
    ("int8g", 32, True),
    ("int4", 32, True),
    ("int8g", 7, True),
    ("int4", 7, True),
    ("int8g", 300, True),
    ("fp8g", 128, False),
    ("fp8g", 48, False),
    ("mxfp4", 32, False),
]
INTEGERS = [kind for kind in KINDS if kind[0] in ("int8g", "int4")]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SIZES = [(1, 1), (7, 31), (33, 33), (33, 127), (40, 128), (65, 300), (96, 1030)]  # (N, K)


def grouped_weight(
    format: Kind,
    num_outputs: int,
    num_inputs: int,
    group: int,
    with_zeros: bool = True,
) -> quant.QuantizedWeight:
    """Codes of every value, the ends among them."""
    groups = -(-num_inputs // group)
    scales = (torch.rand(num_outputs, groups) + 0.1) / num_inputs**0.5
    if format == "fp8g":
        bits = torch.randint(0, 256, (num_outputs, num_inputs), dtype=torch.uint8)
        bits = torch.where(bits % 128 == 127, bits - 1, bits)  # the NaNs
        scales /= 100
        return quant.QuantizedWeight(
            format, bits.view(torch.float8_e4m3fn), scales, num_inputs, group
        )
    if format == "mxfp4":
        scales = 2.0 ** torch.randint(-9, 1, (num_outputs, groups)) / num_inputs**0.5
    low, high = (-128, 128) if format == "int8g" else (0, 16)
    codes = torch.randint(low, high, (num_outputs, num_inputs))
    codes[0], codes[-1] = low, high - 1
    scales /= (high - low) / 4
    zeros = None
    if with_zeros and format != "mxfp4":
        zeros = (torch.rand(num_outputs, groups) - 0.5) * 3 * (high - low) / 2
    if format == "int8g":
        packed = codes.to(torch.int8)
    else:
        packed = quant.pack_nibbles(codes.to(torch.uint8), 8)
    return quant.QuantizedWeight(format, packed, scales, num_inputs, group, zeros)


def naive(x: Tensor, weight: quant.QuantizedWeight) -> tuple[Tensor, Tensor]:
    """x times the weight, element by element as it is defined, in fp64; and the sum of sizes."""
    values = weight.codes.double()
    if weight.format in ("int4", "mxfp4"):
        low, high = weight.codes & 15, weight.codes >> 4
        values = torch.stack((low, high), dim=2).flatten(1)[:, : weight.in_features].double()
    for column in range(weight.in_features):
        place = column // (weight.group or 1)
        if weight.format == "mxfp4":
            codes = values[:, column].long()
            values[:, column] = torch.tensor(E2M1).double()[codes % 8] * (1 - codes // 8 * 2)
        zero: Tensor | float = 8.0 if weight.format == "int4" else 0.0
        if weight.zeros is not None:
            zero = weight.zeros[:, place].double()
        values[:, column] = (values[:, column] - zero) * weight.scales[:, place].double()
    return x.double() @ values.T, x.double().abs() @ values.abs().T


def as_multiplied(x: Tensor, weight: quant.QuantizedWeight) -> Tensor:
    """Rows as they are multiplied: rounded to int8 in groups where the weight takes such."""
    if not weight.takes_int8:
        return x
    codes, scales = quant.quantize_rows_int8(x, weight.row_group)
    columns = torch.arange(x.shape[1]) // (weight.row_group or x.shape[1])
    return codes.double() * scales.double()[:, columns]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("format", "group", "with_zeros"), KINDS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_linear(cpu_path, format, group, with_zeros, dtype, num_outputs, num_inputs):
    weight = grouped_weight(format, num_outputs, num_inputs, group, with_zeros)
    bias = torch.randn(num_outputs).to(dtype)
    packed = pack_linear(weight, bias)
    assert packed.layout == ("native" if cpu_path == "native" else "plain")
    assert packed.format == format and packed.num_bytes == weight.num_bytes
    for num_rows in (1, 3, 17, 64, 130):
        x = rows_of(num_rows, num_inputs, dtype)
        out = torch.full((num_rows, num_outputs + 1), float("nan"), dtype=dtype)
        linear(x, packed, out=out[:, :num_outputs])
        want, _ = naive(as_multiplied(x, weight), weight)
        assert_linear(out[:, :num_outputs], (want + bias.double()).to(dtype))
        assert out[:, num_outputs].isnan().all()  # nothing is written past a row


@pytest.mark.parametrize(
    ("format", "group", "with_zeros"), [kind for kind in INTEGERS if kind[:2] != ("int4", 32)]
)
def test_bf16_rows_are_multiplied_as_int16(native_path, format, group, with_zeros):
    """To the last bits of fp32 sums, whatever the rows' sizes."""
    weight = grouped_weight(format, 70, 517, group, with_zeros)
    x = torch.randn(20, 517).to(BF16)
    x[1], x[2, 300], x[3], x[4] = 0, 1e4, x[3] * 1e-35, x[4] * 1e30
    x[5, :128] = 0
    for num_rows in (1, 3, 20):
        y = linear(x[:num_rows], pack_linear(weight)).double()
        held = fixed_point(x[:num_rows], group)
        want, size = naive(held, weight)
        # A zero point is subtracted from the sum: what it takes away counts, too.
        if weight.zeros is not None:
            size += held.abs() @ (weight.zeros * weight.scales).abs().double().repeat_interleave(
                group, 1
            )[:, :517].T  # fmt: skip
        assert ((y - want).abs() <= 2.0**-8 * want.abs() + 2e-6 * size + 1e-37).all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("format", "group", "with_zeros"), KINDS)
def test_a_row_is_alone(native_path, format, group, with_zeros, dtype):
    """It has the same bits in any batch and on any number of threads, beside rows of NaN too."""
    packed = pack_linear(grouped_weight(format, 300, 401, group, with_zeros), torch.randn(300))
    x = torch.randn(300, 401).to(dtype)
    together = linear(x, packed)
    torch.set_num_threads(2)
    assert torch.equal(linear(x, packed), together)
    for num_rows in (1, 2, 3, 12, 13, 97, 130):
        assert torch.equal(linear(x[:num_rows], packed), together[:num_rows])
        assert torch.equal(linear(x[-num_rows:], packed), together[-num_rows:])
    x[5, 7] = float("nan")
    y = linear(x, packed)
    assert not torch.isfinite(y[5]).any()
    y[5] = together[5]
    assert torch.equal(y, together)


@pytest.mark.parametrize(("format", "group", "with_zeros"), INTEGERS)
def test_inputs_in_another_order(cpu_path, format, group, with_zeros):
    """GPTQ's act-order: a column of codes takes the input that `order` names."""
    plain = grouped_weight(format, 33, 130, group, with_zeros)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    weight = replace(plain, order=order)
    assert not weight.takes_int8 and weight.num_bytes == plain.num_bytes + 4 * 130
    values = quant.dequantize_weight(weight)
    assert torch.equal(values[:, order.long()], quant.dequantize_weight(plain))
    packed = pack_linear(weight)
    for num_rows in (0, 1, 17):
        x = rows_of(num_rows, 130, FP32)
        assert_linear(linear(x, packed), (x.double() @ values.double().T).float())
        alone = pack_linear(replace(plain, weight_only=True))
        if cpu_path == "native":
            assert torch.equal(linear(x, packed), linear(x[:, order.long()], alone))


def test_a_nan_in_a_block_is_not_lost(cpu_path):
    weight = grouped_weight("fp8g", 5, 200, 128)
    weight.codes.view(torch.uint8)[3, 150] = 127
    y = linear(torch.randn(2, 200), pack_linear(weight))
    assert y[:, 3].isnan().all() and y[:, [0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("format", "group"), [("int8g", 32), ("int4", 32), ("fp8g", 128), ("mxfp4", 32)]
)
def test_fp16_and_no_rows(cpu_path, format, group):
    weight = grouped_weight(format, 40, 128, group)
    x = torch.randn(5, 128).half()
    want, _ = naive(as_multiplied(x, weight), weight)
    packed = pack_linear(weight)
    torch.testing.assert_close(linear(x, packed), want.half(), rtol=2e-3, atol=2e-3)
    assert linear(x[:0], packed).shape == (0, 40)
