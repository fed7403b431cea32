"""Chooses the tiles of a GPU matmul.

Arithmetic on sizes, formats and two generations of GPU; no tensors. The one place where the batch
size decides how a linear runs on a GPU: by whom its pieces are summed, never in which order. Not
yet checked against timings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.kernels.quant import CodeFormat

# int4_steps: int4 weights with steps and offsets, which are multiplied as int8.
GpuFormat = CodeFormat | Literal["plain", "int4_steps"]

WEIGHT_BYTES: dict[GpuFormat, float] = {
    "plain": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128, "nf4": 0.5 + 4 / 64,
    "int8g": 1.0 + 4 / 32, "int4_steps": 0.5 + 2 / 16, "fp8g": 1.0 + 4 / 128,
    "mxfp4": 0.5 + 4 / 32,
}  # fmt: skip
# The cost of a multiply-add relative to 16 bits: weight-only formats are multiplied as 16 bits.
OPERATIONS: dict[GpuFormat, float] = {
    "plain": 1.0, "int8": 0.5, "fp8": 0.5, "int4": 1.0, "nf4": 1.0, "int8g": 1.0,
    "int4_steps": 0.5, "fp8g": 1.0, "mxfp4": 1.0,
}  # fmt: skip
# Rows from which a 16-bit matmul is bound by FLOPs: rate * 2 bytes / (2 * bandwidth). A100: 312
# TFLOP/s and 2.0 TB/s; H200: 989 and 4.8. The rest follows: int8 turns at the same number of rows
# (half the bytes, twice the rate), int4 at a quarter of it (A100 38 to 41, H200 51 to 55).
RIDGE_16 = {8: 153.0, 9: 206.0}  # by major compute capability
# Pieces of an output's sum: with 4, one row of 4096 outputs makes two programs a multiprocessor.
MAX_PIECES = 4
STEPS_A_PIECE = 4  # tiles along K at least


Kind = GpuFormat | Literal["int8_groups"]  # int8 with scales of groups is one of its own
FOUR_BITS: tuple[Kind, ...] = ("int4", "int4_steps")
# Outputs, warps and stages that were measured to be faster than the usual ones, by kind, rows of a
# tile, and whether the pieces are apart.
FASTEST: dict[tuple[Kind, int, bool], tuple[int, int, int]] = {
    ("plain", 128, False): (128, 8, 4),
    ("fp8", 64, False): (128, 4, 4),
    ("int8_groups", 16, True): (32, 4, 5),
    ("int8_groups", 16, False): (64, 4, 5),
    **{("int8_groups", 64, apart): (128, 4, 4) for apart in (True, False)},
    **{("int4_steps", 64, apart): (128, 4, 4) for apart in (True, False)},
    **{(kind, 16, apart): (64, 4, 3) for kind in FOUR_BITS for apart in (True, False)},
    **{(kind, 128, apart): (64, 4, 3) for kind in ("int8_groups", *FOUR_BITS)
       for apart in (True, False)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows, outputs and inputs of one program's tile; pieces of an output's sum, and whether each
    has a program of its own."""

    rows: int
    outputs: int
    inputs: int
    pieces: int
    apart: bool
    num_warps: int
    num_stages: int


def choose_tiles(
    num_rows: int,
    num_outputs: int,
    step: int,
    num_inputs: int,
    *,
    kind: Kind = "plain",
    num_groups: int = 1,
    num_sms: int = 132,
    element_bytes: int = 2,
) -> Tiles:
    """Tiles for `num_groups` products of about `num_rows` rows each with weights [outputs, inputs].

    `step` is the inputs that one step of the kernel takes; Few rows: narrow tiles, and the pieces
    of the inputs apart, until every multiprocessor has two programs, since there bytes in flight
    are speed. Many rows: tiles of 128 x 128, which read a weight once for 128 rows; the pieces of
    an output stay together once half the multiprocessors have a tile, since to write and read their
    sums would cost more. The number of pieces follows from the inputs alone.
    """
    widest = 64 if element_bytes == 4 else 128
    rows = max(16, min(widest, 1 << max(0, num_rows - 1).bit_length()))
    outputs = 64 if rows <= 32 else 128
    tiles = max(1, num_groups * -(-num_rows // rows) * -(-num_outputs // outputs))
    steps = -(-num_inputs // step)
    pieces = max(1, min(MAX_PIECES, steps // STEPS_A_PIECE))
    wanted = 2 * num_sms * 32 // max(32, rows)  # sums of pieces: 17 MB at most on 132
    apart = pieces > 1 and tiles < wanted
    if kind in FOUR_BITS and rows == 16 and num_groups == 1 and num_outputs <= 1 << 15:
        apart = pieces > 1  # 8 MB of sums at most
    # Of registers, 4 warps hold sums of 128 x 32 without a spill, 8 warps 128 x 128.
    usual = outputs, 8 if rows > 32 else 4, 3 if rows == 128 else 4
    outputs, warps, stages = FASTEST.get((kind, rows, apart), usual)
    return Tiles(rows, outputs, step, pieces, apart, warps, stages)


def ridge_rows(format: GpuFormat, ridge_16: float = RIDGE_16[9]) -> float:
    """Rows of a batch from which a linear is bound by FLOPs and no longer by its weight's bytes."""
    return ridge_16 * (WEIGHT_BYTES[format] / 2) / OPERATIONS[format]
