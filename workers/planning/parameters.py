"""Counts the weights of a model from its shape: arithmetic only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.model_config import ModelConfig


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
    attention = layers * (d * (q + 2 * kv) + q * d)
    dense = (layers - num_moe) * 3 * d * model.intermediate_size
    shared = num_moe * 3 * d * model.shared_expert_intermediate_size
    router_rows = model.num_experts + (shared > 0 and model.shared_expert_gate)
    biases_each = model.router.has_bias + model.router.has_choice_bias
    routers = num_moe * (d * router_rows + biases_each * model.num_experts)
    biases = model.qkv_bias * (q + 2 * kv) + model.o_bias * d
    norms = 4 if model.norm_place == "sandwich" else 2
    sinks = model.num_heads * model.attention_sinks
    expert_biases = num_moe * model.num_experts * (2 * model.moe_intermediate_size + d)
    qk_norms = {"none": 0, "head": 2 * model.head_dim, "full": q + kv}[model.qk_norm]
    mlp_biases = model.mlp_bias * (layers - num_moe) * (2 * model.intermediate_size + d)
    return Parameters(
        embedding=model.vocab_size * d,
        head=0 if model.tie_word_embeddings else model.vocab_size * d,
        linear=attention + dense + shared,
        routed=num_moe * model.num_experts * 3 * d * model.moe_intermediate_size,
        other=layers * (norms * d + biases + qk_norms + sinks)
        + (d + routers + mlp_biases + model.expert_bias * expert_biases),
        output=layers * q * d,
        output_rows=layers * d,
        linear_rows=layers * (q + 2 * kv + d)
        + (layers - num_moe) * (2 * model.intermediate_size + d)
        + num_moe * (shared > 0) * (2 * model.shared_expert_intermediate_size + d),
        routed_rows=num_moe * model.num_experts * (2 * model.moe_intermediate_size + d),
    )
