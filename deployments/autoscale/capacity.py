"""How many workers a load needs: virtual queues over past work, and the future backlog.

Work is in worker-seconds, capacity in workers, times in seconds. A virtual queue replays the work
of the last minutes against n workers: how much of it would have waited longer than the target? It
needs no model of arrivals, and no backlog that too few workers caused at the time is in it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Bucket = tuple[float, float]  # seconds, worker-seconds of work that arrived in them
Arrival = tuple[float, float]  # seconds from now, workers that become ready then


def late_share(buckets: Sequence[Bucket], capacity: float, wait_s: float) -> float:
    """The share of the work that would have waited longer than `wait_s` with that capacity."""
    backlog = late = total = 0.0
    bound = wait_s * capacity
    for seconds, work in buckets:
        total += work
        backlog += work - capacity * seconds
        if backlog <= 0.0:
            backlog = 0.0
        elif backlog > bound:
            late += work
    return late / total if total > 0.0 else 0.0


def needed_workers(
    buckets: Sequence[Bucket], wait_s: float, late: float, usable: float, most: int, guess: int = 1
) -> int:
    """The fewest workers with which at most the share `late` of past work would have waited longer
    than `wait_s`; `most` if there is no such number up to it.

    usable: share of a worker's capacity that is planned with.
    guess: where the search begins, as the last result; it saves time and changes no result.
    """

    def suffices(number: int) -> bool:
        return late_share(buckets, number * usable, wait_s) <= late

    if not any(work > 0.0 for _, work in buckets):
        return 0
    low, high, step = 1, max(most, 1), 1
    at = min(max(guess, low), high)
    if suffices(at):
        high = at
        while high > low and suffices(max(low, high - step)):
            high = max(low, high - step)
            step *= 2
        low = max(low, high - step + 1)
    else:
        low = min(at + 1, high)
        while low < high and not suffices(low):
            low = min(low + step, high)
            step *= 2
        low, high = max(at + 1, low - step // 2), low
    while low < high:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle + 1
    return min(low, max(most, 1))


def backlog_after(
    backlog: float,
    rate: float,
    growth: float,
    ahead_s: float,
    ready: float,
    arrivals: Sequence[Arrival],
) -> tuple[float, float]:
    """The backlog `ahead_s` seconds from now, and the seconds until it is first 0.

    The rate goes linearly from `rate` to `rate + growth`, in workers. The second is infinite where
    the backlog outlasts `ahead_s`.
    """
    times = sorted({0.0, ahead_s, *(at for at, _ in arrivals if 0.0 < at < ahead_s)})
    times = sorted({*times, *(ahead_s * k / 8 for k in range(1, 8))})
    gone_after = 0.0 if backlog <= 0.0 else float("inf")
    for start, end in pairwise(times):
        capacity = ready + sum(count for at, count in arrivals if at <= start)
        offered = rate + growth * (start + end) / (2.0 * ahead_s)
        after = backlog + (offered - capacity) * (end - start)
        if after <= 0.0 and backlog > 0.0 and gone_after == float("inf"):
            gone_after = start + backlog / (capacity - offered)
        backlog = max(0.0, after)
    return backlog, gone_after
