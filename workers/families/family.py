"""One family of models: its names, how its configuration is read, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]  # of ModelConfig, by name


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a layer's tensors in published checkpoints, behind `model.layers.N.`.

    Those that are not here are the same in all families: self_attn.{q,k,v,o}_proj, q_norm, k_norm,
    mlp.{gate,up,down}_proj; and outside the layers model.embed_tokens, model.norm, lm_head.
    """

    attention_norm: str = "input_layernorm"  # of the attention's input
    attention_out_norm: str = "post_attention_layernorm"  # of its output, where that is normed
    mlp_norm: str = "post_attention_layernorm"  # of the MLP's input
    mlp_out_norm: str = "post_feedforward_layernorm"  # of its output, where that is normed
    qkv: str | None = None  # self_attn.{}: q, k and v in one matrix
    gate_up: str | None = None  # mlp.{}: gate and up in one matrix
    moe: str = "mlp"  # the block of a layer with routed experts: {moe}.gate, {moe}.experts.N
    older_moe: str | None = None  # where else that block may lie
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # gate, up, down
    router: str = "gate"  # in that block, as the two below
    choice_bias: str = "gate.e_score_correction_bias"
    shared_expert: str = "shared_expert"
    # Of all experts of a layer in one tensor: gate and up, and down; whether plain matrices lie
    # [in, out], and, plain or not, whether gate and up take turns.
    fused_experts: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    transposed: bool = False
    interleaved: bool = False
    # Of linear attention, whether the rows of q, k, v and gate, and those of b and a, lie by key
    # head.
    grouped_by_key_head: bool = False

    @property
    def only_fused(self) -> bool:
        """Whether files have no experts but in one tensor."""
        return self.transposed or self.fused_experts != TensorNames().fused_experts

    def moe_block(self, layer: int, has: Callable[[str], bool]) -> str:
        """The name of the routed block of `layer`. `has`: whether a tensor of a name is stored."""
        name = f"model.layers.{layer}"
        if self.older_moe is not None and has(f"{name}.{self.older_moe}.gate.weight"):
            return f"{name}.{self.older_moe}"
        return f"{name}.{self.moe}"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture that loads.

    `read`: from the attributes of transformers' configuration, the fields of ModelConfig that
    differ from those of reading.py. It raises ConfigError for what the decoder does not have.
    `adjacent_pairs`: the rows of q and k that turn together are neighbours, and are put in the
    order that rotary embedding has here while they load. `wide_norms`: the weights of norms stay
    in fp32, and multiply values that are not rounded before.
    """

    architecture: str  # as config.json names it
    model_type: str
    read: Callable[[Any], Fields]
    names: TensorNames = TensorNames()
    adjacent_pairs: bool = False
    wide_norms: bool = False
    more_layers: bool = False  # files have layers after the last one, which predict further tokens
