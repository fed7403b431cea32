"""Builds linear attention: takes its weights, chooses those of a rank's heads, and puts their rows
in the order of the operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.delta_types import DeltaWeights
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.linear_attention import LinearAttention
from penstock.workers.models.linears import Linears
from penstock.workers.models.shards.linear import ShardLinearAttention
from penstock.workers.models.shards.shard import Span
from penstock.workers.quantization import WeightPlan
from penstock.workers.weights.sources import WeightSource


def build_linear_attention(
    config: ModelConfig,
    shape: LinearAttentionConfig,
    source: WeightSource,
    linears: Linears,
    plan: WeightPlan,
    layer: int,
) -> LinearAttention:
    """That of `layer`, or a rank's part of it. The projections to b and a, which decide how fast a
    state decays, are never quantised."""
    name, hidden = f"model.layers.{layer}.linear_attn", config.hidden_size
    fp32, heads, shard = torch.float32, shape.num_value_heads, linears.shard
    own = _OwnHeads(shape, _all(shape.num_key_heads), _all(heads))
    if shard is not None:
        own = _OwnHeads(shape, shard.key_heads, shard.value_heads)
    orders: tuple[Tensor | None, Tensor | None] = (None, None)
    if FAMILIES[config.architecture].names.grouped_by_key_head:
        qkvz = {f"{name}.in_proj_qkvz": shape.channels + shape.values}
        ba = {f"{name}.in_proj_ba": 2 * heads}
        orders = own.of_grouped_qkvz(), own.of_grouped_ba()
    else:
        qkvz = {f"{name}.in_proj_qkv": shape.channels, f"{name}.in_proj_z": shape.values}
        ba = {f"{name}.in_proj_b": heads, f"{name}.in_proj_a": heads}
        if shard is not None:
            orders = own.of_qkv_and_own_z(), None
    conv = source.take(f"{name}.conv1d.weight", shape.channels, 1, shape.taps, dtype=fp32)
    values = slice(own.values.first, own.values.end)
    kind = LinearAttention if shard is None else ShardLinearAttention
    return kind(
        config if shard is None else shard.own_config,
        linears.fused(qkvz, hidden, plan.format, order=orders[0]),
        linears.fused(ba, hidden, None, order=orders[1]),
        linears.fused({f"{name}.out_proj": hidden}, shape.values, plan.of_o()),
        DeltaWeights(
            conv=conv[own.channels().to(conv.device), 0].T.contiguous(),
            decay=-source.take(f"{name}.A_log", heads, dtype=fp32)[values].exp(),
            dt_bias=source.take(f"{name}.dt_bias", heads, dtype=fp32)[values].contiguous(),
            norm=source.take(f"{name}.norm.weight", shape.value_dim, dtype=fp32),
            eps=config.rms_norm_eps,
            num_key_heads=own.keys.size,
            key_dim=shape.key_dim,
        ),
    )


def gates_last(num_heads: int, head_dim: int, num_others: int) -> Tensor:
    """The order of the rows of q with a gate beside each head's, and of `num_others` rows after
    them: all heads' q, the others, all heads' gates."""
    q, gates = torch.arange(2 * num_heads * head_dim).view(num_heads, 2, head_dim).unbind(1)
    others = torch.arange(num_others) + 2 * num_heads * head_dim
    return torch.cat([q.flatten(), others, gates.flatten()])


def _all(num_heads: int) -> Span:
    return Span(0, num_heads, num_heads)


@dataclass(frozen=True, slots=True)
class _OwnHeads:
    """Orders of the rows of `keys` and `values`, heads of a layer of `shape`: q, k, v, then z."""

    shape: LinearAttentionConfig
    keys: Span
    values: Span

    def of_grouped_qkvz(self) -> Tensor:
        """Of rows that lie by key head, those of `keys`: its q, its k, v and z of its values."""
        shape, of_values = self.shape, self._shared * self.shape.value_dim
        q, k, v, z = self._by_kind([shape.key_dim, shape.key_dim, of_values, of_values])
        return torch.cat([q, k, self._chosen(v, shape.value_dim), self._chosen(z, shape.value_dim)])

    def of_grouped_ba(self) -> Tensor:
        """The same of b and a."""
        b, a = self._by_kind([self._shared, self._shared])
        return torch.cat([self._chosen(b, 1), self._chosen(a, 1)])

    def of_qkv_and_own_z(self) -> Tensor:
        """Of q, k and v of all heads, and then z of `values` alone."""
        z = torch.arange(self.values.size * self.shape.value_dim)
        return torch.cat([self.channels(), z + self.shape.channels])

    def channels(self) -> Tensor:
        """Of q, k and v of all heads."""
        shape = self.shape
        keys, values = self.keys.of(shape.key_dim), self.values.of(shape.value_dim)
        q, v = torch.arange(keys.first, keys.end), torch.arange(values.first, values.end)
        return torch.cat([q, q + shape.keys, v + 2 * shape.keys])

    @property
    def _shared(self) -> int:
        """Value heads of a key head."""
        return self.shape.num_value_heads // self.shape.num_key_heads

    def _by_kind(self, sizes: list[int]) -> list[Tensor]:
        """Rows that lie by key head, each with `sizes` rows of each kind: those of a kind."""
        rows = torch.arange(self.keys.size * sum(sizes)).view(self.keys.size, -1)
        return [each.flatten() for each in rows.split(sizes, dim=1)]

    def _chosen(self, rows: Tensor, size: int) -> Tensor:
        """Of `rows`, with `size` for each value head of `keys`, those of `values`."""
        first = (self.values.first - self.keys.first * self._shared) * size
        return rows[first : first + self.values.size * size]
