"""Compiles the Triton kernels of quantised linears, experts, neurons and sampling, as
triton_compiles.py does. Each for one generation of GPU; with `--all`, for both.
"""

from __future__ import annotations

import sys
from typing import Any

from penstock.kernels.triton import matmul_kernels as matmul
from penstock.kernels.triton import moe as moe_triton
from penstock.kernels.triton import neurons
from penstock.kernels.triton import rowwise_quant as rows
from penstock.kernels.triton import sampling as sampling_triton
from penstock.kernels.triton.matmul_tiles import choose_tiles
from tests.kernels.triton.compiles import SHARED_BYTES, compile_for

LINEAR = {"x_ptr": "bf16", "codes_ptr": "u8", "scales_ptr": "fp32", "out_ptr": "bf16"}
CODES = LINEAR | {"x_ptr": "u8", "x_scales_ptr": "fp32"}
ROUTED = {"row_ids_ptr": "i32", "starts_ptr": "i32", "offsets_ptr": "i64"}
BF16 = dict.fromkeys(("x_ptr", "codes_ptr", "out_ptr", "bias_ptr"), "bf16")
NORM = dict.fromkeys(("x_ptr", "added_ptr", "weight_ptr", "total_ptr"), "bf16")
QUANTIZED = {"codes_ptr": "i8", "scales_ptr": "fp32"}
SIZES = {"DIM": 4096, "GROUP": 64, "HADAMARD": False, "TILE": 4096}
ADDED = {"ADD": True, "SCALE": False}
TRANSFORMED = {"HADAMARD": True}
NEURONS = dict.fromkeys(("x_ptr", "rows_ptr", "scales_ptr"), "bf16")
NEURONS |= {"places_ptr": "i32", "index_ptr": "i32", "sums_ptr": "fp32"}
NEURON_SUM = dict.fromkeys(("sums_ptr", "so_far_ptr"), "fp32")
NEURON_SUM |= {"index_ptr": "i32", "out_ptr": "bf16"}
NEURON_SIZES = {"DIM": 2048, "NEURONS": neurons.BLOCK, "TILE": neurons.TILE}
REDUCE_SIZES = {"FORMAT": "int4", "EXPERTS": 128, "TILE": 512}


def linear(format: str, num_rows: int, pointers: dict[str, str], group: int = 128, step: int = 0):
    """As launched for a weight [4096, 4096]; with the pointers of ROUTED, for 128 of them."""
    step = step or (64 if format == "plain" else min(128, group))
    kind: Any = "fp8" if format == "fp8_upcast" else format
    tiles = choose_tiles(num_rows, 4096, step, 4096, kind=kind, element_bytes=2)
    constants = {
        "FORMAT": format, "GROUP": group, "STEP": tiles.inputs, "ROWS": tiles.rows,
        "OUTPUTS": tiles.outputs, "PIECES": 1 if tiles.apart or format == "int8" else tiles.pieces,
        "EXPERTS": 128 if "starts_ptr" in pointers else 1, "EVEN": True, "ALIGNED": True,
    }  # fmt: skip
    partial = {"partial_ptr": "i32" if format == "int8" else "fp32"} if tiles.apart else {}
    pointers = pointers | partial
    return matmul._linear_kernel, pointers, constants, tiles.num_warps, tiles.num_stages


GROUPED = LINEAR | {"codes_ptr": "i8"}
STEPS = CODES | {"x_ptr": "i8", "zeros_ptr": "i16"}
INT8 = CODES | {"x_ptr": "i8", "codes_ptr": "i8"}  # one scale a row
KERNELS = {
    "int8 decode": linear("int8", 1, INT8),
    "int8 prefill": linear("int8", 4096, INT8),
    "int8 routed prefill": linear("int8", 64, INT8 | ROUTED),
    "int8 routed": linear("int8", 16, INT8 | ROUTED),
    "int8 groups decode": linear("int8_groups", 1, INT8, 64),
    "int8 groups prefill": linear("int8_groups", 4096, INT8, 64),
    "int8 groups routed": linear("int8_groups", 16, INT8 | ROUTED, 64),
    "int8 groups of 32": linear("int8_groups", 16, INT8, 32),
    "fp8 decode": linear("fp8", 1, CODES),
    "fp8 prefill": linear("fp8", 4096, CODES),
    "fp8 without units": linear("fp8_upcast", 16, CODES),
    "fp8 without units prefill": linear("fp8_upcast", 4096, CODES),
    "int4 decode": linear("int4", 1, LINEAR | {"zeros_ptr": "u8"}),
    "int4 prefill": linear("int4", 4096, LINEAR),
    "int4 routed": linear("int4", 16, LINEAR | ROUTED),
    "int4 64 rows": linear("int4", 64, LINEAR),
    "int4 fp16": linear("int4", 16, LINEAR | {"x_ptr": "fp16", "out_ptr": "fp16"}),
    "int4 real zeros": linear("int4", 1, LINEAR | {"zeros_ptr": "fp32"}, 32),
    "int4 steps decode": linear("int4_steps", 1, STEPS, 16, 64),
    "int4 steps prefill": linear("int4_steps", 4096, STEPS, 32, 64),
    "int4 steps of 32": linear("int4_steps", 16, STEPS, 32, 64),
    "int4 steps routed": linear("int4_steps", 16, STEPS | ROUTED, 64, 64),
    "int8g decode": linear("int8g", 1, GROUPED, 32),
    "int8g of 16 with zeros": linear("int8g", 64, GROUPED | {"zeros_ptr": "fp32"}, 16),
    "int8g prefill": linear("int8g", 4096, GROUPED, 32),
    "fp8g decode": linear("fp8g", 1, LINEAR),
    "fp8g prefill": linear("fp8g", 4096, LINEAR),
    "fp8g routed": linear("fp8g", 16, LINEAR | ROUTED),
    "mxfp4 decode": linear("mxfp4", 1, LINEAR | {"table_ptr": "bf16"}, 32),
    "mxfp4 routed": linear("mxfp4", 16, LINEAR | {"table_ptr": "bf16"} | ROUTED, 32),
    "nf4 decode": linear("nf4", 1, LINEAR | {"table_ptr": "bf16"}),
    "plain routed": linear("plain", 16, BF16 | ROUTED),
    "plain routed prefill": linear("plain", 256, BF16 | ROUTED),
    "reduce": (matmul._reduce_kernel, LINEAR | {"partial_ptr": "fp32"}, REDUCE_SIZES, 4, 3),
    "reduce routed": (
        matmul._reduce_kernel, CODES | {"partial_ptr": "i32"} | ROUTED,
        REDUCE_SIZES | {"FORMAT": "int8"}, 4, 3,
    ),
    "place": (
        moe_triton._place_kernel,
        {"ids_ptr": "i64", "places_ptr": "i64", "tokens_ptr": "i32", "starts_ptr": "i32"},
        {"QUERIES": 64, "ROUTES": 128}, 4, 3,
    ),
    "sample": (
        sampling_triton._sample_kernel,
        {"logits_ptr": "fp32", "parameters_ptr": "fp64", "scratch_ptr": "fp32", "ids_ptr": "i64"},
        {"TILE": 2048, "TILES": 64, "FILTERED": True}, 16, 1,
    ),
    "norm": (rows._rms_norm_int8_kernel, NORM | QUANTIZED, SIZES | ADDED, 8, 3),
    "norm transformed": (
        rows._rms_norm_int8_kernel, NORM | QUANTIZED, SIZES | TRANSFORMED | ADDED, 8, 3,
    ),
    "act_mul": (
        rows._act_mul_int8_kernel, QUANTIZED | {"gate_up_ptr": "bf16"},
        {"DIM": 14336, "GROUP": 64, "HADAMARD": False, "GELU": False, "TILE": 16384}, 32, 3,
    ),
    "act_mul transformed": (
        rows._act_mul_int8_kernel, QUANTIZED | {"gate_up_ptr": "bf16"},
        {"DIM": 14336, "GROUP": 64, "HADAMARD": True, "GELU": True, "TILE": 16384}, 32, 3,
    ),
    "quantize": (
        rows._quantize_kernel, QUANTIZED | {"x_ptr": "bf16"}, SIZES | {"FP8": False}, 8, 3,
    ),
    "quantize rows": (
        rows._quantize_kernel, QUANTIZED | {"x_ptr": "bf16"},
        SIZES | {"GROUP": 0, "FP8": False}, 8, 3,
    ),
    "quantize transformed": (
        rows._quantize_kernel, QUANTIZED | {"x_ptr": "bf16"},
        SIZES | TRANSFORMED | {"FP8": False}, 8, 3,
    ),
    "quantize fp8": (
        rows._quantize_kernel, {"x_ptr": "bf16", "codes_ptr": "u8", "scales_ptr": "fp32"},
        SIZES | {"GROUP": 0, "FP8": True}, 8, 3,
    ),
    "neurons plain": (neurons._blocks_kernel, NEURONS, NEURON_SIZES | {"FORMAT": 0}, 4, 3),
    "neurons int8": (
        neurons._blocks_kernel, NEURONS | {"rows_ptr": "i8", "scales_ptr": "fp32"},
        NEURON_SIZES | {"FORMAT": 1}, 4, 3,
    ),
    "neurons int4": (
        neurons._blocks_kernel, NEURONS | {"rows_ptr": "u8"}, NEURON_SIZES | {"FORMAT": 2}, 4, 3,
    ),
    "neurons sum": (
        neurons._sum_kernel, NEURON_SUM,
        {"DIM": 2048, "TILE": neurons.TILE, "HAS_MORE": False, "HAS_SOME": True}, 4, 3,
    ),
    "neurons sum so far": (
        neurons._sum_kernel, NEURON_SUM,
        {"DIM": 2048, "TILE": neurons.TILE, "HAS_MORE": True, "HAS_SOME": False}, 4, 3,
    ),
}  # fmt: skip


AMPERE = {
    "int8 routed",
    "int8 groups routed",
    "fp8 without units",
    "int4 decode",
    "reduce",
    "quantize",
}
ON_REQUEST = ("prefill", "64 rows", "fp16", "int4 routed")  # they take seconds each


def chosen(everything: bool):
    for name, entry in KERNELS.items():
        for capability in SHARED_BYTES:
            fits = capability == 90 or entry[2].get("FORMAT") != "fp8"  # launched with FP8 units
            mine = (capability == 80) == (name in AMPERE) and not name.endswith(ON_REQUEST)
            if fits and (everything or mine):
                yield capability, name, entry


if __name__ == "__main__":
    for capability, name, entry in chosen("--all" in sys.argv):
        made = compile_for(capability, *entry)
        assert len(made.asm["cubin"]) > 0
        assert made.metadata.shared <= SHARED_BYTES[capability], (name, made.metadata.shared)
        print(f"sm_{capability} {name} shared {made.metadata.shared}")
