"""The metrics of workers that are groups of processes, by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.deployments.ingress.metrics.families import LABELS
from penstock.workers.stats import EngineStats


def of_ranks(workers: Sequence[tuple[Sequence[str], EngineStats]]) -> Iterator[Metric]:
    """What each rank holds, and how long it waited for the others: the slowest waits least. Ranks
    are numbered stage by stage."""
    labels = (*LABELS, "rank")
    memory = GaugeMetricFamily(
        "penstock_rank_memory_bytes",
        "Memory of one rank of a worker's group, for weights, K and V, states, adapters, and the "
        "activations and logits of a step (reserve).",
        labels=(*labels, "use"),
    )
    gathers = CounterMetricFamily(
        "penstock_rank_gathers",
        "Times that a rank put its rows together with others, or received them from a stage.",
        labels=labels,
    )
    waits = CounterMetricFamily(
        "penstock_rank_wait_seconds",
        "Time that a rank waited for rows of the others; of stages, the first rank alone.",
        labels=labels,
    )
    received = CounterMetricFamily(
        "penstock_rank_received_bytes",
        "Bytes of rows that a rank received from the others; of stages, the first rank alone.",
        labels=labels,
    )
    for names, stats in workers:
        for number, rank in enumerate(stats.ranks):
            each = (*names, str(number))
            memory.add_metric((*each, "weights"), rank.weight_bytes)
            memory.add_metric((*each, "kv"), rank.kv_bytes)
            memory.add_metric((*each, "reserve"), rank.reserve_bytes)
            if rank.state_bytes:
                memory.add_metric((*each, "states"), rank.state_bytes)
            if rank.adapter_bytes:
                memory.add_metric((*each, "adapters"), rank.adapter_bytes)
            gathers.add_metric(each, rank.num_gathers)
            waits.add_metric(each, rank.wait_s)
            received.add_metric(each, rank.received_bytes)
    yield from (memory, gathers, waits, received)
