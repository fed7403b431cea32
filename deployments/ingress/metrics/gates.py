"""The metrics of gates, and of this ingress's connections with them; collector.py collects them.

gate_tables.py has their names. One model's gate has no label, those of several have their model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.deployments.gate.types import REASONS
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.metrics.families import add, model_labels, of_table
from penstock.deployments.ingress.metrics.gate_tables import (
    ADMISSIONS,
    GATE_COUNTERS,
    GATE_GAUGES,
    RETRY_AFTER,
    WAIT_HISTOGRAM,
)

Gates = Mapping[tuple[str, ...], GateClient]


def of_gates(gates: Gates) -> Iterator[Metric]:
    """`gates`: by the values of the labels that tell models apart, of which one model has none."""
    names = model_labels(gates)
    yield from of_table(GaugeMetricFamily, GATE_GAUGES, names, gates.items())
    yield from of_table(CounterMetricFamily, GATE_COUNTERS, names, gates.items())
    admitted = CounterMetricFamily(
        "penstock_admissions",
        "Requests of this ingress that were admitted: on credit, by ticket or as fallback.",
        labels=(*names, "by"),
    )
    for labels, gate in gates.items():
        for by, value in ADMISSIONS:
            admitted.add_metric((*labels, by), value(gate))
    yield admitted
    yield from _of_figures(gates, names)
    waits = HistogramMetricFamily(
        WAIT_HISTOGRAM, "From the question to the gate to its ticket.", labels=names
    )
    for labels, gate in gates.items():
        add(waits, labels, gate.waits.snapshot())
    yield waits


def _of_figures(gates: Gates, names: tuple[str, ...]) -> Iterator[Metric]:
    """What the gates report of themselves."""
    refused = CounterMetricFamily(
        "penstock_gate_refusals",
        "Requests that were not admitted, by reason.",
        labels=(*names, "reason"),
    )
    held = GaugeMetricFamily(
        "penstock_predictor_coverage",
        "Share of recent answers that stayed within the quantile of that level.",
        labels=(*names, "level"),
    )
    judged = CounterMetricFamily(
        "penstock_gate_retry_after_judged",
        "Refused requests judged again: admissible by the Retry-After given, or only later.",
        labels=(*names, "outcome"),
    )
    for labels, gate in gates.items():
        figures = gate.figures
        for outcome, value in RETRY_AFTER:
            judged.add_metric((*labels, outcome), value(gate))
        for reason in REASONS:
            refused.add_metric((*labels, reason), figures.num_refused.get(reason, 0))
        refused.add_metric((*labels, "expired"), figures.num_expired)
        for level, share in zip(figures.levels, figures.coverage, strict=True):
            held.add_metric((*labels, f"{level:g}"), share)
    yield refused
    yield judged
    yield held
