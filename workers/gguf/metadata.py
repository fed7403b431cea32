"""Values of a GGUF file's metadata, checked: a missing or unusable one is named with its key."""

from __future__ import annotations

import math

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.header import GgufHeader

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}


def architecture_of(header: GgufHeader) -> str:
    """`general.architecture`, a key of ARCHITECTURES. Raises ConfigError if it is another."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigError(f"{header.file}: general.architecture is {name!r}; a text was expected")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{header.file}: architecture {name!r} is not supported in GGUF files; supported are "
            f"{', '.join(ARCHITECTURES)}: give the model's safetensors checkpoint"
        )
    return name


def size_of(header: GgufHeader, name: str, default: int | None = None) -> int:
    """A positive number. `name`: of the key, without the architecture."""
    key = f"{architecture_of(header)}.{name}"
    value = header.metadata.get(key, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{header.file}: {key} is {value!r}; a positive number was expected")
    return value


def optional_size(header: GgufHeader, name: str) -> int | None:
    """As `size_of`; None where it is absent or 0."""
    key = f"{architecture_of(header)}.{name}"
    return None if header.metadata.get(key, 0) == 0 else size_of(header, name)


def positive_float(header: GgufHeader, key: str, default: float | None = None) -> float:
    """A positive number under the whole `key`."""
    value = header.metadata.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{header.file}: {key} is {value!r}; a positive number was expected")
    return float(value)
