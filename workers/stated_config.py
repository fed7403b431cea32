"""Reads a config.json that states all that Penstock needs, without importing transformers.

Importing the configuration classes of transformers takes four seconds of CPU, at the start of each
worker. They are needed for what a checkpoint leaves to their defaults, for rotary embeddings that
are scaled otherwise than Llama 3's, and for the families whose layers differ. Whatever is not plain
here, a wrong type included, is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

Check = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_int(value) and value > 0


def _is_id(value: Any) -> bool:
    return value is None or _is_int(value)


def _is_ids(value: Any) -> bool:
    return _is_id(value) or (isinstance(value, list) and all(map(_is_int, value)))


def _is(*kinds: type) -> Check:
    return lambda value: type(value) in kinds


def _is_dtype(value: Any) -> bool:
    return value in (None, "float32", "bfloat16", "float16")  # torch has further names of them


def _is_share(value: Any) -> bool:
    return type(value) is float and 0.0 <= value <= 1.0


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
_NEEDED: Mapping[str, Check] = MappingProxyType(
    {
        **dict.fromkeys(_SIZES, _is_size),
        "model_type": _is(str),
        "architectures": _is(list),
        "hidden_act": _is(str),
        "rms_norm_eps": _is(float),
        "tie_word_embeddings": _is(bool),
        "bos_token_id": _is_id,
        "eos_token_id": _is_ids,
    }
)
_NO_WINDOW: Mapping[str, Check] = MappingProxyType(
    {"use_sliding_window": lambda value: value is False}  # whatever the window is
)
_NEEDED_BY_FAMILY: Mapping[str, Mapping[str, Check]] = MappingProxyType(
    {
        "llama": {},
        "qwen2": _NO_WINDOW,
        "qwen3": {**_NO_WINDOW, "head_dim": _is_size, "attention_bias": _is(bool)},
        "mistral": {"sliding_window": _or_none(_is_size)},
        "mixtral": {
            "sliding_window": _or_none(_is_size),
            "num_local_experts": _is_size,
            "num_experts_per_tok": _is_size,
        },
    }
)
_OF_WINDOWS: Mapping[str, Check] = MappingProxyType(
    {
        "sliding_window": _or_none(_is_size),
        "max_window_layers": _is_int,
        "layer_types": lambda value: isinstance(value, list) and {*value} == {"full_attention"},
    }
)
_OPTIONAL_BY_FAMILY: Mapping[str, Mapping[str, Check]] = MappingProxyType(
    {
        "llama": {"attention_bias": _is(bool), "mlp_bias": _is(bool)},
        "qwen2": {**_OF_WINDOWS, "use_mrope": lambda value: value is False},
        "qwen3": _OF_WINDOWS,
    }
)
# May be left out. From pad_token_id on they are for training and for transformers' own code.
_OPTIONAL: Mapping[str, Check] = MappingProxyType(
    {
        "head_dim": _or_none(_is_size),
        "dtype": _is_dtype,
        "torch_dtype": _is_dtype,
        "rope_parameters": _is(dict),
        "rope_theta": _is(float, int),
        "rope_scaling": _or_none(_is(dict)),
        "quantization_config": _is(dict),
        "pad_token_id": _is_id,
        "pretraining_tp": _is_int,
        "initializer_range": _is_share,
        "attention_dropout": _is(float, int),
        "use_cache": _is(bool),
        "output_router_logits": _is(bool),
        "router_aux_loss_coef": _is(float),
        "router_jitter_noise": _is(float),
        "transformers_version": _or_none(_is(str)),
        "_name_or_path": _is(str),
    }
)


def stated_in_full(stated: Mapping[str, Any]) -> SimpleNamespace | None:
    """The attributes of transformers' configuration that ModelConfig reads; None: ask transformers.

    `stated`: the JSON object of config.json.
    """
    family = str(stated.get("model_type"))
    if family not in _NEEDED_BY_FAMILY:
        return None
    needed = {**_NEEDED, **_NEEDED_BY_FAMILY[family]}
    known = {**_OPTIONAL, **_OPTIONAL_BY_FAMILY.get(family, {}), **needed}
    if not needed.keys() <= stated.keys() <= known.keys():
        return None
    if not all(known[name](value) for name, value in stated.items()):
        return None
    if {"dtype", "torch_dtype"} <= stated.keys():
        return None
    if len(stated.get("layer_types", ())) not in (0, stated["num_hidden_layers"]):
        return None
    rope = _rope(stated)
    if rope is None or stated["hidden_size"] % stated["num_attention_heads"]:
        return None
    dtype = stated.get("dtype", stated.get("torch_dtype"))
    values: dict[str, Any] = {**stated, "rope_parameters": rope, "dtype": dtype}
    if "num_local_experts" in values:  # transformers has both names
        values["num_experts"] = values["num_local_experts"]
    if stated.get("use_sliding_window") is False:
        values["sliding_window"] = None
    return SimpleNamespace(**values)


def _rope(stated: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary embedding in the new form or in the older one: without scaling, or with Llama 3's;
    None: neither."""
    new, theta = stated.get("rope_parameters"), stated.get("rope_theta")
    scaling = stated.get("rope_scaling")
    if new is None:
        if theta is None:
            return None
        new = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        if scaling is not None and "rope_type" not in scaling:
            return None
    elif theta is not None or scaling is not None:
        return None
    positions = stated["max_position_embeddings"]
    return dict(new) if _is_plain(new) or _is_llama3(new, positions) else None


def _is_plain(rope: Mapping[str, Any]) -> bool:
    is_plain = rope.keys() == {"rope_type", "rope_theta"} and rope["rope_type"] == "default"
    return is_plain and type(rope["rope_theta"]) in (float, int)


def _is_llama3(rope: Mapping[str, Any], positions: int) -> bool:
    """Whether it is sound: transformers warns of what is not, or refuses it."""
    names = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor")
    original = "original_max_position_embeddings"
    if rope.keys() != {"rope_type", original, *names} or rope["rope_type"] != "llama3":
        return False
    if any(type(rope[name]) is not float for name in names) or not _is_size(rope[original]):
        return False
    is_rising = 0.0 < rope["low_freq_factor"] < rope["high_freq_factor"]
    return is_rising and rope["factor"] >= 1.0 and rope[original] < positions
