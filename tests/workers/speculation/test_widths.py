"""How many draft tokens are verified: against all numbers tried in turn, and what is learnt."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.workers.speculation.draft import Draft, Offer, StepSize
from penstock.workers.speculation.widths import GAIN, Acceptance, MeasuredWidths, StepCosts

FLAT = {1: 1.0, 8: 1.0, 16: 2.0}
STEEP = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}


def draft(num: int, match_length: int = 5, source: str = "lookup") -> Draft:
    return Draft(tuple(range(num)), source, match_length)


def test_costs_lie_on_straight_lines_and_go_on_beyond_the_last():
    costs = StepCosts({1: 1.0, 3: 2.0, 4: 1.5, 8: 4.0}, key_s=0.01)
    found = [costs.seconds(rows, 0) for rows in (1, 2, 3, 4, 6, 8, 10)]
    # 3 and 4 rows: the mean of 2 and 1.5, for 4 rows never take less than 3.
    assert found == pytest.approx([1.0, 1.375, 1.75, 1.75, 2.875, 4.0, 5.125])
    assert costs.seconds(1, 50) == pytest.approx(1.5)


@pytest.mark.parametrize(("rows_s", "pays"), [(0.001, True), (0.3, False)])
def test_real_steps_correct_what_was_measured_at_the_start(rows_s, pays):
    """Rows looked free, or too dear, as others used the machine; steps say what they take."""
    measured = {1: 1.0, 4: 1.0, 16: 1.01} if not pays else {1: 1.0, 4: 1.6, 16: 5.0}
    widths, step, rng = MeasuredWidths(StepCosts(measured)), StepSize(2, 2, 0), random.Random(0)
    for _ in range(300):
        noise = rng.choice((0.9, 1.0, 1.1, 4.0))
        widths.observe_step(step, 0, 0, 7.0 * noise)
        widths.observe_step(step, 4, 0, 7.0 * (1 + 4 * rows_s) * rng.choice((0.9, 1.0, 1.1)))
    for i in range(60):  # a quarter of the first tokens are right
        widths.observe(draft(4), int(i % 4 == 0))
    chosen = widths.choose([Offer(draft(4), 0)] * 2, step, 8)
    assert (sum(chosen) > 0) == pays


@pytest.mark.parametrize("seed", range(20))
def test_no_other_widths_promise_more(seed):
    """Where all rows see as many keys, the chosen widths are the best of all."""
    rng = random.Random(seed)
    costs = StepCosts(dict(zip((1, 2, 4, 8), itertools.accumulate(rng.random() for _ in range(4)))))
    widths = MeasuredWidths(costs)
    for _ in range(200):
        widths.observe(draft(4, rng.choice((3, 5, 10, 30))), rng.randint(0, 4))
    offers = [Offer(draft(rng.randint(1, 4), rng.choice((3, 5, 10, 30))), 0) for _ in range(3)]
    survival = [widths.acceptance.survival(offer.draft) for offer in offers]
    step, room = StepSize(5, 3, 0), rng.randint(1, 12)

    def rate(chosen):
        tokens = 3.0 + sum(sum(each[:num]) for each, num in zip(survival, chosen))
        return tokens / costs.seconds(5 + sum(chosen), 0)

    chosen = widths.choose(offers, step, room)
    options = itertools.product(*(range(len(offer.draft.token_ids) + 1) for offer in offers))
    best = max((each for each in options if sum(each) <= room), key=rate)
    if rate(best) > GAIN * rate((0, 0, 0)) * (1 + 1e-9):
        assert rate(chosen) == pytest.approx(rate(best))
    else:
        assert chosen == [0, 0, 0]


def test_free_rows_are_taken_and_dear_ones_are_not():
    step = StepSize(1, 1, 0)
    assert MeasuredWidths(StepCosts(FLAT)).choose([Offer(draft(7), 0)], step, 99) == [7]
    assert MeasuredWidths(StepCosts(STEEP)).choose([Offer(draft(7), 0)], step, 99) == [0]
    assert MeasuredWidths(StepCosts(FLAT)).choose([Offer(draft(7), 0)], step, 3) == [3]
    dear_keys = StepCosts(FLAT, key_s=0.001)
    assert MeasuredWidths(dear_keys).choose([Offer(draft(7), 9000)], StepSize(1, 1, 9000), 9) == [0]


def test_drafts_that_fail_end_and_those_that_are_right_grow():
    costs = StepCosts({1: 1.0, 2: 1.1, 16: 2.5})
    widths, step = MeasuredWidths(costs), StepSize(1, 1, 0)
    first = widths.choose([Offer(draft(15), 0)], step, 99)[0]
    for _ in range(40):
        widths.observe(draft(15), 0)
    assert widths.choose([Offer(draft(15), 0)], step, 99) == [0]
    assert widths.choose([Offer(draft(15, 40), 0)], step, 99)[0] > 0, "another kind of match"
    for _ in range(200):
        widths.observe(draft(15), 15)
    assert widths.choose([Offer(draft(15), 0)], step, 99)[0] == 15 > first > 0


def test_a_kind_of_draft_that_did_not_pay_is_tried_again_after_a_while():
    widths, step = MeasuredWidths(StepCosts({1: 1.0, 2: 1.03, 16: 2.0})), StepSize(1, 1, 0)
    offer = Offer(draft(1, match_length=1), 0)
    while widths.choose([offer], step, 9) == [1]:
        widths.observe(offer.draft, 0)
    num_steps = next(i for i in range(10_000) if widths.choose([offer], step, 9) == [1])
    assert 10 < num_steps < 1000


def test_survival_follows_what_was_seen():
    """Of the third token, given the first two: right in 3 of 4 cases."""
    acceptance = Acceptance()
    for i in range(4000):
        acceptance.observe(draft(3), 3 if i % 4 else 2)
    one, two, three = acceptance.survival(draft(3))
    assert one > 0.99 and two > 0.98
    assert three / two == pytest.approx(0.75, abs=0.08)
    assert acceptance.survival(draft(3, source="grammar"))[0] == pytest.approx(0.95)
