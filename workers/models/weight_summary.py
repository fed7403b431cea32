"""The bytes of a decoder's weights by format, for the log, metrics and the models endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.types import FLOAT_FORMATS, PackedLinear
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.layers import Mlp
from penstock.workers.models.moe import MoeMlp


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """`format`: of most weights in linear layers; `bytes_of`: bytes of all weights, by format.

    The embedding counts once if the head reads the same memory, twice if the head is a packed copy.
    """

    format: str
    bytes_of: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{num / 2**20:.1f} MiB {name}" for name, num in self.bytes_of.items())
        return f"{self.format} weights: {self.num_bytes / 2**20:.1f} MiB ({parts})"


def weight_facts(
    layers: Sequence[DecoderLayer],
    embedding: Tensor,
    final_norm: Tensor | None,
    lm_head: PackedLinear | None,
    cached_experts: Sequence[PackedLinear] = (),
) -> WeightFacts:
    """Count the weights of a decoder as they lie in memory.

    `cached_experts`: the slots of the expert cache, if there is one.
    """
    all_linears = [*linears_of(layers), *cached_experts]
    total, linears = Counter[str](), Counter[str]()
    for packed in all_linears:
        total[packed.format] += packed.num_bytes
        linears[packed.format] += packed.in_features * packed.out_features
    format, _ = linears.most_common(1)[0]
    norms = () if final_norm is None else (final_norm,)
    for tensor in (embedding, *norms, *_tensors(layers, all_linears)):
        total[FLOAT_FORMATS[tensor.dtype]] += tensor.numel() * tensor.element_size()
    if lm_head is not None:
        payload = getattr(lm_head.payload, "codes", lm_head.payload)  # on a GPU, in a record
        total[lm_head.format] += lm_head.num_bytes * (embedding is not payload)
    return WeightFacts(format, dict(total.most_common()))


def linears_of(layers: Sequence[DecoderLayer]) -> Iterator[PackedLinear]:
    """All packed linears of `layers`, but experts that a cache holds."""
    for layer in layers:
        yield from layer.mixer.linears
        if isinstance(layer.mlp, Mlp):
            yield from (layer.mlp.gate_up, layer.mlp.down)
            continue
        yield layer.mlp.router
        for pair in layer.mlp.held:
            yield from pair
        if layer.mlp.shared is not None:
            yield from (layer.mlp.shared.gate_up, layer.mlp.shared.down)


def _tensors(layers: Sequence[DecoderLayer], linears: Sequence[PackedLinear]) -> Iterator[Tensor]:
    for layer in layers:
        yield from layer.norms
        yield from layer.mixer.tensors
        if isinstance(layer.mlp, MoeMlp) and layer.mlp.choice_bias is not None:
            yield layer.mlp.choice_bias
    for packed in linears:
        if packed.bias is not None:
            yield packed.bias
