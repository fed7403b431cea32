"""Groups serve quantised checkpoints: each rank has its rows of codes and scales."""

from __future__ import annotations

import pytest

from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.test_group import both
from tests.workers.weights.test_quantized_checkpoints import LAYOUTS, quantized_copy


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_of_one_process(layout, tmp_path):
    """As stored: blocks of rows, packed rows, and inputs in orders of their own."""
    folder = tmp_path / layout
    quantized_copy(folder, make_checkpoint("llama"), layout)
    group, one = both(str(folder), weights="auto")
    assert group == one
    assert len({tuple(ids) for ids in group.values()}) > 1


def test_experts_of_a_stored_checkpoint(tmp_path):
    quantized_copy(tmp_path / "moe", make_checkpoint("qwen3_moe"), "awq")
    group, one = both(str(tmp_path / "moe"), weights="auto")
    assert group == one
