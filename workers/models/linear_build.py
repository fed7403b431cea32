"""Builds linear attention: takes its weights, and puts their rows in the order of the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.delta_types import DeltaWeights
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.linear_attention import LinearAttention
from penstock.workers.models.linears import Linears
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
    """That of `layer`. The projections to b and a, which decide how fast a state decays, are never
    quantised."""
    name, hidden = f"model.layers.{layer}.linear_attn", config.hidden_size
    fp32, heads = torch.float32, shape.num_value_heads
    orders: tuple[Tensor | None, Tensor | None] = (None, None)
    if FAMILIES[config.architecture].names.grouped_by_key_head:
        qkvz = {f"{name}.in_proj_qkvz": shape.channels + shape.values}
        ba = {f"{name}.in_proj_ba": 2 * heads}
        shared = heads // shape.num_key_heads
        of_values = shared * shape.value_dim
        orders = (
            _by_kind(shape.num_key_heads, [shape.key_dim, shape.key_dim, of_values, of_values]),
            _by_kind(shape.num_key_heads, [shared, shared]),
        )
    else:
        qkvz = {f"{name}.in_proj_qkv": shape.channels, f"{name}.in_proj_z": shape.values}
        ba = {f"{name}.in_proj_b": heads, f"{name}.in_proj_a": heads}
    conv = source.take(f"{name}.conv1d.weight", shape.channels, 1, shape.taps, dtype=fp32)
    return LinearAttention(
        config,
        linears.fused(qkvz, hidden, plan.format, order=orders[0]),
        linears.fused(ba, hidden, None, order=orders[1]),
        linears.fused({f"{name}.out_proj": hidden}, shape.values, plan.of_o()),
        DeltaWeights(
            conv=conv[:, 0].T.contiguous(),
            decay=-source.take(f"{name}.A_log", heads, dtype=fp32).exp(),
            dt_bias=source.take(f"{name}.dt_bias", heads, dtype=fp32),
            norm=source.take(f"{name}.norm.weight", shape.value_dim, dtype=fp32),
            eps=config.rms_norm_eps,
            num_key_heads=shape.num_key_heads,
            key_dim=shape.key_dim,
        ),
    )


def gates_last(num_heads: int, head_dim: int, num_others: int) -> Tensor:
    """The order of the rows of q with a gate beside each head's, and of `num_others` rows after
    them: all heads' q, the others, all heads' gates."""
    q, gates = torch.arange(2 * num_heads * head_dim).view(num_heads, 2, head_dim).unbind(1)
    others = torch.arange(num_others) + 2 * num_heads * head_dim
    return torch.cat([q.flatten(), others, gates.flatten()])


def _by_kind(num_groups: int, sizes: list[int]) -> Tensor:
    """The order of rows that lie by group, each with `sizes` rows of each kind: by kind."""
    rows = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    return torch.cat([each.flatten() for each in rows.split(sizes, dim=1)])
