"""All families that load, by architecture; and which of them a config.json names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families import hybrid, mixtures, plain, post_norm
from penstock.workers.families.family import Family, TensorNames

_SANDWICH = TensorNames(mlp_norm="pre_feedforward_layernorm")
_ALL = (
    Family("LlamaForCausalLM", "llama", plain.llama),
    Family("MistralForCausalLM", "mistral", plain.mistral),
    Family("MinistralForCausalLM", "ministral", plain.mistral),
    Family("Ministral3ForCausalLM", "ministral3", plain.ministral3),
    Family("Qwen2ForCausalLM", "qwen2", plain.qwen2),
    Family("Qwen3ForCausalLM", "qwen3", plain.qwen3),
    Family("GraniteForCausalLM", "granite", plain.granite),
    Family("SmolLM3ForCausalLM", "smollm3", plain.smollm3),
    Family("SeedOssForCausalLM", "seed_oss", plain.seed_oss),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        plain.phi3,
        TensorNames(qkv="qkv_proj", gate_up="gate_up_proj"),
    ),
    Family("Olmo2ForCausalLM", "olmo2", post_norm.olmo2, wide_norms=True),
    Family("Olmo3ForCausalLM", "olmo3", post_norm.olmo3, wide_norms=True),
    Family("Gemma2ForCausalLM", "gemma2", post_norm.gemma2, _SANDWICH, wide_norms=True),
    Family("Gemma3ForCausalLM", "gemma3_text", post_norm.gemma3, _SANDWICH, wide_norms=True),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        post_norm.glm4,
        TensorNames(
            attention_out_norm="post_self_attn_layernorm",
            mlp_out_norm="post_mlp_layernorm",
            gate_up="gate_up_proj",
        ),
        adjacent_pairs=True,
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        mixtures.mixtral,
        TensorNames(older_moe="block_sparse_moe", expert=("w1", "w3", "w2")),
    ),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", mixtures.qwen2_moe),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", mixtures.qwen3_moe),
    Family("OlmoeForCausalLM", "olmoe", mixtures.olmoe),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        mixtures.glm4_moe,
        TensorNames(shared_expert="shared_experts"),
        more_layers=True,
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        mixtures.minimax_m2,
        TensorNames(
            moe="block_sparse_moe",
            expert=("w1", "w3", "w2"),
            choice_bias="e_score_correction_bias",
        ),
        more_layers=True,
    ),
    Family(
        "GraniteMoeForCausalLM",
        "granitemoe",
        mixtures.granite_moe,
        TensorNames(
            moe="block_sparse_moe",
            router="router.layer",
            fused_experts=("input_linear.weight", "output_linear.weight"),
        ),
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        mixtures.gpt_oss,
        TensorNames(router="router", transposed=True, interleaved=True),
        wide_norms=True,
    ),
    Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        hybrid.qwen3_next,
        TensorNames(grouped_by_key_head=True),
        wide_norms=True,
    ),
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", hybrid.qwen3_5, wide_norms=True),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", hybrid.qwen3_5_moe, wide_norms=True),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({each.architecture: each for each in _ALL})
CLASSIFIER = "ForSequenceClassification"  # of the decoder of a family, with another head


@dataclass(frozen=True, slots=True)
class Wrapper:
    """An architecture of several parts, of which only the language model is loaded.

    `of_text`: its architecture, by the model_type of `text_config`.
    """

    model_type: str
    of_text: Mapping[str, str]


WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "Mistral3ForConditionalGeneration": Wrapper(
            "mistral3", {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
        ),
        "Gemma3ForConditionalGeneration": Wrapper("gemma3", {"gemma3_text": "Gemma3ForCausalLM"}),
        "Qwen3_5ForConditionalGeneration": Wrapper(
            "qwen3_5", {"qwen3_5_text": "Qwen3_5ForCausalLM"}
        ),
        "Qwen3_5MoeForConditionalGeneration": Wrapper(
            "qwen3_5_moe", {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
        ),
    }
)


def text_of(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is of the language model: most often all of it."""
    nested = stated.get("text_config")
    if _first_name(stated) in WRAPPERS and isinstance(nested, Mapping):
        return nested
    return stated


def _first_name(stated: Mapping[str, Any]) -> Any:
    """The architecture that config.json names, or else its model_type."""
    model_type, names = stated.get("model_type"), stated.get("architectures")
    if not names:
        known = [(each.architecture, each.model_type) for each in _ALL]
        known += [(name, each.model_type) for name, each in WRAPPERS.items()]
        names = [name for name, type in known if type == model_type]
    return names[0] if isinstance(names, list) and names else model_type


def family_of(stated: Mapping[str, Any]) -> Family:
    """The family that a config.json names; of an architecture of several parts that of its language
    model. Raises ConfigError, with the remedy, if it is not supported."""
    model_type, name = stated.get("model_type"), _first_name(stated)
    wrapper = WRAPPERS.get(str(name))
    if wrapper is not None:
        _check_type(name, model_type, wrapper.model_type)
        text_type = text_of(stated).get("model_type", next(iter(wrapper.of_text)))
        if text_type not in wrapper.of_text:
            raise ConfigError(
                f"{name} with a text_config of model_type {text_type!r} is not supported; "
                f"supported are {', '.join(wrapper.of_text)}"
            )
        return FAMILIES[wrapper.of_text[text_type]]
    whole = f"{str(name).removesuffix('Model').removesuffix(CLASSIFIER)}ForCausalLM"
    if whole in FAMILIES:  # it was saved without its LM head, or with one that scores
        if str(name).endswith(CLASSIFIER):
            _check_labels(str(name), stated)
        name = whole
    family = FAMILIES.get(str(name))
    if family is None:
        raise _unsupported(name)
    _check_type(name, model_type, family.model_type)
    return family


def _check_labels(name: str, stated: Mapping[str, Any]) -> None:
    """transformers' configurations leave out the labels where there are two of them."""
    num_labels = len(stated.get("id2label") or (0, 1))
    if num_labels != 1:
        raise ConfigError(
            f"{name} with {num_labels} labels is not supported: of classifiers only rerankers are, "
            "whose head has one output (num_labels 1)"
        )


def _check_type(name: str, model_type: Any, expected: str) -> None:
    if model_type != expected:
        raise ConfigError(
            f"config.json names architecture {name} but model_type {model_type!r}; "
            f"{expected!r} was expected"
        )


def _unsupported(name: Any) -> ConfigError:
    known = [*FAMILIES, *WRAPPERS]
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    hint = f"; the nearest of them is {near[0]}" if near else ""
    return ConfigError(
        f"architecture {name!r} is not supported; supported are {', '.join(known)}{hint}: serve a "
        "model of one of these"
    )
