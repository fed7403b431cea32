"""The metrics of commit or recompute, of the workers with kv_commit deferred or auto."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.deployments.ingress.metrics.families import LABELS, of_table
from penstock.workers.stats import DeferralStats, EngineStats

_GAUGES: tuple[tuple[str, str, Callable[[DeferralStats], float]], ...] = (
    (
        "penstock_ridge_tokens",
        "Rows that a step computes in the time of one.",
        lambda d: d.ridge_tokens,
    ),
    (
        "penstock_read_seconds_per_token",
        "Time by which a cached token makes a step longer.",
        lambda d: d.read_s_per_token,
    ),
    (
        "penstock_compute_seconds_per_token",
        "Time by which a token beyond the ridge makes a step longer.",
        lambda d: d.compute_s_per_token,
    ),
)


def of_deferral(workers: Sequence[tuple[Sequence[str], EngineStats]]) -> Iterator[Metric]:
    """Those that decide report nt, the costs, and their decisions."""
    named = [(labels, stats.deferral) for labels, stats in workers if stats.deferral is not None]
    yield from of_table(GaugeMetricFamily, _GAUGES, LABELS, named)
    decisions = CounterMetricFamily(
        "penstock_commit_decisions",
        "Decisions to store new tokens or to compute them again; free and cheaper: not stored.",
        labels=(*LABELS, "branch"),
    )
    compared = CounterMetricFamily(
        "penstock_commit_compared_seconds",
        "What these decisions compared: computing again (td), and loading instead (tl).",
        labels=(*LABELS, "side"),
    )
    for labels, each in named:
        for branch, num in each.num_decisions.items():
            decisions.add_metric((*labels, branch), num)
        compared.add_metric((*labels, "td"), each.compute_s)
        compared.add_metric((*labels, "tl"), each.load_s)
    yield decisions
    yield compared
