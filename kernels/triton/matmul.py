"""Linears on a GPU: how weights lie there, and the launch of their kernels.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. Meaning of the
formats: `quant.py`; choice of tiles: `matmul_tiles.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from penstock.kernels.quant import (
    INT8_GROUP,
    TABLES,
    CodeFormat,
    Int8Rows,
    QuantizedWeight,
    num_groups,
    unpack_nibbles,
)
from penstock.kernels.triton import matmul_kernels as programs
from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton
from penstock.kernels.triton.matmul_tiles import GpuFormat, Tiles, choose_tiles
from penstock.kernels.types import PackedLinear

SLAB = 128  # inputs that one step takes, of a 4-bit weight with groups of no fewer
_REDUCE_TILE = 512


@dataclass(frozen=True, slots=True, eq=False)
class GpuWeight:
    """A weight [N, K] as its kernel reads it.

    plain, int8, fp8: `codes` [N, K], row by row; codes of 8 bits as uint8 or int8, their rows
    padded with zeros to 16 bytes. int4, nf4, mxfp4: `codes` uint8 [slabs, N, step / 2], in which a
    tile is one run of bytes; byte j of a slab holds its input j, and j + step / 2 in the high
    nibble.
    int4_steps: the same with `zeros` int16 [G, N]: offset * 32 + step. int8g, fp8g: `codes` int8 or
    uint8 [N, K], rows padded with zeros to whole steps; fp8g's scales are 256 times the weight's.
    `order` int32 [K]: the input of each column of codes; None: its own. `scales` fp32
    [N], or [G, N] of groups; `zeros` else [G, N], uint8 or fp32. `group` of int8 is of the
    activations; those of int4_steps are as long as a step.
    """

    format: GpuFormat
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int
    group: int
    step: int
    hadamard: bool = False  # int8 and int4_steps: rows are transformed before they are rounded
    order: Tensor | None = None

    @property
    def takes_int8(self) -> bool:
        return self.format in ("int8", "int4_steps")

    @property
    def row_group(self) -> int | None:
        """Inputs of int8 rows that share a scale; None: a whole row."""
        if self.format == "int4_steps":
            return self.step
        return self.group if self.format == "int8" and self.group < self.in_features else None

    @property
    def num_bytes(self) -> int:
        parts = [self.codes, self.scales, self.zeros, self.bias, self.order]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def pack(quantized: QuantizedWeight, bias: Tensor | None = None) -> GpuWeight:
    """`quantized` and `bias` [N], any float dtype, in the layout of the kernels.

    Raises ValueError for groups that are neither a multiple of 32 (of int8g and fp8g: 16) nor a
    whole row.
    """
    num_outputs, num_inputs = quantized.out_features, quantized.in_features
    if quantized.format in ("int8", "fp8"):
        # uint8 for fp8: a GPU without FP8 units has no type for it.
        kind = torch.int8 if quantized.format == "int8" else torch.uint8
        codes = _padded(quantized.codes.view(kind), -num_inputs % 16)
        scales, group, step = quantized.scales.float().contiguous(), num_inputs, SLAB
        if quantized.format == "int8" and quantized.group is not None:
            group = min(quantized.group, num_inputs)
            step = _step(group, num_inputs, SLAB // 4)
        return GpuWeight(
            quantized.format, codes, scales, None, bias, num_inputs, num_outputs, group, step,
            quantized.hadamard,
        )  # fmt: skip
    assert quantized.group is not None
    if quantized.steps is not None:
        return _pack_steps(quantized, bias)
    is_wide = quantized.format in ("int8g", "fp8g")
    step = _step(quantized.group, num_inputs, SLAB // 8 if is_wide else SLAB // 4)
    scales = quantized.scales.float().T.contiguous()
    if quantized.format == "fp8g":
        codes, scales = _padded(quantized.codes.view(torch.uint8), -num_inputs % step), scales * 256
    elif is_wide:
        codes = _padded(quantized.codes, -num_inputs % step)
    else:
        codes = _slabs(quantized, step)
    zeros = None if quantized.zeros is None else quantized.zeros.T.contiguous()
    group = quantized.group if scales.shape[0] > 1 else num_inputs + -num_inputs % step
    return GpuWeight(
        quantized.format, codes, scales, zeros, bias, num_inputs, num_outputs, group, step,
        order=quantized.order,
    )  # fmt: skip


def _pack_steps(quantized: QuantizedWeight, bias: Tensor | None) -> GpuWeight:
    assert quantized.steps is not None and quantized.offsets is not None
    both = quantized.offsets.to(torch.int16) * 32 + quantized.steps.to(torch.int16)
    assert quantized.group is not None
    return GpuWeight(
        "int4_steps", _slabs(quantized, INT8_GROUP), quantized.scales.float().contiguous(),
        both.T.contiguous(), bias, quantized.in_features, quantized.out_features, quantized.group,
        INT8_GROUP, quantized.hadamard,
    )  # fmt: skip


def _slabs(quantized: QuantizedWeight, step: int) -> Tensor:
    """Nibbles as [slabs, N, step / 2] bytes of two halves."""
    num_inputs = quantized.in_features
    nibbles = _padded(unpack_nibbles(quantized.codes)[:, :num_inputs], -num_inputs % step)
    halves = nibbles.unflatten(1, (-1, 2, step // 2)).permute(1, 0, 2, 3)  # [slabs, N, 2, half]
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).contiguous()


def pack_linear(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> PackedLinear:
    """Plain weights too: cuBLAS orders a row's sum by the number of rows. int4 codes of files take
    activations as they are."""
    if not isinstance(weight, QuantizedWeight):
        return PackedLinear.of_floats(pack_plain(weight, bias), weight, bias, "triton")
    takes_int8 = weight.format == "int8" or weight.steps is not None
    return PackedLinear(
        pack(weight, bias), bias, weight.in_features, weight.out_features, weight.num_bytes,
        weight.format, "triton", weight.row_group if takes_int8 else None, takes_int8,
        weight.hadamard,
    )  # fmt: skip


def packed_linear(x: Tensor | Int8Rows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    return linear(x, packed.payload, out)


def pack_plain(weight: Tensor, bias: Tensor | None = None) -> GpuWeight:
    """`weight` [N, K] as it is."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    step = 128 // weight.element_size()
    return GpuWeight("plain", weight, None, None, bias, num_inputs, num_outputs, num_inputs, step)


def linear(
    x: Tensor | Int8Rows,
    weight: GpuWeight,
    out: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    fp8_units: bool | None = None,
) -> Tensor:
    """`x` [M, K] times `weight`, plus its bias -> [M, N] in `x.dtype`, into `out` if given.

    int8, int4_steps and fp8 quantise the rows of `x` first, unless they are `Int8Rows`. `tiles` and
    `fp8_units` (are there any?) are found out where they are not given.
    """
    values, x_scales = activations(x, weight)
    num_rows = values.shape[0]
    if out is None:
        out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=values.device)
    if tiles is None:
        tiles = tiles_for(weight, num_rows, values)
    launch(values, x_scales, weight, out, tiles, Routing(), fp8_units)
    return out


def activations(x: Tensor | Int8Rows, weight: GpuWeight) -> tuple[Tensor, Tensor | None]:
    """What the kernel multiplies: values or codes [M, K], and the codes' scales [M, G]."""
    assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
    if isinstance(x, Int8Rows):
        if not weight.takes_int8:
            raise ValueError(f"int8 rows for {weight.format} weights: give them plain activations")
        depth = weight.in_features
        assert x.hadamard == weight.hadamard
        assert min(x.group or depth, depth) == min(weight.row_group or depth, depth)
        return x.codes, x.scales
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    if not weight.takes_int8 and weight.format != "fp8":
        return x, None
    kind, group = torch.int8 if weight.takes_int8 else torch.uint8, weight.row_group
    codes = torch.empty(x.shape, dtype=kind, device=x.device)
    shape = x.shape[0], num_groups(x.shape[1], group)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    return rowwise_quant_triton.quantize_rows(x, codes, scales, group, hadamard=weight.hadamard)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which rows go through which expert; empty for a plain linear.

    `starts` int32 [E + 1]: where the rows of each expert begin, in a list sorted by expert, of
    which the call takes those from `row_first` on. `row_ids` int32 [rows]: the row of x that each
    of them is; without, its own. `offsets` int64 [4, E]: elements from the given weight's codes,
    scales, zeros and bias to those of each expert. `aligned`: the codes' are multiples of 16.
    """

    starts: Tensor | None = None
    row_ids: Tensor | None = None
    offsets: Tensor | None = None
    row_first: int = 0
    num_experts: int = 0
    aligned: bool = True


def launch(
    x: Tensor,
    x_scales: Tensor | None,
    weight: GpuWeight,
    out: Tensor,
    tiles: Tiles,
    routing: Routing,
    fp8_units: bool | None = None,
) -> None:
    """Fills `out` [rows, N]. The number of row tiles is a bound that needs no look at `starts`."""
    num_rows, num_outputs = out.shape
    assert x.stride(1) == 1 and out.stride(1) == 1
    if not num_rows:
        return
    num_row_tiles = triton.cdiv(num_rows, tiles.rows)
    if routing.starts is not None:
        full = max(0, num_rows - routing.num_experts) // tiles.rows
        num_row_tiles = min(num_rows, routing.num_experts + full)
    format: str = weight.format
    if format == "fp8" and not (_has_fp8_units(x.device) if fp8_units is None else fp8_units):
        format = "fp8_upcast"
    if format == "int8" and weight.row_group is not None:
        format = "int8_groups"
    steps = triton.cdiv(weight.in_features, tiles.inputs)
    # Sums of one scale a row are exact: one program takes all its inputs as one piece.
    pieces = 1 if format == "int8" and not tiles.apart else tiles.pieces
    inputs_a_piece = triton.cdiv(steps, pieces) * tiles.inputs
    pieces = triton.cdiv(weight.in_features, inputs_a_piece)
    num_splits, partial = 1, None
    if tiles.apart and pieces > 1:
        num_splits, pieces = pieces, 1
        dtype = torch.int32 if format == "int8" else torch.float32
        partial = torch.empty(num_splits, num_rows, num_outputs, dtype=dtype, device=x.device)
    experts = triton.next_power_of_2(max(1, routing.num_experts))
    grid = (num_row_tiles * triton.cdiv(num_outputs, tiles.outputs), num_splits)
    programs._linear_kernel[grid](
        x, x_scales, weight.codes, weight.scales, weight.zeros, _table(weight, x), weight.bias,
        out, partial, routing.row_ids, routing.starts, routing.offsets,
        x.stride(0), weight.codes.stride(0), out.stride(0), num_rows, num_outputs,
        weight.in_features, num_row_tiles, inputs_a_piece, routing.row_first, routing.num_experts,
        FORMAT=format, GROUP=weight.group, STEP=tiles.inputs, ROWS=tiles.rows,
        OUTPUTS=tiles.outputs, PIECES=pieces, EXPERTS=experts,
        EVEN=weight.in_features % tiles.inputs == 0, ALIGNED=routing.aligned,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if partial is not None:
        programs._reduce_kernel[(num_rows, triton.cdiv(num_outputs, _REDUCE_TILE))](
            partial, x_scales, weight.scales, weight.bias, out,
            routing.row_ids, routing.starts, routing.offsets,
            out.stride(0), num_rows, num_outputs, num_splits, routing.row_first,
            routing.num_experts, FORMAT=format, EXPERTS=experts, TILE=_REDUCE_TILE,
            enable_fp_fusion=False,
        )  # fmt: skip


def tiles_for(weight: GpuWeight, num_rows: int, x: Tensor, num_groups: int = 1) -> Tiles:
    """Tiles for `num_groups` weights of this shape with about `num_rows` rows of `x` each."""
    return choose_tiles(
        num_rows, weight.out_features, weight.step, weight.in_features,
        kind="int8_groups" if weight.format == "int8" and weight.row_group else weight.format,
        num_groups=num_groups, num_sms=_num_sms(x.device), element_bytes=x.element_size(),
    )  # fmt: skip


def _step(group: int, num_inputs: int, least: int) -> int:
    """Inputs of a slab: no slab may cross the end of a group."""
    if group >= num_inputs:
        return SLAB
    for step in (SLAB, SLAB // 2, SLAB // 4, SLAB // 8):
        if step >= least and group % step == 0:
            return step
    raise ValueError(
        f"groups of {group} weights: on a GPU they are multiples of {least}, or whole rows; "
        "set --int4-group 32, or quantise the weight anew"
    )


def _padded(rows: Tensor, spare: int) -> Tensor:
    """[N, K] -> [N, K + spare], padded with zeros."""
    return torch.nn.functional.pad(rows, (0, spare)) if spare else rows.contiguous()


def _table(weight: GpuWeight, x: Tensor) -> Tensor | None:
    if weight.format != "nf4" and weight.format != "mxfp4":
        return None
    return _table_of(weight.format, x.device, x.dtype)


@functools.cache
def _table_of(format: CodeFormat, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(TABLES[format], device=device).to(dtype)


@functools.cache
def _has_fp8_units(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs programs one after another
    return torch.cuda.get_device_properties(device).multi_processor_count
