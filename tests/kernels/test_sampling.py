"""Sampling on both CPU paths against a sort in fp64, a row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2

from penstock.kernels.reference.sampling import sample_reference
from penstock.kernels.sampling import sample
from penstock.kernels.types import SamplingRows

FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top_k": (1.4, 5, 1.0, 0.0),
    "top_k beyond 256": (1.0, 300, 1.0, 0.0),
    "top_k beyond the vocabulary": (1.0, 10**9, 1.0, 0.0),
    "top_p": (0.8, 0, 0.8, 0.0),
    "top_p, flat": (0.1, 0, 0.97, 0.0),
    "top_p of nearly nothing": (1.0, 0, 1e-9, 0.0),
    "min_p": (1.0, 0, 1.0, 0.1),
    "all": (1.1, 40, 0.9, 0.02),
}


def rows_of(num_rows: int, *columns: float) -> SamplingRows:
    inverse_temperature, top_k, top_p, min_p = (
        torch.full((num_rows,), value, dtype=torch.float64) for value in columns
    )
    uniform = torch.rand(num_rows, dtype=torch.float64)
    return SamplingRows(inverse_temperature, top_k, top_p, min_p, uniform)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", [1, 7, 16, 257, 503, 4099])
def test_equals_reference(cpu_path: str, vocab: int, name: str) -> None:
    for scale in (0.1, 2.0, 8.0):
        logits = torch.randn(48, vocab) * scale
        rows = rows_of(48, *FILTERS[name])
        assert torch.equal(sample(logits.clone(), rows), sample_reference(logits, rows))


def test_strided_rows_and_threads(native_path: None) -> None:
    """The same ids from a view, and from two threads as from one."""
    wide = torch.randn(33, 5000)
    logits = wide[:, 700:3900]
    rows = rows_of(33, *FILTERS["all"])
    want = sample(logits.contiguous(), rows)
    assert torch.equal(sample(logits, rows), want)
    torch.set_num_threads(2)
    assert torch.equal(sample(logits, rows), want)


def test_unusable_rows_are_named(cpu_path: str) -> None:
    logits = torch.randn(6, 100)
    logits[0, 5] = math.nan
    logits[1, 99] = math.inf
    logits[2] = -math.inf
    logits[3, :97] = -math.inf
    for columns in ((1.0, 0, 0.9, 0.0), (0.0, 0, 1.0, 0.0)):
        ids = sample(logits.clone(), rows_of(6, *columns)).tolist()
        assert ids[:3] == [-1, -1, -1]
        assert ids[3] in (97, 98, 99)
        assert all(0 <= token_id < 100 for token_id in ids[3:])


def test_equal_logits_at_the_edge_all_stay(cpu_path: str) -> None:
    """Five equal leaders, top_k 2: any of the five may come, nothing else."""
    logits = torch.zeros(4000, 50)
    logits[:, 20:25] = 3.0
    ids = sample(logits, rows_of(4000, 1.0, 2, 1.0, 0.0))
    assert set(ids.tolist()) == {20, 21, 22, 23, 24}


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "min_p"])
def test_ids_are_distributed_as_the_probabilities(cpu_path: str, name: str) -> None:
    """Chi-square of 20,000 draws from 12 tokens at the 0.1 % level; the seed is fixed."""
    logits = torch.randn(12) * 1.5
    scale, top_k, top_p, min_p = FILTERS[name]
    p = (logits.double() * scale).softmax(0)
    down = p.sort(descending=True).values
    if top_k:
        p[p < down[top_k - 1]] = 0
    p[p < down[int((down.cumsum(0) >= top_p).int().argmax())]] = 0
    p[p < min_p * down[0]] = 0
    p /= p.sum()
    ids = sample(logits.expand(20_000, 12).contiguous(), rows_of(20_000, *FILTERS[name]))
    counts = torch.bincount(ids, minlength=12).double()
    assert not counts[p == 0].any()
    expected = 20_000 * p[p > 0]
    statistic = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(0.999, df=len(expected) - 1)


def test_the_first_of_equal_leaders_is_greedy(cpu_path: str) -> None:
    logits = torch.zeros(2, 50)
    logits[:, [7, 31]] = 1.0
    assert sample(logits, rows_of(2, *FILTERS["greedy"])).tolist() == [7, 7]
