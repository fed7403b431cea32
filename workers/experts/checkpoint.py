"""The routed experts of one checkpoint: their tensors' names and shapes, and their identity."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.moe.rows import neuron_rows
from penstock.workers.errors import ConfigError
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.quantization import (
    INT4,
    QUANTIZED_FORMATS,
    Int4Options,
)
from penstock.workers.weights.checkpoint import FLOAT_DTYPES, StoredTensor, find_tensor, part_of
from penstock.workers.weights.sources import DTYPES
from penstock.workers.weights.stored import has_fused_experts, stored_blocks

NAMES = {dtype: name for name, dtype in DTYPES.items()}

Parts = tuple[StoredTensor, StoredTensor, StoredTensor]


@dataclass(frozen=True, slots=True)
class CheckpointExperts:
    """The routed experts of one checkpoint, per expert or fused, in Mixtral's or Qwen's names.

    `weights` is the number format that they are served in, on a `device` of that type. Raises
    ConfigError for a model that has none.
    """

    folder: Path
    config: ModelConfig
    tensors: dict[str, StoredTensor]
    weights: str = "auto"
    device: str = "cpu"
    int4: Int4Options = INT4  # how weights in int4 are made and multiplied

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(
                "expert_cache_gb is for mixture-of-experts models, and this one is dense; leave it "
                "out"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(i for i, routed in enumerate(self.config.moe_layers) if routed)

    @property
    def is_packed(self) -> bool:
        """Whether the expert file holds codes and scales as the device multiplies them, instead of
        neurons: true for experts that are served quantised or stored quantised, or have biases."""
        is_coded = self.weights in QUANTIZED_FORMATS or self.config.stored_scheme is not None
        return is_coded or self.config.expert_bias

    def is_fused(self, layer: int) -> bool:
        """Whether all experts of a layer are one tensor."""
        return has_fused_experts(self.tensors.__contains__, self._fused(layer)[0])

    def parts(self, layer: int, expert: int) -> Parts:
        """gate and up [inner, hidden], down [hidden, inner], of plain weights. Raises LoadError."""
        count, (gate_up, down) = self.config.num_experts, self._fused(layer)
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        if self.is_fused(layer):
            both = part_of(self._find(gate_up, count, 2 * inner, hidden), expert)
            gate, up = (replace(part_of(_halved(both), half), name=both.name) for half in (0, 1))
            return gate, up, part_of(self._find(down, count, hidden, inner), expert)
        one, other, last = (
            self._find(f"{module}.weight", *shape)
            for module, shape in self.modules(layer, expert).items()
        )
        return one, other, last

    def modules(self, layer: int, expert: int) -> dict[str, tuple[int, int]]:
        """Names and shapes of gate, up and down, in that order, where each is a module."""
        hidden, inner = self.config.hidden_size, self.config.moe_intermediate_size
        names = FAMILIES[self.config.architecture].names.expert
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        name = f"{self.block(layer)}.experts.{expert}"
        return {f"{name}.{part}": shape for part, shape in zip(names, shapes)}

    def blocks(self, layer: int) -> tuple[str | None, ...]:
        """The types of blocks in which a GGUF file has gate, up and down of `layer`; elsewhere
        None for each."""

        def of(module: str) -> str | None:
            return stored_blocks(lambda mark: f"{module}.{mark}" in self.tensors)

        return tuple(map(of, self.modules(layer, 0)))

    def names(self) -> set[str]:
        """All tensors that belong to routed experts."""
        prefixes = tuple(
            prefix
            for layer in self.layers
            for prefix in (f"{self.block(layer)}.experts.", *self._fused(layer))
        )
        return {name for name in self.tensors if name.startswith(prefixes)} if prefixes else set()

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """The dtype of the expert file: as stored, or the model's if that is narrower. For packed
        experts, the model's."""
        if self.is_packed:
            return compute
        first = self.parts(self.layers[0], 0)
        stored = [FLOAT_DTYPES.get(part.dtype, torch.float32) for part in first]
        widest = max(stored, key=lambda dtype: dtype.itemsize)
        narrow = widest if widest.itemsize <= compute.itemsize and widest in NAMES else compute
        return narrow if narrow in NAMES else torch.float32

    def identity(self, compute: torch.dtype, copies: str = "") -> str:
        """The digest that identifies an expert file of these experts: changes with the files."""
        files = {stored.file for stored in self.tensors.values()}
        facts: dict[str, Any] = {"dtype": NAMES[self.dtype(compute)], "copies": copies}
        if self.is_packed:
            facts |= {"weights": self.weights, "device": self.device, "int4": astuple(self.int4)}
        return checkpoint_identity({str(f): f.stat() for f in files}, facts)

    def routers(self) -> str:
        """A digest of the routers' weights: it identifies the model whatever folder it lies in."""
        hashed = hashlib.blake2b(digest_size=16)
        count, hidden = self.config.num_experts, self.config.hidden_size
        for layer in self.layers:
            names = FAMILIES[self.config.architecture].names
            name = f"{self.block(layer)}.{names.router}.weight"
            router = self._find(name, count, hidden).read()
            hashed.update(router.view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    def block(self, layer: int) -> str:
        """The name of a layer's routed block."""
        names = FAMILIES[self.config.architecture].names
        return names.moe_block(layer, self.tensors.__contains__)

    def _fused(self, layer: int) -> tuple[str, str]:
        """Names of the tensors of all experts, if they are in one."""
        gate_up, down = FAMILIES[self.config.architecture].names.fused_experts
        return f"{self.block(layer)}.{gate_up}", f"{self.block(layer)}.{down}"

    def _find(self, name: str, *shape: int) -> StoredTensor:
        return find_tensor(self.tensors, self.folder, name, shape)


def _halved(stored: StoredTensor) -> StoredTensor:
    return replace(stored, shape=(2, stored.shape[0] // 2, *stored.shape[1:]))


def rows_of(parts: Parts, dtype: torch.dtype) -> Tensor:
    """The neuron rows of one expert, read from the checkpoint: [inner, 3 * hidden]."""
    gate, up, down = (part.read().to(dtype) for part in parts)
    return neuron_rows(gate, up, down)


def checkpoint_identity(files: Mapping[str, os.stat_result], facts: Mapping[str, Any]) -> str:
    """A digest of a checkpoint's files and of the `facts` that decide what is made of them.

    Uses names, sizes and modification times: hashing the contents would take as long as loading.
    """
    parts = [(name, s.st_size, s.st_mtime_ns) for name, s in sorted(files.items())]
    text = json.dumps([parts, sorted(facts.items())])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
