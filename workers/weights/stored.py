"""Reads quantised weights from the layouts of published checkpoints into `QuantizedWeight`.

The layouts follow the formats' public documentation. Each reader takes a `Take` (name -> tensor as
stored) and returns the weight [N, K] with its stored codes and scales: nothing is rounded again.

compressed-tensors: `weight` int8 or float8_e4m3fn [N, K] with `weight_scale` [N, 1]; or 4 bits:
`weight_packed` int32 [N, K / 8], the lowest nibble first, codes offset by 8, `weight_scale` [N, G],
`weight_shape`, and where asymmetric `weight_zero_point` int32 [N / 8, G], packed over N.
AWQ: `qweight` int32 [K, N / 8] and `qzeros` int32 [G, N / 8], eight outputs a word in the order
0 2 4 6 1 3 5 7; `scales` [G, N]. GPTQ: `qweight` int32 [K / 8, N], `qzeros` int32 [G, N / 8],
`scales` [G, N], `g_idx` int32 [K], the group of each input; of 8 bits four codes a word.
fp8: `weight` float8_e4m3fn [N, K], `weight_scale_inv` [N / rows, K / columns] of a block, which
multiplies for all its name. mxfp4, of all experts of a layer: `_blocks` uint8 [E, N, K / 32, 16],
the even k in the low nibble, `_scales` uint8 [E, N, K / 32], powers of two.
bitsandbytes: `weight` uint8, two codes a byte, the first in the high nibble, blocks crossing
the ends of rows; `weight.absmax`; a JSON text as uint8.
GGUF: `weight_q4_0` and so on, uint8 [N, bytes of a row], blocks as gguf_blocks.py has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.quant import MXFP4_GROUP, NF4_VALUES, QuantizedWeight, pack_nibbles
from penstock.workers.errors import LoadError
from penstock.workers.gguf.config import KEPT_FORMATS
from penstock.workers.gguf.header import BLOCK_TYPES
from penstock.workers.quantization import QuantizedFormat, StoredScheme
from penstock.workers.weights.gguf_blocks import codes_of

Take = Callable[[str], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output column in each nibble, lowest first
BNB_STATE = "weight.quant_state.bitsandbytes__nf4"
# Rows of blocks, of a GGUF file.
BLOCK_MARKS = {
    f"weight_{type.name.lower()}": type
    for type in BLOCK_TYPES.values()
    if type.name in KEPT_FORMATS
}
MARKS = (
    "weight_packed", "weight_scale", "weight_scale_inv", "qweight", "weight.absmax", *BLOCK_MARKS,
)  # fmt: skip


def is_stored_quantized(has: Callable[[str], bool], scheme: StoredScheme, module: str) -> bool:
    """Whether `module` has a quantised weight: its tensors exist, and the scheme does not ignore
    it."""
    return any(has(f"{module}.{mark}") for mark in MARKS) and not scheme.ignores(module)


def stored_blocks(has: Callable[[str], bool]) -> str | None:
    """The last part of the name of a module's blocks, of BLOCK_MARKS; None: it has none."""
    return next((mark for mark in BLOCK_MARKS if has(mark)), None)


def read_weight(
    has: Callable[[str], bool], take: Take, scheme: StoredScheme, shape: tuple[int, int]
) -> QuantizedWeight:
    """The weight of one module on the CPU; `take` returns a tensor of it by the last part of its
    name.

    Raises LoadError for tensors that contradict each other or `shape` (N, K).
    """
    if scheme.method == "gguf":
        return _blocks(has, take, shape)
    if scheme.method == "awq":
        return _awq(take, scheme, shape)
    if scheme.method == "gptq":
        return _gptq(has, take, scheme, shape)
    if scheme.method == "bitsandbytes":
        return _bitsandbytes(has, take, shape)
    if scheme.method == "fp8":
        return _fp8_blocks(take, scheme, shape)
    if has("weight_packed"):
        return _pack_quantized(has, take, scheme, shape)
    return _per_row(take, shape)


def pack_int32(nibbles: Tensor) -> Tensor:
    """Codes 0-15 [R, C] -> int32 [R, ceil(C / 8)], the lowest nibble first, padded with zeros."""
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.shape[1] % 8))
    low_first = padded[:, 0::2] | (padded[:, 1::2] << 4)  # bytes; a word is four of them
    return low_first.contiguous().view(torch.int32)


def unpack_int32(words: Tensor, bits: int = 4) -> Tensor:
    """The reverse, also of codes of 8 `bits`: int32 [R, W] -> uint8 [R, 32 / bits * W]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)


def _per_row(take: Take, shape: tuple[int, int]) -> QuantizedWeight:
    codes, scales = take("weight"), take("weight_scale").float().flatten()
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise LoadError(f"weight is {codes.dtype}; with weight_scale it must be int8 or fp8 (E4M3)")
    _must_be("weight", codes, shape)
    if scales.numel() == 1:  # of the whole tensor
        scales = scales.expand(shape[0])
    _must_be("weight_scale", scales, (shape[0],))
    format: QuantizedFormat = "int8" if codes.dtype == torch.int8 else "fp8"
    return QuantizedWeight(format, codes, scales.contiguous(), shape[1])


def _pack_quantized(
    has: Callable[[str], bool], take: Take, scheme: StoredScheme, shape: tuple[int, int]
) -> QuantizedWeight:
    num_rows, width = shape
    if has("weight_g_idx"):
        raise LoadError("weight_g_idx: activation ordering is not supported")
    if has("weight_shape") and tuple(take("weight_shape").tolist()) != shape:
        raise LoadError(f"weight_shape is {take('weight_shape').tolist()}, not {list(shape)}")
    packed, scales = take("weight_packed"), take("weight_scale").float()
    _must_be("weight_packed", packed, (num_rows, -(-width // 8)))
    group = _group_that_gives(scheme, width, scales.shape[-1])
    _must_be("weight_scale", scales, (num_rows, -(-width // group)))
    zeros = None
    if has("weight_zero_point"):
        words = take("weight_zero_point")
        _must_be("weight_zero_point", words, (-(-num_rows // 8), scales.shape[1]))
        zeros = unpack_int32(words.T.contiguous())[:, :num_rows].T.contiguous()
    nibbles = unpack_int32(packed)[:, :width]
    return _int4(nibbles, scales, group, zeros)


def _blocks(has: Callable[[str], bool], take: Take, shape: tuple[int, int]) -> QuantizedWeight:
    """The minimum of a group becomes its zero point, a real number; where the scale is 0, all of
    the group is its minimum."""
    mark = stored_blocks(has)
    assert mark is not None, "is_stored_quantized said so"
    format, group = KEPT_FORMATS[BLOCK_MARKS[mark].name]
    found = codes_of(take(mark), BLOCK_MARKS[mark])
    _must_be(mark, found.codes, shape)
    codes, scales, zeros = found.codes, found.scales, None
    if found.minimums is not None:
        if (is_flat := scales == 0).any():
            scales = scales.masked_fill(is_flat, 1.0)
            codes = codes.masked_fill(is_flat.repeat_interleave(group, dim=1), 0)
        zeros = -found.minimums / scales
    if format == "int8g":
        return QuantizedWeight("int8g", codes, scales, shape[1], group, zeros)
    nibbles = codes if zeros is not None else codes + 8
    packed = pack_nibbles(nibbles.view(torch.uint8), fill=8)
    return QuantizedWeight("int4", packed, scales, shape[1], group, zeros)


def _awq(take: Take, scheme: StoredScheme, shape: tuple[int, int]) -> QuantizedWeight:
    num_rows, width = shape
    qweight, qzeros, scales = take("qweight"), take("qzeros"), take("scales").float()
    group = scheme.groups[0] or width
    num_groups = -(-width // group)
    _must_be("qweight", qweight, (width, num_rows // 8))
    _must_be("qzeros", qzeros, (num_groups, num_rows // 8))
    _must_be("scales", scales, (num_groups, num_rows))
    places = torch.tensor(AWQ_ORDER).argsort()

    def ordered(words: Tensor) -> Tensor:
        return unpack_int32(words).unflatten(1, (-1, 8))[:, :, places].flatten(1)

    return _int4(ordered(qweight).T, scales.T, group, ordered(qzeros).T)


def _gptq(
    has: Callable[[str], bool], take: Take, scheme: StoredScheme, shape: tuple[int, int]
) -> QuantizedWeight:
    (num_rows, width), bits = shape, 4 if scheme.formats[0] == "int4" else 8
    qweight, qzeros, scales = take("qweight"), take("qzeros"), take("scales").float()
    group = scheme.groups[0] or width
    num_groups, in_word = -(-width // group), 32 // bits
    _must_be("qweight", qweight, (width // in_word, num_rows))
    _must_be("qzeros", qzeros, (num_groups, num_rows // in_word))
    _must_be("scales", scales, (num_groups, num_rows))
    codes = unpack_int32(qweight.T.contiguous(), bits)
    zeros = (unpack_int32(qzeros, bits) + scheme.zero_offset) & (2**bits - 1)
    order = _order_of(take("g_idx"), width, group) if has("g_idx") else None
    if order is not None:
        codes = codes[:, order]
    zeros, scales = zeros.T, scales.T
    weight = (
        _int4(codes, scales, group, zeros) if bits == 4 else _int8g(codes, scales, group, zeros)
    )
    return weight if order is None else replace(weight, order=order)


def _order_of(groups: Tensor, width: int, group: int) -> Tensor | None:
    """int32 [K], the inputs of each group together; None where they are already."""
    _must_be("g_idx", groups, (width,))
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], torch.arange(width) // group):
        raise LoadError(f"g_idx does not give each group {group} inputs")
    return None if torch.equal(order, torch.arange(width)) else order.to(torch.int32)


def _int8g(codes: Tensor, scales: Tensor, group: int, zeros: Tensor) -> QuantizedWeight:
    """Of codes and zero points uint8."""
    signed = (codes.to(torch.int16) - 128).to(torch.int8).contiguous()
    real = None if bool((zeros == 128).all()) else (zeros.float() - 128).contiguous()
    return QuantizedWeight("int8g", signed, scales.contiguous(), codes.shape[1], group, real)


def _fp8_blocks(take: Take, scheme: StoredScheme, shape: tuple[int, int]) -> QuantizedWeight:
    num_rows, width = shape
    codes, scales = take("weight"), take("weight_scale_inv").float()
    if codes.dtype != torch.float8_e4m3fn:
        raise LoadError(f"weight is {codes.dtype}; with weight_scale_inv it must be fp8 (E4M3)")
    _must_be("weight", codes, shape)
    group = scheme.groups[0]
    assert group is not None
    _must_be("weight_scale_inv", scales, (-(-num_rows // scheme.block_rows), -(-width // group)))
    by_row = scales.repeat_interleave(scheme.block_rows, dim=0)[:num_rows].contiguous()
    return QuantizedWeight("fp8g", codes, by_row, width, group)


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Of one matrix: `blocks` uint8 [N, G, 16], `scales` uint8 [N, G], 2^(scale - 127) or NaN."""
    powers = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - 127)
    powers = powers.masked_fill(scales == 255, float("nan"))
    codes = blocks.flatten(1).contiguous()
    return QuantizedWeight("mxfp4", codes, powers, 2 * codes.shape[1], MXFP4_GROUP)


def has_fused_experts(has: Callable[[str], bool], name: str) -> bool:
    """Whether the tensor `name`, plain or in MXFP4, is all experts of a layer."""
    return has(name) or has(f"{name}_blocks")


def _bitsandbytes(
    has: Callable[[str], bool], take: Take, shape: tuple[int, int]
) -> QuantizedWeight:
    if not has(BNB_STATE):
        raise LoadError(f"{BNB_STATE} is missing; only NF4 of bitsandbytes is supported")
    state = _bnb_state(take(BNB_STATE))
    block, num_rows, width = state["blocksize"], *shape
    if tuple(state["shape"]) != shape or state.get("quant_type") != "nf4":
        raise LoadError(f"{BNB_STATE} says {state}; an nf4 weight of {list(shape)} was expected")
    table = take("weight.quant_map").float()
    if not torch.allclose(table, torch.tensor(NF4_VALUES), atol=1e-6):
        raise LoadError("weight.quant_map is not NF4's table")
    packed, absmax = take("weight").flatten(), _bnb_absmax(take, state)
    size = num_rows * width
    _must_be("weight", packed, (-(-size // 2),))
    _must_be("weight.absmax", absmax, (-(-size // block),))
    # Blocks may cross the ends of rows. Parts that divide both lie in one block and in one row.
    group = math.gcd(block, width)
    first = torch.arange(0, size, group)
    scales = absmax[first // block].view(num_rows, width // group)
    flat = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[:size]
    codes = pack_nibbles(flat.view(shape), fill=7)
    return QuantizedWeight("nf4", codes, scales, width, group)


def _bnb_state(raw: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(raw.tolist()).decode("utf-8"))
        return {**state, "blocksize": int(state["blocksize"]), "shape": list(state["shape"])}
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{BNB_STATE} is damaged: {error!r}") from error


def _bnb_absmax(take: Take, state: dict[str, Any]) -> Tensor:
    """Scales of blocks; with double quantisation they are stored as 8-bit codes."""
    absmax = take("weight.absmax")
    if "nested_blocksize" not in state:
        return absmax.float()
    block = int(state["nested_blocksize"])
    values = take("weight.nested_quant_map").float()[absmax.long()]
    outer = take("weight.nested_absmax").float().repeat_interleave(block)[: values.numel()]
    return values * outer + float(state.get("nested_offset", 0.0))


def _int4(nibbles: Tensor, scales: Tensor, group: int, zeros: Tensor | None) -> QuantizedWeight:
    width = nibbles.shape[1]
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None  # symmetric after all
    codes = pack_nibbles(nibbles.contiguous(), fill=8)
    zeros = None if zeros is None else zeros.contiguous()
    return QuantizedWeight("int4", codes, scales.contiguous(), width, group, zeros)


def _group_that_gives(scheme: StoredScheme, width: int, num_groups: int) -> int:
    """The group size of the scheme that divides a row into `num_groups` groups."""
    for group in scheme.groups:
        size = width if group is None else min(group, width)
        if -(-width // size) == num_groups:
            return group or width
    sizes = ", ".join(str(group or "a row") for group in scheme.groups)
    raise LoadError(
        f"weight_scale divides {width} columns into {num_groups} groups, whose size is not {sizes}"
    )


def _must_be(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise LoadError(f"{name} has shape {list(tensor.shape)}; {list(shape)} was expected")
