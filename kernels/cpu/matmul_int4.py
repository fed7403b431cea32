"""int4 weights for int8 rows on the CPU: how the native library rounds, packs and multiplies them.

`kernels/cpu/matmul.py` sends here what `takes_int8`; the parameters mean what they mean there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu import huge_pages, native
from penstock.kernels.cpu.arguments import LINEAR_INT4_GROUPS, LINEAR_INT8, PACK_INT4
from penstock.kernels.quant import Int8Rows, QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class NativeInt4:
    """An int4 weight [N, K] as the native library reads it; `bias` fp32 [N] or None.

    With `steps`, they and `offsets` (uint8, 128 more than the weight's) are [panels, G, panel], and
    `scales` fp32 [N]. Else `scales` fp32 are [panels, G, panel], as are `zeros` (uint8) or, where
    zero points are no integers, `minimums` fp32: - zero * scale. `row_group`: inputs whose
    activations share a scale; `hadamard`: they are transformed before.
    """

    codes: Tensor
    scales: Tensor
    steps: Tensor | None
    offsets: Tensor | None
    zeros: Tensor | None
    minimums: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int
    group: int
    row_group: int
    hadamard: bool = False


def pack(quantized: QuantizedWeight, bias: Tensor | None) -> NativeInt4:
    lib = native.bound.library
    num_outputs, depth = quantized.out_features, quantized.in_features
    panel = lib.pk_panel()
    codes = quantized.codes.contiguous()
    packed = huge_pages.empty((-(-num_outputs // panel), -(-depth // 8), panel, 4), torch.uint8)
    lib.pk_pack_int4(PACK_INT4.pack(
        codes.data_ptr(), codes.stride(0), packed.data_ptr(), num_outputs, depth,
        torch.get_num_threads(),
    ))  # fmt: skip
    scales, zeros = quantized.scales.float().contiguous(), quantized.zeros
    steps = offsets = minimums = None
    if quantized.steps is not None:
        assert quantized.offsets is not None
        steps = _by_panel(quantized.steps, panel)
        offsets = _by_panel((quantized.offsets.to(torch.int16) + 128).to(torch.uint8), panel)
    elif zeros is None or not zeros.is_floating_point():
        zeros = torch.full_like(scales, 8, dtype=torch.uint8) if zeros is None else zeros
        zeros, scales = _by_panel(zeros, panel), _by_panel(scales, panel)
    else:  # codes count from 0
        minimums, zeros = _by_panel(-zeros.float() * scales, panel), None
        scales = _by_panel(scales, panel)
    bias = None if bias is None else bias.float().contiguous()
    assert quantized.group is not None and quantized.row_group is not None
    return NativeInt4(
        packed, scales, steps, offsets, zeros, minimums, bias, depth, num_outputs,
        quantized.group, quantized.row_group, quantized.hadamard,
    )  # fmt: skip


def linear(x: Tensor | Int8Rows, rows: Tensor, weight: NativeInt4, out: Tensor) -> Tensor:
    """`rows`: of `x`, values or codes, each row dense."""
    x_scales = 0
    if isinstance(x, Int8Rows):
        assert x.group == weight.row_group and x.scales.is_contiguous()
        assert x.hadamard == weight.hadamard
        x_scales = x.scales.data_ptr()
    source = (native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0), x_scales,
              weight.codes.data_ptr(), weight.scales.data_ptr())  # fmt: skip
    target = (_address(weight.bias), out.data_ptr(), out.stride(0), *out.shape)
    threads, lib = torch.get_num_threads(), native.bound.library
    if weight.steps is not None:
        lib.pk_linear_int8(LINEAR_INT8.pack(
            *source, *target, weight.in_features, weight.row_group, threads,
            weight.steps.data_ptr(), _address(weight.offsets), weight.group, weight.hadamard,
        ))  # fmt: skip
    else:
        lib.pk_linear_int4_groups(LINEAR_INT4_GROUPS.pack(
            *source, _address(weight.zeros), _address(weight.minimums), *target,
            weight.in_features, weight.row_group, weight.group, threads,
        ))  # fmt: skip
    return out


def _by_panel(values: Tensor, panel: int) -> Tensor:
    """[N, G] -> [panels, G, panel], padded with zeros."""
    values = F.pad(values, (0, 0, 0, -values.shape[0] % panel))
    return values.unflatten(0, (-1, panel)).transpose(1, 2).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
