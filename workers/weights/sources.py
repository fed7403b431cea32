"""Sources of a decoder's weights, one tensor at a time: a checkpoint, or random numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cpu.int4_search import search_int4
from penstock.kernels.quant import (
    INT8_GROUP,
    MXFP4_GROUP,
    QuantizedWeight,
    WeightFormat,
    dequantize_weight,
    for_plain_rows,
    quantize_weight,
)
from penstock.kernels.rowwise import hadamard
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.model_config import ModelConfig
from penstock.workers.quantization import (
    INT4,
    Int4Options,
    StoredScheme,
)
from penstock.workers.weights.checkpoint import StoredTensor, find_tensor, part_of
from penstock.workers.weights.joined import moved
from penstock.workers.weights.steps import in_steps
from penstock.workers.weights.stored import (
    is_stored_quantized,
    mxfp4_weight,
    read_weight,
    stored_blocks,
)

log = logging.getLogger("penstock.loader")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Written by older versions of transformers; computed, not learned.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def planned(
    weight: Tensor | QuantizedWeight,
    format: WeightFormat | None,
    dtype: torch.dtype,
    int8_group: int | None = INT8_GROUP,
    int4: Int4Options = INT4,
) -> Tensor | QuantizedWeight:
    """A weight as it will be packed: quantised in `format` unless it already is quantised; in the
    model's `dtype` if `format` is None. `int8_group`: the activations of int8 weights that share a
    scale; None: a whole row. Weights whose activations are rounded to int8 are transformed."""
    is_stored = isinstance(weight, QuantizedWeight)
    if isinstance(weight, Tensor):
        if format is None:
            return weight.to(dtype)
        takes_int8 = format == "int8" or (format == "int4" and int4.activations != "plain")
        weight = quantize_weight(
            weight,
            format,
            int4.group,
            hadamard=hadamard if takes_int8 else None,
            search=search_int4,
        )
    is_exact = is_stored and weight.steps is None  # of a file that rounds no activations
    if weight.format == "int4" and (
        int4.activations == "plain" or (is_exact and int4.activations == "auto")
    ):
        if weight.hadamard:
            raise ConfigError(
                "int4_activations is plain, but the weights of this checkpoint are transformed for "
                "activations in int8: leave it at auto"
            )
        return for_plain_rows(weight)
    return replace(weight, group=int8_group) if weight.format == "int8" else weight


class WeightSource(Protocol):
    """A source of a decoder's weights, taken one at a time."""

    @property
    def device(self) -> str: ...

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name` of `shape` on the model's device, in `dtype` or else the model's."""

    def has_linear(self, module: str) -> bool:
        """Whether `module` has a weight, quantised or not."""

    def take_linear(self, module: str, *shape: int) -> Tensor | QuantizedWeight:
        """The weight of `module`, [out, in]: as stored, on the device, not cast."""

    def take_expert(
        self, name: str, expert: int, count: int, shape: tuple[int, int], *, transposed: bool
    ) -> Tensor | QuantizedWeight:
        """The matrix `shape` of one of `count` experts, of which `name` is all; in a `transposed`
        tensor it lies the other way. As stored, on the device, not cast."""


class CheckpointWeights:
    """Tensors of a checkpoint, checked against the expected shape and cast as they are taken."""

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, StoredTensor],
        dtype: str,
        device: str,
        on_bytes: Callable[[int], object],
        *,
        scheme: StoredScheme | None = None,
        dequantize: bool = False,
    ):
        self.folder = folder
        self.scheme = scheme
        self.dequantize = dequantize
        self.tensors = tensors
        self.dtype = DTYPES[dtype]
        self.device = device
        self._on_bytes = on_bytes
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._take(name, shape).to(device=self.device, dtype=dtype or self.dtype)

    def has_linear(self, module: str) -> bool:
        return f"{module}.weight" in self or self._is_quantized(module)

    def take_linear(self, module: str, *shape: int) -> Tensor | QuantizedWeight:
        if self.scheme is None or not self._is_quantized(module):
            return self._take(f"{module}.weight", shape).to(device=self.device)
        assert len(shape) == 2
        blocks = stored_blocks(lambda name: f"{module}.{name}" in self.tensors)
        if self.dequantize and blocks is not None:  # as the format defines them, to the last bit
            return self._take(f"{module}.{blocks}", shape).to(device=self.device)
        try:
            weight = read_weight(
                lambda name: f"{module}.{name}" in self.tensors,
                lambda name: self._take(f"{module}.{name}", None, codes=True),
                self.scheme,
                shape,
            )
            group = self.scheme.step_group
            if group is not None and module not in self.scheme.int8_modules:
                weight = in_steps(weight, group)
            weight = replace(weight, hadamard=self.scheme.is_transformed(module))
        except LoadError as error:
            raise LoadError(f"{self.folder}: the weight of {module!r}: {error}") from error
        weight = moved(weight, self.device)
        return dequantize_weight(weight) if self.dequantize else weight

    def take_expert(
        self, name: str, expert: int, count: int, shape: tuple[int, int], *, transposed: bool
    ) -> Tensor | QuantizedWeight:
        if f"{name}_blocks" in self.tensors:
            num_rows, width = shape
            blocks, scales = f"{name}_blocks", f"{name}_scales"
            weight = mxfp4_weight(
                self._nth(
                    blocks, expert, (count, num_rows, width // MXFP4_GROUP, MXFP4_GROUP // 2)
                ),
                self._nth(scales, expert, (count, num_rows, width // MXFP4_GROUP)),
            )
            weight = moved(weight, self.device)
            return dequantize_weight(weight) if self.dequantize else weight
        stored = self._nth(name, expert, (count, *(shape[::-1] if transposed else shape)))
        return (stored.T if transposed else stored).to(device=self.device)

    def _nth(self, name: str, index: int, shape: tuple[int, ...]) -> Tensor:
        """Part `index` of a tensor along its first dimension; no more than that is read."""
        stored = find_tensor(self.tensors, self.folder, name, shape)
        self._count(name, stored.num_bytes)
        return part_of(stored, index).read(codes=True)

    def _is_quantized(self, module: str) -> bool:
        return self.scheme is not None and is_stored_quantized(
            lambda name: name in self.tensors, self.scheme, module
        )

    def _take(self, name: str, shape: tuple[int, ...] | None, *, codes: bool = False) -> Tensor:
        stored = find_tensor(self.tensors, self.folder, name, shape)
        tensor = stored.read(codes=codes)
        self._count(name, stored.num_bytes)
        return tensor

    def _count(self, name: str, num_bytes: int) -> None:
        if name not in self._taken:
            self._taken.add(name)
            self._on_bytes(num_bytes)

    def warn_of_unused(self, elsewhere: set[str]) -> None:
        """Log tensors that were taken neither here nor `elsewhere`, except IGNORED_SUFFIXES."""
        unused = [n for n in self.tensors if n not in self._taken and n not in elsewhere]
        unused = [n for n in unused if not n.endswith(IGNORED_SUFFIXES)]
        if unused:
            some = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
            log.warning("%s: %d unknown tensors are ignored: %s", self.folder, len(unused), some)


class RandomWeights:
    """Normal matrices, zero biases, unit norms. Each linear is a matrix of its own."""

    def __init__(self, config: ModelConfig, seed: int, device: str):
        self.tied = config.tie_word_embeddings
        self.dtype = DTYPES[config.dtype]
        self.device = device
        self.norm = 1.0 - config.norm_offset
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        fused = name.endswith(("qkv_proj.weight", "gate_up_proj.weight"))
        is_other = "block_sparse_moe" in name or fused
        return not is_other and not (self.tied and name == "lm_head.weight")

    def has_linear(self, module: str) -> bool:
        return f"{module}.weight" in self

    def take_linear(self, module: str, *shape: int) -> Tensor:
        return self.take(f"{module}.weight", *shape)

    def take_expert(
        self, name: str, expert: int, count: int, shape: tuple[int, int], *, transposed: bool
    ) -> Tensor:
        return self.take(name, *shape)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if len(shape) == 1:
            return tensor.fill_(0.0 if name.endswith(".bias") else self.norm)
        return tensor.normal_(0.0, 0.02, generator=self._generator)
