"""An adapter on the device: for each fused linear of a layer, one A and one B, packed.

Parts that share an input (q, k and v; gate and up) have their A one below the other, and their B on
a block diagonal, so that an adapter takes two products a fused linear. B holds the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.types import PackedLinear
from penstock.workers.adapters.peft import AdapterFile, LowRankPair
from penstock.workers.errors import LoadError
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.sources import DTYPES
from penstock.workers.weights.turned import rows_in_halves


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Of one fused linear. `a` [R, in], `b` [out, R]: R is the sum of its parts' ranks."""

    a: PackedLinear
    b: PackedLinear

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, in] -> what is added to the linear's output, [T, out]. A row's bits do not depend
        on T, as with any packed linear."""
        return linear(linear(x, self.a), self.b)


@dataclass(frozen=True, slots=True, eq=False)
class LayerAdapter:
    """Of one layer; None: that linear is as the base has it."""

    qkv: LowRank | None
    o: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What this process computes of a model: `layers`, by their numbers in the whole model, and of
    a linear of that name the `outputs`."""

    layers: range
    outputs: Callable[[str], slice]

    @classmethod
    def whole(cls, config: ModelConfig) -> AdapterPart:
        return cls(range(config.num_layers), lambda name: slice(None))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """One adapter that is ready to compute. `digest`: of its files; `layers`: those of this
    process; `num_bytes`: on its device.

    In a group, `number` is what its ranks call it, which no other one had, and `other_bytes` what
    it takes on each of the other ranks.
    """

    name: str
    digest: bytes
    layers: Sequence[LayerAdapter]
    rank: int
    num_bytes: int
    number: int = 0
    other_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Fused:
    """One fused linear: its inputs, and its parts in order, with the name that stores all at
    once."""

    inputs: int
    parts: Mapping[str, int]  # name of the linear -> out features
    stored_as: str | None = None


def fused_linears(config: ModelConfig, layer: int) -> dict[str, _Fused]:
    """Those of a layer that adapters can change, by the field of LayerAdapter."""
    names, hidden = FAMILIES[config.architecture].names, config.hidden_size
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    found = {
        "qkv": _Fused(
            hidden,
            {f"{attention}.{name}": size for name, size in qkv.items()},
            names.qkv and f"{attention}.{names.qkv}",
        ),
        "o": _Fused(heads, {f"{attention}.o_proj": hidden}),
    }
    if not config.moe_layers[layer]:
        inner = config.intermediate_size
        found["gate_up"] = _Fused(
            hidden,
            {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner},
            names.gate_up and f"{mlp}.{names.gate_up}",
        )
        found["down"] = _Fused(inner, {f"{mlp}.down_proj": hidden})
    return found


def pack_adapter(
    name: str,
    file: AdapterFile,
    config: ModelConfig,
    device: torch.device,
    part: AdapterPart | None = None,
    number: int = 0,
) -> Adapter:
    """`file` for a model of `config`, the whole one's, in its dtype. `part`: what is kept of it;
    None: all. Raises LoadError naming what does not fit the model, wherever in it that is."""
    part = part or AdapterPart.whole(config)
    left = dict(file.pairs)
    layers, num_bytes = [], 0
    for layer in range(config.num_layers):
        packed: dict[str, LowRank | None] = dict.fromkeys(("qkv", "o", "gate_up", "down"))
        for field, fused in fused_linears(config, layer).items():
            found = _taken(left, fused, file)
            if found and layer in part.layers:
                a, b = _joined(found, fused)
                b = b[_outputs(fused, config, part)]
                a, b = (each.to(device, DTYPES[config.dtype]) for each in (a, b))
                packed[field] = LowRank(pack_linear(a), pack_linear(b))
                num_bytes += (a.numel() + b.numel()) * a.element_size()
        if layer in part.layers:
            layers.append(LayerAdapter(**packed))
    if left:
        raise LoadError(
            f"{file.folder}: {next(iter(left))} is no linear layer that an adapter can change here "
            "(those of attention, and of MLPs without routed experts): merge the adapter into its "
            "base model, or train it with target_modules that leave this one out"
        )
    return Adapter(name, file.digest, layers, file.rank, num_bytes, number)


def adapter_bytes(config: ModelConfig, rank: int, part: AdapterPart | None = None) -> int:
    """The most bytes that an adapter of `rank` takes on the device. `part`: as of pack_adapter."""
    part = part or AdapterPart.whole(config)
    elements = 0
    for layer in part.layers:
        for fused in fused_linears(config, layer).values():
            joined = rank * len(fused.parts)
            elements += joined * (fused.inputs + len(_outputs(fused, config, part)))
    return elements * DTYPES[config.dtype].itemsize


def _taken(
    left: dict[str, LowRankPair], fused: _Fused, file: AdapterFile
) -> dict[str, LowRankPair]:
    """The pairs of one fused linear, by name, removed from `left`. Raises LoadError."""
    sizes = dict(fused.parts)
    if fused.stored_as is not None:
        sizes[fused.stored_as] = sum(fused.parts.values())
    found = {}
    for name, size in sizes.items():
        pair = left.pop(name, None)
        if pair is None:
            continue
        if pair.a.shape[1] != fused.inputs or pair.b.shape[0] != size:
            raise LoadError(
                f"{file.folder}: {name} has lora_A {list(pair.a.shape)} and lora_B "
                f"{list(pair.b.shape)}, and this model has a linear of {fused.inputs} inputs and "
                f"{size} outputs there: the adapter was trained for another base model"
            )
        found[name] = pair
    return found


def _joined(found: Mapping[str, LowRankPair], fused: _Fused) -> tuple[Tensor, Tensor]:
    """A [R, in] and B [out, R] in fp32 of all parts, with the outputs in the file's order."""
    total = sum(fused.parts.values())
    b = torch.zeros(total, sum(pair.rank for pair in found.values()))
    starts, row = {fused.stored_as: 0}, 0
    for name, size in fused.parts.items():
        starts[name], row = row, row + size
    column = 0
    for name, pair in found.items():
        first = starts[name]
        rows = slice(first, first + pair.b.shape[0])
        b[rows, column : column + pair.rank] = pair.b.float() * pair.scale
        column += pair.rank
    return torch.cat([pair.a.float() for pair in found.values()]), b


def _outputs(fused: _Fused, config: ModelConfig, part: AdapterPart) -> Tensor:
    """The stored output that each output of this process's linear is."""
    is_turned = FAMILIES[config.architecture].adjacent_pairs
    parts, first = [], 0
    for name, size in fused.parts.items():
        rows = torch.arange(first, first + size)
        if is_turned and name.endswith((".q_proj", ".k_proj")):
            rows = rows_in_halves(rows, config.head_dim, config.rotary_dim)
        parts.append(rows[part.outputs(name)])
        first += size
    return torch.cat(parts)
