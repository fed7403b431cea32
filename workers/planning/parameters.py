"""Counts the weights of a model from its shape: arithmetic only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.model_config import ModelConfig
from penstock.workers.quantization import is_wide


@dataclass(frozen=True, slots=True)
class Parameters:
    """The number of a model's weights, by use."""

    embedding: int  # a row of it is read for each token
    head: int  # 0 where it is the embedding table
    linear: int  # attention, dense MLPs and shared experts: used by every token
    routed: int  # experts: each token uses its top k
    other: int  # norms, biases, routers
    output: int = 0  # of `linear`, attention's output projections
    linear_rows: int = 0  # output channels of `linear`
    output_rows: int = 0
    routed_rows: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.linear + self.routed + self.other


def count_parameters(model: ModelConfig) -> Parameters:
    """The exact number of weights in a checkpoint of this shape."""
    d, layers, num_moe = model.hidden_size, model.num_layers, sum(model.moe_layers)
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    full, gates = model.num_kv_layers, q * model.attention_gate
    attention = full * (d * (q + gates + 2 * kv) + q * d)
    states = _of_linear_attention(model)
    dense = (layers - num_moe) * 3 * d * model.intermediate_size
    shared = num_moe * 3 * d * model.shared_expert_intermediate_size
    router_rows = model.num_experts + (shared > 0 and model.shared_expert_gate)
    biases_each = model.router.has_bias + model.router.has_choice_bias
    routers = num_moe * (d * router_rows + biases_each * model.num_experts)
    biases = model.qkv_bias * (q + 2 * kv) + model.o_bias * d
    norms = 4 if model.norm_place == "sandwich" else 2
    sinks = model.num_heads * model.attention_sinks
    expert_biases = num_moe * model.num_experts * (2 * model.moe_intermediate_size + d)
    biases += model.qkv_bias * gates
    qk_norms = {"none": 0, "head": 2 * model.head_dim, "full": q + kv}[model.qk_norm]
    mlp_biases = model.mlp_bias * (layers - num_moe) * (2 * model.intermediate_size + d)
    return Parameters(
        embedding=model.vocab_size * d,
        head=0 if model.tie_word_embeddings else model.vocab_size * d,
        linear=attention + states.linear + dense + shared,
        routed=num_moe * model.num_experts * 3 * d * model.moe_intermediate_size,
        other=layers * norms * d
        + full * (biases + qk_norms + sinks)
        + states.other
        + (d + routers + mlp_biases + model.expert_bias * expert_biases),
        output=full * q * d + states.output,
        output_rows=layers * d,
        linear_rows=full * (q + gates + 2 * kv + d)
        + states.linear_rows
        + (layers - num_moe) * (2 * model.intermediate_size + d)
        + num_moe * (shared > 0) * (2 * model.shared_expert_intermediate_size + d),
        routed_rows=num_moe * model.num_experts * (2 * model.moe_intermediate_size + d),
    )


def wide_weights(model: ModelConfig) -> int:
    """The number of weights in q, k, v and down of the layers that `is_wide`, without routed
    experts: int8 where the others are int4."""
    qkv = (model.num_heads * (1 + model.attention_gate) + 2 * model.num_kv_heads) * model.head_dim
    total = 0
    for layer in range(model.num_layers):
        if not is_wide(layer, model.num_layers):
            continue
        is_moe = model.moe_layers[layer]
        inner = model.shared_expert_intermediate_size if is_moe else model.intermediate_size
        total += (inner + (0 if model.is_linear(layer) else qkv)) * model.hidden_size
    return total


def _of_linear_attention(model: ModelConfig) -> Parameters:
    """Of all layers that have it: b and a, which are never quantised, count as `other`."""
    shape, layers, d = model.linear_attention, sum(model.linear_layers), model.hidden_size
    if shape is None:
        return Parameters(embedding=0, head=0, linear=0, routed=0, other=0)
    heads, rows = shape.num_value_heads, shape.channels + shape.values
    small = shape.taps * shape.channels + 2 * heads + shape.value_dim
    return Parameters(
        embedding=0,
        head=0,
        linear=layers * d * (rows + shape.values),
        routed=0,
        other=layers * (2 * heads * d + small),
        output=layers * shape.values * d,
        linear_rows=layers * (rows + d),
    )
