"""The structs of a step refuse tensors that do not fit together: a kernel would read past them."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.types import DecodeBatch, PrefillBatch


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tables", "lens"),
    [
        (ints(3, 4), ints(2)),
        (ints(2, 4), ints(3)),
        (ints(2, 4, dtype=torch.int64), ints(2)),
        (ints(2, 4), ints(2, dtype=torch.int64)),
        (ints(4, 2).T, ints(2)),
        (ints(2, 4), ints(4)[::2]),
    ],
)
def test_tables_and_lengths_that_do_not_fit(tables, lens):
    with pytest.raises(AssertionError):
        DecodeBatch(tables, lens, 1)
    with pytest.raises(AssertionError):
        PrefillBatch(tables, ints(len(lens) + 1), lens, 1)


@pytest.mark.parametrize("starts", [ints(2), ints(4), ints(3, dtype=torch.int64), ints(6)[::2]])
def test_starts_that_do_not_fit(starts):
    with pytest.raises(AssertionError):
        PrefillBatch(ints(2, 4), starts, ints(2), 1)


def test_an_empty_batch_and_a_table_that_is_a_view():
    DecodeBatch(ints(0, 0), ints(0), 0)
    PrefillBatch(ints(0, 0), ints(1), ints(0), 0)
    DecodeBatch(ints(5, 9)[1:3, :4], ints(2), 8)
