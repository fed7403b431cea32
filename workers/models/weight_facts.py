"""What the weights of a decoder take, for the log, metrics and whoever asks what is served.

Counts tensors; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.kernels.matmul import FLOAT_FORMATS, PackedLinear
from penstock.workers.models.layers import Mlp

if TYPE_CHECKING:
    from penstock.workers.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """`format`: that of most weights of the layers' linears; `bytes_of`: all weights, by format.

    The embedding counts once where the head reads the same memory, and twice where it was packed.
    """

    format: str
    bytes_of: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{num / 2**20:.1f} MiB {name}" for name, num in self.bytes_of.items())
        return f"{self.format} weights: {self.num_bytes / 2**20:.1f} MiB ({parts})"


def weight_facts(decoder: Decoder) -> WeightFacts:
    """Count the weights of `decoder`, as they lie in memory."""
    total, linears = Counter[str](), Counter[str]()
    for packed in _linears(decoder):
        total[packed.format] += packed.num_bytes
        linears[packed.format] += packed.in_features * packed.out_features
    format, _ = linears.most_common(1)[0]
    for tensor in _tensors(decoder):
        total[FLOAT_FORMATS[tensor.dtype]] += tensor.numel() * tensor.element_size()
    if decoder.lm_head.payload is not decoder.embedding:
        total[decoder.lm_head.format] += decoder.lm_head.num_bytes
    return WeightFacts(format, dict(total.most_common()))


def _linears(decoder: Decoder) -> Iterator[PackedLinear]:
    for layer in decoder.layers:
        yield from (layer.attention.qkv, layer.attention.o)
        if isinstance(layer.mlp, Mlp):
            yield from (layer.mlp.gate_up, layer.mlp.down)
            continue
        yield layer.mlp.router
        if isinstance(layer.mlp.experts, Sequence):
            for pair in layer.mlp.experts:
                yield from pair
        if layer.mlp.shared is not None:
            yield from (layer.mlp.shared.gate_up, layer.mlp.shared.down)

    if decoder.routed is not None:  # of experts, what is on the device
        for slot in decoder.routed.cache.table:
            yield from slot.expert


def _tensors(decoder: Decoder) -> Iterator[Tensor]:
    yield from (decoder.embedding, decoder.final_norm)
    for layer in decoder.layers:
        yield from (layer.input_norm, layer.post_attention_norm)
        yield from layer.attention.qk_norms or ()
    for packed in _linears(decoder):
        if packed.bias is not None:
            yield packed.bias
