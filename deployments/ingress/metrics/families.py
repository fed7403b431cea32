"""The metrics of an ingress itself: lost requests, journals, connections, loop, certificates, keys.

collector.py collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.core.bounds.loop_watch import LoopWatch
from penstock.deployments.ingress.dispatch.lost_requests import LostRequests
from penstock.deployments.ingress.journal.journals import JournalCounts
from penstock.deployments.security.certificates import Certificates
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.store import StoreStatus
from penstock.workers.stats import Distribution

LABELS = ("model_name", "engine")  # of series of a worker


Entry = TypeVar("Entry")


def of_table(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    table: Iterable[tuple[str, str, Callable[[Entry], float]]],
    names: Sequence[str],
    entries: Iterable[tuple[Sequence[str], Entry]],
) -> Iterator[Metric]:
    """A family for each row (name, help, value) of the table. `names`: of the labels; `entries`:
    with their values."""
    known = list(entries)
    for name, text, value in table:
        family = kind(name, text, labels=names)
        for labels, entry in known:
            family.add_metric(labels, value(entry))
        yield family


def model_labels(by_model: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
    """The names of the labels of such keys: of several models their name, of one model none."""
    return ("model_name",) if all(by_model) else ()


def of_lost(losts: Mapping[tuple[str, ...], LostRequests]) -> Iterator[Metric]:
    """`losts`: by the values of the labels that tell models apart, of which one model has none."""
    names = model_labels(losts)
    continued = CounterMetricFamily(
        "penstock_requests_continued",
        "Times that a request continued on another worker, after its own was lost.",
        labels=names,
    )
    fatal = CounterMetricFamily(
        "penstock_requests_fatal",
        "Requests that were refused because three workers ended while they computed them.",
        labels=names,
    )
    pause = HistogramMetricFamily(
        "penstock_continuation_pause_seconds",
        "From the loss of a request's worker to its next token.",
        labels=names,
    )
    for labels, lost in losts.items():
        continued.add_metric(labels, lost.num_continued)
        fatal.add_metric(labels, lost.num_refused)
        add(pause, labels, lost.pauses.snapshot())
    yield from (continued, fatal, pause)


def of_journals(counts: JournalCounts) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "penstock_journals_begun", "Streams that have a journal.", value=counts.begun
    )
    yield CounterMetricFamily(
        "penstock_journals_resumed",
        "Times that a call was continued here: a lost stream, a request that came again with its "
        "key, or a response in the background.",
        value=counts.resumed,
    )
    yield CounterMetricFamily(
        "penstock_journals_incomplete",
        "Journals that the state store could not take whole; what they lack is computed again.",
        value=counts.incomplete,
    )


def of_store(store: StoreStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "penstock_state_store_up",
        "1: the state store answers and can be written to; 0: the ingress works without it.",
        value=store.fault is None,
    )


def of_keys(keys: KeyFileWatch) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "penstock_key_file_refused",
        "1: the file of API keys cannot be used, and the keys before it stay in force.",
        value=bool(keys.complaint),
    )


def of_connections(connections: Connections) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "penstock_http_connections", "HTTP connections that are open.", value=connections.num
    )
    yield CounterMetricFamily(
        "penstock_http_connections_refused",
        "HTTP connections that were closed at once: there was no room, or too many of the address.",
        value=connections.num_refused,
    )
    yield CounterMetricFamily(
        "penstock_http_connections_evicted",
        "Idle HTTP connections that were closed for newer ones.",
        value=connections.num_evicted,
    )


def of_loop(watch: LoopWatch) -> Iterator[Metric]:
    lag = HistogramMetricFamily(
        "penstock_event_loop_lag_seconds",
        "By how much the ingress's event loop was late, each 0.1 s.",
        labels=(),
    )
    add(lag, (), watch.lags())
    yield lag
    yield GaugeMetricFamily(
        "penstock_event_loop_lag_now_seconds",
        "By how much the ingress's event loop is late now.",
        value=watch.lag_s(),
    )


def of_certificates(certificates: Mapping[str, Certificates]) -> Iterator[Metric]:
    """`certificates`: by what they are used for."""
    failed = GaugeMetricFamily(
        "penstock_cert_reload_failed",
        "1: new certificate files cannot be used, and the certificate before them stays.",
        labels=("use",),
    )
    expires = GaugeMetricFamily(
        "penstock_cert_expires_seconds",
        "Seconds until the certificate in use expires.",
        labels=("use",),
    )
    for use, each in certificates.items():
        failed.add_metric((use,), each.reload_failed)
        expires.add_metric((use,), each.expires_s)
    yield failed
    yield expires


def add(histogram: HistogramMetricFamily, labels: Sequence[str], observed: Distribution) -> None:
    """Add one series. Prometheus buckets are cumulative: each counts all values up to its bound."""
    buckets, num = [], 0
    for bound, count in zip((*observed.bounds, inf), observed.counts, strict=True):
        num += count
        buckets.append(("+Inf" if bound == inf else str(float(bound)), num))
    histogram.add_metric(labels, buckets=buckets, sum_value=observed.total)
