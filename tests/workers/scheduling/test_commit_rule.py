"""Commit or recompute: the rule against the idea it comes from, and against naive step times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import SHAPES
from penstock.workers.scheduling.commit_rule import CommitRule
from penstock.workers.scheduling.deferral import Deferral


def rule_of(model="Llama-2-7B", device="H200", **more):
    bound = Roofline(SHAPES[model], DEVICES[device])
    return CommitRule(bound.ridge_tokens, bound.read_s_per_token, bound.compute_s_per_token, **more)


def test_the_numbers_of_the_research():
    """H200, Llama-2-7B, 64 sequences of 2048: 142 pending tokens are free, 1235 hidden at best."""
    rule = rule_of(max_per_sequence=10**6)
    batch = {"num_scheduled": 64, "num_cached": 64 * 2048}
    assert rule.free_tokens(64) == 142
    assert rule.always(142, **batch).branch == "free"
    assert -(-142 // 16) == 9  # blocks of grace
    hidden = rule.always(143, **batch)
    assert (hidden.stays, hidden.branch) == (True, "cheaper")
    assert hidden.compute_s == pytest.approx(13.1e-6, rel=0.1)
    assert hidden.load_s == pytest.approx(64 * 2048 * 0.11e-6, rel=0.05)
    most = max(m for m in range(1000, 1400) if rule.always(m, **batch).stays)
    assert most == pytest.approx(1235, abs=2)
    assert rule.always(most + 1, **batch).branch == "dearer"
    nothing_read = rule.always(143, num_scheduled=64, num_cached=0)
    assert (nothing_read.stays, nothing_read.branch) == (False, "dearer")


RULES = {
    "nt": st.floats(1, 500),
    "compute_us": st.floats(0.01, 100),
    "pending": st.integers(1, 300),
    "scheduled": st.integers(0, 400),
    "limit": st.integers(0, 200),
}


@settings(max_examples=300, deadline=None)
@given(**RULES, read_us=st.floats(0, 10), cached=st.integers(0, 10**5))
def test_always_against_the_time_of_a_step(
    nt, read_us, compute_us, pending, scheduled, cached, limit
):
    """Linear layers are flat below the ridge, then td a row; then K and V are read. Beside those
    reads what stays makes no step longer, and after them by less than they take."""
    rule = CommitRule(nt, read_us * 1e-6, compute_us * 1e-6, limit)
    reads_us = cached * read_us
    before_us = max(0.0, scheduled - nt) * compute_us
    over_us = max(0.0, scheduled + pending - nt) * compute_us - before_us
    decision = rule.always(pending, num_scheduled=scheduled, num_cached=cached)
    close = 1e-6 * max(1.0, over_us)
    if decision.branch == "free":
        assert over_us <= close and pending <= limit
    elif decision.branch == "cheaper":
        assert -close < over_us < reads_us + close and pending <= limit
    elif decision.branch == "dearer":
        assert over_us > reads_us - close and pending <= limit
        assert scheduled + pending > int(nt), "would have been free"
    else:
        assert decision.branch == "limit" and pending > limit
    assert decision.stays == (decision.branch in ("free", "cheaper"))
    assert str(pending) in str(decision)
    if decision.branch in ("cheaper", "dearer"):
        assert "reading K and V" in str(decision)


@settings(max_examples=300, deadline=None)
@given(
    nt=st.floats(1, 60),
    num_sequences=st.integers(1, 8),
    restore_steps=st.floats(0, 300),
    num_steps=st.integers(1, 40),
    to_end=st.floats(1, 30),
)
def test_instead_of_a_preemption_at_most_twice_the_better_choice(
    nt, num_sequences, restore_steps, num_steps, to_end
):
    """Sequences that all run out of blocks go on without until one is refused: what they repeat
    beyond the ridge, added up row by row, has cost less than a preemption at once."""
    rule = CommitRule(nt, 0.0, 1e-3, 64)
    deferral = Deferral(rule, "pressure", 64, num_scratch_blocks=64)
    restore_s, cost_s = restore_steps * 1e-3, 0.0
    for step in range(1, num_steps + 1):
        deferral.begin_step()
        rows = num_sequences - 1  # others: each has a row at least
        for _ in range(num_sequences):
            verdict = deferral.stored(
                length=step,
                fits=0,
                num_scheduled=rows,
                num_cached=0,
                num_steps=to_end,
                restore_s=lambda: restore_s,
            )
            beyond = max(0.0, rows + step - nt) - max(0.0, rows - nt)
            assert verdict.decision is not None and verdict.decision.is_pressed
            if verdict.num_stored is None:
                refused = verdict.decision.compute_s
                assert refused >= max(restore_s, cost_s + beyond * 1e-3) - 1e-9
                if to_end == 1.0:
                    assert refused == pytest.approx(cost_s + beyond * 1e-3, abs=1e-9)
                deferral.preempted()
                assert deferral.spent_s == 0.0
                return
            if verdict.decision.branch == "cheaper":
                cost_s += beyond * 1e-3
            rows += step - 1
            assert cost_s <= restore_s + 1e-9
            assert deferral.spent_s == pytest.approx(cost_s, abs=1e-9)
    deferral.begin_step()  # a step in which no sequence lacks a block ...
    deferral.begin_step()
    assert deferral.spent_s == 0.0, "... ends the episode"


def test_td_is_what_the_repetition_takes_until_a_sequence_ends():
    """Six more steps with 15 other rows, from the third pending token on, added up one by one."""
    rule = CommitRule(10, 0.0, 1e-3, 64)
    decision = rule.instead(3, num_scheduled=15, num_steps=6, spent_s=0.5, restore_s=1.0)
    rows = [(15 + m) - 15 for m in range(3, 9)]  # all are beyond the ridge
    assert decision.compute_s == pytest.approx(0.5 + sum(rows) * 1e-3)
    assert decision.step_s == pytest.approx(3e-3)
    assert (decision.branch, decision.is_pressed) == ("cheaper", True)
    assert "a preemption" in str(decision)
    partly = rule.instead(3, num_scheduled=4, num_steps=6, spent_s=0.0, restore_s=1.0)
    assert partly.compute_s == pytest.approx(1e-3 + 2e-3)  # 10 rows are free: 7 and 8 pending
    assert partly.branch == "free"


def test_one_budget_for_the_whole_batch():
    """Granting each sequence what the ones before it left never exceeds the ridge."""
    rule = CommitRule(100, 1e-7, 1e-5, max_per_sequence=30)
    scheduled, granted = 40, []
    for _ in range(10):
        decision = rule.always(25, num_scheduled=scheduled, num_cached=0)
        granted.append(decision.stays)
        scheduled += 25 * decision.stays
    assert granted == [True, True] + [False] * 8
    assert rule.always(31, num_scheduled=0, num_cached=0).branch == "limit"


def test_newer_costs():
    rule = CommitRule(8, 1e-6, 1e-3)
    assert rule.with_costs(2e-6, 3e-3) == CommitRule(8, 2e-6, 3e-3)
    assert rule.with_costs(-1.0, 0.0) == rule, "a fit without data changes nothing"


def test_bad_rules():
    with pytest.raises(ConfigError, match="ridge_tokens must be at least 1"):
        CommitRule(0, 1, 1)
    with pytest.raises(ConfigError, match="compute_s_per_token must be positive"):
        CommitRule(10, 1, 0)
