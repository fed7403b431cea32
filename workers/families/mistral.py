"""Mistral's dense families: Mistral, Ministral with windows by layer, Ministral 3."""

from __future__ import annotations

from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.family import Fields
from penstock.workers.families.reading import windows_by_layer
from penstock.workers.rope_config import QueryScaling


def mistral(hf: Any) -> Fields:
    """Without biases."""
    return {"sliding_window": windows_by_layer(hf)}


def ministral3(hf: Any) -> Fields:
    given = hf.rope_parameters
    beta, period = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    if beta is None:
        return mistral(hf)
    if period is None or period < 1:
        raise ConfigError(
            "llama_4_scaling_beta needs original_max_position_embeddings, a positive number; got "
            f"{period}"
        )
    return {**mistral(hf), "query_scaling": QueryScaling(float(beta), int(period))}
