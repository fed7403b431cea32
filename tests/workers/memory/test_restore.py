"""The restore rule against brute force over a simulation of a link and a processor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError
from penstock.workers.memory.restore import MODES, RestoreRule
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import SHAPES

rules = st.builds(
    RestoreRule,
    link_bytes_per_s=st.floats(1e2, 1e7),
    compute_tokens_per_s=st.floats(1.0, 1e4),
    block_bytes=st.sampled_from([512, 1024, 12288]),
    block_size=st.sampled_from([1, 4, 16]),
    mode=st.sampled_from(MODES),
    min_tokens=st.none() | st.integers(0, 60),
    load_start_s=st.just(0.0) | st.floats(0, 0.5),
    min_split_gain=st.sampled_from([0.0, 0.1, 0.5]),
)


def simulate(rule, num_tokens, num_computed):
    """When both are done: the processor takes tokens from the front one by one, the link blocks
    from the back one by one."""
    processor_s = link_s = 0.0
    for _ in range(num_computed):
        processor_s += 1 / rule.compute_tokens_per_s
    end = num_tokens
    while end > num_computed:
        if end == num_tokens:
            link_s += rule.load_start_s
        link_s += rule.block_bytes / rule.link_bytes_per_s
        end = (end - 1) // rule.block_size * rule.block_size
    return max(processor_s, link_s)


@settings(max_examples=400, deadline=None)
@given(rule=rules, num_tokens=st.integers(0, 200))
def test_against_brute_force(rule, num_tokens):
    plan = rule.choose(num_tokens)
    assert plan.num_computed + plan.num_loaded == num_tokens
    assert plan.num_computed % rule.block_size == 0 or plan.num_loaded == 0
    assert plan.seconds == pytest.approx(simulate(rule, num_tokens, plan.num_computed))
    cuts = {*range(0, num_tokens, rule.block_size), num_tokens}
    times = {cut: simulate(rule, num_tokens, cut) for cut in cuts}
    best_s, load_s, compute_s = min(times.values()), times[0], times[num_tokens]
    assert (plan.load_s, plan.recompute_s) == pytest.approx((load_s, compute_s))
    near = 1 + 1e-9
    if rule.min_tokens is not None and num_tokens < rule.min_tokens:
        assert plan.branch == "recompute"
    elif rule.mode in ("load", "recompute"):
        assert plan.branch == rule.mode
    elif rule.mode == "split" or rule.min_split_gain == 0:
        assert plan.seconds <= best_s * near
    else:
        assert plan.seconds <= min(load_s, compute_s) * near
        if plan.branch == "split":
            assert plan.seconds <= best_s * near
            assert plan.seconds <= (1 - rule.min_split_gain) * min(load_s, compute_s) * near
        else:  # no split would have gained enough
            assert best_s >= (1 - rule.min_split_gain) * plan.seconds / near
    if plan.branch == "split":
        assert plan.num_computed > 0 and plan.num_loaded > 0
    assert plan.branch in str(plan)


@settings(max_examples=200, deadline=None)
@given(rule=rules, num_blocks=st.integers(1, 100))
def test_break_even(rule, num_blocks):
    """Whole blocks are loaded faster than computed just above the break-even number of tokens."""
    num_tokens = num_blocks * rule.block_size
    loads_s, computes_s = simulate(rule, num_tokens, 0), simulate(rule, num_tokens, num_tokens)
    if loads_s < computes_s * (1 - 1e-9):
        assert num_tokens > rule.break_even_tokens * (1 - 1e-6)
    elif loads_s > computes_s * (1 + 1e-9):
        assert num_tokens < rule.break_even_tokens * (1 + 1e-6)


def test_published_links():
    """PCIe 4 and NVMe at 5 GB/s on an H200, 50 % of peak: as the research's list has it."""

    def branch(model, link, device="H200"):
        bound = Roofline(SHAPES[model], DEVICES[device])
        rule = RestoreRule(
            link_bytes_per_s=link,
            compute_tokens_per_s=0.5 / bound.compute_s_per_token,
            block_bytes=bound.block_bytes,
            block_size=16,
            min_split_gain=0.99,  # only what is faster alone
        )
        return rule.choose(4096).branch

    models = ("Llama-2-7B", "Llama-3-8B", "Qwen2.5-7B", "Qwen2.5-0.5B")
    assert [branch(m, 5e9) for m in models] == ["recompute", "load", "load", "recompute"]
    assert [branch(m, 1.25e9) for m in models] == ["recompute"] * 4
    assert [branch(m, 1.25e9, "L4") for m in models] == ["recompute", "load", "load", "load"]
    assert [branch(m, 25e9) for m in models] == ["load"] * 4


def test_equal_rates_halve_the_time():
    plan = RestoreRule(1600.0, 100.0, 256, 16).choose(320)
    assert (plan.branch, plan.num_computed, plan.num_loaded) == ("split", 160, 160)
    assert plan.seconds == pytest.approx(plan.load_s / 2)
    assert "saves 50% of the time" in str(plan)


def test_a_dear_start_makes_few_tokens_computed():
    rule = RestoreRule(1e6, 100.0, 1600, 16, load_start_s=1.0)
    assert rule.break_even_tokens == pytest.approx(101.01, abs=0.01)
    assert rule.choose(96).branch == "recompute"
    assert rule.choose(10**4).branch == "load"
    assert RestoreRule(1e3, 100.0, 1600, 16).break_even_tokens == math.inf
    assert rule.choose(0).num_loaded == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "lod"}, "kv_restore must be one of auto, load"),
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s must be positive"),
        ({"compute_tokens_per_s": math.inf}, "compute_tokens_per_s must be positive and finite"),
        ({"min_tokens": -1}, "min_tokens must not be negative"),
        ({"min_split_gain": 1.0}, "min_split_gain must be in"),
    ],
)
def test_bad_settings(change, message):
    good = {
        "link_bytes_per_s": 1e9,
        "compute_tokens_per_s": 1e3,
        "block_bytes": 512,
        "block_size": 16,
    }
    with pytest.raises(ConfigError, match=message):
        RestoreRule(**(good | change))
