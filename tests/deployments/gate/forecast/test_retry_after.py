"""What Retry-After learns from: refused requests that are checked again."""

from __future__ import annotations

import math

from penstock.deployments.gate.forecast.retry_after import (
    LARGEST,
    MAX_WATCHED,
    SMALLEST,
    TARGET_SHARE,
    RetryAfterModel,
)


def life(frees_after, rounds=600):
    """Refused requests: Retry-After is 10 s; each would be admitted after `frees_after(n)` s."""
    frees: dict[int, float] = {}
    returns: RetryAfterModel[object] = RetryAfterModel(
        lambda entry, now: 0.0 if now >= frees[id(entry)] else 99.0
    )
    held = []
    for n in range(rounds):
        now = 1000.0 * n
        entry = object()
        frees[id(entry)] = now + frees_after(n)
        quoted_s = returns.factor * 10.0
        held.append(frees_after(n) <= quoted_s)
        returns.watch(entry, now, 10.0, 8.0, quoted_s)
        for half in range(200):
            returns.update(now + half / 2)
    return returns.factor, held[rounds // 2 :]


def test_retry_after_becomes_accurate():
    factor, _ = life(lambda n: 4.0)
    assert math.isclose(factor, 0.4, rel_tol=0.15)
    factor, held = life(lambda n: 1.0 + n % 20)  # 1 to 20 s, alike
    assert abs(sum(held) / len(held) - TARGET_SHARE) < 0.1 and 0.9 < factor < 1.6


def test_a_request_that_would_never_be_admitted_is_forgotten_in_the_end():
    factor, _ = life(lambda n: math.inf, rounds=200)
    assert factor == LARGEST
    assert life(lambda n: 0.0)[0] == SMALLEST


def test_few_are_remembered():
    checked: list[object] = []

    def never(entry, now):
        checked.append(entry)
        return 99.0

    returns: RetryAfterModel[object] = RetryAfterModel(never)
    for _ in range(50):
        returns.watch(object(), 0.0, 10.0, 8.0, 10.0)
    returns.update(1.0)
    returns.update(1.2)  # too soon
    assert len(checked) == MAX_WATCHED


def test_outcomes_are_counted_by_what_was_given():
    """Bounds and spread make that differ from what the factor calls for."""
    returns: RetryAfterModel[float] = RetryAfterModel(lambda frees, now: 0.0 if now >= frees else 9)
    for frees, given_s in [(3.0, 12.0), (12.0, 12.0), (13.0, 12.0), (math.inf, 50.0)]:
        returns.watch(frees, 0.0, 10.0, 8.0, given_s)
    for half in range(20):
        returns.update(half / 2)
    assert (returns.num_in_time, returns.num_late) == (1, 0)
    for half in range(20, 100):
        returns.update(half / 2)
    assert (returns.num_in_time, returns.num_late) == (2, 1)
    returns.update(50.0)  # its client has not returned yet
    assert (returns.num_in_time, returns.num_late) == (2, 1)
    returns.update(51.0)
    assert (returns.num_in_time, returns.num_late) == (2, 2)
