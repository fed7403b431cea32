"""Reads an adapter as peft saves it: adapter_config.json and adapter_model.safetensors.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1; the scale
with `use_rslora`: Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"
(2023). Pickle files are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.model_config import read_json
from penstock.workers.weights.checkpoint import StoredTensor, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
_MERGE = "merge the adapter into its base model, and serve the result"
# Fields of adapter_config.json whose value, if it is not one of these, changes the computation.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    # The other ways to begin change the base model's weights, too.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """`y += scale * B (A x)`: `a` [rank, in], `b` [out, rank], in the dtype of the file."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What a folder holds. `pairs`: by the name of the linear, as model.layers.0.mlp.up_proj.

    `digest`: 16 bytes; two adapters of one digest are the same.
    """

    folder: Path
    pairs: Mapping[str, LowRankPair]
    digest: bytes

    @property
    def rank(self) -> int:
        """The highest of its ranks."""
        return max(pair.rank for pair in self.pairs.values())


def read_adapter(folder: Path) -> AdapterFile:
    """The adapter in `folder`. Raises LoadError naming the file, the field and the remedy."""
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    if not config_file.is_file():
        raise LoadError(f"{folder} is no LoRA adapter: it has no {CONFIG}, which peft writes")
    if not weights_file.is_file():
        raise LoadError(
            f"{folder} holds no {WEIGHTS}; pickled weights are never opened: save the adapter with "
            "peft's save_pretrained, which writes safetensors"
        )
    try:
        config = read_json(config_file)
    except ConfigError as error:
        raise LoadError(str(error)) from error
    _check_config(config_file, config)
    tensors = read_header(weights_file)
    pairs = _pairs(config_file, config, tensors)
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].read_bytes().numpy().data)
    return AdapterFile(folder, pairs, digest.digest())


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") not in (None, "LORA"):
        raise LoadError(f"{file}: peft_type {config['peft_type']!r} is not served; LORA is")
    for field, plain in _PLAIN.items():
        if config.get(field) not in plain:
            given = json.dumps(config[field])[:100]
            raise LoadError(f"{file}: {field} {given} is not supported: {_MERGE}")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise LoadError(f"{file}: {name} must be a positive number; got {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise LoadError(f"{file}: {name} must be an object of numbers by module")


def _pairs(
    file: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, LowRankPair]:
    """Both matrices of each linear; those in the file count, since peft saves all that it adapts
    (target_modules and layers_to_transform say how they were chosen)."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or not name.startswith(_PREFIX):
            raise LoadError(
                f"{stored.file}: tensor {name!r} is no lora_A or lora_B of a linear layer, and is "
                f"not supported: {_MERGE}"
            )
        module = match["module"].removeprefix(_PREFIX)
        halves.setdefault(module, {})[match["which"]] = stored
    if not halves:
        raise LoadError(f"{file.parent / WEIGHTS} holds no tensors: the adapter changes nothing")
    return {name: _pair(file, config, name, each) for name, each in sorted(halves.items())}


def _pair(
    file: Path, config: Mapping[str, Any], module: str, halves: Mapping[str, StoredTensor]
) -> LowRankPair:
    if len(halves) < 2:
        missing = "B" if "A" in halves else "A"
        raise LoadError(f"{file.parent / WEIGHTS}: {module} has no lora_{missing}: save it again")
    a, b = halves["A"], halves["B"]
    rank = int(_of(config.get("rank_pattern"), module, config["r"]))
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise LoadError(
            f"{a.file}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {module} are not of "
            f"rank {rank}, as r and rank_pattern of {CONFIG} say: they belong to another adapter"
        )
    alpha = float(_of(config.get("alpha_pattern"), module, config["lora_alpha"]))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRankPair(a.read(), b.read(), scale)


def _of(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The first entry of `pattern` that is the end of the module's name, as peft matches it."""
    for key, value in (pattern or {}).items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise LoadError(f"{CONFIG}: {key!r} is no regular expression: {error}") from None
    return default
