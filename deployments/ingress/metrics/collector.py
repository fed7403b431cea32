"""Metrics for Prometheus: vLLM's names where they fit, penstock_* for the rest.

Reads what core/request_metrics.py has counted and what workers report; counts nothing itself.
docs/reference/metrics.md says what each means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.core.bounds.loop_watch import LoopWatch
from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.core.request_metrics import RequestMetrics
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.lost_requests import LostRequests
from penstock.deployments.ingress.journal.journals import JournalCounts
from penstock.deployments.ingress.metrics.deferral import of_deferral
from penstock.deployments.ingress.metrics.drafts import of_drafts
from penstock.deployments.ingress.metrics.families import (
    LABELS,
    add,
    of_certificates,
    of_connections,
    of_journals,
    of_keys,
    of_loop,
    of_lost,
    of_store,
    of_table,
)
from penstock.deployments.ingress.metrics.gates import of_gates
from penstock.deployments.ingress.metrics.ranks import of_ranks
from penstock.deployments.ingress.metrics.tables import (
    EXPERT_COUNTERS,
    EXPERT_GAUGES,
    REQUEST_COUNTERS,
    REQUEST_HISTOGRAMS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
)
from penstock.deployments.security.certificates import Certificates
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.store import StoreStatus
from penstock.workers.stats import EngineStats, WorkerInfo

Workers = Iterable[tuple[WorkerInfo, EngineStats]]

NO_ENGINE = "none"  # of requests that ended before a worker had answered


@dataclass(frozen=True, slots=True)
class ModelSources:
    """What one model's metrics are read from. `gate` None: it has none."""

    requests: RequestMetrics
    gate: GateClient | None = None
    lost: LostRequests | None = None


class PenstockCollector(Collector):
    """All metrics of one ingress, and those of all workers as the registry last returned it.

    Of several models, each series has the label `model_name`; of one, only those that always had.
    """

    def __init__(
        self,
        requests: RequestMetrics,
        workers: Callable[[], Workers],
        gate: GateClient | None = None,
        lost: LostRequests | None = None,
        journals: JournalCounts | None = None,
        connections: Connections | None = None,
        watch: LoopWatch | None = None,
        certificates: Mapping[str, Certificates] | None = None,
        further: Sequence[ModelSources] = (),
        *,
        store: Callable[[], StoreStatus] | None = None,
        keys: KeyFileWatch | None = None,
    ):
        """`requests`, `gate` and `lost` are those of the first model, `further` of the others."""
        self._connections = connections
        self._watch = watch
        self._certificates = certificates
        self._models = (ModelSources(requests, gate, lost), *further)
        self._journals, self._store, self._keys = journals, store, keys
        self._requests = requests
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        yield from self._of_requests()
        yield from self._of_workers(tuple(self._workers()))
        yield from self._of_front_ends()
        gates = [(each, each.gate) for each in self._models if each.gate is not None]
        if gates:
            yield from of_gates({self._labels(each): gate for each, gate in gates})
        losts = [(each, each.lost) for each in self._models if each.lost is not None]
        if losts:
            yield from of_lost({self._labels(each): lost for each, lost in losts})
        if self._journals is not None:
            yield from of_journals(self._journals)
        if self._store is not None:
            yield from of_store(self._store())
        if self._keys is not None:
            yield from of_keys(self._keys)
        if self._connections is not None:
            yield from of_connections(self._connections)
        if self._watch is not None:
            yield from of_loop(self._watch)
        if self._certificates is not None:
            yield from of_certificates(self._certificates)

    def describe(self) -> list[Metric]:
        """Nothing in advance: registering must not collect."""
        return []

    def _labels(self, model: ModelSources) -> tuple[str, ...]:
        """Values of the labels of series that one model alone has without a label."""
        return (model.requests.model_name,) if len(self._models) > 1 else ()

    def _of_requests(self) -> Iterator[Metric]:
        engines = [
            ((each.requests.model_name, key or NO_ENGINE), counts)
            for each in self._models
            for key, counts in list(each.requests.engines.items())
        ]
        for attribute, name, text in REQUEST_HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            for labels, counts in engines:
                add(histogram, labels, getattr(counts, attribute).snapshot())
            yield histogram
        for attribute, name, text in REQUEST_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, counts in engines:
                counter.add_metric(labels, getattr(counts, attribute))
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason; a client that left counts as abort.",
            labels=(*LABELS, "finished_reason"),
        )
        for labels, counts in engines:
            for reason, num in counts.num_finished.items():
                finished.add_metric((*labels, reason), num)
        yield finished

    def _of_workers(self, workers: Sequence[tuple[WorkerInfo, EngineStats]]) -> Iterator[Metric]:
        named = [((info.model, info.address), stats) for info, stats in workers]
        yield from of_table(GaugeMetricFamily, WORKER_GAUGES, LABELS, named)
        yield from of_table(CounterMetricFamily, WORKER_COUNTERS, LABELS, named)
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", labels=LABELS
        )
        seconds = CounterMetricFamily(
            "penstock_step_seconds",
            "Host time in the engine's steps, by phase.",
            labels=(*LABELS, "phase"),
        )
        for labels, stats in named:
            if stats.step_tokens is not None:
                add(tokens, labels, stats.step_tokens)
            for phase, total in stats.step_seconds.items():
                seconds.add_metric((*labels, phase), total)
        weights = GaugeMetricFamily(
            "penstock_model_weight_bytes",
            "Memory of the model's weights, by their number format.",
            labels=(*LABELS, "weights"),
        )
        for info, _ in workers:
            if info.weights:
                weights.add_metric((info.model, info.address, info.weights), info.weight_bytes)
        yield tokens
        yield seconds
        yield from _of_experts(named)
        yield from of_deferral(named)
        yield from of_ranks(named)
        yield from of_drafts(named)
        yield weights
        model = GaugeMetricFamily(
            "penstock_step_model_seconds",
            "Fitted cost of a step, and of each row, cached token and prompt token in it.",
            labels=(*LABELS, "term"),
        )
        for labels, stats in named:
            for term, cost in stats.step_model.items():
                model.add_metric((*labels, term), cost)
        yield model
        yield GaugeMetricFamily(
            "penstock_workers_alive", "Workers with a recent heartbeat.", value=len(named)
        )

    def _of_front_ends(self) -> Iterator[Metric]:
        returned = CounterMetricFamily(
            "penstock_request_errors",
            "Errors returned to clients of this ingress, by code of the error catalogue.",
            labels=("code",),
        )
        for code in CATALOGUE:
            returned.add_metric((code,), self._requests.num_errors_returned[code])
        yield returned
        yield CounterMetricFamily(
            "penstock_ingress_disconnects",
            "Clients of this ingress that left before the end of their answer.",
            value=sum(each.requests.num_disconnects for each in self._models),
        )


def _of_experts(workers: Sequence[tuple[Sequence[str], EngineStats]]) -> Iterator[Metric]:
    """The metrics of the workers that have an expert cache."""
    named = [(labels, stats.experts) for labels, stats in workers if stats.experts is not None]
    yield from of_table(GaugeMetricFamily, EXPERT_GAUGES, LABELS, named)
    yield from of_table(CounterMetricFamily, EXPERT_COUNTERS, LABELS, named)
    lookups = CounterMetricFamily(
        "penstock_expert_lookups",
        "Experts that steps needed, by how much of them was on the device.",
        labels=(*LABELS, "found"),
    )
    moved = CounterMetricFamily(
        "penstock_expert_bytes",
        "Bytes of experts that were copied to the device, on demand or by prefetch.",
        labels=(*LABELS, "why"),
    )
    foreseen = CounterMetricFamily(
        "penstock_expert_predictions",
        "Experts of tokens that had a prediction, by layer and whether they were in it.",
        labels=(*LABELS, "layer", "right"),
    )
    for labels, experts in named:
        lookups.add_metric((*labels, "whole"), experts.num_hits)
        lookups.add_metric((*labels, "partial"), experts.num_partial)
        lookups.add_metric((*labels, "absent"), experts.num_misses)
        moved.add_metric((*labels, "demand"), experts.demand_bytes)
        moved.add_metric((*labels, "prefetch"), experts.prefetch_bytes)
        for each in experts.by_layer:
            layer, wrong = str(each.layer), each.num_routed - each.num_right
            foreseen.add_metric((*labels, layer, "true"), each.num_right)
            foreseen.add_metric((*labels, layer, "false"), wrong)
    yield from (lookups, moved, foreseen)
