"""The settings of rotary position embedding, read from transformers' `rope_parameters`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from penstock.workers.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/rotary_dim), scaled as `type` says."""

    theta: float
    rotary_dim: int  # the leading dimensions of a head that turn; even
    type: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn: context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin
    factors: tuple[float, ...] = ()  # factors: the divisor of each frequency


def rope_config(hf: Any, head_dim: int) -> RopeConfig:
    """From `rope_parameters`, where transformers also puts rope_theta and rope_scaling."""
    given = hf.rope_parameters
    kind = given.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"RoPE scaling {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    theta = float(given["rope_theta"])
    rotary_dim = int(head_dim * given.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    if kind == "factors":
        return RopeConfig(theta, rotary_dim, kind, factors=given["factors"])
    original = given.get("original_max_position_embeddings", hf.max_position_embeddings)
    if original < 1 or (given["factor"] is not None and given["factor"] <= 0):
        raise ConfigError(f"RoPE scaling needs positive factors and contexts; got {given}")
    factor = float(given["factor"] or hf.max_position_embeddings / original)
    return RopeConfig(
        theta,
        rotary_dim,
        kind,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    """The temperature of YaRN (arXiv 2309.00071, eq. 22), in DeepSeek's generalisation."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)
