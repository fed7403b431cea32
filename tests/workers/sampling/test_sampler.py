"""The sampler against transformers' own filters, and its distribution against theirs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.workers.sampling.sampler import RowSampling, sample, uniform_at

VOCAB = 503


def draw(logits, rows):
    return [sampled.token_id for sampled in sample(logits, rows).listed()]


def reference_probabilities(logits, row):
    """What transformers would sample from, fp32 [vocab]."""
    scores = logits[None].clone()
    if row.banned_ids:
        scores[0, list(row.banned_ids)] = -math.inf
    scores = TemperatureLogitsWarper(row.temperature)(None, scores)
    if row.top_k:
        scores = TopKLogitsWarper(row.top_k)(None, scores)
    if row.top_p < 1:
        scores = TopPLogitsWarper(row.top_p)(None, scores)
    if row.min_p > 0:
        scores = MinPLogitsWarper(row.min_p)(None, scores)
    return scores.softmax(-1)[0]


CASES = [
    RowSampling(1.0, 0, 1.0, 0.0, 0.0),
    RowSampling(0.7, 5, 1.0, 0.0, 0.0),
    RowSampling(1.3, 0, 0.8, 0.0, 0.0),
    RowSampling(1.0, 0, 1.0, 0.1, 0.0),
    RowSampling(0.9, 40, 0.9, 0.02, 0.0),
    RowSampling(8.0, 0, 0.97, 0.0, 0.0),  # flat: the nucleus is wider than the quick candidates
    RowSampling(1.0, 0, 0.9, 0.0, 0.0, banned_ids=(3, 7, 11)),
    RowSampling(1.0, 1, 1.0, 0.0, 0.0),
    RowSampling(1.0, 10**9, 1e-9, 0.0, 0.0),
]


@pytest.mark.parametrize("row", CASES, ids=str)
def test_distribution_is_transformers(row):
    """All quantiles of the uniform number, swept evenly, give exactly the reference's shares."""
    torch.manual_seed(1)
    logits = torch.randn(VOCAB) * 2.5
    want = reference_probabilities(logits, row).double()
    num = 20_000
    rows = [
        RowSampling(
            row.temperature, row.top_k, row.top_p, row.min_p, (i + 0.5) / num, row.banned_ids
        )
        for i in range(num)
    ]
    ids = [i for s in range(0, num, 1000) for i in draw(logits.repeat(1000, 1), rows[s : s + 1000])]
    got = torch.bincount(torch.tensor(ids), minlength=VOCAB).double() / num
    assert set(torch.nonzero(got).flatten().tolist()) <= set(
        torch.nonzero(want).flatten().tolist()
    ), "sampled what transformers filters out"
    assert (got - want).abs().max() <= 1.5 / num


def test_chi_square_with_seeds():
    torch.manual_seed(2)
    logits = torch.randn(VOCAB) * 2
    base = RowSampling(0.8, 50, 0.95, 0.0, 0.0)
    want = reference_probabilities(logits, base).double()
    num = 30_000
    rows = [RowSampling(0.8, 50, 0.95, 0.0, uniform_at(1234, i)) for i in range(num)]
    ids = [i for s in range(0, num, 1000) for i in draw(logits.repeat(1000, 1), rows[s : s + 1000])]
    kept = torch.nonzero(want).flatten()
    got = torch.bincount(torch.tensor(ids), minlength=VOCAB)[kept].double()
    assert stats.chisquare(got.numpy(), (want[kept] / want[kept].sum() * num).numpy()).pvalue > 1e-3


def test_uniform_at_is_uniform_and_unrelated():
    draws = [uniform_at(seed, i) for seed in (0, 1, 2**63, -5) for i in range(5000)]
    assert min(draws) >= 0
    assert max(draws) < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    a, b = [uniform_at(7, i) for i in range(5000)], [uniform_at(8, i) for i in range(5000)]
    assert abs(stats.pearsonr(a, b).statistic) < 0.05
    assert uniform_at(7, 3) == uniform_at(7, 3)


rows_strategy = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 300, 10**6]),
    top_p=st.sampled_from([1e-6, 0.5, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
    banned_ids=st.sampled_from([(), (0,), (1, 2, 3)]),
)


@settings(deadline=None, max_examples=80)
@given(rows=st.lists(rows_strategy, min_size=1, max_size=7), seed=st.integers(0, 1000))
def test_row_does_not_depend_on_its_batch(rows, seed):
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB) * 4
    together = draw(logits.clone(), rows)
    alone = [draw(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    for row, token_id in zip(rows, together):
        assert token_id not in row.banned_ids


def test_greedy_is_argmax_and_bad_rows_are_named():
    torch.manual_seed(3)
    logits = torch.randn(5, VOCAB)
    logits[1, 17] = math.nan
    logits[2, 4] = math.inf
    logits[3] = -math.inf
    rows = [RowSampling(0.0, 0, 1.0, 0.0, 0.0)] * 3 + [RowSampling(1.0, 3, 0.9, 0.1, 0.4)] * 2
    ids = draw(logits.clone(), rows)
    assert ids[0] == int(logits[0].argmax())
    assert ids[1:4] == [-1, -1, -1]
    assert 0 <= ids[4] < VOCAB
