"""How far a draft model goes on: as far as pays by measured times, and not in vain for long."""

from __future__ import annotations

import pytest

from penstock.workers.speculation.draft import Draft, Drafted, StepSize
from penstock.workers.speculation.draft_steps import PROBE_STEPS, MeasuredSteps
from penstock.workers.speculation.widths import PLAIN_STEPS, MeasuredWidths, StepCosts

ONE = StepSize(1, 1, 0)


def drafted(*probabilities: float) -> Draft:
    return Draft(tuple(range(len(probabilities))), "draft", probabilities=probabilities)


def steps_with(model_s: float, draft_s: float, row_s: float = 0.02) -> MeasuredSteps:
    """One row of the model takes `model_s`, each further one `row_s` of that; of the draft model
    `draft_s`, and nothing for further ones."""
    widths = MeasuredWidths(StepCosts({1: model_s, 11: model_s * (1 + 10 * row_s)}))
    for num_rows in range(1, 9):  # as measured
        step = StepSize(num_rows, num_rows, 0)
        widths.observe_step(step, 0, 0, widths.costs.seconds(num_rows, 0))
    return MeasuredSteps(widths, StepCosts({1: draft_s, 8: draft_s}))


def grown(steps: MeasuredSteps, step: StepSize, probability: float, most: int = 30) -> int:
    """How many tokens are proposed for a sequence whose drafts all have this probability."""
    kinds: tuple[float, ...] = ()
    gain, seconds = 0.0, 0.0
    survival = 1.0
    while len(kinds) < most:
        state = Drafted((survival,), gain, len(kinds), 0, seconds)
        if not steps.choose(state, step):
            break
        kinds += (probability,)
        survival = steps.survival(drafted(*kinds))
        gain, seconds = gain + survival, seconds + steps.costs.seconds(1, 0)
    return len(kinds)


def test_it_goes_on_while_one_more_token_promises_more_a_second():
    """Against the best number of tokens by trying all, where each is right with probability p."""
    for draft_s in (0.05, 0.1, 0.2, 0.35, 0.5):
        steps = steps_with(1.0, draft_s)
        for _ in range(400):  # the draft model says 0.97 and more, and is right in 9 of 10
            for i in range(10):
                steps.widths.observe(drafted(0.99), int(i > 0))
        right = steps.widths.acceptance.share("draft")
        assert right == pytest.approx(0.9, abs=0.02)
        rates = []
        for num in range(31):
            tokens = sum(right**i for i in range(num + 1))
            rates.append(tokens / (1 + 0.02 * num + draft_s * num))
        best = max(range(31), key=rates.__getitem__)
        found = grown(steps, ONE, 0.99)
        assert abs(found - best) <= 1, (draft_s, found, best)
        assert rates[found] > 0.995 * max(rates)


def test_it_stops_where_it_is_not_sure():
    steps = steps_with(1.0, 0.1)
    sure, unsure = grown(steps, ONE, 0.99), grown(steps, ONE, 0.3)
    assert unsure < 4 < sure


def test_an_expensive_draft_model_proposes_nothing_but_a_probe():
    steps = steps_with(1.0, 0.9)
    chosen = [steps.choose(Drafted((1.0,), 0.0, 0, 0, 0.0), ONE) for _ in range(2 * PROBE_STEPS)]
    assert sum(chosen) == 2 and chosen[PROBE_STEPS - 1] == chosen[-1] == 1


def test_one_that_is_never_right_is_left_alone():
    steps = steps_with(1.0, 0.1)
    assert grown(steps, ONE, 0.99) > 0
    for _ in range(40):
        steps.widths.observe(drafted(0.99, 0.99), 0)
    assert grown(steps, ONE, 0.99) == 0


def test_real_steps_correct_what_was_measured_at_the_start():
    steps = steps_with(1.0, 0.1)
    for i in range(200):
        steps.observe(1, 0, 0.9 if i % 3 else 5.0)  # at times others are in the way
    assert 8 < steps.scale < 16 and grown(steps, ONE, 0.99) == 0


def test_a_model_that_was_measured_in_a_slow_moment_is_corrected_too():
    """Drafts paid by what was measured; by real steps of the model they do not."""
    steps = steps_with(1.0, 0.3)
    assert grown(steps, ONE, 0.99) > 1
    for i in range(200):
        steps.widths.observe_step(ONE, 2 * (i % 2), 0, 0.3 if i % 5 else 3.0)
    assert steps.widths.watch.pace_of(1) < 0.4 and grown(steps, ONE, 0.99) == 0


def test_rows_that_cost_more_than_was_measured_are_learnt():
    """Few numbers of rows were measured, and more cost more than a straight line says."""
    steps, step = steps_with(1.0, 0.02, row_s=0.001), StepSize(4, 4, 0)
    before = grown(steps, step, 0.99)
    for i in range(300):
        num = 0 if steps.widths.watch.wants_plain(4) else 4 + i % 8
        steps.widths.observe_step(step, num, 0, 1.0 + 0.15 * num)
    assert steps.widths.watch.pace_of(4) == pytest.approx(1.0, abs=0.05)
    assert grown(steps, step, 0.99) < before


def test_one_step_in_a_while_is_without_drafts():
    steps = steps_with(1.0, 0.1)
    state, chosen = Drafted((1.0,), 0.0, 0, 0, 0.0), []
    for _ in range(3 * PLAIN_STEPS):
        chosen.append(steps.choose(state, ONE))
        steps.widths.observe_step(ONE, chosen[-1], 0, 1.0)
    assert chosen.count(0) in (2, 3)


def test_the_likeliest_of_several_go_on():
    """A step of the draft model for all costs as much as for one, but rows of the model do."""
    steps = steps_with(1.0, 0.1, row_s=0.1)
    step = StepSize(4, 4, 0)
    assert steps.choose(Drafted((1.0, 0.9, 0.1, 0.01), 0.0, 0, 0, 0.0), step) == 2
    assert steps.is_likely(Draft((1,), "grammar"))
    assert not steps.is_likely(Draft((1,), "lookup", 3))
