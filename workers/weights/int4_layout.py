"""How 4-bit weights lie in a file that Penstock writes: compressed-tensors' pack-quantized layout.

Groups of any size, integer zero points, scales of 16 bits, with and without calibration. Weights in
steps lie there as int8, of which 16 codes occur in a group; the config says so under STEPS_KEY, and
other engines read int8. quantized_layout.py has the other formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.workers.quantization import STEPS_KEY
from penstock.workers.weights.grids import Codes, Grid, GridSpec
from penstock.workers.weights.quantized_layout import StoredPart, parts_of, quantization_config
from penstock.workers.weights.stored import pack_int32

GROUP = 32  # inputs that share a scale, where nothing else is said
STEP_GROUP = 16  # and a step
ONE_GROUP = 128  # rows up to this width that no group size divides are one group


def spec_for(width: int, group: int, kind: Grid, dtype: str) -> GridSpec | None:
    """The grids of rows of `width`; None where no group size divides it, which other engines
    require (a last group in steps may be short). `dtype`: of activations, as config.json has it;
    scales of bf16 models are bf16, of others fp16."""
    if kind == "steps":
        return GridSpec(group, kind)
    scale = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    size = next((each for each in (group, 64, 32) if each <= group and width % each == 0), None)
    if size is None and width <= ONE_GROUP:
        size = width
    return None if size is None else GridSpec(size, kind, scale)


def parts_for(num_rows: int, width: int, spec: GridSpec) -> tuple[StoredPart, ...]:
    """The stored tensors of a 4-bit weight [num_rows, width]."""
    if spec.kind == "steps":
        return tuple(parts_of("int8", num_rows, width, ""))
    num_groups = spec.num_groups(width)
    parts = [
        StoredPart("weight_packed", torch.int32, (num_rows, -(-width // 8))),
        StoredPart("weight_scale", spec.scale_dtype, (num_rows, num_groups)),
        StoredPart("weight_shape", torch.int64, (2,)),
    ]
    if spec.kind == "zero-points":
        parts.append(StoredPart("weight_zero_point", torch.int32, (-(-num_rows // 8), num_groups)))
    return tuple(parts)


def stored_codes(codes: Codes) -> list[Tensor]:
    """The tensors of a weight, in the order of `parts_for`. Zero points are packed over rows."""
    if codes.codes.dtype == torch.int8:
        return [codes.codes, codes.scales]
    found = [pack_int32(codes.codes), codes.scales, torch.tensor(codes.codes.shape)]
    if codes.zeros is not None:
        found.append(pack_int32(codes.zeros.T.contiguous()).T.contiguous())
    return found


def stated_config(
    specs: Mapping[str, GridSpec], wide: Sequence[str], ignore: Sequence[str]
) -> dict[str, Any]:
    """What config.json says: under `quantization_config`, a config group for each kind of grid,
    with the names of its modules where there are several; of steps, what they are, too. `wide`:
    modules of 8 bits."""
    kinds = dict.fromkeys(specs.values())
    if any(spec.kind == "steps" for spec in kinds):
        (spec, *_) = kinds  # some may be transformed, and others not
        steps = {"group_size": spec.group, "int8_modules": list(wide)}
        return {"quantization_config": quantization_config("int8", ignore, ""), STEPS_KEY: steps}
    return {"quantization_config": _packed_config(specs, wide, ignore)}


def _packed_config(
    specs: Mapping[str, GridSpec], wide: Sequence[str], ignore: Sequence[str]
) -> dict[str, Any]:
    kinds = dict.fromkeys(specs.values())
    groups: list[dict[str, Any]] = []
    for spec in kinds:
        weights = {"num_bits": 4, "type": "int", "symmetric": spec.kind == "symmetric",
                   "dynamic": False, "strategy": "group", "group_size": spec.group}  # fmt: skip
        targets = ["Linear"]
        if wide or len(kinds) > 1:
            targets = [name for name, each in specs.items() if each == spec]
        groups.append(_scheme(targets, weights, None, "pack-quantized"))
    if wide:
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False,
                   "strategy": "channel", "group_size": None}  # fmt: skip
        inputs = {**weights, "dynamic": True, "strategy": "token"}
        groups.append(_scheme(list(wide), weights, inputs, "int-quantized"))
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if wide else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _scheme(
    targets: Sequence[str], weights: dict[str, Any], inputs: dict[str, Any] | None, format: str
) -> dict[str, Any]:
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": format,
    }
