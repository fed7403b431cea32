"""Decodes the block types of GGUF: rows of bytes to fp32.

A row is a sequence of blocks of 32 or 256 elements. A block has a scale d in fp16, often a minimum
m, and codes q; the K types have a scale and a minimum for each 16 or 32 elements too, as 6-bit or
8-bit factors of d and m. The products are made in the order of the format's reference, in fp32, so
that results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.workers.gguf.header import BlockType

CHUNK_ELEMENTS = 1 << 22  # decoded at once: what lies between takes several times as much


def decode(raw: Tensor, type: BlockType) -> Tensor:
    """`raw` uint8 [R, bytes of a row] of a block type -> fp32 [R, K]; floats in their own dtype."""
    if type.name in _FLOATS:
        return raw.view(_FLOATS[type.name])
    num_rows, row_bytes = raw.shape
    num_blocks = row_bytes // type.num_bytes
    width = num_blocks * type.elements
    decoded = torch.empty(num_rows, width)
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    for begin in range(0, num_rows, step):
        rows = raw[begin : begin + step].view(-1, num_blocks, type.num_bytes)
        decoded[begin : begin + step] = _DECODERS[type.name](rows).flatten(1)
    return decoded


def q4_0_codes(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_0 rows uint8 [R, B] -> codes 0-15 uint8 [R, K], and fp32 scales [R, K / 32];
    w = (code - 8) * scale."""
    blocks = raw.view(raw.shape[0], -1, 18)
    return _halves(blocks[..., 2:]).flatten(1), _half(blocks, 0).squeeze(-1)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_halves(blocks[..., 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _halves(blocks[..., 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minimums(blocks, _eighths(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    planes = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> planes) & 1  # byte j, bit g: of element 32 g + j
    return _with_minimums(blocks, _eighths(blocks[..., 48:]) | fifth << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    """256 elements: two halves, each of four runs of 32, two bits of which share a byte."""
    shape = blocks.shape[:-1]
    low = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.stack((low & 15, low >> 4), dim=-2).view(*shape, 2, 4, 32)
    planes = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> planes) & 3
    codes = (low | high << 4).view(*shape, 16, 16).float() - 32
    scales = blocks[..., 192:208].view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[..., None] * codes).flatten(-2)


def _with_minimums(blocks: Tensor, codes: Tensor) -> Tensor:
    """`codes` [..., 8, 32] with the block's eight scales and minimums, 6 bits each in 12 bytes."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1).float()
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=-1).float()
    scales, minimums = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (scales[..., None] * codes.float() - minimums[..., None]).flatten(-2)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, as fp32 [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """Bytes [..., 16] -> nibbles [..., 32]: the low ones, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _eighths(packed: Tensor) -> Tensor:
    """Bytes [..., 128] -> nibbles [..., 8, 32]: of each 32 bytes the low ones, then the high."""
    parts = packed.unflatten(-1, (4, 32))
    return torch.stack((parts & 15, parts >> 4), dim=-2).flatten(-3, -2)


def _bits(packed: Tensor) -> Tensor:
    """Bytes [..., 4] -> bits [..., 32], the lowest first."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
