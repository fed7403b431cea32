"""Number formats of weights, activations and KV: what a code means, and how it is made.

Knows matrices; nothing of kernels, checkpoints or layers. Everything here is plain PyTorch and runs
on any device: it quantises at load, and it is what every kernel is compared with.

Formulas and epsilons are those of the PPL.LLM server (W8A8 "online_i8i8", INT4 "i4f16", KV INT8);
NF4 is Dettmers et al. 2023 (QLoRA), appendix E; FP8 is E4M3, scaled to its largest value, 448;
MXFP4 is the Open Compute Project's microscaling format 1.0, sections 5.3.3 and 6.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.int4_search import search_int4

WeightFormat = Literal["int8", "int4", "nf4", "fp8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("int8", "int4", "nf4", "fp8")
# int8g, fp8g: 8-bit codes with scales of groups; mxfp4: 4-bit floats with such. Only files hold
# them; nothing here rounds a weight to one of them.
Search = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]  # as search_int4
Transform = Callable[[Tensor], Tensor]  # as hadamard_transform
CodeFormat = WeightFormat | Literal["int8g", "fp8g", "mxfp4"]
INT8_GROUP = 64  # activations that share a scale before an int8 weight
HADAMARD_BLOCK = 64  # inputs that a Hadamard transform mixes; its root is a power of two
INT4_GROUP = 128  # of checkpoints in int4 as they are written: one scale, no zero point
INT4_STEP_GROUP = 16  # inputs of an int4 weight, rounded at load, that share a step and an offset
NF4_GROUP = 64
FP8_MAX = 448.0
MIN_SCALE = 1e-7  # of weights and activations: a row of zeros divides by it
MIN_KV_SCALE = 1e-5  # an fp16 subnormal
MAX_KV_SCALE = 65504.0  # the largest finite fp16
# Quantiles of a normal distribution, normalised to [-1, 1], with an exact 0.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MXFP4_GROUP = 32
MXFP4_VALUES = (  # E2M1: a sign, two bits of exponent, one of mantissa
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
)  # fmt: skip
TABLES: dict[CodeFormat, tuple[float, ...]] = {"nf4": NF4_VALUES, "mxfp4": MXFP4_VALUES}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [N, K] as codes and fp32 scales.

    int8, fp8: `codes` [N, K] (int8, float8_e4m3fn), `scales` [N]; w = code * scale. `group` of
    int8: inputs whose activations share a scale (32 or a multiple of 64; None: a whole row).
    int4: `codes` uint8 [N, ceil(K / 2)], the even k in the low nibble; G = ceil(K / group) groups.
    As files have it, `scales` [N, G] and w = (nibble - zero) * scale, where zero is 8, or the
    group's own in `zeros` [N, G], uint8 or fp32. As it is made here, w = (step * nibble + offset) *
    scale with `steps` uint8 and `offsets` int8 [N, G] and `scales` [N]: codes of int8, of which 16
    occur in a group. nf4, mxfp4: `scales` [N, G] and w = TABLES[format][nibble] * scale. The last
    nibble of an odd K does not count.
    int8g: `codes` int8 [N, K], `scales` [N, G]; w = (code - zero) * scale, where zero is 0, or the
    group's own in `zeros` fp32 [N, G]. fp8g: the same with float8_e4m3fn and no zeros; unlike fp8,
    it leaves activations as they are.
    `order` int32 [K], of int4 and int8g whose activations stay as they are: column k of the codes
    is input order[k] (GPTQ's act-order); None: input k.
    `hadamard`: w is the transformed weight, for activations that are transformed before they are
    rounded (`hadamard_transform`); of int8, and of int4 with steps.
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    in_features: int
    group: int | None = None
    zeros: Tensor | None = None
    steps: Tensor | None = None
    offsets: Tensor | None = None
    weight_only: bool = False  # of int4: activations stay as they are
    hadamard: bool = False
    order: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, zeros, steps, offsets and the order of inputs."""
        parts = (self.codes, self.scales, self.zeros, self.steps, self.offsets, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def takes_int8(self) -> bool:
        """Whether the activations are quantised to int8, in groups of `row_group`."""
        return self.format == "int8" or (self.format == "int4" and self.row_group is not None)

    @property
    def row_group(self) -> int | None:
        """Inputs whose activations share a scale. int8: its group (None: a whole row). int4: 64, or
        32 where files have groups of so few; None: theirs are cut otherwise, and activations stay
        as they are."""
        if self.format == "int8":
            return self.group
        if self.format != "int4" or self.group is None or self.weight_only:
            return None
        if self.order is not None:  # a group of inputs is none of neighbours
            return None
        if self.steps is not None or self.group >= self.in_features:
            return INT8_GROUP
        return next((size for size in (INT8_GROUP, 32) if self.group % size == 0), None)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Rows:
    """Activations [M, K] that are quantised already: what `quantize_rows_int8` gives.

    `codes` int8 [M, K], -127 to 127, any stride over M; `scales` fp32 [M, G], dense, of G groups of
    `group` inputs each (None: one of all). `dtype` is what they were before, and what a linear
    makes of them. `hadamard`: they were transformed before they were rounded.
    """

    codes: Tensor
    scales: Tensor
    group: int | None = None
    dtype: torch.dtype = torch.float32
    hadamard: bool = False

    @classmethod
    def inside(
        cls,
        memory: Tensor,
        group: int | None = None,
        scales: Tensor | None = None,
        *,
        hadamard: bool = False,
    ) -> Int8Rows:
        """Rows to be filled, whose codes lie at the start of each row of `memory` [M, K].

        `memory` may hold what they will be made of: `rowwise` reads a value before it writes there.
        `scales` fp32, at least M * G elements in a row; by default they are new.
        """
        num_rows, depth = memory.shape
        shape = num_rows, num_groups(depth, group)
        if scales is None:
            scales = torch.empty(shape, dtype=torch.float32, device=memory.device)
        else:
            scales = scales.view(-1)[: shape[0] * shape[1]].view(shape)
        return cls(memory.view(torch.int8)[:, :depth], scales, group, memory.dtype, hadamard)

    @property
    def shape(self) -> torch.Size:
        """(M, K)."""
        return self.codes.shape


def num_groups(depth: int, group: int | None) -> int:
    """Groups of `depth` inputs, at least one; the last may be short. None: one of all."""
    return 1 if group is None else max(1, -(-depth // group))


def quantize_weight(
    weight: Tensor,
    format: WeightFormat,
    group: int = INT4_STEP_GROUP,
    *,
    symmetric: bool = False,
    hadamard: Transform | None = None,
    search: Search = search_int4,
) -> QuantizedWeight:
    """`weight` [N, K] of any float dtype, rounded to the nearest code; no calibration.

    `group`: of int4, a multiple of 8. Its steps and offsets are those of the least squared error
    that `search` finds; `symmetric`: as checkpoints hold it instead, in groups of any size with a
    scale each, that of the largest weight. `hadamard`: of int8 and int4, `hadamard_transform` or
    what gives the same, to which the weight goes before it is rounded. Raises ValueError for a
    group that does not fit.
    """
    if hadamard is not None:
        assert format in ("int8", "int4") and not symmetric
        plain = quantize_weight(hadamard(weight), format, group, search=search)
        return replace(plain, hadamard=True)
    wide = weight.float()
    if format == "int8":
        codes, scales = quantize_rows_int8(wide)
        return QuantizedWeight("int8", codes, scales[:, 0], weight.shape[1], INT8_GROUP)
    if format == "fp8":
        codes, scales = quantize_rows_fp8(wide)
        return QuantizedWeight("fp8", codes, scales, weight.shape[1])
    if format == "int4":
        if symmetric:
            return _quantize_symmetric(wide, group)
        return _quantize_int4(wide, group, search)
    return _quantize_nf4(wide)


def dequantize_weight(quantized: QuantizedWeight) -> Tensor:
    """The weight that the codes stand for: fp32 [N, K], no longer transformed."""
    if quantized.format in ("int8", "fp8") or quantized.steps is not None:
        codes = int8_codes(quantized) if quantized.format == "int4" else quantized.codes
        values = codes.float() * quantized.scales[:, None]
        return hadamard_transform(values) if quantized.hadamard else values
    assert quantized.group is not None
    codes, zeros = quantized.codes, quantized.zeros
    columns = torch.arange(quantized.in_features, device=codes.device) // quantized.group
    if quantized.format not in ("int8g", "fp8g"):
        codes = unpack_nibbles(codes)[:, : quantized.in_features]
    if quantized.format in TABLES:
        values = torch.tensor(TABLES[quantized.format], device=codes.device)[codes.long()]
    elif zeros is not None:
        values = codes.float() - zeros.float()[:, columns]
    else:
        values = codes.float() - (8 if quantized.format == "int4" else 0)
    values = values * quantized.scales[:, columns]
    if quantized.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, quantized.order.long(), values)


def int8_codes(quantized: QuantizedWeight) -> Tensor:
    """int8 [N, K] that the nibbles of an int4 weight stand for, which has steps and offsets."""
    assert quantized.steps is not None and quantized.offsets is not None and quantized.group
    nibbles = unpack_nibbles(quantized.codes)[:, : quantized.in_features].to(torch.int16)
    columns = torch.arange(quantized.in_features, device=nibbles.device) // quantized.group
    codes = nibbles * quantized.steps[:, columns] + quantized.offsets[:, columns]
    return codes.to(torch.int8)


def for_plain_rows(quantized: QuantizedWeight) -> QuantizedWeight:
    """The same int4 weight, not transformed, multiplied with activations as they are."""
    assert not quantized.hadamard
    steps, offsets, scales = quantized.steps, quantized.offsets, quantized.scales
    if steps is None or offsets is None:
        return replace(quantized, weight_only=True)
    scales, zeros = steps * scales[:, None], -offsets.float() / steps
    return replace(
        quantized, scales=scales, zeros=zeros, steps=None, offsets=None, weight_only=True
    )


def hadamard_transform(x: Tensor) -> Tensor:
    """`x` [..., K] -> fp32 [..., K]: each whole block of 64 times the Hadamard matrix over 8, which
    is its own inverse; the inputs after the last one as they are.

    Products of two transformed rows are those of the rows. A value far larger than its neighbours
    is spread over its block, so that rounding loses less of them (QuaRot, Ashkboos et al. 2024).
    The sums of pairs at distance 1 come first, of those at distance 32 last.
    """
    wide = x.float()
    whole = wide.shape[-1] // HADAMARD_BLOCK * HADAMARD_BLOCK
    blocks = wide[..., :whole].unflatten(-1, (whole // HADAMARD_BLOCK, HADAMARD_BLOCK))
    distance = 1
    while distance < HADAMARD_BLOCK:
        a, b = blocks.unflatten(-1, (-1, 2, distance)).unbind(-2)
        blocks = torch.stack((a + b, a - b), -2).flatten(-3)
        distance *= 2
    return torch.cat(((blocks * HADAMARD_BLOCK**-0.5).flatten(-2), wide[..., whole:]), -1)


def quantize_rows_int8(
    x: Tensor, group: int | None = None, *, hadamard: bool = False
) -> tuple[Tensor, Tensor]:
    """`x` [M, K] -> int8 [M, K] in [-127, 127], half to even, and fp32 scales [M, G] of groups.

    A group that holds NaN or an infinity has the scale NaN, so that all made of it is NaN. With
    `hadamard` the rows are transformed before, in blocks.
    """
    if hadamard:
        x = hadamard_transform(x)
    depth = x.shape[1]
    groups = _groups(x.float(), group) if group and depth else x.float().unsqueeze(1)
    scales = (_row_max(groups) / 127.0).clamp(min=MIN_SCALE)
    codes = (groups / scales[..., None]).round().clamp(-127, 127).flatten(1)[:, :depth]
    return codes.nan_to_num(0.0).to(torch.int8), scales


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [M, K] -> float8_e4m3fn [M, K] and fp32 scales [M]; NaN as in `quantize_rows_int8`."""
    wide = x.float()
    scales = (_row_max(wide) / FP8_MAX).clamp(min=MIN_SCALE)
    codes = (wide / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).nan_to_num(0.0)
    return codes.to(torch.float8_e4m3fn), scales


def linear_reference(
    x: Tensor, quantized: QuantizedWeight, bias: Tensor | None = None, *, weight_only: bool = False
) -> Tensor:
    """The reference of a quantised linear: `x` [M, K] -> [M, N] in `x.dtype`, rounded once.

    int8, fp8 and, where it `takes_int8`, int4 quantise x too, in groups or rows; the others are
    weight-only, as is int4 of files on a GPU (`weight_only`). The sums are in fp64.
    """
    if quantized.takes_int8 and not weight_only:
        group = quantized.row_group
        rows, scales = quantize_rows_int8(x, group, hadamard=quantized.hadamard)
        columns = torch.arange(x.shape[1], device=x.device) // (group or x.shape[1] or 1)
        scaled = rows.double() * scales.double()[:, columns]
        if quantized.format == "int8" or quantized.steps is not None:
            codes = quantized.codes if quantized.format == "int8" else int8_codes(quantized)
            y = scaled @ codes.double().T * quantized.scales.double()
        else:
            y = scaled @ dequantize_weight(quantized).double().T
    elif quantized.format == "fp8":
        rows, scales = quantize_rows_fp8(x)
        total = rows.double() @ quantized.codes.double().T
        y = total * scales.double()[:, None] * quantized.scales.double()
    else:
        y = x.double() @ dequantize_weight(quantized).double().T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)


def pack_nibbles(nibbles: Tensor, fill: int) -> Tensor:
    """uint8 [N, K] with values 0-15 -> uint8 [N, ceil(K / 2)], the even k in the low nibble."""
    if nibbles.shape[1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1), value=fill)
    # Two at a time, the even k in the low byte: of a copy, which begins at an even byte.
    pairs = nibbles.clone(memory_format=torch.contiguous_format).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """The reverse: uint8 [N, B] -> uint8 [N, 2 * B]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def quantize_kv(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """`x` [..., D] -> codes [..., D] in `dtype`, and fp16 scales [..., D / group].

    `dtype` is int8 or float8_e4m3fn; `group` divides D. The scale is rounded to fp16 before a value
    is divided by it. A group that holds NaN or an infinity has the scale NaN.
    """
    groups = x.float().unflatten(-1, (-1, group))
    top = 127.0 if dtype == torch.int8 else FP8_MAX
    largest = _finite_max(groups)
    scales = (largest / top).clamp(MIN_KV_SCALE, MAX_KV_SCALE).to(torch.float16)
    codes = (groups / scales.float()[..., None]).nan_to_num(0.0)
    codes = codes.round().clamp(-127, 127) if dtype == torch.int8 else codes.clamp(-top, top)
    return codes.to(dtype).flatten(-2), scales


def dequantize_kv(codes: Tensor, scales: Tensor) -> Tensor:
    """The stored values: fp32 [..., D]."""
    groups = codes.float().unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales.float()[..., None]).flatten(-2)


def _quantize_int4(weight: Tensor, group: int, search: Search) -> QuantizedWeight:
    if group % 8 or group < 8:
        raise ValueError(f"int4 groups of {group} weights: they are multiples of 8")
    scales = (_row_max(weight) / 127.0).clamp(min=MIN_SCALE)
    nibbles, steps, offsets = search(weight, scales, group)
    codes = pack_nibbles(nibbles, fill=8)
    return QuantizedWeight("int4", codes, scales, weight.shape[1], group, None, steps, offsets)


def _quantize_symmetric(weight: Tensor, group: int) -> QuantizedWeight:
    groups = _groups(weight, group)
    place = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, place).squeeze(-1)
    divisor = torch.where(extreme < 0, 8.0, 7.0)  # the codes reach from -8 to 7
    scales = (extreme.abs() / divisor).clamp(min=MIN_SCALE)
    nibbles = (groups / scales[..., None]).round().clamp(-8, 7).add(8).to(torch.uint8)
    codes = pack_nibbles(nibbles.flatten(1)[:, : weight.shape[1]], fill=8)
    return QuantizedWeight("int4", codes, scales, weight.shape[1], group)


def _quantize_nf4(weight: Tensor) -> QuantizedWeight:
    groups = _groups(weight, NF4_GROUP)
    scales = groups.abs().amax(-1).clamp(min=MIN_SCALE)
    table = torch.tensor(NF4_VALUES, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    nibbles = torch.bucketize(groups / scales[..., None], middles).to(torch.uint8)
    codes = pack_nibbles(nibbles.flatten(1)[:, : weight.shape[1]], fill=7)
    return QuantizedWeight("nf4", codes, scales, weight.shape[1], NF4_GROUP)


def _groups(weight: Tensor, group: int) -> Tensor:
    """[N, K] -> [N, ceil(K / group), group], padded with zeros."""
    spare = -weight.shape[1] % group
    return torch.nn.functional.pad(weight, (0, spare)).unflatten(1, (-1, group))


def _row_max(x: Tensor) -> Tensor:
    return _finite_max(x) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _finite_max(x: Tensor) -> Tensor:
    """Largest magnitude over the last dimension; NaN where something is not finite."""
    largest = x.abs().amax(-1)
    return torch.where(torch.isfinite(largest), largest, float("nan"))
