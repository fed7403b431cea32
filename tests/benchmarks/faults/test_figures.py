"""The arithmetic of fault runs, against series whose quantiles, pauses and slopes are known."""

from __future__ import annotations

import random

import pytest

from benchmarks.faults import figures
from benchmarks.faults.figures import NO_FAULT, Sample


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)]
)
def test_a_quantile_is_one_of_the_values(share: float, expected: float) -> None:
    values = [float(n) for n in range(1, 101)]
    random.Random(0).shuffle(values)
    assert figures.quantile(values, share) == expected


def test_nothing_has_no_quantile() -> None:
    assert figures.quantile([], 0.5) is None
    assert figures.summary([]) == {"n": 0, "p50": None, "p99": None, "max": None}


def test_a_pause_belongs_to_the_first_fault_within_it() -> None:
    calls = [[0.0, 0.1, 2.1, 2.2], [0.05, 5.0], [6.0, 6.1, 8.0]]
    faults = [(3.0, "gate"), (1.0, "worker"), (4.0, "ingress")]
    found = figures.pauses(calls, faults, 0.5)
    assert {role: [round(each, 3) for each in gaps] for role, gaps in found.items()} == {
        "worker": [2.0, 4.95],
        NO_FAULT: [1.9],
    }


def noisy(rate: float, level: float, seed: int, num: int = 200) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(10.0 * n, level + rate * 10.0 * n + rng.gauss(0.0, 1.0)) for n in range(num)]


def test_a_slope_is_found_with_its_interval() -> None:
    found = figures.slope([noisy(0.01, 100.0, 1)])
    assert found is not None
    assert found.low < 36.0 < found.high
    assert found.high - found.low < 2.0
    assert not found.is_flat


def test_levels_that_differ_are_no_growth() -> None:
    """Twenty processes, one after the other, each larger than the one before, none growing."""
    segments = [
        [(1000.0 * k + at_s, value) for at_s, value in noisy(0.0, 50.0 * k, k, 20)]
        for k in range(20)
    ]
    found = figures.slope(segments)
    assert found is not None
    assert found.is_flat
    assert abs(found.per_hour) < 10.0


def test_the_interval_holds_what_it_promises() -> None:
    """Of 200 flat series, those that are called not flat are about one in twenty."""
    called = 0
    for seed in range(200):
        found = figures.slope([noisy(0.0, 5.0, seed, 60)])
        assert found is not None
        called += not found.is_flat
    assert 1 <= called <= 22


def test_samples_that_repeat_their_neighbours_count_for_less() -> None:
    repeated = [each for each in noisy(0.0, 5.0, 3) for _ in range(8)]
    times = [(float(n), value) for n, (_, value) in enumerate(repeated)]
    found = figures.slope([times])
    assert found is not None
    assert found.num_effective < 300  # of 1600


@pytest.mark.parametrize("segments", [[], [[(0.0, 1.0)]], [[(0.0, 1.0), (0.0, 2.0), (0.0, 3.0)]]])
def test_no_slope_of_too_little(segments: list[list[tuple[float, float]]]) -> None:
    assert figures.slope(segments) is None


def test_what_never_changes_is_flat() -> None:
    found = figures.slope([[(float(n), 7.0) for n in range(30)]])
    assert found is not None
    assert (found.per_hour, found.low, found.high) == (0.0, 0.0, 0.0)
    assert found.is_flat


def lives(start_mib: float, leak_mib: float) -> list[Sample]:
    """Ten processes of 300 s; each warms up for 60 s, and begins `leak_mib` above the last."""
    rng = random.Random(4)
    samples = []
    for number in range(10):
        for age in range(0, 300, 10):
            warm = start_mib * min(age / 60.0, 1.0) + number * leak_mib + rng.gauss(0, 0.1)
            at_s = 300.0 * number + age
            samples.append(Sample(at_s, float(age), "worker", number, {"rss_mib": warm}))
    return samples


def test_warming_up_is_no_growth_and_a_leak_outside_is_seen_from_process_to_process() -> None:
    alive, renewed = figures.growth(lives(100.0, 0.0), "worker", "rss_mib", warm_up_s=60.0)
    assert alive is not None and renewed is not None
    assert alive.is_flat and renewed.is_flat
    alive, renewed = figures.growth(lives(100.0, 5.0), "worker", "rss_mib", warm_up_s=60.0)
    assert alive is not None and renewed is not None
    assert alive.is_flat
    assert renewed.low < 60.0 < renewed.high  # 5 MiB in each 300 s
    assert not renewed.is_flat
    unwarmed, _ = figures.growth(lives(100.0, 0.0), "worker", "rss_mib", warm_up_s=0.0)
    assert unwarmed is not None and not unwarmed.is_flat


def test_a_process_that_was_there_before_has_no_value_at_the_age_of_the_others() -> None:
    """It has grown for longer: beside it every replacement would seem to shrink."""
    old = [Sample(float(t), 900.0 + t, "worker", 99, {"rss_mib": 500.0}) for t in range(0, 300, 10)]
    _, renewed = figures.growth([*old, *lives(100.0, 5.0)], "worker", "rss_mib", warm_up_s=60.0)
    assert renewed is not None
    assert renewed.low < 60.0 < renewed.high
