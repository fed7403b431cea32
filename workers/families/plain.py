"""Dense families that differ from Llama in biases, windows and norms of q and k only."""

from __future__ import annotations

from typing import Any

from penstock.workers.families.family import Fields
from penstock.workers.families.reading import attention_biases, windows_by_layer


def llama(hf: Any) -> Fields:
    """It never slides, whatever else config.json holds."""
    return {**attention_biases(hf), "mlp_bias": bool(getattr(hf, "mlp_bias", False))}


def mistral(hf: Any) -> Fields:
    """Without biases."""
    return {"sliding_window": windows_by_layer(hf)}


def qwen2(hf: Any) -> Fields:
    """Biases of q, k and v alone."""
    return {"sliding_window": windows_by_layer(hf), "qkv_bias": True}


def qwen3(hf: Any) -> Fields:
    return {"sliding_window": windows_by_layer(hf), **attention_biases(hf), "qk_norm": "head"}
