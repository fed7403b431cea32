"""The ridge by the formula, for every format that most weights of a model may be in."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from penstock.kernels.types import LinearFormat
from penstock.workers.config import EngineConfig
from penstock.workers.memory.arena import BlockLayout
from penstock.workers.planning.hardware import DEVICES, WEIGHT_FORMATS
from penstock.workers.planning.shapes import SHAPES
from penstock.workers.scheduling.deferral import rule_of

LAYOUT = BlockLayout(
    num_layers=32, num_kv_heads=32, block_size=16, head_dim=128, dtype=torch.bfloat16
)


@pytest.mark.parametrize(
    ("weights", "rows"),
    [
        *(("fp32", 25), ("bf16", 12), ("fp16", 12), ("int8", 6), ("fp8", 6)),
        *(("int8g", 7), ("int4", 3), ("nf4", 3)),
    ],
)
def test_the_ridge_without_a_measurement(weights, rows):
    """F b_w / 2B, with the bytes of a weight and its scales: 1e12 b_w / 160e9 on the assumed CPU,
    where all is multiplied in fp32."""
    rule = rule_of(
        EngineConfig(kv_commit="deferred"),
        SHAPES["Llama-2-7B"],
        lambda num_rows: None,
        most_rows=1,  # nothing to measure
        device=None,
        weights=weights,
        layout=LAYOUT,
    )
    assert rule.ridge_tokens == rows


def test_every_format_of_a_linear_layer_has_its_bytes():
    """fp16 has those of bf16; a format that is missing would count as it, too."""
    assert set(get_args(LinearFormat)) - {"fp16"} == WEIGHT_FORMATS.keys()
    assert DEVICES["cpu"].peak("bf16") == DEVICES["cpu"].peak("fp32")
