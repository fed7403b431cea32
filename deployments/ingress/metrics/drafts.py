"""The metrics of speculation: draft tokens in all, under vLLM's names, and by their source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from penstock.deployments.ingress.metrics.families import LABELS
from penstock.workers.stats import EngineStats

_FAMILIES: tuple[tuple[str, str, str, Callable[[EngineStats], dict[str, int]]], ...] = (
    (
        "vllm:spec_decode_num_draft_tokens",
        "penstock_draft_tokens",
        "Draft tokens that were verified",
        lambda stats: stats.num_draft_tokens,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "penstock_draft_tokens_accepted",
        "Draft tokens that were right, and so part of an answer",
        lambda stats: stats.num_accepted_tokens,
    ),
)


def of_drafts(workers: Sequence[tuple[Sequence[str], EngineStats]]) -> Iterator[Metric]:
    """What was accepted, divided by what was verified, falls with longer drafts, even where these
    pay."""
    for name, name_by_source, text, counts_of in _FAMILIES:
        total = CounterMetricFamily(name, f"{text}.", labels=LABELS)
        by_source = CounterMetricFamily(
            name_by_source, f"{text}, by where they came from.", labels=(*LABELS, "source")
        )
        for labels, stats in workers:
            counts = counts_of(stats)
            total.add_metric(labels, sum(counts.values()))
            for source, num in counts.items():
                by_source.add_metric((*labels, source), num)
        yield total
        yield by_source
