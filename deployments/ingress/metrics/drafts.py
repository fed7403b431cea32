"""The metrics of speculation, of the workers that draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from penstock.deployments.ingress.metrics.families import LABELS
from penstock.workers.stats import EngineStats


def of_drafts(workers: Sequence[tuple[Sequence[str], EngineStats]]) -> Iterator[Metric]:
    """Draft tokens by source. Their quotient falls with longer drafts, whether or not they pay."""
    proposed = CounterMetricFamily(
        "penstock_draft_tokens",
        "Draft tokens that were verified, by where they came from (speculate).",
        labels=(*LABELS, "source"),
    )
    accepted = CounterMetricFamily(
        "penstock_draft_tokens_accepted",
        "Draft tokens that were right, and so part of an answer.",
        labels=(*LABELS, "source"),
    )
    for labels, stats in workers:
        for source, num in stats.num_draft_tokens.items():
            proposed.add_metric((*labels, source), num)
        for source, num in stats.num_accepted_tokens.items():
            accepted.add_metric((*labels, source), num)
    yield proposed
    yield accepted
