"""The stored layout of quantised weights: tensors, shapes and `quantization_config`.

The reverse of stored.py, for `penstock quantize`: compressed-tensors' layouts for int8, int4 and
fp8, bitsandbytes' for nf4, so that other engines can read the result. Shapes are computed before
any weight is read, because a safetensors file begins with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.quant import (
    INT4_GROUP,
    NF4_GROUP,
    NF4_VALUES,
    pack_nibbles,
    quantize_weight,
    unpack_nibbles,
)
from penstock.workers.quantization import QuantizedFormat
from penstock.workers.weights.stored import BNB_STATE, pack_int32

DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8",
    torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor that will be written."""

    name: str  # appended to the module's
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def group_of(width: int) -> int | None:
    """The int4 group size for rows of `width`, which other engines require to divide it; None if
    there is none."""
    if width <= INT4_GROUP:
        return width
    return next((group for group in (INT4_GROUP, 64, 32) if width % group == 0), None)


def parts_of(format: QuantizedFormat, num_rows: int, width: int, dtype: str) -> list[StoredPart]:
    """The stored tensors of a weight [num_rows, width]; `dtype`: of activations, in config.json's
    spelling."""
    if format in ("int8", "fp8"):
        codes = torch.int8 if format == "int8" else torch.float8_e4m3fn
        return [
            StoredPart("weight", codes, (num_rows, width)),
            StoredPart("weight_scale", torch.float32, (num_rows, 1)),
        ]
    if format == "int4":
        return [
            StoredPart("weight_packed", torch.int32, (num_rows, -(-width // 8))),
            StoredPart("weight_scale", torch.float32, (num_rows, width // _group_or_fail(width))),
            StoredPart("weight_shape", torch.int64, (2,)),
        ]
    size = num_rows * width
    return [
        StoredPart("weight", torch.uint8, (-(-size // 2), 1)),
        StoredPart("weight.absmax", torch.float32, (-(-size // NF4_GROUP),)),
        StoredPart("weight.quant_map", torch.float32, (16,)),
        StoredPart(BNB_STATE, torch.uint8, (len(_bnb_state(num_rows, width, dtype)),)),
    ]


def tensors_of(weight: Tensor, format: QuantizedFormat, dtype: str) -> list[Tensor]:
    """The tensors of `weight` [N, K], in the order and shapes of `parts_of`."""
    if format == "nf4":
        return _bitsandbytes(weight, dtype)
    group = _group_or_fail(weight.shape[1]) if format == "int4" else INT4_GROUP
    quantized = quantize_weight(weight, format, group, symmetric=True)
    if format in ("int8", "fp8"):
        return [quantized.codes, quantized.scales[:, None]]
    nibbles = unpack_nibbles(quantized.codes)[:, : weight.shape[1]]
    return [pack_int32(nibbles), quantized.scales, torch.tensor(weight.shape)]


def quantization_config(
    format: QuantizedFormat, ignore: Sequence[str], dtype: str, groups: Mapping[int, Sequence[str]]
) -> Any:
    """The `quantization_config` for config.json. `ignore`: linear modules that are not quantised;
    `groups`: by size, modules whose int4 group size is not 128."""
    if format == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": dtype,
            "llm_int8_skip_modules": list(ignore),
        }
    bits = 4 if format == "int4" else 8
    kind = "float" if format == "fp8" else "int"
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False,
               "strategy": "group" if format == "int4" else "channel",
               "group_size": INT4_GROUP if format == "int4" else None}  # fmt: skip
    activations = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": True,
                   "strategy": "token"}  # fmt: skip
    names = {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}
    schemes = {
        "group_0": {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None if format == "int4" else activations,
            "output_activations": None,
        }
    }
    for i, (group, modules) in enumerate(sorted(groups.items()), start=1):
        schemes[f"group_{i}"] = {
            **schemes["group_0"],
            "targets": list(modules),
            "weights": {**weights, "group_size": group},
        }
    return {
        "quant_method": "compressed-tensors",
        "format": names[format],
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group_or_fail(width: int) -> int:
    group = group_of(width)
    assert group is not None, width
    return group


def _bitsandbytes(weight: Tensor, dtype: str) -> list[Tensor]:
    """Blocks of the flat weight, which cross the ends of rows; high nibble first."""
    flat = quantize_weight(weight.reshape(1, -1), "nf4")
    nibbles = unpack_nibbles(flat.codes).view(-1, 2).flip(1).reshape(1, -1)
    num_rows, width = weight.shape
    state = _bnb_state(num_rows, width, dtype)
    return [
        pack_nibbles(nibbles, fill=0).view(-1, 1),
        flat.scales[0],
        torch.tensor(NF4_VALUES),
        torch.tensor(list(state), dtype=torch.uint8),
    ]


def _bnb_state(num_rows: int, width: int, dtype: str) -> bytes:
    state = {
        "quant_type": "nf4",
        "blocksize": NF4_GROUP,
        "dtype": dtype,
        "shape": [num_rows, width],
    }
    return json.dumps(state).encode()
