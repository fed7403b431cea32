"""The tables of docs/reference/supported-models.md: the architectures that load, those that do not,
and the memory that known models take in each number format.

Architectures come from the code that loads them, sizes from the arithmetic of `penstock plan`.
"""

from __future__ import annotations

from penstock.workers.config import DEFAULT_KV_GROUP
from penstock.workers.families.table import FAMILIES
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
    "Qwen2ForCausalLM": (DENSE, "Qwen2, Qwen2.5, R1-Distill-Qwen"),
    "Qwen3ForCausalLM": (DENSE, "Qwen3 0.6B to 32B, Qwen3-Embedding"),
    "MixtralForCausalLM": (EXPERTS, "Mixtral 8x7B and 8x22B"),
    "Qwen2MoeForCausalLM": (EXPERTS, "Qwen1.5-MoE, Qwen2-57B-A14B"),
    "Qwen3MoeForCausalLM": (EXPERTS, "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder"),
    "OlmoeForCausalLM": (EXPERTS, "OLMoE-1B-7B"),
}
# Not loaded: the architecture as config.json has it, the models, and what Penstock lacks for them.
ABSENT = {
    "GraniteForCausalLM": ("Granite 3", "factors of embedding, residual, attention and logits"),
    "SmolLM3ForCausalLM": ("SmolLM3", "layers without rotary embedding"),
    "SeedOssForCausalLM": ("Seed-OSS", "its combination of biases"),
    "Phi3ForCausalLM": ("Phi-3, Phi-4, Phi-4-mini", "fused projections, longrope"),
    "Mistral3ForConditionalGeneration": (
        "Mistral Small 3, Ministral 3, Devstral",
        "nested configuration, images",
    ),
    "Olmo2ForCausalLM": ("OLMo 2", "norms behind the layers"),
    "Olmo3ForCausalLM": ("OLMo 3", "norms behind the layers, rotary embeddings by layer type"),
    "Gemma2ForCausalLM": ("Gemma 2", "four norms a layer, soft caps, GELU"),
    "Gemma3ForCausalLM": ("Gemma 3", "four norms a layer, GELU, rotary embeddings by layer type"),
    "Glm4ForCausalLM": ("GLM-4", "four norms a layer, rotary embedding of adjacent pairs"),
    "Glm4MoeForCausalLM": ("GLM-4.5, GLM-4.6", "sigmoid router, plain shared expert"),
    "MiniMaxM2ForCausalLM": ("MiniMax M2", "sigmoid router"),
    "GptOssForCausalLM": ("gpt-oss", "attention sinks, biased experts, MXFP4"),
    "Llama4ForConditionalGeneration": ("Llama 4", "chunked attention, images"),
    "DeepseekV2ForCausalLM": ("DeepSeek V2", "latent attention (MLA)"),
    "DeepseekV3ForCausalLM": ("DeepSeek V3, R1", "latent attention (MLA)"),
    "Qwen3NextForCausalLM": ("Qwen3-Next", "gated DeltaNet"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3.5", "gated DeltaNet, images"),
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
    return rows


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
