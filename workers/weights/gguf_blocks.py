"""Takes the block types of GGUF apart: rows of bytes to fp32, or to codes, scales and minimums.

A row is a sequence of blocks of 32 or 256 elements. A block has a scale d in fp16, often a minimum
m, and codes q; the K types have a scale and a minimum for each 16 or 32 elements too, as 6-bit or
8-bit factors of d and m. The products are made in the order of the format's reference, in fp32, so
that results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.workers.gguf.header import BlockType

CHUNK_ELEMENTS = 1 << 22  # taken apart at once: what lies between takes several times as much


@dataclass(frozen=True, slots=True)
class Codes:
    """Weights [R, K] as integers: w = code * scale + minimum.

    `codes` int8 [R, K], counted from 0 on where there are minimums, else from the middle; `scales`
    and `minimums` fp32 [R, G], of K / G weights each.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None


def decode(raw: Tensor, type: BlockType) -> Tensor:
    """`raw` uint8 [R, bytes of a row] of a block type -> fp32 [R, K]; floats in their own dtype."""
    if type.name in _FLOATS:
        return raw.view(_FLOATS[type.name])
    decoded = torch.empty(raw.shape[0], raw.shape[1] // type.num_bytes * type.elements)
    begin = 0
    for some in _chunks(raw, type):
        groups = some.codes.view(*some.scales.shape, -1).float() * some.scales[..., None]
        if some.minimums is not None:
            groups += some.minimums[..., None]
        decoded[begin : begin + len(groups)] = groups.flatten(1)
        begin += len(groups)
    return decoded


def codes_of(raw: Tensor, type: BlockType) -> Codes:
    """`raw` uint8 [R, bytes of a row] of a block type as it is, nothing rounded."""
    parts = list(_chunks(raw, type))
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return Codes(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
    )


def _chunks(raw: Tensor, type: BlockType) -> Iterator[Codes]:
    """Some rows after the other."""
    num_rows, row_bytes = raw.shape
    num_blocks = row_bytes // type.num_bytes
    step = max(1, CHUNK_ELEMENTS // max(1, num_blocks * type.elements))
    for begin in range(0, num_rows, step):
        blocks = raw[begin : begin + step].view(-1, num_blocks, type.num_bytes)
        codes, scales, minimums = _READERS[type.name](blocks)
        minimums = None if minimums is None else minimums.flatten(1)
        yield Codes(codes.flatten(1), scales.flatten(1), minimums)


# Of blocks [R, blocks, bytes]: codes int8 [R, blocks, elements], scales and minimums fp32
# [R, blocks, scales of a block].
_Read = tuple[Tensor, Tensor, Tensor | None]


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: Tensor) -> _Read:
    return _halves(blocks[..., 2:]).view(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Read:
    return _halves(blocks[..., 4:]).view(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Read:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return codes.view(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Read:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return codes.view(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Tensor) -> _Read:
    return (_eighths(blocks[..., 16:]).flatten(-2).view(torch.int8), *_sixths(blocks))


def _q5_k(blocks: Tensor) -> _Read:
    planes = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> planes) & 1  # byte j, bit g: of element 32 g + j
    codes = _eighths(blocks[..., 48:]) | fifth << 4
    return (codes.flatten(-2).view(torch.int8), *_sixths(blocks))


def _q6_k(blocks: Tensor) -> _Read:
    """256 elements: two halves, each of four runs of 32, two bits of which share a byte."""
    shape = blocks.shape[:-1]
    low = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.stack((low & 15, low >> 4), dim=-2).view(*shape, 2, 4, 32)
    planes = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> planes) & 3
    codes = (low | high << 4).flatten(-3).view(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8).float()
    return codes, _half(blocks, 208) * scales, None


def _sixths(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The block's eight scales and minimums, 6 bits each in 12 bytes, as their values."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1).float()
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=-1).float()
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, as fp32 [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """Bytes [..., 16] -> nibbles [..., 32]: the low ones, then the high ones."""
    # Eight bytes at a time: of a copy, as words begin at multiples of eight bytes.
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64)
    return torch.cat((words & _LOW, (words >> 4) & _LOW), dim=-1).view(torch.uint8)


def _eighths(packed: Tensor) -> Tensor:
    """Bytes [..., 128] -> nibbles [..., 8, 32]: of each 32 bytes the low ones, then the high."""
    parts = packed.unflatten(-1, (4, 32))
    return torch.stack((parts & 15, parts >> 4), dim=-2).flatten(-3, -2)


def _bits(packed: Tensor) -> Tensor:
    """Bytes [..., 4] -> bits [..., 32], the lowest first."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


_LOW = 0x0F0F0F0F0F0F0F0F
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_READERS: dict[str, Callable[[Tensor], _Read]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
