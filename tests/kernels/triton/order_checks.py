"""A row has the same bits in any batch, decoded or computed again as part of a prompt. Run by
test_triton.py, in a process of its own like checks.py; the cases are those that
`benchmarks.gpu.check` runs on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import order
from penstock.kernels.triton import attention as attention_triton
from tests.kernels.triton.interpreter import DEVICE

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALL = [(name, dtype) for name in order.CHECKS for dtype in (FP32, FP16)]
ALL += [("order: attention", BF16), ("order: rolled KV", BF16)]


def differing(name: str, dtype: torch.dtype) -> dict[str, int]:
    return {case: int(count) for case, count, _ in order.CHECKS[name](dtype) if count}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(attention_triton, "SPLIT", 128)  # three pieces of a short context


@pytest.mark.parametrize(("name", "dtype"), ALL, ids=str)
def test_bits_do_not_depend_on_the_batch(name, dtype):
    assert not differing(name, dtype)


def test_nor_on_the_least_tile(monkeypatch):
    """Of 64 rows, as on Hopper: against a prompt, and against rows of smaller tiles."""
    monkeypatch.setattr(order, "SHAPES", [order.SHAPES[2]])
    monkeypatch.setattr(order, "INTERPRETED", {FP16: 0})
    monkeypatch.setattr(attention_triton, "_least_rows", lambda q: 64)
    assert not differing("order: attention", FP16)
