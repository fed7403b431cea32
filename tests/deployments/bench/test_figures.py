"""Figures of a benchmark against closed forms, on times that were made up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.deployments.bench.figures import (
    ASSUMED,
    EXACT,
    ONE_EACH,
    SPREAD,
    Chunk,
    Outcome,
    Slo,
    figures_of,
    spread_of,
)
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.report import request_rows, table

JOB = Job(0.0, 10, 4)


def outcome(*chunks: tuple, sent_s: float = 1.0, completion: int | None = None, **more) -> Outcome:
    """An answer of chunks (at_s, chars, tokens); it ends with the last of them."""
    made = [Chunk(*chunk) for chunk in chunks]
    ended_s = made[-1].at_s if made else sent_s
    return Outcome(
        JOB, sent_s=sent_s, ended_s=ended_s, chunks=made, completion_tokens=completion, **more
    )


def test_percentiles_of_known_samples():
    spread = spread_of(list(range(101)))
    assert spread == {"mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    two = spread_of([0.0, 1.0], 1e3)
    assert two is not None and two["p90"] == pytest.approx(900)  # between samples: linear
    assert spread_of([7.0]) == {"mean": 7, "p50": 7, "p90": 7, "p99": 7, "max": 7}
    assert spread_of([]) is None


def test_percentiles_of_an_exponential():
    spread = spread_of(np.random.default_rng(0).exponential(2.0, 200_000).tolist())
    assert spread is not None
    for rank in (50, 90, 99):
        assert spread[f"p{rank}"] == pytest.approx(-2 * math.log(1 - rank / 100), rel=0.02)


def test_one_token_a_chunk():
    answer = outcome((1.5, 3, 1), (1.6, 4, 1), (1.8, 1, 1), (2.1, 2, 1), completion=4)
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.itl_s() == pytest.approx([0.1, 0.2, 0.3])  # not times since the first token
    assert answer.tpot_s() == pytest.approx(0.2)
    assert answer.e2e_s == pytest.approx(1.1)
    assert answer.token_counts() == ([1, 1, 1, 1], EXACT)


def test_a_chunk_of_several_tokens_spreads_its_pause():
    answer = outcome((2.0, 5, 3), (2.4, 9, 4), (2.5, 0, 0), (2.9, 2, 2), completion=9)
    # Three came at first, and have no time between them; an empty chunk's pause goes to the next.
    assert answer.itl_s() == pytest.approx([0.1] * 4 + [0.25] * 2)
    assert sum(answer.itl_s()) == pytest.approx(0.9)
    assert answer.pauses_s() == pytest.approx([0.4, 0.1, 0.4])
    assert answer.tpot_s() == pytest.approx(0.9 / 8)


@pytest.mark.parametrize(
    ("completion", "counts", "how"),
    [
        (3, [1, 1, 1], ONE_EACH),
        (4, [1, 1, 1], ONE_EACH),  # the token that ends an answer has no text
        (None, [1, 1, 1], ASSUMED),
        (10, [2, 3, 5], SPREAD),
        (6, [1, 2, 3], SPREAD),
    ],
)
def test_tokens_of_chunks_that_the_server_does_not_count(completion, counts, how):
    answer = outcome((2.0, 4), (2.1, 6), (2.2, 10), completion=completion)
    if how is SPREAD:
        assert sum(counts) == completion
    assert answer.token_counts() == (counts, how)


def test_one_token_has_no_time_per_token():
    assert outcome((2.0, 4, 1)).tpot_s() is None
    assert outcome((2.0, 4, 1)).itl_s() == []


def test_rates_errors_and_goodput():
    outcomes = [
        outcome((1.1, 1, 1), (3.0, 1, 1), completion=2, prompt_tokens=8),  # TPOT 1900 ms
        outcome((2.0, 1, 1), (2.1, 1, 1), completion=2, prompt_tokens=8),  # TTFT 1000 ms
        outcome((1.2, 1, 1), (1.3, 1, 1), completion=2),  # good; prompt as planned
        outcome((1.2, 1, 1), error="worker_lost", sent_s=1.0),
        outcome(error="timeout", sent_s=1.5),
        outcome(error="timeout", sent_s=1.5),
        outcome(completion=0, prompt_tokens=8, sent_s=1.5),  # answered with nothing
    ]
    figures = figures_of(outcomes, Slo(ttft_ms=500, tpot_ms=200))
    assert figures["wall_s"] == pytest.approx(2.0)
    assert figures["num_requests"] == 7 and figures["num_completed"] == 4
    assert figures["num_empty"] == 1
    assert figures["errors"] == {"timeout": 2, "worker_lost": 1}
    assert figures["requests_per_s"] == pytest.approx(2.0)
    assert figures["input_tokens"] == 8 + 8 + 10 + 8 and figures["input_tokens_estimated"] == 1
    assert figures["output_tokens"] == 6
    assert figures["output_tokens_per_s"] == pytest.approx(3.0)
    assert figures["goodput"]["requests_per_s"] == pytest.approx(0.5)
    assert figures["goodput"]["share"] == pytest.approx(1 / 7)
    text = table(figures)
    assert "error: timeout" in text and "0.50 (14 %)" in text
    assert len(request_rows(outcomes)) == 7


@pytest.mark.parametrize(
    ("slo", "num_met"),
    [(Slo(ttft_ms=500), 2), (Slo(tpot_ms=200), 2), (Slo(50, 50), 0), (Slo(1000.001, 2000), 3)],
)
def test_each_demand_of_an_slo_counts(slo, num_met):
    outcomes = [
        outcome((1.1, 1, 1), (3.0, 1, 1)),
        outcome((2.0, 1, 1), (2.1, 1, 1)),
        outcome((1.2, 1, 1), (1.3, 1, 1)),
        outcome((1.2, 1, 1), error="worker_lost"),
    ]
    assert sum(slo.is_met(each) for each in outcomes) == num_met


def test_a_run_of_nothing_but_errors_still_has_figures():
    figures = figures_of([outcome(error="connection")], Slo(ttft_ms=1))
    assert figures["ttft_ms"] is None and figures["requests_per_s"] == 0
    assert "error: connection" in table(figures)
    assert figures_of([], Slo())["num_requests"] == 0


def test_a_late_client_is_reported():
    late = figures_of([outcome((1.1, 1, 1), late_s=0.3)], Slo())
    assert "WARNING" in table(late)
    assert "WARNING" not in table(figures_of([outcome((1.1, 1, 1))], Slo()))
