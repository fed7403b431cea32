"""The packed linears of a model, from tensors that are fused, cut for a rank, and put in order."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from penstock.kernels.matmul import pack_linear
from penstock.kernels.quant import QuantizedWeight
from penstock.kernels.types import PackedLinear
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.shard import Shard, Span, cut
from penstock.workers.packed.parts import PackedParts
from penstock.workers.quantization import QuantizedFormat, WeightPlan
from penstock.workers.weights.joined import joined, selected
from penstock.workers.weights.sources import DTYPES, WeightSource, planned
from penstock.workers.weights.turned import rows_in_halves

Weight = Tensor | QuantizedWeight  # [out, in]


class Linears:
    """Takes weights from a source, and packs them as `plan` says.

    `shard`: what one rank of a group has of the model; None: all of it. `in_part`: modules of
    which the source has only that. `parts`: has those that need not be packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        plan: WeightPlan,
        shard: Shard | None,
        in_part: frozenset[str],
        parts: PackedParts,
    ):
        self.parts = parts
        self.config, self.source, self.plan = config, source, plan
        self.shard, self.in_part = shard, in_part
        self.turns_neighbours = FAMILIES[config.architecture].adjacent_pairs
        self.dtype = DTYPES[config.dtype]

    def fused(
        self,
        parts: dict[str, int],
        in_features: int,
        format: QuantizedFormat | None,
        bias: bool = False,
        stored_as: str | None = None,
        order: Tensor | None = None,
    ) -> PackedLinear:
        """Linears over the same input as one packed matrix. `parts`: name -> out features.

        `stored_as`: the name under which all of them may be stored, one after the other. `order`:
        of all their outputs, as they are stored."""
        return self.parts.linear(
            "+".join(parts),
            lambda: self._fused(parts, in_features, format, bias, stored_as, order),
        )

    def _fused(
        self,
        parts: dict[str, int],
        in_features: int,
        format: QuantizedFormat | None,
        bias: bool,
        stored_as: str | None,
        order: Tensor | None,
    ) -> PackedLinear:
        stored = parts
        if stored_as is not None and self.source.has_linear(stored_as):
            stored = {stored_as: sum(parts.values())}
        take = self.source.take
        weights = [self.stored(name, size, in_features) for name, size in stored.items()]
        biases = [take(f"{name}.bias", size) for name, size in stored.items()] if bias else []
        if self.shard is not None or self.turns_neighbours:
            rows = [self._rows(name, size) for name, size in parts.items()]
            if len(stored) < len(parts):
                starts = accumulate(parts.values(), initial=0)
                rows = [torch.cat([each + start for each, start in zip(rows, starts)])]
            weights = [
                self._chosen(name, weight, each)
                for name, weight, each in zip(stored, weights, rows, strict=True)
            ]
            biases = [each_bias[each] for each_bias, each in zip(biases, rows)]
        weight, all_biases = joined(weights), torch.cat(biases) if bias else None
        if order is not None:
            order = order.to(self.source.device)
            weight = selected(weight, order)
            all_biases = None if all_biases is None else all_biases[order]
        return self.packed(weight, all_biases, format)

    def packed_head(self, module: str, weight: Weight) -> PackedLinear:
        """Of what `stored` returned for `module`, or of the embedding."""
        shard = self.shard
        if shard is not None and shard.num_ranks > 1 and module not in self.in_part:
            weight = cut(weight, shard.vocab)
        return self.packed(weight, None, self.plan.head)

    def stored(self, module: str, size: int, in_features: int) -> Weight:
        """A weight as the source has it: [size, in_features], or this rank's rows of it."""
        span = self._part(module)
        return self.source.take_linear(module, size if span is None else span.size, in_features)

    def _part(self, module: str) -> Span | None:
        """The rows that the source has of a weight; None: all."""
        if self.shard is None or module not in self.in_part:
            return None
        return self.shard.rows_of(module)

    def _chosen(self, module: str, weight: Weight, rows: Tensor) -> Weight:
        """These of all stored rows, of what the source has of them."""
        span = self._part(module)
        if span is None:
            return selected(weight, rows)
        return selected(weight, rows - span.first) if self.turns_neighbours else weight

    def _rows(self, module: str, size: int) -> Tensor:
        """Which of the stored outputs of a linear are computed here, in which order."""
        rows = torch.arange(size, device=self.source.device)
        if self.turns_neighbours and module.endswith((".q_proj", ".k_proj")):
            rows = rows_in_halves(rows, self.config.head_dim, self.config.rotary_dim)
        span = None if self.shard is None else self.shard.rows_of(module)
        return rows if span is None else rows[span.first : span.end]

    def packed(
        self, weight: Weight, bias: Tensor | None, format: QuantizedFormat | None
    ) -> PackedLinear:
        """Quantised in `format` unless it already is; None: in the model's dtype."""
        plan = self.plan
        weight = planned(weight, format, self.dtype, plan.int8_group, plan.int4)
        return pack_linear(weight, bias)
