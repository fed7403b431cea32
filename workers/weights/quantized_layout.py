"""The stored layout of quantised weights: tensors, shapes and `quantization_config`.

The reverse of stored.py, for `penstock quantize`: compressed-tensors' layouts for int8 and fp8,
bitsandbytes' for nf4, so that other engines can read the result; int4_layout.py has int4's. Shapes
are computed before any weight is read, because a safetensors file begins with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.quant import (
    HADAMARD_BLOCK,
    NF4_GROUP,
    NF4_VALUES,
    pack_nibbles,
    quantize_weight,
    unpack_nibbles,
)
from penstock.workers.quantization import QuantizedFormat
from penstock.workers.weights.stored import BNB_STATE

HEADER_ALIGN = 8
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


def file_header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The beginning of a safetensors file whose data are these tensors, name, dtype and shape, one
    after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> Any:
    """Of a tensor on the CPU, as a file has them: a buffer of uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def parts_of(format: QuantizedFormat, num_rows: int, width: int, dtype: str) -> list[StoredPart]:
    """The stored tensors of a weight [num_rows, width] in a format other than int4; `dtype`: of
    activations, in config.json's spelling."""
    if format in ("int8", "fp8"):
        codes = torch.int8 if format == "int8" else torch.float8_e4m3fn
        return [
            StoredPart("weight", codes, (num_rows, width)),
            StoredPart("weight_scale", torch.float32, (num_rows, 1)),
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
    quantized = quantize_weight(weight, format)
    return [quantized.codes, quantized.scales[:, None]]


def quantization_config(format: QuantizedFormat, ignore: Sequence[str], dtype: str) -> Any:
    """The `quantization_config` for config.json; of int4, `int4_layout.stated_config`. `ignore`:
    linear modules that are not quantised."""
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
    weights = {"num_bits": 8, "type": "float" if format == "fp8" else "int", "symmetric": True,
               "dynamic": False, "strategy": "channel", "group_size": None}  # fmt: skip
    activations = {**weights, "dynamic": True, "strategy": "token"}
    del activations["group_size"]
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": {"int8": "int-quantized", "fp8": "float-quantized"}[format],
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def transform_config(ignore: Sequence[str]) -> dict[str, Any]:
    """The `transform_config` of linear layers whose stored weights are Hadamard transforms, and
    whose activations are transformed before they are rounded; not of `ignore`."""
    both = [
        {"targets": ["Linear"], "location": place, "inverse": inverse, "ignore": list(ignore)}
        for place, inverse in (("input", False), ("weight_input", True))
    ]
    scheme = {"type": "hadamard", "head_dim": HADAMARD_BLOCK, "randomize": False, "apply": both}
    return {"config_groups": {"input": scheme}}


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
