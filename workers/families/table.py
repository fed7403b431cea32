"""All families that load, by architecture; and which of them a config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families import mixtures, plain
from penstock.workers.families.family import Family, TensorNames

_ALL = (
    Family("LlamaForCausalLM", "llama", plain.llama),
    Family("MistralForCausalLM", "mistral", plain.mistral),
    Family("Qwen2ForCausalLM", "qwen2", plain.qwen2),
    Family("Qwen3ForCausalLM", "qwen3", plain.qwen3),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        mixtures.mixtral,
        TensorNames(older_moe="block_sparse_moe", expert=("w1", "w3", "w2")),
    ),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", mixtures.qwen2_moe),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", mixtures.qwen3_moe),
    Family("OlmoeForCausalLM", "olmoe", mixtures.olmoe),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({each.architecture: each for each in _ALL})


def family_of(stated: Mapping[str, Any]) -> Family:
    """The family that a config.json names. Raises ConfigError if it is not supported."""
    model_type = stated.get("model_type")
    names = stated.get("architectures") or [
        family.architecture for family in _ALL if family.model_type == model_type
    ]
    name = names[0] if isinstance(names, list) and names else model_type
    whole = f"{str(name).removesuffix('Model')}ForCausalLM"
    if whole in FAMILIES:  # it was saved without its LM head
        name = whole
    family = FAMILIES.get(str(name))
    if family is None:
        raise ConfigError(
            f"architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    if model_type != family.model_type:
        raise ConfigError(
            f"config.json names architecture {name} but model_type {model_type!r}; "
            f"{family.model_type!r} was expected"
        )
    return family
