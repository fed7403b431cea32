"""The tables of docs/reference/supported-models.md: the architectures that load, those that do not,
and the memory that known models take in each number format.

Architectures come from the code that loads them, sizes from the arithmetic of `penstock plan`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.workers.config import DEFAULT_KV_GROUP
from penstock.workers.families.family import Family
from penstock.workers.families.reading import fields_of
from penstock.workers.families.router_config import PLAIN_ROUTER, RouterConfig
from penstock.workers.families.table import FAMILIES, WRAPPERS
from penstock.workers.gguf.metadata import ARCHITECTURES as GGUF_ARCHITECTURES
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.hardware import device_named
from penstock.workers.planning.parameters import count_parameters
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import SHAPES

Rows = list[tuple[str, ...]]
DENSE, EXPERTS = "dense", "mixture of experts"
# Kind, and models that use it, of every architecture that loads.
LOADED = {
    "LlamaForCausalLM": (DENSE, "Llama 2, 3, 3.1, 3.2 and 3.3, SmolLM2, R1-Distill-Llama"),
    "MistralForCausalLM": (DENSE, "Mistral 7B, Mistral Nemo"),
    "MinistralForCausalLM": (DENSE, "Ministral 8B"),
    "Ministral3ForCausalLM": (DENSE, "Ministral 3"),
    "Qwen2ForCausalLM": (DENSE, "Qwen2, Qwen2.5, R1-Distill-Qwen"),
    "Qwen3ForCausalLM": (DENSE, "Qwen3 0.6B to 32B, Qwen3-Embedding and -Reranker"),
    "GraniteForCausalLM": (DENSE, "Granite 3.0 to 3.3"),
    "SmolLM3ForCausalLM": (DENSE, "SmolLM3"),
    "SeedOssForCausalLM": (DENSE, "Seed-OSS"),
    "Phi3ForCausalLM": (DENSE, "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini"),
    "Olmo2ForCausalLM": (DENSE, "OLMo 2"),
    "Olmo3ForCausalLM": (DENSE, "OLMo 3"),
    "Gemma2ForCausalLM": (DENSE, "Gemma 2"),
    "Gemma3ForCausalLM": (DENSE, "Gemma 3 270M and 1B"),
    "Glm4ForCausalLM": (DENSE, "GLM-4 0414"),
    "MixtralForCausalLM": (EXPERTS, "Mixtral 8x7B and 8x22B"),
    "Qwen2MoeForCausalLM": (EXPERTS, "Qwen1.5-MoE, Qwen2-57B-A14B"),
    "Qwen3MoeForCausalLM": (EXPERTS, "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder"),
    "OlmoeForCausalLM": (EXPERTS, "OLMoE-1B-7B"),
    "Glm4MoeForCausalLM": (EXPERTS, "GLM-4.5, GLM-4.5-Air, GLM-4.6"),
    "MiniMaxM2ForCausalLM": (EXPERTS, "MiniMax M2"),
    "GraniteMoeForCausalLM": (EXPERTS, "Granite 3.0 and 3.1, 1B-A400M and 3B-A800M"),
    "GptOssForCausalLM": (EXPERTS, "gpt-oss-20b, gpt-oss-120b"),
    "Qwen3NextForCausalLM": (EXPERTS, "Qwen3-Next-80B-A3B"),
    "Qwen3_5ForCausalLM": (DENSE, "Qwen3.5"),
    "Qwen3_5MoeForCausalLM": (EXPERTS, "Qwen3.5 mixtures"),
}
# Of text and images, of which the language model alone is loaded: see families.table.WRAPPERS.
WRAPPED = {
    "Mistral3ForConditionalGeneration": "Mistral Small 3, Ministral 3, Devstral; text only",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B to 27B; text only",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5; text only",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5 mixtures; text only",
}
# What each switch of ModelConfig does. Which families turn it is read from their code.
SWITCHES = {
    "layer_ropes": "rotary embedding by layer: one of several, or none",
    "qkv_bias": "biases of q, k and v",
    "o_bias": "bias of the output projection",
    "mlp_bias": "biases of the MLP",
    "qk_norm": "norms of q and k: of each head, or of all heads together",
    "clip_qkv": "q, k and v are clipped",
    "norm_place": "norms before attention and MLP, behind them, or both",
    "norm_offset": "added to the stored weights of norms",
    "activation": "of the MLP's gate",
    "embedding_scale": "factor of embeddings",
    "residual_scale": "factor of what attention and MLP add",
    "attention_scale": "factor of q.k, in place of head_dim^-1/2",
    "attention_softcap": "bound of scores, by tanh",
    "logits_divisor": "divisor of logits",
    "logits_softcap": "bound of logits, by tanh",
    "query_scaling": "queries grow with their position",
    "attention_sinks": "a learned score of each head that takes weight from all keys",
    "attention_gate": "sigmoids weight the heads' outputs",
    "linear_attention": "gated DeltaNet: heads, their dimensions, tokens of its convolution",
    "linear_layers": "the layers that have it",
    "num_experts": "routed experts",
    "norm_topk_prob": "weights of a token's experts sum to one",
    "shared_expert_intermediate_size": "an expert for every token",
    "expert_bias": "biases of experts",
    "swiglu_clamp": "alpha and limit of a clamped SwiGLU, of experts",
    "shared_expert_gate": "which has a gate of its own",
}
# The same of RouterConfig, the field `router`.
ROUTER_SWITCHES = {
    "scoring": "scores of experts: softmax or sigmoid",
    "has_bias": "bias of the router",
    "has_choice_bias": "a bias that chooses, and does not weigh",
    "num_groups": "groups of experts, of which",
    "num_kept_groups": "groups with the best experts, from which a token's are chosen",
    "eps": "added to the sum of a token's weights",
    "scale": "factor of a token's weights",
    "in_fp32": "the router computes in fp32",
}
# Fields with a default that are no switches.
NO_SWITCHES = (
    *("num_experts_per_token", "moe_intermediate_size", "moe_layers", "eos_token_ids"),
    *("bos_token_id", "dtype", "stored_scheme", "router"),
)
# Settings of published models that differ from the defaults of transformers' classes.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "granitemoe": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
        "logits_scaling": 6.0,
    },
    "glm4_moe": {  # GLM-4.5, and the groups that no published one has
        "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5, "n_group": 4,
        "topk_group": 2,
    },
    "llama": {"attention_bias": True, "mlp_bias": True},
    "olmoe": {"clip_qkv": 8.0},
}  # fmt: skip
# Not loaded: the architecture as config.json has it, the models, and what Penstock lacks for them.
ABSENT = {
    "Llama4ForConditionalGeneration": ("Llama 4", "chunked attention, images"),
    "DeepseekV2ForCausalLM": ("DeepSeek V2", "latent attention (MLA)"),
    "DeepseekV3ForCausalLM": ("DeepSeek V3, R1", "latent attention (MLA)"),
}
FORMATS = ("bf16", "int8", "int4")
KV_FORMATS = ("bf16", "int8")
TOKENS = 1000


def architectures() -> Rows:
    """Each architecture that loads: its name, kind, name in GGUF files, and models."""
    in_gguf = {architecture: name for name, architecture in GGUF_ARCHITECTURES.items()}
    for name in ("MistralForCausalLM", "MixtralForCausalLM"):  # files call them llama
        in_gguf.setdefault(name, in_gguf["LlamaForCausalLM"])
    rows: Rows = []
    for architecture in FAMILIES:
        kind, models = LOADED[architecture]
        gguf = f"`{in_gguf[architecture]}`" if architecture in in_gguf else "no"
        rows.append((f"`{architecture}`", kind, gguf, models))
    for name, wrapper in WRAPPERS.items():
        kind, _ = LOADED[next(iter(wrapper.of_text.values()))]
        rows.append((f"`{name}`", kind, "no", WRAPPED[name]))
    return rows


def switches() -> Rows:
    """Each switch of the decoder: its name, default, meaning, and the families that turn it."""
    read = {family.architecture: _example(family) for family in FAMILIES.values()}
    defaults = {each.name: each.default for each in dataclasses.fields(ModelConfig)}
    rows: Rows = []
    for name, meaning in SWITCHES.items():
        turned = [
            architecture.removesuffix("ForCausalLM")
            for architecture, fields in read.items()
            if fields.get(name, defaults[name]) != defaults[name]
        ]
        rows.append((f"`{name}`", f"`{defaults[name]}`", meaning, ", ".join(turned)))
    plain = {each.name: each.default for each in dataclasses.fields(RouterConfig)}
    for name, meaning in ROUTER_SWITCHES.items():
        turned = [
            architecture.removesuffix("ForCausalLM")
            for architecture, fields in read.items()
            if getattr(fields.get("router", PLAIN_ROUTER), name) != plain[name]
        ]
        rows.append((f"`router.{name}`", f"`{plain[name]}`", meaning, ", ".join(turned)))
    fused_experts = [
        family.architecture.removesuffix("ForCausalLM")
        for family in FAMILIES.values()
        if family.names.only_fused
    ]
    rows.append(
        (
            "`fused_experts`",
            "`separate`",
            "experts of a layer in one tensor",
            ", ".join(fused_experts),
        )
    )
    named = [(each.architecture.removesuffix("ForCausalLM"), each) for each in FAMILIES.values()]
    fused = [name for name, each in named if each.names.qkv or each.names.gate_up]
    pairs = [name for name, each in named if each.adjacent_pairs]
    rows.append(("`TensorNames`", "`separate`", "fused matrices in the files", ", ".join(fused)))
    folded = "pairs of rotary embedding, neighbours in the files, are put apart at load"
    rows.append(("`adjacent_pairs`", "`False`", folded, ", ".join(pairs)))
    return rows


def _example(family: Family) -> dict[str, Any]:
    """The fields of ModelConfig for a published configuration of `family`, or its class's."""
    from transformers import AutoConfig

    settings = _PUBLISHED.get(family.model_type, {})
    return fields_of(family, AutoConfig.for_model(family.model_type, **settings), {})


def absent() -> Rows:
    """Each known architecture that is refused: its name, models, and what is missing."""
    return [(f"`{name}`", models, missing) for name, (models, missing) in ABSENT.items()]


def memory() -> Rows:
    """Of each known shape: parameters, GB of weights by format, MB of K and V by format, context.

    From the smallest to the largest.
    """
    shapes = sorted(SHAPES.items(), key=lambda each: count_parameters(each[1]).total)
    return [
        (
            name,
            f"{_three(count_parameters(model).total / 1e9)} G",
            *(_three(_roofline(model, weights=each).weight_bytes / 1e9) for each in FORMATS),
            *(
                _three(_roofline(model, kv=each).kv_bytes_per_token * TOKENS / 1e6)
                for each in KV_FORMATS
            ),
            f"{model.max_position_embeddings:,}",
        )
        for name, model in shapes
    ]


def _roofline(model: ModelConfig, weights: str = "bf16", kv: str = "bf16") -> Roofline:
    # Bytes depend on no device.
    whole_head = model.head_dim % DEFAULT_KV_GROUP != 0
    group = model.head_dim if whole_head else DEFAULT_KV_GROUP
    return Roofline(model, device_named("H100"), weights, kv, kv_group=group)


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
