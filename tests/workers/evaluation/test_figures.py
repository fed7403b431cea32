"""Means and standard errors against naive computations, and the windows that they are of."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from penstock.workers.errors import ConfigError, InvariantError
from penstock.workers.evaluation.combination import Combination, ContextChoice
from penstock.workers.evaluation.eval_set import cut_windows
from penstock.workers.evaluation.figures import Scores, change_of, estimate, figures_of

RNG = np.random.default_rng(0)
BASE = RNG.gamma(2.0, 1.5, size=(7, 40))
OTHER = BASE + RNG.normal(0.02, 0.2, size=BASE.shape)


def scores(nll, answers=()) -> Scores:
    return Scores(nll, np.zeros(nll.shape, np.int64), np.abs(nll), answers)


def test_a_standard_error_is_that_of_the_windows_means():
    means = [statistics.fmean(row) for row in BASE.tolist()]
    found = estimate(BASE.mean(axis=1))
    assert found.value == pytest.approx(statistics.fmean(means))
    assert found.error == pytest.approx(statistics.stdev(means) / math.sqrt(7))


def test_a_change_is_paired_by_window():
    differences = [statistics.fmean(row) for row in (OTHER - BASE).tolist()]
    ratio = math.exp(statistics.fmean(differences))
    found = change_of(OTHER, BASE)
    assert found.value == pytest.approx(ratio - 1)
    error = ratio * statistics.stdev(differences) / math.sqrt(7)
    assert found.error == pytest.approx(error)
    both = figures_of(scores(OTHER), scores(BASE))
    assert both.change == found
    assert both.perplexity.error is not None
    assert both.perplexity.error / both.perplexity.value > 3 * error  # which is not paired


def test_the_error_tells_how_far_repetitions_scatter():
    """Over many draws of windows, the spread of the change is the error that each draw states."""
    changes, errors = [], []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        base = rng.gamma(2.0, 1.5, size=(16, 30))
        window = rng.normal(0.03, 0.02, size=(16, 1))  # tokens of a window share it
        found = change_of(base + window + rng.normal(0, 0.05, size=base.shape), base)
        changes.append(found.value)
        assert found.error is not None
        errors.append(found.error)
    assert statistics.stdev(changes) == pytest.approx(statistics.fmean(errors), rel=0.1)


def test_one_window_has_no_error():
    found = figures_of(scores(OTHER[:1]), scores(BASE[:1]))
    assert found.change.error is None and found.perplexity.error is None
    assert found.greedy is None


def test_greedy_figures_by_hand():
    base, other = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]
    found = figures_of(scores(OTHER, other), scores(BASE, base)).greedy
    assert found is not None and found.equal_ids.value == 7 / 8 and found.identical == 0.5
    assert found.before_first_difference == 3


def test_scores_of_other_windows_are_refused():
    with pytest.raises(InvariantError):
        figures_of(scores(OTHER[:3]), scores(BASE))


def test_windows_are_even_and_do_not_overlap():
    texts = [range(100, 200), range(300, 350)]
    found = cut_windows(texts, 4, 21, prefix=[1])
    assert all(len(each) == 21 and each[0] == 1 for each in found)
    assert [each[1] for each in found] == [115, 302, 165, 327]
    whole = cut_windows([range(60)], 3, 20)
    assert [token for each in whole for token in each] == list(range(60))


def test_a_text_that_is_too_short_is_named():
    with pytest.raises(ConfigError, match="text 2 has 50 tokens, and 3 windows of it take 60"):
        cut_windows([range(100), range(50)], 6, 20)


@pytest.mark.parametrize("text", ["sink", "4", "4+", "+4", "4+8/", "a+b", "", "4+8/2/1"])
def test_a_context_policy_that_is_none(text):
    with pytest.raises(ConfigError, match=r"SINKS\+WINDOW"):
        ContextChoice.parse(text)


def test_context_policies_have_the_requests_names():
    asked = ContextChoice.parse("4+508/64").request
    assert asked == {"context_policy": "sink_window", "sinks": 4, "window": 508, "roll": 64}
    assert str(ContextChoice.parse("4+508/64")) == "4+508/64"
    assert str(ContextChoice.parse("16+48")) == "16+48"


def test_names_say_what_differs():
    made = Combination("int8", "row", quantize_o=False, kv="fp8", kv_group="head")
    assert str(made) == "weights int8, group row, o_proj plain; KV fp8, group head; context full"
