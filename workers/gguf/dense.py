"""What the metadata of dense families says beside Llama's, in the words of their config.json.

The keys and the constants that files leave out are those of llama.cpp's converter and loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.reading import FULL, SLIDING
from penstock.workers.gguf.header import GgufHeader
from penstock.workers.gguf.metadata import (
    architecture_of,
    optional_size,
    positive_float,
    size_of,
)

Attributes = dict[str, Any]
NO_ROPE_INTERVAL = 4  # of SmolLM3
GEMMA_3_PATTERN = 6  # of its layers one sees all
LOCAL_THETA = 10000.0  # of Gemma 3's other layers
# Layers of the sizes of Gemma whose scores are scaled by hidden_size / heads, not by the head's.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# The weights of norms lie in files as they are used; in safetensors without the 1 of Gemma.
WHOLE_NORMS = ("gemma2", "gemma3")


def dense_attributes(header: GgufHeader) -> Attributes:
    """The attributes of transformers' configuration that `header` adds to Llama's. Raises
    ConfigError naming the file and the key."""
    read = _READERS.get(architecture_of(header))
    return {} if read is None else read(header)


def by_layer(header: GgufHeader, full: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of Gemma 3: `full` is of the layers that see all."""
    theta = positive_float(header, "gemma3.rope.freq_base_swa", LOCAL_THETA)
    return {FULL: dict(full), SLIDING: {"rope_type": "default", "rope_theta": theta}}


def _granite(header: GgufHeader) -> Attributes:
    def scale(key: str) -> float:
        return positive_float(header, f"granite.{key}")

    return {
        "embedding_multiplier": scale("embedding_scale"),
        "residual_multiplier": scale("residual_scale"),
        "attention_multiplier": scale("attention.scale"),
        "logits_scaling": scale("logit_scale"),
    }


def _smollm3(header: GgufHeader) -> Attributes:
    layers = range(1, size_of(header, "block_count") + 1)
    return {
        "use_sliding_window": False,
        "no_rope_layers": [int(layer % NO_ROPE_INTERVAL != 0) for layer in layers],
    }


def _olmo2(header: GgufHeader) -> Attributes:
    if optional_size(header, "attention.sliding_window") is not None:
        raise ConfigError(
            f"{header.file}: olmo2 with a sliding window is OLMo 3, which is not supported in GGUF "
            "files: give the model's safetensors checkpoint"
        )
    return {}


def _gemma(header: GgufHeader, pattern: int) -> Attributes:
    name, num_layers = architecture_of(header), size_of(header, "block_count")
    heads, hidden = size_of(header, "attention.head_count"), size_of(header, "embedding_length")
    scalar = size_of(header, "attention.key_length", hidden // heads)
    if num_layers == _SCALED_BY_WIDTH[name]:
        scalar = hidden // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "query_pre_attn_scalar": scalar,
        "layer_types": [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)],
        "final_logit_softcapping": _cap(header, "final_logit_softcapping"),
        "attn_logit_softcapping": _cap(header, "attn_logit_softcapping"),
    }


def _cap(header: GgufHeader, key: str) -> float | None:
    key = f"{architecture_of(header)}.{key}"
    return positive_float(header, key) if header.metadata.get(key) else None


def _gemma3(header: GgufHeader) -> Attributes:
    return _gemma(header, size_of(header, "attention.sliding_window_pattern", GEMMA_3_PATTERN))


_READERS: Mapping[str, Callable[[GgufHeader], Attributes]] = MappingProxyType(
    {
        "granite": _granite,
        "smollm3": _smollm3,
        "olmo2": _olmo2,
        "gemma2": lambda header: _gemma(header, 2),
        "gemma3": _gemma3,
    }
)
