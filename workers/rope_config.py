"""The settings of rotary position embedding, read from transformers' `rope_parameters`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from penstock.workers.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/rotary_dim), scaled as `type` says."""

    theta: float
    rotary_dim: int  # the leading dimensions of a head that turn; even
    type: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope: context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin
    factors: tuple[float, ...] = ()  # factors, longrope: the divisor of each frequency
    short_factors: tuple[float, ...] = ()  # longrope: of contexts no longer than before scaling

    def for_length(self, max_length: int) -> RopeConfig:
        """As it is for contexts of up to `max_length` tokens, whatever their own length.

        LongRoPE (arXiv 2402.13753, section 3.3) has one set of factors for contexts within the
        original one, another for longer ones. A key is stored turned, so a sequence cannot change
        from one to the other: the longest one that is served decides for all.
        """
        if self.type != "longrope" or max_length > self.original_max_position_embeddings:
            return self
        return replace(self, factors=self.short_factors)


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries grow with their position p: times 1 + beta * ln(1 + floor(p / period)) (Llama 4)."""

    beta: float
    period: int


def rope_config(given: dict[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """From one of transformers' `rope_parameters`, where it also puts rope_theta and rope_scaling.

    `max_positions`: max_position_embeddings of the model. Raises ConfigError.
    """
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
    original = given.get("original_max_position_embeddings", max_positions)
    stated = given.get("factor") if kind == "longrope" else given["factor"]
    if original < 1 or (stated is not None and stated <= 0):
        raise ConfigError(f"RoPE scaling needs positive factors and contexts; got {given}")
    factor = float(stated or max_positions / original)
    if kind == "longrope":
        return _longrope(given, RopeConfig(theta, rotary_dim, kind, factor, original))
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


def _longrope(given: dict[str, Any], plain: RopeConfig) -> RopeConfig:
    """`plain` with both sets of factors, those of long contexts in use."""
    long, short = (tuple(map(float, given[f"{name}_factor"])) for name in ("long", "short"))
    half, original = plain.rotary_dim // 2, plain.original_max_position_embeddings
    if len(long) != half or len(short) != half or min(*long, *short) <= 0:
        raise ConfigError(f"longrope needs {half} positive long_factor and as many short_factor")
    scale = given.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(max(plain.factor, 1.0)) / math.log(original))
    return replace(plain, factors=long, short_factors=short, attention_factor=float(scale))


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    """The temperature of YaRN (arXiv 2309.00071, eq. 22), in DeepSeek's generalisation."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)
