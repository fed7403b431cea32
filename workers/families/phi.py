"""Phi-3 and Phi-4: fused projections, and LongRoPE."""

from __future__ import annotations

from typing import Any

from penstock.workers.families.family import Fields
from penstock.workers.families.reading import same_window


def phi3(hf: Any) -> Fields:
    """Without biases."""
    return {"sliding_window": same_window(hf)}
